"""The text that a command reads aloud: a file, or standard input."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import IO

from qwen_megakernel.choices import AUDIOBOOK
from qwen_megakernel.errors import RequestError
from spoken_text.files import UnfitFile, open_file, read_most

MOST_BYTES = 50_000_000  # of a text: a hundred long novels

_BINARY = re.compile(rb"PK\x03\x04|PK\x05\x06|%PDF-|\{\\rtf")  # EPUB and other archives, PDF, rich text
_FRONT_MATTER = re.compile(
    r"(---|\+\+\+)[ \t]*\n(?:#.*\n)*(?:[a-z_][\w.-]*|Title|Author)[ \t]*[:=][^\0]*?^(?:\1|\.\.\.)[ \t]*$", re.M
)
_FOOTNOTE = re.compile(r"^ {0,3}\[\^[^\]\s]{1,100}\]:", re.M)
_HEAD = 65_536  # characters; front matter is not longer


@contextmanager
def text_file(path: str | None) -> Iterator[tuple[IO[bytes], str]]:
    """Open a text. `path`: None or "-": standard input. Yields the open file, and how messages name it. Raises
    RequestError: it cannot be read, also within the block."""
    if path is None and sys.stdin.isatty():
        raise RequestError("no text: give --text, --file or standard input")
    where = "standard input" if path in (None, "-") else f"--file {path}"
    try:
        with nullcontext(sys.stdin.buffer) if path is None or path == "-" else open_file(path, "a text") as file:
            yield file, where
    except UnfitFile as error:
        raise RequestError(f"{where}: {error.strerror}; send a pipe to standard input, with --file -") from None
    except OSError as error:
        how = "name a file with text, or give the words themselves with --text"
        raise RequestError(f"{where} cannot be read: {error.strerror or error}; {how}") from None


def read_bytes(file: IO[bytes], where: str) -> bytes:
    """All that is left of a file. `where`: names it in messages. Raises RequestError: it has more than `MOST_BYTES`."""
    data = read_most(file, MOST_BYTES)
    if len(data) > MOST_BYTES:
        raise RequestError(f"{where}: it is longer than {MOST_BYTES // 10**6} MB; split the book")
    return data


def read_text(path: str | None) -> str:
    """Read a plain text in UTF-8, or in UTF-16 or UTF-32 with a byte order mark. `path`: as for `text_file`. Raises
    RequestError: it cannot be read, is no text, or is a book; then the message names the package for books."""
    with text_file(path) as (file, where):
        data = read_bytes(file, where)
    try:
        if _BINARY.match(data):
            raise ValueError
        text = data.decode(_encoding_of(data))
        if "\0" in text:
            raise ValueError
    except ValueError:  # a UnicodeDecodeError is one
        kinds = "EPUB and old encodings, and tells what other files are"
        raise RequestError(f"{where}: expected plain text in UTF-8; {AUDIOBOOK} reads {kinds}") from None
    if _FRONT_MATTER.match(text[:_HEAD].replace("\r\n", "\n")):
        raise RequestError(f"{where}: it begins with front matter; {AUDIOBOOK} reads that")
    if _FOOTNOTE.search(text):
        raise RequestError(f"{where}: it has footnotes; {AUDIOBOOK} leaves them out, or reads them")
    return text


def _encoding_of(data: bytes) -> str:
    """By the byte order mark. UTF-32's little-endian one begins with that of UTF-16."""
    if data.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "utf-32"
    return "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
