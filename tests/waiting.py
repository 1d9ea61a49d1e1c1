"""Tests wait for conditions, never for a time."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from qwen_megakernel.engine.sequence import State

PATIENCE_S = 180.0
"""After this long a test fails instead of hanging. It is far more than anything takes, even on a machine that computes
something else on every core."""


def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Return once `condition()` is true. Raises AssertionError if it is not after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come within {seconds:g} s"
        time.sleep(0.002)


async def until_in_loop(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """The same, while the event loop goes on."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def until_spoken(engine, utterance, seconds: float = PATIENCE_S) -> None:
    """Return once an utterance has ended, or has spoken and handed out all that its text allows and waits for more."""
    calm = 0

    def rests() -> bool:
        nonlocal calm
        sequence = engine.snapshot().sequence(utterance.seed)
        silent = sequence is None or sequence.state is State.WAITING_TEXT
        # The engine's thread takes text out of a queue and counts it one moment later: one look may fall in between.
        rests = silent or sequence.idle and sequence.handed_out == sequence.seen == sequence.launched
        calm = calm + 1 if rests else 0
        return utterance.done or calm > 4

    until(rests, seconds)


def run_all(*targets: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Call each in a thread of its own and wait for all; the first thing that goes wrong is raised."""
    wrong = []

    def guarded(target) -> None:
        try:
            target()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=seconds)
        assert not thread.is_alive(), "a thread hangs"
    if wrong:
        raise wrong[0]


def free_port() -> int:
    """Of 127.0.0.1, where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_python(code: str, *args: str) -> str:
    """What a Python process prints, which must end well."""
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def brief_case(*values):
    """A case that `make test-all` leaves to a slow one, which does the same and more."""
    return pytest.param(*values, marks=pytest.mark.brief)


def slow_case(*values):
    """A case of a test that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)
