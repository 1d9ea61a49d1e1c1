"""TimeStretch: makes speech faster or slower at the same pitch, while it is made.

The method is WSOLA: Verhelst and Roelands, "An overlap-add technique based on waveform similarity (WSOLA) for high
quality time-scale modification of speech", ICASSP 1993. The output grows by hops of equal length. Each hop fades from
the segment that was heard last into another one, taken from near the place in the input that is due by now. Of all
segments near that place it is the one most similar to what would have followed the last one. So pitch periods meet in
phase, and the pitch stays.
"""

import numpy as np

_HOP_S = 0.0125  # seconds over which one segment fades into the next: a pitch period of 80 Hz, a man's low voice

_REACH_S = 0.0075
"""How many seconds before or after its place a segment may begin: 15 ms in all, a pitch period of 67 Hz."""

_TINY = 1e-9
"""Added to energies, so that digital silence causes no division by zero. A hop at -90 dBFS has 300 times as much."""


class TimeStretch:
    """One utterance's stretching; `speed` is seconds of input for a second of output. However the input is cut, the
    joined output is the same: every hop waits for all the input that it looks at. So at most 50 ms of input are held
    back (29 ms up to a speed of 2)."""

    def __init__(self, speed: float, sample_rate: int):
        self._speed = speed
        self._hop = round(_HOP_S * sample_rate)
        self._reach = round(_REACH_S * sample_rate)
        phase = (np.arange(self._hop) + 0.5) / self._hop
        self._fade_in = (0.5 - 0.5 * np.cos(np.pi * phase)).astype(np.float32)
        self._fade_out = 1 - self._fade_in
        self._input = np.zeros(0, np.float32)  # what hops may still look at
        self._begin = self._taken = 0  # input samples: before `_input`; in all
        self._hops = 0  # of output
        self._follows = 0  # input sample that would have followed the last segment

    def place(self, sample: float) -> float:
        """Where a sample of the input is in the output, within 8 ms."""
        return sample / self._speed

    def push(self, samples: np.ndarray) -> np.ndarray:
        """fp32 [n], the next of the input -> fp32 [m], the next of the output: whole hops, so m may be 0."""
        self._input = np.concatenate([self._input, samples])
        self._taken += len(samples)
        return self._stretch(self._taken)

    def finish(self) -> np.ndarray:
        """The input is complete. Returns the rest of the output, whose length is then `round(input / speed)`."""
        left = round(self._taken / self._speed) - self._hops * self._hop
        silence = np.zeros(2 * self._hop + self._reach + int(self._hop * self._speed) + 1, np.float32)
        self._input = np.concatenate([self._input, silence])
        return self._stretch(self._taken + len(silence))[:left]

    def _stretch(self, end: int) -> np.ndarray:
        """All hops for which the input up to its sample `end` is enough."""
        hops: list[np.ndarray] = [np.zeros(0, np.float32)]
        hop, reach = self._hop, self._reach
        while True:
            place = round(self._hops * hop * self._speed)
            low, high = max(0, place - reach), place + reach
            # The third bound keeps the output from growing longer than the input allows if the input ends here.
            if max(high + hop, self._follows + hop, (self._hops + 1) * hop * self._speed) > end:
                break
            heard = self._slice(self._follows, self._follows + hop)
            begin = low + _most_similar(self._slice(low, high + hop), heard)
            hops.append(heard * self._fade_out + self._slice(begin, begin + hop) * self._fade_in)
            self._follows = begin + hop
            self._hops += 1
        keep = min(self._follows, low)
        self._input = self._input[keep - self._begin :]
        self._begin = keep
        return np.concatenate(hops)

    def _slice(self, first: int, last: int) -> np.ndarray:
        return self._input[first - self._begin : last - self._begin]


def _most_similar(samples: np.ndarray, wanted: np.ndarray) -> int:
    """Where in `samples` (fp32 [n]) the part begins that is most similar to `wanted` (fp32 [m]), by the correlation
    over the root of the part's energy; the first of equals."""
    energy = np.cumsum(np.square(samples, dtype=np.float64))
    energy = energy[len(wanted) - 1 :] - np.concatenate([[0.0], energy[: -len(wanted)]])
    return int(np.argmax(np.correlate(samples, wanted) / np.sqrt(energy + _TINY)))
