"""What only English writes: abbreviations before numbers, feet and inches, sizes, rates, names of models."""

import re
from math import gcd

from spoken_text.rule import DASH, Around, Rules, ends_of, initials, keep
from spoken_text.signs import FOLLOWERS, OPENERS, SEASON, rates, season
from spoken_text.signs import rules as sign_rules
from spoken_text.spoken import Spoken

_MONTHS = "Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Sep|Oct|Nov|Dec"

_SMALL_PARTS = {16: "sixteenth", 32: "thirty-second", 64: "sixty-fourth", 100: "hundredth"}


def _stop(around: Around, found: re.Match[str], month: str) -> str:
    """The full stop that a match took behind a month: it may be an abbreviation's, the sentence's, or both."""
    if found[0][-1] != ".":
        return ""
    return "." if found[0].endswith(f"{month}.") else around.stop(found, False)


def _pairs(spoken: Spoken, written: str) -> str:
    """Four digits as a year is said: forty ninety, ten eighty."""
    return spoken.year(written) if written[0] != "0" else spoken.digits(written)


def _first(spoken: Spoken, rule: Rules) -> None:
    """What no other rule may take apart."""
    around = spoken.around
    number = spoken.pattern
    _abbreviations(spoken, rule)
    feet = r"(?<![\w.,])([2-8])(?:['’′](\d|1[01])(?:[\"”″]|''|(?![\w.,'’/]|[.,]\d))|['’′] (\d|1[01])[\"”″])(?!\w)"
    rule("'’′", feet, lambda f: f"{spoken.cardinal(f[1])} foot {spoken.cardinal(f[2] or f[3])}")
    _slashes(spoken, rule)
    _periods(spoken, rule)
    _dates(spoken, rule)
    _large(spoken, rule)
    _digits(spoken, rule)
    rule("k", r"(?<![\w.,])401\(?k\)?(?!\w)", lambda f: "four oh one k")
    verse = r"(?<![\d:.,/-])(\d{1,3}):(\d{1,3})[-–](\d{1,3})(?![\d:]|[.,]\d|/)"
    rule(":", verse, lambda f: f"{spoken.cardinal(f[1])} {spoken.cardinal(f[2])} to {spoken.cardinal(f[3])}")
    free = r"(?<![\w-])1-(8\d\d|900)-([A-Z][A-Z-]{1,12}[A-Z])(?![\w-])"
    rule("-", free, lambda f: f"one, {spoken.cardinal(f[1]) if f[1][1:] == '00' else spoken.digits(f[1])}, {f[2]}")
    rule("p", r"(?<![\w.,])(2160|1440|1080|720|480|360)p(?=[\d ]|\W|$)(?:(\d\d))?(?!\w)", lambda f: _screen(spoken, f))
    # i7-9700K, 5800X: but 9700K alone may be a scale
    rule("-", r"(?<=[A-Za-z]\d-)(\d\d[1-9]\d|\d\d00)(?=[A-Z]{1,2}(?!\w))", lambda f: _pairs(spoken, f[1]))
    rule("X", r"(?<![\w.,-])([3-9]\d[05]0)(?=XT?(?!\w))", lambda f: _pairs(spoken, f[1]))
    model, models = r"^([1-9](?!000)\d{3})(?![\w.,:/-]*\w)", spoken.words("models")
    rule("", model, lambda f: _pairs(spoken, f[1]) if around.before in models else None)
    zip_code = r"^(\d{5})(?:-(\d{4}))?(?![\w-]|[.,]\d)"
    rule("", zip_code, lambda f: _zip(spoken, f) if around.before.rstrip(",:") in spoken.words("states") else None)
    rule("mn", r"\b(noon|midnight)[-–](?=\d)", lambda f: f"{f[1]} to ")
    rule("m", r"(?<=\d)( ?[ap]\.?m\.?) ?[-–] ?(noon|midnight)\b", lambda f: f"{f[1]} to {f[2]}")

    @rule("Kk", r"(?<![\w.,-])(\d{1,2})[kK](?!\w)")
    def race(found: re.Match[str]) -> str | None:
        before = around.before.lower() in "ran run running a his her my our".split()
        is_race = before or around.word_after(found) in spoken.words("races")
        return f"{spoken.cardinal(found[1])} K" if is_race else None

    times = rf"(?<![\w.,$€£-])({number})x(?![\w/*+=-])"
    rule("x", times, lambda f: f"{spoken.said(f[1])} times" if around.word_after(f) in spoken.words("than") else None)
    rule("¢", rf"(?<![\w.,-])({number}) ?¢", lambda f: f"{spoken.said(f[1])} {'cent' if f[1] == '1' else 'cents'}")
    _units(spoken, rule)
    coins = r"(?<![\w.,-])(\d{1,6}|\d{1,3}(?:,\d{3})+)\.(\d\d) ?(dollars|euros|pounds|francs)(?!\w)"
    rule(".", coins, lambda f: _coins(spoken, f))
    sign_rules(spoken, rule)


def _last(spoken: Spoken, rule: Rules) -> None:
    """Rates, and amounts before a noun, once they are words."""

    around = spoken.around

    @rule("s", r"\b(dollar|pound|euro)s$")
    def one(found: re.Match[str]) -> str | None:
        """A $5 bill."""
        after = around.after.rstrip(".,;:!?)")
        noun = after.isalpha() and after.islower() and after not in spoken.words("no_noun")
        is_bill = after in ("bill", "bills", "note", "notes", "coin", "coins")
        return found[1] if is_bill or (noun and around.before.lower() in ("a", "an", "another")) else None

    names = ends_of(name for name in spoken.units if len(name) > 1)
    rule("io", rf"(?<=(?:illion|ousand) )({names})$", lambda f: spoken.units[f[1]][1])
    per = ends_of(spoken.table("rates"))
    written = rf"(?<=[a-z]{{3}})/(\d{{1,4}} )?({per})(?:\.(?=,| [a-z]))?(?![\w²³])"
    rule("/", written, lambda f: f" per {f[1] or ''}{spoken.table('rates')[f[2]]}")


def _screen(spoken: Spoken, found: re.Match[str]) -> str:
    rate = f" {spoken.cardinal(found[2])}" if found[2] else ""
    said = _pairs(spoken, found[1]) if len(found[1]) == 4 else f"{spoken.said(found[1][0])} {spoken.said(found[1][1:])}"
    return f"{said} p{rate}"


def _zip(spoken: Spoken, found: re.Match[str]) -> str:
    return ", ".join(spoken.digits(part) for part in found.groups() if part)


def _coins(spoken: Spoken, found: re.Match[str]) -> str | None:
    code = {"dollars": "USD", "euros": "EUR", "pounds": "GBP", "francs": "CHF"}[found[3]]
    return spoken.money(f"{found[1].replace(',', '')}.{found[2]}", code)


def _abbreviations(spoken: Spoken, rule: Rules) -> None:
    around = spoken.around
    names = ends_of(name for name in spoken.table("abbreviations") if name[0] not in "§¶")

    @rule(".", rf"^([(\[\"“'‘]?)({names})\. ?(?=[$€£]?\d)")
    def say(found: re.Match[str]) -> str | None:
        name, start = found[2], not around.before or around.before[-1] in ".?!:;"
        small = around.after[:1].islower()
        if name == "no" and around.before.lower() not in spoken.words("numbered") and (small or start):
            return None
        if name in ("No", "Nos") and start and small:
            return None
        if name in ("c", "ca", "b", "d") and not re.match(r"\d{3,4}(?!\d)", found.string[found.end() :]):
            return None
        said = spoken.table("abbreviations")[name]
        return f"{found[1]}{said.capitalize() if name[0].isupper() and name[:2] != 'No' else said} "

    sections = r"(?:^|(?<=[(\[ ]))(§§?|¶) ?(?=\d)"
    rule("§¶", sections, lambda f: f"{spoken.table('abbreviations')[f[1]]} ")
    full = {name[:3]: name for name in spoken.months}
    day = r"(?:[1-9]|[12]\d|3[01])(?:st|nd|rd|th)?(?![\d:.]\d|\d|%|[-–]\d{3})"
    month = rf"^([(\[\"“]?)({_MONTHS})\.? (?={day}|(?:1[5-9]|20)\d\d(?!\d))"
    rule("JFMASOND", month, lambda f: f"{f[1]}{full[f[2][:3]]} ")


def _slashes(spoken: Spoken, rule: Rules) -> None:
    around = spoken.around

    @rule("/", r"(?<![\w.,/:–-])([1-9]\d{0,2}(?:\.\d)?)/([1-9]\d{0,2})(?![\w/]|[.,]\d|-\d)")
    def say(found: re.Match[str]) -> str | None:
        if phrase := spoken.table("phrases").get(found[0]):
            return phrase
        if found[1].isdecimal() and int(found[1]) + int(found[2]) == 100 and int(found[2]) % 5 == 0:
            return f"{spoken.cardinal(found[1])} {spoken.cardinal(found[2])}"
        before, after, bottom = around.word_before(found), around.word_after(found), int(found[2])
        if "." in found[1]:
            sure = bottom in (5, 10) and float(found[1]) <= bottom
            return f"{spoken.said(found[1])} out of {spoken.cardinal(found[2])}" if sure else keep(found[0])
        top = int(found[1])
        top_said, bottom_said = spoken.cardinal(found[1]), spoken.cardinal(found[2])
        if 90 <= top <= 250 and 40 <= bottom <= 130 and top > bottom:
            return f"{top_said} over {bottom_said}"
        between = before in ("to", "and", "through") and re.fullmatch(r"\d\d?/\d\d?", around.earlier)
        if (before in spoken.words("before_day") or between) and 1 <= top <= 12:
            return f"{spoken.months[top - 1]} {spoken.ordinal(found[2])}" if 13 <= bottom <= 31 else keep(found[0])
        if before in spoken.words("steps") and top <= bottom:
            return f"{top_said} of {bottom_said}"
        rated = before in spoken.words("rated") and top <= bottom
        rated |= bottom == 10 and 1 < top and after.endswith("s") and after.islower()
        if bottom in (5, 10, 100) and top <= bottom and after != "of":
            rated |= after.startswith("star") or top == bottom or gcd(top, bottom) > 1
        return f"{top_said} out of {bottom_said}" if rated else None

    rule("/", r"(?<![\w.,/:–-])([1-9]/[2-9]|1/10)(?:rds?|ths?)(?!\w)", lambda f: f[1])

    @rule("/", r"(?<![\w.,/:–-])(?:(\d{1,2}) )?([1-9]\d?)/(16|32|64|100)(?![\w/]|[.,]\d|-\d)")
    def part(found: re.Match[str]) -> str | None:
        top, bottom = int(found[2]), int(found[3])
        if top >= bottom or gcd(top, bottom) > 1:
            return None
        whole = f"{spoken.cardinal(found[1])} and " if found[1] else ""
        return f"{whole}{spoken.cardinal(found[2])} {_SMALL_PARTS[bottom]}{'s' if top > 1 else ''}"

    issue = r"(?<![\w.,/:–-])(\d{1,2})/((?:19|20)\d\d)(?![\w/]|[.,]\d)"
    rule("/", issue, lambda f: f"{spoken.cardinal(str(int(f[1])))} {spoken.year(f[2])}")
    ones = r"(?<![\w.,/:–-])1/([2-9]0|1000)(?![\w/]|[.,]\d|-\d)"
    rule("/", ones, lambda f: f"one {spoken.ordinal(f[1])}".replace("one thousandth", "thousandth"))
    short = r"(?<![\d/.,])(1[0-2]|0?[1-9])/(3[01]|[12]\d|0?[1-9])/(\d\d)(?![\w/]|[.,]\d)"
    rule("/", short, lambda f: spoken.on_date(f"{'20' if f[3] < '40' else '19'}{f[3]}", int(f[1]), f[2]))


def _periods(spoken: Spoken, rule: Rules) -> None:
    around = spoken.around
    rule("F", r"(?<=FY)(20\d\d)(?!\w)", lambda f: spoken.year(f[1]))
    rule("/", SEASON, lambda f: season(spoken, f))
    both = rf"(?<![\w.,:/-])((?:1[1-9]|20)\d0|\d0)s ?{DASH} ?(?=['’]?(?:(?:1[1-9]|20)\d|\d)0s\b)"
    rule("s", both, lambda f: f"{re.sub('y$', 'ie', spoken.year(f[1]))}s to ")
    rule("-–", r"(?<![\w.,])(\d{1,3}(?:st|nd|rd|th))[-–](?=\d{1,3}(?:st|nd|rd|th)\b)", lambda f: f"{f[1]} to ")
    short = r"(?<![\w'’])['’‘](\d\d)(?![\w'’]|[.,]\d)"
    rule("'‘’", short, lambda f: f"oh {spoken.cardinal(f[1][1])}" if f[1][0] == "0" else spoken.cardinal(f[1]))
    week = re.compile(r"(?:Mon|Tue|Tues|Wed|Thu|Thurs|Fri|Sat|Sun)(?:days?)?[.,:]?$")
    hours = r"^(\d|1[0-2])[-–](\d|1[0-2])(?=$|[.,;)](?!\d))"

    @rule("-–", hours)
    def opened(found: re.Match[str]) -> str | None:
        return f"{spoken.cardinal(found[1])} to {spoken.cardinal(found[2])}" if week.search(around.before) else None


def _dates(spoken: Spoken, rule: Rules) -> None:
    """15-Jan-2024, 15.01.2024. Where both numbers may be the month, they stay."""
    around = spoken.around
    names = "|".join(spoken.months)
    named = rf"(?<![\w.,:/-])(\d\d?)-({names}|{_MONTHS})-(\d{{4}}|\d\d)(?![\w-])"

    def say(day: str, month: int, year: str) -> str | None:
        if not 1 <= int(day) <= 31:
            return None
        year = year if len(year) == 4 else ("20" if year < "40" else "19") + year
        return f"the {spoken.ordinal(day)} of {spoken.months[month - 1]}, {spoken.year(year)}"

    day = r"(\d\d?)(?:st|nd|rd|th)?"
    span = rf"(?<![\w.,:/-]){day} ?[-–] ?{day} ({names}|{_MONTHS})\b\.?(?:,? (\d{{4}})(?!\d))?"
    full = {month[:3]: month for month in spoken.months}

    @rule("-–", span)
    def two(found: re.Match[str]) -> str | None:
        if not 1 <= int(found[1]) < int(found[2]) <= 31:
            return None
        month = full[found[3][:3]]
        year = f", {spoken.year(found[4])}" if found[4] else _stop(around, found, month)
        return f"the {spoken.ordinal(found[1])} to the {spoken.ordinal(found[2])} of {month}{year}"

    behind = rf"^(?:({names}) )?{day} ?[-–] ?{day}(?:,? (\d{{4}}))?(?=$|[,.;:!?)])"

    @rule("-–", behind)
    def days(found: re.Match[str]) -> str | None:
        month = found[1] or around.before
        if month not in spoken.months or not 1 <= int(found[2]) < int(found[3]) <= 31:
            return None
        year = f", {spoken.year(found[4])}" if found[4] else ""
        named = f"{found[1]} " if found[1] else ""
        return f"{named}{spoken.ordinal(found[2])} to {spoken.ordinal(found[3])}{year}"

    short = [month[:3] for month in spoken.months]
    rule("-", named, lambda f: say(f[1], short.index(f[2][:3]) + 1, f[3]))

    @rule("-.", r"(?<![\w.,:/-])(\d\d?)([.-])(\d\d?)\2((?:19|20)\d\d)(?![\w-]|[.,/]\d)")
    def figures(found: re.Match[str]) -> str | None:
        first, second, year = int(found[1]), int(found[3]), found[4]
        if 12 < first <= 31 and 1 <= second <= 12:
            return say(found[1], second, year)
        if 12 < second <= 31 and 1 <= first <= 12:
            return say(found[3], first, year)
        return keep(found[0]) if 1 <= first <= 12 and 1 <= second <= 12 else None

    clock = r"(?<![\w.,:/-])(1[0-2]|\d)\.([0-5]\d) ?([ap])\.?m\b\.?"
    rule(".", clock, lambda f: spoken.at_time(f[1], f[2], f"{f[3].upper()}M"))


def _large(spoken: Spoken, rule: Rules) -> None:
    large = r"(?<![\w.,-])(\d{1,3}(?:,\d{3})+|\d{7,12}|0)(?:st|nd|rd|th)\b"
    rule("nrst", large, lambda f: "zeroth" if f[1] == "0" else spoken.ordinal(f[1].replace(",", "")))


def _digits(spoken: Spoken, rule: Rules) -> None:
    """Codes, thousands of things, decimals without a zero."""
    around = spoken.around
    codes = frozenset("extension ext code passcode otp".split())

    @rule("", r"(?<![\w.,-])(\d{4,10})(?![\w-]|[.,:/]\d)")
    def one_by_one(found: re.Match[str]) -> str | None:
        before = around.word_before(found).strip(".:#")
        sure = before in codes or (before == "number" and len(found[1]) > 5)
        sure |= before == "in" and around.earlier == "ending"
        return spoken.digits(found[1]) if sure else None

    watch = r"^([01]\d)00(?= hours)"

    @rule("h", watch)
    def military(found: re.Match[str]) -> str:
        hour = f"zero {spoken.cardinal(found[1][1])}" if found[1][0] == "0" else spoken.cardinal(found[1])
        return f"{hour} hundred"

    many = {"10": "tens", "100": "hundreds", "1000": "thousands", "1,000": "thousands"}
    rule("s", r"^(10|100|1,?000)s$", lambda f: many[f[1]] if around.after == "of" else None)
    rule(".", r"(?<![\w.,$€£-])\.(\d{1,5})(?![\d.]|,\d)", lambda f: f"point {spoken.digits(f[1])}")
    million, counted = rf"^({spoken.pattern})m$", spoken.words("counted")
    rule("m", million, lambda f: f"{spoken.said(f[1])} million" if around.after.rstrip(".,;:") in counted else None)
    screen = r"(?<![\w.,-])(\d{3,4})[x×](\d{3,4})(?![\w×]|[.,]\d)"

    def side(written: str) -> str:
        return _pairs(spoken, written) if re.fullmatch(r"\d(?!00)\d{3}", written) else spoken.said(written)

    rule("x×", screen, lambda f: f"{side(f[1])} by {side(f[2])}")
    rule(".", r"(?<=[\d½¼¾⅓⅔⅛] )(tsp|tbsp|oz|lb)\.$", lambda f: f[1] if around.after[:1].islower() else None)


def _units(spoken: Spoken, rule: Rules) -> None:
    around = spoken.around
    number = spoken.pattern
    names = spoken.unit_names
    rates(spoken, "per", rule)
    long = ends_of(unit for unit in spoken.units if unit not in ("%", "°", "h", "s"))
    adjective = rf"(?<![\w.,/])({number})-({long})(?![\w²³/.']|-\d)"
    rule("-", adjective, lambda f: f"{spoken.said(f[1])}-{spoken.units[f[2]][0]}")

    @rule(initials(spoken.units), rf"^({number}) ?({names})$")
    def size(found: re.Match[str]) -> str | None:
        """A 5 km run, the 100m final."""
        before, after = around.word_before(found), around.after.rstrip(".,;:!?)")
        if not after.isalpha() or not after.islower() or after in spoken.words("no_noun"):
            return None
        if before in ("a", "an") or (before == "the" and after in spoken.words("lengths")) or after in ("lens", "film"):
            return f"{spoken.said(found[1])} {spoken.units[found[2]][0]}"
        return None

    @rule('"″', rf"^({number})[\"″]$")
    def inches(found: re.Match[str]) -> str | None:
        after = around.after.rstrip(".,;:!?)")
        noun = after.isalpha() and after.islower() and after not in spoken.words("no_noun")
        return f"{spoken.said(found[1])} inch" if noun and around.before.lower() in ("a", "an", "the") else None

    area = rf"(?<![\w.,-])({number}) (sq|cu)\.? ?(ft|mi|km|m|yd)\.?(?!\w)"
    kinds = {"sq": "square", "cu": "cubic"}
    homes = frozenset("flat apartment house home condo studio loft lot office".split())

    @rule("cs", area)
    def spread(found: re.Match[str]) -> str:
        one = found[1] == "1" or around.word_after(found) in homes
        return f"{spoken.said(found[1])} {kinds[found[2]]} {spoken.units[found[3]][not one]}"


def _years(spoken: Spoken, rule: Rules) -> None:
    """Four digits that stand as a year does: the 2024 election, from 1914 to 1918."""

    around = spoken.around

    @rule("", r"(?<![\w.,:/%-])(1[1-9]\d\d|20[0-4]\d)(?![\w%]|[.,]\d|[:/-]\d| ?[$€£°])")
    def say(found: re.Match[str]) -> str | None:
        before, after = around.word_before(found), around.word_after(found)
        raw = (found.string[: found.start()].split() or [around.before])[-1]
        many = after.endswith("s") and after.islower() and not after.endswith("'s")
        many = many and after not in spoken.words("singular_s")
        if before in ("h1", "h2", "fy"):
            return spoken.year(found[1])
        if many or after.lower() in spoken.words("no_year") or after in spoken.units or after in ("USD", "EUR", "GBP"):
            return None
        named = raw[:1].isupper() and raw[1:].isalpha() and len(raw) > 1 and "1900" <= found[1]
        owner = raw.endswith(("'s", "’s"))
        behind = after[:1].isupper() and after[1:2].islower() and not after.endswith("s")
        cited = "1900" <= found[1] and found.string[found.end() :][:1] == ")"
        if cited or before in spoken.words("before_year") and (found[1] >= "1500") or named or owner or behind:
            return spoken.year(found[1])
        likely = "1500" <= found[1] < "2000" or "2010" <= found[1]
        return spoken.year(found[1]) if likely and before not in spoken.words("before_count") else None


class Language(Spoken):
    first = _first
    last = _last
    years_last = _years

    def __init__(self, code: str):
        super().__init__(code)
        months = [*_MONTHS.split("|"), *(f"{month}." for month in _MONTHS.split("|"))]
        names = (name if name[0] in "§¶" else f"{name}." for name in self.table("abbreviations"))
        self.openers = OPENERS.union(names, months)
        self.followers = FOLLOWERS | self.words("unit_nouns")

    def many(self, sign: str) -> str:
        said = super().many(sign)
        return "euros" if said == "euro" else said

    def king(self, number: str, is_queen: bool) -> str:
        return f"the {self.ordinal(number)}"

    def on_date(self, year: str, month: int, day: str, end: str = "") -> str:
        return f"{self.months[month - 1]} {self.ordinal(day)}" + (f", {self.year(year)}" if year else "")

    def at_time(self, hour: str, minute: str, half: str = "") -> str:
        hours, minutes = self.cardinal(str(int(hour))), self.cardinal(str(int(minute)))
        if int(minute):
            return f"{hours} {'oh ' if int(minute) < 10 else ''}{minutes} {half}".strip()
        return f"{hours} {half}" if half else f"{hours} o'clock" if int(hour) <= 12 else f"{hours} hundred hours"

    def holds(self, word: str, held: str) -> bool:
        if held.lower() in ("a.m.", "p.m.", "sq."):
            return word in ("–", "-", "ft", "mi", "km")
        return held[-1] == "," and bool(re.fullmatch(r"\d{4}", word))

    def named_months(self, months: str, rule: Rules) -> None:
        lower = "|".join(name.lower() for name in self.months if name not in ("March", "May"))
        month = rf"((?:{months}|{_MONTHS}|{lower})\b\.?)"
        year, ends = r"(?:,? (\d{4})(?!\d|,\d))?", r"(?:st|nd|rd|th)?"

        def say(found: re.Match[str], name: str, day: str, year: str | None) -> str | None:
            if not 1 <= int(day) <= 31:
                return None
            said = f", {self.year(year)}" if year else ""
            name = next(known for known in self.months if known.startswith(name[:3].title()))
            if found[1][0].isalpha():
                return f"{name} {self.ordinal(day)}{said}"
            the = "" if self.around.word_before(found) == "the" else "the "
            return f"{the}{self.ordinal(day)} of {name}{said}{_stop(self.around, found, name)}"

        rule("JFMASONDjfmasond", rf"\b{month} (\d\d?){ends}(?![\d:]){year}", lambda f: say(f, f[1], f[2], f[3]))
        rule("JFMASONDjfmasond", rf"(?<![\d.,])(\d\d?){ends} {month}{year}", lambda f: say(f, f[2], f[1], f[3]))

        @rule("", r"^(\d\d?)(?:st|nd|rd|th)?(?:,? (\d{4}))?(?![\d:])(?!,\d)")
        def alone(found: re.Match[str]) -> str | None:
            before = self.around.before.rstrip(".,")
            before = before if before in ("may", "march", "mar") else before.title()
            if before not in {*self.months, *_MONTHS.split("|")} or not 1 <= int(found[1]) <= 31:
                return None
            return self.ordinal(found[1]) + (f", {self.year(found[2])}" if found[2] else "")
