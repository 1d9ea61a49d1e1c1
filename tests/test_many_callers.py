"""Random callers from several threads against a model of what must come out; a soak that leaves nothing behind."""

import contextlib
import gc
import logging
import os
import random
import threading
import time
from collections import Counter
from functools import partial

import pytest
import torch
from callers import ACTIONS, TEXTS, Model, act, assert_at_rest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import PATIENCE_S, run_all, until

from qwen_megakernel import SamplingParams

SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "5"))
OPTIONS = {"max_streams": 3, "max_queue": 3, "max_positions": 256}

REQUESTS = [
    {"text": text, "sampling": SamplingParams(seed=seed), "max_frames": 20} for text in TEXTS for seed in range(3)
]
steps = st.tuples(st.sampled_from(ACTIONS), st.integers(0, len(REQUESTS) - 1), st.integers(0, 2**32))
scripts = st.lists(st.lists(steps, min_size=1, max_size=6), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def model(backend) -> Model:
    return Model(backend.engine(eos_gain=6.0), REQUESTS)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scripts=scripts, close_after=st.none() | st.floats(0, 0.5), timeout=st.sampled_from([0.02, PATIENCE_S]))
def test_whatever_callers_do_everybody_gets_what_is_theirs(backend, model, scripts, close_after, timeout):
    with backend.load(backend.folder(eos_gain=6.0), queue_timeout=timeout, **OPTIONS) as engine:

        def caller(script) -> None:
            for action, number, luck in script:
                act(model, engine, action, number, random.Random(luck))

        def close() -> None:
            time.sleep(close_after)  # at any moment
            engine.close()

        targets = [partial(caller, script) for script in scripts]
        run_all(*targets, *([] if close_after is None else [close]))
        if close_after is None:
            gc.collect()
            assert_at_rest(engine)
            assert act(model, engine, "whole", 3, random.Random(0)) in ("eos", "length")
    assert engine.health()["streams"] == 0 and not engine.snapshot().alive


def left_over() -> dict[str, int]:
    """What a soak must not leave behind."""
    for _ in range(3):
        gc.collect()
    with_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        "GPU memory": torch.cuda.memory_allocated() if with_gpu else 0,
    }


@pytest.mark.slow
def test_a_soak_leaves_nothing_behind(backend, model, capsys, caplog):
    """Random callers for SOAK_SECONDS (`make soak`: 5 minutes)."""
    caplog.set_level(logging.CRITICAL, "qwen_megakernel")  # kept log records keep engines, by their tracebacks
    ended = Counter()

    def soak(seconds: float, kinds: int) -> None:
        with backend.load(backend.folder(eos_gain=6.0), **OPTIONS) as engine:
            stop = time.monotonic() + seconds

            def caller(luck: int) -> None:
                rng = random.Random(luck)
                # A busy machine may need longer before everything has happened that can.
                while time.monotonic() < stop or len(ended) < kinds and time.monotonic() < stop + PATIENCE_S:
                    ended[act(model, engine, rng.choice(ACTIONS), rng.randrange(len(REQUESTS)), rng)] += 1

            run_all(*[partial(caller, random.random()) for _ in range(6)], seconds=seconds + 3 * PATIENCE_S)
            gc.collect()
            assert_at_rest(engine)
            ended["frames"] += engine.metrics()["frames"]

    soak(1, kinds=0)
    before = left_over()
    ended.clear()
    soak(SOAK_SECONDS, kinds=7)
    with contextlib.suppress(AssertionError):  # threads end in their own time; what is left is told below
        until(lambda: left_over() == before, 30)
    assert left_over() == before
    assert len(ended) >= 7, ended
    with capsys.disabled():
        print(f" [{SOAK_SECONDS:g} s: {dict(ended)}] ", end="")
