"""A text in pieces of at most so many characters, and its sentences."""

import math

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from spoken_text.cutting import sentences_of, split_evenly

words = st.text("abcdef", min_size=1, max_size=12)
sentences = st.builds(
    lambda words, mark, gap: " ".join(words) + mark + gap,
    st.lists(words, min_size=1, max_size=40),
    st.sampled_from([".", "!", "?", ",", ""]),
    st.sampled_from([" ", "  ", "\n"]),
)
texts = st.lists(sentences, min_size=1, max_size=30).map("".join)


@given(texts | st.text(max_size=400), st.integers(1, 300))
def test_joined_the_pieces_are_the_text_and_none_is_too_long(text, most):
    pieces = split_evenly(text, most)
    assert "".join(pieces) == text
    assert all(len(piece.strip()) <= most or regex.fullmatch(r"\X", piece.strip()) for piece in pieces)
    assert "".join(sentences_of(text)) == text


@given(st.lists(st.integers(3, 60), min_size=1, max_size=40), st.integers(60, 200))
def test_as_few_pieces_as_can_be_none_of_them_a_stub(lengths, most):
    """Of sentences that all fit."""
    text = " ".join("X" * (length - 1) + "." for length in lengths)
    pieces = [len(piece.strip()) for piece in split_evenly(text, most)]
    greedy, room = 0, -1
    for length in lengths:
        if room < length + 1:
            greedy, room = greedy + 1, most + 1
        room -= length + 1
    assert len(pieces) == greedy
    mean = sum(pieces) / len(pieces)
    for one, other in zip(pieces, pieces[1:], strict=False):
        # Could one sentence change sides, they would not be more even.
        assert abs(one - other) <= 61 or min(one, other) + 61 > most or max(one, other) - 61 < mean


def test_a_paragraph_a_little_too_long_becomes_two_halves():
    text = "This is a sentence of some length, and more. " * 7
    lengths = [len(piece.strip()) for piece in split_evenly(text, 300)]
    assert len(text) > 300 and sorted(lengths) == [134, 179]


@given(st.text("abc ,", min_size=400, max_size=900).filter(lambda text: len(text.strip()) > 300))
def test_a_sentence_that_is_too_long_is_cut_evenly_too(text):
    lengths = [len(piece.strip()) for piece in split_evenly(text, 300)]
    assert len(lengths) <= math.ceil(len(text) / 300) + 1


def test_a_text_of_hundred_pages_is_cut_at_once():
    """Time that is linear in the text, also without any paragraph, sentence or word."""
    for text in ("A sentence of some length. " * 12_000, "word " * 60_000, "x" * 300_000):
        assert len(split_evenly(text, 300)) <= len(text) / 270 + 1


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Mr. Smith met Dr. J. R. Brown. He left.", ["Mr. Smith met Dr. J. R. Brown. ", "He left."]),
        ('"Look!" he said. "No." She left.', ['"Look!" he said. ', '"No." ', "She left."]),
        ("z. B. hier. Gut?", ["z. B. hier. ", "Gut?"]),
        ("好的。是吗？“好！”", ["好的。", "是吗？", "“好！”"]),
    ],
)
def test_sentences(text, expected):
    assert sentences_of(text) == expected
