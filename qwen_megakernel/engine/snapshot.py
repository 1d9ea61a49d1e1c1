"""Snapshot: what an engine holds at one moment. Nothing can be changed through it."""

from dataclasses import dataclass

from qwen_megakernel.engine.core import EngineCore
from qwen_megakernel.engine.device_pipeline import DevicePipeline
from qwen_megakernel.engine.sequence import NO_SLOT, SpeechSequence, State


@dataclass(frozen=True)
class SequenceSnapshot:
    """One open utterance."""

    seed: int
    state: State
    slot: int | None  # None without one
    text_rows: int  # trailing rows that the frame decoder has
    launched: int  # frames
    seen: int  # frames whose codes were seen
    handed_out: int  # frames that went out in chunks
    idle: bool  # its next frame needs text, and none is on its way


@dataclass(frozen=True)
class Snapshot:
    """The engine's threads go on while it is taken, so its numbers fit together only if the engine rests.

    An engine at rest has no sequence, all slots and places free, nothing in flight and nothing in its inbox.
    """

    sequences: tuple[SequenceSnapshot, ...]  # open utterances, whose result somebody may wait for
    unsettled: int  # utterances whose end is not known yet
    running: int  # utterances with a slot
    waiting: int  # utterances queued for a slot
    held: int  # utterances whose frames wait to share a vocoder push
    slots: int  # of the frame decoder
    free_slots: tuple[int, ...]  # their numbers, sorted
    pages: int  # of keys and values that the slots share; 0: they share none
    pages_reserved: int  # of these, for utterances with a slot
    pages_filled: int  # of those reserved, by now
    free_places: int  # utterances that could be admitted now
    in_flight: int  # launches and pushes that were queued and not collected
    inbox: int  # messages that the engine's thread has not taken
    kept_openings: int  # voices whose prompt opening is kept
    kept_prefixes: int  # openings whose keys and values are kept
    kept_references: int  # voices whose vocoder state is kept
    alive: bool  # the engine's thread runs

    @property
    def at_rest(self) -> bool:
        """Nobody speaks or waits, and nothing is computed."""
        busy = self.sequences or self.unsettled or self.running or self.waiting or self.held or self.in_flight
        return not busy and self.free_slots == tuple(range(self.slots)) and self.pages_reserved == 0

    def sequence(self, seed: int) -> SequenceSnapshot | None:
        """The open utterance of a seed; None: there is none."""
        return next((s for s in self.sequences if s.seed == seed), None)


def snapshot_of(core: EngineCore, kept_openings: int) -> Snapshot:
    admission, loop, slots = core.admission, core.loop, core.loop.slots
    pipeline: DevicePipeline | None = getattr(loop, "pipeline", None)
    return Snapshot(
        sequences=tuple(_snapshot_of(sequence) for sequence in admission.open.copy()),
        unsettled=len(admission.unsettled),
        running=len(slots.running),
        waiting=len(slots.waiting),
        held=len(loop.held),
        slots=pipeline.decoder.slots if pipeline else core.slots,
        free_slots=tuple(sorted(slots.free)),
        pages=slots.pages,
        pages_reserved=slots.reserved_pages,
        pages_filled=slots.filled_pages,
        free_places=len(admission.places),
        in_flight=len(pipeline.in_flight) if pipeline else 0,
        inbox=admission.inbox.qsize(),
        kept_openings=kept_openings,
        kept_prefixes=len(pipeline.decoder.prefixes) if pipeline else 0,
        kept_references=len(pipeline.references) if pipeline else 0,
        alive=core.threads[0].is_alive(),
    )


def _snapshot_of(sequence: SpeechSequence) -> SequenceSnapshot:
    return SequenceSnapshot(
        seed=sequence.request.seed,
        state=sequence.state,
        slot=None if sequence.slot == NO_SLOT else sequence.slot,
        text_rows=sequence.text_rows,
        launched=sequence.launched,
        seen=len(sequence.output.codes),
        handed_out=sequence.output.handed_frames,
        idle=sequence.idle,
    )
