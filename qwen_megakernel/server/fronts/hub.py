"""Hub: the engine's process, as its fronts reach it.

    front ─ socket ─► a thread of its own: calls into the engine
    front ◄─ socket ─ one thread for all fronts ◄─ queue ◄─ the engine's thread: chunks

The engine's thread only puts chunks into a queue. All that waits in it goes out together, a write for each front.
"""

import contextlib
import itertools
import json
import logging
import queue
import select
import socket
import threading
from collections import Counter, deque
from typing import Any

from qwen_megakernel.engine.audio import Chunk
from qwen_megakernel.engine.callbacks import returns_at_once
from qwen_megakernel.errors import TextEndedError, TTSError
from qwen_megakernel.server.fronts import wire
from qwen_megakernel.server.fronts.wire import Kind
from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.speech.base import AnySeat, BegunUtterance

log = logging.getLogger(__name__)

_READ = 64 << 10  # bytes
_BUFFER = 4 << 20  # bytes that the system may hold for a front; Linux gives 0.4 MB unless net.core.wmem_max is raised
_PIECES = 900  # of one write; Linux takes 1024
MOST_UNSENT = 256 << 20
"""Bytes that may wait for a front. An H100 at its busiest makes 71 MB a second, for all fronts. A front takes them
within milliseconds; if so many wait, it hangs."""

_FULL_S = 0.001  # a front whose socket is full is tried again after this time, or once it has read


class Line:
    """One front, as the hub sees it.

    Attributes:
        up: it can serve.
        unheard: how often it was told of the engine since something came from it.
        lost: its socket has ended.
        speeches: its open utterances, by their numbers.
        streams: of each key, that are open there.
        seats: its seats, by their numbers.
        unsent: bytes that wait to be sent.
    """

    def __init__(self, ours: socket.socket):
        self.socket = ours
        self.up = self.lost = False
        self.unheard = self.unsent = 0
        self.speeches: dict[int, _Speech] = {}
        self.streams: Counter[str] = Counter()
        self.seats: dict[int, AnySeat] = {}
        self._unsent: deque[bytes | memoryview] = deque()

    @property
    def waits(self) -> bool:
        """Something waits to be sent."""
        return bool(self._unsent) and not self.lost

    def put(self, *pieces: bytes | memoryview) -> None:
        if not self.lost:
            self._unsent.extend(pieces)
            self.unsent += sum(map(len, pieces))

    def send(self) -> None:
        """Send what the socket takes."""
        try:
            while self.waits:
                sent = self.socket.sendmsg(itertools.islice(self._unsent, _PIECES), [], socket.MSG_DONTWAIT)
                self.unsent -= sent
                while sent and sent >= len(self._unsent[0]):
                    sent -= len(self._unsent.popleft())
                if sent:
                    self._unsent[0] = memoryview(self._unsent[0])[sent:]
        except BlockingIOError:
            pass
        except OSError:  # the front is gone; the thread that reads tells it
            self.lost = True

    def end(self) -> None:
        """The front has ended. The socket stays open for the threads that use it: another one could get its number."""
        self.lost = True
        with contextlib.suppress(OSError):  # it may have ended
            self.socket.shutdown(socket.SHUT_RDWR)


class _Speech:
    """An utterance of a front."""

    def __init__(self, line: Line, number: int, out: "queue.SimpleQueue[Any]"):
        self.line, self.number = line, number
        self.utterance: BegunUtterance | None = None
        self.over = False
        self._out = out

    @returns_at_once
    def hear(self, chunk: Chunk) -> None:
        self._out.put((self, chunk))

    @returns_at_once
    def end(self) -> None:
        """The engine has ended it, maybe before `begin` has returned. Both then tell it; the first one counts."""
        self.over = True
        if self.utterance:
            self._out.put((self, None))

    def begin(self, utterance: BegunUtterance) -> None:
        self.utterance = utterance
        if self.over:
            self._out.put((self, None))


class Hub:
    def __init__(self, service: EngineService, metrics: Metrics):
        """`service`: has the engine."""
        self._service = service
        self._metrics = metrics
        self._lines: list[Line] = []
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()  # (speech, chunk or None), (line, bytes), or None
        self._writer = threading.Thread(target=self._write, name="qwen_megakernel fronts out", daemon=True)
        self._writer.start()

    def add(self, ours: socket.socket) -> Line:
        """Serve a front through our end of a socket."""
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        line = Line(ours)
        self._lines = [line, *(other for other in self._lines if not other.lost)]
        threading.Thread(target=self._read, args=(line,), name="qwen_megakernel front in", daemon=True).start()
        return line

    def tell(self, *, all_up: bool) -> None:
        """Tell all fronts how the engine is. `all_up`: all of them can serve, so they may begin."""
        service = self._service
        state: dict[str, Any] = {"status": service.state, "error": service.error, "all_up": all_up}
        if service.loaded:
            engine = service.engine
            state |= {"made_of": engine.made_of, "health": engine.health(), "metrics": engine.metrics()}
            state["measures_words"] = engine.measures_words
        told = wire.frame(Kind.STATE, told=state)
        for line in self._lines:
            line.unheard += 1
            self._out.put((line, told))

    @property
    def writes(self) -> bool:
        """The thread that writes is alive."""
        return self._writer.is_alive()

    def close(self) -> None:
        """Part from all fronts. What waits to be sent goes out first, as far as they take it."""
        self._out.put(None)
        self._writer.join(timeout=1)
        for line in self._lines:
            line.socket.close()

    # ------------------------------------------------------------ to the fronts

    def _write(self) -> None:
        while True:
            if full := [line for line in self._lines if line.waits]:
                select.select([], [line.socket for line in full], [], _FULL_S)
            else:
                item = self._out.get()
                if item is None:
                    return
                self._put(*item)
            for _ in range(self._out.qsize()):
                item = self._out.get()
                if item is None:
                    return
                self._put(*item)
            for line in self._lines:
                line.send()

    def _put(self, of: Line | _Speech, what: Any) -> None:
        if isinstance(of, Line):
            of.put(what)
        elif what is not None:
            if what.token_s is not None and of.utterance:
                of.line.put(wire.frame(Kind.TOKENS, of.number, [what.token_s, of.utterance.tokens]))
            of.line.put(*wire.chunk_frame(of.number, what))
        elif of.line.speeches.pop(of.number, None):
            of.line.put(wire.frame(Kind.ENDED, of.number, _end_of(of)))

    # ------------------------------------------------------------ from a front

    def _read(self, line: Line) -> None:
        frames = wire.Frames()
        try:
            while data := line.socket.recv(_READ):
                line.unheard = 0
                for kind, number, words, rest in frames.feed(data):
                    self._take(line, Kind(kind), number, json.loads(words), rest)
        except OSError:  # it was killed
            pass
        finally:
            line.lost = True
            for key in line.streams.elements():
                self._service.quotas.usage.give_stream(key)
            for speech in list(line.speeches.values()):
                if speech.utterance:
                    speech.utterance.cancel()
            for seat in line.seats.values():
                seat.leave()

    def _take(self, line: Line, kind: Kind, number: int, told: Any, rest: bytes) -> None:
        if kind is Kind.UP:
            line.up = True
        elif kind is Kind.ANSWERED:
            self._metrics.answered(told)
        elif kind is Kind.SAID:
            self._metrics.said(told)
        elif kind is Kind.GIVE:
            line.streams[told] -= 1
            self._service.quotas.usage.give_stream(told)
        elif kind is Kind.RETRY:
            self._service.engine.count_retry()
        elif kind is Kind.CANCEL:
            if (speech := line.speeches.get(number)) and speech.utterance:
                speech.utterance.cancel()
        elif kind is Kind.LEAVE:
            if seat := line.seats.pop(number, None):
                seat.leave()
        else:
            reply: dict[str, Any] = {}
            body = b""
            try:
                if kind is Kind.METRICS:
                    body, reply["media"] = self._metrics.text(told)
                elif kind is Kind.TAKE:
                    reply["told"] = self._take_for_key(line, *told)
                else:
                    self._call(line, kind, number, told, rest)
            except Exception as error:
                if not isinstance(error, TTSError):
                    log.exception("a call of a front failed")
                reply["error"] = wire.write_error(error)
            self._out.put((line, wire.frame(Kind.REPLY, number, reply, body)))

    def _take_for_key(self, line: Line, what: str, key: str, *numbers: int) -> float:
        usage = self._service.quotas.usage
        if what == "characters":
            return usage.take_characters(key, *numbers)
        taken = usage.take_stream(key, *numbers)
        line.streams[key] += taken
        return taken

    def _call(self, line: Line, kind: Kind, number: int, told: Any, rest: bytes) -> None:
        """A call into the engine. Raises TTSError: as the engine does."""
        if kind is Kind.BEGIN:
            text, request = wire.read_begin(told, rest)
            engine, seat = self._service.engine, None
            if told["seat"]:
                seat = line.seats.setdefault(told["seat"], engine.seat())
            speech = line.speeches[number] = _Speech(line, number, self._out)
            try:
                speech.begin(engine.begin(text, request, speech.hear, speech.end, seat))
            except BaseException:
                line.speeches.pop(number, None)
                raise
            return
        if (begun := line.speeches.get(number)) is None or begun.utterance is None:
            raise TextEndedError("the utterance has ended")
        if kind is Kind.PUSH:
            begun.utterance.push_text(told)
        elif kind is Kind.FLUSH:
            begun.utterance.flush()
        else:
            begun.utterance.end_text()


def _end_of(speech: _Speech) -> dict[str, Any]:
    """How an utterance ended, as JSON."""
    assert speech.utterance
    try:
        audio = speech.utterance.result()  # it has ended, so this does not wait
    except Exception as error:
        return {"error": wire.write_error(error)}
    told = {"finish_reason": audio.finish_reason, "seed": audio.seed, "timings": vars(audio.timings)}
    return told | {name: getattr(audio, name) for name in ("ttfc_s", "compute_s", "lead_s", "token_s", "lost")}
