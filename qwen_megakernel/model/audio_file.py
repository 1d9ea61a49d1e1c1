"""Reads an audio file as mono samples: with libsndfile, else with FFmpeg (PyAV, extra [serve]).

Files are data from outside. Kind, size, channels, sample rate and length are bounded before or while a file is decoded.
A file cannot make FFmpeg open another one.
"""

import io
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import soundfile

from qwen_megakernel.errors import AudioError
from spoken_text.files import UnfitFile, open_descriptor

if TYPE_CHECKING:
    from av import AudioFrame

MIN_SECONDS, MAX_SECONDS = 0.5, 60.0
"""Length of reference audio. A shorter one holds hardly a word for the speaker vector; 60 s are 750 of 2,048 rows."""

MAX_CHANNELS = 16
RATES = range(4_000, 384_001)

_MAX_BYTES = 1 << 30  # a minute of a phone's video has some 400 MB
_BLOCK = 1 << 16  # samples a channel, decoded at once
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # two letters at least: C:/ is a drive
_CHUNKS = 100  # of a WAV, before its samples
_OTHERS = "M4A, AAC, WebM"
_CONTAINERS = "mov,matroska,ogg,aac,mp3,flac,wav,amr,asf"  # none is a list of other files, as hls and concat are
_CODECS = (
    "aac,alac,mp3float,opus,vorbis,flac,amrnb,amrwb,ac3,eac3,wmav1,wmav2,wmapro,adpcm_ms,adpcm_ima_wav,adpcm_ima_qt,"
    "pcm_u8,pcm_s8,pcm_s16le,pcm_s16be,pcm_s24le,pcm_s24be,pcm_s32le,pcm_s32be,pcm_f32le,pcm_f32be,pcm_alaw,pcm_mulaw"
)
_BOUNDS = {"format_whitelist": _CONTAINERS, "codec_whitelist": _CODECS, "protocol_whitelist": ""}


def check_file(name: str | Path) -> None:
    """Check that a recording may be read, without looking at its content. Raises AudioError: no such file, an address,
    not a regular file, empty, or too large."""
    os.close(_opened(name))


def _opened(name: str | Path) -> int:
    """The descriptor of a recording's file. Raises AudioError: see `check_file`."""
    try:
        file = open_descriptor(name, "a recording", _MAX_BYTES)
    except UnfitFile as error:
        raise AudioError(f"{name}: {error.strerror}; name a sound file") from None
    except OSError as error:
        if _ADDRESS.match(str(name)):
            raise AudioError(f"{str(name)!r} is an address: download the recording, and give its file") from None
        raise AudioError(f"no recording {str(name)!r}: {error.strerror}; name a sound file") from None
    if not os.fstat(file).st_size:
        os.close(file)
        raise AudioError(f"{name}: the file is empty: record it again")
    return file


def read_file(name: str | Path) -> tuple[np.ndarray, int]:
    """Samples fp32 [n], the channels averaged, and their rate. Raises AudioError: see `check_file`; or the file is not
    audio, damaged, or too long."""
    try:
        with _Recording(_opened(name)) as file:
            try:
                return _by_libsndfile(file, name)
            except (soundfile.SoundFileError, TypeError):  # TypeError: headerless files (.raw)
                pass
            if not find_spec("av"):
                raise AudioError(
                    f"{name}: cannot be read as audio: expected WAV, FLAC, OGG or MP3. {_OTHERS} and others need the "
                    f"package av: pip install -e '.[serve]', or convert the file to WAV"
                )
            file.seek(0)
            return _by_ffmpeg(file, name)
    except OSError as error:
        raise AudioError(f"{name}: cannot be read: {error.strerror or error}") from None


def check_length(seconds: float, what: object) -> None:
    """Raises AudioError: too short or too long."""
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise AudioError(f"{what} must last {MIN_SECONDS} to {MAX_SECONDS:.0f} seconds, got {seconds:.2f}")


def _check_sound(rate: int, channels: int, name: str | Path) -> None:
    if channels > MAX_CHANNELS:
        raise AudioError(f"{name}: at most {MAX_CHANNELS} channels, found {channels}")
    if rate not in RATES:
        raise AudioError(f"{name}: the sample rate must be {RATES.start} to {RATES.stop - 1} Hz, got {rate}")


class _Recording(io.FileIO):
    """A file. Where it is a WAV that states 0 bytes of samples, the largest number is read instead: libsndfile and
    FFmpeg then read to the end. What writes a WAV into a pipe or breaks off leaves such headers."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor)
        self._unstated: range | None = None  # where the number is
        self._unstated = self._find_unstated()
        self.seek(0)

    def readinto(self, buffer: Any, /) -> int:
        begin, count = self.tell(), super().readinto(buffer) or 0
        for at in self._unstated or ():
            if begin <= at < begin + count:
                memoryview(buffer).cast("B")[at - begin] = 0xFF
        return count

    def read(self, size: int | None = -1, /) -> bytes:
        buffer = bytearray(os.fstat(self.fileno()).st_size if size is None or size < 0 else size)
        return bytes(buffer[: self.readinto(buffer)])

    def _find_unstated(self) -> range | None:
        head = self.read(12)
        if head[:4] != b"RIFF" or head[8:] != b"WAVE":
            return None
        for _ in range(_CHUNKS):
            head = self.read(8)
            size = int.from_bytes(head[4:], "little")
            if head[:4] == b"data":
                return range(self.tell() - 4, self.tell()) if not size else None
            if len(head) < 8:
                return None
            self.seek(size + size % 2, os.SEEK_CUR)
        return None


def _by_libsndfile(file: io.FileIO, name: str | Path) -> tuple[np.ndarray, int]:
    with soundfile.SoundFile(file) as sound:
        _check_sound(sound.samplerate, sound.channels, name)
        if sound.frames > _MAX_BYTES * 1000:  # a FLAC or the like that states no length
            raise soundfile.SoundFileRuntimeError("unknown length")
        check_length(sound.frames / sound.samplerate, name)
        # A header may understate the data, so decoding stops at the bound. It goes block by block, because a file
        # of 200 KB may hold a minute of 16 channels, which are 1.5 GB of samples.
        blocks = sound.blocks(_BLOCK, frames=int(MAX_SECONDS * sound.samplerate), dtype="float32", always_2d=True)
        return np.concatenate([block.mean(axis=1) for block in blocks]), sound.samplerate


def _by_ffmpeg(file: io.FileIO, name: str | Path) -> tuple[np.ndarray, int]:
    import av  # imported here, because it loads FFmpeg, which most recordings do not need

    mono: list[np.ndarray] = []
    rate = samples = 0
    try:
        with av.open(file, "r", options=dict(_BOUNDS), metadata_errors="replace") as container:
            if not container.streams.audio:
                found = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
                raise AudioError(f"{name}: expected sound, found {found}: give a recording with sound")
            stream = container.streams.audio[0]
            codec = stream.codec_context.name if stream.codec_context else "an unknown coding"
            if codec not in _CODECS.split(","):
                raise AudioError(f"{name}: sound in {codec} is not taken: convert the file to WAV")
            for frame in container.decode(stream):
                _check_sound(frame.sample_rate, frame.layout.nb_channels, name)
                if (rate := rate or frame.sample_rate) != frame.sample_rate:
                    raise AudioError(f"{name}: its sample rate changes on the way: convert the file to WAV")
                mono.append(_mean(frame))
                samples += frame.samples
                if samples > MAX_SECONDS * rate:  # many such files do not state their length
                    raise AudioError(f"{name} must last {MIN_SECONDS} to {MAX_SECONDS:.0f} seconds, got more")
            if not samples:
                raise ValueError("nothing was decoded")
    except AudioError:
        raise
    except (av.FFmpegError, ValueError):
        if samples:
            why = f"damaged or cut off after {samples / rate:.2f} seconds: record or convert it again"
            raise AudioError(f"{name}: the recording is {why}") from None
        takes = f"expected a whole file in WAV, FLAC, OGG, MP3, {_OTHERS} or the like"
        raise AudioError(f"{name}: cannot be read as audio: {takes}") from None
    check_length(samples / rate, name)
    return np.concatenate(mono), rate


def _mean(frame: "AudioFrame") -> np.ndarray:
    """The mean of a frame's channels, fp32 [n]. Integers are scaled by their type's range."""
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, frame.layout.nb_channels).T
    if samples.dtype.kind in "iu":
        samples = samples / 2.0 ** (8 * samples.dtype.itemsize - 1) - (samples.dtype.kind == "u")
    mean: np.ndarray = samples.mean(axis=0).astype(np.float32)
    return mean
