"""What every rule for numbers is made of: a pattern, what to say for it, and what stands around its phrase."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

DASHES = "-–~～〜－−∼"
"""Between the ends of a range."""
DASH = f"[{DASHES}]"

DAY, MONTH, HOUR, MINUTE = r"(0?[1-9]|[12]\d|3[01])", r"(0?[1-9]|1[0-2])", r"([01]?\d|2[0-4])", r"([0-5]\d)"
"""Regular expressions for parts of dates and times in digits, each a group."""

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

SEEN = 12
"""How many characters before a phrase its rules may see."""

_HIDDEN = 0x10FE00  # private use; text has none, because `Clean` removes it
_DIGIT = re.compile(r"\d")
_COVERED = re.compile(f"[{chr(_HIDDEN)}-{chr(_HIDDEN + 0xFF)}]")


@dataclass(slots=True)
class Around:
    """The words around a phrase."""

    before: str = ""  # the word before, or empty
    earlier: str = ""  # the word before that
    left: str = ""  # the characters before, as they were written; only in Chinese, Japanese and Korean
    after: str = ""  # the word after, if the phrase ended because of it; in Chinese and Japanese a character
    begins: bool = False  # does the phrase begin a line?
    ordinal_end: str = ""  # of the ordinal that the phrase's rules read last; only in German
    ruled: tuple[str, str] = ("", "")  # the noun of the last number, and the preposition before it; only in Russian


class Found:
    """A match of a rule in a phrase, with what stands around it."""

    def __init__(self, match: re.Match[str], around: Around):
        self.match, self.around = match, around

    def __getitem__(self, group: int) -> Any:
        return self.match[group]

    @property
    def head(self) -> str:
        """The phrase before the match."""
        return self.match.string[: self.match.start()]

    @property
    def rest(self) -> str:
        """The phrase behind the match."""
        return self.match.string[self.match.end() :]

    @property
    def ahead(self) -> str:
        """Some characters before the match."""
        return (self.around.left + self.head)[-SEEN:]

    @property
    def behind(self) -> str:
        """What is known of the text behind the match."""
        return self.rest + self.around.after

    @cached_property
    def before(self) -> str:
        """The word before the match, in lower case and without leading marks."""
        words = self.head.split() or [self.around.before]
        return words[-1].lower().strip("\"'([")

    @cached_property
    def after(self) -> str:
        """The word after the match, or empty where the text's next word is not known."""
        words = self.rest.split() or [self.around.after]
        return words[0].strip("\"'()[].,;:!?")

    def stop(self, written: str, nouns_are_capital: bool = False) -> str:
        """A full stop if the match ends with `written`, an abbreviation, whose full stop also ends the sentence."""
        if written[-1] != "." or self.rest.strip() or (written == "долл." and self.around.after.startswith("США")):
            return ""
        if not self.around.after:
            return "."
        return "." if self.around.after[0].isupper() and not nouns_are_capital else ""


Say = Callable[[Found], str | None]
"""What to say for a match. None: another rule may read it."""


class Rules:
    """Collects the rules of a language in their order: a rule sees what those before it have left.

    Attributes:
        made: of each rule the signs that trigger it, its pattern, and what it says.
    """

    def __init__(self) -> None:
        self.made: list[tuple[frozenset[str], str, Say]] = []

    def __call__(self, signs: str, pattern: str, say: Say | None = None) -> Callable[[Say], Say]:
        """Add a rule. `signs`: characters of which a text must have one for the pattern to match; most phrases lack
        them, which is quicker to see than that the pattern fails. Empty: any text may match. Without `say` this is a
        decorator."""

        def add(say: Say) -> Say:
            self.made.append((frozenset(signs), pattern, say))
            return say

        if say:
            add(say)
        return add


class Kept(str):
    """Text that no later rule may read."""


def keep(found: Found) -> Kept:
    """The text of a match as it stands, with its digits hidden from later rules."""
    return Kept(_DIGIT.sub(lambda digit: chr(_HIDDEN + int(digit[0])), found[0]))


def uncover(text: str) -> str:
    """The text with the digits that `keep` has hidden."""
    return _COVERED.sub(lambda hidden: str(ord(hidden[0]) - _HIDDEN), text)


def initials(words: Iterable[str]) -> str:
    """The first characters of the words, as signs of a rule."""
    return "".join({word[0] for word in words})


def ends_of(words: Iterable[str]) -> str:
    """A regular expression for any of the words, the longest first; "_" stands for a blank."""
    return "|".join(re.escape(word.replace("_", " ")) for word in sorted(words, key=len, reverse=True))
