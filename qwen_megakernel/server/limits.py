"""Limits: how much of a server one caller may use."""

import logging
import resource
from collections.abc import MutableSequence
from dataclasses import dataclass, replace
from typing import Any

log = logging.getLogger(__name__)

MOST_VALUES = 40_000
"""Values of JSON: to read more holds the event loop for over 5 ms, and every wrong one makes an error."""

_OTHER_FILES = 256  # open besides connections: of the engine, its device and its libraries; half of a low limit


@dataclass(frozen=True)
class Limits:
    """Times are in seconds, sizes in bytes, texts in characters.

    Attributes:
        max_text: characters of one request, or of one context.
        max_batch: texts of one batch.
        max_batch_text: characters of all texts of one batch together.
        max_body: bytes of a request's body or of a WebSocket message. A batch's body may be four times as large.
        max_upload: bytes of a reference recording.
        connections: open at once, HTTP and WebSocket together.
        spare_connections: more of them, which may ask for the server's health only.
        pipelined: requests that wait behind the one that is answered, on one connection.
        max_head: bytes of a request's head, or of its trailers.
        max_headers: a request's headers and trailers.
        max_unsent: bytes that wait to be sent to one WebSocket's client.
        fragments: frames of one WebSocket message.
        control_frames: pings and pongs of one WebSocket's client in a second.
        contexts: open at once on one WebSocket.
        clones: voices that requests have brought and that are kept; one has at most some 100 KB.
        clones_a_minute: new ones of these; each takes seconds of a CPU.
        header_s: time for the head of a request; then the connection is closed.
        idle_s: a client that neither sends nor takes anything for this long is disconnected.
        text_s: a context whose text is incomplete ends if no more text comes for this long.
        total_s: time for one request or one context, from its first byte to its last.
    """

    max_text: int = 4096
    max_batch: int = 64
    max_batch_text: int = 32_768
    max_body: int = 64 << 10
    max_upload: int = 8 << 20
    connections: int = 512
    spare_connections: int = 16
    pipelined: int = 4
    max_head: int = 16 << 10
    max_headers: int = 100
    max_unsent: int = 16 << 20
    fragments: int = 1000
    control_frames: int = 100
    contexts: int = 16
    clones: int = 64
    clones_a_minute: int = 30
    header_s: float = 20.0
    idle_s: float = 60.0
    text_s: float = 120.0
    total_s: float = 600.0

    @classmethod
    def of(cls, max_streams: int) -> "Limits":
        """The defaults for an engine with so many slots: as many more callers can wait, each over a connection."""
        return cls(connections=max(cls.connections, 2 * max_streams))


def allow_files(limits: Limits) -> Limits:
    """Let this process, and those that it starts, open as many files as the system allows. Each connection is a file,
    and systems often allow 1,024 at first.

    Returns:
        Limits with no more connections than can be open. Without a file for it a caller would hang, and so would a
        supervisor that asks for /health. Warns if they are fewer.
    """
    spare = limits.spare_connections
    need = limits.connections + spare + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits
    most = max(need, soft) if hard == resource.RLIM_INFINITY else hard
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most >= need:
        return limits
    fit = max(1, min(limits.connections, most - spare - min(_OTHER_FILES, most // 2)))
    log.warning(
        "%d connections need %d open files, and the system allows %d: at most %d connections are open at once. Raise "
        "the limit (`ulimit -n %d`) before you start the server",
        limits.connections,
        need,
        most,
        fit,
        need,
    )
    return replace(limits, connections=fit)


class OpenCount:
    """How many connections, or sockets, are open in all processes of a server. Each process writes its own number and
    no other, so there is no lock. In a burst a few more than a limit may come in."""

    def __init__(self, numbers: MutableSequence[int] | None = None, mine: int = 0):
        """
        Args:
            numbers: one for each process, in memory that they share. None: this is the only process.
            mine: the place of this process's number.
        """
        self._numbers = [0] if numbers is None else numbers
        self._mine = mine

    @property
    def here(self) -> int:
        return self._numbers[self._mine]

    @here.setter
    def here(self, number: int) -> None:
        self._numbers[self._mine] = number

    @property
    def total(self) -> int:
        return sum(self._numbers)


def too_many_values(body: bytes | str) -> bool:
    """Does JSON hold more values than `MOST_VALUES`? Texts count too, by their commas."""
    marks: Any = (b",", b"[", b"{") if isinstance(body, bytes) else (",", "[", "{")
    return sum(map(body.count, marks)) > MOST_VALUES
