"""Samples as the 16-bit PCM that players, files and sockets take."""

import struct

import numpy as np

BYTES = 2
"""Of a sample."""

UNKNOWN = 0xFFFFFFFF
"""A length that players take for "until the end", in the header of a WAV that is still being made."""


def pcm16(samples: np.ndarray) -> bytes:
    """fp32 [n], -1..1 (what is beyond is clipped) -> little-endian, rounded to the nearest."""
    return np.rint(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()


def wav_header(sample_rate: int) -> bytes:
    """Of mono 16-bit PCM whose length is not known yet (RIFF WAVE, 44 bytes)."""
    data = struct.pack("<4sI", b"data", UNKNOWN)
    kind = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, sample_rate * BYTES, BYTES, 8 * BYTES)
    return struct.pack("<4sI4s", b"RIFF", UNKNOWN, b"WAVE") + kind + data
