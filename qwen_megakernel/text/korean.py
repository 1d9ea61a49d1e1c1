"""Korean counters: native numbers up to 99 before native ones, Chinese numbers before the others."""

import re

from qwen_megakernel.text.rule import DASH, Around, Language, Rules, ends_of, keep

_ONES = ["", "한", "두", "세", "네", "다섯", "여섯", "일곱", "여덟", "아홉"]
_TENS = ["", "열", "스물", "서른", "마흔", "쉰", "예순", "일흔", "여든", "아흔"]
_NATIVE = ends_of(
    "개 명 사람 살 마리 시 시간 번 잔 병 권 대 장 송이 그루 켤레 벌 채 척 자루 달 가지 곳 군데 통 쌍 줄 판 봉지 상자 "
    "바퀴 끼 그릇 숟가락 접시 조각 포기 다발 가족 곡 건 종 갑 모금 방울 걸음 컵 박스 팀"
)
_SINO = ends_of(
    "년 월 일 원 분 초 층 도 세 회 점 위 호 호선 주 주일 주년 개월 개국 학년 킬로 미터 센티미터 킬로미터 킬로그램 "
    "그램 리터 퍼센트 프로 달러 유로 엔 위안 파운드 인분 인 페이지 쪽 번지 번가 만 억 조 천 백 박 급 등 부 차 선 단계 "
    "단 교시 년대 세기 평 편 과 절 배 조원 억원 만원 천원 만명 억명 년간 일간 분간 초간 시리즈 승 패 무 연승 톤 와트 "
    "볼트 화소 행 열 관 동 화 강 기 군 반 밀리"
)
_PARTICLES = ends_of(
    "은 는 이 가 을 를 의 에 에서 에게 도 만 과 와 로 으로 씩 정도 이상 이하 이내 이후 이전 미만 초과 까지 부터 쯤 "
    "짜리 이나 나 당 마다 들 간 이 인 입니다 이다 이에요 예요 이고 밖에 보다 반 전 후 동안 중 뒤 안 만에 여 때 경 차 "
    "내 분 가량 이며 이라 이란 인데 이었다 였다 이지만 이면 면 란 라 라고 이라고 하고 이랑 랑"
)
COUNTER = re.compile(rf"(?:{_NATIVE}){{1}}(?:{_PARTICLES}){{0,2}}(?![가-힣0-9])|{_SINO}")
"""What may follow a number behind a blank."""

_ENDS = rf"(?=(?:{_PARTICLES}){{0,2}}(?![가-힣0-9]))"


def native(number: int) -> str:
    """1 to 99 as they stand before a counter."""
    if number == 20:
        return "스무"
    return _TENS[number // 10] + _ONES[number % 10]


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
        if counter == "대" and last[-1] == "0":  # 20대 are twenty cars, or people in their twenties
            return keep(found[0])
        if not first:
            return counted(last, counter)
        return f"{counted(first, counter)}{spoken.to} {counted(last, counter)}"

    before = r"(?<![\w.,:/-])"
    ends = rf"(?:({number}) ?{DASH} ?)?(?<![\d.,])({number})"
    yield rf"{before}{ends} ?({_NATIVE}){_ENDS}", say

    def sino(found: re.Match[str]) -> str:
        last = spoken.cardinal(spoken.value(found[3]))
        last = f"{spoken.cardinal(spoken.value(found[2]))}{spoken.to} {last}" if found[2] else last
        return spoken.minus + last if found[1] else last

    yield r"(?<=제)\d{1,4}(?!\d|[.,]\d)", lambda f: spoken.cardinal(f[0])
    yield r"(?<!\d)(6|10)(?=월)", lambda f: "유" if f[1] == "6" else "시"
    yield rf"{before}([-−])?{ends}(?= ?(?:{_SINO})|여 ?[가-힣]|(?:{_PARTICLES}){{1,2}}(?![가-힣0-9]))", sino
