"""Samples -> the 16-bit PCM that players, files and sockets take."""

import struct

import numpy as np

BYTES = 2  # bytes of one sample

UNKNOWN = 0xFFFFFFFF
"""The length in the header of a WAV that is still being made, or that has 4 GiB or more. Players take it for "until the
end"."""


def pcm16(samples: np.ndarray) -> bytes:
    """fp32 [n] in -1..1 -> little-endian PCM16, rounded to the nearest value. Samples beyond -1..1 are clipped."""
    rounded: np.ndarray = np.rint(np.clip(samples, -1.0, 1.0) * 32767.0)
    return rounded.astype("<i2").tobytes()


def wav_header(sample_rate: int, samples: int | None = None) -> bytes:
    """The 44 bytes in front of mono PCM16 (RIFF WAVE). `samples` is how many follow; None: nobody knows yet."""
    size = UNKNOWN if samples is None else min(UNKNOWN, BYTES * samples)
    data = struct.pack("<4sI", b"data", size)
    kind = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, sample_rate * BYTES, BYTES, 8 * BYTES)
    return struct.pack("<4sI4s", b"RIFF", min(UNKNOWN, size + 36), b"WAVE") + kind + data
