"""Where the chapters of an EPUB begin: at the entries of its table of contents, or at its headings."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from qwen_audiobook.lines import Line
from qwen_megakernel.commands.pieces import CHAPTER_LEVELS

_LONGEST_TITLE = 200  # characters; players cut longer ones


def in_chapters(lines: list[Line]) -> list[Line]:
    """The lines with one kind of beginnings. `lines`: with those of the contents (`title`) and of headings (`level`).

    The contents decide if they have several entries, name at least half of the pages that begin with a heading, and
    have at least half as many entries as there are headings of the highest level in use. Other headings are paragraphs
    then. Otherwise each page is cut at its headings, or by the contents if it has none.
    """
    headed: set[str] = set()  # pages that begin with a heading
    begun: set[str] = set()
    levels: Counter[int] = Counter()
    for line in lines:
        if line.text and line.file not in begun:
            begun.add(line.file)
            if line.begins_chapter:
                headed.add(line.file)
        if line.begins_chapter and line.title is None:
            levels[line.level] += 1
    entries = _with_text(lines)
    highest = next((levels[level] for level in (1, 2) if levels[level] > 1), 0)  # a single <h1> is the book's title
    named = len(headed.intersection(entries))
    if len(entries) > 1 and 2 * named >= len(headed) and 2 * len(entries) >= highest:
        return _by_contents(lines)
    own = {line.file for line in lines if line.begins_chapter and line.title is None}
    return [line for line in lines if line.title is None or line.file not in own]


def _with_text(lines: list[Line]) -> list[str]:
    """The pages of the entries that have text before the next one. Others lead to pictures."""
    entries: list[str] = []
    entry: str | None = None
    for line in lines:
        entry = line.file if line.title is not None else entry
        if line.text and entry is not None:
            entries.append(entry)
            entry = None
    return entries


def _by_contents(lines: list[Line]) -> list[Line]:
    cut: list[Line] = []
    begun = False  # the first entry; headings before it begin chapters of their own
    for number, line in enumerate(lines):
        if line.title is None:
            cut.append(_demoted(line) if begun else line)
            continue
        begun = True
        first = len(cut)  # an entry may point to the second of two headings: the chapter begins at the first
        while first and cut[first - 1].file == line.file and _may_precede(cut[first - 1]):
            first -= 1
        before = [_demoted(one) for one in cut[first:]]
        headings = [*(one for one in before if one.level), *_headings_at(lines, number + 1)]
        cut[first:] = [replace(line, title=_fuller(line.title, headings)), *before]
    return cut


def _demoted(line: Line) -> Line:
    return replace(line, level=max(line.level, CHAPTER_LEVELS + 1)) if line.level else line


def _may_precede(line: Line) -> bool:
    return line.title is None and (line.level > 0 or not line.text) and not line.is_scene


def _headings_at(lines: list[Line], first: int) -> Iterable[Line]:
    for line in (lines[n] for n in range(first, len(lines))):
        if line.title is not None or line.text and not line.level:
            return
        if line.level:
            yield line


def joined_titles(titles: Iterable[str]) -> str:
    """Titles that stand below each other as one: "Chapter 1: The Road". One that is said already is left out, and so is
    what would be too long."""
    whole = ""
    for title in titles:
        if len(whole) + len(title) > _LONGEST_TITLE and whole:
            break
        if not whole or not _is_in(title, whole):
            whole += f"{' ' if whole[-1] in '.:!?…' else ': '}{title}" if whole else title
    return whole


def _fuller(title: str, headings: Iterable[Line]) -> str:
    """The title of the contents, or of the chapter's headings if they say it and more, such as a subtitle."""
    whole = joined_titles(line.text for line in headings)
    return whole if len(whole) > len(title) and _is_in(title, whole) else title


def _is_in(title: str, whole: str) -> bool:
    return _plain(title) in _plain(whole)


def _plain(title: str) -> str:
    return "".join(filter(str.isalnum, title.casefold()))
