#!/usr/bin/env python3
"""Make the training text: sentences from Debian documentation and fortunes packages
(unpacked under ROOT), word salads over Debian's wamerican list, and templates written here.

    make_text.py ROOT OUT.txt [N]
"""

import collections
import glob
import gzip
import html
import random
import re
import string
import sys
from pathlib import Path

ROOT, OUT = sys.argv[1], sys.argv[2]
N = int(sys.argv[3]) if len(sys.argv) > 3 else 150000
R = random.Random(7)

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def num(n):
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + ("" if n % 10 == 0 else "-" + ONES[n % 10])
    if n < 1000:
        return ONES[n // 100] + " hundred" + ("" if n % 100 == 0 else " " + num(n % 100))
    if n < 10**6:
        return num(n // 1000) + " thousand" + ("" if n % 1000 == 0 else " " + num(n % 1000))
    return num(n // 10**6) + " million" + ("" if n % 10**6 == 0 else " " + num(n % 10**6))


# ------------------------------------------------------------------ sentences out of documents
def plain(h):
    h = re.sub(r"(?is)<(script|style|pre|code|tt|table)\b.*?</\1>", " ", h)
    h = re.sub(r"(?i)</(p|li|dd|dt|h\d|div)>", "\n\n", h)
    return html.unescape(re.sub(r"<[^>]+>", "", h))


def sentences(text):
    for para in re.split(r"\n\s*\n|\n\s*[%*-]+\s*\n", text):
        para = re.sub(r"\s+", " ", para).strip()
        para = para.translate(
            str.maketrans(
                {
                    "\u2019": "'",
                    "\u2018": "'",
                    "\u201c": "",
                    "\u201d": "",
                    "\u2014": ", ",
                    "\u2013": "-",
                    "\u00a0": " ",
                    '"': "",
                    "`": "'",
                }
            )
        )
        for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", para):
            s = re.sub(r"\s*\([^)]*\)", "", s).strip(" -*#,;:")
            if 12 <= len(s) <= 190 and re.fullmatch(r"[A-Za-z0-9 ,.!?;:'\-]+", s) and s[0].isupper():
                if sum(c.isdigit() for c in s) > 4 or re.search(
                    r"\S{17,}|[a-z][A-Z]|\.\w|--|\w:\w|''| [,.!?;:]|\d[A-Za-z]|[A-Za-z]\d", s
                ):
                    continue
                if s[-1] not in ".!?":
                    s += "."
                yield s


OTHER = "ar|cs|da|de|el|es|fa|fr|hr|hu|id|it|ja|ko|nb|nl|pl|pt|ro|ru|sv|tr|vi|zh|uk|ca"


def documents():
    pats = [
        ("usr/share/doc/debian-handbook/html/en-US/**/*.html", 1),
        ("usr/share/doc/**/*.html", 1),
        ("usr/share/gimp/**/en/**/*.html", 1),
        ("usr/share/**/*.html", 1),
    ]
    seen = set()
    for pat, _ in pats:
        for f in sorted(glob.glob(f"{ROOT}/{pat}", recursive=True)):
            if f in seen:
                continue
            seen.add(f)
            if re.search(
                rf"/({OTHER}|bg|fi)([-_][A-Za-z]+)?(/|\.html)",
                f,
            ):
                continue
            if re.search(
                rf"\.({OTHER})([-_][a-zA-Z]+)?\.html",
                f,
            ):
                continue
            try:
                yield plain(open(f, encoding="utf-8", errors="replace").read())
            except OSError:
                pass
    for f in sorted(glob.glob(f"{ROOT}/usr/share/games/fortunes/*")):
        if not re.search(r"\.(dat|u8)$|/off|zippy", f) and not f.endswith(("ascii-art",)):
            yield open(f, encoding="utf-8", errors="replace").read().replace("\n%\n", "\n\n")


docs = sorted({s for d in documents() for s in sentences(d)})
R.shuffle(docs)
freq = collections.Counter(w for s in docs for w in re.findall(r"[a-z']+", s.lower()))
wam = [w.strip() for w in open(f"{ROOT}/usr/share/dict/american-english", encoding="utf-8")]
wam = [w for w in wam if re.fullmatch(r"[A-Za-z][a-z]*('s)?", w)]
lower = [w for w in wam if w[0].islower() and not w.endswith("'s") and 2 <= len(w) <= 12]
names = [w for w in wam if w[0].isupper() and not w.endswith("'s") and 3 <= len(w) <= 10]
common = [w for w in lower if freq[w] >= 3]
print(f"{len(docs)} document sentences, {len(lower)} dictionary words, {len(common)} of them common in the documents")

# ------------------------------------------------------------------ templates
WORDS = Path(__file__).with_name("make_text_words.txt")
S = dict(line.split(": ", 1) for line in WORDS.read_text().splitlines())
S = {k: v.split("|") for k, v in S.items()}


def cap(s):
    return s[0].upper() + s[1:]


def p(k):
    return R.choice(S[k])


def np_():
    return (
        R.choice(["the", "a", "my", "your", "this", "that", "our", "their", "his", "her", "every", "one"])
        + " "
        + (p("adj") + " " if R.random() < 0.5 else "")
        + p("noun")
    )


def fix(s):
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", s)


def pl(n=None):
    n = (
        R.choice(
            [
                R.randrange(0, 21),
                R.randrange(0, 101),
                R.randrange(100, 1000),
                R.randrange(1000, 10000),
                R.randrange(1, 3000000),
            ]
        )
        if n is None
        else n
    )
    return str(n) if n < 3000 and R.random() < 0.3 else num(n)


def clock():
    return R.choice(
        [
            f"{num(R.randrange(1, 13))} o'clock",
            f"{num(R.randrange(1, 13))} {num(R.randrange(10, 60))}",
            f"half past {num(R.randrange(1, 13))}",
            f"{num(R.randrange(1, 13))} {p('day_part')}",
        ]
    )


T = [
    lambda: f"{p('greet')}{R.choice(['.', '!', ','])}".replace(",", "."),
    lambda: f"{p('greet')}, {R.choice(names)}{R.choice('.!')}",
    lambda: f"{p('greet')}{R.choice('.!,')} {p('say')}.",
    lambda: f"{p('greet')}{R.choice('.!,')} {p('ask')}?",
    lambda: f"{p('ask')}?",
    lambda: f"{p('say')}{R.choice('..!')}",
    lambda: f"{p('say')}. {p('say')}.",
    lambda: f"{p('say')}. {p('ask')}?",
    lambda: f"{p('subj')} {p('verb')} {np_()}.",
    lambda: f"{p('subj')} {p('verb')} {np_()} {p('prep')} {np_()}.",
    lambda: f"{p('time')}, {p('subj')} {p('verb')} {np_()}.",
    lambda: f"{p('subj')} {p('verb')} {np_()} {p('time')}.",
    lambda: f"{np_()} {p('be')} {p('very')}{p('adj')}.",
    lambda: f"{p('adv')}, {p('subj')} {p('verb')} {np_()}, {p('join')} {p('subj')} {p('verb')} {np_()}.",
    lambda: f"{p('q')} {p('aux')} {p('subj')} {p('do')} {np_()}?",
    lambda: f"{p('lead')} {np_()} {R.choice(['', p('prep') + ' ' + np_(), p('time')])}{R.choice('.?!')}",
    lambda: f"{p('noun')}.",
    lambda: f"{p('adj')} {p('noun')}.",
    lambda: f"{p('adv')}.",
    lambda: f"{R.choice(common)}.",
    lambda: f"{R.choice(common)} {R.choice(common)}.",
    lambda: f"{R.choice(names)} {p('between')} {R.choice(names)}.",
    lambda: f"My name is {R.choice(names)}" + R.choice([".", " and I come from " + R.choice(names) + "."]),
    lambda: f"It costs {pl()} {p('unit')}.",
    lambda: f"There are {pl()} {p('unit')} {p('count')}.",
    lambda: f"The time is {clock()}.",
    lambda: f"It is {clock()} {p('time')}.",
    lambda: ", ".join(pl(R.randrange(0, 100)) for _ in range(R.randrange(2, 8))) + ".",
    lambda: f"The number is {' '.join(ONES[R.randrange(10)] for _ in range(R.randrange(3, 9)))}.",
    lambda: f"{num(R.randrange(100))} {p('sum')} {num(R.randrange(1, 100))} {p('equals')} {num(R.randrange(2000))}.",
    lambda: f"It was {p('about')} {p('century')} {num(R.randrange(10, 100))}.",
    lambda: f"{p('tech')} {p('tverb')}.",
    lambda: f"{p('tech')} {p('tverb')}, and {p('tech')} {p('tverb')}.",
    lambda: f"{p('ask')}? {p('tech')} {p('tverb')}.",
    lambda: f"{p('subj')} {p('adv')} {p('verb')} {np_()}; {p('subj')} {p('verb')} {p('tech')}.",
    lambda: f"{', '.join(p('noun') for _ in range(R.randrange(2, 6)))}, and {p('noun')}.",
    lambda: ", ".join(R.choice(string.ascii_uppercase) for _ in range(3)) + ".",
]


def template():
    s = cap(fix(re.sub(r"\s+", " ", R.choice(T)()).replace(" .", ".").replace(" ?", "?").replace(" !", "!")))
    return re.sub(r"(?<=[.!?]) ([a-z])", lambda m: " " + m[1].upper(), s)


def salad():
    pool = R.choice([common, lower, lower])
    w = [R.choice(pool) for _ in range(R.randrange(1, 12))]
    if R.random() < 0.3:
        w[R.randrange(len(w))] = R.choice(names)
    glue = ["the", "a", "of", "and", "to", "in", "is", "with", "for", "on"]
    out = []
    for x in w:
        if R.random() < 0.3:
            out.append(R.choice(glue))
        out.append(x + ("," if R.random() < 0.07 else ""))
    return cap(" ".join(out).strip(",")) + R.choice("...?!")


texts, di = [], 0
while len(texts) < N:
    r = R.random()
    if r < 0.50:
        s = docs[di % len(docs)]
        di += 1
        if di <= 2 * len(docs) and len(s) < 100 and R.random() < 0.25:
            s += " " + docs[di % len(docs)]
            di += 1
    elif r < 0.80:
        s = template()
    else:
        s = salad()
    while len(s) < 90 and R.random() < 0.12:
        s += " " + (template() if R.random() < 0.7 else R.choice(docs))
    if 3 <= len(s) <= 205:
        texts.append(s)
(gzip.open if OUT.endswith("gz") else open)(OUT, "wt").write("\n".join(texts) + "\n")
seen = collections.Counter(w for s in texts for w in re.findall(r"[a-z']+", s.lower()))
print(
    f"{len(texts)} texts, {len(set(texts))} unique, mean {sum(map(len, texts)) / len(texts):.1f} "
    f"chars, {len(seen)} word forms, documents used {di / max(1, len(docs)):.2f} times"
)
for s in R.sample(texts, 25):
    print("  ", s)
