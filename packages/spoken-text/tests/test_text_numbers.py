"""Amounts, times, telephone numbers and other numbers in English; what holds for numbers in every language."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num2words import num2words
from test_text_rules import EN, normalized
from test_text_stream import in_pieces

from spoken_text.normalize import NormalizerStream
from spoken_text.spoken import LANGUAGES, spoken_in

ROWS = [
    ("money", EN, "$1.2B", "one point two billion dollars"),
    ("money", EN, "$1.5M", "one point five million dollars"),
    ("money", EN, "£3bn", "three billion pounds"),
    ("money", EN, "£5m", "five million pounds"),
    ("money", EN, "€5M", "five million euros"),
    ("money", EN, "¥500M", "five hundred million yen"),
    ("money", EN, "$0.5M", "zero point five million dollars"),
    ("money", EN, "-$3.2M", "minus three point two million dollars"),
    ("money", EN, "$100k", "one hundred thousand dollars"),
    ("money", EN, "$1K", "one thousand dollars"),
    ("money", EN, "$1.5 billion", "one point five billion dollars"),
    ("money", EN, "$5bn.", "five billion dollars."),
    ("money", EN, "$10K-$20K", "ten thousand to twenty thousand dollars"),
    ("money", EN, "$10K–$20K", "ten thousand to twenty thousand dollars"),
    ("money", EN, "$10-$20K", "ten to twenty thousand dollars"),
    ("money", EN, "$900K-$1.2M", "nine hundred thousand to one point two million dollars"),
    ("money", EN, "$5-$10", "five to ten dollars"),
    ("money", EN, "$5–10", "five to ten dollars"),
    ("money", EN, "$10-20", "ten to twenty dollars"),
    ("money", EN, "$3-5 million", "three to five million dollars"),
    ("money", EN, "$1 million-$2 million", "one million to two million dollars"),
    ("money", EN, "$5.50-$10.25", "five dollars, fifty cents to ten dollars, twenty-five cents"),
    ("money", EN, "EUR 5-10", "five to ten euros"),
    ("money", EN, "5-10€", "five to ten euros"),
    ("money", EN, "£5-10bn", "five to ten billion pounds"),
    ("money", EN, "$5 to $10", "five dollars to ten dollars"),
    ("money", EN, "USD 5M", "five million dollars"),
    ("money", EN, "5M USD", "five million dollars"),
    ("money", EN, "3bn euros", "three billion euros"),
    ("money", EN, "US$5", "five dollars"),
    ("money", EN, "A$10.50", "ten Australian dollars, fifty cents"),
    ("money", EN, "C$3 million", "three million Canadian dollars"),
    ("money", EN, "HK$200", "two hundred Hong Kong dollars"),
    ("money", EN, "CHF 10.50", "ten Swiss francs, fifty centimes"),
    ("money", EN, "5 zł", "five zlotys"),
    ("money", EN, "100 kr", "one hundred kr"),
    ("money", EN, "R$ 1.234,50", "one thousand, two hundred and thirty-four reais, fifty centavos"),
    ("money", EN, "€5,50", "five euros, fifty cents"),
    ("money", EN, "$.50", "fifty cents"),
    ("money", EN, "$1,234.50", "one thousand, two hundred and thirty-four dollars, fifty cents"),
    ("money", EN, "$1.234", "one point two three four dollars"),
    ("money", EN, "₹5 lakh", "five lakh rupees"),
    ("money", EN, "$5/month", "five dollars per month"),
    ("money left alone", EN, "$5x", "$5x"),
    ("money left alone", EN, "$1,5", "$1,5"),
    ("money left alone", EN, "$5USD", "$5USD"),
    ("money left alone", EN, "$x_1 = 2$ and $5", "x one equals two and five dollars"),
    ("scale", EN, "10k followers", "ten thousand followers"),
    ("scale", EN, "15K users", "fifteen thousand users"),
    ("scale", EN, "1.2M", "one point two million"),
    ("scale", EN, "2M views", "two million views"),
    ("scale", EN, "1.5B parameters", "one point five billion parameters"),
    ("scale", EN, "3M people", "three million people"),
    ("scale", EN, "7bn people", "seven billion people"),
    ("scale", EN, "10k-20k users", "ten thousand to twenty thousand users"),
    ("scale", EN, "1-2M users", "one to two million users"),
    ("no scale", EN, "The 401k plan", "The four oh one k plan"),
    ("no scale", EN, "a 4K TV", "a four K TV"),
    ("no scale", EN, "Room 5B", "Room five B"),
    ("no scale", EN, "a 7B model", "a seven B model"),
    ("groups", EN, "2 000 000", "two million"),
    ("groups", EN, "1 000 000 people", "one million people"),
    ("groups", EN, "12 345 678",
     "twelve million, three hundred and forty-five thousand, six hundred and seventy-eight"),
    ("groups", EN, "1'000'000", "one million"),
    ("groups", EN, "1.000.000", "one million"),
    ("groups", EN, "1,000,000", "one million"),
    ("groups", EN, "10,000,000.5", "ten million point five"),
    ("duration", EN, "1h 30m", "one hour thirty minutes"),
    ("duration", EN, "2m 30s", "two minutes thirty seconds"),
    ("duration", EN, "2m30s", "two minutes thirty seconds"),
    ("duration", EN, "1h30", "one hour thirty minutes"),
    ("duration", EN, "1h 5m 3s", "one hour five minutes three seconds"),
    ("duration", EN, "1hr 30min", "one hour thirty minutes"),
    ("duration", EN, "1 h 30 min", "one hour thirty minutes"),
    ("duration", EN, "2:05:10", "two hours five minutes ten seconds"),
    ("duration", EN, "45s", "forty-five seconds"),
    ("duration", EN, "for 30s", "for thirty seconds"),
    ("duration", EN, "wait 90s", "wait ninety seconds"),
    ("duration", EN, "after 90s", "after ninety seconds"),
    ("duration", EN, "30s", "30s"),
    ("duration", EN, "in his 40s", "in his forties"),
    ("duration", EN, "the '80s", "the eighties"),
    ("duration", EN, "the 30s", "the thirties"),
    ("duration", EN, "mid-90s", "mid-nineties"),
    ("duration", EN, "1960s-70s", "nineteen sixties to seventies"),
    ("duration", EN, "3 hrs", "three hours"),
    ("duration", EN, "1:02:03.5", "1:02:03.5"),
    ("time", EN, "3:45pm", "three forty-five PM"),
    ("time", EN, "9:00–17:00", "nine o'clock to seventeen hundred hours"),
    ("time", EN, "4-5pm", "four to five PM"),
    ("phone", EN, "555-0134", "five five five, zero one three four"),
    ("phone", EN, "1-800-555-0199", "one, eight zero zero, five five five, zero one nine nine"),
    ("phone", EN, "(555) 123-4567", "five five five, one two three, four five six seven"),
    ("phone", EN, "+1 555 123 4567", "plus one, five five five, one two three, four five six seven"),
    ("phone", EN, "555 123 4567", "five five five, one two three, four five six seven"),
    ("phone", EN, "1 (800) 555-0199", "one, eight zero zero, five five five, zero one nine nine"),
    ("phone", EN, "call 911", "call nine one one"),
    ("phone", EN, "100-2000 people", "one hundred to two thousand people"),
    ("phone", EN, "4111 1111 1111 1111", "four one one one, one one one one, one one one one, one one one one"),
    ("phone", EN, "123-45-6789", "one two three, four five, six seven eight nine"),
    ("range", EN, "5-10 km", "five to ten kilometers"),
    ("range", EN, "5–10 km", "five to ten kilometers"),
    ("range", EN, "5 – 10 km", "five to ten kilometers"),
    ("range", EN, "10-20 %", "ten to twenty percent"),
    ("range", EN, "10%-20%", "ten to twenty percent"),
    ("range", EN, "20-30 °C", "twenty to thirty degrees Celsius"),
    ("range", EN, "pages 10-12", "pages ten to twelve"),
    ("range", EN, "2-3 hours", "two to three hours"),
    ("range", EN, "0.1-0.2%", "zero point one to zero point two percent"),
    ("range", EN, "-5–10 °C", "minus five to ten degrees Celsius"),
    ("range", EN, "1939-45", "nineteen thirty-nine to forty-five"),
    ("range", EN, "1985-1990", "nineteen eighty-five to nineteen ninety"),
    ("score", EN, "won 3-2", "won three-two"),
    ("score", EN, "won 2-3", "won two-three"),
    ("score", EN, "2:1", "two to one"),
    ("score", EN, "1-2-3", "one-two-three"),
    ("fraction", EN, "1/2", "one half"),
    ("fraction", EN, "3/4", "three quarters"),
    ("fraction", EN, "2/3 of them", "two thirds of them"),
    ("fraction", EN, "1 1/2 cup", "one and a half cup"),
    ("fraction", EN, "3 1/2 hours", "three and a half hours"),
    ("fraction", EN, "½ cup", "one half cup"),
    ("fraction", EN, "1½ cups", "one and a half cups"),
    ("fraction", EN, "1/2 km", "one half kilometer"),
    ("fraction", EN, "24/7", "twenty-four seven"),
    ("fraction", EN, "on 3/4", "on 3/4"),
    ("fraction", EN, "5/10", "five out of ten"),
    ("year", EN, "(1985)", "(nineteen eighty-five)"),
    ("year", EN, "the year 1066", "the year ten sixty-six"),
    ("year", EN, "in 476 AD", "in four seventy-six AD"),
    ("year", EN, "AD 476", "AD four seventy-six"),
    ("year", EN, "44 BC", "forty-four BC"),
    ("year", EN, "In 1500 cases", "In one thousand, five hundred cases"),
    ("year", EN, "in 1500 we", "in fifteen hundred we"),
    ("address", EN, "192.168.1.1", "one nine two dot one six eight dot one dot one"),
    ("address", EN, "2.0.1", "two dot zero dot one"),
    ("address", EN, "Python 3.11", "Python three point one one"),
    ("direction", EN, "48.2°N", "forty-eight point two degrees north"),
    ("direction", EN, "40° N, 5° E", "forty degrees north, five degrees east"),
    ("direction", EN, "48°51'N", "forty-eight degrees fifty-one minutes north"),
    ("direction", EN, "20 ℃", "twenty degrees Celsius"),
    ("direction", EN, "-5°C", "minus five degrees Celsius"),
    ("serial", EN, "ISBN 978-3-16-148410-0",
     "ISBN nine seven eight, three, one six, one four eight four one zero, zero"),
    ("serial", EN, "ISBN 0-306-40615-2", "ISBN zero, three zero six, four zero six one five, two"),
    ("serial", EN, "1234-5678-9012-3456",
     "one two three four, five six seven eight, nine zero one two, three four five six"),
    ("Roman", EN, "Henry VIII", "Henry the eighth"),
    ("Roman", EN, "Louis XIV was", "Louis the fourteenth was"),
    ("Roman", EN, "Chapter IV", "Chapter four"),
    ("Roman", EN, "Charles I think", "Charles I think"),
    ("Roman", EN, "World War II", "World War two"),
    ("time", EN, "9am-5pm", "nine AM to five PM"),
    ("time", EN, "9am–5pm", "nine AM to five PM"),
    ("duration", EN, "3:45:00", "three hours forty-five minutes"),
    ("date", EN, "2024/05/06", "May sixth, twenty twenty-four"),
    ("money", EN, "$5k/month", "five thousand dollars per month"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "language", "text", "said"), ROWS)
def test_a_number_is_read_or_left_as_a_whole(kind, language, text, said):
    assert normalized(language, text) == said


# ---------------------------------------------------------------- in every language

LANGUAGE = st.sampled_from([*LANGUAGES])
FRAGMENTS = [
    *"1|2|10|20|30|90|1985|2024|1066|000|555|0134|007|3.5|1,5|1.000|1,234.56|12:30|2:05:10|1/2|½|1½".split("|"),
    *"/|-|–|~|～|〜|.|,|:|'|(|)| | | |$|€|£|¥|R$|US$|CHF |zł| kr|руб.|₽|元|円|원|M€|$.".split("|"),
    *"K|M|B|k|bn| Mio.| Mrd| тыс.| млн|万|亿|億|억|만|h|m|s|min| h| m|h30|%|°C|°|N|℃|km| kg|г.|г|году".split("|"),
    *"в |с |个|個|人|年|月|日|时|点|第|是|명|개|시|번째|대|입|이 |Louis |Chapter |XIV|XIV.|VIII|the |in ".split("|"),
    *"call |AD| BC|+49 |1-800-|$x_1|x$|_1|st|.º|-й|\n|pm| Uhr| and| USD| – |ISBN |v|x|#|3. |Mai |марта ".split("|"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join)


@settings(max_examples=500)
@given(text=TEXTS, language=LANGUAGE, cuts=st.lists(st.integers(0, 60), max_size=6))
def test_numbers_in_pieces_are_read_as_in_the_whole_text(text, language, cuts):
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
    assert in_pieces(NormalizerStream(language), pieces) == normalized(language, text)


@settings(max_examples=500)
@given(text=TEXTS, language=LANGUAGE)
def test_digits_that_stay_keep_their_order(text, language):
    """And none is there twice: what is left is what was written without what was read."""
    figures = {"½": "12"}
    written = iter("".join(figures.get(character, character) for character in text))
    left = re.sub(r"\D", "", normalized(language, text))
    assert all(digit in written for digit in left), left


@settings(max_examples=200)
@given(first=st.integers(200, 999), second=st.integers(200, 999), last=st.integers(1, 9998), language=LANGUAGE)
def test_a_telephone_number_has_a_word_for_each_digit(first, second, last, language):
    spoken = spoken_in(language)
    said = normalized(language, f"+1 {first} {second} {last:04}")
    words = {spoken.digits(digit) for digit in "0123456789"} | {"공"}
    if spoken.code in ("zh", "ja"):
        assert sum(character in words for character in said) == 11
    else:
        assert sum(word in words for word in re.findall(r"\w+", said)) == 11


@settings(max_examples=200)
@given(number=st.integers(1_000_000, 999_999_999), language=LANGUAGE)
def test_groups_of_digits_are_one_number_whatever_their_marks(number, language):
    said = normalized(language, str(number))
    for mark in ",. '\u00a0\u202f\u2009’":
        written = f"{number:,}".replace(",", mark)
        phone = language in ("spanish", "portuguese") and re.fullmatch(
            r"[679]\d\d \d{3} \d{3}", f"{number:,}".replace(",", " ")
        )
        if not (phone and mark not in ",.'’"):
            assert normalized(language, written) == said, written


@settings(max_examples=100)
@given(tenths=st.integers(11, 9999).filter(lambda n: n % 10), scale=st.sampled_from(["M", "B"]))
def test_a_scale_takes_its_decimals_with_it(tenths, scale):
    value = f"{tenths // 10}.{tenths % 10}"
    name = {"M": "million", "B": "billion"}[scale]
    said = f"{num2words(tenths // 10)} point {num2words(tenths % 10)} {name} dollars"
    for written in (f"${value}{scale}", f"${value} {scale}", f"${value} {name}", f"USD {value}{scale}"):
        assert normalized(EN, written) == said


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(
    "repeated", ["1", "1,", "1-", "$1", "1:", "1 000 ", "1/2 ", "1h ", "1年", "$", "Louis XIV ", "1'000"]
)
def test_rows_of_numbers_are_read_in_parts(language, repeated):
    """A phrase is bounded, so the time grows with the text and no faster."""
    said = normalized(language, repeated * 600)
    assert normalized(language, repeated * 1200).startswith(said[: len(said) // 2])
