"""How the speech of one utterance goes out on vLLM-Omni's socket: messages about it, audio, times of words."""

import asyncio
import base64
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, Protocol

import numpy as np

from qwen_megakernel.errors import NoWordsError, TextTooLongError
from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.omni.config import SessionConfig
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.server.socket_line import error_message
from qwen_megakernel.server.word_times import TimedWord, WordEnds, alignment
from qwen_megakernel.speech.encoders import StreamEncoder
from qwen_megakernel.speech.events import Ended, Sound, Words
from spoken_text.finder import Conversation

REMEDY = "send input.done, or text sooner"


class Stream(Protocol):
    """What speech needs of a client's session."""

    service: EngineService
    conversation: Conversation

    def put(self, message: dict[str, Any]) -> None: ...

    def put_bytes(self, data: bytes) -> None: ...

    def put_error(self, error: Exception, **more: Any) -> None: ...

    def keep_timestamps(self, told: dict[str, Any]) -> None: ...


class Text(Protocol):
    """What speech needs of an utterance's text."""

    complete: bool

    async def take_whole(self) -> str: ...

    def take(self) -> str: ...

    async def read(self) -> None: ...


class StreamSpeech:
    """Speech from one audio.start to its audio.done: an utterance, or the part of it that fits a slot.

    Attributes:
        wordless: its text had nothing to speak.
    """

    def __init__(self, stream: Stream, config: SessionConfig, text: Text, utterance: int, sentence: int):
        self._stream = stream
        self._config = config
        self._text = text
        self._where = {"utterance_index": utterance, "sentence_index": sentence}
        self._said = ""
        self._ends = WordEnds()
        self._words: list[TimedWord] = []  # that were not sent
        self._chunks = 0
        self._sent = 0  # samples
        self._rate = config.rate or stream.service.engine.sample_rate
        self._encoder = StreamEncoder(config.name, stream.service.engine.sample_rate, config.rate)
        self._made: list[bytes] = []  # audio that is sent as a whole
        self._begun = False
        self.wordless = False
        self._bytes = 0

    async def speak(self) -> bool:
        """Say it, and tell the client how it went.

        Returns:
            Whether the rest of the text may be spoken.
        """
        done: dict[str, Any] = {"type": "audio.done"} | self._where
        ended: Ended | None = None
        limit = self._stream.service.limits.total_s
        try:
            async with asyncio.timeout(limit):
                ended = await self._say()
            done |= {"finish_reason": ended.finish_reason} | self._times()
        except TimeoutError:
            words = f"the utterance took more than {limit:g} s: send input.done sooner"
            late = ApiError(408, "failed", words)
            self._stream.put(error_message(late, utterance_index=self._where["utterance_index"]))
        except NoWordsError:  # nothing is sent of it
            self.wordless = True
        except Exception as error:
            self._stream.put_error(error, utterance_index=self._where["utterance_index"])
        if self._begun:
            self._stream.put(done | {"total_bytes": self._bytes, "error": ended is None})
        return ended is not None and ended.finish_reason != "length"

    async def _say(self) -> Ended:
        """
        Raises:
            TTSError: the text cannot be spoken at all, now, or to its end.
        """
        service, config = self._stream.service, self._config
        service.check_ready()
        request = service.request(config.options, lenient=True).in_conversation(self._stream.conversation)
        whole, opening, complete = None, "", self._text.complete
        if config.whole:
            self._said = whole = await self._text.take_whole()
        else:
            request = request.in_pieces()
            self._said = opening = self._text.take()
        how: dict[str, Any] = {}
        if config.words:
            how = {"rate": service.engine.rates.of(request.conditioning), "words_at_end": config.words != "chunk"}
        ended: Ended | None = None
        async with service.speak(whole, request, opening, ended=complete, **how) as session:
            if not (config.whole or complete):
                session.feed(self._texts(), service.limits.text_s, REMEDY)
            async for event in session.events():
                if isinstance(event, Sound):
                    self._begin(request.seed)
                    self._put_audio(await self._encode(event.samples))
                elif isinstance(event, Words):
                    self._words += self._ends.add(event.words)
                elif isinstance(event, Ended):
                    ended = event
                    self._begin(event.seed)
        assert ended
        self._words += self._ends.finish(ended.seconds)
        self._put_audio(await self._encode(None), last=True)
        if ended.cut:
            raise TextTooLongError(ended.cut)
        return ended

    async def _texts(self) -> AsyncGenerator[str, None]:
        """The pieces of text behind the first one."""
        while not self._text.complete:
            await self._text.read()
            text = self._text.take()
            self._said += text
            self._stream.service.log_text(text)
            yield text

    async def _encode(self, samples: np.ndarray | None) -> bytes:
        """The bytes that are ready. None: the sound is complete."""
        make = self._encoder.finish if samples is None else partial(self._encoder.encode, samples)
        return await asyncio.to_thread(make) if self._encoder.heavy else make()

    def _put_audio(self, data: bytes, last: bool = False) -> None:
        self._bytes += len(data)
        if not self._config.streams:
            self._made.append(data)
            data = b"".join(self._made) if last else b""
        if self._config.words == "chunk":
            self._put_chunk(data)
        elif data:
            self._stream.put_bytes(data)

    def _put_chunk(self, data: bytes) -> None:
        """Audio with the words whose times became known."""
        if not (data or self._words):
            return
        begin, self._sent = self._sent, self._sent + len(data) // 2
        told: dict[str, Any] = (
            {"type": "audio.chunk"} | self._where | {"chunk_id": self._chunks, "sample_rate": self._rate}
        )
        told |= {"chunk_start_ms": 1000 * begin // self._rate, "chunk_end_ms": 1000 * self._sent // self._rate}
        told |= {"audio_b64": base64.b64encode(data).decode()}
        told["timestamps"] = [word.in_ms for word in self._words]
        self._stream.put(told)
        self._chunks += 1
        self._words = []

    def _begin(self, seed: int) -> None:
        if not self._begun:
            self._begun = True
            start = {"type": "audio.start"} | self._where | {"sentence_text": self._said, "format": self._config.name}
            start |= {"sample_rate": self._rate, "channels": 1, "seed": seed}
            self._stream.put(start | ({"ignored": self._config.ignored} if self._config.ignored else {}))

    def _times(self) -> dict[str, Any]:
        """When each word is spoken, for audio.done; empty unless the client asked for it there."""
        if not self._words:
            return {}
        told = {"timestamp_info": alignment(self._words)}
        if self._config.words == "sync":
            return told
        self._stream.keep_timestamps({"type": "timestamps"} | self._where | told)
        return {}
