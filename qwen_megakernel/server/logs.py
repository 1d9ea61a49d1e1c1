"""The log of a server: lines or JSON, each with its request's id, written by a thread of its own."""

import json
import logging
import logging.handlers
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from qwen_megakernel.server.records import CURRENT

log = logging.getLogger(__name__)

_MOST_LINES = 10_000  # that wait for standard error; more are dropped, and counted
_FLUSH_S = 2.0
_KNOWN = ("Invalid HTTP request received.", "ASGI callable returned without completing response.")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


class TextFormatter(logging.Formatter):
    """`2026-11-28T10:00:00.123Z INFO access request status=200 ...`. A value that could be misread is quoted, so no
    client can make up a line."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time_of(record)} {record.levelname} {record.name.removeprefix('qwen_megakernel.')}"
        words = "".join(f" {name}={_quoted(value)}" for name, value in _fields(record).items())
        text = _shown(f"{head} {record.getMessage()}{words}")
        return text + "\n" + _shown(record.exc_text, keep="\n\t") if record.exc_text else text


class JsonFormatter(logging.Formatter):
    """An object a line."""

    def format(self, record: logging.LogRecord) -> str:
        told = {"time": _time_of(record), "level": record.levelname, "logger": record.name}
        told |= {"message": record.getMessage()} | _fields(record)
        return json.dumps(told | ({"traceback": record.exc_text} if record.exc_text else {}), default=str)


def _shown(text: str, keep: str = "") -> str:
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def _time_of(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _quoted(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(' "=\\') else json.dumps(text)


class LogQueue(logging.handlers.QueueHandler):
    """Puts lines into a queue, from which a thread writes them: a reader of standard error that is slow, or a full
    disk, must not hold up an event loop. Who logs waits for nothing."""

    def __init__(self, handler: logging.Handler, fields: dict[str, Any]):
        """`handler`: writes. `fields`: of every line."""
        self._fields = fields
        self._lines: queue.Queue[Any] = queue.Queue(_MOST_LINES)
        super().__init__(self._lines)
        self._formatter = logging.Formatter()
        self.dropped = 0
        self._told = 0  # of those that were dropped
        self._writer = logging.handlers.QueueListener(self._lines, handler)
        self._writer.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """In the thread and the context that logs: arguments may change, and the request is known only here."""
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = record.exc_text or self._formatter.formatException(record.exc_info)
            record.exc_info = None
        served = CURRENT.get()
        fields = self._fields | ({"request_id": served.id} if served else {}) | _fields(record)
        if self.dropped > self._told and not self._lines.full():
            fields |= {"lines_dropped": self.dropped - self._told}
            self._told = self.dropped
        record.fields = fields
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Whoever made it calls it, and Python at its exit may too."""
        super().close()
        if self._writer._thread:  # before Python 3.12 a second `stop` fails
            self._writer.stop()

    def flush(self) -> None:
        """Wait a moment until all lines are written."""
        end = time.monotonic() + _FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)


class FewLines(logging.Filter):
    """Lets so many lines a second through, and tells of the others: anyone can make uvicorn log something. Those of
    `_KNOWN` are left out: the journal has a line of its own for what was refused or cut."""

    def __init__(self, most: int = 10):
        super().__init__()
        self._most = most
        self._second = self._lines = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg in _KNOWN:
            return False
        if self._second != int(record.created):
            left_out = self._lines - self._most
            self._second, self._lines = int(record.created), 0
            if left_out > 0:
                record.msg, record.args = f"{record.getMessage()} (and {left_out} more lines)", ()
        self._lines += 1
        return self._lines <= self._most


def set_up(form: str, *, front: int | None = None) -> Callable[[], None]:
    """Let all loggers of this process write to standard error in this form, also Python's warnings and what ends a
    thread. Returns what undoes it.

    Args:
        form: one of `LOG_FORMATS`.
        front: number of this front process.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root, lines = logging.getLogger(), LogQueue(handler, {} if front is None else {"front": front})
    before, hook = root.handlers, threading.excepthook
    root.handlers = [lines, *(other for other in before if type(other) is not logging.StreamHandler)]
    logging.captureWarnings(True)
    threading.excepthook = _thread_ended
    if form == "json":
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they are no lines

    def undo() -> None:
        root.handlers, threading.excepthook = before, hook
        logging.captureWarnings(False)
        lines.close()

    return undo


def _thread_ended(how: threading.ExceptHookArgs) -> None:
    told: Any = (how.exc_type, how.exc_value, how.exc_traceback)
    log.critical("the thread %s has ended", how.thread and how.thread.name, exc_info=told)


def flush() -> None:
    """Wait a moment until all lines are written: the process is about to end."""
    for handler in logging.getLogger().handlers:
        handler.flush()
