"""Scheduler: which work comes next. Sequences and the time go in, decisions come out; no device, no thread, no clock.

Listeners who have heard nothing yet come first, in the order of their arrival. Then come those whose audio runs out
first. docs/reliability.md explains the rules to users. tests/test_schedule.py tries them on a simulated GPU.
"""

from dataclasses import dataclass

from qwen_megakernel.backend.interfaces import PUSH_FRAMES, RECENT_FRAMES
from qwen_megakernel.engine.sequence import LONG_CHUNK, SpeechSequence

NEW_AT_ONCE = 8
"""The most sequences that are prefilled between two launches. A prompt takes 1 ms on an H200, so 8 delay a frame by
8 ms, a tenth of its 80 ms. 64 callers at once then hear no gap (docs/log/2026-11-21.md#many-callers-pretended)."""

AHEAD_S = 0.25
"""A sequence whose lead is this much larger than that of those being computed waits for them. On a simulated H200 this
lowers p95 TTFC at 10 requests a second from 7.5 to 5.1 ms and costs no throughput
(docs/log/2026-11-21.md#many-callers-pretended)."""

HURRY_S = 0.07
"""A listener with less audio left than this does not wait, and only one new prompt comes before it. With 50 ms, 15
of 64 callers at once heard a gap; with 70 ms none did (docs/log/2026-11-21.md#many-callers-pretended)."""

NEW_IN_HURRY = 4
"""So many come before it where a launch takes hundreds: it also takes the rows of several prompts at once
(docs/log/2026-11-28.md#prompts-together)."""

ENOUGH_FRAMES = 64
"""Frames that do not wait for a larger push. Every push takes 0.4 ms besides its frames on an H200. On a simulated
one, 64 always open get 349, 365, 371 and 374 seconds of audio a second with 1, 32, 48 and 64
(docs/log/2026-11-23.md#vocoder-pushes-hold).
"""

SMALL_LAUNCH = 64
"""Who has heard nothing yet does not wait for a launch of more sequences. A launch of 64 takes 3.3 ms on an H200. One
of 16 takes 1.6 ms, but then the 64 need further ones. On a simulated H200, 64 always open get 676 seconds of audio a
second instead of 622, with p50 TTFC 12 ms instead of 9. Live listeners hear their first audio as soon as before
(docs/log/2026-11-28.md#wide-shapes)."""

_FIRST_FRAME_S = 0.005
_SMOOTHING = 0.1
"""The estimate of a frame's time starts at a guess between a GPU's 1.5 ms and a CPU's 20 ms, and follows within some
ten frames. It only shifts when a chunk is due, so its first value matters little."""


@dataclass(frozen=True, eq=False)
class Push:
    """Frames for the vocoder."""

    sequences: list[SpeechSequence]
    frames: list[int]  # how many of each sequence
    short: list[SpeechSequence]  # their chunk ends with these frames, full or not, because their text has run out


class Scheduler:
    def __init__(self, width: int, narrow: int, most_frames: int):
        """`width`: the most sequences in a launch. `narrow`: in a quick launch (`FrameDecoder`). `most_frames`: of a
        vocoder push; 0: sequences share none."""
        self._width = width
        self._narrow = narrow
        self._most_frames = most_frames
        self.frame_s = _FIRST_FRAME_S  # seconds from a launch to its codes, averaged

    def frame_took(self, seconds: float) -> None:
        self.frame_s += _SMOOTHING * (seconds - self.frame_s)

    def to_prefill(self, new: list[SpeechSequence], running: list[SpeechSequence], now: float) -> list[SpeechSequence]:
        """Sequences whose prompt or reference is computed before the next launch. `new`: those that lack it, in the
        order in which they came."""
        if not new:
            return []
        listening = (s for s in running if s.output.runs_out is not None)
        hurry = any(runs_out_soon(s, now) and not (s.starved or s.reason) for s in listening)
        if not hurry:
            return new[:NEW_AT_ONCE]
        return new[: NEW_IN_HURRY if self._width > self._narrow else 1]

    @staticmethod
    def reads_reference(sequence: SpeechSequence, running: list[SpeechSequence]) -> bool:
        """Does it take the voice's reference through the vocoder? The first does; others wait, and copy the state."""
        return sequence is next(s for s in running if s.reference and s.voice_digest == sequence.voice_digest)

    def ready(self, running: list[SpeechSequence]) -> list[SpeechSequence]:
        """Sequences whose next frame can be launched, the most urgent first."""
        frame_s = self.frame_s
        # Most are in flight, and a property's call takes longer than the flag.
        return sorted([s for s in running if not s.in_flight and s.ready], key=lambda s: s.due_at(frame_s))

    def to_launch(
        self, ready: list[SpeechSequence], computed: list[SpeechSequence], now: float
    ) -> list[SpeechSequence]:
        """Sequences that get a frame now; none if it is better to wait for the launch that is being computed. `ready`:
        the most urgent first. `computed`: sequences in the launches on the device."""
        if computed and ready and self._better_wait(ready, computed, now):
            return []
        many = len(ready)
        # Who lacks frames of the first chunk does not wait for a launch of hundreds, unless that chunk is long. All who
        # run out soon come along.
        if many > SMALL_LAUNCH and any(not s.given and s.launched < LONG_CHUNK for s in ready):
            many = sum(runs_out_soon(s, now) for s in ready)
        if 2 * many <= 3 * self._narrow:  # in one launch, 24 take hardly less time than in two
            return ready[: self._narrow]
        return ready[: min(many, self._width)]

    def _better_wait(self, ready: list[SpeechSequence], computed: list[SpeechSequence], now: float) -> bool:
        """Would a launch delay computed sequences whose listeners run out much sooner? Or is there time to join them?
        Two halves that take turns need twice as long as one launch of all
        (docs/log/2026-11-22.md#streams-launched-together)."""
        first = ready[0].due_at(self.frame_s)
        if first > min(s.due_at(self.frame_s) for s in computed) + AHEAD_S:
            return True
        fit = len(computed) + len(ready) <= self._width
        return fit and ready[0].output.runs_out is not None and first > now + HURRY_S

    def to_push(
        self, candidates: list[SpeechSequence], running: list[SpeechSequence], now: float, wait: bool
    ) -> tuple[list[Push], list[SpeechSequence]]:
        """The pushes that go to the vocoder now, and the sequences that wait for a larger push.

        Sequences share a push, whatever they have to give. Those whose listeners run out first come first. Some go
        alone, with whole chunks (`SpeechSequence.alone`). `candidates`: those with new frames, and those that have
        waited. `wait`: False if no sequence will come to share a push."""
        # Asked once, because text may come at any moment.
        short = [s for s in candidates if s.idle and not s.alone]
        due = [s for s in candidates if s.vocoder_due(s in short) and not s.result.settled]
        few = self._most_frames and sum(s.missing for s in due) < ENOUGH_FRAMES
        more = wait and few and any(s.speaking and not (s.starved or s.reason) for s in running if s not in due)
        waiting = [s for s in due if more and s not in short and _is_calm(s, now)]
        pushes: list[Push] = []
        room = 0
        for sequence in sorted((s for s in due if s not in waiting), key=lambda s: s.output.runs_out or 0.0):
            frames = min(sequence.missing, PUSH_FRAMES)
            if sequence.alone or frames > room:
                pushes.append(Push([], [], []))
                room = 0 if sequence.alone else self._most_frames
            room -= frames
            push = pushes[-1]
            push.sequences.append(sequence)
            push.frames.append(frames)
            if sequence in short and frames == sequence.missing:
                push.short.append(sequence)
        return pushes, waiting


def runs_out_soon(sequence: SpeechSequence, now: float) -> bool:
    """Has its listener little audio left, or none yet?"""
    runs_out = sequence.output.runs_out
    return runs_out is None or runs_out < now + HURRY_S


def _is_calm(sequence: SpeechSequence, now: float) -> bool:
    """May its frames wait? Not if its listener runs out meanwhile, or if no room is left for another frame's codes."""
    return not (runs_out_soon(sequence, now) or sequence.alone) and sequence.missing < RECENT_FRAMES
