"""Pace: how many listeners get slots follows what the device makes, not what it made at load."""

import random

import pytest
from test_schedule import Engine

from qwen_megakernel.engine import pace
from qwen_megakernel.engine.admission import Admission


@pytest.fixture(autouse=True)
def measured(monkeypatch, device_speed):
    monkeypatch.setattr(pace, "_WINDOW_S", 2.0)


def test_a_device_that_was_slow_at_load_soon_takes_all():
    engine = Engine(slots=64, max_queue=256)
    engine.admission.sustain(0.3)
    assert engine.admission.running_limit == 1
    for _ in range(128):
        engine.submit(63)
    engine.run([], until=10.0)
    assert engine.admission.running_limit == 64 and engine.admission.sustained > 100


def test_a_device_that_gets_slow_takes_fewer():
    engine = Engine(slots=64, max_queue=1024, queue_timeout=86_400.0, width=1)
    engine.admission.sustain(10_000.0)
    launch = engine.decoder.launch

    def slow(*args):
        engine.gpu.now += 0.02
        return launch(*args)

    engine.decoder.launch = slow
    for _ in range(500):
        engine.submit(63)
    engine.run([])
    assert 1 <= engine.admission.running_limit < 8, "a frame of 80 ms takes more than 20"


def test_places_follow_the_limit(fresh_seed):
    rng = random.Random(fresh_seed)
    admission, taken = Admission(8, 4), []
    for _ in range(500):
        act = rng.random()
        if act < 0.2:
            admission.sustain(rng.uniform(0.1, 12))
        elif act < 0.6 and admission.places:
            taken.append(admission.places.pop())
        elif taken:
            taken.pop()
            admission.free_place()
        most = admission.running_limit + 4
        assert len(admission.places) == max(0, most - len(taken))
