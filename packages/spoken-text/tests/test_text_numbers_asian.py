"""Numbers, counters and amounts in Chinese, Japanese and Korean."""

import pytest
from test_text_rules import JA, KO, ZH, normalized

from spoken_text.ko.rules import native
from spoken_text.normalize import NormalizerStream
from spoken_text.spoken import spoken_in

ROWS = [
    ("number", ZH, "10", "十"),
    ("number", ZH, "110", "一百一十"),
    ("number", ZH, "1001", "一千零一"),
    ("number", ZH, "2000", "两千"),
    ("number", ZH, "20000", "两万"),
    ("number", ZH, "100200", "十万零二百"),
    ("number", ZH, "120000345", "一亿两千万零三百四十五"),
    ("number", ZH, "100001000", "一亿零一千"),
    ("number", ZH, "3.14", "三点一四"),
    ("number", ZH, "007", "零零七"),
    ("number", ZH, "-3.5", "负三点五"),
    ("percent", ZH, "2.5%", "百分之二点五"),
    ("percent", ZH, "10-20%", "百分之十到百分之二十"),
    ("percent", ZH, "10%～20%", "百分之十到百分之二十"),
    ("percent", JA, "10～20%", "十から二十パーセント"),
    ("percent", KO, "10-20 %", "십에서 이십 퍼센트"),
    ("date", ZH, "今天是2024年3月5日。", "今天是二零二四年三月五日。"),
    ("date", ZH, "2006~2007年", "二零零六到二零零七年"),
    ("date", ZH, "1998～2003年", "一九九八到二零零三年"),
    ("date", ZH, "3000年前", "三千年前"),
    ("date", ZH, "98年5月", "九八年五月"),
    ("date", ZH, "2月2日", "二月二日"),
    ("time", ZH, "15:30", "十五点三十分"),
    ("time", ZH, "2:05", "两点零五分"),
    ("time", ZH, "15：30", "十五点三十分"),
    ("time", ZH, "9:00~17:00", "九点到十七点"),
    ("time", JA, "2024年3月5日15時30分", "二千二十四年三月五日十五時三十分"),
    ("time", KO, "3:45", "세 시 사십오분"),
    ("time", KO, "15:30", "십오시 삼십분"),
    ("time", KO, "9:00~17:00", "아홉 시에서 십칠시"),
    ("money", ZH, "¥100", "一百元"),
    ("money", ZH, "100元", "一百元"),
    ("money", ZH, "100 元", "一百元"),
    ("money", ZH, "$5", "五美元"),
    ("money", ZH, "HK$100", "一百港元"),
    ("money", ZH, "$1.2B", "十二亿美元"),
    ("money", ZH, "3.5亿元", "三点五亿元"),
    ("money", ZH, "¥1.2亿", "一点二亿元"),
    ("money", ZH, "5000万美元", "五千万美元"),
    ("money", JA, "3億円", "三億円"),
    ("money", JA, "1.5億円", "一点五億円"),
    ("money", JA, "¥500", "五百円"),
    ("money", JA, "$5M", "五百万ドル"),
    ("money", JA, "1万2千円", "一万二千円"),
    ("money", KO, "1.2억 원", "일 점 이억 원"),
    ("money", KO, "5,000원", "오천원"),
    ("money", KO, "3만 5천원", "삼만 오천원"),
    ("scale", ZH, "5万", "五万"),
    ("scale", ZH, "2万人", "两万人"),
    ("scale", ZH, "3万5千", "三万五千"),
    ("scale", JA, "5万人", "五万人"),
    ("scale", KO, "5만 명", "오만 명"),
    ("counter", ZH, "3个", "三个"),
    ("counter", ZH, "2个", "两个"),
    ("counter", ZH, "1次", "一次"),
    ("counter", ZH, "2次", "两次"),
    ("counter", ZH, "第2次", "第二次"),
    ("counter", ZH, "2年级", "二年级"),
    ("counter", ZH, "2年", "两年"),
    ("counter", ZH, "12个月", "十二个月"),
    ("counter", ZH, "22个", "二十二个"),
    ("counter", ZH, "2本书", "两本书"),
    ("counter", ZH, "2米", "两米"),
    ("counter", JA, "3人", "三人"),
    ("counter", KO, "3개", "세 개"),
    ("counter", KO, "5 개", "다섯 개"),
    ("counter", KO, "20살", "스무 살"),
    ("counter", KO, "21살", "스물한 살"),
    ("counter", KO, "99마리", "아흔아홉 마리"),
    ("counter", KO, "100마리", "백 마리"),
    ("counter", KO, "3시 30분", "세 시 삼십분"),
    ("counter", KO, "15시", "십오시"),
    ("counter", KO, "2번", "두 번"),
    ("counter", KO, "3번째", "세 번째"),
    ("counter", KO, "4잔", "네 잔"),
    ("counter", KO, "5병", "다섯 병"),
    ("counter", KO, "6권", "여섯 권"),
    ("counter", KO, "7대", "일곱 대"),
    ("counter", KO, "8장", "여덟 장"),
    ("counter", KO, "3시간", "세 시간"),
    ("counter", KO, "10개월", "십개월"),
    ("counter", KO, "3층", "삼층"),
    ("counter", KO, "3개를", "세 개를"),
    ("counter", KO, "7살짜리", "일곱 살짜리"),
    ("counter", KO, "2,000명", "이천 명"),
    ("counter", KO, "10여 명", "십여 명"),
    ("counter left alone", KO, "20대", "20대"),
    ("counter left alone", KO, "12개입", "12개입"),
    ("range", ZH, "5-10个", "五到十个"),
    ("range", ZH, "2-3个", "两到三个"),
    ("range", ZH, "5~10公里", "五到十公里"),
    ("range", JA, "5~10個", "五から十個"),
    ("range", JA, "3〜5個", "三から五個"),
    ("range", KO, "5-10명", "다섯 명에서 열 명"),
    ("range", KO, "3~5개", "세 개에서 다섯 개"),
    ("range", KO, "2~3시간", "두 시간에서 세 시간"),
    ("range", KO, "2006~2007년", "이천육에서 이천칠년"),
    ("phone", ZH, "手机13812345678", "手机一三八一二三四五六七八"),
    ("phone", ZH, "010-12345678", "零一零，一二三四五六七八"),
    ("phone", ZH, "400-123-4567", "四零零，一二三，四五六七"),
    ("phone", ZH, "打110", "打一一零"),
    ("phone", JA, "090-1234-5678", "零九零、一二三四、五六七八"),
    ("phone", KO, "010-1234-5678", "공 일 공, 일 이 삼 사, 오 육 칠 팔"),
    ("phone", KO, "1588-1234", "일 오 팔 팔, 일 이 삼 사"),
    ("fraction", ZH, "1/2", "二分之一"),
    ("fraction", ZH, "2/3的人", "三分之二的人"),
    ("fraction", ZH, "1 1/2", "一又二分之一"),
    ("fraction", JA, "1/2", "二分の一"),
    ("fraction", KO, "1/2", "이분의 일"),
    ("ratio", ZH, "2:1", "二比一"),
    ("ratio", JA, "2:1", "二対一"),
    ("ratio", KO, "2:1", "이 대 일"),
    ("ratio", KO, "3대2", "삼 대 이"),
    ("unit", ZH, "5km", "五公里"),
    ("unit", ZH, "20℃", "二十摄氏度"),
    ("unit", ZH, "-5°C", "负五摄氏度"),
    ("unit", JA, "20℃", "二十度"),
    ("unit", KO, "100km/h", "시속 백 킬로미터"),
    ("unit", KO, "-5도", "마이너스 오도"),
    ("letters", ZH, "A380", "A 三八零"),
    ("letters", ZH, "192.168.1.1", "一百九十二点一百六十八点一点一"),
    ("letters", KO, "제3장", "제 삼장"),
    ("duration", KO, "1h 30m", "한 시간 삼십분"),
    ("duration", ZH, "2:05:10", "两小时五分钟十秒"),
    ("counter", ZH, "1到2个", "一到两个"),
    ("counter", ZH, "第1、2名", "第一、二名"),
    ("phone", JA, "〒100-0001", "〒一零零、零零零一"),
    ("counter", KO, "2건", "두 건"),
    ("counter", KO, "10여년", "십여년"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "language", "text", "said"), ROWS)
def test_a_number_is_read_or_left_as_a_whole(kind, language, text, said):
    assert normalized(language, text) == said


def test_chinese_numbers_are_said_unambiguously():
    values = [
        *range(12_000),
        *(n * 10**power + rest for n in (1, 2, 20, 102) for power in (4, 8) for rest in (0, 1, 2002)),
    ]
    values = sorted(set(values))
    cardinal = spoken_in("chinese").whole
    assert len({cardinal(value) for value in values}) == len(values)
    assert all(value_of(cardinal(value)) == value for value in values)


def value_of(said: str) -> int:
    """The number that Chinese words say."""
    total = section = digit = 0
    for sign in said:
        if sign in "零一二三四五六七八九":
            digit = "零一二三四五六七八九".index(sign)
        elif sign == "两":
            digit = 2
        elif sign in "十百千":
            section += (digit or 1) * 10 ** ("十百千".index(sign) + 1)
            digit = 0
        else:
            total += (section + digit) * {"万": 10**4, "亿": 10**8}[sign]
            section = digit = 0
    return total + section + digit


def test_every_native_korean_number_has_its_own_words():
    assert len({native(number) for number in range(1, 100)}) == 99


@pytest.mark.parametrize("text", ["3个人在等", "3億円です", "2024年3月5日から"])
def test_a_number_waits_for_its_counter_and_no_longer(text):
    stream, given = NormalizerStream("chinese" if "个" in text else "japanese"), ""
    for character in text:
        given += stream.push(character)
    assert given == normalized("chinese" if "个" in text else "japanese", text)
