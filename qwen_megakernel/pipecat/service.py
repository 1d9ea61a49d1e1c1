"""SpeechService: what this package's two Pipecat services share. `pipecat/local.py` has its engine in the same process,
`pipecat/remote.py` behind a socket.

This module imports no torch, because a server's client needs none.
"""

import functools
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from inspect import signature
from typing import Any, TypedDict

from loguru import logger
from pipecat.frames.frames import ErrorFrame, Frame, TextType
from pipecat.processors.metrics.frame_processor_metrics import FrameProcessorMetrics
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TextAggregationMode
from pipecat.transcriptions.language import Language
from pipecat.utils.asyncio.task_manager import BaseTaskManager
from pipecat.utils.errors import ErrorCategory
from pipecat.utils.text.base_text_filter import BaseTextFilter
from pipecat.utils.tracing.service_decorators import traced_tts
from pipecat.utils.types import NOT_GIVEN, is_given

from qwen_megakernel.errors import EngineBusy, LanguageError, RequestError, SpeakerError, SpeechCutError, VoiceError
from qwen_megakernel.pipecat.audio_context import AudioContext
from qwen_megakernel.pipecat.settings import SpeechSettings
from qwen_megakernel.pipecat.turns import BARE, TurnService
from qwen_megakernel.speech.options import RequestOptions
from spoken_text.languages import NAMES, primary_subtag


class ServiceArguments(TypedDict, total=False):
    """Arguments of Pipecat's `TTSService` that are the caller's to choose."""

    text_aggregation_mode: TextAggregationMode | None
    """SENTENCE: speak whole sentences; TOKEN: speak while the LLM writes. Default: SENTENCE."""
    sample_rate: int | None
    """Of the sound, in Hz; default: the pipeline's."""
    text_transforms: list[tuple[TextType | str, Callable[[str, TextType | str], Awaitable[str]]]] | None
    """What changes a text before it is spoken, with the type of text that it is for; "*" is every type."""
    text_filters: Sequence[BaseTextFilter] | None
    """Filters before the transforms; Pipecat 1.14 deprecates them."""
    skip_text_types: list[str] | None
    """Types of text that are not spoken."""
    append_trailing_space: bool
    """Add a blank to each sentence; default: False."""
    reuse_context_id_within_turn: bool
    """A turn is one audio context; default: True, which TOKEN mode needs."""
    stop_frame_timeout_s: float
    """Seconds without sound after which Pipecat asks whether more will come; default: 3."""
    push_silence_after_stop: bool
    """Send silence behind speech; default: False."""
    silence_time_s: float
    """Seconds of that silence; default: 2."""
    pause_frame_processing: bool
    """Hold frames back while a turn is spoken; default: False."""
    max_consecutive_zero_audio_contexts: int
    """Contexts without sound in a row after which Pipecat stops using the service; 0: never. Default: 3."""
    transport_destination: str | None
    """Where the transport sends the sound."""
    name: str | None
    """The service's name in the log; default: its class and a number."""
    enable_direct_mode: bool
    """Process frames without queues; default: False."""
    metrics: FrameProcessorMetrics | None
    """What collects metrics; default: Pipecat's own."""
    task_manager: BaseTaskManager | None
    """Of tasks before the pipeline begins; default: the pipeline's."""
    aggregate_sentences: bool | None
    """Deprecated: use text_aggregation_mode."""
    skip_aggregator_types: list[str] | None
    """Deprecated: use skip_text_types."""
    pause_watchdog_timeout_s: float | None
    """Deprecated: it does nothing."""


@functools.cache
def _arguments_of(cls: type) -> set[str]:
    """The constructor arguments of a class and its bases. Cached, because this blocks the event loop for 0.2 ms."""
    return {
        name
        for base in cls.__mro__
        if "__init__" in vars(base)
        for name in signature(vars(base)["__init__"]).parameters
    }


class SpeechService(TurnService):
    """A text-to-speech service: settings, and an `AudioContext` for each of Pipecat's audio contexts."""

    Settings = SpeechSettings
    _settings: SpeechSettings
    _entrance: str  # in the table of options

    def __init__(self, *, trim_leading_silence: bool, settings: SpeechSettings, **kwargs):
        if unknown := kwargs.keys() - _arguments_of(type(self)):  # Pipecat 1.14 would ignore them
            fields = ", ".join(name for name in vars(settings) if name != "extra")
            raise TypeError(
                f"{type(self).__name__} has no argument {', '.join(sorted(unknown))}; what may change while it runs "
                f"goes into settings={type(self).__name__}.Settings(...): {fields}"
            )
        super().__init__(
            push_start_frame=True, push_stop_frames=True, push_text_frames=False, settings=settings, **kwargs
        )
        self.trims_silence = trim_leading_silence

    def can_generate_metrics(self) -> bool:
        """TTFB, TTFA, usage and, for sentences, processing."""
        return True

    @property
    def supports_processing_metrics(self) -> bool:
        """True in SENTENCE mode, because a sentence is generated within `run_tts`."""
        return not self.in_tokens

    def language_to_service_language(self, language: Language) -> str | None:
        """The published checkpoints' name of a language, or its code if they do not have it."""
        code = primary_subtag(language)
        return NAMES.get(code, code)

    # ------------------------------------------------------------ what differs between services

    @abstractmethod
    def _is_model(self, model: str) -> bool:
        """Is this a name of the service's model?"""

    @abstractmethod
    def _check(self, settings: SpeechSettings) -> None:
        """Raises RequestError if the service cannot speak with these settings."""

    # ------------------------------------------------------------ speaking

    @traced_tts
    async def run_tts(self, text: str, context_id: str) -> AsyncGenerator[Frame | None, None]:
        """Speak a sentence, or take a token into the context's utterance. Yields audio frames at the pipeline's rate,
        and an error frame for what cannot be spoken; in TOKEN mode nothing."""
        turn = self._turn_context_id or BARE
        goes_on = turn in self._readings
        if not goes_on:
            self._readings[turn] = self._new_reading()
        context = self._contexts.get(context_id)
        if context is None:
            context = self._contexts[context_id] = AudioContext(self, context_id, self._readings[turn])
        if self.in_tokens:
            await context.push(text, apart=self._apart)
            yield None
            return
        await self.start_tts_usage_metrics(text)
        async for frame in context.say(self._text_aggregator.gap + text if goes_on else text):
            yield frame
        if context_id != self._turn_context_id:  # no turn will close it
            await self.close_context(context_id)

    # ------------------------------------------------------------ settings

    async def _update_settings(self, delta: TTSSettings) -> dict[str, Any]:
        """Check a change as a whole, then apply it. What was written so far keeps the old settings: whole sentences are
        spoken first, and in TOKEN mode a new utterance begins. A sentence that is not finished gets the new ones."""
        wanted = self._settings.copy()
        if is_given(delta.model) and (delta.model is None or self._is_model(delta.model)):
            delta.model = NOT_GIVEN
        try:
            if is_given(delta.model):
                raise RequestError(
                    f"a service keeps its model, {self._settings.model!r}, got {delta.model!r}: make another service "
                    "for another model"
                )
            for name in vars(wanted):
                given = getattr(delta, name, NOT_GIVEN)
                if name != "extra" and is_given(given):
                    setattr(wanted, name, given)
            self._check(wanted)
        except RequestError as error:
            refused = ErrorCategory.APPLICATION  # the old settings hold: an invalid request would end the service's use
            await self.push_error(f"settings not changed: {error}", exception=error, category=refused)
            return {}
        await self._speak_whole_text()
        changed = await super()._update_settings(delta)
        unknown = changed.keys() - vars(self._settings).keys()
        if unknown:
            logger.warning(f"{self}: there are no settings {', '.join(sorted(unknown))}")
        if changed.keys() - unknown and self.in_tokens:
            await self._end_bare_text()
            if self._turn_context_id:
                await self._split_turn()
        return changed

    def _options(self, settings: SpeechSettings) -> RequestOptions:
        """Raises RequestError for values of another type or out of range, or what this service's mode cannot use."""
        return settings.options(self._entrance, in_tokens=self.in_tokens)

    # ------------------------------------------------------------ errors

    def error_frame(self, context_id: str, error: Exception) -> ErrorFrame:
        """See `Host`."""
        if not self.in_tokens:  # nothing may count this sentence's words as spoken
            slots = reversed(self._aggregated_frame_sequencer._slots)
            mine = (slot for slot in slots if slot.spoken and slot.context_id == context_id)
            if latest := next(mine, None):
                latest.complete = True
        category = self._classify_error(error)
        of_text = isinstance(error, RequestError) and not isinstance(error, (SpeakerError, LanguageError, VoiceError))
        if of_text or isinstance(error, SpeechCutError):
            category = ErrorCategory.APPLICATION  # only this text failed; the next may be spoken
        return ErrorFrame(error=f"{type(error).__name__}: {error}", exception=error, category=category)

    def _classify_error(self, exception: Exception) -> ErrorCategory | None:
        if isinstance(exception, EngineBusy):
            return ErrorCategory.RATE_LIMIT
        if isinstance(exception, RequestError):
            return ErrorCategory.INVALID_REQUEST
        return ErrorCategory.SERVER
