"""What French, Spanish, Italian and Portuguese share: numbers that agree with the noun behind them, halves, centuries.

"1 persona" is "una persona", "200 páginas" are "doscientas páginas". Where the noun's gender is not sure, the figure
stays."""

import re

from spoken_text.european import European, number_of
from spoken_text.rule import DAY, Found, Kept, Rules, ends_of, initials, keep
from spoken_text.spoken import gender_of, plain

_WORD = re.compile(r"[a-zà-ÿœ'’-]+")
_FEMININE_BEFORE = frozenset("las unas estas esas aquellas as umas nas das às estas essas aquelas".split())
_MASCULINE_BEFORE = frozenset("los unos estos esos aquellos os uns nos dos aos estes esses aqueles".split())
_YEAR_AFTER = frozenset("en em in nel dal desde año ano anno an depuis dès l'an l'année".split())
_RANGE = frozenset("a o u ou à oppure".split())
_CLOSING = "\"').,;:!?»”"
_NUMBER = re.compile(r"\d[\d.]*")
_HALF = re.compile(r"(?:^|[^\d/])1/2$")
_ROMAN = r"[IVXL]{1,8}"
CHAIN = rf"{_ROMAN}(?:(?: (?:y|e|al|a) (?:(?:el|il|o) )?| ?[-–] ?){_ROMAN}){{0,3}}"  # of centuries


class Romance(European):
    hour_gender = "f"

    def __init__(self, code: str):
        super().__init__(code)
        ends = (rf"(?:{'|'.join(self.words(f'{gender}_ends'))})$" for gender in ("feminine", "masculine"))
        self.feminine_ends, self.masculine_ends = map(re.compile, ends)  # of nouns in either number

    # ---------------------------------------------------------------- genders

    def singulars(self, word: str) -> list[str]:
        """The word, and what may be its singular."""
        found = [word]
        if word[-1] in "sx" and len(word) > 2:
            found.append(word[:-1])
            ends = {"ces": "z", "es": "", "ns": "m", "ões": "ão", "ais": "al", "eis": "el"}
            found += [word.removesuffix(end) + single for end, single in ends.items() if word.endswith(end)]
        return found

    def gender(self, word: str) -> str:
        """The gender of a noun or of an adjective, "m" or "f"; empty if it is not sure or the word is no noun."""
        if not _WORD.fullmatch(word) or word in self.words("others") or word[1:2] in ("'", "’"):
            return ""
        singulars = self.singulars(word)
        for known, found in (("feminine", "f"), ("masculine", "m")):
            if not self.words(known).isdisjoint(singulars):
                return found
        if self.code in ("es", "pt") and re.search("(?:[eo]|gra|ra)mas$|istas$", word):
            return "m"
        if self.feminine_ends.search(word):
            return "f"
        return "m" if self.masculine_ends.search(word) else ""

    def singular(self, noun: str) -> str:
        """The singular of a noun."""
        known = self.words("feminine") | self.words("masculine")
        return next((word for word in self.singulars(noun)[1:] if word in known), noun.removesuffix("s"))

    def holds(self, word: str, held: str) -> bool:
        between, both = self._data["and"].strip(), self.words("both")
        if (held, word) in (("de", "cada"), ("em", "cada")) or held == "cada" and word.isdecimal():
            return True
        if not held[-1].isdecimal():
            return held in (*_RANGE, between) and word in both
        if word in _RANGE or word in both or word == between or self.holds_noun(word, held):
            return True
        return bool(_HALF.search(held)) and bool(self.gender(word))

    def holds_noun(self, word: str, held: str) -> bool:
        """Is the word behind this number needed to tell how the number ends?"""
        return False

    def noun(self, found: Found) -> str:
        """The word that the number counts, or else the next word; empty if a mark follows."""
        text, link = found.rest, self._data["and"].strip()
        if text and text[0] != " ":
            return ""
        words = [*text.split(), found.around.after]
        between = found.before in ("entre", "tra", "fra")
        if len(words) > 2 and (words[0] in _RANGE or (between and words[0] == link)) and _NUMBER.fullmatch(words[1]):
            words = words[2:]
        if len(words) > 3 and words[1] == "cada" and words[2].isdecimal():
            return words[3].rstrip(_CLOSING)  # 1 de cada 5 niñas
        while len(words) > 1 and words[0] in self.words("both"):
            words = words[1:]
        if len(words) > 1 and words[0] == "de" and self.code == "es" and words[1] in _FEMININE_BEFORE:
            words = words[1:]  # 1 de las
        return words[0].rstrip(_CLOSING)

    def agree(self, found: Found, value: str, said: str, in_range: bool = False) -> str:
        if not value.isdecimal():
            return said
        before, labels = found.before, self.words("labels")
        if before in labels or before.rstrip(".") + "." in labels:
            return self.changed(said, "labelled")
        if before in _YEAR_AFTER and re.fullmatch(r"1[1-9]\d\d|20\d\d", found[0]):
            return said
        noun = self.noun(found)
        each = " cada " in found.rest[:9]
        known = self.gender_at(noun, before, value, value == "1" and not in_range and not each)
        takes_of = noun in self.words("many") if self.words("many") else known
        if int(value) and int(value) % 10**6 == 0 and takes_of:
            return f"{said} {self.of_noun(noun)}"
        if known:
            return self.agreed(said, value, noun, known)
        return keep(found) if not in_range and self._may_be_noun(noun) and self.is_open(value, noun, said) else said

    def gender_at(self, noun: str, before: str, value: str, is_one: bool) -> str:
        """The gender of the noun behind a number, also by the word before."""
        known = self.gender(noun)
        if noun and before in _FEMININE_BEFORE and not is_one and self.code in ("es", "pt") and known != "f":
            known = "f" if self.words("masculine").isdisjoint(self.singulars(noun)) else known
        listed = self.words("feminine") | self.words("masculine")
        if self.code != "it" and known and (noun[-1] in "sx") == is_one and noun not in listed:
            known = ""
        if noun in ("las", "das", "delas", "delle", "nuestras") and is_one or noun in ("das", "delas") and value == "2":
            return "f"
        if self.code in ("es", "pt") and not known and not noun[:1].isdigit():
            return "f" if before in _FEMININE_BEFORE else "m" if noun and before in _MASCULINE_BEFORE else ""
        return known

    def part_of_unit(self, whole: str | None, part: str, unit: str) -> str | None:
        """trois quarts d'heure, deux heures et demie"""
        name, kind = plain(self.units[unit])[0], gender_of(self.units[unit])
        if "{}" in name or unit == "%" or (whole and " " in name):
            return None
        if part == "1/2":
            return (
                f"{self.counted(whole, unit)} {self.table('and_half')[kind]}"
                if whole
                else f"{self.table('half')[kind]} {name}"
            )
        said = self.fraction(*map(int, part.split("/")))
        if whole:
            return f"{self.counted(whole, unit)}{self._data['and']}{said}"
        of = self._data["of"]
        elides = self.code == "fr" and name[0] in "aehiouéê" or (self.code, unit) == ("it", "h")
        return f"{said} {of[0] + chr(39) if elides else of}{name}"

    def of_noun(self, noun: str) -> str:
        return self._data["of"].rstrip()

    def agreed(self, said: str, value: str, noun: str, known: str) -> str:
        """A number before a noun of this gender."""
        return self.inflected(said, known)

    def _may_be_noun(self, noun: str) -> bool:
        return noun.islower() and bool(_WORD.fullmatch(noun)) and noun not in self.words("others")

    def is_open(self, value: str, noun: str, said: str) -> bool:
        """May this noun be of either gender, and would the number differ?"""
        return value == "1"

    # ---------------------------------------------------------------- rules

    end = European.no_rules  # what comes behind the shared rules
    centuries_behind = European.no_rules  # numerals with "century" behind them

    def ordinal_at(self, found: Found) -> str | None:
        said = self.ordinal(found[1])
        return self.feminine_ordinal(said) if found[0][-1] in "ªa" else self.shortened(said, found[0])

    def shortened(self, said: str, written: str) -> str:
        """An ordinal before a masculine noun, if it is written so: 3er"""
        return self.changed(said, "shortened_ordinals") if written.endswith(("er", "ᵉʳ")) else said

    def _times(self, found: Found) -> str:
        """3x: tres veces"""
        one, many = self._data["multiple"]
        return one if found[1] == "1" else many.format(self.before_noun(found[1], "f"))

    def is_counted(self, found: Found) -> bool:
        return bool(self.gender(found.after))

    def middle(self, rule: Rules) -> None:
        rule("x", r"(?<![\w.,/-])(\d{1,3}) ?x(?=$| [a-zà-ÿ]|[.,;!?)](?!\d))", self._times)
        clocks = r"(?<![\w.,:/-])(\d\d?) ?h ?([0-5]\d)? ?[-–] ?(?=\d\d? ?h)"
        rule("h", clocks, lambda f: f"{self.at_time(f[1], f[2] or '0')} {self.to} ")

    def iberian(self, rule: Rules) -> None:
        """Telephone numbers and days of a month, as in Spanish and Portuguese."""
        years = r"(?!(?:1\d|20)\d\d-(?:1\d|20))"
        abroad = r"(?<!\+\d\d )(?<!\+\d\d \d\d )(?<!\+\d\d \d{3} )"
        phone = rf"(?<![\w.,:/)-])(?<!\) ){abroad}{years}(?:\d\d )?9?\d{{4}}-\d{{4}}(?![\w-]|[.,]\d)"
        rule("-", phone, self.dialled)
        months = "|".join(self.months)
        date = rf"(?<![\w.,:/-]){DAY} ({months})(?!\w)(?: (?:del? )?(\d{{4}})(?![\w]|[.,]\d))?"  # 5 febrero 2024
        rule(initials(self.months), date, lambda f: self.on_date(f[3] or "", self.months.index(f[2]) + 1, f[1]))

    def second(self, rule: Rules) -> None:
        super().second(rule)
        self.end(rule)
        if self.code != "fr":
            rule("°ao", r"(?<![\w.,])([1-9]\d?)([°oa])(?!\w)", self._loose_ordinal)
        rule("/½", r"(?<![\w.,/:–-])([1-9]\d?) ?(?:1/2|½) ([a-zà-ÿœ]+)", self._and_half)
        rule("/½", r"(?<![\w.,/:–-])(?<!\d )(?:1/2|½)(?= ?[a-zà-ÿ]|$)(?! ?(?:kg|g|l|km|m|cm|h|ml|mg)\b)", self._half)

    def _and_half(self, found: Found) -> str | None:
        """2 1/2 tasses: deux tasses et demie."""
        number, noun = found[1], found[2]
        kind = self.gender(noun)
        if not kind or (self.code == "it" and number == "1"):
            return keep(found) if kind else None
        words = self.cardinal(number)
        if number == "1":
            noun, words = self.singular(noun), self.one[kind]
        words = self.inflected(words, "f") if kind == "f" else words
        return f"{words} {noun} {self.table('and_half')[kind]}"

    def _half(self, found: Found) -> str | None:
        before = found.before
        if before in ("un", "una", "um", "uma", "une") or before[-1:].isdigit():
            return None
        if before in ("an", "ans", "heure", "heures", "jours", "mois", "años", "anos", "anni"):
            return keep(found)
        kind = self.gender(found.after)
        return Kept(self.table("half")[kind]) if kind else None

    def _loose_ordinal(self, found: Found) -> str | None:
        """il 3° posto, la 2a volta: with an article before, and a noun behind."""
        before, noun = found.before, found.after
        if not re.fullmatch("[a-zà-ú]{3,}", noun) or found.rest[:1].strip():
            return None
        kind = {"°": "m", "o": "m", "a": "f"}[found[2]]
        articles = {"m": "il al del dal nel sul el o ao do no un", "f": "la alla della dalla nella sulla a à da na"}[
            kind
        ]
        known = self.gender(noun) == kind and (found[2] != "°" or noun[-1] != "s" and int(found[1]) <= 20)
        if (before not in articles.split() and not known) or (self.code == "es" and found[2] != "°"):
            return None
        if noun in ("con", "com", "per", "por", "para", "nord", "sud", "est", "norte", "sur", "sul", "celsius"):
            return None
        said = self.ordinal(found[1])
        return self.feminine_ordinal(said) if kind == "f" else self.shortened(said, f"{found[1]}er")

    # ---------------------------------------------------------------- centuries

    def is_roman(self, word: str) -> bool:
        return word[:1] in frozenset("IVXLХ") and all(map(number_of, re.split("[-–]", word)))

    def first(self, rule: Rules) -> None:
        rule("º°", r"(?i:(?<!\w)(n\.?)) [º°] ?(?=\d)", lambda f: f"{f[1]}° ")
        rule("ºª", r"(?<=\d) ([ºª])(?!\w)", lambda f: f[1])
        if self.code != "fr":
            rule("°", r"(?<=\d) °(?=$)", lambda f: "°" if re.fullmatch("[a-zà-ú]{3,}", f.after) else None)

    def own(self, rule: Rules) -> None:
        rule("ILVX", rf"(?<!\w)((?i:{ends_of(self.centuries)})) ({CHAIN})(?!\w)", self._century)
        written = rf"^({CHAIN})(?!\w)"
        rule("ILVX", written, lambda f: self.chain(f[1]) if f.around.before.lower() in self.centuries else None)
        self.centuries_behind(rule)
        rule("ILVX", rf"(?<!\w)({_ROMAN})(?!\w)", self._event)

    def chain(self, chain: str) -> str | None:
        """Roman numerals that follow each other."""
        return re.sub(_ROMAN, self._numeral, chain) if all(map(number_of, re.findall(_ROMAN, chain))) else None

    def _numeral(self, found: re.Match[str]) -> str:
        number = number_of(found[0])
        is_ordinal = self.code == "it" or number <= 10
        return self.ordinal(str(number)) if is_ordinal else self.cardinal(str(number))

    def _century(self, found: Found) -> str | None:
        said, name = self.chain(found[2]), self.centuries[found[1].lower()]
        return said and f"{name[0].upper() if found[1][0].isupper() else name[0]}{name[1:]} {said}"

    def _event(self, found: Found) -> str | None:
        """II Guerra Mundial."""
        kind = self.table("events").get(found.after.lower())
        if not kind or not 0 < number_of(found[1]) < 40:
            return None
        said = self.ordinal(str(number_of(found[1])))
        return self.shortened(self.feminine_ordinal(said) if kind == "f" else said, "er")
