"""What only German writes: abbreviations before numbers, endings of ordinals, genders behind 1 and 1/2."""

import re
from math import gcd

from spoken_text.european import number_of
from spoken_text.germanic import Germanic
from spoken_text.rule import DAY, HOUR, MINUTE, MONTH, Found, Kept, Rules, ends_of, keep

_ENDS_N = re.compile(r"(?:(?:k|m|d|s)?ein|ihr|unser|eur|jed|dies|jen|manch)(?:em|en|es|er)")
_ROMAN = re.compile(r"[(\[\"„]?[IVXL]{1,8}\.")
_COUNTED = "Weltkrieg|Weltkriegs|Reich|Akt|Quartal|Instanz|Liga|Klasse"
"""Behind a Roman numeral that is an ordinal."""
_BARE = re.compile("(?:(?:k|m|d|s)?ein|ihr|unser|euer)")
_GENDERS = {"Reich": "n", "Quartal": "n", "Instanz": "f", "Liga": "f", "Klasse": "f"}
_STRONG = {"m": "r", "f": "", "n": "s"}


class Language(Germanic):
    def __init__(self, code: str):
        super().__init__(code)
        genders = {"m": "masculine", "f": "feminine", "n": "neuter"}
        self.genders = {noun: gender for gender, name in genders.items() for noun in self.words(name)}

    def holds(self, word: str, held: str) -> bool:
        return bool(re.search(r"(?<!\d)\d{1,3}\.$", held)) or (
            bool(_ROMAN.fullmatch(held)) and word in self.words("headed") | {*_COUNTED.split("|")}
        )

    def is_roman(self, word: str) -> bool:
        return number_of(word) > 0

    def begins(self, word: str) -> bool:
        return word.rstrip(",;:!?)").endswith("str.")

    def king(self, number: str, is_queen: bool) -> str:
        said = self.ordinal(number)
        return f"{'die' if is_queen else 'der'} {said[0].upper()}{said[1:]}"

    def is_king(self, found: Found) -> bool:
        return bool(found[3] and (found.rest or found.around.after[:1].islower()))

    def king_in_case(self, said: str, before: str) -> str:
        is_dative = said.startswith("der ") and before.lower() in self.words("dative")
        return f"dem {said[4:]}n" if is_dative else said

    def nth_part(self, top: int, bottom: int) -> str:
        if bottom == 2:
            return f"{self._one(str(top))} halbe"
        return f"{self._one(str(top))} {self.ordinal(str(bottom)).capitalize()}l"

    def is_counted(self, found: Found) -> bool:
        return found.after[:1].isupper() and found.after[1:].islower()

    def with_part(self, whole: str, part: str, is_half: bool) -> str:
        if is_half:
            return f"{self.before_noun(whole, 'm')}einhalb"
        return super().with_part(whole, part, is_half)

    def dated(self, found: Found, year: str, month: int, day: str) -> str:
        said = f"{self.ordinal(day)}{self.end_of_ordinal(found) or ''} {self.months[month - 1]}"
        return said + (f" {self.year(year)}" if year else "")

    def named_months(self, months: str, rule: Rules) -> None:
        @rule(".", rf"(?<!\d)(\d\d?)\. ((?i:{months}))\b(?: (\d{{4}})(?!\d))?")
        def day(found: Found) -> str:
            year = f" {self.year(found[3])}" if found[3] else ""
            return f"{self.ordinal(found[1])}{self.end_of_ordinal(found)} {found[2]}{year}"

    def years_last(self, rule: Rules) -> None:
        """German says 1989 as nineteen hundreds also where it is no year."""
        rule("", r"(?<![\w.,:/-])(1[1-9]\d\d)(?![\w%]|[.,]\d|[:/-]\d| ?[$€£°])", lambda f: self.year(f[1]))

    def last(self, rule: Rules) -> None:
        rates = self.table("rates")
        written = rf"(?<=[a-z]{{3}})/(\d{{1,4}} )?({ends_of(rates)})(?![\w²³])"
        rule("/", written, lambda f: f" pro {f[1] or ''}{rates[f[2]]}")

    # ---------------------------------------------------------------- what no shared rule may take apart

    def first(self, rule: Rules) -> None:
        century = rf"(?<!\w)([IVXL]{{1,8}})\.(?= (?:{self.any_of('headed')}|{_COUNTED}))"
        rule("IVXL", century, self._roman_ordinal)
        inflected = r"(?<=\d\. )Jahrhundert(?=$|[^\w])"
        rule(".", inflected, lambda f: f"{f[0]}s" if f.around.before in ("des", "eines") else None)
        rule(".", r"(\w+)str\.", lambda f: f"{f[1]}straße{f.stop(f[0], True)}")
        self._abbreviations(rule)
        self._joined(rule)
        self.coins(r",(\d\d) ", rule)
        self.fixed_pairs(rule)
        self.seasons(rule)
        rule("", r"^(?:D-)?(\d{4,5})(?![\w-]|[.,]\d)", self._post_code)
        rule(".,", r"(?<=\d)[,.][-–—]{1,2}(?= ?€| EUR| Euro|$|[.,;)])", lambda f: "")
        rule("F", r"^Fr\. (?=\d)", lambda f: "CHF ")
        self._dates(rule)
        phone = r"\(0\d{1,5}\) ?\d{2,9}(?:[ -]\d{1,9}){0,5}|0\d{1,5}/\d{2,9}(?:[ -]\d{1,9}){1,5}"
        rule("/(", rf"(?<![\w.,:/-])(?:{phone})(?!\w|[.,]\d)", self.dialled)
        part = r"(?<![\w.,/:–-])(?:(\d{1,2}) )?([1-9]\d?)/(7|9|1[1-9]|[2-9]0|100|1000)(?![\w/]|[.,]\d|-\d)"
        rule("/", part, self._part)
        self.rates(rule)
        self.issues(rule)

        self.pressures("blutdruck", rule)
        beats = {"4": "Vierteltakt", "8": "Achteltakt"}
        rule("/", r"(?<![\w.,/])(\d\d?)/([48])-?[Tt]akt", lambda f: f"{self.cardinal(f[1])} {beats[f[2]]}")
        self._compounds(rule)
        self._ones(rule)
        self.signs(rule)

    def _roman_ordinal(self, found: Found) -> str | None:
        number, noun = number_of(found[1]), found.after
        if not number:
            return None
        if not found.around.begins or found.head:
            return f"{number}."
        return self.ordinal(str(number)) + _STRONG[self.genders.get(noun) or _GENDERS.get(noun, "m")]

    def _abbreviations(self, rule: Rules) -> None:
        names = ends_of(name for name in self.leads if name[0] != "§")

        @rule(".", rf"^([(\[\"„]?)({names})\. ?(?=\d)")
        def long(found: Found) -> str | None:
            is_sentence = found[2] == "S" and found.around.before.isdecimal()
            return f"{found[1]}{'Satz' if is_sentence else self.leads[found[2]]} "

        rule("§", r"(?:^|(?<=[(\[ ]))(§§?) ?(?=\d)", lambda f: f"{self.leads[f[1]]} ")
        months = "|".join(self.months)

        @rule(".", rf"(?<![\w.])(\d\d?)\. ?(bis|und|oder|sowie|[-–/]) ?(\d\d?)\. ?(?=(?:{months})\b)")
        def two(found: Found) -> str:
            end, between = self.end_of_ordinal(found), "bis" if found[2] in "-–" else found[2].replace("/", "und")
            return f"{self.ordinal(found[1])}{end} {between} {self.ordinal(found[3])}{end} "

        rule(".", r"(?<![\w.,:])(\d{1,3})\.(?=,)", lambda f: self._ended(f, "?"))

    def _joined(self, rule: Rules) -> None:
        """5-jährig, 3x, 5%ig, 1980er"""
        ends = rf"(?:{self.any_of('joined_ends')}|mal(?![a-zäöü]))\w*"
        rule("", rf"(?<![\w.,])(\d{{1,4}})-?({ends})", lambda f: f"{self._one(f[1])}{f[2].lower()}")
        rule("x", r"(?<![\w.,-])(\d{1,3})x(?![\w/*+=-]| [-+=*/])", lambda f: f"{self._one(f[1])}mal")
        rule("%", r"(?<![\w.,])(\d+(?:,\d+)?) ?%-?(ig\w{0,2})", lambda f: f"{self.said(f[1])}prozent{f[2]}")
        rule("e", r"(?<![\w.,])((?:1[1-9]|20)\d\d)er(?![a-zäöü])", lambda f: f"{self.year(f[1])}er")
        clock = r"(?<![\w.,:-])(1?\d|2[0-4])h([0-5]\d)(?!\w)"
        rule("h", clock, lambda f: self.at_time(f[1], f[2]) if f.before in ("um", "ab", "gegen", "bis") else None)

    def _post_code(self, found: Found) -> str | None:
        cities = self.words("cities" if len(found[1]) == 5 else "cities_of_four")
        return self.digits(found[1]) if found[0][0] == "D" or found.around.after.rstrip(",.;)") in cities else None

    def _dates(self, rule: Rules) -> None:
        @rule(".", r"^(\d\d?)\.([0-5]\d)$")
        def starts(found: Found) -> str | None:
            sure = found.around.after == "bis" and found.around.before.lower() in ("von", "zwischen", "ab")
            return self.at_time(found[1], found[2]) if sure else None

        padded = r"(?<![\w.,])([0-3]\d)\.(0[1-9]|1[0-2])(?![\w.]|,\d| (?:Uhr|h)\b)"
        days, hours = ("am", "vom", "zum"), ("um", "gegen")
        clock = rf"(?<![\w.,]){HOUR}\.{MINUTE}(?![\w.%]|,\d| ?[€%]| [A-ZÄÖÜ])"
        rule(
            ".", clock, lambda f: self.at_time(f[1], f[2]) if f.before in hours and not f.after[:1].isupper() else None
        )
        rule(
            ".",
            padded,
            lambda f: self.dated(f, "", int(f[2]), f[1]) if f.before in days and 0 < int(f[1]) < 32 else None,
        )

        @rule(".", rf"(?<![\w.]){DAY}\.{MONTH}\.(\d\d)(?![\w.]|[,/]\d)")
        def short(found: Found) -> str | None:
            padded = found[0][0] + found[2][0] in "00 01 10 11 20 21 30 31".split()
            if not padded and found.before not in self.words("before_day"):
                return None
            return self.dated(found, ("20" if found[3] < "40" else "19") + found[3], int(found[2]), found[1])

        rule(".", r"(?<=\d\.)[-–](?=\d\d?\.\d\d?\.)", lambda f: " bis ")
        rule("e", r"(?<![\w.,])((?:(?:1[1-9]|20)\d|\d)0)ern\b", lambda f: f"{self.year(f[1])}ern")

    def _part(self, found: Found) -> str | None:
        """1/7, 3/20, 2 1/16."""
        top, bottom = int(found[2]), int(found[3])
        named = top == 1 or bottom in (7, 9, 16, 100, 1000)
        if top >= bottom or gcd(top, bottom) > 1 or not named or found.around.before.isupper():
            return None
        said = re.sub("^ein(?=hundert|tausend)", "", self.cardinal(found[3]))
        name = "siebtel" if bottom == 7 else said + ("tel" if bottom < 20 else "stel")
        whole = f"{self.cardinal(found[1])} " if found[1] else ""
        return f"{whole}{self._one(found[2])} {name.capitalize()}"

    def _one(self, written: str) -> str:
        return re.sub("eins$", "ein", self.cardinal(written))

    def _compounds(self, rule: Rules) -> None:
        """1-Zimmer-Wohnung, 5-€-Schein, 5-km-Lauf, 3 x täglich, 1-2 Tage"""
        rule("-", r"(?<![\w.,])1(?=-[A-ZÄÖÜ]\w{1,40}-)", lambda f: "ein")
        rule("-", r"(?<=\d)-([€$£])(?=-[A-ZÄÖÜ])", lambda f: f"-{self.forms_of(f[1])[0][0]}")
        units = ends_of(name for name, forms in self.units.items() if name.isalpha() and len(forms) > 1)
        rule("-", rf"(?<=\d)-({units})(?=-[A-ZÄÖÜ])", lambda f: f"-{self.units[f[1]][0]}")
        rule("x", r"^(\d\d?) x$", lambda f: f"{self._one(f[1])}mal" if f.around.after[:1].islower() else None)

        @rule("-–", r"^1 ?[-–] ?(?=(\d{1,2})(?:$| ))")
        def from_one(found: Found) -> str | None:
            counts = found.around.after[:1].isupper() or " " in found.rest
            return "ein bis " if counts and found.around.before not in self.words("labels") else None

    def _ones(self, rule: Rules) -> None:
        """1 and 1/2 in the gender and the case of the noun behind."""
        rule("", r"^1$", lambda f: "ein" if f.after == "mal" else self._before_noun(f))
        unit = r"^1 (Stunde|Minute|Sekunde)$"
        rule("MS", unit, lambda f: f"einer {f[1]}" if f.around.before.lower() in self.words("dative") else None)

        @rule("h", r"(?<![\w.,/])(?:1/2|½) ?h(?!\w)")
        def hour(found: Found) -> str:
            return "einer halben Stunde" if found.before in self.words("dative") else "eine halbe Stunde"

        @rule("/½", r"^(?:1/2|½)(?: (Liter|Stunde|Minute|Kilometer|Meter|l|TL|EL))?$")
        def half(found: Found) -> str | None:
            name = self.units[found[1]][0] if found[1] in ("l", "TL", "EL") else found[1]
            gender, before = self.genders.get(name or found.after), found.before
            behind = f" {name}" if name else ""
            if gender == "f" and before not in self.words("dative") | {"der", "einer"}:
                return f"eine halbe{behind}"
            if gender == "n" and not before:
                return f"ein halbes{behind}"
            return f"ein halber{behind}" if gender == "m" and self._begins(found) else None

    def _begins(self, found: Found) -> bool:
        """Does a sentence or a clause begin, so that a noun is its subject?"""
        return not found.before or found.around.before[-1] in ".,:;!?("

    def _before_noun(self, found: Found) -> str | None:
        """The 1 before a noun."""
        noun, before = found.after, found.before
        gender = self.genders.get(noun)
        if not gender or found.around.before in self.words("labels"):
            return None  # Absatz 1 Satz 2
        if before in self.words("dative"):
            is_place = before in ("in", "auf", "vor", "an", "über", "unter", "hinter", "neben")
            if is_place and noun not in self.words("times"):
                return None
            return "einer" if gender == "f" else "einem"
        if gender != "m":
            return {"f": "eine", "n": "ein"}[gender]
        if self._begins(found) or before in self.words("copulas"):
            return "ein"
        return "einen" if before in ("für", "um", "durch", "ohne", "gegen") else keep(found)

    # ---------------------------------------------------------------- ordinals

    def headed(self, rule: Rules) -> None:
        """19. Jahrhundert at the beginning of a line is no item of a list."""
        written = rf"^(\d{{1,3}})\.(?= ({self.any_of('headed')})\b)"
        strong = {noun: _STRONG[self.genders[noun]] for noun in self.words("headed")}
        rule(".", written, lambda f: f"{self.ordinal(f[1])}{strong[f[2]]}" if f.around.begins else None)

    def ordinals(self, rule: Rules) -> None:
        """The 2. Platz: its article, or its noun, tells its ending."""
        rule("il", rf"(?<=(?:illionen|lliarden) )({self.unit_names})$", lambda f: self.units[f[1]][1])
        rule("efm", r"(?<![\d.,])(\d+)(er|fach\w*|mal)\b", lambda f: self.cardinal(f[1]) + f[2])
        rule("t", r"(?<![\w.,/-])(\d{1,6})-?s?te([mnrs]?)(?!\w)", lambda f: self.ordinal(f[1]) + f[2])

        @rule(".", r"(?<![\w.,:/])(\d{1,3})\./(\d{1,3})\.(?= \w)")
        def both(found: Found) -> str | None:
            end = self.end_of_ordinal(found, self._noun(found))
            return None if end is None else f"{self.ordinal(found[1])}{end} und {self.ordinal(found[2])}{end}"

        rule(".", r"(?<![\w.,:])(\d{1,3})\.(?= \w)", self._ordinal)

        @rule(".", r"(?<![\w.,:])([1-9]|[12]\d|3[01])\.(?=$|[\"“)])")
        def at_end(found: Found) -> str | None:
            is_day = not found.around.after and found.before in ("der", "den", "dem", "am", "vom", "zum", "des")
            return f"{self.ordinal(found[1])}{self.end_of_ordinal(found, '?')}." if is_day else None

    def _noun(self, found: Found) -> str:
        return (found.rest.split() or [found.around.after])[0].strip("\"'()[].,;:!?“")

    def _ended(self, found: Found, noun: str) -> str | None:
        """The ordinal with its ending; None if the words around do not say it."""
        end = self.end_of_ordinal(found, noun)
        return None if end is None else f"{self.ordinal(found[1])}{end}"

    def _ordinal(self, found: Found) -> str | Kept | None:
        noun, before, said = self._noun(found), found.before, self.ordinal(found[1])
        if re.search(r"\d\. (?:und|oder|bis|sowie) $", found.head):
            return f"{said}{found.around.ordinal_end}"
        end = self.end_of_ordinal(found, noun or "?")
        if noun in self.words("starters"):  # am 5. Dann: the full stop is the sentence's, too
            return None if end is None else f"{said}{end}."
        found.around.ordinal_end = end or ("n" if noun[:1].islower() else "")
        if before in ("wurde", "wird", "werde", "wurden"):  # er wurde 2. im Lauf
            of = {"er": "r", "sie": ""}.get(found.around.earlier.lower())
            return keep(found) if of is None else f"{said.capitalize()}{of}"
        if end is not None:
            return f"{said}{end}"
        if noun[:1].islower():
            return f"{said}n" if not found.around.before[-1:].isdecimal() else None
        return keep(found) if _BARE.fullmatch(before) else None

    def end_of_ordinal(self, found: Found, noun: str = "") -> str | None:
        """What an ordinal ends with behind "-e": "", "n", "r" or "s". None: the words around do not say. `noun`: the
        word behind, or empty for a day of a month."""
        ahead = found.head.split()
        before, earlier = ([found.around.earlier, found.around.before, *ahead])[-1:-3:-1]
        before, earlier = before.strip("\"'([„"), earlier.strip("\"'([„")
        low = before.lower()
        if low == "der" and noun:
            genitive = earlier in self.words("genitive") or (
                earlier[:1].isupper()
                and earlier.isalpha()
                and earlier not in self.words("capital_starts")
                and self.genders.get(noun) == "f"
            )
            return "n" if earlier.lower() in self.words("dative") or genitive else ""
        if low in self.words("articles_e"):
            return "" if low not in ("dieser", "jeder") or earlier.lower() not in self.words("dative") else "n"
        if (low in self.words("before_noun") if noun else low in self.words("before_day")) or _ENDS_N.fullmatch(low):
            return "n"
        if noun:
            gender = self.genders.get(noun)
            adjective = re.fullmatch("[a-zäöüß]{3,}e([nrsm]?)", before)
            if adjective and noun.startswith(("Jahrhundert", "Jubiläum", "Jahrestag", "Geburtstag")):
                return adjective[1]  # des späten 15. Jahrhunderts
            if behind := re.search("(?:isch|lich|ig)e([nrsm]?)$", noun):  # das frühe 5. vorchristliche Jahrhundert
                return behind[1]
            if gender and low in self.words("dative"):  # in zweiter Auflage
                return "r" if gender == "f" else "m"
            if low == "als" and noun.endswith("er"):
                return "r"
            alone = before[-1:] in ",:(" or low == "als" or _BARE.fullmatch(low)
            return _STRONG[gender] if gender and alone else None
        is_named = (
            before.endswith(",")
            and not earlier.isupper()
            and earlier.lower() in ("am", "vom", "ab", "bis", "seit", "den", "dem", "zum")
        )
        return "n" if is_named else "r"
