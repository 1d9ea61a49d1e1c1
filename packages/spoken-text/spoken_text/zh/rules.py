"""How Mandarin says numbers, which num2words lacks."""

import re

from spoken_text.rule import DASH, Around, Kept, Language, Rules, keep

_DIGITS = "零一二三四五六七八九"
_COUNTERS = (
    "个|個|只|隻|条|條|张|張|本|辆|輛|位|名|件|块|塊|天|年(?!级|級|代|生)|周|岁|歲|种|種|家|台|部|座|间|間|"
    "杯|瓶|份|双|雙|次(?!方|元)|倍|头|頭|匹|把|支|枝|根|颗|顆|封|首|节|節|门|門|场|場|套|层|組|组|排|群|碗|盒|包|箱|斤|"
    "公斤|公里|千米|千克|厘米|毫米|米|克|升|吨|噸|元(?!素)|美元|欧元|英镑|港元|日元|韩元|毛|小时|小時|分钟|分鐘|秒|"
    "点|點|时|万|萬|亿|億|人(?!称)|人份|国|勺|匙|粒|片|滴|遍|趟|轮|輪|局|句|段|页|頁|集|款|类|類|项|項|批|笔|筆|桶|罐|壶|袋|"
    "篇|幅|枚|架|艘|顿|餐|口|户|戶|处|處|步|圈|例|届|屆|室(?=\\d厅|\\d廳)"
)
_FOLLOWING = (
    "月日号號期级級代多余餘半时時间間钟鐘内以上下左右到至第楼樓路章条室房栋棟单元厅廳卫成折分度角年季学學赛賽财財"
    "后後前～〜：－．／公里斤千百米厘毫克升吨噸美欧日韩港英镑元平方立秒线線股航讯訊微立单"
)
FOLLOWERS = frozenset(_COUNTERS + _FOLLOWING) - frozenset("|()?!=\\d")
"""A number waits for what comes behind one of these."""

_NUMBERED = re.compile(
    r"(?:电话|電話|热线|熱線|手机|手機|传真|客服|拨打?|撥打?|致电|号码|號碼|编号|編號|编码|邮编|郵編|学号|工号|订单号?|单号|卡号|账号|"
    r"帐号|密码|密碼|验证码|驗證碼|尾号|QQ号?|微信号?|证号|代码|口令|车牌号?|分机|机号|门牌号?|批号|序列号|端口|报警|急救|火警|转)"
    r"(?:号|号码)?(?:是|为|為|[:：])? ?$|号(?:是|为|為|[:：]) ?$"
)
_HOTLINES = "12306|12345|12315|12333|12320|12348|12378|12369|10086|10010|95\\d{3}"
_LASTS = re.compile(
    r"(?:近|约|約|有|长达|過去|过去|历时|經過|经过|历经|了|共|满|超过|将近|整整|每|前|后|以上|达|过|需|要)$"
)
_MODEL = re.compile(r"(?:波音|空客|歼|殲|轰|运|直|教|武直|麦道) ?-?$")
_RATIO = re.compile(r"(?:比例|比分|比率|配比|赔率|之比|总分)(?:是|为|為|约为|[:：])? ?$")
_WON = "获獲胜勝击擊险險负負落领領逆惜大横平战戰淘完力险"


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


def first(spoken: Language, around: Around) -> Rules:
    """What the shared rules would read otherwise: numbers that are names, years, ratios, prices."""
    number = spoken.pattern

    def named(found: re.Match[str]) -> str | None:
        if not _NUMBERED.search(around.ahead(found)):
            return None
        return "，".join(map(digits, found[0].split()))

    yield r"(?<![\w.,/-])\d{3,20}(?: \d{3,8}){0,5}(?![\w]|[.,:/-]\d| \d)", named
    yield r"\((0\d{2,3})\) ?(\d{7,8})(?![\w-])", lambda f: f"{digits(f[1])}，{digits(f[2])}"
    yield r"(?<![\w.,/-])[45]\d\d(?![\w.,/-])", lambda f: digits(f[0]) if around.behind(f)[:1] in ("错", "状") else None
    yield r"(?<![\w.,/-])(?:19|20)\d\d(?=[QqHh][1-4](?!\w))", lambda f: digits(f[0])
    yield r"(?<=\d秒)\d\d(?![\d.])", lambda f: digits(f[0])
    yield r"(?<=\d)\.00?(?= ?(?:元|美元|欧元|英镑|港元|日元))", lambda f: Kept()
    yield rf"(?<![\w.,/-])(?:{_HOTLINES})(?![\w%元个人万亿]|[.,:/-]\d)", lambda f: digits(f[0])
    yield r"(?<![\w.,/-])(\d{3,4})(?=路|室(?!\d厅)|号房|房间|国道|號房|房間)", lambda f: digits(f[1])
    yield r"(?<![\w.,/-])(7[0-8]7)-([1-9]00)(?![\w.,/-])", lambda f: f"{digits(f[1])}，{cardinal(int(f[2]))}"

    yield (
        r"(?<![\w.,/-])(?:5\.1|10\.1)(?![\w.,/-])",
        lambda f: (
            {"5.1": "五一", "10.1": "十一"}[f[0]]
            if around.behind(f)[:1] in ("假", "国", "黄", "长", "小", "劳")
            else None
        ),
    )
    yield r"(?<![\w.,/-])(\d{1,2})-(\d{3,4})(?=室|房|号)", lambda f: f"{cardinal(int(f[1]))}-{digits(f[2])}"
    yield r"(?<![\w.,/-])(?:[5-9][05]|0[05]|10)(?=[后後](?!期))", lambda f: digits(f[0])
    yield r"(?<![\w.,/-])([1-9]\d?)·(\d{1,2})(?![\w.·])", lambda f: digits(f[1] + f[2])

    def event(found: re.Match[str]) -> str | None:
        return digits(found[0]) if around.behind(found)[:1] in ("事", "恐", "购", "大", "晚") else None

    yield r"(?<![\w.,/-])(?:911|618|315|818|1111|1212)(?![\w.,/-])", event

    def model(found: re.Match[str]) -> str | None:
        if not _MODEL.search(around.ahead(found)):
            return None
        figure = found[2]
        said = cardinal(int(figure)) if len(figure) < 3 and figure < "20" else digits(figure)
        return f"{said}，{cardinal(int(found[3]))}" if found[3] else said

    yield r"(?<![\w.,/])(-?)([1-9]\d{0,2})(?:-(\d00))?(?![\w.,/-]|米|元)", model
    yield r"(?<![\w.,])([1-9]\d{0,2}(?: \d{3})+)(?![\w.,]| ?\d)(?= ?[元人个個吨公])", lambda f: f[1].replace(" ", "")
    yield rf"[¥￥] ?({number}(?: ?[万亿])?)(?= ?元)", lambda f: f[1]
    yield from _years(spoken, around)
    yield from _ratios(spoken, around)
    yield rf"({number}) ?‰", lambda f: f"千分之{spoken.cardinal(spoken.value(f[1]))}"
    yield (
        r"(?<=[里米克升元斤吨次人])/(?=小时|分钟|秒|天|日|人|月|年|个|件|斤|公|平|立|吨|米|次|瓶|份|晚|升|单|间)",
        lambda f: "每",
    )
    yield r"(?<![\w.,])\d{3,4}(?=[pP](?![A-Za-z]))", lambda f: digits(f[0])
    # 图1-2 may be one figure or two.
    tables = ("图", "圖", "表", "例", "式", "题")
    yield (
        r"(?<![\w.,/-])\d{1,2}-\d{1,2}(?![\w.,/-])",
        lambda f: keep(f[0]) if around.ahead(f).endswith(tables) else None,
    )


def _years(spoken: Language, around: Around) -> Rules:
    season = "(?= ?(?:学年|學年|赛季|賽季|年度|财年|財年))"
    yield (
        rf"(?<![\w.,/-])((?:19|20)\d\d)(?:{DASH}|/)((?:19|20)?\d\d){season}",
        lambda f: f"{digits(f[1])}{spoken.to}{digits(f[2])}",
    )
    yield rf"(?<![\w.,/-])((?:19|20)\d\d){season}", lambda f: digits(f[1])

    def era(found: re.Match[str]) -> str | None:
        return digits(found[0]) if around.ahead(found).endswith(("公元", "公元前", "西元", "西元前")) else None

    yield r"(?<![\w.,/-])\d{1,4}(?=年)", era

    def lasting(found: re.Match[str]) -> str | None:
        """1500年前 are a count, 1949年前 is a year."""
        year, right = found[1], around.behind(found)[1:]
        recent = year[:2] in ("19", "20") and year not in ("1900", "2000")
        if not recent and (right[:1] in ("前", "历", "歷", "后", "後", "间", "間") or right[:2] == "的历"):
            return spoken.cardinal(year)
        counts = not recent and year.endswith("00") and _LASTS.search(around.ahead(found))
        return spoken.cardinal(year) if counts else None

    yield r"(?<![\w.,/-])([1-9]\d{3})(?=年)", lasting

    def short(found: re.Match[str]) -> str | None:
        """97年 may be a year or a time of 97 years."""
        left, right = around.ahead(found), around.behind(found)[1:]
        if _LASTS.search(left) or right[:1] in ("多", "来", "來", "历", "间", "前", "后"):
            return None
        if right[:1] in ("出", "生", "毕", "入", "参", "春", "夏", "秋", "冬", "底", "初", "款", "版") or left.endswith(
            ("在", "从", "自", "于", "是", "到")
        ):
            return digits(found[0])
        return keep(found[0])

    yield r"(?<![\w.,/-])[89][1-9](?=年(?!\d|代|级))", short


def _ratios(spoken: Language, around: Around) -> Rules:
    number = spoken.pattern

    def ratio(found: re.Match[str]) -> str | None:
        first, last = found[1], found[2]
        named = _RATIO.search(around.ahead(found))
        won = around.ahead(found).endswith(("以", "以总比分")) and around.behind(found).lstrip()[:1] in tuple(_WON)
        if not named and not won and ("." not in last or first[0] == "0"):
            return None
        return f"{spoken.cardinal(spoken.value(first))}比{spoken.cardinal(spoken.value(last))}"

    yield rf"(?<![\w.,:/-])({number})[:：]({number})(?![\w:]|-\d)", ratio

    def score(found: re.Match[str]) -> str | None:
        left, right = around.ahead(found), around.behind(found)[:1]
        lost = right in ("不", "被", "输") and "0" in (found[1], found[2])
        if lost or right in tuple(_WON) or re.search(r"(?:比分|总分|以|战成|踢成|打成)(?:是|为|[:：])?$", left):
            return f"{cardinal(int(found[1]))}比{cardinal(int(found[2]))}"
        return keep(found[0]) if int(found[1]) >= int(found[2]) and found[0][0] != "0" else None

    yield r"(?<![\w.,:/-])(\d{1,2})-(\d{1,2})(?![\w.,:/=-]| ?=)(?! ?[%°元])", score


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
