"""Manifest: what a batch has made, one JSON object a line, kept so that the same command goes on after any end."""

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

from qwen_megakernel.errors import RequestError

NAME = "manifest.jsonl"


class Manifest:
    """The manifest of a folder. While a batch runs, entries are appended as they are made. At the end they are sorted
    by the input's lines, so that the file does not show in which order they were made.

    What is known lies in a temporary database: memory is bounded however many entries there are.
    """

    def __init__(self, folder: Path):
        """
        Args:
            folder: made if it is not there.

        Raises:
            RequestError: it cannot be written, or another batch writes there.
        """
        self._path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a+b")  # noqa: SIM115 - see `close`
        except OSError as error:
            raise self._cannot_write(error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise RequestError(f"--output {folder}: another batch writes there; wait for it, or name another") from None
        for left in folder.glob(".speech-*.part"):  # of a batch that was killed
            left.unlink(missing_ok=True)
        self._known = sqlite3.connect("")  # a temporary file
        self._known.execute("CREATE TABLE entries (key TEXT PRIMARY KEY, entry TEXT)")
        self._known.execute("CREATE TABLE lines (key TEXT PRIMARY KEY, line INTEGER)")
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        """Entries of an earlier run. A last line without its end was being written when that was killed."""
        self._file.seek(0)
        whole = 0
        for number, raw in enumerate(self._file, 1):
            if not raw.endswith(b"\n"):
                break
            try:
                entry = json.loads(raw)
                if entry["error"] is None:  # else the line is tried again
                    self._keep(entry, _folded(entry["id"]))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise RequestError(
                    f"{self._path}, line {number}: not a manifest of `batch`; name another --output, or move it away"
                ) from None
            whole += len(raw)
        self._file.truncate(whole)

    def _keep(self, entry: dict[str, Any], key: str) -> None:
        row = (key, json.dumps(entry, ensure_ascii=False))
        self._known.execute("INSERT OR REPLACE INTO entries VALUES (?, ?)", row)

    def entry(self, name: str) -> dict[str, Any] | None:
        """What was made for an id."""
        row = self._known.execute("SELECT entry FROM entries WHERE key = ?", (_folded(name),)).fetchone()
        return json.loads(row[0]) if row else None

    def threads(self) -> int | None:
        """CPU threads of an earlier run: with as many, sums are the same to the last bit."""
        row = self._known.execute("SELECT entry FROM entries LIMIT 1").fetchone()
        return json.loads(row[0]).get("threads") if row else None

    def claim(self, name: str, line: int) -> int | None:
        """Take an id for a line of this run. The line that has it already, or None."""
        row = self._known.execute("SELECT line FROM lines WHERE key = ?", (_folded(name),)).fetchone()
        if row is None:
            self._known.execute("INSERT INTO lines VALUES (?, ?)", (_folded(name), line))
        return row and row[0]

    def add(self, entry: dict[str, Any]) -> None:
        """Append an entry. A process that is killed afterwards does not lose it.

        Raises:
            RequestError: the manifest cannot be written.
        """
        if entry["error"] is None:
            self._keep(entry, _folded(entry["id"]))
        else:  # which may not have the id for itself
            key = f"\0{entry['line']}"
            self._keep(entry, key)
            self._known.execute("INSERT OR REPLACE INTO lines VALUES (?, ?)", (key, entry["line"]))
        with self._told():
            self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
            self._file.flush()

    def finish(self) -> None:
        """All lines of the input were seen: sort the entries by them. Entries of lines that are not in the input any
        more are left out.

        Raises:
            RequestError: the manifest cannot be written.
        """
        part = self._path.with_name(f".{NAME}.part")
        query = "SELECT lines.line, entry FROM entries JOIN lines USING (key) ORDER BY lines.line"
        with self._told(), open(part, "wb") as file:
            for line, entry in self._known.execute(query):
                file.write(json.dumps(json.loads(entry) | {"line": line}, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            part.replace(self._path)

    def close(self) -> None:
        self._known.close()
        self._file.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> RequestError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "no space left: make room" if full else f"{error.strerror}: name another folder"
        return RequestError(f"--output {self._path.parent}: {NAME} cannot be written, {why}")


def _folded(name: str) -> str:
    """Ids that some file systems take for the same are the same."""
    return unicodedata.normalize("NFC", name).casefold()
