"""Files that a running server reads again once they have changed: keys, certificates, voices, a lexicon."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qwen_megakernel.files import stamp_of

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_AGAIN_S = 60.0  # until what could not be read is tried again: memory, a descriptor or a disk may have been missing


class Watched:
    """Files, or a folder and its files, and what reads them again."""

    def __init__(self, about: str, paths: Sequence[Path], reread: Callable[[], Any]):
        """`about`: for the log. `reread`: runs in a thread. If it fails, what was read before stays."""
        self._about, self._paths, self._reread = about, paths, reread
        self._seen = self._state()
        self._again = math.inf  # when to try once more, although nothing has changed

    def look(self) -> None:
        """Read the files again if they have changed. Never fails."""
        try:
            state, now = self._state(), time.monotonic()
            if state == self._seen and now < self._again:
                return
            self._seen, self._again = state, now + _AGAIN_S
            self._reread()
            self._again = math.inf
            log.info("%s: read again", self._about)
        except Exception as error:
            log.error("%s: cannot be read again, what was there stays: %s", self._about, error)

    def _state(self) -> list[tuple[Path, tuple[int, ...] | None]]:
        files = list(self._paths)
        for path in self._paths:
            with contextlib.suppress(OSError):  # a file, or a folder that cannot be read: reading it again says so
                files += sorted(path.iterdir())
        return [(path, stamp_of(path)) for path in files]  # links are followed: Kubernetes swaps them


async def watch(all_watched: Sequence[Watched]) -> None:
    """Look after them until the task is cancelled."""
    while all_watched:
        await asyncio.sleep(_LOOK_S)
        for watched in all_watched:
            await asyncio.to_thread(watched.look)
