"""Record: what a server notes of a request until it has ended, for its log, metrics and traces."""

import contextlib
import re
import secrets
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_MOST_PATH = 200  # characters


@dataclass(eq=False)
class Record:
    """A request over HTTP, a connection of a WebSocket, or one of the texts that such a connection has spoken.

    Attributes:
        protocol: "http", "socket", "stream" (vLLM-Omni's), "wyoming", or "websocket" for a path where none is.
        id: the client's or a new one. All texts of a connection have the connection's.
        client: its address.
        key: name of the client's key; empty: there are no names.
        path, route: what was asked for, and the same for metrics, where unknown paths are "other".
        traceparent: of the client's trace (W3C Trace Context).
        status: of HTTP; 101: a WebSocket. None: nothing was answered yet.
        error: an ApiError, if it was refused or has failed.
        fields: further ones of its line in the log.
        characters: of the texts that came to be spoken.
        speeches: what was spoken.
        trace_id: of its spans, if there are any.
    """

    protocol: str
    id: str = ""
    client: str = ""
    key: str = ""
    method: str = ""
    path: str = ""
    route: str = "other"
    traceparent: str = ""
    status: int | None = None
    error: Any = None
    fields: dict[str, Any] = field(default_factory=dict)
    characters: int = 0
    speeches: list["Speech"] = field(default_factory=list)
    trace_id: str = ""
    begun_ns: int = field(default_factory=time.time_ns)
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            self.id = secrets.token_hex(16)
        self.path = self.path[:_MOST_PATH]

    def child(self, **fields: Any) -> "Record":
        """A text of this connection. `fields`: they tell which."""
        return Record(
            self.protocol, self.id, self.client, self.key, "", self.path, self.route, self.traceparent, fields=fields
        )

    @property
    def answer(self) -> int:
        """The status for log and metrics: what was sent, or what the error means."""
        return self.status or (self.error.status if self.error else 200)


@dataclass(eq=False)
class Speech:
    """What a session has spoken, in seconds; None: it did not come to that.

    Attributes:
        stages: seconds of each stage up to the first chunk, by their names in order (`Timings`).
        finish_reason: as `Audio` has it, or "failed".
    """

    seed: int
    finish_reason: str = "cancelled"
    audio_s: float = 0.0
    compute_s: float = 0.0
    first_audio_s: float | None = None
    lead_s: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    begun_ns: int = field(default_factory=time.time_ns)


CURRENT: ContextVar[Record | None] = ContextVar("qwen_megakernel_request", default=None)
"""The request that this task serves. Tasks that it starts inherit it."""


@contextlib.contextmanager
def serving(record: Record) -> Iterator[Record]:
    """`CURRENT` is this record until the end of the block."""
    token = CURRENT.set(record)
    try:
        yield record
    finally:
        CURRENT.reset(token)
