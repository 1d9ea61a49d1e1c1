"""Many texts at once: what `TTSEngine.map` yields, in which order, how far ahead it reads, and how it ends."""

import itertools
import threading

import numpy as np
import pytest
from callers import TEXTS
from waiting import PATIENCE_S, until

from qwen_megakernel import EngineClosed, RequestError, SamplingParams, SpeakerError, TextError
from qwen_megakernel.engine.in_parallel import in_parallel

OPTIONS = {"max_streams": 3, "max_queue": 0, "max_positions": 256}
WRONG = [({"speaker": "ada"}, TextError), ({"text": 5}, TextError), ({"text": "Yes.", "spaker": "ada"}, RequestError)]
WRONG += [(7, RequestError), ({"text": "Yes.", "speaker": "nobody"}, SpeakerError), ({"text": " "}, TextError)]


def requests(count: int) -> list[dict]:
    return [{"text": TEXTS[i % 3], "sampling": SamplingParams(seed=i), "max_frames": 5 + i % 20} for i in range(count)]


@pytest.fixture
def engine(backend):
    with backend.load(backend.folder(eos_gain=6.0), **OPTIONS) as engine:
        yield engine


def test_each_says_what_it_says_alone_in_order(engine):
    asked = requests(14)
    mapped = list(engine.map(asked))
    assert [one.index for one in mapped] == list(range(14)) and not any(one.error for one in mapped)
    for request, one in zip(asked, mapped, strict=True):
        alone = engine.generate(**request, reproducible=True, chunk_frames=8)
        assert np.array_equal(one.audio.codes, alone.codes)
        assert np.array_equal(one.audio.samples, alone.samples), "to the bit"


def test_unordered_every_request_comes_once_and_short_ones_overtake(engine):
    asked = [{"text": TEXTS[1], "max_frames": frames} for frames in (120, 2, 2, 2, 2, 2)]
    indices = [one.index for one in engine.map(asked, ordered=False, runaway_guard=False)]
    assert sorted(indices) == list(range(6)) and indices[0] != 0


def test_options_hold_for_requests_that_have_none_of_their_own(engine):
    mapped = engine.map(["Yes.", {"text": "Yes.", "max_frames": 2}], max_frames=1, sampling=SamplingParams(seed=1))
    assert [one.audio.frames for one in mapped] == [1, 2]


@pytest.mark.parametrize("wrong, kind", WRONG)
def test_a_wrong_request_fails_alone(engine, wrong, kind):
    first, bad, last = engine.map(["Yes.", wrong, "Yes."], max_frames=2)
    assert first.audio.frames and last.audio.frames and first.error is None
    assert type(bad.error) is kind
    with pytest.raises(kind):
        print(bad.audio)


def test_requests_are_taken_no_further_ahead_than_twice_the_slots(engine):
    taken = []

    def endless():
        for seed in itertools.count():
            taken.append(seed)
            yield {"text": "Yes.", "max_frames": 2, "sampling": SamplingParams(seed=seed)}

    mapped = engine.map(endless())
    for number in range(10):
        assert next(mapped).index == number and len(taken) == number + 2 * OPTIONS["max_streams"]
    mapped.close()
    assert engine.health()["streams"] == 0


def test_closing_it_cancels_what_is_open(engine):
    mapped = engine.map({"text": TEXTS[1], "max_frames": n} for n in (1, 200, 200, 200, 200))
    assert next(mapped).index == 0
    mapped.close()
    until(lambda: engine.health()["streams"] == 0)
    assert engine.metrics()["cancelled"] or engine.metrics()["eos"]


def test_it_waits_while_others_have_the_slots(engine):
    others = [engine.submit() for _ in range(3)]
    mapped, heard = engine.map(["Yes.", "Yes."], max_frames=2), []
    thread = threading.Thread(target=lambda: heard.extend(mapped))
    thread.start()
    until(lambda: engine.metrics()["busy"] > 2)
    for other in others:
        other.cancel()
    thread.join(PATIENCE_S)
    assert [one.audio.frames for one in heard] == [2, 2]


def test_a_closed_engine_ends_it(engine):
    mapped = engine.map(itertools.repeat("Yes."), max_frames=2)
    next(mapped)
    engine.close()
    with pytest.raises(EngineClosed):
        list(mapped)


# ---------------------------------------------------------------- in_parallel


@pytest.mark.parametrize("ordered", [True, False])
def test_what_work_or_items_raise_ends_it(ordered):
    def items():
        yield 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(in_parallel(lambda item, _stopped: item, items(), workers=2, ordered=ordered))
    with pytest.raises(KeyError):
        list(in_parallel(lambda item, _stopped: {}[item], range(9), workers=2, ordered=ordered))
    assert not [t for t in threading.enumerate() if t.name.startswith("qwen_megakernel map")]


def test_workers_work_at_once_and_end_when_nobody_wants_more():
    meet, ended = threading.Barrier(3), []

    def work(item, stopped):
        meet.wait(PATIENCE_S)
        if item > 2:
            ended.append(stopped.wait(PATIENCE_S))
        return item

    results = in_parallel(work, range(6), workers=3, ordered=True)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    until(lambda: meet.n_waiting == 0)
    results.close()
    assert all(ended)
