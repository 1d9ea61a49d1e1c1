"""The picture of a book's cover, for sound files that hold one (.m4a, .m4b)."""

import io
from pathlib import Path

from qwen_megakernel.errors import RequestError
from spoken_text.files import open_file, read_most

_MOST_BYTES = 20_000_000
_KINDS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")


def check_cover(picture: bytes) -> str | None:
    """Why a picture can be no cover, and what to do; None if it can. `picture`: a file's bytes."""
    if not picture.startswith(_KINDS):
        return "expected JPEG or PNG; convert the picture"
    import av  # imported here, because it loads FFmpeg

    try:
        with av.open(io.BytesIO(picture), "r") as file:
            next(file.decode(video=0))
    except (av.FFmpegError, StopIteration, IndexError) as error:
        return f"the picture is broken ({error}); name another"
    return None


def cover_file(path: str) -> bytes:
    """Read a picture. Raises RequestError: it cannot be read, or is none."""
    try:
        with open_file(Path(path), "a picture") as file:
            picture = read_most(file, _MOST_BYTES)
    except OSError as error:
        raise RequestError(f"--cover {path} cannot be read: {error.strerror or error}; name a JPEG or PNG") from None
    if len(picture) > _MOST_BYTES:
        raise RequestError(f"--cover {path}: expected at most {_MOST_BYTES // 10**6} MB; make the picture smaller")
    if why := check_cover(picture):
        raise RequestError(f"--cover {path}: {why}")
    return picture
