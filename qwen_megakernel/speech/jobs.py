"""Jobs: generators that wait for utterances and the like. One thread runs them all.

A thread for each would compete with the engine's thread for the interpreter. On an H200, `batch` then made 78 to 82 %
of what the engine makes alone (docs/log/2026-11-24.md#batch-runs-thread).
"""

import contextlib
import os
import queue
import threading
from collections import deque
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


Begin = Callable[[Callable[[], None]], Work]
"""Begins some work. It is given what to call once the work has ended, from any thread. If beginning or the work raises
EngineBusy, because others have the engine's slots, the work is begun again a moment later."""

Result = TypeVar("Result")
Job = Generator[Begin, Any, Result]
"""It yields a `Begin` and is sent the work's result, or is thrown its error; then again. It returns its own result."""


class _Open:
    """A job that has not ended."""

    def __init__(self, job: Job[Any]):
        self.job = job
        self.future: Future[Any] = Future()
        self.begin: Begin | None = None  # of what it waits for
        self.work: Work | None = None
        self.attempt: object = None  # to begin it


class JobRunner:
    """Runs jobs in a thread of its own."""

    def __init__(self, at_once: int):
        """
        Args:
            at_once: the most jobs that are open; others wait.
        """
        self._at_once = at_once
        self._news: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # The thread's own:
        self._waiting: deque[_Open] = deque()
        self._open: set[_Open] = set()
        self._refused: list[_Open] = []  # the engine had no place for what they began
        self._thread = threading.Thread(target=self._run, name="qwen_megakernel map", daemon=True)
        self._thread.start()

    def add(self, job: Job[Result]) -> "Future[Result]":
        """Run a job. From any thread."""
        one = _Open(job)
        self._news.put(partial(self._waiting.append, one))
        return one.future

    def close(self, wait: bool = True) -> None:
        """Cancel what jobs wait for, and wait until that has ended. Their futures are never done."""
        self._news.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (news := self._next()) is not None:
            news()
            while self._waiting and len(self._open) < self._at_once:
                one = self._waiting.popleft()
                self._open.add(one)
                self._go_on(one, partial(one.job.send, None))
        works = [one.work for one in self._open if one.work]
        for work in works:
            work.cancel()
        for work in works:
            with contextlib.suppress(Exception):  # nobody wants to know
                work.result()

    def _next(self) -> Callable[[], None] | None:
        try:
            return self._news.get(timeout=_BUSY_S if self._refused else None)
        except queue.Empty:
            return self._begin_refused

    def _begin_refused(self) -> None:
        refused, self._refused = self._refused, []
        for one in refused:
            self._begin(one)

    def _go_on(self, one: _Open, step: Callable[[], Begin]) -> None:
        one.begin = one.work = one.attempt = None
        try:
            one.begin = step()
        except StopIteration as end:
            self._open.remove(one)
            one.future.set_result(end.value)
        except BaseException as error:
            self._open.remove(one)
            one.future.set_exception(error)
        else:
            self._begin(one)

    def _begin(self, one: _Open) -> None:
        one.attempt = object()
        ended = returns_at_once(partial(self._news.put, partial(self._ended, one, one.attempt)))
        try:
            assert one.begin
            one.work = one.begin(ended)
        except EngineBusy:
            self._refused.append(one)
        except BaseException as error:
            self._go_on(one, partial(one.job.throw, error))

    def _ended(self, one: _Open, attempt: object) -> None:
        """What a job waits for has ended."""
        if one.attempt is not attempt:  # beginning it failed, so the job went on already
            return
        try:
            assert one.work
            result = one.work.result()
        except EngineBusy:  # it has waited too long for a slot
            one.work = None
            self._refused.append(one)
        except BaseException as error:
            self._go_on(one, partial(one.job.throw, error))
        else:
            self._go_on(one, partial(one.job.send, result))


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
        self._runner = JobRunner(at_once)
        self._results = _results(iter(jobs), self._runner, 2 * at_once, ordered)

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
        self._runner.close()

    def __del__(self) -> None:
        # The garbage collector may call this in the engine's own thread, which the jobs wait for.
        self._runner.close(wait=False)


def _results(
    left: Iterator[Job[Result]], runner: JobRunner, ahead: int, ordered: bool
) -> Generator[Result, None, None]:
    done: queue.SimpleQueue[Future[Result]] = queue.SimpleQueue()
    taken: list[Future[Result]] = []  # whose results were not, in the jobs' order
    more = True
    while True:
        while more and len(taken) < ahead:
            try:
                job = next(left)
            except StopIteration:
                more = False
                break
            future = runner.add(job)
            taken.append(future)
            if not ordered:
                future.add_done_callback(done.put)
        if not taken:
            return
        future = taken[0] if ordered else done.get()
        result = future.result()
        taken.remove(future)
        yield result
