"""Where a text to read aloud comes from: a file of text, Markdown or EPUB, or standard input."""

import io
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from qwen_megakernel.commands.book_lines import Line, Markdown
from qwen_megakernel.commands.epub import Epub
from qwen_megakernel.commands.front_matter import split_front_matter
from qwen_megakernel.commands.text_bytes import HEAD, check_text, decoded
from qwen_megakernel.errors import RequestError


@dataclass(frozen=True)
class Source:
    """A text, and what it tells about itself."""

    lines: Iterable[Line]  # which can be read more than once
    tags: dict[str, str] = field(default_factory=dict)  # "title", "author", "language", as far as they are known


def read_source(path: str | None) -> Source:
    """Read a file; None or "-": standard input. Raises RequestError: it cannot be read, or holds no text."""
    try:
        if path not in (None, "-"):
            return _file(Path(path), f"--file {path}")
        if path is None and sys.stdin.isatty():
            raise RequestError("no text: give --text, --file or standard input")
        data = sys.stdin.buffer.read()
        if _is_zip(data):
            return _epub(io.BytesIO(data), "standard input")
        check_text(data[:HEAD], "standard input")
        return _text(data, "standard input")
    except OSError as error:
        raise RequestError(f"the text cannot be read: {error}") from None


def _file(path: Path, where: str) -> Source:
    with open(path, "rb") as file:
        head = file.read(HEAD)
        if _is_zip(head):
            return _epub(file, where)
        check_text(head, where)  # before the rest of what may be a film is read
        return _text(head + file.read(), where)


def _is_zip(data: bytes) -> bool:
    return data.startswith((b"PK\x03\x04", b"PK\x05\x06"))


def _epub(file: io.BufferedReader | io.BytesIO, where: str) -> Source:
    with Epub(file, where) as book:
        tags, lines = book.read()
        return Source(list(lines), tags)


def _text(data: bytes, where: str) -> Source:
    text, guessed = decoded(data, where)
    if guessed:
        guessed = guessed.replace("cp125", "Windows-125")
        print(f"text    {where}: read as {guessed}; if letters are wrong, save it as UTF-8", file=sys.stderr)
    tags, rest, first = split_front_matter(text)
    return Source(Markdown(rest, first), tags)
