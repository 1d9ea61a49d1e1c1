"""AudioContext: the content of one of Pipecat's audio contexts: audio at the pipeline's rate, words, errors, its end.
`Host`: the service whose it is.

In SENTENCE mode a context is a series of sessions of speech; in TOKEN mode it is one.

This module imports no torch, because a server's client needs none.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
import soxr
from loguru import logger
from pipecat.frames.frames import ErrorFrame, Frame, TTSAudioRawFrame, TTSStoppedFrame
from pipecat.metrics.metrics import MetricsData
from pipecat.services.tts_service import TTSService

from qwen_megakernel.errors import NoWordsError, SpeechCutError, TextEndedError, TTSError
from qwen_megakernel.model.edges import Edges
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.speech.events import Ended, Session, Sound, Words
from qwen_megakernel.speech.words import is_unspaced

_LEAST_GAP_S = 0.05  # shorter waits of the listener do not move word times
_RESAMPLER = "HQ"  # soxr's: from a first chunk of 80 ms it yields 61 ms at 8 and 16 kHz; VHQ yields 0 and 69 ms
_HEAD_START_S = 0.002
"""Seconds between a context's first frame and its first words. For each word Pipecat compares whole texts, in some
2,000 calls. Without this wait it does so before the transport gets the frame."""
_LEAST_WORD_S = 1e-9
"""Least time of a word in its utterance. To Pipecat a context may begin at the last word of the context before, whose
message ends 1 ns later: a word at 0 would get into that message."""
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


@dataclass(frozen=True)
class Opening:
    """A session that was made and waits for its beginning."""

    session: Session
    begin: Callable[[], Awaitable[None]]  # with the text for which it was opened. Raises TTSError or OSError
    sample_rate: int  # of its sound, in Hz
    least_first_s: float = 0.0  # seconds that the first frame of its audio context must have


class Host(TTSService):
    """A service, as its audio contexts see it."""

    trims_silence: bool  # in front of a context's first speech
    words_measured = False  # are the times of the words that came last? Otherwise they are estimates

    @abstractmethod
    async def open_session(self, context_id: str, reading: Any, text: str, *, complete: bool) -> Opening:
        """Make a context's next session, which begins with `text`. `reading`: what the context reads together with
        others, by `TurnService._new_reading`. `complete`: no more text will come. Raises TTSError or OSError: it cannot
        speak."""

    @abstractmethod
    async def tell(self, ended: Ended) -> None:
        """Log and measure what was spoken."""

    @abstractmethod
    def error_frame(self, context_id: str, error: Exception) -> ErrorFrame:
        """Why a context's latest text cannot be spoken. The words of that sentence do not count as spoken."""

    async def finish_words(self, context_id: str) -> None:
        """Match a context's words with its last sentence, which has ended. Only in TOKEN mode are there any."""
        frames = await self._aggregated_frame_sequencer.finalize(context_id)
        await self._push_sequencer_frames(frames, context_id)

    async def close_context(self, context_id: str | None) -> None:
        """Say that a context gets nothing more. Does nothing if Pipecat has dropped it."""
        if context_id and self.audio_context_available(context_id):
            await self.append_to_audio_context(context_id, TTSStoppedFrame(context_id=context_id))
            await self.remove_audio_context(context_id)


class AudioContext:
    """The content of one of Pipecat's audio contexts."""

    def __init__(self, host: Host, context_id: str, reading: object):
        self._host = host
        self.id = context_id
        self.reading = reading  # what this context and others read of one text, by `TurnService._new_reading`
        self.session: Session | None = None  # the current one; None before the first
        self.made_s = 0.0  # seconds of audio in it
        self.ended: list[Ended] = []  # what its utterances that came to their ends said of themselves
        self._begun_s = 0.0  # where in the context the current utterance's audio begins
        self._rate = 0  # of that utterance's audio, in Hz
        self._resample: soxr.ResampleStream | None = None
        self._trims = host.trims_silence  # no speech was heard yet, so silence is cut
        self._edges: Edges | None = None  # cuts it from the current session
        self._trimmed_before_s = 0.0  # from sessions before it
        self._reader: asyncio.Task | None = None
        self._cancelled = False
        self.failed = False  # an error of this context was reported
        self.wordless = False  # some of its text had nothing to speak
        self.busy = False  # a sentence is spoken, or a token is being taken
        self.text_ended = False  # no more text will come
        self.text_at = monotonic()  # its latest text came; of a sentence: was spoken
        self._first_audio_at: float | None = None  # clock time
        self._words_begun = False
        self._words: list[tuple[str, float]] = []  # that are not sent yet
        self._least_first_s = 0.0  # seconds to begin with
        self._held = np.zeros(0, np.float32)  # audio that is less than that
        # (position, wait): before the audio from `position` on, the listener has waited `wait` seconds in total.
        self._gaps: list[tuple[float, float]] = [(0.0, 0.0)]

    def summary(self) -> str:
        """What was spoken, for the log."""
        seconds, compute_s = (sum(getattr(one, name) for one in self.ended) for name in ("seconds", "compute_s"))
        rtf = f", RTF {compute_s / seconds:.2f}" if seconds else ""
        return f"{self.made_s:.2f} s of speech, {len(self.ended)} utterances ended{rtf}"

    @property
    def trimmed_s(self) -> float:
        """Seconds of silence that were cut in front of the first speech."""
        return self._trimmed_before_s + (self._edges.cut / self._rate if self._edges else 0.0)

    async def flush(self) -> None:
        """Speak text that is held back because the next character could change it."""
        session = self.session
        if session and session.begun and not session.done and not self.text_ended:
            try:
                await session.flush()
            except OSError as error:
                await self._fail(error)
            except (TTSError, RuntimeError) as error:  # it has ended, or the service was cleaned up
                logger.debug(f"flush came too late: {error}")

    async def end_word(self) -> None:
        """The text so far ends with a whole word."""
        if self.session:
            await self._send_words(self.session.end_word())

    async def _open(self, text: str, *, complete: bool) -> None:
        """Begin the next session. `complete`: no more text will come."""
        opening = await self._host.open_session(self.id, self.reading, text, complete=complete)
        self.begin(opening.sample_rate, opening.least_first_s)
        self.session = opening.session
        await opening.begin()

    def _drop(self) -> None:
        if self.session:
            self.session.cancel()

    async def _audio(self) -> AsyncGenerator[TTSAudioRawFrame | ErrorFrame, None]:
        """Yield the session's audio at the pipeline's rate, then an error if it was cut. Send the words too."""
        assert self.session
        async for event in self.session.events():
            if isinstance(event, Sound):
                if frame := self._to_frame(event.samples):
                    yield frame
                    await self._send_words([])
            elif isinstance(event, Words):
                self._host.words_measured = event.measured
                await self._send_words(event.words)
            elif isinstance(event, Ended):
                self.ended.append(event)
                self.wordless |= event.seconds == 0
                if tail := self._tail():
                    yield tail
                if event.cut:  # the rest of the text was not spoken
                    yield self._error(SpeechCutError(event.cut))
                await self._host.tell(event)

    # ------------------------------------------------------------ a sentence

    async def say(self, text: str) -> AsyncGenerator[Frame, None]:
        """Speak a sentence."""
        self.busy = True
        try:
            await self._open(text, complete=True)
            async for frame in self._audio():
                yield frame
        except NoWordsError:  # no error: its words still belong to the turn's text
            self.wordless = True
        except Exception as error:
            yield self._error(error)
        finally:
            self.busy, self.text_at = False, monotonic()
            self._drop()

    # ------------------------------------------------------------ tokens

    async def push(self, text: str, apart: bool = False) -> None:
        """Take a token into the context's utterance. `apart`: it is a whole text, such as a sentence, which a blank
        sets apart from the text before it."""
        self.text_at = monotonic()
        if self.failed or self._cancelled:
            return
        self.busy = True
        try:
            if self._reader is not None and self.session:
                await self.session.push_text(f" {text}" if apart else text)
                return
            await self._open(text, complete=False)
            self._reader = self._host.create_task(self._read())
        except TextEndedError:
            pass  # the reader reports why it ended
        except Exception as error:
            await self._fail(error)
            if self._reader is None:
                self._drop()
        finally:
            self.busy = False

    async def end_text(self) -> None:
        """End the context's text. What was made of it is still heard if some of it failed."""
        if self.text_ended:
            return
        self.text_ended = True
        if self._reader is None or self._reader.done():
            await self._host.close_context(self.id)
            return
        try:
            assert self.session
            await self.session.end_text()
        except NoWordsError:
            pass  # the reader is told too
        except Exception as error:
            await self._fail(error)

    async def _read(self) -> None:
        """Append the utterance's audio to the context as it comes. Then close the context, unless more text may come:
        that must not open a new context."""
        try:
            async for frame in self._audio():
                await self._host.append_to_audio_context(self.id, frame)
        except NoWordsError:
            self.wordless = True
        except Exception as error:
            await self._fail(error)
        if self.text_ended:
            await self._host.close_context(self.id)

    async def _fail(self, error: Exception) -> None:
        if not self.failed and not self._cancelled:
            await self._host.append_to_audio_context(self.id, self._error(error))

    async def lose(self, error: Exception) -> None:
        """Report a broken connection. The context will be closed; if the turn goes on, it gets a new context."""
        if not self._cancelled:
            await self._host.append_to_audio_context(self.id, self._error(error))
            await self._host.finish_words(self.id)  # those of the last sentence that were heard
        self.text_ended = True

    # ------------------------------------------------------------ audio, words, errors

    def cancel(self) -> None:
        """Stop at once. Takes no time and never fails."""
        self._cancelled = self.text_ended = True
        self._drop()
        if self._reader and not self._reader.done() and self._reader is not asyncio.current_task():
            self._reader.cancel()
        self._reader = None  # breaks a reference cycle: a cancelled task holds its frames

    def begin(self, rate: int, least_first_s: float = 0.0) -> None:
        """Begin a session. Its audio comes at `rate` Hz and follows the context's earlier audio. `least_first_s`:
        seconds of the context's first audio frame at least."""
        self._least_first_s = least_first_s
        self._trimmed_before_s = self.trimmed_s
        self._edges = None
        if self._trims:
            self._edges = Edges("start", _KEPT_SILENCE_S, rate, max(0.0, _MAX_TRIMMED_S - self.trimmed_s))
        self._begun_s = self.made_s
        self._rate = rate
        self._resample = None
        if rate != self._host.sample_rate:
            self._resample = soxr.ResampleStream(rate, self._host.sample_rate, 1, "float32", _RESAMPLER)

    def _to_frame(self, samples: np.ndarray) -> TTSAudioRawFrame | None:
        """A frame of these samples (fp32 [n] at the utterance's rate); None if trimming or resampling leaves none."""
        if self._edges:
            samples = self._edges.push(samples)
            self._trims &= not len(samples)
        if self._resample and len(samples):
            samples = self._resample.resample_chunk(samples)
        if self._first_audio_at is None:
            samples = self._held = np.concatenate([self._held, samples])
            if len(samples) < self._least_first_s * self._host.sample_rate:
                return None
        return self._frame(samples) if len(samples) else None

    def _tail(self) -> TTSAudioRawFrame | None:
        """The utterance's last audio: what trimming, the resampler or the minimum for a first frame holds back."""
        tail = self._edges.finish() if self._edges and self._trims else np.zeros(0, np.float32)
        if self._resample:
            tail = self._resample.resample_chunk(tail, last=True)
        if self._first_audio_at is None:
            tail = np.concatenate([self._held, tail])
        return self._frame(tail) if len(tail) else None

    def _frame(self, samples: np.ndarray) -> TTSAudioRawFrame:
        rate, now = self._host.sample_rate, monotonic()
        if self._first_audio_at is None:
            self._first_audio_at = now
        # If the listener has heard everything by now, this frame and its words are heard `gap` seconds late.
        gap = now - self._first_audio_at - self.made_s
        if gap > self._gaps[-1][1] + _LEAST_GAP_S:
            self._gaps.append((self.made_s, gap))
        self.made_s += len(samples) / rate
        return TTSAudioRawFrame(pcm16(samples), rate, 1, context_id=self.id)

    async def _send_words(self, words: list[tuple[str, float]]) -> None:
        """Send words to the pipeline, each with its beginning, in seconds from the utterance's first sample. They wait
        while the context's first audio is held back."""
        self._words += words
        if not self._words or self._first_audio_at is None and len(self._held):
            return
        words, self._words = self._words, []
        if not self._words_begun:
            self._words_begun = True
            await asyncio.sleep(_HEAD_START_S)
        for word, at in words:
            at = self._begun_s + max(_LEAST_WORD_S, at - (self.trimmed_s - self._trimmed_before_s))
            at += next(gap for begin, gap in reversed(self._gaps) if begin <= at + 1e-9)
            unspaced = True if is_unspaced(word) else None
            await self._host.add_word_timestamps([(word, at)], self.id, includes_inter_frame_spaces=unspaced)

    def _error(self, error: Exception) -> ErrorFrame:
        self.failed = True
        return self._host.error_frame(self.id, error)
