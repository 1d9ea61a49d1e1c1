"""What Chinese, Japanese and Korean share: ranges with a unit on both sides, dates in digits, maths, coordinates."""

import re
from collections.abc import Callable

from spoken_text.european import number_of
from spoken_text.rule import DASHES, HOUR, MINUTE, SUPERSCRIPTS, Found, Kept, Rules, keep
from spoken_text.spoken import Spoken

_DASHES = "[-–—~～〜－−∼]"
_AT = re.compile(
    "(?:于|在|时间|上午|下午|晚上?|凌晨|早上|中午|午前|午後|時刻は?|오전|오후|밤|낮|새벽|저녁|아침)[:：]? ?$"
)
_DATED = re.compile(r"(?:今天|明天|昨天|日期|在|于|从|오늘|내일|날짜)(?:是|은|는|[:：])? ?$")
_VERSIONS = ("版", "版本", "バージョン", "버전", "윈도우")
_MEASURES = tuple("度도°%元円원层層階층分点점")


class EastAsian(Spoken):
    measures: list[str]  # the text before a fraction
    behind_fraction: str  # a character behind one
    behind_day: str  # a character behind a day such as 3/5
    dated_zeros: str  # characters before which the zero of 05 is not said
    weekdays: str
    verbs: str  # characters before a number below zero

    def on_date(self, year: str, month: int, day: str) -> str:
        years, months, days = self._data["date_marks"]
        said = f"{self.year(year)}{years}" if year else ""
        return f"{said}{self.cardinal(str(month))}{months}{self.cardinal(str(int(day)))}{days}"

    def at_time(self, hour: str, minute: str, half: str = "") -> str:
        hours, minutes, _ = self._data["clock_marks"]
        value = str(int(hour))
        said = f"{self.table('hours').get(value) or self.cardinal(value)}{hours}"
        if not int(minute):
            return said.strip()
        zero = self.zero_of if int(minute) < 10 else ""
        return f"{said}{zero}{self.cardinal(str(int(minute)))}{minutes}"

    def to_next_year(self, found: Found, say: Callable[[str], str]) -> str | None:
        """1959-60: a year and the last two figures of the next one."""
        follows = int(found[2]) == (int(found[1]) + 1) % 100
        return f"{say(found[1])}{self.to}{say(found[2])}" if follows else None

    def exact_time(self, hour: str, minute: str, second: str) -> str:
        """A time with its seconds."""
        _, minutes, seconds = self._data["clock_marks"]
        said = self.at_time(hour, minute)
        if second == "00":
            return said
        if minute == "00":
            said += f"{self.blank}{self.cardinal('0')}{minutes.strip()}"
        zero = self.zero_of if second[0] == "0" else ""
        return f"{said}{self.blank}{zero}{self.cardinal(str(int(second)))}{seconds}"

    own = Spoken.no_rules  # what only one of these languages writes

    def first(self, rule: Rules) -> None:
        if self.following:
            rule(" ", rf"(?<=\d) (?=[{''.join(sorted(self.following))}])", lambda f: "")
        self._names(rule)
        self._dates(rule)
        self._ranges(rule)
        self._amounts(rule)
        self.own(rule)
        self._times(rule)
        self._hyphens(rule)
        self._days(rule)
        self._maths(rule)

    def is_roman(self, word: str) -> bool:
        return number_of(word) > 0

    def _names(self, rule: Rules) -> None:
        rule("0", r"(?<=제)0+(?=[1-9])|^0+(?=[1-9])", lambda f: "" if f.head or f.ahead.endswith("第") else None)

        @rule("IVX", r"^([IVX]{1,8})$|(?<=제)([IVX]{1,8})(?=[장부권편절])")
        def chapter(found: Found) -> str | None:
            value = number_of(found[0])
            return self.cardinal(str(value)) if value and (found[2] or found.ahead.endswith("第")) else None

        rule("/", r"(?<![\w./])24/7(?![\w/])", keep)
        rule("nrst", r"(?<![\w.,])\d+(?:st|nd|rd|th)(?![A-Za-z])", keep)
        rule(".x", r"(?<![\w])[Nn][Oo]\.\d+(?![\d.])|(?<!\w)0x[0-9A-Fa-f]{1,16}(?!\w)", keep)
        rule("/", r"(?<![\w./])\d\d/\d\d/\d\d(?![\w/])", keep)
        point = f"{self.blank}{self.point}{self.blank}"
        dotted = r"(?<=[A-Za-z]\.)\d{1,3}(?:\.\d{1,3}){1,3}(?![\w.])"  # Ver.2.0
        rule(".", dotted, lambda f: point.join(map(self.cardinal, f[0].split("."))))
        # The parts of a number with letters, such as HT2024-0315.
        parts = r"(?<=[A-Za-z])-?\d{2,20}(?:-\d{1,20}){1,9}(?![\w.-])"
        rule("-", parts, lambda f: Kept("-".join(map(self.digits, f[0].lstrip("-").split("-")))))
        rule("'’′", r"(?<![\w.,])\d+['’′]\d+(?:[\"”″]|['’′]{2})", keep)

    def _amounts(self, rule: Rules) -> None:
        written = r"(?<![\w.,/+-])(?<![\d)] )\d{2,6}-\d{2,6}-\d{2,8}(?![\w.-])"
        rule("-", written, lambda f: self.dialled(f) if sum(map(str.isdecimal, f[0])) >= 9 else None)

        written = rf"(?<![\w.,/-])({self.pattern}) ?([万亿億만억천]) ?({self.unit_names})(?![A-Za-z0-9²³/])"

        @rule("万亿億만억천", written)
        def scaled(found: Found) -> str | None:
            form, two = self.units[found[3]][0], found[1] == "2"
            said = f"{self.before_scale('2') if two else self.said(found[1])}{found[2]}"
            return form.format(said) if "{}" in form else f"{said}{self.blank}{form}"

        @rule("°", r"(?<![\w.,])(\d{1,3}) ?° ?(\d{1,2}) ?['’′](?: ?(\d{1,2}(?:\.\d{1,3})?) ?[\"”″])?")
        def angle(found: Found) -> str:
            degrees, minutes, seconds = self._data["angle_marks"]
            said = f"{self.cardinal(found[1])}{degrees}{self.cardinal(str(int(found[2])))}{minutes}"
            return (said + (self.said(found[3].lstrip("0") or "0") + seconds if found[3] else "")).strip()

        halves = self._data["am_pm"]
        clock = rf"(?<![\w:.,-])(0?[1-9]|1[0-2])(?:[:：]{MINUTE})? ?([AaPp])(?:\.[Mm]\.|[Mm])(?![A-Za-z])"
        rule(".Mm", clock, lambda f: f"{halves[f[3] in 'pP']}{self.at_time(f[1], f[2] or '0')}")
        exact = rf"(?<![\w:.,-])(0?[1-9]|1[0-2])[:：]{MINUTE}[:：]{MINUTE} ?([AaPp])(?:\.[Mm]\.|[Mm])(?![A-Za-z])"
        rule(":：", exact, lambda f: f"{halves[f[4] in 'pP']}{self.exact_time(f[1], f[2], f[3])}")

    def _times(self, rule: Rules) -> None:
        """With two digits of hours 14:30:05 is a time of day, with one it lasts. 78:96 is a score."""

        @rule(":：", rf"(?<![\w.,:/-]){HOUR}([:：]){MINUTE}\2{MINUTE}(?![\w:/]|[.,]\d)")
        def clock(found: Found) -> str | None:
            hour, minute, second = found[1], found[3], found[4]
            if len(hour) == 1 and not _AT.search(found.ahead):
                return None
            return self.exact_time(hour, minute, second)

        score = r"(?<![\w.,:：/-])([1-9]\d{0,2})[:：]([1-9]\d)(?![\w:：/]|-\d|[.,]\d)"
        rule(":：", score, lambda f: self.ratio(f) if int(f[1]) > 24 or int(f[2]) > 59 or "比分" in f.ahead else None)

    def _hyphens(self, rule: Rules) -> None:
        """嫦娥-5 is no number below zero."""

        @rule("-−", r"(?<![\w.,])[-−]([1-9]\d{0,3})(?![\w.,/-])")
        def hyphen(found: Found) -> str | None:
            left, right = found.ahead[-1:], found.behind.lstrip()
            named = left.isalpha() and not left.isascii() and left not in self.verbs and not right.startswith(_MEASURES)
            return Kept(f"-{self.cardinal(found[1])}") if named else None

    def is_small(self, top: int, bottom: int) -> bool:
        """Does the fraction look like one without a word beside it?"""
        return top == 1 and bottom in (2, 3, 4) or (top, bottom) in ((2, 3), (3, 4))

    def _days(self, rule: Rules) -> None:
        """3/5 is a fraction or a day. Where nothing tells, it stays."""
        measured = re.compile(rf"(?:{'|'.join(self.measures)})(?:{self.blank})?$")

        @rule("/", r"(?<![\w.,/:–-])(?<!\d )([-−])?([1-9]\d{0,2})/([1-9]\d{0,3})(?![A-Za-z0-9_/]|[.,]\d|-\d)")
        def say(found: Found) -> str | None:
            top, bottom, minus = int(found[2]), int(found[3]), self.minus if found[1] else ""
            left, right = found.ahead, found.behind.lstrip()[:1]
            is_day = top <= 12 and 0 < bottom <= 31 and not minus
            marked = (bottom > 10 or top >= bottom) and right and right in self.behind_day
            of_whole = measured.search(left)
            marked = marked or (bottom > 12 and right in ("是", "は", "은", "는"))  # 12/25 is Christmas
            if is_day and (marked or (top >= bottom and not of_whole)):
                return self.on_date("", top, found[3])
            if _DATED.search(left) or top > bottom >= 20:
                return keep(found)
            sure = of_whole or (right and right in self.behind_fraction) or top >= bottom
            if sure or minus or bottom > 10 or top > 12:
                return f"{minus}{self.part(top, bottom)}"
            return None if self.is_small(top, bottom) else keep(found)

    def part(self, top: int, bottom: int) -> str | None:
        return f"{self.cardinal(str(bottom))}{self._data['parts']}{self.cardinal(str(top))}"

    def fraction(self, top: int, bottom: int) -> str:
        return self.part(top, bottom) or ""

    def is_versioned(self, found: Found) -> bool:
        """Is the number one of a version?"""
        left = found.ahead.rstrip(" ")
        return left[-1:].isascii() and left[-1:].isalnum() or left.endswith(_VERSIONS)

    def date_at(self, found: Found) -> str | None:
        return None if self.is_versioned(found) else self.on_date(found[1], int(found[2]), found[3])

    def _dates(self, rule: Rules) -> None:
        """2024.3.5, and 3/5 with a weekday behind. The number of a version stays one."""
        day, month, year = r"(0?[1-9]|[12]\d|3[01])", r"(0?[1-9]|1[0-2])", r"((?:19|20)\d\d)"
        span = rf"(?<![\w.,/-])((?:19|20)\d\d([./-])\d\d?\2\d\d?) ?{_DASHES} ?(?={year}\2\d)"
        rule("-./", span, lambda f: f"{f[1]}{self.to}{self.blank}")
        rule("-", rf"(?<![\w.,/-]){year}-{month}-{day}(?![\w./-])", lambda f: self.on_date(f[1], int(f[2]), f[3]))
        self.dotted_dates(year, month, day, rule)
        rule(".", r"(?<![\w.,/-])\d\d\.\d{1,2}\.\d{1,2}(?![\w.])", lambda f: None if self.is_versioned(f) else keep(f))
        # 2024-03 is a month, 2010-12 may be years, 2024.03 may be an amount.
        written = rf"(?<![\w.,/-]){year}(?:[-/](0[1-9])|/(1[0-2]))(?![\w./-]|,\d| ?[年学學赛賽财財])"
        rule("-/", written, lambda f: self.month(f[1], f[2] or f[3]))
        ends = r"(?=$|[-~～〜）) ]|到|至|から|부터)"
        rule(".", rf"(?<![\w.,/-]){year}\.(?:0[1-9]|1[0-2]){ends}(?! ?[%A-Za-z元円万萬亿億원만])", keep)
        written = r"(?<![\w.,/:-])(0[1-9]|1[0-2])[-/]((?:19|20)\d\d)(?![\w./-])"
        rule("-/", written, lambda f: self.month(f[2], f[1]))
        padded = r"(?<![\w.,/:-])(0[1-9])[-/](0[1-9]|[12]\d|3[01])(?![\w.,/:-]| ?\d)"
        rule("-/", padded, lambda f: self.on_date("", int(f[1]), f[2]))
        rule(self.dated_zeros, rf"(?<![\w.,:/-])0(?=[1-9] ?[{self.dated_zeros}])", lambda f: "")
        named, weekday = rf"(?<![\w.,/:–-]){month}/{day}(?![\w/]|[.,]\d)", rf" ?[(（](?:[{self.weekdays}]|$)"
        rule("/", named, lambda f: self.on_date("", int(f[1]), f[2]) if re.match(weekday, f.behind) else None)

    def dotted_dates(self, year: str, month: str, day: str, rule: Rules) -> None:
        rule(".·", rf"(?<![\w.,/-]){year}[.·]{month}[.·]{day}(?![\w.])", self.date_at)

    def month(self, year: str, month: str) -> str:
        """A month in words."""
        return self.on_date(year, int(month), "1").removesuffix("일일").removesuffix("一日").rstrip()

    def _ranges(self, rule: Rules) -> None:
        """3月5日～8日, 10万-20万: a dash between a unit and a digit."""
        unit, said = f"[{self._data['range_units']}]", Kept(self.to + self.blank)
        behind = "|".join(rf"(?<=\d{unit * size})" for size in (1, 2, 3))
        rule("—", r"(?<=\d)—(?=\d)", lambda f: "～")
        rule("~～〜", r"(?<=\d) ?[~～〜] ?(?=[-−]\d)", lambda f: said)
        rule("~～〜", r"(?<=\d/\d) ?[~～〜] ?(?=\d/\d)", lambda f: said)
        rule(")", r"(?<=\)) ?[~～〜] ?(?=\d)", lambda f: said)
        rule("°", rf"°C ?{_DASHES} ?(?=[-−]?\d)", lambda f: Kept(f"°C{said}"))
        rule(DASHES + "—", rf"(?:{behind}|(?<=\d°)) ?{_DASHES} ?(?=[-−]?\d)", lambda f: said)

    def _maths(self, rule: Rules) -> None:
        """Signs between numbers. They come behind all rules that need their digits."""
        blank, words = self.blank, self.table("signs")

        def named(name: str) -> Kept:
            return Kept(f"{blank}{words[name]}{blank}")

        def sign(found: Found) -> Kept | None:
            name = found[0].strip()
            return named(name) if words[name] != name else None  # Korean says some of them at the end

        def times(found: Found) -> Kept:
            """A product, or 3×4 metres."""
            return named("×" if "=" in found.rest[:60] else "x")

        def power(found: Found) -> str:
            base, exponent = self.said(found[1]), found[2].lstrip("^").translate(SUPERSCRIPTS)
            if exponent in ("2", "3"):
                return f"{base}{blank}{words['²' if exponent == '2' else '³']}"
            minus = self.minus if exponent[0] == "-" else ""
            return base + words["^"].format(minus + self.cardinal(str(int(exponent.lstrip("-")))))

        rule("<>", r"(?<=\d)([<>])=(?=\d)", lambda f: "≤" if f[1] == "<" else "≥")
        rule("x", r"(?<=\d) ?x ?(?=\d)", lambda f: named("x"))
        rule("*×✕", r"(?<=[\d)²米厘毫cmM]) ?[×✕] ?(?=[\d(])|(?<=\d)\*(?=\d)", times)
        rule("²", r"(?<=[A-Za-z)])²(?= ?[-+=<>])", lambda f: Kept(f"{blank}{words['²']}"))
        left, term = r"(?<=[A-Za-z\d)²³方乗곱])", r"[A-Za-z\d(]"
        formula = rf"(?={term}[A-Za-z\d.,()+×÷*^² −-]{{0,60}}=)"
        rule("=", rf"{left} ?[-−] ?(?=\d[\d.,()+×÷* −-]{{0,60}}=)", lambda f: named("-"))
        rule("+", rf"(?<=[\d)²³方乗곱]) ?\+ ?(?=[\d(])|{left} ?\+ ?{formula}", sign)
        rule("√", r"([-−]?)√(?=\d)", lambda f: Kept(self.below_zero(f[1]) + words["√"] + blank))
        rule("±", r"±(?=\d)", lambda f: Kept(words["±"] + blank))
        rule("^⁰¹²³⁴⁵⁶⁷⁸⁹", rf"(?<![\w.,])({self.pattern})(\^-?\d{{1,3}}(?![\d.])|⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]{{1,3}})", power)
        rule("÷", r"(?<=[\d)]) ?÷ ?(?=[\d(])", sign)

        @rule("=", r"^= ?(?=\d)")
        def equals(found: Found) -> Kept | None:
            left = found.around.left
            return named("=") if left[-1:].isalpha() and not left.isascii() else None

        written = r"^[≈≤≥≠±] ?(?=\d)|(?<=[^\s=<>!:+*/&?-]) ?[=≈≤≥≠] ?(?=[-−\d(])|(?<=[\d)²%]) ?[=≈≤≥≠] ?(?=[\w(])"
        rule("=±≈≠≤≥", written, sign)
        rule("<>", r"(?<=[\d)²³方乗곱A-Za-z]) ?[<>] ?(?=[\d(])", sign)
