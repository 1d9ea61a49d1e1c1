"""Text -> token ids, and long text -> pieces that fit a slot.

The tokenizer is byte-level BPE with Qwen2's own pre-tokenizer, built here from the vocabulary and the merges of
tokenizer.json, or of vocab.json and merges.txt, and nothing else. That avoids two traps. Some loaders take another
model's pre-tokenizer for a local folder, which splits camel-case words differently. And this tokenizer knows no special
tokens: "<|im_end|>" inside user text becomes ordinary characters, so user text cannot end its turn.
"""

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from qwen_megakernel.checkpoint.json_object import read_json
from qwen_megakernel.errors import CheckpointError, RequestError, TextError, TextTooLongError

_QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English contractions
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # a run of letters with the one character before it
    r"|\p{N}"  # digits one by one
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # punctuation
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # white space
)


_BOTH, _VOCAB, _MERGES = "tokenizer.json", "vocab.json", "merges.txt"


class TextTokenizer:
    """NFC, Qwen2's pre-tokenizer, byte-level BPE. No special tokens; nothing is added to the text."""

    def __init__(self, folder: Path, vocab_size: int):
        """`folder` holds tokenizer.json, which wins as in transformers, or vocab.json and merges.txt. `vocab_size` is
        the rows of the text embedding. Raises CheckpointError: a file is missing or broken, or an id is beyond the
        embedding."""
        both = (folder / _BOTH).is_file()
        named, merged = (folder / name for name in ((_BOTH, _BOTH) if both else (_VOCAB, _MERGES)))
        if both:
            model = read_json(named).child("model")
            model.only("type", "BPE")
            vocab, listed = model.get("vocab", dict), model.get("merges", list)
        elif not named.exists():
            raise CheckpointError(f"{folder}: there is neither {_BOTH} nor {_VOCAB}; copy the base checkpoint's")
        else:
            vocab, listed = read_json(named).raw, None
        if not vocab or not all(type(i) is int and 0 <= i < vocab_size for i in vocab.values()):
            raise CheckpointError(f"{named}: every id must be an integer in 0..{vocab_size - 1}")
        try:
            if listed is None:
                lines = merged.read_text(encoding="utf-8").split("\n")
                listed = [line for line in lines if line and not line.startswith("#version")]
            # A merge is "left right", or in newer tokenizer.json files [left, right].
            pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in listed)
            merges = [(left, right) for left, right in pairs]
            bpe = models.BPE(vocab=vocab, merges=merges)
        except Exception as error:  # tokenizers raises plain Exception for a merge whose parts are unknown
            raise CheckpointError(f"{merged}: {error}") from None
        self._tokenizer = Tokenizer(bpe)
        self._tokenizer.normalizer = normalizers.NFC()
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN2_PIECES), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises TextError for lone surrogates."""
        check_unicode(text)
        return self._tokenizer.encode(text, add_special_tokens=False).ids


LONGEST_RUN = 16  # how many characters without a boundary `PieceEncoder` holds back at most
_LONGEST_HELD = 1000  # characters; encoding then takes time linear in a piece's size, not quadratic


class PieceEncoder:
    """Token ids of a text that arrives in pieces. An id is given out as soon as no later character can change it.

    A cut is safe at a boundary: where Qwen2's pre-tokenizer ends a pre-token whatever comes next. One is after a word
    or a digit if the next character is neither letter nor combining mark. Another is before a blank that follows
    something visible. With cuts there, the ids equal those of the whole text, however it was cut into pieces.

    A run of more than `LONGEST_RUN` characters without a boundary (Chinese or Japanese between two marks, a very long
    word) is cut all the same, always at the same character. Ids may differ from those of the whole text only there.
    """

    def __init__(self, encode: Callable[[str], list[int]], before: str = ""):
        """`encode`: text -> ids (`TextTokenizer.encode`). `before`: characters before the text, encoded with it."""
        self._encode = encode
        self._held = before
        self._run = len(before)  # characters of `_held` after its last boundary
        self._foreign = len(before)  # characters of `_run` that come from `before`

    @property
    def held(self) -> int:
        """How many characters of the text wait, because the next one may change their ids."""
        return len(self._held) - self._foreign

    def push(self, piece: str) -> list[int]:
        """Take a piece and return the ids that are now final. Raises TextError for lone surrogates, and takes none."""
        check_unicode(piece)
        ids: list[int] = []
        for character in piece:
            if self._held and _ends(self._held[-1], character):
                self._run = self._foreign = 0
                if len(self._held) > _LONGEST_HELD:
                    ids += self.flush()
            elif self._run - self._foreign >= LONGEST_RUN and not _joins(character):
                ids += self.flush()
            self._held += character
            self._run += 1
        settled = len(self._held) - self._run
        if settled > 0:
            ids += self._encode(self._held[:settled])
            self._held = self._held[settled:]
        return ids

    def flush(self) -> list[int]:
        """Ids of all characters that were held back."""
        ids = self._encode(self._held) if self._held else []
        self._held = ""
        self._run = 0
        self._foreign = 0
        return ids


def _ends(last: str, following: str) -> bool:
    """Is there a boundary between these two characters?"""
    kind, then = unicodedata.category(last)[0], unicodedata.category(following)[0]
    if kind in "LN":
        return then != "M" and (kind == "N" or then != "L")
    return following in " \t\u3000" and not last.isspace()


def _joins(character: str) -> bool:
    """May NFC merge the character with the one before it? It may with a combining mark or a later part of a Hangul
    syllable."""
    return unicodedata.category(character)[0] == "M" or "\u1160" <= character <= "\u11ff"


def check_unicode(text: str, name: str = "text") -> None:
    """Raises TextError for lone surrogates, which have no UTF-8 form."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(f"{name} must be valid Unicode: {error}") from None


# A sentence ends after its marks and closing quotes: before white space, in Chinese and Japanese anywhere.
_SENTENCE_END = re.compile(
    r"(?<=[.!?…][\"'”’)\]])\s+|(?<=[.!?…])\s+|(?<=[。！？；])(?![。！？；”’」』）])|(?<=[。！？；][”’」』）])|\n\s*\n"
)
_CLAUSE_END = re.compile(r"(?<=[,;:—])\s+|(?<=[，、；：])")
_SPACE = re.compile(r"\s+")
# A full stop after one of these, or after a single letter, ends no sentence.
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|Nr|bzw|[^\W\d_])\.\s+$")
_QUOTED = re.compile(r"[.!?…][\"'”’)\]]\s+$")  # before a small letter it ends no sentence either: "No!" he said.
_ENDED = re.compile(r"[.!?…。！？；][\"'”’)\]」』）]*\s*$")


def split_sentences(text: str, max_chars: int = 300) -> list[str]:
    """Cut long text at sentence ends into pieces of at most `max_chars` characters.

    A piece takes as many whole sentences as fit. A sentence that is longer by itself is cut at clauses, then at white
    space, then anywhere. Short text comes back whole; blank text gives an empty list.
    """
    if max_chars < 1:
        raise RequestError(f"max_chars must be at least 1, got {max_chars}")
    if len(whole := text.strip()) <= max_chars:
        return [whole] if whole else []
    pieces: list[str] = []
    for fragment in _fragments(text, max_chars, (_SENTENCE_END, _CLAUSE_END, _SPACE)):
        if pieces and len((pieces[-1] + fragment).strip()) <= max_chars:
            pieces[-1] += fragment
        else:
            pieces.append(fragment)
    return [piece.strip() for piece in pieces if piece.strip()]


def split_to_fit(text: str, count: Callable[[str], int], most: int) -> list[str]:
    """Cut text like `split_sentences`, but into pieces of at most `most` tokens.

    A piece with more tokens is cut again, into pieces of as many characters as have `most` tokens on average. A piece
    of at most `most` bytes is not counted, because every token stands for at least one byte. `count` gives the number
    of tokens of a text. Raises TextTooLongError: a single character has more tokens. TextError: lone surrogates.
    """
    check_unicode(text)
    pieces: list[str] = []
    left = [whole] if (whole := text.strip()) else []
    while left:
        piece = left.pop(0)
        if len(unicodedata.normalize("NFC", piece).encode()) <= most or (tokens := count(piece)) <= most:
            pieces.append(piece)
        elif len(piece) > 1:
            left[:0] = split_sentences(piece, max(1, len(piece) * most // tokens))
        else:
            raise TextTooLongError(f"{piece!r} has {tokens} tokens, but a piece of the text may have at most {most}")
    return pieces


def _fragments(text: str, max_chars: int, ends: tuple[re.Pattern[str], ...]) -> Iterator[str]:
    """Cut after every end of the first kind. Cut what is still too long after every end of the next kind. The fragments
    joined are the text."""
    for fragment in _cut(text, ends[0]):
        if len(fragment.strip()) <= max_chars:
            yield fragment
        elif len(ends) > 1:
            yield from _fragments(fragment, max_chars, ends[1:])
        else:
            yield from (fragment[start : start + max_chars] for start in range(0, len(fragment), max_chars))


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, each with the white space after it: joined they are the text. A stop after "Mr", "Dr"
    or a single letter ends no sentence, nor does a closing quote before a small letter."""
    sentences: list[str] = []
    for fragment in _cut(text, _SENTENCE_END):
        before = sentences[-1][-40:] if sentences else ""  # its end, so that time is linear in the text
        if _ABBREVIATION.search(before) or fragment[0].islower() and _QUOTED.search(before):
            sentences[-1] += fragment
        else:
            sentences.append(fragment)
    return sentences


def ends_sentence(text: str) -> bool:
    """Does the text end with a mark that ends a sentence? Closing quotes and white space after it do not count."""
    return bool(_ENDED.search(text))


def split_evenly(text: str, max_chars: int) -> list[str]:
    """Cut long text at sentence ends into pieces of at most `max_chars` characters. They are as few as the sentences
    allow, and about equally long. White space at a piece's ends is not counted.

    A sentence that is longer by itself is cut in the same way at clauses, a clause at white space, a word anywhere.
    Each piece has the white space after it: joined they are the text.
    """
    return _split_evenly(text, max_chars, (_CLAUSE_END, _SPACE), sentences_of(text))


def _split_evenly(text: str, max_chars: int, ends: tuple[re.Pattern[str], ...], fragments: list[str]) -> list[str]:
    """`fragments`: joined they are the text. Fragments that are too long are cut at the first of `ends`."""
    if len(text.strip()) <= max_chars:
        return [text]
    parts: list[str] = []
    for fragment in fragments:
        if len(fragment.strip()) <= max_chars:
            parts.append(fragment)
        elif ends:
            parts += _split_evenly(fragment, max_chars, ends[1:], _cut(fragment, ends[0]))
        else:
            length, count = len(fragment), -(-len(fragment) // max_chars)
            cuts = [length * n // count for n in range(count + 1)]
            parts += [fragment[start:end] for start, end in itertools.pairwise(cuts)]
    return _join_evenly(parts, max_chars)


def _join_evenly(parts: list[str], max_chars: int) -> list[str]:
    """Join neighbours into as few texts of at most `max_chars` characters as possible. Of all such joins it takes the
    most even one: the least sum of squared lengths."""
    best = [(0, 0, 0)]  # for the first n parts: texts, sum of squares, where the last text begins
    for end in range(1, len(parts) + 1):
        length, options = 0, []
        for start in range(end - 1, -1, -1):
            length += len(parts[start])
            inside = max(0, length - _blank_ends(parts[start], parts[end - 1]))
            if inside > max_chars and start < end - 1:
                break
            count, squares, _ = best[start]
            options.append((count + 1, squares + inside**2, start))
        best.append(min(options))
    cuts = [len(parts)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][2])
    return ["".join(parts[start:end]) for start, end in itertools.pairwise(reversed(cuts))]


def _blank_ends(first: str, last: str) -> int:
    """How many blanks are before `first` and after `last`."""
    return len(first) - len(first.lstrip()) + len(last) - len(last.rstrip())


def _cut(text: str, ends: re.Pattern[str]) -> list[str]:
    """Cut after every end. The fragments joined are the text."""
    cuts = [0, *(end.end() for end in ends.finditer(text)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(cuts) if start < end]
