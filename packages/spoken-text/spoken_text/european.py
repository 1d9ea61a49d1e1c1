"""What French, Spanish, Italian, Portuguese and Russian write beside numbers: abbreviations such as "n° 5", signs of
arithmetic, dates with dots or dashes, marks out of twenty."""

import re
from math import gcd

from spoken_text.rule import DAY, Found, Rules, ends_of, keep
from spoken_text.spoken import Spoken

_SAME = {"~": "≈", "-": "−", "–": "−", "x": "×", "*": "×", "·": "×", "х": "×", "/": "÷", ":": "÷"}
_TENS = ["", "X", "XX", "XXX", "XL", "L", "LX", "LXX", "LXXX", "XC"]
_ONES = ["", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"]
_VALUES = {ten + one: int(f"{tens}{ones}") for tens, ten in enumerate(_TENS) for ones, one in enumerate(_ONES)}
_ALONE = frozenset("+±≈~=")
_JOINS = frozenset("y e et и al a - –".split())
_RAISED = frozenset("ºª°")
_ARTICLES = frozenset("il el o".split())
_BEHIND = frozenset("+ = × ÷ · * x х / - −".split())
MAY_BE_ROMAN = (
    r"\b[IVX]{1,8}(?:er|re|e|i?èmes?)\b|\b[IVXLХ]{2,8}\b"
    r"|\b[IVXLХ] (?:[Ss]ec|[Gg]uerra|[Rr]ep|в|[Ee]di[czç]|[Dd]inast|[Cc]on[gc]|[Aa]n|Reich|[Cc][uú][mp]|[Cc]ent|[Mm]un)"
    r"|\b[IVXХ] [а-я]|\b[IVX] d[eoa]\b|\b[IVXL]{1,8}(?:th|\.) "
    r"|\b(?:siglos?|s|ss|séculos?|sécs?|sec|secc|secol[oi])\.? [IVXL]"
)
"""What `figures.before_roman` looks for as well."""


def number_of(roman: str, most: int = 89) -> int:
    """The value of a Roman numeral; 0 if it is none, or more than `most`."""
    value = _VALUES.get(roman.replace("Х", "X"), 0)
    return value if value <= most else 0


class European(Spoken):
    """The rules that these languages share."""

    round_clock = ""  # between 24 and 7
    by = ""  # said for the letter x between numbers
    out_of: str  # said for the bar of 15/20

    def __init__(self, code: str):
        super().__init__(code)
        self.leads, self.centuries, self.signs = map(self.table, ("abbreviations", "centuries", "signs"))
        self.signs |= {other: self.signs[sign] for other, sign in _SAME.items()}

    # ---------------------------------------------------------------- which words belong together

    def begins(self, word: str) -> bool:
        word = word.replace("’", "'").rpartition("'")[2].lstrip('("«„[').lower()  # l'art.
        if word in ("n", "n.") and f"{word}°" in self.leads:
            return True
        return word in self.leads or word in _ALONE or word in self.centuries or word in self.words("money")

    def follows(self, word: str, held: str) -> bool:
        if held[-1].isdecimal():
            return word in _BEHIND or word in _RAISED
        if held in ("km", "m", "cm") and word[0] in "²³":
            return True
        if held.lower() in ("n", "n.") and word in _RAISED or held in _RAISED and word[:1].isdecimal():
            return True  # n º 5
        if held in self.signs or self.begins(held):
            has_digit = any(map(str.isdecimal, word))
            return has_digit or self.is_roman(word) and held.lower() in self.centuries
        if number_of(held):
            return word in _JOINS or f"{word}." in self.centuries or word in self.centuries
        if held in _JOINS and word in _ARTICLES:
            return True
        return held in _JOINS | _ARTICLES and bool(number_of(word))

    # ---------------------------------------------------------------- rules

    own = Spoken.no_rules  # what no shared rule of these languages may take apart
    middle = Spoken.no_rules  # what comes behind abbreviations and dates

    def second(self, rule: Rules) -> None:
        number = self.pattern
        self.own(rule)
        rule("²³", r"(?<![^\W\d])([kc]?m) (?=[²³])", lambda f: f[1])
        rule("", rf"(?i:(?<![\w.])({ends_of(self.leads)})) ?(?=\d)", self._lead)
        self._dates(rule)
        if self.code != "ru":
            ends = r"(?![\w/]|[.,]\d)"
            rule("/", rf"(?<![\w.,:/-])((?:1[89]|20)\d\d|[1-9]\d\d)/(\d{{2,4}}){ends}", self._season)
            rule("/", rf"(?<![\w.,:/-])(\d{{1,5}})/((?:19|20)?\d\d){ends}", self._law)
        written = r"(?<![\w.,/-])24/7(?![\w/]|[.,]\d)"
        rule("/", written, lambda f: f"{self.cardinal('24')} {self.round_clock}{self.cardinal('7')}")
        even = r"(?<![\w.,/-])50/50(?![\w/]|[.,]\d)"
        rule("/", even, lambda f: f"{self.cardinal('50')} {self.cardinal('50')}")
        self.middle(rule)
        rule("'’′", r"(?<![\w.,])\d{1,2}['’′]\d\d(?:[\"”″]|'')?(?!\d)", keep)
        rule("/,", r"(?<![\w.,:/-])(?:\d+,\d+/(?:5|10)|\d{1,3}/(?:10|20|30|100|110))(?![\w/]|[.,]\d)", self._mark)
        scale, one = r"(?<![\w.,:/-])1:(\d{4,7}|\d{1,3}(?:[. ]\d{3})+)(?![\w:/]|[.,]\d)", self.cardinal("1")
        rule(":", scale, lambda f: f"{one} {self.ratio_to} {self.cardinal(self.value(f[1]))}")
        rule("'’", r"(?<![\w'’])['’](?=\d\d(?![\d'’]))", lambda f: "")
        rule("-", r"(?<![\w.,:/-])(?<![\d)] )\d{3}-(?:\d{3}-\d{2,4}|\d\d-\d\d)(?![\w-]|[.,]\d)", self.dialled)
        rule(":", r"(?<![\w.,:/-])(\d{1,2}):([0-5]\d)([.,])(\d{1,3})(?![\w:/]|[.,]\d)", self._lap)
        if self.by:
            sizes = rf"(?<=\d) ?[x×] ?(?={number} ?(?:{self.unit_names})(?!\w))"
            rule("x×", sizes, lambda f: f" {self.by} ")
        rule("H", r"(?<![\w.,:/-])(\d\d?)H(?=\d\d(?!\w)|(?!\w))", lambda f: f"{f[1]}h")
        rule("h", r"(?<![\w.,:/-])0(\d)(?= ?h(?!\w))", lambda f: f[1])
        decade, plurals = r"(?<![\w.,:/-])\d{2,4}s(?!\w)", "les los os années años anos gli anni".split()
        rule("s", decade, lambda f: keep(f) if f.before in plurals else None)  # les 80s, which are no seconds

    def _season(self, found: Found) -> str | None:
        """1984/85, en 630/631"""
        first, last = found[1], found[2]
        next_year = f"{int(first) + 1}"
        if last != next_year and (len(first) < 4 or last != next_year[2:]):
            return None
        return f"{self.year(first)}{self.pause}{self.cardinal(next_year if last[0] == '0' else last)}"

    def _law(self, found: Found) -> str | None:
        """legge 820/71, Ley 30/1992"""
        named = found.before.replace(".", "") in self.words("laws")
        is_year = len(found[2]) == 4 and int(found[1]) > 12 and found[1][0] != "0"
        return f"{self.cardinal(found[1])} {self.slash} {self.cardinal(found[2])}" if named or is_year else None

    def later(self, rule: Rules) -> None:
        """Signs of arithmetic. They come behind telephone numbers, which begin with a plus."""
        number = self.pattern
        equation = rf"(?<![\w.,]){number}(?: [+×÷·*xх/:−–-] {number}){{1,6}} = (?=[−-]?\d)"
        rule("=", equation, lambda f: re.sub(r"(?<=\d) ([^\s\d]) (?=[−-]?\d|$)", self._sign, f[0]))
        rule("+=×÷", r"(?<=\d) ([+×÷=]) (?=\d)", self._sign)
        rule("=", r"(?<![\w.,)%])= (?=[−-]?\d)", lambda f: f"{self.signs['=']} ")
        if self.by:
            rule("x", r"(?<=\d) x (?=\d)", lambda f: f" {self.by} ")
            if self.code != "pt":
                rule("x", r"(?<![\w.,])(\d{1,4})x(?=\d{1,4}(?!\w))", lambda f: f"{f[1]} {self.by} ")
        rule("+~±≈", r"(?<![\w.,)%])([±≈~+]) ?(?=\d)", lambda f: f"{self.signs[f[1]]} ")

    def _lap(self, found: Found) -> str:
        """2:00.531 is the time of a lap."""
        _, minutes, seconds = self.duration_units
        rest = self.counted(f"{int(found[2])}.{found[4]}", seconds, self.decimal)
        return f"{self.counted(str(int(found[1])), minutes)} {rest}"

    def _mark(self, found: Found) -> str | None:
        """15/20: quinze sur vingt"""
        top, bottom = found[0].split("/")
        is_date = found.before in "le el il dia em du au del al dal c с на до от".split()
        if (
            top in "12"
            or "," not in top
            and (int(top) > int(bottom) or is_date or (bottom == "10" and gcd(int(top), 10) == 1))
        ):
            return None
        return f"{self.cardinal(self.value(top), ',')} {self.out_of} {self.cardinal(bottom)}"

    def _sign(self, found: Found | re.Match[str]) -> str:
        return f" {self.signs[found[1]]} "

    def _lead(self, found: Found) -> str:
        said = self.leads[found[1].lower()]
        return f"{said[0].upper() if found[1][0].isupper() else said[0]}{said[1:]} "

    def _dates(self, rule: Rules) -> None:
        def say(found: Found) -> str | None:
            day, month, year = int(found[1]), int(found[3]), found[4]
            if not (1 <= day <= 31 and 1 <= month <= 12):
                return keep(found) if found[2] == "." else None
            if len(year) == 2:
                year = ("20" if year < "40" else "19") + year
            return self.on_date(year, month, str(day))

        if self.code != "ru":
            days = rf"(?<![\w.,:/-])\d\d?(?:/\d\d?){{1,2}}(?= (?:de )?(?:{'|'.join(self.months)})\b)"
            rule("/", days, lambda f: ", ".join(map(self.cardinal, f[0].split("/"))))
        guard, mark = r"(?![\w/-]|[.,]\d)", self.date[-1]
        rule("-./", rf"(?<![\w.,:/-])(\d\d?)([{'./'.replace(mark, '')}-])(\d\d?)\2(\d{{4}}){guard}", say)
        rule(mark, rf"(?<![\w.,:/-])(\d\d?)([{mark}])(\d\d?)\2([012]\d){guard}", say)
        digits = r"\d\d?" if mark == "/" else r"\d\d"
        rule(mark, rf"(?<![\w.,:/-])({digits})([{mark}])({digits})\2(\d\d){guard}", say)
        if self.code != "ru":
            rule("-.", rf"(?<![\w.,:/-])([0-3]\d)([-.])([01]\d)\2(\d\d){guard}", say)
        day, articles = rf"(?<![\w.,:/-]){DAY}/(0[1-9]|1[0-2]){guard}(?! ?%)", "le au du el al il dal dia até".split()
        rule("/", day, lambda f: self.on_date("", int(f[2]), f[1]) if f.before in articles else None)
