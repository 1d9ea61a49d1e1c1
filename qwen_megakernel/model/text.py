"""Text -> token ids.

The tokenizer is byte-level BPE with Qwen2's own pre-tokenizer, built here from the vocabulary and the merges of
tokenizer.json, or of vocab.json and merges.txt, and nothing else. That avoids two traps. Some loaders take another
model's pre-tokenizer for a local folder, which splits camel-case words differently. And this tokenizer knows no special
tokens: "<|im_end|>" inside user text becomes ordinary characters, so user text cannot end its turn.
"""

import unicodedata
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from qwen_megakernel.checkpoint.json_object import MOST_TABLE_BYTES, read_json, read_text
from qwen_megakernel.errors import CheckpointError
from qwen_megakernel.model.folding import FOLDS, FoldedPieces, Folding, joins
from spoken_text.cutting import bytes_of, check_unicode

_QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English contractions
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # a run of letters with the one character before it
    r"|\p{N}"  # digits one by one
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # punctuation
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # white space
)


_BOTH, _VOCAB, _MERGES = "tokenizer.json", "vocab.json", "merges.txt"
_SETTINGS = "tokenizer_config.json"


class TextTokenizer:
    """NFC, Qwen2's pre-tokenizer, byte-level BPE. No special tokens; nothing is added to the text."""

    def __init__(self, folder: Path, vocab_size: int):
        """`folder` holds tokenizer.json, which wins as in transformers, or vocab.json and merges.txt. `vocab_size` is
        the rows of the text embedding. Raises CheckpointError: a file is missing or broken, or an id is beyond the
        embedding."""
        settings = folder / _SETTINGS
        folds = settings.is_file() and read_json(settings, MOST_TABLE_BYTES).get(FOLDS, bool, False)
        # What characters become before they become tokens, if the checkpoint asks for it.
        self.folding = Folding(self._has_token) if folds else None
        both = (folder / _BOTH).is_file()
        named, merged = (folder / name for name in ((_BOTH, _BOTH) if both else (_VOCAB, _MERGES)))
        if both:
            model = read_json(named, MOST_TABLE_BYTES).child("model")
            model.only("type", "BPE")
            vocab, listed = model.get("vocab", dict), model.get("merges", list)
        elif not named.exists():
            raise CheckpointError(f"{folder}: there is neither {_BOTH} nor {_VOCAB}; copy the base checkpoint's")
        else:
            vocab, listed = read_json(named, MOST_TABLE_BYTES).raw, None
        if not vocab or not all(type(i) is int and 0 <= i < vocab_size for i in vocab.values()):
            raise CheckpointError(f"{named}: every id must be an integer in 0..{vocab_size - 1}")
        try:
            if listed is None:
                lines = read_text(merged, MOST_TABLE_BYTES).split("\n")
                listed = [line for line in lines if line and not line.startswith("#version")]
            # A merge is "left right", or in newer tokenizer.json files [left, right].
            pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in listed)
            merges = [(left, right) for left, right in pairs]
            bpe = models.BPE(vocab=vocab, merges=merges)
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:  # tokenizers raises plain Exception for a merge whose parts are unknown
            raise CheckpointError(f"{merged}: {error}") from None
        self._tokenizer = Tokenizer(bpe)
        self._tokenizer.normalizer = normalizers.NFC()
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN2_PIECES), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises TextError for lone surrogates."""
        check_unicode(text)
        return self._tokenizer.encode(self._folded(text), add_special_tokens=False).ids

    def spelt(self, ids: list[int]) -> list[str]:
        """Each token as text. A character of several tokens is U+FFFD in each of them."""
        return [self._tokenizer.decode([i]) for i in ids]

    def most_tokens(self, text: str) -> int:
        """At most so many tokens has a text: one for each byte that becomes tokens. Faster than `encode`."""
        return bytes_of(self._folded(text))

    def is_blank(self, text: str) -> bool:
        """Is nothing but white space left of it?"""
        return not self._folded(text).strip()

    def _folded(self, text: str) -> str:
        return self.folding(text) if self.folding else text

    def _has_token(self, character: str) -> bool:
        return len(self._tokenizer.encode(character, add_special_tokens=False).ids) == 1


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

    def __init__(self, tokenizer: TextTokenizer, before: str = ""):
        """`before`: characters before the text, encoded with it."""
        self._encode = tokenizer.encode
        self._folded = FoldedPieces(tokenizer.folding) if tokenizer.folding else None
        self._held = before
        self._run = len(before)  # characters of `_held` after its last boundary
        self._foreign = len(before)  # characters of `_run` that come from `before`

    @property
    def held(self) -> int:
        """How many characters of the text wait, because the next one may change their ids."""
        return len(self._held) - self._foreign + (len(self._folded.held) if self._folded else 0)

    def push(self, piece: str) -> list[int]:
        """Take a piece and return the ids that are now final. Raises TextError for lone surrogates, and takes none."""
        check_unicode(piece)
        return self._take(self._folded.push(piece) if self._folded else piece)

    def _take(self, piece: str) -> list[int]:
        ids: list[int] = []
        for character in piece:
            if self._held and _ends(self._held[-1], character):
                self._run = self._foreign = 0
                if len(self._held) > _LONGEST_HELD:
                    ids += self._give()
            elif self._run - self._foreign >= LONGEST_RUN and not joins(character):
                ids += self._give()
            self._held += character
            self._run += 1
        settled = len(self._held) - self._run
        if settled > 0:
            ids += self._encode(self._held[:settled])
            self._held = self._held[settled:]
        return ids

    def flush(self) -> list[int]:
        """Ids of all characters that were held back."""
        return (self._take(self._folded.flush()) if self._folded else []) + self._give()

    def _give(self) -> list[int]:
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
