"""Times of day, durations, decades, and years where a language does not say them as counts."""

import re

from spoken_text.rule import DASH, HOUR, MINUTE, Found, Rules, ends_of, keep
from spoken_text.spoken import Spoken, plain

_ENGLISH_HALF = r"(?:\s?([AaPp])(?:\.\s?[Mm]\.?|[Mm])(?!\w))"
_SURE = frozenset("year ad jahr".split())
"""Before any year."""


def durations(spoken: Spoken, rule: Rules) -> None:
    """1h 30m, 2m 30s, 2:05:10, and in English "30s"."""

    def say(hours: str | None, minutes: str | None, seconds: str | None) -> str | None:
        values = [re.sub("^0+(?=\\d)", "", (value or "").replace(",", ".")) for value in (hours, minutes, seconds)]
        if any(
            value and float(value) >= 60
            for value, larger in zip(values[1:], (hours, hours or minutes), strict=True)
            if larger
        ):
            return None
        given = zip(values, spoken.duration_units, strict=True)
        parts = [spoken.lasting(value, unit) for value, unit in given if value and (float(value) or not hours)]
        return spoken.blank.join(filter(None, parts))

    h = r"(\d{1,3}) ?(?:h|hrs?|Std\.?|ч\.?)"
    m = r"(\d{1,2}) ?(?:mins?|m|м|мин)(?![A-Za-zа-я])\.?"
    s = r"(\d{1,2}(?:[.,]\d{1,3})?) ?(?:secs?|s|с|сек)(?![A-Za-zа-я])\.?"
    begins, ends = r"(?<![\w.,:–-])", r"(?![\w²³/]|[.,]\d)" if not spoken.joined else r"(?![A-Za-z0-9_²³/])"
    between = "(?:,? )?"
    rule("mм", rf"{begins}{h}{between}{m}(?:{between}{s})?{ends}", lambda f: say(f[1], f[2], f[3]))
    rule("mм", rf"{begins}{m}{between}{s}{ends}", lambda f: say(None, f[1], f[2]))
    unit = spoken.duration_units[0]
    hours = ends_of(plain(spoken.units.get(unit, [unit])))
    lasting = rf"(?<![\w.,:–-])(\d{{1,3}}):([0-5]\d):([0-5]\d)(?: (?:{hours})\b)?(?![\w:/]|[.,]\d)"
    rule(":", lasting, lambda f: say(f[1], f[2], f[3]))
    if spoken.code in ("en", "de"):
        rule("h", r"(?<![\w.,:–-])(\d\d?)h([0-5]\d)\b", lambda f: say(f[1], f[2], None))
    if spoken.code == "en":
        rule("s", r"(?<![\w.,])['’]?((?:1[1-9]|20)?\d0)['’]s\b", lambda f: f"{f[1]}s")
        rule("s", r"(?<![\w.,'’])(\d{1,3})s\b", lambda f: _seconds(spoken, f))
        rule("s", r"(?<![\w.,])['’]?(\d{1,3}0)s\b", lambda f: re.sub("y$", "ie", spoken.year(f[1])) + "s")


def _seconds(spoken: Spoken, found: Found) -> str | None:
    """ "30s" are seconds or a decade in English: what stands before tells. Without that it stays."""
    before, number = found.before.strip("-–'’"), found[1]
    if re.search("[A-Z]", (found.head.split() or [found.around.before])[-1][1:]):  # iPhone 5s
        return f"{spoken.cardinal(number)} S"
    is_tens = len(number) == 2 and number[1] == "0" and number >= "20"
    last = not found.after
    if before in spoken.words("seconds") or not is_tens or (before == "in" and last):
        return spoken.counted(str(int(number)), "s")
    return None if before in spoken.words("decade") or before.endswith(("'s", "0s")) else keep(found)


def clocks(spoken: Spoken, rule: Rules) -> None:
    """Times of day."""

    say = spoken.clock_at

    half = {"en": r" ?[AaPp]\.?[Mm]\b", "de": r" Uhr\b"}.get(spoken.code)
    if half:
        hours = rf"(?<![\w:.,/-])(\d\d?) ?{DASH} ?(?=\d\d?{half})"
        rule("MmU", hours, lambda f: f"{spoken.whole(int(f[1]))} {spoken.to} ")
    clock, before = rf"(?<![\d:.,]){HOUR}[:：]{MINUTE}(?![\d:])", r"(?<![\w:.,])"
    span = rf"{clock} ?{DASH} ?(?=\d\d?[:：][0-5]\d(?!\d))"
    start = "" if spoken.code == "ko" else spoken.blank
    rule(":：", span, lambda f: f"{say(f)}{start}{spoken.to}{spoken.blank}")
    if spoken.code == "en":
        day = rf"(?<![\d:.,]){HOUR}(?::{MINUTE})?{_ENGLISH_HALF} ?{DASH} ?(?=\d\d?(?::\d\d)?{_ENGLISH_HALF})"
        rule(".Mm", day, lambda f: f"{spoken.at_time(f[1], f[2] or '0', f[3])} {spoken.to} ")

        def stop(found: Found) -> str:
            """The full stop of "p.m." may end the sentence too."""
            day = found.around.after.rstrip(".,;:!?)")
            return "" if day in spoken.words("no_start") or day.isupper() else found.stop(found[0])

        rule(":：", rf"{clock}{_ENGLISH_HALF}?", lambda f: spoken.at_time(f[1], f[2], f[3]) + stop(f))
        dotted = rf"(?<![\w:.,]){HOUR}\.{MINUTE}{_ENGLISH_HALF}"
        rule(".", dotted, lambda f: spoken.at_time(f[1], f[2], f[3]) + stop(f))
        hour = rf"(?<![\d:.,])(\d\d?){_ENGLISH_HALF}"
        rule(".Mm", hour, lambda f: f"{spoken.cardinal(f[1])} {f[2].upper()}M{stop(f)}")
    else:
        rule(":：", clock + spoken.clock_end, say)
    if spoken.code in ("es", "it", "pt", "ru"):
        end = r" ?h\b" if spoken.code != "ru" else r"(?![\d.,]\d| ?[%€$₽°]| (?:кг|км|м|г|млн|млрд|тыс|руб))"
        words = {"ru": ("в",), "it": ("ore", "alle", "dalle")}.get(spoken.code, ())
        only = spoken.code != "ru"
        dotted = rf"{before}{HOUR}\.{MINUTE}"
        rule(".", dotted + end, lambda f: say(f) if only or f.before in words else None)
        if spoken.code == "it":
            rule(".", rf"{dotted}(?![\w]|[.,]\d)", lambda f: say(f) if f.before in words else None)
    if spoken.code == "de":
        rule(".", rf"(?<![\d:.,]){HOUR}\.{MINUTE} Uhr\b", say)
        rule("U", r"(?<![\d:.,])(\d\d?)(?= Uhr\b)", lambda f: "ein" if f[1] == "1" else spoken.whole(int(f[1])))
    if spoken.code in ("fr", "pt", "es", "it"):
        rule("h", rf"{before}{HOUR} ?h ?{MINUTE}(?:min)?\b", say)


def years(spoken: Spoken, rule: Rules) -> None:
    """Years with a word or a mark that says so. They come before units: "1985 г." are no grams."""
    spoken.years_first(rule)
    if spoken.joined:
        return
    year, ends = r"(?:1[1-9]|20)\d\d", r"(?![\w%]|[.,]\d|[:/–-]\d)(?! ?[$€£%°])"
    both = rf"(?<![\w.,:/-])({year})[-–]({year}){ends}"
    rule("-–", both, lambda f: f"{spoken.year(f[1])} {spoken.to} {spoken.year(f[2])}")
    short = rf"(?<![\w.,:/-])({year})[-–](\d\d){ends}"

    @rule("-–", short)
    def shortened(found: Found) -> str | None:
        """1990-95, 2003-04"""
        last = found[2] if found[2][0] != "0" else found[1][:2] + found[2]
        is_later = found[2] > found[1][2:]
        return f"{spoken.year(found[1])} {spoken.to} {spoken.cardinal(last)}" if is_later else None

    if spoken.words("years"):
        rule("(", r"(?<=\()(1[5-9]\d\d|20\d\d)(?=\))", lambda f: spoken.year(f[1]))
    if spoken.code == "en":
        era = r"(?<![\w.,:/-])(\d{1,4}) ?(AD|BCE?|CE|A\.D\.|B\.C\.)(?!\w)"
        rule("ABC", era, lambda f: f"{_short(spoken, f[1])} {f[2]}")


def years_behind_words(spoken: Spoken, rule: Rules) -> None:
    """Years after a word such as "in"."""
    if not spoken.words("years"):
        return
    before = spoken.words("years") | _SURE | {month.lower() for month in spoken.months}

    @rule("", r"(?<![\w.,:/-])(\d{3}|1\d{3}|20\d\d)(?![\d%]|[.,]\d|[:/-]\d| \d{3}(?!\d))")
    def say(found: Found) -> str | None:
        word, linked = found.before, False
        if word in ("and", "to"):  # between 1990 and 1995
            linked = bool(re.fullmatch(r"1[5-9]\d\d|20\d\d", found.around.earlier))
        linked |= word == "of" and found.around.earlier in spoken.words("seasons")
        linked |= word == "about" and found.around.earlier in spoken.words("years") and not spoken.is_counted(found)
        year = int(found[1])
        sure = linked or word == "in" and spoken.code == "en" and not found.after.endswith("s")
        is_early = year < 1100 and not (year > 1000 and sure)  # in 1066
        if not linked and word not in before or (word not in _SURE and is_early):
            return None
        is_count = (
            spoken.is_counted(found)
            and not linked
            and (word not in spoken.words("sure_years") or found[1].endswith("00"))
        )
        return None if is_count and word != "year" else _short(spoken, found[1])


def _short(spoken: Spoken, year: str) -> str:
    return spoken.year(year) if len(year) > 2 else spoken.cardinal(year)
