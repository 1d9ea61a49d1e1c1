"""Direct speech in prose, by its quotation marks."""

import re
from collections.abc import Iterator

from spoken_text.stage import has_words

_MARKS = ("“”", "„“”", "«»", "»«", "「」", "『』", "‹›", '""')
_WITHIN = "|".join(rf"{m[0]}[^{m}]*(?:[{m[1:]}]|\Z)" for m in _MARKS)
# A closing ’ is an apostrophe where a letter follows. Speech that goes on in the next paragraph has no closing mark.
_QUOTED = re.compile(rf"(?<!\w)(?:{_WITHIN}|‘(?:[^‘’]|’(?=\w))*(?:’|\Z))")
_ENDS = ".!?…,;:—–-。！？、"
_CLOSING = '”“»«」』›"’'


def in_quotes(text: str) -> Iterator[tuple[str, bool]]:
    """A paragraph in parts, and whether each is direct speech.

    Quotation marks around a word or a title within a sentence are no speech. Speech ends with a mark, has one behind
    it, or begins its paragraph.
    """
    end = 0
    for found in _QUOTED.finditer(text):
        within = found[0].rstrip(_CLOSING)
        behind = text[found.end() :].lstrip()[:1]
        begins = not has_words(text[: found.start()])
        if has_words(within) and (within[-1:] in _ENDS or behind in (",", "，") or begins):
            if text[end : found.start()]:
                yield text[end : found.start()], False
            yield found[0], True
            end = found.end()
    if text[end:]:
        yield text[end:], False
