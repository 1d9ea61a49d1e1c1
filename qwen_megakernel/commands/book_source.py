"""Where a text to read aloud comes from: a file of text, Markdown or EPUB, or standard input."""

import io
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import IO

from qwen_megakernel.commands.book_lines import Line, Markdown
from qwen_megakernel.commands.epub import MOST_BYTES, Epub
from qwen_megakernel.commands.front_matter import split_front_matter
from qwen_megakernel.commands.text_bytes import HEAD, check_text, decoded
from qwen_megakernel.errors import RequestError
from spoken_text.files import UnfitFile, open_file, read_most


@dataclass(frozen=True)
class Source:
    """A text, and what it tells about itself."""

    lines: Iterable[Line]  # which can be read more than once
    tags: dict[str, str] = field(default_factory=dict)  # "title", "author", "language", as far as they are known


def read_source(path: str | None) -> Source:
    """Read a file; None or "-": standard input. Raises RequestError: it cannot be read, or holds no text."""
    try:
        if path not in (None, "-"):
            return _file(path, f"--file {path}")
        if path is None and sys.stdin.isatty():
            raise RequestError("no text: give --text, --file or standard input")
        head = sys.stdin.buffer.read(HEAD)
        if _is_zip(head):
            return _epub(io.BytesIO(head + _rest(sys.stdin.buffer, "standard input")), "standard input")
        return _plain(head, sys.stdin.buffer, "standard input")
    except OSError as error:
        where = "standard input" if path in (None, "-") else f"--file {path}"
        how = "name a file with text, or give the words themselves with --text"
        raise RequestError(f"{where} cannot be read: {error.strerror or error}; {how}") from None


def _file(path: str, where: str) -> Source:
    try:
        with open_file(path, "a text") as file:
            head = file.read(HEAD)
            return _epub(file, where) if _is_zip(head) else _plain(head, file, where)
    except UnfitFile as error:
        raise RequestError(f"{where}: {error.strerror}; send a pipe to standard input, with --file -") from None


def _plain(head: bytes, file: IO[bytes], where: str) -> Source:
    check_text(head, where)  # before the rest of what may be a film is read
    return _text(head + _rest(file, where), where)


def _rest(file: IO[bytes], where: str) -> bytes:
    data = read_most(file, MOST_BYTES)
    if len(data) > MOST_BYTES:
        raise RequestError(f"{where}: it is longer than {MOST_BYTES // 10**6} MB; split the book")
    return data


def _is_zip(data: bytes) -> bool:
    return data.startswith((b"PK\x03\x04", b"PK\x05\x06"))


def _epub(file: IO[bytes], where: str) -> Source:
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
