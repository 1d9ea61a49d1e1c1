"""Pages as lines: paragraphs, headings, footnotes. A page is XHTML, SVG, or any HTML."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from html import unescape
from html.parser import HTMLParser
from posixpath import dirname, join, normpath
from typing import Protocol, TypeVar
from urllib.parse import unquote
from xml.parsers import expat

from qwen_audiobook.lines import Line
from spoken_text.stage import has_words

_BLOCKS = frozenset(
    "address article aside blockquote body caption center dd details dialog div dl dt fieldset figcaption figure footer"
    " form h1 h2 h3 h4 h5 h6 header hgroup hr legend li main nav object ol option p pre section summary table tbody td"
    " text tfoot th thead tr ul".split()
)
_SKIPPED = frozenset(
    "annotation annotation-xml audio desc epub:case head iframe metadata rp rt rtc script style template title"
    " video".split()
)
_EMPTY = frozenset("area base br col embed hr img input link meta param source track wbr".split())
_FORMULA = frozenset("mi mn mo ms mtext".split())
_CONTAINERS = frozenset("article aside body div footer header main nav section".split())
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_NOTE = frozenset("footnote endnote rearnote note doc-footnote doc-endnote".split())
_NOTES = frozenset("footnotes endnotes rearnotes notes doc-endnotes".split())
_UNSPOKEN = frozenset("pagebreak doc-pagebreak backlink doc-backlink".split())
_REFERENCE = frozenset("noteref doc-noteref".split())
_SUBTITLE = frozenset({"subtitle", "doc-subtitle"})
_MATTER = frozenset(
    "colophon copyright-page cover halftitlepage imprimatur imprint index landmarks loa loi lot lov other-credits"
    " page-list pg-boilerplate seriespage titlepage title-page toc toc-brief".split()
)
"""What few listeners want to hear, by `epub:type`, landmarks, EPUB 2's guide, or a class of Project Gutenberg."""
_HALVES = frozenset({"frontmatter", "backmatter"})  # which hold both, what is heard and what is not
_HEARD = frozenset(
    "abstract acknowledgments afterword appendix bodymatter chapter conclusion dedication epigraph epilogue foreword"
    " introduction part preamble preface prologue volume".split()
)
_NUMBERS = frozenset("pagenum pageno page-number pagenumber".split())  # as Project Gutenberg marks "[Pg 12]"
_IS_PAGE = re.compile(r"\.x?html?(?:#|$)", re.I)
_SIGN = re.compile(r"[\s\[\](){}*†‡§¶|↩↑^\ufe0e\d.,]*")  # of a link to a footnote or back from it
_CHUNK, _LONGEST_HELD = 65_536, 1_000_000  # characters
_LONGEST_END = 2000  # characters of an open tag at the end, for which html.parser takes time that grows by the square
_OPS = "http://www.idpf.org/2007/ops"  # the namespace of the prefix "epub"


class EntitiesDeclared(ValueError):
    """A page declares entities (<!ENTITY), which can grow without end, or name files."""


def path_of(page: str, target: str) -> tuple[str, str]:
    """The file and the fragment that a link of a page leads to. The file may be outside of the EPUB: "../..."."""
    file, _, fragment = target.partition("#")
    return normpath(join(dirname(page), unquote(file))) if file else page, unquote(fragment)


class _Handler(Protocol):
    """Takes a page's elements and words in order."""

    line: Callable[[], int]  # the number, from 1, of the line that is read

    def start(self, tag: str, given: dict[str, str]) -> None: ...

    def end(self, tag: str) -> None: ...

    def words(self, text: str) -> None: ...


_H = TypeVar("_H", bound=_Handler)


def _read(page: str, new_handler: Callable[[], _H]) -> _H | None:
    """Give a page to a new handler, as XML if it is well-formed, else as HTML. Returns None: a tag is too long to be
    one, so the page is no page. Raises EntitiesDeclared."""
    handler = new_handler()
    parser = expat.ParserCreate(namespace_separator=" ")

    def refuse(*_declaration: object) -> None:
        raise EntitiesDeclared

    def start(tag: str, given: Mapping[str, str]) -> None:
        handler.start(_name(tag), {_name(name): value for name, value in given.items()})

    parser.UseForeignDTD(True)  # so that HTML's own entities, such as &nbsp;, are no error
    parser.ExternalEntityRefHandler = lambda *_ids: 1  # which reads nothing
    parser.SkippedEntityHandler = lambda name, _is_parameter: handler.words(unescape(f"&{name};"))
    parser.EntityDeclHandler = refuse
    parser.StartElementHandler = start
    parser.EndElementHandler = lambda tag: handler.end(_name(tag))
    parser.CharacterDataHandler = handler.words
    handler.line = lambda: parser.CurrentLineNumber
    try:
        parser.Parse(page, True)
        return handler
    except expat.ExpatError:
        handler = new_handler()
    html = _Html(handler)
    handler.line = lambda: html.getpos()[0]
    for begin in range(0, len(page), _CHUNK):  # in parts, because what is held back is read again
        html.feed(page[begin : begin + _CHUNK])
        if len(html.rawdata) > _LONGEST_HELD:
            return None
    if len(html.rawdata) > _LONGEST_END:
        return None
    html.close()
    return handler


def _name(name: str) -> str:
    """The name of an element or attribute without its namespace, except "epub:"."""
    space, _, local = name.rpartition(" ")
    return f"epub:{local}" if space == _OPS else local


class _Html(HTMLParser):
    def __init__(self, handler: _Handler):
        super().__init__()
        self._handler = handler

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._handler.start(_without_prefix(tag), {name: value or "" for name, value in attrs})

    def handle_endtag(self, tag: str) -> None:
        self._handler.end(_without_prefix(tag))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _EMPTY:
            self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        self._handler.words(data)

    def unknown_decl(self, data: str) -> None:
        if data.startswith("CDATA["):
            self._handler.words(data.removeprefix("CDATA["))


def _without_prefix(tag: str) -> str:
    return tag if tag.startswith("epub:") else tag.rpartition(":")[2]


@dataclass
class Page:
    """What a page holds."""

    lines: list[Line]  # with the beginnings of chapters by headings (`level`), and by the contents (`title`)
    embedded: list[str]  # targets of frames, whose text stands elsewhere


def page_of(text: str, file: str, marks: dict[str, str], matter: dict[str, str]) -> Page | None:
    """Read a page.

    Args:
        text: XHTML, SVG or any HTML.
        file: its name.
        marks: where the table of contents says that chapters begin: the id of an element, or "" for the beginning ->
            title.
        matter: what landmarks say that elements are: id, or "" for the whole page -> a kind such as "colophon".

    Returns:
        None: a tag is too long to be one, so the page is no page.

    Raises:
        EntitiesDeclared: the page declares entities.
    """
    reader = _read(text, lambda: _Page(file, marks, matter))
    if reader is None:
        return None
    reader.finish()
    lines = reader.lines
    if marks and not any(line.title is not None for line in lines):  # its id is not there
        lines.insert(0, Line("", 1, 1, title=next(iter(marks.values())), file=file))
    return Page(lines, reader.embedded)


@dataclass
class _Link:
    start: int  # where its words begin, in what is collected
    target: str
    is_reference: bool
    is_raised: bool


class _Page:
    line: Callable[[], int]

    def __init__(self, file: str, marks: dict[str, str], matter: dict[str, str]):
        self.lines: list[Line] = []
        self.embedded: list[str] = []
        self.line = lambda: 1
        self._file = file
        self._marks = marks
        self._matter = matter
        self._containers = [("", "")]  # open ones: tag, what it holds
        self._containers[0] = ("", self._held("", {matter.get("", "")}))
        self._words: list[str] = []  # of the paragraph so far
        self._number = 0  # of the line where they begin; 0: no words yet
        self._level = 0  # of the open heading
        self._headed = 0  # level of the heading right before
        self._refers: list[str] = []
        self._skipped = _Element()
        self._group = _Element()  # the open <hgroup>
        self._notes = _Element()  # the open list of footnotes
        self._note = _Element()  # the open footnote
        self._label: str | None = None
        self._link: _Link | None = None
        self._raised = self._kept = self._cells = 0  # open elements <sup>, <pre>, <td> or <th>
        self._mark("")

    def start(self, tag: str, given: dict[str, str]) -> None:
        kinds = set(f"{given.get('epub:type', '')} {given.get('role', '')}".lower().split())
        if self._skipped.open(tag):
            return
        classes = given.get("class", "").split()
        is_number = not _NUMBERS.isdisjoint(classes)
        source = given.get("src") or given.get("data", "")
        if tag == "iframe" and source or tag in ("embed", "object") and _IS_PAGE.search(source):
            self.embedded.append(source)
        if tag == "math" and (spoken := given.get("alttext", "").strip()):
            self.words(f" {spoken} ")
            self._skipped.begin(tag)
            return
        if tag in _SKIPPED or kinds & _UNSPOKEN or is_number or "hidden" in given:
            if tag not in _EMPTY:
                self._skipped.begin(tag)
            return
        if tag in _BLOCKS:
            self._end_paragraph()
        name = given.get("id") or (given.get("name", "") if tag == "a" else "")
        if tag in _CONTAINERS:
            kinds_of = kinds | set(classes) & _MATTER | {self._matter.get(name, "") if name else ""}
            self._containers.append((tag, self._held(tag, kinds_of)))
        if name:
            self._mark(name)
        self._see_notes(tag, name, kinds)
        self._group.open(tag)
        if tag == "br":
            self._end_line()
        elif tag == "hr":
            self._end_scene()
        elif tag in _HEADINGS:
            self._level = _HEADINGS[tag]
        elif tag == "hgroup":
            self._group.begin(tag)
        elif tag == "p" and (self._group.tag or kinds & _SUBTITLE and self._headed):
            self._level = self._headed or 2
        elif tag == "sup":
            self._raised += 1
            if self._link:
                self._link.is_raised = True
        elif tag == "pre":
            self._kept += 1
        elif tag in ("td", "th"):
            self._cells += 1
        elif tag in _FORMULA or tag == "tspan" and {"x", "y", "dy"} & given.keys():
            self._words.append(" ")
        elif tag == "a" and "href" in given:
            self._link = _Link(len(self._words), given["href"], bool(kinds & _REFERENCE), self._raised > 0)

    def _held(self, tag: str, kinds: set[str]) -> str:
        """What a container holds that few listeners want to hear; "" if it is to be heard."""
        kinds = {kind.removeprefix("doc-") for kind in kinds}
        if found := kinds & _MATTER:
            return min(found)
        if tag == "nav":
            return "toc"
        if kinds & (_HEARD | _NOTES):
            return ""
        return next(iter(kinds & _HALVES), self._containers[-1][1])

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

    def end(self, tag: str) -> None:
        if self._skipped.tag:
            self._skipped.close(tag)
            return
        if tag == "a" and self._link:
            self._end_link(self._link)
        elif tag == "sup":
            self._raised = max(0, self._raised - 1)
        if tag in _BLOCKS:
            self._end_paragraph()
        if tag in _HEADINGS or tag == "p":
            self._level = 0
        elif tag == "pre":
            self._kept = max(0, self._kept - 1)
        elif tag in ("td", "th"):
            self._cells = max(0, self._cells - 1)
        if self._note.close(tag):
            self._end_paragraph()
            self._label = None
        self._notes.close(tag)
        self._group.close(tag)
        if tag in _CONTAINERS and (open_ := [n for n, (name, _) in enumerate(self._containers) if name == tag]):
            del self._containers[open_[-1] :]

    def words(self, text: str) -> None:
        if self._skipped.tag:
            return
        if not self._number and text.strip():
            self._number = self.line() + text[: len(text) - len(text.lstrip())].count("\n")
        for part, line in enumerate(text.split("\n") if self._kept else [text]):
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
            self._add(Line("", self.line(), 1, title=self._marks[name]))

    def _add(self, line: Line) -> None:
        self.lines.append(replace(line, file=self._file, matter=self._containers[-1][1]))

    def _end_line(self) -> None:
        """End a line of the paragraph. A heading has one line."""
        if self._level:
            self._words.append(" ")
            return
        text = " ".join("".join(self._words).replace("\xad", "").split())
        number, self._words, self._number, self._link = self._number or self.line(), [], 0, None
        refers, self._refers = tuple(self._refers), []
        if text and not has_words(text) and not refers:
            if not self._cells:
                self._end_scene()
        elif (text or refers) and not (self._notes.tag and self._label is None):
            self._headed = 0
            self._add(Line(text, number, 0, note=self._label, refers=refers))

    def _end_scene(self) -> None:
        """A rule, or a paragraph of signs: nothing is spoken there."""
        if not self._level:
            self._add(Line("", self.line(), note=self._label, is_scene=True))

    def _end_paragraph(self) -> None:
        level, self._level = self._level, 0
        before = len(self.lines)
        self._end_line()
        self._level = level
        if len(self.lines) > before and self.lines[-1].text:
            line = self.lines[-1]
            if level and line.note is None:
                self.lines[-1] = replace(line, level=level)
                self._headed = level
            self._add(Line("", line.number, note=self._label))

    def finish(self) -> None:
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


class Contents:
    """What a navigation document says.

    Attributes:
        entries: targets and titles of the table of contents, with the level of each from 0 on.
        landmarks: targets and kinds, such as "colophon".
    """

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, int]] = []
        self.landmarks: list[tuple[str, str]] = []
        self.line: Callable[[], int] = lambda: 1
        self._list = ""  # the open <nav>: "toc", "landmarks" or another
        self._items: list[bool] = []  # open <li> in it: does it have a link?
        self._target = ""
        self._title: list[str] = []
        self._level = 0

    def start(self, tag: str, given: dict[str, str]) -> None:
        kinds = f"{given.get('epub:type', '')} {given.get('role', '').removeprefix('doc-')}".split()
        if tag == "nav":
            self._list, self._items = next((kind for kind in ("toc", "landmarks") if kind in kinds), ""), []
        elif tag == "li":
            self._items.append(False)
        elif tag == "a" and self._list == "landmarks":
            self.landmarks += [(given.get("href", ""), kind) for kind in kinds]
        elif tag == "a" and self._list == "toc":
            self._target, self._title, self._level = given.get("href", ""), [], sum(self._items[:-1])
            self._items[-1:] = [True]
        elif tag == "br":
            self._title.append(" ")

    def end(self, tag: str) -> None:
        if tag == "nav":
            self._list = ""
        elif tag == "li":
            del self._items[-1:]
        elif tag == "a" and self._target:
            self.entries.append((self._target, " ".join("".join(self._title).split()), self._level))
            self._target = ""

    def words(self, text: str) -> None:
        if self._target:
            self._title.append(text)


def contents_of(page: str) -> Contents:
    """Read a navigation document. Raises EntitiesDeclared."""
    return _read(page, Contents) or Contents()
