"""Korean counters: native numbers up to 99 before native ones, Chinese numbers before the others."""

import re

from spoken_text.rule import DASH, Around, Kept, Language, Rules, ends_of, keep

_ONES = ["", "한", "두", "세", "네", "다섯", "여섯", "일곱", "여덟", "아홉"]
_TENS = ["", "열", "스물", "서른", "마흔", "쉰", "예순", "일흔", "여든", "아흔"]
_NATIVE = ends_of(
    "개 명 사람 살 마리 시 시간 번 잔 병 권 대 장 송이 그루 켤레 벌 채 척 자루 달 가지 곳 군데 통 쌍 줄 판 봉지 상자 "
    "바퀴 끼 그릇 큰술 작은술 스푼 숟가락 접시 조각 포기 다발 가족 곡 건 갑 모금 방울 걸음 컵 박스 팀 골 경기 과목 "
    "문제 문장 글자 단어 칸 자리 가구 가정 편 알 캔 척 정거장 제곱"
)
_SINO = ends_of(
    "년 월 일 원 분 초 층 도 세 회 점 위 호 호선 주 주일 주년 개월 개국 학년 킬로 미터 센티미터 킬로미터 킬로그램 "
    "그램 리터 퍼센트 프로 달러 유로 엔 위안 파운드 인분 인 페이지 쪽 번지 번가 만 억 조 천 백 박 급 등 부 차 선 단계 "
    "단 교시 년대 세기 평 과 절 배 조원 억원 만원 천원 만명 억명 년간 일간 분간 초간 시리즈 승 패 무 연승 톤 포인트 "
    "푼 리 불 와트 "
    "볼트 화소 행 열 관 동 화 강 기 군 반 밀리 학기 학점 할 루 남 녀 개년 계절 길 국 각 성급 형 종 매 득점 실점 "
    "안타 이닝 "
    "라운드 교대 인승 인용"
)
_PARTICLES = ends_of(
    "은 는 이 가 을 를 의 에 에서 에게 도 만 과 와 로 으로 씩 정도 이상 이하 이내 이후 이전 미만 초과 까지 부터 쯤 "
    "짜리 이나 나 당 마다 들 간 이 인 입니다 이다 이에요 예요 이고 밖에 보다 반 전 후 동안 중 뒤 안 만에 여 때 경 차 "
    "내 분 가량 이며 이라 이란 인데 이었다 였다 이지만 이면 면 란 라 라고 이라고 하고 이랑 랑 꼴"
)
COUNTER = re.compile(rf"(?:{_NATIVE}){{1}}(?:{_PARTICLES}){{0,2}}(?![가-힣0-9])|{_SINO}")
"""What may follow a number behind a blank."""

_ENDS = rf"(?=(?:{_PARTICLES}){{0,2}}(?![가-힣0-9]))"


def native(number: int) -> str:
    """1 to 99 as they stand before a counter."""
    if number == 20:
        return "스무"
    return _TENS[number // 10] + _ONES[number % 10]


HALVES = ("오전", "오후", "새벽", "아침", "낮", "저녁", "밤", "정오", "자정")
DATE_GOES_ON = re.compile(r"(?<![\d.])(?:(?:19|20)\d\d|\d{1,2})\.$")
"""2024. 3. 5."""

_MACHINES = frozenset(
    "차 자동차 차량 승용차 버스 트럭 택시 컴퓨터 노트북 tv 비행기 자전거 오토바이 카메라 기계 로봇 드론 서버 냉장고 "
    "에어컨 전화기 휴대폰 피아노 헬기 탱크 전투기 pc 장비 구급차 소방차 선풍기 열차".split()
)
_NUMBERED = ends_of(
    "출구 버스 국도 선수 홈 타자 트랙 게이트 승강장 채널 좌석 마을버스 교향곡 염색체 레인 아이언 우드 창구 항목 "
    "정답 답 고속도로"
)
_NAMED_NUMBER = ("정답", "답", "문제", "보기", "기호", "등번호", "번호", "채널", "노선", "버스", "국도", "출구", "홈")
_AGED = ends_of(
    "남성 여성 남자 여자 초반 중반 후반 청년 젊은 직장인 부부 인구 가수 배우 주부 대학생 청소년 미혼 때 초 말"
)
_MAJOR = ends_of("도시 보험 기업 명절 그룹 은행 강국 과제 원칙 뉴스 종합 핵심 주요 국 메이저 의혹 요소 영양소 로펌")
_DIALLED = re.compile(
    r"(?:번호는?|우편번호는?|비밀번호는?|학번은?|사번은?|계좌는?|코드는?|핀번호는?|끝자리|자리|내선|오류|에러|"
    r"포트)[:：]? ?$"
)
_SCORES = re.compile(
    r"(?:으로|로|의)? ?(?:이겼|이기|승|패|졌|지고|꺾|제압|무승부|무|앞|역전|완승|완패|리드|비겼|비긴|물리|격파|눌렀|"
    r"눌러|끝)"
)


def first(spoken: Language, around: Around) -> Rules:
    """What the shared rules and the counters would read otherwise."""

    def say(written: str) -> str:
        return spoken.cardinal(written)

    def ordinal(found: re.Match[str]) -> str:
        return say(found[1]) + (f"{spoken.to} {say(found[2])}" if found[2] else "")

    to = rf"(?: ?{DASH} ?제?(\d{{1,4}}))?(?!\d|[.,]\d)"
    yield rf"(?<=(?<![가-힣])제)(\d{{1,4}}){to}", ordinal
    yield rf"^(\d{{1,4}}){to}", lambda f: ordinal(f) if around.before == "제" else None
    yield r"(?<![\w.,/])([1-4])/4(?= ?분기)", lambda f: f"{say(f[1])}사"
    yield rf"(?<=[\d시분]) ?{DASH} ?(?=(?:{ends_of(' '.join(HALVES))}))", lambda f: Kept(f"{spoken.to} ")

    def event(found: re.Match[str]) -> str | None:
        """6·25 is said by its digits, and so are 1·2학년."""
        month, day = found[1], found[2]
        if found.string[found.end() :].startswith(("대", "%")) or day[0] == "0":
            return keep(found[0])
        whole = day in ("10", "20", "30") or (month == "12" and day == "12")
        return say(month) + (say(day) if whole else "".join(map(say, day)))

    yield r"(?<![\w.,·])([1-9]|1[0-2])·([1-9]\d?)(?![\w.·])", event
    dotted = (
        r"(?<![\w.,])([1-9]|1[0-2])\.([1-9]\d?)(?![\w.])(?= ?(?:전쟁|운동|혁명|절|사태|테러|선언|민주|항쟁|만세|참전))"
    )
    yield dotted, event
    yield rf"(?<![\w.,/-])([1-9]0) ?{DASH} ?([1-9]0)(?=대)", lambda f: f"{say(f[1])}{spoken.to} {say(f[2])}"

    def month(number: str) -> str:
        return {"6": "유", "10": "시"}.get(number) or say(number)

    yield (
        rf"(?<![\w.,/-])([1-9]|1[0-2]) ?{DASH} ?([1-9]|1[0-2])(?=월)",
        lambda f: f"{month(f[1])}월{spoken.to} {month(f[2])}",
    )
    yield (
        r"(?<![\w.,·])([1-9]), ?([1-9])(?=위|차|학년|등|층|부|호기|심)",
        lambda f: f"{say(f[1])}, {say(f[2])}" if " " in f[0] else f"{say(f[1])}{say(f[2])}",
    )

    def ordinal_of(found: re.Match[str]) -> str | None:
        number = int(found[1])
        return f"{native(number) if number < 100 else say(found[1])} 번째" if 0 < number < 10**12 else None

    yield r"(?<![\w.,])(\d{1,12}) ?번째", ordinal_of

    def dialled(found: re.Match[str]) -> str | None:
        if not _DIALLED.search(around.ahead(found)):
            return None
        return spoken.digits(found[0]).replace("영", "공")

    yield r"(?<![\w.,/-])\d{3,20}(?![\w]|[.,:/-]\d|[가-힣]?원)", dialled
    emergency = r"(?= ?(?:에 ?|로 ?)?(?:신고|구급|구조|종합|상황실|대원|소방|전화))"
    yield (
        rf"(?<![\w.,/-])(?:11[0-9])(?:{emergency}|(?=에$|로$|$))",
        lambda f: (
            spoken.digits(f[0]).replace(" ", "")
            if re.match(emergency, around.behind(f))
            or around.after.startswith(("신고", "구급", "구조", "종합", "대원", "상황"))
            else None
        ),
    )

    def score(found: re.Match[str]) -> str | None:
        right = found.string[found.end() :]
        rest = f"{right} {around.after}" if around.after else right
        if _SCORES.match(rest):
            return f"{say(found[1])} 대 {say(found[2])}"
        return keep(found[0]) if int(found[1]) >= int(found[2]) else None

    yield r"(?<![\w.,:/-])(\d{1,2})-(\d{1,2})(?![\w.,:/=-]| ?=)", score
    yield (
        r"(?<![\w.,])(\d{1,3}) ?대 ?(\d{1,3})(?![\w.,]|\d)(?! ?(?:명|개|대|시|년|월|일|분|원|만|번|살|세|권|장))",
        lambda f: f"{say(f[1])} 대 {say(f[2])}",
    )

    def machines(found: re.Match[str]) -> str | None:
        """20대 are twenty cars, or people in their twenties; 4대 are four, or the four great ones."""
        number, next_word = int(found[1]), found.string[found.end() :].strip() or around.after
        if around.word_before(found) in _MACHINES or number > 99:
            return f"{native(number) if number < 100 else say(found[1])} 대"
        if number % 10 == 0 and re.match(rf"(?:{_AGED})|(?:에|부터|는|의)(?: |$)", next_word):
            return f"{say(found[1])}대"
        if re.match(rf"(?:{_MAJOR})", next_word):
            return f"{say(found[1])}대"
        return keep(found[0]) if number % 10 == 0 or around.after or next_word else None

    yield rf"(?<![\w.,:/~-])([1-9]\d{{0,2}}) ?대(?=(?:{_PARTICLES}){{0,2}}(?![가-힣0-9]))", machines

    def numbered(found: re.Match[str]) -> str | None:
        """Exit 3, or three times."""
        next_word = found.string[found.end() :].strip() or around.after
        named = re.match(rf"(?:{_NUMBERED})", next_word) or around.word_before(found).endswith("반")
        named = named or around.word_before(found).rstrip("은는이가") in _NAMED_NUMBER
        if not named and next_word[:1] in ("을", "를"):
            return keep(found[0])
        return f"{say(found[1])} 번" if named else None

    yield rf"(?<![\w.,:/~-])([1-9]\d{{0,3}}) ?번(?=(?:{_PARTICLES}){{0,2}}(?![가-힣0-9]))", numbered


def rules(spoken: Language, around: Around) -> Rules:
    """Numbers with counters and particles. What has another noun behind it stays as it is."""
    number = spoken.pattern

    def counted(written: str, counter: str) -> str:
        value = spoken.value(written)
        most = 12 if counter == "시" else 99
        if value.isdecimal() and written[0] != "0" and 1 <= int(value) <= most:
            return f"{native(int(value))} {counter}"
        said = spoken.cardinal(value)
        return f"{said}{counter}" if counter == "시" else f"{said} {counter}"

    def say(found: re.Match[str]) -> str | None:
        first, last, counter = found[1], found[2], found[3]
        if counter == "대" and last[-1] == "0" or ("-" in found[0] and (counter == "장" or not rises(first, last))):
            return keep(found[0])  # 20대 are twenty cars, or people in their twenties; 1-3장 are chapters or sheets
        if not first:
            return counted(last, counter)
        return f"{counted(first, counter)}{spoken.to} {counted(last, counter)}"

    def rises(first: str, last: str) -> bool:
        return float(spoken.value(first)) < float(spoken.value(last))

    before = r"(?<![\w.,:/-])"
    ends = rf"(?:({number}) ?{DASH} ?)?(?<![\d.,])({number})"
    yield rf"{before}{ends} ?({_NATIVE}){_ENDS}", say

    def sino(found: re.Match[str]) -> str:
        if found[2] and "-" in found[0][1:] and not rises(found[2], found[3]):
            return keep(found[0])
        last = spoken.cardinal(spoken.value(found[3]))
        last = f"{spoken.cardinal(spoken.value(found[2]))}{spoken.to} {last}" if found[2] else last
        return spoken.minus + last if found[1] else last

    yield r"(?<!\d)(6|10)(?=월)", lambda f: "유" if f[1] == "6" else "시"
    yield rf"{before}([-−])?{ends}(?= ?(?:{_SINO})|여 ?[가-힣]|(?:{_PARTICLES}){{1,2}}(?![가-힣0-9]))", sino
