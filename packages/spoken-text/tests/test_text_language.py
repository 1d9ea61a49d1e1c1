"""Numbers are read in the model's only language, else in the text's own, which is found once for each text."""

import logging

import pytest
from running import run_python
from test_text_stream import merged

from spoken_text import finder
from spoken_text.finder import LONGEST_WAIT, Candidates, Conversation, language_of
from spoken_text.front_end import Reading, TextFrontEnd
from spoken_text.languages import PUBLISHED
from spoken_text.lexicon import Lexicon
from spoken_text.pauses import Pause

NONE = "language cannot be found"
READ = [
    ("Ich habe 5 Äpfel.", "Ich habe fünf Äpfel."),
    ("It costs $20.", "It costs twenty dollars."),
    ("J'ai 1 chat, 1 voiture et 1 idée.", "J'ai un chat, une voiture et une idée."),
    ("Hola. Cuesta 20 euros.", "Hola. Cuesta veinte euros."),
    ("一共42个", "一共四十二个"),
    ("ここに3人います。", "ここに三人います。"),
    ("около 5 км", "около пяти километров"),
    ("3개 5층", "세 개 오층"),
    ("我的iPhone 15坏了3次。", "我的iPhone 十五坏了三次。"),
    ("<think>The user wants a short answer in English.</think>Hallo. Das macht 5 Euro.", "Hallo. Das macht fünf Euro."),
    ("`the_code = in.english()` ist gut. Es hat 5 Zeilen.", "the code = in.english() ist gut. Es hat fünf Zeilen."),
    ("Das ist Deutsch und bleibt es. There are 5 apples.", "Das ist Deutsch und bleibt es. There are fünf apples."),
]


@pytest.mark.parametrize("written, read", READ)
def test_numbers_are_read_in_the_language_of_the_text_however_it_is_cut(written, read):
    front_end = TextFrontEnd(normalize="auto")
    whole, stream = front_end.whole(written), front_end.stream()
    if "`" not in written:  # how code is read is not this test's matter
        assert whole == [read]
    assert read.split()[-2:] == whole[-1].split()[-2:]
    assert merged([part for character in written for part in stream.push(character)] + stream.finish()) == whole
    stream = front_end.for_text(written).stream()
    assert merged(stream.push(written) + stream.finish()) == whole


@pytest.mark.parametrize("language, languages", [("german", None), (None, ("auto", "german"))])
def test_where_the_language_is_known_nothing_waits(language, languages, monkeypatch):
    monkeypatch.setattr(finder, "_statistics", None)  # it is not even loaded
    front_end = TextFrontEnd(language, "auto", languages=languages)
    front_end.load()
    stream = front_end.stream()
    assert merged(stream.push("Das ")) == ["Das "]
    assert merged(stream.push("kostet 5 Euro,") + stream.finish()) == ["kostet fünf Euro,"]


def test_text_waits_for_its_first_clear_sentence_a_pause_a_flush_or_so_many_characters():
    front_end = TextFrontEnd(normalize="auto")
    stream = front_end.stream()
    assert stream.push("Das ist schön, wir haben 3 Hunde.") == [] and "".join(stream.push(" ")).strip().endswith(
        "drei Hunde."
    )
    assert stream.push("Und ") == ["Und "], "it is clear from here on"
    stream = front_end.stream()
    assert merged(stream.push("Das ist schön, wir haben 3 Hunde [pause 1s]")) == [
        "Das ist schön, wir haben drei Hunde ",
        Pause(1),
    ]
    stream = front_end.stream()
    assert stream.push("Wir haben 3") == [] and merged(stream.settle()) == ["Wir haben drei"]
    assert merged(stream.push(" Hunde und ")) == [" Hunde und "]
    stream = front_end.stream()
    assert merged(stream.push("Hm.") + stream.settle()) == ["Hm."]
    assert merged(stream.push(" Das ist schön. Und ")) == [" Das ist schön. Und "]
    for words in ("la li lu ", "1 2 3 "):
        stream, pushed = front_end.stream(), 0
        while not stream.push(words):
            pushed += len(words)
        assert pushed <= LONGEST_WAIT + len(words)


def test_a_short_text_is_in_the_language_of_the_text_before_it(caplog):
    one = TextFrontEnd(normalize="auto").in_conversation(Conversation())
    assert one.whole("5") == ["5"] and NONE in caplog.text, "nothing was said before"
    assert one.whole("Das kostet 3 Euro.") == ["Das kostet drei Euro."]
    assert one.whole("5") == ["fünf"] and one.stream().push("OK.") == []
    assert TextFrontEnd(normalize="auto").whole("5") == ["5"], "another conversation"


def test_a_turn_keeps_its_language(caplog):
    front_end, reading = TextFrontEnd(normalize="auto"), Reading()
    said = [
        reading.sentence(front_end, text) for text in ("Das ist wirklich sehr schön.", " 5", " There are 5 apples.")
    ]
    assert said == [["Das ist wirklich sehr schön."], ["fünf"], ["There are fünf apples."]]
    reading = Reading()
    said = [reading.sentence(front_end, text) for text in ("Hm.", " Das kostet 5 Euro.")]
    assert said == [["Hm."], ["Das kostet fünf Euro."]] and not caplog.records


@pytest.mark.parametrize("text, warnings", [("5, 6, 7, 8 [pause 1s] 9. 10", 1), ("Um momento.", 0), ("OK", 0)])
def test_a_warning_says_once_that_numbers_stay(text, warnings, caplog):
    stream = TextFrontEnd(normalize="auto").stream()
    given = [part for character in text for part in stream.push(character)]
    given += stream.settle() + stream.push(" 11") + stream.finish() if warnings else stream.finish()
    assert (
        caplog.text.count(NONE) == warnings
        and "Name the language, one of: english" in caplog.text * warnings + "Name the language, one of: english"
    )
    assert not any(isinstance(part, str) and "five" in part for part in given)


def test_a_language_that_the_normalizer_does_not_know_is_told(caplog):
    finder.tell_unread.cache_clear()
    for _ in range(2):
        assert TextFrontEnd("swedish", "auto").whole("Jag har 5 äpplen.") == ["Jag har 5 äpplen."]
        TextFrontEnd(None, "auto", languages=("auto", "swedish"))
    assert [record.getMessage() for record in caplog.records] == [
        "normalize='auto' reads no numbers in 'swedish': they stay as they are written. It reads "
        "english, german, french, spanish, italian, portuguese, russian, chinese, japanese, korean, dutch"
    ]
    caplog.clear()
    TextFrontEnd("swedish", "off")
    assert not caplog.records


def test_only_what_the_model_and_the_normalizer_know_is_found():
    both = Candidates.of(("auto", "english", "swedish", "sichuan_dialect"))
    assert both == Candidates(("english", "chinese"), ("sv",))
    assert language_of("Vi köpte fem äpplen på torget i dag.", both) is None
    assert language_of("We bought five apples at the market today.", both) == "english"
    assert language_of("Hm.", Candidates.of(("english", "german"))) is None, "both are as likely"
    assert language_of("Привет, как дела?", both) is None and language_of("今天很好", both) == "chinese"
    assert language_of("今天很好", Candidates.of(("japanese", "english"))) == "japanese"
    assert Candidates.of(()) == Candidates.of(("auto",)) == Candidates.of(None)
    assert language_of("We bought five apples.", Candidates(("english",), ("xx",))) == "english"
    english = Candidates.of(("english", "chinese"))
    assert language_of("Hm.", english) == "english"


def test_entries_of_a_lexicon_for_one_language_follow_the_text(caplog):
    front_end = TextFrontEnd(lexicon=Lexicon({"a": "b"}, {"german": {"GIF": "Giff"}}))
    assert front_end.whole("Das GIF ist sehr schön.") == ["Das Giff ist sehr schön."]
    assert front_end.whole("The GIF is very beautiful.") == ["The GIF is very beautiful."]
    assert TextFrontEnd(lexicon=Lexicon({"GIF": "Giff"})).stream().push("Das GIF ist ") == ["Das Giff ist "], "no wait"
    assert not caplog.records


def test_a_formula_is_read_once_the_language_is_found():
    reading, front_end = Reading(), TextFrontEnd(normalize="auto")
    for text in ("<b>Hm.</b>", " Das ist wirklich eine schöne Formel: $x = 2$."):
        said = reading.sentence(front_end, text)
    assert said == ["Das ist wirklich eine schöne Formel: x gleich zwei."]


def test_the_statistics_are_imported_when_they_are_needed():
    code = (
        "from qwen_megakernel import TextFrontEnd\nimport sys\nTextFrontEnd(normalize='auto').whole('Hello there.')\n"
    )
    assert "False" in run_python(f"{code}print('py3langid' in sys.modules)")


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.WARNING)


@pytest.mark.parametrize(
    "text",
    [
        "Kupiłem dziś 5 jabłek na rynku w Krakowie.",
        "Jag köpte 5 äpplen på torget i dag.",
        "Vandaag was het weer prachtig en we liepen 12 km langs de rivier.",
    ],
)
def test_a_text_in_a_language_that_nobody_reads_is_not_taken_for_its_neighbour(text, caplog):
    assert TextFrontEnd(normalize="auto").whole(text) == [text] and NONE in caplog.text


def test_dutch_is_found_only_where_it_is_asked_for():
    text = "Vandaag was het mooi weer en we liepen 12 km."
    assert TextFrontEnd(normalize="auto", languages=PUBLISHED).whole(text) == [text]
    both = TextFrontEnd(normalize="auto", languages=("english", "dutch"))
    assert both.whole(text) == ["Vandaag was het mooi weer en we liepen twaalf kilometer."]
    assert both.whole("The weather was fine, so we walked 5 km.") == [
        "The weather was fine, so we walked five kilometers."
    ]
    candidates = Candidates.of(("auto", "english", "german", "dutch"))
    for text in ("Es kamen heute ungefähr fünfzig Leute.", "Wir treffen uns am Montag in Berlin.", "Das ist alles."):
        assert language_of(text, candidates) == "german"
    for text in ("We met in January to talk about it.", "Is that all we have?", "The water is warm in here."):
        assert language_of(text, candidates) == "english"


def test_the_parts_of_a_text_are_not_looked_at_again(caplog):
    one = TextFrontEnd(normalize="auto").in_conversation(Conversation())
    parts = one.for_text("5, 6, 7.\nUnd 8 Uhr?")
    assert parts.whole("Das kostet 5 Euro.") == ["Das kostet 5 Euro."] and caplog.text.count(NONE) == 1
    assert one.for_text("9").whole("9") == ["9"] and caplog.text.count(NONE) == 1, "a conversation is told once"
