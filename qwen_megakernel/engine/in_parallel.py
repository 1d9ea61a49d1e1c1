"""in_parallel: work on many items at once, with results as they come and no more items taken than needed."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Stopped(Exception):
    """What `work` raises if it was told to stop and has no result."""


def in_parallel(
    work: Callable[[Item, threading.Event], Result], items: Iterable[Item], *, workers: int, ordered: bool
) -> Iterator[Result]:
    """What `work` returns for each item. Closing the iterator ends it.

    The iterating thread takes the items, at most `2 * workers` ahead of the results. So memory is bounded, and a worker
    that is done finds its next item.

    Args:
        work: called in a worker thread with an item and an event. The event is set once no result is wanted any more.
        ordered: results come in the items' order; otherwise as they are made.

    Raises:
        Exception: what `work` or the items raised; no further items are then worked on.
    """
    left, stopped = iter(items), threading.Event()
    done: queue.SimpleQueue[Future[Result]] = queue.SimpleQueue()
    open_: list[Future[Result]] = []  # results not taken, in the items' order
    more = True
    pool = ThreadPoolExecutor(workers, thread_name_prefix="qwen_megakernel map")
    try:
        while True:
            while more and len(open_) < 2 * workers:
                try:
                    item = next(left)
                except StopIteration:
                    more = False
                    break
                future = pool.submit(work, item, stopped)
                open_.append(future)
                if not ordered:
                    future.add_done_callback(done.put)
            if not open_:
                return
            future = open_[0] if ordered else done.get()
            result = future.result()
            open_.remove(future)
            yield result
    finally:
        stopped.set()
        pool.shutdown(wait=True, cancel_futures=True)
