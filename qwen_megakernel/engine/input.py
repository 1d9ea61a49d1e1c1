"""What callers give of an utterance: a checked request, and text that may come in pieces."""

import queue
import threading
from dataclasses import dataclass

from torch import Tensor

from qwen_megakernel.model.conditioning import Conditioning
from qwen_megakernel.model.prompt_pieces import PromptPieces
from qwen_megakernel.sampling_params import SamplingParams


@dataclass(frozen=True)
class Request:
    """A checked request with every default filled in."""

    conditioning: Conditioning
    non_streaming_mode: bool
    sampling: SamplingParams
    max_frames: int
    runaway_guard: bool
    judge_length: bool  # the runaway guard tells babble by how long the text should take
    chunk_frames: tuple[int, ...]
    speed: float
    trim: str
    silence_s: float
    before_s: float  # seconds of silence before the speech, and after it
    after_s: float
    reproducible: bool

    @property
    def seed(self) -> int:
        assert self.sampling.seed is not None  # who checks a request draws one
        return self.sampling.seed


class Input:
    """Callers' threads fill it. The engine's thread takes `rows` and looks at `cancelled`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held by the caller who pushes or ends the text
        self.text_open = True  # more may be pushed; written under `lock`, or before others know the sequence
        # Makes rows of text that comes in pieces, under `lock`. None: the text came whole, or the sequence ended.
        self.pieces: PromptPieces | None = None
        # Trailing rows [n, hidden] for the engine's thread, each time with: is the text complete?
        self.rows: queue.SimpleQueue[tuple[Tensor, bool]] = queue.SimpleQueue()
        self.tokens: list[int] = []  # the text's ids so far; it only grows
        self.cancelled = False  # stop before the next frame; any thread sets it, nobody takes it back

    @property
    def news(self) -> bool:
        """Has the engine's thread something to see here?"""
        return self.cancelled or not self.rows.empty()

    def forget(self) -> None:
        """The sequence has ended, so its text is not needed."""
        self.pieces = None
        self.rows = queue.SimpleQueue()
