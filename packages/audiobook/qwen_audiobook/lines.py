"""The lines of a book, with what each of them is: a heading, code, part of a footnote."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from qwen_megakernel.commands import pieces
from qwen_megakernel.commands.pieces import HEADING, fence_behind, written_lines
from spoken_text.stage import has_words

FOOTNOTES = ("none", "end")  # whether footnotes are left out, or read at their chapter's end
MATTER = ("main", "all")  # whether front and back matter is left out, or read

_NOTE = re.compile(r" {0,3}\[\^([^\]\s]{1,100})\]:[ \t]*(.*)")
_SIGN = re.compile(r"\[\^([^\]\s]{1,100})\]")
_UNDERLINE = re.compile(r" {0,3}(?:={2,}|-{2,})[ \t]*")
_TITLE = re.compile(r".{1,80}[^.!?…,;:\"'”’»]")  # prose above "---" ends a scene
_ITEM = re.compile(r"\s*(?:[-*+>|\[]|\d+[.)])|\s{4}")  # of a list, a quote, a table, a speaker, or code
_OTHERS = re.compile(r"[|>`$\\{}<]")
_HIDDEN = re.compile(
    r"^ {0,3}(`{3,})[^`\n]*\n.*?(?:^ {0,3}\1`*[ \t]*$|\Z)|`[^`\n]+`|<!--(?:(?!<!--).)*?-->"
    r"|!\[[^\[\]\n]{0,1000}\](?:\([^()\n]{0,2000}(?:\([^()\n]{0,200}\)[^()\n]{0,200})?\)|\[[^\[\]\n]{0,200}\])",
    re.M | re.S,
)
_GOES_ON = re.compile(r"[ \t]+\S")
_GOES_ON_AFTER_BLANK = re.compile(r"(?: {4}| {0,3}\t)[ \t]*\S")


@dataclass(frozen=True, slots=True)
class Line(pieces.Line):
    """A line of a book, or a paragraph's words between two line ends of an EPUB."""

    title: str | None = None  # a chapter with this title begins here, and the line says nothing
    note: str | None = None  # the footnote that it is part of
    refers: tuple[str, ...] = ()  # to these footnotes
    file: str = ""  # within an EPUB
    is_scene: bool = False  # a scene ends here, and the line says nothing
    matter: str = ""  # what it belongs to that few listeners want to hear, such as "colophon"


@dataclass(frozen=True)
class Markdown:
    """The lines of a text with Markdown's headings, code fences and footnotes, `[^1]: text`. A footnote goes on in
    indented lines. Comments and images are left out. A line of signs ends a scene. The lines are made anew each time,
    so that they take no memory."""

    text: str
    first: int = 1  # the number of the text's first line

    def __iter__(self) -> Iterator[Line]:
        text = _HIDDEN.sub(_without_hidden, self.text) if "<!--" in self.text or "![" in self.text else self.text
        return _with_underlined(_markdown(written_lines(text), self.first))


def _without_hidden(found: re.Match[str]) -> str:
    """A comment's or an image's line ends, so that lines keep their numbers. Code stays as it is."""
    return "\n" * found[0].count("\n") if found[0].startswith(("<", "!")) else found[0]


def _with_underlined(lines: Iterable[Line]) -> Iterator[Line]:
    """A paragraph of one line with "===" or "---" below it is a heading. Without it such a line ends a scene."""
    held: Line | None = None  # a paragraph's first line
    begins = True  # does a paragraph begin?
    for line in lines:
        signs = line.text.strip()
        if held and _UNDERLINE.fullmatch(line.text) and (signs[0] == "=" or _TITLE.fullmatch(held.text)):
            yield replace(held, text=held.text.strip(), level=1 if signs[0] == "=" else 2)
            held, begins = None, True
            continue
        if held:
            yield held
        if _is_scene(line):
            line = replace(line, text="", is_scene=True)
        plain = bool(line.text) and not (line.level or line.is_code or line.note) and not _ITEM.match(line.text)
        held, begins = line if plain and begins else None, bool(line.level) or not line.text.strip()
        if not held:
            yield line
    if held:
        yield held


def _is_scene(line: Line) -> bool:
    """Does the line have signs and no words? Signs of tables, quotes, code and formulas are others'."""
    text = line.text
    return bool(text.strip()) and not (has_words(text) or line.is_code or line.level or _OTHERS.search(text))


def _markdown(lines: Iterable[str], first: int) -> Iterator[Line]:
    fence = ""  # the open code fence; "" if none
    note: str | None = None  # the footnote that may go on
    blanks: list[Line] = []  # blank lines that may be part of it
    for number, written in enumerate(lines, first):
        if note is not None:
            if not written.strip():
                blanks.append(Line("", number))
                continue
            if (_GOES_ON_AFTER_BLANK if blanks else _GOES_ON).match(written):
                yield from (replace(blank, note=note) for blank in blanks)
                yield Line(written.strip(), number, note=note)
                blanks = []
                continue
            yield from blanks
            note, blanks = None, []
        if not fence and (found := _NOTE.fullmatch(written)):
            note = found[1]
            yield Line(found[2], number, note=note)
        elif not fence and (heading := HEADING.fullmatch(written)):
            yield Line(heading[2], number, len(heading[1]))
        else:
            was, fence = fence, fence_behind(written, fence)
            yield Line(written, number, is_code=bool(was or fence))


@dataclass
class _Note:
    chapter: int  # in which it stands
    lines: list[Line] = field(default_factory=list)
    is_referred_to: bool = False
    is_due: bool = False  # it was given to a chapter


def with_footnotes(lines: Iterable[Line], footnotes: str = "none") -> Iterator[Line]:
    """The lines without footnotes and without the signs that refer to them. A sign that refers to nothing stays.

    Args:
        lines: are read more than once.
        footnotes: one of `FOOTNOTES`. "end": a footnote is a paragraph at the end of the chapter that refers to it. If
            none does, it stays in the chapter where it stands.
    """
    if notes := _notes_of(lines):
        yield from _Placed(lines, notes, footnotes == "end").lines()
    else:
        yield from lines


def _notes_of(lines: Iterable[Line]) -> dict[tuple[int, str], _Note]:
    """Footnotes by chapter and label: chapters may each have a "1"."""
    notes: dict[tuple[int, str], _Note] = {}
    chapter = 0
    for line in lines:
        chapter += line.begins_chapter
        if line.note is not None:
            note = notes.setdefault((chapter, line.note), _Note(chapter))
            note.lines.append(replace(line, note=None))
    return notes


class _Placed:
    """Puts footnotes where they are read."""

    def __init__(self, lines: Iterable[Line], notes: dict[tuple[int, str], _Note], at_end: bool):
        self._lines = lines
        self._notes = notes
        self._at_end = at_end
        self._first: dict[str, _Note] = {}  # by label alone
        for (_, label), note in notes.items():
            self._first.setdefault(label, note)
        self._due: list[_Note] = []  # of this chapter
        chapter = 0
        for line in self._prose():
            chapter += line.begins_chapter
            self._mark_known(line, chapter)
        for note in notes.values():
            for line in note.lines:
                self._mark_known(line, note.chapter)

    def lines(self) -> Iterator[Line]:
        chapter = 0
        for line in self._prose():
            if line.begins_chapter:
                yield from self._end(chapter)
                chapter += 1
            yield self._without_signs(line, chapter)
        yield from self._end(chapter)

    def _prose(self) -> Iterator[Line]:
        """The lines without footnotes. Where one stood, a paragraph ends."""
        for line in self._lines:
            yield line if line.note is None else Line("", line.number, file=line.file)

    def _mark_known(self, line: Line, chapter: int) -> None:
        for label in (*line.refers, *_signs(line)):
            if note := self._note(label, chapter):
                note.is_referred_to = True

    def _note(self, label: str, chapter: int) -> _Note | None:
        return self._notes.get((chapter, label)) or self._first.get(label)

    def _without_signs(self, line: Line, chapter: int) -> Line:
        for label in (*line.refers, *_signs(line)):
            if (note := self._note(label, chapter)) and not note.is_due:
                note.is_due = True
                self._due.append(note)
        if not _signs(line):
            return line
        return replace(line, text=_SIGN.sub(lambda s: "" if self._note(s[1], chapter) else s[0], line.text))

    def _end(self, chapter: int) -> Iterator[Line]:
        """The footnotes of a chapter that ends."""
        here = [note for note in self._notes.values() if note.chapter == chapter and not note.is_referred_to]
        self._due += here
        while self._at_end and self._due:  # a footnote may refer to others
            note = self._due.pop(0)
            yield Line("", note.lines[0].number)
            for line in note.lines:
                yield self._without_signs(line, chapter)
        self._due = []


def _signs(line: Line) -> list[str]:
    """The footnotes to which the line refers by a sign such as "[^1]"."""
    return [] if line.is_code or "[^" not in line.text else _SIGN.findall(line.text)
