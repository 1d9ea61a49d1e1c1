"""Admission: which sequences are open, and how each one ended.

Every open sequence has a place, in a slot or in the queue. Any thread may call these methods, also from a finalizer or
a signal handler. Those may have interrupted the thread that holds a lock, so the methods take no lock that they would
wait for. Shared state changes by one atomic operation at a time.
"""

import logging
import math
import queue
import threading
from collections import deque
from contextlib import suppress
from functools import partial

from qwen_megakernel.engine.seat import Seat
from qwen_megakernel.engine.sequence import NO_SLOT, SpeechSequence
from qwen_megakernel.errors import EngineBusy, EngineClosed, EngineDied, OutOfMemoryError, TTSError

log = logging.getLogger(__name__)

ENDS = ("eos", "length", "runaway", "cancelled", "failed")
RUNAWAYS = ("runaway_repeats", "runaway_silence", "runaway_standstill", "runaway_babble")
COUNTED = ("utterances", "frames", *ENDS, *RUNAWAYS, "lost", "retries", "busy", "timed_out", "stuck", "kernel_faults")
"""The counters. `failed` includes `timed_out` (in the queue) and `stuck` (in a callback). `RUNAWAYS` are the kinds of
`runaway`. `lost` are those of `eos` that left out text (`Audio.lost`). `retries` are utterances said again."""

_SUSTAINED = 0.9
"""Share of the measured throughput that is given to live listeners. The rest covers prefill and bursts. An H200 then
takes 190 listeners; 200 at once on average heard no gap (docs/log/2026-11-21.md#many-callers-h200)."""


class Admission:
    def __init__(self, slots: int, max_queue: int):
        """`max_queue`: sequences beyond the slots that may wait for one."""
        self.slots = slots
        self.running_limit = slots  # the most sequences that have a slot at once, if all are heard at speed 1.0
        self._max_queue = max_queue
        self.measured = 0.0  # seconds of the model's audio that the device makes in one; 0: nobody has measured
        self.sustained = math.inf  # those for live listeners
        # The loop's: sequences whose prompt is built. None: text came for a sequence, or one was cancelled.
        self.inbox: queue.SimpleQueue[SpeechSequence | None] = queue.SimpleQueue()
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # the watchdog's; None makes it look now
        self.fault: BaseException | None = None  # why the engine is dead
        self.closed = False  # it takes no more sequences
        self.draining = False  # the same, but the loop goes on
        self.ended = False  # the loop has settled every sequence, or never will
        self.places = deque([None] * (slots + max_queue))  # free ones
        self._excess: deque[None] = deque()  # places that are no longer there once they are free
        self.seats: set[Seat] = set()  # that have a place
        self.open: set[SpeechSequence] = set()  # somebody may still wait for them
        self.unsettled: set[SpeechSequence] = set()  # their end is not known yet
        self.some_ended = False  # since the loop has last looked
        self._tally: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()  # events not yet counted
        self._counts = dict.fromkeys(COUNTED, 0)
        self._counting = threading.RLock()

    def sustain(self, audio_s_per_s: float) -> None:
        """Limit the running sequences to what the device sustains. Further callers wait in the queue, even if slots are
        free. Only one thread calls it: the one that loads, and then the engine's."""
        self.measured, before = audio_s_per_s, self.running_limit
        self.sustained = _SUSTAINED * audio_s_per_s
        self.running_limit = max(1, min(self.slots, int(self.sustained)))
        for _ in range(before - self.running_limit):
            try:
                self.places.pop()
            except IndexError:
                self._excess.append(None)
        for _ in range(self.running_limit - before):
            self.free_place()

    def free_place(self) -> None:
        """There is one more place."""
        try:
            self._excess.pop()
        except IndexError:
            self.places.append(None)

    def seat(self) -> Seat:
        """For several utterances, one after the other."""
        return Seat(self.places.pop, self.free_place, self.seats, self.wake)

    def check_open(self, seat: Seat | None = None) -> None:
        """Raises EngineClosed."""
        if self.fault:
            raise self.death()
        if self.closed:
            raise EngineClosed("the engine is closed; load a new one")
        if self.draining and not (seat and seat.free):
            raise EngineClosed("the engine is closing and takes no more utterances; load a new one")

    def check(self, seat: Seat | None = None) -> None:
        """Is there a place for one more? Raises EngineClosed, EngineBusy: no."""
        self.check_open(seat)
        if not self.places and not (seat and seat.free):
            self.tally("busy")
            raise EngineBusy(
                f"all {self.running_limit} streams are taken and {self._max_queue} more wait, for a slot or for their "
                "text; try later or raise max_streams or max_queue"
            )

    def admit(self, sequence: SpeechSequence) -> None:
        """Give a sequence its place. Raises EngineClosed, EngineBusy: nothing was taken."""
        try:
            if sequence.seat:
                sequence.seat.take()
            else:
                self.places.pop()
        except IndexError:
            self.check()
            return self.admit(sequence)
        self.unsettled.add(sequence)
        self.open.add(sequence)
        if self.closed:  # since `check`: the loop may have missed this one
            self.settle_closed(sequence)
            self.check_open()

    def callback_failed(self, sequence: SpeechSequence, error: BaseException) -> None:
        """One of the sequence's callbacks has raised."""
        self.settle(sequence, error=error)
        sequence.result.error = sequence.result.error or error  # it may have been settled before
        self.wake()

    def wake(self) -> None:
        """Text came, or a sequence was cancelled: the loop looks again."""
        self.inbox.put(None)

    def settle(self, sequence: SpeechSequence, reason: str = "", error: BaseException | None = None) -> None:
        """End a sequence with a reason or an error; later calls do nothing. Waiters wake up after its last callback."""
        try:
            self.unsettled.remove(sequence)
        except KeyError:
            return
        result = sequence.result
        try:
            if error is None:
                result.audio = sequence.output.assemble(reason)
        except BaseException as failure:
            error = failure
        error = error and (OutOfMemoryError.of(error) or error)
        result.error = error or result.error
        result.settled = True
        self.some_ended = True  # in this order: the loop looks for settled ones once it has seen this
        try:
            if callbacks := result.callbacks:
                callbacks.call(partial(self._announce, sequence), last=True)
                return
        except RuntimeError:  # no more threads
            log.exception("a callback was never called")
        self._announce(sequence)

    def settle_closed(self, sequence: SpeechSequence) -> None:
        """Settle a sequence because the engine has ended."""
        self.settle(sequence, "cancelled", self.death() if self.fault else None)

    def abandon(self, sequence: SpeechSequence, error: TTSError, counted: str | None = None) -> None:
        """End a sequence and wake its waiters, without waiting for its callback."""
        callbacks = sequence.result.callbacks
        if not self._close(sequence, error):
            return
        if counted:
            self.tally(counted)
        if callbacks:
            callbacks.broken = True
            with suppress(RuntimeError):  # its thread never began, and the process has no more
                callbacks.call(lambda: None, last=True)
        self.settle(sequence, error=error)
        try:
            threading.Thread(target=_call_on_end, args=(sequence,), name="qwen_megakernel on_end", daemon=True).start()
        except RuntimeError:  # no more threads, and whoever else waits must be told too
            _call_on_end(sequence)
        self.wake()

    def forked(self) -> None:
        """This is a forked process's copy: the engine is dead here. Whoever waits here for an utterance gets the error.
        Other threads held locks when the process forked, so those are replaced; no callback is called a second time."""
        why = "this process was forked, and an engine's threads stay where it was loaded: start processes with spawn"
        self.fault = RuntimeError(why)
        self.closed = self.ended = True
        self._counting = threading.RLock()
        for sequence in self.open:
            result = sequence.result
            sequence.input.lock, sequence.input.cancelled = threading.Lock(), True
            result.error, result.settled, result.callbacks, result.done = self.death(), True, None, threading.Event()
            result.done.set()
            result.chunks.put(None)
        self.open.clear()
        self.unsettled.clear()

    def death(self) -> EngineDied:
        return EngineDied(f"the engine's thread died: {self.fault!r}; load a new engine")

    def _announce(self, sequence: SpeechSequence) -> None:
        if self._close(sequence):
            _call_on_end(sequence)

    def _close(self, sequence: SpeechSequence, error: TTSError | None = None) -> bool:
        """Remove it from `open` and wake its waiters. True for the first caller only. `error`: if it has none."""
        try:
            self.open.remove(sequence)
        except KeyError:
            return False
        result = sequence.result
        result.error = result.error or error
        reason = result.audio.finish_reason if result.audio and not result.error else "failed"
        self.tally(reason)
        if reason == "runaway":
            self.tally(f"runaway_{sequence.runaway}")
        elif result.audio and result.audio.lost:
            self.tally("lost")
        if sequence.seat:
            sequence.seat.give_back()
        else:
            self.free_place()
        if sequence.slot == NO_SLOT:
            sequence.forget()
        result.chunks.put(None)
        result.done.set()
        if self.ended:
            self.bell.put(None)  # it may be the last one that the watchdog waits for
        result.callbacks = None  # breaks a reference cycle, which would wait for the garbage collector
        return True

    def tally(self, event: str, count: int = 1) -> None:
        """Count one of `COUNTED`, later."""
        self._tally.put((event, count))

    @property
    def frames(self) -> int:
        """Those that were counted."""
        return self._counts["frames"]

    @property
    def counts(self) -> dict[str, int]:
        """The counters up to now, by the names of `COUNTED`."""
        with self._counting:
            self._count()
            return {**self._counts, "utterances": len(self.open) + sum(self._counts[end] for end in ENDS)}

    def count(self) -> None:
        """Count the events so far, unless a reader of `counts` is doing it."""
        if self._counting.acquire(blocking=False):
            try:
                self._count()
            finally:
                self._counting.release()

    def forget(self) -> None:
        """Reset the counters. No sequence may be open."""
        with self._counting:
            self._count()
            self._counts = dict.fromkeys(COUNTED, 0)

    def _count(self) -> None:
        for _ in range(self._tally.qsize()):
            try:
                event, count = self._tally.get_nowait()
                self._counts[event] += count
            except queue.Empty:
                return


def _call_on_end(sequence: SpeechSequence) -> None:
    result, on_end = sequence.result, sequence.result.on_end
    result.on_chunk = result.on_end = None  # the callbacks may hold the utterance: breaks that cycle too
    if on_end:
        try:
            on_end()
        except Exception:
            log.exception("on_end raised an error; its utterance had ended")
