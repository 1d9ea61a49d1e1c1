"""Tests wait for conditions, never for a time."""

import time
from collections.abc import Callable

PATIENCE_S = 180.0
"""After this long a test fails instead of hanging. It is far more than anything takes, even on a machine that computes
something else on every core."""


def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Return once `condition()` is true. Raises AssertionError if it is not after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come within {seconds:g} s"
        time.sleep(0.002)


def until_spoken(utterance, seconds: float = PATIENCE_S) -> None:
    """Return once an utterance has ended, or has spoken and handed out all that its text allows and waits for more."""
    stream, calm = utterance._stream, 0

    def rests() -> bool:
        nonlocal calm
        without_prompt = stream.prompt is None and stream.pieces is not None
        starved = stream.idle and stream.handed_frames == len(stream.codes) == stream.launched
        # The engine's thread takes text out of a queue and counts it one moment later: one look may fall in between.
        calm = calm + 1 if without_prompt or starved else 0
        return stream.done.is_set() or calm > 4

    until(rests, seconds)
