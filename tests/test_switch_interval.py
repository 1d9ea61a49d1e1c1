"""The interpreter's switch interval is short while an engine is open, and what it was afterwards."""

import gc
import sys

import pytest
from waiting import until

from qwen_megakernel.engine import core

FORMER_US = 5000


def interval_us() -> int:
    return round(1e6 * sys.getswitchinterval())


@pytest.fixture(autouse=True)
def no_other_engine_counts(monkeypatch):
    monkeypatch.setattr(core, "_SWITCH_INTERVAL", core._SwitchInterval())
    before = sys.getswitchinterval()
    sys.setswitchinterval(FORMER_US / 1e6)
    yield
    sys.setswitchinterval(before)


def test_it_is_short_until_the_last_engine_is_closed(backend):
    with backend.load(max_streams=1):
        assert interval_us() <= 100
        with backend.load(max_streams=1) as second:
            second.generate("Hello.", max_frames=1)
            assert interval_us() <= 100
        assert interval_us() <= 100
    assert interval_us() == FORMER_US
    with backend.load(max_streams=1):
        assert interval_us() <= 100
    assert interval_us() == FORMER_US


def test_it_comes_back_after_an_engine_that_was_dropped(backend):
    engine = backend.load(max_streams=1)
    assert interval_us() <= 100
    del engine
    gc.collect()
    until(lambda: interval_us() == FORMER_US)


@pytest.mark.parametrize("theirs_us", [50, 2000])
def test_what_somebody_else_sets_meanwhile_stays(backend, theirs_us):
    with backend.load(max_streams=1):
        sys.setswitchinterval(theirs_us / 1e6)
    assert interval_us() == theirs_us


def test_a_shorter_one_is_left_alone(backend):
    sys.setswitchinterval(20 / 1e6)
    with backend.load(max_streams=1):
        assert interval_us() == 20
    assert interval_us() == 20


@pytest.mark.parametrize("before", [True, False])
def test_an_engine_that_starts_while_the_last_one_ends_has_it_short(monkeypatch, before):
    """It starts right before or right after the former interval is set."""
    interval, set_interval = core._SwitchInterval(), sys.setswitchinterval

    def start_meanwhile(seconds: float) -> None:
        patch.undo()
        steps = [lambda: interval.shorten("second"), lambda: set_interval(seconds)]
        for step in steps if before else reversed(steps):
            step()

    interval.shorten("first")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "setswitchinterval", start_meanwhile)
        interval.restore("first")
    assert interval_us() <= 100
    interval.restore("second")
    assert interval_us() == FORMER_US
