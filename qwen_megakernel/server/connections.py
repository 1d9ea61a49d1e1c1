"""The connections of `serve`: uvicorn's protocols, whose every state has a limit of time and of bytes here.

uvicorn has a limit on the number of connections and on a kept-alive one's silence. The rest is ours:

    state                 time                        bytes
    TLS, then a head      `header_s` for both         of TLS asyncio's own; `max_head`, `max_headers`
    a handshake           `header_s`                  the same; no body
    a body                `idle_s` (guard.py)         `max_body` and others (guard.py); between its pieces `max_head`
    an answer             `total_s` (guard.py)        what waits to be sent: uvicorn's flow control, 64 KB and a piece
    unsent bytes          `idle_s` without progress   (TCP_USER_TIMEOUT, set where the socket is bound)
    between two requests  `idle_s`                    `max_head`, `pipelined`
    a socket's message    `idle_s` (socket_line.py)   `max_message`, `fragments`
    pings and pongs                                   `control_frames` a second; one pong waits to be sent

uvicorn with httptools has half the latency of its h11, and of hypercorn and granian, which have such limits of their
own in part (docs/log/2026-11-25.md#attacks-server-uvicorn).

uvicorn promises none of the names that are overridden here. So pyproject.toml admits one minor version of it, and
tests/test_connections.py looks whether each name is there. To admit the next one: raise both bounds, run that test,
test_serve*.py and `make test-attacks`, and read what has changed in uvicorn/protocols/.

The plan for leaving these overrides; each step deletes what it makes needless:

1. Offer uvicorn limits of heads (only its h11 has one), pipelined requests, a message's fragments, control frames.
2. Report its bugs: a pipelined request is not told that its client has gone (`_hang_up`), a refusal may come amid an
   answer (`send_400_response`), a handshake may have a body, bad UTF-8 is logged with a traceback, pongs pile up.
3. Places for connections (`resting`, `_crowded`) and reading by turns (`_read`) are our own. They need no override in a
   protocol of ours around httptools' parser and websockets' `ServerProtocol`, which uvicorn's `Config(http=, ws=)`
   takes. It would have about 400 lines, so it is worth it only if steps 1 and 2 fail.
"""

import asyncio
import json
import time
from contextlib import suppress
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame

from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.guard import OPEN, error_response
from qwen_megakernel.server.journal import Journal
from qwen_megakernel.server.limits import Limits, OpenCount
from qwen_megakernel.server.records import Record, serving
from qwen_megakernel.server.tls import TlsConnection

_BUSY = ApiError(503, "busy", "too many connections are open; try again", True)
_MOST_IGNORED = 16 << 20  # bytes, more than a recording has: a client may send all of it before it reads an error
_SLICE, _READ_S = 512, 0.002  # bytes and seconds: a frame takes up to 20 us, and 256 KB may come at once
_BAD_HANDSHAKE = STATUS_LINE[400] + b"connection: close\r\ncontent-length: 0\r\n\r\n"
_POLICY, _NOT_UTF8, _TOO_BIG = 1008, 1007, 1009  # closing codes (RFC 6455)


class _Refused(Exception):
    """Raised in a callback of the parser: the rest of what has come is not read."""


class CountedConnections(set[Any]):
    """uvicorn's set of open connections. It keeps their number up to date for other processes."""

    def __init__(self, count: OpenCount):
        self._count = count

    def add(self, connection: Any) -> None:
        super().add(connection)
        self._count.here = len(self)

    def discard(self, connection: Any) -> None:
        super().discard(connection)
        self._count.here = len(self)

    remove = discard


class HttpConnection(TlsConnection):
    """A connection that speaks HTTP.

    At rest it waits for TLS, and for a request's head. If all places are taken, a new connection takes that of the one
    that rests longest. If none rests, it may ask for `OPEN` only: a supervisor must not take a full server for dead.
    """

    limits: Limits
    count: OpenCount
    journal: Journal
    resting: dict["HttpConnection", None]
    """Those at rest, the longest first."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._loose = 0  # bytes since the last part of a request that was whole
        self._head = self._fields = self._ignored = 0  # bytes and number of its headers; bytes behind its answer
        self._refusal: ApiError | None = None
        self._answered: Any = None  # uvicorn's state of the request that is answered
        most, taken = self.limits.connections, self._taken
        if taken > most and (longest := next(iter(self.resting), None)):
            longest.drop()
            taken -= 1
        self._spare = taken > most
        if taken > most + self.limits.spare_connections:
            self._refused(_BUSY)
            self.drop()
            return
        self.resting[self] = None
        self._start_timer()
        self.begin_tls()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resting.pop(self, None)
        self._hang_up()
        super().connection_lost(exc)

    def drop(self) -> None:
        """End the connection at once."""
        self.resting.pop(self, None)
        self.connections.discard(self)
        self._hang_up()
        self.transport.abort()

    def _refused(self, error: ApiError) -> Record:
        record = Record("http", client=self.client[0] if self.client else "")
        self.journal.refuse(record, error)
        return record

    def _hang_up(self) -> None:
        """Nobody gets the answers. uvicorn tells that to the last request only."""
        if self._answered:
            self._answered.disconnected = True
            self._answered.message_event.set()
        self.pipeline.clear()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.limits.header_s, self._last_look)

    def _last_look(self) -> None:  # a head may wait that came in time: uvloop looks at its timers first
        self._timer = self.loop.call_later(0.001, self._too_late)

    def _too_late(self) -> None:
        if self._loose and not self.transport.is_closing():
            words = f"the head of a request took more than {self.limits.header_s:g} s: send it at once"
            self._refusal = ApiError(408, "idle", words)
            self.send_400_response("")
        else:  # nobody has asked for anything
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:  # as `_last_look`, for the next request
        self.timeout_keep_alive_task = self.loop.call_later(0.001, super().timeout_keep_alive_handler)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    # ------------------------------------------------------------ from the client

    def data_received(self, data: bytes) -> None:
        if self.early is not None:
            self.early += data
            return
        if self.cycle is None or self.cycle.response_complete:
            self._start_timer()
        self._loose += len(data)
        super().data_received(data)
        if self._loose > self.limits.max_head and not self.transport.is_closing():
            self._too_large()
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._head = self._fields = self._ignored = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._add(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._add(len(name) + len(value))
        super().on_header(name, value)

    def _add(self, size: int) -> None:
        self._head += size
        if self._head > self.limits.max_head or self._fields > self.limits.max_headers:
            self._too_large()
            raise _Refused

    def _too_large(self) -> None:
        most, number = self.limits.max_head, self.limits.max_headers
        words = f"the head of a request may have {most} bytes and {number} headers, at most: send less"
        self._refusal = ApiError(431, "invalid", words)

    def on_headers_complete(self) -> None:
        self._loose = 0
        if self.parser.should_upgrade() and self._should_upgrade():
            sizes = [value for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]
            if any(value != b"0" for value in sizes):  # else the parser would wait for the body
                self._refusal = ApiError(400, "invalid", "the handshake of a WebSocket has no body: leave it out")
                raise _Refused
            super().on_headers_complete()
            return  # the timer goes on
        if len(self.pipeline) >= self.limits.pipelined:
            raise _Refused
        self._stop_timer()
        self.resting.pop(self, None)
        self.app = self._answer
        super().on_headers_complete()

    @property
    def _crowded(self) -> bool:
        return self._spare and self._taken > self.limits.connections

    @property
    def _taken(self) -> int:
        return self.count.total - self.count.here + len(self.connections)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self.config.loaded_app
        if self._crowded and scope["path"] not in OPEN:
            record = self._refused(_BUSY)
            with serving(record):
                app = error_response(_BUSY, headers={"Connection": "close", "X-Request-Id": record.id})
        if scope["http_version"] == "1.0":
            self._answered.waiting_for_100_continue = False  # "100 Continue" would be its answer
            send = _without_chunks(self._answered, send)
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:  # the server ends; uvicorn would log a traceback
            self.drop()

    def on_body(self, body: bytes) -> None:
        self._loose = 0
        if self.cycle and self.cycle.response_complete:  # it was answered without its body
            self._ignored += len(body)
            if self._ignored > _MOST_IGNORED:
                raise _Refused
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._loose = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._answered.response_complete and not self.transport.is_closing():  # else another request is answered now
            self.resting[self] = None

    # ------------------------------------------------------------ to the client

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read, or is not wanted, and close."""
        if self.cycle and not self.cycle.response_complete:
            self.drop()  # nothing may come between the bytes of an answer
            return
        error = self._refusal or ApiError(400, "invalid", "this is not HTTP/1.1 as it must be")
        with serving(self._refused(error)) as record:
            body = json.dumps({"error": error.body}).encode()
        head = f"content-type: application/json\r\nconnection: close\r\nx-request-id: {record.id}\r\n".encode()
        head += b"content-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as one that asks for no other protocol. What comes behind it cannot be read."""
        if self.cycle:
            self.cycle.keep_alive = False
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def handle_websocket_upgrade(self) -> None:
        if self._crowded or self.cycle and not self.cycle.response_complete:
            self._refusal = _BUSY
            self.send_400_response("")
            return
        super().handle_websocket_upgrade()  # it answers, or another protocol has the connection now
        self._stop_timer()
        self.resting.pop(self, None)


def _without_chunks(cycle: Any, send: Send) -> Send:
    """HTTP/1.0 has no chunks: a body of unknown length goes on until the connection ends. uvicorn would send chunks to
    whoever asks. `cycle`: its state of the request."""
    endless = False

    async def send_plain(message: Message) -> None:
        nonlocal endless
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            endless = "content-length" not in headers
            if endless:
                headers["connection"] = "close"
                cycle.chunked_encoding = False
        elif endless:
            cycle.expected_content_length = len(message.get("body", b""))  # so uvicorn finds it right each time
        await send(message)

    return send_plain


class SocketConnection(WebSocketsSansIOProtocol):
    """A connection that speaks WebSocket. It reads for `_READ_S` in each turn of the event loop, because thousands of
    frames may come at once, and not beyond a message that the app has not taken."""

    limits: Limits
    journal: Journal

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._unread = bytearray()
        self._turn: asyncio.Handle | None = None
        self._pong = b""  # not sent yet, because the client does not read
        self._controls, self._since = 0, 0.0  # control frames in the current second, and its beginning

    def connection_lost(self, exc: Exception | None) -> None:
        if self._turn:
            self._turn.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        with suppress(InvalidState):  # it closes already: uvicorn would raise, and leave the other connections
            super().shutdown()
        self.transport.close()

    def drop(self) -> None:
        """End the connection at once."""
        self.disconnected = True
        self.transport.abort()

    # ------------------------------------------------------------ from the client

    def data_received(self, data: bytes) -> None:
        if self.handshake_initiated:
            self._unread += data
            self._read()
            return
        super().data_received(data)  # a whole head
        if not self.handshake_initiated or self.handshake_complete:  # the library refuses it
            error = ApiError(400, "invalid", "this is no handshake of a WebSocket as it must be")
            self.journal.refuse(Record("websocket", client=self.client[0] if self.client else ""), error)
        if not self.handshake_initiated:
            self.transport.write(b"".join(self.conn.data_to_send()) or _BAD_HANDSHAKE)
            self.transport.close()

    def _go_on(self) -> None:
        """Read what is left, in the event loop's next turn."""
        if self._unread:
            self.transport.pause_reading()  # uvicorn may have resumed it
            self._turn = self._turn or self.loop.call_soon(self._read)

    def _read(self) -> None:
        if self._turn:
            self._turn.cancel()
            self._turn = None
        end = time.monotonic() + _READ_S  # uvloop's own clock stands still within a turn
        # Without a handshake `send` goes on, and `receive` behind a message.
        while self._unread and self.handshake_complete and not self.read_paused and not self.transport.is_closing():
            if time.monotonic() > end:
                self._go_on()
                return
            data = bytes(self._unread[:_SLICE])
            del self._unread[:_SLICE]
            super().data_received(data)
        if self.transport.is_closing():
            self._unread.clear()
        elif self._unread:
            self.transport.pause_reading()
        elif not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> Any:
        message = await super().receive()
        if not self.read_paused:
            self._go_on()
        return message

    def handle_cont(self, event: Frame) -> None:
        super().handle_cont(event)
        if len(self.frames) > self.limits.fragments:
            self._fail(_TOO_BIG, f"a message may have {self.limits.fragments} frames at most")

    def handle_pong(self, event: Frame) -> None:
        self._count_control()
        super().handle_pong(event)

    def handle_ping(self) -> None:
        self._count_control()
        pong = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(pong)
        else:
            self._pong = pong or self._pong

    def _count_control(self) -> None:
        now, most = self.loop.time(), self.limits.control_frames
        if now >= self._since + 1:
            self._controls, self._since = 0, now
        self._controls += 1
        if self._controls == most + 1:
            self._fail(_POLICY, f"more than {most} pings or pongs came within a second")

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:  # uvicorn would log it with a traceback
                self.frames = []
                self._fail(_NOT_UTF8, "a text frame must be UTF-8")
                return
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        assert self.conn.close_sent
        self.logger.warning("a WebSocket's client broke the protocol: %s", self.conn.close_sent.reason or "bad UTF-8")
        super().handle_parser_exception()

    def _fail(self, code: int, reason: str) -> None:
        if not self.transport.is_closing():
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    # ------------------------------------------------------------ to the client

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body":  # refused; uvicorn would log an error
            self.handshake_complete = True
        self._go_on()  # frames may have come right behind the handshake

    def resume_writing(self) -> None:
        pong, self._pong = self._pong, b""
        if pong and not self.transport.is_closing():
            self.transport.write(pong)
        super().resume_writing()


def protocols_of(limits: Limits, count: OpenCount, journal: Journal) -> tuple[type[Any], type[Any]]:
    """`HttpConnection` and `SocketConnection` of one server, which has so many open connections, and its journal."""
    shared = {"limits": limits, "journal": journal}
    http = type("Http", (HttpConnection,), shared | {"count": count, "resting": {}})
    return http, type("Socket", (SocketConnection,), shared)
