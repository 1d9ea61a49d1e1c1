"""The speech of a book, kept in the user's cache until its files are complete. After an interrupt or a crash the same
command speaks only the rest, and makes the same bytes."""

import argparse
import fcntl
import hashlib
import json
import logging
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from qwen_audiobook.book import Piece
from qwen_megakernel.commands.output import drop_halves
from qwen_megakernel.errors import RequestError
from qwen_megakernel.model.voice import Voice
from spoken_text.files import open_descriptor

_OLD_S = 30 * 24 * 3600.0
log = logging.getLogger(__name__)

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
    """A context manager. Without an error the file is deleted at the end. Where it cannot be written, a warning says
    so, and nothing more is kept.

    Attributes:
        seed, threads: those that the kept speech was made with; None: there is none, or it had none.
    """

    def __init__(self, output: str, digest: str, pieces: Sequence[Piece]):
        """`output`: the path of the book's sound. `pieces`: of the book, before they are cut to fit a slot. Raises
        RequestError: another process speaks this book. Raises OSError: nothing can be kept here."""
        place = Path(output).absolute()
        text = "\0".join(f"{piece.speaker}\0{piece.text}" for piece in pieces)
        name = hashlib.sha256(f"{place}\0{digest}\0{text}".encode(errors="replace")).hexdigest()[:32]
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "qwen-audiobook")
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name}.speech"
        opened = open_descriptor(self._path, "kept speech", flags=os.O_RDWR | os.O_CREAT)
        self._file = open(opened, "r+b")  # noqa: SIM115 - see `__exit__`
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise RequestError(f"--output {output}: another process speaks it; wait, or name another") from None
        self._keeps = True
        self._is_new = False  # the file holds nothing of an earlier run
        self._pieces = 0  # that this run has read or written
        self.seed: int | None = None
        self.threads: int | None = None
        _drop_old(folder)
        try:
            head = json.loads(self._file.readline(1000))
            self.seed, self.threads = head["seed"], head["threads"]
            drop_halves(place.parent)
        except (ValueError, KeyError, TypeError):  # a new file, or one that was killed at its beginning
            self._is_new = True
            self._file.seek(0)
            self._file.truncate()

    def begin(self, seed: int | None, threads: int | None) -> None:
        """Note how the speech is made, if it is not noted yet."""
        if not self._file.tell():
            self._write(json.dumps({"seed": seed, "threads": threads}).encode() + b"\n")

    def spoken(self, pieces: Sequence[Piece]) -> Iterator[np.ndarray]:
        """The sound, fp32 [n], of the first pieces, as far as it was kept. What is incomplete is dropped."""
        for piece in pieces:
            start = self._file.tell()
            head = self._file.read(_HEAD.size)
            if len(head) == _HEAD.size:
                text, checksum, size = _HEAD.unpack(head)
                sound = self._file.read(size)
                if text == _checksum(piece) and len(sound) == size and checksum == zlib.crc32(sound):
                    self._pieces += 1
                    yield np.frombuffer(sound, "<f4")
                    continue
            self._file.seek(start)
            self._file.truncate()
            return

    def keep(self, piece: Piece, samples: np.ndarray) -> None:
        """Append the sound, fp32 [n], of the next piece."""
        sound = samples.astype("<f4").tobytes()
        self._write(_HEAD.pack(_checksum(piece), zlib.crc32(sound), len(sound)) + sound)
        self._pieces += 1

    def _write(self, data: bytes) -> None:
        if not self._keeps:
            return
        try:
            self._file.write(data)
            self._file.flush()  # what was flushed survives the process
        except OSError as error:
            self._keeps = False
            log.warning("from here on no speech is kept for another run: %s: %s", self._path, error.strerror or error)

    def __enter__(self) -> "KeptSpeech":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is None or self._is_new and not self._pieces:
            self._path.unlink(missing_ok=True)
        with suppress(OSError):  # it tries to write the rest once more
            self._file.close()


def _drop_old(folder: Path) -> None:
    """Delete what nobody came back for."""
    for path in folder.glob("*.speech"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _OLD_S:
                path.unlink()


def _checksum(piece: Piece) -> int:
    return zlib.crc32(f"{piece.speaker}\0{piece.text}".encode(errors="replace"))
