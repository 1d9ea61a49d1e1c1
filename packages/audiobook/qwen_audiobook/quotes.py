"""Direct speech in prose, by its quotation marks."""

import re
from collections.abc import Iterator

from spoken_text.stage import has_words

_MARKS = ("“”", "„“”", "«»", "»«", "「」", "『』", "‹›")
_WITHIN = "|".join(rf"{m[0]}[^{m}]*(?:[{m[1:]}]|\Z)" for m in _MARKS)
# A closing ’ is an apostrophe where a letter follows. Speech that goes on in the next paragraph has no closing mark. A
# straight mark opens only behind a blank or a bracket: its partner may be missing.
_STRAIGHT = r'(?<![^\s(\[—–-])"(?=\S)[^"]*(?:"|\Z)'
_QUOTED = re.compile(rf"(?<!\w)(?:{_WITHIN}|{_STRAIGHT}|‘(?:[^‘’]|’(?=\w))*(?:’|\Z))")
_ENDS = ".!?…,;:—–-。！？、"
_BEGINNING = 20  # characters that a paragraph's signs before its first word have at most
_CLOSING = '”“»«」』›"’'


def in_quotes(text: str) -> Iterator[tuple[str, bool]]:
    """A paragraph in parts, and whether each is direct speech.

    Quotation marks around a word or a title within a sentence are no speech. Speech ends with a mark, has a comma
    behind it, begins its paragraph, or goes on beyond it.
    """
    end = 0
    for found in _QUOTED.finditer(text):
        within = found[0].rstrip(_CLOSING)
        behind = text[found.end() : found.end() + 2].lstrip()[:1]
        begins = found.start() < _BEGINNING and not has_words(text[: found.start()])
        is_open = found[0][-1] not in _CLOSING and found[0][0] != "‘"  # which may be a wrong apostrophe
        if has_words(within) and (within[-1:] in _ENDS or behind in (",", "，") or begins or is_open):
            if text[end : found.start()]:
                yield text[end : found.start()], False
            yield found[0], True
            end = found.end()
    if text[end:]:
        yield text[end:], False
