"""MegakernelWebsocketTTSService: Qwen3-TTS in a Pipecat pipeline, with the engine behind a server's WebSocket.

    LLM text ─► run_tts ─► socket ─► server's engine ─► socket ─► receive loop ─► audio context ─► transport

The same service as `MegakernelTTSService`, without torch. docs/serving.md describes the messages. Every utterance has
its own context on the socket: a sentence (SENTENCE mode), or all text of an audio context (TOKEN mode). If the socket
breaks, its utterances end with an error, and the receive loop connects again.
"""

import asyncio
import itertools
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

from loguru import logger
from pipecat.frames.frames import ErrorFrame
from pipecat.metrics.metrics import MetricsData
from pipecat.processors.frame_processor import FrameProcessorSetup
from pipecat.services.tts_service import WebsocketTTSService
from pipecat.services.websocket_service import WebsocketService
from pipecat.utils.errors import ErrorCategory, classify_http_exception
from websockets.exceptions import InvalidStatus, WebSocketException

from qwen_megakernel.choices import MOST_CONTEXT_NAME
from qwen_megakernel.errors import (
    EngineBusy,
    EngineClosed,
    EngineDied,
    RequestError,
    SpeakerError,
    TTSError,
)
from qwen_megakernel.pipecat.address import HandshakeRefused, socket_url
from qwen_megakernel.pipecat.audio_context import Opening
from qwen_megakernel.pipecat.remote_session import RemoteSession
from qwen_megakernel.pipecat.service import ServiceArguments, SpeechService
from qwen_megakernel.pipecat.settings import SpeechSettings, check_names
from qwen_megakernel.speech.events import Ended
from qwen_megakernel.speech.options import options_of
from spoken_text.languages import spellings_of

_FORMAT = "pcm_s16le"
_CONNECT_S = 5.0  # for the handshake and the server's first message; a pipeline's set-up may take 20 s in total
_PING_S = 20.0  # between two pings
# The exception for each of the server's error codes; for any other code it is TTSError.
_ERRORS: dict[str, type[TTSError]] = {
    "invalid": RequestError,
    "busy": EngineBusy,
    "closing": EngineClosed,
    "dead": EngineDied,
}


class WebsocketServiceArguments(ServiceArguments, total=False):
    """Arguments of Pipecat's `WebsocketTTSService`."""

    reconnect_on_error: bool
    """Connect again if the socket breaks; default: True."""
    reconnect_backoff_min_wait: float
    """Seconds between two attempts at least; default: 4."""
    reconnect_backoff_max_wait: float
    """Seconds between two attempts at most; default: 10."""
    ws_close_timeout: float
    """Seconds that closing the socket may take; default: Pipecat's own."""
    ws_send_timeout: float | None
    """Seconds that sending a message may take (from Pipecat 1.14 on); default: 5."""


class MegakernelWebsocketTTSService(SpeechService, WebsocketTTSService):
    """Streams Qwen3-TTS from a server over one WebSocket per service.

    An interruption cancels only its own utterance and keeps the socket.

    Event handlers:
        on_connected: Connected, and the server has told its voices and languages.
        on_disconnected: The socket is closed.
        on_connection_error: Called with the message.
    """

    _entrance = "remote"

    def __init__(
        self,
        *,
        url: str,
        token: str | None = None,
        chunk_frames: int | Sequence[int] | None = None,
        trim_leading_silence: bool = True,
        settings: SpeechSettings | None = None,
        **kwargs: Unpack[WebsocketServiceArguments],
    ):
        """Make the service; `setup` connects.

        Args:
            url: The server's, such as ws://HOST:8000 or https://HOST, or its socket's: .../v1/audio/speech/socket.
            token: The server's, if it has one.
            chunk_frames: The setting of this name, unless `settings` have it.
            trim_leading_silence: Cut silence in front of a turn's first word.
            settings: What may change while the pipeline runs. If they name a model, it must be the server's.
            **kwargs: For `WebsocketTTSService`.

        Raises:
            RequestError: the URL is no server's, a sampling value is out of range, or a setting has a wrong type.
                `setup` checks whether the server has the voice and the language.
            TypeError: an argument that neither this service nor `WebsocketTTSService` has.
        """
        self._url = socket_url(url)
        store = self.Settings.unset(model=None)
        if settings is not None:
            store.apply_update(settings)
        store.chunk_frames = chunk_frames if store.chunk_frames is None else store.chunk_frames
        super().__init__(trim_leading_silence=trim_leading_silence, settings=store, **kwargs)
        self._token = token
        self._named_model = store.model  # None: the server's, whichever it is
        self._hello: dict[str, Any] = {}  # the server's first message, which lists what it has
        self._ready = asyncio.Event()  # the socket is open, and the server has told its voices and languages
        self._receive_task: asyncio.Task | None = None
        self._ping_task: asyncio.Task | None = None
        self._sessions: dict[str, RemoteSession] = {}  # by name, until the server ends them
        self._count = itertools.count(1)
        self._told_ignored: set[str] = set()
        self._check(self._settings)

    # ------------------------------------------------------------ life

    async def setup(self, setup: FrameProcessorSetup):
        """Connect. If the server cannot be reached, an error is reported, and the first text tries again.

        Raises:
            RequestError: the server does not have what the settings name.
        """
        await super().setup(setup)
        if self._receive_task:  # a StopFrame leaves the connection to the tasks of its pipeline
            await self._disconnect()
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
        self._ping_task = self._ping_task or self.create_task(self._ping())

    async def _disconnect(self):
        await super()._disconnect()
        for task in filter(None, (self._ping_task, self._receive_task)):
            await self.cancel_task(task)
        self._ping_task = self._receive_task = None
        await self._disconnect_websocket()

    async def _connect_websocket(self):
        """Connect. Unlike Pipecat's own services this raises, so that the caller reports each attempt once."""
        if self._ready.is_set():
            return
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            async with asyncio.timeout(_CONNECT_S):
                # No compression: PCM hardly shrinks. The timeout around this also covers the first message.
                self._websocket = await self._websocket_connect(
                    self._url, additional_headers=headers, compression=None, open_timeout=None
                )
                hello = json.loads(await self._websocket.recv())
                # For languages that are not published this takes a third of a second, once.
                await asyncio.to_thread(spellings_of, tuple(hello.get("languages", ())))
                self._check_hello(hello)
            self._ready.set()
        except TimeoutError:
            raise ConnectionError(f"{self._url} did not answer within {_CONNECT_S:.0f} s") from None
        except InvalidStatus as error:
            raise HandshakeRefused(error.response, self._url, self._token) from None
        except OSError as error:
            raise ConnectionError(f"cannot reach {self._url}: {error!r}; start `qwen-megakernel serve`") from error
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
        # Contexts of the old socket were closed when it broke. Contexts that are open now wait for the new one.
        return await WebsocketService._reconnect_websocket(self, attempt_number)

    def _check_hello(self, message: dict[str, Any]) -> None:
        """Check the settings against the server's first message, which lists what it has."""
        if message.get("type") == "error":
            raise _error_of(message)
        missing = {"model", "sample_rate", "voices", "languages"} - message.keys()
        if message.get("type") != "hello" or message.get("format") != _FORMAT or missing:
            raise TTSError(f"expected a hello with the format {_FORMAT!r} from {self._url}, got {message}")
        model = message["model"]
        if self._named_model not in (None, model):
            raise RequestError(f"the settings name the model {self._named_model!r}, but {self._url} has {model!r}")
        self._hello = message
        self._check(self._settings)
        self._settings.model = model
        self.set_core_metrics_data(MetricsData(processor=self.name, model=model))

    async def _ensure_connected(self) -> None:
        """Connect if the first attempt failed. Wait while the receive loop connects again."""
        if self._receive_task is None or self._receive_task.done():
            await self._connect()
        try:
            await asyncio.wait_for(self._ready.wait(), _CONNECT_S)
        except TimeoutError:
            raise ConnectionError(f"the connection to {self._url} is lost and not restored yet; try later") from None

    async def send(self, kind: str, **fields: Any) -> None:
        """See `Line`."""
        if self._websocket is None:
            raise ConnectionError(f"the connection to {self._url} is lost; send the text again")
        await self._websocket.send(json.dumps({"type": kind, **fields}))

    async def try_to_send(self, kind: str, **fields: Any) -> None:
        """See `Line`."""
        try:
            await self.send(kind, **fields)
        except (OSError, WebSocketException) as error:  # the server has cancelled all; the receive loop connects again
            logger.debug(f"{self}: {error}")

    async def _ping(self) -> None:
        """The server closes a socket on which nothing comes."""
        while True:
            await asyncio.sleep(_PING_S)
            await self.try_to_send("ping")

    async def _receive_messages(self):
        try:
            assert self._websocket
            async for message in self._websocket:
                if isinstance(message, bytes):
                    self._handle_audio(message)
                else:
                    await self._handle(json.loads(message))
        finally:
            self._ready.clear()
            await self._lose_contexts()

    def _handle_audio(self, message: bytes) -> None:
        number = int.from_bytes(message[:4], "little")
        for session in self._sessions.values():  # none, if it was cancelled and this audio came late
            if session.number == number:
                session.items.put_nowait(message[4:])

    async def _handle(self, message: dict[str, Any]) -> None:
        kind, name = message["type"], message.get("context")
        if kind == "pong":
            return
        if kind == "error" and name is None:  # about the socket, which the server now closes, or a message
            error = _error_of(message)
            await self._report_error(ErrorFrame(str(error), exception=error, category=ErrorCategory.CONNECTIVITY))
            return
        session = self._sessions.get(str(name))
        if session is None:
            logger.debug(f"{self}: {kind} of {name}, which has ended")
        elif kind == "error":
            self.forget(session)
            session.items.put_nowait(_error_of(message))
        elif kind in ("begin", "words", "end"):
            if kind == "begin":
                session.number = message["number"]
                self._warn_of_ignored(message.get("ignored", ()))
            elif kind == "end":
                self.forget(session)
            session.items.put_nowait(message)
        else:
            logger.debug(f"{self}: unknown message {kind!r}")

    def forget(self, session: RemoteSession) -> None:
        """See `Line`."""
        session.done = True
        self._sessions.pop(session.name, None)

    async def _lose_contexts(self) -> None:
        """End the utterances of a broken socket. An audio context must get its error before it is closed."""
        error = ConnectionError(f"the connection to {self._url} was lost; send the text again")
        for session in list(self._sessions.values()):
            self.forget(session)
            for context in list(self._contexts.values()):
                if context.session is session:
                    await context.lose(error)
            session.items.put_nowait(None)
        await self._close_connection_contexts()

    # ------------------------------------------------------------ speaking

    async def open_session(self, context_id: str, reading: str, text: str, *, complete: bool) -> Opening:
        await self._ensure_connected()
        settings: dict[str, Any] = {**self._options(self._settings)}
        fields = {name: settings[row.name] for name, row in options_of("socket").items() if row.name in settings}
        if "turn" in self._hello.get("settings", ()):
            fields["turn"] = reading
        else:  # a server before 0.3
            text = text.lstrip()  # it says how the text goes on
        if "traceparent" in self._hello.get("settings", ()):
            fields |= self._trace_of(context_id)
        tail = f"/{next(self._count)}"
        name = context_id[: MOST_CONTEXT_NAME - len(tail)] + tail
        session = self._sessions[name] = RemoteSession(self, name, capped="max_frames" in settings)
        begin = partial(session.begin, text, complete, {"words": True} | fields)
        return Opening(session, begin, self._hello["sample_rate"])

    def _trace_of(self, context_id: str) -> dict[str, str]:
        """`traceparent`, so that the trace of Pipecat goes on in the server; empty where nothing is traced."""
        entry = getattr(self, "_tts_spans", {}).get(context_id)
        if entry is None:
            return {}
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        told: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(told, set_span_in_context(entry["span"]))
        return {name: value for name, value in told.items() if name == "traceparent"}

    async def tell(self, ended: Ended) -> None:
        logger.debug(f"{self}: {ended.seconds:.2f} s, {ended.finish_reason}, seed {ended.seed}")

    def _warn_of_ignored(self, names: Sequence[str]) -> None:
        """Warn, once for each, of settings that change nothing."""
        for name in sorted({*names} - self._told_ignored):
            self._told_ignored.add(name)
            logger.warning(f"{self}: {name} changes nothing, the server says")

    def _new_reading(self) -> str:
        """The turn's name: the server reads contexts with one name as one text."""
        return f"turn/{next(self._count)}"

    # ------------------------------------------------------------ settings

    def _is_model(self, model: str) -> bool:
        return model == self._settings.model

    def _check(self, settings: SpeechSettings) -> None:
        if settings.voice is not None and not isinstance(settings.voice, str):
            raise SpeakerError(f"voice must be a voice's name, got {type(settings.voice).__name__}")
        unseen = f"none yet, because {self._url} has not answered"
        voices, languages = self._hello.get("voices"), self._hello.get("languages")
        check_names(settings, voices, languages, unseen=unseen, no_voices="none" if self._hello else unseen)
        self._options(settings)

    def _classify_error(self, exception: Exception) -> ErrorCategory | None:
        if isinstance(exception, InvalidStatus):
            return classify_http_exception(exception)  # 401: the token
        if isinstance(exception, (OSError, WebSocketException)):
            return ErrorCategory.CONNECTIVITY
        return super()._classify_error(exception)


def _error_of(message: dict[str, Any]) -> TTSError:
    again = "; try again" if message.get("retryable") else ""
    return _ERRORS.get(message["code"], TTSError)(f"{message['message']} ({message['code']}{again})")
