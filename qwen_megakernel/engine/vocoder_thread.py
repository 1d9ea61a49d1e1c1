"""VocoderThread: on a CPU the vocoder computes in a thread of its own, beside the frames that come next."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from qwen_megakernel.backend.cpu_threads import use_threads

VOCODER_THREAD = "qwen_megakernel vocoder"


class VocoderThread:
    """Computes calls in another thread, one after the other. Not thread-safe: one thread makes the calls.

    A `ThreadPoolExecutor` would keep Python from ending while a call hangs. It also takes no calls once Python ends,
    but an engine may still be at work then."""

    def __init__(self, threads: int):
        """`threads`: how many PyTorch uses for a call."""
        self._threads = threads
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Compute `function(*args)` after the calls before it.

        Raises:
            RuntimeError: the process can have no more threads.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=VOCODER_THREAD, daemon=True)
            thread.start()
            self._thread = thread
            self.call(use_threads, self._threads).result()
        future: Future[Any] = Future()
        self._calls.put((future, partial(function, *args)))
        return future

    def close(self) -> None:
        """End the thread after the calls so far."""
        if self._thread:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    @torch.inference_mode()
    def _run(self) -> None:
        while call := self._calls.get():
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del call, future, function  # while it waits, it must keep no tensors
