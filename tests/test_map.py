"""Many texts at once: what `TTSEngine.map` yields, in which order, how far ahead it reads, and how it ends."""

import itertools
import random
import threading

import numpy as np
import pytest
from callers import TEXTS
from waiting import PATIENCE_S, until

from qwen_megakernel import (
    EngineBusy,
    EngineClosed,
    NoWordsError,
    RequestError,
    SamplingParams,
    SpeakerError,
    TextError,
)
from qwen_megakernel.speech.jobs import JobResults

OPTIONS = {"max_streams": 3, "max_queue": 0, "max_positions": 256}
WRONG = [({"speaker": "ada"}, TextError), ({"text": 5}, TextError), ({"text": "Yes.", "spaker": "ada"}, RequestError)]
WRONG += [(7, RequestError), ({"text": "Yes.", "speaker": "nobody"}, SpeakerError), ({"text": " "}, NoWordsError)]


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


def test_closing_it_cancels_what_is_open(backend):
    with backend.load(max_streams=3, max_queue=0, max_positions=512) as engine:  # whose speech does not end by itself
        mapped = engine.map([{"text": "Yes.", "max_frames": 1}, *["Yes."] * 4], runaway_guard=False)
        assert next(mapped).index == 0
        mapped.close()
        assert engine.health()["streams"] == 0 and engine.metrics()["cancelled"] == 3


def test_it_waits_while_others_have_the_slots(engine):
    waits_for([engine.submit() for _ in range(3)], engine, "busy")


def waits_for(others, engine, counted: str) -> None:
    """`map` begins again and again, which the engine counts, and speaks once the others are gone."""
    mapped, heard = engine.map(["Yes.", "Yes."], max_frames=2), []
    thread = threading.Thread(target=lambda: heard.extend(mapped))
    thread.start()
    until(lambda: engine.metrics()[counted] > 2)
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


# ---------------------------------------------------------------- jobs


class Waits:
    """What a job waits for. `end` ends it, from any thread."""

    def __init__(self, name: int):
        self.name, self.ended, self.cancelled = name, threading.Event(), False

    def begin(self, tell):
        self._tell = tell
        return self

    def end(self):
        self.ended.set()
        self._tell()

    def cancel(self):
        self.cancelled = True
        self.end()

    def result(self):
        assert self.ended.wait(PATIENCE_S)
        return self.name


def runs() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("qwen_megakernel map")]


@pytest.mark.parametrize("ordered", [True, False])
def test_what_jobs_or_their_source_raise_ends_them(ordered):
    def job(number):
        yield lambda tell: {}[number]

    def source():
        yield job(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(JobResults(source(), at_once=2, ordered=ordered))
    with pytest.raises(KeyError):
        list(JobResults(map(job, range(9)), at_once=2, ordered=ordered))
    assert not runs()


@pytest.mark.parametrize("ordered", [True, False])
def test_no_more_jobs_are_open_than_wanted_and_results_keep_their_order(ordered, fresh_seed):
    rng, open_, most = random.Random(fresh_seed), set(), []
    lock, over = threading.Lock(), threading.Event()

    def job(number):
        said = []
        for _ in range(rng.randrange(4)):
            work = Waits(rng.random())

            def begin(tell, work=work):
                with lock:
                    open_.add(work.begin(tell))
                    most.append(len(open_))
                return work

            said.append((yield begin) == work.name)
        return number, all(said)

    def end_some():
        while not over.is_set():
            with lock:
                work = open_.pop() if open_ else None
            if work:
                work.end()

    thread = threading.Thread(target=end_some)
    thread.start()
    try:
        results = list(JobResults(map(job, range(40)), at_once=3, ordered=ordered))
    finally:
        over.set()
        thread.join(PATIENCE_S)
    assert all(right for _, right in results) and max(most) <= 3
    numbers = [number for number, _ in results]
    assert (numbers if ordered else sorted(numbers)) == list(range(40))


def test_an_error_reaches_the_job_which_may_go_on():
    class Fails(Waits):
        def result(self):
            raise TextError("no")

    def fails_later(tell):
        work = Fails(0).begin(tell)
        work.end()
        return work

    def fails_at_once(tell):
        tell()  # as an utterance of an engine that is closed meanwhile
        raise TextError("no")

    def job(number, begin):
        with pytest.raises(TextError):
            yield begin
        work = Waits(number)

        def ends_later(tell):
            threading.Timer(0.01, work.begin(tell).end).start()
            return work

        return (yield ends_later)

    jobs = [job(1, fails_later), job(2, fails_at_once)]
    assert list(JobResults(jobs, at_once=1, ordered=True)) == [1, 2]


def test_who_finds_no_room_begins_later():
    class Waited(Waits):
        def result(self):
            raise EngineBusy("no stream became free")

    works = iter([EngineBusy("full"), Waited(6), EngineBusy("full"), Waits(7)])

    def begin(tell):
        work = next(works)
        if isinstance(work, EngineBusy):
            raise work
        work.begin(tell).end()
        return work

    def job():
        return (yield begin)

    assert list(JobResults([job()], at_once=1, ordered=True)) == [7]


def test_it_waits_longer_than_a_queue_lets_anybody_wait(backend):
    options = OPTIONS | {"max_queue": 2, "queue_timeout": 0.05}
    with backend.load(backend.folder(), **options) as engine:
        others = [engine.submit(sampling=SamplingParams(do_sample=False)) for _ in range(3)]
        for other in others:
            other.push_text("Hello there. ")  # it has a slot, and keeps it while its text is open
        until(lambda: not engine.snapshot().free_slots)
        waits_for(others, engine, "timed_out")


def test_closing_it_cancels_what_jobs_wait_for():
    works = [Waits(number) for number in range(9)]

    def job(work):
        return (yield work.begin)

    results = JobResults(map(job, works), at_once=3, ordered=True)

    def end_the_first():
        until(lambda: hasattr(works[0], "_tell"))
        works[0].end()

    thread = threading.Thread(target=end_the_first)
    thread.start()
    assert next(results) == 0
    thread.join(PATIENCE_S)
    until(lambda: hasattr(works[3], "_tell"))
    results.close()
    assert [work.cancelled for work in works] == [False, True, True, True, *[False] * 5] and not runs()
    assert not list(results), "as of any closed iterator"


def test_dropping_it_does_not_wait():
    """The garbage collector may drop it in the thread that its jobs wait for."""
    dropped, in_time = threading.Event(), []

    class Slow(Waits):
        def cancel(self):
            in_time.append(dropped.wait(5.0))
            super().cancel()

    def job(work):
        return (yield work.begin)

    class Done(Waits):
        def begin(self, tell):
            super().begin(tell).end()
            return self

    slow = Slow(1)
    results = JobResults(map(job, [Done(0), slow]), at_once=2, ordered=True)
    assert next(results) == 0
    until(lambda: hasattr(slow, "_tell"))
    del results
    dropped.set()
    until(lambda: in_time)
    assert in_time == [True]
