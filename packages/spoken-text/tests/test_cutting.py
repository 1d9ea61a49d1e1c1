"""Where long text is cut, in many scripts."""

import random

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from spoken_text.cutting import ends_with_mark, sentences_of, split_evenly, split_sentences, split_to_fit

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
CUTS = [
    ("你今天好吗?今天天气很好.我们去公园走走吧!好的,走。", 12, "你今天好吗?|今天天气很好.|我们去公园走走吧!|好的,走。"),
    ("他说……我不知道……后来他走了，再也没有回来。", 10, "他说……我不知道……|后来他走了，|再也没有回来。"),
    ("价格是3.50元左右,大家都说好", 12, "价格是3.50元左右,|大家都说好"),
    ("床前明月光\n疑是地上霜\n举头望明月\n低头思故乡", 8, "床前明月光|疑是地上霜|举头望明月|低头思故乡"),
    ("Roses are red\nViolets are blue\nSugar is sweet", 20, "Roses are red|Violets are blue|Sugar is sweet"),
    ("मैं घर जा रहा हूँ। वह स्कूल गया।तुम कहाँ हो?", 20, "मैं घर जा रहा हूँ।|वह स्कूल गया।|तुम कहाँ हो?"),
    ("هل أنت بخير؟ نعم، أنا بخير؛ شكرا لك.", 20, "هل أنت بخير؟|نعم، أنا بخير؛|شكرا لك."),
    ("안녕하세요. 저는 학생입니다! 만나서 반갑습니다", 12, "안녕하세요.|저는 학생입니다!|만나서 반갑습니다"),
    (
        "Dr. Smith met Mr. Jones. They talked about 3.5 things.",
        30,
        "Dr. Smith met Mr. Jones.|They talked about 3.5 things.",
    ),
    ("Es war am 3. Oktober sehr kalt. Wirklich.", 32, "Es war am 3. Oktober sehr kalt.|Wirklich."),
    (
        "Then, e.g. on Jan. 5, he came back. See fig. 3 of it.",
        36,
        "Then, e.g. on Jan. 5, he came back.|See fig. 3 of it.",
    ),
    ("Was ist z. B. mit Dr. Müller, d. h. unserem Arzt?", 40, "Was ist z. B. mit Dr. Müller,|d. h. unserem Arzt?"),
    ("1. Erstens\n2. Drittens ist es lang", 15, "1. Erstens|2. Drittens ist|es lang"),
    ("Γεια σου. Τι κάνεις; Καλά.", 12, "Γεια σου.|Τι κάνεις;|Καλά."),
    ("ሰላም። እንዴት ነህ፧", 8, "ሰላም።|እንዴት ነህ፧"),
    ("یہ ایک جملہ ہے۔ یہ دوسرا ہے۔", 15, "یہ ایک جملہ ہے۔|یہ دوسرا ہے۔"),
    ("မင်္ဂလာပါ။ နေကောင်းလား။", 12, "မင်္ဂလာပါ။|နေကောင်းလား။"),
    ("He came. Nobody, however, had expected him to.", 30, "He came.|Nobody, however,|had expected him to."),
    ("In 2\u00a0000\u00a0000 cases", 11, "In|2\u00a0000\u00a0000|cases"),
    ("hello. how are you. i am fine", 12, "hello.|how are you.|i am fine"),
    ("一个很长的句子没有任何标点符号", 6, "一个很长的句|子没有任何标|点符号"),
    (f"{FAMILY}{FAMILY} ok", 8, f"{FAMILY}|{FAMILY}|ok"),
    ("A paragraph.\n\nAnother one, with a clause.", 28, "A paragraph.|Another one, with a clause."),
    ("“走吧！”他说。“好。”", 8, "“走吧！”他说。|“好。”"),
    ("あ" * 5 + "っ" + "あ" * 5, 5, "ああああ|あっあああ|ああ"),
    (
        "彼は「行こう！」と言って、走り出した。そして消えた。",
        20,
        "彼は「行こう！」と言って、走り出した。|そして消えた。",
    ),
    (
        "これは長い文章で句読点がまったくないのですがどこで切るべきでしょうか",
        18,
        "これは長い文章で|句読点がまったくないのですがどこで|切るべきでしょうか",
    ),
    ("ラーメンとチャーハンとギョーザをください", 8, "ラーメンと|チャーハンと|ギョーザを|ください"),
    ("그는 “가자!” 하고 말했다. 그리고 떠났다.", 18, "그는 “가자!” 하고 말했다.|그리고 떠났다."),
    ("안녕하세요 저는 학생입니다 오늘 날씨가 좋네요", 16, "안녕하세요 저는 학생입니다|오늘 날씨가 좋네요"),
    ("她说:“好的.”然后离开了.真的?我不信!", 12, "她说:“好的.”|然后离开了.真的?|我不信!"),
    ("彼は黙った…そして静かに去っていった", 13, "彼は黙った…|そして静かに去っていった"),
    ("第一章　开始\n　　他走了。\n　　她来了。", 8, "第一章　开始|他走了。|她来了。"),
    ("ราคาเท่าไหร่ ลดได้ไหม", 13, "ราคาเท่าไหร่|ลดได้ไหม"),
]


@pytest.mark.parametrize("text, most, pieces", CUTS)
def test_cuts(text, most, pieces):
    assert split_sentences(text, most) == pieces.split("|")


def test_lines_that_were_broken_for_their_length_are_no_verses():
    """Prose is cut at sentences, though lines end within them."""
    text = (
        "It was a bright cold day in April, and the clocks were\nstriking thirteen that afternoon. He pressed his chin "
        "into\nhis breast to escape the vile wind. Then he went on."
    )
    assert [piece[-1] for piece in split_sentences(text, 100)] == ["."] * 2


SCRIPTS = [
    "abc déf ",
    "привет мир ",
    "你好。今天",
    "こんにちは、",
    "สวัสดี ครับ",
    "안녕 하세요. ",
    "हूँ। गया ",
    "؟ نعم، ",
    "!?.…,;:\n\n ",
    f"{FAMILY}🇩🇪 ",
]


@given(st.data(), st.integers(1, 60))
def test_no_cluster_is_cut_and_nothing_is_lost(data, most):
    text = data.draw(
        st.lists(st.sampled_from("".join(SCRIPTS)) | st.sampled_from([FAMILY, "e\u0301"]), max_size=120).map("".join)
    )
    for pieces in (split_evenly(text, most), sentences_of(text)):
        assert "".join(pieces) == text
        assert [c for piece in pieces for c in regex.findall(r"\X", piece)] == regex.findall(r"\X", text)
    for pieces in (split_evenly(text, most), split_sentences(text, most)):
        assert all(len(piece.strip()) <= most or len(regex.findall(r"\X", piece.strip())) == 1 for piece in pieces)
        assert "".join("".join(pieces).split()) == "".join(text.split())


@given(st.lists(st.text("abcdefghéßжя", min_size=1, max_size=10), min_size=1, max_size=80), st.integers(11, 60))
def test_no_word_is_cut_that_fits(words, most):
    text = " ".join(words)
    for pieces in (split_evenly(text, most), split_sentences(text, most)):
        assert [word for piece in pieces for word in piece.split()] == words


def test_a_stack_of_marks_that_no_language_has_is_cut():
    assert max(map(len, split_sentences("a" + "\u0301" * 500, 100))) <= 100


@pytest.mark.parametrize("seed", range(3))
def test_tiny_parts_are_joined_evenly_too(seed):
    """Above a thousand parts of a few characters another way is taken."""
    rng = random.Random(seed)
    text = "".join(rng.choice(["Hm. ", "好。", "No? ", "Ja! "]) for _ in range(3000))
    lengths = [len(piece.strip()) for piece in split_evenly(text, 300)]
    assert max(lengths) <= 300 and min(lengths) > 250


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("behind", ["", " Yes, it is so."])
def test_a_sentence_without_marks_is_cut_into_even_parts(seed, behind):
    """Short words have more tokens for their letters than long ones."""
    rng = random.Random(seed)
    text = " ".join(rng.choices("the quick brown foxes are jumping over a lazy dog".split(), k=rng.randint(70, 300)))
    pieces = split_to_fit(f"{text}.{behind}", lambda piece: len(piece.split()) + len(piece) // 4, 100)
    lengths = [len(piece) for piece in pieces if piece != behind.strip()]
    assert min(lengths) > 0.8 * max(lengths) and " ".join(pieces) == f"{text}.{behind}"


@pytest.mark.parametrize(
    "text, ends", [("Yes.", True), ("好。”", True), ("गया।", True), ("؟", True), ("well,", False), ("", False)]
)
def test_ends(text, ends):
    assert ends_with_mark(text) == ends
