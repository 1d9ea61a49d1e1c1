"""Owner: the one thread that touches frame decoder and vocoder, and every slot.

    inbox -> queue -> [slot] -> prefill -> (frame -> vocoder -> chunk)* -> settled

Each round it gives every running utterance one frame. It knows nothing of checkpoints, prompts or callers' options, and
holds no engine: an engine that is dropped ends its owner.
"""

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from qwen_megakernel.errors import EngineBusy, EngineClosed, KernelFault, RequestError
from qwen_megakernel.frame_decoder import FrameDecoder
from qwen_megakernel.prompt import Prefix, Prompt, PromptPieces
from qwen_megakernel.stream import Chunk, Stream
from qwen_megakernel.vocoder import Vocoder, VocoderState

log = logging.getLogger(__name__)

COUNTED = (
    *("utterances", "frames", "eos", "length", "runaway", "cancelled"),
    *("failed", "busy", "timed_out", "kernel_faults"),
)
"""Work, ends by their reason, and what went wrong (`timed_out`, in the queue, is part of `failed`)."""

_CONTEXT_FRAMES = 25  # of a reference that the vocoder hears in one turn, so that others get theirs


class Owner:
    """Methods without an underscore may be called from any thread."""

    def __init__(
        self, decoder: FrameDecoder, vocoder: Vocoder, *, sample_rate: int, max_queue: int, queue_timeout: float
    ):
        """
        Args:
            sample_rate: of the vocoder, in Hz.
            max_queue: utterances beyond the slots that may wait for one.
            queue_timeout: seconds that one of them waits at most.
        """
        self._decoder, self._vocoder, self._sample_rate = decoder, vocoder, sample_rate
        self._max_queue, self._queue_timeout = max_queue, queue_timeout
        self.fault: BaseException | None = None
        self.closed = False
        self.counts = Counter(dict.fromkeys(COUNTED, 0))
        self._lock = threading.Lock()  # of `closed`, `_open` and `counts`
        self._open: set[Stream] = set()
        # A stream whose prompt is ready, or None: look again at what waits or was cancelled.
        self._inbox: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._waiting: deque[Stream] = deque()
        self._running: list[Stream] = []
        self._free = list(range(decoder.slots))
        # What the vocoder knows after a voice's reference; as long-lived as the prefix of its prompts.
        self._heard: WeakKeyDictionary[Prefix, VocoderState] = WeakKeyDictionary()
        self._thread = threading.Thread(target=self._run, name="qwen_megakernel owner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Is there a place for one more?

        Raises:
            EngineClosed, EngineBusy: no.
        """
        with self._lock:
            self._check()

    def _check(self) -> None:
        self.check_open()
        slots = self._decoder.slots
        if len(self._open) >= slots + self._max_queue:
            self.counts["busy"] += 1
            raise EngineBusy(
                f"all {slots} streams are taken and {self._max_queue} more wait; try later or raise max_streams or "
                "max_queue"
            )

    def check_open(self) -> None:
        """Raises EngineClosed."""
        if self.fault:
            raise EngineClosed(f"the engine's owner thread died: {self.fault!r}; load a new engine")
        if self.closed:
            raise EngineClosed("the engine is closed; load a new one")

    def admit(self, stream: Stream) -> None:
        """Give an utterance its place, before it is handed over with `speak` or `advance`.

        Raises:
            EngineClosed, EngineBusy: nothing was taken.
        """
        with self._lock:
            self._check()
            self._open.add(stream)
            self.counts["utterances"] += 1

    def speak(self, stream: Stream, prompt: Prompt, text_complete: bool) -> None:
        """The prompt of an admitted utterance is there."""
        stream.prompt, stream.text_rows, stream.text_complete = prompt, len(prompt.trailing), text_complete
        room = self._decoder.max_positions - len(prompt.rows) + 1
        stream.max_frames = min(stream.request.max_frames, room)
        stream.stage_began = time.monotonic()
        stream.deadline = stream.stage_began + self._queue_timeout
        self._inbox.put(stream)

    @torch.inference_mode()
    def advance(self, stream: Stream, step: Callable[[PromptPieces], Tensor]) -> None:
        """A piece of text, under the stream's lock: build the rows that it settles in the caller's thread, and hand
        them on."""
        pieces, began = stream.pieces, time.monotonic()
        stream.arrived = stream.arrived or began
        try:
            rows = step(pieces)
            if stream.prompt is not None:
                if len(rows) or pieces.ended:
                    stream.incoming.put((rows, pieces.ended))
                    self._look()
            elif pieces.prompt is not None:
                stream.timings |= {"tokenise": pieces.tokenise_s, "prompt": time.monotonic() - began}
                self.speak(stream, pieces.prompt, text_complete=pieces.ended)
        except BaseException as error:  # also an interrupt: nobody else would free the slot
            stream.cancelled.set()
            self.settle(stream, error=error)
            self._look()
            raise

    def cancel(self, stream: Stream) -> None:
        """Takes no lock: a finalizer may call it."""
        stream.cancelled.set()
        self._look()

    def refuse_own_thread(self, stream: Stream) -> None:
        """Raises RequestError where waiting for the stream would never end."""
        if threading.current_thread() is self._thread and not stream.done.is_set():
            raise RequestError("a callback cannot wait for an utterance: it would wait for its own thread")

    def settle(self, stream: Stream, reason: str = "", error: BaseException | None = None) -> None:
        """End an utterance, once, with a finish reason or an error; whoever waits on it wakes up."""
        with self._lock:
            if stream not in self._open:
                return
            self._open.discard(stream)
            self.counts["failed" if error else reason] += 1
        if error is None:
            stream.audio = stream.assemble(reason, self._sample_rate, self._vocoder.groups)
        stream.error = error
        stream.text_open = False
        stream.chunks.put(None)
        stream.done.set()
        if stream.on_end:
            try:
                stream.on_end()
            except Exception:
                log.exception("on_end raised; its utterance had ended")

    def load(self) -> dict[str, int]:
        """Utterances that have a slot, wait for one, or wait for their text."""
        with self._lock:
            open_, running, waiting = len(self._open), len(self._running), len(self._waiting)
        return {"streams": open_, "running": running, "queued": waiting}

    def stop(self) -> None:
        """Let the thread end before its next round; what is open is cancelled. Takes no lock: see `cancel`."""
        self.closed = True
        self._look()

    def join(self) -> None:
        """Wait for the thread, unless from within it."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _look(self) -> None:
        """Text came, or an utterance was cancelled."""
        self._inbox.put(None)

    # ------------------------------------------------------------ the owner thread

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while not self.closed:
                self._turn()
        except BaseException as error:
            log.exception("the engine's owner thread died")
            self.fault = error
        finally:
            with self._lock:
                self.closed = True
                left = list(self._open)
            for stream in left:
                if self.fault:
                    self.settle(stream, error=EngineClosed(f"the engine's owner thread died: {self.fault!r}"))
                else:
                    self.settle(stream, "cancelled")

    def _turn(self) -> None:
        """Take what came; one round of frames."""
        while not self._inbox.empty() or self._at_rest():
            try:
                stream = self._inbox.get(timeout=self._until_deadline())
            except queue.Empty:
                break  # somebody has waited too long
            if self.closed:
                return
            if stream is None:
                self._settle_cancelled()
            elif not stream.done.is_set():
                self._waiting.append(stream)
            stream = None  # hold nothing while waiting: an engine's last reference may be its callback's
        self._seat()
        for stream in self._round():
            self._running.remove(stream)
            self._free.append(stream.slot)

    def _at_rest(self) -> bool:
        """Nothing to do before something comes or a wait is over."""
        seats = bool(self._waiting) and bool(self._free)
        late = bool(self._waiting) and self._waiting[0].deadline <= time.monotonic()
        return not seats and not late and all(stream.idle for stream in self._running)

    def _until_deadline(self) -> float | None:
        return max(0.0, self._waiting[0].deadline - time.monotonic()) if self._waiting else None

    def _settle_cancelled(self) -> None:
        """Those that have no slot; the others end with their round."""
        with self._lock:
            cancelled = [s for s in self._open if s.slot is None and s.cancelled.is_set()]
        for stream in cancelled:
            self.settle(stream, "cancelled")

    def _seat(self) -> None:
        """Slots for those that wait, first come first served; those that waited too long are told."""
        while self._waiting and (self._free or self._waiting[0].deadline <= time.monotonic()):
            stream = self._waiting.popleft()
            if stream.done.is_set():
                continue
            if self._free:
                stream.slot = self._free.pop()
                stream.mark("queue")
                self._running.append(stream)
            else:
                self.counts["timed_out"] += 1
                why = f"no stream became free within {self._queue_timeout:g} s; try later or raise max_streams"
                self.settle(stream, error=EngineBusy(why))

    def _round(self) -> list[Stream]:
        """One frame of every utterance, as many in a launch as the backend computes together; those that have ended."""
        running = self._running
        ended = [stream for stream in running if self._ends(stream, self._before_frame)]
        ready = [stream for stream in running if stream not in ended and not stream.context and not stream.starved]
        for first in range(0, len(ready), self._decoder.width):
            together = ready[first : first + self._decoder.width]
            try:
                self._decoder.launch([stream.slot for stream in together])
                frames = self._decoder.collect()
            except KernelFault as error:  # every slot's state is suspect
                log.exception("the kernel gave up; all %d running utterances end, the engine goes on", len(running))
                self.counts["kernel_faults"] += 1
                self._decoder.recover()
                self._heard.clear()
                for stream in running:
                    self.settle(stream, error=error)
                return list(running)
            except Exception as error:
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()  # a device that is lost raises here as well, and ends the engine
                log.exception("a frame failed")
                for stream in together:
                    self.settle(stream, error=error)
                ended += together
                continue
            for stream, codes in zip(together, frames, strict=True):
                if self._ends(stream, self._after_frame, codes):
                    ended.append(stream)
        return ended

    def _ends(self, stream: Stream, step: Callable[..., str | None], *args) -> bool:
        """One step of an utterance; True when it has ended. What it raises, sys.exit() from a callback too, ends it
        alone."""
        try:
            reason = step(stream, *args)
            if reason is None:
                return False
            self.settle(stream, reason)
        except BaseException as error:
            log.exception("an utterance failed")
            self.settle(stream, error=error)
        return True

    def _before_frame(self, stream: Stream) -> str | None:
        """What comes before a frame: prefill first, then the reference as context for the vocoder, then new text."""
        if stream.cancelled.is_set():
            return "cancelled"
        if stream.context is None:
            self._prefill(stream)
        elif stream.context:  # its own audio is dropped, exactly as many frames
            self._vocoder.push([stream.slot], stream.context.pop(0)[None])
            if not stream.context:
                self._heard[stream.prompt.prefix] = self._vocoder.save(stream.slot)
                stream.mark("prefill")
        while not stream.incoming.empty():
            rows, stream.text_complete = stream.incoming.get()
            self._decoder.extend(stream.slot, rows)
            stream.text_rows += len(rows)
        return None

    def _prefill(self, stream: Stream) -> None:
        self._decoder.start(stream.slot, stream.prompt, stream.request.sampling)
        self._vocoder.reset(stream.slot)
        stream.context = []
        codes = None if stream.request.voice is None else stream.request.voice.ref_codes
        if codes is not None:
            heard = self._heard.get(stream.prompt.prefix)
            if heard:
                self._vocoder.restore(stream.slot, heard)
            else:
                stream.context = list(codes.split(_CONTEXT_FRAMES))
        if not stream.context:
            stream.mark("prefill")

    def _after_frame(self, stream: Stream, codes: Tensor | None) -> str | None:
        """One more frame, or the end of speech; hand out what is due. The reason if the utterance has ended."""
        guard, reason = stream.guard, None
        if codes is None:
            reason = "eos"
        else:
            if not stream.codes:
                stream.mark("first_frame")
            stream.codes.append(codes)
            self.counts["frames"] += 1
            if guard:
                guard.see(codes, stream.text_used_up)
            if len(stream.codes) == stream.max_frames:
                reason = "length"
        due = len(stream.codes) - stream.pushed
        schedule = stream.request.chunk_frames
        if due and (reason or due >= schedule[min(stream.pushes, len(schedule) - 1)]):
            self._decode(stream)
        if reason is None and guard and guard.is_runaway:
            if len(stream.codes) > stream.pushed:
                self._decode(stream)
            reason = "runaway"
        self._hand_out(stream, guard.presentable if guard and reason in (None, "runaway") else len(stream.codes))
        if reason == "runaway":
            self._hand_out_part(stream, guard.presentable)
        return reason

    def _decode(self, stream: Stream) -> None:
        """The frames that are due, through the vocoder."""
        codes = torch.stack(stream.codes[stream.pushed :])
        samples = self._vocoder.push([stream.slot], codes[None])[0].float().cpu().numpy()
        stream.pushed += len(codes)
        stream.pushes += 1
        if stream.guard:
            stream.guard.hear(samples, len(codes))
        stream.held.append(Chunk(samples, codes.numpy(), self._sample_rate))

    def _hand_out(self, stream: Stream, frames: int) -> None:
        """Chunks that lie within the utterance's first `frames`."""
        while stream.held and stream.handed_frames + len(stream.held[0].codes) <= frames:
            self._give(stream, stream.held.popleft())

    def _hand_out_part(self, stream: Stream, frames: int) -> None:
        """Of the chunk that reaches beyond the first `frames`, what lies within them."""
        left = frames - stream.handed_frames
        if stream.held and left > 0:
            chunk = stream.held[0]
            samples = chunk.samples[: left * (len(chunk.samples) // len(chunk.codes))]
            self._give(stream, Chunk(samples, chunk.codes[:left], self._sample_rate))

    def _give(self, stream: Stream, chunk: Chunk) -> None:
        now = time.monotonic()
        if stream.first_chunk is None:
            stream.first_chunk = now
            stream.mark("first_chunk")
        else:
            made = stream.handed_frames * len(chunk.samples) / len(chunk.codes) / self._sample_rate
            lead = made - (now - stream.first_chunk)
            stream.lead = lead if stream.lead is None else min(stream.lead, lead)
        stream.handed.append(chunk)
        stream.handed_frames += len(chunk.codes)
        given = Chunk(chunk.samples.copy(), chunk.codes.copy(), chunk.sample_rate)  # what is done to it stays there
        stream.chunks.put(given)
        if stream.on_chunk:
            stream.on_chunk(given)
