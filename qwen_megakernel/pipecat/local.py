"""MegakernelTTSService: Qwen3-TTS in a Pipecat pipeline, with the engine in the same process.

    LLM text ─► run_tts ─► SpeechSession ─► engine (its own thread) ─► chunks ─► audio context ─► transport

No code here computes the model. The session builds prompts in the service's own thread, so that they do not block the
event loop. In SENTENCE mode each sentence is a session. In TOKEN mode a context is one, spoken while its tokens come.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from loguru import logger
from pipecat.frames.frames import EndFrame, ErrorFrame, MetricsFrame
from pipecat.processors.frame_processor import FrameProcessorSetup
from pipecat.services.settings import TTSSettings
from pipecat.utils.types import NOT_GIVEN, NotGiven, assert_given, is_given

from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.load import find_cached
from qwen_megakernel.engine.options import EngineArguments, EngineOptions
from qwen_megakernel.errors import CheckpointError, EngineClosed, RequestError, SpeakerError, VoiceError
from qwen_megakernel.model.conditioning import AUTO
from qwen_megakernel.model.voice import Voice
from qwen_megakernel.pipecat.audio_context import Opening, SpeechMetricsData
from qwen_megakernel.pipecat.service import ServiceArguments, SpeechService
from qwen_megakernel.pipecat.settings import SpeechSettings, check_names
from qwen_megakernel.speech import shared as shared_engine
from qwen_megakernel.speech.engine import TTSEngine
from qwen_megakernel.speech.events import Ended
from qwen_megakernel.speech.request import SpeechRequest, foreign_hint
from qwen_megakernel.speech.session import SpeechSession
from spoken_text.finder import Conversation
from spoken_text.front_end import Reading
from spoken_text.lexicon import Lexicon

DEFAULT_MODEL = "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice"


@dataclass
class MegakernelTTSSettings(SpeechSettings):
    """Settings that may change while a pipeline runs: those of `SpeechSettings`, and saved voices.

    Parameters:
        model: Folder, hub id or "demo". Fixed once the service is made.
    """

    voice: str | Voice | None | NotGiven = NOT_GIVEN  # type: ignore[assignment]  # Pipecat knows no saved voices
    """A speaker of the checkpoint (CustomVoice), or a `Voice` (Base; with `allow_foreign_voice` among the engine's
    options CustomVoice too). None: the first speaker."""


class MegakernelTTSService(SpeechService):
    """Streams Qwen3-TTS, on a GPU through the megakernel, anywhere through PyTorch.

    Pipelines of one process that name the same model share one engine. Every utterance has its own slot, and an
    interruption cancels only its own utterance.
    """

    Settings = MegakernelTTSSettings
    _settings: MegakernelTTSSettings
    _entrance = "pipecat"

    def __init__(
        self,
        *,
        engine: TTSEngine | None = None,
        model: str = DEFAULT_MODEL,
        engine_options: EngineArguments | None = None,
        chunk_frames: int | Sequence[int] | None = None,
        lexicon: Lexicon | None = None,
        trim_leading_silence: bool = True,
        settings: MegakernelTTSSettings | None = None,
        **kwargs: Unpack[ServiceArguments],
    ):
        """Make the service without loading anything. `setup` attaches to the engine, which `warmup` should have loaded.

        Args:
            engine: The caller's own, which the caller closes. None: the process's engine for `model`.
            model: Folder in the published layout, hub id, or "demo".
            engine_options: Fields of `EngineOptions`, such as device or max_streams. Services with the same model and
                options share an engine.
            chunk_frames: The setting of this name, unless `settings` have it.
            lexicon: The same.
            trim_leading_silence: Cut silence in front of a turn's first word.
            settings: What may change while the pipeline runs.
            **kwargs: For `TTSService`.

        Raises:
            RequestError: an engine comes with a model or options to load another. Or the model does not have the voice
                or language (the message lists the known ones), or a sampling value or chunk size is out of range. If
                the model is not on this machine yet, `setup` checks.
            TypeError: an argument that neither this service nor `TTSService` has.
        """
        if engine and (engine_options or model not in (DEFAULT_MODEL, engine.model)):
            raise RequestError(
                f"the engine is loaded already, with {engine.model!r}: leave model and engine_options out, or leave "
                "engine out"
            )
        store = self.Settings.unset(engine.model if engine else str(model))
        if settings is not None:
            named = settings.model if is_given(settings.model) else None
            if named is not None and not _same_model(named, store.model):
                if engine or model != DEFAULT_MODEL:
                    raise RequestError(
                        f"settings name the model {named!r}, but the service has {store.model!r}: name one model only"
                    )
                store.model = model = str(named)
            resolved = store.model
            store.apply_update(settings)
            store.model = resolved
        store.chunk_frames = chunk_frames if store.chunk_frames is None else store.chunk_frames
        store.lexicon = lexicon if store.lexicon is None else store.lexicon
        super().__init__(trim_leading_silence=trim_leading_silence, settings=store, **kwargs)
        self._engine = engine
        self._given_engine = engine
        self._model = str(model)
        self._engine_options = EngineArguments(**(engine_options or {}))
        self._conversation = Conversation()
        self._executor: ThreadPoolExecutor | None = None  # while a pipeline runs
        self._check(self._settings)

    @classmethod
    async def warmup(
        cls, model: str = DEFAULT_MODEL, options: EngineOptions | None = None, **engine_options: Unpack[EngineArguments]
    ) -> TTSEngine:
        """Load the process's engine for `model` and speak a word with it. Call this before any pipeline starts: a
        pipeline's set-up may take 20 seconds at most. The engine stays loaded until `shutdown(engine)`.

        Args:
            model: As for the service.
            options: The engine's; None: `EngineOptions()`.
            **engine_options: As the service's `engine_options`.
        """
        return await shared_engine.acquire(model, options, **engine_options)

    @classmethod
    async def shutdown(cls, engine: TTSEngine) -> None:
        """Release the engine that `warmup` returned. It closes once no service uses it."""
        await shared_engine.release(engine)

    # ------------------------------------------------------------ life

    async def setup(self, setup: FrameProcessorSetup):
        """Attach to the engine. If it is not loaded yet, load it now and log that."""
        await super().setup(setup)
        self._engine = self._engine or self._given_engine  # an earlier pipeline has let go of it
        # Only one thread, so that the pieces of a text stay in order.
        self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix="qwen_megakernel submit")
        if self._engine is None:
            logger.info(f"{self}: attaching to the engine of {self._model}")
            self._engine = await shared_engine.acquire(self._model, **self._engine_options)
            await self.set_usable(True)  # the engine of an earlier pipeline may have died
            self._check(self._settings)
        await self._load_front_end()

    async def _load_front_end(self) -> None:
        """What finding a text's language needs, if the settings ask for it, before a text waits for it."""
        if self._engine and self._executor:
            load = self._request(self._engine).front_end.load
            await asyncio.get_running_loop().run_in_executor(self._executor, load)

    async def stop(self, frame: EndFrame):
        """Speak everything that was asked for, then release the engine."""
        await super().stop(frame)
        await self._release_engine()

    async def cleanup(self):
        """Release the engine."""
        await super().cleanup()
        await self._release_engine()

    async def _release_engine(self) -> None:
        self._cancel_all()
        executor, self._executor = self._executor, None
        if executor:
            executor.shutdown(wait=False)
        engine, self._engine = self._engine, None
        if engine and self._given_engine is None:
            await shared_engine.release(engine)

    async def push_error_frame(self, error: ErrorFrame, force_treat_as_permanent: bool = False):
        """Once its engine is closed or dead, the service cannot speak again in this pipeline."""
        await super().push_error_frame(error, force_treat_as_permanent or isinstance(error.exception, EngineClosed))

    # ------------------------------------------------------------ speaking

    async def open_session(self, context_id: str, reading: Reading, text: str, *, complete: bool) -> Opening:
        engine = self._engine
        if engine is None or self._executor is None:
            raise EngineClosed("the service was cleaned up")
        request = self._request(engine)
        session = SpeechSession(
            engine,
            self._executor,
            request if complete else request.in_pieces(),
            reading=reading,
            rate=engine.rates.of(request.conditioning),
        )
        begin = partial(session.begin, text) if complete else partial(session.begin, None, text)
        return Opening(session, begin, engine.sample_rate, _CPU_FIRST_S if engine.threads else 0.0)

    async def tell(self, ended: Ended) -> None:
        audio = ended.audio
        assert audio
        queue = audio.timings.queue
        logger.debug(
            f"{self}: {audio.duration_s:.2f} s, {audio.finish_reason}, seed {audio.seed}; "
            f"queue {_ms(queue)}, first chunk {_ms(audio.ttfc_s)}, RTF {audio.rtf:.3f}, least lead {_ms(audio.lead_s)}"
        )
        if audio.ttfc_s is not None and self.metrics_enabled:
            taken = {"audio_s": audio.duration_s, "compute_s": audio.compute_s, "ttfc_s": audio.ttfc_s}
            data = SpeechMetricsData(processor=self.name, model=assert_given(self._settings.model), **taken)
            await self.push_frame(MetricsFrame(data=[data]))

    def _new_reading(self) -> Reading:
        return Reading()

    # ------------------------------------------------------------ settings

    async def _update_settings(self, delta: TTSSettings) -> dict[str, Any]:
        changed = await super()._update_settings(delta)
        if changed:
            await self._load_front_end()
        return changed

    def _is_model(self, model: str) -> bool:
        return _same_model(model, self._settings.model)

    def _check(self, settings: MegakernelTTSSettings) -> None:
        """If the model is not on this machine yet, only settings that no model takes are refused."""
        engine = self._engine or self._given_engine
        known = (engine.variant, engine.speakers, engine.languages) if engine else _known_of(self._model)
        variant, speakers, languages = known or (None, None, None)
        voice = settings.voice
        foreign = isinstance(voice, Voice) and variant != "base"
        # A loaded engine checks this itself.
        if foreign and variant and engine is None and not self._engine_options.get("allow_foreign_voice"):
            raise VoiceError(f"a saved voice needs a Base checkpoint; this one is {variant}{foreign_hint(variant)}")
        if voice is not None and not isinstance(voice, (str, Voice)):
            raise SpeakerError(f"voice must be a speaker's name or a Voice, got {type(voice).__name__}")
        unseen = "none yet, because the model is not on this machine"
        no_voices = f"none, a {variant} checkpoint has no named speakers" if variant else unseen
        check_names(settings, speakers, languages, unseen=unseen, no_voices=no_voices)
        if voice is None and variant == "base":
            raise SpeakerError("a Base checkpoint needs a voice: settings=Settings(voice=engine.create_voice(...))")
        self._options(settings)
        if engine:
            self._request(engine, settings)

    def _request(self, engine: TTSEngine, settings: MegakernelTTSSettings | None = None) -> SpeechRequest:
        """How the next text is spoken."""
        options = self._options(settings or self._settings)
        voice = options.get("voice")
        if isinstance(voice, str):
            options = {**options, "voice": None, "speaker": voice}
        options["lenient"] = True
        return engine.request(**options).in_conversation(self._conversation)


_CPU_FIRST_S = 0.1
"""Least first audio on a CPU, in seconds. Trimming may leave 10 ms of the first chunk. The next one, of two frames,
takes some 40 ms, so the listener would hear a gap."""


def _known_of(model: str) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
    """Variant, speakers and languages of a model on this machine; None if it is not here."""
    folder = find_cached(model)
    if folder is None:
        return None
    config = ModelConfig.from_folder(folder)
    return config.variant, tuple(config.talker.speakers), (AUTO, *config.talker.named_languages)


def _same_model(one: object, other: object) -> bool:
    if str(one) == str(other):
        return True
    try:
        folder = find_cached(str(one))
        return folder is not None and folder == find_cached(str(other))
    except CheckpointError:  # no model at all
        return False


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
