"""MegakernelTTSService: Qwen3-TTS in a Pipecat pipeline.

    LLM text ─► run_tts ─► engine (its own thread) ─► chunks ─► audio context ─► transport

Nothing here touches the model. Prompts are built in a thread of the service, because they compute; chunks come from
the engine's thread through `call_soon_threadsafe`. Sentences are generated one by one (SENTENCE mode); tokens all go
into one utterance per context, which speaks while they come (TOKEN mode).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import soxr
from loguru import logger
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
from pipecat.processors.frame_processor import FrameDirection, FrameProcessorSetup
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TTSService
from pipecat.transcriptions.language import Language, resolve_language
from pipecat.utils.errors import ErrorCategory
from pipecat.utils.tracing.service_decorators import traced_tts
from pipecat.utils.types import NOT_GIVEN, NotGiven, is_given

from qwen_megakernel import shared_engine
from qwen_megakernel.checkpoint import find_cached
from qwen_megakernel.config import ModelConfig, SamplingParams
from qwen_megakernel.engine import TTSEngine
from qwen_megakernel.errors import (
    CheckpointError,
    EngineBusy,
    EngineClosed,
    LanguageError,
    RequestError,
    SpeakerError,
    TextEndedError,
    TextTooLongError,
    VoiceError,
)
from qwen_megakernel.request import chunk_schedule
from qwen_megakernel.stream import Chunk
from qwen_megakernel.text import split_sentences
from qwen_megakernel.utterance import Utterance
from qwen_megakernel.voice import Voice
from qwen_megakernel.word_times import SpeechRate, WordTimes, is_unspaced

DEFAULT_MODEL = "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice"

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
class MegakernelTTSSettings(TTSSettings):
    """Settings that may change while a pipeline runs; a change applies to the next sentence (SENTENCE mode) or opens a
    new utterance (TOKEN mode).

    Parameters:
        model: Folder, hub id or "demo". Fixed once the service is made.
        voice: A speaker of the checkpoint (CustomVoice), or a `Voice` (Base). None: the first speaker.
        language: `Language`, a code such as "de-DE", or a name such as "german". None: auto.
        instruct: How to say it, where the checkpoint takes it.
        temperature: Of both kinds of codes; None: the checkpoint's.
        top_k: The same.
        top_p: The same.
        repetition_penalty: None: the checkpoint's.
        seed: None: a fresh one for every utterance.
    """

    voice: str | Voice | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    instruct: str | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    temperature: float | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    top_k: int | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    top_p: float | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    repetition_penalty: float | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    seed: int | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)


class _FlushFrame(ControlFrame):
    """To the service from itself: stays in order with the text, which a system frame overtakes."""


class MegakernelTTSService(TTSService):
    """Streams Qwen3-TTS, on a GPU through the megakernel, anywhere through PyTorch.

    Pipelines of one process that name the same model share one engine; every utterance has a slot of its own in it, and
    an interruption cancels that utterance alone.
    """

    Settings = MegakernelTTSSettings
    _settings: Settings

    def __init__(
        self,
        *,
        engine: TTSEngine | None = None,
        model: str = DEFAULT_MODEL,
        engine_options: Mapping[str, Any] | None = None,
        chunk_frames: int | tuple[int, ...] | None = None,
        trim_leading_silence: bool = True,
        settings: Settings | None = None,
        **kwargs,
    ):
        """Make the service. Nothing is loaded: `setup` attaches to the engine, which `warmup` should have loaded.

        Args:
            engine: One of the caller's own, which it also closes. None: the process's engine for `model`.
            model: Folder in the published layout, hub id, or "demo".
            engine_options: Further arguments of `TTSEngine.load`, such as device or max_streams. Services share an
                engine where model and options are the same.
            chunk_frames: Frames of 80 ms per chunk; None: 1, 2, 4, 8, 8, ...
            trim_leading_silence: Cut silence in front of a turn's first word.
            settings: What may change while the pipeline runs.
            **kwargs: For `TTSService`.

        Raises:
            RequestError: a voice or language that the model does not have (the known ones are listed), a sampling
                value or chunk size out of range. Where the model is not on this machine yet, `setup` finds out.
        """
        store = self.Settings(
            model=engine.model if engine else str(model),
            voice=None,
            language=None,
            instruct=None,
            temperature=None,
            top_k=None,
            top_p=None,
            repetition_penalty=None,
            seed=None,
        )
        if settings is not None:
            named = settings.model if is_given(settings.model) else None
            if named is not None and not _same_model(named, store.model):
                if engine or model != DEFAULT_MODEL:
                    raise RequestError(f"settings name the model {named!r}, the service {store.model!r}")
                store.model = model = str(named)
            resolved = store.model
            store.apply_update(settings)
            store.model = resolved
        super().__init__(push_start_frame=True, push_stop_frames=True, push_text_frames=False, settings=store, **kwargs)
        self._engine, self._own_engine = engine, engine is None
        self._model, self._engine_options = str(model), dict(engine_options or {})
        self._chunk_frames, self._trim = chunk_schedule(chunk_frames), trim_leading_silence
        self._rate = SpeechRate()
        self._speeches: dict[str, _Speech] = {}  # by context
        # One thread, so that the pieces of a text stay in order.
        self._submitter = ThreadPoolExecutor(1, thread_name_prefix="qwen_megakernel submit")
        known = (engine.variant, engine.speakers, engine.languages) if engine else _known_of(self._model)
        self._check_settings(self._settings, *(known or (None, None, None)))
        self._sampling()
        if engine:
            engine.check(**self._request())

    @classmethod
    async def warmup(cls, model: str = DEFAULT_MODEL, **engine_options) -> TTSEngine:
        """Load the process's engine for `model` and speak a word with it, before any pipeline starts: a pipeline's
        set-up may take 20 seconds at most. It stays loaded until `shutdown(engine)`.

        Args:
            model: As for the service.
            **engine_options: As the service's `engine_options`.
        """
        return await shared_engine.acquire(model, **engine_options)

    @classmethod
    async def shutdown(cls, engine: TTSEngine) -> None:
        """Let go of what `warmup` returned; the engine closes when no service uses it any more."""
        await shared_engine.release(engine)

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

    # ------------------------------------------------------------ life

    async def setup(self, setup: FrameProcessorSetup):
        """Attach to the engine; loads it, with a log line, if nobody has."""
        await super().setup(setup)
        if self._engine is None:
            logger.info(f"{self}: attaching to the engine of {self._model}")
            self._engine = await shared_engine.acquire(self._model, **self._engine_options)
            self._check_settings(self._settings, self._engine.variant, self._engine.speakers, self._engine.languages)
            self._engine.check(**self._request())

    async def stop(self, frame: EndFrame):
        """Everything that was asked for is spoken first; text that was not ended is complete now."""
        if self._is_streaming_tokens:
            for speech in list(self._speeches.values()):
                await speech.end_text()
        await super().stop(frame)
        await self._teardown()

    async def cancel(self, frame: CancelFrame):
        """Stop at once."""
        self._cancel_all()
        await super().cancel(frame)

    async def cleanup(self):
        """Let go of the engine."""
        await super().cleanup()
        await self._teardown()

    async def _teardown(self) -> None:
        self._cancel_all()
        self._submitter.shutdown(wait=False)
        engine, self._engine = self._engine, None
        if engine and self._own_engine:
            await shared_engine.release(engine)

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
            speech = self._speeches[context_id] = _Speech(self, context_id)
        if self._is_streaming_tokens:
            await speech.push(text)
            yield None
            return
        speech.keep_open()
        await self.start_tts_usage_metrics(text)
        for piece in await self._pieces(text):
            async for frame in speech.say(piece):
                yield frame

    async def _pieces(self, text: str) -> list[str]:
        """The text, cut at sentences where it is longer than a slot can hold at a guess (a frame a letter at most)."""
        room = self._engine._decoder.max_positions // 2 if self._engine else len(text)
        return [text] if len(text) <= room else split_sentences(text, room)

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
            for speech in self._speeches.values():
                speech.flush()
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
        """Barge-in: this context's utterance stops before its next frame, no other's.

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
        if is_given(delta.model) and (delta.model is None or _same_model(delta.model, self._settings.model)):
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
            if self._engine:
                self._check_settings(wanted, self._engine.variant, self._engine.speakers, self._engine.languages)
                self._engine.check(**self._request(wanted))
            self._sampling(wanted)
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

    @staticmethod
    def _check_settings(
        settings: Settings,
        variant: str | None,
        speakers: tuple[str, ...] | None,
        languages: tuple[str, ...] | None,
    ) -> None:
        """None: of a model that is not on this machine yet, so that only what can never be is refused."""
        voice, language, instruct = settings.voice, settings.language, settings.instruct
        if isinstance(voice, Voice) and variant not in (None, "base"):
            raise VoiceError(f"a saved voice needs a Base checkpoint; this one is {variant}")
        if voice is not None and not isinstance(voice, (str, Voice)):
            raise SpeakerError(f"voice must be a speaker's name or a Voice, got {type(voice).__name__}")
        if language is not None and not isinstance(language, str):
            raise LanguageError(f"language must be a string or a Language, got {type(language).__name__}")
        if instruct is not None and not isinstance(instruct, str):
            raise RequestError(f"instruct must be a string, got {type(instruct).__name__}")
        unseen = "what the model has, which is not on this machine yet"
        if isinstance(voice, str) and (not voice.strip() or speakers is not None and voice.lower() not in speakers):
            none = f"none, a {variant} checkpoint has no named speakers" if variant else unseen
            raise SpeakerError(f"unknown voice {voice!r}; known: {', '.join(speakers or ()) or none}")
        if voice is None and variant == "base":
            raise SpeakerError("a Base checkpoint needs a voice: settings=Settings(voice=engine.create_voice(...))")
        if language is not None and (
            not language.strip() or languages is not None and language.lower() not in languages
        ):
            raise LanguageError(f"unknown language {str(language)!r}; known: {', '.join(languages or ()) or unseen}")

    def _sampling(self, settings: Settings | None = None) -> SamplingParams:
        s = settings or self._settings
        return SamplingParams(
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            repetition_penalty=s.repetition_penalty,
            subtalker_temperature=s.temperature,
            subtalker_top_k=s.top_k,
            subtalker_top_p=s.top_p,
            seed=s.seed,
        )

    def _request(self, settings: Settings | None = None) -> dict[str, Any]:
        """How the next utterance is to be said."""
        settings = settings or self._settings
        return {
            "speaker": None if isinstance(settings.voice, Voice) else settings.voice,
            "voice": settings.voice if isinstance(settings.voice, Voice) else None,
            "language": settings.language,
            "instruct": settings.instruct,
            "sampling": self._sampling(settings),
            "chunk_frames": self._chunk_frames,
        }

    def _classify_error(self, exception: Exception) -> ErrorCategory | None:
        if isinstance(exception, EngineBusy):
            return ErrorCategory.RATE_LIMIT
        if isinstance(exception, RequestError):
            return ErrorCategory.INVALID_REQUEST
        return ErrorCategory.SERVER


class _Speech:
    """What one audio context says: its utterances one after the other, in TOKEN mode a single one."""

    def __init__(self, service: MegakernelTTSService, context_id: str):
        self._service, self._context_id = service, context_id
        self._loop = asyncio.get_running_loop()
        self._utterance: Utterance | None = None
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._made = 0.0  # seconds of audio in the context
        self._words = WordTimes(service._rate)
        self._begun = 0.0  # where in the context the utterance's audio begins
        self._silent = service._trim
        self._trimmed = 0.0
        self._reader: asyncio.Task | None = None
        self._ended = asyncio.Event()  # the text is
        self._cancelled = False
        self.failed = False
        self._keeper: asyncio.Task | None = None
        self._started: float | None = None  # loop time of the context's first audio
        self._gaps: list[tuple[float, float]] = [(0.0, 0.0)]  # from this second of audio on, so long a wait before it

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

    # ------------------------------------------------------------ a sentence

    async def say(self, text: str) -> AsyncGenerator[Frame, None]:
        self._words = WordTimes(self._service._rate)
        self._words.add(text)
        try:
            await self._open(text)
            async for frame in self._audio():
                yield frame
        except asyncio.CancelledError:
            raise
        except Exception as error:
            yield self._error(error)
        finally:
            self._drop()

    # ------------------------------------------------------------ tokens

    async def push(self, text: str) -> None:
        if self.failed:
            return
        self._words.add(text)
        try:
            if self._utterance is None:
                await self._open(None)
                self._reader = self._service.create_task(self._read())
            await self._run(lambda: self._utterance.push_text(text))
        except TextEndedError:
            pass  # the reader tells why it ended
        except Exception as error:
            await self._fail(error)
            if self._reader is None:
                self._reader = self._service.create_task(self._close_with_text())

    def flush(self) -> None:
        if self._utterance and not self._utterance.done and not self._ended.is_set():
            try:
                self._service._submitter.submit(_quietly, self._utterance.flush)
            except RuntimeError as error:  # the service was cleaned up
                logger.debug(f"flush came too late: {error}")

    async def end_text(self) -> None:
        self._ended.set()
        if self._utterance is None or self.failed:
            await self._service._close(self._context_id)
            return
        try:
            await self._run(self._utterance.end_text)
        except Exception as error:
            await self._fail(error)

    async def _read(self) -> None:
        """Audio of the context's utterance as it comes; closes the context behind it."""
        try:
            async for frame in self._audio():
                await self._service.append_to_audio_context(self._context_id, frame)
        except asyncio.CancelledError:
            raise
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

    def _drop(self) -> None:
        if self._utterance and not self._utterance.done:
            self._utterance.cancel()

    async def _run(self, job: Callable[[], Any]) -> Any:
        return await self._loop.run_in_executor(self._service._submitter, job)

    async def _open(self, text: str | None) -> None:
        """Begin an utterance. One that is interrupted meanwhile is cancelled by whoever made it."""
        engine, request = self._service._engine, self._service._request()
        if engine is None:
            raise EngineClosed("the service was cleaned up")
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()

        def tell(chunk: Chunk | None) -> None:
            try:
                self._loop.call_soon_threadsafe(chunks.put_nowait, chunk)
            except RuntimeError:  # the loop is closed: nobody listens any more
                self.cancel()

        def submit() -> None:
            utterance = engine.submit(text, tell, on_end=lambda: tell(None), **request)
            self._utterance = utterance
            if self._cancelled:
                utterance.cancel()

        self._chunks, self._begun = chunks, self._made
        try:
            await self._run(submit)
        except asyncio.CancelledError:
            self._cancelled = True
            self._drop()
            raise

    async def _audio(self) -> AsyncGenerator[TTSAudioRawFrame | ErrorFrame, None]:
        """The utterance's audio at the pipeline's rate, its words in between; behind it, an error if it was cut."""
        service, utterance = self._service, self._utterance
        rate, resample = service.sample_rate, None
        if rate != service._engine.sample_rate:
            resample = soxr.ResampleStream(service._engine.sample_rate, rate, 1, "float32", _QUALITY)
        while True:
            chunk = await self._next()
            if chunk is None:
                break
            samples = self._trim(chunk.samples, chunk.sample_rate)
            if resample and len(samples):
                samples = resample.resample_chunk(samples)
            if len(samples):
                yield self._frame(samples, rate)
                await self._tell_words(self._words.due(self._made - self._begun))
        audio = utterance.result()
        tail = resample.resample_chunk(np.zeros(0, np.float32), last=True) if resample else ()
        if len(tail):
            yield self._frame(tail, rate)
        if audio.finish_reason == "length":  # what is left of the text was not spoken: it is no part of the context
            yield self._error(TextTooLongError(f"speech was cut after {audio.duration_s:.1f} s: its slot is full"))
        else:
            await self._tell_words(self._words.finish(self._made - self._begun))
        queue = audio.timings.queue
        logger.info(
            f"{service}: {audio.duration_s:.2f} s, {audio.finish_reason}, seed {audio.seed}; "
            f"queue {_ms(queue)}, first chunk {_ms(audio.ttfc_s)}, RTF {audio.rtf:.3f}, least lead {_ms(audio.lead_s)}"
        )

    async def _next(self) -> Chunk | None:
        """The next chunk, None behind the last. The context is kept open meanwhile, however long it takes."""
        while True:
            try:
                return await asyncio.wait_for(self._chunks.get(), self._keepalive)
            except TimeoutError:
                self._service._refresh_audio_context(self._context_id)

    def _trim(self, samples: np.ndarray, rate: int) -> np.ndarray:
        """Without the silence that a context begins with."""
        if not self._silent:
            return samples
        loud = np.flatnonzero(np.abs(samples) > _SILENCE)
        first = max(0, int(loud[0]) - int(_KEPT_SILENCE * rate)) if len(loud) else len(samples)
        first = min(first, max(0, int((_MOST_TRIMMED - self._trimmed) * rate)))
        self._trimmed += first / rate
        self._silent = first == len(samples)
        return samples[first:]

    def _frame(self, samples: np.ndarray, rate: int) -> TTSAudioRawFrame:
        now = self._loop.time()
        if self._started is None:
            self._started = now
        # Whoever listens has heard all there was and waits: what comes now, and its words, are so much later.
        gap = now - self._started - self._made
        if gap > self._gaps[-1][1] + _LEAST_GAP:
            self._gaps.append((self._made, gap))
        self._made += len(samples) / rate
        pcm = np.rint(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()
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


def _known_of(model: str) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
    """Variant, speakers and languages of a model that is on this machine."""
    folder = find_cached(model)
    if folder is None:
        return None
    config = ModelConfig.from_folder(folder)
    languages = ("auto", *sorted(n for n in config.talker.languages if "dialect" not in n))
    return config.variant, tuple(config.talker.speakers), languages


def _same_model(one: str, other: str) -> bool:
    if str(one) == str(other):
        return True
    try:
        folder = find_cached(str(one))
        return folder is not None and folder == find_cached(str(other))
    except CheckpointError:  # no model at all
        return False


def _quietly(job: Callable[[], Any]) -> None:
    """For jobs nobody waits for: their utterance may have ended."""
    try:
        job()
    except RequestError as error:
        logger.debug(f"flush came too late: {error}")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
