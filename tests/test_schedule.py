"""Whose frame comes next, on a pretended GPU and a pretended clock: what an H200 takes, without one."""

import random
from types import SimpleNamespace

import pytest
import torch

from qwen_megakernel import owner as owner_module
from qwen_megakernel import stream as stream_module
from qwen_megakernel.config import SamplingParams
from qwen_megakernel.errors import EngineBusy
from qwen_megakernel.owner import Owner
from qwen_megakernel.stream import Stream

GROUPS, SAMPLES, RATE = 16, 1920, 24000
FRAME_S = SAMPLES / RATE
CODES = torch.zeros(GROUPS, dtype=torch.int64)


class Gpu:
    """Work in the order in which it was queued, and a clock that goes on when somebody waits or computes."""

    def __init__(self):
        self.now, self.free_at, self.worked = 100.0, 0.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def compute(self, ms: float) -> None:
        self.now += ms / 1000

    def queue(self, ms: float) -> float:
        self.free_at = max(self.now, self.free_at) + ms / 1000
        self.worked += ms / 1000
        return self.free_at

    def wait(self, until: float) -> None:
        self.now = max(self.now, until) + 1e-5


class Decoder:
    """0.6B on an H200: a frame of 1 to 8 streams in 1.46 to 1.79 ms, a prompt in 1 ms."""

    width = 8
    max_positions = 2048

    def __init__(self, gpu: Gpu, slots: int):
        self.gpu, self.slots = gpu, slots
        self.left = [0] * slots
        self.launches, self.order = [], []

    def start(self, slot, prompt, sampling):
        self.gpu.compute(0.3)
        self.gpu.queue(1.0)
        self.left[slot] = prompt.frames

    def launch(self, slots):
        assert len(self.launches) < 4 and len(slots) <= self.width
        self.order.append(list(slots))
        said = []
        for slot in slots:
            said.append(CODES if self.left[slot] > 0 else None)
            self.left[slot] -= 1
        self.gpu.compute(0.05)
        self.launches.append((self.gpu.queue(1.46 + 0.047 * (len(slots) - 1)), said))

    def collect(self):
        until, said = self.launches.pop(0)
        self.gpu.wait(until)
        self.gpu.compute(0.02 * len(said))
        return said


class Vocoder:
    follows, together, groups = True, 8, GROUPS

    def __init__(self, gpu: Gpu):
        self.gpu, self.pushed = gpu, []

    def reset(self, slot):
        pass

    def follow(self, slots, first, frames):
        total = len(slots) * frames
        self.pushed.append((len(slots), frames))
        self.gpu.compute(0.02)
        done = self.gpu.queue(0.55 + 0.117 * total if total <= 16 else 0.15 * total)

        def collect():
            self.gpu.wait(done)
            self.gpu.compute(0.02 * len(slots))
            return torch.zeros(len(slots), frames * SAMPLES)

        return collect


class Engine:
    """An owner whose turns are taken here."""

    def __init__(self, monkeypatch, slots: int = 64, max_queue: int = 64, queue_timeout: float = 5.0):
        self.gpu = Gpu()
        for module in (owner_module, stream_module):
            monkeypatch.setattr(module, "time", self.gpu)
        self.decoder, self.vocoder = Decoder(self.gpu, slots), Vocoder(self.gpu)
        options = {"sample_rate": RATE, "max_queue": max_queue, "queue_timeout": queue_timeout, "kept_voices": 4}
        self.owner = Owner(self.decoder, self.vocoder, device=torch.device("cpu"), **options)
        self.streams: list[Stream] = []
        self.refused = 0

    def submit(self, frames: int, schedule=(1, 2, 4, 8)) -> Stream | None:
        request = SimpleNamespace(
            sampling=SamplingParams(seed=1), max_frames=4096, voice=None, chunk_frames=schedule, runaway_guard=False
        )
        stream = Stream(request, None)
        stream.arrived = self.gpu.now
        prompt = SimpleNamespace(rows=torch.zeros(20, 1), trailing=torch.zeros(1, 1), frames=frames)
        try:
            self.owner.admit(stream)
        except EngineBusy:
            self.refused += 1
            return None
        self.owner.speak(stream, prompt, text_complete=True)
        self.streams.append(stream)
        return stream

    def run(self, arrivals, until: float = 1e9) -> None:
        """arrivals: (seconds from now, function), sorted."""
        began, arrivals = self.gpu.now, list(arrivals)
        while self.gpu.now - began < until:
            while arrivals and began + arrivals[0][0] <= self.gpu.now:
                arrivals.pop(0)[1]()
            if self.owner._turn():
                self.gpu.compute(0.03)
            elif arrivals:
                self.gpu.now = max(self.gpu.now, began + arrivals[0][0])
            elif self.owner._waiting:
                self.gpu.now = self.owner._waiting[0].deadline
            else:
                return

    def ttfc_ms(self) -> list[float]:
        return sorted(1000 * (s.first_chunk - s.arrived) for s in self.streams if s.first_chunk)

    def underruns(self) -> int:
        return sum(s.lead is not None and s.lead < 0 for s in self.streams)


@pytest.fixture
def make(monkeypatch):
    return lambda **options: Engine(monkeypatch, **options)


def poisson(rate: float, seconds: float, rng: random.Random) -> list[float]:
    times, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        times.append(now)
    return times


def quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


@pytest.mark.parametrize("rate, p95_ms", [(10, 10), (20, 15), (30, 20), (36, 25)])
def test_who_comes_by_chance_is_heard_soon_and_nobody_hears_a_gap(make, fresh_seed, rate, p95_ms):
    engine = make(slots=256)
    engine.run([(t, lambda: engine.submit(63)) for t in poisson(rate, 15, random.Random(fresh_seed))])
    assert quantile(engine.ttfc_ms(), 0.95) < p95_ms and engine.underruns() == engine.refused == 0
    assert all(s.audio.finish_reason == "eos" and s.audio.frames == 63 for s in engine.streams)


def test_128_live_listeners_hear_no_gap(make, fresh_seed):
    """Each hears 5 s after 5 s, for 20 s."""
    engine, rng = make(slots=128), random.Random(fresh_seed)
    starts = sorted(rng.random() * 5 + 5.04 * turn for turn in range(4) for _ in range(128))
    engine.run([(t, lambda: engine.submit(63)) for t in starts])
    assert engine.underruns() == engine.refused == 0 and quantile(engine.ttfc_ms(), 0.99) < 30


def test_a_crowd_that_comes_at_once_gets_its_first_audio_in_turn_and_no_gap(make):
    engine = make()
    speaking = [engine.submit(200) for _ in range(8)]
    engine.run([(1.0, lambda: [engine.submit(63) for _ in range(56)])])
    assert engine.underruns() == 0
    first = [s.first_chunk for s in engine.streams[8:]]
    assert first == sorted(first) and first[-1] - engine.streams[8].arrived < 0.5
    assert all(s.lead > 0 for s in speaking)


def test_new_callers_come_before_the_lead_of_old_ones(make):
    """64 that are far ahead of their listeners; the next is heard as if it were nearly alone."""
    engine = make(slots=65)
    for _ in range(64):
        engine.submit(400)
    engine.run([], until=3.0)
    assert all(s.runs_out - engine.gpu.now > 1.0 for s in engine.streams)
    engine.run([(0.0, lambda: engine.submit(63))], until=0.1)
    new = engine.streams[-1]
    assert new.first_chunk - new.arrived < 0.012


def test_whose_listener_runs_out_first_is_served_first(make):
    engine = make(slots=16)
    long = [engine.submit(300) for _ in range(8)]
    engine.run([], until=0.3)
    late = [engine.submit(300) for _ in range(8)]
    engine.run([], until=0.1)
    lead = [s.runs_out - engine.gpu.now for s in engine.streams]
    assert max(lead[8:]) < min(lead[:8]) and all(s.launched < 40 for s in late)
    before = [s.launched for s in long]
    engine.run([], until=0.02)
    assert [s.launched for s in long] == before, "who is far ahead waits for who is not"


def test_full_launches_and_pairs_of_pushes_under_load(make):
    engine = make()
    for _ in range(64):
        engine.submit(630)
    began, worked = engine.gpu.now, engine.gpu.worked
    engine.run([])
    assert 64 * 630 * FRAME_S / (engine.gpu.now - began) > 200, "seconds of audio a second"
    assert (engine.gpu.worked - worked) / (engine.gpu.now - began) > 0.97, "the GPU does not wait"
    assert sum(map(len, engine.decoder.order)) / len(engine.decoder.order) > 7.9
    alone = sum(pushed == (1, 8) for pushed in engine.vocoder.pushed)
    assert alone < 0.05 * len(engine.vocoder.pushed)


def test_alone_nobody_waits_for_company(make):
    engine = make()
    stream = engine.submit(63)
    engine.run([])
    assert 1000 * (stream.first_chunk - stream.arrived) < 4 and stream.audio.frames == 63
    assert stream.audio.compute_s < 63 * 0.0022
    assert engine.vocoder.pushed == [(1, 1), (1, 2), (1, 4), *[(1, 8)] * 7]


def test_a_cancelled_stream_costs_no_further_launch(make, fresh_seed):
    engine, rng = make(slots=24), random.Random(fresh_seed)
    for _ in range(24):
        engine.submit(200)
    engine.run([], until=0.2 + rng.random() * 0.1)
    gone = rng.sample(engine.streams, 9)
    for stream in gone:
        engine.owner.cancel(stream)
    slots, launches = {s.slot for s in gone}, len(engine.decoder.order)
    engine.run([], until=0.05)
    assert not slots & {slot for launch in engine.decoder.order[launches:] for slot in launch}
    assert all(s.done.is_set() and s.audio.finish_reason == "cancelled" for s in gone)
    engine.run([])
    assert sorted(engine.owner._free) == list(range(24)) and not engine.owner._flying


def test_beyond_its_bounds_it_refuses_and_who_waits_too_long_is_told(make):
    engine = make(slots=8, max_queue=4, queue_timeout=0.5)
    for _ in range(13):
        engine.submit(1000)
    assert engine.refused == 1
    engine.run([], until=0.6)
    told = [s for s in engine.streams if s.error]
    assert told == engine.streams[8:] and all(isinstance(s.error, EngineBusy) for s in told)
    assert engine.owner.counts["timed_out"] == 4 and engine.owner.counts["busy"] == 1
