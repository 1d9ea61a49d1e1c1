"""Watchdog: ends the wait for a GPU that does not answer, and for a callback that does not return."""

import contextlib
import logging
import queue
import time

from qwen_megakernel.engine.admission import Admission
from qwen_megakernel.engine.loop import Loop
from qwen_megakernel.engine.options import Patience
from qwen_megakernel.errors import CallbackError

log = logging.getLogger(__name__)


class Watchdog:
    def __init__(self, admission: Admission, loop: Loop, patience: Patience, default_s: float):
        """`default_s`: in place of `patience.device_s` if that is None."""
        self._admission = admission
        self._loop = loop
        self._patience = patience
        self._default_s = default_s
        self.hangs = False  # the loop's thread does not come back

    def run(self) -> None:
        """Time is counted by looks, because the process may be stopped and go on hours later."""
        turn, turn_s = None, 0.0
        while not self._admission.ended or self._admission.open:
            before = time.monotonic()
            with contextlib.suppress(queue.Empty):
                self._admission.bell.get(timeout=self._patience.look_s)
            passed = min(time.monotonic() - before, 2 * self._patience.look_s)
            began = self._loop.turn_began
            self._watch_callbacks(passed)
            turn, turn_s = began, turn_s + passed if began is not None and began == turn else 0.0
            device_s = self._patience.device_s or self._default_s
            if turn_s > device_s:
                self._end(device_s)

    def _watch_callbacks(self, passed: float) -> None:
        for sequence in self._admission.open.copy():
            if callbacks := sequence.result.callbacks:
                callbacks.watch(passed)
                if callbacks.stuck_s > self._patience.callback_s:
                    why = f"on_chunk did not return in {self._patience.callback_s:g} s: do not wait in it"
                    self._admission.abandon(sequence, CallbackError(why), "stuck")

    def _end(self, device_s: float) -> None:
        """End the engine, because the device did not answer for `device_s` seconds."""
        self._admission.fault = TimeoutError(f"the device did not answer for {device_s:g} s")
        self._admission.closed = True
        self._admission.ended = True
        self.hangs = True
        log.error("the engine is dead: %s", self._admission.fault)
        for sequence in self._admission.open.copy():
            self._admission.abandon(sequence, self._admission.death())
