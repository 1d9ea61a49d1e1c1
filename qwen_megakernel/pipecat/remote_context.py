"""What a Pipecat service holds of an utterance that a server speaks."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np
from loguru import logger
from pipecat.frames.frames import ErrorFrame, TTSAudioRawFrame
from pipecat.services.tts_service import TTSService
from websockets.exceptions import WebSocketException

from qwen_megakernel.errors import TextEndedError, TextTooLongError
from qwen_megakernel.pipecat.audio_context import AudioContext


@dataclass
class UtteranceEnd:
    """The server's "end" message."""

    finish_reason: str
    seconds: float
    seed: int


@dataclass(eq=False)
class RemoteUtterance:
    """An utterance: one context on the socket.

    Attributes:
        name: the name of its context on the socket.
        number: the number of its audio; None before the server's "begin".
        opened: its first text was sent.
        ended: the server has ended it, it was cancelled, or the socket broke.
        items: PCM, words, and last an UtteranceEnd or exception. None: the socket broke, and that was reported.
    """

    name: str
    context: "RemoteAudioContext | None"  # None once it has ended
    number: int | None = None
    opened: bool = False
    ended: bool = False
    items: asyncio.Queue[bytes | list | UtteranceEnd | Exception | None] = field(default_factory=asyncio.Queue)


class RemoteAudioContext(AudioContext):
    """An audio context whose utterances come from a server."""

    def __init__(self, service: TTSService, context_id: str, reading: str):
        super().__init__(service, context_id, reading)
        self._utterance: RemoteUtterance | None = None  # the current one
        self._trimmed_before_s = 0.0  # silence cut in front of earlier utterances

    async def _open(self, text: str, complete: bool) -> None:
        await self._service._ensure_connected()
        if "turn" not in self._service._server.settings:
            text = text.lstrip()  # it says how the text goes on
        self._utterance = self._service._new_utterance(self, self._context_id)
        self._begin(self._service._server.sample_rate)
        self._trimmed_before_s = self._trimmed_s
        await self._send("text", text=text, end=complete)

    async def _push(self, text: str) -> None:
        if self._utterance.ended:
            raise TextEndedError("the server has ended this utterance")
        await self._send("text", text=text)

    async def _end(self) -> None:
        if not self._utterance.ended:
            await self._send("end")

    async def flush(self) -> None:
        utterance = self._utterance
        if utterance and utterance.opened and not utterance.ended and not self.text_ended:
            try:
                await self._send("flush")
            except (OSError, WebSocketException) as error:
                await self._fail(error)

    async def _send(self, kind: str, **fields) -> None:
        """Send a message of the current utterance. The first message opens it. If sending fails, the utterance has
        ended and the caller reports why."""
        utterance, service = self._utterance, self._service
        if not utterance.opened:
            utterance.opened = True
            service._utterances[utterance.name] = utterance
            fields |= service._request(self._reading)
        try:
            await service._send(kind, context=utterance.name, **fields)
        except (OSError, WebSocketException):
            service._forget(utterance)
            utterance.items.put_nowait(None)
            raise

    def _drop(self) -> None:
        utterance, service = self._utterance, self._service
        if utterance and utterance.opened and not utterance.ended:
            service._forget(utterance)
            utterance.items.put_nowait(None)  # a sentence that may not be interrupted still waits for more
            service.create_task(service._cancel_remote(utterance.name))

    async def lose(self, error: Exception) -> None:
        """Report a broken socket. The context will be closed; if the turn goes on, it gets a new context."""
        if not self._cancelled:
            await self._service.append_to_audio_context(self._context_id, self._error(error))
            await self._service._finalize_words(self._context_id)  # those of the last sentence that were heard
        self.text_ended = True

    async def _audio(self) -> AsyncGenerator[TTSAudioRawFrame | ErrorFrame, None]:
        utterance = self._utterance
        while isinstance(item := await utterance.items.get(), (bytes, list)):
            if isinstance(item, list):
                cut = self._trimmed_s - self._trimmed_before_s
                await self._send_words([(word, max(0.0, at - cut)) for word, at in item])
            elif frame := self._to_frame(np.frombuffer(item, "<i2").astype(np.float32) / 32767):
                yield frame
        if item is None:
            return
        if self._reader and not self.text_ended:
            # Text that came to the server after it ended the utterance has opened a new context of this name there.
            await self._service._cancel_remote(utterance.name)
        if isinstance(item, Exception):
            raise item
        self.wordless |= item.seconds == 0
        if tail := self._tail():
            yield tail
        if item.finish_reason == "length":  # the rest of the text was not spoken
            told = f"speech was cut after {item.seconds:.1f} s, at its slot's or checkpoint's limit: shorten the text"
            yield self._error(TextTooLongError(told))
        logger.info(f"{self._service}: {item.seconds:.2f} s, {item.finish_reason}, seed {item.seed}")
