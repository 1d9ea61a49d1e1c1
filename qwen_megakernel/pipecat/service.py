"""SpeechService: what this package's two Pipecat services share. `pipecat/local.py` has its engine in the same process,
`pipecat/remote.py` behind a socket.

This module imports no torch, because a server's client needs none.
"""

import functools
from abc import abstractmethod
from collections.abc import AsyncGenerator
from inspect import signature
from typing import Any

from pipecat.frames.frames import (
    CancelFrame,
    ControlFrame,
    EndFrame,
    Frame,
    FunctionCallsStartedFrame,
    TTSStoppedFrame,
    TTSTextFrame,
)
from pipecat.processors.frame_processor import FrameDirection
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TTSService
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory
from pipecat.utils.tracing.service_decorators import traced_tts
from pipecat.utils.types import NOT_GIVEN, is_given

from qwen_megakernel.checkpoint.languages import NAMES, primary_subtag
from qwen_megakernel.errors import EngineBusy, RequestError
from qwen_megakernel.pipecat.audio_context import AudioContext
from qwen_megakernel.pipecat.settings import SpeechSettings, layout_of, sampling_of, speed_of, text_options_of


class _FlushFrame(ControlFrame):
    """The service sends this to itself. Unlike a system frame it stays in order with the text."""


@functools.cache
def _arguments_of(cls: type) -> set[str]:
    """The constructor arguments of a class and its bases. Cached, because this blocks the event loop for 0.2 ms."""
    return {name for base in cls.__mro__ if "__init__" in vars(base) for name in signature(base.__init__).parameters}


class SpeechService(TTSService):
    """A text-to-speech service: settings, and an `AudioContext` for each of Pipecat's audio contexts."""

    Settings = SpeechSettings
    _settings: SpeechSettings

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
        self._trim = trim_leading_silence
        self._contexts: dict[str, AudioContext] = {}  # by id

    def can_generate_metrics(self) -> bool:
        """TTFB, TTFA, usage and, for sentences, processing."""
        return True

    @property
    def supports_processing_metrics(self) -> bool:
        """True in SENTENCE mode, because a sentence is generated within `run_tts`."""
        return not self._is_streaming_tokens

    def language_to_service_language(self, language: Language) -> str | None:
        """The published checkpoints' name of a language, or its code if they do not have it."""
        code = primary_subtag(language)
        return NAMES.get(code, code)

    # ------------------------------------------------------------ what differs between services

    @abstractmethod
    def _new_context(self, context_id: str) -> AudioContext: ...

    @abstractmethod
    def _is_model(self, model: str) -> bool:
        """Is this a name of the service's model?"""

    @abstractmethod
    def _check(self, settings: SpeechSettings) -> None:
        """Raises RequestError if the service cannot speak with these settings."""

    # ------------------------------------------------------------ life

    async def stop(self, frame: EndFrame):
        """Speak everything that was asked for. Text without an end counts as complete now."""
        if self._is_streaming_tokens:
            for context in list(self._contexts.values()):
                await context.end_text()
        await super().stop(frame)

    async def cancel(self, frame: CancelFrame):
        """Stop at once."""
        self._cancel_all()
        await super().cancel(frame)

    def _cancel_all(self) -> None:
        for context in list(self._contexts.values()):
            context.cancel()
        self._contexts.clear()

    # ------------------------------------------------------------ speaking

    @traced_tts
    async def run_tts(self, text: str, context_id: str) -> AsyncGenerator[Frame | None, None]:
        """Speak a sentence, or take a token into the context's utterance.

        Args:
            text: A sentence; in TOKEN mode a piece of text.
            context_id: The turn's context.

        Yields:
            Audio frames at the pipeline's rate, and an error frame for what cannot be spoken; in TOKEN mode nothing.
        """
        context = self._contexts.get(context_id)
        if context is None:
            context = self._contexts[context_id] = self._new_context(context_id)
        if self._is_streaming_tokens:
            await context.push(text)
            yield None
            return
        context.keep_open()
        await self.start_tts_usage_metrics(text)
        async for frame in context.say(text):
            yield frame

    async def flush_audio(self, context_id: str | None = None):
        """End the turn's text.

        Args:
            context_id: The turn's context; None: the one that plays.
        """
        context_id = context_id or self.get_active_audio_context_id()
        context = self._contexts.get(context_id)
        if context is None:  # the service was not usable, so it got no text
            await self._close(context_id)
        elif self._is_streaming_tokens:
            await context.end_text()
        elif not self._is_yielding_frames_synchronously:  # its last sentence failed, so nothing else closes it
            await self._close(context_id)

    async def process_frame(self, frame: Frame, direction: FrameDirection):
        """Before a function call, finish speaking the text so far.

        Args:
            frame: Any.
            direction: The frame's direction.
        """
        if isinstance(frame, _FlushFrame):
            for context in list(self._contexts.values()):
                await context.flush()
            return
        if isinstance(frame, FunctionCallsStartedFrame):
            await self.queue_frame(_FlushFrame(), FrameDirection.DOWNSTREAM)
        await super().process_frame(frame, direction)

    async def push_frame(self, frame: Frame, direction: FrameDirection = FrameDirection.DOWNSTREAM):
        """Mark word times as estimates.

        Args:
            frame: Any.
            direction: The frame's direction.
        """
        if isinstance(frame, TTSTextFrame):
            frame.metadata["time_is_estimated"] = True
        await super().push_frame(frame, direction)

    async def on_audio_context_interrupted(self, context_id: str):
        """Barge-in: stop the utterance of this context and no other.

        Args:
            context_id: The context that was dropped.
        """
        context = self._contexts.pop(context_id, None)
        if context:
            context.cancel()
        await super().on_audio_context_interrupted(context_id)

    async def on_audio_context_completed(self, context_id: str):
        """Forget a context that was played to its end.

        Args:
            context_id: That context.
        """
        context = self._contexts.pop(context_id, None)
        if context:
            context.cancel()
        await super().on_audio_context_completed(context_id)

    async def _record_context_audio_outcome(self, context_id: str, received_audio: bool):
        """Do not count a silent context against the service if its error was reported."""
        context = self._contexts.get(context_id)
        if received_audio or context is None or not context.failed:
            await super()._record_context_audio_outcome(context_id, received_audio)

    async def _close(self, context_id: str | None) -> None:
        if context_id and self.audio_context_available(context_id):
            await self.append_to_audio_context(context_id, TTSStoppedFrame(context_id=context_id))
            await self.remove_audio_context(context_id)

    # ------------------------------------------------------------ settings

    async def _update_settings(self, delta: TTSSettings) -> dict[str, Any]:
        """Check a change as a whole, then apply it. In TOKEN mode it opens a new utterance."""
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
                    f"a service keeps its model, {self._settings.model!r}, got {delta.model!r}: make another service "
                    "for another model"
                )
            for name in vars(wanted):
                given = getattr(delta, name, NOT_GIVEN)
                if name not in ("language", "extra") and is_given(given):
                    setattr(wanted, name, given)
            self._check(wanted)
        except RequestError as error:
            await self.push_error(f"settings not changed: {error}", exception=error)
            await self.set_usable(usable)  # an invalid request makes it unusable to Pipecat, but the old settings hold
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

    def _check_values(self, settings: SpeechSettings) -> None:
        """Raises RequestError for numbers out of range, or a layout that this service's mode cannot use."""
        sampling_of(settings)
        speed_of(settings)
        text_options_of(settings)
        layout_of(settings, in_tokens=self._is_streaming_tokens)

    def _classify_error(self, exception: Exception) -> ErrorCategory | None:
        if isinstance(exception, EngineBusy):
            return ErrorCategory.RATE_LIMIT
        if isinstance(exception, RequestError):
            return ErrorCategory.INVALID_REQUEST
        return ErrorCategory.SERVER
