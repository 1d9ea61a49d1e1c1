"""A long text in pieces that are spoken at once and heard one after the other."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Self

from qwen_megakernel.errors import TextError
from spoken_text.cutting import ends_with_mark, split_evenly
from spoken_text.front_end import TextFrontEnd
from spoken_text.pauses import Pause
from spoken_text.stage import has_words

MAX_PIECE_CHARS = 300  # longer text is spoken in pieces cut at sentence ends
CHAPTER_LEVELS = 2  # "#" and "##" begin chapters; deeper headings are paragraphs

HEADING = re.compile(r" {0,3}(#{1,6})[ \t]+(\S.*?)(?:[ \t]+#+)?[ \t]*")
"""A line that is a Markdown heading: its marks and its words."""
_FENCE = re.compile(r" {0,3}(`{3,})([^`]*)")  # not "~~~", which separates scenes in novels
_LINE_END = re.compile(r"\r\n?|\n")


class Break(IntEnum):
    """What lies between a piece and the one before it. A higher value means a longer pause."""

    CLAUSE = 0
    SENTENCE = 1
    PARAGRAPH = 2
    CHAPTER = 3


@dataclass(frozen=True)
class Piece:
    """Text that is spoken at once."""

    text: str  # without white space at its ends
    behind: Break  # what lies between it and the piece before
    pause_s: float = 0.0  # seconds of silence that the text asks for before it

    def cut(self, parts: Iterable[str]) -> Iterator[Self]:
        """The same piece in these parts."""
        behind, pause_s = self.behind, self.pause_s
        for part in parts:
            if has_words(part := part.strip()):
                yield replace(self, text=part, behind=behind, pause_s=pause_s)
                behind, pause_s = break_behind(part), 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a text."""

    text: str  # of a heading: its words
    number: int  # from 1
    level: int = 0  # of a heading: 1 to 6
    is_code: bool = False  # it belongs to a code fence

    @property
    def begins_chapter(self) -> bool:
        return 0 < self.level <= CHAPTER_LEVELS


def written_lines(text: str) -> Iterator[str]:
    """A text's lines without their ends, one by one, so that they take no memory."""
    start = 0
    for end in _LINE_END.finditer(text):
        yield text[start : end.start()]
        start = end.end()
    yield text[start:]


def lines_of(text: str) -> Iterator[Line]:
    """The lines of a text with Markdown's headings and code fences."""
    fence = ""  # the open code fence; "" if none
    for number, written in enumerate(written_lines(text), 1):
        if not fence and (heading := HEADING.fullmatch(written)):
            yield Line(heading[2], number, len(heading[1]))
        else:
            was, fence = fence, fence_behind(written, fence)
            yield Line(written, number, is_code=bool(was or fence))


def fence_behind(line: str, fence: str) -> str:
    """The code fence that is open after a line; "" if there is none. `fence`: the one that was open before."""
    mark = _FENCE.fullmatch(line)
    if not mark:
        return fence
    if not fence:
        return mark[1]
    return "" if len(mark[1]) >= len(fence) and not mark[2].strip() else fence


def break_behind(text: str) -> Break:
    """What lies between a text and the next one in the same paragraph."""
    return Break.SENTENCE if ends_with_mark(text) else Break.CLAUSE


def read_pieces(text: str, front_end: TextFrontEnd) -> tuple[list[Piece], float]:
    """Cut a text into pieces of at most `MAX_PIECE_CHARS` characters, never across paragraphs or pauses.

    A paragraph ends at a blank line. A Markdown heading outside code fences is a paragraph of its own, and begins a
    chapter if it has one or two marks, unless the chapter has nothing but headings yet. `front_end`: turns each
    paragraph into what is spoken. Returns the pieces, and the seconds of silence that the text asks for at its end.
    Raises TextError: a pause or another tag is refused; the message has the line."""
    pieces: list[Piece] = []
    behind, pause_s = Break.CHAPTER, 0.0  # for the next piece
    only_headings = False  # are in the chapter so far
    for paragraph, level, line in _paragraphs(text):
        begins = 0 < level <= CHAPTER_LEVELS and not only_headings
        behind = max(behind, Break.CHAPTER if begins else Break.PARAGRAPH)
        for part in spoken_parts(front_end, paragraph, f"line {line}"):
            if isinstance(part, Pause):
                pause_s += part.seconds
            elif found := list(Piece(part, behind, pause_s).cut(split_evenly(part, MAX_PIECE_CHARS))):
                pieces += found
                only_headings = level > 0 and (only_headings or behind is Break.CHAPTER)
                behind, pause_s = break_behind(found[-1].text), 0.0
    return pieces, pause_s


def spoken_parts(front_end: TextFrontEnd, paragraph: str, where: str) -> list[str | Pause]:
    """What is spoken of a paragraph, and the pauses between. `where`: names the paragraph in messages. Raises
    TextError: a pause or another tag is refused."""
    if front_end.leaves_alone(paragraph):
        return [paragraph]
    try:
        return front_end.whole(paragraph)
    except TextError as error:
        raise TextError(f"{where}: {error}") from None


def _paragraphs(text: str) -> Iterator[tuple[str, int, int]]:
    """Each paragraph, its level if it is a heading, and the number of its first line."""
    lines: list[Line] = []  # so far

    def ended() -> Iterator[tuple[str, int, int]]:
        if paragraph := "\n".join(line.text for line in lines).strip():
            yield paragraph, 0, lines[0].number
        lines.clear()

    for line in lines_of(text):
        if not line.level and (line.text.strip() or line.is_code):
            lines.append(line)
            continue
        yield from ended()
        if line.level:
            yield line.text, line.level, line.number
    yield from ended()
