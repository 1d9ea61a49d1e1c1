"""vLLM-Omni's streaming socket, which LiveKit's Qwen3-TTS client speaks: docs/livekit.md, docs/serving.md.

An utterance's text comes in `input.text` and ends with `input.done`. Its speech goes out between audio.start and
audio.done, once for each part that fits a slot.
"""

import asyncio
import base64
import reprlib
from collections.abc import AsyncGenerator, Coroutine, Iterable
from functools import partial
from typing import Any

import numpy as np

from qwen_megakernel.errors import NoWordsError, RequestError, SpeechCutError, TextTooLongError
from qwen_megakernel.server.api_error import ApiError, Refused
from qwen_megakernel.server.omni.config import SessionConfig
from qwen_megakernel.server.omni.session import Session
from qwen_megakernel.server.word_times import TimedWord, WordEnds, alignment
from qwen_megakernel.speech.base import AnySeat
from qwen_megakernel.speech.encoders import StreamEncoder
from qwen_megakernel.speech.events import Ended, Sound, Words
from qwen_megakernel.speech.patience import within

PATH = "/v1/audio/speech/stream"
_REMEDY = "send input.done, or text sooner"
_SILENT_S = 0.1
"""Seconds of silence for a text without words. LiveKit's client takes an answer without sound for a failure."""
_GLANCES = 3
"""Turns of the event loop, some 20 us each, in which the end of a text may still come before its speech begins."""


class Stream(Session):
    """One client's session. One task answers its messages in order, so it speaks one utterance at a time."""

    def _jobs(self) -> Iterable[Coroutine[Any, Any, None]]:
        return (self._answer_all(),)

    async def _answer_all(self) -> None:
        while True:
            kind, message = await self.next_message()
            self.busy = True
            try:
                if kind == "input.text":
                    await self._speak(message)
                else:
                    await self.answer(kind, message)
            finally:
                self.busy = False

    async def _speak(self, message: dict[str, Any]) -> None:
        """One utterance, from its first text to its session.done."""
        if self.config is None:
            self.put_error(RequestError("there are no settings yet: send session.config first", field="type"))
            return
        text, sentences, speaks = _Text(self), 0, True
        seat = self.service.engine.seat()
        with self.service.journal.entry(self.record.child(utterance_index=self.utterance)):
            try:
                text.add(message)
                while speaks and await text.begins():
                    if not self.config.whole:
                        await text.glance()
                    speaks = await _Part(self, self.config, text, sentences, seat).speak()
                    sentences += 1
            except Exception as error:
                self.put_error(error, utterance_index=self.utterance)
            finally:
                seat.leave()
        self.busy = False  # after an error, a silent client is disconnected
        while not text.complete:  # the utterance is over
            await text.read_next(keep=False)
        self.put_done(sentences)


class _Text:
    """The text of one utterance, as its client sends it.

    Attributes:
        pending: text that has come but is not spoken yet.
        complete: its input.done has come.
    """

    def __init__(self, session: Session):
        self._session = session
        self._characters = 0
        self.pending = ""
        self.complete = False

    def add(self, message: dict[str, Any]) -> None:
        """Take an `input.text`.

        Raises:
            RequestError: the message has no text, or the utterance has too much.
        """
        text, most = message.get("text"), self._session.service.limits.max_text
        if not isinstance(text, str):
            raise RequestError(f"text must be a string, got {reprlib.repr(text)}", field="text")
        self._characters += len(text)
        if self._characters > most:
            words = f"an utterance may have at most {most} characters, this one has {self._characters}"
            raise TextTooLongError(f"{words}: send input.done sooner, and then the rest")
        self.pending += text

    async def begins(self) -> bool:
        """Wait until there is something to speak. Blanks alone take no slot. False: the text ended before that.

        Raises:
            RequestError: as `read`.
        """
        while not self.complete and not self.pending.strip():
            await self.read()
        self.pending = self.pending.lstrip()
        return bool(self.pending)

    async def glance(self) -> None:
        """Take what is there already. A client with a whole text sends its input.done right behind it; the text is then
        spoken as a whole, which saves a call into the engine.

        Raises:
            RequestError: as `read`.
        """
        for _ in range(_GLANCES):
            while not self.complete and self._session.has_message:
                await self.read()
            await asyncio.sleep(0)

    def take(self) -> str:
        """The text that has come since the last call."""
        text, self.pending = self.pending, ""
        return text

    async def take_whole(self) -> str:
        """Wait for the end of a text that must come in one message.

        Raises:
            RequestError: another message with text came, or the end did not come in time.
        """
        came = self._characters
        while not self.complete:
            await self.read()
            if self._characters > came:
                words = "non_streaming_mode needs the whole text in one input.text, but more came"
                raise RequestError(f"{words}: send it whole, or set non_streaming_mode to false", field="text")
        return self.take()

    async def read(self) -> None:
        """As `read_next`. Raises RequestError: nothing came in time, or the piece is refused."""
        patience = self._session.service.limits.text_s
        try:
            async with within(patience):
                await self.read_next()
        except TimeoutError:
            raise RequestError(f"no more text came for {patience:g} s: {_REMEDY}") from None

    async def read_next(self, *, keep: bool = True) -> None:
        """Wait for the next piece of text, or for the text's end. Answer other messages meanwhile. `keep`: the piece
        will be spoken.

        Raises:
            RequestError: the piece is refused.
        """
        while True:
            kind, message = await self._session.next_message()
            if kind == "input.text":
                if keep:
                    self.add(message)
                return
            if kind == "input.done":
                self.complete = True
                return
            await self._session.answer(kind, message, speaking=True)


class _Part:
    """Speech from one audio.start to its audio.done: an utterance, or the part of it that fits a slot."""

    def __init__(self, session: Session, config: SessionConfig, text: _Text, sentence: int, seat: AnySeat):
        self._session = session
        self._config = config
        self._text = text
        self._seat = seat
        self._where = {"utterance_index": session.utterance, "sentence_index": sentence}
        self._said = ""
        self._ends = WordEnds()
        self._words: list[TimedWord] = []  # that were not sent
        self._measured = False  # see `Words.measured`
        self._chunks = 0
        self._sent = 0  # samples
        rate = session.service.engine.sample_rate
        self._rate = config.rate or rate
        self._encoder = StreamEncoder(config.name, rate, config.rate, whole=not config.streams)
        self._begun = False
        self._bytes = 0

    async def speak(self) -> bool:
        """Say it, and tell the client how it went.

        Returns:
            Whether the rest of the text may be spoken.
        """
        done: dict[str, Any] = {"type": "audio.done"} | self._where
        ended: Ended | None = None
        limit = self._session.service.limits.total_s
        try:
            async with asyncio.timeout(limit):
                ended = await self._say()
            done |= {"finish_reason": ended.finish_reason} | self._times()
        except TimeoutError:
            words = f"the utterance took more than {limit:g} s: send input.done sooner"
            self._session.put_error(Refused(ApiError(408, "failed", words)), utterance_index=self._session.utterance)
        except Exception as error:
            self._session.put_error(error, utterance_index=self._session.utterance)
        if self._begun:
            self._session.put(done | {"total_bytes": self._bytes, "error": ended is None})
        return ended is not None and ended.finish_reason != "length"

    async def _say(self) -> Ended:
        """
        Raises:
            TTSError: the text cannot be spoken at all, now, or to its end.
        """
        service, config = self._session.service, self._config
        service.check_ready()
        request = service.request(config.options, lenient=True).in_conversation(self._session.conversation)
        whole, opening, complete = None, "", self._text.complete
        if config.whole:
            self._said = whole = await self._text.take_whole()
        else:
            request = request.in_pieces()
            self._said = opening = self._text.take()
        how: dict[str, Any] = {"words": bool(config.words), "words_at_end": config.words != "chunk", "seat": self._seat}
        ended: Ended | None = None
        try:
            async with service.speak(whole, request, opening, ended=complete, **how) as session:
                if not (config.whole or complete):
                    session.feed(self._texts(), service.limits.text_s, _REMEDY)
                async for event in session.events():
                    if isinstance(event, Sound):
                        self._begin(request.seed)
                        self._put_audio(await self._encode(event.samples))
                    elif isinstance(event, Words):
                        self._words += self._ends.add(event.words)
                        self._measured = event.measured
                    elif isinstance(event, Ended):
                        ended = event
                        self._begin(event.seed)
        except NoWordsError:
            self._begin(request.seed)
            silence = np.zeros(round(_SILENT_S * service.engine.sample_rate), np.float32)
            self._put_audio(await self._encode(silence))
            ended = Ended("eos", _SILENT_S, 0.0, request.seed)
        assert ended
        self._words += self._ends.finish(ended.seconds)
        self._put_audio(await self._encode(None))
        if ended.cut:
            raise SpeechCutError(ended.cut)
        return ended

    async def _texts(self) -> AsyncGenerator[str, None]:
        """The pieces of text behind the first one."""
        while not self._text.complete:
            await self._text.read()
            text = self._text.take()
            self._said += text
            await self._session.service.take_text(text)
            yield text

    async def _encode(self, samples: np.ndarray | None) -> bytes:
        """The bytes that are ready. None: the sound is complete."""
        make = self._encoder.finish if samples is None else partial(self._encoder.encode, samples)
        return await asyncio.to_thread(make) if self._encoder.heavy else make()

    def _put_audio(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._config.words == "chunk":
            self._put_chunk(data)
        elif data:
            self._session.put_bytes(data)

    def _put_chunk(self, data: bytes) -> None:
        """Audio with the words whose times became known."""
        if not (data or self._words):
            return
        begin, self._sent = self._sent, self._sent + len(data) // 2
        told: dict[str, Any] = {"type": "audio.chunk"} | self._where
        told |= {"chunk_id": self._chunks, "sample_rate": self._rate}
        told |= {"chunk_start_ms": 1000 * begin // self._rate, "chunk_end_ms": 1000 * self._sent // self._rate}
        told |= {"audio_b64": base64.b64encode(data).decode()}
        told |= {"timestamps": [word.in_ms for word in self._words], "measured": self._measured}
        self._session.put(told)
        self._chunks += 1
        self._words = []

    def _begin(self, seed: int) -> None:
        if not self._begun:
            self._begun = True
            start = {"type": "audio.start"} | self._where | {"sentence_text": self._said, "format": self._config.name}
            start |= {"sample_rate": self._rate, "channels": 1, "seed": seed}
            self._session.put(start | ({"ignored": self._config.ignored} if self._config.ignored else {}))

    def _times(self) -> dict[str, Any]:
        """When each word is spoken, for audio.done; empty unless the client asked for it there."""
        if not self._words:
            return {}
        told = {"timestamp_info": alignment(self._words) | {"measured": self._measured}}
        if self._config.words == "sync":
            return told
        self._session.timestamps.append({"type": "timestamps"} | self._where | told)
        return {}
