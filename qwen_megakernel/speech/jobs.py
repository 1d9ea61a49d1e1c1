"""Jobs: generators that wait for utterances and the like. One event loop, in a thread of its own, runs them all.

A thread for each would compete with the engine's thread for the interpreter. On an H200, `batch` then made 78 to 82 %
of what the engine makes alone (docs/log/2026-11-24.md#batch-runs-thread).
"""

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from qwen_megakernel.engine.callbacks import returns_at_once
from qwen_megakernel.errors import EngineBusy, EngineDied

_BUSY_S = 0.05  # between two attempts while others have the engine's slots


class Work(Protocol):
    """What a job waits for: an `Utterance`, or a `Future`."""

    def result(self) -> Any: ...

    def cancel(self) -> object: ...


Begin = Callable[[Callable[[], Any]], Work]
"""Begins some work. It is given what to call once the work has ended, from any thread. If beginning or the work raises
EngineBusy, because others have the engine's slots, the work is begun again a moment later."""

Result = TypeVar("Result")
Job = Generator[Begin, Any, Result]
"""It yields a `Begin` and is sent the work's result, or is thrown its error; then again. It returns its own result."""


async def _run(job: Job[Result], room: asyncio.Semaphore) -> Result:
    """Run a job once there is room for it."""
    async with room:
        step = partial(job.send, None)
        while True:
            try:
                begin = step()
            except StopIteration as end:
                result: Result = end.value
                return result
            try:
                step = partial(job.send, await _result_of(begin))
            except Exception as error:
                step = partial(job.throw, error)


async def _result_of(begin: Begin) -> Any:
    """The result of some work. If this task is cancelled, the work is too, and its end is waited for."""
    post = asyncio.get_running_loop().call_soon_threadsafe
    while True:
        ended = asyncio.Event()
        try:
            work = begin(returns_at_once(partial(post, ended.set)))
            try:
                await ended.wait()
            except asyncio.CancelledError:
                work.cancel()
                await ended.wait()
                raise
            return work.result()
        except EngineBusy:  # there was no slot, or the work has waited too long for one
            await asyncio.sleep(_BUSY_S)


class JobResults(Iterator[Result]):
    """The results of jobs.

    The iterating thread takes the jobs, at most `2 * at_once` ahead of the results. So memory is bounded, and the next
    job is there when one has ended.
    """

    def __init__(self, jobs: Iterable[Job[Result]], *, at_once: int, ordered: bool):
        """
        Args:
            at_once: the most jobs that are open.
            ordered: results come in the jobs' order; otherwise as they are made.
        """
        self._process = os.getpid()
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = runner.get_loop()
        self._thread = threading.Thread(target=_run_loop, args=(runner,), name="qwen_megakernel map", daemon=True)
        self._thread.start()
        self._results = _results(iter(jobs), self._loop, at_once, ordered)

    def __next__(self) -> Result:
        """
        Raises:
            Exception: what a job or `jobs` raised; no further jobs are then begun.
            EngineDied: in a forked process.
        """
        try:
            if os.getpid() != self._process:
                raise EngineDied("this process was forked, and what makes the results stays where they were asked for")
            return next(self._results)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel what is open, and wait until that has ended. No more results come."""
        self._results.close()
        self._stop()
        self._thread.join()

    def _stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)

    __del__ = _stop  # it does not wait: the collector may call it in the engine's own thread, which the jobs wait for


def _run_loop(runner: asyncio.Runner) -> None:
    with runner:  # which cancels at its end what is open
        runner.get_loop().run_forever()


def _results(
    left: Iterator[Job[Result]], loop: asyncio.AbstractEventLoop, at_once: int, ordered: bool
) -> Generator[Result, None, None]:
    room = asyncio.Semaphore(at_once)
    done: queue.SimpleQueue[Future[Result]] = queue.SimpleQueue()
    taken: list[Future[Result]] = []  # whose results were not, in the jobs' order
    more = True
    while True:
        while more and len(taken) < 2 * at_once:
            try:
                job = next(left)
            except StopIteration:
                more = False
                break
            future = asyncio.run_coroutine_threadsafe(_run(job, room), loop)
            taken.append(future)
            if not ordered:
                future.add_done_callback(done.put)
        if not taken:
            return
        future = taken[0] if ordered else done.get()
        result = future.result()
        taken.remove(future)
        yield result
