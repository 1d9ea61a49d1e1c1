"""EngineCore: admission, loop, pipeline and watchdog of one engine, and how callers' threads reach them.

    caller ─ open, hand over ─► inbox ─► Loop ─► chunks, callbacks ─► caller

It does not refer to the engine. So an engine that is dropped without `close` ends its threads.
"""

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from qwen_megakernel.backend.cpu_threads import use_threads
from qwen_megakernel.backend.interfaces import CpuSpeed, LoadedModel
from qwen_megakernel.engine.admission import Admission
from qwen_megakernel.engine.audio import FRAME_S, Chunk
from qwen_megakernel.engine.callbacks import CallbackRunner, DirectCalls
from qwen_megakernel.engine.device_pipeline import DevicePipeline
from qwen_megakernel.engine.failures import Failures
from qwen_megakernel.engine.input import Request
from qwen_megakernel.engine.loop import Loop
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.engine.sequence import SpeechSequence, State
from qwen_megakernel.engine.slots import Slots
from qwen_megakernel.engine.text_path import HeadFinder
from qwen_megakernel.engine.watchdog import watch
from qwen_megakernel.errors import RequestError, TextEndedError, memory_told
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.model.prompt_pieces import PromptPieces

log = logging.getLogger(__name__)

_THREADS = ("qwen_megakernel engine", "qwen_megakernel watchdog")

_SWITCH_S = 0.0001

_SHORT_TEXT, _LONGEST_WAIT_S = 1000, 1.0  # characters; see `in_turn`

_DEVICE_S = {"cuda": 30.0, "cpu": 300.0}  # see Patience.device_s


class EngineCore:
    """Any thread may call the methods, unless one says otherwise."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        sample_rate: int,
        device: torch.device,
        limits: EngineOptions,
        spare: Callable[[], LoadedModel] | None = None,
        void: Callable[[], None] | None = None,
        finder: HeadFinder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`spare`: makes the model of `Loop`'s spare. `void`: see `Failures`. `finder`: of the checkpoint."""
        if limits.fallback is not None and spare is None:
            log.warning("fallback changes nothing: PyTorch speaks already")
        self.finder = finder or HeadFinder()
        pipeline = partial(DevicePipeline, finder=self.finder, kept_voices=limits.kept_voices, clock=clock)
        self._cuda = torch.cuda.default_stream(device) if device.type == "cuda" else None
        self._limits = limits
        self._sequence = partial(SpeechSequence, sample_rate=sample_rate, groups=model.vocoder.groups, clock=clock)
        self.slots = model.decoder.slots
        self._building = threading.Lock()
        # Nothing below refers to this core: without a reference cycle its memory is freed as soon as it is dropped.
        self.admission = Admission(self.slots, limits.max_queue)
        slots = Slots(self.admission, limits.queue_timeout, clock)
        make_spare = (lambda: pipeline(spare())) if spare else None
        failures = Failures(self.admission, model.check_device, void)
        self.loop = Loop(pipeline(model), self.admission, failures, slots, make_spare, clock)
        self._thread = threading.Thread(target=partial(_run, self.loop, model.cpu), name=_THREADS[0], daemon=True)
        watching = partial(watch, self.admission, self.loop, limits.patience, _DEVICE_S[device.type])
        watchdog = threading.Thread(target=watching, name=_THREADS[1], daemon=True)
        self.threads = (self._thread, watchdog)
        if model.cpu:  # it computes frames one by one: it sustains what the time of one tells, or more
            audio_s_per_s = FRAME_S * model.cpu.frames_per_s
            self.admission.sustain(audio_s_per_s)
            log.debug("%s", model.cpu)
            if audio_s_per_s < 1:
                told = "this CPU makes %.2f s of speech a second: live listeners hear gaps"
                log.warning(f"{told}; use a GPU or a smaller model", audio_s_per_s)

    def start(self) -> None:
        for thread in self.threads:
            thread.start()
        _SWITCH_INTERVAL.shorten(self.loop)
        _CORES.add(self)

    def new_sequence(
        self, request: Request, on_chunk: Callable[[Chunk], None] | None, on_end: Callable[[], None] | None
    ) -> SpeechSequence:
        """A sequence without a place. The thread of its callbacks is not started yet. If `on_chunk` is marked with
        `returns_at_once`, `on_end` must return at once too."""
        sequence = self._sequence(request, on_chunk, on_end)
        if getattr(on_chunk or on_end, "returns_at_once", None) is True:
            sequence.result.callbacks = DirectCalls()
        elif on_chunk or on_end:
            sequence.result.callbacks = CallbackRunner(partial(self.admission.callback_failed, sequence))
        return sequence

    def start_callbacks(self, sequence: SpeechSequence, callbacks: CallbackRunner | DirectCalls | None) -> None:
        """Start the callbacks' thread of an admitted sequence now, so that its first chunk does not wait for it.
        `callbacks`: those it was made with; it may have ended by now, and have none. Raises RuntimeError: the process
        can have no more threads; the sequence has ended."""
        try:
            if callbacks:
                callbacks.start()
        except RuntimeError as error:
            self.admission.settle(sequence, error=error)
            self.cancel(sequence)
            raise

    def hand_over(self, sequence: SpeechSequence, prompt: Prompt, text_complete: bool) -> None:
        """Give the loop an admitted sequence, whose prompt is built."""
        sequence.enqueue(prompt, text_complete, self._limits.max_positions, self._limits.queue_timeout)
        self.admission.inbox.put(sequence)

    @torch.inference_mode()
    @memory_told()
    def advance(self, sequence: SpeechSequence, step: Callable[[PromptPieces], Tensor]) -> None:
        """Take a piece of text, under the sequence's lock. Build the rows that it settles in the caller's thread, and
        hand them to the loop."""
        pieces = sequence.input.pieces
        began = time.monotonic()
        if pieces is None:
            raise TextEndedError("the utterance has ended")
        stopwatch = sequence.stopwatch
        if stopwatch.arrived is None:
            stopwatch.arrived = began
        tokenised_s = pieces.tokenise_s
        try:
            with self.in_order():
                rows = step(pieces)
            if sequence.state is not State.WAITING_TEXT:
                if len(rows) or pieces.ended:
                    sequence.input.rows.put((rows, pieces.ended))
                    self.admission.wake()
            elif pieces.prompt is not None:
                prompt_s = time.monotonic() - began - (pieces.tokenise_s - tokenised_s)
                stopwatch.stages |= {"tokenise": pieces.tokenise_s, "prompt": prompt_s}
                self.hand_over(sequence, pieces.prompt, text_complete=pieces.ended)
        except BaseException as error:  # also an interrupt: nobody else would free the slot
            try:
                self.admission.settle(sequence, error=error)  # first: the loop ends who is cancelled without an error
            finally:
                sequence.input.cancelled = True
                self.admission.wake()
            raise

    def cancel(self, sequence: SpeechSequence) -> None:
        """Takes no lock: a finalizer or a signal handler may call it."""
        if not sequence.input.cancelled:
            sequence.input.cancelled = True
            self.admission.wake()

    def in_order(self) -> contextlib.AbstractContextManager[object]:
        """A context for callers that build prompts. It selects the loop's CUDA stream, so the rows are made in time."""
        if self._cuda is None or torch.cuda.current_stream(self._cuda.device) == self._cuda:
            return contextlib.nullcontext()  # torch's own context takes 70 us
        return torch.cuda.stream(self._cuda)

    @contextlib.contextmanager
    def in_turn(self, text: str | None) -> Iterator[None]:
        """A context for callers that build prompts, one after the other. The loop then competes with one of them for
        the interpreter, not with all: the least lead of 256 callers at once was 55 ms instead of 25
        (docs/log/2026-11-23.md#vocoder-pushes-hold). A long text waits for nobody and keeps nobody waiting. After
        `_LONGEST_WAIT_S` a caller goes on anyway: a signal handler may have interrupted the one whose turn it is."""
        short = text is None or len(text) <= _SHORT_TEXT
        mine = short and self._building.acquire(timeout=_LONGEST_WAIT_S)
        try:
            yield
        finally:
            if mine:
                self._building.release()

    def refuse_own_thread(self, sequence: SpeechSequence) -> None:
        """Raises RequestError if waiting for the sequence would never end."""
        callbacks = sequence.result.callbacks
        mine = threading.current_thread() in (self._thread, callbacks and callbacks.thread)
        if mine and not sequence.result.done.is_set():
            raise RequestError("a callback cannot wait for its own utterance: take its Audio from on_end")

    def forget(self) -> None:
        """Reset the counters and drop what was kept of voices' references. No sequence may be open."""
        self.loop.pipeline.references.clear()
        self.admission.forget()

    def drain(self, seconds: float) -> None:
        """Take no more sequences, and wait at most `seconds` for the open ones. Takes no lock: see `cancel`."""
        self.admission.draining = True
        end = time.monotonic() + min(seconds, threading.TIMEOUT_MAX)
        while (self.admission.open or self.admission.seats) and not self.admission.closed and time.monotonic() < end:
            time.sleep(0.01)

    def stop(self) -> None:
        """End the loop before its next turn. Open sequences are cancelled. Takes no lock: see `cancel`."""
        self.admission.closed = True
        self.admission.wake()
        self.admission.bell.put(None)

    def join(self) -> None:
        """Wait for the threads, unless this is one of them, or the loop hangs."""
        me, look_s = threading.current_thread(), self._limits.patience.look_s
        while me is not self._thread and self._thread.is_alive() and not self.loop.hangs:
            self._thread.join(timeout=look_s)
        end = time.monotonic() + 2 * look_s
        for sequence in self.admission.open.copy():  # callbacks may still have calls to make
            callbacks = sequence.result.callbacks
            while callbacks and me not in (self._thread, callbacks.thread) and time.monotonic() < end:
                if sequence.result.done.is_set():
                    break
                time.sleep(0.002)
        if me not in self.threads:
            self.threads[1].join(timeout=look_s)


class _SwitchInterval:
    """The interpreter's switch interval, which is the whole process's: short while a loop runs. When a loop comes back
    from the GPU and other threads run Python, it waits at most this long for the interpreter. Python's default of 5 ms
    is more than three frames of 1.5 ms.

    It takes no lock, because a signal handler may wait for the end of a loop in the midst of a call. So the steps are
    atomic ones, and whoever restores looks once more.
    """

    def __init__(self) -> None:
        self._loops: set[Loop] = set()  # that run
        self._former: float | None = None

    def shorten(self, loop: Loop) -> None:
        self._loops.add(loop)
        self._shorten()

    def _shorten(self) -> None:
        now = sys.getswitchinterval()
        if now > _SWITCH_S:
            self._former = now
            sys.setswitchinterval(_SWITCH_S)

    def restore(self, loop: Loop) -> None:
        """A loop has ended. After the last one the former interval is back, unless somebody else has set theirs."""
        self._loops.discard(loop)
        if self._loops or not math.isclose(sys.getswitchinterval(), _SWITCH_S):
            return
        former = self._former
        self._former = None
        if former is not None:
            sys.setswitchinterval(former)
        if self._loops:  # another engine was started meanwhile
            self._shorten()


_SWITCH_INTERVAL = _SwitchInterval()


def _run(loop: Loop, cpu: CpuSpeed | None) -> None:
    try:
        if cpu:
            use_threads(cpu.threads)
        loop.run()
    finally:
        _SWITCH_INTERVAL.restore(loop)


_CORES: "weakref.WeakSet[EngineCore]" = weakref.WeakSet()


def _end_copies() -> None:
    """In a forked process: no engine's threads came along, so every engine is dead at once."""
    for core in list(_CORES):
        core.admission.forked()
        core.loop.slots.clear()
        _SWITCH_INTERVAL.restore(core.loop)


os.register_at_fork(after_in_child=_end_copies)


@atexit.register
def _stop_cores() -> None:
    """Stop every core's threads: a thread inside torch while the interpreter shuts down aborts the process. It waits by
    thread name too, because an engine that was just dropped leaves threads that still stop and free the model."""
    cores = list(_CORES)
    for core in cores:
        core.stop()
        core.join()
    waited_for = {thread for core in cores for thread in core.threads}
    for thread in threading.enumerate():
        if thread.name in _THREADS and thread not in waited_for:
            thread.join(timeout=10.0)
