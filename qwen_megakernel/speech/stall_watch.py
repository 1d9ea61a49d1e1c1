"""StallWatch: tells when the writer of a text that comes in pieces has stalled."""

import asyncio
import weakref
from collections.abc import Callable

from spoken_text.sentence import LONGEST_END, STALL_S, ends_sentence

LONG_STALL_S = 5.0
"""Seconds without text after which a writer within a sentence counts as stalled. After the part's end its slot is kept
for a while (engine/slots.py), and then free for others."""
LOW_LEAD_S = 0.5
"""Seconds of audio that a listener still has when a stalled part is ended. A CPU at a real-time factor of 0.5 makes its
next chunk, of 0.64 s at most, in that time."""


class StallWatch:
    """All in one event loop, whose time it uses; `stop` may be called from any thread once the loop is closed.

    Attributes:
        text_at: when the latest text came.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, stalled: "weakref.WeakMethod[Callable[[float], None]]"):
        """`stalled`: called with `text_at` when the part must be ended. Weak, because its object refers to this one."""
        self._loop = loop
        self._stalled = stalled
        self.text_at = 0.0
        self._tail = ""  # the end of the text so far
        self._flushed = False  # the text so far may be all
        self._runs_out = 0.0  # when the listener has heard all that was made
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def made(self, seconds: float) -> None:
        """So much more audio was made."""
        self._runs_out = max(self._runs_out, self._loop.time()) + seconds

    def came(self, text: str) -> None:
        """Text has come."""
        self._tail = self._tail[-LONGEST_END:] + text
        self.text_at = self._loop.time()
        self._flushed = False
        self._watch()

    def flushed(self) -> None:
        """The text so far may be all."""
        self._flushed = True
        self._watch()

    def stop(self) -> None:
        """No text will come, or none is wanted."""
        self._stopped = True
        self._unwatch()

    def _watch(self) -> None:
        """Look again when the writer may count as stalled. A timer that fires sooner sees to that: texts are many."""
        at = self._stalled_at()
        if not self._stopped and (self._timer is None or self._timer.when() > at):
            self._unwatch()
            self._timer = self._loop.call_at(at, self._look)

    def _unwatch(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None  # it holds this object

    def _stalled_at(self) -> float:
        """When the part must be ended if no text comes until then."""
        whole = self._flushed or ends_sentence(self._tail)
        return max(self.text_at + (STALL_S if whole else LONG_STALL_S), self._runs_out - LOW_LEAD_S)

    def _look(self) -> None:
        self._timer = None
        if self._loop.time() < self._stalled_at():
            self._watch()
        elif self._tail and (stalled := self._stalled()):
            self._tail, self._flushed = "", False  # until more text comes
            stalled(self.text_at)
