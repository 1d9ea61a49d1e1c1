"""An EPUB's pages as lines: paragraphs, headings, footnotes."""

import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from posixpath import dirname, join, normpath
from urllib.parse import unquote

from qwen_audiobook.lines import Line

_BLOCKS = frozenset(
    "address article aside blockquote body caption center dd details div dl dt fieldset figcaption figure footer form"
    " h1 h2 h3 h4 h5 h6 header hgroup hr li main ol p pre section summary table tbody td th thead tr ul".split()
)
_SKIPPED = frozenset("audio canvas head iframe math nav object rp rt script style svg template video".split())
_EMPTY = frozenset("area base br col embed hr img input link meta param source track wbr".split())
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_NOTE = frozenset("footnote endnote rearnote note doc-footnote doc-endnote".split())
_NOTES = frozenset("footnotes endnotes rearnotes notes doc-endnotes".split())
_UNSPOKEN = frozenset("pagebreak doc-pagebreak backlink doc-backlink toc doc-toc".split())
_REFERENCE = frozenset("noteref doc-noteref".split())
_SIGN = re.compile(r"[\s\[\](){}*†‡§¶|↩↑^\ufe0e\d.,]*")  # of a link to a footnote or back from it
_CHUNK, _LONGEST_HELD = 65_536, 1_000_000  # characters
_LONGEST_END = 2000  # characters of an open tag at the end, for which html.parser takes time that grows by the square


def path_of(page: str, target: str) -> tuple[str, str]:
    """The file and the fragment that a link of a page leads to. The file may be outside of the EPUB: "../..."."""
    file, _, fragment = target.partition("#")
    return normpath(join(dirname(page), unquote(file))) if file else page, unquote(fragment)


def lines_of(page: str, file: str, marks: dict[str, str]) -> list[Line] | None:
    """The lines of a page.

    Args:
        page: its text, XHTML or any HTML.
        file: its name.
        marks: where the table of contents says that chapters begin: the id of an element, or "" for the beginning ->
            title. They count only if the page has no headings of chapters.

    Returns:
        None: a tag is too long to be one, so the page is no page.
    """
    reader = _Page(file, marks)
    for start in range(0, len(page), _CHUNK):  # in parts, because what is held back is read again
        reader.feed(page[start : start + _CHUNK])
        if len(reader.rawdata) > _LONGEST_HELD:
            return None
    if len(reader.rawdata) > _LONGEST_END:
        return None
    reader.close()
    lines = reader.lines
    if any(line.begins_chapter and line.title is None for line in lines):
        return [line for line in lines if line.title is None]
    if marks and not any(line.title is not None for line in lines):  # its id is not there
        return [Line("", 1, 1, title=next(iter(marks.values())), file=file), *lines]
    return lines


@dataclass
class _Link:
    start: int  # where its words begin, in what is collected
    target: str
    is_reference: bool
    is_raised: bool


class _Page(HTMLParser):
    def __init__(self, file: str, marks: dict[str, str]):
        super().__init__()
        self.lines: list[Line] = []
        self._file = file
        self._marks = marks
        self._words: list[str] = []  # of the paragraph so far
        self._number = 1  # of the line where they begin
        self._level = 0  # of the open heading
        self._refers: list[str] = []
        self._skipped = _Element()
        self._notes = _Element()  # the open list of footnotes
        self._note = _Element()  # the open footnote
        self._label: str | None = None
        self._link: _Link | None = None
        self._raised = self._kept = 0  # open elements <sup>, <pre>
        self._mark("")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        kinds = set(f"{given.get('epub:type', '')} {given.get('role', '')}".lower().split())
        if self._skipped.open(tag):
            return
        is_number = "pagenum" in given.get("class", "").split()  # as Project Gutenberg writes "[Pg 12]"
        if tag in _SKIPPED or kinds & _UNSPOKEN or is_number or "hidden" in given:
            if tag not in _EMPTY:
                self._skipped.begin(tag)
            return
        if tag in _BLOCKS:
            self._end_paragraph()
        name = given.get("id") or (given.get("name", "") if tag == "a" else "")
        if name:
            self._mark(name)
        self._see_notes(tag, name, kinds)
        if tag == "br":
            self._end_line()
        elif tag in _HEADINGS:
            self._level = _HEADINGS[tag]
        elif tag == "sup":
            self._raised += 1
            if self._link:
                self._link.is_raised = True
        elif tag == "pre":
            self._kept += 1
        elif tag == "a" and "href" in given:
            self._link = _Link(len(self._words), given["href"], bool(kinds & _REFERENCE), self._raised > 0)

    def _see_notes(self, tag: str, name: str, kinds: set[str]) -> None:
        """Does a footnote begin, or a list of them?"""
        nested = self._notes.open(tag), self._note.open(tag)
        if kinds & _NOTES and not any(nested):
            self._notes.begin(tag)
        in_list = self._notes.tag and name and tag in ("li", "aside", "p", "div", "dd")
        if self._label is None and (kinds & _NOTE and tag != "a" or in_list):
            self._end_paragraph()
            self._note.begin(tag)
            self._label = f"{self._file}#{name}"

    def handle_endtag(self, tag: str) -> None:
        if self._skipped.tag:
            self._skipped.close(tag)
            return
        if tag == "a" and self._link:
            self._end_link(self._link)
        elif tag == "sup":
            self._raised = max(0, self._raised - 1)
        if tag in _BLOCKS:
            self._end_paragraph()
        if tag in _HEADINGS:
            self._level = 0
        elif tag == "pre":
            self._kept = max(0, self._kept - 1)
        if self._note.close(tag):
            self._end_paragraph()
            self._label = None
        self._notes.close(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _EMPTY:
            self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        if self._skipped.tag:
            return
        if not self._words and data.strip():
            self._number = self.getpos()[0] + data[: len(data) - len(data.lstrip())].count("\n")
        for part, line in enumerate(data.split("\n") if self._kept else [data]):
            if part:
                self._end_line()
            self._words.append(line)

    def _end_link(self, link: _Link) -> None:
        """Leave out a link's words if they only point at a footnote, or back from one."""
        self._link = None
        words = "".join(self._words[link.start :])
        if not (link.is_reference or (link.is_raised or self._label) and _SIGN.fullmatch(words)):
            return
        del self._words[link.start :]
        if not self._label or link.is_reference:
            file, name = path_of(self._file, link.target)
            self._refers.append(f"{file}#{name}")

    def _mark(self, name: str) -> None:
        if name in self._marks:
            self._end_paragraph()
            self.lines.append(Line("", self.getpos()[0], 1, title=self._marks[name], file=self._file))

    def _end_line(self) -> None:
        """End a line of the paragraph. A heading has one line."""
        if self._level:
            self._words.append(" ")
            return
        text = " ".join("".join(self._words).replace("\xad", "").split())
        self._words, self._link = [], None
        refers, self._refers = tuple(self._refers), []
        if (text or refers) and not (self._notes.tag and self._label is None):
            line = Line(text, self._number, 0, note=self._label, refers=refers, file=self._file)
            self.lines.append(line)

    def _end_paragraph(self) -> None:
        level, self._level = self._level, 0
        before = len(self.lines)
        self._end_line()
        self._level = level
        if len(self.lines) > before and self.lines[-1].text:
            line = self.lines[-1]
            if level and line.note is None:
                self.lines[-1] = replace(line, level=level)
        if self.lines and self.lines[-1].text:
            self.lines.append(Line("", self._number, note=self._label, file=self._file))

    def close(self) -> None:
        super().close()
        self._end_paragraph()


class _Element:
    """Tells where an element ends, with others of its name in it."""

    def __init__(self) -> None:
        self.tag = ""  # its name; "" if none is open
        self._depth = 0

    def begin(self, tag: str) -> None:
        self.tag, self._depth = tag, 1

    def open(self, tag: str) -> bool:
        """An element begins. Is it within?"""
        if self.tag == tag and tag not in _EMPTY:
            self._depth += 1
        return bool(self.tag)

    def close(self, tag: str) -> bool:
        """An element ends. Was it this one?"""
        if self.tag != tag:
            return False
        self._depth -= 1
        if not self._depth:
            self.tag = ""
        return not self._depth


class _Contents(HTMLParser):
    """Reads the table of contents of a navigation document."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, str]] = []  # target and title
        self._depth = self._lists = 0  # open elements: <nav> of the contents, <ol> in it
        self._target = ""
        self._title: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "nav":
            kinds = f"{given.get('epub:type') or ''} {given.get('role') or ''}".split()
            self._depth = self._depth + 1 if self._depth or {"toc", "doc-toc"} & set(kinds) else 0
        elif self._depth and tag == "ol":
            self._lists += 1
        elif self._depth and tag == "a" and self._lists <= 2:
            self._target, self._title = given.get("href") or "", []

    def handle_endtag(self, tag: str) -> None:
        if tag == "nav":
            self._depth = max(0, self._depth - 1)
        elif tag == "ol":
            self._lists = max(0, self._lists - 1)
        elif tag == "a" and self._target:
            self.entries.append((self._target, " ".join("".join(self._title).split())))
            self._target = ""

    def handle_data(self, data: str) -> None:
        if self._target:
            self._title.append(data)


def contents_of(page: str) -> list[tuple[str, str]]:
    """Targets and titles of the first two levels of a navigation document."""
    reader = _Contents()
    reader.feed(page)
    return reader.entries
