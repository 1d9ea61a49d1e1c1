"""The WebSocket API: text comes in by contexts, PCM goes out. docs/serving.md describes it."""

import asyncio
import logging
import reprlib
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from starlette.websockets import WebSocket

from qwen_megakernel.engine.event_loop import AsyncUtterance
from qwen_megakernel.engine.word_times import SpeechRate, WordTimes
from qwen_megakernel.errors import NoWordsError, RequestError, TextEndedError, TextError, TextTooLongError
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.server.socket_line import MAX_UNREAD, SocketLine, error_message, parse_message, protocol_error
from qwen_megakernel.text.front_end import Reading
from qwen_megakernel.text.sentence import STALL_S

log = logging.getLogger(__name__)

PATH = "/v1/audio/speech/socket"

_KINDS = {
    "a string": str,
    "an integer": int,
    "a number": (int, float),
    "an integer or a list": (int, list),
    "true or false": bool,
}
_SETTINGS = {
    "voice": "a string",
    "language": "a string",
    "instructions": "a string",
    "seed": "an integer",
    "temperature": "a number",
    "top_k": "an integer",
    "top_p": "a number",
    "repetition_penalty": "a number",
    "chunk_frames": "an integer or a list",
    "speed": "a number",
    "normalize": "a string",
    "trim": "a string",
    "non_streaming_mode": "true or false",
    "words": "true or false",
    "turn": "a string",
}
_MAX_NAME, _MAX_SETTING = 64, 2000  # characters of a context's name; of any other setting
_REMEMBERED = 1000  # names of ended contexts: late text must not open them again
_MOST_TURNS = 32  # whose text may go on in another context, the latest used; one needs some 10 kB


def add_socket(app: FastAPI, service: EngineService, metrics: Metrics) -> None:
    """Add the route."""

    @app.websocket(PATH)
    async def speak(websocket: WebSocket) -> None:
        with metrics.sockets.track_inprogress():
            await _Socket(websocket, service, metrics).run()


class _Socket(SocketLine):
    """One client's WebSocket; every context has a task of its own."""

    idle_words = "no request came; send ping to keep a socket open"

    def __init__(self, websocket: WebSocket, service: EngineService, metrics: Metrics):
        super().__init__(websocket, service)
        self.metrics = metrics
        self._contexts: dict[str, _Context] = {}
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)
        self._numbers = 0
        self._turns: OrderedDict[str, _Turn] = OrderedDict()  # by name
        self.rates: dict[str | None, SpeechRate] = {}  # by voice; only existing voices get an entry

    def _greeting(self) -> dict[str, Any]:
        service, engine = self.service, self.service.engine
        hello = {"type": "hello", "model": service.model, "format": "pcm_s16le", "sample_rate": engine.sample_rate}
        hello |= {"voices": service.voice_names(), "languages": list(engine.languages), "settings": list(_SETTINGS)}
        return hello | {"idle_seconds": service.limits.idle_s, "max_characters": service.limits.max_text}

    def _listens(self) -> bool:
        return bool(self._contexts)

    def _tasks(self) -> Iterable[asyncio.Task]:
        return [context.task for context in self._contexts.values()]

    def put_audio(self, number: int, pcm: bytes) -> None:
        """Queue PCM of the context with this number."""
        self.put_bytes(number.to_bytes(4, "little") + pcm)

    def put_error(self, name: str, error: ApiError) -> None:
        """Queue the error that ends a context."""
        self.put(error_message(error, context=name))

    def _handle(self, text: str | None) -> None:
        message = parse_message(text, self.service.limits.max_body)
        kind, name = message.pop("type", None), message.pop("context", None)
        if kind == "ping":
            if name is not None or message:
                raise protocol_error(f"ping takes no other field, got {(sorted(message) or ['context'])[0][:40]!r}")
            self.put({"type": "pong"})
            return
        if kind not in ("text", "flush", "end", "cancel"):
            raise protocol_error(f"type must be text, flush, end, cancel or ping, got {str(kind)[:40]!r}")
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
            got = reprlib.repr(name)
            raise protocol_error(f"context must be a string of 1 to {_MAX_NAME} characters, got {got}")
        context = self._contexts.get(name)
        if kind == "text":
            if context is None and name not in self._ended:
                context = self._open(name)
            if context:
                context.text(message)
        elif message:
            raise protocol_error(f"{kind} takes a context and no other field, got {sorted(message)[0][:40]!r}")
        elif context:
            context.command(kind)
        elif kind != "cancel" and name not in self._ended:  # if in `_ended`, the message only came late
            self.put_error(name, ApiError(400, "invalid", f"there is no context {name!r}: a text message opens it"))

    def _open(self, name: str) -> "_Context | None":
        if len(self._contexts) >= self.service.limits.contexts:
            most = self.service.limits.contexts
            self.put_error(
                name,
                ApiError(429, "busy", f"a socket may have at most {most} contexts at once: open this one later", True),
            )
            self._ended.append(name)
            return None
        self._numbers += 1
        context = self._contexts[name] = _Context(self, name, self._numbers)
        return context

    def turn(self, name: str | None) -> "_Turn":
        """The turn of this name. None: a turn of its own."""
        if name is None:
            return _Turn()
        turn = self._turns.setdefault(name, _Turn())
        self._turns.move_to_end(name)
        while len(self._turns) > _MOST_TURNS:
            self._turns.popitem(last=False)
        return turn

    def remove(self, name: str) -> None:
        """Remove a context that has ended. Its name cannot be used again."""
        del self._contexts[name]
        self._ended.append(name)


class _Turn:
    """A text that several contexts speak, one behind the other. A context whose text is open has the lock."""

    def __init__(self) -> None:
        self.reading, self.lock = Reading(), asyncio.Lock()


class _Context:
    """One context: an utterance, or several if its text came whole and does not fit a slot.

    Its own task reads its messages from a queue, so that other contexts do not wait while its prompt is built."""

    def __init__(self, socket: _Socket, name: str, number: int):
        self._socket, self._name, self._number = socket, name, number
        self._inbox: asyncio.Queue[dict[str, Any] | str] = asyncio.Queue()
        self._characters = 0
        self._utterance: AsyncUtterance | None = None
        self._words: WordTimes | None = None
        self._refused: RequestError | None = None  # why a later message ended it
        self._running = self._cancelled = False
        self._text_complete = False
        self._blank = True  # its text so far
        self._audio_s = 0.0
        self.task = asyncio.create_task(self._run())

    def text(self, message: dict[str, Any]) -> None:
        """Take a "text" message."""
        if self._text_complete:
            return
        self._text_complete = message.get("end") is True
        self._characters += len(message["text"]) if isinstance(message.get("text"), str) else 0
        if self._characters > self._socket.service.limits.max_text:
            message = {}  # the text is too long: `_read` refuses it, so it need not be kept
            self._text_complete = True
        self._queue(message)

    def _queue(self, message: dict[str, Any] | str) -> None:
        if self._inbox.qsize() >= MAX_UNREAD:
            raise protocol_error(f"more than {MAX_UNREAD} messages wait in one context: send larger pieces")
        self._inbox.put_nowait(message)

    def command(self, kind: str) -> None:
        """Take a "flush", "end" or "cancel" message."""
        if kind == "cancel":  # it overtakes the messages in the queue
            self._cancelled = True
            if self._utterance:
                self._utterance.cancel()
            elif self._running:
                self.task.cancel()
            return
        if not self._text_complete:
            self._text_complete = kind == "end"
            self._queue(kind)

    async def _run(self) -> None:
        socket = self._socket
        self._running = True
        try:
            async with asyncio.timeout(socket.service.limits.total_s):
                if self._cancelled:
                    raise asyncio.CancelledError
                await self._speak()
        except TimeoutError:
            socket.put_error(
                self._name,
                ApiError(
                    408, "failed", f"the context took more than {socket.service.limits.total_s:g} s: send end sooner"
                ),
            )
        except asyncio.CancelledError:  # cancelled before it spoke, or the socket is closed and nobody reads this
            self._put_end("cancelled", 0.0, 0.0, None)
        except Exception as error:
            told = ApiError.of(error)
            if told.status == 500:
                log.exception("a context failed")
            socket.put_error(self._name, told)
        finally:
            socket.remove(self._name)

    async def _speak(self) -> None:
        service = self._socket.service
        service.check_ready()
        first = await self._inbox.get()
        settings, text, complete = self._read(first, opens=True)
        if settings.get("non_streaming_mode") and not complete:
            raise RequestError(
                "text that comes in pieces needs the streaming layout: leave non_streaming_mode out, or send the whole "
                "text in the first message, with end true"
            )
        with_words, voice = settings.pop("words", False), settings.get("voice")
        turn = self._socket.turn(settings.pop("turn", None))
        settings["instruct"] = settings.pop("instructions", None)
        request = service.request(**settings, lenient=True)
        async with turn.lock:
            if with_words:
                rate = self._socket.rates.setdefault(voice and voice.lower(), SpeechRate())
                silence = turn.reading.silence if request.get("normalize") == "auto" else None
                self._words = WordTimes(rate, request.get("speed", 1.0), silence)
                self._words.add(text)
            self._blank = not text.strip()
            try:
                await self._speak_text(text, complete, request, turn.reading)
            except NoWordsError:
                if self._blank:
                    raise
                if self._words:
                    self._put_words(self._words.finish(0.0))
                self._put_end("eos", 0.0, 0.0, request["sampling"].seed)

    async def _speak_text(self, text: str, complete: bool, request: dict[str, Any], reading: Reading) -> None:
        """
        Raises:
            NoWordsError: there is nothing to speak.
        """
        service = self._socket.service
        seed, seconds, compute = request["sampling"].seed, 0.0, 0.0
        begin = {"type": "begin", "context": self._name, "number": self._number, "seed": seed}
        pieces = await service.pieces(text, request, reading) if complete else [None]
        for piece in pieces:
            opening = "" if complete else text
            async with service.speak(piece, request, opening, reading=reading) as self._utterance:
                if begin:
                    self._socket.put(begin)
                    begin = None
                if self._cancelled:
                    self._utterance.cancel()
                pusher = None if complete else asyncio.create_task(self._push_texts())
                try:
                    await self._put_chunks(service.engine.sample_rate)
                finally:
                    if pusher:
                        pusher.cancel()
                        await asyncio.gather(pusher, return_exceptions=True)
            audio = self._utterance.audio
            self._socket.metrics.record(audio)
            seconds += audio.duration_s
            compute += audio.compute_s
            if audio.finish_reason in ("cancelled", "length"):  # the next piece would not continue what was heard
                break
        if self._words and audio.finish_reason not in ("cancelled", "length"):  # all words were spoken
            self._put_words(self._words.finish(self._audio_s))
        self._put_end(audio.finish_reason, seconds, compute, seed)

    def _read(self, message: dict[str, Any], *, opens: bool) -> tuple[dict[str, Any], str, bool]:
        """
        Args:
            message: a "text" message.
            opens: it is the context's first message.

        Returns:
            Its settings, its text, and whether the text is complete.
        """
        message, most = dict(message), self._socket.service.limits.max_text
        if self._characters > most:
            raise TextTooLongError(
                f"a context may have at most {most} characters, this one has {self._characters}: open another context"
            )
        text, complete = message.pop("text", None), message.pop("end", False)
        if not isinstance(text, str):
            raise TextError(f"text must be a string, got {reprlib.repr(text)}")
        if not isinstance(complete, bool):
            raise RequestError(f"end must be true or false, got {reprlib.repr(complete)}")
        for name, value in message.items():
            if name not in _SETTINGS:
                raise RequestError(f"unknown setting {name[:40]!r}; known: {', '.join(_SETTINGS)}")
            if not opens:
                raise RequestError(f"{name} comes too late: settings go with a context's first message")
            wanted = _SETTINGS[name]
            kind = _KINDS[wanted]
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool)):
                raise RequestError(f"{name} must be {wanted}, got {reprlib.repr(value)}")
            if isinstance(value, str) and len(value) > _MAX_SETTING:
                raise RequestError(f"{name} has {len(value)} characters, at most {_MAX_SETTING} are allowed")
        return {name: value for name, value in message.items() if value is not None}, text, complete

    async def _push_texts(self) -> None:
        """Push later text into the utterance as it comes. A refused message ends the utterance."""
        service, utterance = self._socket.service, self._utterance
        try:
            complete = False
            while not complete:
                async with asyncio.timeout(service.limits.text_s):
                    message = await self._next_message()
                if message == "flush":
                    await utterance.flush()
                elif message == "end":
                    complete = True
                else:
                    _, text, complete = self._read(message, opens=False)
                    if self._words:
                        self._words.add(text)
                    self._blank &= not text.strip()
                    service.log_text(text)
                    await utterance.push_text(text)
            await utterance.end_text()
        except TextEndedError:
            pass  # the utterance ended before its text did: its "end" message says why
        except TimeoutError:
            self._refused = RequestError(f"no more text came for {service.limits.text_s:g} s: send end, or text sooner")
            utterance.cancel()
        except RequestError as error:  # without this message's text the utterance cannot go on
            if not utterance.done:
                self._refused = error
            utterance.cancel()

    async def _next_message(self) -> dict[str, Any] | str:
        """The next message. If it is long in coming, the word before it is whole."""
        try:
            async with asyncio.timeout(STALL_S):
                return await self._inbox.get()
        except TimeoutError:
            if self._words:
                self._words.flush()
                self._put_words(self._words.due(self._audio_s))
            return await self._inbox.get()

    async def _put_chunks(self, rate: int) -> None:
        async for chunk in self._utterance:
            if self._cancelled:
                continue  # the chunk was made before the cancel came
            self._socket.put_audio(self._number, pcm16(chunk.samples))
            self._audio_s += len(chunk.samples) / rate
            if self._words:
                self._put_words(self._words.due(self._audio_s))
        if self._refused:
            raise self._refused

    def _put_words(self, words: list[tuple[str, float]]) -> None:
        if words:
            listed = [[word, round(at, 3)] for word, at in words]
            self._socket.put({"type": "words", "context": self._name, "words": listed})

    def _put_end(self, reason: str, seconds: float, compute: float, seed: int | None) -> None:
        end = {"type": "end", "context": self._name, "finish_reason": reason, "seconds": round(seconds, 3)}
        self._socket.put(end | {"compute_seconds": round(compute, 4), "seed": seed})
