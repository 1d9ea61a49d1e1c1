"""Pace: how much audio the engine makes while it works. What was measured at load may be wrong an hour later: other
programs may use the device, now or then."""

from qwen_megakernel.engine.admission import Admission
from qwen_megakernel.engine.audio import FRAME_S

_WINDOW_S = 2.0  # of work, after which the figure is renewed
_LOWEST = 0.8  # of the last figure: a crowd's prompts slow down one window, and not the next one


class Pace:
    """The engine's thread owns it."""

    def __init__(self, admission: Admission):
        self._admission = admission
        self._worked_s, self._frames, self._full = 0.0, 0, True

    def worked(self, seconds: float, frames: int, full: bool) -> None:
        """A turn took so long, and so many frames came of it. `full`: somebody waits for a slot, so the engine works as
        much as it may. Without that, the figure tells only that it could do so much or more."""
        self._worked_s += seconds
        self._frames += frames
        self._full &= full
        if self._worked_s < _WINDOW_S:
            return
        measured = FRAME_S * self._frames / self._worked_s
        if self._admission.measured and (self._full or measured > self._admission.measured):
            self._admission.sustain(max(measured, _LOWEST * self._admission.measured))
        self._worked_s, self._frames, self._full = 0.0, 0, True
