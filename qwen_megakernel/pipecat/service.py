"""What Pipecat's services of this package share, wherever their engine is: `pipecat_tts` has it in its own process,
`websocket_tts` behind a socket.

    SpeechService   settings, order, contexts that open and close, words marked as estimates
    Speech          what one audio context says: audio at the pipeline's rate, words, errors, its end

No torch in here: who speaks through a socket needs none.
"""

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Self

import numpy as np
import soxr
from pipecat.frames.frames import (
    CancelFrame,
    ControlFrame,
    EndFrame,
    ErrorFrame,
    Frame,
    FunctionCallsStartedFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
    TTSTextFrame,
)
from pipecat.processors.frame_processor import FrameDirection
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TTSService
from pipecat.transcriptions.language import Language, resolve_language
from pipecat.utils.errors import ErrorCategory
from pipecat.utils.tracing.service_decorators import traced_tts
from pipecat.utils.types import NOT_GIVEN, NotGiven, is_given

from qwen_megakernel.checkpoint.config import SamplingParams
from qwen_megakernel.engine.word_times import is_unspaced
from qwen_megakernel.errors import (
    EngineBusy,
    LanguageError,
    RequestError,
    SpeakerError,
    TextEndedError,
    VoiceError,
)
from qwen_megakernel.model.pcm import pcm16

LANGUAGES = {
    Language.ZH: "chinese",
    Language.EN: "english",
    Language.DE: "german",
    Language.IT: "italian",
    Language.PT: "portuguese",
    Language.ES: "spanish",
    Language.JA: "japanese",
    Language.KO: "korean",
    Language.FR: "french",
    Language.RU: "russian",
}

_KEEPALIVE = 1.0  # seconds at most; an audio context without an item for 3 is taken for finished
_LEAST_GAP = 0.05  # seconds of waiting that words must know of
_QUALITY = "HQ"  # of soxr: of a first chunk of 80 ms it yields 61 at 8 and 16 kHz, where VHQ yields 0 and 69
_SILENCE, _KEPT_SILENCE, _MOST_TRIMMED = 0.003, 0.01, 0.6  # amplitude (-50 dBFS); seconds left in front; seconds


@dataclass
class SpeechSettings(TTSSettings):
    """Settings that may change while a pipeline runs; a change applies to the next sentence (SENTENCE mode) or opens a
    new utterance (TOKEN mode).

    Parameters:
        model: The checkpoint. Fixed once the service is made.
        voice: A speaker of the checkpoint. None: the first speaker.
        language: `Language`, a code such as "de-DE", or a name such as "german". None: auto.
        instruct: How to say it, where the checkpoint takes it.
        temperature: Of both kinds of codes; None: the checkpoint's.
        top_k: The same.
        top_p: The same.
        repetition_penalty: None: the checkpoint's.
        seed: None: a fresh one for every utterance.
    """

    instruct: str | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    temperature: float | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    top_k: int | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    top_p: float | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    repetition_penalty: float | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    seed: int | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)

    @classmethod
    def unset(cls, model: str | None) -> Self:
        """Everything as the checkpoint has it."""
        return cls(
            model=model,
            voice=None,
            language=None,
            instruct=None,
            temperature=None,
            top_k=None,
            top_p=None,
            repetition_penalty=None,
            seed=None,
        )


def sampling_of(settings: SpeechSettings) -> SamplingParams:
    """Raises:
    SamplingError: a value out of its range.
    """
    return SamplingParams(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        repetition_penalty=settings.repetition_penalty,
        subtalker_temperature=settings.temperature,
        subtalker_top_k=settings.top_k,
        subtalker_top_p=settings.top_p,
        seed=settings.seed,
    )


def check_names(
    settings: SpeechSettings,
    voices: Collection[str] | None,
    languages: Collection[str] | None,
    *,
    unseen: str,
    no_voices: str,
) -> None:
    """None for voices or languages: not known yet, so that only what can never be is refused; `unseen` says so.

    Raises:
        SpeakerError, LanguageError: unknown; the message lists the known ones.
        RequestError: an instruct that is no string.
    """
    voice, language, instruct = settings.voice, settings.language, settings.instruct
    if language is not None and not isinstance(language, str):
        raise LanguageError(f"language must be a string or a Language, got {type(language).__name__}")
    if instruct is not None and not isinstance(instruct, str):
        raise RequestError(f"instruct must be a string, got {type(instruct).__name__}")
    if isinstance(voice, str) and not _is_among(voice, voices):
        raise SpeakerError(f"unknown voice {voice!r}; known: {', '.join(voices or ()) or no_voices}")
    if language is not None and not _is_among(language, languages):
        raise LanguageError(f"unknown language {str(language)!r}; known: {', '.join(languages or ()) or unseen}")


def _is_among(name: str, known: Collection[str] | None) -> bool:
    return bool(name.strip()) and (known is None or name.lower() in {one.lower() for one in known})


class _FlushFrame(ControlFrame):
    """To the service from itself: stays in order with the text, which a system frame overtakes."""


@functools.cache
def _arguments_of(cls: type) -> set[str]:
    """What it and its bases name in their constructors. Found once: 0.2 ms, on the event loop of every other call."""
    return {name for one in cls.__mro__ if "__init__" in vars(one) for name in signature(one.__init__).parameters}


class SpeechService(TTSService):
    """A text-to-speech service whose audio contexts each have a `Speech`."""

    Settings = SpeechSettings
    _settings: SpeechSettings

    def __init__(self, *, trim_leading_silence: bool, settings: SpeechSettings, **kwargs):
        if unknown := kwargs.keys() - _arguments_of(type(self)):  # Pipecat 1.14 would drop them in silence
            fields = ", ".join(name for name in vars(settings) if name != "extra")
            raise TypeError(
                f"{type(self).__name__} has no argument {', '.join(sorted(unknown))}; what may change while it runs "
                f"goes into settings={type(self).__name__}.Settings(...): {fields}"
            )
        super().__init__(
            push_start_frame=True, push_stop_frames=True, push_text_frames=False, settings=settings, **kwargs
        )
        self._trim = trim_leading_silence
        self._speeches: dict[str, Speech] = {}  # by context

    def can_generate_metrics(self) -> bool:
        """TTFB, TTFA, usage and, for sentences, processing."""
        return True

    @property
    def supports_processing_metrics(self) -> bool:
        """In SENTENCE mode a sentence is generated within `run_tts`."""
        return not self._is_streaming_tokens

    def language_to_service_language(self, language: Language) -> str | None:
        """The checkpoint's name of a language."""
        return resolve_language(language, LANGUAGES, use_base_code=True)

    # ------------------------------------------------------------ what a service says of itself

    @abstractmethod
    def _new_speech(self, context_id: str) -> "Speech": ...

    @abstractmethod
    def _is_model(self, model: str) -> bool:
        """Another name of the model it speaks with?"""

    @abstractmethod
    def _check(self, settings: SpeechSettings) -> None:
        """Raises RequestError for settings that it cannot speak with."""

    def _pieces(self, text: str) -> list[str]:
        """The utterances that a sentence is said in; RequestError for one that cannot be said."""
        return [text]

    # ------------------------------------------------------------ life

    async def stop(self, frame: EndFrame):
        """Everything that was asked for is spoken first; text that was not ended is complete now."""
        if self._is_streaming_tokens:
            for speech in list(self._speeches.values()):
                await speech.end_text()
        await super().stop(frame)

    async def cancel(self, frame: CancelFrame):
        """Stop at once."""
        self._cancel_all()
        await super().cancel(frame)

    def _cancel_all(self) -> None:
        for speech in list(self._speeches.values()):
            speech.cancel()
        self._speeches.clear()

    # ------------------------------------------------------------ speaking

    @traced_tts
    async def run_tts(self, text: str, context_id: str) -> AsyncGenerator[Frame | None, None]:
        """Speak a sentence, or take a token into the context's utterance.

        Args:
            text: A sentence, in TOKEN mode a piece of text.
            context_id: Of the turn.

        Yields:
            Audio frames at the pipeline's rate and, for what cannot be spoken, an error frame; in TOKEN mode nothing.
        """
        speech = self._speeches.get(context_id)
        if speech is None:
            speech = self._speeches[context_id] = self._new_speech(context_id)
        if self._is_streaming_tokens:
            await speech.push(text)
            yield None
            return
        speech.keep_open()
        await self.start_tts_usage_metrics(text)
        async for frame in speech.say(text):
            yield frame

    async def flush_audio(self, context_id: str | None = None):
        """The turn's text is complete.

        Args:
            context_id: Of the turn; None: the one that plays.
        """
        context_id = context_id or self.get_active_audio_context_id()
        speech = self._speeches.get(context_id)
        if speech is None:  # nothing was asked of us: the service is not usable
            await self._close(context_id)
        elif self._is_streaming_tokens:
            await speech.end_text()
        elif not self._is_yielding_frames_synchronously:  # its last sentence failed: nobody else would close it
            await self._close(context_id)

    async def process_frame(self, frame: Frame, direction: FrameDirection):
        """Before a function call everything said so far is spoken out.

        Args:
            frame: Any.
            direction: Its way.
        """
        if isinstance(frame, _FlushFrame):
            for speech in list(self._speeches.values()):
                await speech.flush()
            return
        if isinstance(frame, FunctionCallsStartedFrame):
            await self.queue_frame(_FlushFrame(), FrameDirection.DOWNSTREAM)
        await super().process_frame(frame, direction)

    async def push_frame(self, frame: Frame, direction: FrameDirection = FrameDirection.DOWNSTREAM):
        """Word times are marked as the estimates they are.

        Args:
            frame: Any.
            direction: Its way.
        """
        if isinstance(frame, TTSTextFrame):
            frame.metadata["time_is_estimated"] = True
        await super().push_frame(frame, direction)

    async def on_audio_context_interrupted(self, context_id: str):
        """Barge-in: this context's utterance stops, no other's.

        Args:
            context_id: The context that was dropped.
        """
        speech = self._speeches.pop(context_id, None)
        if speech:
            speech.cancel()
        await super().on_audio_context_interrupted(context_id)

    async def on_audio_context_completed(self, context_id: str):
        """Forget a context that was played out.

        Args:
            context_id: That context.
        """
        speech = self._speeches.pop(context_id, None)
        if speech:
            speech.cancel()
        await super().on_audio_context_completed(context_id)

    async def _record_context_audio_outcome(self, context_id: str, received_audio: bool):
        """A context whose error was told is not silent without a reason: it does not count against the service."""
        speech = self._speeches.get(context_id)
        if received_audio or speech is None or not speech.failed:
            await super()._record_context_audio_outcome(context_id, received_audio)

    async def _close(self, context_id: str | None) -> None:
        if context_id and self.audio_context_available(context_id):
            await self.append_to_audio_context(context_id, TTSStoppedFrame(context_id=context_id))
            await self.remove_audio_context(context_id)

    # ------------------------------------------------------------ settings

    async def _update_settings(self, delta: TTSSettings) -> dict[str, Any]:
        """Check a change as a whole, then apply it; in TOKEN mode it opens a new utterance."""
        wanted = self._settings.copy()
        language = delta.language
        if is_given(language):
            wanted.language = self._service_language(language) if isinstance(language, str) else language
        if is_given(delta.model) and (delta.model is None or self._is_model(delta.model)):
            delta.model = NOT_GIVEN
        usable = self.is_usable
        try:
            if is_given(delta.model):
                raise RequestError(
                    f"the model is {self._settings.model!r} and stays so: a service of another checkpoint is another "
                    f"service; got {delta.model!r}"
                )
            for name in vars(wanted):
                given = getattr(delta, name, NOT_GIVEN)
                if name not in ("language", "extra") and is_given(given):
                    setattr(wanted, name, given)
            self._check(wanted)
        except RequestError as error:
            await self.push_error(f"settings not changed: {error}", exception=error)
            await self.set_usable(usable)  # an invalid request would be its end; but the old settings hold
            return {}
        changed = await super()._update_settings(delta)
        unknown = changed.keys() - vars(self._settings).keys()
        self._warn_unhandled_updated_settings(unknown)
        if changed.keys() - unknown and self._is_streaming_tokens and self._turn_context_id:
            turn = self._turn_context_id
            await self._push_sequencer_frames(await self._aggregated_frame_sequencer.finalize(turn), turn)
            if self.audio_context_available(turn):
                await self.flush_audio(context_id=turn)
            self._turn_context_id = None
            self._turn_context_id = self.create_context_id()
        return changed

    def _classify_error(self, exception: Exception) -> ErrorCategory | None:
        if isinstance(exception, EngineBusy):
            return ErrorCategory.RATE_LIMIT
        if isinstance(exception, RequestError):
            return ErrorCategory.INVALID_REQUEST
        return ErrorCategory.SERVER


class Speech(ABC):
    """What one audio context says: its utterances one after the other, in TOKEN mode a single one."""

    def __init__(self, service: SpeechService, context_id: str):
        self._service, self._context_id = service, context_id
        self._loop = asyncio.get_running_loop()
        self._made = 0.0  # seconds of audio in the context
        self._begun = 0.0  # where in the context the utterance's audio begins
        self._rate = 0  # of that audio
        self._resample: soxr.ResampleStream | None = None
        self._silent = service._trim
        self._trimmed = 0.0
        self._reader: asyncio.Task | None = None
        self._ended = asyncio.Event()  # the text is
        self._cancelled = False
        self.failed = False
        self._keeper: asyncio.Task | None = None
        self._started: float | None = None  # loop time of the context's first audio
        self._gaps: list[tuple[float, float]] = [(0.0, 0.0)]  # from this second of audio on, so long a wait before it

    # ------------------------------------------------------------ who makes it

    @abstractmethod
    async def _open(self, text: str | None) -> None:
        """Begin an utterance, of this text or of pieces that will come."""

    @abstractmethod
    async def _push(self, text: str) -> None:
        """A piece of its text; TextEndedError if it is over, which `_audio` gives the reason of."""

    @abstractmethod
    async def _end(self) -> None:
        """Its text is complete."""

    @abstractmethod
    async def flush(self) -> None:
        """Speak what is held back."""

    @abstractmethod
    def _drop(self) -> None:
        """Cancel the utterance if it is not over; takes no time and never fails."""

    @abstractmethod
    def _audio(self) -> AsyncGenerator[TTSAudioRawFrame | ErrorFrame, None]:
        """The utterance's audio at the pipeline's rate, its words in between; behind it, an error if it was cut."""

    # ------------------------------------------------------------ an open context

    @property
    def _keepalive(self) -> float:
        return min(_KEEPALIVE, self._service._stop_frame_timeout_s / 3)

    def keep_open(self) -> None:
        """As long as the LLM writes this turn, a pause between sentences ends nothing."""
        if self._keeper is None and self._service._turn_context_id == self._context_id:
            self._keeper = self._service.create_task(self._keep_open())

    async def _keep_open(self) -> None:
        while self._service._turn_context_id == self._context_id:
            self._service._refresh_audio_context(self._context_id)
            await asyncio.sleep(self._keepalive)

    async def _next(self, items: asyncio.Queue) -> Any:
        """The next of `items`. The context is kept open meanwhile, however long it takes."""
        while True:
            try:
                return await asyncio.wait_for(items.get(), self._keepalive)
            except TimeoutError:
                self._service._refresh_audio_context(self._context_id)

    # ------------------------------------------------------------ a sentence

    async def say(self, text: str) -> AsyncGenerator[Frame, None]:
        try:
            for piece in self._service._pieces(text):
                await self._open(piece)
                async for frame in self._audio():
                    yield frame
                    if isinstance(frame, ErrorFrame):  # what would come next does not follow
                        return
        except Exception as error:
            yield self._error(error)
        finally:
            self._drop()

    # ------------------------------------------------------------ tokens

    async def push(self, text: str) -> None:
        if self.failed:
            return
        try:
            if self._reader is None:
                await self._open(None)
                self._reader = self._service.create_task(self._read())
            await self._push(text)
        except TextEndedError:
            pass  # the reader tells why it ended
        except Exception as error:
            await self._fail(error)
            if self._reader is None:
                self._reader = self._service.create_task(self._close_with_text())

    async def end_text(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        if self._reader is None or self.failed:
            await self._service._close(self._context_id)
            return
        try:
            await self._end()
        except Exception as error:
            await self._fail(error)

    async def _read(self) -> None:
        """Audio of the context's utterance as it comes; closes the context behind it."""
        try:
            async for frame in self._audio():
                await self._service.append_to_audio_context(self._context_id, frame)
        except Exception as error:
            await self._fail(error)
        await self._close_with_text()

    async def _close_with_text(self) -> None:
        """Nothing more will be heard; but more tokens of this turn must not open it again."""
        while not self._ended.is_set():
            self._service._refresh_audio_context(self._context_id)
            try:
                await asyncio.wait_for(self._ended.wait(), self._keepalive)
            except TimeoutError:
                continue
        await self._service._close(self._context_id)

    async def _fail(self, error: Exception) -> None:
        if not self.failed and not self._cancelled:
            self.failed = True
            await self._service.append_to_audio_context(self._context_id, self._error(error))

    # ------------------------------------------------------------ both

    def cancel(self) -> None:
        """Takes no time and never fails."""
        self._cancelled = True
        self._drop()
        for task in (self._reader, self._keeper):
            if task and not task.done() and task is not asyncio.current_task():
                task.cancel()

    def _begin(self, rate: int) -> None:
        """An utterance's audio of this rate follows what the context has."""
        self._begun, self._rate, self._resample = self._made, rate, None
        if rate != self._service.sample_rate:
            self._resample = soxr.ResampleStream(rate, self._service.sample_rate, 1, "float32", _QUALITY)

    def _heard(self, samples: np.ndarray) -> TTSAudioRawFrame | None:
        """Samples as the pipeline hears them; None where nothing of them is left."""
        samples = self._trim(samples)
        if self._resample and len(samples):
            samples = self._resample.resample_chunk(samples)
        return self._frame(samples) if len(samples) else None

    def _tail(self) -> TTSAudioRawFrame | None:
        """What the resampler still holds behind the last of them."""
        tail = self._resample.resample_chunk(np.zeros(0, np.float32), last=True) if self._resample else ()
        return self._frame(tail) if len(tail) else None

    def _trim(self, samples: np.ndarray) -> np.ndarray:
        """Without the silence that a context begins with."""
        if not self._silent:
            return samples
        loud = np.flatnonzero(np.abs(samples) > _SILENCE)
        first = max(0, int(loud[0]) - int(_KEPT_SILENCE * self._rate)) if len(loud) else len(samples)
        first = min(first, max(0, int((_MOST_TRIMMED - self._trimmed) * self._rate)))
        self._trimmed += first / self._rate
        self._silent = first == len(samples)
        return samples[first:]

    def _frame(self, samples: np.ndarray) -> TTSAudioRawFrame:
        rate, now = self._service.sample_rate, self._loop.time()
        if self._started is None:
            self._started = now
        # Whoever listens has heard all there was and waits: what comes now, and its words, are so much later.
        gap = now - self._started - self._made
        if gap > self._gaps[-1][1] + _LEAST_GAP:
            self._gaps.append((self._made, gap))
        self._made += len(samples) / rate
        pcm = pcm16(samples)
        return TTSAudioRawFrame(pcm, rate, 1, context_id=self._context_id)

    async def _tell_words(self, words: list[tuple[str, float]]) -> None:
        for word, at in words:
            at += self._begun
            at += next(gap for begin, gap in reversed(self._gaps) if begin <= at + 1e-9)
            unspaced = True if is_unspaced(word) else None
            await self._service.add_word_timestamps(
                [(word, at)], self._context_id, includes_inter_frame_spaces=unspaced
            )

    def _error(self, error: Exception) -> ErrorFrame:
        self.failed = True
        category = self._service._classify_error(error)
        if isinstance(error, RequestError) and not isinstance(error, (SpeakerError, LanguageError, VoiceError)):
            category = ErrorCategory.APPLICATION  # of this text; the next one may be spoken
        return ErrorFrame(error=f"{type(error).__name__}: {error}", exception=error, category=category)
