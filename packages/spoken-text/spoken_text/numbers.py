"""Numbers in a phrase of text -> words: phone numbers, dates, times, money, units, ordinals, years, counts."""

import re
from functools import cache, partial

from spoken_text import amounts, figures, spelling, times
from spoken_text.code import HARDWARE
from spoken_text.european import number_of
from spoken_text.rule import DAY, MONTH, Around, Found, Kept, Rules, Say, keep, uncover
from spoken_text.spoken import Spoken
from spoken_text.stage import is_cjk

_NUMERIC = re.compile(rf"[\d{''.join(figures.VULGAR)}]")
_CURRENCY = re.compile(rf"[-−]?(?:{amounts.SIGN})|{amounts.CODE}")


@cache
def _compiled(pattern: str, is_joined: bool) -> re.Pattern[str]:
    """Where there are no blanks, a letter of the language beside a number is no part of it."""
    return re.compile(pattern, re.ASCII if is_joined else 0)


class Numbers:
    """The rules for one language, compiled once."""

    def __init__(self, spoken: Spoken):
        self.spoken = spoken
        glued = [scale + sign for scale in spoken.scales for sign in "€$£¥₽₩"]  # M€
        followers = *spoken.units, *spoken.nouns, *spoken.scales, *spoken.currencies, *glued, "–", *figures.VULGAR
        self._followers = spoken.followers.union(followers)
        dotted = *spoken.scales, *spoken.currencies, *amounts.DOTTED, *spoken.words("dotted")
        self._abbreviations = frozenset(name.rstrip(".") for name in dotted if name[-1] == ".")
        small = *spoken.months, *amounts.CODES, *spoken.words("followers")
        self._small_followers = frozenset(map(str.lower, small))
        rule = Rules()
        self._all(rule)
        self._rules = [(signs, _compiled(pattern, spoken.joined), say) for signs, pattern, say in rule.made]

    def _all(self, rule: Rules) -> None:
        """Their order matters: a rule sees what those before it have left."""
        spoken = self.spoken
        spelling.words(spoken, rule)
        spelling.numbers(spoken, rule)
        spoken.first(rule)
        self._names(rule)
        spoken.second(rule)
        figures.phones(spoken, rule)
        figures.emergency(spoken, rule)
        spoken.later(rule)
        figures.minus(spoken, rule)
        self._dates(rule)
        times.years(spoken, rule)
        times.durations(spoken, rule)
        figures.others(spoken, rule)
        times.clocks(spoken, rule)
        figures.fractions(spoken, rule)
        amounts.money(spoken, rule)
        amounts.scaled(spoken, rule)
        amounts.units(spoken, rule)
        self._ordinals(rule)
        spelling.slashes(spoken, rule)
        times.years_behind_words(spoken, rule)
        spoken.years_last(rule)
        spoken.counters(rule)
        amounts.ranges(spoken, rule)
        spelling.chains(spoken, rule)
        self._rest(rule)
        spoken.last(rule)

    def read(self, phrase: str, around: Around) -> str:
        """Put a phrase's numbers into words. The phrase is words with one blank between them."""
        lacks = frozenset(phrase).isdisjoint
        for needed, pattern, say in self._rules:
            if not (needed and lacks(needed)) and pattern.search(phrase):
                phrase = pattern.sub(partial(self._apart, say, around), phrase)
                lacks = frozenset(phrase).isdisjoint
        return uncover(phrase)

    def follows(self, word: str, held: str) -> bool:
        """Does this word, without marks at its ends, belong to the number before it?"""
        spoken = self.spoken
        has_digit = any(map(str.isdecimal, word))
        if spelling.follows(spoken, word, held):
            return True
        if spoken.openers and (held.lstrip("([\"'“„‘") in spoken.openers or held == ":"):
            return has_digit
        if spoken.holds(word, held) or spoken.follows(word, held):
            return True
        if word == "/" and held.rstrip(".").isalpha() or held == "/" and {word, f"{word[:-1]}²"} & {*spoken.units}:
            return True  # hab. / km2
        if held[-1] in "°º" and word in ("C", "F"):
            return True
        if held[-1] in ".,;:!?" and not (held[-1] == "." and held.lstrip("0123456789,.")[:-1] in self._abbreviations):
            return False
        if has_digit or (held[-1] in "°'’′\"”″" and word in figures.DIRECTIONS):
            return True
        if spoken.openers and "/" in word and word.partition("/")[0] in [*spoken.units, *amounts.CODES]:  # mg/kg
            return True
        if "/" in word and {word.partition("/")[0], word.rpartition("/")[2]} & {*spoken.units}:  # people/km², km/jour
            return True
        if word.startswith(tuple("€$£¥₽₩₹")):
            word = word.partition("/")[0]  # €/kg
        return word in self._followers or word.lower() in self._small_followers

    def goes_on(self, held: str, character: str) -> bool:
        """May this Chinese or Japanese character belong to the number in the word before it?"""
        return character in self.spoken.following and any(map(str.isdecimal, held))

    def is_roman(self, word: str, around: Around) -> bool:
        """May the word be a Roman numeral, behind a king's name or "Chapter" or alone?"""
        word = word.replace("’", "'").removesuffix("'s")
        may_be = word[:1] in "IVXLC" and figures.roman(self.spoken, word, around.before, around.earlier) is not None
        if may_be or self.spoken.is_roman(word):
            return True
        return around.begins and len(word) > 1 and number_of(word) > 0

    def is_number(self, word: str) -> bool:
        """Does the word have what a rule reads?"""
        return _NUMERIC.search(word) is not None

    def begins_number(self, word: str) -> bool:
        """Is the word a currency, a sign or an abbreviation that a number may follow?"""
        if word.lstrip("([\"'“„‘") in self.spoken.openers or self.spoken.begins(word):
            return True
        if spelling.begins(self.spoken, word):
            return True
        return _CURRENCY.fullmatch(word) is not None

    def _apart(self, say: Say, around: Around, match: re.Match[str]) -> str:
        """What to say, with blanks between its words and adjacent letters, if the language uses blanks."""
        if (said := say(Found(match, around))) is None:
            return match[0]
        text, start, end = match.string, match.start(), match.end()
        if not said or isinstance(said, Kept) or said == match[0]:
            return said
        if start and text[start - 1].isalpha() and not is_cjk(text[start - 1]) and said[0].isalpha():
            said = " " + said
        if end < len(text) and text[end].isalpha() and not is_cjk(text[end]) and self.spoken.code != "ko":
            said += " "
        return said

    def _names(self, rule: Rules) -> None:
        """What no rule may take apart: a number in the name of a thing."""
        rule("CILVX", r"^([(\[\"'“„«]?)([IVXLC]{1,9}(?:er|re)?)(\.?)(?!\w)", self._roman)
        rule(":", r"(?<![\w.,])\d{1,3}(?::\d\d){2}[.,]\d{1,9}(?![\w:])", keep)
        rule("°", r"(?<![\w.,])\d{1,3} ?° ?\d{1,2} ?['’′](?: ?\d{1,2} ?[\"”″])?", keep)
        rule("k", r"(?<![\w.,])401\(?k\)?(?!\w)", keep)
        rule("-:", rf"(?<![\w.:-])(?:{HARDWARE})(?![\w:]|-\d)", keep)

    def _roman(self, found: Found) -> str | None:
        around = found.around
        said = figures.roman(self.spoken, found[2], around.before, around.earlier)
        if self.spoken.is_king(found):
            said = figures.numbered_king(self.spoken, found[2], around.before) or said
            said = said and self.spoken.king_in_case(said, around.earlier)
        if not said and around.begins and not (around.after or found.rest) and len(found[2]) > 1 and found[2] != "XL":
            value = number_of(found[2])  # the title of a part: II
            return f"{self.spoken.cardinal(str(value))}{found[3]}" if value else None
        goes_on = found[3] and self.spoken.code == "de" and found.around.after[:1].islower()
        return said and found[1] + said + ("" if goes_on else found[3])

    def _dates(self, rule: Rules) -> None:
        spoken = self.spoken

        iso = rf"(?<![\d/-])(\d{{4}})([-/])(?=\d\d\2\d\d){MONTH}\2{DAY}(?![\d/-])"
        rule("-/", iso, lambda f: spoken.dated(f, f[1], int(f[3]), f[4]))
        order, mark = spoken.date[:3], re.escape(spoken.date[-1])
        if order == "ymd":
            written = rf"(?<!\d)(\d{{4}}){mark}{MONTH}{mark}{DAY}(?!\d)"
            rule("/", written, lambda f: spoken.dated(f, f[1], int(f[2]), f[3]))
        elif order == "mdy":
            written = rf"(?<![\d/]){MONTH}{mark}{DAY}{mark}(\d{{4}})(?![\d/])"
            rule("/", written, lambda f: spoken.dated(f, f[3], int(f[1]), f[2]))
        else:
            written = rf"(?<![\d.]){DAY}{mark} ?{MONTH}{mark} ?(\d{{4}})(?!\d)"
            rule(spoken.date[-1], written, lambda f: spoken.dated(f, f[3], int(f[2]), f[1]))
        if spoken.code == "de":
            rule(".", rf"(?<![\d.]){DAY}\.{MONTH}\.(?= ?[^\d\s]|$)", lambda f: spoken.dated(f, "", int(f[2]), f[1]))
        spoken.named_months("|".join(spoken.months), rule)

    def _ordinals(self, rule: Rules) -> None:
        spoken = self.spoken
        spoken.headed(rule)
        if not spoken.joined:
            item = r"^(?!0+\D)(\d{1,3})[.)](?= |$)(?! ?\d)"
            rule(".)", item, lambda f: f"{spoken.cardinal(f[1])}," if f.around.begins else None)
        spoken.ordinals(rule)
        if spoken.ordinal_ends:
            grouped = rf"(?<![\d.,])\d{{1,3}}(?:[{re.escape(spoken.groups)}]\d{{3}})+(?={spoken.ordinal_ends})"
            rule("".join(spoken.groups), grouped, lambda f: Kept(re.sub(r"\D", "", f[0])))
            rule("", rf"(?<![\d.,])(0*[1-9]\d{{0,11}}){spoken.ordinal_ends}", spoken.ordinal_at)

    def _rest(self, rule: Rules) -> None:
        spoken, number, blank = self.spoken, self.spoken.pattern, self.spoken.blank
        dot = f"{blank}{spoken.dot}{blank}"

        def dotted(found: Found) -> str | None:
            return None if re.fullmatch(number, found[0]) else dot.join(map(spoken.cardinal, found[0].split(".")))

        def say(found: Found) -> str:
            said = spoken.agree(found, spoken.value(found[2]), spoken.said(found[2]))
            return said if isinstance(said, Kept) else spoken.below_zero(found[1]) + said

        if spoken.number:
            rule("#", r"(?<!\w)#(?=\d)", lambda f: f"{spoken.number} ")
        rule(".", r"(?<![\d.,])\d+(?:\.\d+){2,}(?![\d])", dotted)
        ends = r"(?![,.]?\d)" + ("(?![가-힣])" if spoken.code == "ko" else "")
        rule("–", r"(?<=\d) ?– ?(?=\d)", lambda f: f"{blank}{spoken.to}{blank}")
        rule("", rf"(?:(?<![\w.,)–-])([-−]))?(?<![\d.,])({number}){ends}", say)
        if spoken.code != "ko":
            rule("", r"\d+", lambda f: spoken.said(f[0]))
        if spoken.code in ("fr", "it"):
            rule("du", r"(?:(?<=\bd')|(?<=\bun')) (?=\w)", lambda f: "")  # d'habitants, un'ora


@cache
def numbers_of(spoken: Spoken) -> Numbers:
    """The rules for a language, made once."""
    return Numbers(spoken)
