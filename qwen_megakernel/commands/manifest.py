"""Manifest: what a batch has made, one JSON object per line. With it the same command can resume after any end."""

import errno
import fcntl
import json
import os
import sqlite3
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qwen_megakernel.choices import MANIFEST
from qwen_megakernel.commands.batch_input import check_id
from qwen_megakernel.commands.output import drop_halves, new_file
from qwen_megakernel.errors import RequestError
from spoken_text.files import open_descriptor

_LONGEST = 2**22  # bytes of a line; an error may quote a line of the input


class Manifest:
    """A folder's manifest. While a batch runs, it appends entries as they are made. At the end it sorts them by the
    input's lines, so that the file does not depend on the order in which they were made.

    A temporary database holds the entries, so memory stays bounded.
    """

    def __init__(self, folder: Path):
        """`folder`: made if it does not exist. Raises RequestError: the folder cannot be written, or another batch
        writes there."""
        self._path = folder / MANIFEST
        with self._told():
            folder.mkdir(parents=True, exist_ok=True)
            opened = open_descriptor(self._path, "a manifest", flags=os.O_RDWR | os.O_APPEND | os.O_CREAT)
            self._file = open(opened, "a+b")  # noqa: SIM115 - see `close`
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise RequestError(f"--output {folder}: another batch writes there; wait for it, or name another") from None
        drop_halves(folder)
        self._known = sqlite3.connect("")  # a temporary file
        self._known.execute("CREATE TABLE entries (key TEXT PRIMARY KEY, entry TEXT)")
        self._known.execute("CREATE TABLE lines (key TEXT PRIMARY KEY, line INTEGER)")
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        """Read an earlier run's entries. An incomplete last line was being written when that run was killed."""
        self._file.seek(0)
        whole = number = 0
        while raw := self._file.readline(_LONGEST):
            number += 1
            if not raw.endswith(b"\n") and len(raw) < _LONGEST:
                break
            try:
                entry = _checked(json.loads(raw))
                if entry["error"] is None:  # else the line is tried again
                    self._keep(entry, _folded(entry["id"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                wrong = f"{self._path}, line {number}: not a manifest of `batch`"
                raise RequestError(f"{wrong}; name another --output, or move it away") from None
            whole += len(raw)
        self._file.truncate(whole)

    def _keep(self, entry: dict[str, Any], key: str) -> None:
        row = (key, json.dumps(entry))
        self._known.execute("INSERT OR REPLACE INTO entries VALUES (?, ?)", row)

    def entry(self, name: str) -> dict[str, Any] | None:
        """The entry for an id, from an earlier run."""
        return self._first("SELECT entry FROM entries WHERE key = ?", _folded(name))

    def threads(self) -> int | None:
        """CPU threads of an earlier run. The same number makes sums equal to the last bit."""
        return (self._first("SELECT entry FROM entries LIMIT 1") or {}).get("threads")

    def _first(self, query: str, *values: str) -> dict[str, Any] | None:
        row = self._known.execute(query, values).fetchone()
        return json.loads(row[0]) if row else None

    def claim(self, name: str, line: int) -> int | None:
        """Take an id for a line of this run. Returns the line that already has it, or None."""
        key = _folded(name)
        if self._known.execute("INSERT OR IGNORE INTO lines VALUES (?, ?)", (key, line)).rowcount:
            return None
        return self._known.execute("SELECT line FROM lines WHERE key = ?", (key,)).fetchone()[0]

    def add(self, entry: dict[str, Any]) -> None:
        """Append an entry. If the process is killed afterwards, the entry is not lost. Raises RequestError: the
        manifest cannot be written."""
        # Another line may have the id of one that failed.
        key = _folded(entry["id"]) if entry["error"] is None else f"\0{entry['line']}"
        self._keep(entry, key)
        self._known.execute("INSERT OR IGNORE INTO lines VALUES (?, ?)", (key, entry["line"]))
        with self._told():
            self._file.write(_line(entry))
            self._file.flush()

    def finish(self) -> None:
        """Sort the entries by the input's lines, once all lines were seen. Entries of lines that are no longer in the
        input are dropped. Raises RequestError: the manifest cannot be written."""
        query = "SELECT lines.line, entry FROM entries JOIN lines USING (key) ORDER BY lines.line"
        with self._told(), new_file(self._path) as file:
            for line, entry in self._known.execute(query):
                file.write(_line(json.loads(entry) | {"line": line}))

    def close(self) -> None:
        self._known.close()
        self._file.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "no space left: make room" if full else f"{error.strerror}: name another folder"
            raise RequestError(f"--output {self._path.parent}: {MANIFEST} cannot be written, {why}") from None


def _checked(entry: Any) -> dict[str, Any]:
    """An entry of an earlier run, whose fields this run uses. Raises ValueError, KeyError, TypeError: it is none."""
    if entry["error"] is None:
        check_id(entry["id"])
        threads = entry["threads"]
        if not isinstance(entry["request"], str) or not (threads is None or type(threads) is int and threads > 0):
            raise ValueError
    return entry


def _line(entry: dict[str, Any]) -> bytes:
    # What has no UTF-8 form becomes the escape that JSON has for it.
    return json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _folded(name: str) -> str:
    """The same string for ids that some file systems do not tell apart."""
    return unicodedata.normalize("NFC", name).casefold()
