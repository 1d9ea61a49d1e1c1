"""Answers: the speech of one HTTP request, as bytes, as events, or as one entry of a batch."""

import asyncio
import base64
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
from fastapi.responses import StreamingResponse
from starlette.types import Receive

from qwen_megakernel.errors import SpeechCutError, TextTooLongError, TTSError
from qwen_megakernel.server.api_error import ApiError, Refused
from qwen_megakernel.server.openai.bodies import BATCH, SPEECH, error_of
from qwen_megakernel.server.openai.turns import turns_of
from qwen_megakernel.server.records import CURRENT
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.server.tasks import cancelled
from qwen_megakernel.server.word_times import TimedWord, WordEnds
from qwen_megakernel.speech.encoders import MEDIA, StreamEncoder
from qwen_megakernel.speech.events import Ended, Sound, Words
from qwen_megakernel.speech.options import RequestOptions
from qwen_megakernel.speech.request import SpeechRequest
from spoken_text.finder import Conversation

log = logging.getLogger(__name__)

_RETRIES = 2  # of a whole answer, if the client is silent about it
_PIECE = 64 << 10  # bytes of a whole file that are sent at once: each waits until the client takes it
_BASE64_PIECE = 3 << 16  # bytes; takes 0.2 ms to encode; a multiple of 3, so that the pieces join


class Speech:
    """The speech of one text. It begins with `begin`, or when its bytes are asked for.

    Attributes:
        seed: the seed that it is spoken with.
        ignored: names of the request's fields that change nothing with this model.
        words: whose times are known so far.
        attempts: how often it was spoken so far. With several parts: the most that one part took.
        clipped: samples that `volume` made louder than full scale, so far.
    """

    def __init__(
        self,
        service: EngineService,
        encoder: StreamEncoder,
        text: str,
        options: RequestOptions,
        *,
        speakers: bool = False,
        times: bool = False,
        volume: float | None = None,
        whole: bool = False,
        patient: bool = False,
    ):
        """
        Args:
            encoder: a new one.
            options: of the client, checked.
            speakers: names in brackets change the speaker (`turns_of`).
            times: tell when each word is spoken.
            volume: a factor on the samples; None: 1.
            whole: nobody hears it before all of it is made. Unless `fixes_attempts`, what ends badly is said again.
            patient: wait for a slot, however long it takes.

        Raises:
            RequestError: nothing can be spoken like this.
        """
        self._service = service
        self._patient = patient
        self._volume = volume
        self._encoder = encoder
        self._first: np.ndarray | None = None
        self._frames = 0
        self._seconds = 0.0  # of the turns that are over
        self._ends = WordEnds() if times else None
        self.words: list[TimedWord] = []
        self.measured = False  # see `Words.measured`
        self.ignored: list[str] = []
        self.attempts = 1
        self.clipped = 0
        if options.get("instruct") and not service.takes_instructions:
            self.ignored = ["instructions"]
            options = options | {"instruct": None}
        if whole and not service.fixes_attempts(options):
            options = options | {"retries": _RETRIES}
        conversation = Conversation()
        self.ignored += service.idle(options)
        first = service.request(options).in_conversation(conversation)
        self.seed = first.seed
        turns = [(text, first)]
        if speakers:
            options = options | {"seed": self.seed}
            named = turns_of(text, service.is_voice, service.known_voices())
            turns = [
                (said, service.request(options | {"voice": name}).in_conversation(conversation) if name else first)
                for name, said in named
            ]
        self._texts = *(said for said, _ in turns), options.get("instruct")
        self._samples = self._speak(turns)

    async def usage(self) -> dict[str, int]:
        """Usage in OpenAI's form. Input: tokens of text and instructions. Output: frames of 80 ms so far."""
        tokens = await self._service.count_tokens(*self._texts)
        return {"input_tokens": tokens, "output_tokens": self._frames, "total_tokens": tokens + self._frames}

    async def begin(self) -> None:
        """Wait for the first chunk. Raises TTSError: nothing can be spoken."""
        self._first = await anext(self._samples, None)

    async def _speak(self, turns: list[tuple[str, SpeechRequest]]) -> AsyncGenerator[np.ndarray, None]:
        seat = self._service.engine.seat()
        try:
            for text, request in turns:
                words, ended = self._ends is not None, None
                how: dict[str, Any] = {"words": words, "patient": self._patient, "seat": seat}
                async with self._service.speak(text, request, **how) as session:
                    async for event in session.events():
                        if isinstance(event, Sound):
                            yield event.samples if self._volume is None else self._louder(event.samples)
                        elif isinstance(event, Words) and self._ends:
                            self.words += self._ends.add(event.words, self._seconds)
                            self.measured = event.measured
                            yield np.zeros(0, np.float32)  # `events` tells them before more sound is made
                        elif isinstance(event, Ended):
                            ended = event
                assert ended and ended.audio
                self._frames += ended.audio.frames
                self._seconds += ended.seconds
                self.words += self._ends.finish(self._seconds) if self._ends else []
                self.attempts = max(self.attempts, ended.attempts)
                if ended.cut:
                    raise SpeechCutError(ended.cut)
        finally:
            seat.leave()

    def _louder(self, samples: np.ndarray) -> np.ndarray:
        made = self._volume * samples
        self.clipped += int(np.count_nonzero(np.abs(made) > 1))
        return np.clip(made, -1, 1)

    async def encoded(self) -> AsyncGenerator[bytes, None]:
        """Yield the encoded bytes as they are made; no bytes where only words are new.

        Raises:
            TTSError: the utterance failed, or its speech was cut.
        """
        if self._first is not None:
            yield await self._run(self._encoder.encode, self._first)
        async for samples in self._samples:
            yield await self._run(self._encoder.encode, samples) if len(samples) else b""
        yield await self._run(self._encoder.finish)

    async def _run(self, call: Callable[..., bytes], *args: np.ndarray) -> bytes:
        return await asyncio.to_thread(call, *args) if self._encoder.heavy else call(*args)

    async def whole(self) -> bytes:
        """The whole file.

        Raises:
            TTSError: the utterance failed, or its speech was cut.
        """
        try:
            return b"".join([data async for data in self.encoded()])
        finally:
            await self.close()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """OpenAI's Server-Sent Events: audio in base64, then usage. An error event ends them early. If words are told,
        an event has those whose times became known."""
        told = 0
        try:
            async for data in self.encoded():
                for start in range(0, len(data), _BASE64_PIECE):
                    audio = base64.b64encode(data[start : start + _BASE64_PIECE]).decode()
                    yield _event({"type": "speech.audio.delta", "audio": audio})
                if words := self.words[told:]:
                    told = len(self.words)
                    times = {"words": [word.in_ms for word in words], "measured": self.measured}
                    yield _event({"type": "speech.audio.words"} | times)
            clipped = {"clipped": self.clipped} if self.clipped else {}
            yield _event({"type": "speech.audio.done", "usage": await self.usage()} | clipped)
        except Exception as error:
            yield _event({"type": "error", "error": _noted(_failure(error, SPEECH)).body})

    async def close(self) -> None:
        """Cancel what is still being spoken."""
        await self._samples.aclose()


def _noted(error: ApiError) -> ApiError:
    """An error that comes too late for the answer's status: the request's record has it then."""
    if record := CURRENT.get():
        record.error = error
    return error


def _failure(error: Exception, path: str) -> ApiError:
    """What the client is told. The log has the traceback of an error that nobody foresaw."""
    if not isinstance(error, TTSError | Refused):
        log.exception("an answer failed")
    return error_of(error, path)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Ends the block once the client has gone.

    Args:
        receive: of a request whose body was read.

    Raises:
        Refused: the client has gone.
    """
    connected = asyncio.timeout(None)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        connected.reschedule(asyncio.get_running_loop().time())

    watcher = asyncio.create_task(watch())
    try:
        async with connected:
            yield
    except TimeoutError:
        if not connected.expired():
            raise
        raise Refused(ApiError(408, "idle", "the client has gone")) from None
    finally:
        watcher.cancel()


class Streamed(StreamingResponse):
    """A streaming answer that always closes its generator: one that nobody reads any more would not close itself.

    If the speech fails or is cut, the answer stays incomplete and the server closes the connection."""

    def __init__(self, parts: AsyncGenerator[bytes, None], speech: Speech | None = None, **options):
        super().__init__(parts, **options)
        self._parts = parts
        self._speech = speech

    async def __call__(self, scope, receive, send) -> None:
        """Starlette's own method starts two tasks before it sends anything, which delays the first sound."""
        try:
            async with while_connected(receive):
                await self.stream_response(send)
        except Refused:
            pass
        except TTSError as error:
            _noted(ApiError.of(error))
        finally:
            await self._parts.aclose()
            if self._speech:
                await self._speech.close()


def whole_file(content: bytes, headers: dict[str, str], media_type: str) -> Streamed:
    """The answer with a file that is complete. It is handed over in pieces, so that a slow client holds few of them."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(content), _PIECE):
            yield content[start : start + _PIECE]

    return Streamed(pieces(), media_type=media_type, headers=headers | {"Content-Length": str(len(content))})


# ---------------------------------------------------------------- a batch


Item = tuple[str, RequestOptions, dict[str, Any]]
"""A text, the client's options for it, and `speakers` and `volume` as `Speech` takes them."""


async def batch_json(
    service: EngineService,
    name: str,
    rate: int | None,
    items: list[Item],
    *,
    omni: bool = False,
) -> AsyncGenerator[bytes, None]:
    """Speak several texts in all slots at once. Yield the answer's JSON, entry by entry, in their order. If closed
    early, cancel what is not spoken yet.

    Args:
        name: the audio format, one of `MEDIA`.
        rate: the audio's sample rate in Hz; None: the model's.
        omni: answer in vLLM-Omni's form.
    """
    slots = asyncio.Semaphore(service.engine.health()["max_streams"])

    async def say(index: int, item: Item) -> tuple[dict[str, Any], bytes | None]:
        """The entry for one input, and its audio; None if it failed."""
        text, options, how = item
        async with slots:
            try:
                service.check_ready()
                if (size := len(text)) > (most := service.limits.max_text):
                    raise TextTooLongError(f"input has {size} characters, at most {most} are allowed")
                encoder = StreamEncoder(name, service.engine.sample_rate, rate, whole=True)
                speech = Speech(service, encoder, text, options, **how, whole=True, patient=True)
                audio = await speech.whole()
                told = {"index": index, "object": "speech", "format": name, "seed": speech.seed}
                told |= {"ignored": speech.ignored} if speech.ignored else {}
                told |= {"attempts": speech.attempts} if options.get("retries") or speech.attempts > 1 else {}
                told |= {"clipped": speech.clipped} if speech.clipped else {}
                return told | {"usage": await speech.usage()}, audio
            except Exception as error:
                return {"index": index, "object": "error", "error": _failure(error, BATCH).body}, None

    tasks = [asyncio.create_task(say(index, item)) for index, item in enumerate(items)]
    try:
        before = b'{"id": "speech-batch", "results": [' if omni else b'{"object": "list", "data": ['
        spoken = 0
        for task in tasks:
            await asyncio.wait([task])  # cancelling this wait spares the task; `finally` cancels all at once
            told, audio = task.result()
            spoken += audio is not None
            told = _as_omni(told, name) if omni else told
            yield before + json.dumps(told).encode().removesuffix(b"}")
            for piece in _base64_json(audio, "audio_data" if omni else "audio"):
                yield piece
            yield b"}"
            before = b", "
        counts = {"total": len(tasks), "succeeded": spoken, "failed": len(tasks) - spoken}
        yield b"], " + json.dumps(counts).encode()[1:] if omni else b"]}"
    finally:
        await cancelled(tasks)


def _as_omni(told: dict[str, Any], name: str) -> dict[str, Any]:
    """An entry of a batch without its audio, in vLLM-Omni's form."""
    if "error" in told:
        return {"index": told["index"], "status": "error", "error": told["error"]["message"]}
    return {"index": told["index"], "status": "success", "usage": told["usage"], "media_type": MEDIA[name]}


def _base64_json(audio: bytes | None, name: str) -> Iterator[bytes]:
    """The member of this name for an open JSON object, in pieces. None: nothing."""
    if audio is not None:
        yield f', "{name}": "'.encode()
        for start in range(0, len(audio), _BASE64_PIECE):
            yield base64.b64encode(audio[start : start + _BASE64_PIECE])
        yield b'"'
