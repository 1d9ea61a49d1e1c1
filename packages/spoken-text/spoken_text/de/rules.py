"""What only German writes: abbreviations before numbers, endings of ordinals, genders behind 1 and 1/2."""

import re
from math import gcd

from spoken_text.rule import Kept, Rules, ends_of, keep
from spoken_text.signs import FOLLOWERS, OPENERS, SEASON, rates, season
from spoken_text.signs import rules as sign_rules
from spoken_text.spoken import Spoken

_ENDS_N = re.compile(r"(?:(?:k|m|d|s)?ein|ihr|unser|eur|jed|dies|jen|manch)(?:em|en|es|er)")
_STRONG = {"m": "r", "f": "", "n": "s"}
_JOINED = (
    "jährig|Jährig|köpfig|tägig|stündig|minütig|monatig|wöchig|malig|stellig|seitig|prozentig|stöckig|teilig|türig|"
    "bändig|fach|mal(?![a-zäöü])"
)


def _first(spoken: "Language", rule: Rules) -> None:
    around = spoken.around
    long_of = spoken.table("abbreviations")
    names = ends_of(name for name in long_of if name[0] != "§")

    @rule(".", rf"^([(\[\"„]?)({names})\. ?(?=\d)")
    def long(found: re.Match[str]) -> str | None:
        name = found[2]
        if name == "S" and around.before.isdecimal():
            return f"{found[1]}Satz "
        return f"{found[1]}{long_of[name]} "

    rule("§", r"(?:^|(?<=[(\[ ]))(§§?) ?(?=\d)", lambda f: f"{long_of[f[1]]} ")
    months = "|".join(spoken.months)
    days = rf"(?<![\w.])(\d\d?)\. ?(bis|und|oder|sowie|[-–/]) ?(\d\d?)\. ?(?=(?:{months})\b)"

    @rule(".", days)
    def two(found: re.Match[str]) -> str:
        end, between = spoken.end_of_ordinal(found), "bis" if found[2] in "-–" else found[2].replace("/", "und")
        return f"{spoken.ordinal(found[1])}{end} {between} {spoken.ordinal(found[3])}{end} "

    @rule(".", r"(?<![\w.,:])(\d{1,3})\.(?=,)")
    def listed(found: re.Match[str]) -> str | None:
        end = spoken.end_of_ordinal(found, "?")
        return None if end is None else f"{spoken.ordinal(found[1])}{end}"

    rule("", rf"(?<![\w.,])(\d{{1,4}})-?((?:{_JOINED})\w*)", lambda f: f"{_one(spoken, f[1])}{f[2].lower()}")

    rule("x", r"(?<![\w.,-])(\d{1,3})x(?![\w/*+=-]| [-+=*/])", lambda f: f"{_one(spoken, f[1])}mal")
    rule("%", r"(?<![\w.,])(\d+(?:,\d+)?) ?%-?(ig\w{0,2})", lambda f: f"{spoken.said(f[1])}prozent{f[2]}")
    year = r"(?<![\w.,])((?:1[1-9]|20)\d0)er(?![a-zäöü])"
    rule("e", year, lambda f: f"{spoken.year(f[1])}er")

    @rule("h", r"(?<![\w.,:-])(1?\d|2[0-4])h([0-5]\d)(?!\w)")
    def clock(found: re.Match[str]) -> str | None:
        return spoken.at_time(found[1], found[2]) if around.word_before(found) in ("um", "ab", "gegen", "bis") else None

    coins = r"(?<![\w.,-])(\d{1,6}|\d{1,3}(?:\.\d{3})+),(\d\d) (Euro|Dollar|Franken|Pfund)(?!\w)"
    codes = {"Euro": "EUR", "Dollar": "USD", "Franken": "CHF", "Pfund": "GBP"}
    rule(",", coins, lambda f: spoken.money(f"{f[1].replace('.', '')}.{f[2]}", codes[f[3]]))
    equal = r"(?<![\w.,/])(50/50|24/7|9/11)(?![\w/]|[.,]\d)"
    rule("/", equal, lambda f: " ".join(map(spoken.cardinal, f[1].split("/"))))
    rule("/", SEASON, lambda f: season(spoken, f))

    @rule("", r"^(?:D-)?(\d{4,5})(?![\w-]|[.,]\d)")
    def post(found: re.Match[str]) -> str | None:
        cities = spoken.words("cities" if len(found[1]) == 5 else "cities_of_four")
        return spoken.digits(found[1]) if found[0][0] == "D" or around.after.rstrip(",.;)") in cities else None

    rule(".,", r"(?<=\d)[,.][-–—]{1,2}(?= ?€| EUR| Euro|$|[.,;)])", lambda f: "")
    rule("F", r"^Fr\. (?=\d)", lambda f: "CHF ")

    @rule(".", r"^(\d\d?)\.([0-5]\d)$")
    def starts(found: re.Match[str]) -> str | None:
        sure = around.after == "bis" and around.before.lower() in ("von", "zwischen", "ab")
        return spoken.at_time(found[1], found[2]) if sure else None

    short = r"(?<![\w.])(\d\d?)\.(\d\d?)\.(\d\d)(?![\w.]|[,/]\d)"

    @rule(".", short)
    def short_date(found: re.Match[str]) -> str | None:
        padded = found[0][0] + found[2][0] in "00 01 10 20 30".split()
        sure = around.word_before(found) in spoken.words("before_day") or padded
        if not (sure and 1 <= int(found[1]) <= 31 and 1 <= int(found[2]) <= 12):
            return None
        year = ("20" if found[3] < "40" else "19") + found[3]
        return spoken.on_date(year, int(found[2]), found[1], spoken.end_of_ordinal(found) or "")

    rule(".", r"(?<=\d\.)[-–](?=\d\d?\.\d\d?\.)", lambda f: " bis ")
    rule("e", r"(?<![\w.,])((?:(?:1[1-9]|20)\d|\d)0)ern\b", lambda f: f"{spoken.year(f[1])}ern")
    phones = (
        r"(?<![\w.,:/-])(?:\(0\d{1,5}\) ?\d{2,9}(?:[ -]\d{1,9}){0,5}|0\d{1,5}/\d{2,9}(?:[ -]\d{1,9}){1,5})(?!\w|[.,]\d)"
    )
    rule("/(", phones, lambda f: ", ".join(map(spoken.digits, re.findall(r"\d+", f[0]))))
    part = r"(?<![\w.,/:–-])(?:(\d{1,2}) )?([1-9]\d?)/(7|9|1[1-9]|[2-9]0|100|1000)(?![\w/]|[.,]\d|-\d)"
    rule("/", part, lambda f: _part(spoken, around.before, f))
    rates(spoken, "pro", rule)
    issue = r"(?<![\w.,/:–-])(\d{1,2})/((?:19|20)\d\d)(?![\w/]|[.,]\d)"
    rule("/", issue, lambda f: f"{spoken.cardinal(str(int(f[1])))} {spoken.year(f[2])}")
    pressure = r"(?<![\w.,/:–-])(\d{2,3})/(\d{2,3})(?![\w/]|[.,]\d)"

    @rule("/", pressure)
    def over(found: re.Match[str]) -> str | None:
        sure = around.word_before(found) == "blutdruck" or around.word_after(found) == "mmHg"
        return f"{spoken.cardinal(found[1])} zu {spoken.cardinal(found[2])}" if sure else None

    beats = {"4": "Vierteltakt", "8": "Achteltakt"}
    rule("/", r"(?<![\w.,/])(\d\d?)/([48])-?[Tt]akt", lambda f: f"{spoken.cardinal(f[1])} {beats[f[2]]}")
    rule("-", r"(?<![\w.,])1(?=-[A-ZÄÖÜ]\w{1,40}-)", lambda f: "ein")
    signs = {"€": "Euro", "$": "Dollar", "£": "Pfund"}
    rule("-", r"(?<=\d)-([€$£])(?=-[A-ZÄÖÜ])", lambda f: f"-{signs[f[1]]}")
    short_units = ends_of(name for name, forms in spoken.units.items() if name.isalpha() and len(forms) > 1)
    rule("-", rf"(?<=\d)-({short_units})(?=-[A-ZÄÖÜ])", lambda f: f"-{spoken.units[f[1]][0]}")
    rule("x", r"^(\d\d?) x$", lambda f: f"{_one(spoken, f[1])}mal" if around.after[:1].islower() else None)
    few = r"^1 ?[-–] ?(?=(\d{1,2})(?:$| ))"

    @rule("-–", few)
    def from_one(found: re.Match[str]) -> str | None:
        counts = around.after[:1].isupper() or " " in found.string[found.end() :]
        return "ein bis " if counts and around.before not in spoken.words("labels") else None

    @rule("", r"^1$")
    def one(found: re.Match[str]) -> str | None:
        gender, before = spoken.genders.get(around.after.strip("\"'()[].,;:!?")), around.word_before(found)
        if not gender or around.before in spoken.words("labels"):
            return None  # Absatz 1 Satz 2
        if before in spoken.words("dative"):
            is_place = before in ("in", "auf", "vor", "an", "über", "unter", "hinter", "neben")
            if is_place and around.after.strip("\"'()[].,;:!?") not in spoken.words("times"):
                return None
            return {"m": "einem", "f": "einer", "n": "einem"}[gender]
        if gender != "m":
            return {"f": "eine", "n": "ein"}[gender]
        names = not before or around.before[-1] in ".,:;!?(" or before in spoken.words("copulas")
        return "ein" if names else "einen" if before in ("für", "um", "durch", "ohne", "gegen") else keep(found[0])

    unit = r"^1 (Stunde|Minute|Sekunde)$"
    rule("MS", unit, lambda f: f"einer {f[1]}" if around.before.lower() in spoken.words("dative") else None)

    @rule("/½", r"^(?:1/2|½)(?: (Liter|Stunde|Minute|Kilometer|Meter|l|TL|EL))?$")
    def half(found: re.Match[str]) -> str | None:
        noun, before = around.after.strip("\"'()[].,;:!?"), around.word_before(found)
        name = {"l": "Liter", "TL": "Teelöffel", "EL": "Esslöffel"}.get(found[1], found[1])
        gender = spoken.genders.get(name or noun)
        behind = f" {name}" if name else ""
        if gender == "f" and before not in spoken.words("dative") | {"der", "einer"}:
            return f"eine halbe{behind}"
        if gender == "n" and not before:
            return f"ein halbes{behind}"
        names = not before or around.before[-1] in ".,:;!?("
        return f"ein halber{behind}" if gender == "m" and names else None

    sign_rules(spoken, rule)


def _last(spoken: Spoken, rule: Rules) -> None:
    rates = spoken.table("rates")
    rule("il", rf"(?<=(?:illionen|lliarden) )({spoken.unit_names})$", lambda f: spoken.units[f[1]][1])
    per = ends_of(rates)
    rule("/", rf"(?<=[a-z]{{3}})/(\d{{1,4}} )?({per})(?![\w²³])", lambda f: f" pro {f[1] or ''}{rates[f[2]]}")


def _headed(spoken: "Language", rule: Rules) -> None:
    """19. Jahrhundert at the beginning of a line is no item of a list."""
    around = spoken.around
    nouns = spoken.any_of("headed")

    written = rf"^(\d{{1,3}})\.(?= ({nouns})\b)"
    rule(".", written, lambda f: f"{spoken.ordinal(f[1])}{_STRONG[spoken.genders[f[2]]]}" if around.begins else None)


def _ordinals(spoken: "Language", rule: Rules) -> None:
    """The 2. Platz: its article, or its noun, tells its ending."""

    around = spoken.around
    last = ""  # ending of the ordinal before

    def say(found: re.Match[str]) -> str | Kept | None:
        nonlocal last
        noun = (found.string[found.end() :].split() or [around.after])[0].strip("\"'()[].,;:!?“")
        if re.search(r"\d\. (?:und|oder|bis|sowie) $", found.string[: found.start()]):
            return f"{spoken.ordinal(found[1])}{last}"
        end = spoken.end_of_ordinal(found, noun or "?")
        if noun in spoken.words("starters"):  # am 5. Dann: the full stop is the sentence's, too
            return None if end is None else f"{spoken.ordinal(found[1])}{end}."
        last = end or ("n" if noun[:1].islower() else "")
        if around.word_before(found) in ("wurde", "wird", "werde", "wurden"):  # er wurde 2. im Lauf
            of = {"er": "r", "sie": ""}.get(around.earlier.lower())
            return keep(found[0]) if of is None else f"{spoken.ordinal(found[1]).capitalize()}{of}"
        if end is None and noun[:1].islower():
            return f"{spoken.ordinal(found[1])}n" if not around.before[-1:].isdecimal() else None
        if end is None:
            article = around.word_before(found)
            return keep(found[0]) if re.fullmatch("(?:(?:k|m|d|s)?ein|ihr|unser|euer)", article) else None
        return f"{spoken.ordinal(found[1])}{end}"

    @rule(".", r"(?<![\w.,:/])(\d{1,3})\./(\d{1,3})\.(?= \w)")
    def both(found: re.Match[str]) -> str | None:
        noun = (found.string[found.end() :].split() or [around.after])[0].strip("\"'()[].,;:!?“")
        end = spoken.end_of_ordinal(found, noun)
        return None if end is None else f"{spoken.ordinal(found[1])}{end} und {spoken.ordinal(found[2])}{end}"

    rule(".", r"(?<![\w.,:])(\d{1,3})\.(?= \w)", say)

    @rule(".", r"(?<![\w.,:])([1-9]|[12]\d|3[01])\.(?=$|[\"“)])")
    def at_end(found: re.Match[str]) -> str | None:
        if around.after or around.word_before(found) not in ("der", "den", "dem", "am", "vom", "zum", "des"):
            return None
        return f"{spoken.ordinal(found[1])}{spoken.end_of_ordinal(found, '?')}."


def _part(spoken: Spoken, before: str, found: re.Match[str]) -> str | None:
    """1/7, 3/20, 2 1/16."""
    top, bottom = int(found[2]), int(found[3])
    if top >= bottom or gcd(top, bottom) > 1 or not (top == 1 or bottom in (7, 9, 16, 100, 1000)) or before.isupper():
        return None
    said = re.sub("^ein(?=hundert|tausend)", "", spoken.cardinal(found[3]))
    name = "siebtel" if bottom == 7 else said + ("tel" if bottom < 20 else "stel")
    whole = f"{spoken.cardinal(found[1])} " if found[1] else ""
    return f"{whole}{_one(spoken, found[2])} {name.capitalize()}"


def _one(spoken: Spoken, written: str) -> str:
    return re.sub("eins$", "ein", spoken.cardinal(written))


class Language(Spoken):
    first = _first
    last = _last
    headed = _headed

    def __init__(self, code: str):
        super().__init__(code)
        genders = {"m": "masculine", "f": "feminine", "n": "neuter"}
        self.genders = {noun: gender for gender, name in genders.items() for noun in self.words(name)}
        self.openers = OPENERS.union(["Fr.", "§", "§§"], (f"{name}." for name in self.table("abbreviations")))
        self.followers = FOLLOWERS | self.words("unit_nouns")

    def holds(self, word: str, held: str) -> bool:
        return bool(re.search(r"(?<!\d)\d{1,3}\.$", held))

    def years_last(self, rule: Rules) -> None:
        """German says 1989 as nineteen hundreds also where it is no year."""
        rule("", r"(?<![\w.,:/-])(1[1-9]\d\d)(?![\w%]|[.,]\d|[:/-]\d| ?[$€£°])", lambda f: self.year(f[1]))

    def named_months(self, months: str, rule: Rules) -> None:
        @rule(".", rf"(?<!\d)(\d\d?)\. ({months})\b(?: (\d{{4}})(?!\d))?")
        def day(found: re.Match[str]) -> str:
            year = f" {self.year(found[3])}" if found[3] else ""
            return f"{self.ordinal(found[1])}{self.end_of_ordinal(found)} {found[2]}{year}"

    def ordinals(self, rule: Rules) -> None:
        rule("efm", r"(?<![\d.,])(\d+)(er|fach\w*|mal)\b", lambda f: self.cardinal(f[1]) + f[2])
        _ordinals(self, rule)

    def king(self, number: str, is_queen: bool) -> str:
        said = self.ordinal(number)
        return f"{'die' if is_queen else 'der'} {said[0].upper()}{said[1:]}"

    def with_part(self, whole: str, part: str, is_half: bool) -> str:
        if is_half:
            return f"{self.before_noun(self.cardinal(whole), whole, 'm')}einhalb"
        return super().with_part(whole, part, is_half)

    def dated(self, found: re.Match[str], year: str, month: int, day: str) -> str:
        return self.on_date(year, month, day, self.end_of_ordinal(found) or "")

    def on_date(self, year: str, month: int, day: str, end: str = "n") -> str:
        """`end`: what the ordinal ends with."""
        return f"{self.ordinal(day)}{end} {self.months[month - 1]}" + (f" {self.year(year)}" if year else "")

    def end_of_ordinal(self, found: re.Match[str], noun: str = "") -> str | None:
        """What an ordinal ends with behind "-e": "", "n", "r" or "s". None: the words around do not say. `noun`: the
        word behind, or empty for a day of a month."""
        ahead = found.string[: found.start()].split()
        before, earlier = ([self.around.earlier, self.around.before, *ahead])[-1:-3:-1]
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
            if gender and low in self.words("dative"):  # in zweiter Auflage
                return "r" if gender == "f" else "m"
            if low == "als" and noun.endswith("er"):
                return "r"
            alone = before[-1:] in ",:(" or re.fullmatch("(?:(?:k|m|d|s)?ein|ihr|unser|euer|als)", low)
            return _STRONG[gender] if gender and alone else None
        is_named = before.endswith(",") and earlier.lower() in ("am", "vom", "ab", "bis", "seit", "den", "dem", "zum")
        return "n" if is_named else "r"
