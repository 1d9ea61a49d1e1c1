"""How Mandarin says numbers, which num2words lacks."""

import re

from qwen_megakernel.text.rule import DASH, Around, Language, Rules

_DIGITS = "零一二三四五六七八九"
_COUNTERS = (
    "个|個|只|隻|条|條|张|張|本|辆|輛|位|名|件|块|塊|天|年(?!级|級|代)|周(?!岁|年)|岁|歲|种|種|家|台|部|座|间|間|"
    "杯|瓶|份|双|雙|次|倍|头|頭|匹|把|支|枝|根|颗|顆|封|首|节|節|门|門|场|場|套|层|組|组|排|群|碗|盒|包|箱|斤|"
    "公斤|公里|千米|厘米|毫米|米|克|升|吨|噸|元|美元|欧元|英镑|港元|日元|韩元|角|小时|小時|分钟|分鐘|秒|点|點|时|"
    "万|萬|亿|億|人|人份|国"
)
_FOLLOWING = (
    "月日号號期级級代多余餘半时時间間钟鐘内以上下左右到至第楼樓"
    "后後前～〜：－．／公里斤千百米厘毫克升吨噸美欧日韩港英镑元"
)
FOLLOWERS = frozenset(_COUNTERS + _FOLLOWING) - frozenset("|()?!")
"""A number waits for what comes behind one of these."""


def digits(written: str) -> str:
    return "".join(_DIGITS[int(digit)] for digit in written)


def cardinal(number: int) -> str:
    """A whole number of at most 16 digits: 两 only before 千, 万, 亿 and 兆."""
    if not number:
        return _DIGITS[0]
    said, gap = "", False
    for power, scale in ((12, "兆"), (8, "亿"), (4, "万"), (0, "")):
        part = number // 10**power % 10_000
        if not part:
            gap = bool(said)
            continue
        if said and (gap or part < 1000):
            said += _DIGITS[0]
        gap = False
        said += ("两" if part == 2 and scale else _below_ten_thousand(part)) + scale
    return re.sub("^一十", "十", said)


def _below_ten_thousand(number: int) -> str:
    said, gap = "", False
    for power, scale in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = number // power % 10
        if digit:
            said += (_DIGITS[0] if gap and said else "") + ("两" if digit == 2 and scale == "千" else _DIGITS[digit])
            said += scale
        gap = not digit
    return said


def rules(spoken: Language, around: Around) -> Rules:
    """Years, counters, codes and 11-digit telephone numbers."""
    yield r"(?<![\d.,])1[3-9]\d([ -]?)\d{4}\1\d{4}(?!\d)", lambda f: "，".join(map(digits, re.findall(r"\d+", f[0])))
    code = re.compile("[打拨撥话話编編]")
    yield r"^\d{3,12}(?!\d|[.,:/-]\d)", lambda f: digits(f[0]) if code.fullmatch(around.before) else None
    yield r"(?<=[A-Za-z])-?\d{3,}(?![\d.,])", lambda f: f[0][: -len(f[0].lstrip("-"))] + digits(f[0].lstrip("-"))
    year = r"(1[1-9]\d\d|2\d{3})"
    both = rf"(?<![\d.,]){year}(?:年)? ?{DASH} ?{year}(?= ?年)"
    yield both, lambda f: f"{digits(f[1])}{'年' if '年' in f[0] else ''}{spoken.to}{digits(f[2])}"
    yield r"(?<![\w.,/-])((?:19|20)\d\d)/((?:19|20)\d\d)(?![\d/])", lambda f: f"{digits(f[1])}/{digits(f[2])}"
    yield rf"(?<![\d.,]){year}(?= ?年)", lambda f: digits(f[1])
    yield (
        r"(?<![\d.,])(\d\d)(?=年(?:\d{1,2}月|代))",
        lambda f: digits(f[1]) if "代" not in f.string[f.end() :][:2] else None,
    )

    number = spoken.pattern

    def counted(found: re.Match[str]) -> str | None:
        ahead = found.string[: found.start()]
        if "第" in ahead or (around.before in ("第", "、") and not ahead):
            return spoken.cardinal(spoken.value(found[2]))
        said = _before_counter(spoken, found[2])
        return f"{_before_counter(spoken, found[1])}{spoken.to}{said}" if found[1] else said

    yield rf"(?<![A-Za-z0-9_.,:/-])(?:({number}) ?{DASH} ?)?(?<![\d.,])({number})(?= ?(?:{_COUNTERS}))", counted


def _before_counter(spoken: Language, written: str) -> str:
    return "两" if written == "2" else spoken.cardinal(spoken.value(written))
