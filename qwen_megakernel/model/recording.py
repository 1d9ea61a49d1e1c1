"""Reads a recording to clone: makes it mono, cuts its silent ends, and notes what is wrong with its sound.

`audio_file` reads files; arrays are bounded here in the same way.
"""

import math
import numbers
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qwen_megakernel.errors import AudioError
from qwen_megakernel.model.audio_file import MAX_CHANNELS, RATES, check_length, read_file
from qwen_megakernel.model.resample import resample

_LOUDEST = 2.0  # peak; a decoder's overshoot and a hot mix stay below it
_INT16 = 64, 32_768  # peaks in the range of int16; below it they would be a whisper, or of another range
_SILENCE = 1e-4  # peak; -80 dBFS
_SILENT_END_DB = -50  # below the peak; the breath before a word is some 30 dB below it
_KEPT_S = 0.1  # of a silent end, so that no soft consonant is cut
_FLAT = 1e-4  # part of the peak: neighbours this near to it are on a flat top
_CLIPPED = 0.001  # part of the samples; speech that is not clipped has a handful at its peak
_LEVEL_S = 0.02
_QUIET_DB = 20  # from the loud tenth to the quiet tenth; in clean speech pauses are 40 dB or more below

RefAudio = str | Path | tuple[np.ndarray, int]


@dataclass(frozen=True, eq=False)
class Recording:
    """Reference audio that a voice can be made of."""

    samples: np.ndarray  # mono, fp32 [n], at the rate that was asked for
    notes: tuple[str, ...]  # what its owner should know, in plain sentences


def load_recording(ref_audio: RefAudio, sample_rate: int, *, trim: bool) -> Recording:
    """Reference audio as mono fp32 [n] at `sample_rate`: channels averaged, resampled with soxr HQ.

    `ref_audio`: path of a file that `audio_file` reads, or (samples [n] or [n, channels], rate in Hz). Integer samples
    are scaled by their type's range, floating ones in the range of int16 by that. `trim` cuts silence from both ends:
    all that is 50 dB below the peak, except the 0.1 s next to the sound. Raises AudioError: missing, not audio, empty,
    NaN, silent, out of range, or not of 0.5 to 60 seconds, before or after the cut."""
    raw, rate, notes = _read(ref_audio)
    if (clipped := _clipped(raw)) >= _CLIPPED:
        notes.append(f"{100 * clipped:.2g} % of its samples are clipped: record it again, more quietly")
    samples = whole = _resampled(raw, rate, sample_rate)
    if trim:
        samples = _without_silent_ends(whole, sample_rate)
        check_length(len(samples) / sample_rate, "ref_audio without the silence at its ends")
    if (cut := (len(whole) - len(samples)) / sample_rate) >= 0.05:
        notes.append(f"{cut:.1f} s of silence were cut from its ends")
    if (between := _loud_to_quiet_db(samples, sample_rate)) < _QUIET_DB:
        notes.append(
            f"its quiet parts are only {between:.0f} dB below its loud ones: record it where there is less noise, "
            "echo or music"
        )
    return Recording(samples, tuple(notes))


def _read(ref_audio: RefAudio) -> tuple[np.ndarray, int, list[str]]:
    """Mono fp32 [n], its rate, and what its owner should know."""
    name = str(ref_audio) if isinstance(ref_audio, (str, Path)) else "ref_audio"
    if isinstance(ref_audio, (str, Path)):
        samples, rate = read_file(ref_audio)
    elif isinstance(ref_audio, tuple) and len(ref_audio) == 2:
        try:
            samples, rate = np.asarray(ref_audio[0]), ref_audio[1]
        except (ValueError, TypeError, RuntimeError) as error:
            raise AudioError(f"samples cannot be read as an array: {error}") from None
    else:
        raise AudioError(f"ref_audio must be a path or (samples, rate), got {type(ref_audio).__name__}")
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real) or rate not in RATES:
        raise AudioError(f"sample rate must be an integer in {RATES.start}..{RATES.stop - 1} Hz, got {rate!r}")
    if samples.ndim not in (1, 2) or samples.ndim == 2 and not 1 <= samples.shape[1] <= MAX_CHANNELS:
        raise AudioError(f"samples must be [n] or [n, channels], got {list(samples.shape)}")
    rate = int(rate)
    check_length(len(samples) / rate, "ref_audio")
    if np.issubdtype(samples.dtype, np.signedinteger):
        samples = samples / -float(np.iinfo(samples.dtype).min)
    elif not np.issubdtype(samples.dtype, np.floating):
        raise AudioError(f"samples must be floating or signed integers, got {samples.dtype}")
    if samples.ndim == 2:
        samples = samples.mean(axis=1)
    if not np.isfinite(samples).all():
        raise AudioError(f"{name} holds NaN or infinite samples")
    samples, notes = _in_range(samples)
    if np.abs(samples).max() < _SILENCE:
        raise AudioError(f"{name} is silent: record it again")
    return samples.astype(np.float32, copy=False), rate, notes


def _resampled(samples: np.ndarray, rate: int, sample_rate: int) -> np.ndarray:
    if rate != sample_rate:
        # The reference implementation calls librosa.resample, which is soxr HQ cut or padded to ceil(n * ratio).
        length = math.ceil(len(samples) * sample_rate / rate)
        samples = resample(samples, rate, sample_rate)[:length]
        samples = np.pad(samples, (0, length - len(samples)))
    return np.ascontiguousarray(samples, dtype=np.float32)


def _in_range(samples: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Mono samples in -1..1, and a note if their range was int16's. Raises AudioError: it is unknown."""
    peak = float(np.abs(samples).max())
    if peak <= _LOUDEST:
        return samples, []
    if _INT16[0] <= peak <= _INT16[1]:
        return samples / 32768, ["its samples were in the range of int16, so they were divided by 32,768"]
    raise AudioError(
        f"ref_audio is out of range: expected floating samples from -1 to 1, got a peak of {peak:.4g}: divide them by "
        "their full scale"
    )


def _without_silent_ends(samples: np.ndarray, sample_rate: int) -> np.ndarray:
    loud = np.flatnonzero(np.abs(samples) > np.abs(samples).max() * 10 ** (_SILENT_END_DB / 20))
    kept = int(_KEPT_S * sample_rate)
    return samples[max(0, loud[0] - kept) : loud[-1] + 1 + kept]


def _clipped(samples: np.ndarray) -> float:
    """Part of the samples that are on a flat top: the sample and the one before it are at the recording's peak. A
    clipped recording's peak is where it was clipped, also if it was made quieter afterwards."""
    top = np.abs(samples) >= (1 - _FLAT) * np.abs(samples).max()
    return float((top[1:] & top[:-1] & (np.signbit(samples[1:]) == np.signbit(samples[:-1]))).mean())


def _loud_to_quiet_db(samples: np.ndarray, sample_rate: int) -> float:
    """dB between the level that the loudest tenth of the recording exceeds and the level that the quietest tenth stays
    below. Speech has pauses between words, and in them only other sound, such as noise, is left."""
    size = int(_LEVEL_S * sample_rate)
    squares = samples[: len(samples) // size * size].reshape(-1, size).astype(np.float64) ** 2
    quiet, loud = np.percentile(squares.mean(axis=1), (10, 90))
    return 10 * math.log10((loud + 1e-12) / (quiet + 1e-12))
