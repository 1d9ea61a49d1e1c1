"""Years, where a language does not say them as counts."""

import re

from spoken_text.rule import DASH, Around, Rules, keep
from spoken_text.spoken import Spoken

_SURE = frozenset("year ad jahr".split())
_NO_NOUN = frozenset("was is as has does his this its us s".split())
_CASES = {"в": "p", "во": "p", "о": "p", "об": "p", "к": "d", "ко": "d", "по": "n"}
_GENITIVE = frozenset(
    "с со до от после около из для без начала начале конца конце середины середине лета летом зимой осенью весной зимы "
    "весны осени марта января февраля апреля мая июня июля августа сентября октября ноября декабря".split()
)
_MONTHS_IN = frozenset("январе феврале марте апреле мае июне июле августе сентябре октябре ноябре декабре".split())


def rules(spoken: Spoken, around: Around) -> Rules:
    """Years with a word or a mark that says so. They come before units: "1985 г." are no grams."""
    if spoken.code == "ru":
        yield from _russian(spoken, around)
    if spoken.joined:
        return
    year = r"(?:1[1-9]|20)\d\d"
    both = rf"(?<![\w.,:/-])({year})[-–]({year})(?![\w%]|[.,]\d|[:/–-]\d)(?! ?[$€£%°])"
    yield both, lambda f: f"{spoken.year(f[1])} {spoken.to} {spoken.year(f[2])}"
    short = rf"(?<![\w.,:/-])({year})[-–](\d\d)(?![\w%]|[.,]\d|[:/–-]\d)(?! ?[$€£%°])"
    yield short, lambda f: f"{spoken.year(f[1])} {spoken.to} {spoken.cardinal(f[2])}" if f[2] > f[1][2:] else None
    if spoken.years:
        yield r"(?<=\()(1[5-9]\d\d|20\d\d)(?=\))", lambda f: spoken.year(f[1])
    if spoken.code == "en":
        yield (
            r"(?<![\w.,:/-])(\d{1,4}) ?(AD|BCE?|CE|A\.D\.|B\.C\.)(?!\w)",
            lambda f: f"{_english(spoken, f[1])} {f[2]}",
        )


def counts(spoken: Spoken, around: Around) -> Rules:
    """Years after a word such as "in"."""
    if not spoken.years:
        return
    before = spoken.years | _SURE | {month.lower() for month in spoken.months}

    def say(found: re.Match[str]) -> str | None:
        word, after = around.word_before(found), around.word_after(found)
        if word not in before or (word not in _SURE and found[1] < "1100"):
            return None
        is_count = spoken.code == "en" and after[-1:] == "s" and after.islower() and after not in _NO_NOUN
        return None if is_count and word != "year" else _english(spoken, found[1])

    yield r"(?<![\w.,:/-])(\d{3}|1\d{3}|20\d\d)(?![\d%]|[.,]\d|[:/-]\d)", say


def _english(spoken: Spoken, year: str) -> str:
    return spoken.year(year) if len(year) > 2 else spoken.cardinal(year)


def _russian(spoken: Spoken, around: Around) -> Rules:
    nouns = {"n": "год", "g": "года", "d": "году", "p": "году"}

    def say(found: re.Match[str]) -> str | None:
        year, written = found[1], found[2]
        before = around.word_before(found)
        bare = written.strip() == "г"
        case = {"года": "g", "годом": "i", "год": "n"}.get(written)
        if not case:
            case = "g" if before in _GENITIVE or before in _MONTHS_IN else _CASES.get(before, "n")
            if written == "г." and case == "n" and year < "1100":
                return None
            if bare and case == "n":  # grams or a year
                return keep(found[0])
        if written == "году":
            case = "d" if before in ("к", "ко") else "p"
        stop = around.stop(found, False) if written == "г." else ""
        noun = written if written not in ("г", "г.") else nouns[case]
        return f"{_ordinal(spoken, year, case)} {noun}{stop}"

    yield r"(?<![\w.,:/-])(1\d{3}|20\d\d) ?(году|года|годом|год|г\.|г)(?!\w)", say

    def span(found: re.Match[str]) -> str:
        before = around.word_before(found)
        case = "p" if before in ("в", "во") else "n"
        stop = around.stop(found, False) if found[3] == "гг." else ""
        noun = "годах" if case == "p" else "годы"
        return f"{_ordinal(spoken, found[1], case)} – {_ordinal(spoken, found[2], case)} {noun}{stop}"

    yield rf"(?<![\w.,:/-])(1\d{{3}}|20\d\d) ?{DASH} ?(1\d{{3}}|20\d\d) ?(гг\.|гг|годы|годах)(?!\w)", span


def _ordinal(spoken: Spoken, year: str, case: str) -> str:
    said = spoken.ordinal(year, case=case)
    return said.removeprefix("одна ")
