"""Score the normalizer against the test suites of others: how many of their cases it reads as they do.

    python packages/spoken-text/tools/score_suites.py FOLDER [--language de] [--show wrong]

It fetches nothing. FOLDER holds suites that you have fetched, each file below a folder named by its language, such as
`nemo/de/date.txt`. The name of the file is the kind. A file has one case a line, a written and a spoken text with one
of `=>`, `~`, a tab or `|` between. The side with digits or signs is the written one. Lines of JSON hold the two texts
as their first strings. In a Python file every call that is compared with a string is a case: `f("5") == "five"`.

A case is *equal* if it is the same but for case, blanks and marks. It is *other* if it differs only in what speakers
do differently, such as an "and" in a number. It is *left* if figures or signs stay in our text. Anything else is
*wrong*, though often both readings are right: read them with `--show wrong`."""

import argparse
import ast
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from spoken_text import TextFrontEnd
from spoken_text.languages import NAMES
from spoken_text.spoken import LANGUAGES

VERDICTS = ("equal", "other", "left", "wrong")
_BETWEEN = re.compile(r" *=> *| *~ *|\t+| *\| *")
_WRITTEN = re.compile(r"[\d$€£¥%°&@#/]")
_SAME = {  # regular expressions for what speakers say in two ways -> one of them; texts have no marks and no capitals
    "english": {
        r"\band\b|\bthe\b|\bof\b": "",
        r"\b(?:o|oh|zero)\b": "zero",
        r"etre(s?)\b": r"eter\1",
        r"itre(s?)\b": r"iter\1",
        r"\ba (?=hundred|thousand|million|half)": "one ",
        r"\bhundredth\b": "one hundredth",
        r"\bper cent\b": "percent",
        r"\b([ap]) m\b": r"\1m",
        r"\beuro\b": "euros",
        r"\bo clock\b|\bhundred hours\b": "",
        r"\bone (?=thousandth|one hundredth)": "",
    },
    "german": {r"\beine?\b|\beins\b|ein(?=hundert|tausend)": "ein", r"\bund\b": "", r"ß": "ss", r"zwo": "zwei"},
    "french": {r"\bet\b": "", r"\bseptante\b": "soixante dix", r"\bzéro\b": ""},
    "spanish": {r"\by\b|\bcon\b|\bde\b|\bdel\b|\bhoras?\b": "", r"\bpunto\b|\bcoma\b": "coma", r"\bun[ao]?\b": "un"},
    "italian": {r"\be\b": "", r"\bun[oa]?\b": "un", r"\btré\b": "tre"},
    "portuguese": {r"\be\b|\bhoras?\b": "", r"\bquatorze\b": "catorze", r"\bum\b|\buma\b": "um"},
    "russian": {r"ё": "е", r"\bодн[аи] (?=тысяча)": "", r"\bодной (?=тысячи)": ""},
    "chinese": {r"〇": "零", r"两": "二", r"幺": "一", r"千米": "公里", r"千克": "公斤"},
    "japanese": {r"〇|ゼロ": "零", r"れい": "零", r"テン|てん": "点"},
    "korean": {r"공": "영", r"육": "륙"},
    "dutch": {r"é": "e", r"ë": "e", r"\ben\b": "", r"een(?=duizend|honderd)": "", r"\bvierde\b": "kwart"},
}


def language_of(path: Path) -> str | None:
    """The language that one of the path's folders is named by."""
    for part in reversed(path.parts[:-1]):
        name = NAMES.get(part.lower(), part.lower())
        if name in LANGUAGES:
            return name
    return None


def cases(path: Path) -> Iterator[tuple[str, str]]:
    """The written and the spoken texts of a file."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py":
        yield from _compared(text)
        return
    for line in text.splitlines():
        sides = _in_json(line) if line.lstrip()[:1] in ("{", "[") else _BETWEEN.split(line.strip())[:2]
        if len(sides) < 2 or not all(sides) or line.startswith("#"):
            continue
        backwards = _WRITTEN.search(sides[1]) and not _WRITTEN.search(sides[0])
        yield (sides[1], sides[0]) if backwards else (sides[0], sides[1])


def _in_json(line: str) -> list[str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return []
    values = row.values() if isinstance(row, dict) else row
    return [value for value in values if isinstance(value, str)][:2]


def _compared(text: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Compare) and isinstance(node.left, ast.Call) and node.left.args):
            continue
        sides = (node.left.args[0], node.comparators[0])
        texts = [side.value for side in sides if isinstance(side, ast.Constant) and isinstance(side.value, str)]
        if len(texts) == 2:
            yield texts[0], texts[1]


def folded(text: str, language: str) -> str:
    """Without what only the page shows: case, marks and blanks beside letters that are read alone."""
    text = unicodedata.normalize("NFKC", text).lower().replace("’", "'")
    text = re.sub(r"[^\w\s$€£%°&@#/+=<>]|_", " ", text)
    if language in ("chinese", "japanese", "korean"):
        return re.sub(r"\s+", "", text)
    return " ".join(text.split())


def alike(text: str, language: str) -> str:
    """The folded text without what speakers say in several ways."""
    for pattern, instead in _SAME[language].items():
        text = re.sub(pattern, instead, text)
    return "".join(text.split())


def verdict(said: str, spoken: str, language: str) -> str:
    """`said`: our reading. `spoken`: the suite's."""
    ours, theirs = folded(said, language), folded(spoken, language)
    if ours.replace(" ", "") == theirs.replace(" ", ""):
        return "equal"
    if alike(ours, language) == alike(theirs, language):
        return "other"
    return "left" if _WRITTEN.search(said) else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="suites: FOLDER/.../LANGUAGE/KIND.txt")
    parser.add_argument("--language", help="only this one")
    parser.add_argument("--show", choices=VERDICTS, action="append", default=[], help="print these cases")
    options = parser.parse_args()
    wanted = NAMES.get(options.language, options.language)
    counts: dict[tuple[str, str], Counter[str]] = {}
    for path in sorted(
        file for file in options.folder.rglob("*.*") if file.suffix in (".txt", ".tsv", ".jsonl", ".py")
    ):
        language = language_of(path.relative_to(options.folder))
        if language is None or wanted not in (None, language):
            continue
        reader = TextFrontEnd(language, "auto", lenient=True)
        for written, spoken in cases(path):
            said = "".join(part for part in reader.whole(written) if isinstance(part, str))
            found = verdict(said, spoken, language)
            for row in ((language, path.stem), (language, "all"), ("all", "all")):
                counts.setdefault(row, Counter())[found] += 1
            if found in options.show:
                print(f"{found} {language} {path.stem}: {written!r} -> {said!r}, theirs {spoken!r}")
    print(f"{'language':12}{'kind':28}{'cases':>7}" + "".join(f"{name:>8}" for name in VERDICTS))
    for (language, kind), count in sorted(counts.items()):
        shares = "".join(f"{count[name] / count.total():8.1%}" for name in VERDICTS)
        print(f"{language:12}{kind:28}{count.total():7}{shares}")


if __name__ == "__main__":
    main()
