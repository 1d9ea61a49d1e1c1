"""What English, German and Dutch share: signs of maths beside numbers, degrees with minutes, clocks with seconds,
account numbers, rates, seasons."""

import re

from spoken_text.rule import HOUR, MINUTE, SUPERSCRIPTS, Found, Rules, ends_of
from spoken_text.spoken import Spoken, plain

_FOLLOWERS = frozenset("+ +/- = × x · ÷ ± ≈ ≥ ≤ ≠ - − * / < > :".split())
"""Signs that may stand alone between numbers."""
_OPENERS = frozenset("= + ± ≈ ≥ ≤ ≠ > < ~ √".split())
"""Signs that may stand alone before a number."""
_AMOUNT = r"[-−]?[$€£]?\d"
_GROUPED = re.compile(r"\d{1,3}(?:[.,]\d{3})+")
_AT = frozenset("at by until um gegen".split())
_RATIOS = frozenset(
    "ratio ratios scale odds dilution verhältnis mischverhältnis maßstab verdünnung verhouding schaal".split()
)


class Germanic(Spoken):
    hours: str  # a regular expression for what is written behind 1:30 if it is a duration
    divided: str  # the same for signs of a division

    def __init__(self, code: str):
        super().__init__(code)
        self.leads = self.table("abbreviations")
        self.openers = _OPENERS.union(self.words("openers"), (f"{name}." for name in self.leads if name[0] not in "§¶"))
        self.followers = _FOLLOWERS | self.words("unit_nouns")

    def coins(self, point: str, rule: Rules) -> None:
        """5.50 dollars. `point`: a regular expression for the mark before the cents."""
        names = self.table("coins")
        mark = re.escape(self.groups[0])
        written = rf"(?<![\w.,-])(\d{{1,6}}|\d{{1,3}}(?:{mark}\d{{3}})+){point}({ends_of(names)})(?!\w)"
        rule(self.decimal, written, lambda f: self.money(f"{f[1].replace(self.groups[0], '')}.{f[2]}", names[f[3]]))

    def fixed_pairs(self, rule: Rules) -> None:
        """50/50, 24/7, 9/11"""
        equal = r"(?<![\w.,/])(50/50|24/7|9/11)(?![\w/]|[.,]\d)"
        rule("/", equal, lambda f: " ".join(map(self.cardinal, f[1].split("/"))))

    def pressures(self, name: str, rule: Rules) -> None:
        """120/80 mmHg. `name`: what stands before it otherwise."""
        pressure = r"(?<![\w.,/:–-])(\d{2,3})/(\d{2,3})(?![\w/]|[.,]\d)"
        rule("/", pressure, lambda f: self.ratio(f) if f.before == name or f.after == "mmHg" else None)

    def seasons(self, rule: Rules) -> None:
        """2023/24, 2023/2024."""

        @rule("/", r"(?<![\w.,:/-])((?:19|20)(\d\d))/((?:19|20)?(\d\d))(?![\w/]|[.,]\d)")
        def season(found: Found) -> str | None:
            if int(found[4]) != (int(found[2]) + 1) % 100:
                return None
            return f"{self.year(found[1])} {self.year(found[3]) if len(found[3]) == 4 else self.cardinal(found[3])}"

    def issues(self, rule: Rules) -> None:
        """3/2024"""
        issue = r"(?<![\w.,/:–-])(\d{1,2})/((?:19|20)\d\d)(?![\w/]|[.,]\d)"
        rule("/", issue, lambda f: f"{self.cardinal(str(int(f[1])))} {self.year(f[2])}")

    def rates(self, rule: Rules) -> None:
        """10 mg/kg"""
        units, names = self.unit_names, self.table("rates")

        def say(found: Found) -> str | None:
            written, unit, behind = found[1], found[2], found[3]
            said = self.counted_as(written, unit) if f"{unit}/{behind}" not in self.units else None
            return said and f"{said} {self.per} {names[behind]}"

        hundred = rf"(?<![\w.,/-])({self.pattern}) ?({units})/(?=\d{{1,4}} ?(?:{units})(?!\w))"
        rule("/", hundred, lambda f: f"{self.counted_as(f[1], f[2])} {self.per} ")
        rule("/", rf"(?<![\w.,/-])({self.pattern}) ?({units})\.?/({ends_of(names)})(?![\w²³/])", say)

    def signs(self, rule: Rules) -> None:
        """Signs come early and leave the numbers to the rules behind them."""
        words = self.table("signs")
        self._degrees(rule)
        self._clocks(rule)
        rule("+", r"(?<=\d) ?\+/[-−] ?(?=\d)", lambda f: f" {words['±']} ")
        rule("+", r"(?<=\d) ?\+ ?(?=[\d(])|(?<=\d[a-z]) \+ (?=\d)", lambda f: f" {words['+']} ")
        written = r"(?<=\d) ([+=]) (?=[A-Za-z][\^²³\d])|^([+=]) (?=[A-Za-z]{1,2}\^)"
        rule("+=^", written, lambda f: f" {words[f[1]]} " if f[1] else f"{words[f[2]]} ")
        self._powers(rule)

        @rule("x×", r"(?<=\d)(?<!(?<!\d)0)([x×])(?=\d)|(?<=[\da-z²\"])( [x×] )(?=\d)")
        def by(found: Found) -> str:
            is_sum = "=" in found.match.string or (found[2] == " × " and not found.around.after)
            is_sum |= found.rest.startswith(f"10 {words['^']}")
            return f" {words['×' if is_sum else 'by']} "

        rule("*·÷", r"(?<=\d) ?((?<!\*)\*(?!\*)|[·÷]) ?(?=\d)", lambda f: f" {words[f[1]]} ")
        rule("/:", rf"(?<=\d) {self.divided} (?=\d[\d.,]{{0,20}} =)", lambda f: f" {words['÷']} ")

        @rule("-−", r"(?<=\d) [-−] (?=\d)")
        def minus(found: Found) -> str | None:
            if re.search(r" = ?-?\d|=$", found.rest):
                return f" {words['-']} "
            year = re.search(r"(?<![\d.,])(?:1[5-9]|20)(\d\d)$", found.head)
            behind = f"{found.rest} {found.around.after}"
            years = year and re.match(r"\d\d(?![\w.,:])", found.rest) and 0 < int(found.rest[:2]) - int(year[1]) < 10
            if years or (year and re.match(rf"\d\d?\.? (?:{'|'.join(self.months)})\b", behind, re.IGNORECASE)):
                return f" {words['to']} "  # 1940 - 41, 13 April 1860 - 19 November 1949
            first, last = re.search(r"(?<![\d.,])\d{1,9}$", found.head), re.match(r"\d{1,9}(?![\d.,:])", found.rest)
            is_range = first and last and int(first[0]) < int(last[0]) and found.around.after[:1].islower()
            return f" {words['to']} " if is_range else None

        rule("-", r"(?<=\d)-(?=\d{1,9} ?=)", lambda f: f" {words['-']} ")
        rule("+", r"(?<!\S)\+(?=\d{1,2}(?:[.,]\d{1,2})?(?![\d/.(-]| [\d(]))", lambda f: f"{words['+']} ")
        rule("+", r"(?<=[\d%])\+(?![\w+/])", lambda f: f" {words['+']}")
        rule("GU", r"(?<=UTC|GMT)([+-])(?=\d)", lambda f: f" {words[f[1]]} ")
        written = rf"(?:(?<=\d) ?|(?<!\S))± ?(?={_AMOUNT})"
        rule("±", written, lambda f: f"{'' if f.head[-1:] in ('', ' ') else ' '}{words['±']} ")

        @rule("+", r"^\+ (?=\d)")
        def term(found: Found) -> str | None:
            before = found.around.before
            return f"{words['+']} " if len(before) == 1 and before.isalpha() else None

        rule("=", rf"(?:^|(?<=[\w%°)²³] ))= (?={_AMOUNT})", lambda f: f"{words['=']} ")
        rule("=", r"(?<=\d)=(?=\d)|(?<=\b[A-Za-z])=(?=[-−]?\d)", lambda f: f" {words['=']} ")
        rule("=", r"(?<=[\d%]) =$", lambda f: f" {words['=']}")
        rule("~", rf"(?<![\w~])~ ?(?={_AMOUNT})", lambda f: f"{words['~']} ")
        rule("≈≠≤≥", rf"(?<![\w=<>])([≥≤≈≠]) ?(?={_AMOUNT})", lambda f: f"{words[f[1]]} ")
        rule("<>", rf"(?<![\w=<>/-])([<>]) (?={_AMOUNT})", lambda f: f"{words[f[1]]} ")
        no_heart = r"(?!<3(?!\d|[.,]\d|%))"
        compared = rf"(?<![\w=<>/-]){no_heart}[<>](?={_AMOUNT})(?!\d{{1,9}}>)"
        rule("<>", compared, lambda f: f"{words['less' if f[0] == '<' else 'more']} ")
        rule("√", r"√ ?(?=\d)", lambda f: f"{words['√']} ")

        def one_by_one(written: str) -> str:
            return " ".join(self.cardinal(sign) if sign.isdecimal() else sign for sign in written)

        iban = r"(?<![\w-])([A-Z]{2})(\d\d)((?: [A-Z0-9]{4}){3,7}(?: [A-Z0-9]{1,3})?|[0-9]{10,30})(?!\w)"
        rule("", iban, lambda f: f"{f[1]} {', '.join(map(one_by_one, [f[2], *f[3].split()]))}")

    def _powers(self, rule: Rules) -> None:
        words = self.table("signs")

        def power(written: str, unit: str | None = None) -> str:
            if written in ("2", "3"):
                said = f" {words['²' if written == '2' else '³']}"
            else:
                minus = f"{words['-']} " if written[0] in "-−" else ""
                said = f" {words['^']} {minus}{self.cardinal(written.lstrip('-−'))}"
            return said + (f" {plain(self.units[unit])[-1]}" if unit else "")

        def exponent(found: Found) -> str | None:
            """1.5e-3"""
            raised = found[2].strip("+") + found[3].lstrip("0")
            return f"{found[1]} {words['×']} 10{power(raised)}" if int(found[3]) else None

        unit = rf"(?: ({ends_of(self.units)})(?![\w²³/]))?"
        rule("^", rf"(?<=[\d)A-Za-z])\^[({{]?([-−]?\d{{1,4}})[)}}]?(?![\w.^]){unit}", lambda f: power(f[1], f[2]))
        high = rf"(?<![\d.,])(\d{{1,2}})([⁻]?[⁰¹²³⁴-⁹]{{1,4}})(?!\w){unit}"
        rule("⁰¹²³⁴⁵⁶⁷⁸⁹", high, lambda f: f[1] + power(f[2].translate(SUPERSCRIPTS), f[3]))
        rule("Ee", r"(?<![\w.,])(\d{1,3}(?:[.,]\d{1,9})?)[eE]([+-])(\d{1,3})(?!\w|\.\d)", exponent)

    def _clocks(self, rule: Rules) -> None:
        """2024-05-06T10:30:00Z, at 10:30:45, 1:30 min, 1:23.45."""

        def exact(hour: str, minute: str, second: str | None, half: str = "") -> str:
            said = self.at_time(hour, minute, half)
            seconds = str(int(second or 0))
            return said if seconds == "0" else f"{said}{self._data['and']}{self.counted(seconds, 's')}"

        stamp = r"(?<=\d{4}-\d\d-\d\d)T([01]\d|2[0-4]):([0-5]\d)(?::([0-5]\d)(?:\.\d{1,9})?)?(Z?)(?![\w:.+-])"
        rule("-", stamp, lambda f: f", {exact(f[1], f[2], f[3])}{' UTC' if f[4] else ''}")

        @rule(":", rf"(?<![\w.,:/-])(\d{{1,4}}):({self.pattern})(?![\w:/]|-\d)")
        def ratio(found: Found) -> str | None:
            near = {found.before, found.after.lower()}
            near |= {found.around.earlier.lower()} if found.around.before in ("of", "von") else set()
            sure = near & _RATIOS or _GROUPED.fullmatch(found[2])
            return f"{found[1]} {self.ratio_to} {found[2]}" if sure else None

        clock = rf"(?<![\w.,:/-]){HOUR}:{MINUTE}:{MINUTE}"
        if self.code == "en":
            rule(":", rf"{clock} ?([AaPp])\.?[Mm]\b\.?", lambda f: exact(f[1], f[2], f[3], f[4]))

        at = rf"{clock}(?: Uhr\b)?(?![\w:/]|[.,]\d)"
        rule(":", at, lambda f: exact(f[1], f[2], f[3]) if f.before in _AT or "Uhr" in f[0] else None)

        @rule(":", rf"(?<![\w.,:/-])(\d{{1,3}}):([0-5]\d) ({self.hours})\b\.?")
        def length(found: Found) -> str:
            unit, smaller = ("min", "s") if found[3][0] in "mM" else ("h", "min")
            said = self.counted(str(int(found[1])), unit) or ""
            if said.startswith("eine ") and found.before in ("in", "nach", "vor", "seit", "mit", "von"):
                said = f"einer{said[4:]}"
            said += f" {self.counted(str(int(found[2])), smaller)}" if int(found[2]) else ""
            return said + found.stop(found[0], self.code == "de")

        @rule(":", rf"(?<![\w.,:/-])(\d{{1,2}}):([0-5]\d)({re.escape(self.decimal)})(\d{{1,3}})(?![\w:/]|[.,]\d)")
        def lap(found: Found) -> str:
            seconds = f"{self.cardinal(f'{int(found[2])}.{found[4]}', found[3])} {self.units['s'][1]}"
            return f"{self.counted(str(int(found[1])), 'min')} {seconds}"

    def _degrees(self, rule: Rules) -> None:
        """48°51'N, 40°42'46" N."""
        words = self.table("signs")

        def part(number: str | None, sign: str) -> str:
            if not number:
                return ""
            value = number.replace(",", ".")
            one, many = words[sign].split()
            said = self.cardinal(str(int(value)) if value.isdecimal() else value)
            if value.lstrip("0") == "1" and self.code == "de":
                said = "ein" if sign == "°" else "eine"
            return f"{said} {one if value.lstrip('0') == '1' else many}"

        minutes, seconds = r"(\d{1,2}(?:[.,]\d{1,6})?) ?['’′]", r"(\d{1,2}(?:[.,]\d{1,6})?) ?(?:[\"”″]|''|′′)"

        @rule("°", rf"(?<![\w.,])(\d{{1,3}}) ?° ?{minutes}(?: ?{seconds})?(?: ?([NSEWO])(?!\w))?")
        def say(found: Found) -> str | None:
            if int(found[1]) > 180 or (found[4] and found[4] not in words):
                return None
            parts = [part(found[1], "°"), part(found[2], "'"), part(found[3], '"'), words[found[4]] if found[4] else ""]
            return " ".join(filter(None, parts))
