"""AsyncUtterance: an utterance for an event loop. The server and the Pipecat service both speak through it.

    event loop ── submit, push_text, flush, end_text ──► executor ──► engine
    event loop ◄── call_soon_threadsafe ◄── the engine's thread

The calls into the engine compute (they tokenise text and build the prompt), so they run in an executor.

Text that comes in pieces may outgrow a slot. It is then cut, mostly after a sentence (turn_text.py), and the engine
says the parts one after the other. A part begins once the one before it is made, long before that one has been heard.
Text after a pause, and text that comes after the model has said end of speech, is a new part too.

Without more text a part cannot go on, so a writer that stalls behind a sentence would cut it. When the listener has
nearly heard what was made, the part is therefore ended, and said to its end. What comes later is a new part.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from qwen_megakernel.engine.audio import Audio, Chunk, joined
from qwen_megakernel.engine.callbacks import returns_at_once
from qwen_megakernel.engine.engine import TTSEngine
from qwen_megakernel.engine.utterance import Utterance
from qwen_megakernel.errors import NoWordsError, TextEndedError, TTSError
from qwen_megakernel.model.edges import silent_end_s
from qwen_megakernel.model.text import check_unicode
from qwen_megakernel.model.turn_text import Turn
from qwen_megakernel.text.front_end import Reading
from qwen_megakernel.text.pauses import Pause
from qwen_megakernel.text.sentence import LONGEST_END, STALL_S, ends_sentence
from qwen_megakernel.text.spoken_text import SpokenText

LONG_STALL_S = 5.0
"""Seconds without text after which a writer within a sentence counts as stalled. The slot is then free for others."""
LOW_LEAD_S = 0.5
"""Seconds of audio that a listener still has when a stalled part is ended. A CPU at a real-time factor of 0.5 makes its
next chunk, of 0.64 s at most, in that time."""

_CUT = ("length", "cancelled")
"""Finish reasons after which no further part is said: it would not join what was heard."""


@dataclass
class _Part:
    """A part of the text that is said later. If the text came whole, `text` is a `SpokenText`. `pause_s`: seconds of
    silence between this part and the one before."""

    text: str
    pause_s: float
    ended: bool = False


class AsyncUtterance:
    """One utterance of an engine, for one event loop. Make it in that loop, `submit` it, iterate over its chunks.

    Attributes:
        audio: the whole utterance, as soon as the last chunk has been taken; None before.
    """

    def __init__(self, engine: TTSEngine, executor: Executor):
        """
        Args:
            engine: speaks.
            executor: runs the calls into the engine.
        """
        self._engine, self._executor = engine, executor
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._runs_out = 0.0  # when the listener has heard all that was made, in the loop's time
        self._tail, self._text_at = "", 0.0  # the end of the text so far; when it came, in the loop's time
        self._flushed = False  # the text so far may be all
        self._stall: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task | None = None  # the loop keeps only weak references to tasks
        self._utterance: Utterance | None = None  # says the current part
        self._cancelled = False
        self.audio: Audio | None = None
        self._request: dict[str, Any] = {}
        self._turn: Turn | None = None  # of text that comes in pieces
        self._later: deque[_Part] = deque()
        self._complete = True  # no more text will come
        self._blank = False  # the current part comes in pieces, and has no words yet
        self._news = asyncio.Event()  # text has come, or its end, or a cancel
        self._said: list[Audio] = []  # the parts that are over
        self._in_turn = asyncio.Lock()  # pieces of text keep their order
        self._goes_on: asyncio.Task[bool] | None = None

    async def submit(
        self,
        text: str | None,
        opening: str = "",
        *,
        ended: bool = False,
        reading: Reading | None = None,
        **request: Any,
    ) -> None:
        """Begin. If the calling task is cancelled meanwhile, the utterance is cancelled as soon as it exists.

        Args:
            text: what to say, cut if it is longer than a slot. None: it comes through `push_text` and `end_text`, and
                may be longer than a slot unless `max_frames` is given.
            opening: the first piece of text that comes in pieces. It saves a call of `push_text`.
            ended: no text follows the opening. It saves a call of `end_text`.
            reading: of the text that this one continues, as the next sentence of a turn. Only one utterance at a time
                may use it. None: a text of its own.
            **request: `TTSEngine.submit`'s options.

        Raises:
            NoWordsError: a whole text has nothing to speak. Of text in pieces `next_chunk` says that.
            TTSError: as `TTSEngine.submit`.
        """
        self._request = request
        reads = request | ({"reading": reading} if reading else {})

        def submit() -> None:
            first = text
            if text is None:
                self._turn, self._complete = self._engine.turn(**reads), False
                if ended and not reading and (first := self._one_part(opening)):
                    self._request, self._complete = request | {"non_streaming_mode": False}, True
            elif not isinstance(text, SpokenText):
                first, *others = self._engine.pieces(text, **reads)
                self._later += [_Part(piece, 0.0, ended=True) for piece in others]
            self._begin(first)
            with suppress(TextEndedError):  # `next_chunk` says why it has ended
                if not self._complete:
                    self._push(opening)
                    if ended:
                        self._end_text()

        try:
            await self._run(submit)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if not self._complete:
            self._came(opening)

    def _one_part(self, text: str) -> SpokenText | None:
        """A text that comes in pieces, if all of it is there and is one part."""
        self._check(text)
        turn = self._engine.turn(**self._request)
        parts = [*turn.push(text), *turn.finish()]
        whole = "" if any(isinstance(part, Pause) for part in parts) else "".join(parts)
        return SpokenText(whole) if whole.strip() else None

    def _begin(self, text: str | None, pause_s: float = 0.0) -> None:
        """Runs in the executor."""
        request = self._request | ({"pause_s": pause_s} if pause_s else {})
        if text is None:  # the turn has the front end
            request = {name: value for name, value in request.items() if name not in ("normalize", "lexicon")}
        self._blank = text is None
        utterance = self._engine.submit(text, self._receive, on_end=lambda: self._receive(None), **request)
        self._utterance = utterance
        if self._cancelled:  # `cancel` came before the utterance existed
            utterance.cancel()

    @returns_at_once
    def _receive(self, chunk: Chunk | None) -> None:
        """Called by the engine's thread. None: the current part has ended."""
        try:
            self._loop.call_soon_threadsafe(self._arrive, chunk)
        except RuntimeError:  # the loop is closed, so no task waits for chunks
            self.cancel()

    def _arrive(self, chunk: Chunk | None) -> None:
        if chunk is not None and not self._complete:
            now = self._loop.time()
            self._runs_out = max(self._runs_out, now) + len(chunk.samples) / chunk.sample_rate
        self._chunks.put_nowait(chunk)

    @property
    def begun(self) -> bool:
        """`submit` has succeeded."""
        return self._utterance is not None

    @property
    def done(self) -> bool:
        """The engine has ended it; chunks may still wait to be taken."""
        return self._utterance is not None and self._utterance.done and not self._later

    async def push_text(self, text: str) -> None:
        """See `Utterance.push_text`, which also says what it raises."""
        async with self._in_turn:
            await self._run(lambda: self._push(text))
            self._news.set()
            self._came(text)

    def _push(self, text: str) -> None:
        """Runs in the executor."""
        self._check(text)
        self._take(self._turn.push(text))

    def _check(self, text: str) -> None:
        if not self._request.get("lenient"):
            check_unicode(text)

    def _take(self, parts: list[str | Pause]) -> None:
        for part in parts:
            if isinstance(part, str):
                self._add(part)
            elif self._later and not self._later[-1].text.strip():
                self._later[-1].pause_s += part.seconds
            else:
                self._end_part()
                self._later.append(_Part("", part.seconds))

    def _end_part(self) -> None:
        if self._later:
            self._later[-1].ended = True
        elif self._blank:  # a pause comes first: this utterance has nothing to say
            self._utterance.cancel()
        else:
            self._utterance.end_text()

    def _add(self, text: str) -> None:
        """Append text to the last part."""
        if self._later:
            self._later[-1].text += text
        else:
            try:
                self._utterance.push_text(text)
                self._blank &= not text.strip()
            except TextEndedError:
                if self._complete or not self._utterance.done or self._utterance.result().finish_reason in _CUT:
                    raise
                self._later.append(_Part(text, 0.0))

    async def flush(self) -> None:
        """See `Utterance.flush`."""
        async with self._in_turn:
            await self._run(self._flush)
            self._flushed = True
            self._watch()

    def _flush(self) -> None:
        """Runs in the executor."""
        self._take(self._turn.flush())
        if not self._later:
            self._utterance.flush()

    # ------------------------------------------------------------ a writer that stalls

    def _came(self, text: str) -> None:
        """Text has come."""
        self._tail, self._text_at, self._flushed = self._tail[-LONGEST_END:] + text, self._loop.time(), False
        self._watch()

    def _watch(self) -> None:
        """Look again when the writer may count as stalled. A timer that fires sooner sees to that: texts are many."""
        if self._complete or self._cancelled:
            return
        at = self._stalled_at()
        if self._stall is None or self._stall.when() > at:
            self._unwatch()
            self._stall = self._loop.call_at(at, self._look)

    def _unwatch(self) -> None:
        if self._stall:
            self._stall.cancel()
        self._stall = None  # it holds this utterance

    def _stalled_at(self) -> float:
        """When the part must be ended if no text comes until then, in the loop's time."""
        whole = self._flushed or ends_sentence(self._tail)
        return max(self._text_at + (STALL_S if whole else LONG_STALL_S), self._runs_out - LOW_LEAD_S)

    def _look(self) -> None:
        self._stall = None
        if self._loop.time() < self._stalled_at():
            self._watch()
        elif self._tail:
            self._tail, self._flushed = "", False  # until more text comes
            self._ending = self._loop.create_task(self._end_stalled_part(self._text_at))

    async def _end_stalled_part(self, text_at: float) -> None:
        async with self._in_turn:
            if self._complete or self._cancelled or text_at != self._text_at:
                return
            if self._later or not (self._blank or self._utterance.done):
                with suppress(TTSError, RuntimeError):  # `next_chunk` says why it has ended, or the executor is closed
                    await self._run(lambda: self._take(self._turn.end_part()))

    # ------------------------------------------------------------ the end

    async def end_text(self) -> None:
        """See `Utterance.end_text`."""
        async with self._in_turn:
            await self._run(self._end_text)
            self._unwatch()
            self._news.set()

    def _end_text(self) -> None:
        """Runs in the executor."""
        if not self._complete:
            with suppress(TextEndedError):  # it was cut, or cancelled
                self._take(self._turn.finish())
        self._complete = True
        if self._later:
            self._later[-1].ended = True
        else:
            self._utterance.end_text()

    async def _run(self, call: Callable[[], Any]) -> None:
        await self._loop.run_in_executor(self._executor, call)

    def cancel(self) -> None:
        """Stop before the next frame. Returns at once, also before the utterance has begun and after its end."""
        self._cancelled = True
        self._news.set()
        self._unwatch()
        if self._utterance and not self._utterance.done:
            self._utterance.cancel()

    async def next_chunk(self) -> Chunk | None:
        """The next chunk; None after the last one, when `audio` is set.

        Raises:
            TTSError: why the utterance failed.
        """
        while True:
            if self._goes_on:  # the caller that waited for it may have been cancelled
                more = await asyncio.shield(self._goes_on)
                self._goes_on = None
                if not more:
                    self.audio = joined(self._said)
                    return None
            if (chunk := await self._chunks.get()) is not None:
                return chunk
            self._goes_on = asyncio.create_task(self._go_on())
            # If nobody waits for the task any more, asyncio would log what it raised.
            self._goes_on.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _go_on(self) -> bool:
        """The current part has ended. Begin the next one, if there is one."""
        audio = self._utterance.result()  # it has ended, so this does not wait
        if self._cancelled or not (self._blank and self._later):
            self._said.append(audio)
            if self._cancelled or audio.finish_reason in _CUT:
                return False
        while not self._cancelled:
            self._news.clear()
            async with self._in_turn:
                while self._later and self._later[0].ended and not self._later[0].text.strip():
                    self._later.popleft()
                if self._later and self._later[0].text.strip():
                    await self._run(self._begin_next)
                    return True
                if self._complete:
                    break
            await self._news.wait()
        if not self._said and not self._cancelled:
            raise NoWordsError("text must not be blank")
        self._said = self._said or [audio]
        return False

    def _begin_next(self) -> None:
        """Runs in the executor."""
        part = self._later.popleft()
        if isinstance(part.text, SpokenText):
            self._begin(part.text)
            return
        silent_s = silent_end_s(self._said[-1].samples, self._said[-1].sample_rate) if self._said else 0.0
        self._begin(None, max(0.0, part.pause_s - silent_s))
        self._blank = False
        self._utterance.push_text(part.text)
        if part.ended:
            self._utterance.end_text()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """
        Raises:
            TTSError: why the utterance failed.
        """
        while (chunk := await self.next_chunk()) is not None:
            yield chunk
