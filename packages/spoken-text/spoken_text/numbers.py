"""Numbers in a phrase of text -> words: phone numbers, dates, times, money, units, ordinals, years, counts."""

import re
import threading
from functools import cache, partial

from spoken_text import amounts, clock, currency, east_asian, figures, signs, years
from spoken_text.agreement import Agreement
from spoken_text.code import HARDWARE
from spoken_text.de import rules as german
from spoken_text.en import rules as english
from spoken_text.european import European
from spoken_text.ja import rules as japanese
from spoken_text.ko import rules as korean
from spoken_text.needed import needs
from spoken_text.rule import Around, Kept, Rules, Say, keep, uncover
from spoken_text.ru.rules import Russian
from spoken_text.spoken import Spoken, num2words
from spoken_text.stage import is_cjk
from spoken_text.zh import rules as chinese

_ORDINAL_ENDS = {
    "en": r"(\d+)(?:st|nd|rd|th)\b",
    "fr": r"(\d+)(?:er|re|ère|e|ème|eme|ième|nd|nde|d|ers|res|ères|es|èmes|ᵉ|ᵉʳ|ʳᵉ)(?!\w)",
    "es": r"(\d+)\.?(?:[ºª°]|er\b|ro\b|ra\b|do\b|da\b|to\b|ta\b|mo\b|ma\b|vo\b|va\b|no\b|na\b)",
    "it": r"(\d+)\.?[ºª°]",
    "pt": r"(\d+)\.?[ºª°]",
    "ru": r"(\d+)-?(?:й|ый|ий|ой|я|ая|ю|ую|е|ые|ое|го|ого|му|ому|м|ом|х|ых)\b",
}
_FOLLOWERS = {
    "en": "am pm a.m p.m jan feb mar apr jun jul aug sep sept oct nov dec ad bc bce ce hr hrs mins sec secs",
    "de": "uhr",
    "fr": "h heures",
    "es": "de del h",
    "pt": "de h",
    "zh": "am pm a.m p.m + - × ÷ = ≈ ≤ ≥ ≠",
    "ja": "am pm a.m p.m + - × ÷ = ≈ ≤ ≥ ≠",
    "ko": "am pm a.m p.m + - × ÷ = ≈ ≤ ≥ ≠",
    "ru": "год года году годом годы гг ч мин сек с",
}
_RUSSIAN_ENDS = {
    "я": {"gender": "f"},
    "ю": {"gender": "f", "case": "a"},
    "е": {"gender": "n"},
    "о": {"case": "g"},
    "у": {"case": "d"},
    "м": {"case": "p"},
}


_FOLLOWING = {"zh": chinese.FOLLOWERS, "ja": japanese.FOLLOWERS, "ko": frozenset("～〜")}


@cache
def _compiled(pattern: str, is_joined: bool) -> re.Pattern[str]:
    """Where there are no blanks, a letter of the language beside a number is no part of it."""
    return re.compile(pattern, re.ASCII if is_joined else 0)


class Numbers:
    """The rules for one language, compiled once."""

    def __init__(self, spoken: Spoken):
        self.spoken = spoken
        scales = amounts.written_scales(spoken)
        self._followers = frozenset(
            [*spoken.units, *spoken.nouns, *scales, *currency.SIGNS, *amounts.glued(scales), "–", *figures.VULGAR]
        )
        own = {"en": english, "de": german}.get(spoken.code)
        self._openers = own.OPENERS | signs.OPENERS if own else frozenset[str]()
        if own:
            self._followers |= own.FOLLOWERS | signs.FOLLOWERS
        self._abbreviations = frozenset(
            name.rstrip(".") for name in [*scales, *currency.SIGNS, *amounts.dotted(spoken)] if name[-1] == "."
        )
        small = [*spoken.months, *currency.CODES, *_FOLLOWERS.get(spoken.code, "").split()]
        self._small_followers = frozenset(map(str.lower, small))
        self._around = around = Around()
        self._agree = Agreement(spoken.code, around)
        self._european = European(spoken, around)
        self._russian = Russian(spoken, around) if spoken.code == "ru" else None
        # Their order matters: a rule sees what those before it have left.
        rules = [*(own.first(spoken, around) if own else ()), *signs.rules(spoken, around), *self._first()]
        rules += [*(self._russian.first() if self._russian else ()), *self._european.first()]
        rules += [*figures.phones(spoken, around), *self._european.later()]
        rules += [*self._dates(), *years.rules(spoken, around)]
        rules += [
            *clock.durations(spoken, around),
            *clock.decades(spoken),
            *figures.others(spoken, around),
            *clock.times(spoken, around),
        ]
        rules += [*figures.fractions(spoken, around), *amounts.rules(spoken, around), *amounts.units(spoken, around)]
        rules += [*self._ordinals(), *years.counts(spoken, around), *(own.years(spoken, around) if own else ())]
        rules += [
            *self._counters(),
            *amounts.ranges(spoken, around),
            *self._rest(),
            *(own.last(spoken, around) if own else ()),
        ]
        self._rules = [(needs(p), _compiled(p, spoken.joined), partial(self._apart, say)) for p, say in rules]

    def read(self, phrase: str, before: str, begins: bool, after: str = "", earlier: str = "", left: str = "") -> str:
        """Put a phrase's numbers into words. The phrase is words with one blank between them, `begins`: it begins a
        line. For the others see `Around`."""
        around = self._around
        around.before, around.after, around.begins = before, after, begins
        around.earlier, around.left = earlier, left
        lacks = frozenset(phrase).isdisjoint
        for needed, pattern, say in self._rules:
            if needed and lacks(needed):
                continue
            if (said := pattern.sub(say, phrase)) is not phrase:
                phrase, lacks = said, frozenset(said).isdisjoint
        return uncover(phrase)

    def follows(self, word: str, held: str) -> bool:
        """Does this word, without marks at its ends, belong to the number before it?"""
        spoken = self.spoken
        if self._openers and (held.lstrip("([\"'“„‘") in self._openers or held == ":"):
            return any(character.isdecimal() for character in word)
        if self._agree.holds(word, held) or self._european.follows(word, held):
            return True
        if self._russian and self._russian.holds(word, held):
            return True
        if held[-1] == "." and spoken.code == "de" and re.search(r"(?<!\d)\d{1,3}\.$", held):
            return True
        if spoken.code == "en" and held.lower() in ("a.m.", "p.m.", "sq."):
            return word in ("–", "-", "ft", "mi", "km")
        if spoken.code == "ko" and held[-1] == "." and korean.DATE_GOES_ON.search(held) and word[:1].isdecimal():
            return True
        if held[-1] in ".,;:!?" and not (held[-1] == "." and held.lstrip("0123456789,.")[:-1] in self._abbreviations):
            return spoken.code == "en" and held[-1] == "," and bool(re.fullmatch(r"\d{4}", word))
        if any(character.isdecimal() for character in word):
            return True
        if spoken.code == "ko" and (
            (word.startswith(korean.HALVES) and held[-1] in "~-–") or korean.COUNTER.match(word)
        ):
            return True
        if held[-1] in "°'’′\"”″" and word in figures.DIRECTIONS:
            return True
        if self._openers and "/" in word and word.partition("/")[0] in [*spoken.units, *currency.CODES]:  # mg/kg
            return True
        if word.startswith(tuple("€$£¥₽₩₹")):
            word = word.partition("/")[0]  # €/kg
        return word in self._followers or word.lower() in self._small_followers

    def goes_on(self, held: str, character: str) -> bool:
        """May this Chinese or Japanese character belong to the number in the word before it?"""
        return character in _FOLLOWING.get(self.spoken.code, ()) and any(map(str.isdecimal, held))

    def is_roman(self, word: str, before: str) -> bool:
        """Is the word a Roman numeral behind a king's name or "Chapter"?"""
        return figures.roman(self.spoken, word, before) is not None or (self._russian or self._european).is_roman(word)

    def is_number(self, word: str) -> bool:
        """Does the word have what a rule reads?"""
        return any(character.isdecimal() or character in figures.VULGAR for character in word)

    def begins_number(self, word: str) -> bool:
        """Is the word a currency, a sign or an abbreviation that a number may follow?"""
        if word.lstrip("([\"'“„‘") in self._openers or self._european.begins(word):
            return True
        return bool(re.fullmatch(rf"{currency.SIGN}|{currency.CODE}", word))

    def _apart(self, say: Say, found: re.Match[str]) -> str:
        """What to say, with blanks between its words and adjacent letters, if the language uses blanks."""
        if (said := say(found)) is None:
            return found[0]
        text, start, end = found.string, found.start(), found.end()
        if not said or isinstance(said, Kept) or said == found[0]:
            return said
        if start and text[start - 1].isalpha() and not is_cjk(text[start - 1]) and said[0].isalpha():
            said = " " + said
        if end < len(text) and text[end].isalpha() and not is_cjk(text[end]) and self.spoken.code != "ko":
            said += " "
        return said

    def _first(self) -> Rules:
        """What no rule may take apart: a number in the name of a thing."""
        yield r"^([(\[\"'“„«]?)([IVXLC]{1,9}(?:er|re)?)(\.?)(?!\w)", self._roman
        if following := _FOLLOWING.get(self.spoken.code):
            yield rf"(?<=\d) (?=[{''.join(sorted(following))}])", lambda f: ""
        if self.spoken.joined:
            yield from east_asian.first(self.spoken, self._around)
            yield from {"zh": chinese, "ja": japanese, "ko": korean}[self.spoken.code].first(self.spoken, self._around)
            yield from east_asian.times(self.spoken, self._around)
            yield from east_asian.hyphens(self.spoken, self._around)
            yield from east_asian.days(self.spoken, self._around)
            yield from east_asian.maths(self.spoken, self._around)
        yield r"(?<![\w.,])\d{1,3}(?::\d\d){2}[.,]\d{1,9}(?![\w:])", lambda f: keep(f[0])
        yield r"(?<![\w.,])\d{1,3} ?° ?\d{1,2} ?['’′](?: ?\d{1,2} ?[\"”″])?", lambda f: keep(f[0])
        yield r"(?<![\w.,])401\(?k\)?(?!\w)", lambda f: keep(f[0])
        yield rf"(?<![\w.:-])(?:{HARDWARE})(?![\w:]|-\d)", lambda f: keep(f[0])

    def _roman(self, found: re.Match[str]) -> str | None:
        said = figures.roman(self.spoken, found[2], self._around.before)
        goes_on = found[3] and self.spoken.code == "de" and self._around.after[:1].islower()
        return said and found[1] + said + ("" if goes_on else found[3])

    def _dates(self):
        spoken = self.spoken

        def say(found: re.Match, year: str, month: str, day: str) -> str | None:
            if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31):
                return None
            end = german.end_of_ordinal(self._around, found) if spoken.code == "de" else None
            return spoken.on_date(year, int(month), day, end or "")

        yield r"(?<![\d/-])(\d{4})([-/])(\d\d)\2(\d\d)(?![\d/-])", lambda f: say(f, f[1], f[3], f[4])
        mark = re.escape(spoken.date[-1])
        if spoken.date[:3] == "ymd":
            yield rf"(?<!\d)(\d{{4}}){mark}(\d\d?){mark}(\d\d?)(?!\d)", lambda f: say(f, f[1], f[2], f[3])
        elif spoken.date[:3] == "mdy":
            yield rf"(?<![\d/])(\d\d?){mark}(\d\d?){mark}(\d{{4}})(?![\d/])", lambda f: say(f, f[3], f[1], f[2])
        else:
            yield rf"(?<![\d.])(\d\d?){mark} ?(\d\d?){mark} ?(\d{{4}})(?!\d)", lambda f: say(f, f[3], f[2], f[1])
        if spoken.code == "de":
            yield r"(?<![\d.])(\d\d?)\.(\d\d?)\.(?= ?[^\d\s]|$)", lambda f: say(f, "", f[2], f[1])
        if spoken.months:
            yield from self._named_months()

    def _named_months(self):
        spoken, months = self.spoken, "|".join(self.spoken.months)
        if spoken.code == "en":
            short = "Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sep|Sept|Oct|Nov|Dec"
            lower = "|".join(name.lower() for name in spoken.months if name not in ("March", "May"))
            month = rf"((?:{months}|{short}|{lower})\b\.?)"
            year = r"(?:,? (\d{4})(?!\d|,\d))?"
            ends = r"(?:st|nd|rd|th)?"

            def full(name: str) -> str:
                return next(known for known in spoken.months if known.startswith(name[:3].title()))

            def say(found: re.Match, name: str, day: str, year: str | None) -> str | None:
                if not 1 <= int(day) <= 31:
                    return None
                said = f", {spoken.year(year)}" if year else ""
                name, day = full(name), spoken.ordinal(day)
                if found[1][0].isalpha():
                    return f"{name} {day}{said}"
                end = english.stop(self._around, found, name)
                return f"{'' if self._around.word_before(found) == 'the' else 'the '}{day} of {name}{said}{end}"

            yield rf"\b{month} (\d\d?){ends}(?![\d:]){year}", lambda f: say(f, f[1], f[2], f[3])
            yield rf"(?<![\d.,])(\d\d?){ends} {month}{year}", lambda f: say(f, f[2], f[1], f[3])
            after = {*spoken.months, *short.split("|")}

            def alone(found: re.Match) -> str | None:
                before = self._around.before.rstrip(".,")
                if before not in ("may", "march", "mar"):
                    before = before.title()
                if before not in after or not 1 <= int(found[1]) <= 31:
                    return None
                return spoken.ordinal(found[1]) + (f", {spoken.year(found[2])}" if found[2] else "")

            yield r"^(\d\d?)(?:st|nd|rd|th)?(?:,? (\d{4}))?(?![\d:])(?!,\d)", alone
        elif spoken.code == "de":
            yield rf"(?<!\d)(\d\d?)\. ({months})\b(?: (\d{{4}})(?!\d))?", self._german_day
        elif spoken.code == "ru":
            date = rf"(?<!\d)(\d\d?) ({months})\b(?: (\d{{4}})(?: года\b| г\.| г\b)?(?!\d))?"
            yield date, lambda f: spoken.on_date(f[3] or "", spoken.months.index(f[2]) + 1, f[1])
        else:
            first = {"fr": "premier", "it": "primo", "pt": "primeiro"}.get(spoken.code, spoken.cardinal("1"))
            yield rf"(?<!\d)1(?:er|º|°)?(?= (?:de )?(?:{months})\b)", lambda f: first

    def _german_day(self, found: re.Match) -> str:
        said = self.spoken.ordinal(found[1])
        end = german.end_of_ordinal(self._around, found)
        year = f" {self.spoken.year(found[3])}" if found[3] else ""
        return f"{said}{end} {found[2]}{year}"

    def _ordinals(self):
        spoken = self.spoken
        if spoken.code == "de":
            yield from german.headed(spoken, self._around)
        if not spoken.joined:
            yield r"^(\d{1,3})[.)](?= |$)(?! ?\d)", self._list_number
        if spoken.code == "de":
            yield r"(?<![\d.,])(\d+)(er|fach\w*|mal)\b", lambda f: spoken.cardinal(f[1]) + f[2]
            yield from german.ordinals(spoken, self._around)
        if pattern := _ORDINAL_ENDS.get(spoken.code):
            yield rf"(?<![\d.,]){pattern}", self._ordinal

    def _list_number(self, found: re.Match) -> str | None:
        return f"{self.spoken.cardinal(found[1])}," if self._around.begins and int(found[1]) else None

    def _ordinal(self, found: re.Match) -> str | None:
        end, number = found[0][-1], found[1]
        if not 1 <= int(number) < 1_000_000:
            return None
        if self.spoken.code == "ru" and (end == "х" or (end == "е" and number[-1] == "0")):
            if end == "х" and int(number) in (2, 3, 4):
                return num2words(int(number), lang="ru", case="g")
            return num2words(int(number), lang="ru", to="ordinal", plural=True, case="g" if end == "х" else "n")
        if self._russian:
            oblique = end == "й" and self._russian.is_oblique(self._around.word_after(found))
            inflection = {"gender": "f", "case": "g"} if oblique else _RUSSIAN_ENDS.get(end, {})
            return self.spoken.ordinal(number, **inflection)
        said = self.spoken.ordinal(number)
        if self.spoken.code == "fr":
            return self._french_ordinal(number, found[0].lstrip("0123456789"), said)
        if self.spoken.code in ("es", "it", "pt") and end in "ªa":
            return " ".join(re.sub("o$", "a", word) for word in said.split())
        if self.spoken.code == "es" and found[0].endswith("er"):
            return re.sub("(primer|tercer)o$", r"\1", said)
        return said

    def _french_ordinal(self, number: str, end: str, said: str) -> str | None:
        many = "s" if end[-1] == "s" else ""
        end = end.removesuffix("s")
        if number == "1":
            return {"er": "premier", "ᵉʳ": "premier", "re": "première", "ère": "première", "ʳᵉ": "première"}.get(
                end, said
            ) + many
        if end in ("d", "nd", "nde"):
            return ("seconde" if end == "nde" else "second") + many if number == "2" else None
        return said + many

    def _counters(self) -> Rules:
        if self.spoken.code == "zh":
            yield from chinese.rules(self.spoken, self._around)
        elif self.spoken.code == "ko":
            yield from korean.rules(self.spoken, self._around)

    def _rest(self) -> Rules:
        spoken, number = self.spoken, self.spoken.pattern
        glue = spoken.around_dot
        dot = f"{glue}{spoken.dot}{glue}"

        def dotted(found: re.Match[str]) -> str | None:
            return None if re.fullmatch(number, found[0]) else dot.join(map(spoken.cardinal, found[0].split(".")))

        def say(found: re.Match[str]) -> str:
            if spoken.code == "ru" and not found[1] and self._around.word_before(found) in amounts.GENITIVE:
                value = spoken.value(found[2])
                if re.fullmatch(r"1[1-9]\d\d|20\d\d", value) and self._around.word_after(found) in ("по", "до"):
                    return spoken.ordinal(value, case="g").removeprefix("одна ")
            agree = self._russian.count if self._russian else self._agree
            said = agree(found, spoken.value(found[2]), self._cardinal(found[2]))
            if isinstance(said, Kept):
                return said
            return (spoken.minus + ("" if spoken.joined else " ") if found[1] else "") + said

        if spoken.number:
            yield r"(?<!\w)#(?=\d)", lambda f: f"{spoken.number} "
        yield r"(?<![\d.,])\d+(?:\.\d+){2,}(?![\d])", dotted
        ends = r"(?![,.]?\d)" + ("(?![가-힣])" if spoken.code == "ko" else "")
        yield r"(?<=\d) ?– ?(?=\d)", lambda f: f"{glue}{spoken.to}{glue}"
        yield rf"(?:(?<![\w.,)–-])([-−]))?(?<![\d.,])({number}){ends}", say
        if spoken.code != "ko":
            yield r"\d+", lambda f: self._cardinal(f[0])
        if spoken.code in ("fr", "it"):
            yield r"(?:(?<=\bd')|(?<=\bun')) (?=\w)", lambda f: ""  # d'habitants, un'ora

    def _cardinal(self, written: str) -> str:
        mark = "," if re.search(r",\d+$", written) else "."
        return self.spoken.cardinal(self.spoken.value(written), mark)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.made: dict[int, Numbers] = {}  # by the id of their language, which they keep


_OF_THREAD = _OfThread()


def numbers_of(spoken: Spoken) -> Numbers:
    """The rules for a language, made once a thread: `read` uses what stands around the phrase that it reads."""
    if id(spoken) not in _OF_THREAD.made:
        _OF_THREAD.made[id(spoken)] = Numbers(spoken)
    return _OF_THREAD.made[id(spoken)]
