"""The WebSocket: contexts of text in, PCM out, as docs/serving.md says."""

import asyncio
import json
import logging
from collections import deque
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from starlette.websockets import WebSocket, WebSocketDisconnect

from qwen_megakernel.engine.word_times import SpeechRate, WordTimes
from qwen_megakernel.errors import RequestError, TextEndedError, TextTooLongError
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.service import EngineService, Problem, Speech

log = logging.getLogger(__name__)

PATH = "/v1/audio/speech/socket"
PROTOCOL = "speech"
"""Subprotocol, taken where it is offered: a browser that offers its token as one wants one of them taken."""

_SETTINGS = {
    "voice": str,
    "language": str,
    "instructions": str,
    "seed": int,
    "temperature": (int, float),
    "top_k": int,
    "top_p": (int, float),
    "repetition_penalty": (int, float),
    "chunk_frames": (int, list),
    "words": bool,
}
_MOST_NAME, _MOST_SAID = 64, 2000  # characters of a name; of any other setting
_MOST_UNSENT, _MOST_UNTAKEN = 1000, 1000  # messages to a client, and of it to one context
_REMEMBERED = 1000  # contexts that are over: text that crossed their end must not open them again
_POLICY, _AWAY, _LATER = 1008, 1001, 1013  # closing codes (RFC 6455 and its registry)


def add_socket(app: FastAPI, service: EngineService, metrics: Metrics) -> None:
    @app.websocket(PATH)
    async def speak(websocket: WebSocket) -> None:
        with metrics.sockets.track_inprogress():
            await _Socket(websocket, service, metrics).run()


class _End(Exception):
    """The socket is to be closed."""

    def __init__(self, close: int, problem: Problem):
        self.close, self.problem = close, problem


class _Socket:
    """One client. Its messages are taken by one task, sent by another; every context has its own."""

    def __init__(self, websocket: WebSocket, service: EngineService, metrics: Metrics):
        self._websocket, self.service, self.metrics = websocket, service, metrics
        self._contexts: dict[str, _Context] = {}
        self._over: deque[str] = deque(maxlen=_REMEMBERED)
        self._numbers = 0
        self._outbox: asyncio.Queue[str | bytes] = asyncio.Queue()
        self.rates: dict[str | None, SpeechRate] = {}  # by voice, of those that there are

    async def run(self) -> None:
        await self._websocket.accept(PROTOCOL if PROTOCOL in self._websocket.scope.get("subprotocols", ()) else None)
        tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._receive())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await next(iter(done))
        except _End as end:
            await self._part(end, tasks)
        except (WebSocketDisconnect, ConnectionError):
            pass
        finally:
            contexts = list(self._contexts.values())
            for task in (*tasks, *(context.task for context in contexts)):
                task.cancel()
            await asyncio.gather(*tasks, *(context.task for context in contexts), return_exceptions=True)
            self.service.unsent.discard(self)

    async def _part(self, end: _End, tasks: list[asyncio.Task]) -> None:
        """Say why, as far as the client still listens."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        message = json.dumps({"type": "error"} | _words_of(end.problem))
        with suppress(TimeoutError, WebSocketDisconnect, ConnectionError, RuntimeError):
            async with asyncio.timeout(1):
                await self._websocket.send_text(message)
                await self._websocket.close(end.close)

    def tell(self, message: dict[str, Any]) -> None:
        self._post(json.dumps(message))

    def tell_audio(self, number: int, pcm: bytes) -> None:
        self._post(number.to_bytes(4, "little") + pcm)

    def _post(self, message: str | bytes) -> None:
        self._outbox.put_nowait(message)
        self.service.unsent.add(self)

    async def _send(self) -> None:
        service = self.service
        hello = {"type": "hello", "model": service.model, "format": "pcm_s16le"}
        if service.state == "ready":
            engine = service.engine
            hello |= {"sample_rate": engine.sample_rate, "voices": service.voice_names()}
            hello |= {"idle_seconds": service.limits.idle_s, "max_characters": service.limits.max_text}
            await self._websocket.send_text(json.dumps(hello | {"languages": list(engine.languages)}))
        else:
            raise _End(_LATER, Problem(503, "closing", f"the server is {service.state}; try again", True))
        while True:
            message = await self._outbox.get()
            send = self._websocket.send_bytes if isinstance(message, bytes) else self._websocket.send_text
            try:
                async with asyncio.timeout(service.limits.idle_s):
                    await send(message)
            except TimeoutError:
                raise _End(_POLICY, Problem(408, "slow", "the client does not read what it asked for")) from None
            except RuntimeError:  # Starlette's word for a socket that closed meanwhile
                raise WebSocketDisconnect(1006) from None
            if self._outbox.empty():
                self.service.unsent.discard(self)

    async def _receive(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self.service.limits.idle_s) as idle:
                    message = await self._websocket.receive()
            except TimeoutError:
                if self._contexts:  # it listens
                    continue
                assert idle.expired()
                raise _End(_AWAY, Problem(408, "idle", "nothing was asked for; ping to keep a socket open")) from None
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", 1000))
            self._take(message.get("text"))
            await asyncio.sleep(0)  # a flood that is there already must not keep others waiting
            while self._outbox.qsize() > _MOST_UNSENT:  # who does not read is not read
                await asyncio.sleep(0.01)

    def _take(self, text: str | None) -> None:
        message = self._parse(text)
        kind, name = message.pop("type", None), message.pop("context", None)
        if kind == "ping" and name is None and not message:
            self.tell({"type": "pong"})
            return
        if kind not in ("text", "flush", "end", "cancel"):
            raise self._protocol(f"type must be text, flush, end, cancel or ping, got {str(kind)[:40]!r}")
        if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME:
            raise self._protocol(f"context must be a string of 1 to {_MOST_NAME} characters")
        context = self._contexts.get(name)
        if kind == "text":
            if context is None and name not in self._over:
                context = self._open(name)
            if context:
                context.text(message)
        elif message:
            raise self._protocol(f"{kind} takes a context and nothing else, got {sorted(message)[0][:40]!r}")
        elif context:  # else it is over: its end crossed this message
            context.command(kind)

    def _parse(self, text: str | None) -> dict[str, Any]:
        if text is None:
            raise self._protocol("messages are JSON in text frames")
        if len(text) > self.service.limits.max_body:
            raise self._protocol(f"a message may have {self.service.limits.max_body} characters")
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._protocol(f"a message must be JSON: {str(error)[:80]}") from None
        if not isinstance(message, dict):
            raise self._protocol("a message must be a JSON object")
        return message

    @staticmethod
    def _protocol(words: str) -> _End:
        return _End(_POLICY, Problem(400, "protocol", words))

    def _open(self, name: str) -> "_Context | None":
        if len(self._contexts) >= self.service.limits.contexts:
            most = self.service.limits.contexts
            self.fail(name, Problem(429, "busy", f"a socket speaks {most} contexts at once", True))
            self._over.append(name)
            return None
        self._numbers += 1
        context = self._contexts[name] = _Context(self, name, self._numbers)
        return context

    def fail(self, name: str, problem: Problem) -> None:
        self.tell({"type": "error", "context": name} | _words_of(problem))

    def forget(self, name: str) -> None:
        del self._contexts[name]
        self._over.append(name)


def _words_of(problem: Problem) -> dict[str, Any]:
    field = {"field": problem.field} if problem.field else {}
    return {"code": problem.code, "message": problem.message, "retryable": problem.retryable} | field


class _Context:
    """One utterance: its messages go through a queue into a task of its own, so that nobody waits for its prompt."""

    def __init__(self, socket: _Socket, name: str, number: int):
        self._socket, self._name, self._number = socket, name, number
        self._inbox: asyncio.Queue[dict[str, Any] | str] = asyncio.Queue()
        self._characters = 0
        self._speech: Speech | None = None
        self._words: WordTimes | None = None
        self._refused: RequestError | None = None  # a later message
        self._running = self._cancelled = self._complete = False  # complete: its text
        self._made = 0.0  # seconds of audio
        self.task = asyncio.create_task(self._run())

    def text(self, message: dict[str, Any]) -> None:
        if self._complete:
            return
        self._complete = message.get("end") is True
        self._characters += len(message["text"]) if isinstance(message.get("text"), str) else 0
        if self._characters > self._socket.service.limits.max_text:
            message = {}  # what was too long is not kept
            self._complete = True
        self._put(message)

    def _put(self, message: dict[str, Any] | str) -> None:
        if self._inbox.qsize() >= _MOST_UNTAKEN:
            raise _End(_POLICY, Problem(400, "protocol", f"more than {_MOST_UNTAKEN} messages wait in one context"))
        self._inbox.put_nowait(message)

    def command(self, kind: str) -> None:
        if kind == "cancel":  # overtakes what waits
            self._cancelled = True
            if self._speech:
                self._speech.cancel()
            elif self._running:
                self.task.cancel()
            return
        if not self._complete:
            self._complete = kind == "end"
            self._put(kind)

    async def _run(self) -> None:
        socket = self._socket
        self._running = True
        try:
            async with asyncio.timeout(socket.service.limits.total_s):
                if self._cancelled:
                    raise asyncio.CancelledError
                await self._say()
        except TimeoutError:
            socket.fail(self._name, Problem(408, "failed", "the context took too long"))
        except asyncio.CancelledError:  # before its first word; or the socket is gone, and nobody hears it
            self._tell_end("cancelled", 0.0, 0.0, None)
        except Exception as error:
            problem = Problem.of(error)
            if problem.status == 500:
                log.exception("a context failed")
            socket.fail(self._name, problem)
        finally:
            socket.forget(self._name)

    async def _say(self) -> None:
        service = self._socket.service
        service.check_ready()
        first = await self._inbox.get()
        settings, text, ended = self._read(first, opens=True)
        with_words, voice = settings.pop("words", False), settings.get("voice")
        settings["instruct"] = settings.pop("instructions", None)
        request = service.request(**settings)
        if with_words:
            self._words = WordTimes(self._socket.rates.setdefault(voice and voice.lower(), SpeechRate()))
            self._words.add(text)
        seed, seconds, compute = request["sampling"].seed, 0.0, 0.0
        begin = {"type": "begin", "context": self._name, "number": self._number, "seed": seed}
        pieces = await service.pieces(text, request) if ended else [None]
        for piece in pieces:
            async with service.saying(piece, request) as self._speech:
                if begin:
                    self._socket.tell(begin)
                    begin = None
                if self._cancelled:
                    self._speech.cancel()
                feeder = None if ended else asyncio.create_task(self._feed(text))
                try:
                    await self._hear(service.engine.sample_rate)
                finally:
                    if feeder:
                        feeder.cancel()
                        await asyncio.gather(feeder, return_exceptions=True)
            audio = self._speech.audio
            self._socket.metrics.heard(audio)
            seconds += audio.duration_s
            compute += audio.compute_s
            if audio.finish_reason in ("cancelled", "length"):  # what would come next does not follow
                break
        if self._words and audio.finish_reason not in ("cancelled", "length"):  # else they were not said
            self._tell_words(self._words.finish(self._made))
        self._tell_end(audio.finish_reason, seconds, compute, seed)

    def _read(self, message: dict[str, Any], *, opens: bool) -> tuple[dict[str, Any], str, bool]:
        """Settings, text, whether the text is complete."""
        message, most = dict(message), self._socket.service.limits.max_text
        if self._characters > most:
            raise TextTooLongError(f"a context may have {most} characters")
        text, ended = message.pop("text", None), message.pop("end", False)
        if not isinstance(text, str) or not isinstance(ended, bool):
            raise RequestError("text must be a string, and end true or false")
        for name, value in message.items():
            kind = _SETTINGS.get(name)
            if kind is None or not opens:
                where = "" if opens else " behind a context's first message"
                raise RequestError(f"unknown setting {name[:40]!r}{where}; known: {', '.join(_SETTINGS)}")
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool)):
                raise RequestError(f"{name} has a value of the wrong kind: {str(value)[:40]!r}")
            if isinstance(value, str) and len(value) > _MOST_SAID:
                raise RequestError(f"{name} may have {_MOST_SAID} characters")
        return {name: value for name, value in message.items() if value is not None}, text, ended

    async def _feed(self, text: str) -> None:
        """Text as it comes into the utterance. What it refuses ends it."""
        service = self._socket.service
        utterance, run = self._speech.utterance, service.run
        try:
            ended = False
            while True:
                if text:
                    service.log_text(text)
                    await run(lambda text=text: utterance.push_text(text))
                if ended:
                    await run(utterance.end_text)
                    return
                async with asyncio.timeout(service.limits.text_s):
                    message, text = await self._inbox.get(), ""
                if message == "flush":
                    await run(utterance.flush)
                elif message == "end":
                    ended = True
                else:
                    _, text, ended = self._read(message, opens=False)
                    if self._words:
                        self._words.add(text)
        except TextEndedError:
            pass  # it was over before its text was: its end tells why
        except TimeoutError:
            self._refused = RequestError(
                f"the text did not go on for {service.limits.text_s:g} s; end it, or go on sooner"
            )
            self._speech.cancel()
        except RequestError as error:  # of the message; the utterance cannot go on without it
            if not utterance.done:
                self._refused = error
            self._speech.cancel()

    async def _hear(self, rate: int) -> None:
        async for chunk in self._speech:
            if self._cancelled:
                continue  # it was made before the cancel came
            self._socket.tell_audio(self._number, pcm16(chunk.samples))
            self._made += len(chunk.samples) / rate
            if self._words:
                self._tell_words(self._words.due(self._made))
        if self._refused:
            raise self._refused

    def _tell_words(self, words: list[tuple[str, float]]) -> None:
        if words:
            listed = [[word, round(at, 3)] for word, at in words]
            self._socket.tell({"type": "words", "context": self._name, "words": listed})

    def _tell_end(self, reason: str, seconds: float, compute: float, seed: int | None) -> None:
        end = {"type": "end", "context": self._name, "finish_reason": reason, "seconds": round(seconds, 3)}
        self._socket.tell(end | {"compute_seconds": round(compute, 4), "seed": seed})
