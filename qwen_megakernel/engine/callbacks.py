"""Listener: one utterance's callbacks, in order, in a thread of their own. The owner thread runs no code of callers,
and no caller waits for another's: who is slow hears its own utterance late."""

import contextlib
import queue
import threading
from collections.abc import Callable


class Listener:
    """Attributes:
    stuck_s: seconds that the call that is running has taken, as far as `watch` has seen it.
    broken: a call has raised, or nobody waits for it any more: those behind it are dropped, but for the last.
    """

    def __init__(self, failed: Callable[[BaseException], None]):
        """`failed`: called in the thread with what a call raised, sys.exit() too."""
        self._failed, self.broken, self.stuck_s = failed, False, 0.0
        self._call = self._watched = 0  # the number of the call that is running, 0 between two; the one watched last
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], bool]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="qwen_megakernel listener", daemon=True)
        self._unstarted = [self.thread]

    def start(self) -> None:
        """Once, whoever calls it.

        Raises:
            RuntimeError: no more threads can be had.
        """
        with contextlib.suppress(IndexError):
            thread = self._unstarted.pop()
            try:
                thread.start()
            except RuntimeError:
                self._unstarted.append(thread)
                raise

    def watch(self, seconds: float) -> None:
        """So much time has passed since the last look."""
        self.stuck_s = self.stuck_s + seconds if self._call and self._call == self._watched else 0.0
        self._watched = self._call

    def tell(self, call: Callable[[], None], *, last: bool = False) -> None:
        """From any thread. Behind the last call the thread ends."""
        self._calls.put((call, last))
        if last:
            self.start()

    def _run(self) -> None:
        calls = 0
        while True:
            call, last = self._calls.get()
            if last:
                call()
                return
            if self.broken:
                continue
            calls += 1
            self._call = calls
            try:
                call()
            except BaseException as error:
                self.broken = True
                self._failed(error)
            self._call = 0
