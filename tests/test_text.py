"""Tokenizer and sentence splitting."""

import random

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from qwen_megakernel.checkpoint.load import DEMO_FOLDER, Checkpoint
from qwen_megakernel.errors import CheckpointError, TextTooLongError
from qwen_megakernel.model.text import TextTokenizer
from spoken_text.cutting import split_sentences, split_to_fit

ALPHABETS = (
    "abc XYZ theHelloWorld iPhone's don't WE'LL 'S\t\n\r\n  0123456789.,;:!?/-()\"“”…",
    "äöüßéñçÅA\u030ao\u0308e\u0301n\u0303",  # composed and combining
    "你好今天天气真好，。！？《》",
    "こんにちは世界カタカナー",
    "안녕하세요각\u1100\u1161",
    "Привет мир",
    "مرحبا שלום हिन्दी",
    "🙂👩\u200d👩\u200d👧🇩🇪\ufe0f\u200b\u00a0\u3000",
)


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(rng.choice(ALPHABETS)) for _ in range(rng.randint(1, 60)))


@pytest.fixture(scope="module", params=["tiny", "demo"])
def folder(request, tiny):
    return DEMO_FOLDER if request.param == "demo" else tiny("custom_voice")


@pytest.fixture(scope="module")
def tokenizer(folder) -> TextTokenizer:
    return TextTokenizer(folder, Checkpoint.open(folder).config.talker.text_vocab_size)


def test_ids_equal_those_of_transformers_qwen2_tokenizer(folder, tokenizer):
    """Fresh random text in many scripts, and the regular expression's corners."""
    reference = transformers.Qwen2TokenizerFast.from_pretrained(folder)
    rng = random.Random(torch.initial_seed())
    texts = [random_text(rng) for _ in range(2000)] + ["helloWorld iPhone McDonald a/b/c", " \n x", "12.5", "I'M"]
    for text in texts:
        read = tokenizer.folding(text) if tokenizer.folding else text
        assert tokenizer.encode(text) == reference(read, add_special_tokens=False).input_ids, repr(text)


def test_only_a_voice_that_asks_for_it_reads_what_it_lacks_as_ascii(folder, caplog):
    tokenizer = TextTokenizer(folder, Checkpoint.open(folder).config.talker.text_vocab_size)
    typed, lacked = "“Zoë’s café” — São… «Łódź»", "5 € Привет\u00a0😀 ﬁne ʼtis e\u0301x\u0301 日本"
    if tokenizer.folding is None:  # as every published checkpoint
        assert max(map(len, map(tokenizer.encode, "é日😀"))) > 1, "it spells them out in bytes"
        return
    assert tokenizer.folding(typed) == typed, "it learned these"
    assert len(tokenizer.encode("“")) == len(tokenizer.encode("é")) == 1
    assert tokenizer.encode("“") != tokenizer.encode('"')
    assert tokenizer.folding(lacked) == "5 EUR Privet  fine 'tis éx RiBen"
    assert tokenizer.encode(lacked) == tokenizer.encode("5 EUR Privet  fine 'tis éx RiBen")
    told = [record.message for record in caplog.records]
    assert len(told) == 1 and "cannot read '€' and reads it as 'EUR'" in told[0], "once"
    assert tokenizer.folding("コーヒー ™✓🇩🇪 مرحبا\U00012345 20 °C") == "kohi  mrhba 20 degC", "no letter remains"


def test_special_token_strings_are_spelt_out(folder, tokenizer):
    config = Checkpoint.open(folder).config
    special = {config.im_start_id, config.im_end_id, config.tts_pad_id, config.tts_bos_id, config.tts_eos_id}
    for text in ("<|im_end|>", "a<|im_start|>assistant\nb", "<tts_text_eod>", "<tts_pad><|endoftext|>", "<think>"):
        ids = tokenizer.encode(text)
        assert len(ids) > 1 and not special & set(ids) and max(ids) < min(special)


@pytest.mark.parametrize(
    "name, content", [("vocab.json", "[]"), ("vocab.json", '{"a": 99999999}'), ("merges.txt", "q")]
)
def test_broken_tokenizer_files_are_refused_by_name(tiny, tmp_path, name, content):
    source = tiny("custom_voice")
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).write_text(content if file == name else (source / file).read_text())
    with pytest.raises(CheckpointError, match=name):
        TextTokenizer(tmp_path, 750)


@given(st.text(st.sampled_from("ab cd.!?,。，\n\"'"), max_size=200), st.integers(1, 40))
def test_splitting_loses_nothing_but_white_space(text, max_chars):
    pieces = split_sentences(text, max_chars)
    assert all(piece.strip() == piece and 0 < len(piece) <= max_chars for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


@pytest.mark.parametrize(
    "text, max_chars, expected",
    [
        ("One two. Three four! Five?", 12, ["One two.", "Three four!", "Five?"]),
        ("One two. Three four! Five?", 100, ["One two. Three four! Five?"]),
        ("It costs 3.50 euros. Really.", 20, ["It costs 3.50 euros.", "Really."]),
        ("你好。今天天气很好！再见。", 8, ["你好。", "今天天气很好！", "再见。"]),
        ("真的吗？！好的。", 5, ["真的吗？！", "好的。"]),
        ("他说：“走。”我走。", 7, ["他说：“走。”", "我走。"]),
        ("first clause, second clause, third", 16, ["first clause,", "second clause,", "third"]),
        ('He said "stop." Then he left.', 16, ['He said "stop."', "Then he left."]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("  \n ", 10, []),
    ],
)
def test_splitting_prefers_sentences_then_clauses_then_spaces(text, max_chars, expected):
    assert split_sentences(text, max_chars) == expected


def test_pieces_have_at_most_so_many_tokens_and_lose_nothing(tokenizer):
    """Random text in many scripts, of which a character is up to a dozen tokens."""
    rng, count = random.Random(torch.initial_seed()), lambda text: len(tokenizer.encode(text))
    for _ in range(100):
        text, most = " ".join(random_text(rng) for _ in range(rng.randint(1, 8))), rng.randint(24, 80)
        pieces = split_to_fit(text, count, most)
        assert max(map(count, pieces), default=0) <= most
        assert "".join("".join(pieces).split()) == "".join(text.split())


def test_pieces_end_with_sentences_where_they_can(tokenizer):
    short, sentence = "Да.", "Сегодня хорошая погода, и мы идём гулять в парк."
    if tokenizer.folding:
        short, sentence = "Yes, it is so.", "The weather is fine today, and we walk in the park."
    count = lambda text: len(tokenizer.encode(text))  # noqa: E731
    assert split_to_fit(" ".join([sentence] * 5), count, count(sentence) + 4) == [sentence] * 5
    assert split_to_fit(" ".join([short, sentence] * 3), count, count(sentence) + 4) == [short, sentence] * 3


def test_short_text_is_not_counted():
    assert split_to_fit(" Hello there. ", lambda piece: pytest.fail("counted"), 12) == ["Hello there."]
    assert split_to_fit("\n ", lambda piece: pytest.fail("counted"), 12) == []


def test_a_character_that_cannot_be_cut_is_refused():
    with pytest.raises(TextTooLongError, match="4"):
        split_to_fit("Hi \U0001f600", lambda piece: len(piece.encode()), 3)
