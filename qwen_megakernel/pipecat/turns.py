"""TurnService: when turns, audio contexts and text begin and end, as Pipecat's frames tell it.

A turn begins with `LLMFullResponseStartFrame`. It ends with `LLMFullResponseEndFrame`, the next turn, or the pipeline.
Text outside of a turn is bare: a sentence is a context of its own, and tokens share one until they pause. An audio
context stays open as long as sound may come (`_is_awaited`).

tests/test_pipecat_names.py says of each of Pipecat's underscore names why this folder uses it.

This module imports no torch, because a server's client needs none.
"""

import asyncio
import uuid
from abc import abstractmethod
from dataclasses import dataclass
from time import monotonic
from typing import Any

from loguru import logger
from pipecat.frames.frames import (
    AggregatedTextFrame,
    AggregatedTextProgressFrame,
    CancelFrame,
    ControlFrame,
    EndFrame,
    Frame,
    FunctionCallsStartedFrame,
    InterruptionFrame,
    LLMAssistantPushAggregationFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    StopFrame,
    SystemFrame,
    TextFrame,
    TextType,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    TTSStartedFrame,
    TTSTextFrame,
)
from pipecat.processors.frame_processor import FrameDirection, FrameProcessorSetup
from pipecat.utils.context.audio_context_manager import AudioContextManager
from pipecat.utils.text.base_text_aggregator import BaseTextAggregator
from pipecat.utils.time import seconds_to_nanoseconds

from qwen_megakernel.errors import RequestError
from qwen_megakernel.pipecat.audio_context import AudioContext, Host
from qwen_megakernel.pipecat.sentences import Sentences
from spoken_text.sentence import LONGEST_END, STALL_S, ends_sentence

_LONGEST_STALL_S = 10.0
"""Seconds without text and sound after which a turn's context is closed, so that Pipecat is told that the bot has
stopped. Text that comes later has a context of its own."""
_POLL_S = 1.0  # between two looks at a context that gets nothing
_BORDERS = LLMFullResponseStartFrame, LLMFullResponseEndFrame, LLMAssistantPushAggregationFrame, TTSStartedFrame
BARE = ""  # stands for the turn of text that belongs to none


@dataclass
class _FlushFrame(ControlFrame):
    """The service sends this to itself. Unlike a system frame it stays in order with the text."""

    texts: int = -1  # count of the texts before it; it is void if more have come. -1: it is never void


def _keep_cancelled() -> None:
    """`wait_for` of Python 3.11 drops a cancellation that comes together with its result. The task would go on, and
    whoever cancelled it would wait for it."""
    task = asyncio.current_task()
    if task and task.cancelling():
        raise asyncio.CancelledError


class TurnService(Host):
    """A text-to-speech service with an `AudioContext` for each of Pipecat's audio contexts."""

    _text_aggregator: Sentences

    def __init__(self, *, stop_frame_timeout_s: float = 3.0, reuse_context_id_within_turn: bool = True, **kwargs):
        if not stop_frame_timeout_s > 0:
            raise RequestError(f"stop_frame_timeout_s must be more than 0 seconds, got {stop_frame_timeout_s!r}")
        super().__init__(reuse_context_id_within_turn=reuse_context_id_within_turn, **kwargs)
        theirs: BaseTextAggregator = self._text_aggregator
        self.in_tokens = theirs.aggregation_type == TextType.TOKEN
        if self.in_tokens and not reuse_context_id_within_turn:
            raise RequestError(
                "reuse_context_id_within_turn=False would make each token an utterance: leave it out in TOKEN mode"
            )
        self._text_aggregator = Sentences(aggregation_type=theirs.aggregation_type, language=theirs.language)
        self._patience_s = stop_frame_timeout_s
        self._begin_anew()

    def _begin_anew(self) -> None:
        """A pipeline begins, with nothing of an earlier one."""
        self._contexts: dict[str, AudioContext] = {}  # by id
        self._readings: dict[str, Any] = {}  # by the turn's id
        self._bare = False  # the text being processed belongs to no turn
        self._bare_id: str | None = None  # of the context that takes bare tokens
        self._written, self._texts = "", 0  # the end of the text so far; how many texts that were
        self._apart = False  # the text being processed is a whole one
        self._unheard: str | None = None  # the context whose last words Pipecat now takes for spoken ones
        self._calm = asyncio.Event()  # no interruption is being handled
        self._calm.set()
        self._stall: asyncio.TimerHandle | None = None  # looks whether more comes
        self._heard_at = 0  # when all sound so far will have been heard, in ns of the pipeline's clock

    @abstractmethod
    def _new_reading(self) -> Any:
        """What the utterances of one turn share, so that its text is read as one: a `<think>` or a code block may begin
        in one sentence and end in another."""

    # ------------------------------------------------------------ life

    async def setup(self, setup: FrameProcessorSetup):
        """Forget what an earlier pipeline left behind."""
        await super().setup(setup)
        self._begin_anew()
        self._cancelling = False  # Pipecat never takes it back, and would drop all frames
        self._turn_context_id = None
        self._audio_context_manager = AudioContextManager()
        self._aggregated_frame_sequencer.clear()
        await self._handle_interruption(InterruptionFrame(), FrameDirection.DOWNSTREAM)  # so Pipecat forgets the rest

    async def cancel(self, frame: CancelFrame):
        """Stop at once."""
        self._cancel_all()
        await super().cancel(frame)

    def _cancel_all(self) -> None:
        self._unwatch()
        for context_id in list(self._contexts):
            self._drop_context(context_id, interrupted=True)
        self._readings.clear()

    # ------------------------------------------------------------ turns

    async def process_frame(self, frame: Frame, direction: FrameDirection):
        """Speak text, and see that every turn ends. Before a function call, finish speaking the text so far."""
        if isinstance(frame, _FlushFrame):
            await self._flush(frame)
            return
        if isinstance(frame, FunctionCallsStartedFrame):
            await self.queue_frame(_FlushFrame(), FrameDirection.DOWNSTREAM)
        if isinstance(frame, InterruptionFrame):
            await self._interrupt(frame, direction)
            return
        if direction is FrameDirection.DOWNSTREAM and not isinstance(frame, SystemFrame):
            await self._calm.wait()
            await self._before(frame)
        await super().process_frame(frame, direction)
        if isinstance(frame, TextFrame) and direction is FrameDirection.DOWNSTREAM:
            self._watch_writer(frame.text)

    async def _interrupt(self, frame: InterruptionFrame, direction: FrameDirection) -> None:
        """Pipecat goes on with frames that may not be interrupted before it has dropped the contexts that were there.
        It would drop those of such frames too."""
        self._calm.clear()
        try:
            await super().process_frame(frame, direction)
        finally:
            self._calm.set()
        self._unwatch()
        self._heard_at = 0  # the transport drops what it has
        open_turn = self._turn_context_id  # one that may not be interrupted
        self._readings = {turn: reading for turn, reading in self._readings.items() if turn == open_turn}

    async def _before(self, frame: Frame) -> None:
        """End what this frame ends."""
        ends = isinstance(frame, (EndFrame, StopFrame, LLMFullResponseStartFrame))
        ends = ends or (
            isinstance(frame, LLMFullResponseEndFrame) and bool(frame.skip_tts)
        )  # Pipecat goes past the turn
        if ends or (isinstance(frame, TTSSpeakFrame) and self._turn_context_id is None):
            await self._end_turn()
        elif isinstance(frame, LLMFullResponseEndFrame):  # of a turn that was interrupted: its late tokens are bare
            await self._end_bare_text()
        self._bare = isinstance(frame, TextFrame) and self._turn_context_id is None
        self._apart = False
        if isinstance(frame, (AggregatedTextFrame, TTSSpeakFrame)):
            self._apart = frame.text_type != TextType.TOKEN
            self._text_aggregator.set_apart(frame.text)

    async def _end_turn(self) -> None:
        """No more text of the turn, or bare text, will come."""
        await self._speak_rest()
        await self._end_bare_text()
        if turn := self._turn_context_id:
            await self.finish_words(turn)
            await self.on_turn_context_completed()

    async def on_turn_context_completed(self):
        """Forget what the utterances of the turn shared."""
        turn = self._turn_context_id
        await super().on_turn_context_completed()
        self._readings.pop(turn or BARE, None)

    async def _end_bare_text(self) -> None:
        """Text that belongs to no turn has ended."""
        bare, self._bare_id = self._bare_id, None
        self._readings.pop(BARE, None)
        if bare:
            await self._end_context(bare)

    async def _split_turn(self) -> None:
        """End the turn's context. The text that comes next has another one."""
        turn = self._turn_context_id
        assert turn
        self._turn_context_id = str(uuid.uuid4())
        if turn in self._readings:
            self._readings[self._turn_context_id] = self._readings.pop(turn)
        await self._end_context(turn)

    async def _end_context(self, context_id: str) -> None:
        """No more text of this context will come."""
        await self.finish_words(context_id)
        await self.flush_audio(context_id)

    def create_context_id(self) -> str:
        """The id of the turn's context. In TOKEN mode bare tokens share one, too."""
        if not (self._bare and self.in_tokens):
            return super().create_context_id()
        if self._bare_id is None or not self.audio_context_available(self._bare_id):
            self._bare_id = super().create_context_id()
        return self._bare_id

    # ------------------------------------------------------------ a writer that stalls

    def _watch_writer(self, text: str) -> None:
        """A sentence waits for the next one's first character. If the writer stalls, it goes on without that."""
        self._texts += 1
        self._written = self._written[-LONGEST_END:] + text
        self._unwatch()
        if ends_sentence(self._written):
            self._stall = asyncio.get_running_loop().call_later(STALL_S, self._stalled, self._texts)

    def _unwatch(self) -> None:
        if self._stall:
            self._stall.cancel()
        self._stall = None

    def _stalled(self, texts: int) -> None:
        self._stall = None
        self.create_task(self.queue_frame(_FlushFrame(texts), FrameDirection.DOWNSTREAM))

    async def _flush(self, frame: _FlushFrame) -> None:
        """Before a function call, or if the writer stalls behind a sentence: speak what waits for more text.

        An utterance itself notes that its writer stalls. Its words still wait: until they are matched with a sentence,
        they are not in the LLM's context."""
        called = frame.texts < 0
        if not called and frame.texts != self._texts:
            return
        if self.in_tokens:
            if called:
                for context in list(self._contexts.values()):
                    await context.flush()
            for context_id, context in list(self._contexts.items()):
                if not (context.text_ended or context.failed):
                    await context.end_word()
                    await self.finish_words(context_id)
        else:
            await self._speak_whole_text()

    async def _speak_whole_text(self) -> None:
        """Speak a sentence that waits for the next one's first character."""
        if ends_sentence(self._text_aggregator.text.text):
            await self._speak_rest()

    async def _speak_rest(self) -> None:
        """Speak what waits to be a sentence."""
        if rest := await self._text_aggregator.flush():
            frame = AggregatedTextFrame(rest.text, rest.type, raw_text=rest.text)
            await super().process_frame(frame, FrameDirection.DOWNSTREAM)

    # ------------------------------------------------------------ audio contexts

    async def flush_audio(self, context_id: str | None = None):
        """End a context's text. `context_id`: None: the one that plays."""
        context_id = context_id or self.get_active_audio_context_id()
        context = self._contexts.get(context_id) if context_id else None
        if context and self.in_tokens:
            await context.end_text()
        else:  # nothing else closes it if its last sentence was silent, or if it got no text: it was not usable
            await self.close_context(context_id)

    async def _next_audio_context_item(self, context_id: str) -> Any:
        """Wait for the context's next item: not for a fixed time, but while one may come."""
        began = monotonic()
        while True:
            try:
                item = await self._audio_context_manager.get(context_id, min(_POLL_S, self._patience_s))
                _keep_cancelled()
                return item
            except TimeoutError:
                _keep_cancelled()
                quiet_s = monotonic() - began
                if quiet_s >= self._patience_s and not await self._is_awaited(context_id, quiet_s):
                    return None

    async def _is_awaited(self, context_id: str, quiet_s: float) -> bool:
        """May more sound come for a context that got nothing for so long? If only its turn's text could bring some, and
        that has stalled, the text counts as ended.

        The text has stalled once other speech waits behind this context, or after `_LONGEST_STALL_S`."""
        context = self._contexts.get(context_id)
        if context is None or context.busy:
            return context is not None
        if self.in_tokens and context.text_ended:
            return True
        least_s = max(_POLL_S, self._patience_s)
        stalled_s = min(quiet_s, monotonic() - context.text_at)
        if context_id == self._turn_context_id:
            others_wait = len(self.get_audio_contexts()) > 1
            if stalled_s >= (least_s if others_wait else max(least_s, _LONGEST_STALL_S)):
                await self._split_turn()
        elif context_id == self._bare_id:
            if stalled_s >= least_s:
                await self._end_bare_text()
        else:
            await self._end_context(context_id)
        return True

    async def on_audio_context_interrupted(self, context_id: str):
        """Barge-in: stop the utterance of this context and no other."""
        self._drop_context(context_id, interrupted=True)
        await super().on_audio_context_interrupted(context_id)

    async def on_audio_context_completed(self, context_id: str):
        """Forget a context that was played to its end."""
        self._drop_context(context_id)
        await super().on_audio_context_completed(context_id)

    def _drop_context(self, context_id: str, interrupted: bool = False) -> None:
        context = self._contexts.pop(context_id, None)
        if context is None:
            return
        context.cancel()
        if context.made_s:
            logger.info(f"{self}: {context.summary()}{', interrupted' if interrupted else ''}")

    async def _record_context_audio_outcome(self, context_id: str, received_audio: bool):
        """Do not count a silent context against the service if its error was reported, or if it had nothing to say."""
        context = self._contexts.get(context_id)
        if received_audio or context is None or not (context.failed or context.wordless):
            await super()._record_context_audio_outcome(context_id, received_audio)

    # ------------------------------------------------------------ what was not heard

    async def _apply_force_complete(self, context_id: str):
        """Pipecat takes the words that are left for spoken ones. They are not if the context failed, or if the service
        was not usable: then they do not go into the LLM's context."""
        context = self._contexts.get(context_id)
        self._unheard = context_id if context is None or context.failed else None
        try:
            await super()._apply_force_complete(context_id)
        finally:
            self._unheard = None

    async def start_word_timestamps(self):
        """Words of a context are heard behind the sound before it. Pipecat would time them from now on."""
        tracker = self._word_timestamp_tracker
        tracker.last_pts = max(tracker.last_pts, self._heard_at)
        await super().start_word_timestamps()

    async def push_frame(self, frame: Frame, direction: FrameDirection = FrameDirection.DOWNSTREAM):
        """Leave out words that were not heard, and mark the times of others if they are estimates.

        A message begins when the sound before it was heard, and ends when its own was. Without a time its beginning
        would wait for the transport's sound, and its words and its end would overtake it."""
        if isinstance(frame, TTSAudioRawFrame):
            seconds = frame.num_frames / frame.sample_rate
            self._heard_at = max(self._heard_at, self.get_clock().get_time()) + seconds_to_nanoseconds(seconds)
        if isinstance(frame, _BORDERS) or getattr(frame, "skip_tts", False):  # unspoken text keeps its place, too
            self._heard_at = max(self._heard_at, frame.pts or 0)
            frame.pts = self._heard_at or None
        if isinstance(frame, (TTSTextFrame, AggregatedTextProgressFrame)):
            if self._unheard and frame.context_id == self._unheard:
                return
        if isinstance(frame, TTSTextFrame):
            frame.metadata["time_is_estimated"] = not self.words_measured
        await super().push_frame(frame, direction)
