"""How long to wait for a client, where the process itself may have stood still."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

_LAST_LOOK_S = 0.05  # enough for what lies in sockets to get to who waits for it


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout`, but what came in time counts. After a standstill an event loop's timers are late, and it runs
    them before it looks at its sockets. So it looks once more before the time is over. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds, lambda: limit.reschedule(loop.time() + _LAST_LOOK_S))
        try:
            yield limit
        finally:
            timer.cancel()
