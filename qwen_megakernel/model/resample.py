"""Other sample rates, by soxr. It is under the LGPL, so everything at the model's own rate works without it."""

import numpy as np

from qwen_megakernel.errors import RequestError

try:
    import soxr
except ModuleNotFoundError:
    soxr = None

_QUALITY = "HQ"


def resample(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """A whole sound, fp32 [n]. Raises RequestError: soxr is not installed."""
    _check(rate, wanted)
    resampled: np.ndarray = soxr.resample(samples, rate, wanted, quality=_QUALITY)
    return resampled


def resampler(rate: int, wanted: int) -> "soxr.ResampleStream":
    """For one sound that comes in chunks of fp32 [n]. Raises RequestError: soxr is not installed."""
    _check(rate, wanted)
    return soxr.ResampleStream(rate, wanted, 1, dtype="float32", quality=_QUALITY)


def _check(rate: int, wanted: int) -> None:
    if soxr is None:
        raise RequestError(
            f"sound of {rate} Hz becomes sound of {wanted} Hz by the package soxr, which is not installed: "
            f"pip install soxr, or take {wanted} Hz for both"
        )
