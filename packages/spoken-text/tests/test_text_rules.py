"""The normalizer's rules, one row each: rule, language, what comes in, what goes out."""

from decimal import Decimal

import pytest
from num2words import num2words

from spoken_text.normalize import NormalizerStream
from spoken_text.spoken import spoken_in
from spoken_text.stage import LONGEST_HELD
from spoken_text.words import LONGEST_WORD


def normalized(language: str | None, text: str) -> str:
    """What the normalizer makes of a whole text."""
    stream = NormalizerStream(language)
    return stream.push(text) + stream.finish()


EN, DE, FR, ES, IT, PT = "english", "german", "french", "spanish", "italian", "portuguese"
RU, ZH, JA, KO, NL = "russian", "chinese", "japanese", "korean", "dutch"

MARKUP = [
    ("heading", EN, "# Title\nText.", "Title. Text."),
    ("heading closed", EN, "## Title ##\nText.", "Title. Text."),
    ("heading with a mark", EN, "### Why?\nText.", "Why? Text."),
    ("no heading", EN, "#hashtag", "hashtag hashtag"),
    ("C sharp", EN, "Write C# code.", "Write C# code."),
    ("setext heading", EN, "Title\n=====\nText.", "Title\n\nText."),
    ("emphasis", EN, "a **bold** and *thin* and __strong__ _word_", "a bold and thin and strong word"),
    ("emphasis within a word", EN, "un*believ*able", "unbelievable"),
    ("emphasis over words", EN, "***all of this***", "all of this"),
    ("strike", EN, "~~gone~~ here", "gone here"),
    ("star between blanks", EN, "a * b", "a * b"),
    ("escaped star", EN, r"a \*b\*", "a *b*"),
    ("link", EN, "See [the docs](https://example.com/a?b=c) now.", "See the docs now."),
    ("link with a title", EN, 'See [it](http://a.com "A title").', "See it."),
    ("link with brackets in it", EN, "[Go](https://a.org/wiki/Go_(game)) is old.", "Go is old."),
    ("link by reference", EN, "See [the docs][1].", "See the docs."),
    ("no link", EN, "[a] (b)", "a (b)"),
    ("image", EN, "![A cat](cat.png) sleeps.", "A cat sleeps."),
    ("footnote", EN, "So it is.[^1]", "So it is."),
    ("list", EN, "- milk\n- bread!\n* eggs\n+ tea", "milk. bread! eggs. tea."),
    ("list in a list", EN, "- milk\n  - fresh\n", "milk. fresh."),
    ("task list", EN, "- [ ] milk\n- [x] bread", "milk. bread."),
    ("numbered list", EN, "1. Milk\n2) Bread", "one, Milk. two, Bread."),
    ("numbered list", DE, "1. Milch\n2. Brot", "eins, Milch. zwei, Brot."),
    ("block quote", EN, "> He said so.\n> Twice.", "He said so. Twice."),
    ("rule", EN, "One.\n\n---\n\nTwo.", "One.\n\nTwo."),
    ("rule of stars", EN, "One.\n* * *\nTwo.", "One.\n\nTwo."),
    ("inline code", EN, "Call `foo_bar` here.", "Call foo bar here."),
    ("code fence", EN, "Look:\n```python\nx = [1]\n```\nDone.", "Look:\n\nDone."),
    ("code fence of tildes", EN, "Look:\n~~~\n```\n~~~\nDone.", "Look:\n\nDone."),
    ("open code fence", EN, "Look:\n```\nx = 1", "Look:"),
    ("fence on one line", EN, "```code``` here", "code here"),
    ("table", EN, "| name | age |\n|---|:-:|\n| Ada | 36 |\n", "name, age.\n\nAda, thirty-six."),
    (
        "table without outer bars",
        EN,
        "name | age\n--- | :-:\nAda | 36\nMax | 7\n\na | b",
        "name | age\n\nAda, thirty-six. Max, seven.\n\na | b",
    ),
    ("where a link points", EN, 'See [the docs][1].\n\n[1]: https://example.com "Docs"\nEnd.', "See the docs.\n\nEnd."),
    ("a footnote's text", EN, "So.[^1]\n\n[^1]: It is *small*.", "So.\n\nIt is small."),
    ("a note in brackets", EN, "[Note]: this is prose.", "Note: this is prose."),
    ("bar in prose", EN, "a | b", "a | b"),
    ("underscores", EN, "snake_case_name", "snake case name"),
    ("think", EN, "<think>Hm, **no**.\n</think>Yes.", "Yes."),
    ("think left open", EN, "Yes. <think>Hm", "Yes. "),
    ("thinking, any case", EN, "<Thinking>Hm</THINKING>Yes.", "Yes."),
    ("script", EN, "<script>if (a < b) {}</script>Yes.", "Yes."),
    ("tag", EN, 'A <b class="x > y">bold</b> <i>word</i>.', "A bold word."),
    ("tag of SSML", EN, '<prosody rate="slow">slow</prosody>', "slow"),
    ("line break", EN, "One<br/>two<br>three", "One two three"),
    ("list of tags", EN, "<ul><li>milk</li><li>bread</li></ul>", "milk.\n\nbread."),
    ("heading tag", EN, "<h1>Title</h1>Text.", "Title. Text."),
    ("comment", EN, "One<!-- a > b --> two.", "One two."),
    ("address in brackets", EN, "<https://example.com/a>", "example dot com"),
    ("less than", EN, "if a < b and c > d", "if a < b and c > d"),
    ("less than without blanks", EN, "if a <b and c", "if a <b and c"),
    ("entity", EN, "Tom &amp; Jerry&nbsp;&lt;3 &unknown; AT&T", "Tom and Jerry <three &unknown; AT and T"),
    ("emoji", EN, "Hi 😀 there 👍🏽 👨‍👩‍👧 🇩🇪 ❤️.", "Hi there ."),
    ("keycap", EN, "Press 1️⃣ now", "Press one now"),
    ("controls", EN, "a\x00b\x07c\u200bd\ufeffe\u00adf\u202eg", "abcdefg"),
    ("white space", EN, "a  b\tc\u00a0d\u3000e \n f\r\ng\rh", "a b c d e f g h"),
    ("paragraph", EN, "One.\n\n\n\nTwo.", "One.\n\nTwo."),
    ("private use", EN, "a\U00100010b", "ab"),
    ("nothing", EN, "*** 😀 --- !!! <br> ...", ""),
    ("nothing", EN, " \n\t", ""),
    ("nothing", None, "```\ncode\n```", ""),
    ("word of many letters", EN, "a" * (2 * LONGEST_WORD + 1), f"{'a' * LONGEST_WORD} {'a' * LONGEST_WORD} a"),
    ("no language", None, "It costs **$5** at https://a.com/x", "It costs $5 at a.com"),
    ("another language", "klingon", "**5**", "5"),
    ("auto", "auto", "**5**", "5"),
]

ADDRESSES = [
    ("address", EN, "See https://www.example.com/path?x=1#y.", "See example dot com."),
    ("address", EN, "(www.example.com)", "(example dot com)"),
    ("address with a user and a port", EN, "http://me:pw@example.org:8080/", "example dot org"),
    ("bare host", EN, "Go to example.co.uk/a!", "Go to example dot co dot uk!"),
    ("no host", EN, "Wait...what? e.g. this.", "Wait...what? e.g. this."),
    ("long address", EN, f"https://example.com/{'x' * 3000}. Yes.", "example dot com. Yes."),
    ("mail", EN, "Write to john_doe@mail.example.com.", "Write to john doe at mail dot example dot com."),
    ("mail", EN, "mailto:ann@example.com", "ann at example dot com"),
    ("address", DE, "Siehe https://example.de/a.", "Siehe example Punkt de."),
    ("mail", FR, "ann@example.fr", "ann arobase example point fr"),
    ("mail", ES, "ann@example.es", "ann arroba example punto es"),
    ("address", IT, "www.example.it", "example punto it"),
    ("address", PT, "www.example.pt", "example ponto pt"),
    ("address", RU, "www.example.ru", "example точка ru"),
    ("address", ZH, "请看https://example.com/a。谢谢", "请看example点com。谢谢"),
    ("address", JA, "https://example.jp/aを", "exampleドットjpを"),
    ("address", KO, "www.example.kr", "example 점 kr"),
]

NUMBERS = [
    ("decimal", EN, "3.14 and 0.5", "three point one four and zero point five"),
    ("decimal", DE, "3,14 und 0,5", "drei Komma eins vier und null Komma fünf"),
    ("decimal", FR, "3,14", "trois virgule un quatre"),
    ("decimal", ES, "3,14 y 3.14", "tres coma uno cuatro y tres punto uno cuatro"),
    ("decimal", IT, "12,05", "dodici virgola zero cinque"),
    ("decimal", PT, "12,05", "doze vírgula zero cinco"),
    ("decimal", RU, "12,05", "двенадцать целых пять сотых"),
    ("decimal", JA, "3.14", "三点一四"),
    ("decimal", KO, "3.14", "삼 점 일 사"),
    ("thousands", EN, "1,234,567", "one million, two hundred and thirty-four thousand, five hundred and sixty-seven"),
    ("thousands", DE, "10.000", "zehntausend"),
    ("thousands", FR, "10\u202f000", "dix mille"),
    ("thousands", ES, "1.234.567", "un millón doscientos treinta y cuatro mil quinientos sesenta y siete"),
    ("thousands", ZH, "1,234,567", "一百二十三万四千五百六十七"),
    ("comma between numbers", EN, "1, 2, 3", "one, two, three"),
    ("negative", EN, "It is -5 or −6.", "It is minus five or minus six."),
    ("negative", DE, "-5", "minus fünf"),
    ("negative", PT, "-7", "menos sete"),
    ("negative", ZH, "-5°C", "负五摄氏度"),
    ("hyphen", EN, "COVID-19 and GPT-4", "COVID-nineteen and GPT-four"),
    ("letters and digits", EN, "an mp3 of B2B", "an mp three of B two B"),
    ("range", EN, "5–10 items", "five to ten items"),
    ("range", DE, "5–10", "fünf bis zehn"),
    ("version", EN, "v1.2.3", "v one dot two dot three"),
    ("zero in front", EN, "agent 007", "agent zero zero seven"),
    ("many digits", EN, "1" * 16, " ".join(["one"] * 16)),
    ("number sign", EN, "#5", "number five"),
    ("number sign", DE, "#5", "Nummer fünf"),
    ("end of a sentence", EN, "I have 5. You have 6!", "I have five. You have six!"),
    ("full-width digits", JA, "２４", "二十四"),
    ("counter", JA, "3人", "三人"),
    ("counter", KO, "3개 5층", "세 개 오층"),
    ("counter", ZH, "一共42个", "一共四十二个"),
    ("ordinal", EN, "the 21st of 102nd", "the twenty-first of one hundred and second"),
    ("ordinal after an article", DE, "der 3. Platz", "der dritte Platz"),
    ("ordinal after a preposition", DE, "im 19. Jahrhundert", "im neunzehnten Jahrhundert"),
    ("end of a sentence", DE, "Er ist 42. Dann ging er.", "Er ist zweiundvierzig. Dann ging er."),
    ("ordinal", FR, "le 2e, la 1re, le 1er", "le deuxième, la première, le premier"),
    ("ordinal", ES, "1.º 2ª 3er", "primero segunda tercer"),
    ("ordinal", IT, "1º 2ª", "primo seconda"),
    ("ordinal", PT, "1º 2ª", "primeiro segunda"),
    ("ordinal", RU, "1-й 2-я", "первый вторая"),
    ("ordinal", KO, "3번째", "세 번째"),
    ("year", EN, "in 1999 with 1900 people", "in nineteen ninety-nine with one thousand, nine hundred people"),
    ("year", EN, "Q4 2023, 1939-1945", "Q four twenty twenty-three, nineteen thirty-nine to nineteen forty-five"),
    ("decade", DE, "die 90er, 2-mal, 100fach", "die neunziger, zweimal, einhundertfach"),
    ("ordinal", KO, "100번째 0번째", "백 번째 0번째"),
    ("no ordinal", DE, "Blatt A4. Er", "Blatt A vier. Er"),
    ("date", DE, "der 3.4.2024", "der dritte April zweitausendvierundzwanzig"),
    ("times in a row", EN, "10:00-11:30", "ten o'clock to eleven thirty"),
    ("decade", EN, "the 1990s and 80s", "the nineteen nineties and eighties"),
    ("year", DE, "im Jahr 1999", "im Jahr neunzehnhundertneunundneunzig"),
    ("year", RU, "в 2024 году", "в две тысячи двадцать четвёртом году"),
    ("date", EN, "3 March 2024", "the third of March, twenty twenty-four"),
    ("date", EN, "on the 3rd March", "on the third of March"),
    ("date", EN, "May 2024", "May twenty twenty-four"),
    ("no date", EN, "They march 5 miles, we may 6.", "They march five miles, we may six."),
    ("date", EN, "Sept. 5th", "September fifth"),
    ("no date", EN, "2024-13-45", "two thousand and twenty-four-thirteen-forty-five"),
    ("date", DE, "am 3. März", "am dritten März"),
    ("date", DE, "der 3. März", "der dritte März"),
    ("date", DE, "3. März 2024", "dritter März zweitausendvierundzwanzig."),
    ("date", DE, "am 3.4. um 8:00", "am dritten April um acht Uhr"),
    ("date", FR, "le 1er mars 2024", "le premier mars deux mille vingt-quatre"),
    ("date", FR, "14/07/1789", "quatorze juillet mille sept cent quatre-vingt-neuf"),
    ("date", ES, "3 de marzo de 2024", "tres de marzo de dos mil veinticuatro"),
    ("date", ES, "03/04/2024", "tres de abril de dos mil veinticuatro"),
    ("date", IT, "1 marzo 2024", "primo marzo duemilaventiquattro"),
    ("date", PT, "3/4/2024", "três de abril de dois mil e vinte e quatro"),
    ("date", RU, "3 марта 2024 года", "третьего марта две тысячи двадцать четвёртого года"),
    ("date", ZH, "2024-03-05", "二零二四年三月五日"),
    ("date", ZH, "2024/3/5", "二零二四年三月五日"),
    ("date", JA, "2024年3月5日", "二千二十四年三月五日"),
    ("date", KO, "2024년 6월 5일", "이천이십사년 유월 오일"),
    ("time", EN, "3:30 pm, 3:30 p.m. and 15:05", "three thirty PM, three thirty PM and fifteen oh five"),
    ("time", EN, "3:00, 3:00 AM, 3 pm", "three o'clock, three AM, three PM"),
    ("time", EN, "25:99", "twenty-five to ninety-nine"),
    ("time", DE, "um 15:30 Uhr, um 1:05, um 1 Uhr", "um fünfzehn Uhr dreißig, um ein Uhr fünf, um ein Uhr"),
    ("time", FR, "à 15h30, 21:00, 1 h", "à quinze heures trente, vingt et une heures, une heure"),
    ("time", ES, "a las 15:30, a las 21:00", "a las quince treinta, a las veintiuna horas"),
    ("time", IT, "alle 15:30", "alle quindici e trenta"),
    ("time", PT, "às 15:30", "às quinze e trinta"),
    ("time", RU, "15:05", "пятнадцать ноль пять"),
    ("time", ZH, "下午3:30，15:00", "下午三点三十分，十五点"),
    ("time", JA, "15:30", "十五時三十分"),
    ("time", KO, "15:30", "십오시 삼십분"),
    ("money", EN, "$5, €3 and 20 USD", "five dollars, three euros and twenty dollars"),
    ("money", EN, "$0.99 or -$5", "ninety-nine cents or minus five dollars"),
    ("money", EN, "$5 million, ¥500", "five million dollars, five hundred yen"),
    ("money", DE, "1 €, 3 Millionen Euro, 2 Millionen €", "ein Euro, drei Millionen Euro, zwei Millionen Euro"),
    ("money", DE, "0,99 €", "neunundneunzig Cent"),
    ("money", FR, "5 millions €, 1 £", "cinq millions d'euros, une livre"),
    ("money", ES, "2 millones €", "dos millones de euros"),
    ("money", RU, "5 $, 21 ₽", "пять долларов, двадцать один рубль"),
    ("money", ZH, "$5、100€、￥", "五美元、一百欧元、￥"),
    ("money", JA, "$5、500¥", "五ドル、五百円"),
    ("money", KO, "$5 500₩", "오달러 오백원"),
    ("money", KO, "3€", "삼유로"),
    ("money that a language lacks", DE, "5 ₩", "fünf Won"),
    ("percent", ZH, "50%的人", "百分之五十的人"),
    ("percent", RU, "21 %, 22 %", "двадцать один процент, двадцать два процента"),
    ("percent", RU, "25 %, 2,5 %", "двадцать пять процентов, две целых пять десятых процента"),
    ("percent", JA, "50%", "五十パーセント"),
    ("unit", EN, "1 km, 2 km, 70 mph", "one kilometer, two kilometers, seventy miles per hour"),
    ("unit", EN, "-5 °C", "minus five degrees Celsius"),
    ("unit with its noun", DE, "1 Stunde, 1 Meter", "eine Stunde, ein Meter"),
    ("unit with its noun", ES, "21 horas, 21 metros", "veintiuna horas, veintiún metros"),
    ("unit", ZH, "5km和3kg", "五公里和三公斤"),
    ("unit", KO, "5km", "오 킬로미터"),
    ("no unit", EN, "5 months", "five months"),
    ("phone", EN, "+1 (555) 123-4567", "plus one, five five five, one two three, four five six seven"),
    ("phone", EN, "555-123-4567", "five five five, one two three, four five six seven"),
    ("phone", DE, "030 1234567", "null drei null, eins zwei drei vier fünf sechs sieben"),
    ("phone", FR, "06 12 34", "zéro six, un deux, trois quatre"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "language", "text", "said"), MARKUP + ADDRESSES + NUMBERS)
def test_a_rule(rule, language, text, said):
    assert normalized(language, text) == said


# ---------------------------------------------------------------- generated rows

CODES = {EN: "en", DE: "de", FR: "fr", ES: "es"}
COUNTS = [0, 2, 7, 12, 16, 20, 22, 35, 48, 71, 80, 99, 100, 103, 200, 342, 777, 1000, 2500, 71_000, 1_000_000]
ORDINALS = [1, 2, 3, 5, 8, 10, 12, 20, 22, 30, 100]
DAYS = [(2, 1, 1987), (3, 2, 1999), (14, 7, 2004), (21, 12, 2024), (30, 9, 1815), (31, 10, 2013)]
TIMES = [(2, 15), (7, 30), (11, 45), (13, 20), (18, 50), (23, 59)]
AMOUNTS = ["2", "7", "12", "100", "1.01", "12.50", "99.99", "250.05"]
SIGNS = {"$": "USD", "€": "EUR"}
UNITS = {
    EN: {"km": "kilometers", "kg": "kilograms", "%": "percent", "GB": "gigabytes"},
    DE: {"km": "Kilometer", "kg": "Kilogramm", "%": "Prozent", "GB": "Gigabyte"},
    FR: {"km": "kilomètres", "kg": "kilogrammes", "%": "pour cent", "Go": "gigaoctets"},
    ES: {"km": "kilómetros", "kg": "kilogramos", "%": "por ciento", "GB": "gigabytes"},
}
MONTHS = {
    EN: "January February March April May June July August September October November December".split(),
    DE: "Januar Februar März April Mai Juni Juli August September Oktober November Dezember".split(),
    FR: "janvier février mars avril mai juin juillet août septembre octobre novembre décembre".split(),
    ES: "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre".split(),
}
ORDINAL_ENDS = {EN: {1: "st", 2: "nd", 3: "rd", 22: "nd"}, FR: {1: "er"}}


def date_row(language: str, day: int, month: int, year: int) -> tuple[str, str]:
    code, name = CODES[language], MONTHS[language][month - 1]
    spoken_year = num2words(year, lang=code, to="year")
    if language == EN:
        return f"{name} {day}, {year}", f"{name} {num2words(day, to='ordinal')}, {spoken_year}"
    if language == DE:
        return f"am {day}. {name} {year}", f"am {num2words(day, lang=code, to='ordinal')}n {name} {spoken_year}"
    of = "de " if language == ES else ""
    return f"{day} {of}{name} {of}{year}", f"{num2words(day, lang=code)} {of}{name} {of}{spoken_year}"


def numeric_date_row(language: str, day: int, month: int, year: int) -> tuple[str, str]:
    written = {EN: f"{month}/{day}/{year}", DE: f"am {day:02}.{month:02}.{year}"}.get(language, f"{day}/{month}/{year}")
    return written, date_row(language, day, month, year)[1]


def time_row(language: str, hour: int, minute: int) -> tuple[str, str]:
    hours, minutes = (num2words(number, lang=CODES[language]) for number in (hour, minute))
    if language == ES:
        hours = hours.replace("veintiuno", "veintiuna")
    between = {DE: " Uhr ", FR: " heures "}.get(language, " ")
    return f"{hour}:{minute:02}", f"{hours}{between}{minutes}"


def ordinal_row(language: str, number: int) -> tuple[str, str]:
    said = num2words(number, lang=CODES[language], to="ordinal")
    said = "duodécimo" if said == "décimosegundo" else said  # a fault of its Spanish
    if language == DE:
        return f"der {number}. Versuch", f"der {said} Versuch"
    end = ORDINAL_ENDS.get(language, {}).get(number, {EN: "th", FR: "e", ES: ".º"}[language])
    return f"{number}{end}", said


def money_row(language: str, amount: str, sign: str) -> tuple[str, str]:
    code, currency = CODES[language], SIGNS[sign]
    said = num2words(Decimal(amount), lang=code, to="currency", currency=currency, separator="|")
    said = said.partition("|")[0] if "." not in amount else num2words(
        Decimal(amount), lang=code, to="currency", currency=currency
    )  # fmt: skip
    if language == EN:
        said = said.replace(" euro", " euros") if not amount.startswith("1.") else said  # num2words has one form
    return (f"{sign}{amount}" if language == EN else f"{amount.replace('.', ',')} {sign}"), said


def generated() -> list[tuple[str, str, str, str]]:
    rows = []
    for language, code in CODES.items():
        counts = {n: num2words(n, lang=code).replace("uno mil", "un mil") for n in COUNTS}  # a fault of its Spanish
        rows += [("count", language, str(n), said) for n, said in counts.items()]
        rows += [("ordinal", language, *ordinal_row(language, n)) for n in ORDINALS]
        rows += [("date", language, *date_row(language, *day)) for day in DAYS]
        rows += [("date in digits", language, *numeric_date_row(language, *day)) for day in DAYS]
        rows += [("time", language, *time_row(language, *time)) for time in TIMES]
        rows += [("money", language, *money_row(language, amount, sign)) for amount in AMOUNTS for sign in SIGNS]
        for unit, plural in UNITS[language].items():
            rows += [("unit", language, f"{n} {unit}", f"{num2words(n, lang=code)} {plural}") for n in (2, 12, 90)]
    cardinal, digits = spoken_in(ZH).whole, spoken_in(ZH).digits
    for n in COUNTS:
        said = cardinal(n)
        rows.append(("count", ZH, f"有{n}个", f"有{said if n != 2 else '两'}个"))
        rows.append(("percent", ZH, f"约{n}%", f"约百分之{said}"))
        rows.append(("money", ZH, f"花了${n}。", f"花了{said}美元。"))
    days = [(d, m, y, digits(str(y))) for d, m, y in DAYS]
    rows += [("date", ZH, f"{y}-{m:02}-{d:02}起", f"{s}年{cardinal(m)}月{cardinal(d)}日起") for d, m, y, s in days]
    rows += [("time", ZH, f"在{h}:{m}", f"在{'两' if h == 2 else cardinal(h)}点{cardinal(m)}分") for h, m in TIMES]
    return rows


GENERATED = generated()


def test_there_are_three_hundred_generated_rows_and_all_languages():
    assert len(GENERATED) >= 300
    assert {row[1] for row in GENERATED} == {EN, DE, FR, ES, ZH}


@pytest.mark.parametrize("language", [EN, DE, FR, ES, ZH])
def test_generated_rows_say_what_num2words_says(language):
    for rule, _, text, said in (row for row in GENERATED if row[1] == language):
        assert normalized(language, text) == said, (rule, text)
        if language != ZH:
            assert normalized(language, f"Hm, {text}, hm.") == f"Hm, {said}, hm.", (rule, text)


def test_a_construct_that_is_too_long_is_given_out_as_it_is():
    long = "x" * (LONGEST_HELD + 10)
    parts = " ".join(long[start : start + LONGEST_WORD] for start in range(0, len(long), LONGEST_WORD))
    assert normalized(EN, f"<a {long}") == f"<a {parts}"
    assert normalized(EN, f'<a b="{long}">').replace(" ", "") == f'<ab="{long}">'
    assert normalized(EN, f"[see]({long}) it").replace(" ", "") == f"see({long})it"
