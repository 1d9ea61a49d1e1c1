"""Where a book comes from: a file of text, Markdown, EPUB, HTML, DOCX or PDF, a folder, or standard input."""

import io
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from qwen_audiobook.chapters import in_chapters
from qwen_audiobook.documents import HTML, is_html, read_folder, read_html, read_pdf, read_word
from qwen_audiobook.epub import Epub, Told
from qwen_audiobook.front_matter import split_front_matter
from qwen_audiobook.lines import MATTER, Line, Markdown
from qwen_audiobook.text_bytes import HEAD, check_text, decoded
from qwen_megakernel.commands.options import shown
from qwen_megakernel.commands.text_input import read_bytes, text_file
from qwen_megakernel.speech.words import words_of


@dataclass(frozen=True)
class Source:
    """A text, and what it tells about itself."""

    lines: Iterable[Line]  # which can be read more than once
    tags: dict[str, str] = field(default_factory=dict)  # "title", "author", "language", as far as they are known
    markup: str = "markdown"  # of the text, as for `TextFrontEnd.of_book`
    cover: bytes | None = None  # its picture, as a file


def read_source(path: str | None, matter: str = MATTER[0]) -> Source:
    """Read a file, or a folder of HTML; None or "-": standard input. What is not read is told on standard error.

    Args:
        matter: one of `MATTER`. "main": contents, imprint, colophon and the like are left out, where the book marks
            them as such.

    Raises:
        RequestError: it cannot be read, or holds no text.
    """
    if path is not None and Path(path).is_dir() and (told := read_folder(Path(path), f"--file {path}")):
        return _book(told, f"--file {path}", matter)
    with text_file(path) as (file, where):
        head = file.read(HEAD)
        if head.startswith(b"%PDF-"):
            return _book(read_pdf(io.BytesIO(head + read_bytes(file, where)), where), where, matter)
        if not head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            check_text(head, where)  # before the rest of what may be a film is read
            page = (path or "").lower().endswith(HTML)
            return _text(head + read_bytes(file, where), where, matter, page)
        if not file.seekable():
            file = io.BytesIO(head + read_bytes(file, where))
        with Epub(file, where) as book:
            return _book(read_word(file, where) if book.is_word else book.read(), where, matter)


def _book(told: Told, where: str, matter: str) -> Source:
    """A book whose words are no markup."""
    for warning in told.warnings:
        print(shown(f"warning {where}: {warning}"), file=sys.stderr)
    lines = told.lines if matter == "all" else _main(told.lines, where)
    return Source(in_chapters(lines), told.tags, "none", told.cover)


def _main(lines: list[Line], where: str) -> list[Line]:
    """The lines without contents, imprint and the like, unless these are most of the book."""
    main = [line for line in lines if not line.matter]
    left_out = {line.matter: 0 for line in lines if line.matter and line.text}
    for line in lines:
        if line.matter in left_out:
            left_out[line.matter] += len(words_of(line.text))
    if not left_out or 2 * sum(len(line.text) for line in main) < sum(len(line.text) for line in lines):
        return lines
    kinds = ", ".join(f"{kind} ({count} words)" for kind, count in left_out.items())
    print(f"text    {where}: left out {kinds}; --matter all reads them", file=sys.stderr)
    return main


def _text(data: bytes, where: str, matter: str, is_page: bool) -> Source:
    text, guessed = decoded(data, where)
    if guessed:
        guessed = guessed.replace("cp125", "Windows-125")
        print(f"text    {where}: read as {guessed}; if letters are wrong, save it as UTF-8", file=sys.stderr)
    if is_page or is_html(text):
        return _book(read_html(text, where), where, matter)
    tags, rest, first = split_front_matter(text, where)
    return Source(Markdown(rest, first), tags)
