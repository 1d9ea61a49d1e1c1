#!/usr/bin/env python3
"""written_text.py SPOKEN.txt.gz OUT.jsonl.gz COUNT

Texts as people type them, each beside the plain text that a voice of plain text says in its place: quotes, apostrophes,
dashes, ellipses, brackets, `&`, `%`, line breaks, accents, titles. A line of OUT is {"plain", "written", "at"}: `at[k]`
is the place in `plain` of character k of `written`, and of its end.
"""

import gzip
import json
import random
import re
import sys
import unicodedata

from spoken_text.normalize import NormalizerStream

QUOTES = [("“", "”")] * 5 + [('"', '"')] * 5 + [("‘", "’"), ("'", "'"), ("«", "»"), ("„", "“")]
DASHES = [" — "] * 4 + ["—"] * 3 + [" – "] * 2 + [" -- ", " - ", "--"]
DOTS = ["…"] * 2 + ["..."]
TITLES = {"Mr.": "Mister", "Mrs.": "Missus", "Ms.": "Miss", "Dr.": "Doctor", "Prof.": "Professor", "St.": "Saint"}
SPECIAL = {
    "ß": "ss", "æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D",
    "ð": "d", "Ð": "D", "þ": "th", "Þ": "Th", "ı": "i",
}  # fmt: skip
LETTERS = "àáâãäåçèéêëìíîïñòóôõöùúûüýÿāăąćčďēėęěğģīįķļľńņňőřśşšťūůűųźżžțșÀÁÂÄÅÇÈÉÊËÍÎÑÓÔÖØÚÜČŠŽŚŻŁÞ" + "".join(SPECIAL)
WORDS = """café naïve résumé fiancé fiancée façade cliché déjà crème brûlée jalapeño señor señora piñata entrée soufflé
sauté purée décor rôle élite élan protégé touché voilà ménage crêpe pâté à über doppelgänger Führer smörgåsbord
Zürich München Köln Düsseldorf Nürnberg Würzburg Göttingen Tübingen Lübeck Münster Salzburg Graz Genève Bâle Neuchâtel
São João Paulo Brasília Goiânia Maceió Belém Córdoba Málaga Cádiz Ávila Léon León Mérida Logroño Coruña Bogotá Medellín
Cancún Mazatlán Querétaro México Perú Panamá Asunción Kraków Łódź Gdańsk Wrocław Poznań Toruń Białystok Plzeň Olomouc
Dvořák Janáček Čapek Škoda Košice Žilina Győr Pécs Szeged Győrgy Bartók Liszt Erdős Kodály Timișoara Iași Brașov
Constanța Brâncuși Šibenik Dubrovnik Čakovec Niš Malmö Göteborg Västerås Örebro Umeå Gävle Åbo Jyväskylä Hämeenlinna
Tromsø Bodø Ålesund Århus Aarhus Ærø Sørensen Kierkegaard Søren Bjørn Åse Øystein Reykjavík Höfn Björk Guðrún Þór
Šiauliai Klaipėda Rīga Jūrmala Tallinn Pärnu Võru İstanbul İzmir Çanakkale Muğla Beyoğlu Erdoğan Atatürk Brontë Zoë
Chloë Noël Renée Léa Zoé Hélène François Françoise Éric Étienne Rémi André José María Sofía Lucía Andrés Iñaki Begoña
Müller Schäfer Schröder Jürgen Günther Bärbel Löwe Weiß Groß Strauß Mañana Beyoncé Pokémon Citroën Nestlé Hermès
Gruyères Besançon Orléans Nîmes Béziers Périgueux Angoulême Saône Rhône Champs-Élysées Côte Montréal Québec""".split()
SAID = {
    "café": "kaffay", "cliché": "cleeshay", "crème": "krem", "brûlée": "broolay", "soufflé": "sooflay",
    "entrée": "ontray", "résumé": "rezzoomay", "fiancé": "fee on say", "fiancée": "fee on say", "Zoë": "Zoey",
    "Zoé": "Zoey",
}  # fmt: skip
"""Words that the voice misreads in ASCII, and spellings that whisper hears right. Both forms learn from these."""
LOANS = "café cliché fiancé fiancée soufflé résumé façade entrée jalapeño piñata señor señora purée décor".split()
LOANS.append("crème brûlée")
LOANED = [
    "The {} was closed.", "The naïve {} was here.", "The {} on the corner is new.", "It was a naïve idea.",
    "My {} is new.", "We talked about the {} and the {}.", "He is so naïve.", "Do you like the {}?",
    "A {} is not a {}.", "Is your {} here?", "Don't be naïve about the {}.", "The {} on the naïve street was closed.",
    "I sent my {} yesterday.", "Where is the {}?", "She was naïve, and he was late.", "They opened a {} near the {}.",
    "That is a {} of mine.", "This {}, please.",
]  # fmt: skip
PLACES = [
    "Visit {}, {} and {}.", "{} lives in {}.", "We flew from {} to {}.", "The train to {} leaves at noon.",
    "I met {} in {} last year.", "Have you ever been to {}?", "The {} on the {} street was closed.",
    "My friend {} called.", "{} and {} are coming tonight.", "She was born in {}.", "Do you know {}?",
    "It is called {}.", "{} is from {}.", "Please give the {} to {}.", "The road goes through {} and {}.",
    "{}, {} and {} said no.", "A letter from {}.",
]  # fmt: skip
TITLED = [
    "{} is here.", "I spoke to {} yesterday.", "{} and {} are old friends.", "That is {}'s dog.", "Please call {}.",
    "{} said that it was late.", "Good morning, {}.", "{}'s house is over there.", "Is {} in?", "Ask {} about it.",
]  # fmt: skip
NAMES = """O'Brien O'Neill O'Connor D'Angelo Smith Jones Brown Taylor Wilson Baker Miller Davis Clark Lewis Walker Hall
Young King Wright Green Adams Nelson Carter Mitchell Parker Collins Murphy Cook Rogers Morgan Cooper Reed Bell Ward
Watson Brooks Kelly Price Bennett Wood Barnes Ross Henderson Holmes Bennet Darcy Bingley McCarthy MacDonald""".split()
SAYS = "said|asked|answered|cried|whispered|replied|thought|shouted|called|added".split("|")
WHO = "he|she|I|they|Anna|Tom|John|Mary|Peter|the old man|his mother|her brother|the teacher|the captain|we".split("|")
COUNTED = [
    "She paid {}%.", "She paid {}% & left.", "He wants {}% (or more).", "About {}% of them left.",
    "It fell by {}% last year.", "I am {}% sure.", "He gave {}% back.", "It costs ${}.", "We paid ${} for it.",
    "There were {} people.", "He is {} years old.", "See page {}.", "It took {} minutes.", "Only {}% remained.",
    "They sold {} books & {} pens.", "Take {}% off.", "Room {}, please.",
]  # fmt: skip

SHORT = {
    "I'm": "am", "you're": "are", "we're": "are", "they're": "are", "I've": "have", "you've": "have",
    "we've": "have", "they've": "have", "I'll": "will", "you'll": "will", "we'll": "will", "they'll": "will",
    "he'll": "will", "she'll": "will", "it'll": "will", "I'd": "would", "you'd": "would", "we'd": "would",
    "they'd": "would", "he'd": "would", "she'd": "would", "that'd": "would", "he's": "is", "she's": "is", "it's": "is",
    "that's": "is", "there's": "is", "what's": "is", "who's": "is", "let's": "let", "don't": "not", "doesn't": "not",
    "didn't": "not", "won't": "not", "wouldn't": "not", "can't": "not", "couldn't": "not", "shouldn't": "not",
}  # fmt: skip
"""Short forms, which the texts have once in a thousand sentences, and what may follow them."""
FOLLOWS = {
    "am": "late|sorry|afraid so|right here|going home|sure|not ready|glad to hear it|from the north|almost there",
    "are": "late|right|closed today|welcome|going home|not alone|all here|too loud|in the garden|on the way|next",
    "have": "seen it before|booked a table|been there twice|got a problem|lost the key|told him already|had enough|"
    "won|heard that one|just begun|never met|changed the name|finished the book|been waiting|done well",
    "will": "be late|call tomorrow|find it on the shelf|need a coat|wait outside|have the soup|be here soon|tell her|"
    "see|never know|take the bus|do it again|pay for that|open the window|meet at noon",
    "would": "better go now|like a coffee|rather stay|love to come|never say so|call it luck|be nice|left before noon|"
    "been there before|hate to wait|buy it|do the same|say that again|have known",
    "is": "late|over|a good idea|the old house|not here|coming|all right|time to go|on the table|my brother|gone|next",
    "let": "go|wait and see|try it again|meet at noon|ask the teacher|stay for lunch|call it a day|sit down",
    "not": "know|want it|say yes|worry about it|stay|go there|see the road|hear it|ask again|open the door|wait|care",
}
DO = ["I", "you", "we", "they", "the children", "my parents"]
JOINED = [", but ", ", and ", ", so ", ": ", ". ", "; ", ", because ", "! "]
TAGS = ", isn't it?|, won't they?|, don't you?|, aren't we?|, wasn't she?|, haven't you?|, didn't he?".split("|")


def plain_letter(c):
    """An accented letter without its accent."""
    return SPECIAL.get(c) or unicodedata.normalize("NFD", c)[0]


def letters(word):
    """A word with accents as aligned stretches."""
    if word in SAID:
        return [(word, SAID[word])]
    return [(c, plain_letter(c) if c in LETTERS or not c.isascii() else c) for c in word]


class Writer:
    def __init__(self, seed):
        self.r = random.Random(seed)
        self.by_letter = {}
        for c in LETTERS:
            if len(plain_letter(c)) == 1:
                self.by_letter.setdefault(plain_letter(c), []).append(c)

    # ---- new sentences, in aligned stretches
    def places(self):
        return self.filled(self.r.choice(PLACES), lambda: letters(self.r.choice(WORDS)))

    def loaned(self):
        """A loan word, with its accents or without."""
        bare = self.r.random() < 0.35

        def said(word):
            pairs = letters(word)
            return [("".join(map(plain_letter, written)), plain) for written, plain in pairs] if bare else pairs

        def slot():
            first, *others = self.r.choice(LOANS).split()
            return said(first) + [pair for word in others for pair in [(" ", " "), *said(word)]]

        template = self.r.choice(LOANED).split("naïve")
        out = self.filled(template[0], slot)
        return out + (said("naïve") + self.filled(template[1], slot) if len(template) > 1 else [])

    def titled(self):
        def name():
            title, name = self.r.choice(list(TITLES)), self.r.choice(NAMES)
            return [(title, TITLES[title]), (" ", " "), *[("’" if c == "'" else c, c) for c in name]]

        return self.filled(self.r.choice(TITLED), name)

    def counted(self):
        sizes = (10, 100, 100, 100, 1000, 3000)
        template = self.r.choice(COUNTED)
        written = template.format(*(self.r.randrange(self.r.choice(sizes)) for _ in range(template.count("{}"))))
        stream = NormalizerStream("english")
        said = stream.push(written.replace("&", "and")) + stream.finish()
        return [(written, said.replace(" (", ", ").replace(")", ""))]

    def shortened(self):
        """A plain sentence with short forms: `I've booked a table, but we'll be late.`"""

        def clause():
            word = self.r.choice(list(SHORT))
            what = self.r.choice(FOLLOWS[SHORT[word]].split("|"))
            if SHORT[word] != "not":
                return f"{word} {what}"
            who = DO if word == "don't" else WHO
            return f"{self.r.choice(who)} {word} {what}"

        text = clause()
        if self.r.random() < 0.5:
            text += (joined := self.r.choice(JOINED))
            follows = clause()
            text += follows if joined[0] in ",:;" else follows[0].upper() + follows[1:]
        text += self.r.choice(TAGS) if self.r.random() < 0.1 else self.r.choice("...!?")
        return text[0].upper() + text[1:]

    def filled(self, template, slot):
        out = []
        for k, part in enumerate(template.split("{}")):
            if k:
                out += slot()
            out += [(c, c) for c in part]
        return out

    def dialogue(self, sentence):
        """`“Sentence,” she said.` and the like."""
        left, right = self.r.choice(QUOTES)
        body, end = sentence[:-1], sentence[-1]
        verb, who = self.r.choice(SAYS), self.r.choice(WHO)
        if self.r.random() < 0.5:
            mark = end if end in "!?" else ","
            tail = f" {verb} {who}." if self.r.random() < 0.3 and who != "I" else f" {who} {verb}."
            return [(left, ""), *self.typed(body), (mark, mark), (right, ""), *[(c, c) for c in tail]]
        who = who[0].upper() + who[1:]
        comma = self.r.choice([", ", ": "])
        before = [*[(c, c) for c in f"{who} {verb}"], (comma, ", ")]
        return [*before, (left, ""), *self.typed(body), (end, end), (right, "")]

    # ---- a plain sentence as people type it
    def typed(self, text):
        """Stretches of a text: some of its marks are written in other ways."""
        r, out = self.r, []
        curly, accents, shout = r.random() < 0.75, r.random() < 0.12, r.random() < 0.05
        for word in re.findall(r"[\w']+|\s+|.", text):
            if accents and word.isalpha() and r.random() < 0.4:
                k = r.randrange(len(word))
                if options := self.by_letter.get(word[k]):
                    out.append((word[:k] + r.choice(options) + word[k + 1 :], word))
                    continue
            if shout and word.isalpha() and len(word) > 3 and r.random() < 0.3:
                out.append((word.upper(), word))
            elif "'" in word and curly:
                out.append((word.replace("'", "’"), word))
            else:
                out.append((word, word))
        return out

    def marked(self, text):
        """The stretches of `typed` with quotes, dashes, brackets and the rest."""
        r, out = self.r, self.typed(text)
        spaces = [k for k, (w, p) in enumerate(out) if w == p and w.isspace()]
        words = [k for k, (w, _) in enumerate(out) if w[:1].isalpha()]
        if len(words) > 3 and r.random() < 0.45:  # a span in quotes, stars or brackets
            first = r.randrange(len(words) - 1)
            last = min(len(words) - 1, first + r.choice([0, 0, 1, 2, 3, 4]))
            if words[first] == 0 or out[words[first] - 1][0].isspace():
                pair = r.choice([*QUOTES, ("*", "*"), ("_", "_")])
                inside = out[words[first] : words[last] + 1]
                if words[last] + 1 == len(out) - 1 and r.random() < 0.4:
                    comma = "" if first and out[words[first] - 2][0][-1:] in ".!?,;:" else ","
                    before = [(" (", comma + " ")] if words[first] else [("(", "")]
                    out = out[: max(0, words[first] - 1)] + before + inside + [(")", "")] + out[words[last] + 1 :]
                else:
                    out = out[: words[first]] + [(pair[0], ""), *inside, (pair[1], "")] + out[words[last] + 1 :]
        elif len(spaces) > 3 and r.random() < 0.3:  # a dash or dots between words, with or without a comma
            k = r.choice(spaces[1:])
            if out[k - 1][0] == ",":
                out[k - 1] = ("", "")
            if out[k - 1][0][-1:].isalpha() or out[k - 1] == ("", ""):
                mark = r.choice(DASHES) if r.random() < 0.7 else r.choice(DOTS) + " "
                out[k] = (mark, ", ")
        elif len(spaces) > 2 and r.random() < 0.25:  # a line break
            out[r.choice(spaces)] = ("\n", " ")
        for k, (w, p) in enumerate(out):
            if p == "and" and w == "and" and r.random() < 0.25:
                out[k] = ("&", "and")
            elif w == p and w == "." and k + 1 == len(out) and r.random() < 0.12:
                out[k] = (r.choice(DOTS), ".")
            elif w == p and w in "?!" and r.random() < 0.1:
                out[k] = (r.choice([w * 2, w * 3, "?!" if w == "?" else "!!"]), w)
            elif w == p and w.isspace() and k and out[k - 1][0][-1:] in list(".!?”") and r.random() < 0.25:
                out[k] = (r.choice(["\n", "\n\n"]), " ")
        if r.random() < 0.06:  # the whole in quotes
            left, right = r.choice(QUOTES)
            out = [(left, ""), *out, (right, "")]
        return out

    def text(self, sentence):
        if self.r.random() < 0.2:
            sentence = self.shortened()
        r = self.r.random()
        if r < 0.10:
            return self.places()
        if r < 0.20:
            return self.loaned()
        if r < 0.24:
            return self.titled()
        if r < 0.38:
            return self.counted()
        if r < 0.50 and len(sentence) < 120 and sentence[-1] in ".!?":
            return self.dialogue(sentence)
        return self.marked(sentence)


def line(stretches):
    """The row of the file for aligned stretches."""
    written, plain, at = "", "", []
    for w, p in stretches:
        at += [round(len(plain) + len(p) * k / len(w), 2) for k in range(len(w))]
        written += w
        plain += p
    return {"plain": plain, "written": written, "at": [*at, float(len(plain))]}


def main():
    texts, out, count = sys.argv[1:4]
    writer = Writer(3)
    lines = gzip.open(texts, "rt").read().strip("\n").split("\n")[: int(count)]
    rows = [line(writer.text(s)) for s in lines]
    rows = [row for row in rows if 2 <= len(row["plain"]) <= 205 and len(row["written"]) <= 240]
    with gzip.open(out, "wt", encoding="utf-8") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{len(rows)} texts, {sum(r['plain'] != r['written'] for r in rows)} of them written otherwise")
    for row in random.Random(1).sample(rows, 30):
        print("   ", row["written"].replace("\n", "⏎"), "|", row["plain"])


if __name__ == "__main__":
    main()
