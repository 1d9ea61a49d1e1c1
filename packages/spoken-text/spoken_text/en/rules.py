"""What only English writes: abbreviations before numbers, feet and inches, sizes, rates, names of models."""

import re
from math import gcd

from spoken_text.european import number_of
from spoken_text.germanic import Germanic
from spoken_text.rule import DASH, DAY, MINUTE, MONTH, Found, Rules, ends_of, initials, keep

_DAY = rf"{DAY}(?:st|nd|rd|th)?"


class Language(Germanic):
    def __init__(self, code: str):
        super().__init__(code)
        self.short_months = self.any_of("short_months")
        self.full_months = {month[:3]: month for month in self.months}

    def king(self, number: str, is_queen: bool) -> str:
        return f"the {self.ordinal(number)}"

    def on_date(self, year: str, month: int, day: str) -> str:
        return f"{self.months[month - 1]} {self.ordinal(day)}" + (f", {self.year(year)}" if year else "")

    def at_time(self, hour: str, minute: str, half: str = "") -> str:
        hours, minutes, half = self.whole(int(hour)), self.whole(int(minute)), f" {half.upper()}M" if half else ""
        if int(minute):
            return f"{hours} {'oh ' if int(minute) < 10 else ''}{minutes}{half}"
        return f"{hours}{half}" if half else f"{hours} o'clock" if int(hour) <= 12 else f"{hours} hundred hours"

    def is_counted(self, found: Found) -> bool:
        after = found.after
        return after in self.words("no_year") or (
            after.endswith("s") and after.islower() and after not in self.words("year_verbs")
        )

    def nth_part(self, top: int, bottom: int) -> str:
        if bottom == 2:
            return self.part(top, bottom) or ""
        end = "s" if top > 1 else ""
        return f"{self.cardinal(str(top))} {self.ordinal(str(bottom)).removeprefix('one ')}{end}"

    def is_roman(self, word: str) -> bool:
        return len(word) > 1 and number_of(word.removesuffix("th")) > 0

    def begins(self, word: str) -> bool:
        return word.rstrip(",;:!?)") in self.words("streets")

    def holds(self, word: str, held: str) -> bool:
        if (
            word.startswith("deg")
            and held[-1].isdecimal()
            or word.rstrip(".,;") in ("C", "F")
            and held.startswith("deg")
        ):
            return True
        if held.lower() in ("a.m.", "p.m.", "sq."):
            return word in ("–", "-", "ft", "mi", "km")
        return held[-1] == "," and bool(re.fullmatch(r"\d{4}", word))

    def _times(self, written: str) -> str:
        return "once" if written == "1" else f"{self.said(written)} times"

    def pairs(self, written: str) -> str:
        """Four digits as a year is said: forty ninety, ten eighty."""
        return self.year(written) if written[0] != "0" else self.digits(written)

    def century_of(self, year: str) -> str:
        """A year of two digits with all four."""
        return year if len(year) == 4 else ("20" if year < "40" else "19") + year

    def is_before_noun(self, found: Found) -> bool:
        """Is the word behind the phrase a noun, such as in "a 5 km run"?"""
        after = found.around.after.rstrip(".,;:!?)")
        return after.isalpha() and after.islower() and after not in self.words("no_noun")

    # ---------------------------------------------------------------- what no shared rule may take apart

    def first(self, rule: Rules) -> None:
        number = self.pattern
        century = r"^([IVXL]{2,8})(?:th)?$"
        centuries = ("century", "centuries", "Century")
        rule("IVXL", century, lambda f: self.ordinal(str(number_of(f[1]))) if f.after in centuries else None)
        self._streets(rule)
        self._abbreviations(rule)
        feet = r"(?<![\w.,])([2-8])(?:['’′](\d|1[01])(?:[\"”″]|''|(?![\w.,'’/]|[.,]\d))|['’′] (\d|1[01])[\"”″])(?!\w)"
        rule("'’′", feet, lambda f: f"{self.cardinal(f[1])} foot {self.cardinal(f[2] or f[3])}")

        @rule(",", r"^([1-9]|[12]\d|3[01]),((?:1[5-9]|20)\d\d)(?![\w.,]\d)")
        def glued(found: Found) -> str | None:
            """August 11,2000"""
            is_date = found.around.before in self.months
            return f"{self.ordinal(found[1])}, {self.year(found[2])}" if is_date else None

        self._slashes(rule)
        rule("%", rf"(?<!\S)%({number})(?![\w%])", lambda f: f"{f[1]}%")
        self._periods(rule)
        self._dates(rule)
        large = r"(?<![\w.,-])(\d{1,3}(?:,\d{3})+|\d{7,12}|0)(?:st|nd|rd|th)\b"
        rule("nrst", large, lambda f: "zeroth" if f[1] == "0" else self.ordinal(f[1].replace(",", "")))
        self._digits(rule)
        rule("k", r"(?<![\w.,])401\(?k\)?(?!\w)", lambda f: "four oh one k")
        verse = r"(?<![\d:.,/-])(\d{1,3}):(\d{1,3})[-–](\d{1,3})(?![\d:]|[.,]\d|/)"
        rule(":", verse, lambda f: f"{self.cardinal(f[1])} {self.cardinal(f[2])} to {self.cardinal(f[3])}")
        free = r"(?<![\w-])1-(8\d\d|900)-([A-Z][A-Z-]{1,12}[A-Z])(?![\w-])"
        rule("-", free, lambda f: f"one, {self.cardinal(f[1]) if f[1][1:] == '00' else self.digits(f[1])}, {f[2]}")
        self._models(rule)
        rule("mn", r"\b(noon|midnight)[-–](?=\d)", lambda f: f"{f[1]} to ")
        rule("m", r"(?<=\d)( ?[ap]\.?m\.?) ?[-–] ?(noon|midnight)\b", lambda f: f"{f[1]} to {f[2]}")

        @rule("Kk", r"(?<![\w.,-])(\d{1,2})[kK](?!\w)")
        def race(found: Found) -> str | None:
            before = found.around.before.lower() in "ran run running a his her my our".split()
            return f"{self.cardinal(found[1])} K" if before or found.after in self.words("races") else None

        times = rf"(?<![\w.,$€£-])({number})x(?![\w/*+=-])"
        rule("x", times, lambda f: f"{self._times(f[1])}" if f.after in self.words("than") else None)
        rule("d", r"(?<=\d) ?deg(?:rees)?\.? ?([CF])\b\.?(?=.|($))", lambda f: f" °{f[1]}" + f.stop(f[0]))
        sound, sounds = rf"(?<![\w.,-])({number})k(?!\w)", self.words("sounds")
        rule("k", sound, lambda f: f"{self.said(f[1])} k" if f.after.lower() in sounds else None)
        rule("¢", rf"(?<![\w.,-])({number}) ?¢", lambda f: f"{self.said(f[1])} {'cent' if f[1] == '1' else 'cents'}")
        self._units(rule)
        self.coins(r"\.(\d\d) ?", rule)
        self.signs(rule)

    def _streets(self, rule: Rules) -> None:
        """St. is a street behind its name or number, and a saint before a saint's name."""
        roads = {
            "Ave": "Avenue",
            "Blvd": "Boulevard",
            "Rd": "Road",
            "Rd.": "Road",
            "Ct": "Court",
            "Expy": "Expressway",
            "Hwy": "Highway",
        }

        @rule("SABRCEH", r"^(St\.?|Ave|Blvd|Rd\.?|Ct|Expy|Hwy)(?=$|[,;:!?)])")
        def road(found: Found) -> str | None:
            before, after = found.around.before.strip("([\"'“"), found.around.after
            named = before[:1].isupper() or before[:1].isdigit() and before[-1:].isalpha()
            is_saint = after.rstrip(".,;:!?)").removesuffix("'s").removesuffix("’s") in self.words("saints")
            if found[1] not in ("St", "St.") or (
                named and before.lower() not in self.words("no_noun") and not is_saint
            ):
                said = roads.get(found[1], "Street") if named else None
                return said and said + found.stop(found[1])
            return "Saint" if after[:1].isupper() else None

    def _abbreviations(self, rule: Rules) -> None:
        names = ends_of(name for name in self.leads if name[0] not in "§¶")

        @rule(".", rf"^([(\[\"“'‘]?)({names})\. ?(?=[$€£]?\d)")
        def say(found: Found) -> str | None:
            name, start = found[2], not found.around.before or found.around.before[-1] in ".?!:;"
            small = found.around.after[:1].islower()
            if name == "no" and found.around.before.lower() not in self.words("numbered") and (small or start):
                return None
            if name in ("No", "Nos") and start and small:
                return None
            if name in ("c", "ca", "b", "d") and not re.match(r"\d{3,4}(?!\d)", found.rest):
                return None
            said = self.leads[name]
            return f"{found[1]}{said.capitalize() if name[0].isupper() and name[:2] != 'No' else said} "

        rule("§¶", r"(?:^|(?<=[(\[ ]))(§§?|¶) ?(?=\d)", lambda f: f"{self.leads[f[1]]} ")
        day = r"(?:[1-9]|[12]\d|3[01])(?:st|nd|rd|th)?(?![\d:.]\d|\d|%|[-–]\d{3})"
        month = rf"^([(\[\"“]?)((?i:{self.short_months}))\.? (?={day}|(?:1[5-9]|20)\d\d(?!\d))"
        rule("JFMASONDjfasond", month, lambda f: f"{f[1]}{self.full_months[f[2][:3].title()]} ")

    def _slashes(self, rule: Rules) -> None:
        rule("/", r"(?<![\w.,/:–-])([1-9]\d{0,2}(?:\.\d)?)/([1-9]\d{0,2})(?![\w/]|[.,]\d|-\d)", self._slash)
        rule("/", r"(?<![\w.,/:–-])([1-9]/[2-9]|1/10)(?:rds?|ths?)(?!\w)", lambda f: f[1])

        @rule("/", r"(?<![\w.,/:–-])(?:(\d{1,2}) )?([1-9]\d?)/(16|32|64|100)(?![\w/]|[.,]\d|-\d)")
        def part(found: Found) -> str | None:
            top, bottom = int(found[2]), int(found[3])
            if top >= bottom or gcd(top, bottom) > 1:
                return None
            whole = f"{self.cardinal(found[1])} and " if found[1] else ""
            return f"{whole}{self.cardinal(found[2])} {self.table('small_parts')[found[3]]}{'s' if top > 1 else ''}"

        law = r"(?<![\w.,:/–-])(\d{1,4})/(\d{1,4})(?![\w/]|[.,]\d)"
        laws, link = self.words("laws"), f" {self.slash} "
        rule("/", law, lambda f: link.join(map(self.cardinal, (f[1], f[2]))) if f.before in laws else None)
        self.issues(rule)
        ones = r"(?<![\w.,/:–-])1/([2-9]0|1000)(?![\w/]|[.,]\d|-\d)"
        rule("/", ones, lambda f: f"one {self.ordinal(f[1])}".replace("one thousandth", "thousandth"))
        short = r"(?<![\d/.,])(1[0-2]|0?[1-9])/(3[01]|[12]\d|0?[1-9])/(\d\d)(?![\w/]|[.,]\d)"
        rule("/", short, lambda f: self.on_date(self.century_of(f[3]), int(f[1]), f[2]))
        dashed = r"(?<![\w./,-])(1[0-2]|0[1-9])-(3[01]|[12]\d|0[1-9])-(\d\d)(?![\w/-]|[.,]\d)"
        rule("-", dashed, lambda f: self.on_date(self.century_of(f[3]), int(f[1]), f[2]))

    def _slash(self, found: Found) -> str | None:
        """24/7, a date, blood pressure, a step, a rating."""
        if phrase := self.table("phrases").get(found[0]):
            return phrase
        top_said, bottom_said, bottom = self.said(found[1]), self.cardinal(found[2]), int(found[2])
        if found[1].isdecimal() and int(found[1]) + bottom == 100 and bottom % 5 == 0:
            return f"{top_said} {bottom_said}"
        before, after = found.before, found.after
        if "." in found[1]:
            sure = bottom in (5, 10) and float(found[1]) <= bottom
            return f"{top_said} out of {bottom_said}" if sure else keep(found)
        top = int(found[1])
        if 90 <= top <= 250 and 40 <= bottom <= 130 and top > bottom:
            return f"{top_said} over {bottom_said}"
        between = before in ("to", "and", "through") and re.fullmatch(r"\d\d?/\d\d?", found.around.earlier)
        if (before in self.words("before_day") or between) and 1 <= top <= 12:
            return f"{self.months[top - 1]} {self.ordinal(found[2])}" if 13 <= bottom <= 31 else keep(found)
        if top <= 12 < bottom <= 31 and bottom not in (16, 20) and after not in ("of", "inch", "inches", "scale"):
            return f"{self.months[top - 1]} {self.ordinal(found[2])}"
        if before in self.words("steps") and top <= bottom:
            return f"{top_said} of {bottom_said}"
        rated = before in self.words("rated") and top <= bottom
        rated |= bottom == 10 and 1 < top and after.endswith("s") and after.islower()
        if bottom in (5, 10, 100) and top <= bottom and after != "of":
            rated |= after.startswith("star") or top == bottom or gcd(top, bottom) > 1
        return f"{top_said} out of {bottom_said}" if rated else None

    def _many(self, said: str) -> str:
        """sixteens, sixes, twenties"""
        return re.sub("y$", "ie", said) + ("es" if said.endswith("x") else "s")

    def _periods(self, rule: Rules) -> None:
        named = r"(?:(?<=[A-Z])|(?<=[A-Z][-–])|(?<=[A-Za-z]{2}[-–]))(\d{1,3})s\b"
        rule("s", named, lambda f: self._many(self.cardinal(f[1])))  # F-16s
        rule("s", r"(?<![\w.,–-])((?:1[1-9]|20)\d0)s(?=$|[.,;:!?)]*$)", lambda f: self._many(self.year(f[1])))
        jets = r"(?<![\w.,])7([0-8]7)s\b"
        rule("s", jets, lambda f: f"seven {'oh ' * (f[1][0] == '0')}{self._many(self.cardinal(str(int(f[1]))))}")

        rule(
            "-",
            r"(?i:\b(pre|post|mid|early|late))-((?:1[1-9]|20)\d\d)(?![\w/–-])",
            lambda f: f"{f[1]}-{self.year(f[2])}",
        )
        era = r"(?<![\w.,:/-])(\d{1,4}) ?[-–] ?(\d{1,4})(?= (?:B\.?C|BCE))"
        rule("-–", era, lambda f: f"{self.year(f[1])} to {self.year(f[2])}")
        case = r"(?<![\w.,:/-])(\d\d)-(\d{2,5})(?![\w-]|[.,]\d)"
        rule(
            "-",
            case,
            lambda f: f"{self.cardinal(f[1])} {self.digits(f[2])}" if f.before in ("case", "docket") else None,
        )
        euros = r"(?<![\w.,])(\d+),(\d\d?)(?= [Ee]uros?(?!\w))"
        rule(",", euros, lambda f: f"{self.cardinal(f[1])} {self.point} {self.digits(f[2])}")
        opens = r"(?<![\w.,:])(\d\d?)\.([0-5]\d) ?[-–] ?(?=\d\d?(?:[.:]\d\d)? ?[ap]\.?m\b)"
        rule(".", opens, lambda f: f"{self.at_time(f[1], f[2], '')} to ")

        @rule(".", r"(?<![\w.,])(1[3-9]|2[0-3])\.([0-5]\d)(?![\w%]|[.,]\d)")
        def dotted(found: Found) -> str | None:
            """at 23.45"""
            known, after = found.before in ("at", "until", "till"), found.after
            return f"{found[1]}:{found[2]}" if known and (not after or after in self.words("no_noun")) else None

        @rule("-–", r"(?<![\w.,-])9[-–]11(?![\w-]|[.,]\d)")
        def attack(found: Found) -> str | None:
            after = found.after
            is_count = after.isalpha() and after.islower() and after not in self.words("no_noun")
            return "nine eleven" if found.before in ("after", "since") and not is_count else None

        rule("F", r"(?<=FY)(20\d\d)(?!\w)", lambda f: self.year(f[1]))
        self.seasons(rule)
        both = rf"(?<![\w.,:/-])((?:1[1-9]|20)\d0|\d0)s ?{DASH} ?(?=['’]?(?:(?:1[1-9]|20)\d|\d)0s\b)"
        rule("s", both, lambda f: f"{re.sub('y$', 'ie', self.year(f[1]))}s to ")
        rule("-–", r"(?<![\w.,])(\d{1,3}(?:st|nd|rd|th))[-–](?=\d{1,3}(?:st|nd|rd|th)\b)", lambda f: f"{f[1]} to ")
        short = r"(?<![\w'’])['’‘](\d\d)(?![\w'’]|[.,]\d)"
        rule("'‘’", short, lambda f: f"oh {self.cardinal(f[1][1])}" if f[1][0] == "0" else self.cardinal(f[1]))
        week = re.compile(r"(?:Mon|Tue|Tues|Wed|Thu|Thurs|Fri|Sat|Sun)(?:days?)?[.,:]?$")
        opened = r"^(\d|1[0-2])[-–](\d|1[0-2])(?=$|[.,;)](?!\d))"
        rule("-–", opened, lambda f: self.ratio(f) if week.search(f.around.before) else None)

    def _digits(self, rule: Rules) -> None:
        """Codes, thousands of things, decimals without a zero."""

        @rule("", r"(?<![\w.,-])(\d{4,10})(?![\w-]|[.,:/]\d)")
        def one_by_one(found: Found) -> str | None:
            before = found.before.strip(".:#")
            sure = before in self.words("codes") or (before == "number" and len(found[1]) > 5)
            return self.digits(found[1]) if sure or (before == "in" and found.around.earlier == "ending") else None

        watch = r"^([01]\d)00(?= hours)"
        rule("h", watch, lambda f: f"{self.digits(f[1]) if f[1][0] == '0' else self.cardinal(f[1])} hundred")
        many = {"10": "tens", "100": "hundreds", "1000": "thousands", "1,000": "thousands"}
        rule("s", r"^(10|100|1,?000)s$", lambda f: many[f[1]] if f.around.after == "of" else None)
        rule(".", r"(?<![\w.,$€£-])\.(\d{1,5})(?![\d.]|,\d)", lambda f: f"point {self.digits(f[1])}")
        million, counted = rf"^({self.pattern})m$", self.words("counted")
        rule("m", million, lambda f: f"{self.said(f[1])} million" if f.around.after.rstrip(".,;:") in counted else None)

        def side(written: str) -> str:
            return self.pairs(written) if re.fullmatch(r"\d(?!00)\d{3}", written) else self.said(written)

        screen = r"(?<![\w.,-])(\d{3,4})[x×](\d{3,4})(?![\w×]|[.,]\d)"
        rule("x×", screen, lambda f: f"{side(f[1])} by {side(f[2])}")
        rule(".", r"(?<=[\d½¼¾⅓⅔⅛] )(tsp|tbsp|oz|lb)\.$", lambda f: f[1] if f.around.after[:1].islower() else None)

    def _models(self, rule: Rules) -> None:
        """1080p60, i7-9700K, 5800X, but 9700K alone may be a scale; RTX 4090; a ZIP code"""

        @rule("p", r"(?<![\w.,])(2160|1440|1080|720|480|360)p(?=[\d ]|\W|$)(?:(\d\d))?(?!\w)")
        def screen(found: Found) -> str:
            lines, rate = found[1], f" {self.cardinal(found[2])}" if found[2] else ""
            said = self.pairs(lines) if len(lines) == 4 else f"{self.said(lines[0])} {self.said(lines[1:])}"
            return f"{said} p{rate}"

        rule("-", r"(?<=[A-Za-z]\d-)(\d\d[1-9]\d|\d\d00)(?=[A-Z]{1,2}(?!\w))", lambda f: self.pairs(f[1]))
        rule("X", r"(?<![\w.,-])([3-9]\d[05]0)(?=XT?(?!\w))", lambda f: self.pairs(f[1]))
        model, models = r"^([1-9](?!000)\d{3})(?![\w.,:/-]*\w)", self.words("models")
        rule("", model, lambda f: self.pairs(f[1]) if f.around.before in models else None)
        zip_code, states = r"^(\d{5})(?:-(\d{4}))?(?![\w-]|[.,]\d)", self.words("states")
        rule("", zip_code, lambda f: self.dialled(f) if f.around.before.rstrip(",:") in states else None)

    def _units(self, rule: Rules) -> None:
        number = self.pattern
        self.rates(rule)
        long = ends_of(unit for unit in self.units if unit not in ("%", "°", "h", "s"))
        adjective = rf"(?<![\w.,/])({number})-({long})(?![\w²³/.']|-\d)"
        rule("-", adjective, lambda f: f"{self.said(f[1])}-{self.units[f[2]][0]}")

        @rule(initials(self.units), rf"^({number}) ?({self.unit_names})$")
        def size(found: Found) -> str | None:
            """A 5 km run, the 100m final."""
            before, after = found.before, found.around.after.rstrip(".,;:!?)")
            named = before in ("a", "an") or (before == "the" and after in self.words("lengths"))
            sure = self.is_before_noun(found) and (named or after in ("lens", "film"))
            return f"{self.said(found[1])} {self.units[found[2]][0]}" if sure else None

        @rule('"″', rf"^({number})[\"″]$")
        def inches(found: Found) -> str | None:
            sure = self.is_before_noun(found) and found.around.before.lower() in ("a", "an", "the")
            return f"{self.said(found[1])} inch" if sure else None

        @rule("cs", rf"(?<![\w.,-])({number}) (sq|cu)\.? ?(ft|mi|km|m|yd)\.?(?!\w)")
        def spread(found: Found) -> str:
            one = found[1] == "1" or found.after in self.words("homes")
            kind = "square" if found[2] == "sq" else "cubic"
            return f"{self.said(found[1])} {kind} {self.units[found[3]][not one]}"

    # ---------------------------------------------------------------- dates and years

    def _dates(self, rule: Rules) -> None:
        """15-Jan-2024, 15.01.2024. Where both numbers may be the month, they stay."""
        names = "|".join(self.months)

        def say(day: str, month: str, year: str) -> str:
            return f"the {self.ordinal(day)} of {month}, {self.year(self.century_of(year))}"

        @rule("-–", rf"(?<![\w.,:/-]){_DAY} ?[-–] ?{_DAY} ({names}|{self.short_months})\b\.?(?:,? (\d{{4}})(?!\d))?")
        def two(found: Found) -> str | None:
            if int(found[1]) >= int(found[2]):
                return None
            month = self.full_months[found[3][:3]]
            year = f", {self.year(found[4])}" if found[4] else self._stop(found, month)
            return f"the {self.ordinal(found[1])} to the {self.ordinal(found[2])} of {month}{year}"

        @rule("-–", rf"^(?:({names}) )?{_DAY} ?[-–] ?{_DAY}(?:,? (\d{{4}}))?(?=$|[,.;:!?)])")
        def days(found: Found) -> str | None:
            month = found[1] or found.around.before
            if month not in self.months or int(found[2]) >= int(found[3]):
                return None
            year = f", {self.year(found[4])}" if found[4] else ""
            named = f"{found[1]} " if found[1] else ""
            return f"{named}{self.ordinal(found[2])} to {self.ordinal(found[3])}{year}"

        named = rf"(?<![\w.,:/-]){DAY}-({names}|{self.short_months})-(\d{{4}}|\d\d)(?![\w-])"
        rule("-", named, lambda f: say(f[1], self.full_months[f[2][:3]], f[3]))

        @rule("-", rf"(?<![\w.,:/-])({names}|{self.short_months})-{DAY}(?:-(\d{{4}}))?(?![\w-]|[.,]\d)")
        def month_first(found: Found) -> str:
            said = f"{self.full_months[found[1][:3]]} {self.ordinal(found[2])}"
            return said + (f", {self.year(found[3])}" if found[3] else "")

        begins, year = r"(?<![\w.,:/-])", r"\2((?:19|20)\d\d)(?![\w-]|[.,/]\d)"
        late = r"(1[3-9]|2\d|3[01])"  # a day, because there is no such month
        rule("-.", rf"{begins}{late}([.-]){MONTH}{year}", lambda f: say(f[1], self.months[int(f[3]) - 1], f[4]))
        rule("-.", rf"{begins}{MONTH}([.-]){late}{year}", lambda f: say(f[3], self.months[int(f[1]) - 1], f[4]))
        rule("-.", rf"{begins}{MONTH}([.-]){MONTH}{year}", keep)
        rule(".", rf"(?<![\w.,:/-])(1[0-2]|\d)\.{MINUTE} ?([ap])\.?m\b\.?", lambda f: self.at_time(f[1], f[2], f[3]))

    def _stop(self, found: Found, month: str) -> str:
        """The full stop that a match took behind a month: it may be an abbreviation's, the sentence's, or both."""
        return "." if found[0].endswith(f"{month}.") else found.stop(found[0])

    def named_months(self, months: str, rule: Rules) -> None:
        lower = "|".join(name.lower() for name in self.months if name not in ("March", "May"))
        month = rf"((?:{months}|(?i:{self.short_months})|{lower})\b\.?)"
        year = r"(?:,? (\d{4})(?!\d|,\d))?"

        def say(found: Found, name: str, day: str, year: str | None) -> str:
            said = f", {self.year(year)}" if year else ""
            name = self.full_months[name[:3].title()]
            if found[1][0].isalpha():
                return f"{name} {self.ordinal(day)}{said}"
            the = "" if found.before == "the" else "the "
            return f"{the}{self.ordinal(day)} of {name}{said}{self._stop(found, name)}"

        rule("JFMASONDjfmasond", rf"\b{month} {_DAY}(?![\d:]){year}", lambda f: say(f, f[1], f[2], f[3]))
        rule("JFMASONDjfmasond", rf"(?<![\d.,]){_DAY} {month}{year}", lambda f: say(f, f[2], f[1], f[3]))

        @rule("", rf"^{_DAY}(?:,? (\d{{4}}))?(?![\d:])(?!,\d)")
        def alone(found: Found) -> str | None:
            before = found.around.before.rstrip(".,")
            before = before if before in ("may", "march", "mar") else before.title()
            if before not in self.months and before not in self.words("short_months"):
                return None
            return self.ordinal(found[1]) + (f", {self.year(found[2])}" if found[2] else "")

    def years_last(self, rule: Rules) -> None:
        """Four digits that stand as a year does: the 2024 election, from 1914 to 1918."""
        rule("", r"(?<![\w.,:/%-])(1[1-9]\d\d|20[0-4]\d)(?![\w%]|[.,]\d|[:/-]\d| ?[$€£°])", self._bare_year)

    def _bare_year(self, found: Found) -> str | None:
        before, after = found.before, found.after
        raw = (found.head.split() or [found.around.before])[-1]
        if before in ("h1", "h2", "fy"):
            return self.year(found[1])
        many = after.endswith("s") and after.islower() and not after.endswith("'s")
        counts = (many and after not in self.words("singular_s")) or after.lower() in self.words("no_year")
        if counts or after in self.units or after in ("USD", "EUR", "GBP"):
            return None
        named = raw[:1].isupper() and raw[1:].isalpha() and len(raw) > 1 and "1900" <= found[1]
        owner = raw.endswith(("'s", "’s"))
        behind = after[:1].isupper() and after[1:2].islower() and not after.endswith("s")
        cited = "1900" <= found[1] and found.rest[:1] == ")"
        if cited or before in self.words("before_year") and (found[1] >= "1500") or named or owner or behind:
            return self.year(found[1])
        likely = "1500" <= found[1] < "2000" or "2010" <= found[1]
        return self.year(found[1]) if likely and before not in self.words("before_count") else None

    # ---------------------------------------------------------------- once amounts are words

    def last(self, rule: Rules) -> None:
        """Rates, and amounts before a noun."""
        rates = self.table("rates")

        @rule("s", r"\b(dollar|pound|euro)s$")
        def one(found: Found) -> str | None:
            """A $5 bill."""
            is_bill = found.around.after.rstrip(".,;:!?)") in ("bill", "bills", "note", "notes", "coin", "coins")
            noun = self.is_before_noun(found) and found.around.before.lower() in ("a", "an", "another")
            return found[1] if is_bill or noun else None

        names = ends_of(name for name in self.units if len(name) > 1)
        rule("io", rf"(?<=(?:illion|ousand) )({names})$", lambda f: self.units[f[1]][1])
        written = rf"(?<=[a-z]{{3}})/(\d{{1,4}} )?({ends_of(rates)})(?:\.(?=,| [a-z]))?(?![\w²³])"
        rule("/", written, lambda f: f" per {f[1] or ''}{rates[f[2]]}")
