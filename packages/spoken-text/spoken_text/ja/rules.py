"""What only Japanese writes: counters, prices that begin a range, addresses."""

import re

from spoken_text.rule import DASH, Around, Rules, keep
from spoken_text.spoken import Spoken

FOLLOWERS = frozenset(
    "世紀年月日時分秒円万億兆千百個人本枚冊台匹歳才回階度間目つ名ヶか件話巻章位倍点級番号代週泊割丁対半〜～：－．／，"
)
"""A number waits for what comes behind one of these."""

_REPEATED = "日|人|月|時(?!間)"
"""Counters that change how the number is read: both ends of a range have them."""
_MONEY = "円人個本枚台件名万億"

_NAMED = re.compile(r"(?:番号|電話|内線|コード|暗証|口座|ID|エラー|ポート|HTTP) ?(?:は|が|:|：)? ?$")


def first(spoken: Spoken, around: Around) -> Rules:
    number = spoken.pattern
    yield rf"(?<![\d.,，])\d{{1,3}}(?:，\d{{3}}){{1,4}}(?!，?\d)(?= ?[{_MONEY}])", lambda f: f[0].replace("，", ",")

    def both(found: re.Match[str]) -> str:
        if found[3] == "月" and found.string[: found.start()].endswith("月"):  # 7月1～7月3日
            return f"{found[1]}日{spoken.to}{found[2]}"
        return f"{found[1]}{found[3]}{spoken.to}{found[2]}"

    yield rf"(?<![A-Za-z0-9_.,:/-])(\d{{1,2}}) ?{DASH} ?(\d{{1,2}})(?=({_REPEATED}))", both
    yield r"(?<![\d.,])([1-9]),(?=[1-9](?:人|個|日|回|年|月|本|枚|台|匹|名|歳|度|件))", lambda f: f"{f[1]}、"
    # 10:00～ and 3,000円～ have no other end.
    yield r"(?<=[\d円時分日月年人歳個%]) ?[～〜~]$", lambda f: spoken.to if around.after not in ("～", "〜") else None

    def address(found: re.Match[str]) -> str | None:
        last = around.ahead(found)[-1:]
        is_place = "\u4e00" <= last <= "\u9fff" and last not in "番号話第式型比数"
        return "の".join(map(spoken.cardinal, found[0].split("-"))) if is_place else None

    yield r"(?<![\w.,-])[1-9]\d{0,2}(?:-[1-9]\d{0,3}){2}(?![\w-])", address

    yield r"(?<![\w.,-])\d{3}-\d{4}(?![\w.,円人個-])", lambda f: "、".join(map(spoken.digits, f[0].split("-")))

    def average(found: re.Match[str]) -> str | None:
        named = zip(map(spoken.cardinal, found[1]), "割分厘", strict=True)
        return "".join(map("".join, named)) if around.ahead(found).endswith("率") and "0" not in found[1] else None

    yield r"(?<![\w.,])\.(\d{3})(?![\w.,])", average

    def score(found: re.Match[str]) -> str | None:
        after = around.behind(found)[:1]
        if after in ("か", "ま") and found[2] != "0":  # 5-15から5-20まで
            return keep(found[0])
        is_score = around.ahead(found).endswith(("スコア", "試合", "スコアは")) or (
            after in "でのと" and after and int(found[1]) >= int(found[2])
        )
        return f"{spoken.cardinal(found[1])}対{spoken.cardinal(found[2])}" if is_score else None

    yield r"(?<![\w.,:/-])(\d{1,2})-(\d{1,2})(?![\w.,:/-])", score

    def named(found: re.Match[str]) -> str | None:
        return spoken.digits(found[0]) if _NAMED.search(around.ahead(found)) else None

    yield r"(?<![\w.,/-])\d{3,20}(?![\w円]|[.,:/-]\d| \d)", named

    def speed(found: re.Match[str]) -> str:
        start = "" if around.ahead(found).endswith("時速") else "時速"
        return f"{start}{spoken.cardinal(spoken.value(found[1]))}キロメートル"

    yield rf"(?<![\w.,])({number}) ?km/h", speed
