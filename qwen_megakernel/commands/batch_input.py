"""The lines that `qwen-megakernel batch` speaks: from JSONL, CSV or plain text, one at a time."""

import csv
import json
import reprlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from qwen_megakernel.errors import RequestError
from qwen_megakernel.speech.options import Option, RequestOptions, options_of, read_options, table
from spoken_text.files import open_file

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".txt": "text"}
"""Ending of an input's name -> its format."""

_LONGEST = 2**20  # bytes of a line
_LONGEST_ID = 150  # bytes: file systems take names of 255, and an ending is added
_NOT_IN_IDS = set('/\\:*?"<>|')


@dataclass(frozen=True)
class Line:
    """One line of the input."""

    number: int  # from 1; in a CSV file the row's number, without the header
    id: str | None  # the name of its file, checked unless there is an error; None: it could not be read
    text: str = ""
    options: RequestOptions = field(default_factory=RequestOptions)  # of speech, checked
    error: str | None = None  # why it cannot be spoken; None: no error was found here


FIELDS = ("id", "text", *options_of("line"))  # a line's possible fields


def kind_of(source: str, kind: str | None) -> str:
    """The input's format: "jsonl", "csv" or "text". `source`: a path, or "-" for standard input. `kind`: the user's
    choice; None: by the name's ending. Raises RequestError: the name has no known ending."""
    if kind is None and (kind := KINDS.get(Path(source).suffix.lower())) is None:
        name = "standard input" if source == "-" else repr(source)
        raise RequestError(f"{name} does not tell its format: give --input-format jsonl, csv or text")
    return kind


def count_lines(source: str, kind: str) -> int | None:
    """The number of lines to speak; None: not known before they are read."""
    return None if source == "-" else sum(1 for _ in read_lines(source, kind))


def read_lines(source: str, kind: str) -> Iterator[Line]:
    """The lines, one at a time. A line that cannot be read comes with its error. Raises RequestError: the input cannot
    be read, or it is a CSV file whose header is wrong."""
    with _opened(source) as file:
        yield from {"jsonl": _read_jsonl, "csv": _read_csv, "text": _read_text}[kind](file)


def _opened(source: str) -> AbstractContextManager[IO[bytes]]:
    try:
        return nullcontext(sys.stdin.buffer) if source == "-" else open_file(source, "a batch's input")
    except OSError as error:
        raise RequestError(
            f"{source!r} cannot be read: {error.strerror}; name a file of lines, or - for stdin"
        ) from None


def _raw_lines(file: IO[bytes]) -> Iterator[tuple[int, str, str | None]]:
    """Yield every line's number, text and error. The text is empty if there is an error."""
    number = 0
    while raw := file.readline(_LONGEST + 1):
        number += 1
        if len(raw) > _LONGEST:
            while not raw.endswith(b"\n") and (raw := file.readline(_LONGEST)):
                pass
            yield number, "", f"the line is longer than {_LONGEST:,} bytes: cut it"
            continue
        try:
            yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n"), None
        except UnicodeDecodeError as error:
            yield number, "", f"the line must be UTF-8: {error}"


def _read_text(file: IO[bytes]) -> Iterator[Line]:
    for number, text, error in _raw_lines(file):
        if error or text.strip():
            yield Line(number, f"{number:06d}", text, error=error)


def _read_jsonl(file: IO[bytes]) -> Iterator[Line]:
    for number, text, error in _raw_lines(file):
        if error is None and not text.strip():
            continue
        said: Any = None
        if error is None:
            try:
                said = json.loads(text)
                error = None if isinstance(said, dict) else f"must be a JSON object, got {text[:80]!r}"
            except (ValueError, RecursionError) as wrong:
                error = f"must be a JSON object: {wrong}"
        yield Line(number, None, error=error) if error else _line(number, said)


def _read_csv(file: IO[bytes]) -> Iterator[Line]:
    errors: dict[int, str] = {}

    def texts() -> Iterator[str]:
        for number, text, error in _raw_lines(file):
            errors.update({number: error} if error else {})
            yield f"{text}\n"

    csv.field_size_limit(_LONGEST)
    rows = csv.reader(texts(), strict=True)
    header = [name.strip().lower() for name in _row(rows) or []]
    unknown = [name for name in header if name not in FIELDS]
    if "text" not in header or unknown or len(set(header)) < len(header):
        wanted = "the first row of the CSV must name its columns, once each, with text among them"
        raise RequestError(f"{wanted}: {', '.join(FIELDS)}; got {', '.join(header)[:200] or 'nothing'}")
    number = 0
    while (row := _row(rows)) is not None:
        if row == []:
            continue
        number += 1
        wrong = row if isinstance(row, str) else errors.pop(rows.line_num, None)
        if wrong is None and len(row) > len(header):
            wrong = f"has {len(row)} cells, but the header has {len(header)}: put quotes around a text with commas"
        if wrong:
            yield Line(number, None, error=f"row {number}: {wrong}")
        else:
            yield _line(number, {name: cell for name, cell in zip(header, row, strict=False) if cell != ""})


def _row(rows: Iterator[list[str]]) -> list[str] | str | None:
    """The next row. A string says why it cannot be read. None: there are no more rows."""
    try:
        return next(rows)
    except StopIteration:
        return None
    except csv.Error as error:
        return f"is not CSV: {error}"


def _line(number: int, said: dict[str, Any]) -> Line:
    named = said.get("id")
    try:
        line_id = f"{number:06d}" if named is None else check_id(named)
        for name in said:
            if name not in FIELDS and name not in table():
                raise ValueError(f"unknown field {reprlib.repr(name)}; known: {', '.join(FIELDS)}")
        if (text := said.get("text")) is None:
            raise ValueError("text is missing: say what to speak")
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {reprlib.repr(text)}")
        rows = options_of("line")
        given = {n: _read_cell(rows.get(n), n, v) for n, v in said.items() if n not in ("id", "text")}
        options = read_options(given, "line")
    except ValueError as wrong:  # a RequestError is one
        return Line(number, named[:_LONGEST_ID] if isinstance(named, str) else None, error=str(wrong))
    return Line(number, line_id, text, options)


def _read_cell(row: Option | None, name: str, value: Any) -> Any:
    """A field's value. A CSV file has strings alone."""
    if row is None or not isinstance(value, str) or (kind := row.kinds[0]) not in (int, float, bool):
        return value
    try:
        return {"true": True, "false": False}[value.strip().lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        raise ValueError(f"{name} must be {row.wanted}, got {reprlib.repr(value)}") from None


def check_id(name: object) -> str:
    """The id of a line. Raises ValueError: it cannot be a file name."""
    if not isinstance(name, str):
        raise ValueError(f"id must be a string, got {reprlib.repr(name)}")
    bad = not name.strip() or name.startswith(".") or name != name.strip(" ") or not name.isprintable()
    if bad or _NOT_IN_IDS & set(name) or len(name.encode("utf-8", "surrogatepass")) > _LONGEST_ID:
        wanted = f"a plain name for a file, of at most {_LONGEST_ID} bytes, not beginning with a dot"
        raise ValueError(f"id must be {wanted} and without {' '.join(sorted(_NOT_IN_IDS))}; got {name[:80]!r}")
    return name
