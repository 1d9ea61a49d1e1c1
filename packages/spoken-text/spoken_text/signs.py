"""Signs of maths beside numbers, degrees with minutes, and account numbers, in English and German."""

import re

from spoken_text.rule import SUPERSCRIPTS, Rules, ends_of
from spoken_text.spoken import Spoken, plain

FOLLOWERS = frozenset("+ +/- = × x · ÷ ± ≈ ≥ ≤ ≠ - − * / < > :".split())
"""Signs that may stand alone between numbers."""
OPENERS = frozenset("= + ± ≈ ≥ ≤ ≠ > < ~ √".split())
"""Signs that may stand alone before a number."""
_AMOUNT = r"[-−]?[$€£]?\d"
_GROUPED = re.compile(r"\d{1,3}(?:[.,]\d{3})+")


def rules(spoken: Spoken, rule: Rules) -> None:
    """They come early and leave the numbers to the rules behind them."""
    around, words = spoken.around, spoken.table("signs")
    _degrees(spoken, rule)
    _clocks(spoken, rule)
    rule("+", r"(?<=\d) ?\+/[-−] ?(?=\d)", lambda f: f" {words['±']} ")
    rule("+", r"(?<=\d) ?\+ ?(?=[\d(])|(?<=\d[a-z]) \+ (?=\d)", lambda f: f" {words['+']} ")
    written = r"(?<=\d) ([+=]) (?=[A-Za-z][\^²³\d])|^([+=]) (?=[A-Za-z]{1,2}\^)"
    rule("+=^", written, lambda f: f" {words[f[1]]} " if f[1] else f"{words[f[2]]} ")
    _powers(spoken, rule)

    @rule("x×", r"(?<=\d)(?<!(?<!\d)0)([x×])(?=\d)|(?<=[\da-z²\"])( [x×] )(?=\d)")
    def by(found: re.Match[str]) -> str:
        is_sum = "=" in found.string or (found[2] == " × " and not around.after)
        is_sum |= found.string.startswith(f"10 {words['^']}", found.end())
        return f" {words['×' if is_sum else 'by']} "

    rule("*", r"(?<=\d) ?(?<!\*)\*(?!\*) ?(?=\d)", lambda f: f" {words['×']} ")
    rule("·", r"(?<=\d) ?· ?(?=\d)", lambda f: f" {words['×']} ")
    rule("÷", r"(?<=\d) ?÷ ?(?=\d)", lambda f: f" {words['÷']} ")
    divided = "[/:]" if spoken.code == "de" else "/"
    rule("/:", rf"(?<=\d) {divided} (?=\d[\d.,]{{0,20}} =)", lambda f: f" {words['÷']} ")

    @rule("-−", r"(?<=\d) [-−] (?=\d)")
    def minus(found: re.Match[str]) -> str | None:
        if re.search(r" = ?-?\d|=$", found.string[found.end() :]):
            return f" {words['-']} "
        ends = (
            re.search(r"(?<![\d.,])\d{1,9}$", found.string[: found.start()]),
            re.match(r"\d{1,9}(?![\d.,:])", found.string[found.end() :]),
        )
        is_range = ends[0] and ends[1] and int(ends[0][0]) < int(ends[1][0]) and around.after[:1].islower()
        return f" {words['to']} " if is_range else None

    rule("-", r"(?<=\d)-(?=\d{1,9} ?=)", lambda f: f" {words['-']} ")
    rule("+", r"(?<!\S)\+(?=\d{1,2}(?:[.,]\d{1,2})?(?![\d/.(-]| [\d(]))", lambda f: f"{words['+']} ")
    rule("+", r"(?<=[\d%])\+(?![\w+/])", lambda f: f" {words['+']}")
    rule("GU", r"(?<=UTC|GMT)([+-])(?=\d)", lambda f: f" {words[f[1]]} ")
    written = rf"(?:(?<=\d) ?|(?<!\S))± ?(?={_AMOUNT})"
    rule("±", written, lambda f: f"{' ' if f.start() and f.string[f.start() - 1] != ' ' else ''}{words['±']} ")

    written = r"^\+ (?=\d)"
    rule("+", written, lambda f: f"{words['+']} " if len(around.before) == 1 and around.before.isalpha() else None)
    rule("=", rf"(?:^|(?<=[\w%°)²³] ))= (?={_AMOUNT})", lambda f: f"{words['=']} ")
    rule("=", r"(?<=\d)=(?=\d)|(?<=\b[A-Za-z])=(?=[-−]?\d)", lambda f: f" {words['=']} ")
    rule("=", r"(?<=[\d%]) =$", lambda f: f" {words['=']}")
    rule("~", rf"(?<![\w~])~ ?(?={_AMOUNT})", lambda f: f"{words['~']} ")
    rule("≈≠≤≥", rf"(?<![\w=<>])([≥≤≈≠]) ?(?={_AMOUNT})", lambda f: f"{words[f[1]]} ")
    rule("<>", rf"(?<![\w=<>/-])([<>]) (?={_AMOUNT})", lambda f: f"{words[f[1]]} ")

    @rule("<>", rf"(?<![\w=<>/-])[<>](?={_AMOUNT})(?!\d{{1,9}}>)")
    def compared(found: re.Match[str]) -> str | None:
        heart = found[0] == "<" and re.match(r"3(?![\d.,]\d|\d|%)", found.string[found.end() :])
        return None if heart else f"{words['less' if found[0] == '<' else 'more']} "

    rule("√", r"√ ?(?=\d)", lambda f: f"{words['√']} ")
    iban = r"(?<![\w-])([A-Z]{2})(\d\d)((?: [A-Z0-9]{4}){3,7}(?: [A-Z0-9]{1,3})?|[0-9]{10,30})(?!\w)"
    rule("", iban, lambda f: f"{f[1]} {', '.join(_one_by_one(spoken, part) for part in [f[2], *f[3].split()])}")


def _one_by_one(spoken: Spoken, written: str) -> str:
    return " ".join(spoken.cardinal(sign) if sign.isdecimal() else sign for sign in written)


SEASON = r"(?<![\w.,:/-])((?:19|20)(\d\d))/((?:19|20)?(\d\d))(?![\w/]|[.,]\d)"


def season(spoken: Spoken, found: re.Match[str]) -> str | None:
    """2023/24, 2023/2024."""
    if int(found[4]) != (int(found[2]) + 1) % 100:
        return None
    return f"{spoken.year(found[1])} {spoken.year(found[3]) if len(found[3]) == 4 else spoken.cardinal(found[3])}"


def rates(spoken: Spoken, per: str, rule: Rules) -> None:
    """10 mg/kg"""
    units, names = spoken.unit_names, spoken.table("rates")

    def say(found: re.Match[str]) -> str | None:
        written, unit, behind = found.groups()
        if f"{unit}/{behind}" in spoken.units:
            return None
        said = spoken.counted_as(written, unit)
        return said and f"{said} {per} {names[behind]}"

    hundred = rf"(?<![\w.,/-])({spoken.pattern}) ?({units})/(?=\d{{1,4}} ?(?:{units})(?!\w))"
    rule("/", hundred, lambda f: f"{spoken.counted_as(f[1], f[2])} {per} ")
    rule("/", rf"(?<![\w.,/-])({spoken.pattern}) ?({units})/({ends_of(names)})(?![\w²³/])", say)


def _powers(spoken: Spoken, rule: Rules) -> None:
    words = spoken.table("signs")

    def power(written: str) -> str:
        if written in ("2", "3"):
            return f" {words['²' if written == '2' else '³']}"
        minus = f"{words['-']} " if written[0] in "-−" else ""
        return f" {words['^']} {minus}{spoken.cardinal(written.lstrip('-−'))}"

    names = ends_of(spoken.units)
    unit = rf"(?: ({names})(?![\w²³/]))?"

    def measured(written: str, unit: str | None) -> str:
        return power(written) + (f" {plain(spoken.units[unit])[-1]}" if unit else "")

    rule("^", rf"(?<=[\d)A-Za-z])\^[({{]?([-−]?\d{{1,4}})[)}}]?(?![\w.^]){unit}", lambda f: measured(f[1], f[2]))
    high = rf"(?<![\d.,])(\d{{1,2}})([⁻]?[⁰¹²³⁴-⁹]{{1,4}})(?!\w){unit}"
    rule("⁰¹²³⁴⁵⁶⁷⁸⁹", high, lambda f: f[1] + measured(f[2].translate(SUPERSCRIPTS), f[3]))
    exponent = r"(?<![\w.,])(\d{1,3}(?:[.,]\d{1,9})?)[eE]([+-])(\d{1,3})(?!\w|\.\d)"
    rule(
        "Ee",
        exponent,
        lambda f: f"{f[1]} {words['×']} 10{power(f[2].strip('+') + f[3].lstrip('0'))}" if int(f[3]) else None,
    )


def _clocks(spoken: Spoken, rule: Rules) -> None:
    """2024-05-06T10:30:00Z, at 10:30:45, 1:30 min, 1:23.45."""
    around, link = spoken.around, "and" if spoken.code == "en" else "und"

    def exact(hour: str, minute: str, second: str | None) -> str:
        said = spoken.at_time(hour, minute)
        return f"{said} {link} {spoken.counted(str(int(second)), 's')}" if second and int(second) else said

    stamp = r"(?<=\d{4}-\d\d-\d\d)T([01]\d|2[0-4]):([0-5]\d)(?::([0-5]\d)(?:\.\d{1,9})?)?(Z?)(?![\w:.+-])"
    rule("-", stamp, lambda f: f", {exact(f[1], f[2], f[3])}{' UTC' if f[4] else ''}")
    clock = r"(?<![\w.,:/-])([01]?\d|2[0-4]):([0-5]\d):([0-5]\d)(?: Uhr\b)?(?![\w:/]|[.,]\d)"
    times = frozenset("at by until um gegen".split())

    def at(found: re.Match[str]) -> str | None:
        return exact(found[1], found[2], found[3]) if around.word_before(found) in times or "Uhr" in found[0] else None

    ratios = frozenset("ratio ratios scale odds dilution verhältnis mischverhältnis maßstab verdünnung".split())

    @rule(":", rf"(?<![\w.,:/-])(\d{{1,4}}):({spoken.pattern})(?![\w:/]|-\d)")
    def ratio(found: re.Match[str]) -> str | None:
        near = {around.word_before(found), around.word_after(found).lower()}
        near |= {around.earlier.lower()} if around.before in ("of", "von") else set()
        return (
            f"{found[1]} {'to' if spoken.code == 'en' else 'zu'} {found[2]}"
            if near & ratios or _GROUPED.fullmatch(found[2])
            else None
        )

    if spoken.code == "en":
        half = r" ?([AaPp])\.?[Mm]\b\.?"
        seconds = rf"(?<![\w.,:/-])([01]?\d|2[0-4]):([0-5]\d):([0-5]\d){half}"
        rule(
            ":",
            seconds,
            lambda f: (
                f"{spoken.at_time(f[1], f[2], f[4].upper() + 'M')}"
                + (f" {link} {spoken.counted(str(int(f[3])), 's')}" if int(f[3]) else "")
            ),
        )
    rule(":", clock, at)
    last = {"min": "s", "h": "min"}

    names = "mins?|minutes|hours|hrs|h" if spoken.code == "en" else "min|Min|Minuten|Std|Stunden|h"

    @rule(":", rf"(?<![\w.,:/-])(\d{{1,3}}):([0-5]\d) ({names})\b\.?")
    def length(found: re.Match[str]) -> str:
        unit = "min" if found[3][0] in "mM" else "h"
        said = spoken.counted(str(int(found[1])), unit) or ""
        if said.startswith("eine ") and around.word_before(found) in ("in", "nach", "vor", "seit", "mit", "von"):
            said = f"einer{said[4:]}"
        said += f" {spoken.counted(str(int(found[2])), last[unit])}" if int(found[2]) else ""
        return said + (around.stop(found, spoken.code == "de") if found[0][-1] == "." else "")

    mark = re.escape(spoken.decimal)

    @rule(":", rf"(?<![\w.,:/-])(\d{{1,2}}):([0-5]\d)({mark})(\d{{1,3}})(?![\w:/]|[.,]\d)")
    def lap(found: re.Match[str]) -> str:
        seconds = f"{spoken.cardinal(f'{int(found[2])}.{found[4]}', found[3])} {spoken.units['s'][1]}"
        return f"{spoken.counted(str(int(found[1])), 'min')} {seconds}"


def _degrees(spoken: Spoken, rule: Rules) -> None:
    """48°51'N, 40°42'46" N."""
    words = spoken.table("signs")

    def part(number: str | None, sign: str) -> str:
        if not number:
            return ""
        value = number.replace(",", ".")
        one, many = words[sign].split()
        said = spoken.cardinal(str(int(value)) if value.isdecimal() else value)
        if value.lstrip("0") == "1" and words["to"] == "bis":
            said = "ein" if sign == "°" else "eine"
        return f"{said} {one if value.lstrip('0') == '1' else many}"

    minutes, seconds = r"(\d{1,2}(?:[.,]\d{1,6})?) ?['’′]", r"(\d{1,2}(?:[.,]\d{1,6})?) ?(?:[\"”″]|''|′′)"

    @rule("°", rf"(?<![\w.,])(\d{{1,3}}) ?° ?{minutes}(?: ?{seconds})?(?: ?([NSEWO])(?!\w))?")
    def say(found: re.Match[str]) -> str | None:
        if int(found[1]) > 180 or (found[4] and found[4] not in words):
            return None
        parts = [part(found[1], "°"), part(found[2], "'"), part(found[3], '"'), words[found[4]] if found[4] else ""]
        return " ".join(filter(None, parts))
