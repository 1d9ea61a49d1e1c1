"""Korean counters: native numbers up to 99 before native ones, Chinese numbers before the others."""

import re

from spoken_text.east_asian import EastAsian
from spoken_text.rule import DASH, DASHES, Found, Kept, Rules, keep

_ONES = ["", "한", "두", "세", "네", "다섯", "여섯", "일곱", "여덟", "아홉"]
_TENS = ["", "열", "스물", "서른", "마흔", "쉰", "예순", "일흔", "여든", "아흔"]


def native(number: int) -> str:
    """1 to 99 as they stand before a counter."""
    if number == 20:
        return "스무"
    return _TENS[number // 10] + _ONES[number % 10]


_DATE_GOES_ON = re.compile(r"(?<![\d.])(?:(?:19|20)\d\d|\d{1,2})\.$")
"""2024. 3. 5."""


class Language(EastAsian):
    def __init__(self, code: str):
        super().__init__(code)
        self.ends = rf"(?=(?:{self.any_of('particles')}){{0,2}}(?![가-힣0-9]))"
        self.counter = re.compile(rf"(?:{self.any_of('native')}){self.ends}|{self.any_of('sino')}")

    def on_date(self, year: str, month: int, day: str) -> str:
        """June and October drop a sound."""
        return super().on_date(year, month, day).replace("육월", "유월").replace("십월", "시월")

    def lasting(self, value: str, unit: str) -> str | None:
        number = native(int(value)) if unit == "h" and 0 < int(value) < 100 else self.cardinal(value)
        return number + {"h": " 시간", "min": "분", "s": "초"}[unit]

    def begins(self, word: str) -> bool:
        return re.match("제[IVX]+[장부권편절]", word) is not None

    def dialled(self, found: Found) -> str:
        return super().dialled(found).replace("영", "공")

    def holds(self, word: str, held: str) -> bool:
        if held[-1] == "." and _DATE_GOES_ON.search(held) and word[:1].isdecimal():
            return True
        starts = word.startswith("번째") or held[-1] in "~-–" and word.startswith(tuple(self.words("halves")))
        return held[-1] not in ".,;:!?" and (starts or self.counter.match(word) is not None)

    def dotted_dates(self, year: str, month: str, day: str, rule: Rules) -> None:
        rule(".", rf"(?<![\w.,/-]){year}\. ?{month}\. ?{day}(?!\d|\.\d)(?:\.(?= ?[^\s\d]))?", self.date_at)
        rule(".", rf"(?<![\w.,/-]){year}\. ?{month}\.(?! ?\d)(?=.)", lambda f: self.month(f[1], f[2]))

    def _dates(self, rule: Rules) -> None:
        season = r"(?<![\w.,])(20\d\d)-(0\d)(?=$| ?시즌)"

        @rule("-", season)
        def seasons(found: Found) -> str | None:
            """2008-09 시즌, which is no month"""
            first, last = int(found[1]), int(found[2])
            sure = last == first % 100 + 1 and found.behind.lstrip().startswith("시즌")
            return f"{self.cardinal(found[1])}{self.to} {self.cardinal(str(first + 1))}" if sure else None

        rule("년분시월일", r"(?<=\d[년월일시분])(?=\d)|(?<=\d시간)(?=\d)", lambda f: " ")
        super()._dates(rule)

    def own(self, rule: Rules) -> None:
        say = self.cardinal

        def ordinal(found: Found) -> str:
            return say(found[1]) + (f"{self.to} {say(found[2])}" if found[2] else "")

        to = rf"(?: ?{DASH} ?제?(\d{{1,4}}))?(?!\d|[.,]\d)"
        rule("제", rf"(?<=(?<![가-힣])제)(\d{{1,4}}){to}", ordinal)
        several = r"(?<![\w.,])(?:[1-9][천백십]){3}"  # 2천2백1십억
        rule("천백십", several, lambda f: re.sub(r"\d", lambda one: "" if one[0] == "1" else say(one[0]), f[0]))
        years = r"(?<![\w.,/-])(\d{1,4}) ?[-–] ?(\d{1,4})(?=년)"
        rule("-–", years, lambda f: f"{say(f[1])}{self.to} {say(f[2])}")
        rule("", rf"^(\d{{1,4}}){to}", lambda f: ordinal(f) if f.around.before == "제" else None)
        rule("/", r"(?<![\w.,/])([1-4])/4(?= ?분기)", lambda f: f"{say(f[1])}사")
        rule(DASHES, rf"(?<=[\d시분]) ?{DASH} ?(?=(?:{self.any_of('halves')}))", lambda f: Kept(f"{self.to} "))

        def event(found: Found) -> str | None:
            """6·25 is said by its digits, and so are 1·2학년."""
            month, day = found[1], found[2]
            if found.rest.startswith(("대", "%")) or day[0] == "0":
                return keep(found)
            whole = day in ("10", "20", "30") or (month == "12" and day == "12")
            return say(month) + (say(day) if whole else "".join(map(say, day)))

        on_weekday = r"(?<![\w.,])([1-9]|1[0-2])\.([1-9]|[12]\d|3[01])(?=\([월화수목금토일]\)|$)"
        rule(".", on_weekday, lambda f: self.on_date("", int(f[1]), f[2]) if f.behind[:1] == "(" else None)
        english = self.table("english")
        named = rf"(?<![A-Za-z0-9.-])(?:{'|'.join(english)})(?![A-Za-z0-9-])"
        rule("".join({name[-1] for name in english}), named, lambda f: english[f[0]])
        rule("·ㆍ", r"(?<![\w.,·])([1-9]|1[0-2])[·ㆍ]([1-9]\d?)(?![\w.·])", event)
        events = re.compile(rf" ?(?:{self.any_of('events')})")
        day = r"(?<![\w.,])([1-9]|1[0-2])\.([1-9]\d?)(?![A-Za-z0-9.])"
        rule(".", day, lambda f: event(f) if events.match(f.behind) else None)
        rule("-", r"(?:(?<=\d파운드)|(?<=\d달러)|(?<=\d유로)) ?- ?(?=\d)", lambda f: Kept(f"{self.to} "))
        rule("대", rf"(?<![\w.,/-])([1-9]0) ?{DASH} ?([1-9]0)(?=대)", lambda f: f"{say(f[1])}{self.to} {say(f[2])}")

        def month(number: str) -> str:
            return {"6": "유", "10": "시"}.get(number) or say(number)

        written = rf"(?<![\w.,/-])([1-9]|1[0-2]) ?{DASH} ?([1-9]|1[0-2])(?=월)"
        rule("월", written, lambda f: f"{month(f[1])}월{self.to} {month(f[2])}")
        written = r"(?<![\w.,·])([1-9]), ?([1-9])(?=위|차|학년|등|층|부|호기|심)"
        rule(",", written, lambda f: f"{say(f[1])}, {say(f[2])}" if " " in f[0] else f"{say(f[1])}{say(f[2])}")
        written = r"(?<![\w.,])(?=\d*[1-9])(\d{1,12}) ?번째"

        def nth(found: Found) -> str:
            value = int(found[1])
            return f"{'첫' if value == 1 else native(value) if value < 100 else say(found[1])} 번째"

        rule("번", written, nth)
        days = r"(?<=일)\(([월화수목금토일])(?:[~〜]([월화수목금토일]))?(?=\))"
        rule("(", days, lambda f: f"({f[1]}요일" + (f"{self.to} {f[2]}요일" if f[2] else ""))

        written = r"(?<![\w.,/-])\d{3,20}(?![\w]|[.,:/-]\d|[가-힣]?원)"
        dialled = re.compile(rf"(?:{self.any_of('dialled')})[:：]? ?$")
        rule("", written, lambda f: self.dialled(f) if dialled.search(f.ahead) else None)
        emergency = r" ?(?:에 ?|로 ?)?(?:신고|구급|구조|종합|상황실|대원|소방|전화)"

        @rule("", rf"(?<![\w.,/-])11[0-9](?={emergency}|에$|로$|$)")
        def helped(found: Found) -> str | None:
            called = re.match("신고|구급|구조|종합|대원|상황", found.around.after)
            called = called or re.match(emergency, found.behind)
            return self.digits(found[0]).replace(" ", "") if called else None

        scores = re.compile(rf"(?:으로|로|의)? ?(?:{self.any_of('scores')})")

        @rule("-", r"(?<![\w.,:/-])(\d{1,2})-(\d{1,2})(?![\w.,:/=-]| ?=)")
        def score(found: Found) -> str | None:
            if scores.match(f"{found.rest} {found.around.after}"):
                return self.ratio(found)
            return keep(found) if int(found[1]) >= int(found[2]) else None

        written = r"(?<![\w.,])(\d{1,3}) ?대 ?(\d{1,3})(?![\w.,])(?! ?[명개대시년월일분원만번살세권장])"
        rule("대", written, self.ratio)

        @rule("대", rf"(?<![\w.,:/~-])([1-9]\d{{0,2}}) ?대{self.ends}")
        def machines(found: Found) -> str | None:
            """20대 are twenty cars, or people in their twenties; 4대 are four, or the four great ones."""
            number, next_word = int(found[1]), found.rest.strip() or found.around.after
            if found.before in self.words("machines") or number > 99:
                return f"{native(number) if number < 100 else say(found[1])} 대"
            aged = number % 10 == 0 and re.match(rf"(?:{self.any_of('aged')})|(?:에|부터|는|의)(?: |$)", next_word)
            if aged or re.match(self.any_of("major"), next_word):
                return f"{say(found[1])}대"
            return keep(found) if number % 10 == 0 or found.around.after or next_word else None

        @rule("번", rf"(?<![\w.,:/~-])([1-9]\d{{0,3}}) ?번{self.ends}")
        def numbered(found: Found) -> str | None:
            """Exit 3, or three times."""
            next_word = found.rest.strip() or found.around.after
            named = re.match(self.any_of("numbered"), next_word) or found.before.endswith("반")
            named = named or re.match("으로 ?(?:배정|정해|변경|바뀌)", found.behind) is not None
            named = named or found.before.rstrip("은는이가") in self.words("named_number")
            if not named and next_word[:1] in ("을", "를"):
                return keep(found)
            return f"{say(found[1])} 번" if named else None

    def last(self, rule: Rules) -> None:
        """2/5이: the particle goes with what is said last, 오분의 이가."""
        pairs = dict(zip("이은을과", "가는를와", strict=True))
        rule("분", r"(?<=분의 )(\S*[이사오구])([이은을과])(?![가-힣])", lambda f: f[1] + pairs[f[2]])
        pairs_behind = {open: closed for closed, open in pairs.items()}
        rule("분", r"(?<=분의 )(\S*[일삼육칠팔십])([가는를와])(?![가-힣])", lambda f: f[1] + pairs_behind[f[2]])

    def counters(self, rule: Rules) -> None:
        """Numbers with counters and particles. What has another noun behind it stays as it is."""
        number = self.pattern

        def counted(written: str, counter: str) -> str:
            value = self.value(written)
            if counter == "시간" and value in ("24", "48", "72"):
                return f"{self.cardinal(value)} 시간"
            most = 12 if counter == "시" else 99
            if value.isdecimal() and written[0] != "0" and 1 <= int(value) <= most:
                return f"{native(int(value))} {counter}"
            said = self.cardinal(value)
            return f"{said}{counter}" if counter == "시" else f"{said} {counter}"

        def say(found: Found) -> str | None:
            first, last, counter = found[1], found[2], found[3]
            if counter == "대" and last[-1] == "0" or ("-" in found[0] and (counter == "장" or not rises(first, last))):
                return keep(found)  # 20대 are twenty cars, or people in their twenties; 1-3장 are chapters or sheets
            if counter == "장" and re.search("(?:복음|서|기|행전|록|시편|잠언)$", found.before):  # a chapter
                return f"{self.said(first)}{self.to} {self.said(last)}장" if first else f"{self.said(last)}장"
            if not first:
                return counted(last, counter)
            return f"{counted(first, counter)}{self.to} {counted(last, counter)}"

        def rises(first: str, last: str) -> bool:
            return float(self.value(first)) < float(self.value(last))

        before = r"(?<![\w.,:/-])"
        ends = rf"(?:({number}) ?{DASH} ?)?(?<![\d.,])({number})"
        rule("", rf"{before}{ends} ?({self.any_of('native')}){self.ends}", say)

        def sino(found: Found) -> str:
            if found[2] and "-" in found[0][1:] and not rises(found[2], found[3]):
                return keep(found)
            last = self.said(found[3])
            last = f"{self.said(found[2])}{self.to} {last}" if found[2] else last
            return self.minus + last if found[1] else last

        particles = self.any_of("particles")
        rule("월", r"(?<!\d)(6|10)(?=월)", lambda f: "유" if f[1] == "6" else "시")
        behind = rf" ?(?:{self.any_of('sino')})|여 ?[가-힣]|(?:{particles}){{1,2}}(?![가-힣0-9])"
        rule("", rf"{before}([-−])?{ends}(?={behind})", sino)
