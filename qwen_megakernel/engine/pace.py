"""Pace: how much audio the engine makes while it works. What was measured at load may be wrong an hour later: other
programs may use the device, now or then."""

from collections.abc import Callable

from qwen_megakernel.engine.admission import Admission
from qwen_megakernel.engine.audio import FRAME_S
from qwen_megakernel.engine.slots import Slots

_WINDOW_S = 2.0  # of work, after which the figure is renewed
_LOWEST = 0.8  # of the last figure: a crowd's prompts slow down one window, and not the next one


class Pace:
    """The engine's thread owns it."""

    def __init__(self, admission: Admission, slots: Slots, clock: Callable[[], float]):
        self._admission, self._slots, self._clock = admission, slots, clock
        self._at = 0.0  # when the last turn ended
        self._worked = False  # it found something to do, so the next one came without a rest
        self._begin()

    def _begin(self) -> None:
        """A new window."""
        self._seconds, self._frames = 0.0, self._admission.frames
        self._full = True  # somebody waits for a slot all the time, so the engine works as much as it may

    def turned(self, worked: bool) -> None:
        """A turn of the loop has ended."""
        now = self._clock()
        if worked and self._worked:
            self._seconds += now - self._at
            self._full &= bool(self._slots.waiting)
        self._at, self._worked = now, worked
        if self._seconds < _WINDOW_S:
            return
        measured, last = FRAME_S * (self._admission.frames - self._frames) / self._seconds, self._admission.measured
        # If the engine is not full, it makes so much or more.
        if last and (self._full or measured > last):
            self._admission.sustain(max(measured, _LOWEST * last))
        self._begin()
