"""Where the command line's speech goes: a sound file, raw PCM on standard output, a player."""

import argparse
import errno
import fcntl
import io
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import soundfile

from qwen_megakernel.choices import ENDINGS, FORMATS, MPEG4, OUT, PLAYERS
from qwen_megakernel.commands.encoder_process import EncoderProcess
from qwen_megakernel.errors import RequestError
from qwen_megakernel.speech.encoders import Encoder, encoder, missing

_T = TypeVar("_T")
_NEW_S = 5.0  # a file is new for so long


def checked_output(args: argparse.Namespace) -> str | None:
    """Check --output and --play before anything is loaded or spoken. Returns a path, "-" for standard output, or None:
    play the speech and write no file. Raises RequestError: nothing can be written there, or no player here plays the
    format."""
    output = OUT if args.output is None and not args.play else args.output
    if output == "-":
        if args.play:
            raise RequestError("--play plays a file, and --output - makes none: give one of the two")
        if sys.stdout.isatty():
            why = "--output - writes raw PCM16, and standard output is a terminal"
            raise RequestError(f"{why}: pipe it (| aplay -f S16_LE -r 24000) or redirect it (> speech.pcm)")
        return output
    if output is not None:
        check_format("--output", output)
        check_writable("--output", output)
        drop_halves(Path(output).parent)
    if args.play:
        player_for(_ending(output or OUT))
    return output


def _ending(output: str) -> str:
    return Path(output).suffix.lower() or ".wav"


def check_format(option: str, output: str) -> None:
    """Check that the ending of the path `output` names a format that can be written here. Raises RequestError: it names
    no such format; the message names `option`."""
    ending = _ending(output)
    if why := missing(ending):
        raise RequestError(f"{option}: {why}")
    able = [name for name in ENDINGS if name in MPEG4 or soundfile.check_format(*FORMATS[name])]
    if ending not in ENDINGS:
        raise RequestError(f"{option}: {output!r} does not end in a known format: end it in {', '.join(able)}")
    if ending not in able:
        version, able = soundfile.__libsndfile_version__, [name for name in able if name not in MPEG4]
        raise RequestError(f"{option}: libsndfile {version} cannot write {ending}; here it writes {', '.join(able)}")


def check_writable(option: str, output: str) -> None:
    """Check that a file can be made, or replaced, at the path `output`. Raises RequestError: it cannot; the message
    names `option`."""
    path = Path(output)
    try:
        if not path.parent.is_dir():
            raise RequestError(f"{option}: no folder {str(path.parent)!r}; make it first, or name another")
        if path.is_dir():
            raise RequestError(f"{option}: {output!r} is a folder; name a file, such as {str(path / OUT)!r}")
        needed = [path] if path.exists() else []
        if path.is_file() or not needed:
            needed.append(path.parent)  # the file is made beside its final place
        if locked := next((place for place in needed if not os.access(place, os.W_OK)), None):
            raise RequestError(
                f"{option}: {output!r} cannot be written: no permission for {str(locked)!r}; name another"
            )
    except OSError as error:  # such as a name that is too long
        raise RequestError(f"{option}: {output!r} cannot be written: {error.strerror}; name another file") from None


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that appears at its place only once it is whole, instead of an older one, whose mode it gets.

    It is made beside its place under a hidden name and renamed at the end. If the block fails, nothing is left.
    """
    part = path.with_name(f".speech-{secrets.token_hex(4)}.part")
    file = open(part, "xb")  # noqa: SIM115 - closed below
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)  # tells that its process lives
        if path.exists():
            os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
        yield file
        file.flush()
        os.fsync(file.fileno())  # some file systems report only now that they are full
        part.replace(path)
    finally:
        _close(file)
        part.unlink(missing_ok=True)


def drop_halves(folder: Path) -> None:
    """Delete unfinished files of processes that were killed. A process that lives has locked its own; a new one gets
    the time to do so."""
    for path in folder.glob(".speech-*.part"):
        with suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - path.stat().st_mtime > _NEW_S:
                path.unlink()


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):  # it tries to write the rest once more
        file.close()


class _Target:
    """The file that an encoder writes to. It keeps the first error, because libsndfile gives no reason for failures."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        return self._attempt(self._file.write, data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._attempt(self._file.seek, offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def _attempt(self, call: Callable[..., int], *args: Any) -> int:
        try:
            return call(*args)
        except OSError as error:
            self.error = self.error or error
            return 0


class SpeechFile:
    """A mono sound file that appears at its place only once it is whole.

    Until then an older file stays. If the `with` block fails, nothing is left. A device or a pipe gets the whole file
    at the end.

    Raises:
        RequestError: the file cannot be written; the message says why.
    """

    def __init__(
        self,
        path: str,
        rate: int,
        *,
        keep_partial: bool = False,
        in_memory: bool = False,
        long: bool = False,
        tags: Mapping[str, str] | None = None,
        cover: bytes | None = None,
    ):
        """
        Args:
            path: its ending names the format, one of `ENDINGS`.
            rate: sample rate in Hz.
            keep_partial: if the block fails, keep the sound so far as a whole file and say so, unless writing failed.
            in_memory: encode in memory, and give the disk the whole file at the end, in few calls. After each call the
                thread waits for the interpreter, which keeps the engine's thread waiting too.
            long: hours of sound may come. What PyAV encodes goes into a process of its own.
            tags, cover: see `encoder`.
        """
        self.path = Path(path).absolute()
        if self.path.is_symlink():
            self.path = self.path.resolve()  # the target, so that the link stays
        self._is_device = self.path.exists() and not self.path.is_file()
        self._written = Path(tempfile.gettempdir()) if self._is_device else self.path.parent  # for messages
        self._ending = _ending(path)
        self._rate = rate
        self._keep_partial = keep_partial
        self._in_memory = in_memory
        self._beside = long and self._ending in MPEG4 and not (in_memory or self._is_device)
        self._tags = tags or {}
        self._cover = cover
        self._chapters: list[tuple[int, str]] = []
        self._samples = 0
        self._encoded = False  # completely
        # libsndfile calls `_Target` back and would swallow a KeyboardInterrupt there. Only the main thread gets one, so
        # it leaves the calls to another thread.
        self._thread = ThreadPoolExecutor(1) if threading.current_thread() is threading.main_thread() else None

    def __enter__(self) -> "SpeechFile":
        with ExitStack() as stack:
            try:
                self._file = self._open(stack)
            except OSError as error:
                raise self._cannot_write(error) from None
            self._target = _Target(self._file)
            if self._thread:
                stack.enter_context(self._thread)
            self._encoder = self._call(self._new_encoder)
            stack.callback(self._free)
            self._stack = stack.pop_all()
        return self

    def _new_encoder(self) -> Encoder:
        how = self._rate, self._chapters, self._tags, self._cover
        if self._beside:
            return EncoderProcess(self._ending, self._file, *how)
        return encoder(self._ending, self._target, *how)

    def _open(self, stack: ExitStack) -> IO[bytes]:
        """The file that is written while speech comes."""
        if self._is_device:
            file = tempfile.TemporaryFile()
            stack.callback(_close, file)
            return file
        return io.BytesIO() if self._in_memory else stack.enter_context(new_file(self.path))

    def write(self, pcm: bytes) -> None:
        """Append PCM16, little-endian."""
        samples = np.frombuffer(pcm, "<i2")
        # libsndfile's Vorbis overflows its stack on minutes at once. Each call waits for the interpreter once or twice.
        most = max(1, len(samples)) if self._beside else self._rate
        for start in range(0, len(samples), most):
            self._call(self._encoder.write, samples[start : start + most])
        self._samples += len(samples)

    def mark_chapter(self, start: float, title: str) -> None:
        """Mark a chapter at a second of this file, in the formats that have marks (.m4a, .m4b)."""
        self._chapters.append((round(start * self._rate), title))

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        keep = kind is not None and self._keep_partial and self._samples > 0 and self._target.error is None
        if kind is not None and not keep:
            self._stack.__exit__(kind, *error)
            return
        try:
            with self._stack:
                self._finish()
        except OSError as failure:
            raise self._cannot_write(failure) from None
        if keep:
            print(f"kept    {self.path}: what was said so far", file=sys.stderr)

    def _finish(self) -> None:
        self._call(self._encoder.close)
        self._encoded = True
        self._call(self._file.seek, 0)
        if self._is_device:
            self._written = self.path
            with open(self.path, "wb") as device:
                shutil.copyfileobj(self._file, device)
        elif self._in_memory:
            with new_file(self.path) as file:
                file.write(self._file.read())

    def _free(self) -> None:
        """Free what an encoder holds that could not complete the sound."""
        if not self._encoded:
            with suppress(Exception):  # it tries to write the rest once more
                self._run(self._encoder.close)

    def _call(self, call: Callable[..., _T], *args: Any) -> _T:
        try:
            done = self._run(call, *args)
            if self._target.error:
                raise self._target.error
            return done
        except Exception as raised:  # soundfile asserts that everything was written
            error = self._target.error or raised
            if isinstance(error, OSError):
                raise self._cannot_write(error) from None
            if isinstance(error, soundfile.SoundFileError):
                raise RequestError(f"--output {self.path}: {error}") from None
            raise

    def _run(self, call: Callable[..., _T], *args: Any) -> _T:
        return self._thread.submit(call, *args).result() if self._thread else call(*args)

    def _cannot_write(self, error: OSError) -> RequestError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = f"no space left on {self._written}; make room there, or name another place"
        else:
            why = f"{error.strerror or error}; name another place"
        return RequestError(f"--output {self.path}: {why}")


@contextmanager
def opened(path: str, rate: int, keep_partial: bool) -> Iterator[Callable[[bytes], None]]:
    """Open a sound file, or standard output for "-", and yield what appends PCM16, little-endian. `rate` and
    `keep_partial`: as for `SpeechFile`."""
    if path == "-":
        yield write_stdout
        return
    with SpeechFile(path, rate, keep_partial=keep_partial) as file:
        yield file.write


def write_stdout(pcm: bytes) -> None:
    """Write to standard output at once. Raises BrokenPipeError: the process that read it is gone. Raises RequestError:
    it cannot be written."""
    try:
        sys.stdout.buffer.write(pcm)
        sys.stdout.buffer.flush()
    except OSError as error:
        # Python flushes standard output again at exit, which would report the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        why = f"standard output cannot be written: {error.strerror}"
        raise RequestError(f"--output -: {why}; redirect it to another place") from None


def players_of(ending: str) -> list[str]:
    """The players among `PLAYERS` that play a format."""
    return [name for name, (_, endings) in PLAYERS.items() if ending in endings]


def player_for(ending: str) -> str:
    """The first of `PLAYERS` that is installed and plays a format. Raises RequestError: none is installed."""
    able = players_of(ending)
    for name in able:
        if shutil.which(name):
            return name
    raise RequestError(f"--play: no program here plays {ending}; install one of {', '.join(able)}")


def play(path: Path) -> None:
    """Play a sound file to its end. Raises RequestError: there is no player for it, or the player failed."""
    player = player_for(_ending(path.name))
    try:
        status = subprocess.run([player, *PLAYERS[player][0], str(path)], stdin=subprocess.DEVNULL).returncode
    except OSError as error:
        raise RequestError(f"--play: {player} cannot be started: {error}") from None
    if status:
        raise RequestError(f"--play: {player} could not play it (status {status}); its own message is above")
