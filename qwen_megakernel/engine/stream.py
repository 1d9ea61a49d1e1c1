"""Stream: one utterance as the engine sees it; what comes out of it: chunks, and in the end its audio.

Callers never touch tensors of the owner thread: text rows go in through a queue, chunks come out through another.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qwen_megakernel.backend.frame_decoder import RECENT_FRAMES
from qwen_megakernel.engine.callbacks import Listener
from qwen_megakernel.engine.request import Request
from qwen_megakernel.engine.runaway import RunawayGuard
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.model.prompt_pieces import PromptPieces
from qwen_megakernel.model.vocoder import Portion


@dataclass(frozen=True, eq=False)
class Chunk:
    """PCM handed out at once.

    Attributes:
        samples: fp32 [frames * 1920], -1..1.
        codes: int64 [frames, 16].
        sample_rate: in Hz.
    """

    samples: np.ndarray
    codes: np.ndarray
    sample_rate: int


@dataclass(frozen=True)
class Timings:
    """Where an utterance's time went, in seconds; one stage after the other up to the first chunk, apart from waiting
    for a whole first word where the text comes in pieces. A stage that was not reached is None. On a GPU work is
    queued, so that what prompt and prefill leave undone is waited for by the first frame.

    Attributes:
        tokenise: text to ids.
        prompt: ids to rows.
        queue: rows in hand until a slot was free.
        prefill: keys and values of the prompt; with a cloned voice its reference through the vocoder too.
        first_frame: prefilled to the first 16 codes on the host.
        first_chunk: those codes to the first chunk handed out: the frames that fill it, and the vocoder.
    """

    tokenise: float | None = None
    prompt: float | None = None
    queue: float | None = None
    prefill: float | None = None
    first_frame: float | None = None
    first_chunk: float | None = None


@dataclass(frozen=True, eq=False)
class Audio:
    """A whole utterance.

    Attributes:
        samples: fp32 [n], -1..1; equals the joined chunks.
        codes: int64 [frames, 16].
        finish_reason: "eos" (the model ended), "length" (frame limit), "runaway" (the model fell into a
            loop) or "cancelled".
        seed: that was used; the same request with it gives the same codes.
        sample_rate: in Hz.
        ttfc_s: seconds from the text's arrival (its first piece's) to the first chunk; None if there was no chunk.
        compute_s: seconds from the text's arrival to the utterance's end; waiting for more text counts too.
        lead_s: the least audio, in seconds, that a listener who began with the first chunk still had to hear when
            another came; below 0 they heard a gap. None with fewer than two chunks.
        timings: of the stages up to the first chunk.
    """

    samples: np.ndarray
    codes: np.ndarray
    finish_reason: str
    seed: int
    sample_rate: int
    ttfc_s: float | None
    compute_s: float
    lead_s: float | None
    timings: Timings

    @property
    def frames(self) -> int:
        return len(self.codes)

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.sample_rate

    @property
    def rtf(self) -> float:
        """Compute time / audio time; lower is better."""
        return self.compute_s / self.duration_s if len(self.samples) else float("inf")


_FRAME_S = 0.08
_LONG_CHUNK = 16  # frames: who asks for longer chunks waits for what is beyond, as others wait for theirs
_MOST_UNHEARD = RECENT_FRAMES  # more of them a vocoder that follows would not find on the device


class Stream:
    """Callers' threads fill in the text; everything below the line belongs to the owner thread once it was handed the
    prompt."""

    def __init__(
        self, request: Request, on_chunk: Callable[[Chunk], None] | None, on_end: Callable[[], None] | None = None
    ):
        self.request, self.on_chunk, self.on_end = request, on_chunk, on_end
        self.seed = request.sampling.seed
        self.lock = threading.Lock()  # of the text
        self.text_open = True  # more may be pushed
        self.pieces: PromptPieces | None = None  # where the text does not come whole
        self.incoming: queue.SimpleQueue[tuple[Tensor, bool]] = queue.SimpleQueue()  # rows; the text is complete
        self.cancelled = False
        self.listener: Listener | None = None
        self.over = False  # it has its audio or its error, of which its listener may have yet to hear
        self.done = threading.Event()
        self.chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self.audio: Audio | None = None
        self.error: BaseException | None = None
        self.arrived: float | None = None  # when its text did
        self.timings: dict[str, float] = {}
        self.place: int | None = None
        # ------------------------------------------------ the owner's
        self.prompt: Prompt | None = None
        self.text_rows = 0  # trailing ones that the decoder has
        self.text_complete = False  # and no more will come
        self.max_frames = 0
        self.deadline = 0.0  # of waiting for a slot
        self.slot: int | None = None
        self.in_flight = False  # a frame of it was launched whose codes nobody has seen
        self.held = False  # what the vocoder lacks waits for company
        self.pushes = 0  # on their way through the vocoder
        self.context: list[Portion] | None = None  # of the reference, yet to be heard; None before prefill
        self.voice_digest = b""
        self.stage_began = 0.0
        self.guard = RunawayGuard() if request.runaway_guard else None
        self.launched = 0  # frames
        self.given = 0  # frames that went to the vocoder, or, launched and not yet seen, are on their way to it
        self.codes: list[Tensor] = []  # int64 [groups] each, of the frames seen
        self.sound: list[np.ndarray] = []  # fp32 [1920] each, of the first of these frames
        self.reason: str | None = None  # why it ends with the frames it has
        self._planned = self._chunks_planned = 0  # chunks that are whole with what was given, and their frames
        self.handed_frames = self.chunks_given = 0
        self.first_chunk: float | None = None
        self.runs_out: float | None = None  # when its listener has heard all that was handed out
        self.lead: float | None = None

    @property
    def unheard(self) -> int:
        """Frames seen whose sound is not there."""
        return len(self.codes) - len(self.sound)

    def chunk_size(self, index: int) -> int:
        """Frames of a chunk."""
        schedule = self.request.chunk_frames
        return schedule[min(index, len(schedule) - 1)]

    def due(self, short: bool) -> bool:
        """Must the vocoder have the frames launched so far? At the latest after 8, whatever the chunks: so often the
        guard listens. `short`: its chunk ends with them, full or not."""
        missing = self.launched - self.given
        if missing <= 0:
            return False
        last = self.reason is not None or self.launched == self.max_frames
        return last or short or missing >= _MOST_UNHEARD or self._to_chunk <= 0

    @property
    def _to_chunk(self) -> int:
        """Frames that its next chunk lacks."""
        return self.chunk_size(self._chunks_planned) - (self.launched - self._planned)

    def due_at(self, frame_s: float) -> float:
        """When its next frame must begin, so that its listener hears no gap, where frames take `frame_s`. Before its
        first chunk somebody has been waiting since its text came; where that chunk is long, as patiently as others
        listen."""
        if self.runs_out is None:
            return (self.arrived or 0.0) + _FRAME_S * self.launched
        patience = _FRAME_S * max(0, self.launched - self.handed_frames - _LONG_CHUNK)
        return self.runs_out + patience - frame_s * min(max(1, self._to_chunk), _LONG_CHUNK)

    def give(self, short: bool) -> None:
        """The vocoder gets them."""
        self.given = self.launched
        while (size := self.chunk_size(self._chunks_planned)) <= self.given - self._planned:
            self._planned += size
            self._chunks_planned += 1
        if short and self._planned < self.given:
            self._planned = self.given
            self._chunks_planned += 1

    def forget(self) -> None:
        """It has ended: whoever goes on holding its utterance keeps its audio, not what making it took."""
        self.prompt = self.pieces = self.context = None
        self.incoming = queue.SimpleQueue()
        self.codes, self.sound = [], []

    @property
    def prefilled(self) -> bool:
        return self.context is not None and not self.context

    @property
    def ready(self) -> bool:
        """Can its next frame be launched?"""
        over = self.reason or self.over or self.launched >= self.max_frames
        return self.prefilled and not (over or self.in_flight or self.held or self.starved)

    @property
    def starved(self) -> bool:
        """Its next frame needs a text row that has not come: nothing is spoken in its place. A frame hears of the text
        row of the one before."""
        return self.prefilled and not self.text_complete and self.launched > self.text_rows

    @property
    def idle(self) -> bool:
        return self.starved and self.incoming.empty() and not self.cancelled

    @property
    def text_used_up(self) -> bool:
        return self.text_complete and len(self.codes) >= self.text_rows

    def mark(self, stage: str) -> None:
        """A stage is over: the time since the one before it is its own."""
        now = time.monotonic()
        self.timings[stage] = now - self.stage_began
        self.stage_began = now

    def assemble(self, reason: str, sample_rate: int, groups: int) -> Audio:
        now = time.monotonic()
        arrived = now if self.arrived is None else self.arrived
        spoken = self.handed_frames
        return Audio(
            samples=np.concatenate(self.sound[:spoken]) if spoken else np.zeros(0, np.float32),
            codes=torch.stack(self.codes[:spoken]).numpy() if spoken else np.zeros((0, groups), np.int64),
            finish_reason=reason,
            seed=self.seed,
            sample_rate=sample_rate,
            ttfc_s=None if self.first_chunk is None else self.first_chunk - arrived,
            compute_s=now - arrived,
            lead_s=self.lead,
            timings=Timings(**self.timings),
        )
