"""EngineCore: admission, loop, pipeline and watchdog of one engine, and how callers' threads reach them.

    caller ─ open, hand over ─► inbox ─► Loop ─► chunks, callbacks ─► caller

It holds no engine. So an engine that is dropped without `close` ends its threads.
"""

import atexit
import contextlib
import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from qwen_megakernel.backend.cpu_threads import use_threads
from qwen_megakernel.backend.interfaces import CpuSpeed, LoadedModel
from qwen_megakernel.engine.admission import Admission
from qwen_megakernel.engine.audio import Chunk
from qwen_megakernel.engine.device_pipeline import make_pipeline
from qwen_megakernel.engine.failures import Failures
from qwen_megakernel.engine.loop import Loop
from qwen_megakernel.engine.options import Limits
from qwen_megakernel.engine.request import Request
from qwen_megakernel.engine.sequence import FRAME_S, Sequence
from qwen_megakernel.engine.slots import Slots
from qwen_megakernel.engine.watchdog import Watchdog
from qwen_megakernel.errors import RequestError, TextEndedError
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.model.prompt_pieces import PromptPieces

log = logging.getLogger(__name__)

_THREADS = ("qwen_megakernel engine", "qwen_megakernel watchdog")

_SWITCH_S = 0.0001
"""The interpreter's switch interval. Coming back from the GPU, the loop waits for the interpreter as long as others
compute in Python, at most this long each time. Python's own 5 ms would be more than three frames of 1.5 ms."""

_DEVICE_S = {"cuda": 30.0, "cpu": 300.0}  # see Patience.device_s


class EngineCore:
    """Methods may be called from any thread, except where one says otherwise.

    Attributes:
        slots: of the frame decoder.
        max_positions: of a slot.
        threads: the loop's and the watchdog's.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        sample_rate: int,
        device: torch.device,
        limits: Limits,
        spare: Callable[[], LoadedModel] | None = None,
        void: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            sample_rate: of the vocoder, in Hz.
            device: of the model.
            spare: makes what takes over once the kernels are given up; without it that ends the engine.
            void: see `Failures`.
        """

        def pipeline(of: LoadedModel):
            return make_pipeline(of, kept_voices=limits.kept_voices, clock=clock)

        self._cuda = torch.cuda.default_stream(device) if device.type == "cuda" else None
        self._sample_rate, self._limits, self._clock = sample_rate, limits, clock
        self.slots, self.max_positions = model.decoder.slots, model.decoder.max_positions
        self._groups = model.vocoder.groups
        # Nothing below knows this core: without a circle its memory is free as soon as nobody holds it.
        self._inbox: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.admission = Admission(self.slots, limits.max_queue, self._inbox, self._bell)
        slots = Slots(self.admission, limits.queue_timeout, clock)
        make_spare = (lambda: pipeline(spare())) if spare else None
        failures = Failures(self.admission, model.check_device, void)
        self.loop = Loop(pipeline(model), self.admission, failures, slots, self._inbox, self._bell, make_spare, clock)
        self.watchdog = Watchdog(self.admission, self.loop, self._bell, limits.patience, _DEVICE_S[device.type])
        run = partial(_run_with, model.cpu.threads, self.loop.run) if model.cpu else self.loop.run
        self.threads = tuple(
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in zip((run, self.watchdog.run), _THREADS, strict=True)
        )
        self._thread = self.threads[0]

        if model.cpu:
            self._heed(model.cpu)

    def _heed(self, cpu: CpuSpeed) -> None:
        """A CPU computes one frame after the other: what it sustains follows from one frame."""
        audio_s_per_s = FRAME_S * cpu.frames_per_s
        self.admission.sustain(audio_s_per_s)
        log.debug("%s", cpu)
        if audio_s_per_s < 1:
            told = "this CPU makes %.2f s of speech a second: live listeners hear gaps; use a GPU or a smaller model"
            log.warning(told, audio_s_per_s)

    def start(self) -> None:
        """The switch interval holds for the whole process."""
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        for thread in self.threads:
            thread.start()
        _CORES.add(self)

    # ------------------------------------------------------------ what callers do

    def new_sequence(
        self, request: Request, on_chunk: Callable[[Chunk], None] | None, on_end: Callable[[], None] | None
    ) -> Sequence:
        """A sequence that takes nothing yet, with its callbacks' runner, whose thread is not started."""
        sequence = Sequence(
            request, on_chunk, on_end, sample_rate=self._sample_rate, groups=self._groups, clock=self._clock
        )
        if on_chunk or on_end:
            sequence.callbacks = self.admission.make_callbacks(sequence)
        return sequence

    def start_callbacks(self, sequence: Sequence) -> None:
        """Of an admitted sequence: a thread is not made on the way to the first chunk.

        Raises:
            RuntimeError: the process can have no more threads; the sequence has ended.
        """
        try:
            if callbacks := sequence.callbacks:
                callbacks.start()
        except RuntimeError as error:
            self.admission.settle(sequence, error=error)
            self.cancel(sequence)
            raise

    def hand_over(self, sequence: Sequence, prompt: Prompt, text_complete: bool) -> None:
        """The prompt of an admitted sequence is built."""
        sequence.enqueue(prompt, text_complete, self.max_positions, self._limits.queue_timeout)
        self._inbox.put(sequence)

    @torch.inference_mode()
    def advance(self, sequence: Sequence, step: Callable[[PromptPieces], Tensor]) -> None:
        """A piece of text, under the sequence's lock: build the rows that it settles in the caller's thread, and hand
        them on."""
        pieces, began = sequence.pieces, time.monotonic()
        if pieces is None:
            raise TextEndedError("the utterance has ended")
        sequence.arrived, tokenised_s = sequence.arrived or began, pieces.tokenise_s
        try:
            with self.in_order():
                rows = step(pieces)
            if sequence.prompt is not None:
                if len(rows) or pieces.ended:
                    sequence.incoming.put((rows, pieces.ended))
                    self.wake()
            elif pieces.prompt is not None:
                prompt_s = time.monotonic() - began - (pieces.tokenise_s - tokenised_s)
                sequence.timings |= {"tokenise": pieces.tokenise_s, "prompt": prompt_s}
                self.hand_over(sequence, pieces.prompt, text_complete=pieces.ended)
        except BaseException as error:  # also an interrupt: nobody else would free the slot
            sequence.cancelled = True
            self.admission.settle(sequence, error=error)
            self.wake()
            raise

    def cancel(self, sequence: Sequence) -> None:
        """Takes no lock: a finalizer or a signal handler may call it."""
        if not sequence.cancelled:
            sequence.cancelled = True
            self.wake()

    def wake(self) -> None:
        """Text came, or a sequence was cancelled: the loop looks again."""
        self._inbox.put(None)

    def in_order(self) -> contextlib.AbstractContextManager:
        """For callers that build prompts: before what the loop computes, whatever CUDA stream is theirs."""
        return torch.cuda.stream(self._cuda) if self._cuda else contextlib.nullcontext()

    def refuse_own_thread(self, sequence: Sequence) -> None:
        """Raises RequestError where waiting for the sequence would never end."""
        callbacks = sequence.callbacks
        mine = threading.current_thread() in (self._thread, callbacks and callbacks.thread)
        if mine and not sequence.done.is_set():
            raise RequestError("a callback cannot wait for its own utterance: it would wait for its own thread")

    # ------------------------------------------------------------ what an engine asks

    @property
    def fell_back(self) -> bool:
        """The spare took over."""
        return self.loop.fell_back

    @property
    def alive(self) -> bool:
        """Does the loop's thread run?"""
        return self._thread.is_alive()

    @property
    def inbox_size(self) -> int:
        return self._inbox.qsize()

    def forget(self) -> None:
        """What was said so far, none of which is open, counts for nothing and leaves nothing."""
        self.loop.pipeline.forget_references()
        self.admission.forget()

    # ------------------------------------------------------------ the end

    def drain(self, seconds: float) -> None:
        """Take no more, and wait for those that are open, so long at most. Takes no lock: see `cancel`."""
        self.admission.draining, end = True, time.monotonic() + seconds
        while self.admission.open and not self.admission.closed and time.monotonic() < end:
            time.sleep(0.01)

    def stop(self) -> None:
        """Let the loop end before its next turn; what is open is cancelled. Takes no lock: see `cancel`."""
        self.admission.closed = True
        self.wake()
        self._bell.put(None)

    def join(self) -> None:
        """Wait for the threads, unless this is one of them, or the loop hangs."""
        me, look_s = threading.current_thread(), self._limits.patience.look_s
        while me is not self._thread and self._thread.is_alive() and not self.watchdog.hangs:
            self._thread.join(timeout=look_s)
        end = time.monotonic() + 2 * look_s
        for sequence in self.admission.open.copy():  # what callbacks have yet to hear
            callbacks = sequence.callbacks
            while callbacks and me not in (self._thread, callbacks.thread) and time.monotonic() < end:
                if sequence.done.is_set():
                    break
                time.sleep(0.002)
        if me not in self.threads:
            self.threads[1].join(timeout=look_s)


def _run_with(threads: int, run: Callable[[], None]) -> None:
    """Run with so many of PyTorch's threads."""
    use_threads(threads)
    run()


_CORES: "weakref.WeakSet[EngineCore]" = weakref.WeakSet()


@atexit.register
def _stop_cores() -> None:
    """A thread that is inside torch while the interpreter goes away aborts the process. Not by way of the engines: one
    that was dropped a moment ago leaves its threads to stop, and the last of them to free what the model took."""
    cores = list(_CORES)
    for core in cores:
        core.stop()
        core.join()
    waited_for = {thread for core in cores for thread in core.threads}
    for thread in threading.enumerate():
        if thread.name in _THREADS and thread not in waited_for:
            thread.join(timeout=10.0)
