"""What each key of a server uses at this moment, and may use."""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

from qwen_megakernel.server.api_error import ApiError, Refused
from qwen_megakernel.server.keys import Keys

_BUSY_S = 0.25  # a patient session tries again after this time if its key has no stream left


class Usage:
    """What each key uses now. Any thread may call its methods."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._streams: Counter[str] = Counter()
        self._left: dict[str, tuple[float, float]] = {}  # characters that are left, and when that was so

    def take_stream(self, name: str, most: int) -> bool:
        """Take one of so many streams. False: all are taken."""
        with self._lock:
            if free := self._streams[name] < most:
                self._streams[name] += 1
            return free

    def give_stream(self, name: str) -> None:
        with self._lock:
            self._streams[name] -= 1

    def take_characters(self, name: str, count: int, per_minute: int) -> float:
        """Take characters of an account that fills up within a minute. A longer text than that waits for a full one,
        and leaves a debt. Returns 0, or the seconds until there are enough."""
        with self._lock:
            now = self._clock()
            left, since = self._left.get(name, (float(per_minute), now))
            left = min(per_minute, left + (now - since) * per_minute / 60)
            lack = min(count, per_minute) - left
            self._left[name] = (left if lack > 0 else left - count, now)
        return max(0.0, lack * 60 / per_minute)


class Quotas:
    """Used in one event loop.

    Attributes:
        usage: of all keys.
    """

    def __init__(self, keys: Keys):
        self._keys = keys
        self.usage = Usage()

    @contextlib.asynccontextmanager
    async def stream(self, name: str, *, patient: bool) -> AsyncIterator[None]:
        """One more text is spoken for the key of this name until the end of the block.

        Args:
            name: empty: of no key.
            patient: wait for a stream, however long it takes.

        Raises:
            Refused: the key was withdrawn, or has no stream left.
        """
        most = None
        while name:
            if (key := self._keys.by_name.get(name)) is None:
                raise Refused(ApiError(401, "unauthorized", f"the key {name} was withdrawn: connect with another one"))
            if (most := key.streams) is None or await self._take_stream(name, most):
                break
            if not patient:
                words = f"the key {name} may speak {most} texts at once: try again once one has ended"
                raise Refused(ApiError(429, "rate_limit", words, True, why="key_streams"))
            await asyncio.sleep(_BUSY_S)
        try:
            yield
        finally:
            if most is not None:
                self._give_stream(name)

    async def take_characters(self, name: str, count: int) -> None:
        """Raises Refused: the key of this name has had its characters of this minute."""
        if not (count and (key := self._keys.by_name.get(name)) and (most := key.characters_per_minute)):
            return
        if seconds := await self._take_characters(name, count, most):
            words = f"the key {name} may send {most} characters a minute: try again in {seconds:.0f} s"
            retry_s = max(1, round(seconds + 0.5))
            raise Refused(ApiError(429, "rate_limit", words, True, why="key_characters", retry_s=retry_s))

    async def _take_stream(self, name: str, most: int) -> bool:
        return self.usage.take_stream(name, most)

    def _give_stream(self, name: str) -> None:
        self.usage.give_stream(name)

    async def _take_characters(self, name: str, count: int, per_minute: int) -> float:
        return self.usage.take_characters(name, count, per_minute)
