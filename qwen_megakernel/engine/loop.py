"""Loop: the engine's thread. It takes messages, asks the scheduler, tells the pipeline, and hands out the results.

inbox -> queued -> [slot] -> prefill -> (frame -> vocoder -> chunk)* -> settled
"""

import contextlib
import logging
import queue
from collections.abc import Callable

import numpy as np
import torch

from qwen_megakernel.engine.admission import Admission
from qwen_megakernel.engine.device_pipeline import DevicePipeline, Launch, Pushed
from qwen_megakernel.engine.failures import Failures
from qwen_megakernel.engine.pace import Pace
from qwen_megakernel.engine.scheduler import Scheduler
from qwen_megakernel.engine.sequence import SpeechSequence, State
from qwen_megakernel.engine.slots import Slots
from qwen_megakernel.errors import KernelFault

log = logging.getLogger(__name__)


class Loop:
    def __init__(
        self,
        pipeline: DevicePipeline,
        admission: Admission,
        failures: Failures,
        slots: Slots,
        spare: Callable[[], DevicePipeline] | None,
        clock: Callable[[], float],
    ):
        """`spare`: makes the pipeline that takes over once the kernels are given up. None: the engine then ends."""
        self._admission, self.slots, self.failures = admission, slots, failures
        self._spare, self._clock = spare, clock
        self._use(pipeline)
        self.held: list[SpeechSequence] = []  # sequences that wait to share a vocoder push
        self._news = False  # text came, or a cancel
        self.fell_back = False  # the spare took over
        self._pace = Pace(admission, slots, clock)
        self.turn_began: float | None = None  # when the thread began its turn; None while it rests
        self.hangs = False  # the watchdog has given the thread up

    def _use(self, pipeline: DevicePipeline) -> None:
        self.pipeline = pipeline
        self.slots.use(pipeline.decoder)
        self._scheduler = Scheduler(pipeline.decoder.width, pipeline.decoder.narrow, pipeline.most_frames)

    @torch.inference_mode()
    def run(self) -> None:
        """Take turns until the engine is closed."""
        try:
            while not self._admission.closed:
                self.turn_began = self._clock()
                if not self.turn():
                    self.turn_began = None
                    with contextlib.suppress(queue.Empty):  # a sequence has waited too long
                        self._take(self._admission.inbox.get(timeout=self.slots.seconds_to_deadline))
        except BaseException as error:
            self._admission.fault = self._admission.fault or error
            log.exception("the engine's thread died")
        finally:
            self._end()

    def turn(self) -> bool:
        """Take messages, then do one step. False: there is nothing to do until a message comes."""
        for _ in range(self._admission.inbox.qsize()):  # no more: a caller in a tight loop must not hold up frames
            self._take(self._admission.inbox.get())
        if self._admission.closed:
            return True
        if self._news:
            self.slots.settle_cancelled()
        self.slots.assign()
        try:
            busy = self._step()
        except KernelFault as error:
            busy = self._recover(error)
        busy |= self.slots.release()
        self._admission.count()
        self._pace.turned(busy)
        return busy

    def _take(self, sequence: SpeechSequence | None) -> None:
        if sequence:
            self.slots.queue(sequence)
        else:
            self._news = True

    def _step(self) -> bool:
        """Prefill, and launch the most urgent frames. If there is no room for more, see what earlier work made."""
        for sequence in [s for s in self.slots.running if s.input.news] if self._news else ():
            self.failures.alone(sequence, self._read_news)
        self._news = False
        busy = False
        if self.pipeline.has_room and not (self.pipeline.sound_first and self.slots.new):
            for sequence in self._scheduler.to_prefill(self.slots.new, self.slots.running, self._clock()):
                self.failures.alone(sequence, self._prefill)
                busy = True
            ready = self._scheduler.ready(self.slots.running)
            if chosen := self._scheduler.to_launch(ready, self.pipeline.computed, self._clock()):
                with self.failures.together(chosen, "a frame"):
                    self._push(self.pipeline.launch(chosen))
                return True
            if self.held and not ready and not self.pipeline.computed:
                self._push([], wait=False)  # no other sequence will share a push
                return True
        if self.pipeline.in_flight:
            work = self.pipeline.pop()
            self._see_codes(work) if isinstance(work, Launch) else self._see_sound(work)
            return True
        return busy

    def _prefill(self, sequence: SpeechSequence) -> str | None:
        if sequence.state is State.PREFILLING:
            self.pipeline.start(sequence)
        if sequence.state is State.REFERENCE:
            self.pipeline.hear_reference(sequence, self._scheduler.reads_reference(sequence, self.slots.running))
        return self._read_news(sequence)

    def _read_news(self, sequence: SpeechSequence) -> str | None:
        if sequence.state is not State.PREFILLING and not sequence.input.cancelled:
            if self.pipeline.read_text(sequence):
                self.slots.trim(sequence)
        return "cancelled" if sequence.input.cancelled else None

    def _see_codes(self, launch: Launch) -> None:
        with self.failures.together(launch.sequences, "a frame"):
            frames = list(zip(launch.sequences, self.pipeline.codes(), strict=True))
            self._scheduler.frame_took(self._clock() - launch.began)
            for sequence, codes in frames:
                self.failures.alone(sequence, self.pipeline.add_frame, codes)
            said = sum(isinstance(codes, np.ndarray) and not s.result.settled for s, codes in frames)
            self._admission.tally("frames", said)
        ended = [s for s in launch.sequences if s.reason and not s.result.settled]
        self._push(self.pipeline.behind_codes(launch.sequences, ended))
        for sequence in (s for s in ended if not s.pushes):
            self.failures.alone(sequence, SpeechSequence.hand_out)

    def _push(self, candidates: list[SpeechSequence], wait: bool = True) -> None:
        """Give the vocoder the candidates' frames that are due. `wait`: some may wait to share a push."""
        if wait and not candidates:
            return
        candidates = list(dict.fromkeys([*self.held, *candidates]))
        self.held = []
        while candidates:
            pushes, held = self._scheduler.to_push(candidates, self.slots.running, self._clock(), wait)
            self.held += held
            for push in pushes:
                with self.failures.together(push.sequences, "the vocoder"):
                    self.pipeline.push(push)
            # Some may have more than a push takes.
            candidates = [s for push in pushes for s in push.sequences if s.missing > 0 and not s.result.settled]

    def _see_sound(self, pushed: Pushed) -> None:
        sounds: list[np.ndarray | None] = []  # stays empty if the push failed
        with self.failures.together(pushed.sequences, "the vocoder"):
            sounds = self.pipeline.sound(pushed)
            self.failures.in_a_row = 0
        for sequence, sound in zip(pushed.sequences, sounds, strict=False):
            self.failures.alone(sequence, self.pipeline.follow)  # first: the guard hears where it is in its text
            self.failures.alone(sequence, SpeechSequence.add_sound, sound)
            self.failures.alone(sequence, SpeechSequence.hand_out, sequence in pushed.push.short)

    def _recover(self, error: KernelFault) -> bool:
        """End all running sequences after a fault, because no slot's state is trusted. Then go on, or fall back."""
        self.pipeline.forget()
        self.held.clear()
        self.failures.all(self.slots.running, error)
        if not self.failures.too_many:
            self.pipeline.recover()
        elif self._spare and not self.fell_back:
            log.error("%d kernel faults in a row: PyTorch takes over", self.failures.in_a_row)
            del self.pipeline  # the spare needs the memory; until it is there, there is no pipeline
            self.turn_began = None  # its load takes long
            self._use(self._spare())
            self.fell_back = True
        else:
            raise error
        log.error("a kernel gave up; all running utterances ended, the engine goes on", exc_info=error)
        return True

    def _end(self) -> None:
        self._admission.closed = True
        self.turn_began = self._clock()
        if hasattr(self, "pipeline"):
            self.pipeline.drain()
            self.pipeline.close()
        self.slots.clear()
        for sequence in list(self._admission.open):
            self._admission.settle_closed(sequence)
            sequence.forget()
        self.turn_began = None
        self._admission.ended = True
        self._admission.bell.put(None)
