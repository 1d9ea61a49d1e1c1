"""Looks at a file from outside before it is read: a pipe may never answer, and /dev/zero never ends."""

import errno
import os
import stat
from pathlib import Path
from typing import IO

_PIECE = 1 << 18  # bytes


class UnfitFile(OSError):
    """A file that is there, but is no regular one (EINVAL) or too large (EFBIG)."""


def open_descriptor(path: str | Path, what: str, most: int | None = None, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, without waiting. `what`: names its kind in messages, such as "a voice". `most`: bytes.
    Raises OSError: it cannot be opened; `strerror` is for people. UnfitFile. TypeError: `path` is no path."""
    try:
        file = os.open(os.fspath(path), flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except ValueError as error:  # a null character, half a character
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "something else"
            raise UnfitFile(errno.EINVAL, f"{what} is a regular file, but this is {kind}")
        if most is not None and found.st_size > most:
            raise _too_large(what, most, found.st_size)
    except BaseException:
        os.close(file)
        raise
    return file


def open_file(path: str | Path, what: str, most: int | None = None) -> IO[bytes]:
    """Open a regular file to read it, as `open_descriptor`."""
    return open(open_descriptor(path, what, most), "rb")


def read_file(path: str | Path, what: str, most: int) -> bytes:
    """The bytes of a regular file. Raises as `open_descriptor`."""
    with open_file(path, what, most) as file:
        data = read_most(file, most)
    if len(data) > most:  # files of /proc state no size, and others may grow
        raise _too_large(what, most, len(data))
    return data


def read_most(file: IO[bytes], most: int) -> bytes:
    """Read to the end, or `most` bytes and a few more, which tells that there are more. One large read would take the
    memory of `most` at once."""
    pieces, size = [], 0
    while size <= most and (piece := file.read(_PIECE)):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def size_of_file(path: str | Path, what: str, most: int | None = None) -> int:
    """How many bytes a regular file has that other code will open. Raises as `open_descriptor`."""
    with open_file(path, what, most) as file:
        return os.fstat(file.fileno()).st_size


def _too_large(what: str, most: int, size: int) -> UnfitFile:
    return UnfitFile(errno.EFBIG, f"{what}'s file has at most {most} bytes, this one has {size}")
