"""Watchdog: ends the wait for a GPU that does not answer, and for a callback that does not return."""

import contextlib
import logging
import queue
import time

from qwen_megakernel.engine.admission import Admission
from qwen_megakernel.engine.loop import Loop
from qwen_megakernel.engine.options import Patience
from qwen_megakernel.errors import CallbackError

log = logging.getLogger(__name__)


def watch(admission: Admission, loop: Loop, patience: Patience, default_s: float) -> None:
    """Watch until the engine has ended. Time is counted by looks, because the process may be stopped and go on hours
    later. `default_s`: in place of `patience.device_s` if that is None."""
    turn, turn_s = None, 0.0
    while not admission.ended or admission.open:
        before = time.monotonic()
        with contextlib.suppress(queue.Empty):
            admission.bell.get(timeout=patience.look_s)
        passed = min(time.monotonic() - before, 2 * patience.look_s)
        began = loop.turn_began
        _watch_callbacks(admission, passed, patience.callback_s)
        turn, turn_s = began, turn_s + passed if began is not None and began == turn else 0.0
        device_s = patience.device_s or default_s
        if turn_s > device_s:
            loop.hangs = True
            _end(admission, TimeoutError(f"the device did not answer for {device_s:g} s"))


def _watch_callbacks(admission: Admission, passed: float, most_s: float) -> None:
    for sequence in admission.open.copy():
        if callbacks := sequence.result.callbacks:
            callbacks.watch(passed)
            if callbacks.stuck_s > most_s:
                why = f"on_chunk did not return in {most_s:g} s: do not wait in it"
                admission.abandon(sequence, CallbackError(why), "stuck")


def _end(admission: Admission, fault: TimeoutError) -> None:
    admission.fault = fault
    admission.closed = True
    admission.ended = True
    log.error("the engine is dead: %s", fault)
    for sequence in admission.open.copy():
        admission.abandon(sequence, admission.death())
