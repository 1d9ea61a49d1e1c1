"""The WebSocket API: text comes in by contexts, PCM goes out. docs/serving.md describes it."""

import asyncio
import logging
import reprlib
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from typing import Any

from starlette.websockets import WebSocket

from qwen_megakernel.choices import MOST_CONTEXT_NAME
from qwen_megakernel.errors import NoWordsError, RequestError, TextError, TextTooLongError
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.clones import CLONE_FIELDS, read_clone
from qwen_megakernel.server.fields import told_apart
from qwen_megakernel.server.records import CURRENT
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.server.socket_line import (
    MAX_RECORDING,
    MAX_UNREAD,
    SocketLine,
    error_message,
    parse_message,
    protocol_error,
)
from qwen_megakernel.speech.events import Began, Ended, Sound, Words
from qwen_megakernel.speech.options import MOST_TEXT, Option, options_of, read_options
from qwen_megakernel.speech.session import FLUSH, Flush, SpeechSession
from spoken_text.front_end import Reading

log = logging.getLogger(__name__)

SETTINGS = {"words": Option(kinds=(bool,)), "turn": Option(kinds=(str,)), "traceparent": Option(kinds=(str,))}
"""What a context's first message may have besides the options of speech."""
_REMEMBERED = 1000  # names of ended contexts: late text must not open them again
_MOST_WAITING = 256 << 10  # characters of a context's messages that it has not read; it may wait for its turn
_MOST_TURNS = 32  # whose text may go on in another context, the latest used; one needs some 10 kB


class Socket(SocketLine):
    """One client's WebSocket; every context has a task of its own.

    Attributes:
        longest: most characters of a message.
    """

    idle_words = "no request came; send ping to keep a socket open"

    def __init__(self, websocket: WebSocket, service: EngineService):
        super().__init__(websocket, service)
        self.longest = max(service.limits.max_body, MAX_RECORDING * service.options.allow_clone)
        self._contexts: dict[str, _Context] = {}
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)
        self._numbers = 0
        self._turns: OrderedDict[str, _SharedReading] = OrderedDict()  # by name

    def _greeting(self) -> dict[str, Any]:
        service, engine = self.service, self.service.engine
        hello = {"type": "hello", "model": service.model, "format": "pcm_s16le", "sample_rate": engine.sample_rate}
        hello |= {"voices": service.voice_names(), "languages": list(engine.languages)}
        hello["settings"] = [*options_of("socket"), *SETTINGS]
        return hello | {"idle_seconds": service.limits.idle_s, "max_characters": service.limits.max_text}

    def _listens(self) -> bool:
        return bool(self._contexts)

    def _tasks(self) -> list[asyncio.Task]:
        return [context.task for context in self._contexts.values()]

    def put_audio(self, number: int, pcm: bytes) -> None:
        """Queue PCM of the context with this number."""
        self.put_bytes(number.to_bytes(4, "little") + pcm)

    def put_error(self, name: str, error: ApiError) -> None:
        """Queue the error that ends a context, or that refuses to open one."""
        self.service.journal.fail(self.record, error, context=name)
        self.put(error_message(error, context=name))

    def _handle(self, text: str | None) -> None:
        message = parse_message(text, self.longest)
        size = len(text or "")
        kind, name = message.pop("type", None), message.pop("context", None)
        if kind == "ping":
            if name is not None or message:
                raise protocol_error(f"ping takes no other field, got {(sorted(message) or ['context'])[0][:40]!r}")
            self.put({"type": "pong"})
            return
        if kind not in ("text", "flush", "end", "cancel"):
            raise protocol_error(f"type must be text, flush, end, cancel or ping, got {str(kind)[:40]!r}")
        if not isinstance(name, str) or not 0 < len(name) <= MOST_CONTEXT_NAME:
            got = reprlib.repr(name)
            raise protocol_error(f"context must be a string of 1 to {MOST_CONTEXT_NAME} characters, got {got}")
        context = self._contexts.get(name)
        if kind == "text":
            if context is None and name not in self._ended:
                context = self._open(name)
            if context:
                context.text(message, size)
        elif message:
            raise protocol_error(f"{kind} takes a context and no other field, got {sorted(message)[0][:40]!r}")
        elif context:
            context.command(kind)
        elif kind != "cancel" and name not in self._ended:  # if in `_ended`, the message only came late
            self.put_error(name, ApiError(400, "invalid", f"there is no context {name!r}: a text message opens it"))

    def _open(self, name: str) -> "_Context | None":
        if len(self._contexts) >= (most := self.service.limits.contexts):
            words = f"a socket may have at most {most} contexts at once: open this one later"
            self.put_error(name, ApiError(429, "busy", words, True))
            self._ended.append(name)
            return None
        self._numbers += 1
        context = self._contexts[name] = _Context(self, name, self._numbers)
        return context

    def turn(self, name: str | None) -> "_SharedReading":
        """The turn of this name. None: a turn of its own."""
        if name is None:
            return _SharedReading()
        turn = self._turns.setdefault(name, _SharedReading())
        self._turns.move_to_end(name)
        while len(self._turns) > _MOST_TURNS:
            self._turns.popitem(last=False)
        return turn

    def remove(self, name: str) -> None:
        """Remove a context that has ended. Its name cannot be used again."""
        del self._contexts[name]
        self._ended.append(name)


class _SharedReading:
    """A text that several contexts speak, one behind the other. A context whose text is open has the lock."""

    def __init__(self) -> None:
        self.reading = Reading()
        self.lock = asyncio.Lock()


class _Context:
    """One context: an utterance, or several if its text came whole and does not fit a slot.

    Its own task reads its messages from a queue, so that other contexts do not wait while its prompt is built."""

    def __init__(self, socket: Socket, name: str, number: int):
        self._socket = socket
        self._name = name
        self._number = number
        self._inbox: asyncio.Queue[tuple[dict[str, Any] | str, int]] = asyncio.Queue()
        self._waiting = 0  # characters in it
        self._characters = 0
        self._session: SpeechSession | None = None
        self._ignored: list[str] = []  # fields that change nothing here
        self._running = False
        self._cancelled = False
        self._text_complete = False
        self.task = asyncio.create_task(self._run())

    def text(self, message: dict[str, Any], size: int) -> None:
        """Take a "text" message. `size`: its characters as JSON."""
        if self._text_complete:
            return
        self._text_complete = message.get("end") is True
        self._characters += len(message["text"]) if isinstance(message.get("text"), str) else 0
        if self._characters > self._socket.service.limits.max_text:
            message = {}  # the text is too long: `_read` refuses it, so it need not be kept
            self._text_complete = True
        self._queue(message, size)

    def _queue(self, message: dict[str, Any] | str, size: int) -> None:
        self._waiting += size
        if self._inbox.qsize() >= MAX_UNREAD or self._waiting > _MOST_WAITING + self._socket.longest:
            words = f"more than {MAX_UNREAD} messages or {_MOST_WAITING} characters wait in one context"
            raise protocol_error(f"{words}: send fewer and larger pieces")
        self._inbox.put_nowait((message, size))

    async def _next_message(self) -> dict[str, Any] | str:
        message, size = await self._inbox.get()
        self._waiting -= size
        return message

    def command(self, kind: str) -> None:
        """Take a "flush", "end" or "cancel" message."""
        if kind == "cancel":  # it overtakes the messages in the queue
            self._cancelled = True
            if self._session:
                self._session.cancel()
            elif self._running:
                self.task.cancel()
            return
        if not self._text_complete:
            self._text_complete = kind == "end"
            self._queue(kind, 0)

    async def _run(self) -> None:
        with self._socket.service.journal.entry(self._socket.record.child(context=self._name)):
            await self._run_recorded()

    async def _run_recorded(self) -> None:
        socket, limit = self._socket, self._socket.service.limits.total_s
        self._running = True
        try:
            async with asyncio.timeout(limit):
                if self._cancelled:
                    raise asyncio.CancelledError
                await self._speak()
        except TimeoutError:
            words = f"the context took more than {limit:g} s: send end sooner"
            socket.put_error(self._name, ApiError(408, "failed", words))
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
        opening = await self._next_message()
        assert isinstance(opening, dict)
        settings, text, complete = self._read(opening, opens=True)
        with_words = settings.pop("words", False)
        turn = self._socket.turn(settings.pop("turn", None))
        if (parent := settings.pop("traceparent", None)) and (record := CURRENT.get()):
            record.traceparent = parent
        clone = read_clone({name: settings.pop(name) for name in CLONE_FIELDS if name in settings})
        options = await service.cloned(read_options(settings, "socket", also=SETTINGS), clone)
        request = service.request(options, lenient=True).in_conversation(self._socket.conversation)
        self._ignored += service.idle(options)
        if not complete:
            request = request.in_pieces()
        seed = request.seed
        async with turn.lock:
            texts = (text, request) if complete else (None, request, text)
            try:
                async with service.speak(*texts, words=with_words, reading=turn.reading) as session:
                    self._session = session
                    if self._cancelled:
                        session.cancel()
                    if not complete:
                        session.feed(self._texts(), service.limits.text_s, "send end, or text sooner")
                    end = await self._tell(session)
            except NoWordsError:
                end = Ended("eos", 0.0, 0.0, seed)
        self._put_end(end.finish_reason, end.seconds, end.compute_s, seed)

    async def _tell(self, session: SpeechSession) -> Ended:
        """Tell the client what is spoken, and return its end."""
        ended: Ended | None = None
        begin: dict[str, Any] | None = None  # sent with the first sound: a text may have no words
        async for event in session.events():
            if isinstance(event, Began):
                begin = {"type": "begin", "context": self._name, "number": self._number, "seed": event.seed}
                begin |= {"ignored": self._ignored} if self._ignored else {}
            elif isinstance(event, Sound) and not self._cancelled:  # a chunk may have been made before the cancel came
                if begin:
                    self._socket.put(begin)
                    begin = None
                self._socket.put_audio(self._number, pcm16(event.samples))
            elif isinstance(event, Words) and event.words and not self._cancelled:
                words = [[word, round(at, 3)] for word, at in event.words]
                told = {"type": "words", "context": self._name, "words": words, "measured": event.measured}
                self._socket.put(told)
            elif isinstance(event, Ended):
                ended = event
        assert ended
        return ended

    def _read(self, message: dict[str, Any], *, opens: bool) -> tuple[dict[str, Any], str, bool]:
        """
        Args:
            message: a "text" message.
            opens: it is the context's first message.

        Returns:
            Its settings, its text, and whether the text is complete.
        """
        message, ignored = told_apart(message, "socket")
        self._ignored = ignored if opens else self._ignored
        most = self._socket.service.limits.max_text
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
            if not opens:
                known = name in options_of("socket") or name in SETTINGS or name in CLONE_FIELDS
                words = "comes too late: settings go with a context's first message" if known else "is not known here"
                raise RequestError(f"{name[:40]} {words}", field=name[:40])
            if setting := SETTINGS.get(name):
                setting.checked(value, name, MOST_TEXT)
        return {name: value for name, value in message.items() if value is not None}, text, complete

    async def _texts(self) -> AsyncGenerator[str | Flush, None]:
        """The pieces of text behind the first one, up to the end."""
        complete = False
        while not complete:
            message = await self._next_message()
            if message == "flush":
                yield FLUSH
            elif isinstance(message, str):
                return
            else:
                _, text, complete = self._read(message, opens=False)
                await self._socket.service.take_text(text)
                yield text

    def _put_end(self, reason: str, seconds: float, compute: float, seed: int | None) -> None:
        end = {"type": "end", "context": self._name, "finish_reason": reason, "seconds": round(seconds, 3)}
        self._socket.put(end | {"compute_seconds": round(compute, 4), "seed": seed})
