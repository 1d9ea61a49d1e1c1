"""How Mandarin says numbers, which num2words lacks."""

import re

from spoken_text.amounts import CODES
from spoken_text.east_asian import EastAsian
from spoken_text.rule import DASH, DASHES, Found, Kept, Rules, keep

_DIGITS = "零一二三四五六七八九"
_SCALES = {10**12: "兆", 10**8: "亿", 10**4: "万", 1000: "千", 100: "百", 10: "十"}


def _whole(number: int) -> str:
    """A number of at most 16 digits: 两 only before 千, 万, 亿 and 兆, 零 where digits are missing."""
    for power, scale in _SCALES.items():
        if number >= power:
            many, rest = divmod(number, power)
            said = ("两" if many == 2 and power >= 1000 else _whole(many)) + scale
            return said + ("零" if rest < power // 10 else "") + _whole(rest) if rest else said
    return _DIGITS[number]


class Language(EastAsian):
    def __init__(self, code: str):
        super().__init__(code)
        self.counter = rf"(?:(?!{self.any_of('no_counters')})(?:{self.any_of('counters')})|室(?=\d厅|\d廳))"
        known = *self.words("counters"), *self.words("no_counters"), self._data["following"], "室厅廳"
        self.following = frozenset("".join(known))
        self.no_years = "".join(self.words("counters")) + self._data["no_years"]
        self.won = tuple(self._data["won"])

    def whole(self, number: int) -> str:
        return re.sub("^一十", "十", _whole(number))

    def digits(self, digits: str) -> str:
        return "".join(_DIGITS[int(digit)] for digit in digits)

    def year(self, year: str) -> str:
        return self.digits(year)

    def counted(self, value: str, unit: str, mark: str = "") -> str | None:
        said = super().counted(value, unit, mark)
        return f"两{self.units[unit][0]}" if said and value == "2" and unit[0] not in "°%" else said

    def is_small(self, top: int, bottom: int) -> bool:
        return bottom < 7 or bottom in (8, 10)

    def behind(self, found: Found, characters: str) -> bool:
        """Does one of the characters stand behind the match?"""
        return found.behind[:1] in tuple(characters)

    def own(self, rule: Rules) -> None:
        number, whole, digits = self.pattern, self.whole, self.digits
        rule(":：", r"(?<=\d[:：][0-5]\d)分", lambda f: "")  # 15:15分
        locant = r"(?<![\w.,-])-(\d{1,2})(?=-)"  # 甘油醛-3-磷酸
        rule("-", locant, lambda f: Kept(f"-{whole(int(f[1]))}") if "一" < f.ahead[-1:] not in self.verbs else None)
        link = "是|为|為|[:：]"
        named = re.compile(rf"(?:{self.any_of('numbered')})(?:号|号码)?(?:{link})? ?$|号(?:{link}) ?$")
        written = r"(?<![\w.,/-])\d{3,20}(?:[ -]\d{3,8}){0,5}(?![\w]|[.,:/-]\d| \d)"
        rule("", written, lambda f: self.dialled(f) if named.search(f.ahead) else None)
        rule(" ", r"(?<![\w.,/-])(?!20\d\d 20)[2-9]\d{3} \d{4}(?![\w.,/-]| ?\d)", self.dialled)  # in Hong Kong
        area = re.compile(r"[（(]0\d{2,3}[)）] ?$")
        rule("", r"^\d{7,8}$", lambda f: digits(f[0]) if area.search(f.around.left) else None)

        @rule("1", r"(?<![\w.,/-])(?:11[0-2]|119|12[02])(?![\w.,/-])")
        def emergency(found: Found) -> str | None:
            return digits(found[0]) if self.behind(found, "报火急救警") else None

        @rule("", r"(?<![\w.,/-])[1-9](?!00)\d\d(?![\w.,/-])")
        def name(found: Found) -> str | None:
            """台北101, 211工程, 211系"""
            tower = found[0] == "101" and found.ahead.endswith("北")
            project = found[0] in ("211", "985") and self.behind(found, "工高院大")
            return digits(found[0]) if tower or project or self.behind(found, "系") else None

        rule(DASHES, r"(?<![\w.,/-])([1-9]\d{2,3})[-–~～－]([1-9]\d{2,3}|\d\d)(?![\w.,/-])", self._life)
        named_by_letters = r"(?<![\w.,/:-])[1-9]\d{2,4}(?![\w.,/:%-]| ?[A-Za-z%\d])"  # ISO 9001
        rule("", named_by_letters, self._after_letters)

        @rule("", r"(?<![\w.,/-])((?:19|20)\d\d)(?=[世奥奧亚亞冬春夏秋款版]|欧(?!元)|$)")
        def event(found: Found) -> str | None:
            """2010世博会"""
            return digits(found[1]) if self.behind(found, "世奥奧亚亞冬春夏秋款版欧") else None

        rule(
            "k",
            r"(?<![\w.,])(\d{1,3}(?:\.\d)?)k",
            lambda f: f"{self.said(f[1])}k" if self.behind(f, "采音赫") else None,
        )
        rule("(", r"\((0\d{2,3})\) ?(\d{7,8})(?![\w-])", self.dialled)
        rule("", r"(?<![\w.,/-])[45]\d\d(?![\w.,/-])", lambda f: digits(f[0]) if self.behind(f, "错状") else None)
        rule("HQhq", r"(?<![\w.,/-])(?:19|20)\d\d(?=[QqHh][1-4](?!\w))", lambda f: digits(f[0]))
        rule("秒", r"(?<=\d秒)\d\d(?![\d.])", lambda f: digits(f[0]))
        rule(".", r"(?<=\d)\.00?(?= ?(?:元|美元|欧元|英镑|港元|日元))", lambda f: Kept())
        hotlines = rf"(?<![\w.,/-])(?:{self.any_of('hotlines')}|95\d{{3}})(?![\w%元个人万亿]|[.,:/-]\d)"
        rule("", hotlines, lambda f: digits(f[0]))
        titled = r"(?<![\w.,/-])[1-9]\d{2,3}(?<!00)(?=[》』」]|$)"  # 《银河铁道999》
        noun = re.compile("[\u4e00-\u9fff]$")
        rule("", titled, lambda f: digits(f[0]) if self.behind(f, "》』」") and noun.search(f.ahead) else None)
        room = (
            r"(?<![\w.,/-])(\d{3,4})(?=路|[线線綫](?<!00.)|室(?!\d厅)|[号號]房|房[间間]|[国國]道|[号號次]航|[号號]班)"
        )
        rule("号国國室房號路线線綫航班", room, lambda f: digits(f[1]))
        rule("-", r"(?<![\w.,/-])(7[0-8]7)-([1-9]00)(?![\w.,/-])", lambda f: f"{digits(f[1])}，{whole(int(f[2]))}")

        holidays = {"5.1": "五一", "10.1": "十一"}
        written = r"(?<![\w.,/-])(?:5\.1|10\.1)(?![\w.,/-])"
        rule(".", written, lambda f: holidays[f[0]] if self.behind(f, "假国黄长小劳") else None)
        rule("-", r"(?<![\w.,/-])(\d{1,2})-(\d{3,4})(?=室|房|号)", lambda f: f"{whole(int(f[1]))}-{digits(f[2])}")
        day = r"(?<![\w.,/-])([1-9]|1[0-2])\.([1-9]\d?)(?![\d.])"  # 5.16事变
        rule(".", day, lambda f: digits(f[1] + f[2]) if self.behind(f, "事军軍政运運惨慘") else None)
        rule("", r"(?<![\w.,/-])\d{3,4}(?![\w.,/-])", lambda f: digits(f[0]) if self.behind(f, "型") else None)
        rule("后後", r"(?<![\w.,/-])(?:[5-9][05]|0[05]|10)(?=[后後](?!期))", lambda f: digits(f[0]))
        rule("·", r"(?<![\w.,/-])([1-9]\d?)·(\d{1,2})(?![\w.·])", lambda f: digits(f[1] + f[2]))

        written = r"(?<![\w.,/-])(?:911|618|315|818|1111|1212)(?![\w.,/-])"
        rule("", written, lambda f: digits(f[0]) if self.behind(f, "事恐购大晚") else None)
        models = re.compile(rf"(?:{self.any_of('models')}) ?-?$")
        prefixes = tuple("图圖苏蘇铀鈾钚鈈碳氢氫锶鍶铯銫碘钴鈷镭鐳氧氮")

        @rule("", r"(?<![\w.,/])(-?)([1-9]\d{0,2})(?:-(\d00|\d))?(?![\w.,/-]|米|元)")
        def model(found: Found) -> str | None:
            named = found[1] and found.ahead.endswith(prefixes)  # 图-154, but 图1
            if not named and not models.search(found.ahead):
                return None
            figure = found[2]
            said = whole(int(figure)) if len(figure) < 3 and figure < "20" else digits(figure)
            return f"{said}，{whole(int(found[3]))}" if found[3] else said

        written = r"(?<![\w.,])([1-9]\d{0,2}(?: \d{3})+)(?![\w.,]| ?\d)(?= ?[元人个個吨公])"
        rule("个人個元公吨", written, lambda f: f[1].replace(" ", ""))
        rule("元", rf"[¥￥] ?({number}(?: ?[万亿])?)(?= ?元)", lambda f: f[1])
        self._years(rule)
        self._ratios(rule)
        rule("‰", rf"({number}) ?‰", lambda f: f"千分之{self.said(f[1])}")
        per = "小时|分钟|[分秒天日人月年个件斤公平立吨米次瓶份晚升单间]"
        rule("/", rf"(?<=[里米克升元斤吨次人发發])/(?={per})", lambda f: "每")
        rule("s", r"(?<![\w.,])(1[6-9]\d0)s(?![A-Za-z])", lambda f: f"{digits(f[1])}年代")
        rule("年", r"(?<![\w.,/-])[1-9]\d0(?=(?:[至到]\d{3})?年代)", lambda f: digits(f[0]))
        resolution = r"(?<![\w.,/-])(\d{1,3})/(\d{1,4})(?=[号號])"
        rule("/", resolution, lambda f: f"{whole(int(f[1]))}{self._data['slash']}{whole(int(f[2]))}")
        rule("Pp", r"(?<![\w.,])\d{3,4}(?=[pP](?![A-Za-z]))", lambda f: digits(f[0]))
        # 图1-2 may be one figure or two.
        tables = ("图", "圖", "表", "例", "式", "题")
        rule("-", r"(?<![\w.,/-])\d{1,2}-\d{1,2}(?![\w.,/-])", lambda f: keep(f) if f.ahead.endswith(tables) else None)

    def _short_date(self, found: Found) -> str | None:
        """12/2/2"""
        month, day = int(found[2]), int(found[3])
        is_date = 1 <= month <= 12 and 1 <= day <= 31
        return f"{self.digits(found[1])}年{self.whole(month)}月{self.whole(day)}日" if is_date else None

    def _years(self, rule: Rules) -> None:
        rule("/", r"(?<![\w.,:/-])(\d\d)/(\d\d?)/(\d\d?)(?![\w/]|[.,]\d)", self._short_date)
        digits = self.digits

        @rule(DASHES, rf"(?<![\w.,/-])((?:1[5-9]|20)\d\d)(?= ?{DASH})")
        def since(found: Found) -> str | None:
            """（1987-）"""
            ends = re.match(f" ?{DASH}[)）]", found.behind)
            return digits(found[1]) if ends and re.search(r"[(（][^()（）\d]{0,9}$", found.ahead) else None

        dated = r"(?<![\w.,/-])[1-9]\d{2,3}(?=[)）]|$)"  # 元年（1201）
        rule("", dated, lambda f: digits(f[0]) if re.search("年[（(]$", f.ahead) and self.behind(f, ")）") else None)

        @rule("", r"(?<![\w.,/-])(?:1[5-9]|20)\d\d(?![\w.,/-]|[^)）》”」』级級届屆、或和及與与])")
        def year(found: Found) -> str | None:
            """（1934）, 2008级, 2007、2008年"""
            alone = found.ahead.endswith(tuple("(（《“「『")) and self.behind(found, ")）》”」』")
            listed = self.behind(found, "级級届屆、或和及與与") and found[0][2:] != "00"
            listed = listed and (found[0] > "1850" or found[0][3] != "0")
            return digits(found[0]) if alone or listed else None

        both = r"(?<![\w.,/-])((?:1[5-9]|20)\d\d)(?= ?[至到] ?(?:1[5-9]|20)\d\d ?年)"
        rule("至到", both, lambda f: digits(f[1]))  # 2008至2009年
        listed = r"(?<![\w.,/-])((?:1[5-9]|20)\d\d),(?=(?:1[5-9]|20)\d\d年)"
        rule(",", listed, lambda f: f"{digits(f[1])}、")

        @rule("/", r"(?<![\w.,/-])([1-9]\d{2,3})/([1-9]\d{2,3})(?![\w.,/-])")
        def next_to_it(found: Found) -> str | None:
            """1993/1994, 6415/6416次"""
            link = self.pause if self.behind(found, "次") else self.to
            follows = int(found[2]) == int(found[1]) + 1
            return f"{digits(found[1])}{link}{digits(found[2])}" if follows else None

        shortened = r"(?<![\w.,/-])((?:1[89]|20)\d\d)[-–/](1[3-9]|[2-9]\d)(?![\w.,/-])"
        rule("-–/", shortened, lambda f: self.to_next_year(f, digits))

        seasons = "学學赛賽财財年季马馬球雪"
        season = "(?= ?(?:学年|學年|年?赛季|年?賽季|年度|财年|財年|季(?![节節度])|$))"

        @rule("", rf"(?<![\w.,/-])((?:19|20)\d\d)(?:(?:{DASH}|/)((?:19|20)?\d\d))?{season}")
        def in_season(found: Found) -> str | None:
            """2023/24赛季, 1998-99季"""
            if not self.behind(found, seasons):
                return None
            return f"{digits(found[1])}{self.to}{digits(found[2])}" if found[2] else digits(found[1])

        rule("", rf"(?<![\w.,/:-])(?:1[5-9]|20)\d\d(?![\w./:%-]|,\d| ?(?:{DASH}|[A-Za-z\d%]))", self._bare)
        rule(DASHES, rf"(?<![\w.,/-])([1-9]\d\d) ?{DASH} ?([1-9]\d\d)(?=年)", self._early_years)

        era, lasts = re.compile("[公西]元前?(?:.{3,4}年[到至])?$"), re.compile(rf"(?:{self.any_of('lasts')})$")

        @rule(DASHES, rf"(?<![\w.,/-])([1-9]\d{{0,3}}) ?{DASH} ?(前?)([1-9]\d{{0,3}})(?=年)")
        def era_years(found: Found) -> str | None:
            """公元前598～前591年"""
            sure = era.search(found.ahead) and (len(found[1]) > 2 or len(found[3]) > 2)
            return f"{digits(found[1])}{self.to}{found[2]}{digits(found[3])}" if sure else None

        @rule("年", r"(?<![\w.,/-])\d{1,4}(?=年)")
        def era_year(found: Found) -> str | None:
            """公元前221年, but 公元前一千年"""
            is_round = found[0].endswith("00") and re.search("元前约?約?$", found.ahead)
            return self.cardinal(found[0]) if is_round else digits(found[0]) if era.search(found.ahead) else None

        @rule("年", r"(?<![\w.,/-])([1-9]\d\d)(?=年)")
        def early(found: Found) -> str | None:
            """211年 is a year, 200年 only where its text says so."""
            left, right = found.ahead, found.behind[1:]
            before_christ = re.search(r"(?:^|\W|[于於在从從自约約至到即])前$|[（(][约約]$", left)
            if lasts.search(left) and not before_christ or re.match("前(?![后後])|[历歷内內]", right):
                return None
            if found[0].endswith("0") and not before_christ:
                alone = left.endswith(("(", "（")) and right[:1] in tuple(")）")
                begins = re.search(r"(?:^|\W)$", left) and re.match(r"[，,正春夏秋冬初末]|[到至]\d{3}年", right)
                dated = re.search("[在于於自从從即]$", left) and not re.match("[间間里裡之以后後来來的]", right)
                first = re.search(r"(?:^|[。！？])$", left) and not re.match("[间間里裡之以后後来來的多没沒]", right)
                after_year = re.search(r"(?:\d[1-9]|(?:^|\W)\d{3})年[至到]$", left)
                if not (alone or begins or first or dated or after_year or re.match(r"\d+月", right)):
                    return None
            return None if found[0].endswith("00") and before_christ else digits(found[0])

        @rule("年赛賽", rf"(?<![\w.,/-])((?:1\d|20)\d\d) ?(?:{DASH}|/|([至到])) ?(\d\d)(?=年|赛季|賽季)")
        def short_range(found: Found) -> str | None:
            """1620-21年, 1967至68赛季"""
            rises = found[1][2:] < found[3]
            return f"{digits(found[1])}{found[2] or self.to}{digits(found[3])}" if rises else None

        @rule("年", r"(?<![\w.,/-])([1-9]\d{3})(?=年)")
        def lasting(found: Found) -> str | None:
            """1500年前 are a count, 1949年前 is a year."""
            year, right = found[1], found.behind[1:]
            about = found.ahead.endswith(("约", "約")) and "1500" <= year < "2000" and right[:1] in tuple("。，）),、")
            recent = year[:2] in ("19", "20") and year != "1900" and (year != "2000" or right[:1] in tuple("后後"))
            counts = year.endswith("00") and not about and (lasts.search(found.ahead) or re.match("[后後间間]", right))
            counts = counts or year.endswith("0") and re.match("前(?![后後])|[历歷]", right)
            ends_range = found.ahead.endswith(("年至", "年到"))
            return self.cardinal(year) if counts and not recent and not ends_range else None

        @rule("年", r"(?<![\w.,/-])[89][1-9](?=年(?!\d|代|级))")
        def short(found: Found) -> str | None:
            """97年 may be a year or a time of 97 years."""
            left, right = found.ahead, found.behind[1:]
            if lasts.search(left) or re.match("[多来來历间前后]", right):
                return None
            is_year = re.match("[出生毕入参春夏秋冬底初款版]", right) or re.search("[在从自于是到]$", left)
            return digits(found[0]) if is_year else keep(found)

    def _bare(self, found: Found) -> str | None:
        """在1893出版, 2010中国, Shine, 1991"""
        year, left = found[0], found.ahead
        titled = left.endswith("《")
        if year.endswith("00") and not titled or self.behind(found, self.no_years):
            return None
        cited = re.search(r"[A-Za-z]['’]?[.,，]{0,2} ?$", left) and not re.search(r"(?:RMB|USD|HKD|NT) ?$", left)
        begins = re.search(r"(?:^|[，。；“”《》「」（）！？、(])$", left) and year > "1900"
        begins = begins and re.match("[\u4e00-\u9fff]", found.behind)
        dated = re.search("[于於在从從自赛賽杯盃会會展节節奖獎]$", left)
        return self.digits(year) if titled or cited or begins or dated else None

    def _after_letters(self, found: Found) -> str | None:
        """ISO 9001"""
        letters = re.search(r"(?<![A-Za-z])(?!AQI|KM|KG|IQ)([A-Z]{2,4}) ?$", found.ahead)
        sure = letters and letters[1] not in CODES and not found[0].endswith("00")
        return self.digits(found[0]) if sure and not self.behind(found, self.no_years) else None

    def _early_years(self, found: Found) -> str | None:
        """482-493年"""
        rises = found[1] < found[2] and not (found[1].endswith("0") and found[2].endswith("0"))
        return f"{self.digits(found[1])}{self.to}{self.digits(found[2])}" if rises else None

    def _ratios(self, rule: Rules) -> None:
        number = self.pattern
        ratios = re.compile(rf"(?:{self.any_of('ratios')})(?:是|为|為|约为|[:：])? ?$")

        @rule(":：", rf"(?<![\w.,:/-])({number})[:：]({number})(?![\w:]|-\d)")
        def ratio(found: Found) -> str | None:
            left, right = found.ahead, found.behind.lstrip()[:1]
            sure = ratios.search(left) or (left.endswith(("以", "以总比分")) and right in self.won)
            sure = sure or ("." in found[2] and found[1][0] != "0")
            return f"{self.said(found[1])}比{self.said(found[2])}" if sure else None

        @rule("-–", r"(?<![\w.,:/-])(\d{1,3})[-–](\d{1,3})(?![\w.,:/=-]| ?=)(?! ?[%°元])")
        def score(found: Found) -> str | None:
            left, right = found.ahead.rstrip(), found.behind.lstrip()[:1]
            if right == "分" and int(found[1]) < int(found[2]):
                return f"{self.whole(int(found[1]))}{self.to}{self.whole(int(found[2]))}"
            lost = right in ("不", "被", "输") and "0" in (found[1], found[2])
            if lost or right in self.won or re.search(r"(?:比分|总分|以|战成|踢成|打成)(?:是|为|[:：])?$", left):
                return f"{self.whole(int(found[1]))}比{self.whole(int(found[2]))}"
            falls = (
                len(found[1] + found[2]) < 5
                and len(found[1]) < 3
                and int(found[1]) >= int(found[2])
                and found[0][0] != "0"
            )
            return keep(found) if falls else None

    def below_one(self, decimals: str) -> str:
        return f"{self.point}{self.digits(decimals)}"

    def _life(self, found: Found) -> str | None:
        """（1881-1936）"""
        in_brackets = re.search(r"[（(](?:[^（()）\d]{0,9}[，约約])?$", found.ahead)
        sure = in_brackets and self.behind(found, ")）") and int(found[1][-len(found[2]) :]) < int(found[2])
        return f"{self.digits(found[1])}{self.to}{self.digits(found[2])}" if sure else None

    def counters(self, rule: Rules) -> None:
        """Years, counters, codes and 11-digit telephone numbers."""
        digits = self.digits
        rule("", r"(?<![\d.,])1[3-9]\d([ -]?)\d{4}\1\d{4}(?!\d)", self.dialled)
        code = r"^\d{3,12}(?!\d|[.,:/-]\d)"
        rule("", code, lambda f: digits(f[0]) if f.around.before in tuple("打拨撥话話编編") else None)
        rule("", r"(?<=[A-Za-z])(-?)(\d{3,})(?![\d.,])", lambda f: f[1] + digits(f[2]))
        year = r"(10(?!00)\d\d|1[1-9]\d\d|2\d{3})"
        both = rf"(?<![\d.,]){year}(?:年)? ?{DASH} ?{year}(?= ?年)"
        rule("年", both, lambda f: f"{digits(f[1])}{'年' if '年' in f[0] else ''}{self.to}{digits(f[2])}")
        rule("/", r"(?<![\w.,/-])((?:19|20)\d\d)/((?:19|20)\d\d)(?![\d/])", lambda f: f"{digits(f[1])}/{digits(f[2])}")
        rule("年", rf"(?<![\d.,]){year}(?= ?年)", lambda f: digits(f[1]))
        eras = re.compile(rf"(?:{self.any_of('eras')}) ?$")
        short = r"(?<![\d.,])\d\d(?=年\d{1,2}月)"
        rule("年", short, lambda f: None if eras.search(f.ahead) else digits(f[0]))  # 民国17年6月

        number = self.pattern

        @rule("", rf"(?<![A-Za-z0-9_.,:/-])(?:({number}) ?{DASH} ?)?(?<![\d.,])({number})(?= ?{self.counter})")
        def counted(found: Found) -> str | None:
            ahead = found.head
            if "第" in ahead or (found.around.before in ("第", "、") and not ahead):
                return self.to.join(self.said(written) for written in (found[1], found[2]) if written)
            first, last = (
                "两" if written == "2" else written and self.said(written) for written in (found[1], found[2])
            )
            return f"{first}{self.to}{last}" if first else last
