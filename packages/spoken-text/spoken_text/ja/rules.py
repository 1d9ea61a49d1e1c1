"""What only Japanese writes: counters, prices that begin a range, addresses."""

import re

from spoken_text.east_asian import EastAsian
from spoken_text.rule import DASH, Found, Rules, keep

_REPEATED = "日|人|月|時(?!間)"
"""Counters that change how the number is read: both ends of a range have them."""
_MONEY = "円人個本枚台件名万億"


class Language(EastAsian):
    def own(self, rule: Rules) -> None:
        number = self.pattern
        strains, processors = r"(?<=\bO)-?(?:157|111|104)(?!\d)", r"(?<=\b[ix])[1-6]?86(?!\d)"  # O157, i386
        rule("O6", f"{strains}|{processors}", lambda f: self.digits(f[0].lstrip("-")))
        room = r"(?<![\w.,-])(\d{1,2})-(\d{3,4})(?=号)"  # 3-405号
        rule("-", room, lambda f: f"{self.cardinal(f[1])}の{self.cardinal(f[2])}")
        rule("s", r"(?<![\w.,])\d{3}s(?![A-Za-z])", keep)  # セスナ402s

        season = r"(?<![\w.,/-])((?:19|20)\d\d)[-–](1[3-9]|[2-9]\d)(?![\w.,/-])"
        rule("-–", season, lambda f: self.to_next_year(f, self.cardinal))

        written = rf"(?<![\d.,，])\d{{1,3}}(?:，\d{{3}}){{1,4}}(?!，?\d)(?= ?[{_MONEY}])"
        rule("，", written, lambda f: f[0].replace("，", ","))

        @rule("人日時月", rf"(?<![A-Za-z0-9_.,:/-])(\d{{1,2}}) ?{DASH} ?(\d{{1,2}})(?=({_REPEATED}))")
        def both(found: Found) -> str:
            if found[3] == "月" and found.head.endswith("月"):  # 7月1～7月3日
                return f"{found[1]}日{self.to}{found[2]}"
            return f"{found[1]}{found[3]}{self.to}{found[2]}"

        rule(",", r"(?<![\d.,])([1-9]),(?=[1-9](?:人|個|日|回|年|月|本|枚|台|匹|名|歳|度|件))", lambda f: f"{f[1]}、")
        # 10:00～ and 3,000円～ have no other end.
        written = r"(?<=[\d円時分日月年人歳個%紀代]) ?[～〜~](?=紀|$)"
        rule("~〜～", written, lambda f: self.to if f.around.after not in ("～", "〜") else None)

        rule("〜～", r"^[〜～](?=\d)", lambda f: self.to if "\u4e00" <= f.ahead[-1:] <= "\u9fff" else None)  # 中旬〜9月

        @rule("-", r"(?<![\w.,-])[1-9]\d{0,2}(?:-[1-9]\d{0,3}){2}(?![\w-])")
        def address(found: Found) -> str | None:
            last = found.ahead[-1:]
            is_place = "\u4e00" <= last <= "\u9fff" and last not in "番号話第式型比数"
            return "の".join(map(self.cardinal, found[0].split("-"))) if is_place else None

        rule("-", r"(?<![\w.,-])\d{3}-\d{4}(?![\w.,円人個-])", lambda f: "、".join(map(self.digits, f[0].split("-"))))

        @rule(".", r"(?<![\w.,])\.(\d{3})(?![\w.,])")
        def average(found: Found) -> str | None:
            """打率.450: 四割五分"""
            parts = (
                self.cardinal(digit) + unit for digit, unit in zip(found[1], "割分厘", strict=True) if digit != "0"
            )
            return "".join(parts) or None if found.ahead.endswith("率") else None

        @rule("・", r"(?<=\d)・(?=\d)")
        def point(found: Found) -> str | None:
            """11・9ポイント"""
            unit = found.behind.lstrip("0123456789")[:1]
            sure = re.search(r"率\d+$", found.ahead) or (unit and unit in "%％倍万億兆ポマミキ")
            return "." if sure else None

        bases = r"(?<![\d.,])([12])[.・,]([23])(?=塁|$)"
        rule(".・,", bases, lambda f: f"{f[1]}、{f[2]}" if f.behind[:1] == "塁" else None)
        rule("/", r"(?<=\d円)/(?=\d)", lambda f: self.pause)
        days = r"(?<=日)([(（])([日月火水木金土])((?:・祝)?)(?:[~～〜]([日月火水木金土]))?(?=[)）]|$)"

        @rule("(（", days)
        def weekday(found: Found) -> str:
            last = f"{self.to}{found[4]}曜日" if found[4] else ""
            return f"{found[1]}{found[2]}曜日{found[3] and '祝日'}{last}"

        @rule("-", r"(?<![\w.,:/-])(\d{1,2})-(\d{1,2})(?![\w.,:/-])")
        def score(found: Found) -> str | None:
            after = found.behind[:1]
            if after in ("か", "ま") and found[2] != "0":  # 5-15から5-20まで
                return keep(found)
            named = found.ahead.endswith(("スコア", "試合", "スコアは"))
            is_score = named or (after in tuple("でのと") and int(found[1]) >= int(found[2]))
            return self.ratio(found) if is_score else None

        named = re.compile(rf"(?:{self.any_of('named')}) ?(?:は|が|:|：)? ?$")
        written = r"(?<![\w.,/-])\d{3,20}(?![\w円]|[.,:/-]\d| \d)"
        rule("", written, lambda f: self.digits(f[0]) if named.search(f.ahead) else None)

        @rule("k", rf"(?<![\w.,])({number}) ?km/h")
        def speed(found: Found) -> str:
            start = "" if found.ahead.endswith("時速") else "時速"
            return f"{start}{self.cardinal(self.value(found[1]))}キロメートル"
