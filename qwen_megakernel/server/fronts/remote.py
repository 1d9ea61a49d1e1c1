"""RemoteEngine: the engine as a front has it. Chunks come through a socket; requests and texts are checked here."""

import asyncio
import itertools
import json
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import numpy as np

from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.engine.audio import Audio, Chunk, Timings
from qwen_megakernel.errors import EngineClosed, EngineDied, TTSError
from qwen_megakernel.model.prompt import PromptText
from qwen_megakernel.model.text import TextTokenizer
from qwen_megakernel.server.fronts import wire
from qwen_megakernel.server.fronts.wire import Kind
from qwen_megakernel.server.keys import Keys
from qwen_megakernel.server.quotas import Quotas
from qwen_megakernel.speech.base import AnySeat, BegunUtterance, SpeechEngine
from qwen_megakernel.speech.patience import within
from qwen_megakernel.speech.request import SpeechRequest
from spoken_text.spoken_text import SpokenText

_GONE = "the engine's process is gone"
_PATIENCE_S = 60.0  # for the engine's process to answer a call


class Link(asyncio.Protocol):
    """A front's end of the socket, in its event loop. Any thread may call `post` and `call`.

    Attributes:
        state: what the engine's process said last of itself.
        ready: its first state in which the engine is ready, or why that never came.
        all_up: done once all fronts can serve.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"status": "loading", "error": ""}
        self.ready: Future[dict[str, Any]] = Future()
        self.all_up: Future[None] = Future()
        self.utterances: dict[int, RemoteUtterance] = {}
        self.lost: EngineDied | None = None  # the socket has ended
        self._up = False
        self._calls: dict[int, Future[tuple[dict[str, Any], bytes]]] = {}
        self._numbers = itertools.count(1)
        self._frames = wire.Frames()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: Any = None
        self._unsent: deque[bytes] = deque()
        self._flushes = threading.Lock()  # held while a flush is due

    # ------------------------------------------------------------ to the engine's process

    def up(self) -> None:
        """Tell that this front can serve, and wait for the others. Raises EngineDied."""
        self._up = True
        self.post(wire.frame(Kind.UP))
        self.all_up.result()

    def post(self, frame: bytes) -> None:
        """Send a frame with all others of this turn of the event loop."""
        self._unsent.append(frame)
        if self._loop and self._flushes.acquire(blocking=False):
            try:
                self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:  # the loop is closed: this front has ended
                self._flushes.release()

    def _flush(self) -> None:
        self._flushes.release()  # first: what is appended from now on has a flush of its own
        frames = []
        while self._unsent:
            frames.append(self._unsent.popleft())
        if not self.lost:
            self._transport.write(b"".join(frames))

    def number(self) -> int:
        """For a new utterance or call."""
        return next(self._numbers)

    def asked(self, number: int, frame: bytes) -> "Future[tuple[dict[str, Any], bytes]]":
        """Make a call, one at a time for a number. The answer, or a TTSError."""
        answer: Future[tuple[dict[str, Any], bytes]] = Future()
        self._calls[number] = answer
        self.post(frame)
        if self.lost and self._calls.pop(number, None):  # since `connection_lost`
            answer.set_exception(self.lost)
        return answer

    def call(self, number: int, frame: bytes) -> None:
        """The same; wait for it, in a thread that is not the event loop's. Raises TTSError: what the engine raises, or
        EngineDied."""
        try:
            self.asked(number, frame).result(_PATIENCE_S)
        except TimeoutError:
            raise EngineDied(f"the engine's process did not answer within {_PATIENCE_S:g} s") from None

    async def answer(self, kind: Kind, told: Any) -> tuple[dict[str, Any], bytes]:
        """Make a call from the event loop. Raises TTSError: as `call`."""
        number = self.number()
        answer = self.asked(number, wire.frame(kind, number, told))
        try:
            async with within(_PATIENCE_S):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            raise EngineDied(f"the engine's process did not answer within {_PATIENCE_S:g} s") from None

    def close(self) -> None:
        """Part from the engine's process, which then cancels what is open. Any thread may call it."""
        if self._loop:
            self._loop.call_soon_threadsafe(self._transport.close)

    # ------------------------------------------------------------ from there

    def connection_made(self, transport: Any) -> None:
        self._transport, self._loop = transport, asyncio.get_running_loop()
        self.post(b"")

    def data_received(self, data: bytes) -> None:
        for kind, number, first, second in self._frames.feed(data):
            if kind == Kind.CHUNK:
                if speech := self.utterances.get(number):
                    speech.take(first, second)
                continue
            told = json.loads(first)
            if kind == Kind.STATE:
                self._hear(told)
            elif kind == Kind.TOKENS:
                if speech := self.utterances.get(number):
                    speech.take_tokens(*told)
            elif kind == Kind.ENDED:
                if speech := self.utterances.pop(number, None):
                    speech.end(told)
            elif answer := self._calls.pop(number, None):
                if error := told.get("error"):
                    answer.set_exception(wire.read_error(error))
                else:
                    answer.set_result((told, second))

    def _hear(self, state: dict[str, Any]) -> None:
        self.state = state
        if self._up:
            self.post(wire.frame(Kind.UP))
        if state["status"] in ("failed", "dead"):
            self._give_up(EngineDied(state["error"]))
        elif state["status"] == "ready" and not self.ready.done():
            self.ready.set_result(state)
        if state["all_up"] and not self.all_up.done():
            self.all_up.set_result(None)

    def _give_up(self, why: TTSError) -> None:
        for waiting in (self.ready, self.all_up):
            if not waiting.done():
                waiting.set_exception(why)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = EngineDied(_GONE)
        self._give_up(self.lost)
        for number in list(self._calls):
            if answer := self._calls.pop(number, None):
                answer.set_exception(self.lost)
        for number in list(self.utterances):
            if speech := self.utterances.pop(number, None):
                speech.end({"error": wire.write_error(self.lost)})


class RemoteUtterance:
    """An utterance in the engine's process. See `Utterance` for what it does and raises; EngineDied: that process is
    gone."""

    def __init__(
        self,
        link: Link,
        engine: "RemoteEngine",
        on_chunk: Callable[[Chunk], None] | None,
        on_end: Callable[[], None] | None,
    ):
        self._link, self._number = link, link.number()
        self._read = partial(
            wire.read_chunk, groups=engine.config.talker.num_code_groups, sample_rate=engine.sample_rate
        )
        self._sample_rate = engine.sample_rate
        self._on_chunk, self._on_end = on_chunk, on_end
        self.tokens: list[int] = []
        self._token_s: tuple[float, ...] | None = None  # of the next chunk
        self._chunks: list[Chunk] = []
        self._end: Audio | Exception | None = None

    def begin(self, text: SpokenText | None, request: SpeechRequest, seat: int) -> None:
        self._link.utterances[self._number] = self
        try:
            self._link.call(self._number, wire.write_begin(self._number, text, request, seat))
        except BaseException:
            self._link.utterances.pop(self._number, None)
            self.cancel()  # it may have begun, if its answer is late
            raise

    @property
    def done(self) -> bool:
        return self._end is not None

    def push_text(self, text: str) -> None:
        self._call(Kind.PUSH, text)

    def flush(self) -> None:
        self._call(Kind.FLUSH)

    def end_text(self) -> None:
        if not self.done:
            self._call(Kind.END_TEXT)

    def _call(self, kind: Kind, told: str | None = None) -> None:
        self._link.call(self._number, wire.frame(kind, self._number, told))

    def cancel(self) -> None:
        self._link.post(wire.frame(Kind.CANCEL, self._number))

    def result(self) -> Audio:
        """How it ended. It must be `done`. Raises TTSError: why it failed."""
        if isinstance(self._end, Audio):
            return self._end
        raise self._end or RuntimeError("the utterance has not ended")

    def take_tokens(self, token_s: list[float], tokens: list[int]) -> None:
        """When tokens begin that the next chunk tells, and all ids so far, have come, in the event loop."""
        self._token_s, self.tokens = tuple(token_s), tokens

    def take(self, samples: bytes, codes: bytes) -> None:
        """A chunk has come, in the event loop."""
        chunk = self._read(samples, codes, self._token_s)
        self._token_s = None
        self._chunks.append(chunk)
        if self._on_chunk:
            self._on_chunk(chunk)

    def end(self, told: dict[str, Any]) -> None:
        """Its end has come, in the event loop."""
        if error := told.pop("error", None):
            self._end = wire.read_error(error)
        else:
            timings = Timings(**told.pop("timings"))
            sound = [chunk.samples for chunk in self._chunks]
            codes = np.concatenate([self._read(b"", b"", None).codes, *(chunk.codes for chunk in self._chunks)])
            if told["token_s"] is not None:
                told["token_s"] = tuple(told["token_s"])
            told["lost"] = tuple(told["lost"])
            self._end = Audio(sound, codes, sample_rate=self._sample_rate, timings=timings, **told)
        on_end, self._on_chunk, self._on_end, self._chunks = self._on_end, None, None, []
        if on_end:
            on_end()


class RemoteSeat:
    """A seat in the engine's process. See `Seat`.

    Attributes:
        known: that process has it.
    """

    def __init__(self, link: Link):
        self._link, self.number = link, link.number()
        self.left = self.known = False

    def leave(self) -> None:
        self.left = True
        if self.known:
            self.known = False
            self._link.post(wire.frame(Kind.LEAVE, self.number))


class RemoteEngine(SpeechEngine):
    def __init__(self, link: Link, state: dict[str, Any]):
        """`state`: of a ready engine. Raises CheckpointError: its folder has changed since it was loaded."""
        self._link = link
        of = state["made_of"]
        checkpoint = Checkpoint.open(of["folder"], of["adapters"])
        tokenizer = TextTokenizer(checkpoint.folder, checkpoint.config.talker.text_vocab_size)
        sizes = {name: of[name] for name in ("max_positions", "allow_foreign_voice")}
        super().__init__(of["model"], checkpoint, PromptText(checkpoint.config, tokenizer), **sizes)

    @property
    def measures_words(self) -> bool:
        return self._link.state.get("measures_words", False)

    def check_open(self) -> None:
        if self.health()["status"] != "ok":
            raise EngineClosed("the engine is closing and makes no more voices")

    def begin(
        self,
        text: str | SpokenText | None,
        request: SpeechRequest,
        on_chunk: Callable[[Chunk], None] | None = None,
        on_end: Callable[[], None] | None = None,
        seat: AnySeat | None = None,
    ) -> BegunUtterance:
        assert not isinstance(text, str), "a session begins with text that is ready to be spoken"
        utterance = RemoteUtterance(self._link, self, on_chunk, on_end)
        kept = cast(RemoteSeat | None, seat)
        try:
            utterance.begin(text, request, kept.number if kept else 0)
        finally:
            if kept:
                kept.known = True
                if kept.left:  # maybe before it had begun
                    kept.leave()
        return utterance

    def seat(self) -> "RemoteSeat":
        return RemoteSeat(self._link)

    def health(self) -> dict[str, Any]:
        """As the engine's process told it last, some 0.2 s ago."""
        if self._link.lost:
            return {"status": "dead", "error": str(self._link.lost), "max_streams": 1}
        return self._link.state["health"]

    def metrics(self) -> dict[str, int]:
        return self._link.state["metrics"]

    def count_retry(self) -> None:
        self._link.post(wire.frame(Kind.RETRY))

    def close(self) -> None:
        """Cancel what this front has let speak. The engine goes on, for other fronts."""
        self._link.close()


class RemoteMetrics:
    """`AnyMetrics` in the engine's process, so that every front tells of the whole server."""

    def __init__(self, link: Link):
        self._link = link

    def answered(self, told: dict[str, Any]) -> None:
        self._link.post(wire.frame(Kind.ANSWERED, told=told))

    def said(self, told: dict[str, Any]) -> None:
        self._link.post(wire.frame(Kind.SAID, told=told))

    async def told(self, accept: str) -> tuple[bytes, str]:
        """Raises EngineDied."""
        told, text = await self._link.answer(Kind.METRICS, accept)
        return text, told["media"]


class RemoteQuotas(Quotas):
    """The engine's process counts for all fronts."""

    def __init__(self, keys: Keys, link: Link):
        super().__init__(keys)
        self._link = link

    async def _take_stream(self, name: str, most: int) -> bool:
        return bool(await self._take("streams", name, most))

    def _give_stream(self, name: str) -> None:
        self._link.post(wire.frame(Kind.GIVE, told=name))

    async def _take_characters(self, name: str, count: int, per_minute: int) -> float:
        return float(await self._take("characters", name, count, per_minute))

    async def _take(self, *told: str | int) -> float:
        answer, _ = await self._link.answer(Kind.TAKE, told)
        return answer["told"]
