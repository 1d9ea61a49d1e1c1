"""A long text to read aloud: its chapters, paragraphs, speakers and pieces."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from qwen_audiobook.chapters import joined_titles
from qwen_audiobook.lines import Line, Markdown, with_footnotes
from qwen_audiobook.quotes import in_quotes
from qwen_audiobook.written import with_written
from qwen_megakernel.commands import pieces
from qwen_megakernel.commands.pieces import MAX_PIECE_CHARS, Break, break_behind, spoken_parts
from qwen_megakernel.errors import SpeakerError
from spoken_text.cutting import split_evenly
from spoken_text.front_end import TextFrontEnd
from spoken_text.pauses import Pause
from spoken_text.stage import has_words

_SPEAKER = re.compile(r"[ \t]*\[([\w-]+)\](?:[ \t]+|$)")  # no blanks inside: "[pause 1s]" is no name


@dataclass(frozen=True, kw_only=True)
class Piece(pieces.Piece):
    """Text of a book that is spoken at once."""

    chapter: int  # the chapter's number, from 0
    sentence: int  # index in `Book.sentences` of the text that it is, or is part of
    speaker: str | None  # the name in the text; None: the default speaker
    line: int  # number, from 1, of the line where this speaker's words begin
    file: str = ""  # which has that line, within an EPUB


@dataclass(frozen=True)
class Book:
    """A text, ready to be spoken."""

    pieces: list[Piece]  # in order
    sentences: list[str]  # the texts that the pieces are parts of, as they were written, each on one line
    titles: list[str | None]  # of the chapters; None for text before the first heading
    after_s: float  # seconds of silence that the text asks for at its end


@dataclass(frozen=True)
class _Turn:
    """One speaker's words within one paragraph, or a heading."""

    text: str
    behind: Break
    speaker: str | None
    line: int
    file: str
    title: str | None  # of the chapter that begins
    is_heading: bool = False
    behind_scene: bool = False  # a scene ends before it


def read_book(
    text: str | Iterable[Line],
    front_end: TextFrontEnd,
    *,
    by_sentence: bool = False,
    speakers: bool = False,
    footnotes: str = "none",
    scene_s: float = 1.35,
    quotes: str | None = None,
) -> Book:
    """Cut a text into pieces of at most `MAX_PIECE_CHARS` characters, never across paragraphs, speakers or pauses.

    A paragraph ends at a blank line. A Markdown heading outside code fences is a paragraph of its own, and begins a
    chapter if it has one or two marks. Such headings without text between them begin one chapter together. Sentences
    and paragraphs without letters and digits are not spoken.

    Args:
        text: Markdown, or lines that are told apart already. They are read more than once.
        front_end: turns each paragraph into what is spoken.
        by_sentence: every sentence is its own piece, or several pieces if it is too long. `Book.sentences` has it as
            it was written; otherwise it has what is spoken.
        speakers: a name in brackets at the beginning of a line, such as "[ada] ", names the speaker until the
            paragraph ends. The name is not spoken.
        footnotes: one of `FOOTNOTES`.
        scene_s: seconds of silence where a scene ends within a chapter.
        quotes: the speaker of direct speech, where the text names nobody.

    Raises:
        TextError: a pause or another tag is refused; the message has the line.
    """
    book = Book([], [], [], 0.0)
    lines = with_footnotes(Markdown(text) if isinstance(text, str) else text, footnotes)
    behind, title, pause_s = Break.CHAPTER, None, 0.0  # for the next piece
    only_headings = False  # are in the chapter so far
    turns = _turns(lines, speakers)
    for turn in turns if quotes is None else _with_quotes(turns, quotes.lower()):
        if turn.behind is Break.CHAPTER and only_headings and behind is not Break.CHAPTER:
            book.titles[-1] = joined_titles(filter(None, (book.titles[-1], turn.title)))
            behind = max(behind, Break.PARAGRAPH)
        else:
            behind = max(behind, turn.behind)
            title = turn.title if turn.behind is Break.CHAPTER else title
        least_s = scene_s if turn.behind_scene and behind is not Break.CHAPTER else 0.0
        for part in _said(front_end, turn, by_sentence):
            if isinstance(part, Pause):
                pause_s += part.seconds
                continue
            whole, written = part
            if not has_words(whole):
                continue
            if behind is Break.CHAPTER:
                book.titles.append(title)
                only_headings = True
            only_headings &= turn.is_heading
            chapter, sentence = len(book.titles) - 1, len(book.sentences)
            piece = Piece(
                whole,
                behind,
                max(pause_s, least_s),
                chapter=chapter,
                sentence=sentence,
                speaker=turn.speaker,
                line=turn.line,
                file=turn.file,
            )
            book.pieces.extend(piece.cut(split_evenly(whole, MAX_PIECE_CHARS)))
            book.sentences.append(" ".join(written.split()))
            behind, title, pause_s, least_s = break_behind(book.pieces[-1].text), None, 0.0, 0.0
    return replace(book, after_s=pause_s)


def _said(front_end: TextFrontEnd, turn: _Turn, by_sentence: bool) -> Iterator[tuple[str, str] | Pause]:
    """The parts of a turn that are spoken at once, each with its written form, and the pauses between."""
    parts = spoken_parts(front_end, turn.text, _place(turn.line, turn.file))
    if by_sentence:
        yield from with_written(parts, parts if front_end.leaves_alone(turn.text) else front_end.shown(turn.text))
        return
    for part in parts:
        if isinstance(part, Pause):
            yield part
        else:
            yield from ((whole, whole) for whole in split_evenly(part, MAX_PIECE_CHARS))


def _with_quotes(turns: Iterable[_Turn], speaker: str) -> Iterator[_Turn]:
    """The turns, cut where direct speech begins and ends. That is said by `speaker`, unless the text names another."""
    for turn in turns:
        if turn.speaker is not None or turn.is_heading:
            yield turn
            continue
        for number, (text, is_said) in enumerate(in_quotes(turn.text)):
            part = replace(turn, text=text, speaker=speaker if is_said else None)
            yield replace(part, behind=Break.CLAUSE, title=None, behind_scene=False) if number else part


def _place(line: int, file: str) -> str:
    return f"{file}, line {line}" if file else f"line {line}"


def check_speakers(pieces: Iterable[Piece], known: Iterable[str], where: str) -> None:
    """`known`: speakers' names, in lower case. `where`: says what to do if there are no known speakers. Raises
    SpeakerError: a piece names an unknown speaker; the message has the line and the known names."""
    known = list(known)
    for piece in pieces:
        if piece.speaker is not None and piece.speaker not in known:
            names = ", ".join(known) or f"none: {where}"
            place = _place(piece.line, piece.file)
            raise SpeakerError(f"{place}: unknown speaker {piece.speaker!r}; known: {names}")


def _turns(lines: Iterable[Line], speakers: bool) -> Iterator[_Turn]:
    behind, speaker = Break.PARAGRAPH, None
    title: str | None = None  # of a chapter that begins without a heading
    turn: list[Line] = []  # so far
    behind_scene = False

    def ended() -> Iterator[_Turn]:
        nonlocal title, behind_scene
        if said := "\n".join(line.text for line in turn).strip():
            level = behind if title is None else Break.CHAPTER
            yield _Turn(said, level, speaker, turn[0].number, turn[0].file, title, behind_scene=behind_scene)
            title, behind_scene = None, False

    for line in lines:
        begun = _SPEAKER.match(line.text) if speakers and not (line.is_code or line.level) else None
        if line.level or not (line.text.strip() or line.is_code):
            yield from ended()
            behind, speaker, turn = Break.PARAGRAPH, None, []
            behind_scene |= line.is_scene
            if line.title is not None:
                title = line.title
            elif line.level:
                level = Break.CHAPTER if line.begins_chapter or title is not None else Break.PARAGRAPH
                named = line.text if title is None or line.begins_chapter else title
                yield _Turn(line.text, level, None, line.number, line.file, named, True, behind_scene)
                title, behind_scene = None, False
            continue
        if begun:
            said = list(ended())
            yield from said
            behind = Break.SENTENCE if said else behind
            speaker, turn, line = begun[1].lower(), [], replace(line, text=line.text[begun.end() :])
        turn.append(line)
    yield from ended()
