"""AudioContext: the content of one of Pipecat's audio contexts: audio at the pipeline's rate, words, errors, its end.

In SENTENCE mode a context is a series of utterances; in TOKEN mode it is one. `pipecat/local.py` and
`pipecat/remote.py` say how an utterance is made.

This module imports no torch, because a server's client needs none.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from time import monotonic
from typing import Any

import numpy as np
import soxr
from pipecat.frames.frames import ErrorFrame, Frame, TTSAudioRawFrame
from pipecat.metrics.metrics import MetricsData
from pipecat.services.tts_service import TTSService
from pipecat.utils.errors import ErrorCategory

from qwen_megakernel.engine.word_times import is_unspaced
from qwen_megakernel.errors import LanguageError, RequestError, SpeakerError, TextEndedError, VoiceError
from qwen_megakernel.model.edges import SILENCE
from qwen_megakernel.model.pcm import pcm16

_KEEPALIVE_S = 1.0  # longest interval; Pipecat ends an audio context that gets no item for 3 s
_LEAST_GAP_S = 0.05  # shorter waits of the listener do not move word times
_RESAMPLER = "HQ"  # soxr's: from a first chunk of 80 ms it yields 61 ms at 8 and 16 kHz; VHQ yields 0 and 69 ms
_HEAD_START_S = 0.002
"""Seconds between a context's first frame and its first words. For each word Pipecat compares whole texts, in some
2,000 calls. Without this wait it does so before the transport gets the frame."""
_KEPT_SILENCE_S, _MAX_TRIMMED_S = 0.01, 0.6  # silence left before the first sound; most that is cut


class SpeechMetricsData(MetricsData):
    """The engine's times for an utterance that was not interrupted.

    Parameters:
        audio_s: Seconds of audio.
        compute_s: Seconds from the text's arrival to the utterance's end. RTF is this over audio_s.
        ttfc_s: Seconds from the text's arrival to the first chunk.
    """

    audio_s: float
    compute_s: float
    ttfc_s: float


class AudioContext(ABC):
    """Attributes:
    failed: an error of this context was reported.
    """

    def __init__(self, service: TTSService, context_id: str):
        self._service, self._context_id = service, context_id
        self._made_s = 0.0  # seconds of audio in the context
        self._begun_s = 0.0  # where in the context the current utterance's audio begins
        self._rate = 0  # of that utterance's audio, in Hz
        self._resample: soxr.ResampleStream | None = None
        self._silent = service._trim  # nothing was heard yet, so silence is cut
        self._trimmed_s = 0.0
        self._reader: asyncio.Task | None = None
        self._text_ended = asyncio.Event()
        self._cancelled = False
        self.failed = False
        self._keepalive_task: asyncio.Task | None = None
        self._first_audio_at: float | None = None  # clock time
        self._words_begun = False
        self._least_first_s, self._held = 0.0, np.zeros(0, np.float32)  # seconds to begin with; less is held back
        # (position, wait): before the audio from `position` on, the listener has waited `wait` seconds in total.
        self._gaps: list[tuple[float, float]] = [(0.0, 0.0)]

    # ------------------------------------------------------------ how an utterance is made

    @abstractmethod
    async def _open(self, text: str, complete: bool) -> None:
        """Begin an utterance. `complete`: no more text will come."""

    @abstractmethod
    async def _push(self, text: str) -> None:
        """Push a piece of text. Raises TextEndedError if the utterance has ended; `_audio` says why."""

    @abstractmethod
    async def _end(self) -> None:
        """End the utterance's text."""

    @abstractmethod
    async def flush(self) -> None:
        """Speak text that is held back because the next character could change it."""

    @abstractmethod
    def _drop(self) -> None:
        """Cancel the utterance if it has not ended. Takes no time and never fails."""

    @abstractmethod
    def _audio(self) -> AsyncGenerator[TTSAudioRawFrame | ErrorFrame, None]:
        """Yield the utterance's audio at the pipeline's rate, then an error if it was cut. Send the words too."""

    # ------------------------------------------------------------ keeping the context open

    @property
    def _keepalive(self) -> float:
        return min(_KEEPALIVE_S, self._service._stop_frame_timeout_s / 3)

    def keep_open(self) -> None:
        """Keep the context open while the LLM writes this turn: a pause between two sentences must not end it."""
        if self._keepalive_task is None and self._service._turn_context_id == self._context_id:
            self._keepalive_task = self._service.create_task(self._keep_open())

    async def _keep_open(self) -> None:
        while self._service._turn_context_id == self._context_id:
            self._service._refresh_audio_context(self._context_id)
            await asyncio.sleep(self._keepalive)

    async def _next(self, get: Callable[[], Awaitable[Any]]) -> Any:
        """The result of `get()`. Keep the context open meanwhile, however long it takes."""
        while True:
            try:
                async with asyncio.timeout(self._keepalive):  # `wait_for` starts a task for each chunk in Python 3.11
                    return await get()
            except TimeoutError:
                self._service._refresh_audio_context(self._context_id)

    # ------------------------------------------------------------ a sentence

    async def say(self, text: str) -> AsyncGenerator[Frame, None]:
        """Speak a sentence."""
        try:
            await self._open(text, complete=True)
            async for frame in self._audio():
                yield frame
        except Exception as error:
            yield self._error(error)
        finally:
            self._drop()

    # ------------------------------------------------------------ tokens

    async def push(self, text: str) -> None:
        """Take a token into the context's utterance."""
        if self.failed or self._cancelled:
            return
        try:
            if self._reader is not None:
                await self._push(text)
                return
            await self._open(text, complete=False)
            self._reader = self._service.create_task(self._read())
        except TextEndedError:
            pass  # the reader reports why it ended
        except Exception as error:
            await self._fail(error)
            if self._reader is None:
                self._drop()
                self._reader = self._service.create_task(self._close_with_text())

    async def end_text(self) -> None:
        """End the context's text."""
        if self._text_ended.is_set():
            return
        self._text_ended.set()
        if self._reader is None or self.failed:
            await self._service._close(self._context_id)
            return
        try:
            await self._end()
        except Exception as error:
            await self._fail(error)

    async def _read(self) -> None:
        """Append the utterance's audio to the context as it comes, then close the context."""
        try:
            async for frame in self._audio():
                await self._service.append_to_audio_context(self._context_id, frame)
        except Exception as error:
            await self._fail(error)
        await self._close_with_text()

    async def _close_with_text(self) -> None:
        """Close the context once its text has ended. Until then later tokens must not open a new context."""
        while not self._text_ended.is_set():
            self._service._refresh_audio_context(self._context_id)
            try:
                await asyncio.wait_for(self._text_ended.wait(), self._keepalive)
            except TimeoutError:
                continue
        await self._service._close(self._context_id)

    async def _fail(self, error: Exception) -> None:
        if not self.failed and not self._cancelled:
            self.failed = True
            await self._service.append_to_audio_context(self._context_id, self._error(error))

    # ------------------------------------------------------------ audio, words, errors

    def cancel(self) -> None:
        """Stop at once. Takes no time and never fails."""
        self._cancelled = True
        self._text_ended.set()
        self._drop()
        for task in (self._reader, self._keepalive_task):
            if task and not task.done() and task is not asyncio.current_task():
                task.cancel()
        self._reader = self._keepalive_task = None  # breaks a reference cycle: a cancelled task holds its frames

    def _begin(self, rate: int) -> None:
        """Begin an utterance. Its audio comes at `rate` Hz and follows the context's earlier audio."""
        self._begun_s, self._rate, self._resample = self._made_s, rate, None
        if rate != self._service.sample_rate:
            self._resample = soxr.ResampleStream(rate, self._service.sample_rate, 1, "float32", _RESAMPLER)

    def _to_frame(self, samples: np.ndarray) -> TTSAudioRawFrame | None:
        """A frame of these samples (fp32 [n] at the utterance's rate); None if trimming or resampling leaves none."""
        samples = self._trim(samples)
        if self._resample and len(samples):
            samples = self._resample.resample_chunk(samples)
        if self._first_audio_at is None:
            samples = self._held = np.concatenate([self._held, samples])
            if len(samples) < self._least_first_s * self._service.sample_rate:
                return None
        return self._frame(samples) if len(samples) else None

    def _tail(self) -> TTSAudioRawFrame | None:
        """The utterance's last audio: what the resampler or the minimum for a first frame still holds back."""
        tail = np.zeros(0, np.float32)
        if self._resample:
            tail = self._resample.resample_chunk(tail, last=True)
        if self._first_audio_at is None:
            tail = np.concatenate([self._held, tail])
        return self._frame(tail) if len(tail) else None

    def _trim(self, samples: np.ndarray) -> np.ndarray:
        """Cut the silence at the context's beginning."""
        if not self._silent:
            return samples
        loud = np.flatnonzero(np.abs(samples) > SILENCE)
        first = max(0, int(loud[0]) - int(_KEPT_SILENCE_S * self._rate)) if len(loud) else len(samples)
        first = min(first, max(0, int((_MAX_TRIMMED_S - self._trimmed_s) * self._rate)))
        self._trimmed_s += first / self._rate
        self._silent = first == len(samples)
        return samples[first:]

    def _frame(self, samples: np.ndarray) -> TTSAudioRawFrame:
        rate, now = self._service.sample_rate, monotonic()
        if self._first_audio_at is None:
            self._first_audio_at = now
        # If the listener has heard everything by now, this frame and its words are heard `gap` seconds late.
        gap = now - self._first_audio_at - self._made_s
        if gap > self._gaps[-1][1] + _LEAST_GAP_S:
            self._gaps.append((self._made_s, gap))
        self._made_s += len(samples) / rate
        return TTSAudioRawFrame(pcm16(samples), rate, 1, context_id=self._context_id)

    async def _send_words(self, words: list[tuple[str, float]]) -> None:
        """Send words to the pipeline.

        Args:
            words: each with its beginning, in seconds from the utterance's first sample.
        """
        if words and not self._words_begun:
            self._words_begun = True
            await asyncio.sleep(_HEAD_START_S)
        for word, at in words:
            at += self._begun_s
            at += next(gap for begin, gap in reversed(self._gaps) if begin <= at + 1e-9)
            unspaced = True if is_unspaced(word) else None
            await self._service.add_word_timestamps(
                [(word, at)], self._context_id, includes_inter_frame_spaces=unspaced
            )

    def _error(self, error: Exception) -> ErrorFrame:
        self.failed = True
        category = self._service._classify_error(error)
        if isinstance(error, RequestError) and not isinstance(error, (SpeakerError, LanguageError, VoiceError)):
            category = ErrorCategory.APPLICATION  # only this text failed; the next may be spoken
        return ErrorFrame(error=f"{type(error).__name__}: {error}", exception=error, category=category)
