"""Listener: one utterance's callbacks, in order, in a thread of their own. The owner thread runs no code of callers,
and no caller waits for another's: who is slow hears its own utterance late."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable


class Listener:
    """Attributes:
    since: when the call that is running began (time.monotonic), or None.
    """

    def __init__(self, failed: Callable[[BaseException], None]):
        """`failed`: called in the thread with what a call raised, sys.exit() too; calls behind it are dropped, but for
        the last."""
        self._failed = failed
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], bool]] = queue.SimpleQueue()
        self.since: float | None = None
        self.thread = threading.Thread(target=self._run, name="qwen_megakernel listener", daemon=True)
        self._unstarted = [self.thread]

    def start(self) -> None:
        """Once, whoever calls it."""
        with contextlib.suppress(IndexError):
            self._unstarted.pop().start()

    def tell(self, call: Callable[[], None], *, last: bool = False) -> None:
        """From any thread. Behind the last call the thread ends."""
        self._calls.put((call, last))
        if last:
            self.start()

    def _run(self) -> None:
        broken = False
        while True:
            call, last = self._calls.get()
            if last:
                call()
                return
            if broken:
                continue
            self.since = time.monotonic()
            try:
                call()
            except BaseException as error:
                broken = True
                self._failed(error)
            self.since = None
