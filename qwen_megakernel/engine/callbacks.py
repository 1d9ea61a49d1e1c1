"""CallbackRunner: one utterance's callbacks, in order, in a thread of their own.

The engine's thread runs no code of callers. A slow callback delays its own utterance and no other. Our own callbacks
that only post to an event loop need no thread: `DirectCalls`.
"""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

Callback = TypeVar("Callback", bound=Callable[..., object])


def returns_at_once(callback: Callback) -> Callback:
    """Mark a callback that never waits and never raises. The engine's thread calls it itself, so the first sound does
    not wait for another thread."""
    vars(callback)["returns_at_once"] = True
    return callback


class CallbackRunner:
    def __init__(self, failed: Callable[[BaseException], None]):
        """`failed`: called in the thread with what a call raised, SystemExit too."""
        self._failed = failed
        self.broken = False  # a call has raised, or was given up; later calls are dropped, except the last
        self.stuck_s = 0.0  # that the running call has taken, as far as `watch` has seen it
        self._running = 0  # the running call's number; 0: none
        self._watched = 0  # the number that `watch` saw
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], bool]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="qwen_megakernel callbacks", daemon=True)
        self._starting, self._begun = threading.RLock(), False

    def start(self) -> None:
        """Start the thread, if it was not. Raises RuntimeError: the process can have no more threads.

        A second caller waits for the first one and then tries itself, or it would take a failed start for a done one.
        A signal's handler in the first one's thread does not wait.
        """
        with self._starting:
            if self._begun:
                return
            self._begun = True
            try:
                self.thread.start()
            except RuntimeError:
                self._begun = False
                raise

    def watch(self, seconds: float) -> None:
        """`seconds` have passed since the last look."""
        self.stuck_s = self.stuck_s + seconds if self._running and self._running == self._watched else 0.0
        self._watched = self._running

    def call(self, callback: Callable[[], None], *, last: bool = False) -> None:
        """Queue a call, from any thread. The thread ends after the last one."""
        self._calls.put((callback, last))
        if last:
            self.start()

    def _run(self) -> None:
        calls = 0
        while True:
            callback, last = self._calls.get()
            if last:
                callback()
                return
            if self.broken:
                continue
            calls += 1
            self._running = calls
            try:
                callback()
            except BaseException as error:
                self.broken = True
                self._failed(error)
            self._running = 0


class DirectCalls:
    """Calls callbacks in the thread that hands them over. They are marked with `returns_at_once`."""

    thread = None
    stuck_s = 0.0
    broken = False

    def start(self) -> None:
        """There is no thread."""

    def watch(self, seconds: float) -> None:
        """No call takes long."""

    def call(self, callback: Callable[[], None], *, last: bool = False) -> None:
        if last or not self.broken:
            callback()
