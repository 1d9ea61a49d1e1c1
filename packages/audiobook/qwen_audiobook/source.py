"""Where a book comes from: a file of text, Markdown or EPUB, or standard input."""

import io
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from qwen_audiobook.epub import Epub
from qwen_audiobook.front_matter import split_front_matter
from qwen_audiobook.lines import Line, Markdown
from qwen_audiobook.text_bytes import HEAD, check_text, decoded
from qwen_megakernel.commands.text_input import read_bytes, text_file


@dataclass(frozen=True)
class Source:
    """A text, and what it tells about itself."""

    lines: Iterable[Line]  # which can be read more than once
    tags: dict[str, str] = field(default_factory=dict)  # "title", "author", "language", as far as they are known


def read_source(path: str | None) -> Source:
    """Read a file; None or "-": standard input. Raises RequestError: it cannot be read, or holds no text."""
    with text_file(path) as (file, where):
        head = file.read(HEAD)
        if not head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            check_text(head, where)  # before the rest of what may be a film is read
            return _text(head + read_bytes(file, where), where)
        if not file.seekable():
            file = io.BytesIO(head + read_bytes(file, where))
        with Epub(file, where) as book:
            tags, lines = book.read()
            return Source(list(lines), tags)


def _text(data: bytes, where: str) -> Source:
    text, guessed = decoded(data, where)
    if guessed:
        guessed = guessed.replace("cp125", "Windows-125")
        print(f"text    {where}: read as {guessed}; if letters are wrong, save it as UTF-8", file=sys.stderr)
    tags, rest, first = split_front_matter(text, where)
    return Source(Markdown(rest, first), tags)
