"""The speech of a book, kept in a hidden file beside its output until that is complete. After an interrupt or a crash
the same command speaks only the rest, and makes the same bytes."""

import argparse
import fcntl
import hashlib
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qwen_audiobook.book import Piece
from qwen_megakernel.errors import RequestError
from qwen_megakernel.model.voice import Voice
from spoken_text.files import open_descriptor

_NEW_S = 5.0  # a file is new for so long
_HEAD = struct.Struct("<III")  # of a piece: checksum of its text, checksum and bytes of its sound


def digest_of(args: argparse.Namespace, options: Mapping[str, Any], voices: Mapping[str, Voice]) -> str:
    """A hash that changes if how the book is spoken changes. Pauses, loudness, tags and the form of the files do not
    count, because they come later. `options`: of speech, without a seed that was drawn."""
    how = [args.model, args.adapters, args.weights, args.dtype, args.vocoder_dtype, args.device, args.backend]
    whole = [how, options, voices, args.ref_text, [_bytes_hash(path) for path in args.ref_audio or ()]]
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=_hash).encode()).hexdigest()[:16]


def _hash(value: object) -> str:
    return value.digest.hex() if isinstance(value, Voice) else repr(value)


def _bytes_hash(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # the engine tells
        return path


class KeptSpeech:
    """A context manager. Without an error the file is deleted at the end.

    Attributes:
        seed, threads: those that the kept speech was made with; None: there is none, or it had none.
    """

    def __init__(self, output: str, digest: str, pieces: Sequence[Piece]):
        """`output`: the path of the book's sound. `pieces`: of the book, before they are cut to fit a slot. Raises
        RequestError: the file cannot be written, or another process speaks this book."""
        text = zlib.crc32("\0".join(f"{piece.speaker}\0{piece.text}" for piece in pieces).encode(errors="replace"))
        place = Path(output).absolute()
        self._path = place.with_name(f".{place.name}.{digest[:8]}{text:08x}.speech")
        try:
            opened = open_descriptor(self._path, "kept speech", flags=os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise self._cannot(error) from None
        self._file = open(opened, "r+b")  # noqa: SIM115 - see `__exit__`
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise RequestError(f"--output {output}: another process speaks it; wait, or name another") from None
        self.seed: int | None = None
        self.threads: int | None = None
        try:
            head = json.loads(self._file.readline(1000))
            self.seed, self.threads = head["seed"], head["threads"]
            _drop_halves(place.parent)
        except (ValueError, KeyError, TypeError):  # a new file, or one that was killed at its beginning
            self._file.seek(0)
            self._file.truncate()

    def begin(self, seed: int | None, threads: int | None) -> None:
        """Note how the speech is made, if it is not noted yet."""
        if not self._file.tell():
            self._write(json.dumps({"seed": seed, "threads": threads}).encode() + b"\n")

    def spoken(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        """The sound, PCM16, of the first pieces, as far as it was kept. What is incomplete is dropped."""
        for piece in pieces:
            start = self._file.tell()
            head = self._file.read(_HEAD.size)
            if len(head) == _HEAD.size:
                text, checksum, size = _HEAD.unpack(head)
                pcm = self._file.read(size)
                if text == _checksum(piece) and len(pcm) == size and checksum == zlib.crc32(pcm):
                    yield pcm
                    continue
            self._file.seek(start)
            self._file.truncate()
            return

    def keep(self, piece: Piece, pcm: bytes) -> None:
        """Append the sound of the next piece. Raises RequestError: it cannot be written."""
        self._write(_HEAD.pack(_checksum(piece), zlib.crc32(pcm), len(pcm)) + pcm)

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self._file.flush()  # what was flushed survives the process
        except OSError as error:
            raise self._cannot(error) from None

    def _cannot(self, error: OSError) -> RequestError:
        why = f"{self._path} cannot be written: {error.strerror or error}"
        return RequestError(f"--output: {why}; make room there, or name another place")

    def __enter__(self) -> "KeptSpeech":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is None:
            self._path.unlink(missing_ok=True)
        self._file.close()


def _drop_halves(folder: Path) -> None:
    """Delete unfinished sound files of processes that were killed. A process that lives has locked its own; a new one
    gets the time to do so."""
    for path in folder.glob(".speech-*.part"):
        with suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - path.stat().st_mtime > _NEW_S:
                path.unlink()


def _checksum(piece: Piece) -> int:
    return zlib.crc32(f"{piece.speaker}\0{piece.text}".encode(errors="replace"))
