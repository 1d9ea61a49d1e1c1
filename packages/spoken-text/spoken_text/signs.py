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


def rules(spoken: Spoken) -> Rules:
    """They come early and leave the numbers to the rules behind them."""
    around, words = spoken.around, spoken.table("signs")
    yield from _degrees(spoken)
    yield from _clocks(spoken)
    yield r"(?<=\d) ?\+/[-−] ?(?=\d)", lambda f: f" {words['±']} "
    yield r"(?<=\d) ?\+ ?(?=[\d(])|(?<=\d[a-z]) \+ (?=\d)", lambda f: f" {words['+']} "
    yield (
        r"(?<=\d) ([+=]) (?=[A-Za-z][\^²³\d])|^([+=]) (?=[A-Za-z]{1,2}\^)",
        lambda f: f" {words[f[1]]} " if f[1] else f"{words[f[2]]} ",
    )
    yield from _powers(spoken)

    def by(found: re.Match[str]) -> str:
        is_sum = "=" in found.string or (found[2] == " × " and not around.after)
        is_sum |= found.string.startswith(f"10 {words['^']}", found.end())
        return f" {words['×' if is_sum else 'by']} "

    yield r"(?<=\d)(?<!(?<!\d)0)([x×])(?=\d)|(?<=[\da-z²\"])( [x×] )(?=\d)", by
    yield r"(?<=\d) ?(?<!\*)\*(?!\*) ?(?=\d)", lambda f: f" {words['×']} "
    yield r"(?<=\d) ?· ?(?=\d)", lambda f: f" {words['×']} "
    yield r"(?<=\d) ?÷ ?(?=\d)", lambda f: f" {words['÷']} "
    divided = "[/:]" if spoken.code == "de" else "/"
    yield rf"(?<=\d) {divided} (?=\d[\d.,]{{0,20}} =)", lambda f: f" {words['÷']} "

    def minus(found: re.Match[str]) -> str | None:
        if re.search(r" = ?-?\d|=$", found.string[found.end() :]):
            return f" {words['-']} "
        ends = (
            re.search(r"(?<![\d.,])\d{1,9}$", found.string[: found.start()]),
            re.match(r"\d{1,9}(?![\d.,:])", found.string[found.end() :]),
        )
        is_range = ends[0] and ends[1] and int(ends[0][0]) < int(ends[1][0]) and around.after[:1].islower()
        return f" {words['to']} " if is_range else None

    yield r"(?<=\d) [-−] (?=\d)", minus
    yield r"(?<=\d)-(?=\d{1,9} ?=)", lambda f: f" {words['-']} "
    yield r"(?<!\S)\+(?=\d{1,2}(?:[.,]\d{1,2})?(?![\d/.(-]| [\d(]))", lambda f: f"{words['+']} "
    yield r"(?<=[\d%])\+(?![\w+/])", lambda f: f" {words['+']}"
    yield r"(?<=UTC|GMT)([+-])(?=\d)", lambda f: f" {words[f[1]]} "
    yield (
        rf"(?:(?<=\d) ?|(?<!\S))± ?(?={_AMOUNT})",
        lambda f: f"{' ' if f.start() and f.string[f.start() - 1] != ' ' else ''}{words['±']} ",
    )

    yield r"^\+ (?=\d)", lambda f: f"{words['+']} " if len(around.before) == 1 and around.before.isalpha() else None
    yield rf"(?:^|(?<=[\w%°)²³] ))= (?={_AMOUNT})", lambda f: f"{words['=']} "
    yield r"(?<=\d)=(?=\d)|(?<=\b[A-Za-z])=(?=[-−]?\d)", lambda f: f" {words['=']} "
    yield r"(?<=[\d%]) =$", lambda f: f" {words['=']}"
    yield rf"(?<![\w~])~ ?(?={_AMOUNT})", lambda f: f"{words['~']} "
    yield rf"(?<![\w=<>])([≥≤≈≠]) ?(?={_AMOUNT})", lambda f: f"{words[f[1]]} "
    yield rf"(?<![\w=<>/-])([<>]) (?={_AMOUNT})", lambda f: f"{words[f[1]]} "

    def compared(found: re.Match[str]) -> str | None:
        heart = found[0] == "<" and re.match(r"3(?![\d.,]\d|\d|%)", found.string[found.end() :])
        return None if heart else f"{words['less' if found[0] == '<' else 'more']} "

    yield rf"(?<![\w=<>/-])[<>](?={_AMOUNT})(?!\d{{1,9}}>)", compared
    yield r"√ ?(?=\d)", lambda f: f"{words['√']} "
    iban = r"(?<![\w-])([A-Z]{2})(\d\d)((?: [A-Z0-9]{4}){3,7}(?: [A-Z0-9]{1,3})?|[0-9]{10,30})(?!\w)"
    yield iban, lambda f: f"{f[1]} {', '.join(_one_by_one(spoken, part) for part in [f[2], *f[3].split()])}"


def _one_by_one(spoken: Spoken, written: str) -> str:
    return " ".join(spoken.cardinal(sign) if sign.isdecimal() else sign for sign in written)


SEASON = r"(?<![\w.,:/-])((?:19|20)(\d\d))/((?:19|20)?(\d\d))(?![\w/]|[.,]\d)"


def season(spoken: Spoken, found: re.Match[str]) -> str | None:
    """2023/24, 2023/2024."""
    if int(found[4]) != (int(found[2]) + 1) % 100:
        return None
    return f"{spoken.year(found[1])} {spoken.year(found[3]) if len(found[3]) == 4 else spoken.cardinal(found[3])}"


def rates(spoken: Spoken, per: str) -> Rules:
    """10 mg/kg"""
    units, names = spoken.unit_names, spoken.table("rates")

    def say(found: re.Match[str]) -> str | None:
        written, unit, behind = found.groups()
        if f"{unit}/{behind}" in spoken.units:
            return None
        said = spoken.counted_as(written, unit)
        return said and f"{said} {per} {names[behind]}"

    hundred = rf"(?<![\w.,/-])({spoken.pattern}) ?({units})/(?=\d{{1,4}} ?(?:{units})(?!\w))"
    yield hundred, lambda f: f"{spoken.counted_as(f[1], f[2])} {per} "
    yield rf"(?<![\w.,/-])({spoken.pattern}) ?({units})/({ends_of(names)})(?![\w²³/])", say


def _powers(spoken: Spoken) -> Rules:
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

    yield rf"(?<=[\d)A-Za-z])\^[({{]?([-−]?\d{{1,4}})[)}}]?(?![\w.^]){unit}", lambda f: measured(f[1], f[2])
    high = rf"(?<![\d.,])(\d{{1,2}})([⁻]?[⁰¹²³⁴-⁹]{{1,4}})(?!\w){unit}"
    yield high, lambda f: f[1] + measured(f[2].translate(SUPERSCRIPTS), f[3])
    exponent = r"(?<![\w.,])(\d{1,3}(?:[.,]\d{1,9})?)[eE]([+-])(\d{1,3})(?!\w|\.\d)"
    yield (
        exponent,
        lambda f: f"{f[1]} {words['×']} 10{power(f[2].strip('+') + f[3].lstrip('0'))}" if int(f[3]) else None,
    )


def _clocks(spoken: Spoken) -> Rules:
    """2024-05-06T10:30:00Z, at 10:30:45, 1:30 min, 1:23.45."""
    around, link = spoken.around, "and" if spoken.code == "en" else "und"

    def exact(hour: str, minute: str, second: str | None) -> str:
        said = spoken.at_time(hour, minute)
        return f"{said} {link} {spoken.counted(str(int(second)), 's')}" if second and int(second) else said

    stamp = r"(?<=\d{4}-\d\d-\d\d)T([01]\d|2[0-4]):([0-5]\d)(?::([0-5]\d)(?:\.\d{1,9})?)?(Z?)(?![\w:.+-])"
    yield stamp, lambda f: f", {exact(f[1], f[2], f[3])}{' UTC' if f[4] else ''}"
    clock = r"(?<![\w.,:/-])([01]?\d|2[0-4]):([0-5]\d):([0-5]\d)(?: Uhr\b)?(?![\w:/]|[.,]\d)"
    times = frozenset("at by until um gegen".split())

    def at(found: re.Match[str]) -> str | None:
        return exact(found[1], found[2], found[3]) if around.word_before(found) in times or "Uhr" in found[0] else None

    ratios = frozenset("ratio ratios scale odds dilution verhältnis mischverhältnis maßstab verdünnung".split())

    def ratio(found: re.Match[str]) -> str | None:
        near = {around.word_before(found), around.word_after(found).lower()}
        near |= {around.earlier.lower()} if around.before in ("of", "von") else set()
        return (
            f"{found[1]} {'to' if spoken.code == 'en' else 'zu'} {found[2]}"
            if near & ratios or _GROUPED.fullmatch(found[2])
            else None
        )

    yield rf"(?<![\w.,:/-])(\d{{1,4}}):({spoken.pattern})(?![\w:/]|-\d)", ratio
    if spoken.code == "en":
        half = r" ?([AaPp])\.?[Mm]\b\.?"
        seconds = rf"(?<![\w.,:/-])([01]?\d|2[0-4]):([0-5]\d):([0-5]\d){half}"
        yield (
            seconds,
            lambda f: (
                f"{spoken.at_time(f[1], f[2], f[4].upper() + 'M')}"
                + (f" {link} {spoken.counted(str(int(f[3])), 's')}" if int(f[3]) else "")
            ),
        )
    yield clock, at
    last = {"min": "s", "h": "min"}

    def length(found: re.Match[str]) -> str:
        unit = "min" if found[3][0] in "mM" else "h"
        said = spoken.counted(str(int(found[1])), unit) or ""
        if said.startswith("eine ") and around.word_before(found) in ("in", "nach", "vor", "seit", "mit", "von"):
            said = f"einer{said[4:]}"
        said += f" {spoken.counted(str(int(found[2])), last[unit])}" if int(found[2]) else ""
        return said + (around.stop(found, spoken.code == "de") if found[0][-1] == "." else "")

    names = "mins?|minutes|hours|hrs|h" if spoken.code == "en" else "min|Min|Minuten|Std|Stunden|h"
    yield rf"(?<![\w.,:/-])(\d{{1,3}}):([0-5]\d) ({names})\b\.?", length

    def lap(found: re.Match[str]) -> str:
        seconds = f"{spoken.cardinal(f'{int(found[2])}.{found[4]}', found[3])} {spoken.units['s'][1]}"
        return f"{spoken.counted(str(int(found[1])), 'min')} {seconds}"

    mark = re.escape(spoken.decimal)
    yield rf"(?<![\w.,:/-])(\d{{1,2}}):([0-5]\d)({mark})(\d{{1,3}})(?![\w:/]|[.,]\d)", lap


def _degrees(spoken: Spoken) -> Rules:
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

    def say(found: re.Match[str]) -> str | None:
        if int(found[1]) > 180 or (found[4] and found[4] not in words):
            return None
        parts = [part(found[1], "°"), part(found[2], "'"), part(found[3], '"'), words[found[4]] if found[4] else ""]
        return " ".join(filter(None, parts))

    minutes, seconds = r"(\d{1,2}(?:[.,]\d{1,6})?) ?['’′]", r"(\d{1,2}(?:[.,]\d{1,6})?) ?(?:[\"”″]|''|′′)"
    yield rf"(?<![\w.,])(\d{{1,3}}) ?° ?{minutes}(?: ?{seconds})?(?: ?([NSEWO])(?!\w))?", say
