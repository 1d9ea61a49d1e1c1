"""What every language writes in several ways, brought to the one way that its other rules read: dates in another order,
a date beside a time, signs within amounts, and words that are short for others."""

import re
from functools import cache

from spoken_text.amounts import INITIALS, SIGN
from spoken_text.rule import Found, Kept, Rules, ends_of, keep
from spoken_text.spoken import LANGUAGES, Spoken, gender_of
from spoken_text.tables import table_of

_SIGN = re.compile(r"(?<!\w)[@#](?=[^\W\d]|$)|\w&(?=\w)|^@$")  # a name such as @ann, a tag, AT&T
_SHORT = ("titles", "short", "short_last")
"""Tables of words that are short for others: before a name only, anywhere, and also at the end of a sentence."""
_OPENING, _CLOSING = "([\"'“„«¿¡", ",;:!?)]»”\"'"
_RAISED = str.maketrans("melrs", "ᵐᵉˡʳˢ")
_BESIDE = r"(?<![\w.,:/-])", r"(?![\w/-]|[.,:]\d)"
"""No digit or mark of a number stands beside."""


def _spellings(written: str, code: str) -> set[str]:
    """ "z. B." is also written "z.B.", and begins a sentence with a capital. Spanish "Sr." is also "sr." """
    forms = {written, written[0].upper() + written[1:]} | ({written.lower()} if code in ("es", "it", "pt") else set())
    raised = {written[0] + written[1:].translate(_RAISED)} if code == "fr" and written.isalpha() else set()  # Mᵐᵉ
    return forms | raised | {form.replace(". ", ".") for form in forms}


@cache
def short_words(code: str) -> dict[str, tuple[str, str]]:
    """What is short for other words in a language -> its table and what is said."""
    data = table_of(f"{code}/words")
    rows = ((table, *row) for table in _SHORT for row in data.get(table, {}).items())
    return {form: (table, said) for table, written, said in rows for form in _spellings(written, code)}


@cache
def _beginnings(code: str) -> frozenset[str]:
    return frozenset(written.split()[0] for written in short_words(code))


@cache
def short_in_any_language() -> frozenset[str]:
    """The first words of all that is short for others."""
    streets = {
        word for code in LANGUAGES.values() for word in table_of(f"{code}/words")["lists"].get("streets", "").split()
    }
    return frozenset().union(streets, *map(_beginnings, LANGUAGES.values()))


def begins(spoken: Spoken, word: str) -> bool:
    """May the word be short for another one, a name such as @ann, or a sign between words?"""
    core = word.lstrip(_OPENING).rstrip(_CLOSING)
    if core in _beginnings(spoken.code):
        return True
    return core == "&" or _SIGN.search(core) is not None and "=" not in core


def follows(spoken: Spoken, word: str, held: str) -> bool:
    """Does the word go on with what `held` begins, as the "B." of "z. B."?"""
    if held[-1] != "." and held.lstrip(_OPENING) not in _beginnings(spoken.code):
        return False
    both = f"{held.lstrip(_OPENING)} {word.rstrip(_CLOSING)}"
    return any(written.startswith(both) for written in short_words(spoken.code) if " " in written)


def words(spoken: Spoken, rule: Rules) -> None:
    """Words that are short for others, @names and #tags."""
    known = short_words(spoken.code)
    unsure = {name for name in spoken.table("titles") if len(name) == 2 or name[0].islower()}

    def full(found: Found) -> str | None:
        table, said = known[found[0]]
        after = found.around.after if not found.rest.strip() else found.after
        if (
            found[0].rstrip(".") in spoken.units
            and found.before[-1:].isdecimal()
            and (found.rest[:1] != "/" or spoken.code == "ru")
        ):
            return None
        is_start = found[0] not in spoken.table(table) and found[0][0].isupper() and found[0].count(".") == 1
        if is_start and not (after[:1].islower() or after.lstrip("+(")[:1].isdecimal()):
            return None  # "Max." at the end of a sentence is a name
        is_name = (
            found[0] == "M." and after == "et" or after[:1].isupper()
            if found[0] in unsure
            else after[:1].isalpha() or found[0][-1] in "ᵉʳˢ"
        )
        previous = (found.head.split() or [found.around.before])[-1]
        initial = found[0] == "D." and previous[:1].isupper() and previous not in known  # Franklin D. Roosevelt
        if table == "titles" and (not is_name or initial):
            return None
        said = said if found[0][0].islower() or not said[0].islower() else said[0].upper() + said[1:]
        if table == "short_last":
            return said + found.stop(found[0])
        return said + ("." if found[0][-1] == "." and not after and not found.rest else "")

    if known:
        rule("", rf"(?<![\w.@#])(?:{ends_of(known)})(?![\w.-]*\w)", full)
    blank = spoken.blank
    rule("@", r"(?<![\w.@])@(?=[^\W\d]|[^\x00-\x7f]|$| )", lambda f: spoken.at + spoken.blank)
    goes_on = r"(?=[^\W\d]|[^\x00-\x7f]|$)"
    tagged = rf"(?<![\w#&])#{goes_on}"
    rule("#", tagged, lambda f: spoken.hashtag + blank if f.rest or (spoken.joined and f.around.after) else None)
    link = spoken.ampersand
    rule("&", r"(?<=\w)&(?=\w)|(?<!\S)&(?!\S)", lambda f: f"{blank}{link}{blank}" if f[0] != f.match.string else link)


def numbers(spoken: Spoken, rule: Rules) -> None:
    """Before the rules of the language."""
    before, _ = _BESIDE
    if spoken.decimal == ",":
        thousands = r"(?<![\w.,])[1-9]\d{0,2}(?:,000)+(?![\w,]|\.\d)"
        rule(",", thousands, lambda f: f[0].replace(",", ""))
    rule("⁄", r"(?<=\d)⁄(?=\d)", lambda f: "/")
    if spoken.decimal == ".":  # $1,5 may be anything
        odd = rf"(?<![\w.,])[-−]?(?:\d+,\d(?!\d) ?(?:{SIGN})|(?:{SIGN})[-−]?\d+,\d(?!\d))\S*"
        rule(INITIALS, odd, keep)
    rule("-−", rf"({SIGN}) ?([-−])(?=[\d.])", lambda f: f"{f[2]}{f[1]}")
    if not spoken.joined:  # 1914—1918
        rule("—", r"(?<=[\dIVXLХ])—(?=[\dIVXLХ])", lambda f: "–")
    rule("º°", r"(?<=\d) ?[º°] ?(?=[CF](?!\w))", lambda f: Kept(" °"))
    if spoken.joined:
        alone = r"^(\d{1,4}) / (\d{1,4})$"
        rule("/", alone, lambda f: f"{f[1]}/{f[2]}" if f.around.begins and not f.around.after else None)
    rule(" ", r"(?<![\w.,])\d{1,3}(?: \d{3}){5,9}(?![\w]|[.,]\d| \d)", lambda f: spoken.digits(f[0].replace(" ", "")))
    # A comma comes between a date and a time, and between the items of a list without blanks.
    comma = spoken.pause.strip()
    blank = spoken.pause.removeprefix(comma)
    date = rf"{before}(?:\d{{4}}([./-])\d\d?\1\d\d?|\d\d?([./-])\d\d?\2(?:\d\d)?\d\d)"
    rule("./-", rf"{date} (?=\d\d?[:：h]\d\d)", lambda f: f"{f[0].rstrip()}{comma}{blank}")
    rule(",", r"(?<=[^\s\d.,]),(?=\d)", lambda f: comma + blank)
    items = r"(?<![\d.,])(\d{1,2}),(?=\d{1,2}\.\d{1,2}(?![\d.,]))"
    rule(",", items, lambda f: f[1] + comma + blank)
    rule(":h", r"(?<![\w.,:/-])((?:19|20)\d\d) (?=\d\d?[:h]\d\d)", lambda f: f"{f[1]}{comma} ")
    _dates(spoken, rule)
    if spoken.decimal == ".":  # .5kg
        rule(".", rf"(?<![\w.,:/$€£-])(?=\.\d{{1,5}} ?(?:{spoken.unit_names})(?!\w))", lambda f: "0")
    rule("kcdmf23м", r"(?<=[\d/]) ?((?:[kcdm]?m|ft|[кс]?м))([23])(?![\w²³])", lambda f: f" {f[1]}{'²³'[f[2] == '3']}")
    # Chapter 01 has no zero, and 66·5 is a decimal.
    rule("0", r"^0+(?=[1-9]\d?(?!\w|[.,:/-]\d))", lambda f: "" if _is_label(spoken, f) else None)
    units = rf"(?= ?(?:%|{spoken.unit_names})(?!\w))" if spoken.joined else r"(?![\d·])"
    raised = rf"(?<![\d·・.,])(\d+)[·・](\d+){units}"
    rule("·・", raised, lambda f: None if "=" in f.match.string else f"{f[1]}{spoken.decimal}{f[2]}")
    if spoken.either and spoken.ordinal_ends:
        ordinals = rf"(?<=\d)({spoken.ordinal_ends})/(?=\d+{spoken.ordinal_ends})"
        rule("/", ordinals, lambda f: f"{f[1]} {spoken.either} ")

    @rule("+×÷*", r"(?<![\w.,/-])(?=[\d.-]*[+×÷*])\d+(?:\.\d+)?(?:[-+×÷*]\d+(?:\.\d+)?){2,9}(?![\w-])")
    def formula(found: Found) -> str:
        """5×4+3-6"""
        return found[0].replace("-", f"{blank}{spoken.less}{blank}")

    # A letter that is a part of a name, as in Qwen3-0.6B, is no power of ten.
    @rule("BMKbk", r"(?<=\w-)(\d+(?:\.\d+)?)([BMKbk])(?!\w)")
    def named(found: Found) -> str | None:
        is_name = re.search(r"[^\W\d]{2}\S*-$", found.head)
        return f"{spoken.cardinal(found[1])}{spoken.blank}{found[2]}" if is_name else None


def slashes(spoken: Spoken, rule: Rules) -> None:
    """What no other rule has read: a bar is never left between digits and words."""
    names, has_rates = spoken.unit_names, bool(spoken.table("rates"))

    def per(name: str) -> str | None:
        forms = spoken.units.get(name, [name, spoken.gender(name)])
        return spoken.blank + spoken.per_one(forms[0], gender_of(forms)) if "{}" not in forms[0] else None

    def rate(found: Found) -> str | None:
        said, behind = spoken.counted_as(found[1], found[2]), per(found[3])
        return said and behind and said + behind

    words = "" if has_rates else r"|[^\W\d_]{3,12}"
    rule("/", rf"(?<![\w.,/-])({spoken.pattern}) ?({names})/({names}{words})(?![\w²³/])", rate)
    rule("/", rf"(?<=[^\s/_])\.? ?/ ?({names})(?![\w²³/])", lambda f: per(f[1]))
    rule("/", r"(?<=\S) / (?=\S)", lambda f: spoken.pause)
    if not has_rates:
        foreign = r"(?<=[^\s\d/_])/([A-Za-zà-ÿ]{1,9}[²³]?)(?!\w)"
        rule("/", foreign, lambda f: None if not f.head.strip() or f[1][1:].isupper() else per(f[1]))
    rule("/", r"(?<!\S)(?=\S*\d)\S*/\S*", lambda f: _by_parts(spoken, f[0].strip("/")))


def chains(spoken: Spoken, rule: Rules) -> None:
    """Numbers with marks between that no rule has read: all of them are read, or none."""
    rule("-:·", r"(?<!\S)\S*\d[-:·]\d\S*", lambda f: _by_parts(spoken, f[0]))


def _by_parts(spoken: Spoken, token: str) -> str:
    if spoken.over and re.fullmatch(rf"{spoken.pattern}/{spoken.pattern}", token) and re.search("[.,]", token):
        return f" {spoken.over} ".join(map(spoken.said, token.split("/")))
    token = token.replace("/", f"{spoken.blank}{spoken.slash}{spoken.blank}")

    def say(found: re.Match[str]) -> str:
        behind = token[found.end() : found.end() + 1]
        start = spoken.blank if token[found.start() - 1 : found.start()].isalpha() else ""
        return start + spoken.said(found[0]) + (spoken.blank if behind.isalpha() else "")

    return re.sub(rf"{spoken.pattern}|\d+", say, token)


def _is_label(spoken: Spoken, found: Found) -> bool:
    names = spoken.words("chapters") | spoken.words("labels") | spoken.words("steps")
    return {found.before, found.around.before} & names != set()


def _dates(spoken: Spoken, rule: Rules) -> None:
    """Dates whose order their numbers tell: 24/04/2020, 03/15/2024, 2022.10.21."""
    before, behind = _BESIDE

    def at_first(found: Found) -> str | None:
        year, month, day = found[1], int(found[3]), int(found[4])
        return spoken.dated(found, year, month, str(day)) if 0 < month <= 12 and 0 < day <= 31 else None

    def at_last(found: Found) -> str | None:
        first, second, year = int(found[1]), int(found[3]), found[4]
        day_first = second <= 12 and (first > 12 or spoken.date.startswith("d") or first == second)
        day, month = (first, second) if day_first else (second, first)
        if not (0 < month <= 12 and 0 < day <= 31) or (not day_first and day <= 12):
            return None
        return spoken.dated(found, year, month, str(day)) + (found.stop(found[0]) if found[0][-1] == "." else "")

    if not spoken.joined:
        rule("./", rf"{before}((?:1[5-9]|20)\d\d)([./])(\d\d)\2(\d\d){behind}", at_first)
        rule("-/", rf"{before}((?:1[5-9]|20)\d\d)([-/])(\d\d?)\2(\d\d?){behind}", at_first)
    marks = "/" if spoken.date.startswith("m") else "./-"
    rule("./-", rf"{before}(\d\d?)([{marks}])(\d\d?)\2((?:1\d|20)\d\d){spoken.year_ends}{behind}", at_last)
