"""Folding: a small checkpoint reads few characters. Those that it lacks become ASCII before they become tokens.

A checkpoint asks for it by `"fold_unknown_to_ascii": true` in its tokenizer_config.json, as the demo voice does.
Published checkpoints read all scripts, and are never folded.
"""

import logging
import unicodedata
from collections.abc import Callable

from anyascii import anyascii

log = logging.getLogger(__name__)

FOLDS = "fold_unknown_to_ascii"  # in tokenizer_config.json; tools/demo_voice/make_tokenizer.py writes it


class Folding:
    """Reads the characters that a voice lacks as ASCII, and tells the log once that it does."""

    def __init__(self, knows: Callable[[str], bool]):
        """`knows`: does the voice read this character?"""
        self._knows = knows
        self._read: dict[str, str] = {}
        self._told = False

    def __call__(self, text: str) -> str:
        """A text in NFC, with ASCII for what the voice lacks. Emojis and other signs that nobody says are left out."""
        if text.isascii():
            return text
        return "".join(c if c.isascii() else self._plain(c) for c in unicodedata.normalize("NFC", text))

    def _plain(self, c: str) -> str:
        if c in self._read:
            return self._read[c]
        plain = c if self._knows(c) else _ascii(c)
        if plain != c and not self._told:
            self._told = True
            what = f"reads it as {plain!r}" if plain else "leaves it out"
            log.warning("this voice cannot read %r and %s; it does likewise with others that it lacks", c, what)
        self._read[c] = plain
        return plain


_SAID = "°№℃℉"  # of the signs that Unicode lists with emojis, those that are said
_LACKED = {"ا": "a"}  # letters that anyascii has nothing for


def _ascii(c: str) -> str:
    if unicodedata.category(c) == "So" and c not in _SAID:
        return ""
    return _LACKED.get(c) or anyascii(c)


class FoldedPieces:
    """Folds a text that arrives in pieces. However it is cut, the joined result is that of the whole text."""

    def __init__(self, fold: Folding):
        self._fold = fold
        self.held = ""  # the last character and the marks on it: the next one may join them

    def push(self, piece: str) -> str:
        text = self.held + piece
        last = len(text) - 1
        while last > 0 and joins(text[last]):
            last -= 1
        if text[last:].isspace():
            last += 1
        self.held = text[last:]
        return self._fold(text[:last])

    def flush(self) -> str:
        rest, self.held = self.held, ""
        return self._fold(rest)


def joins(character: str) -> bool:
    """May NFC merge the character with the one before it? It may with a combining mark or a later part of a Hangul
    syllable."""
    return unicodedata.category(character)[0] == "M" or "\u1160" <= character <= "\u11ff"
