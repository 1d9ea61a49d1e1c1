"""A long text to read aloud: its chapters, paragraphs, speakers and pieces."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from qwen_megakernel.errors import SpeakerError, TextError
from qwen_megakernel.text.cutting import ends_sentence, sentences_of, split_evenly
from qwen_megakernel.text.front_end import TextFrontEnd
from qwen_megakernel.text.pauses import Pause

MAX_PIECE_CHARS = 300  # longer text is spoken in pieces cut at sentence ends

_HEADING = re.compile(r" {0,3}(#{1,6})[ \t]+(\S.*?)(?:[ \t]+#+)?[ \t]*")
_CHAPTER_LEVELS = 2  # "#" and "##"; deeper headings are paragraphs
_FENCE = re.compile(r" {0,3}(`{3,})([^`]*)")  # not "~~~", which separates scenes in novels
_SPEAKER = re.compile(r"[ \t]*\[([\w-]+)\](?:[ \t]+|$)")  # no blanks inside: "[pause 1s]" is no name


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
    chapter: int  # the chapter's number, from 0
    sentence: int  # index in `Book.sentences` of the text that it is, or is part of
    speaker: str | None  # the name in the text; None: the default speaker
    line: int  # number, from 1, of the line where this speaker's words begin
    pause_s: float = 0.0  # seconds of silence that the text asks for before it

    def cut(self, parts: Iterable[str]) -> Iterator["Piece"]:
        """The same piece in these parts."""
        behind, pause_s = self.behind, self.pause_s
        for part in parts:
            if part := part.strip():
                yield replace(self, text=part, behind=behind, pause_s=pause_s)
                behind, pause_s = _behind(part), 0.0


@dataclass(frozen=True)
class Book:
    """A text, ready to be spoken."""

    pieces: list[Piece]  # in order
    sentences: list[str]  # the texts that the pieces are parts of, each on one line
    titles: list[str | None]  # of the chapters; None for text before the first heading
    after_s: float  # seconds of silence that the text asks for at its end


@dataclass(frozen=True)
class _Turn:
    """One speaker's words within one paragraph, or a heading."""

    text: str
    behind: Break
    speaker: str | None
    line: int


def read_book(text: str, front_end: TextFrontEnd, *, by_sentence: bool = False, speakers: bool = False) -> Book:
    """Cut a text into pieces of at most `MAX_PIECE_CHARS` characters, never across paragraphs, speakers or pauses.

    A paragraph ends at a blank line. A Markdown heading outside code fences is a paragraph of its own, and begins a
    chapter if it has one or two marks.

    Args:
        front_end: turns each paragraph into what is spoken.
        by_sentence: every sentence is its own piece, or several pieces if it is too long.
        speakers: a name in brackets at the beginning of a line, such as "[ada] ", names the speaker until the
            paragraph ends. The name is not spoken.

    Raises:
        TextError: a pause or another tag is refused; the message has the line.
    """
    book = Book([], [], [], 0.0)
    behind, title, pause_s = Break.CHAPTER, None, 0.0  # for the next piece
    for turn in _turns(text, speakers):
        behind = max(behind, turn.behind)
        title = turn.text if turn.behind is Break.CHAPTER else title
        for part in _spoken(front_end, turn):
            if isinstance(part, Pause):
                pause_s += part.seconds
                continue
            for whole in sentences_of(part) if by_sentence else split_evenly(part, MAX_PIECE_CHARS):
                if not whole.strip():
                    continue
                if behind is Break.CHAPTER:
                    book.titles.append(title)
                chapter, sentence = len(book.titles) - 1, len(book.sentences)
                piece = Piece(whole, behind, chapter, sentence, turn.speaker, turn.line, pause_s)
                book.pieces.extend(piece.cut(split_evenly(whole, MAX_PIECE_CHARS)))
                book.sentences.append(" ".join(whole.split()))
                behind, title, pause_s = _behind(book.pieces[-1].text), None, 0.0
    return replace(book, after_s=pause_s)


def _spoken(front_end: TextFrontEnd, turn: "_Turn") -> list[str | Pause]:
    if front_end.leaves_alone(turn.text):
        return [turn.text]
    try:
        return front_end.whole(turn.text)
    except TextError as error:
        raise TextError(f"line {turn.line}: {error}") from None


def check_speakers(pieces: Iterable[Piece], known: Iterable[str], where: str) -> None:
    """`known`: speakers' names, in lower case. `where`: says what to do if there are no known speakers. Raises
    SpeakerError: a piece names an unknown speaker; the message has the line and the known names."""
    known = list(known)
    for piece in pieces:
        if piece.speaker is not None and piece.speaker not in known:
            names = ", ".join(known) or f"none: {where}"
            raise SpeakerError(f"line {piece.line}: unknown speaker {piece.speaker!r}; known: {names}")


def _behind(text: str) -> Break:
    """What lies between a text and the next one in the same paragraph."""
    return Break.SENTENCE if ends_sentence(text) else Break.CLAUSE


def _turns(text: str, speakers: bool) -> Iterator[_Turn]:
    behind, speaker, begun = Break.PARAGRAPH, None, 1
    lines: list[str] = []  # the turn so far
    fence = ""  # the open code fence; "" if none

    def turn() -> Iterator[_Turn]:
        if said := "\n".join(lines).strip():
            yield _Turn(said, behind, speaker, begun)

    for number, line in enumerate(re.split(r"\r\n?|\n", text), 1):
        heading = None if fence else _HEADING.fullmatch(line)
        named = _SPEAKER.match(line) if speakers and not (fence or heading) else None
        if heading or not (line.strip() or fence):
            yield from turn()
            behind, speaker, lines = Break.PARAGRAPH, None, []
            if heading:
                level = Break.CHAPTER if len(heading[1]) <= _CHAPTER_LEVELS else Break.PARAGRAPH
                yield _Turn(heading[2], level, None, number)
            continue
        if named:
            said = list(turn())
            yield from said
            behind = Break.SENTENCE if said else behind
            speaker, lines, line = named[1].lower(), [], line[named.end() :]
        if not lines:
            begun = number
        lines.append(line)
        fence = _fence_behind(line, fence)
    yield from turn()


def _fence_behind(line: str, fence: str) -> str:
    """The code fence that is open after a line; "" if there is none. `fence`: the one that was open before."""
    mark = _FENCE.fullmatch(line)
    if not mark:
        return fence
    if not fence:
        return mark[1]
    return "" if len(mark[1]) >= len(fence) and not mark[2].strip() else fence
