"""RemoteSession: speech of one text by a server, as a Pipecat service holds it."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from websockets.exceptions import WebSocketException

from qwen_megakernel.errors import TextEndedError
from qwen_megakernel.pipecat.audio_context import AudioContext
from qwen_megakernel.speech.events import Began, Ended, Event, Sound, Words


class RemoteSession:
    """A context on the socket, as `speech.events.Session` describes it.

    Attributes:
        name: the context's name.
        number: the number of its audio; None before the server's "begin".
        done: the server has ended it, it was cancelled, or the socket broke.
        context: gets what is spoken. A weak reference, because the context refers to this session.
        items: messages, PCM and errors from the server. None: the socket broke, and that was reported.
    """

    def __init__(self, service: Any, name: str, context: AudioContext):
        """`service`: the one of `pipecat/remote.py`, which imports this module."""
        self._service = service
        self.name = name
        self.context = weakref.ref(context)
        self.number: int | None = None
        self.begun = False
        self.done = False
        self.items: asyncio.Queue[bytes | dict[str, Any] | Exception | None] = asyncio.Queue()

    async def begin(self, text: str, complete: bool, fields: dict[str, Any]) -> None:
        """
        Args:
            complete: no more text will come.
            fields: further fields of the context's first message.

        Raises:
            ConnectionError: the socket is broken.
        """
        self.begun = True
        self._service._sessions[self.name] = self
        await self._send("text", text=text, end=complete, **fields)

    async def push_text(self, text: str) -> None:
        if self.done:
            raise TextEndedError("the server has ended this utterance")
        await self._send("text", text=text)

    async def flush(self) -> None:
        await self._send("flush")

    async def end_text(self) -> None:
        if not self.done:
            await self._send("end")

    async def _send(self, kind: str, **fields: Any) -> None:
        """If sending fails, the session is done and the caller reports why."""
        try:
            await self._service._send(kind, context=self.name, **fields)
        except (OSError, WebSocketException) as error:
            self._service._forget(self)
            self.items.put_nowait(None)
            raise ConnectionError(str(error)) from error

    def cancel(self) -> None:
        if self.begun and not self.done:
            self._service._forget(self)
            self.items.put_nowait(None)  # a sentence that may not be interrupted still waits for more
            self._service.create_task(self._service._cancel_remote(self.name))

    def end_word(self) -> list[tuple[str, float]]:
        """The server tells words by itself."""
        return []

    async def events(self) -> AsyncIterator[Event]:
        context = self.context()  # it waits for these events, so it exists
        assert context
        while (item := await self.items.get()) is not None:
            if isinstance(item, Exception):
                await self._end_late_text(context)
                raise item
            if isinstance(item, bytes):
                yield Sound(np.frombuffer(item, "<i2").astype(np.float32) / 32767)
            elif item["type"] == "begin":
                self._service._warn_of_ignored(item.get("ignored", ()))
                yield Began(item.get("seed", 0))
            elif item["type"] == "words":
                yield Words([(word, at) for word, at in item["words"]])
            else:
                await self._end_late_text(context)
                seconds = item["seconds"]
                why: str | None = None
                if item["finish_reason"] == "length" and not context.capped:
                    why = f"speech was cut after {seconds:.1f} s, at its slot's or checkpoint's limit: shorten the text"
                yield Ended(item["finish_reason"], seconds, item.get("compute_seconds", 0.0), item["seed"], cut=why)
                return

    async def _end_late_text(self, context: AudioContext) -> None:
        """Text that came to the server after it ended the context has opened a new one of this name there."""
        if context.reads and not context.text_ended:
            await self._service._cancel_remote(self.name)
