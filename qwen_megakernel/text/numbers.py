"""Numbers in a phrase of text -> words: phone numbers, dates, times, money, units, ordinals, years, counts."""

import re
from collections.abc import Callable
from functools import partial

from qwen_megakernel.text.spoken import CURRENCY, CURRENCY_CODE, Spoken
from qwen_megakernel.text.stage import is_cjk

_ENGLISH_HALF = r"(?:\s?([AaPp])(?:\.\s?[Mm]\.|[Mm])(?!\w))"
_SINO_COUNTERS = "년월일원분초층도"  # Korean; other counters take native numbers, which num2words lacks
_ORDINAL_ENDS = {
    "en": r"(\d+)(?:st|nd|rd|th)\b",
    "fr": r"(\d+)(?:er|re|ère|e|ème|eme|ième|nd|nde)\b",
    "es": r"(\d+)\.?(?:[ºª°]|er\b|ro\b|ra\b|do\b|da\b|to\b|ta\b|mo\b|ma\b|vo\b|va\b|no\b|na\b)",
    "it": r"(\d+)\.?[ºª°]",
    "pt": r"(\d+)\.?[ºª°]",
    "ru": r"(\d+)-?(?:й|ый|ий|я|ая|е|ое|го|му|м)\b",
    "ko": r"(\d+)\s?번째",
}
_ORDINALS_BELOW = {"ko": 100}  # num2words fails at some larger ones; they are said as counts
_FOLLOWERS = {
    "en": "am pm a.m p.m jan feb mar apr jun jul aug sep sept oct nov dec",
    "de": "uhr",
    "fr": "h heures",
    "es": "de del h",
    "pt": "de",
    "ru": "года году",
}
_GERMAN_E = frozenset("der die das diese dieser dieses jede jeder jedes eine meine".split())
_GERMAN_EN = frozenset("am im vom zum zur beim dem den des einen einem bis ab".split())
_RUSSIAN_ENDS = {"я": {"gender": "f"}, "е": {"gender": "n"}, "о": {"case": "g"}, "у": {"case": "d"}, "м": {"case": "p"}}


_Say = Callable[[re.Match[str]], str | None]  # None: leave it as it is


class Numbers:
    """The rules for one language, compiled once."""

    def __init__(self, spoken: Spoken):
        self.spoken = spoken
        self._followers = frozenset([*spoken.units, *spoken.nouns, *spoken.scales, *"$€£¥₽₩₹"])
        small = [*spoken.months, *CURRENCY_CODE.split("|"), *_FOLLOWERS.get(spoken.code, "").split()]
        self._small_followers = frozenset(map(str.lower, small))
        self._before = ""
        self._begins = False
        # Their order matters: a rule sees what those before it have left.
        rules = [*self._phones(), *self._dates(), *self._times(), *self._money(), *self._units(), *self._ordinals()]
        rules += [*self._years(), *self._rest()]
        self._rules: list[tuple[re.Pattern[str], _Say]] = [(re.compile(p), say) for p, say in rules]

    def read(self, phrase: str, before: str, begins: bool) -> str:
        """Put a phrase's numbers into words. The phrase is words with one blank between them, `before` the word before
        it, or empty. `begins`: it begins a line."""
        self._before = before
        self._begins = begins
        for pattern, say in self._rules:
            phrase = pattern.sub(partial(self._apart, say), phrase)
        return phrase

    def follows(self, word: str, held: str) -> bool:
        """Does this word, without marks at its ends, belong to the number before it?"""
        spoken = self.spoken
        if held[-1] == "." and spoken.code == "de" and re.search(r"(?<!\d)\d{1,3}\.$", held):
            return True
        if held[-1] in ".,;:!?":
            return spoken.code == "en" and held[-1] == "," and bool(re.fullmatch(r"\d{4}", word))
        if any(character.isdecimal() for character in word):
            return True
        return word in self._followers or word.lower() in self._small_followers

    def begins_number(self, word: str) -> bool:
        """Is the word a currency that a number may follow?"""
        return bool(re.fullmatch(rf"{CURRENCY}|{CURRENCY_CODE}", word))

    def _apart(self, say: _Say, found: re.Match[str]) -> str:
        """What to say, with blanks between its words and adjacent letters, if the language uses blanks."""
        if (said := say(found)) is None:
            return found[0]
        text, start, end = found.string, found.start(), found.end()
        if not self.spoken.code or said == found[0]:
            return said
        if start and text[start - 1].isalpha() and not is_cjk(text[start - 1]) and said[0].isalpha():
            said = " " + said
        if end < len(text) and text[end].isalpha() and not is_cjk(text[end]) and self.spoken.code != "ko":
            said += " "
        return said

    def _word_before(self, found: re.Match) -> str:
        """The word before the match, in lower case and without leading marks."""
        words = found.string[: found.start()].split() or [self._before]
        return words[-1].lower().strip("\"'([")

    def _minus(self, sign: str | None) -> str:
        blank = "" if self.spoken.joined else " "
        return self.spoken.minus + blank if sign else ""

    def _mark(self, written: str) -> str:
        return "," if re.search(r",\d+$", written) else "."

    def _phones(self):
        def say(found: re.Match) -> str | None:
            groups = re.findall(r"\d+", found[0])
            glue = "，" if not self.spoken.code else "、" if self.spoken.code == "ja" else ", "
            said = glue.join(map(self.spoken.digits, groups))
            return f"{self.spoken.plus} {said}" if found[0][0] == "+" else said

        if self.spoken.code:
            yield r"\+\d{1,3}(?:[ ()./-]{0,2}\d+){1,6}(?<=\d{2})", lambda f: say(f) if len(f[0]) > 7 else None
            yield r"(?<![\w.,-])(?:\(\d{3}\) ?|\d{3}[-.])\d{3}[-.]\d{4}(?!\w)", say
            yield r"(?<![\w.,:/-])0\d{1,4}(?:[ -]\d{2,}|/\d{4,})+(?![\w,]|\.\d)", say

    def _dates(self):
        spoken = self.spoken

        def say(found: re.Match, year: str, month: str, day: str) -> str | None:
            if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31):
                return None
            return spoken.on_date(year, int(month), day, "" if self._word_before(found) in _GERMAN_E else "n")

        yield r"(?<![\d-])(\d{4})-(\d\d)-(\d\d)(?![\d-])", lambda f: say(f, f[1], f[2], f[3])
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
            month = rf"((?:{months}|{short})\b\.?)"
            year = r"(?:,? (\d{4})(?!\d|,\d))?"
            ends = r"(?:st|nd|rd|th)?"

            def full(name: str) -> str:
                return next(known for known in spoken.months if known.startswith(name[:3]))

            def say(found: re.Match, name: str, day: str, year: str | None) -> str | None:
                if not 1 <= int(day) <= 31:
                    return None
                said = f", {spoken.year(year)}" if year else ""
                name, day = full(name), spoken.ordinal(day)
                if found[1][0].isalpha():
                    return f"{name} {day}{said}"
                return f"{'' if self._word_before(found) == 'the' else 'the '}{day} of {name}{said}"

            yield rf"\b{month} (\d\d?){ends}(?![\d:]){year}", lambda f: say(f, f[1], f[2], f[3])
            yield rf"(?<![\d.,])(\d\d?){ends} {month}{year}", lambda f: say(f, f[2], f[1], f[3])
            after = {*spoken.months, *short.split("|")}

            def alone(found: re.Match) -> str | None:
                if self._before.rstrip(".,") not in after or not 1 <= int(found[1]) <= 31:
                    return None
                return spoken.ordinal(found[1]) + (f", {spoken.year(found[2])}" if found[2] else "")

            yield r"^(\d\d?)(?:st|nd|rd|th)?(?:, (\d{4}))?(?![\d:])(?!,\d)", alone
        elif spoken.code == "de":
            yield rf"(?<!\d)(\d\d?)\. ({months})\b(?: (\d{{4}})(?!\d))?", self._german_day
        elif spoken.code == "ru":
            date = rf"(?<!\d)(\d\d?) ({months})\b(?: (\d{{4}})(?: года)?(?!\d))?"
            yield date, lambda f: spoken.on_date(f[3] or "", spoken.months.index(f[2]) + 1, f[1])
            yield r"(?<!\d)(\d{4}) года\b", lambda f: f"{spoken.ordinal(f[1], case='g')} года"
            yield r"(?<!\d)(\d{4}) году\b", lambda f: f"{spoken.ordinal(f[1], case='p')} году"
        else:
            first = {"fr": "premier", "it": "primo", "pt": "primeiro"}.get(spoken.code, spoken.cardinal("1"))
            yield rf"(?<!\d)1(?:er|º|°)?(?= (?:de )?(?:{months})\b)", lambda f: first

    def _german_day(self, found: re.Match) -> str:
        said = self.spoken.ordinal(found[1])
        before = self._word_before(found)
        end = "" if before in _GERMAN_E else "n" if before else "r"
        year = f" {self.spoken.year(found[3])}" if found[3] else ""
        return f"{said}{end} {found[2]}{year}"

    def _times(self):
        spoken = self.spoken

        def say(hour: str, minute: str, half: str | None = None) -> str | None:
            if int(hour) > 24 or int(minute) > 59:
                return None
            return spoken.at_time(hour, minute, f"{half.upper()}M" if half else "")

        clock = r"(?<![\d:.,])(\d\d?):(\d\d)(?![\d:])"
        if spoken.code == "en":
            yield rf"{clock}{_ENGLISH_HALF}?", lambda f: say(f[1], f[2], f[3])
            yield rf"(?<![\d:.,])(\d\d?){_ENGLISH_HALF}", lambda f: f"{spoken.cardinal(f[1])} {f[2].upper()}M"
        else:
            ends = {"de": r"(?: ?Uhr\b)?", "fr": r"(?: ?(?:h|heures)\b)?", "es": r"(?: ?h\b)?"}.get(spoken.code, "")
            yield clock + ends, lambda f: say(f[1], f[2])
        if spoken.code == "de":
            yield r"(?<![\d:.,])(\d\d?)(?= Uhr\b)", lambda f: "ein" if f[1] == "1" else spoken.cardinal(str(int(f[1])))
        if spoken.code == "fr":
            yield r"(?<![\d:.,])(\d\d?) ?h ?(\d\d)\b", lambda f: say(f[1], f[2])

    def _money(self):
        spoken, number = self.spoken, self.spoken.pattern
        scales = f"(?: ({'|'.join(spoken.scales)})\\b)?" if spoken.scales else "()"
        sign = rf"({CURRENCY}|(?:{CURRENCY_CODE})\b)"

        def say(currency: str, written: str, scale: str | None, minus: str | None = None) -> str | None:
            said = spoken.money(self.spoken.value(written), currency, scale or "")
            return said and self._minus(minus) + said

        yield rf"([-−])?{sign} ?({number}){scales}", lambda f: say(f[2], f[3], f[4], f[1])
        yield rf"(?<![\d.,])({number}){scales} ?{sign}", lambda f: say(f[3], f[1], f[2])

    def _units(self):
        spoken, number = self.spoken, self.spoken.pattern
        if spoken.code == "en":
            yield r"(?<![\w.,])'?(\d{1,3}0)s\b", lambda f: re.sub("y$", "ie", spoken.year(f[1])) + "s"
        if spoken.number:
            yield r"(?<!\w)#(?=\d)", lambda f: f"{spoken.number} "
        names = "|".join(sorted(map(re.escape, {**spoken.units, **spoken.nouns}), key=len, reverse=True))

        def counted(found: re.Match) -> str | None:
            said = spoken.counted(spoken.value(found[2]), found[3], self._mark(found[2]))
            return said and self._minus(found[1]) + said

        yield rf"(?<![\w.,])([-−])?({number}) ?({names})(?![\w²³/])", counted

    def _ordinals(self):
        spoken = self.spoken
        if spoken.code and not spoken.joined:
            yield r"^(\d{1,3})[.)](?= |$)(?! ?\d)", self._list_number
        if spoken.code == "de":
            yield r"(?<![\d.,])(\d+)(er|fach\w*|mal)\b", lambda f: spoken.cardinal(f[1]) + f[2]
            yield r"(?<![\w.,:])(\d{1,3})\.(?= (\w))", self._german_ordinal
        elif pattern := _ORDINAL_ENDS.get(spoken.code):
            yield rf"(?<![\d.,]){pattern}", self._ordinal

    def _list_number(self, found: re.Match) -> str | None:
        return f"{self.spoken.cardinal(found[1])}," if self._begins and int(found[1]) else None

    def _german_ordinal(self, found: re.Match) -> str | None:
        before = self._word_before(found)
        if before in _GERMAN_E:
            return self.spoken.ordinal(found[1])
        if before in _GERMAN_EN or found[2].islower():
            return f"{self.spoken.ordinal(found[1])}n"
        return None

    def _ordinal(self, found: re.Match) -> str | None:
        end, number = found[0][-1], found[1]
        if not 1 <= int(number) < _ORDINALS_BELOW.get(self.spoken.code, 1_000_000):
            return None
        if self.spoken.code == "ru":
            return self.spoken.ordinal(number, **_RUSSIAN_ENDS.get(end, {}))
        said = self.spoken.ordinal(number)
        if self.spoken.code == "fr" and re.search("(re|ère|nde)$", found[0]):
            return "première" if number == "1" else "seconde" if number == "2" else said
        if self.spoken.code in ("es", "it", "pt") and end in "ªa":
            return " ".join(re.sub("o$", "a", word) for word in said.split())
        if self.spoken.code == "es" and found[0].endswith("er"):
            return re.sub("(primer|tercer)o$", r"\1", said)
        return said

    def _years(self):
        spoken = self.spoken
        if spoken.code and not spoken.joined:
            year = r"(?:1[1-9]|20)\d\d"
            both = rf"(?<![\w.,:/-])({year})[-–]({year})(?![\w%]|[.,]\d|[:/-]\d)"
            yield both, lambda f: f"{spoken.year(f[1])} {spoken.to} {spoken.year(f[2])}"
        if spoken.years:
            before = spoken.years | {month.lower() for month in spoken.months}
            year = r"(?<![\w.,:/-])(1[1-9]\d\d|20\d\d)(?![\d%]|[.,]\d|[:/-]\d)"
            yield year, lambda f: spoken.year(f[1]) if self._word_before(f) in before else None

    def _rest(self):
        spoken, number = self.spoken, self.spoken.pattern
        if not spoken.code:
            yield r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d])", lambda f: f[0].replace(",", "")
            yield r"(?<![\w.,–-])[-−](?=\d)", lambda f: spoken.minus
            return
        glue = spoken.around_dot
        dot = f"{glue}{spoken.dot}{glue}"

        def dotted(found: re.Match) -> str | None:
            return None if re.fullmatch(number, found[0]) else dot.join(map(spoken.cardinal, found[0].split(".")))

        yield r"(?<![\d.,])\d+(?:\.\d+){2,}(?![\d])", dotted
        ends = r"(?![,.]?\d)"
        if spoken.code == "ko":
            yield r"(?<!\d)(6|10)(?=월)", lambda f: "유" if f[1] == "6" else "시"
            ends += rf"(?![가-힣])|(?<![\d.,])({number})(?=[{_SINO_COUNTERS}])"
        yield r"(?<=\d) ?– ?(?=\d)", lambda f: f"{glue}{spoken.to}{glue}"
        signed = rf"(?:(?<![\w.,)–-])([-−]))?(?<![\d.,])({number}){ends}"
        yield signed, lambda f: self._minus(f[1]) + self._cardinal(f[2] or f[3])
        if spoken.code != "ko":
            yield r"\d+", lambda f: self._cardinal(f[0])

    def _cardinal(self, written: str) -> str:
        return self.spoken.cardinal(self.spoken.value(written), self._mark(written))
