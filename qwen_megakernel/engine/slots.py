"""Slots: which sequence has which slot and which pages of keys and values, and who waits for them.

A sequence gets a slot once there are pages for all positions that it can ever need, and it gets them at once. So it
never lacks one, whoever comes later, and nobody who has a slot waits for another. What it can need is known: its
prompt, and frames up to its limit, or up to where the runaway guard ends it at the latest. While its text is open the
guard cannot tell, so it has pages up to its limit. When the text is complete, those that it cannot need come back.
A wait for pages is like one for a slot: first come, first served, up to `queue_timeout`.

Who has a seat (seat.py) comes before strangers with its next utterances. Between two of them its slot is kept, so that
no stranger's speech is in between. Not for ever, because its writer may have stalled.
"""

from collections import deque
from collections.abc import Callable

from qwen_megakernel.backend.interfaces import FrameDecoder
from qwen_megakernel.backend.sizes import PAGE_POSITIONS
from qwen_megakernel.engine.admission import Admission
from qwen_megakernel.engine.seat import Seat
from qwen_megakernel.engine.sequence import NO_SLOT, SpeechSequence, State
from qwen_megakernel.errors import EngineBusy

_KEPT_S = 10.0  # a writer that is silent for longer than that has stopped speaking, or waits for a tool


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
        self.free: list[int] = []  # the slots' numbers
        self.kept: list[Seat] = []  # each keeps one of these for its next utterance
        self.pages = 0  # in all; 0: slots share none
        self.free_pages: list[int] = []  # their numbers

    def use(self, decoder: FrameDecoder) -> None:
        """Give out this decoder's slots and pages from now on. Whoever has one of another decoder must have ended."""
        self.release()
        self.free = list(range(decoder.slots))
        self.pages = decoder.pages
        self.free_pages = list(range(decoder.pages))

    def available(self, sequence: SpeechSequence) -> bool:
        """Can this sequence get a slot? A listener at speed 2 needs the model's audio twice as fast."""
        returns = sequence.seat in self.kept
        if len(self.free) + returns <= len(self.kept) or self._pages(sequence, sequence.longest) > len(self.free_pages):
            return False
        speeds = [s.request.speed for s in self.running] + [seat.speed for seat in self.kept]
        return returns or not speeds or sum(speeds) + sequence.request.speed <= self._admission.sustained

    @property
    def new(self) -> list[SpeechSequence]:
        """Those whose prompt or reference is not computed yet, in the order in which they entered."""
        self._new = [s for s in self._new if s.state in (State.PREFILLING, State.REFERENCE)]
        return self._new

    def _pages(self, sequence: SpeechSequence, frames: int) -> int:
        """Pages for a sequence's prompt and so many frames."""
        return -(-sequence.positions(frames) // PAGE_POSITIONS) if self.pages else 0

    @property
    def reserved_pages(self) -> int:
        """Pages of running sequences."""
        return self.pages - len(self.free_pages)

    @property
    def filled_pages(self) -> int:
        """Those of them that hold keys and values by now. Any thread may ask."""
        return sum(self._pages(s, s.launched) for s in self.running.copy())

    def trim(self, sequence: SpeechSequence) -> None:
        """A running sequence's text is complete: take back the pages that it cannot need."""
        sequence.limit()
        kept = self._pages(sequence, sequence.longest)
        self._give_back(sequence, kept)

    def _give_back(self, sequence: SpeechSequence, kept: int = 0) -> None:
        """Take a sequence's pages but the first `kept`. Who comes next gets the same ones in the same order, and a slot
        whose page table already lists them needs no new one."""
        self.free_pages += reversed(sequence.pages[kept:])
        del sequence.pages[kept:]

    @property
    def seconds_to_deadline(self) -> float | None:
        """Seconds until the first in the queue has waited too long, or a slot is no longer kept; None: nobody waits."""
        if not self.waiting:
            return None
        return max(0.0, min([self.waiting[0].deadline, *(seat.until for seat in self.kept)]) - self._clock())

    def queue(self, sequence: SpeechSequence) -> None:
        """Queue a sequence whose prompt is built."""
        if sequence.result.settled:
            return
        if sequence.seat and sequence.seat.entered:
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)

    def settle_cancelled(self) -> None:
        """End cancelled sequences that have no slot. The others end with their next step."""
        for sequence in [s for s in self._admission.open.copy() if s.slot == NO_SLOT and s.input.cancelled]:
            self._admission.settle(sequence, "cancelled")
        self.waiting = deque(s for s in self.waiting if not s.result.settled)

    def assign(self) -> None:
        """Give slots to those that wait. End those that waited too long."""
        if self.kept:
            self.kept = [seat for seat in self.kept if not seat.left and seat.until > self._clock()]
        while self.waiting:
            sequence = self.waiting[0]
            available = self.available(sequence)
            if not available and sequence.deadline > self._clock():
                break
            self.waiting.popleft()
            if sequence.result.settled:
                continue
            if available:
                needed = self._pages(sequence, sequence.longest)
                sequence.enter(self.free.pop(), [self.free_pages.pop() for _ in range(needed)])
                self.running.append(sequence)
                self._new.append(sequence)
                if seat := sequence.seat:
                    seat.entered = True
                    self.kept = [other for other in self.kept if other is not seat]
            else:
                self._admission.tally("timed_out")
                why = f"no stream became free within {self._queue_timeout:g} s; try later or raise max_streams"
                if self.free and self._pages(sequence, sequence.longest) > len(self.free_pages):
                    why = f"no memory became free within {self._queue_timeout:g} s; try later or raise kv_memory"
                self._admission.settle(sequence, error=EngineBusy(why))

    def release(self) -> bool:
        """Take back the slots of those that have ended. Returns whether there were any."""
        if not self._admission.some_ended:
            return False
        self._admission.some_ended = False  # first, because another thread may end one meanwhile
        ended = [s for s in self.running if s.result.settled]
        for sequence in ended:
            self.free.append(sequence.slot)
            self._give_back(sequence)
            self.running.remove(sequence)
            sequence.forget()
            if (seat := sequence.seat) and not seat.left:
                seat.speed, seat.until = sequence.request.speed, self._clock() + _KEPT_S
                self.kept.append(seat)
        return bool(ended)

    def clear(self) -> None:
        """The engine has ended: forget everybody."""
        for forgotten in (self.running, self._new, self.waiting, self.kept):
            forgotten.clear()
