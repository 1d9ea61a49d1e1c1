"""Scheduler: which work comes next. Sequences and the time go in, decisions come out; no device, no thread, no clock.

Listeners decide. First come those who have heard nothing yet, in the order of their arrival. Then come those whose
audio runs out first. docs/reliability.md says it for users, tests/test_schedule.py tries it on a pretended GPU.
"""

from dataclasses import dataclass

from qwen_megakernel.backend.interfaces import RECENT_FRAMES
from qwen_megakernel.engine.sequence import Sequence, State

NEW_AT_ONCE = 8
"""Sequences that are prefilled between two launches. A prompt takes 1 ms on an H200, so 8 hold a frame up by 8 ms: a
tenth of the 80 ms that it lasts. 64 callers at once then hear no gap (docs/log.md, 2026-11-21)."""

AHEAD_S = 0.25
"""A sequence that is this much further ahead of its listener than those being computed waits for them. On a pretended
H200 it lowers p95 TTFC at 10 requests a second from 7.5 to 5.1 ms and costs no throughput (docs/log.md, 2026-11-21)."""

HURRY_S = 0.07
"""A listener with less audio left than this waits for nobody, and only one new prompt comes before it. With 50 ms, 15
of 64 callers at once heard a gap; with 70 ms none did (docs/log.md, 2026-11-21)."""

_FIRST_FRAME_S = 0.005
_SMOOTHING = 0.1
"""The estimate of a frame's time starts at a guess between a GPU's 1.5 ms and a CPU's 20 ms, and follows within some
ten frames. It only shifts when a chunk is due, so its first value matters little."""


@dataclass(frozen=True, eq=False)
class Push:
    """Frames for the vocoder, the same count for each of these sequences.

    Attributes:
        short: those whose chunk ends with them, full or not: their text has run out.
    """

    sequences: list[Sequence]
    frames: int
    short: list[Sequence]


class Scheduler:
    """Attributes:
    frame_s: seconds from a launch to its codes, averaged.
    """

    def __init__(self, width: int, together: int, shares_pushes: bool):
        """
        Args:
            width: sequences of a launch, at most.
            together: sequences of a vocoder push, at most.
            shares_pushes: frames may wait on the device, so that two sequences share a push.
        """
        self._width, self._together, self._shares_pushes = width, together, shares_pushes
        self.frame_s = _FIRST_FRAME_S

    def frame_took(self, seconds: float) -> None:
        self.frame_s += _SMOOTHING * (seconds - self.frame_s)

    # ------------------------------------------------------------ prefill

    def to_prefill(self, running: list[Sequence], now: float) -> list[Sequence]:
        """Who gets prompt or reference computed before the next launch: first come, first served."""
        new = [s for s in running if s.state in (State.PREFILLING, State.REFERENCE)]
        if not new:
            return []
        speaking = [s for s in running if s.runs_out is not None and not (s.starved or s.reason)]
        hurry = any(s.runs_out < now + HURRY_S for s in speaking)
        return new[: 1 if hurry else NEW_AT_ONCE]

    @staticmethod
    def reads_reference(sequence: Sequence, running: list[Sequence]) -> bool:
        """Does this sequence take the voice's reference through the vocoder? The first with the voice does, the others
        wait for it and copy what it left."""
        return sequence is next(s for s in running if s.reference and s.voice_digest == sequence.voice_digest)

    # ------------------------------------------------------------ frames

    def ready(self, running: list[Sequence]) -> list[Sequence]:
        """Whose next frame can be launched, the most urgent first."""
        return sorted((s for s in running if s.ready), key=lambda s: s.due_at(self.frame_s))

    def to_launch(self, ready: list[Sequence], computed: list[Sequence], now: float) -> list[Sequence]:
        """Who gets a frame now; nobody where it is better to wait for the launch that is being computed.

        Args:
            ready: the most urgent first.
            computed: of the launches on the device.
        """
        return [] if computed and ready and self._better_wait(ready, computed, now) else ready[: self._width]

    def _better_wait(self, ready: list[Sequence], computed: list[Sequence], now: float) -> bool:
        """Would a launch delay computed sequences whose listeners run out much sooner? Or is there time to join them?
        Two halves by turns for ever take twice as long as one launch of all (docs/log.md, 2026-11-22)."""
        first = ready[0].due_at(self.frame_s)
        if first > min(s.due_at(self.frame_s) for s in computed) + AHEAD_S:
            return True
        fit = len(computed) + len(ready) <= self._width
        return fit and ready[0].runs_out is not None and first > now + HURRY_S

    # ------------------------------------------------------------ vocoder

    def to_push(
        self, candidates: list[Sequence], running: list[Sequence], now: float, wait: bool
    ) -> tuple[list[Push], list[Sequence]]:
        """What goes to the vocoder now, and who waits to share a later push.

        Sequences with equally many frames go together, those first whose listeners have heard nothing. One whose
        samples are reproducible goes alone, with whole chunks: a sum's last bits depend on what else is pushed.

        Args:
            candidates: those with new frames, and those that have waited; none is marked as held any more.
            wait: False where nobody will come to share a push.
        """
        # Asked once: text may come at any moment.
        short = [s for s in candidates if s.idle and not s.request.reproducible]
        groups: dict[tuple[int, int], list[Sequence]] = {}
        for number, sequence in enumerate(candidates):
            if sequence.vocoder_due(sequence in short) and not sequence.settled:
                alone = number if sequence.request.reproducible else -1
                groups.setdefault((sequence.missing, alone), []).append(sequence)
        pushes: list[Push] = []
        waiting: list[Sequence] = []
        for (frames, _), group in sorted(groups.items(), key=lambda item: all(s.chunks_given for s in item[1])):
            for first in range(0, len(group), self._together):
                some = group[first : first + self._together]
                calm = wait and some[0] not in short and self._is_calm(some, frames, now)
                if calm and any(s.ready and s.shares_pushes for s in running if s not in waiting):
                    waiting += some
                else:
                    pushes.append(Push(some, frames, [s for s in some if s in short]))
        return pushes, waiting

    def _is_calm(self, sequences: list[Sequence], frames: int, now: float) -> bool:
        """A single full ring of frames may wait, if its listener does not run out meanwhile. Two together take 2.4 ms,
        one by one 3.0 (docs/log.md, 2026-11-21)."""
        if not self._shares_pushes or frames < RECENT_FRAMES or len(sequences) > 1:
            return False
        soon = now + HURRY_S + self.frame_s
        first = sequences[0]
        if first.request.reproducible or first.reason is not None:
            return False
        return first.runs_out is not None and first.runs_out > soon
