"""SocketLine: what all the server's WebSockets do: greet, read, send, and close silent or slow clients."""

import asyncio
import json
import logging
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.limits import MOST_VALUES, too_many_values
from qwen_megakernel.server.records import CURRENT, Record
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.server.tasks import cancelled, first_of
from qwen_megakernel.speech.patience import within
from spoken_text.finder import Conversation

log = logging.getLogger(__name__)

PROTOCOL = "speech"
"""Subprotocol, accepted if offered. A browser that offers its token as a subprotocol needs one to be accepted."""

MAX_RECORDING = 2 << 20
"""Most characters of a message with a recording. More would hold the event loop for over 5 ms; HTTP takes more."""

MAX_UNREAD = 1000
"""Most unread messages of a client; more close the socket."""

_MAX_UNSENT = 1000  # messages that a client has not taken yet; above this we stop reading from it
_NORMAL, _AWAY, _POLICY, _FAILED, _LATER = 1000, 1001, 1008, 1011, 1013  # closing codes (RFC 6455 and its registry)


class CloseSocket(Exception):
    """The socket must be closed. `code`: RFC 6455's; `error`: sent to the client first, if given."""

    def __init__(self, code: int, error: ApiError | None = None):
        self.code, self.error = code, error


def protocol_error(message: str) -> CloseSocket:
    """A message that ends the socket."""
    return CloseSocket(_POLICY, ApiError(400, "protocol", message))


def _slow() -> CloseSocket:
    return CloseSocket(_POLICY, ApiError(408, "slow", "the client does not read what it asked for"))


def error_message(error: ApiError, **more: Any) -> dict[str, Any]:
    """An error as a message to the client. `more`: further fields, which say what it is about."""
    told = {"type": "error"} | more | {"code": error.code, "message": error.message, "retryable": error.retryable}
    told |= {"field": error.field} if error.field else {}
    served = CURRENT.get()
    return told | ({"request_id": served.id} if served else {})


def parse_message(text: str | None, most: int) -> dict[str, Any]:
    """Parse a client's message.

    Args:
        text: of a text frame; None: it was a binary frame.
        most: the largest allowed number of characters.

    Raises:
        CloseSocket: the message is not a JSON object, or is too long.
    """
    if text is None:
        raise protocol_error("a message must be JSON in a text frame, got a binary one")
    if len(text) > most:
        raise protocol_error(f"a message has {len(text)} characters, at most {most}: send its text in pieces")
    if too_many_values(text):
        raise protocol_error(f"a message has more than {MOST_VALUES} values or commas: send less at once")
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise protocol_error(f"a message must be JSON: {str(error)[:80]}") from None
    if not isinstance(message, dict):
        raise protocol_error(f"a message must be a JSON object, got {reprlib.repr(message)}")
    return message


class SocketLine(ABC):
    """One client's WebSocket. One task reads messages, another sends them; a subclass says what they mean.

    Attributes:
        idle_words: the message to a client that was silent for too long.
        conversation: of all that this client lets speak.
        record: of the connection.
    """

    idle_words: str

    def __init__(self, websocket: WebSocket, service: EngineService):
        self._websocket, self.service = websocket, service
        self.record = CURRENT.get() or Record("websocket")
        self.conversation = Conversation()
        self._outbox: asyncio.Queue[str | bytes | None] = asyncio.Queue()
        self._unsent = 0  # bytes in it
        self._overfull = asyncio.Event()

    # ------------------------------------------------------------ what a subclass says

    def _greeting(self) -> dict[str, Any] | None:
        """The first message to the client, if there is one."""
        return None

    @abstractmethod
    def _handle(self, text: str | None) -> None:
        """Handle a message. None: a binary one. Raises CloseSocket if it ends the socket."""

    @abstractmethod
    def _listens(self) -> bool:
        """Is the client waiting for an answer? It may then be silent."""

    def _jobs(self) -> Iterable[Coroutine[Any, Any, None]]:
        """Jobs that run as long as the socket is open."""
        return ()

    def _tasks(self) -> list[asyncio.Task]:
        """Other running tasks, which end with the socket."""
        return []

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Run until the client disconnects or must be disconnected."""
        offered = self._websocket.scope.get("subprotocols", ())
        try:
            await self._websocket.accept(PROTOCOL if PROTOCOL in offered else None)
        except (WebSocketDisconnect, RuntimeError):  # the client has gone; Starlette tells it in both ways
            return
        try:
            await first_of(self._send(), self._receive(), self._watch_unsent(), *self._jobs())
        except CloseSocket as close:
            self.record.error = close.error
            self.record.fields["close"] = close.code
            await self._close(close)
        except WebSocketDisconnect as gone:
            self.record.fields["close"] = gone.code
        except ConnectionError:
            pass
        except Exception as failure:
            log.exception("a socket failed")
            self.record.error = ApiError.of(failure)
            self.record.fields["close"] = _FAILED
            await self._close(CloseSocket(_FAILED, self.record.error))
        finally:
            await cancelled(self._tasks())
            self.service.unsent_sockets.discard(self)

    async def _close(self, close: CloseSocket) -> None:
        """Tell the client why, if it still reads."""
        with suppress(TimeoutError, WebSocketDisconnect, ConnectionError, RuntimeError):
            async with asyncio.timeout(1):
                if close.error:
                    await self._websocket.send_text(json.dumps(error_message(close.error)))
                await self._websocket.close(close.code)

    # ------------------------------------------------------------ to the client

    def put(self, message: dict[str, Any]) -> None:
        """Queue a message for the client."""
        self._put(json.dumps(message))

    def put_bytes(self, data: bytes) -> None:
        """Queue a binary message for the client."""
        self._put(data)

    def put_end(self) -> None:
        """Close the socket once everything before this has been sent."""
        self._put(None)

    def _put(self, message: str | bytes | None) -> None:
        self._outbox.put_nowait(message)
        self.service.unsent_sockets.add(self)
        self._unsent += len(message or "")
        if self._unsent > self.service.limits.max_unsent:
            self._overfull.set()

    async def _watch_unsent(self) -> None:
        await self._overfull.wait()
        raise _slow()

    async def _send(self) -> None:
        service = self.service
        if not service.serves:
            raise CloseSocket(_LATER, ApiError(503, "closing", f"the server is {service.state}; try again", True))
        if greeting := self._greeting():
            await self._deliver(json.dumps(greeting))
        while True:
            message = await self._outbox.get()
            if message is None:
                raise CloseSocket(_NORMAL)
            await self._deliver(message)
            self._unsent -= len(message)
            if self._outbox.empty():
                self.service.unsent_sockets.discard(self)

    async def _deliver(self, message: str | bytes) -> None:
        try:
            async with within(self.service.limits.idle_s):
                if isinstance(message, bytes):
                    await self._websocket.send_bytes(message)
                else:
                    await self._websocket.send_text(message)
        except TimeoutError:
            raise _slow() from None
        except RuntimeError:  # Starlette raises it if the socket has been closed
            raise WebSocketDisconnect(1006) from None

    # ------------------------------------------------------------ from the client

    async def _receive(self) -> None:
        while True:
            try:
                async with within(self.service.limits.idle_s) as idle:
                    message = await self._websocket.receive()
            except TimeoutError:
                if self._listens():
                    continue
                assert idle.expired()
                raise CloseSocket(_AWAY, ApiError(408, "idle", self.idle_words)) from None
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", 1000))
            self._handle(message.get("text"))
            await asyncio.sleep(0)  # a flood of messages must not keep other tasks waiting
            while self._outbox.qsize() > _MAX_UNSENT:  # stop reading from a client that does not read
                await asyncio.sleep(0.01)
