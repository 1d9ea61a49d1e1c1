"""Times of day, durations and decades."""

import re

from spoken_text.ko import rules as korean
from spoken_text.rule import DASH, Around, Rules, Say, keep
from spoken_text.spoken import Spoken

_ENGLISH_HALF = r"(?:\s?([AaPp])(?:\.\s?[Mm]\.?|[Mm])(?!\w))"
_HOURS = {"fr": r"(?: ?(?:h|heures)\b)?", "de": r"(?: ?Uhr\b)?", "es": r"(?: ?h\b)?", "pt": r"(?: ?h\b)?"}
_NO_START = frozenset("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
_LASTS = {
    "ru": ("ч", "мин", "сек"), "zh": ("h", "min", "s"), "ja": ("h", "min", "s"), "ko": ("h", "min", "s"),
}  # fmt: skip
_DECADE = frozenset("the early mid late his her their my your our its 's and or to".split())
_SECONDS = frozenset(
    "for after every within about wait waits waited take takes took last lasts lasted under over than only just next "
    "first of sleep timeout runs ran another extra additional approximately around roughly nearly almost is was".split()
)


def durations(spoken: Spoken, around: Around) -> Rules:
    """1h 30m, 2m 30s, 2:05:10, and in English "30s"."""
    hour, minute, second = _LASTS.get(spoken.code, ("h", "min", "s"))

    def part(number: str | None, unit: str) -> str:
        if not number:
            return ""
        if spoken.code == "ko":
            is_native = unit == "h" and 0 < int(number) < 100
            said = korean.native(int(number)) if is_native else spoken.cardinal(str(int(number)))
            return said + {"h": " 시간", "min": "분", "s": "초"}[unit]
        return spoken.counted(str(int(number)), unit) or ""

    def say(hours: str | None, minutes: str | None, seconds: str | None) -> str | None:
        if (hours and minutes and int(minutes) > 59) or ((hours or minutes) and seconds and int(seconds) > 59):
            return None
        given = [(hours, hour), (minutes, minute), (seconds, second)]
        parts = [part(number, unit) for number, unit in given if number and (int(number) or not hours)]
        return (" " if not spoken.joined or spoken.code == "ko" else "").join(filter(None, parts))

    h = r"(\d{1,3}) ?(?:h|hrs?|Std\.?|ч\.?)"
    m = r"(\d{1,2}) ?(?:mins?|m|м|мин)(?![A-Za-zа-я])\.?"
    s = r"(\d{1,2}) ?(?:secs?|s|с|сек)(?![A-Za-zа-я])\.?"
    begins, ends = r"(?<![\w.,:–-])", r"(?![\w²³/]|[.,]\d)" if not spoken.joined else r"(?![A-Za-z0-9_²³/])"
    between = "(?:,? )?"
    yield rf"{begins}{h}{between}{m}(?:{between}{s})?{ends}", lambda f: say(f[1], f[2], f[3])
    yield rf"{begins}{m}{between}{s}{ends}", lambda f: say(None, f[1], f[2])
    yield r"(?<![\w.,:–-])(\d{1,3}):([0-5]\d):([0-5]\d)(?![\w:/]|[.,]\d)", lambda f: say(f[1], f[2], f[3])
    if spoken.code in ("en", "de"):
        yield r"(?<![\w.,:–-])(\d\d?)h([0-5]\d)\b", lambda f: say(f[1], f[2], None)
    if spoken.code == "en":
        yield r"(?<![\w.,'’])(\d{1,3})s\b", _english_seconds(spoken, around)


def _english_seconds(spoken: Spoken, around: Around) -> Say:
    """ "30s" are seconds or a decade: what stands before tells. Without that it stays."""

    def say(found: re.Match[str]) -> str | None:
        before, number = around.word_before(found).strip("-–'’"), found[1]
        is_tens = len(number) == 2 and number[1] == "0" and number >= "20"
        last = not around.word_after(found)
        if before in _SECONDS or not is_tens or (before == "in" and last):
            return spoken.counted(str(int(number)), "s")
        return None if before in _DECADE or before.endswith(("'s", "0s")) else keep(found[0])

    return say


def times(spoken: Spoken, around: Around) -> Rules:
    """Times of day."""

    def say(hour: str, minute: str, half: str | None = None) -> str | None:
        if int(hour) > 24 or int(minute) > 59:
            return None
        return spoken.at_time(hour, minute, f"{half.upper()}M" if half else "")

    half = {"en": r" ?[AaPp]\.?[Mm]\b", "de": r" Uhr\b"}.get(spoken.code)
    if half:
        hours = rf"(?<![\w:.,/-])(\d\d?) ?{DASH} ?(?=\d\d?{half})"
        yield hours, lambda f: f"{spoken.cardinal(str(int(f[1])))} {spoken.to} "
    clock = r"(?<![\d:.,])(\d\d?)[:：](\d\d)(?![\d:])"

    def span(found: re.Match[str]) -> str | None:
        said = say(found[1], found[2])
        start = "" if spoken.code == "ko" else spoken.around_dot
        return said and f"{said}{start}{spoken.to}{spoken.around_dot}"

    yield rf"{clock} ?{DASH} ?(?=\d\d?[:：][0-5]\d(?!\d))", span
    if spoken.code == "en":
        day = rf"(?<![\d:.,])(\d\d?)(?::(\d\d))?{_ENGLISH_HALF} ?{DASH} ?(?=\d\d?(?::\d\d)?{_ENGLISH_HALF})"
        yield day, lambda f: f"{say(f[1], f[2] or '0', f[3])} {spoken.to} " if say(f[1], f[2] or "0", f[3]) else None

        def stop(found: re.Match[str]) -> str:
            """The full stop of "p.m." may end the sentence too."""
            day = around.after.rstrip(".,;:!?)")
            ends = found[0][-1] == "." and day not in _NO_START and not day.isupper()
            return around.stop(found, False) if ends else ""

        yield rf"{clock}{_ENGLISH_HALF}?", lambda f: (said := say(f[1], f[2], f[3])) and said + stop(f)
        hour = rf"(?<![\d:.,])(\d\d?){_ENGLISH_HALF}"
        yield hour, lambda f: f"{spoken.cardinal(f[1])} {f[2].upper()}M{stop(f)}"
    else:
        yield clock + _HOURS.get(spoken.code, ""), lambda f: say(f[1], f[2])
    if spoken.code in ("es", "it", "pt", "ru"):
        end = r" ?h\b" if spoken.code != "ru" else r"(?![\d.,]\d| ?[%€$₽°]| (?:кг|км|м|г|млн|млрд|тыс|руб))"
        words = {"ru": ("в",), "it": ("ore", "alle", "dalle")}.get(spoken.code, ())
        only = spoken.code != "ru"
        dotted = rf"(?<![\w:.,])(\d\d?)\.([0-5]\d){end}"
        yield dotted, lambda f: say(f[1], f[2]) if only or around.word_before(f) in words else None
        if spoken.code == "it":
            bare = r"(?<![\w:.,])(\d\d?)\.([0-5]\d)(?![\w]|[.,]\d)"
            yield bare, lambda f: say(f[1], f[2]) if around.word_before(f) in words else None
    if spoken.code == "de":
        yield r"(?<![\d:.,])(\d\d?)\.([0-5]\d) Uhr\b", lambda f: say(f[1], f[2])
        yield r"(?<![\d:.,])(\d\d?)(?= Uhr\b)", lambda f: "ein" if f[1] == "1" else spoken.cardinal(str(int(f[1])))
    if spoken.code in ("fr", "pt", "es", "it"):
        yield r"(?<![\w:.,])(\d\d?) ?h ?([0-5]\d)(?:min)?\b", lambda f: say(f[1], f[2])


def decades(spoken: Spoken) -> Rules:
    if spoken.code == "en":
        yield r"(?<![\w.,])['’]?(\d{1,3}0)s\b", lambda f: re.sub("y$", "ie", spoken.year(f[1])) + "s"
