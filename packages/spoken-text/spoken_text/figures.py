"""Figures that are no amounts: telephone numbers, serial numbers, fractions, scores, directions, Roman numerals."""

import re
from functools import cache
from math import gcd

from spoken_text.european import MAY_BE_ROMAN, number_of
from spoken_text.rule import Found, Rules, ends_of, keep
from spoken_text.spoken import LANGUAGES, Spoken, plain
from spoken_text.tables import shared_words, table_of

_CALLED = shared_words("called")
VULGAR: dict[str, str] = table_of("shared")["fractions"]
"""Fractions of one character."""
DIRECTIONS = frozenset("NSEWO")


def phones(spoken: Spoken, rule: Rules) -> None:
    """Digit by digit, with a comma between the groups."""
    say = spoken.dialled

    def local(found: Found) -> str | None:
        """555-0134, but not 100-2000, which may be a range."""
        is_range = found[0][4] != "0" and found[0].endswith("00")
        return say(found) if found.around.before == "〒" or not (found[0][0] in "01" or is_range) else None

    before, after = r"(?<![\w.,:/-])(?<!\d )", r"(?![\w-]|[.,]\d)"
    serial = rf"{before}(?:97[89][- ]?)?\d{{1,5}}-\d{{1,7}}-\d{{1,7}}-[\dX](?![\w-])"
    rule("-", serial, lambda f: f"{say(f)} X" if f[0][-1] == "X" else say(f))
    rule("+", r"\+\d{1,3}(?:[ ()./-]{0,2}\d+){1,6}(?<=\d{2})", lambda f: say(f) if len(f[0]) > 7 else None)
    rule("-. ", rf"{before}[18][ -.](?:\(\d{{3}}\)[ -.]?|\d{{3}}[-. ])\d{{3}}[-. ](?:\d{{4}}|\d\d-\d\d){after}", say)
    rule("-. ", rf"(?<![\w.,-])(?<!\d )(?:\(\d{{3}}\)[ -]?|\d{{3}}[-. ])\d{{3}}[-. ]\d{{4}}{after}", say)
    rule("(", rf"{before}\(\d\d\) ?9?\d{{4}}-\d{{4}}{after}", say)
    rule("-/ ", r"(?<![\w.,:/-])(?<!\d )0\d{1,4}(?:[ -]\d{2,}|/\d{4,})+(?!\w|[.,]\d)", say)
    if spoken.code in ("es", "pt"):
        rule(" ", rf"{before}\d\d \d{{3}} \d\d \d\d{after}", say)
        rule(" ", rf"{before}[679]\d\d \d{{3}} (?!000)\d{{3}}{after}(?! \d| ?[€$%])", say)
    rule("-", rf"{before}\d{{3}}-\d{{4}}{after}", local)
    rule(" ", rf"{before}\d{{4}}(?: \d{{4}}){{2,4}}{after}", say)
    rule("-", rf"{before}(?:\d{{3}}-\d\d-\d{{4}}|\d{{5}}-\d{{4}}){after}", say)
    if spoken.code == "ko":
        rule("-", rf"{before}1[5-8]\d\d-\d{{4}}(?!\d|년)", say)
        rule("대", r"(?<![\w.,])(\d{1,2})대(\d{1,2})(?!\d)", spoken.ratio)
    # Groups with three hyphens or more, such as serial numbers, are no amounts.
    rule("-", rf"{before}\d+(?:-\d+){{3,20}}(?![\w-])", say)
    rule("", r"(?<![\w.,])\d{3,20}(?![\w]|[.,:/-]\d)", lambda f: say(f) if f.before.strip(".:,#") in _CALLED else None)


def fractions(spoken: Spoken, rule: Rules) -> None:
    """1/2, 1 3/4, ½. Where it may be a date or a ratio, the figures stay as they are read alone."""
    letters = "A-Za-z0-9_" if spoken.joined else r"\w"
    unit = rf"(?: ?({spoken.unit_names})(?![{letters}/²³]))?"

    def measured(found: Found) -> str | None:
        said, unit = say(found), found[3]
        if not said or not unit:
            return said
        if said in ("un medio", "un mezzo", "um meio"):
            said = said.partition(" ")[2]
        forms = plain(spoken.units[unit])
        form = forms[1 if found[1] and len(forms) > 1 else 0]
        return form.format(said) if "{}" in form else f"{said}{'' if spoken.joined else ' '}{form}"

    def say(found: Found) -> str | None:
        whole, written = found[1], VULGAR.get(found[2], found[2])
        top, bottom = (int(figure) for figure in written.split("/"))
        said = spoken.part(top, bottom) if 0 < top < bottom <= 10 and gcd(top, bottom) == 1 else None
        if not said:
            return None
        if found[2] not in VULGAR and not whole and found.before in spoken.words("dated"):
            return keep(found)
        return said if not whole else spoken.with_part(whole, said, is_half=bottom == 2)

    rule("".join(VULGAR), rf"(?<![\w.,/:–-])(?:(\d{{1,2}}) ?)?([{''.join(VULGAR)}]){unit}(?![\w/])", measured)
    rule("/", rf"(?<![\w.,/:–-])(?:(\d{{1,2}}) )?([1-9]/(?:10|[2-9])){unit}(?![{letters}/]|[.,]\d|-\d)", measured)


def others(spoken: Spoken, rule: Rules) -> None:
    """Addresses of computers, scores and ratios, directions."""
    dot = f"{spoken.blank}{spoken.dot}{spoken.blank}"
    octet, say = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)", spoken.digits if spoken.code == "en" else spoken.cardinal
    address = rf"(?<![\w.,]){octet}(?:\.{octet}){{3}}(?![\w]|\.\d)"
    rule(".", address, lambda f: dot.join(map(say, f[0].split("."))))
    rule(":", r"(?<![\w.,:/-])(\d{1,3}):(\d|[1-9]\d{2})(?![\w:/]|-\d|[.,]\d)", spoken.ratio)
    if names := spoken.table("directions"):

        @rule("°", rf"(?<![\w.,])({spoken.pattern}) ?° ?([NSEWO])(?!\w)")
        def toward(found: Found) -> str | None:
            said = spoken.counted_as(found[1], "°")
            return said and f"{said} {names[found[2]]}"


# ---------------------------------------------------------------- Roman numerals


@cache
def before_roman() -> re.Pattern[str]:
    """A text with this may be changed, in any language."""
    lists = (pair for code in LANGUAGES.values() for pair in table_of(f"{code}/words")["lists"].items())
    names = " ".join(words for kind, words in lists if kind.startswith(("kings", "queens", "chapters")))
    return re.compile(rf"\b(?:{ends_of(set(names.split()))}) [IVXLC]|{MAY_BE_ROMAN}")


def roman(spoken: Spoken, word: str, before: str) -> str | None:
    """The number after a king's name or "Chapter", without marks at its ends; None if it is none."""
    kings = spoken.words("kings")
    if spoken.code == "fr" and word in ("Ier", "Ire") and before in kings:
        return "premier" if word == "Ier" else "première"
    number = str(number_of(word, 99))
    if number == "0" or word == "L" or not word.isascii() or spoken.joined:  # Appendix L
        return None
    if before in spoken.words("chapters") and (before, word) not in (("War", "I"), ("Type", "V"), ("Type", "X")):
        return spoken.cardinal(number)
    if declined := spoken.declined_kings.get(before):
        return spoken.ordinal(number, case=declined[0], gender=declined[1])
    if before not in kings or (word == "I" and spoken.code == "en"):
        return None
    return spoken.king(number, before in spoken.words("queens"))
