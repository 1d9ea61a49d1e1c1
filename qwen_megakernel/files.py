"""Looks at a folder before what is in it is trusted, and tells whether a file has changed."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    """Make a folder for what this process trusts, such as compiled code, or check that nobody else could write there.
    Yields a path to the folder itself, which stays right if others rename it. Raises OSError: it cannot be made or
    opened, is a link, or is not trusted (`check_own`)."""
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        with contextlib.suppress(FileExistsError):
            missing.mkdir(mode=0o700)
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        check_own(opened, folder)
        yield Path(f"/proc/self/fd/{opened}")
    finally:
        os.close(opened)


def check_own(file: int | Path, name: Path) -> None:
    """Raises PermissionError: a file or folder called `name` is not this user's or root's, or others may write it."""
    found = os.stat(file)
    if found.st_uid not in (0, os.geteuid()):
        why = f"belongs to user {found.st_uid}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"may be written by others (mode {stat.S_IMODE(found.st_mode):03o})"
    else:
        return
    how = "delete it, or set TORCH_EXTENSIONS_DIR to a folder of your own"
    raise PermissionError(errno.EACCES, f"{name} {why}, so what is in it is not trusted: {how}")


def stamp_of(path: Path) -> tuple[int, ...] | None:
    """Another one if the file, or what a link leads to, has changed, or who may read it. None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
