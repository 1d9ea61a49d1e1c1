"""RunawayGuard: tells speech from the loops that the model itself falls into.

Once in a few hundred requests the published model never says end of speech: it stays in near-silence, or repeats
itself, up to the frame limit (207 of 60,424 requests in sglang-omni issue 1179). A pause looks just the same at first,
and nothing in one second of it tells which it will be. But frames are made much faster than they are heard: so the
first second of a run is handed out, what follows is held back, and the verdict falls after three. Where speech goes on,
the listener gets all of it, a little later; where it does not, nothing of the loop beyond its first second.
"""

from collections import deque

import numpy as np
import torch
from torch import Tensor

HANDED_OUT = 12
"""Frames of a loop that a listener hears at most: 0.96 s."""
VERDICT = 38
"""Frames in a loop after which it is a runaway: 3 s, a second more than the pauses of slow speech."""

_PERIODS = range(1, 5)
_QUIET, _SILENT = 0.01, 5e-4  # RMS: of the loudest frame so far (-40 dB), and in itself (-66 dBFS)


class RunawayGuard:
    """Watches one utterance, from the moment its text is used up: what repeats or rests before that may go on."""

    def __init__(self):
        self._recent: deque[Tensor] = deque(maxlen=_PERIODS[-1])
        self._repeated = dict.fromkeys(_PERIODS, 0)  # latest frames that equal the one so many before
        self._quiet = 0  # latest frames heard that are near silence
        self._loudest = 0.0
        self._seen = self._heard = self._watched_from = 0  # frames

    def see(self, codes: Tensor, text_used_up: bool) -> None:
        """One more frame: codes int64 [groups]."""
        for period in _PERIODS:
            same = len(self._recent) >= period and torch.equal(codes, self._recent[-period])
            self._repeated[period] = self._repeated[period] + 1 if same else 0
        self._recent.append(codes)
        self._seen += 1
        if not text_used_up:
            self._watched_from = self._seen

    def hear(self, samples: np.ndarray, frames: int) -> None:
        """What the next frames sound like: fp32 [frames * 1920]."""
        for frame in samples.reshape(frames, -1):
            level = float(np.sqrt(np.mean(np.square(frame))))
            self._loudest = max(self._loudest, level)
            self._quiet = self._quiet + 1 if level < max(_SILENT, _QUIET * self._loudest) else 0
        self._heard += frames

    @property
    def is_runaway(self) -> bool:
        return any(end - begin >= VERDICT for begin, end in self._loops())

    @property
    def presentable(self) -> int:
        """Frames, from the utterance's first, that may be handed out by now."""
        return min((begin + HANDED_OUT for begin, end in self._loops()), default=self._seen)

    def _loops(self) -> list[tuple[int, int]]:
        """First frame and end of every run that goes on."""
        loops = [(self._seen - run - period, self._seen) for period, run in self._repeated.items() if run]
        loops += [(self._heard - self._quiet, self._heard)] if self._quiet else []
        return [(max(begin, self._watched_from), end) for begin, end in loops]
