"""TurnLog: one line in the log for each turn of a conversation.

    "Count to seven." first audio 255 ms after the text (TTFC 53 ms), RTF 0.27, least lead 35 ms

Lead is measured here as the listener hears it: it includes the event loop's and the LLM's pauses. TTFC and RTF are the
engine's.
"""

from collections import deque
from dataclasses import dataclass, field

from loguru import logger
from pipecat.frames.frames import (
    CancelFrame,
    InterruptionFrame,
    LLMContextFrame,
    MetricsFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
)
from pipecat.observers.base_observer import BaseObserver, FramePushed
from pipecat.processors.aggregators.llm_response_universal import LLMAssistantAggregator
from pipecat.processors.frame_processor import FrameDirection
from pipecat.services.tts_service import TTSService

from qwen_megakernel.pipecat.audio_context import SpeechMetricsData
from qwen_megakernel.pipecat.offline_llm import last_user_text

_MAX_TEXT = 60  # letters of the user's text in a line
_PIECE_S = 0.04  # a transport plays pieces of this length, so it begins with the first whole one
_KINDS = (LLMContextFrame, TTSAudioRawFrame, MetricsFrame, TTSStoppedFrame, InterruptionFrame, CancelFrame)


class TurnLog(BaseObserver):
    """Logs what the user said and how the answer came, once the answer is complete or interrupted. If the listener
    heard a gap, the line is a warning. RTF and TTFC need the worker's `PipelineParams(enable_metrics=True)`."""

    def __init__(self):
        super().__init__()
        self._turn: _Turn | None = None  # None: no question since the last line
        self._seen: deque[int] = deque(maxlen=100)  # an observer is told of every hop of a frame
        self._contexts: set[str] = set()  # audio contexts of the turn
        self._told: deque[str] = deque(maxlen=100)  # those of turns whose lines were logged

    async def on_push_frame(self, data: FramePushed):
        """Follow the turn. `data`: a frame, its source, and its time in ns."""
        frame = data.frame
        if not isinstance(frame, _KINDS) or frame.id in self._seen:
            return
        if isinstance(frame, InterruptionFrame) and not isinstance(data.source, TTSService):
            return  # until it reaches the service, the service speaks on
        self._seen.append(frame.id)
        if isinstance(frame, LLMContextFrame):
            if _asks(data):
                self._tell()
                self._turn = _Turn(last_user_text(frame.context), data.timestamp / 1e9)
        elif isinstance(frame, TTSAudioRawFrame):
            # A transport cuts audio into its own frames. Speech that may not be interrupted goes on behind its line.
            if isinstance(data.source, TTSService) and frame.context_id not in self._told:
                if frame.context_id is not None:
                    self._contexts.add(frame.context_id)
                self._turn = self._turn or _Turn("", data.timestamp / 1e9)
                self._turn.hear(data.timestamp / 1e9, frame.num_frames / frame.sample_rate)
        elif isinstance(frame, MetricsFrame):
            if self._turn:
                self._turn.utterances += [one for one in frame.data if isinstance(one, SpeechMetricsData)]
        elif isinstance(frame, TTSStoppedFrame) or (self._turn and self._turn.first is not None):
            self._tell(interrupted=not isinstance(frame, TTSStoppedFrame))

    def _tell(self, interrupted: bool = False) -> None:
        turn, self._turn = self._turn, None
        self._told.extend(self._contexts)
        self._contexts.clear()
        if turn:
            gap = turn.lead is not None and turn.lead < 0
            logger.log("WARNING" if gap else "INFO", "{}", turn.line(interrupted))


@dataclass
class _Turn:
    text: str  # what the user said; empty for a greeting
    asked: float  # time of the question, in seconds of the pipeline's clock
    first: float | None = None  # time of the first piece of audio, by the same clock
    lead: float | None = None  # least lead: seconds of audio that the listener had not yet heard when more came
    utterances: list[SpeechMetricsData] = field(default_factory=list)
    _made: float = 0.0  # seconds of audio
    _waited: float = 0.0  # seconds for which the listener heard nothing

    def hear(self, now: float, seconds: float) -> None:
        """Take audio. `now`: in seconds of the pipeline's clock. `seconds`: the audio's length."""
        if self.first is not None:
            lead = self._made + self._waited - (now - self.first)
            self.lead = lead if self.lead is None else min(self.lead, lead)
            self._waited += max(0.0, -lead)
        self._made += seconds
        if self.first is None and self._made >= _PIECE_S:
            self.first = now

    def line(self, interrupted: bool) -> str:
        """The log line for this turn."""
        text = " ".join(self.text.split())
        text = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
        said = f'"{text}"' if text else "(no text)"
        if self.first is None:
            return f"{said} no sound"
        parts = [f"first audio {_ms(self.first - self.asked)} after the text"]
        if self.utterances:
            made, heard = (sum(getattr(u, name) for u in self.utterances) for name in ("compute_s", "audio_s"))
            parts[0] += f" (TTFC {_ms(self.utterances[0].ttfc_s)})"
            parts.append(f"RTF {made / heard:.2f}")
        if self.lead is not None:
            parts.append(f"least lead {_ms(self.lead)}")
            if self.lead < 0:
                parts.append(f"A GAP WAS HEARD ({_ms(self._waited)} of silence in all)")
        return f"{said} {', '.join(parts)}{', interrupted' if interrupted else ''}"


def _asks(data: FramePushed) -> bool:
    """Does the context go to the LLM? The assistant's aggregator sends one downstream too, with the answer in it.

    The messages do not tell: an observer is late, and the words of an interrupted answer may by then stand behind the
    user's."""
    return not (isinstance(data.source, LLMAssistantAggregator) and data.direction is FrameDirection.DOWNSTREAM)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
