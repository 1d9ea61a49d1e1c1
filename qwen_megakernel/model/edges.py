"""Silence before and after speech: cut to a given length, or added, while the speech is made."""

import numpy as np

SILENCE = 0.003  # amplitude, -50 dBFS: samples that are not above it are silent

FADE_S = 0.005  # seconds over which a cut fades in or out: without it a cut clicks


def silent_end_s(samples: np.ndarray, sample_rate: int) -> float:
    """Seconds of silence at the end of fp32 [n]."""
    loud = np.flatnonzero(np.abs(samples) > SILENCE)
    return (len(samples) - 1 - int(loud[-1]) if len(loud) else len(samples)) / sample_rate


class Edges:
    """One utterance's trimming: leaves `silence_s` seconds at most, but never less than the fade takes. However the
    input is cut, the joined output is the same. A silence within the speech comes out once the speech goes on."""

    def __init__(self, trim: str, silence_s: float, sample_rate: int):
        fade = round(FADE_S * sample_rate)
        self._ramp = ((np.arange(fade) + 0.5) / fade).astype(np.float32)
        self._keep = max(fade, round(silence_s * sample_rate))
        self._waits = trim in ("start", "both")
        self._trims_end = trim in ("end", "both")
        self._held = np.zeros(0, np.float32)  # the latest samples, all silent, which may be cut
        self._cut = False  # samples before them were cut

    def push(self, samples: np.ndarray) -> np.ndarray:
        """fp32 [n], the next of the input -> fp32 [m], the next of the output; m may be 0."""
        before = len(self._held)
        loud = before + np.flatnonzero(np.abs(samples) > SILENCE)
        samples = np.concatenate([self._held, samples])
        self._held = samples[:0]
        if self._waits:
            first = max(0, (int(loud[0]) if len(loud) else len(samples)) - self._keep)
            samples = samples[first:]
            loud = loud - first
            self._cut = self._cut or first > 0
            if not len(loud):
                self._held = samples
                return samples[:0]
            self._waits = False
            if self._cut:  # `_keep` silent samples stand in front of the first loud one
                samples[: len(self._ramp)] *= self._ramp
        if self._trims_end:
            last = int(loud[-1]) + 1 if len(loud) else 0
            self._held = samples[last:]
            samples = samples[:last]
        return samples

    def finish(self) -> np.ndarray:
        """The input is complete. Returns fp32 [m], the rest of the output."""
        rest = self._held[: self._keep] if self._trims_end else self._held
        if len(rest) < len(self._held):
            rest[-len(self._ramp) :] *= self._ramp[::-1]
        return rest


class Padding:
    """Adds silence before and after one utterance's speech, up to the given lengths; silence already there counts.
    After an `Edges` that cuts both ends, the joined output is the same however the input is cut."""

    def __init__(self, before_s: float, after_s: float, sample_rate: int):
        self._before = round(before_s * sample_rate)
        self._after = round(after_s * sample_rate)
        self._silent = 0  # latest samples that were silent

    def push(self, samples: np.ndarray) -> np.ndarray:
        """fp32 [n] -> fp32 [m]. The silence in front comes with the first sample."""
        loud = np.flatnonzero(np.abs(samples) > SILENCE)
        self._silent = len(samples) - 1 - int(loud[-1]) if len(loud) else self._silent + len(samples)
        if len(samples) and self._before:
            silent = int(loud[0]) if len(loud) else len(samples)
            lacking = max(0, self._before - silent)
            self._before = 0
            samples = np.concatenate([np.zeros(lacking, np.float32), samples])
        return samples

    def finish(self) -> np.ndarray:
        """The input is complete. Returns fp32 [m], the silence after it."""
        return np.zeros(max(0, self._after - self._silent), np.float32)
