"""RemoteSession: speech of one text by a server, as a Pipecat service holds it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from websockets.exceptions import WebSocketException

from qwen_megakernel.errors import SpeechCutError, TextEndedError
from qwen_megakernel.speech.events import Began, Ended, Event, Sound, Words


class Line(Protocol):
    """What a `RemoteSession` needs of the service that holds the socket."""

    async def send(self, kind: str, **fields: Any) -> None:
        """Send a message. Raises OSError or WebSocketException: the socket is broken."""

    def forget(self, session: "RemoteSession") -> None:
        """Give a session that has ended, or that nobody waits for, no more messages."""

    async def try_to_send(self, kind: str, **fields: Any) -> None:
        """Send a message that means nothing to a broken socket. Never fails."""

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task:
        """Run something beside the frames, until the pipeline ends."""


@dataclass(eq=False)
class RemoteSession:
    """A context on the socket, as `speech.events.Session` describes it."""

    _line: Line
    name: str  # the context's
    capped: bool  # the settings say how long speech may be, so reaching that is no error
    number: int | None = None  # of its audio; None before the server's "begin"
    begun: bool = False
    done: bool = False  # the server has ended it, it was cancelled, or the socket broke
    _text_open: bool = False  # more text may come
    items: asyncio.Queue[bytes | dict[str, Any] | Exception | None] = field(default_factory=asyncio.Queue)
    """Messages, PCM and errors from the server. None: the socket broke, and that was reported."""

    async def begin(self, text: str, complete: bool, fields: dict[str, Any]) -> None:
        """`complete`: no more text will come. `fields`: further ones of the context's first message. Raises
        ConnectionError: the socket is broken."""
        self.begun = True
        self._text_open = not complete
        await self._send("text", text=text, end=complete, **fields)

    async def push_text(self, text: str) -> None:
        if self.done:
            raise TextEndedError("the server has ended this utterance")
        await self._send("text", text=text)

    async def flush(self) -> None:
        await self._send("flush")

    async def end_text(self) -> None:
        self._text_open = False
        if not self.done:
            await self._send("end")

    async def _send(self, kind: str, **fields: Any) -> None:
        """If sending fails, the session is done and the caller reports why."""
        try:
            await self._line.send(kind, context=self.name, **fields)
        except (OSError, WebSocketException) as error:
            self._line.forget(self)
            self.items.put_nowait(None)
            raise ConnectionError(str(error)) from error

    def cancel(self) -> None:
        self._text_open = False
        if self.begun and not self.done:
            self._line.forget(self)
            self.items.put_nowait(None)  # a sentence that may not be interrupted still waits for more
            self._line.create_task(self._line.try_to_send("cancel", context=self.name))

    def end_word(self) -> list[tuple[str, float]]:
        """The server tells words by itself."""
        return []

    async def events(self) -> AsyncIterator[Event]:
        while (item := await self.items.get()) is not None:
            if isinstance(item, Exception):
                await self._end_late_text()
                raise item
            if isinstance(item, bytes):
                yield Sound(np.frombuffer(item, "<i2").astype(np.float32) / 32767)
            elif item["type"] == "begin":
                yield Began(item.get("seed", 0))
            elif item["type"] == "words":
                yield Words([(word, at) for word, at in item["words"]], item.get("measured", False))
            else:
                await self._end_late_text()
                seconds = item["seconds"]
                why: str | None = None
                if item["finish_reason"] == "length" and not self.capped:
                    why = SpeechCutError.words(seconds, "at its slot's or checkpoint's limit")
                yield Ended(item["finish_reason"], seconds, item.get("compute_seconds", 0.0), item["seed"], cut=why)
                return

    async def _end_late_text(self) -> None:
        """Text that came to the server after it ended the context has opened a new one of this name there."""
        if self._text_open:
            await self._line.try_to_send("cancel", context=self.name)
