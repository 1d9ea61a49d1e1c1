"""Slots: which sequence has which slot, and who waits for one."""

from collections import deque
from collections.abc import Callable

from qwen_megakernel.engine.admission import Admission
from qwen_megakernel.engine.sequence import NO_SLOT, SpeechSequence, State
from qwen_megakernel.errors import EngineBusy


class Slots:
    """The engine's thread owns it; others may look."""

    def __init__(self, admission: Admission, queue_timeout: float, clock: Callable[[], float]):
        """`queue_timeout`: seconds that a sequence waits for a slot, at most."""
        self._admission = admission
        self._queue_timeout = queue_timeout
        self._clock = clock
        self.running: list[SpeechSequence] = []  # with a slot
        self._new: list[SpeechSequence] = []  # of these, those that entered last
        self.waiting: deque[SpeechSequence] = deque()  # queued for one, first come, first served
        self.free = list(range(admission.slots))  # the slots' numbers

    def available(self, sequence: SpeechSequence) -> bool:
        """Can this sequence get a slot? A listener at speed 2 needs the model's audio twice as fast."""
        if not self.free or not self.running:
            return bool(self.free)
        return sum([s.request.speed for s in (sequence, *self.running)]) <= self._admission.sustained

    @property
    def new(self) -> list[SpeechSequence]:
        """Those whose prompt or reference is not computed yet, in the order in which they entered."""
        self._new = [s for s in self._new if s.state in (State.PREFILLING, State.REFERENCE)]
        return self._new

    @property
    def seconds_to_deadline(self) -> float | None:
        """Seconds until the first in the queue has waited too long; None: nobody waits."""
        return max(0.0, self.waiting[0].deadline - self._clock()) if self.waiting else None

    def queue(self, sequence: SpeechSequence) -> None:
        """Queue a sequence whose prompt is built."""
        if not sequence.result.settled:
            self.waiting.append(sequence)

    def settle_cancelled(self) -> None:
        """End cancelled sequences that have no slot. The others end with their next step."""
        for sequence in [s for s in self._admission.open.copy() if s.slot == NO_SLOT and s.input.cancelled]:
            self._admission.settle(sequence, "cancelled")
        self.waiting = deque(s for s in self.waiting if not s.result.settled)

    def assign(self) -> None:
        """Give slots to those that wait. End those that waited too long."""
        while self.waiting:
            sequence = self.waiting[0]
            available = self.available(sequence)
            if not available and sequence.deadline > self._clock():
                break
            self.waiting.popleft()
            if sequence.result.settled:
                continue
            if available:
                sequence.enter(self.free.pop())
                self.running.append(sequence)
                self._new.append(sequence)
            else:
                self._admission.tally("timed_out")
                why = f"no stream became free within {self._queue_timeout:g} s; try later or raise max_streams"
                self._admission.settle(sequence, error=EngineBusy(why))

    def release(self) -> bool:
        """Take back the slots of those that have ended. Returns whether there were any."""
        if not self._admission.some_ended:
            return False
        self._admission.some_ended = False  # first, because another thread may end one meanwhile
        ended = [s for s in self.running if s.result.settled]
        for sequence in ended:
            self.free.append(sequence.slot)
            self.running.remove(sequence)
            sequence.forget()
        return bool(ended)

    def clear(self) -> None:
        """The engine has ended: forget everybody."""
        for sequences in (self.running, self._new, self.waiting):
            sequences.clear()
