"""What every language writes in several ways: dates, fractions, abbreviations, signs within amounts. And what holds for
any of it: a number is read whole or left whole, and no sign stays beside its words."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text_rules import DE, EN, ES, FR, IT, JA, KO, NL, PT, RU, ZH, normalized
from test_text_stream import in_pieces

from spoken_text.normalize import NormalizerStream
from spoken_text.spoken import LANGUAGES

ROWS = [
    (EN, "In 1990 companies merged and in 2001 they split.",
     "In nineteen ninety companies merged and in two thousand and one they split."),
    (EN, "After 1945 soldiers returned home.", "After nineteen forty-five soldiers returned home."),
    (EN, "Between 1990 and 1995 prices doubled.", "Between nineteen ninety and nineteen ninety-five prices doubled."),
    (EN, "the 1980's", "the nineteen eighties"),
    (EN, "It is due on 24/04/2020.", "It is due on April twenty-fourth, twenty twenty."),
    (EN, "Jan-15-2020", "January fifteenth, twenty twenty"),
    (EN, "09/08/2000 09:55 AM", "September eighth, two thousand, nine fifty-five AM"),
    (EN, "66·5 per cent", "sixty-six point five per cent"),
    (EN, "You can lose 3-4 pounds a week.", "You can lose three to four pounds a week."),
    (EN, "won 5-10 dollars", "won five to ten dollars"),
    (EN, "They won 3-2.", "They won three-two."),
    (EN, "1st/2nd grade", "first or second grade"),
    (EN, "$-3.25", "minus three dollars, twenty-five cents"),
    (EN, "€3", "three euros"),
    (EN, "2m dollars", "two million dollars"),
    (EN, "500 usd", "five hundred dollars"),
    (EN, "1,200 THB", "one thousand, two hundred baht"),
    (EN, "192.168.0.1:8080", "one nine two dot one six eight dot zero dot one colon eight zero eight zero"),
    (EN, "Call 911 or 112 now.", "Call nine one one or one one two now."),
    (EN, "Qwen3-TTS-12Hz-0.6B", "Qwen three-TTS-twelve hertz-zero point six B"),
    (EN, "a 16k wav", "a sixteen K wav"),
    (EN, "Take it 3x daily.", "Take it three times daily."),
    (EN, "2x8 m2", "two by eight square meters"),
    (EN, "Keep it at 30 deg.C. in the dark.", "Keep it at thirty degrees Celsius in the dark."),
    (EN, "5,3.5 km", "five, three point five kilometers"),
    (EN, "Read Chapter 01 first.", "Read Chapter one first."),
    (EN, "Choose option [3] or [4].", "Choose option three or four."),
    (EN, "Press <Enter> to go on.", "Press Enter to go on."),
    (EN, "Press <Ctrl><Alt><Del>.", "Press Ctrl Alt Del."),
    (EN, "<Tool><Name>x</Name></Tool> ok", "x ok"),
    (EN, "go<noise/>home, ha<laugh/>, super<wbr/>cali", "go home, ha, supercali"),
    (EN, "at 02.30 a.m. it", "at two thirty AM it"),
    (EN, "won 78:96, at 25:10", "won seventy-eight to ninety-six, at twenty-five ten"),
    (EN, "Bert (3-5213), 1-5000 units", "Bert (three, five two one three), one to five thousand units"),
    (EN, "a .5kg loaf", "a zero point five kilogram loaf"),
    (EN, "1-413-te-b-1-5", "one-four hundred and thirteen-te-b-one-five"),
    (ES, "1-800-go-u-haul", "uno, ocho cero cero-go-u-haul"),
    (ES, "100 000 000 000 000 002", f"uno{' cero' * 16} dos"),
    (JA, "7月初旬〜9月中旬、紀元前2世紀〜西暦12年", "七月初旬から九月中旬、紀元前二世紀から西暦十二年"),
    (JA, "すごい〜3人、最高〜！", "すごい〜三人、最高〜！"),
    (ZH, "2019·2·10", "二零一九年二月十日"),
    (ZH, "计算-2，2<=4，比分17:16", "计算负二，二小于等于四，比分十七比十六"),
    (JA, "-√2", "マイナスルート二"),
    (FR, "le Dʳ Martin et Mᵐᵉ Paul, Mr. Dupond", "le Docteur Martin et Madame Paul, Monsieur Dupond"),
    (KO, "이것은 1 번째, 300N, 3s", "이것은 첫 번째, 삼백 뉴턴, 삼 초"),
    (ES, "⅖ y ₡ 3", "dos quintos y tres colones"),
    (EN, "2788 San Tomas Expy, 12 Laguna Ct", "two thousand, seven hundred and eighty-eight San Tomas Expressway, "
     "twelve Laguna Court"),
    (EN, "<Tool>x</Tool>", "x"),
    (EN, "St. Louis vs. Boston", "Saint Louis versus Boston"),
    (EN, "Set `<lookup>` to true.", "Set lookup to true."),
    (EN, "A vector<int> holds numbers.", "A vector int holds numbers."),
    (EN, "Things to buy\n- milk\n- eggs", "Things to buy: milk. eggs."),
    (EN, "Dr. Brown met Mr. Smith on Main St. yesterday.", "Doctor Brown met Mister Smith on Main Street yesterday."),
    (EN, "near St. Mary's on Park Ave", "near Saint Mary's on Park Avenue"),
    (EN, "Ask @anna about #climate.", "Ask at anna about hashtag climate."),
    (EN, "Johnson & Johnson, R&D", "Johnson and Johnson, R and D"),
    (EN, "King James I ruled England.", "King James the first ruled England."),
    (EN, "in the XIX century", "in the nineteenth century"),
    (EN, "II", "two"),
    (EN, "17 km/s, 3,000 rpm", "seventeen kilometers per second, three thousand revolutions per minute"),
    (EN, "20 °C / 68 °F", "twenty degrees Celsius, sixty-eight degrees Fahrenheit"),
    (EN, "1/12 of it, 21/22 of it", "one twelfth of it, twenty-one twenty-seconds of it"),
    (EN, "10 - 3", "ten minus three"),
    (EN, "12/25 is Christmas.", "December twenty-fifth is Christmas."),
    (DE, "von 150 000 Arbeitsplätzen", "von einhundertfünfzigtausend Arbeitsplätzen"),
    (DE, "am 24/04/2020", "am vierundzwanzigsten April zweitausendzwanzig"),
    (DE, "2022.10.21, 09:30 Uhr", "einundzwanzigster Oktober zweitausendzweiundzwanzig, neun Uhr dreißig"),
    (DE, "Er brauchte 2:05:30 Stunden.", "Er brauchte zwei Stunden fünf Minuten dreißig Sekunden."),
    (DE, "66·5 Prozent", "sechsundsechzig Komma fünf Prozent"),
    (DE, "1/22 und 11/10", "ein Zweiundzwanzigstel und elf Zehntel"),
    (DE, "56,3 /km²", "sechsundfünfzig Komma drei pro Quadratkilometer"),
    (DE, "4.100 Einwohner/km²", "viertausendeinhundert Einwohner pro Quadratkilometer"),
    (DE, "Im Notfall 112 wählen.", "Im Notfall eins eins zwei wählen."),
    (DE, "3x täglich", "dreimal täglich"),
    (DE, "2x8 m2", "zwei mal acht Quadratmeter"),
    (DE, "Wähle Option [3].", "Wähle Option drei."),
    (DE, "Dr. Schmidt kommt z. B. am Montag.", "Doktor Schmidt kommt zum Beispiel am Montag."),
    (DE, "in der Hauptstr. 12 in St. Pölten", "in der Hauptstraße zwölf in Sankt Pölten"),
    (DE, "Müller & Söhne", "Müller und Söhne"),
    (DE, "Kaiser Wilhelm II. dankte ab.", "Kaiser Wilhelm der Zweite dankte ab."),
    (DE, "Im XX. Jahrhundert", "Im zwanzigsten Jahrhundert"),
    (DE, "Der II. Weltkrieg endete 1945.", "Der zweite Weltkrieg endete neunzehnhundertfünfundvierzig."),
    (DE, "44 v. Chr. war es.", "vierundvierzig vor Christus war es."),
    (DE, "3.000 U/min", "dreitausend Umdrehungen pro Minute"),
    (DE, "am 3. Okt. 1990", "am dritten Oktober neunzehnhundertneunzig"),
    (FR, "le 21/10/05", "le vingt et un octobre deux mille cinq"),
    (FR, "Le 05/03/2021 14:30", "Le cinq mars deux mille vingt et un, quatorze heures trente"),
    (FR, "en 2:00.531", "en deux minutes zéro virgule cinq trois un seconde"),
    (FR, "8/10e, 1/12, 11/10", "huit dixièmes, un douzième, onze dixièmes"),
    (FR, "56,3 hab./km²", "cinquante-six virgule trois habitants par kilomètre carré"),
    (FR, "un tapis de 2x8 m2", "un tapis de deux par huit mètres carrés"),
    (FR, "3x par jour", "trois fois par jour"),
    (FR, "Appelez le 112.", "Appelez le un un deux."),
    (FR, "M. Dupont et Mme Martin habitent av. Foch.", "Monsieur Dupont et Madame Martin habitent avenue Foch."),
    (FR, "c.-à-d. demain, etc.", "c'est-à-dire demain, et cetera."),
    (FR, "le pape Jean-Paul II", "le pape Jean-Paul deux"),
    (FR, "120/80", "cent vingt sur quatre-vingts"),
    (FR, "1.ᵉʳ", "premier"),
    (FR, "les 17/18 juin", "les dix-sept, dix-huit juin"),
    (ES, "a la 1:00", "a la una"),
    (ES, "a las 5:02 p.m.", "a las cinco y dos de la tarde."),
    (ES, "a las 8:15 p. m.", "a las ocho y quince de la noche."),
    (ES, "el 21/10/05", "el veintiuno de octubre de dos mil cinco"),
    (ES, "1/12 y 3/11", "un doceavo y tres onceavos"),
    (ES, "5/12 partes", "cinco doceavas partes"),
    (ES, "2 - 1", "dos menos uno"),
    (ES, "1.000.º", "milésimo"),
    (ES, "1.ᵉʳ lugar", "primer lugar"),
    (ES, "El Sr. García y la Dra. Ruiz", "El Señor García y la Doctora Ruiz"),
    (ES, "EE. UU., p. ej. hoy", "Estados Unidos, por ejemplo hoy"),
    (ES, "Llame al 112 o al 911.", "Llame al uno uno dos o al nueve uno uno."),
    (ES, "3x al día", "tres veces al día"),
    (ES, "17 km/s", "diecisiete kilómetros por segundo"),
    (IT, "il 21/10/05", "il ventuno ottobre duemilacinque"),
    (IT, "un 1° test", "un primo test"),
    (IT, "1 ° gennaio", "primo gennaio"),
    (IT, "1/12 e 3/11", "un dodicesimo e tre undicesimi"),
    (IT, "3x al giorno", "tre volte al giorno"),
    (IT, "Il Sig. Rossi e la Dott.ssa Neri", "Il Signor Rossi e la Dottoressa Neri"),
    (IT, "5 €/kg, 100 km/h", "cinque euro al chilogrammo, cento chilometri all'ora"),
    (IT, "re Umberto I", "re Umberto primo"),
    (IT, "alle 13:05", "alle tredici e cinque"),
    (PT, "21/10/05", "vinte e um de outubro de dois mil e cinco"),
    (PT, "03/15/2024", "quinze de março de dois mil e vinte e quatro"),
    (PT, "R $ 53,00", "cinquenta e três reais"),
    (PT, "3/11", "três onze avos"),
    (PT, "3x por dia", "três vezes por dia"),
    (PT, "O Sr. Silva e a Dra. Ana", "O Senhor Silva e a Doutora Ana"),
    (PT, "Flamengo 2x1 Vasco", "Flamengo dois a um Vasco"),
    (PT, "Dom Pedro II", "Dom Pedro segundo"),
    (PT, "1º/2º lugar", "primeiro ou segundo lugar"),
    (RU, "В 44 г. до н. э. он умер.", "В сорок четвёртом году до нашей эры он умер."),
    (RU, "от 6/3/2006г.", "от шестого марта две тысячи шестого года."),
    (RU, "С 1930 преподавал в школе.", "С тысяча девятьсот тридцатого преподавал в школе."),
    (RU, "В 1932—1933 годах", "В тысяча девятьсот тридцать втором – тысяча девятьсот тридцать третьем годах"),
    (RU, "(1924—2008)", "(тысяча девятьсот двадцать четвёртый – две тысячи восьмой)"),
    (RU, "В 14 веке", "В четырнадцатом веке"),
    (RU, "в XVIII—XIX веках", "в восемнадцатом – девятнадцатом веках"),
    (RU, "премия 1991 г. за роман", "премия тысяча девятьсот девяносто первого года за роман"),
    (RU, "в возрасте 65 лет", "в возрасте шестидесяти пяти лет"),
    (RU, "в 1812 и 1814 годах", "в тысяча восемьсот двенадцатом и тысяча восемьсот четырнадцатом годах"),
    (RU, "с 1941 по 1945 гг. шла", "с тысяча девятьсот сорок первого по тысяча девятьсот сорок пятый годы шла"),
    (RU, "в июле 1941", "в июле тысяча девятьсот сорок первого"),
    (RU, "1/12 и 3/11", "одна двенадцатая и три одиннадцатых"),
    (RU, "Звоните по 112 или 02.", "Звоните по один один два или ноль два."),
    (RU, "3x в день", "три раза в день"),
    (RU, "2x8 м2", "два на восемь квадратных метров"),
    (RU, "г-н Иванов живёт в г. Москве.", "господин Иванов живёт в городе Москве."),
    (RU, "ул. Ленина, д. 5, кв. 10", "улица Ленина, дом пять, квартира десять"),
    (RU, "II мировая война", "вторая мировая война"),
    (RU, "и т. д.", "и так далее."),
    (RU, "100 км/с", "сто километров в секунду"),
    (RU, "сезон 2010/11", "сезон две тысячи десять – одиннадцать"),
    (RU, "150 000 рабочих мест", "сто пятьдесят тысяч рабочих мест"),
    (RU, "Рост 185 см.", "Рост сто восемьдесят пять сантиметров."),
    (ZH, "鲁迅（1881-1936）", "鲁迅（一八八一到一九三六）"),
    (ZH, "2010世博会", "二零一零世博会"),
    (ZH, "会议定于12/2举行", "会议定于十二月二日举行"),
    (ZH, "2020/04/24 09:55发车", "二零二零年四月二十四日，九点五十五分发车"),
    (ZH, "1:02:36am", "上午一点零二分三十六秒"),
    (ZH, "一共42个,3.5公里", "一共四十二个，三点五公里"),
    (ZH, "-2至5℃", "负二至五摄氏度"),
    (ZH, "$-3.25", "负三点二五美元"),
    (ZH, "电话:010-12345678", "电话:零一零，一二三四五六七八"),
    (ZH, "135-4567-8900", "一三五，四五六七，八九零零"),
    (ZH, "（012）23358966", "（零一二）二三三五八九六六"),
    (ZH, "110报警", "一一零报警"),
    (ZH, "192.168.0.1:8080", "一九二点一六八点零点一冒号八零八零"),
    (ZH, ".22口径", "点二二口径"),
    (ZH, "1/12的人", "十二分之一的人"),
    (ZH, "5×4+3-6=17", "五乘以四加三减六等于十七"),
    (ZH, "16k采样", "十六k采样"),
    (ZH, "第01章和第II章", "第一章和第二章"),
    (ZH, "56.3人/km²", "五十六点三人每平方公里"),
    (ZH, "@小明 #新闻", "艾特小明 井号新闻"),
    (JA, "71・2%", "七十一点二パーセント"),
    (JA, "打率.450", "打率四割五分"),
    (JA, "打率.305", "打率三割五厘"),
    (JA, "防御率2・35", "防御率二点三五"),
    (JA, "5×4+3-6", "五かける四プラス三マイナス六"),
    (JA, "3月3日（日）、4日（月・祝）", "三月三日（日曜日）、四日（月曜日祝日）"),
    (JA, "12/2に行う", "十二月二日に行う"),
    (JA, "2022/10/21 09:55発", "二千二十二年十月二十一日、九時五十五分発"),
    (JA, "第01章", "第一章"),
    (JA, "192.168.0.1:8080", "一九二ドット一六八ドット零ドット一コロン八零八零"),
    (KO, "1번째", "첫 번째"),
    (KO, "21번째", "스물한 번째"),
    (KO, "3번 문제", "삼 번 문제"),
    (KO, "-3/4km", "마이너스 사분의 삼킬로미터"),
    (KO, "71·2%", "칠십일 점 이 퍼센트"),
    (KO, "(1881-1936)", "(천팔백팔십일에서 천구백삼십육)"),
    (KO, "5월 1일(일)에", "오월 일일(일요일)에"),
    (KO, "192.168.0.1:8080", "일 구 이 점 일 육 팔 점 영 점 일 콜론 팔 영 팔 영"),
    (KO, "제II장", "제 이장"),
    (KO, "42개,3.5km", "마흔두 개, 삼 점 오 킬로미터"),
    (KO, "15k 팔로워", "만 오천 팔로워"),
]  # fmt: skip


@pytest.mark.parametrize(("language", "text", "said"), ROWS)
def test_what_is_written_in_several_ways_is_read_in_one(language, text, said):
    assert normalized(language, text) == said
    for cut in range(1, len(text)):
        assert in_pieces(NormalizerStream(language), [text[:cut], text[cut:]]) == said, cut


_NUMBER = st.sampled_from("1 2 7 10 12 21 30 99 100 365 1990 2024 3.5".split())
_TOKEN = st.one_of(
    st.builds("{}/{}".format, _NUMBER, _NUMBER),
    st.builds("{}/{}/{}".format, _NUMBER, _NUMBER, _NUMBER),
    st.builds("{}:{}".format, _NUMBER, _NUMBER),
    st.builds("{}{}".format, st.sampled_from(["$", "€", "£", "$-", "€-"]), _NUMBER),
    st.builds("-{}/{}".format, _NUMBER, _NUMBER),
    st.builds("{}€/{}".format, _NUMBER, st.sampled_from(["kg", "h"])),
    st.builds("{} / {}".format, _NUMBER, _NUMBER),
)
_WORDS = {EN: ("They saw ", " today"), DE: ("Er sah ", " heute"), FR: ("Il voit ", " demain"), ZH: ("他看", "了")}
_WORDS |= {ES: ("Vio ", " ayer"), IT: ("Vide ", " ieri"), PT: ("Viu ", " ontem"), JA: ("彼は", "と")}
_WORDS |= {RU: ("Он видел ", " вчера"), KO: ("그는 ", " 하고"), NL: ("Hij zag ", " gisteren")}


@settings(max_examples=300, deadline=None)
@given(token=_TOKEN, language=st.sampled_from([*LANGUAGES]))
def test_a_number_is_read_whole_or_left_whole_and_no_sign_stays(token, language):
    before, after = _WORDS[language]
    said = normalized(language, f"{before}{token}{after}")
    assert said.startswith(before) and said.endswith(after)
    if re.search(r"\d", said):
        kept = [part for part in token.split(" / ") if re.search(rf"(?<!\d){re.escape(part)}(?!\d)", said)]
        assert kept, said
    else:
        assert not re.search("[$€£/]", said), said


@pytest.mark.parametrize(
    ("language", "text"),
    [
        (EN, "An St is no word, and an Ave Maria is sung."),
        (EN, "C# and F# are languages; a = b & c = d? No, a <b and c."),
        (FR, "M. est une lettre."),
        (ES, "La D. es una letra."),
        (RU, "Это г. и пр. без имени"),
    ],
)
def test_what_may_be_something_else_stays(language, text):
    assert normalized(language, text).replace(" and c = d", " & c = d") == text
