"""Where speech begins and ends, and the silence around it: cut to a given length, or added, while the speech is made.

One loud sample is a click. Speech is sound whose level stays above `SILENCE` for 14 ms of 20.
"""

import math

import numpy as np

SILENCE = 0.003  # amplitude and RMS, -50 dBFS: sound that is not above it is silent

OFFSET = 0.02  # a constant offset up to it is silent too

FADE_S = 0.005  # seconds over which a cut fades in or out: without it a cut clicks

WINDOW_S = 0.002  # seconds over which the level is judged

# In such windows:
LASTING, WITHIN = 7, 10
"""Speech is above `SILENCE` for 14 ms of 20. The bursts of p, t and k may be shorter, but breath follows them. Of 200
utterances of the demo voice all then begin within 20 ms of where their level says so
(docs/log/2026-11-27.md#first-minute-typed)."""
_JOINED = 8  # silent ones in a row end a sound; fewer are between the pulses of a creaking voice
_REACH = 5  # softer sound than `SILENCE` belongs to the speech it touches, if samples in it are above
_AT_ONCE, _WARM_UP = 2, 25
"""Sound that begins in the first two and is over after 50 ms is no speech: some decoders answer an empty past with
noise. The demo voice of 2026-11 made up to 40 ms of it."""


def levels(windows: np.ndarray) -> np.ndarray:
    """fp32 [..., samples] -> fp32 [...]: each window's RMS, around its mean if that is no more than `OFFSET`."""
    size = windows.shape[-1]
    # From two sums: to subtract the mean from each sample takes five times as long, and 2e-6 is exact enough.
    sums, squares = np.einsum("...s->...", windows), np.einsum("...s,...s->...", windows, windows)
    offsets = np.minimum(np.maximum(sums / size, -OFFSET), OFFSET)
    rms: np.ndarray = np.sqrt(np.maximum(squares - offsets * (2 * sums - size * offsets), 0) / size)
    return rms


def lasting_level(levels: np.ndarray) -> np.ndarray:
    """fp32 [..., windows] -> fp32 [...]: the level that `LASTING` of the windows reach, so that no click raises it."""
    reached: np.ndarray = np.partition(levels, -LASTING, axis=-1)[..., -LASTING]
    return reached


def silent_end_s(samples: np.ndarray, sample_rate: int) -> float:
    """Seconds of silence at the end of fp32 [n]; all of them if there is no speech."""
    bounds = SpeechBounds(sample_rate)
    bounds.push(samples)
    bounds.finish()
    return (len(samples) - bounds.end) / sample_rate


class SpeechBounds:
    """Finds where speech begins and ends. However the input is cut, it finds the same. All that it tells is in samples
    of the input."""

    def __init__(self, sample_rate: int):
        self._window = round(WINDOW_S * sample_rate)
        self.begin: int | None = None  # the first sample of speech; None: there was none yet
        self.end = 0  # behind the last sample of speech so far
        self.noise_end = 0  # behind the last sound that came before the speech and is none, such as a click
        self._recent = np.zeros(0, np.float32)  # the input from sample `_at` on
        self._at = 0
        # In windows from the input's first:
        self._judged = 0
        self._loud = np.zeros(0, np.int64)  # the latest loud ones of the latest sound
        self._first = 0  # of the latest sound
        self._last = -_JOINED - 1
        self._lasts_from: int | None = None  # from this one on it lasts; None: it does not yet
        self._speech_last: int | None = None

    def push(self, samples: np.ndarray) -> None:
        """fp32 [n], the next of the input."""
        self._recent = np.concatenate([self._recent, samples])
        judged = self._judged
        loud = judged + (levels(self._windows(judged)) > SILENCE).nonzero()[0]
        self._judged = (self._at + len(self._recent)) // self._window
        if len(loud):
            stops = [*(1 + (loud[1:] - loud[:-1] > _JOINED).nonzero()[0]), len(loud)]
            for first, stop in zip([0, *stops], stops, strict=False):
                self._hear(loud[first:stop])
        if self._speech_last is not None and self._speech_last + _REACH >= judged:
            behind = self._windows(self._speech_last)[: 1 + _REACH]
            self.end = self._speech_last * self._window + _sounding(behind)
        old = max(0, (self._judged - WITHIN - _REACH) * self._window - self._at)
        self._recent = self._recent[old:]
        self._at += old

    def finish(self) -> None:
        """The input is complete: judge what fills no window."""
        if rest := (self._at + len(self._recent)) % self._window:
            self.push(np.zeros(self._window - rest, np.float32))

    @property
    def silent(self) -> int:
        """Samples from the input's first that are no speech, whatever follows."""
        if self.begin is not None:
            return self.begin
        open_from = 0 if self._judged <= _WARM_UP + _JOINED else self._judged - WITHIN - _REACH
        return open_from * self._window

    def _hear(self, loud: np.ndarray) -> None:
        """int64 [n], the next loud windows; they belong to one sound."""
        if loud[0] - self._last > _JOINED:
            if self.begin is None:
                self.noise_end = max(0, self._last + 1) * self._window
            self._first, self._lasts_from, self._loud = int(loud[0]), None, loud[:0]
        self._last = int(loud[-1])
        if self._lasts_from is None:
            loud = np.concatenate([self._loud, loud])
            self._loud = loud[1 - LASTING :]
            lasting = (loud[LASTING - 1 :] - loud[: 1 - LASTING] < WITHIN).nonzero()[0]
            self._lasts_from = int(loud[lasting[0]]) if len(lasting) else None
        warms_up = self._first < _AT_ONCE
        if self._lasts_from is None or warms_up and self._last < _WARM_UP:
            return
        self._speech_last = self._last
        if self.begin is None:
            from_start = warms_up and self._lasts_from < _WARM_UP
            self.begin = 0 if from_start else self._onset(self._lasts_from)

    def _onset(self, first: int) -> int:
        """The first sample of sound whose first loud window is given."""
        before = self._windows(max(0, first - _REACH))[: min(first, _REACH) + 1]
        return (first + 1) * self._window - _sounding(before[::-1, ::-1])

    def _windows(self, first: int) -> np.ndarray:
        """The whole windows from `first` on: fp32 [windows, samples]."""
        samples = self._recent[first * self._window - self._at :]
        return samples[: len(samples) // self._window * self._window].reshape(-1, self._window)


def _sounding(windows: np.ndarray) -> int:
    """fp32 [windows, samples], the first one loud -> samples up to the last one above `SILENCE`. Windows behind one
    without such a sample do not count."""
    above = np.abs(windows) > SILENCE
    touched = int(np.argmin(np.append(above.any(axis=1), False)))
    return int(np.flatnonzero(above[:touched]).max(initial=-1)) + 1


class Edges:
    """One utterance's trimming: leaves `silence_s` seconds at most, but never less than the fade takes. However the
    input is cut, the joined output is the same. A pause within the speech comes out, unchanged, once the speech goes
    on. Clicks in the silence that is left in front become silence."""

    def __init__(self, trim: str, silence_s: float, sample_rate: int, most_s: float = math.inf):
        """`most_s`: seconds to cut at the start at most; what follows comes out, speech or not."""
        self._fade = round(FADE_S * sample_rate)
        self._keep = max(self._fade, round(silence_s * sample_rate))
        self._most = most_s * sample_rate
        self._waits = trim in ("start", "both")
        self._trims_end = trim in ("end", "both")
        self._bounds = SpeechBounds(sample_rate)
        self._held = np.zeros(0, np.float32)  # the latest samples, which may be cut
        self._taken = 0  # samples in all
        self.cut = 0  # of them at the start
        self._given = 0

    @property
    def begin(self) -> int | None:
        """Samples of the output before its speech; None: none came yet."""
        return None if self._bounds.begin is None else max(0, self._bounds.begin - self.cut)

    @property
    def end(self) -> int:
        """Samples of the output up to the end of its speech so far."""
        return max(0, self._bounds.end - self.cut)

    @property
    def tail(self) -> int:
        """Samples of the output so far behind its speech."""
        return self._given - self.end

    def place(self, sample: float) -> float:
        """Where a sample of the input is in the output; below 0: it was cut."""
        return sample - self.cut

    def push(self, samples: np.ndarray) -> np.ndarray:
        """fp32 [n], the next of the input -> fp32 [m], the next of the output; m may be 0."""
        self._bounds.push(samples)
        self._taken += len(samples)
        self._held = np.concatenate([self._held, samples])
        if self._waits and not self._begins():
            return samples[:0]
        return self._give(self._bounds.end if self._trims_end else self._taken)

    def finish(self) -> np.ndarray:
        """The input is complete. Returns fp32 [m], the rest of the output."""
        self._bounds.finish()
        if self._waits and not self._begins():  # there is no speech, only silence and clicks
            self._cut(self._taken)
            self._given = min(self._keep, len(self._held))
            return _silence(self._given)
        said = self._give(self._bounds.end)
        rest = self._held[: self._keep] if self._trims_end else self._held
        if len(rest) < len(self._held):
            _fade_in(rest[-self._fade :][::-1])
        self._given += len(rest)
        return np.concatenate([said, rest])

    def _begins(self) -> bool:
        """Cut what is no speech. Returns whether the rest may come out."""
        self._cut(self._bounds.silent)
        if self._bounds.begin is None and self.cut < self._most:
            return False
        self._waits = False
        clicks = max(0, self._bounds.noise_end - self.cut) if self.cut < self._most else 0
        self._held[:clicks] = 0
        if clicks or self.cut:
            _fade_in(self._held[clicks : self.begin][: self._fade])
        return True

    def _cut(self, silent: int) -> None:
        more = max(0, int(min(silent - self._keep, self._most)) - self.cut)
        self._held = self._held[more:]
        self.cut += more

    def _give(self, end: int) -> np.ndarray:
        """What is held of the input up to its sample `end`."""
        count = max(0, end - self._taken + len(self._held))
        given, self._held = self._held[:count], self._held[count:]
        self._given += len(given)
        return given


def _fade_in(samples: np.ndarray) -> None:
    samples *= (np.arange(len(samples), dtype=np.float32) + 0.5) / max(1, len(samples))


class Padding:
    """Adds silence before and after one utterance's speech, up to the given lengths; silence already there counts.
    However the input is cut, the joined output is the same."""

    def __init__(self, before_s: float, after_s: float, sample_rate: int, edges: Edges, speed: float = 1.0):
        """`edges`: what has trimmed the same sides. `speed`: of a `TimeStretch` between it and this."""
        self._before = before_s * sample_rate
        self._after = after_s * sample_rate
        self._edges = edges
        self._speed = speed
        self._added = 0  # samples before the speech

    def place(self, sample: float) -> float:
        """Where a sample of the input is in the output so far."""
        return sample + self._added

    def push(self, samples: np.ndarray) -> np.ndarray:
        """fp32 [n] -> fp32 [m]. The silence in front comes with the first samples."""
        if len(samples) and self._before:
            there = len(samples) if self._edges.begin is None else self._edges.begin / self._speed
            silence = _silence(self._before - there)
            samples = np.concatenate([silence, samples])
            self._before, self._added = 0, len(silence)
        return samples

    def finish(self) -> np.ndarray:
        """The input is complete. Returns fp32 [m], the silence after it."""
        return _silence(self._after - self._edges.tail / self._speed)


def _silence(samples: float) -> np.ndarray:
    return np.zeros(max(0, round(samples)), np.float32)
