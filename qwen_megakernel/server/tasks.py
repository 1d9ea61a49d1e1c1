"""Jobs of the server's event loop: the first of several to end, and one in a thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any


async def first_of(*jobs: Coroutine[Any, Any, Any]) -> None:
    """Run the jobs until one ends, and cancel the others. Raises what that one raises."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await next(iter(done))
    finally:
        await cancelled(tasks)


async def cancelled(tasks: list[asyncio.Task]) -> None:
    """Cancel tasks, and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def in_thread(job: Callable[[], None]) -> None:
    """Run `job`, which may run twice, in a thread, or here if the process can have no more threads."""
    try:
        await asyncio.to_thread(job)
    except RuntimeError:
        job()


async def in_daemon(job: Callable[[], Any]) -> Any:
    """Run `job` in a daemon thread, which does not keep the process alive. A download may take an hour."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()  # it cannot be stopped

    def run() -> None:
        try:
            done.set_result(job())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="qwen_megakernel load", daemon=True).start()
    return await asyncio.wrap_future(done)
