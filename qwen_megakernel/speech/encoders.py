"""Encoders: samples -> an audio format, as a file, or as bytes while speech is made.

FFmpeg (PyAV, extra [serve]) makes MPEG-4 and the streams of mp3, opus and aac. libsndfile makes the rest.
"""

import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from importlib.util import find_spec
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np
import soundfile

from qwen_megakernel.choices import FORMATS
from qwen_megakernel.model.pcm import pcm16, wav_header
from qwen_megakernel.model.resample import resampler
from spoken_text.languages import primary_subtag

MEDIA = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
"""Name of a stream's format -> its media type."""

RATES = (8000, 12000, 16000, 24000, 48000)
"""Sample rates in Hz of a stream. All of its formats have them."""

_TAGS = {"title": "title", "artist": "artist", "album": "album", "track": "tracknumber"}
"""A tag -> libsndfile's name for it."""

_NOW = {"flush_packets": "1"}  # else FFmpeg collects 32 KB before it writes anything
_Codec = Literal["libmp3lame", "libopus", "aac"]
_FFMPEG: dict[str, tuple[str, _Codec, int, dict[str, str]]] = {
    # No Xing frame: it states the length, which is not known yet, and plays as 24 ms of silence.
    "mp3": ("mp3", "libmp3lame", 96_000, _NOW | {"write_xing": "0", "id3v2_version": "0"}),
    # One page for every packet of 20 ms (the option is in microseconds). The default is one second a page.
    "opus": ("ogg", "libopus", 48_000, _NOW | {"page_duration": "20000"}),
    "aac": ("adts", "aac", 96_000, _NOW),
    ".m4a": ("mp4", "aac", 96_000, {"brand": "M4A "}),
    ".m4b": ("mp4", "aac", 96_000, {"brand": "M4B "}),  # by which players tell a book from music
}
"""Stream's format or file's ending -> FFmpeg's muxer and codec, bits per second, the muxer's options."""


class Target(Protocol):
    """The binary file that an encoder writes to."""

    def write(self, data: bytes, /) -> int: ...

    def seek(self, offset: int, whence: int = 0, /) -> int: ...

    def tell(self) -> int: ...

    def seekable(self) -> bool: ...


class Encoder(Protocol):
    """Encodes one sound."""

    def write(self, samples: np.ndarray) -> None:
        """Append int16 [n], little-endian."""

    def close(self) -> None:
        """Complete the sound."""


def missing(name: str) -> str | None:
    """Why a stream's format, or a file's ending, is not available here, and what to do; None if it is available."""
    if name not in _FFMPEG or find_spec("av"):
        return None
    where, instead = "in the checkout", "choose another format"
    if name in MEDIA:
        where, instead = "on the server", "ask for wav, pcm or flac"
    return f"{name} needs the package av: {where}, pip install -e '.[serve]', or {instead}"


def encoder(
    name: str,
    target: Target,
    rate: int,
    chapters: Sequence[tuple[int, str]] = (),
    tags: Mapping[str, str] = MappingProxyType({}),
    cover: bytes | None = None,
) -> Encoder:
    """A new encoder.

    Args:
        name: a stream's format of `MEDIA` or a file's ending of `ENDINGS`, and not `missing`.
        rate: the sample rate in Hz.
        chapters: first sample and title of each, for `MPEG4`. `close` reads them; they come while sound is written.
        tags: "title", "artist", "album" and "track", for files other than WAV; "language", for `MPEG4`.
        cover: a JPEG or PNG file, for `MPEG4`.
    """
    if name in _FFMPEG:
        return _Ffmpeg(name, target, rate, chapters, tags, cover)
    if name in ("pcm", "wav", ".wav"):
        return _Pcm(target, None if name == "pcm" else rate)
    kind, coding = FORMATS[".flac" if name == "flac" else name]
    sound = soundfile.SoundFile(target, "w", rate, 1, coding, format=kind)
    for tag in _TAGS.keys() & tags.keys():
        setattr(sound, _TAGS[tag], tags[tag])
    made: Encoder = sound
    return made


class StreamEncoder:
    """Makes the bytes of one utterance.

    Attributes:
        heavy: too much work for the thread of an event loop.
        streams: bytes come out while samples go in. Otherwise all bytes come from `finish`.
    """

    def __init__(self, name: str, rate: int, wanted: int | None = None, *, whole: bool = False):
        """
        Args:
            name: the format, one of `MEDIA`, and not `missing`.
            rate: the sample rate of what is encoded, in Hz.
            wanted: the sample rate of the sound, one of `RATES`; None: the same.
            whole: nobody needs the bytes before the last one, so that a header can state the length.
        """
        self._resample = None
        if wanted not in (None, rate):
            self._resample = resampler(rate, wanted)
            rate = wanted
        self.heavy = name not in ("wav", "pcm")
        self.streams = not whole and name != "flac"  # many readers refuse a FLAC whose header has no length
        self._sink = _Sink(whole=not self.streams)
        self._encoder = encoder(name, self._sink, rate)

    def encode(self, samples: np.ndarray) -> bytes:
        """The bytes that are ready. `samples`: fp32 [n] in -1..1; values beyond are clipped."""
        if self._resample:
            samples = self._resample.resample_chunk(np.ascontiguousarray(samples, np.float32))
        self._encoder.write(np.frombuffer(pcm16(samples), "<i2"))
        return self._sink.take() if self.streams else b""

    def finish(self) -> bytes:
        """The rest of the sound. Nothing can be encoded afterwards."""
        if self._resample:
            rest = self._resample.resample_chunk(np.zeros(0, np.float32), last=True)
            self._encoder.write(np.frombuffer(pcm16(rest), "<i2"))
        self._encoder.close()
        return self._sink.take()


class _Sink(io.BytesIO):
    """Holds bytes until they are taken. It can seek only if they are taken as a whole."""

    def __init__(self, *, whole: bool):
        super().__init__()
        self._whole = whole

    def seekable(self) -> bool:
        return self._whole

    def take(self) -> bytes:
        """What was written since the last call."""
        taken = self.getvalue()
        self.seek(0)
        self.truncate()
        return taken


class _Pcm:
    """PCM16, with or without WAV's header. libsndfile would make the same WAV in 20 steps. Each step gives other
    threads a turn, of which a batch has many (docs/log/2026-11-24.md#batch-runs-thread)."""

    def __init__(self, target: Target, wav_rate: int | None):
        """
        Args:
            wav_rate: the sample rate for the header; None: no header.
        """
        self._target = target
        self._wav_rate = wav_rate
        self._samples = 0
        if wav_rate is not None:
            target.write(wav_header(wav_rate))

    def write(self, samples: np.ndarray) -> None:
        self._samples += len(samples)
        self._target.write(samples.tobytes())

    def close(self) -> None:
        if self._wav_rate is not None and self._target.seekable():
            self._target.seek(0)
            self._target.write(wav_header(self._wav_rate, self._samples))


class _Ffmpeg:
    """A format that FFmpeg encodes."""

    def __init__(
        self,
        name: str,
        target: Target,
        rate: int,
        chapters: Sequence[tuple[int, str]],
        tags: Mapping[str, str],
        cover: bytes | None,
    ):
        import av  # imported here, because it loads FFmpeg, which other formats do not need

        muxer, codec, bits, options = _FFMPEG[name]
        self._new_frame = av.AudioFrame.from_ndarray
        self._container = av.open(target, "w", format=muxer, options=options)
        # Nearly three times as fast as FFmpeg's default, and not worse (docs/log/2026-11-28.md#whole-books).
        coder = {"aac_coder": "fast"} if codec == "aac" else {}
        self._stream = self._container.add_stream(codec, rate=rate, layout="mono", options=coder)
        self._stream.bit_rate = bits
        if code := _language_code(tags.get("language", "")):
            self._stream.metadata["language"] = code
        self._container.metadata.update({tag: tags[tag] for tag in _TAGS.keys() & tags.keys()})
        self._rate = rate
        self._chapters = chapters
        self._samples = 0
        if cover:
            with av.open(io.BytesIO(cover), "r") as picture:
                packet = next(picture.demux(video=0))
                packet.stream = self._container.add_stream_from_template(picture.streams.video[0])
                packet.stream.disposition = av.stream.Disposition.attached_pic
                self._container.mux(packet)

    def write(self, samples: np.ndarray) -> None:
        if not len(samples):
            return
        frame = self._new_frame(samples[None], format="s16", layout="mono")
        frame.sample_rate = self._rate
        frame.pts = self._samples
        self._samples += len(samples)
        self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        if self._samples:
            self._container.mux(self._stream.encode(None))
        if self._chapters:
            # The first chapter begins with the file, so that it includes the silence before its first sound. FFmpeg
            # writes the marks at the end of the file; they are not known at its beginning.
            starts = [0, *(start for start, _ in self._chapters[1:]), self._samples]
            tick = Fraction(1, self._rate)
            self._container.set_chapters(
                [
                    {"id": n, "start": first, "end": last, "time_base": tick, "metadata": {"title": title}}
                    for n, ((_, title), (first, last)) in enumerate(zip(self._chapters, pairwise(starts), strict=True))
                ]
            )
        self._container.close()


def _language_code(tag: str) -> str:
    """The ISO 639-3 code of a BCP 47 tag such as "en-GB", as MPEG-4 has it; "" if it is unknown."""
    if not tag:
        return ""
    import iso639  # imported here, as in `languages.py`: its table takes time to load

    try:
        return iso639.Language.match(primary_subtag(tag)).part3
    except iso639.LanguageNotFoundError:
        return ""
