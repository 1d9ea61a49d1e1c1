"""MegakernelWebsocketTTSService: Qwen3-TTS in a Pipecat pipeline, from an engine that is elsewhere.

    LLM text ─► run_tts ─► socket ─► server's engine ─► socket ─► receive loop ─► audio context ─► transport

The same service as `MegakernelTTSService`, without torch: docs/serving.md is what the two ends say to each other. Every
utterance is a context of its own on the wire: a sentence, one after the other (SENTENCE mode), or all that an audio
context says (TOKEN mode). The socket outlives interruptions. Where it breaks, what was being said ends with an error
and the receive loop makes a new one.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from loguru import logger
from pipecat.frames.frames import ErrorFrame, TTSAudioRawFrame
from pipecat.processors.frame_processor import FrameProcessorSetup
from pipecat.services.tts_service import WebsocketTTSService
from pipecat.services.websocket_service import WebsocketService
from pipecat.utils.errors import ErrorCategory, classify_http_exception
from websockets.exceptions import InvalidStatus, WebSocketException

from qwen_megakernel.errors import (
    EngineBusy,
    EngineClosed,
    RequestError,
    SpeakerError,
    TextEndedError,
    TextTooLongError,
    TTSError,
)
from qwen_megakernel.pipecat.service import Speech, SpeechService, SpeechSettings, check_names, sampling_of

_FORMAT = "pcm_s16le"
_CONNECT = 5.0  # seconds for the handshake and the server's first message; a pipeline's set-up has 20
_PING = 20.0  # seconds between keep-alives
_MOST_NAME = 64  # characters of a context's name
# What the server may answer instead of audio; everything else it calls by a name that we do not need to know.
_ERRORS: dict[str, type[TTSError]] = {
    "invalid": RequestError,
    "busy": EngineBusy,
    "closing": EngineClosed,
    "dead": EngineClosed,
}


class MegakernelWebsocketTTSService(SpeechService, WebsocketTTSService):
    """Streams Qwen3-TTS from a server over one WebSocket per service.

    An interruption cancels that utterance alone and keeps the socket.

    Event handlers:
        on_connected: Connected, and the server has said what it speaks.
        on_disconnected: The socket is closed.
        on_connection_error: Called with the message.
    """

    Settings = SpeechSettings
    _settings: Settings

    def __init__(
        self,
        *,
        url: str,
        token: str | None = None,
        chunk_frames: int | Sequence[int] | None = None,
        trim_leading_silence: bool = True,
        settings: Settings | None = None,
        **kwargs,
    ):
        """Make the service; `setup` connects.

        Args:
            url: ws://HOST:PORT/v1/audio/speech/socket, or wss://.
            token: The server's, if it has one.
            chunk_frames: Frames of 80 ms per chunk; None: as the server has it.
            trim_leading_silence: Cut silence in front of a turn's first word.
            settings: What may change while the pipeline runs. A model must be the server's.
            **kwargs: For `WebsocketTTSService`.

        Raises:
            RequestError: a URL of another kind, a sampling value out of range, a setting of a wrong type. Whether the
                server has the voice and the language `setup` finds out.
            TypeError: an argument that neither this service nor `WebsocketTTSService` has.
        """
        if not url.startswith(("ws://", "wss://")):
            raise RequestError(f"url must begin with ws:// or wss://, got {url!r}")
        store = self.Settings.unset(model=None)
        if settings is not None:
            store.apply_update(settings)
        super().__init__(trim_leading_silence=trim_leading_silence, settings=store, **kwargs)
        self._url, self._token, self._chunk_frames = url, token, chunk_frames
        self._named_model = store.model  # None: whatever the server has
        self._hello: _Hello | None = None  # the server's latest
        self._ready = asyncio.Event()  # the socket is open and the server has said what it speaks
        self._receive_task: asyncio.Task | None = None
        self._wires: dict[str, _Wire] = {}  # by name, until the server's end or error
        self._numbers: dict[int, _Wire] = {}
        self._count = itertools.count(1)
        self._check(self._settings)

    # ------------------------------------------------------------ life

    async def setup(self, setup: FrameProcessorSetup):
        """Connect. A server that cannot be reached is told of; the first text tries again.

        Raises:
            RequestError: the server does not have what the settings name.
        """
        await super().setup(setup)
        try:
            await self._connect()
        except RequestError:
            raise
        except Exception as error:
            await self._report_error(ErrorFrame(f"cannot speak yet: {error}", exception=error))

    async def cleanup(self):
        """Close the socket."""
        self._cancel_all()
        await super().cleanup()

    # ------------------------------------------------------------ the socket

    async def _connect(self):
        await super()._connect()
        await self._connect_websocket()
        self._receive_task = self.create_task(self._receive_task_handler(self._report_error))
        self._create_keepalive_task(_PING)

    async def _disconnect(self):
        await super()._disconnect()
        await self._cancel_keepalive_task()
        if self._receive_task:
            await self.cancel_task(self._receive_task)
            self._receive_task = None
        await self._disconnect_websocket()

    async def _connect_websocket(self):
        """Raises where Pipecat's own services only tell: each attempt is told of once, by who wanted it."""
        if self._ready.is_set():
            return
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            async with asyncio.timeout(_CONNECT):
                # PCM does not shrink; the timeout around this one covers the first message too.
                self._websocket = await self._websocket_connect(
                    self._url, additional_headers=headers, compression=None, open_timeout=None
                )
                self._greet(json.loads(await self._websocket.recv()))
            self._ready.set()
        except TimeoutError:
            raise ConnectionError(f"{self._url} did not answer within {_CONNECT:.0f} s") from None
        finally:
            if not self._ready.is_set():  # refused, or an interruption came
                await self._disconnect_websocket()
        await self._call_event_handler("on_connected")

    async def _disconnect_websocket(self):
        self._ready.clear()
        websocket, self._websocket = self._websocket, None
        if websocket is None:
            return
        await self.stop_all_metrics()
        try:
            await websocket.close()
        except (OSError, WebSocketException) as error:
            logger.debug(f"{self}: {error}")
        await self._call_event_handler("on_disconnected")

    async def _reconnect_websocket(self, attempt_number: int) -> bool:
        # Contexts of the old socket were closed when it broke; those that are open by now wait for the new one.
        return await WebsocketService._reconnect_websocket(self, attempt_number)

    def _greet(self, message: dict[str, Any]) -> None:
        """The server's first message: what it has, against what is asked of it."""
        if message.get("type") == "error":
            raise _error_of(message)
        missing = {"model", "sample_rate", "voices", "languages"} - message.keys()
        if message.get("type") != "hello" or message.get("format") != _FORMAT or missing:
            raise TTSError(f"expected a hello with the format {_FORMAT!r} from {self._url}, got {message}")
        model = message["model"]
        if self._named_model not in (None, model):
            raise RequestError(f"the settings name the model {self._named_model!r}, {self._url} has {model!r}")
        self._hello = _Hello(message["sample_rate"], tuple(message["voices"]), tuple(message["languages"]))
        self._check(self._settings)
        self._settings.model = model
        self._sync_model_name_to_metrics()

    async def _connected(self) -> None:
        """Behind this there is a socket: connects if the first try failed, waits while the receive loop reconnects."""
        if self._receive_task is None or self._receive_task.done():
            await self._connect()
        try:
            await asyncio.wait_for(self._ready.wait(), _CONNECT)
        except TimeoutError:
            raise ConnectionError(f"the connection to {self._url} is lost and not there again yet; try later") from None

    async def _send(self, kind: str, **fields) -> None:
        if self._websocket is None:
            raise ConnectionError(f"the connection to {self._url} is lost; what was being said may be said again")
        await self._websocket.send(json.dumps({"type": kind, **fields}))

    async def _send_keepalive(self):
        await self._send("ping")

    async def _cancel_wire(self, name: str) -> None:
        try:
            await self._send("cancel", context=name)
        except (OSError, WebSocketException) as error:  # a socket that broke has cancelled all of its contexts
            logger.debug(f"{self}: {error}")

    async def _receive_messages(self):
        try:
            async for message in self._websocket:
                if isinstance(message, bytes):
                    self._take_audio(message)
                else:
                    await self._take(json.loads(message))
        finally:
            self._ready.clear()
            await self._lose_contexts()

    def _take_audio(self, message: bytes) -> None:
        wire = self._numbers.get(int.from_bytes(message[:4], "little"))
        if wire:  # otherwise late audio of one that was cancelled
            wire.items.put_nowait(message[4:])

    async def _take(self, message: dict[str, Any]) -> None:
        kind, name = message["type"], message.get("context")
        if kind == "pong":
            return
        if kind == "error" and name is None:  # of the socket, which the server closes behind it, or of a message
            error = _error_of(message)
            await self._report_error(ErrorFrame(str(error), exception=error, category=ErrorCategory.CONNECTIVITY))
            return
        wire = self._wires.get(name)
        if wire is None:
            logger.debug(f"{self}: {kind} of {name}, which is over")
        elif kind == "begin":
            wire.number = message["number"]
            self._numbers[wire.number] = wire
        elif kind == "words":
            wire.items.put_nowait(message["words"])
        elif kind == "end":
            self._forget(wire)
            wire.items.put_nowait(_End(message["finish_reason"], message["seconds"], message["seed"]))
        elif kind == "error":
            self._forget(wire)
            wire.items.put_nowait(_error_of(message))
        else:
            logger.debug(f"{self}: unknown message {kind!r}")

    def _forget(self, wire: "_Wire") -> None:
        """The wire context is over, or nobody listens to it any more."""
        wire.over = True
        self._wires.pop(wire.name, None)
        self._numbers.pop(wire.number, None)

    async def _lose_contexts(self) -> None:
        """The socket broke: what was being said over it ends here. The error must be in a context before its end is."""
        error = ConnectionError(f"the connection to {self._url} was lost; what was being said may be said again")
        for wire in list(self._wires.values()):
            self._forget(wire)
            await wire.speech.lose(error)
            wire.items.put_nowait(None)
        await self._close_connection_contexts()

    # ------------------------------------------------------------ speaking

    def _new_speech(self, context_id: str) -> "_Speech":
        return _Speech(self, context_id)

    def _new_wire(self, speech: "_Speech", context_id: str) -> "_Wire":
        tail = f"/{next(self._count)}"
        return _Wire(context_id[: _MOST_NAME - len(tail)] + tail, speech)

    # ------------------------------------------------------------ settings

    def _is_model(self, model: str) -> bool:
        return model == self._settings.model

    def _check(self, settings: SpeechSettings) -> None:
        if settings.voice is not None and not isinstance(settings.voice, str):
            raise SpeakerError(f"voice must be a voice's name, got {type(settings.voice).__name__}")
        unseen = f"what {self._url} has, which has not answered yet"
        voices, languages = (self._hello.voices, self._hello.languages) if self._hello else (None, None)
        check_names(settings, voices, languages, unseen=unseen, no_voices="none" if self._hello else unseen)
        sampling_of(settings)

    def _request(self) -> dict[str, Any]:
        """How the next utterance is to be said: the first message's fields."""
        settings, sampling = self._settings, sampling_of(self._settings)
        asked = {
            "voice": settings.voice,
            "language": settings.language,
            "instructions": settings.instruct,
            "seed": sampling.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "repetition_penalty": sampling.repetition_penalty,
            "chunk_frames": self._chunk_frames,
        }
        return {"words": True} | {name: value for name, value in asked.items() if value is not None}

    def _classify_error(self, exception: Exception) -> ErrorCategory | None:
        if isinstance(exception, InvalidStatus):
            return classify_http_exception(exception)  # 401: the token
        if isinstance(exception, (OSError, WebSocketException)):
            return ErrorCategory.CONNECTIVITY
        return super()._classify_error(exception)


@dataclass
class _Hello:
    sample_rate: int
    voices: tuple[str, ...]
    languages: tuple[str, ...]


@dataclass
class _End:
    finish_reason: str
    seconds: float
    seed: int


@dataclass(eq=False)
class _Wire:
    """A context on the wire: one utterance."""

    name: str
    speech: "_Speech"
    number: int | None = None  # of its audio
    opened: bool = False  # by its first text
    over: bool = False
    # PCM, words and, once, an _End or an exception; None: the socket broke, of which the audio context was told
    items: asyncio.Queue[bytes | list | _End | Exception | None] = field(default_factory=asyncio.Queue)


class _Speech(Speech):
    """Its utterances are contexts on the wire."""

    def __init__(self, service: MegakernelWebsocketTTSService, context_id: str):
        super().__init__(service, context_id)
        self._wire: _Wire | None = None
        self._trimmed_before = 0.0  # seconds cut in front of earlier utterances

    async def _open(self, text: str | None) -> None:
        self.keep_open()  # it may have to connect first
        await self._service._connected()
        self._wire = self._service._new_wire(self, self._context_id)
        self._begin(self._service._hello.sample_rate)
        self._trimmed_before = self._trimmed
        if text is not None:
            await self._tell("text", text=text, end=True)

    async def _push(self, text: str) -> None:
        if self._wire.over:
            raise TextEndedError("the server has ended this utterance")
        await self._tell("text", text=text)

    async def _end(self) -> None:
        if not self._wire.over:
            await self._tell("end")

    async def flush(self) -> None:
        if self._wire and self._wire.opened and not self._wire.over and not self._ended.is_set():
            try:
                await self._tell("flush")
            except (OSError, WebSocketException) as error:
                await self._fail(error)

    async def _tell(self, kind: str, **fields) -> None:
        """The first that is told opens the context. One that cannot be told of more is over; the caller tells why."""
        wire, service = self._wire, self._service
        if not wire.opened:
            wire.opened = True
            service._wires[wire.name] = wire
            fields |= service._request()
        try:
            await service._send(kind, context=wire.name, **fields)
        except (OSError, WebSocketException):
            service._forget(wire)
            wire.items.put_nowait(None)
            raise

    def _drop(self) -> None:
        if self._wire and self._wire.opened and not self._wire.over:
            self._service._forget(self._wire)
            self._service.create_task(self._service._cancel_wire(self._wire.name))

    async def lose(self, error: Exception) -> None:
        """The socket broke; the context is about to be closed, and a turn that goes on has a new one."""
        if not self._cancelled:
            await self._service.append_to_audio_context(self._context_id, self._error(error))
        self._ended.set()

    async def _audio(self) -> AsyncGenerator[TTSAudioRawFrame | ErrorFrame, None]:
        wire = self._wire
        while isinstance(item := await self._next(wire.items), (bytes, list)):
            if isinstance(item, list):
                cut = self._trimmed - self._trimmed_before
                await self._tell_words([(word, max(0.0, at - cut)) for word, at in item])
            elif frame := self._heard(np.frombuffer(item, "<i2").astype(np.float32) / 32767):
                yield frame
        if item is None:
            return
        if self._reader and not self._ended.is_set():
            # Text that was on its way when the server ended the utterance has opened another of this name there.
            await self._service._cancel_wire(wire.name)
        if isinstance(item, Exception):
            raise item
        if tail := self._tail():
            yield tail
        if item.finish_reason == "length":  # what is left of the text was not spoken
            yield self._error(TextTooLongError(f"speech was cut after {item.seconds:.1f} s: its slot is full"))
        logger.info(f"{self._service}: {item.seconds:.2f} s, {item.finish_reason}, seed {item.seed}")


def _error_of(message: dict[str, Any]) -> TTSError:
    again = "; it may be tried again" if message.get("retryable") else ""
    return _ERRORS.get(message["code"], TTSError)(f"{message['message']} ({message['code']}{again})")
