"""Encoders: samples -> the bytes of an audio format, chunk by chunk while speech is made."""

import io
from typing import Any, Protocol

import numpy as np
import soundfile

from qwen_megakernel.model.pcm import pcm16, wav_header

try:
    import av
except ModuleNotFoundError:  # `missing` tells callers which formats need it
    av = None

MEDIA = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
"""Name of a format -> its media type."""

_FFMPEG: dict[str, dict[str, Any]] = {
    # No Xing frame: it states the length, which is not known yet, and plays as 24 ms of silence.
    "mp3": {
        "muxer": "mp3",
        "codec": "libmp3lame",
        "bits": 96_000,
        "options": {"write_xing": "0", "id3v2_version": "0"},
    },
    # One page for every packet of 20 ms (the option is in microseconds). The default is one second a page.
    "opus": {"muxer": "ogg", "codec": "libopus", "bits": 48_000, "options": {"page_duration": "20000"}},
    "aac": {"muxer": "adts", "codec": "aac", "bits": 96_000, "options": {}},
}


class Encoder(Protocol):
    """Makes one file of one utterance.

    Attributes:
        heavy: too much work for the thread of an event loop.
        streams: bytes come out while samples go in. Otherwise all bytes come from `finish`.
    """

    heavy: bool
    streams: bool

    def encode(self, samples: np.ndarray) -> bytes:
        """The bytes that are ready. `samples`: fp32 [n] in -1..1; values beyond are clipped."""

    def finish(self) -> bytes:
        """The rest of the file. Nothing can be encoded afterwards."""


def missing(name: str) -> str | None:
    """Why the format `name` is not available here, and what to do; None if it is available."""
    if name in _FFMPEG and av is None:
        return f"{name} needs the package av: on the server, pip install -e '.[serve]', or ask for wav, pcm or flac"
    return None


def encoder(name: str, rate: int) -> Encoder:
    """A new encoder.

    Args:
        name: the format, one of `MEDIA`, and not `missing`.
        rate: the sample rate in Hz.
    """
    if name in _FFMPEG:
        return _Compressed(rate, **_FFMPEG[name])
    return _Flac(rate) if name == "flac" else _Pcm(wav_header(rate) if name == "wav" else b"")


class _Pcm:
    """PCM16, with or without a header."""

    heavy, streams = False, True

    def __init__(self, header: bytes):
        self._header = header

    def encode(self, samples: np.ndarray) -> bytes:
        header, self._header = self._header, b""
        return header + pcm16(samples)

    def finish(self) -> bytes:
        return self._header  # nothing was encoded


class _Flac:
    """Comes out whole at the end: the header states the length, and many readers refuse a FLAC without it."""

    heavy, streams = True, False

    def __init__(self, rate: int):
        self._bytes = io.BytesIO()
        self._file = soundfile.SoundFile(self._bytes, "w", rate, 1, format="FLAC", subtype="PCM_16")

    def encode(self, samples: np.ndarray) -> bytes:
        self._file.write(np.frombuffer(pcm16(samples), "<i2"))
        return b""

    def finish(self) -> bytes:
        self._file.close()
        return self._bytes.getvalue()


class _Compressed:
    """A format that FFmpeg encodes, in a container that can be read while it is written."""

    heavy, streams = True, True

    def __init__(self, rate: int, *, muxer: str, codec: str, bits: int, options: dict[str, str]):
        """
        Args:
            bits: bits per second.
            options: the muxer's options.
        """
        self._sink = _Sink()
        # Without flush_packets FFmpeg collects 32 KB before it writes anything.
        self._container = av.open(self._sink, "w", format=muxer, options={"flush_packets": "1"} | options)
        self._stream = self._container.add_stream(codec, rate=rate, layout="mono")
        self._stream.bit_rate = bits
        self._rate, self._samples = rate, 0

    def encode(self, samples: np.ndarray) -> bytes:
        if not len(samples):
            return b""
        frame = av.AudioFrame.from_ndarray(np.frombuffer(pcm16(samples), "<i2")[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._samples
        self._samples += len(samples)
        return self._mux(frame)

    def finish(self) -> bytes:
        last = self._mux(None)
        self._container.close()
        return last + self._sink.take()

    def _mux(self, frame: Any) -> bytes:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)
        return self._sink.take()


class _Sink:
    """A file that cannot seek; PyAV writes to it."""

    def __init__(self):
        self._bytes = bytearray()

    def write(self, data: bytes) -> int:
        self._bytes += data
        return len(data)

    def take(self) -> bytes:
        """What was written since the last call."""
        taken, self._bytes = bytes(self._bytes), bytearray()
        return taken
