"""Figures that are no amounts: telephone numbers, serial numbers, fractions, scores, directions, Roman numerals."""

import re
from functools import cache
from math import gcd

from spoken_text.european import MAY_BE_ROMAN, number_of
from spoken_text.rule import Found, Rules, ends_of, keep
from spoken_text.spoken import LANGUAGES, Spoken, plain
from spoken_text.tables import shared_words, table_of

_CALLED, SCORE = map(shared_words, ("called", "score"))
VULGAR: dict[str, str] = table_of("shared")["fractions"]
"""Fractions of one character."""
DIRECTIONS = frozenset("NSEWO")
_SEQUELS = frozenset("II III IV VI VII VIII IX XI XII XIII XIV XV".split())
_NAME = re.compile("[A-ZÄÖÜÀ-Ý][a-zß-ÿ]{2,}")
"""Before such a numeral."""


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
    rule("-", rf"(?<![\w.,:/-])\d{{3}}-\d{{3}}-\d{{4}}{after}", say)
    rule("/", rf"{before}\d{{3}}/\d{{3}}-\d{{4}}{after}", say)
    rule("(", rf"(?<![\d.,-])\(\d{{3}}\)[ -]?\d{{3}}[-. ]\d{{4}}{after}", say)
    rule("(", rf"{before}\(\d\d\) ?9?\d{{4}}-\d{{4}}{after}", say)
    rule("-/ ", r"(?<![\w.,:/-])(?<!\d )0\d{1,4}(?:[ -]\d{2,}| ?/ ?\d{4,})+(?!\w|[.,]\d)", say)
    rule("-", rf"{before}1-8\d\d(?=-[A-Za-z])", say)  # 1-800-FLOWERS
    if spoken.code in ("es", "pt"):
        rule(" ", rf"{before}\d\d \d{{3}} \d\d \d\d{after}", say)
        rule(" ", rf"{before}[679]\d\d \d{{3}} (?!000)\d{{3}}{after}(?! \d| ?[€$%])", say)
    rule("-", rf"{before}\d{{3}}-\d{{4}}{after}", local)
    rule("-", rf"{before}\d-\d{{4}}(?<!00){after}", say)  # an extension: 3-5213
    rule(" ", rf"{before}\d{{4}}(?: \d{{4}}){{2,4}}{after}", say)
    rule("-", rf"{before}(?:\d{{3}}-\d\d-\d{{4}}|\d{{5}}-\d{{4}}){after}", say)
    if spoken.code == "ko":
        rule("-", rf"(?<!\(){before}1[5-8]\d\d-\d{{4}}(?!\d|년)", say)
        rule("대", r"(?<![\w.,])(\d{1,2})대(\d{1,2})(?!\d)", spoken.ratio)
    # Groups with three hyphens or more, such as serial numbers, are no amounts.
    rule("-", rf"{before}\d+(?:-\d+){{3,20}}(?![\w-])", say)
    rule("", r"(?<![\w.,])\d{3,20}(?![\w]|[.,:/-]\d)", lambda f: say(f) if f.before.strip(".:,#") in _CALLED else None)


def emergency(spoken: Spoken, rule: Rules) -> None:
    """Call 112 or 911."""
    numbers, before = spoken.words("emergency"), spoken.words("emergency_before")
    after = spoken.words("emergency_after")

    def say(found: Found) -> str | None:
        word, next_word = found.before.strip(".:,"), found.after.lower()
        *_, earlier, _ = ["", found.around.earlier, found.around.before, *found.head.split()]
        linked = word in spoken.words("links") and earlier in numbers
        sure = word in before | _CALLED or linked
        return spoken.digits(found[0]) if sure and (not next_word or next_word in after) else None

    if numbers:
        rule("", rf"(?<![\w.,:/-])(?:{ends_of(numbers)})(?![\w%]|[.,:/-]\d| ?[€$£%°])", say)


def minus(spoken: Spoken, rule: Rules) -> None:
    """2 - 1 is a sum, 1 - 2 a range, and between two names both are a score."""
    word = f"{spoken.blank}{spoken.less}{spoken.blank}"

    @rule("-−", rf"(?<![\w.,/-])({spoken.pattern}) [-−] ({spoken.pattern})(?![\w%]|[.,:/-]\d)")
    def between(found: Found) -> str | None:
        names = found.around.before[:1].isupper() and found.after[:1].isupper()
        if names or found.before in SCORE:
            return None
        first, last = (float(spoken.value(found[group])) for group in (1, 2))
        if re.match(r" (?:vor Chr|BC|B\.C|avant|antes|avanti)", f"{found.rest} {found.around.after}") or (
            spoken.code == "de" and found.around.after == "v."
        ):
            return f"{found[1]}–{found[2]}"
        return f"{found[1]}{word}{found[2]}" if first >= last else f"{found[1]}–{found[2]}"


def fractions(spoken: Spoken, rule: Rules) -> None:
    """1/2, 1 3/4, ½. Where it may be a date or a ratio, the figures stay as they are read alone."""
    letters = "A-Za-z0-9_" if spoken.joined else r"\w"
    unit = rf"(?: ?({spoken.unit_names})(?![{letters}/²³]))?"

    names = spoken.words("labels") | spoken.words("steps")

    def measured(found: Found, is_any: bool = False) -> str | None:
        if found[2] not in VULGAR and {found.before, found.around.before} & names:
            return None  # class 5/6
        said, unit = say(found, is_any), found[3]
        if not said or not unit:
            return said
        if whole_said := spoken.part_of_unit(found[1], VULGAR.get(found[2], found[2]), unit):
            return whole_said
        forms = plain(spoken.units[unit])
        form = forms[1 if (found[1] or spoken.code == "ru") and len(forms) > 1 else 0]
        return form.format(said) if "{}" in form else f"{said}{'' if spoken.joined else ' '}{form}"

    def say(found: Found, is_any: bool) -> str | None:
        whole, written = found[1], VULGAR.get(found[2], found[2])
        top, bottom = (int(figure) for figure in written.split("/"))
        said = spoken.part(top, bottom) if 0 < top < bottom <= 10 and gcd(top, bottom) == 1 else None
        said = said or (spoken.fraction(top, bottom) if is_any else None)
        if not said:
            return None
        if found[2] not in VULGAR and not whole and found.before in spoken.words("dated"):
            is_day = spoken.date[0] == "d" and bottom <= 12 and found.after not in spoken.words("of_part")
            return spoken.dated(found, "", bottom, str(top)) if is_day else keep(found)
        return said if not whole else spoken.with_part(whole, said, is_half=bottom == 2 and top == 1)

    below = r"(?<![\w.,/)%-])[-−](?=(?:\d{1,3} )?\d{1,3}/\d{1,3}(?![\d/]))"
    rule("-−", below, lambda f: spoken.below_zero(f[0]))
    rule("".join(VULGAR), rf"(?<![\w.,/:–-])(?:(\d{{1,2}}) ?)?([{''.join(VULGAR)}]){unit}(?![\w/])", measured)
    rule("/", rf"(?<![\w.,/:–-])(?:(\d{{1,2}}) )?([1-9]/(?:10|[2-9])){unit}(?![{letters}/]|[.,]\d|-\d)", measured)
    any_part = (
        rf"(?<![\w.,/:–-])(?:(\d{{1,3}}) )?(\d{{1,12}}/\d{{1,12}}){spoken.part_ends}{unit}(?![{letters}/]|[.,]\d|-\d)"
    )
    rule("/", any_part, lambda f: measured(f, is_any=True))


def others(spoken: Spoken, rule: Rules) -> None:
    """Addresses of computers, scores and ratios, directions."""
    dot = f"{spoken.blank}{spoken.dot}{spoken.blank}"
    octet, blank = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)", spoken.blank
    address = rf"(?<![\w.,])({octet}(?:\.{octet}){{3}})(?:([:/])(\d{{1,5}}))?(?:/([A-Za-z]\w*))?(?![\w]|[.:/]\d)"
    marks = {":": spoken.colon, "/": spoken.slash}

    def computer(found: Found) -> str:
        behind = f"{blank}{marks[found[2]]}{blank}{spoken.digits(found[3])}" if found[2] else ""
        behind += f"{blank}{spoken.slash} {found[4]}" if found[4] else ""
        say = spoken.digits if found[2] or spoken.code == "en" else spoken.cardinal
        return dot.join(map(say, found[1].split("."))) + behind

    rule(".", address, computer)

    @rule(":", r"(?<=localhost):(\d{1,5})(?:/([A-Za-z]\w*))?(?![\w:])")
    def port(found: Found) -> str:
        path = f" {spoken.slash} {found[2]}" if found[2] else ""
        return f" {spoken.colon} {spoken.digits(found[1])}{path}"

    begins = r"(?<![\w.,:/$€£-])\.(\d{1,5})(?![\d.]|,\d)"
    rule(".", begins, lambda f: spoken.below_one(f[1]))
    rule(":", r"(?<![\w.,:/-])(\d{1,3}):(\d|[1-9]\d{2,6})(?![\w:/]|-\d|[.,]\d)", spoken.ratio)

    @rule(":", r"(?<![\w.,:/-])([1-9]\d{1,2}):(\d\d)(?![\w:/]|-\d|[.,]\d)")
    def score(found: Found) -> str | None:
        """78:96 is no time of day. 25:10 may be minutes and seconds, which English says without a word between."""
        first, last = found[1], found[2]
        if int(first) <= 24 and int(last) <= 59:
            return None
        is_score = int(last) > 59 or (spoken.code != "en" and last[0] != "0")
        return spoken.ratio(found) if is_score else f"{spoken.cardinal(first)} {spoken.cardinal(last)}"

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


def numbered_king(spoken: Spoken, word: str, before: str) -> str | None:
    """A name and an ordinal, where the caller knows that it is no sequel: German "Thutmosis III." with a full stop."""
    no_names = spoken.words("chapters") | spoken.words("labels")
    is_name = _NAME.fullmatch(before) and no_names.isdisjoint((before, before.lower())) and word in {"I"} | _SEQUELS
    return spoken.king(str(number_of(word)), before in spoken.words("queens")) if is_name else None


def roman(spoken: Spoken, word: str, before: str, earlier: str = "") -> str | None:
    """The number after a king's name or "Chapter", without marks at its ends; None if it is none."""
    kings = spoken.words("kings")
    if spoken.code == "fr" and word in ("Ier", "Ire") and before in kings:
        return "premier" if word == "Ier" else "première"
    number = str(number_of(word, 99))
    if number == "0" or word == "L" or not word.isascii() or spoken.joined:  # Appendix L
        return None
    if word == "I" and (earlier, before) == ("World", "War"):
        return spoken.cardinal("1")
    if before in spoken.words("chapters") and (before, word) not in (("War", "I"), ("Type", "V"), ("Type", "X")):
        return spoken.cardinal(number)
    if declined := spoken.declined_kings.get(before):
        return spoken.ordinal(number, case=declined[0], gender=declined[1])
    title = earlier.lower()
    if title in spoken.words("rulers") and before[:1].isupper():
        return spoken.king(number, title in spoken.words("women_rulers"))
    if before not in kings and word in _SEQUELS and spoken.code != "it" and _NAME.fullmatch(before):
        return spoken.cardinal(number)  # Rocky II
    if before not in kings or (word == "I" and spoken.code == "en"):
        return None
    return spoken.king(number, before in spoken.words("queens"))
