"""Request: how the engine speaks one utterance."""

from dataclasses import dataclass

from qwen_megakernel.checkpoint.config import SamplingParams
from qwen_megakernel.model.conditioning import Conditioning


@dataclass(frozen=True)
class Request:
    """A checked request with every default filled in.

    Attributes:
        judge_length: the runaway guard tells babble by how long the text should take.
        before_s, after_s: seconds of silence around the speech.
    """

    conditioning: Conditioning
    non_streaming_mode: bool
    sampling: SamplingParams
    max_frames: int
    runaway_guard: bool
    judge_length: bool
    chunk_frames: tuple[int, ...]
    speed: float
    trim: str
    silence_s: float
    before_s: float
    after_s: float
    reproducible: bool
