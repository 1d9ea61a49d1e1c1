"""SpeechSession: text in, events out, for an event loop. The server and the local Pipecat service speak through it.

    event loop ── begin, push_text, flush, end_text ──► executor (parts.py) ──► engine
    event loop ◄── call_soon_threadsafe ◄── the engine's thread

The calls into the engine compute (they tokenise text and build the prompt), so they run in an executor. A part of the
text begins once the one before it is made, long before that one has been heard.

Without more text a part cannot go on, so a writer that stalls behind a sentence would cut it. When the listener has
nearly heard what was made (stall_watch.py), the part is therefore ended, and said to its end. What comes later is a new
part.
"""

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import partial

from qwen_megakernel.engine.audio import Audio, Chunk, joined
from qwen_megakernel.engine.callbacks import returns_at_once
from qwen_megakernel.errors import EngineBusy, NoWordsError, RequestError, TextEndedError, TTSError
from qwen_megakernel.speech.base import AnySeat, BegunUtterance, SpeechEngine
from qwen_megakernel.speech.events import Began, Ended, Event, Sound, Words
from qwen_megakernel.speech.measured_words import MeasuredWords
from qwen_megakernel.speech.parts import CUT, Parts
from qwen_megakernel.speech.patience import within
from qwen_megakernel.speech.request import SpeechRequest
from qwen_megakernel.speech.stall_watch import StallWatch
from qwen_megakernel.speech.words import SpeechRate, WordTimes
from spoken_text.front_end import Reading
from spoken_text.normalize import Silence
from spoken_text.sentence import STALL_S
from spoken_text.spoken_text import SpokenText

_BUSY_S = 0.25  # a patient session tries again after this time if all slots are taken
_CLOSE_S = 1.0  # for the engine to end a cancelled part, which it does before the next frame
_BLOCK_S = 2.0  # seconds of one `Sound` at most: to encode and send it takes an event loop some milliseconds
_WORDS_AT_ONCE = 64  # characters; more would hold the event loop for over 5 ms at worst


class Flush(Enum):
    """Among pieces of text: speak what is held back because the next character could change it."""

    FLUSH = 0


FLUSH = Flush.FLUSH


class SpeechSession:
    """Speech of one text by an engine, for one event loop. Make it in that loop, `begin` it, iterate over its `events`.
    All fields are the loop's. The engine's thread posts chunks to the loop, and cancels if the loop is closed.

    Attributes:
        audio: everything, once `Ended` has come; None before. After `close`, what was made until then.
    """

    def __init__(
        self,
        engine: SpeechEngine,
        executor: Executor,
        request: SpeechRequest,
        *,
        reading: Reading | None = None,
        rate: SpeechRate | None = None,
        words_at_end: bool = False,
        patient: bool = False,
        seat: AnySeat | None = None,
    ):
        """
        Args:
            engine: speaks.
            executor: runs the calls into the engine.
            request: of this engine.
            reading: of the text that this one continues, as the next sentence of a turn. Only one session at a time may
                use it. None: a text of its own.
            rate: the voice's, to tell words and their times; None: no words are told.
            words_at_end: tell all words once everything was made.
            patient: wait for a slot, however long it takes. Only for text that is whole.
            seat: of this engine, shared with the sessions before and behind this one. None: one of its own.
        """
        self._engine = engine
        self._executor = executor
        self._request = request
        self._patient = patient
        self._loop = asyncio.get_running_loop()
        self._words: WordTimes | None = None
        if rate:
            silence = (reading.silence if reading else Silence()) if request.normalizes else None
            if engine.measures_words:
                self._words = MeasuredWords(engine.spelt, request.front_end.fragment, silence)
            else:
                self._words = WordTimes(rate, request.speed, silence)
        self._words_at_end = words_at_end
        # Chunks. None: the part has ended. FLUSH: the writer is slow, so the last word is a whole one.
        self._items: asyncio.Queue[Chunk | Flush | None] = asyncio.Queue()
        self._ending: asyncio.Task[None] | None = None  # the loop keeps only weak references to tasks
        self._feeding: asyncio.Task[None] | None = None
        self._refused: Exception | None = None  # why the text could not go on
        self._wordless: NoWordsError | None = None  # the text came whole and has nothing to speak
        self._stalls = StallWatch(self._loop, weakref.WeakMethod(self._stalled))
        self._seat = engine.seat()
        if not seat:
            weakref.finalize(self, self._seat.leave).atexit = False  # it may be dropped before its end
        self._parts = Parts(engine, request, reading, weakref.WeakMethod(self._receive), seat or self._seat)
        self._lock = asyncio.Lock()  # held from one piece of text to its end, so that pieces keep their order
        self._news = asyncio.Event()  # text has come, or its end, or a cancel
        self._cancelled = False  # no part will follow
        self._said: list[Audio] = []  # the parts that are over
        self._part_over = asyncio.Event()  # the engine has ended the current part
        self._most_attempts = 1  # how often the part was said that was said most often
        self.audio: Audio | None = None

    async def begin(self, text: str | SpokenText | None, opening: str = "", *, ended: bool = False) -> None:
        """Begin. If the calling task is cancelled meanwhile, speech is cancelled as soon as it exists.

        Args:
            text: what to say, cut if it is longer than a slot. None: it comes through `push_text` and `end_text`, or
                `feed`, and may be longer than a slot unless `max_frames` is given. The request is then one `in_pieces`.
            opening: the first piece of text that comes in pieces. It saves a call of `push_text`.
            ended: no text follows the opening. It saves a call of `end_text`.

        Raises:
            TTSError: as `TTSEngine.submit`, but for NoWordsError, which comes from `events`.
        """
        try:
            await self._begin_part(self._parts.begin, text, opening, ended)
        except asyncio.CancelledError:
            self.cancel()
            raise
        except NoWordsError as error:  # `events` tells its words first
            self._wordless = error.with_traceback(None)
        finally:  # nobody needs them before the first chunk
            await self._add_words(opening if text is None else str(text))
        if self._parts.complete:
            self._stalls.stop()
        else:
            self._stalls.came(opening)

    async def _call(self, function: Callable[..., None], *args: object) -> None:
        """A call of `Parts`, in the executor. `_lock` is held, or no other call can come."""
        await self._loop.run_in_executor(self._executor, partial(function, *args))
        self._news.set()

    async def _begin_part(self, begin: Callable[..., None], *args: object) -> None:
        """As `_call`, for what begins a part. Raises EngineBusy: there is no slot, and the session is not patient."""
        while True:
            self._part_over.clear()
            try:
                return await self._call(begin, *args)
            except EngineBusy:
                if not self._patient:
                    raise
            await asyncio.sleep(_BUSY_S)

    async def _add_words(self, text: str) -> None:
        """A piece of the text, for the words that are told."""
        if self._words:
            for start in range(0, len(text), _WORDS_AT_ONCE):
                if start:
                    await asyncio.sleep(0)
                self._words.add(text[start : start + _WORDS_AT_ONCE])

    @returns_at_once
    def _receive(self, chunk: Chunk | None) -> None:
        """Called by the engine's thread. None: the current part has ended."""
        try:
            self._loop.call_soon_threadsafe(self._arrive, chunk)
        except RuntimeError:  # the loop is closed, so no task waits for chunks
            self.cancel()

    def _arrive(self, chunk: Chunk | None) -> None:
        if chunk is None:
            self._part_over.set()
        elif self._request.retries:  # it is heard once all of it is good
            return
        else:
            self._stalls.made(len(chunk.samples) / chunk.sample_rate)
        self._items.put_nowait(chunk)

    @property
    def begun(self) -> bool:
        """`begin` has succeeded."""
        return self._parts.utterance is not None

    @property
    def done(self) -> bool:
        """The engine has ended it; chunks may still wait to be taken."""
        return self._parts.done

    # ------------------------------------------------------------ text in pieces

    async def push_text(self, text: str) -> None:
        """See `Utterance.push_text`, which also says what it raises."""
        async with self._lock:
            await self._add_words(text)
            await self._call(self._parts.push, text)
            self._stalls.came(text)

    async def flush(self) -> None:
        """See `Utterance.flush`."""
        async with self._lock:
            await self._call(self._parts.flush)
            self._stalls.flushed()

    async def end_text(self) -> None:
        """See `Utterance.end_text`."""
        async with self._lock:
            await self._call(self._parts.end)
            self._stalls.stop()

    def _stalled(self, text_at: float) -> None:
        self._ending = self._loop.create_task(self._end_stalled_part(text_at))

    async def _end_stalled_part(self, text_at: float) -> None:
        async with self._lock:
            if self._parts.complete or self._cancelled or text_at != self._stalls.text_at:
                return
            with suppress(TTSError, RuntimeError):  # `events` says why it has ended, or the executor is closed
                await self._call(self._parts.end_part)

    def feed(self, pieces: AsyncGenerator[str | Flush, None], within_s: float, remedy: str) -> None:
        """Push text as it comes, and end it. Text that is refused ends the session with its error.

        Args:
            within_s: the longest wait for a piece, in seconds.
            remedy: for a message: what a client should do that was too slow.
        """
        self._feeding = self._loop.create_task(self._feed(pieces, within_s, remedy))

    async def _feed(self, pieces: AsyncGenerator[str | Flush, None], within_s: float, remedy: str) -> None:
        try:
            while (piece := await self._next_piece(pieces, within_s)) is not None:
                if piece is FLUSH:
                    await self.flush()
                else:
                    await self.push_text(piece)
            await self.end_text()
        except TextEndedError:
            pass  # speech has ended before its text did: `Ended` says why
        except TimeoutError:
            self._refused = RequestError(f"no more text came for {within_s:g} s: {remedy}")
            self.cancel()
        except Exception as error:  # without this text speech cannot go on
            if not self.done:
                self._refused = error
            self.cancel()

    async def _next_piece(self, pieces: AsyncGenerator[str | Flush, None], within_s: float) -> str | Flush | None:
        """The next piece, or None at the end. If it is long in coming, the word before it is a whole one."""
        word_ends = self._loop.call_later(STALL_S, self._items.put_nowait, FLUSH) if self._words else None
        try:
            async with within(within_s):
                return await anext(pieces, None)
        finally:
            if word_ends:
                word_ends.cancel()

    # ------------------------------------------------------------ part after part

    async def _part_ended(self) -> tuple[Audio | None, Audio | None]:
        """The current part has ended. Begin the next one, or that one again. Returns what was held back of it, and
        everything if it was the last.

        Raises:
            TTSError: why it failed, or the next one cannot begin. NoWordsError: no part had a word.
        """
        assert self._parts.utterance
        try:
            audio = self._parts.utterance.result()  # it has ended, so this does not wait
        except EngineBusy:  # it has waited too long for a slot
            if not self._patient:
                raise
            await asyncio.sleep(_BUSY_S)
            await self._begin_part(self._parts.repeat)
            return None, None
        if not self._cancelled and (request := self._parts.next_attempt(audio)):
            self._most_attempts = max(self._most_attempts, request.attempt)
            self._engine.count_retry()
            await self._begin_part(self._parts.repeat, request)
            return None, None
        held = audio if self._request.retries else None
        # To join minutes takes too long for an event loop.
        if held:
            await self._loop.run_in_executor(self._executor, lambda: audio.samples)
        if await self._go_on(audio):
            return held, None
        if len(self._said) == 1:
            return held, self._said[0]
        return held, await self._loop.run_in_executor(self._executor, joined, self._said)

    async def _go_on(self, audio: Audio) -> bool:
        """Begin the part behind the one that said `audio`. False: there is none."""
        if self._cancelled or not self._parts.superseded:
            self._said.append(audio)
            if self._cancelled or audio.finish_reason in CUT:
                return False
        while not self._cancelled:
            self._news.clear()
            async with self._lock:
                if self._parts.has_next:
                    await self._begin_part(self._parts.begin_next, self._said[-1] if self._said else None)
                    return True
                if self._parts.complete:
                    break
            await self._news.wait()
        if not self._said and not self._cancelled:
            raise NoWordsError("the text is blank or has no letter or digit: there is nothing to speak")
        self._said = self._said or [audio]
        return False

    # ------------------------------------------------------------ the end

    def cancel(self) -> None:
        """Stop before the next frame. Returns at once, also before speech has begun and after its end."""
        self._cancelled = True
        self._stalls.stop()
        self._news.set()
        self._parts.cancel()
        self._seat.leave()

    async def close(self) -> None:
        """Cancel what still runs. Wait for the task of `feed`, and until the engine has ended the current part."""
        self.cancel()
        feeding, self._feeding = self._feeding, None  # a cancelled task holds its frames, which hold this session
        if feeding:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        if self.audio is None and (utterance := self._parts.utterance):
            with suppress(TimeoutError, TTSError):  # stuck, or failed
                if not utterance.done:
                    await asyncio.wait_for(self._part_over.wait(), _CLOSE_S)
                last = utterance.result()
                said = self._said if self._said and self._said[-1] is last else [*self._said, last]
                made = await self._loop.run_in_executor(self._executor, joined, said)
                self.audio = replace(made, finish_reason="cancelled")

    # ------------------------------------------------------------ events out

    async def events(self) -> AsyncIterator[Event]:
        """Yield `Began`, then `Sound` and `Words` as they are made, `Ended`, and the last `Words`.

        Raises:
            NoWordsError: nothing was to speak. Its words were told.
            TTSError: why speech failed, or what `feed` refused.
        """
        try:
            if self._wordless:
                raise self._wordless
            yield Began(self._request.seed)
            while self.audio is None:
                item = await self._items.get()
                if isinstance(item, Chunk):
                    async for sound in self._sounds(item, self._parts.utterance):
                        yield sound
                elif item is FLUSH:
                    if self._words:
                        self._words.flush()
                else:
                    utterance = self._parts.utterance
                    held, self.audio = await self._part_ended()
                    if held:
                        async for sound in self._sounds(held, utterance):
                            yield sound
                    if self._words and self.audio is None:
                        self._words.end_part()
                if self._words and not self._words_at_end and (due := self._words.due()):
                    yield Words(due, self._words.measured)
            if self._refused:
                raise self._refused
        except NoWordsError:
            if self._words and (words := self._words.finish()):
                yield Words(words, self._words.measured)
            raise
        finally:  # an error holds this frame, which holds the session
            self._refused = self._wordless = None
            self._seat.leave()
        audio = self.audio
        cut = None
        if audio.finish_reason == "length" and not self._request.capped:
            cut = audio.why_cut(self._engine.config.max_frames)
        seed, most = self._request.seed, self._most_attempts
        yield Ended(audio.finish_reason, audio.duration_s, audio.compute_s, seed, most, cut, audio)
        if self._words and audio.finish_reason not in CUT:  # all words were spoken
            if words := self._words.finish():
                yield Words(words, self._words.measured)

    async def _sounds(self, made: Chunk | Audio, utterance: BegunUtterance | None) -> AsyncIterator[Sound]:
        """What the utterance made, in blocks: a pause of a minute is one chunk, and so is speech with `retries`."""
        size = round(_BLOCK_S * made.sample_rate)
        for start in range(0, len(made.samples), size):
            if start:
                await asyncio.sleep(0)  # who takes them may never wait
            block = made.samples[start : start + size]
            if self._words:
                self._words.hear(block, made.sample_rate)
            yield Sound(block)
        if isinstance(self._words, MeasuredWords) and utterance and made.token_s is not None:
            self._words.enter(utterance.tokens, made.token_s)

    def end_word(self) -> list[tuple[str, float]]:
        """The text so far ends with a whole word. The words that are due by now."""
        if not self._words:
            return []
        self._words.flush()
        return self._words.due()
