"""Owner: the one thread that touches frame decoder and vocoder, and every slot.

    inbox -> queue -> [slot] -> prefill -> (frame -> vocoder -> chunk)* -> settled

Each launch gives a frame to the utterances that need it most: those of which nobody has heard yet, then those whose
listeners run out first. Where frame decoder and vocoder share a GPU, a launch is queued there with what the vocoder is
due, codes going from one to the other on the device, and the next while the GPU still works: it does not wait for this
thread, which may have to wait for the interpreter. The owner knows nothing of checkpoints, prompts or callers' options,
and holds no engine: an engine that is dropped ends its owner.
"""

import atexit
import contextlib
import logging
import queue
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from qwen_megakernel.backend.cuda_graphs import synchronize
from qwen_megakernel.backend.frame_decoder import RECENT_FRAMES, FrameDecoder
from qwen_megakernel.engine.callbacks import Listener
from qwen_megakernel.engine.stream import Chunk, Stream
from qwen_megakernel.errors import (
    CallbackError,
    EngineBusy,
    EngineClosed,
    KernelFault,
    OutOfMemoryError,
    RequestError,
    SpeechError,
    TextEndedError,
    TTSError,
)
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.model.prompt_pieces import PromptPieces
from qwen_megakernel.model.vocoder import Vocoder, VocoderState

log = logging.getLogger(__name__)

ENDS = ("eos", "length", "runaway", "cancelled", "failed")
COUNTED = ("utterances", "frames", *ENDS, "busy", "timed_out", "stuck", "kernel_faults")
"""Work, ends by their reason, and what went wrong (`timed_out`, in the queue, and `stuck`, in a callback, are part of
`failed`)."""

_SUSTAINED = 0.9
"""Of the listeners for whom frames can just be made in time, those that are let in."""
_MOST_FAULTS = 3
"""Kernel faults in a row, no frame between them, of a kernel that is worth another try."""
_PATIENCE_S = {"cuda": 30.0, "cpu": 300.0}
"""That a turn of the owner thread may take: a GPU that does not answer is lost, and everybody is told."""
_LISTENER_PATIENCE_S = 30.0
_WATCH_S = 0.5
_THREADS = ("qwen_megakernel owner", "qwen_megakernel watchdog")

_SWITCH_S = 0.0001  # of the interpreter from thread to thread
_NEW_AT_ONCE = 8  # that get their prompt between two launches
_AHEAD_S = 0.25  # of other listeners: who is so far ahead is not launched while they are
_HURRY_S = 0.07  # to a listener's last sample: who is so near waits for nobody, and few are let in before


@dataclass(frozen=True, eq=False)
class _Launch:
    """A frame of each of these utterances, whose codes nobody has seen."""

    streams: list[Stream]
    began: float


@dataclass(frozen=True, eq=False)
class _Push:
    """Frames on their way through the vocoder, the same count for each of these utterances."""

    streams: list[Stream]
    frames: int
    short: list[Stream]  # whose chunk ends with them, full or not: their text has run out
    collect: Callable[[], Tensor]  # waits for their PCM, [streams, samples]


class Owner:
    """Methods without an underscore may be called from any thread."""

    def __init__(
        self,
        decoder: FrameDecoder,
        vocoder: Vocoder,
        *,
        sample_rate: int,
        max_queue: int,
        queue_timeout: float,
        kept_voices: int,
        device: torch.device,
        spare: Callable[[], tuple[FrameDecoder, Vocoder]] | None = None,
    ):
        """
        Args:
            sample_rate: of the vocoder, in Hz.
            max_queue: utterances beyond the slots that may wait for one.
            queue_timeout: seconds that one of them waits at most.
            kept_voices: voices for which the vocoder's state after their reference is kept, the latest used.
            device: of decoder and vocoder.
            spare: makes what takes over after `_MOST_FAULTS` kernel faults in a row; else they end the engine.
        """
        self._cuda = torch.cuda.default_stream(device) if device.type == "cuda" else None
        self._decoder, self._vocoder, self._sample_rate = decoder, vocoder, sample_rate
        self._groups = vocoder.groups
        self._max_queue, self._queue_timeout = max_queue, queue_timeout
        self.fault: BaseException | None = None
        self.closed = self.draining = self.fell_back = False
        self.slots, self.max_positions = decoder.slots, decoder.max_positions
        self._ended = self._hangs = False  # the owner thread: it has told everybody; it never will
        self._spare, self._faults = spare, 0  # in a row
        self.seats = decoder.slots  # utterances in slots at once, at most
        self._patience = _PATIENCE_S[device.type]
        self._turn_began: float | None = None
        self._watching: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Callers share these with the owner thread without a lock, one atomic operation at a time: a finalizer or a
        # signal handler may come in anywhere, and must not wait for the thread that it interrupted.
        self._places = deque(range(decoder.slots + max_queue))  # free ones
        self._open: set[Stream] = set()
        self._unsettled: set[Stream] = set()  # those of which it is not known how they end
        self._tally: queue.SimpleQueue[str] = queue.SimpleQueue()  # what was not yet counted
        self._counts = Counter(dict.fromkeys(COUNTED, 0))
        self._counting = threading.RLock()
        # A stream whose prompt is ready, or None: look again at what waits or was cancelled.
        self._inbox: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._waiting: deque[Stream] = deque()
        self._running: list[Stream] = []
        self._flying: deque[_Launch | _Push] = deque()  # in the order in which the device comes to them
        self._unseen = 0  # launches among them
        self._held: list[Stream] = []
        self._news = False  # text came, or a cancel
        self._frame_s = 0.005  # from a launch to its codes, averaged
        self._free = list(range(decoder.slots))
        self._heard: dict[bytes, VocoderState] = {}  # by a voice's digest; the latest used last
        self._kept_voices = kept_voices
        self._thread = threading.Thread(target=self._run, name=_THREADS[0], daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name=_THREADS[1], daemon=True)

    def start(self) -> None:
        # Coming back from the GPU, the thread waits for the interpreter as long as others compute in Python, at most
        # this interval each time; Python's 5 ms would be more than a frame. It holds for the whole process.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._thread.start()
        self._watchdog.start()
        _OWNERS.add(self)

    def sustain(self, audio_s_per_s: float) -> None:
        """Callers beyond what the device sustains wait in the queue, though there were slots. To be called before
        anybody else knows the engine."""
        self.seats = max(1, min(self.slots, int(_SUSTAINED * audio_s_per_s)))
        for _ in range(self.slots - self.seats):
            self._places.pop()

    def check(self) -> None:
        """Is there a place for one more?

        Raises:
            EngineClosed, EngineBusy: no.
        """
        self.check_open()
        if not self._places:
            self._tally.put("busy")
            raise EngineBusy(
                f"all {self.seats} streams are taken and {self._max_queue} more wait, for a slot or for their "
                "text; try later or raise max_streams or max_queue"
            )

    def check_open(self) -> None:
        """Raises EngineClosed."""
        if self.fault:
            raise self._death()
        if self.closed:
            raise EngineClosed("the engine is closed; load a new one")
        if self.draining:
            raise EngineClosed("the engine is closing and takes no more utterances; load a new one")

    def admit(self, stream: Stream) -> None:
        """Give an utterance its place, before it is handed over with `speak` or `advance`.

        Raises:
            EngineClosed, EngineBusy: nothing was taken.
        """
        try:
            stream.place = self._places.pop()
        except IndexError:
            return self.check() or self.admit(stream)
        self._unsettled.add(stream)
        self._open.add(stream)
        if self.closed:  # since `check`: the owner may have missed it
            self._settle_closed(stream)
            self.check_open()

    def speak(self, stream: Stream, prompt: Prompt, text_complete: bool) -> None:
        """The prompt of an admitted utterance is there."""
        stream.prompt, stream.text_rows, stream.text_complete = prompt, len(prompt.trailing), text_complete
        room = self.max_positions - len(prompt.rows) + 1
        stream.max_frames = min(stream.request.max_frames, room)
        stream.stage_began = time.monotonic()
        stream.deadline = stream.stage_began + self._queue_timeout
        self._inbox.put(stream)

    @torch.inference_mode()
    def advance(self, stream: Stream, step: Callable[[PromptPieces], Tensor]) -> None:
        """A piece of text, under the stream's lock: build the rows that it settles in the caller's thread, and hand
        them on."""
        pieces, began = stream.pieces, time.monotonic()
        if pieces is None:
            raise TextEndedError("the utterance has ended")
        stream.arrived = stream.arrived or began
        try:
            with self.in_order():
                rows = step(pieces)
            if stream.prompt is not None:
                if len(rows) or pieces.ended:
                    stream.incoming.put((rows, pieces.ended))
                    self._look()
            elif pieces.prompt is not None:
                stream.timings |= {"tokenise": pieces.tokenise_s, "prompt": time.monotonic() - began}
                self.speak(stream, pieces.prompt, text_complete=pieces.ended)
        except BaseException as error:  # also an interrupt: nobody else would free the slot
            stream.cancelled = True
            self.settle(stream, error=error)
            self._look()
            raise

    def cancel(self, stream: Stream) -> None:
        """Takes no lock: a finalizer or a signal handler may call it."""
        if not stream.cancelled:
            stream.cancelled = True
            self._look()

    def in_order(self) -> contextlib.AbstractContextManager:
        """For callers that make prompts: before what this thread computes, whatever stream is theirs."""
        return torch.cuda.stream(self._cuda) if self._cuda else contextlib.nullcontext()

    def refuse_own_thread(self, stream: Stream) -> None:
        """Raises RequestError where waiting for the stream would never end."""
        listener = stream.listener
        if threading.current_thread() in (self._thread, listener and listener.thread) and not stream.done.is_set():
            raise RequestError("a callback cannot wait for its own utterance: it would wait for its own thread")

    def settle(self, stream: Stream, reason: str = "", error: BaseException | None = None) -> None:
        """End an utterance, once, with a finish reason or an error. Whoever waits on it wakes up once its listener has
        heard all of it."""
        try:
            self._unsettled.remove(stream)
        except KeyError:
            return
        if isinstance(error, torch.OutOfMemoryError):
            error = OutOfMemoryError(f"no memory was left for this utterance ({error}); lower max_streams")
        try:
            if error is None:
                stream.audio = stream.assemble(reason, self._sample_rate, self._groups)
        except BaseException as failure:
            error = failure
        if error is not None:
            stream.error = error
        stream.over = True
        try:
            if listener := stream.listener:
                listener.tell(partial(self._announce, stream), last=True)
                return
        except RuntimeError:  # no more threads
            log.exception("a listener was never told anything")
        self._announce(stream)

    def _announce(self, stream: Stream) -> None:
        if self._close(stream):
            self._wake(stream)
            self._tell_end(stream)

    def _close(self, stream: Stream) -> bool:
        """Once, whoever does it."""
        try:
            self._open.remove(stream)
        except KeyError:
            return False
        return True

    def _wake(self, stream: Stream) -> None:
        """Whoever waits for it."""
        self._tally.put("failed" if stream.error else stream.audio.finish_reason)
        self._places.append(stream.place)
        if stream.slot is None:
            stream.forget()
        stream.chunks.put(None)
        stream.done.set()
        if self._ended:
            self._watching.put(None)
        stream.listener = None  # which knows the stream: together they would wait for the garbage collector

    @staticmethod
    def _tell_end(stream: Stream) -> None:
        if stream.on_end:
            try:
                stream.on_end()
            except Exception:
                log.exception("on_end raised; its utterance had ended")

    def listen(self, stream: Stream) -> Listener:
        """What calls the stream's callbacks; to be started once it was admitted."""

        def failed(error: BaseException) -> None:
            self.settle(stream, error=error)
            stream.error = stream.error or error  # where all was said, and then this
            self._look()

        return Listener(failed)

    @property
    def counts(self) -> dict[str, int]:
        """By the names of `COUNTED`, up to now."""
        with self._counting:
            self._count()
            return {**self._counts, "utterances": len(self._open) + sum(self._counts[end] for end in ENDS)}

    def forget(self) -> None:
        """What was said so far, none of which is open, counts for nothing and leaves nothing."""
        self._heard.clear()
        with self._counting:
            self._count()
            self._counts = Counter(dict.fromkeys(COUNTED, 0))

    def _count(self) -> None:
        for _ in range(self._tally.qsize()):
            try:
                self._counts[self._tally.get_nowait()] += 1
            except queue.Empty:
                return

    def load(self) -> dict[str, int]:
        """Utterances that are open, of these with a slot, and waiting for one."""
        return {"streams": len(self._open), "running": len(self._running), "queued": len(self._waiting)}

    def drain(self, seconds: float) -> None:
        """Take no more; wait for those that are open, so long at most. Takes no lock: see `cancel`."""
        self.draining, end = True, time.monotonic() + seconds
        while self._open and not self.closed and time.monotonic() < end:
            time.sleep(0.01)

    def stop(self) -> None:
        """Let the thread end before its next turn; what is open is cancelled. Takes no lock: see `cancel`."""
        self.closed = True
        self._look()
        self._watching.put(None)

    def join(self) -> None:
        """Wait for the thread, unless from within it, or it hangs."""
        me = threading.current_thread()
        while me is not self._thread and self._thread.is_alive() and not self._hangs:
            self._thread.join(timeout=_WATCH_S)
        end = time.monotonic() + 2 * _WATCH_S
        for stream in self._open.copy():  # what listeners have yet to hear
            listener = stream.listener
            while listener and me not in (self._thread, listener.thread) and time.monotonic() < end:
                if stream.done.is_set():
                    break
                time.sleep(0.002)
        if me not in (self._thread, self._watchdog):
            self._watchdog.join(timeout=_WATCH_S)

    def _look(self) -> None:
        """Text came, or an utterance was cancelled."""
        self._inbox.put(None)

    # ------------------------------------------------------------ the owner thread

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while not self.closed:
                self._turn_began = time.monotonic()
                if not self._turn():
                    self._turn_began = None
                    self._rest()
        except BaseException as error:
            self.fault = self.fault or error
            log.exception("the engine's owner thread died")
        finally:
            self.closed, self._turn_began = True, time.monotonic()
            for flying in self._flying:  # what the device still writes must not be given away
                with contextlib.suppress(Exception):
                    self._decoder.collect() if isinstance(flying, _Launch) else flying.collect()
            self._waiting.clear()
            self._running.clear()
            for stream in list(self._open):
                self._settle_closed(stream)
                stream.forget()
            self._turn_began, self._ended = None, True
            self._watching.put(None)

    def _watch(self) -> None:
        """In a thread of its own: nobody waits for ever, neither for a GPU that does not answer nor for a callback that
        does not return. It counts looks and not hours, as the process may be stopped and go on."""
        turn, turn_s = None, 0.0
        while not self._ended or self._open:
            before = time.monotonic()
            with contextlib.suppress(queue.Empty):
                self._watching.get(timeout=_WATCH_S)
            passed, began = min(time.monotonic() - before, 2 * _WATCH_S), self._turn_began
            for stream in self._open.copy():
                listener = stream.listener
                if listener:
                    listener.watch(passed)
                    if listener.stuck_s > _LISTENER_PATIENCE_S:
                        why = f"on_chunk did not return in {_LISTENER_PATIENCE_S:g} s"
                        self._leave_behind(stream, CallbackError(why), "stuck")
            turn, turn_s = began, turn_s + passed if began is not None and began == turn else 0.0
            if turn_s > self._patience:
                self.fault = TimeoutError(f"the device did not answer for {self._patience:g} s")
                self.closed = self._hangs = self._ended = True
                log.error("the engine is dead: %s", self.fault)
                for stream in self._open.copy():
                    self._leave_behind(stream, self._death())

    def _leave_behind(self, stream: Stream, error: TTSError, counted: str | None = None) -> None:
        """Whoever waits is told, whatever its listener does."""
        listener = stream.listener
        if not self._close(stream):
            return
        stream.error = stream.error or error
        self._wake(stream)
        if counted:
            self._tally.put(counted)
        if listener:
            listener.broken = True
            listener.tell(lambda: None, last=True)
        self.settle(stream, error=error)
        threading.Thread(target=self._tell_end, args=(stream,), daemon=True).start()
        self._look()

    def _death(self) -> EngineClosed:
        return EngineClosed(f"the engine's owner thread died: {self.fault!r}; load a new engine")

    def _settle_closed(self, stream: Stream) -> None:
        if self.fault:
            self.settle(stream, error=self._death())
        else:
            self.settle(stream, "cancelled")

    def _turn(self) -> bool:
        """Take what came, then one step: launch frames, or see what came of earlier ones. False: there is nothing to
        do before something comes."""
        for _ in range(self._inbox.qsize()):  # and no more: who calls in a loop must not keep others from their frames
            self._take(self._inbox.get())
        if self.closed:
            return True
        self._seat()
        try:
            busy = self._go_on()
        except KernelFault as error:
            self._give_up(error)
            busy = True
        for stream in [stream for stream in self._running if stream.over]:
            self._free.append(stream.slot)
            self._running.remove(stream)
            stream.forget()
            busy = True
        if self._counting.acquire(blocking=False):  # whoever reads the counts does it otherwise
            try:
                self._count()
            finally:
                self._counting.release()
        return busy

    def _rest(self) -> None:
        """Until something comes, or somebody has waited too long."""
        with contextlib.suppress(queue.Empty):
            self._take(self._inbox.get(timeout=self._until_deadline()))

    def _take(self, stream: Stream | None) -> None:
        if stream is None:
            self._news = True
            self._settle_cancelled()
        elif not stream.over:
            self._waiting.append(stream)

    def _until_deadline(self) -> float | None:
        return max(0.0, self._waiting[0].deadline - time.monotonic()) if self._waiting else None

    def _settle_cancelled(self) -> None:
        """Those that have no slot; the others end with their round."""
        for stream in [s for s in self._open.copy() if s.slot is None and s.cancelled]:
            self.settle(stream, "cancelled")
        self._waiting = deque(stream for stream in self._waiting if not stream.over)

    def _seat(self) -> None:
        """Slots for those that wait, first come first served; those that waited too long are told."""
        while self._waiting and (self._has_seat or self._waiting[0].deadline <= time.monotonic()):
            stream = self._waiting.popleft()
            if stream.over:
                continue
            if self._has_seat:
                stream.slot = self._free.pop()
                stream.mark("queue")
                self._running.append(stream)
            else:
                self._tally.put("timed_out")
                why = f"no stream became free within {self._queue_timeout:g} s; try later or raise max_streams"
                self.settle(stream, error=EngineBusy(why))

    @property
    def _has_seat(self) -> bool:
        return len(self._running) < self.seats and bool(self._free)

    def _go_on(self) -> bool:
        """One step of those that have a slot: the most urgent frames are launched while others are computed; codes and
        sound are seen in the order in which the device makes them."""
        if self._news:
            self._news = False
            for stream in self._running:
                self._step(stream, self._hear_news)
        busy = False
        if self._unseen < 2 if self._vocoder.follows else not self._flying:
            busy = self._bring_in()
            ready = [stream for stream in self._running if stream.ready]
            ready.sort(key=lambda stream: stream.due_at(self._frame_s))
            if ready and not self._better_wait(ready):
                self._launch(ready[: self._decoder.width])
                return True
            if self._held and not ready:  # no company will come
                self._speak([])
                return True
        if self._flying:
            self._see(self._flying.popleft())
            return True
        return busy

    def _bring_in(self) -> bool:
        """Prefill those that are new, first come first served, some between two launches; while somebody's listener is
        about to run out, one."""
        new = [stream for stream in self._running if not (stream.prefilled or stream.over)]
        if new:
            soon = time.monotonic() + _HURRY_S
            speaking = [s for s in self._running if s.runs_out is not None and not (s.starved or s.reason)]
            hurry = any(stream.runs_out < soon for stream in speaking)
            for stream in new[: 1 if hurry else _NEW_AT_ONCE]:
                self._step(stream, self._enter)
        return bool(new)

    def _better_wait(self, ready: list[Stream]) -> bool:
        """Would a launch of these, the most urgent first, delay those that are computed, whose listeners run out much
        sooner? Or is there time to join them? Two halves by turns for ever take twice as long as one launch of all."""
        computed = [s for flying in self._flying if isinstance(flying, _Launch) for s in flying.streams]
        if not computed:
            return False
        first = ready[0].due_at(self._frame_s)
        if first > min(s.due_at(self._frame_s) for s in computed) + _AHEAD_S:
            return True
        fit = len(computed) + len(ready) <= self._decoder.width
        return fit and ready[0].runs_out is not None and first > time.monotonic() + _HURRY_S

    def _launch(self, streams: list[Stream]) -> None:
        """A frame of each."""
        with self._together(streams, "a frame"):
            self._decoder.launch([stream.slot for stream in streams])
            for stream in streams:
                stream.launched += 1
                stream.in_flight = True
            self._flying.append(_Launch(streams, time.monotonic()))
            self._unseen += 1
            if self._vocoder.follows:
                self._speak(streams)

    def _see(self, flying: "_Launch | _Push") -> None:
        """Wait for the oldest of what was queued."""
        if isinstance(flying, _Push):
            self._present(flying)
            return
        self._unseen -= 1
        for stream in flying.streams:
            stream.in_flight = False
        frames = None
        with self._together(flying.streams, "a frame"):
            frames = self._decoder.collect()
        if frames is None:
            return
        self._frame_s += 0.1 * (time.monotonic() - flying.began - self._frame_s)
        for stream, codes in zip(flying.streams, frames, strict=True):
            self._step(stream, self._see_frame, codes)
        ended = [stream for stream in flying.streams if stream.reason and not stream.over]
        if ended or not self._vocoder.follows:
            self._speak(ended if self._vocoder.follows else flying.streams)
        for stream in ended:
            if not stream.pushes:
                self._step(stream, self._hand_on)

    @contextlib.contextmanager
    def _together(self, streams: list[Stream], what: str) -> Iterator[None]:
        """Work for several utterances at once: what it raises ends them all and goes no further, unless it is a
        KernelFault, which ends more."""
        try:
            yield
        except KernelFault:
            raise
        except Exception as error:
            self._check_device()
            for stream in streams:
                self.settle(stream, error=error)
            log.exception("%s failed", what)

    def _give_up(self, error: KernelFault) -> None:
        """Every slot's state is suspect, and what was kept of any."""
        self._tally.put("kernel_faults")
        self._flying.clear()
        self._held.clear()
        self._unseen = 0
        self._heard.clear()
        for stream in self._running:
            self.settle(stream, error=error)
        self._faults += 1
        if self._faults < _MOST_FAULTS:
            self._vocoder.recover()
            self._decoder.recover()
        elif self._spare and not self.fell_back:
            log.error("%d kernel faults in a row: PyTorch takes over, as fallback='torch' asks", self._faults)
            self._decoder = self._vocoder = self._turn_began = None  # their memory is needed, and time
            self._decoder, self._vocoder = self._spare()
            self.fell_back = True
        else:
            raise error
        log.error(
            "a kernel gave up; all %d running utterances ended, the engine goes on", len(self._running), exc_info=error
        )

    @staticmethod
    def _check_device() -> None:
        """A device that is lost raises here as well, and ends the engine."""
        if torch.cuda.is_initialized():
            synchronize()

    def _step(self, stream: Stream, step: Callable[..., str | None], *args) -> None:
        """One step of an utterance, which ends it if it gives a reason. What it raises, sys.exit() from a callback too,
        ends it alone."""
        if stream.over:
            return
        try:
            reason = step(stream, *args)
            if reason is not None:
                self.settle(stream, reason)
        except KernelFault:
            raise
        except BaseException as error:
            self.settle(stream, error=error)
            log.exception("an utterance failed")
            if not isinstance(error, SpeechError):
                self._check_device()

    def _enter(self, stream: Stream) -> str | None:
        """What comes before its first frame: prefill, then the reference as context for the vocoder."""
        if stream.context is None:
            self._prefill(stream)
        elif stream.context:
            self._hear_reference(stream)
        return self._hear_news(stream)

    def _hear_news(self, stream: Stream) -> str | None:
        if stream.cancelled:
            return "cancelled"
        while stream.context is not None and not stream.incoming.empty():
            rows, stream.text_complete = stream.incoming.get()
            stream.text_rows += len(rows)
            self._decoder.extend(stream.slot, rows, stream.text_complete)
        return None

    def _prefill(self, stream: Stream) -> None:
        self._decoder.start(stream.slot, stream.prompt, stream.request.sampling)
        self._vocoder.reset(stream.slot)
        voice = stream.request.conditioning.voice
        stream.context = []
        if voice is not None and voice.ref_codes is not None:
            stream.voice_digest, stream.context = voice.digest, self._vocoder.portions(voice.ref_codes)
            self._hear_reference(stream)
        else:
            stream.mark("prefill")

    def _hear_reference(self, stream: Stream) -> None:
        """The reference is what the vocoder hears before an utterance: once per voice, by the first that speaks with
        it, a portion a round, so that others get their frames."""
        digest = stream.voice_digest
        state = self._heard.pop(digest, None)
        if state is not None:
            self._vocoder.restore(stream.slot, state)
            stream.context = []
        else:
            leader = next(s for s in self._running if s.context and s.voice_digest == digest)
            if leader is not stream:
                return  # it waits for what the leader is decoding
            self._vocoder.listen(stream.slot, stream.context.pop(0))
            if stream.context:
                return
            state = self._vocoder.save(stream.slot)
        self._heard[digest] = state
        if len(self._heard) > self._kept_voices:
            del self._heard[next(iter(self._heard))]
        stream.mark("prefill")

    def _see_frame(self, stream: Stream, codes: Tensor | SpeechError | None) -> None:
        """One more frame, or the end of speech."""
        if isinstance(codes, SpeechError):
            raise codes
        if codes is None:
            stream.reason = "eos"
            stream.launched = len(stream.codes)
            return
        if not stream.codes:
            stream.mark("first_frame")
        stream.codes.append(codes)
        self._tally.put("frames")
        if stream.guard:
            stream.guard.see(codes, stream.text_used_up)
            if stream.guard.is_runaway:
                stream.reason = "runaway"
        if len(stream.codes) == stream.max_frames:
            stream.reason = stream.reason or "length"

    def _speak(self, streams: list[Stream]) -> None:
        """What the vocoder lacks of their frames goes to it where it is due, those with equally many together, first
        those whose listeners have heard nothing. Several at once are cheaper: who can wait does, while frames of others
        are launched."""
        short = [stream for stream in [*self._held, *streams] if stream.idle]  # once: text may come at any moment
        by_count: dict[int, list[Stream]] = {}
        for stream in [*self._held, *(s for s in streams if not s.held)]:
            stream.held = False
            if stream.due(stream in short) and not stream.over:
                by_count.setdefault(stream.launched - stream.given, []).append(stream)
        self._held, soon = [], time.monotonic() + _HURRY_S + self._frame_s
        for count, group in sorted(by_count.items(), key=lambda item: all(s.chunks_given for s in item[1])):
            for first in range(0, len(group), self._vocoder.together):
                some = group[first : first + self._vocoder.together]
                if streams and some[0] not in short and self._can_wait(some, count, soon):
                    self._held += some
                    for stream in some:
                        stream.held = True
                    continue
                with self._together(some, "the vocoder"):
                    self._push(some, count, [stream for stream in some if stream in short])

    def _can_wait(self, streams: list[Stream], count: int, soon: float) -> bool:
        """Frames as many as a slot's ring holds are pushed in pairs, when there are others to launch meanwhile."""
        if not self._vocoder.follows or count < RECENT_FRAMES or len(streams) > 1:
            return False
        calm = all(s.reason is None and s.runs_out is not None and s.runs_out > soon for s in streams)
        return calm and any(stream.ready for stream in self._running)

    def _push(self, streams: list[Stream], frames: int, short: list[Stream]) -> None:
        slots, first = [stream.slot for stream in streams], [stream.given for stream in streams]
        if self._vocoder.follows:
            collect = self._vocoder.follow(slots, first, frames)
        else:
            codes = torch.stack([torch.stack(stream.codes[-frames:]) for stream in streams])
            sound = self._vocoder.push(slots, codes)
            collect = lambda: sound  # noqa: E731
        for stream in streams:
            stream.give(stream in short)
            stream.pushes += 1
        self._flying.append(_Push(streams, frames, short, collect))

    def _present(self, push: _Push) -> None:
        """Wait for a push; what it made is handed out, chunk by chunk."""
        made = None
        for stream in push.streams:
            stream.pushes -= 1
        with self._together(push.streams, "the vocoder"):
            made = push.collect().float().cpu().numpy()
            self._faults = 0
        for stream, sound in zip(push.streams, made, strict=True) if made is not None else ():
            if len(made) > 1:
                sound = sound.copy()  # a view would keep its neighbours' samples as long as its own
            self._step(stream, self._hear, sound.reshape(push.frames, -1))
            self._step(stream, self._hand_on, stream in push.short)

    @staticmethod
    def _hear(stream: Stream, sound: np.ndarray) -> None:
        """[frames, 1920]; what stands for end of speech and behind it is noise."""
        sound = sound[: stream.unheard]
        if not np.isfinite(sound).all():
            raise SpeechError("the model's samples are no numbers: its weights or this utterance's prompt are broken")
        if stream.guard and len(sound):
            stream.guard.hear(sound, len(sound))
        stream.sound += list(sound)

    def _hand_on(self, stream: Stream, short: bool = False) -> str | None:
        """Hand out what is due, everything where the utterance ends: then the reason."""
        if stream.reason and stream.pushes:
            return None  # the last one will
        presentable, guard = len(stream.sound), stream.guard
        if guard and stream.reason != "eos":
            if guard.is_runaway or stream.reason == "length" and guard.presentable < len(stream.codes):
                stream.reason = "runaway"
            presentable = min(presentable, guard.presentable)
        self._hand_out(stream, presentable, all_of_it=bool(stream.reason) or short)
        return stream.reason

    def _hand_out(self, stream: Stream, frames: int, all_of_it: bool) -> None:
        """Of the utterance's first `frames` those that nobody has yet: whole chunks, or `all_of_it`."""
        while (
            not stream.over
            and (left := frames - stream.handed_frames) > 0
            and (all_of_it or left >= stream.chunk_size(stream.chunks_given))
        ):
            first, count = stream.handed_frames, min(left, stream.chunk_size(stream.chunks_given))
            samples = np.concatenate(stream.sound[first : first + count])
            codes = torch.stack(stream.codes[first : first + count]).numpy()
            self._give(stream, Chunk(samples, codes, self._sample_rate))

    def _give(self, stream: Stream, chunk: Chunk) -> None:
        now = time.monotonic()
        if stream.first_chunk is None:
            stream.first_chunk = now
            stream.mark("first_chunk")
        else:
            made = stream.handed_frames * len(chunk.samples) / len(chunk.codes) / self._sample_rate
            lead = made - (now - stream.first_chunk)
            stream.lead = lead if stream.lead is None else min(stream.lead, lead)
        seconds = len(chunk.samples) / self._sample_rate
        stream.runs_out = max(stream.runs_out or now, now) + seconds
        stream.chunks_given += 1
        stream.handed_frames += len(chunk.codes)
        stream.chunks.put(chunk)
        listener = stream.listener
        if listener and stream.on_chunk:
            listener.tell(partial(stream.on_chunk, chunk))


_OWNERS: "weakref.WeakSet[Owner]" = weakref.WeakSet()


@atexit.register
def _stop_owners() -> None:
    """A thread that is inside torch while the interpreter goes away aborts the process. Not by way of the engines: one
    that was dropped a moment ago leaves its threads to stop, and the last of them to free what the model took."""
    owners = list(_OWNERS)
    for owner in owners:
        owner.stop()
        owner.join()
    waited_for = {thread for owner in owners for thread in (owner._thread, owner._watchdog)}
    for thread in threading.enumerate():
        if thread.name in _THREADS and thread not in waited_for:
            thread.join(timeout=20 * _WATCH_S)
