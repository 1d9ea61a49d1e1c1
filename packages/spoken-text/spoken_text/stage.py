"""The base of every step over text in pieces. It reads character by character, so that cuts cannot matter."""

import re
from abc import ABC, abstractmethod

from spoken_text.errors import TextError

LONGEST_HELD = 2000
"""Most characters that an open construct (a link, a tag) holds back. A longer one is given out as it is."""

FIRST_MARK = "\U00100000"
"""Private-use characters from here on stand for something other than text, such as a pause. Steps let them through."""

_CJK = re.compile("[\u3001-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uff9f\U00020000-\U000323af]")


def check_text(text: object) -> None:
    """Raises TextError: it is no string."""
    if not isinstance(text, str):
        raise TextError(f"text must be a string, got {type(text).__name__}")


class Stage(ABC):
    """Text in, text out. A step sees one character at a time and never sees where a piece ended."""

    _held = ""  # text that waits for what follows

    @abstractmethod
    def feed(self, character: str) -> str:
        """Take one character, and return what is now final."""

    def end(self) -> str:
        """End the text, and return what was held back."""
        held, self._held = self._held, ""
        return held

    def settle(self) -> str:
        """A sentence has ended: return what the next character could have changed. An open construct, such as a tag or
        a code block, stays open."""
        return self.end()

    @property
    def at_rest(self) -> bool:
        """Nothing is held back or open."""
        return not self._held

    def push(self, piece: str) -> str:
        """Take a piece of any length, and return what is now final. Raises TextError: it is no string."""
        check_text(piece)
        return "".join(map(self.feed, piece))


def has_words(text: str) -> bool:
    """Is there a letter or a digit, of any script? A text without them has nothing to speak."""
    return any(map(str.isalnum, text))


def is_mark(character: str) -> bool:
    """Does the character stand for something other than text?"""
    return character >= FIRST_MARK


def is_cjk(character: str) -> bool:
    """Is it a Chinese or Japanese letter or mark? There are no blanks between these."""
    return _CJK.match(character) is not None
