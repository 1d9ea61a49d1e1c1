"""The first and the last step of the normalizer: they clean characters on the way in and white space on the way out."""

import re
import unicodedata

from spoken_text.stage import FIRST_MARK, LONGEST_HELD, Stage, is_mark
from spoken_text.tables import table_of

_EMOJI = re.compile(
    "[\u231a\u231b\u23e9-\u23fa\u25fb-\u25fe\u2600-\u27bf\u2b05-\u2b55\U0001f000-\U0001faff\U000e0020-\U000e007f]"
)
_CHARACTERS: dict[str, str] = table_of("shared")["characters"]
_JOINS_EMOJI = "\u200d\ufe0e\ufe0f\u20e3"  # joiner, two variation selectors, keycap


class Clean(Stage):
    """Leaves out emojis, control characters and other invisible ones. Turns every blank into " ", every line end into
    a line feed, and full-width digits into ordinary ones."""

    def __init__(self):
        self._last = "\n"

    def feed(self, character: str) -> str:
        last, self._last = self._last, character
        if character == "\n":
            return "" if last == "\r" else "\n"
        if character in "\r\u0085\u2028\u2029\v\f":
            return "\n"
        if character == "\t":
            return " "
        if "\uff10" <= character <= "\uff19":
            return chr(ord(character) - 0xFEE0)
        if character in _CHARACTERS and (character != "ℓ" or last.isdecimal() or last == "m"):  # which may be a letter
            return _CHARACTERS[character]
        if character in _JOINS_EMOJI or _EMOJI.match(character):
            return "\u200d" if character == "\u200d" and last.isalpha() else ""
        kind = unicodedata.category(character)
        if kind == "Zs":
            return " "
        if kind == "Cc" or (kind == "Cf" and character not in "\u200c\u0600\u0601\u06dd") or character >= FIRST_MARK:
            return ""
        return character


class Layout(Stage):
    """Turns several blanks into one, a single line end into a blank, and an empty line into "\\n\\n". Holds text back
    until its first letter or digit comes. Text without any comes out empty."""

    def __init__(self):
        self._begin()

    def _begin(self) -> None:
        self._line_ends = 0
        self._last = ""
        self._sought = True  # no letter or digit has come yet
        self._silent = ""  # what has come instead

    def feed(self, character: str) -> str:
        if is_mark(character):
            self._begin()
            return character
        if character == "\n":
            self._line_ends += 1
            return ""
        if character == " ":
            return "" if self._line_ends or self._last in ("", " ") else self._give(" ")
        text = character
        if self._line_ends > 1 and self._last:
            text = "\n\n" + character
        elif self._line_ends and self._last not in ("", " "):
            text = " " + character
        self._line_ends = 0
        return self._give(text)

    def _give(self, text: str) -> str:
        self._last = text[-1]
        if not self._sought:
            return text
        self._silent = (self._silent + text)[-LONGEST_HELD:]
        if not self._last.isalnum():
            return ""
        text = self._silent
        self._silent = ""
        self._sought = False
        return text

    def end(self) -> str:
        self._sought = True
        self._silent = ""
        return ""
