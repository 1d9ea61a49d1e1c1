"""Where the command line's speech goes: a sound file, raw PCM on standard output, a player."""

import argparse
import errno
import io
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import soundfile

from qwen_megakernel.commands import mpeg4
from qwen_megakernel.errors import RequestError
from qwen_megakernel.model.pcm import wav_header

OUT = "out.wav"
"""The default output file."""

FORMATS = {
    ".wav": ("WAV", "PCM_16"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
    ".opus": ("OGG", "OPUS"),
}
"""Ending of a file's name -> libsndfile's names of format and coding. No ending means WAV."""

ENDINGS = (*FORMATS, *mpeg4.ENDINGS)
"""The endings of all formats that can be written."""

PLAYERS = {
    "aplay": (["-q"], {".wav"}),
    "paplay": ([], {".wav", ".flac", ".ogg"}),
    "ffplay": (["-nodisp", "-autoexit", "-loglevel", "error"], set(ENDINGS)),
    "afplay": ([], {".wav", ".mp3", ".flac"}),
}
"""Program -> its options before a file, and the formats that every version of it plays."""


# ---------------------------------------------------------------- checks, before anything is loaded


def checked_output(args: argparse.Namespace) -> str | None:
    """Check --output and --play before anything is loaded or spoken.

    Returns:
        A path, "-" for standard output, or None: play the speech and write no file.

    Raises:
        RequestError: nothing can be written there, or no player here plays the format.
    """
    output = OUT if args.output is None and not args.play else args.output
    if output == "-":
        if args.play:
            raise RequestError("--play plays a file, and --output - makes none: give one of the two")
        if sys.stdout.isatty():
            raise RequestError(
                "--output - writes raw PCM16, and standard output is a terminal: "
                "pipe it (| aplay -f S16_LE -r 24000) or redirect it (> speech.pcm)"
            )
        return output
    if output is not None:
        check_format("--output", output)
        check_writable("--output", output)
    if args.play:
        player_for(_ending(output or OUT))
    return output


def _ending(output: str) -> str:
    return Path(output).suffix.lower() or ".wav"


def check_format(option: str, output: str) -> None:
    """Check that the ending of the path `output` names a format that can be written here.

    Raises:
        RequestError: it names no such format; the message names `option`.
    """
    able = [ending for ending, (kind, coding) in FORMATS.items() if soundfile.check_format(kind, coding)]
    ending = _ending(output)
    if ending in mpeg4.ENDINGS:
        if why := mpeg4.missing():
            raise RequestError(f"{option}: {ending} {why}")
        return
    if ending not in FORMATS:
        able += mpeg4.ENDINGS
        raise RequestError(f"{option}: {output!r} does not end in a known format: end it in {', '.join(able)}")
    if ending not in able:
        version = soundfile.__libsndfile_version__
        raise RequestError(f"{option}: libsndfile {version} cannot write {ending}; here it writes {', '.join(able)}")


def check_writable(option: str, output: str) -> None:
    """Check that a file can be made, or replaced, at the path `output`.

    Raises:
        RequestError: it cannot; the message names `option`.
    """
    path = Path(output)
    try:
        if not path.parent.is_dir():
            raise RequestError(f"{option}: no folder {str(path.parent)!r}")
        needed = [path] if path.exists() else []
        if path.is_file() or not needed:
            needed.append(path.parent)  # the file is made beside its final place
        if path.is_dir() or not all(os.access(place, os.W_OK) for place in needed):
            raise RequestError(f"{option}: {output!r} is a folder or cannot be written")
    except OSError as error:  # such as a name that is too long
        raise RequestError(f"{option}: {output!r} cannot be written: {error.strerror}") from None


def _cannot_write(path: Path, folder: Path, error: OSError) -> RequestError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RequestError(f"--output {path}: no space left on {folder}; make room there, or name another place")
    return RequestError(f"--output {path}: {error.strerror or error}; name another place")


# ---------------------------------------------------------------- a sound file


def _status(path: Path) -> os.stat_result | None:
    """A file's own, also of a link; None if there is none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return path.lstat()
    return None


class _Target:
    """The file that libsndfile writes to. It keeps the first error, because libsndfile gives no reason for failures."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        return self._attempt(self._file.write, data)

    def seek(self, *where: int) -> int:
        return self._attempt(self._file.seek, *where)

    def tell(self) -> int:
        return self._file.tell()

    def _attempt(self, call: Callable[..., int], *args: Any) -> int:
        try:
            return call(*args)
        except OSError as error:
            self.error = self.error or error
            return 0


class _Wave:
    """A WAV file. libsndfile would make the same bytes in 20 steps. Each step gives other threads a turn, of which a
    batch has many (docs/log.md, 2026-11-24)."""

    def __init__(self, target: _Target, rate: int):
        self._target, self._rate, self._samples, self._closed = target, rate, 0, False
        target.write(wav_header(rate))

    def write(self, samples: np.ndarray) -> None:
        """Append int16 [n], little-endian."""
        self._samples += len(samples)
        self._target.write(samples.tobytes())

    def close(self) -> None:
        """Complete the header. Another call does nothing."""
        if not self._closed:
            self._closed = True
            self._target.seek(0)
            self._target.write(wav_header(self._rate, self._samples))


class SpeechFile:
    """A mono sound file that appears at its place only once it is whole.

    It is made beside its place under a hidden name and renamed at the end. Until then an older file stays. If the
    `with` block fails, nothing is left. A device or a pipe gets the whole file at the end.

    Raises:
        RequestError: the file cannot be written; the message says why.
    """

    def __init__(self, path: str, rate: int, *, keep_partial: bool = False, in_memory: bool = False):
        """
        Args:
            path: its ending names the format, one of `ENDINGS`.
            rate: sample rate in Hz.
            keep_partial: if the block fails, keep the sound so far as a complete file, unless writing failed.
            in_memory: encode in memory, and give the disk the whole file at the end, in few calls. After each call the
                thread waits for the interpreter, which keeps the engine's thread waiting too.
        """
        self.path = Path(path).absolute()
        self._before = _status(self.path)
        if self._before and stat.S_ISLNK(self._before.st_mode):
            self.path = self.path.resolve()  # the target, so that the link stays
            self._before = _status(self.path)
        self._rate, self._keep_partial = rate, keep_partial
        self._ending = _ending(path)
        self._chapters: list[tuple[int, str]] = []
        self._part: Path | None = None
        if self._before is None or stat.S_ISREG(self._before.st_mode):
            self._part = self.path.with_name(f".speech-{secrets.token_hex(4)}.part")
        self._file: BinaryIO | None = None
        self._sound: soundfile.SoundFile | mpeg4.Mpeg4Sound | _Wave | None = None
        self._samples = 0
        # libsndfile calls `_Target` back and would swallow a KeyboardInterrupt there. Only the main thread gets one, so
        # it leaves the calls to another thread.
        self._thread = ThreadPoolExecutor(1) if threading.current_thread() is threading.main_thread() else None
        self.kept = False
        """Did the block fail, and is the partial file kept?"""
        self._in_memory = in_memory and self._part is not None

    def __enter__(self) -> "SpeechFile":
        try:
            self._open()
        except BaseException:
            self._discard()
            raise
        return self

    def write(self, pcm: bytes) -> None:
        """Append PCM16, little-endian."""
        samples = np.frombuffer(pcm, "<i2")
        for start in range(0, len(samples), self._rate):  # libsndfile's Vorbis overflows its stack on minutes at once
            self._call(self._sound.write, samples[start : start + self._rate])
        self._samples += len(samples)

    def mark_chapter(self, start: float, title: str) -> None:
        """Mark a chapter at a second of this file, in the formats that have marks (.m4a, .m4b)."""
        self._chapters.append((round(start * self._rate), title))

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        try:
            keep = kind is not None and self._keep_partial and self._samples > 0 and self._target.error is None
            if kind is None or keep:
                self._finish()
            self.kept = keep
        finally:
            self._discard()

    def _open(self) -> None:
        try:
            if self._in_memory:
                self._file = io.BytesIO()
            else:
                self._file = self._open_part() if self._part else tempfile.TemporaryFile()
        except OSError as error:
            raise _cannot_write(self.path, self._folder, error) from None
        self._target = _Target(self._file)
        if self._ending in mpeg4.ENDINGS:
            self._sound = self._call(mpeg4.Mpeg4Sound, self._target, self._rate, self._chapters)
            return
        if self._ending == ".wav":
            self._sound = self._call(_Wave, self._target, self._rate)
            return
        kind, coding = FORMATS[self._ending]
        options = {"samplerate": self._rate, "channels": 1, "subtype": coding, "format": kind}
        self._sound = self._call(soundfile.SoundFile, self._target, "w", **options)

    def _open_part(self) -> BinaryIO:
        file = open(self._part, "xb")  # noqa: SIM115 - `_discard` closes it
        if self._before:
            os.fchmod(file.fileno(), stat.S_IMODE(self._before.st_mode))
        return file

    @property
    def _folder(self) -> Path:
        return self._part.parent if self._part else Path(tempfile.gettempdir())

    def _call(self, call: Callable, *args: Any, **options: Any) -> Any:
        try:
            done = self._run(call, *args, **options)
            if self._target.error:
                raise self._target.error
            return done
        except Exception as raised:  # soundfile asserts that everything was written
            error = self._target.error or raised
            if isinstance(error, OSError):
                raise _cannot_write(self.path, self._folder, error) from None
            if isinstance(error, soundfile.SoundFileError):
                raise RequestError(f"--output {self.path}: {error}") from None
            raise

    def _run(self, call: Callable, *args: Any, **options: Any) -> Any:
        return self._thread.submit(call, *args, **options).result() if self._thread else call(*args, **options)

    def _finish(self) -> None:
        self._call(self._sound.close)
        folder = self._folder
        try:
            if self._part:
                self._store()
            else:
                self._file.flush()
                folder = self.path
                self._file.seek(0)
                with open(self.path, "wb") as device:
                    shutil.copyfileobj(self._file, device)
        except OSError as error:
            raise _cannot_write(self.path, folder, error) from None

    def _store(self) -> None:
        """Put the encoded sound at its place."""
        if self._in_memory:
            encoded, self._file = self._file.getbuffer(), self._open_part()
            self._file.write(encoded)
        self._file.flush()
        os.fsync(self._file.fileno())  # some file systems report only now that they are full
        self._part.replace(self.path)
        self._part = None
        self._file.close()

    def _discard(self) -> None:
        """Close what is open, and delete the part if it still exists."""
        if self._sound:
            with suppress(Exception):  # it tries to write the rest once more
                self._run(self._sound.close)
        if self._thread:
            self._thread.shutdown()
        if self._file:
            with suppress(OSError):  # and so does this
                self._file.close()
        if self._part:
            self._part.unlink(missing_ok=True)


# ---------------------------------------------------------------- standard output, players


def write_stdout(pcm: bytes) -> None:
    """Write to standard output at once.

    Raises:
        BrokenPipeError: the process that read it is gone.
        RequestError: it cannot be written.
    """
    try:
        sys.stdout.buffer.write(pcm)
        sys.stdout.buffer.flush()
    except OSError as error:
        # Python flushes standard output again at exit, which would report the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise RequestError(
            f"--output -: standard output cannot be written: {error.strerror}; redirect it to another place"
        ) from None


def players_of(ending: str) -> list[str]:
    """The players among `PLAYERS` that play a format."""
    return [name for name, (_, endings) in PLAYERS.items() if ending in endings]


def player_for(ending: str) -> str:
    """The first of `PLAYERS` that is installed and plays a format.

    Raises:
        RequestError: none is installed.
    """
    able = players_of(ending)
    for name in able:
        if shutil.which(name):
            return name
    raise RequestError(f"--play: no program here plays {ending}; install one of {', '.join(able)}")


def play(path: Path) -> None:
    """Play a sound file to its end.

    Raises:
        RequestError: there is no player for it, or the player failed.
    """
    player = player_for(_ending(path.name))
    try:
        status = subprocess.run([player, *PLAYERS[player][0], str(path)], stdin=subprocess.DEVNULL).returncode
    except OSError as error:
        raise RequestError(f"--play: {player} cannot be started: {error}") from None
    if status:
        raise RequestError(f"--play: {player} could not play it (status {status}); its own message is above")
