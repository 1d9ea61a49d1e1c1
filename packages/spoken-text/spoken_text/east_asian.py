"""What Chinese, Japanese and Korean share: ranges with a unit on both sides, dates in digits, maths, coordinates."""

import re

from spoken_text.figures import OF, RATIO
from spoken_text.rule import SUPERSCRIPTS, Around, Kept, Rules, ends_of, keep
from spoken_text.spoken import Spoken

_UNITS = {
    "zh": "世纪紀千年月日号號天周点點时時分秒元块塊万萬亿億岁歲个個人名级級章节節页頁度层層米里克斤升吨次倍届屆条條"
    "折位集期公小钟鐘半美欧厘毫%",
    "ja": "世紀年月日時分秒円万億兆千歳才人個名位回階章話巻度号番本枚台冊週間倍点級件代半ヶか%",
    "ko": "년월일시분초원만억조천살세명개번회위층호장권대주달도간%",
}
"""What a number may have before the dash of a range."""
_DASHES = "[-–—~～〜－−]"

_SIGNS = {
    "zh": "加 减 乘以 除以 等于 约等于 小于等于 大于等于 不等于 小于 大于 正负 的平方 的立方 根号 的{}次方 乘",
    "ja": "プラス マイナス かける わる イコール ニアリーイコール 小なりイコール 大なりイコール ノットイコール "
    "小なり 大なり "
    "プラスマイナス の二乗 の三乗 ルート の{}乗 かける",
    "ko": "더하기 빼기 곱하기 나누기 이퀄 약 ≤ ≥ ≠ < > 플러스마이너스 제곱 세제곱 루트 의_{}제곱 곱하기",
}
_NAMES = "+ - × ÷ = ≈ ≤ ≥ ≠ < > ± ² ³ √ ^ x".split()
_HALVES = {"zh": ("上午", "下午"), "ja": ("午前", "午後"), "ko": ("오전 ", "오후 ")}
_ANGLES = {"zh": "度分秒", "ja": "度分秒", "ko": ("도 ", "분 ", "초")}


def first(spoken: Spoken, around: Around) -> Rules:
    """Before all other rules."""
    code = spoken.code
    yield r"(?<![\w.,])\d+(?:st|nd|rd|th)(?![A-Za-z])", lambda f: keep(f[0])
    yield r"(?<![\w])[Nn][Oo]\.\d+(?![\d.])|(?<!\w)0x[0-9A-Fa-f]{1,16}(?!\w)", lambda f: keep(f[0])
    yield r"(?<![\w./])\d\d/\d\d/\d\d(?![\w/])", lambda f: keep(f[0])
    point = f"{spoken.around_dot}{spoken.point}{spoken.around_dot}"
    dotted = r"(?<=[A-Za-z]\.)\d{1,3}(?:\.\d{1,3}){1,3}(?![\w.])"  # Ver.2.0
    yield dotted, lambda f: point.join(map(spoken.cardinal, f[0].split(".")))
    # The parts of a number with letters, such as HT2024-0315.
    parts = r"(?<=[A-Za-z])-?\d{2,20}(?:-\d{1,20}){1,9}(?![\w.-])"
    yield parts, lambda f: Kept("-".join(map(spoken.digits, f[0].lstrip("-").split("-"))))
    yield r"(?<![\w.,])\d+['’′]\d+(?:[\"”″]|['’′]{2})", lambda f: keep(f[0])
    if spoken.code == "ko":
        yield r"(?<=\d[년월일시분])(?=\d)|(?<=\d시간)(?=\d)", lambda f: " "
    yield from _dates(spoken, around)
    yield from _ranges(spoken)
    pause = {"zh": "，", "ja": "、", "ko": ", "}[code]

    def account(found: re.Match[str]) -> str | None:
        if sum(map(str.isdecimal, found[0])) < 9:
            return None
        said = pause.join(map(spoken.digits, found[0].split("-")))
        return said.replace("영", "공") if code == "ko" else said

    yield r"(?<![\w.,/+-])(?<![\d)] )\d{2,6}-\d{2,6}-\d{2,8}(?![\w.-])", account
    names = ends_of(" ".join(name for name in spoken.units if name != "%"))

    def scaled(found: re.Match[str]) -> str | None:
        said, form = spoken.cardinal(spoken.value(found[1])) + found[2], spoken.units[found[3]][0]
        if code == "zh" and found[1] == "2":
            said = f"两{found[2]}"
        return form.format(said) if "{}" in form else f"{said}{' ' if code == 'ko' else ''}{form}"

    yield rf"(?<![\w.,/-])({spoken.pattern}) ?([万亿億만억천]) ?({names})(?![A-Za-z0-9²³/])", scaled
    degrees, minutes, seconds = _ANGLES[code]

    def angle(found: re.Match[str]) -> str:
        said = f"{spoken.cardinal(found[1])}{degrees}{spoken.cardinal(str(int(found[2])))}{minutes}"
        return (
            f"{said}{spoken.cardinal(spoken.value(found[3].lstrip('0') or '0'))}{seconds}" if found[3] else said
        ).strip()

    yield r"(?<![\w.,])(\d{1,3}) ?° ?(\d{1,2}) ?['’′](?: ?(\d{1,2}(?:\.\d{1,3})?) ?[\"”″])?", angle
    am, pm = _HALVES[code]

    def half(found: re.Match[str]) -> str | None:
        if not 1 <= int(found[1]) <= 12:
            return None
        return f"{am if found[3] in 'aA' else pm}{spoken.at_time(found[1], found[2] or '0')}"

    yield r"(?<![\w:.,-])(\d\d?)(?:[:：]([0-5]\d))? ?([AaPp])(?:\.[Mm]\.|[Mm])(?![A-Za-z])", half


_AT = re.compile(
    "(?:于|在|时间|上午|下午|晚上?|凌晨|早上|中午|午前|午後|時刻は?|오전|오후|밤|낮|새벽|저녁|아침)[:：]? ?$"
)


def times(spoken: Spoken, around: Around) -> Rules:
    """With two digits of hours 14:30:05 is a time of day, with one it lasts. 78:96 is a score."""
    second_mark = {"zh": "秒", "ja": "秒", "ko": "초"}[spoken.code]

    def clock(found: re.Match[str]) -> str | None:
        hour, minute, second = found[1], found[3], found[4]
        is_time = len(hour) == 2 or _AT.search(around.ahead(found))
        if not is_time or int(hour) > 24:
            return None
        said = spoken.at_time(hour, minute)
        if second == "00":
            return said
        if minute == "00":
            said += {"zh": "零分", "ja": "零分", "ko": " 영분"}[spoken.code]
        zero = "零" if spoken.code == "zh" and second[0] == "0" else ""
        return f"{said}{' ' if spoken.code == 'ko' else ''}{zero}{spoken.cardinal(str(int(second)))}{second_mark}"

    yield r"(?<![\w.,:/-])(\d{1,2})([:：])([0-5]\d)\2([0-5]\d)(?![\w:/]|[.,]\d)", clock

    def ratio(found: re.Match[str]) -> str | None:
        first, last = found[1], found[2]
        is_time = int(first) <= 24 and int(last) <= 59
        blank = " " if spoken.code == "ko" else ""
        return None if is_time else f"{spoken.cardinal(first)}{blank}{RATIO[spoken.code]}{blank}{spoken.cardinal(last)}"

    yield r"(?<![\w.,:：/-])([1-9]\d{0,2})[:：]([1-9]\d)(?![\w:：/]|-\d|[.,]\d)", ratio


def hyphens(spoken: Spoken, around: Around) -> Rules:
    """嫦娥-5 is no number below zero."""
    units = tuple("度도°%元円원层層階층分点점")
    verbs = {"zh": "为為是到低达约至在从于温得等降", "ja": "はがをにで約低高温気比", "ko": "하"}[spoken.code]

    def plain(found: re.Match[str]) -> str | None:
        left = around.ahead(found)[-1:]
        if not left.isalpha() or left.isascii() or left in verbs or around.behind(found).lstrip().startswith(units):
            return None
        return Kept(f"-{spoken.cardinal(found[1])}")

    yield r"(?<![\w.,])[-−]([1-9]\d{0,3})(?![\w.,/-])", plain


_MEASURED = {
    "zh": r"(?:的|约|約|占|了|过|近)$",
    "ja": r"(?:大さじ|小さじ|約|割合は?|確率は?|の)$",
    "ko": r"(?:의|약|전체|중|은|는) ?$",
}
_BEHIND_FRACTION = {"zh": "的杯勺", "ja": "カ合以", "ko": "컵큰작스이수정"}
_BEHIND_DAY = {"zh": "", "ja": "にかまのはで（(〜～、", "ko": "에부까("}
_DATED = re.compile(r"(?:今天|明天|昨天|日期|在|于|从|오늘|내일|날짜)(?:是|은|는|[:：])? ?$")


def days(spoken: Spoken, around: Around) -> Rules:
    """3/5 is a fraction or a day. Where nothing tells, it stays."""

    def say(found: re.Match[str]) -> str | None:
        top, bottom = int(found[2]), int(found[3])
        minus = spoken.minus if found[1] else ""
        left, right = around.ahead(found), around.behind(found).lstrip()[:1]
        is_day = top <= 12 and 0 < bottom <= 31 and not minus
        if is_day and (bottom > 10 or top >= bottom) and right and right in _BEHIND_DAY[spoken.code]:
            return spoken.on_date("", top, found[3])
        if _DATED.search(left) or top >= bottom:
            return keep(found[0])
        sure = re.search(_MEASURED[spoken.code], left) or (right and right in _BEHIND_FRACTION[spoken.code])
        small = bottom < 7 or bottom in (8, 10)
        if spoken.code != "zh":
            small = top == 1 and bottom in (2, 3, 4) or (top, bottom) in ((2, 3), (3, 4))
        if sure or minus or bottom > 31 or top > 12:
            return f"{minus}{spoken.cardinal(found[3])}{OF[spoken.code]}{spoken.cardinal(found[2])}"
        return None if small else keep(found[0])

    yield r"(?<![\w.,/:–-])(?<!\d )([-−])?([1-9]\d{0,2})/([1-9]\d{0,3})(?![A-Za-z0-9_/]|[.,]\d|-\d)", say


def _dates(spoken: Spoken, around: Around) -> Rules:
    """2024.3.5, and 3/5 with a weekday behind. The number of a version stays one."""
    day = r"(0?[1-9]|[12]\d|3[01])"
    month = r"(0?[1-9]|1[0-2])"
    blank = " " if spoken.code == "ko" else ""

    def versioned(found: re.Match[str]) -> bool:
        left = around.ahead(found).rstrip(" ")
        return (
            left[-1:].isascii() and left[-1:].isalnum() or left.endswith(("版", "版本", "バージョン", "버전", "윈도우"))
        )

    def dotted(found: re.Match[str]) -> str | None:
        if versioned(found):
            return None
        return spoken.on_date(found[1], int(found[2]), found[3])

    year = r"((?:19|20)\d\d)"
    yield (
        rf"(?<![\w.,/-])({year[1:-1]}([./-])\d\d?\2\d\d?) ?{_DASHES} ?(?={year}\2\d)",
        lambda f: f"{f[1]}{spoken.to}{blank}",
    )
    yield rf"(?<![\w.,/-]){year}-{month}-{day}(?![\w./-])", lambda f: spoken.on_date(f[1], int(f[2]), f[3])
    if spoken.code == "ko":
        yield rf"(?<![\w.,/-]){year}\. ?{month}\. ?{day}(?!\d|\.\d)(?:\.(?= ?[^\s\d]))?", dotted
        yield rf"(?<![\w.,/-]){year}\. ?{month}\.(?! ?\d)(?=.)", lambda f: _month(spoken, f[1], f[2])
    else:
        yield rf"(?<![\w.,/-]){year}\.{month}\.{day}(?![\w.])", dotted
    yield r"(?<![\w.,/-])\d\d\.\d{1,2}\.\d{1,2}(?![\w.])", lambda f: keep(f[0]) if not versioned(f) else None
    # 2024-03 is a month, 2010-12 may be years, 2024.03 may be an amount.
    yield rf"(?<![\w.,/-]){year}(?:[-/](0[1-9])|/(1[0-2]))(?![\w./-])", lambda f: _month(spoken, f[1], f[2] or f[3])
    ends = r"(?=$|[-~～〜）) ]|到|至|から|부터)"
    yield rf"(?<![\w.,/-]){year}\.(?:0[1-9]|1[0-2]){ends}(?! ?[%A-Za-z元円万萬亿億원만])", lambda f: keep(f[0])
    yield (
        r"(?<![\w.,/:-])(0[1-9])[-/](0[1-9]|[12]\d|3[01])(?![\w.,/:-])",
        lambda f: None if re.match(" ?\\d", f.string[f.end() :]) else spoken.on_date("", int(f[1]), f[2]),
    )
    marks = "월일시분초" if spoken.code == "ko" else "月日号號" + ("時分秒" if spoken.code == "ja" else "")
    yield rf"(?<![\w.,:/-])0(?=[1-9] ?[{marks}])", lambda f: ""
    weekday = {"zh": "周週星", "ja": "月火水木金土日祝", "ko": "월화수목금토일"}[spoken.code]

    def on_weekday(found: re.Match[str]) -> str | None:
        return (
            spoken.on_date("", int(found[1]), found[2])
            if re.match(rf" ?[(（](?:[{weekday}]|$)", around.behind(found))
            else None
        )

    yield rf"(?<![\w.,/:–-]){month}/{day}(?![\w/]|[.,]\d)", on_weekday


def _month(spoken: Spoken, year: str, month: str) -> str:
    said = spoken.on_date(year, int(month), "1")
    return said.removesuffix("일일").removesuffix("一日").rstrip()


def _ranges(spoken: Spoken) -> Rules:
    """3月5日～8日, 10万-20万: a dash between a unit and a digit."""
    after = " " if spoken.code == "ko" else ""
    unit = f"[{_UNITS[spoken.code]}]"
    behind = "|".join(rf"(?<=\d{unit * size})" for size in (1, 2, 3))
    yield r"(?<=\d)—(?=\d)", lambda f: "～"
    yield r"(?<=\)) ?[~～〜] ?(?=\d)", lambda f: Kept(spoken.to + after)
    yield rf"°C ?{_DASHES} ?(?=[-−]?\d)", lambda f: Kept(f"°C{spoken.to}{after}")
    yield rf"(?:{behind}|(?<=\d°)) ?{_DASHES} ?(?=[-−]?\d)", lambda f: Kept(spoken.to + after)


def maths(spoken: Spoken, around: Around) -> Rules:
    """Signs between numbers. They come behind all rules that need their digits."""
    blank = " " if spoken.code == "ko" else ""
    words = dict(zip(_NAMES, (word.replace("_", " ") for word in _SIGNS[spoken.code].split()), strict=True))
    number = spoken.pattern

    def named(name: str) -> Kept:
        return Kept(f"{blank}{words[name]}{blank}")

    def sign(found: re.Match[str]) -> Kept | None:
        name = found[0].strip()
        return None if spoken.code == "ko" and name in "≤≥≠<>" else named(name)  # Korean says these at the end

    def times(found: re.Match[str]) -> Kept:
        """A product, or 3×4 metres."""
        return named("×" if "=" in found.string[found.end() :][:60] else "x")

    def power(found: re.Match[str]) -> str:
        base, exponent = spoken.cardinal(spoken.value(found[1])), found[2].lstrip("^").translate(SUPERSCRIPTS)
        if exponent in ("2", "3"):
            return f"{base}{blank}{words['²' if exponent == '2' else '³']}"
        minus, exponent = exponent[0] == "-", exponent.lstrip("-")
        return base + words["^"].format((spoken.minus if minus else "") + spoken.cardinal(str(int(exponent))))

    yield r"(?<=[\d)²米厘毫cmM]) ?[×✕] ?(?=[\d(])|(?<=\d)\*(?=\d)", times
    yield r"(?<=[A-Za-z)])²(?= ?[-+=<>])", lambda f: Kept(f"{blank}{words['²']}")
    left, term = r"(?<=[A-Za-z\d)²³方乗곱])", r"[A-Za-z\d(]"
    formula = rf"(?={term}[A-Za-z\d.,()+×÷*^² −-]{{0,60}}=)"
    yield rf"{left} ?[-−] ?(?=\d[\d.,()+×÷* −-]{{0,60}}=)", lambda f: named("-")
    yield rf"(?<=[\d)²³方乗곱]) ?\+ ?(?=[\d(])|{left} ?\+ ?{formula}", sign
    yield r"√(?=\d)", lambda f: Kept(words["√"] + blank)
    yield r"±(?=\d)", lambda f: Kept(words["±"] + blank)
    yield rf"(?<![\w.,])({number})(\^-?\d{{1,3}}(?![\d.])|⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]{{1,3}})", power
    yield r"(?<=[\d)]) ?÷ ?(?=[\d(])", sign
    yield r"^= ?(?=\d)", lambda f: named("=") if around.left[-1:].isalpha() and not around.left.isascii() else None
    yield r"^[≈≤≥≠±] ?(?=\d)|(?<=[^\s=<>!:+*/&?-]) ?[=≈≤≥≠] ?(?=[-−\d(])|(?<=[\d)²%]) ?[=≈≤≥≠] ?(?=[\w(])", sign
    yield r"(?<=[\d)²³方乗곱A-Za-z]) ?[<>] ?(?=[\d(])", sign
