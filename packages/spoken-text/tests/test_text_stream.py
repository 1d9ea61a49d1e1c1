"""Text in pieces gives what the whole text gives, however it is cut; what a lexicon, pauses and the front end do."""

import itertools
import json
import re
import unicodedata
from functools import partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from running import run_python
from test_text_rules import normalized

from spoken_text import lexicon as lexicon_module
from spoken_text.choices import LONGEST_PAUSE_S
from spoken_text.errors import NoWordsError, RequestError, TextError
from spoken_text.european import number_of
from spoken_text.front_end import Reading, TextFrontEnd, has_half_characters
from spoken_text.lexicon import Lexicon
from spoken_text.normalize import NormalizerStream, is_plain
from spoken_text.pauses import Pause
from spoken_text.sentence import ends_sentence
from spoken_text.spelling import short_in_any_language
from spoken_text.spoken import LANGUAGES
from spoken_text.spoken_text import spoken_texts
from spoken_text.stage import LONGEST_HELD, is_cjk

FRAGMENTS = [
    *("the | Word|ab| | |\n|\n\n|. |, |!|?|(|)|'|-|–|/|:|_|\\|# |## T ##|*|**|__|~~|`|```|\n```\n|- |* ".split("|")),
    *"[x] ¦> ¦---¦|¦| a |¦|-|¦[¦]¦](¦](http://a.b/c)¦![¦[^1]¦<b>¦</b>¦<a b='c'>¦<¦>¦<think>¦</think>".split("¦"),
    *("&amp;|&|<!--|-->|https://x.com/a|www.|a@b.org|😀|👍🏽|\r|\r\n|\t|\x00|\u00a0|é|1|23|3.|4,5|1,234".split("|")),
    *("$5|€|%|km| kg|-7|15:30| pm|2024-03-05|March |Mai |2nd|+49 30 123456|。|年|日本|3月|값|[pause 1s]".split("|")),
    *("\\[pause 2s]|<break time='20ms'/>|<speak>|New York|New |SQL|12/31/2024|1er|0|٣|½|°C|£|1.234".split("|")),
    "x" * 120,
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)
LANGUAGE = st.sampled_from([*LANGUAGES, None])
LEXICON = Lexicon(
    {"New York": "Noo York", "New": "Noo", "sql": "sequel", "York-Word": "yw", "日本": "にほん", "the Word": "it"},
    {"german": {"Mai": "Maai"}},
)


@st.composite
def texts_in_pieces(draw, texts=TEXTS):
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def merged(parts) -> list[str | Pause]:
    whole: list[str | Pause] = []
    for part in parts:
        assert part != ""
        if isinstance(part, str) and whole and isinstance(whole[-1], str):
            whole[-1] += part
        else:
            whole.append(part)
    return whole


def in_pieces(stream, pieces):
    """All that a stream gives: text or a list of parts."""
    given = [stream.push(piece) for piece in pieces]
    given.append(stream.finish())
    return "".join(given) if isinstance(given[-1], str) else merged(part for parts in given for part in parts)


STAGES = {
    "normalizer": lambda language: (partial(normalized, language), lambda: NormalizerStream(language)),
    "lexicon": lambda language: (lambda text: LEXICON.apply(text, language), lambda: LEXICON.stream(language)),
    "tags": lambda _language: of_front_end(TextFrontEnd()),
    "without normalizing": lambda language: of_front_end(TextFrontEnd(language, "off", LEXICON)),
    "all": lambda language: of_front_end(TextFrontEnd(language, "auto", LEXICON)),
}
"""What each makes of a whole text, and its stream for a text in pieces, by the language."""


def of_front_end(front_end: TextFrontEnd):
    return front_end.whole, front_end.stream


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=300)
@given(cut=texts_in_pieces(), language=LANGUAGE)
def test_pieces_give_what_the_whole_text_gives(stage, cut, language):
    (text, pieces), (of_whole, stream) = cut, STAGES[stage](language)
    whole = of_whole(text)
    assert in_pieces(stream(), pieces) == whole
    assert in_pieces(stream(), text) == whole  # character by character
    assert isinstance(whole, str) or whole == merged(whole)


# ---------------------------------------------------------------- the normalizer


@settings(max_examples=200)
@given(text=TEXTS, language=LANGUAGE)
def test_what_has_no_words_is_nothing(text, language):
    whole = normalized(language, text)
    assert not whole or any(character.isalnum() for character in whole)


@settings(max_examples=200)
@given(text=st.text(), language=LANGUAGE)
def test_any_text_is_taken(text, language):
    said = normalized(language, text)
    assert not any(unicodedata.category(character) == "Cc" and character != "\n" for character in said)


_LETTER = st.characters(categories=["Lu", "Ll", "Lt", "Lo"])
_READ = short_in_any_language()


def _is_read(word: str) -> bool:
    """Is it short for another word, or a Roman numeral?"""
    return not {word, f"{word}."}.isdisjoint(_READ) or bool(number_of(word))


_WORD = st.text(_LETTER, min_size=1, max_size=30).filter(lambda word: not _is_read(word))
_MARKED = st.builds(
    lambda word, other, mark: {"-": f"{word}-{other}", "'": f"{word}'{other}", '"': f'"{word}"'}.get(mark, word + mark),
    _WORD, _WORD, st.sampled_from(["", "", ".", ",", ";", ":", "!", "?", "...", "?!", "-", "'", '"']),
)  # fmt: skip


@settings(max_examples=300)
@given(words=st.lists(_MARKED, min_size=1, max_size=12), language=LANGUAGE)
def test_text_without_digits_symbols_and_markup_comes_through_untouched(words, language):
    text = " ".join(words)
    assert normalized(language, text) == text


_ODD = "Mr. Dr. e.g am pm XIV km kg. a I No. Jan. may USD co-op it's NaN www Ünï Да".split()


@settings(max_examples=500)
@given(
    words=st.lists(st.sampled_from(_ODD) | _MARKED | st.text("abcXYZ.,-' \n0#*é²½", max_size=8), max_size=10),
    language=LANGUAGE,
)
def test_what_counts_as_plain_is_what_the_normalizer_leaves_untouched(words, language):
    text = " ".join(words)
    whole = TextFrontEnd(language, "auto").whole(text)
    if is_plain(text):
        assert normalized(language, text) == text and whole == [text]


def test_a_bots_sentence_is_plain_and_markup_is_not():
    assert is_plain("Hello there, how can I help you today?") and is_plain("Ja, so-so: it's late. Да!")
    for text in "| Hi|Hi |Hi  there|- Hi|Hi\nthere|see example.com now|5 km|x²|*Hi*|a_b|Hi!!".split("|"):
        assert not is_plain(text), text


PROSE = (
    "It was the best of times, it was the worst of times; it was the age of wisdom - it was the age of foolishness! "
    'Was it? "It was," she said, (and meant it). Don\'t ask.'
)


def test_prose_waits_for_the_word_in_progress_and_no_longer():
    stream, given = NormalizerStream("english"), ""
    for place, character in enumerate(PROSE, 1):
        given += stream.push(character)
        whole_words = PROSE[:place].rpartition(" ")
        assert given == whole_words[0] + whole_words[1]
    assert given + stream.finish() == PROSE


@pytest.mark.parametrize("text", ["他说你好。我们走吧", "これはペンです。はい"])
def test_chinese_and_japanese_wait_for_nothing(text):
    stream = NormalizerStream("japanese")
    for character in text:
        assert is_cjk(character)
        assert stream.push(character) == character


def test_a_number_waits_for_the_word_behind_it():
    stream = NormalizerStream("english")
    assert stream.push("I ran 5 ") == "I ran "
    assert stream.push("km") == ""
    assert stream.push(" today ") == "five kilometers today "


@pytest.mark.parametrize("construct", ["[see](", '<a b="', "<a"])
def test_what_is_held_back_is_bounded(construct):
    stream = NormalizerStream("english")
    text = construct + "x" * (LONGEST_HELD + 200)
    assert len(stream.push(text)) > LONGEST_HELD


def test_what_is_left_out_is_not_held():
    stream = NormalizerStream()
    stream.push("Yes. <think>")
    assert sum(len(stream.push("no " * 1000)) for _ in range(20)) == 0
    assert stream.push("</think>So be it. ") == "So be it. "


def test_a_mark_is_no_text():
    stream = NormalizerStream("english")
    assert stream.push("So") + stream.push_mark("\U00100005") + stream.push(" yes no") == "So\U00100005yes "
    with pytest.raises(ValueError, match="private-use"):
        stream.push_mark("a")


# ---------------------------------------------------------------- the lexicon


@settings(max_examples=500)
@given(words=st.lists(st.sampled_from("New|new| |York|sql|SQL|_|'s|-|and|Mai|é|在日".split("|"))))
def test_what_the_lexicon_may_not_change_it_does_not(words):
    text = "".join(words)
    assert LEXICON.may_change(text, "german") or LEXICON.apply(text, "german") == text
    assert not LEXICON.may_change("A sentence like any other, isn't it?")


@pytest.mark.parametrize(
    ("text", "language", "said"),
    [
        ("New York, New Yorker, New!", None, "Noo York, Noo Yorker, Noo!"),
        ("NEW YORK newt anew", None, "NEW YORK newt anew"),
        ("SQL, sql and Sql's MySQL sqlite", None, "sequel, sequel and sequel's MySQL sqlite"),
        ("Mai", "german", "Maai"),
        ("Mai", "de-AT", "Maai"),
        ("Mai", "english", "Mai"),
        ("在日本的", "chinese", "在にほん的"),
        ("sqĺ", None, "sqĺ"),
        ("sql_x éNew", None, "sql_x éNew"),
        ("", None, ""),
    ],
)
def test_whole_words_are_replaced(text, language, said):
    assert LEXICON.apply(text, language) == said


def test_which_entry_wins():
    lexicon = Lexicon({"us": "small", "US": "big", "a": "one"}, {"en": {"us": "ours"}})
    assert lexicon.apply("us US Us", "german") == "small big small"
    assert lexicon.apply("us US Us a", "english") == "ours big ours one"
    assert len(lexicon) == 4


def test_the_lexicon_holds_back_what_may_be_an_entry():
    stream = LEXICON.stream()
    assert stream.push("I like New") == "I like "
    assert stream.push(" Yor") == ""
    assert stream.push("kshire") == "Noo Yorkshire"


def test_a_lexicon_from_a_file(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"SQL": "sequel", "de": {"GIF": "Gif"}}), encoding="utf-8")
    (tmp_path / "b.csv").write_text("\ufeffword,spelling,language\nSQL,sequel,\n\nGIF,Gif,german\n", encoding="utf-8")
    for name in ("a.json", "b.csv"):
        lexicon = Lexicon.load(tmp_path / name)
        assert lexicon.apply("SQL GIF", "de") == "sequel Gif"
        assert lexicon.apply("SQL GIF", "en") == "sequel GIF"
    (tmp_path / "c.csv").write_text('word,spelling\n"A, B","a, b"\n', encoding="utf-8")
    assert Lexicon.load(str(tmp_path / "c.csv")).apply("A, B") == "a, b"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{\n"a": "b",\n"c" "d"}', "line 3: not valid JSON"),
        ("a.json", '{\n"a": "b",\n"c": 5}', "line 3: word and spelling must be text, got 'c' and 5"),
        ("a.json", '{\n"a": "b",\n"a": "c"}', "line 2: 'a' is there twice"),
        ("a.json", '{\n"a": "b",\n\n"klingon": {"c": "d"}}', "line 4: unknown language 'klingon'"),
        ("a.json", "[1]", "line 1: expected an object"),
        ("a.json", "[" * 100_000, "not valid JSON"),
        ("a.csv", "wort,laut\na,b", "line 1: expected the columns"),
        ("a.csv", "", "line 1: expected the columns"),
        ("a.csv", "word,spelling\na,b\nc,d,e", "line 3: expected 2 columns, got 3"),
        ("a.csv", 'word,spelling\na,"b" c', "line 2: not valid CSV"),
        ("a.csv", "word,spelling,language\na,b,xx", "line 2: unknown language 'xx'"),
        ("a.csv", "word,spelling\na,b\na,c", "line 3: the word 'a' is there twice"),
        ("a.csv", "word,spelling\n ,b", "line 2: a word has 1 to 100"),
        ("a.csv", "word,spelling\n...,b", "line 2: a word must begin or end with a letter"),
        ("a.csv", f"word,spelling\na,{'b' * 501}", "its spelling at most 500, got 1 and 501"),
        ("a.txt", "a,b", "a .json or a .csv file"),
        ("a.csv", "word,spelling\n\udcff,b", "readable file in UTF-8"),
        ("a.csv", None, "readable file"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(TextError, match=re.escape(message)):
        Lexicon.load(path)


def test_a_lexicon_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(lexicon_module, "MOST_ENTRIES", 2)
    with pytest.raises(TextError, match="2 entries"):
        Lexicon({"a": "", "b": "", "c": ""})
    monkeypatch.setattr(lexicon_module, "MOST_BYTES", 10)
    (tmp_path / "a.csv").write_text("word,spelling\n")
    with pytest.raises(TextError, match="may have at most 10 bytes"):
        Lexicon.load(tmp_path / "a.csv")


# ---------------------------------------------------------------- pauses


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("a[pause 500ms]b", ["a", Pause(0.5), "b"]),
        ("[pause 1.5s]", [Pause(1.5)]),
        ("[Pause  .5 S ]", [Pause(0.5)]),
        ("[pause 10s][pause 0ms]", [Pause(LONGEST_PAUSE_S), Pause(0.0)]),
        ('a<break time="500ms"/>b', ["a", Pause(0.5), "b"]),
        ("a<break time = '1s' />b", ["a", Pause(1.0), "b"]),
        ("<BREAK TIME='1s'></BREAK>", [Pause(1.0)]),
        ("<break strength='x-strong'/>", [Pause(1.2)]),
        ("<break strength='none'/>", [Pause(0.0)]),
        ("<break/>", [Pause(0.5)]),
        ("<break strength='weak' time='2s'/>", [Pause(2.0)]),
        ('<speak version="1.1" xmlns="http://www.w3.org/2001/10/synthesis">a</speak>', ["a"]),
        ("<speak>a</speak>b", ["ab"]),
        ("[pause 0.0005s]", [Pause(0.0)]),
        ("a < b, <b>c</b> [d] [paused] [pause", ["a < b, <b>c</b> [d] [paused] [pause"]),
        ("<breakfast> <speaker> [[pause 1s]]", ["<breakfast> <speaker> [", Pause(1.0)]),
        (r"\[pause 1s] \<break/> \n \\x \[a]", [r"[pause 1s] <break/> \n \\x \[a]"]),
    ],
)
def test_pauses_are_found(text, parts):
    assert TextFrontEnd().whole(text) == parts


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_no_short_text_is_a_long_silence(caplog, size):
    """60 s, and 0.07 s for each character before a pause that is no blank: 100 allow 7 s."""
    text = "[pause 10s]" * 7 + "a" * 100 + " " * 500 + "[pause 7s][pause 1ms]b"
    stream, parts = TextFrontEnd(lenient=True).stream(), []
    for start in range(0, len(text), size):
        parts += stream.push(text[start : start + size])
    parts += stream.finish()
    assert [part.seconds for part in parts if isinstance(part, Pause)] == [10.0] * 6 + [7.0]
    assert caplog.text.count("over 60 seconds longer than the speech before them") == 1
    TextFrontEnd().whole("[pause 10s]" * 6 + "a")
    with pytest.raises(TextError, match="the text's pauses are together over 60 seconds longer"):
        TextFrontEnd().whole(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pause xyz]", "[pause 500ms], [pause 1.5s]"),
        ("[pause]", "Write a backslash"),
        ("[pause 11s]", "at most 10 seconds"),
        *[(f"[pause {wrong}", "expected one of") for wrong in ("5]", "-1s]", "1.2.3s]", "5", "x" * 2000)],
        *[(f"<break {wrong}", "expected one of") for wrong in ("time='x'/>", "time=1s/>", "foo='1s'/>", "time='1s'")],
        ("<break strength='loud'/>", "strength must be one of none, x-weak"),
        ("<prosody rate='slow'>a</prosody>", "which is not supported"),
        ("a</say-as>", "which is not supported"),
    ],
)
def test_a_tag_that_cannot_be_followed_is_refused(text, message):
    with pytest.raises(TextError, match=re.escape(message)):
        TextFrontEnd().whole(text)


def test_pauses_and_a_lexicon_let_prose_through_at_once():
    for front_end in (TextFrontEnd(), TextFrontEnd(lexicon=Lexicon({"xylophone": ""}))):
        stream = front_end.stream()
        for character in PROSE:
            assert stream.push(character) == [character]
    assert TextFrontEnd().stream().push("a [pau") == ["a "]
    assert TextFrontEnd().stream().push("a [pat") == ["a [pat"]


# ---------------------------------------------------------------- all together


def test_the_order_is_pauses_normalizer_lexicon():
    lexicon = Lexicon({"five": "5ive", "kilometers": "kays", "one": "won"})
    front_end = TextFrontEnd("english", "auto", lexicon)
    assert front_end.whole("**It is 5 km.** [pause 500ms] One") == ["It is 5ive kays.", Pause(0.5), "won"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("It costs 5[pause 1s]km", ["It costs five", Pause(1.0), "km"]),
        ("[pause 1s] *** [pause 2s]", [Pause(1.0), Pause(2.0)]),
        ("<think>wait [pause 1s] more</think>Yes.", ["Yes."]),
        ("```\n[pause 1s]\n```\nYes.", ["Yes."]),
        ("- a\n[pause 1s]\n- b", ["a.", Pause(1.0), "b."]),
        ("<prosody rate='x'>slow</prosody> [pause 1s]", ["slow ", Pause(1.0)]),
        ("[pause 0ms]a[pause 10s]", [Pause(0.0), "a", Pause(10.0)]),
        (r"\[pause 1s]", ["pause 1s".replace("1s", "one second")]),
        ("a\U00100010b", ["ab"]),
    ],
)
def test_pauses_go_through_the_normalizer(text, parts):
    assert TextFrontEnd("english", "auto").whole(text) == parts


def test_without_normalizing_text_stays_as_it_is():
    text = "# a < b **5** 😀\n\U00100010 <b>"
    assert TextFrontEnd("english").whole(text) == [text]
    assert TextFrontEnd("english", lexicon=Lexicon({"a": "A"})).whole(text) == [text.replace("a", "A")]


def test_text_is_a_string_and_normalize_has_two_values():
    with pytest.raises(TextError, match="must be a string, got bytes"):
        TextFrontEnd().whole(b"a")
    with pytest.raises(RequestError, match="off, auto"):
        TextFrontEnd("english", "on")


def test_the_front_end_needs_neither_torch_nor_asyncio():
    code = "import sys, spoken_text.front_end; print({'torch', 'asyncio'} & set(sys.modules))"
    assert run_python(code) == "set()\n"


# ---------------------------------------------------------------- a text that several utterances speak


def read(sentences: list[str], **how) -> list[list]:
    """What is spoken of each sentence of one text."""
    front_end, reading = TextFrontEnd("english", **({"normalize": "auto", "lenient": True} | how)), Reading()
    return [reading.sentence(front_end, sentence) for sentence in sentences]


@pytest.mark.parametrize(
    ("sentences", "spoken"),
    [
        (["<think>The user says hello.", " I should greet.", " Short.</think> Hello!"], [[], [], ["Hello!"]]),
        (["<think>Hm. <b>Yes.</b>", " No.", "</think>", " Hello!"], [[], [], [], ["Hello!"]]),
        (["Yes. <!-- one.", " two.", " three. --> No."], [["Yes."], [], ["No."]]),
        (["Yes.", " <!", "-- one.", " two. -->", " No."], [["Yes."], [], [], [], ["No."]]),
        (["Look:\n```py\nx = 1.", " y = 2\n```\nDone."], [["Look:"], ["Done."]]),
        (["See [it](https://a.b.", "c) now.", " Yes."], [["See it"], ["now."], ["Yes."]]),
        (['<a title="One.', ' Two.">Yes.</a>'], [[], ["Yes."]]),
        (["**Bold.**", " It is 5 km.", " At $5."], [["Bold."], ["It is five kilometers."], ["At five dollars."]]),
        (["That is great!", " \U0001f389", " ...", " Yes."], [["That is great!"], [], [], ["Yes."]]),
        (["- One", "\n- Two", "\nThree"], [["One."], ["Two."], ["Three"]]),
        (["2.", " Go."], [["two,"], ["Go."]]),
    ],
)
def test_what_a_sentence_leaves_open_goes_on_in_the_next(sentences, spoken):
    said = [[part.strip() for part in parts] for parts in read(sentences)]
    assert [[part for part in parts if part] for parts in said] == spoken


@settings(max_examples=300)
@given(words=st.lists(_MARKED, min_size=1, max_size=12), cuts=st.sets(st.integers(1, 11)))
def test_prose_stays_as_it_is_however_it_is_cut_into_sentences(words, cuts):
    assume(all(any(c.isalnum() for c in word) for word in words))
    bounds = [0, *sorted(cut for cut in cuts if cut < len(words)), len(words)]
    sentences = [" ".join(words[a:b]) for a, b in itertools.pairwise(bounds)]
    for normalize in ("auto", "off"):
        said = read([sentences[0], *(f" {sentence}" for sentence in sentences[1:])], normalize=normalize)
        assert ["".join(parts).strip() for parts in said] == sentences


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("Yes [pause] no.", "Yes  no."),
        ("Yes [pause 20s] no.", "Yes  no."),
        ("[pause the music] now.", "[pause the music] now."),
        ("Yes <break time=500ms/> no.", "Yes  no."),
        ("It is <emphasis>fine</emphasis>.", "It is fine."),
        ("The <audio> tag.", "The  tag."),
        ("The <audio tag is old.", "The <audio tag is old."),
        ("The <audio\ntag.", "The <audio\ntag."),
        ("The <audio <voice> tag.", "The <audio  tag."),
        ("Hello \ud83d there \ude00.", "Hello  there ."),
        ("<" + "break " * 50 + ">", "<" + "break " * 50 + ">"),
    ],
)
def test_what_a_language_model_writes_is_no_error(text, spoken):
    """However it is cut."""
    front_end = TextFrontEnd("english", lenient=True)
    assert front_end.whole(text) == [spoken]
    stream = front_end.stream()
    assert "".join([*itertools.chain.from_iterable(map(stream.push, text)), *stream.finish()]) == spoken
    if not has_half_characters(text) and not text.startswith("[pause the"):
        with pytest.raises(TextError):
            TextFrontEnd("english").whole(text)


@pytest.mark.parametrize("text", ["...", "---", "\U0001f389", " \n", "[pause]", "[pause 1s]", "<emphasis/>"])
@pytest.mark.parametrize("normalize", ["off", "auto"])
def test_text_without_words_is_nothing(text, normalize):
    assert not [part for part in read([text], normalize=normalize)[0] if isinstance(part, str) and part.strip()]
    if text not in ("[pause]", "<emphasis/>"):
        with pytest.raises(NoWordsError):
            spoken_texts(TextFrontEnd("english", normalize), text)


@pytest.mark.parametrize(
    "text", ["5", "100 %", "€5", "½", "٣", "π", "*5*", "... Hi", "Hi ... [pause 1s] ... [pause 1s] Hi"]
)
@pytest.mark.parametrize("normalize", ["off", "auto"])
def test_a_letter_or_a_digit_is_something_to_speak(text, normalize):
    said = spoken_texts(TextFrontEnd("english", normalize), text)
    assert [any(map(str.isalnum, part.text)) for part in said] == [True] * (1 + ("pause" in text))


@pytest.mark.parametrize(
    ("text", "ends"),
    [("Hello.", 1), ("Hello. ", 1), ('He said "no."', 1), ("**Done!**", 1), ("Ah! \U0001f389", 1), ("好。", 1),
     ("the list:\n\n", 1), ("Yes \U0001f389", 0), ("Hello", 0), ("e.g., ", 0), ("3.5", 0), ("well,", 0), ("", 0)],
)  # fmt: skip
def test_a_sentence_has_ended_behind_its_mark(text, ends):
    assert ends_sentence(text) == bool(ends)


def test_blanks_around_a_text_are_no_plain_text():
    """They change its tokens, so only a caller that strips them may take the short cut."""
    front_end = TextFrontEnd("english", normalize="auto")
    assert front_end.leaves_alone("Hello there.") and not front_end.leaves_alone(" Hello there.")
    assert read([" Hello there."]) == [[" Hello there."]]
