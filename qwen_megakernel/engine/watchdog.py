"""Watchdog: ends the wait for a GPU that does not answer, and for a callback that does not return."""

import contextlib
import logging
import queue
import reprlib
import time
from dataclasses import dataclass

from qwen_megakernel.engine.admission import Admission
from qwen_megakernel.engine.loop import Loop
from qwen_megakernel.errors import BackendError, CallbackError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """Seconds that things may take before the watchdog ends them. The defaults are choices, not measurements.

    Attributes:
        device_s: one turn of the engine's thread. Turns take milliseconds on a GPU, so 30 s is a thousand times more;
            the driver itself gives up on a lost GPU after some seconds. None: 30 on a GPU, 300 on a CPU, where one long
            prompt may take minutes.
        callback_s: one call of `on_chunk`.
        look_s: between two looks: far shorter than the others, but long enough that looks cost nothing.

    Raises:
        BackendError: one is not above 0.
    """

    device_s: float | None = None
    callback_s: float = 30.0
    look_s: float = 0.5

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if name == "device_s" and seconds is None:
                continue
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
                raise BackendError(f"{name} must be seconds above 0, got {reprlib.repr(seconds)}")


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
            if turn_s > self._device_s:
                self._end()

    @property
    def _device_s(self) -> float:
        return self._default_s if self._patience.device_s is None else self._patience.device_s

    def _watch_callbacks(self, passed: float) -> None:
        for sequence in self._admission.open.copy():
            if callbacks := sequence.callbacks:
                callbacks.watch(passed)
                if callbacks.stuck_s > self._patience.callback_s:
                    why = f"on_chunk did not return in {self._patience.callback_s:g} s: do not wait in it"
                    self._admission.abandon(sequence, CallbackError(why), "stuck")

    def _end(self) -> None:
        """End the engine, because the device does not answer."""
        self._admission.fault = TimeoutError(f"the device did not answer for {self._device_s:g} s")
        self._admission.closed = True
        self._admission.ended = True
        self.hangs = True
        log.error("the engine is dead: %s", self._admission.fault)
        for sequence in self._admission.open.copy():
            self._admission.abandon(sequence, self._admission.death())
