"""Owner: the one thread that touches frame decoder and vocoder, and every slot.

    inbox -> queue -> [slot] -> prefill -> (frame -> vocoder -> chunk)* -> settled

Each round it gives every running utterance one frame. It knows nothing of checkpoints, prompts or callers' options, and
holds no engine: an engine that is dropped ends its owner.
"""

import logging
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from qwen_megakernel.errors import EngineBusy, EngineClosed, KernelFault, RequestError, TextEndedError
from qwen_megakernel.frame_decoder import FrameDecoder
from qwen_megakernel.frame_graphs import CAPTURING
from qwen_megakernel.prompt import Prompt, PromptPieces
from qwen_megakernel.stream import Chunk, Stream
from qwen_megakernel.vocoder import Vocoder, VocoderState

log = logging.getLogger(__name__)

ENDS = ("eos", "length", "runaway", "cancelled", "failed")
COUNTED = ("utterances", "frames", *ENDS, "busy", "timed_out", "kernel_faults")
"""Work, ends by their reason, and what went wrong (`timed_out`, in the queue, is part of `failed`)."""

_SWITCH_S = 0.0001  # of the interpreter from thread to thread
_CONTEXT_FRAMES = 25  # of a reference that the vocoder hears in one turn, so that others get theirs


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
    ):
        """
        Args:
            sample_rate: of the vocoder, in Hz.
            max_queue: utterances beyond the slots that may wait for one.
            queue_timeout: seconds that one of them waits at most.
            kept_voices: voices for which the vocoder's state after their reference is kept, the latest used.
        """
        self._decoder, self._vocoder, self._sample_rate = decoder, vocoder, sample_rate
        self._max_queue, self._queue_timeout = max_queue, queue_timeout
        self.fault: BaseException | None = None
        self.closed = False
        # Callers share these with the owner thread without a lock, one atomic operation at a time: a finalizer or a
        # signal handler may come in anywhere, and must not wait for the thread that it interrupted.
        self._places = deque(range(decoder.slots + max_queue))  # free ones
        self._open: set[Stream] = set()
        self._tally: queue.SimpleQueue[str] = queue.SimpleQueue()  # what was not yet counted
        self._counts = Counter(dict.fromkeys(COUNTED, 0))
        self._counting = threading.RLock()
        # A stream whose prompt is ready, or None: look again at what waits or was cancelled.
        self._inbox: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._waiting: deque[Stream] = deque()
        self._running: list[Stream] = []
        self._free = list(range(decoder.slots))
        self._heard: dict[bytes, VocoderState] = {}  # by a voice's digest; the latest used last
        self._kept_voices = kept_voices
        self._thread = threading.Thread(target=self._run, name="qwen_megakernel owner", daemon=True)

    def start(self) -> None:
        # Coming back from the GPU, the thread waits for the interpreter as long as others compute in Python, at most
        # this interval each time; Python's 5 ms would be more than a frame. It holds for the whole process.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._thread.start()

    def check(self) -> None:
        """Is there a place for one more?

        Raises:
            EngineClosed, EngineBusy: no.
        """
        self.check_open()
        if not self._places:
            self._tally.put("busy")
            raise EngineBusy(
                f"all {self._decoder.slots} streams are taken and {self._max_queue} more wait, for a slot or for their "
                "text; try later or raise max_streams or max_queue"
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
        try:
            stream.place = self._places.pop()
        except IndexError:
            return self.check() or self.admit(stream)
        self._open.add(stream)
        if self.closed:  # since `check`: the owner may have missed it
            self._settle_closed(stream)
            self.check_open()

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
        if pieces is None:
            raise TextEndedError("the utterance has ended")
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
            stream.cancelled = True
            self.settle(stream, error=error)
            self._look()
            raise

    def cancel(self, stream: Stream) -> None:
        """Takes no lock: a finalizer or a signal handler may call it."""
        if not stream.cancelled:
            stream.cancelled = True
            self._look()

    def refuse_own_thread(self, stream: Stream) -> None:
        """Raises RequestError where waiting for the stream would never end."""
        if threading.current_thread() is self._thread and not stream.done.is_set():
            raise RequestError("a callback cannot wait for an utterance: it would wait for its own thread")

    def settle(self, stream: Stream, reason: str = "", error: BaseException | None = None) -> None:
        """End an utterance, once, with a finish reason or an error; whoever waits on it wakes up."""
        try:
            self._open.remove(stream)
        except KeyError:
            return
        try:
            if error is None:
                stream.audio = stream.assemble(reason, self._sample_rate, self._vocoder.groups)
        except BaseException as failure:
            error = failure
        stream.error = error
        self._tally.put("failed" if error else reason)
        self._places.append(stream.place)
        if stream.slot is None:
            stream.forget()
        stream.chunks.put(None)
        stream.done.set()
        if stream.on_end:
            try:
                stream.on_end()
            except Exception:
                log.exception("on_end raised; its utterance had ended")

    @property
    def counts(self) -> dict[str, int]:
        """By the names of `COUNTED`, up to now."""
        with self._counting:
            self._count()
            return {**self._counts, "utterances": len(self._open) + sum(self._counts[end] for end in ENDS)}

    def _count(self) -> None:
        for _ in range(self._tally.qsize()):
            try:
                self._counts[self._tally.get_nowait()] += 1
            except queue.Empty:
                return

    def load(self) -> dict[str, int]:
        """Utterances that are open, of these with a slot, and waiting for one."""
        return {"streams": len(self._open), "running": len(self._running), "queued": len(self._waiting)}

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
            self.fault = error
            log.exception("the engine's owner thread died")
        finally:
            self.closed = True
            self._waiting.clear()
            self._running.clear()
            for stream in list(self._open):
                self._settle_closed(stream)
                stream.forget()

    def _settle_closed(self, stream: Stream) -> None:
        if self.fault:
            self.settle(stream, error=EngineClosed(f"the engine's owner thread died: {self.fault!r}"))
        else:
            self.settle(stream, "cancelled")

    def _turn(self) -> None:
        """Take what came; one round of frames."""
        while self._at_rest():
            try:
                self._take(self._inbox.get(timeout=self._until_deadline()))
            except queue.Empty:
                break  # somebody has waited too long
        for _ in range(self._inbox.qsize()):  # and no more: who calls in a loop must not keep others from their frames
            self._take(self._inbox.get())
        if self.closed:
            return
        self._seat()
        for stream in self._round():
            self._running.remove(stream)
            self._free.append(stream.slot)
            stream.forget()
        if self._counting.acquire(blocking=False):  # whoever reads the counts does it otherwise
            try:
                self._count()
            finally:
                self._counting.release()

    def _take(self, stream: Stream | None) -> None:
        if stream is None:
            self._settle_cancelled()
        elif not stream.done.is_set():
            self._waiting.append(stream)

    def _at_rest(self) -> bool:
        """Nothing to do before something comes or a wait is over."""
        if self.closed:
            return False
        seats = bool(self._waiting) and bool(self._free)
        late = bool(self._waiting) and self._waiting[0].deadline <= time.monotonic()
        return not seats and not late and all(stream.idle for stream in self._running)

    def _until_deadline(self) -> float | None:
        return max(0.0, self._waiting[0].deadline - time.monotonic()) if self._waiting else None

    def _settle_cancelled(self) -> None:
        """Those that have no slot; the others end with their round."""
        for stream in [s for s in self._open.copy() if s.slot is None and s.cancelled]:
            self.settle(stream, "cancelled")
        self._waiting = deque(stream for stream in self._waiting if not stream.done.is_set())

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
                self._tally.put("timed_out")
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
                self._tally.put("kernel_faults")
                self._decoder.recover()
                for stream in running:
                    self.settle(stream, error=error)
                log.exception("the kernel gave up; all %d running utterances ended, the engine goes on", len(running))
                return list(running)
            except Exception as error:
                self._check_device()
                for stream in together:
                    self.settle(stream, error=error)
                log.exception("a frame failed")
                ended += together
                continue
            for stream, codes in zip(together, frames, strict=True):
                if self._ends(stream, self._see_frame, codes):
                    ended.append(stream)
            ended += self._decode([stream for stream in together if stream not in ended and stream.due])
            ended += [s for s in together if s not in ended and self._ends(s, self._present)]
        return ended

    @staticmethod
    def _check_device() -> None:
        """A device that is lost raises here as well, and ends the engine."""
        if torch.cuda.is_initialized():
            with CAPTURING:  # another engine's capture would fail of it
                torch.cuda.synchronize()

    def _ends(self, stream: Stream, step: Callable[..., str | None], *args) -> bool:
        """One step of an utterance; True when it has ended. What it raises, sys.exit() from a callback too, ends it
        alone."""
        try:
            reason = step(stream, *args)
            if reason is None:
                return False
            self.settle(stream, reason)
        except BaseException as error:
            self.settle(stream, error=error)
            log.exception("an utterance failed")
        return True

    def _before_frame(self, stream: Stream) -> str | None:
        """What comes before a frame: prefill first, then the reference as context for the vocoder, then new text."""
        if stream.cancelled:
            return "cancelled"
        if stream.context is None:
            self._prefill(stream)
        elif stream.context:
            self._hear_reference(stream)
        while not stream.incoming.empty():
            rows, stream.text_complete = stream.incoming.get()
            self._decoder.extend(stream.slot, rows)
            stream.text_rows += len(rows)
        return None

    def _prefill(self, stream: Stream) -> None:
        self._decoder.start(stream.slot, stream.prompt, stream.request.sampling)
        self._vocoder.reset(stream.slot)
        voice = stream.request.voice
        stream.context = []
        if voice is not None and voice.ref_codes is not None:
            stream.voice_digest, stream.context = voice.digest, list(voice.ref_codes.split(_CONTEXT_FRAMES))
            self._hear_reference(stream)
        else:
            stream.mark("prefill")

    def _hear_reference(self, stream: Stream) -> None:
        """The reference is what the vocoder hears before an utterance: decoded once per voice, by the first that speaks
        with it, 25 frames a round; its own audio is dropped, exactly as many frames."""
        digest = stream.voice_digest
        state = self._heard.pop(digest, None)
        if state is not None:
            self._vocoder.restore(stream.slot, state)
            stream.context = []
        else:
            leader = next(s for s in self._running if s.context and s.voice_digest == digest)
            if leader is not stream:
                return  # it waits for what the leader is decoding
            self._vocoder.push([stream.slot], stream.context.pop(0)[None])
            if stream.context:
                return
            state = self._vocoder.save(stream.slot)
        self._heard[digest] = state
        if len(self._heard) > self._kept_voices:
            del self._heard[next(iter(self._heard))]
        stream.mark("prefill")

    def _see_frame(self, stream: Stream, codes: Tensor | None) -> None:
        """One more frame, or the end of speech."""
        if codes is None:
            stream.reason = "eos"
            return
        if not stream.codes:
            stream.mark("first_frame")
        stream.codes.append(codes)
        self._tally.put("frames")
        if stream.guard:
            stream.guard.see(codes, stream.text_used_up)
        if len(stream.codes) == stream.max_frames:
            stream.reason = "length"

    def _decode(self, streams: list[Stream]) -> list[Stream]:
        """What they have not heard of their frames, through the vocoder, those with equally many together; the streams
        that failed."""
        failed: list[Stream] = []
        by_count: dict[int, list[Stream]] = {}
        for stream in streams:
            by_count.setdefault(stream.unheard, []).append(stream)
        for count, group in by_count.items():
            for first in range(0, len(group), self._vocoder.together):
                some = group[first : first + self._vocoder.together]
                try:
                    self._push(some, count)
                except Exception as error:
                    self._check_device()
                    for stream in some:
                        self.settle(stream, error=error)
                    log.exception("the vocoder failed")
                    failed += some
        return failed

    def _push(self, streams: list[Stream], frames: int) -> None:
        codes = torch.stack([torch.stack(stream.codes[-frames:]) for stream in streams])
        samples = self._vocoder.push([stream.slot for stream in streams], codes).float().cpu().numpy()
        for stream, sound in zip(streams, samples, strict=True):
            if stream.guard:
                stream.guard.hear(sound, frames)
            if len(streams) > 1:
                sound = sound.copy()  # a view would keep its neighbours' samples as long as its own
            stream.sound += list(sound.reshape(frames, -1))

    def _present(self, stream: Stream) -> str | None:
        """Hand out what is due. The reason if the utterance has ended."""
        guard, presentable = stream.guard, len(stream.codes)
        if guard and stream.reason != "eos":
            if guard.is_runaway or stream.reason == "length" and guard.presentable < len(stream.codes):
                stream.reason = "runaway"
                if stream.unheard:
                    self._push([stream], stream.unheard)
            presentable = guard.presentable
        presentable = min(presentable, len(stream.sound))
        self._hand_out(stream, presentable, all_of_it=bool(stream.reason) or stream.idle)
        return stream.reason

    def _hand_out(self, stream: Stream, frames: int, all_of_it: bool) -> None:
        """Of the utterance's first `frames` those that nobody has yet: whole chunks, or `all_of_it`."""
        while (left := frames - stream.handed_frames) > 0 and (all_of_it or left >= stream.chunk_size):
            first, count = stream.handed_frames, min(left, stream.chunk_size)
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
        stream.chunks_given += 1
        stream.handed_frames += len(chunk.codes)
        stream.chunks.put(chunk)
        if stream.on_chunk:
            stream.on_chunk(chunk)
