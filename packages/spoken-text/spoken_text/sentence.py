"""Has a writer finished a sentence?"""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import regex

STALL_S = 0.5
"""Seconds without text after which a writer behind a sentence counts as stalled. Language models write a word in less
than a tenth of that."""

_ENDS_SENTENCE = r"(?:[.!?…\p{Sentence_Terminal}][^\w,;:，、；：]*|\n\s*\n\s*)$"
LONGEST_END = 40  # characters at the text's end that are looked at


def ends_sentence(text: str) -> bool:
    """Does the text end behind a sentence? Closing quotes, signs of Markdown and emojis may follow its mark."""
    return _compiled().search(text[-LONGEST_END:]) is not None


@cache
def _compiled() -> "regex.Pattern[str]":
    import regex  # 20 ms, which a text whose language is named does not need

    return regex.compile(_ENDS_SENTENCE)
