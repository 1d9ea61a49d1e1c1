"""What comes out of an utterance: chunks of PCM, and in the end the whole audio."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from qwen_megakernel.errors import SpeechCutError

FRAME_S = 0.08  # seconds of audio of a frame: the model's 12.5 frames a second

CHUNK_SCHEDULE = (1, 2, 4, 8)
"""Frames per chunk: the first sound after one frame, then larger portions; the last size repeats."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """PCM handed out at once.

    Attributes:
        samples: fp32 [frames * 1920], -1..1. At a speed other than 1.0 [n]: the samples that can be made by now. They
            end up to 50 ms, in the model's audio, before these frames do.
        codes: int64 [frames, 16]. At another speed the last chunk may hold the rest of the samples and no frame.
        sample_rate: in Hz.
        token_s: when the tokens of the text begin, in order, in seconds from the utterance's first sample: those that
            begin by this chunk's end and were not in an earlier one. None: it is not measured.
    """

    samples: np.ndarray
    codes: np.ndarray
    sample_rate: int
    token_s: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Timings:
    """Where an utterance's time went, in seconds. The stages follow each other up to the first chunk. If the text comes
    in pieces, the wait for a whole first word is left out. A stage that was not reached is None. On a GPU work is
    queued, so `first_frame` includes what the GPU has yet to do for prompt and prefill.

    Attributes:
        tokenise: text to ids.
        prompt: ids to rows.
        queue: from the rows to a free slot.
        prefill: keys and values of the prompt; for a cloned voice also its reference through the vocoder.
        first_frame: from prefill to the first 16 codes on the host.
        first_chunk: from those codes to the first chunk handed out: the frames that fill it, and the vocoder.
    """

    tokenise: float | None = None
    prompt: float | None = None
    queue: float | None = None
    prefill: float | None = None
    first_frame: float | None = None
    first_chunk: float | None = None


class Stopwatch:
    """Times the stages of an utterance. One thread at a time uses it."""

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock  # in seconds
        self.arrived: float | None = None  # when the text did, or its first piece, by the clock; None: not yet
        self.stages: dict[str, float] = {}  # seconds of each stage that is over, by the names of `Timings`
        self._began = 0.0

    def begin(self, now: float | None = None) -> float:
        """A stage begins, now or when it is told. Returns when."""
        self._began = self.clock() if now is None else now
        return self._began

    def mark(self, stage: str) -> None:
        """A stage is over: the time since the previous one belongs to it."""
        now = self.clock()
        self.stages[stage] = now - self._began
        self._began = now


@dataclass(frozen=True, eq=False)
class Audio:
    """A whole utterance.

    Attributes:
        samples: fp32 [n], -1..1; equals the joined chunks. All seconds of audio are at the requested speed.
        sound: the same in parts. Who reads `samples` first joins them, so the engine's thread need not.
        codes: int64 [frames, 16].
        finish_reason: "eos" (the model ended), "length" (frame limit), "runaway" (the model fell into a
            loop or babbled on) or "cancelled".
        seed: the one that was used; the same request with it gives the same codes.
        sample_rate: in Hz.
        ttfc_s: seconds from the text's arrival (its first piece's) to the first chunk; None if there was no chunk.
        compute_s: seconds from the text's arrival to the utterance's end; waiting for more text counts too.
        lead_s: the smallest lead, in seconds: audio still to be heard when the next chunk came, for a listener who
            began with the first chunk. Below 0 they heard a gap. None with fewer than two chunks.
        timings: of the stages up to the first chunk.
        attempts: how often it was said; more than 1 only with `retries`. Everything else is the last attempt's.
        token_s: see `Chunk.token_s`; here of all tokens. Tokens of parts that were joined follow each other.
        lost: numbers of the text's tokens that it has left out, although the model ended it; of each part that was
            joined. Empty: none or a few, or it is not known (docs/architecture.md, "Loops of the model").
    """

    sound: list[np.ndarray] = field(repr=False)
    codes: np.ndarray
    finish_reason: str
    seed: int
    sample_rate: int
    ttfc_s: float | None
    compute_s: float
    lead_s: float | None
    timings: Timings
    attempts: int = 1
    token_s: tuple[float, ...] | None = None
    lost: tuple[int, ...] = ()

    @property
    def samples(self) -> np.ndarray:
        if len(self.sound) != 1:
            self.sound[:] = [np.concatenate([np.zeros(0, np.float32), *self.sound])]
        return self.sound[0]

    @property
    def frames(self) -> int:
        return len(self.codes)

    @property
    def duration_s(self) -> float:
        return sum(map(len, self.sound)) / self.sample_rate

    @property
    def rtf(self) -> float:
        """Compute time / audio time; lower is better."""
        return self.compute_s / self.duration_s if self.duration_s else float("inf")

    def why_cut(self, most_frames: int) -> str:
        """What to tell the listener of speech that ended by "length" although its caller set no limit. `most_frames`:
        that the checkpoint allows (`ModelConfig.max_frames`)."""
        if self.frames >= most_frames:
            limit, remedy = f"at the {most_frames} frames that the checkpoint allows (max_new_tokens)", ""
        else:
            limit, remedy = "because its slot is full", ", or raise max_positions"
        return SpeechCutError.words(self.duration_s, limit, remedy)


def joined(parts: Sequence[Audio]) -> Audio:
    """Join consecutive parts, at least one. Seed, TTFC and timings are the first's, the finish reason is the last's."""
    first, last = parts[0], parts[-1]
    if first is last:
        return first
    leads = [part.lead_s for part in parts if part.lead_s is not None]
    starts = list(accumulate((part.duration_s for part in parts), initial=0.0))
    tokens = [start + at for start, part in zip(starts, parts, strict=False) for at in part.token_s or ()]
    return replace(
        first,
        sound=[part.samples for part in parts],
        codes=np.concatenate([part.codes for part in parts]),
        finish_reason=last.finish_reason,
        compute_s=sum(part.compute_s for part in parts),
        lead_s=min(leads, default=None),
        token_s=None if any(part.token_s is None for part in parts) else tuple(tokens),
        lost=tuple(token for part in parts for token in part.lost),
    )
