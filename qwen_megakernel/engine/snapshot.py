"""Snapshot: what an engine holds at one moment. Nothing can be changed through it."""

from dataclasses import dataclass

from qwen_megakernel.engine.core import EngineCore
from qwen_megakernel.engine.sequence import SpeechSequence, State


@dataclass(frozen=True)
class SequenceSnapshot:
    """One open utterance.

    Attributes:
        seed: the utterance's.
        state: where it is on its way.
        slot: None without one.
        text_rows: trailing text rows that the frame decoder has.
        launched, seen, handed_out: frames that were launched, whose codes were seen, that went out in chunks.
        idle: its next frame needs text, and none is on its way.
    """

    seed: int
    state: State
    slot: int | None
    text_rows: int
    launched: int
    seen: int
    handed_out: int
    idle: bool


@dataclass(frozen=True)
class Snapshot:
    """The engine's threads go on while it is taken, so its numbers fit together only if the engine rests.

    An engine at rest has no sequence, all slots and places free, nothing in flight and nothing in its inbox.

    Attributes:
        sequences: open utterances, whose result somebody may wait for.
        unsettled: utterances whose end is not known yet.
        running: utterances with a slot.
        waiting: utterances queued for a slot.
        held: utterances whose frames wait to share a vocoder push.
        slots: of the frame decoder.
        free_slots: their numbers, sorted.
        free_places: utterances that could be admitted now.
        in_flight: launches and pushes that were queued and not collected.
        inbox: messages that the engine's thread has not taken.
        kept_openings: voices whose prompt opening is kept.
        kept_prefixes: openings whose keys and values are kept.
        kept_references: voices whose vocoder state is kept.
        alive: the engine's thread runs.
    """

    sequences: tuple[SequenceSnapshot, ...]
    unsettled: int
    running: int
    waiting: int
    held: int
    slots: int
    free_slots: tuple[int, ...]
    free_places: int
    in_flight: int
    inbox: int
    kept_openings: int
    kept_prefixes: int
    kept_references: int
    alive: bool

    @property
    def at_rest(self) -> bool:
        """Nobody speaks or waits, and nothing is computed."""
        busy = self.sequences or self.unsettled or self.running or self.waiting or self.held or self.in_flight
        return not busy and self.free_slots == tuple(range(self.slots))

    def sequence(self, seed: int) -> SequenceSnapshot | None:
        """The open utterance of a seed; None: there is none."""
        return next((s for s in self.sequences if s.seed == seed), None)


def snapshot_of(core: EngineCore, kept_openings: int) -> Snapshot:
    admission, loop, slots, pipeline = core.admission, core.loop, core.loop.slots, core.loop.pipeline
    return Snapshot(
        sequences=tuple(_snapshot_of(sequence) for sequence in admission.open.copy()),
        unsettled=admission.unsettled,
        running=len(slots.running),
        waiting=len(slots.waiting),
        held=len(loop.held),
        slots=core.slots,
        free_slots=tuple(sorted(slots.free)),
        free_places=admission.free_places,
        in_flight=len(pipeline.in_flight) if pipeline else 0,
        inbox=core.inbox_size,
        kept_openings=kept_openings,
        kept_prefixes=pipeline.kept_prefixes if pipeline else 0,
        kept_references=pipeline.kept_references if pipeline else 0,
        alive=core.alive,
    )


def _snapshot_of(sequence: SpeechSequence) -> SequenceSnapshot:
    return SequenceSnapshot(
        seed=sequence.seed,
        state=sequence.state,
        slot=sequence.slot,
        text_rows=sequence.text_rows,
        launched=sequence.launched,
        seen=len(sequence.codes),
        handed_out=sequence.handed_frames,
        idle=sequence.idle,
    )
