"""Years, where a language does not say them as counts."""

import re

from spoken_text.rule import Rules
from spoken_text.spoken import Spoken

_SURE = frozenset("year ad jahr".split())


def rules(spoken: Spoken, rule: Rules) -> None:
    """Years with a word or a mark that says so. They come before units: "1985 г." are no grams."""
    spoken.years_first(rule)
    if spoken.joined:
        return
    year, ends = r"(?:1[1-9]|20)\d\d", r"(?![\w%]|[.,]\d|[:/–-]\d)(?! ?[$€£%°])"
    both = rf"(?<![\w.,:/-])({year})[-–]({year}){ends}"
    rule("-–", both, lambda f: f"{spoken.year(f[1])} {spoken.to} {spoken.year(f[2])}")
    short = rf"(?<![\w.,:/-])({year})[-–](\d\d){ends}"
    rule("-–", short, lambda f: f"{spoken.year(f[1])} {spoken.to} {spoken.cardinal(f[2])}" if f[2] > f[1][2:] else None)
    if spoken.words("years"):
        rule("(", r"(?<=\()(1[5-9]\d\d|20\d\d)(?=\))", lambda f: spoken.year(f[1]))
    if spoken.code == "en":
        era = r"(?<![\w.,:/-])(\d{1,4}) ?(AD|BCE?|CE|A\.D\.|B\.C\.)(?!\w)"
        rule("ABC", era, lambda f: f"{_short(spoken, f[1])} {f[2]}")


def counts(spoken: Spoken, rule: Rules) -> None:
    """Years after a word such as "in"."""
    if not spoken.words("years"):
        return
    before = spoken.words("years") | _SURE | {month.lower() for month in spoken.months}

    @rule("", r"(?<![\w.,:/-])(\d{3}|1\d{3}|20\d\d)(?![\d%]|[.,]\d|[:/-]\d)")
    def say(found: re.Match[str]) -> str | None:
        word, after = spoken.around.word_before(found), spoken.around.word_after(found)
        if word not in before or (word not in _SURE and found[1] < "1100"):
            return None
        is_count = (
            spoken.code == "en" and after[-1:] == "s" and after.islower() and after not in spoken.words("year_verbs")
        )
        return None if is_count and word != "year" else _short(spoken, found[1])


def _short(spoken: Spoken, year: str) -> str:
    return spoken.year(year) if len(year) > 2 else spoken.cardinal(year)
