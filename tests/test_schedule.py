"""Whose frame comes next, on a pretended GPU and a pretended clock: what an H200 takes, without one."""

import math
import random
from collections import Counter, deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from waiting import slow_case

from qwen_megakernel.backend.interfaces import PUSH_FRAMES, RECENT_FRAMES, LoadedModel
from qwen_megakernel.backend.sizes import PAGE_POSITIONS
from qwen_megakernel.engine.admission import ENDS
from qwen_megakernel.engine.audio import Stopwatch
from qwen_megakernel.engine.core import EngineCore
from qwen_megakernel.engine.device_pipeline import Launch
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.engine.output import ChunkPlan, Output, Result
from qwen_megakernel.engine.scheduler import SMALL_LAUNCH, Scheduler
from qwen_megakernel.engine.sequence import NO_SLOT, SpeechSequence
from qwen_megakernel.errors import EngineBusy, KernelFault
from qwen_megakernel.model.vocoder import Portion, VocoderState
from qwen_megakernel.sampling_params import SamplingParams

GROUPS, SAMPLES, RATE = 16, 1920, 24000
FRAME_S = SAMPLES / RATE


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
    """0.6B on an H200: a frame of 1 to 8 streams in 1.46 to 1.79 ms, a prompt in 1 ms. A frame's code 0 is its number;
    the ring holds which stream's frame lies where."""

    max_positions = 2048

    def __init__(self, gpu: Gpu, slots: int, width: int, pages: int):
        self.gpu, self.slots, self.pages = gpu, slots, pages
        self.width, self.narrow = width, min(width, 16)
        self.filled = {}  # by page: the stream whose keys and values it holds, and which of its pages it is
        self.streams: dict[int, SimpleNamespace] = {}
        self.ring = [[None] * RECENT_FRAMES for _ in range(slots)]
        self.launches, self.order, self.failing = [], [], None

    def fail(self, where: str, error: Exception) -> None:
        if self.failing == where:
            self.failing = None
            raise error

    def start(self, slot, prompt, sampling, pages, watch):
        self.fail("start", RuntimeError("start"))
        self.gpu.compute(0.3)
        self.gpu.queue(1.0)
        if slot in self.streams:
            self.streams[slot].over = True
        self.streams[slot] = SimpleNamespace(
            left=prompt.frames, rows=len(prompt.trailing), text_open=prompt.text_open, launched=0, over=False,
            pages=pages, position=0,
        )  # fmt: skip
        self.fill(self.streams[slot], len(prompt.rows) - 1)

    def fill(self, stream, positions: int) -> None:
        """Keys and values of its next positions. It must find all before them, and have a page for each."""
        for position in range(stream.position, stream.position + positions) if self.pages else ():
            number, offset = divmod(position, PAGE_POSITIONS)
            if offset == 0:
                self.filled[stream.pages[number]] = stream, number
            assert all(self.filled[page] == (stream, n) for n, page in enumerate(stream.pages[: number + 1]))
        stream.position += positions

    def extend(self, slot, rows, ended):
        self.streams[slot].rows += len(rows)
        self.streams[slot].text_open = not ended

    def launch(self, slots):
        assert len(self.launches) < 4 and 1 <= len(slots) <= self.width and len(set(slots)) == len(slots)
        self.fail("launch", RuntimeError("launch"))
        self.order.append(list(slots))
        frames = []
        for slot in slots:
            stream = self.streams[slot]
            assert not stream.text_open or stream.launched <= stream.rows, "its text row has not come"
            self.ring[slot][stream.launched % RECENT_FRAMES] = stream, stream.launched
            frames.append((stream, stream.launched))
            stream.launched += 1
            self.fill(stream, 1)
        self.gpu.compute(0.05)
        self.launches.append((self.gpu.queue(1.46 + 0.047 * (len(slots) - 1)), frames))

    def collect(self):
        until, frames = self.launches.pop(0)
        self.gpu.wait(until)
        self.gpu.compute(0.02 * len(frames))
        self.fail("collect", RuntimeError("collect"))
        self.fail("fault", KernelFault("pretended"))
        return [self.say(*frame) for frame in frames]

    @staticmethod
    def say(stream, frame: int) -> np.ndarray | None:
        stream.over |= frame >= stream.left
        return None if stream.over else np.full(GROUPS, frame)

    def recover(self):
        self.launches.clear()
        self.streams.clear()


def sound_of(numbers: torch.Tensor) -> torch.Tensor:
    """[...] -> [..., SAMPLES]: loud, and its first sample tells the number."""
    sound = torch.full((*numbers.shape, SAMPLES), 0.5)
    sound[..., ::2] = numbers[..., None] / 4096
    return sound


class Vocoder:
    """A frame's sound tells its number; it reads them in the decoder's ring, where they must still lie."""

    groups, steady = GROUPS, False

    def __init__(self, gpu: Gpu, decoder: Decoder, follows: bool, most_frames: int):
        self.gpu, self.decoder, self.follows, self.most_frames = gpu, decoder, follows, most_frames
        self.pushed, self.given, self.failing = [], {}, None
        self.heard = []  # of each push: its streams, and the frames of each

    fail = Decoder.fail

    def reset(self, slot):
        self.given[slot] = 0

    def save(self, slot):
        return VocoderState({})

    def restore(self, slot, state):
        pass

    def recover(self):
        pass

    def portions(self, codes):
        return [Portion(some, True) for some in codes.split(25)]

    def listen(self, slot, portion):
        self.gpu.queue(1.0)

    def follow(self, slots, first, frames):
        assert all(1 <= n <= PUSH_FRAMES for n in frames) and len(set(slots)) == len(slots)
        assert sum(frames) <= self.most_frames
        self.fail("launch", RuntimeError("follow"))
        sounds = [torch.zeros(n, SAMPLES) for n in frames]
        for row, slot, begin in zip(sounds, slots, first, strict=True):
            assert self.given[slot] == begin, "every frame once, in order"
            self.given[slot] += len(row)
            for i in range(len(row)):
                lies = self.decoder.ring[slot][(begin + i) % RECENT_FRAMES]
                assert lies == (self.decoder.streams[slot], begin + i), "overwritten before it was read"
            row[:] = sound_of(torch.arange(begin, begin + len(row)))
        self.pushed.append(list(frames))
        self.heard.append(([self.decoder.streams[slot] for slot in slots], list(frames)))
        self.gpu.compute(0.02)
        done = self.gpu.queue(0.46 + 0.085 * sum(frames))

        def collect():
            self.gpu.wait(done)
            self.gpu.compute(0.02 * len(slots))
            self.fail("collect", RuntimeError("collect"))
            self.fail("fault", KernelFault("pretended"))
            return [sound.flatten() for sound in sounds]

        return collect

    def push(self, slots, codes):
        self.gpu.compute(0.3 * codes.shape[0] * codes.shape[1])
        return sound_of(codes[:, :, 0]).flatten(1)


class Engine:
    """A core whose loop's turns are taken here."""

    def __init__(
        self, slots=64, max_queue=64, queue_timeout=5.0, *, width=8, most_frames=128, follows=True, pages=0, **options
    ):
        """`pages`: of keys and values, which the slots share; 0: they share none."""
        self.gpu = Gpu()
        self.decoder = Decoder(self.gpu, slots, width, pages)
        self.vocoder = Vocoder(self.gpu, self.decoder, follows, most_frames)
        options |= {"max_streams": slots, "max_queue": max_queue, "queue_timeout": queue_timeout, "kept_voices": 4}
        self.core = EngineCore(
            LoadedModel(None, self.decoder, self.vocoder, lambda: None),
            sample_rate=RATE,
            device=torch.device("cpu"),
            limits=EngineOptions(**options),
            clock=self.gpu.monotonic,
        )
        self.admission, self.loop, self.slots = self.core.admission, self.core.loop, self.core.loop.slots
        self.streams: list[SpeechSequence] = []
        self.refused = 0

    def submit(
        self,
        frames,
        schedule=(1, 2, 4, 8),
        rows=None,
        voice=None,
        max_frames=4000,
        speed=1.0,
        reproducible=False,
        letters=0,
        prompt_rows=20,
        seat=None,
    ) -> SpeechSequence | None:
        """`rows`: of the text, of which more will come; None: it is whole. `letters`: of the text so far, by which the
        runaway guard knows how long speech should take; 0: there is no guard."""
        wanted = {"max_frames": max_frames, "chunk_frames": schedule, "speed": speed, "reproducible": reproducible}
        wanted |= {"runaway_guard": letters > 0, "judge_length": True}
        untouched = {"trim": "none", "silence_s": 0.05, "before_s": 0.0, "after_s": 0.0}
        who = {"seed": 1, "sampling": SamplingParams(seed=1), "conditioning": SimpleNamespace(voice=voice)}
        request = SimpleNamespace(**wanted, **untouched, **who)
        stream = self.core.new_sequence(request, None, None)
        stream.seat = seat
        stream.stopwatch.arrived = self.gpu.now
        stream.add_text("a" * letters)
        trailing = torch.zeros(1 if rows is None else rows, 1)
        before = torch.zeros(prompt_rows, 1)
        prompt = SimpleNamespace(rows=before, trailing=trailing, frames=frames, text_at=0, text_open=rows is not None)
        try:
            self.admission.admit(stream)
        except EngineBusy:
            self.refused += 1
            return None
        self.core.hand_over(stream, prompt, text_complete=rows is None)
        self.streams.append(stream)
        return stream

    def push_text(self, stream: SpeechSequence, rows: int, ended: bool = False, letters: int = 0) -> None:
        stream.add_text("a" * letters)
        stream.input.rows.put((torch.zeros(rows, 1), ended))
        self.admission.wake()

    def run(self, arrivals, until: float = 1e9) -> None:
        """arrivals: (seconds from now, function), sorted."""
        began, arrivals = self.gpu.now, list(arrivals)
        while self.gpu.now - began < until:
            while arrivals and began + arrivals[0][0] <= self.gpu.now:
                arrivals.pop(0)[1]()
            if self.loop.turn():
                self.gpu.compute(0.03)
            elif arrivals:
                self.gpu.now = max(self.gpu.now, began + arrivals[0][0])
            elif self.slots.waiting:
                self.gpu.now = self.slots.waiting[0].deadline
            else:
                return

    def ttfc_ms(self) -> list[float]:
        return sorted(1000 * (s.output.first_chunk - s.stopwatch.arrived) for s in self.streams if s.output.first_chunk)

    def underruns(self) -> int:
        return sum(s.output.lead is not None and s.output.lead < 0 for s in self.streams)


def poisson(rate: float, seconds: float, rng: random.Random) -> list[float]:
    times, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        times.append(now)
    return times


def quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


@pytest.mark.parametrize("rate, p95_ms", [(10, 10), slow_case(20, 15), slow_case(30, 20), (36, 25)])
def test_who_comes_by_chance_is_heard_soon_and_nobody_hears_a_gap(fresh_seed, rate, p95_ms):
    engine = Engine(slots=256)
    engine.run([(t, lambda: engine.submit(63)) for t in poisson(rate, 15, random.Random(fresh_seed))])
    assert quantile(engine.ttfc_ms(), 0.95) < p95_ms and engine.underruns() == engine.refused == 0
    assert all(s.result.audio.finish_reason == "eos" and s.result.audio.frames == 63 for s in engine.streams)


def test_128_live_listeners_hear_no_gap(fresh_seed):
    """Each hears 5 s after 5 s, for 20 s."""
    engine, rng = Engine(slots=128), random.Random(fresh_seed)
    starts = sorted(rng.random() * 5 + 5.04 * turn for turn in range(4) for _ in range(128))
    engine.run([(t, lambda: engine.submit(63)) for t in starts])
    assert engine.underruns() == engine.refused == 0 and quantile(engine.ttfc_ms(), 0.99) < 30


def test_a_crowd_that_comes_at_once_gets_its_first_audio_in_turn_and_no_gap():
    engine = Engine()
    speaking = [engine.submit(200) for _ in range(8)]
    engine.run([(1.0, lambda: [engine.submit(63) for _ in range(56)])])
    assert engine.underruns() == 0
    first = [s.output.first_chunk for s in engine.streams[8:]]
    assert first == sorted(first) and first[-1] - engine.streams[8].stopwatch.arrived < 0.5
    assert all(s.output.lead > 0 for s in speaking)


def test_a_crowd_delays_the_next_frame_by_eight_prompts_at_most():
    engine, started = Engine(), Counter()
    engine.submit(400)
    engine.run([], until=1.0)
    start = engine.decoder.start
    engine.decoder.start = lambda *prompt: (started.update([len(engine.decoder.order)]), start(*prompt))
    engine.run([(0.0, lambda: [engine.submit(63) for _ in range(56)])])
    assert started.total() == 56 and max(started.values()) == 8, "prompts by the launches before them"


@pytest.mark.parametrize("width, hurried", [(16, 1), (256, 4)])
def test_few_prompts_come_before_a_listener_with_less_than_70_ms(width, hurried):
    def prompts(runs_out: float | None, *, starved: bool = False, reason: str | None = None) -> int:
        listener = SimpleNamespace(output=SimpleNamespace(runs_out=runs_out), starved=starved, reason=reason)
        return len(Scheduler(width, 16, most_frames=8).to_prefill(list(range(20)), [listener], 100.0))

    assert prompts(100.069) == hurried
    assert prompts(100.071) == prompts(None) == 8, "a listener with more, and one who has heard nothing"
    assert prompts(100.0, starved=True) == prompts(100.0, reason="eos") == 8, "no frame of theirs waits"


def test_new_callers_come_before_the_lead_of_old_ones():
    """64 that are far ahead of their listeners; the next is heard as if it were nearly alone."""
    engine = Engine(slots=65)
    for _ in range(64):
        engine.submit(400)
    engine.run([], until=3.0)
    assert all(s.output.runs_out - engine.gpu.now > 1.0 for s in engine.streams)
    engine.run([(0.0, lambda: engine.submit(63))], until=0.1)
    new = engine.streams[-1]
    assert new.output.first_chunk - new.stopwatch.arrived < 0.012


def test_many_share_wide_launches_and_who_has_heard_nothing_goes_into_a_quick_one():
    """Up to one and a half times a quick launch's sequences go as quick ones, which are as fast."""
    engine = Engine(slots=101, width=256)

    def first_launch() -> int:
        """How many sequences share the first frame of one that comes now."""
        before = len(engine.decoder.order)
        engine.run([(0.0, lambda: engine.submit(63))], until=0.2)
        return next(len(slots) for slots in engine.decoder.order[before:] if engine.streams[-1].slot in slots)

    some = [engine.submit(400) for _ in range(24)]
    engine.run([], until=1.0)
    assert all(len(slots) <= 16 for slots in engine.decoder.order)
    some += [engine.submit(400) for _ in range(20)]
    engine.run([], until=1.0)
    assert 16 < first_launch() <= SMALL_LAUNCH
    many = [engine.submit(400) for _ in range(55)]
    engine.run([], until=2.0)
    assert max(map(len, engine.decoder.order)) > 90
    assert first_launch() <= 16
    engine.run([])
    assert all(s.result.audio.frames == 400 for s in some + many) and engine.underruns() == 0


def test_whose_listener_runs_out_first_is_served_first():
    engine = Engine(slots=16)
    long = [engine.submit(300) for _ in range(8)]
    engine.run([], until=0.3)
    late = [engine.submit(300) for _ in range(8)]
    engine.run([], until=0.1)
    lead = [s.output.runs_out - engine.gpu.now for s in engine.streams]
    assert max(lead[8:]) < min(lead[:8]) and all(s.launched < 40 for s in late)
    before = [s.launched for s in long]
    engine.run([], until=0.02)
    assert [s.launched for s in long] == before, "who is far ahead waits for who is not"


def test_who_has_time_joins_the_launch_that_is_computed():
    def waits(due: float, *, width: int = 8, heard: bool = True) -> bool:
        """One whose frame is due then, while another's is computed that is due now."""
        output = SimpleNamespace(runs_out=101.0 if heard else None)
        ready = SimpleNamespace(due_at=lambda _frame_s: due, output=output, given=1, launched=50)
        computed = SimpleNamespace(due_at=lambda _frame_s: 100.0)
        return Scheduler(width, 8, most_frames=8).to_launch([ready], [computed], 100.0) == []

    assert waits(100.08) and not waits(100.06), "there is room for both"
    assert waits(100.26, width=1) and not waits(100.24, width=1), "there is none"
    assert waits(100.26, heard=False) and not waits(100.24, heard=False), "who has heard nothing"


def test_the_first_of_each_voice_reads_its_reference():
    running = [SimpleNamespace(reference=[1], voice_digest=voice) for voice in (b"one", b"one", b"two", b"two")]
    assert [Scheduler.reads_reference(one, running) for one in running] == [True, False, True, False]


def test_who_lacks_a_first_chunk_and_few_go_into_quick_launches():
    def launched(count: int, given: int = 1, first_launched: int = 50, urgent: int = 0) -> int:
        """`urgent`: of the others, those whose listener has little audio left."""
        first = SimpleNamespace(given=given, launched=first_launched, output=SimpleNamespace(runs_out=None))
        ends = [100.0 if n < urgent else 101.0 for n in range(count - 1)]
        others = [SimpleNamespace(given=1, launched=50, output=SimpleNamespace(runs_out=end)) for end in ends]
        return len(Scheduler(256, 16, most_frames=8).to_launch([first, *others], [], 100.0))

    assert [launched(count) for count in (1, 16, 17, 24, 25, 300)] == [1, 16, 16, 16, 25, 256]
    assert launched(100, given=0, first_launched=15) == 16 and launched(100, given=0, first_launched=16) == 100
    assert [launched(300, 0, 0, urgent) for urgent in (23, 24, 70, 299)] == [16, 25, 71, 256], "all who are urgent"


def test_the_time_of_a_frame_follows_what_frames_take():
    scheduler = Scheduler(8, 8, most_frames=8)
    for _ in range(100):
        scheduler.frame_took(0.02)
    assert scheduler.frame_s == pytest.approx(0.02, rel=1e-3)


def test_a_part_that_ends_with_a_full_chunk_adds_no_other_one():
    plan = ChunkPlan((1, 2, 4))
    plan.fill(1, short=True)
    assert plan.full_at == 3, "the second chunk has two frames"
    plan.fill(2, short=False)
    assert plan.full_at == 3
    plan.fill(2, short=True)
    assert plan.full_at == 6, "the second one was short"


def test_whose_listener_has_heard_all_runs_out_anew_from_then_on():
    """Not from when it ran out: who was silent for minutes would come before all others for as long."""
    now = [10.0]
    request = SimpleNamespace(chunk_frames=(1,), speed=1.0, trim="none", silence_s=0.0, before_s=0.0, after_s=0.0)
    output = Output(request, Stopwatch(lambda: now[0]), Result(None, None), sample_rate=24_000, groups=1)
    for frame, (now[0], runs_out) in enumerate([(10.0, 10.08), (10.01, 10.16), (20.0, 20.08)]):
        output.codes.append(np.zeros(1, np.int64))
        output.add_sound(np.zeros((1, 1920), np.float32))
        output.hand_out(frame + 1, short=False, last=False)
        assert output.runs_out == pytest.approx(runs_out)


def due_for_vocoder(runs_out: float | None, *, alone: bool = False, missing: int = 8) -> SimpleNamespace:
    output, result = SimpleNamespace(runs_out=runs_out), SimpleNamespace(settled=False)
    state = {"idle": False, "speaking": True, "starved": False, "reason": None, "alone": alone, "missing": missing}
    return SimpleNamespace(output=output, result=result, vocoder_due=lambda short: True, **state)


def test_whose_listener_runs_out_first_goes_to_the_vocoder_first():
    due = [due_for_vocoder(runs_out) for runs_out in (3.0, None, 2.0)]
    pushes, waiting = Scheduler(8, 8, most_frames=8).to_push(due, due, 1.0, wait=False)
    assert [push.sequences for push in pushes] == [[due[1]], [due[2]], [due[0]]] and not waiting


def test_who_goes_alone_shares_no_push_with_those_behind():
    due = [due_for_vocoder(1.0), due_for_vocoder(2.0, alone=True), due_for_vocoder(3.0), due_for_vocoder(4.0)]
    pushes, _ = Scheduler(8, 8, most_frames=16).to_push(due, due, 1.0, wait=False)
    assert [push.sequences for push in pushes] == [[due[0]], [due[1]], due[2:]]


def test_frames_wait_for_a_larger_push_while_nobody_hurries():
    def waiting(count: int, *, most_frames: int = 128, runs_out: float = 2.0, **company) -> int:
        due = [due_for_vocoder(runs_out) for _ in range(count)]
        others = [SimpleNamespace(**{"speaking": True, "starved": False, "reason": None} | company)]
        return len(Scheduler(8, 8, most_frames).to_push(due, due + others, 1.0, wait=True)[1])

    assert waiting(7) == 7 and waiting(8) == 0, "64 frames are enough"
    assert waiting(7, most_frames=0) == waiting(7, runs_out=1.06) == 0
    assert waiting(7, speaking=False) == waiting(7, starved=True) == waiting(7, reason="eos") == 0, "nobody will come"


def test_reproducible_samples_are_pushed_alone_in_the_same_portions_in_any_company(fresh_seed):
    rng, portions = random.Random(fresh_seed), []
    for others in (0, 3, 30):
        engine = Engine()
        comings = sorted((rng.random(), rng.randint(1, 90)) for _ in range(others))
        arrivals = [(t, partial(engine.submit, n, rng.choice([(1, 2, 4, 8), (8,)]))) for t, n in comings]
        engine.run([(0.0, partial(engine.submit, 75, reproducible=True)), *arrivals])
        mine = engine.vocoder.heard[0][0][0]
        with_me = [push for push in engine.vocoder.heard if any(stream is mine for stream in push[0])]
        assert all(len(streams) == 1 for streams, _ in with_me)
        portions.append([frames for _, frames in with_me])
        assert all(s.result.audio.finish_reason == "eos" for s in engine.streams)
    assert portions[0] == portions[1] == portions[2] and portions[0][:4] == [[1], [2], [4], [8]]


def test_reproducible_samples_share_pushes_of_a_steady_vocoder():
    engine = Engine()
    engine.vocoder.steady = True
    for _ in range(4):
        engine.submit(75, reproducible=True)
    engine.run([])
    assert any(len(streams) > 1 for streams, _ in engine.vocoder.heard)
    assert all(s.result.audio.finish_reason == "eos" for s in engine.streams)


def test_reproducible_samples_wait_for_their_text_rather_than_be_cut_short():
    engine = Engine()
    engine.submit(40, (8,), rows=5, reproducible=True)
    engine.run([(0.5, lambda: engine.push_text(engine.streams[0], 50, ended=True))])
    assert [frames for _, frames in engine.vocoder.heard] == [[8]] * 5


def test_who_listens_twice_as_fast_gets_frames_twice_as_fast():
    """One sequence a launch, so that they take turns. All listeners keep the same lead."""
    engine = Engine(slots=8, width=1)
    for n in range(8):
        engine.submit(400, speed=2.0 if n % 4 == 0 else 1.0)
    engine.run([], until=2.0)
    assert engine.underruns() == 0 and all(not s.result.settled for s in engine.streams)
    leads = [s.output.runs_out - engine.gpu.now for s in engine.streams]
    frames = [s.output.handed_frames for s in engine.streams]
    assert max(leads) - min(leads) < 1.0
    assert min(frames[::4]) > 1.4 * max(frames[n] for n in range(8) if n % 4)


def test_long_chunks_fill_by_their_listeners_speed():
    engine = Engine(slots=2, width=1)
    plain, fast = engine.submit(400, (200,)), engine.submit(400, (200,), speed=4.0)
    engine.run([], until=0.15)
    assert plain.output.first_chunk is fast.output.first_chunk is None
    assert fast.launched > 3 * plain.launched > 0


def test_nobody_waits_to_share_a_push_with_speech_at_another_speed():
    """Its frames go through the vocoder one by one, and others' by eight."""
    engine = Engine(slots=4, width=1)
    plain, fast, *_ = [engine.submit(400, speed=speed) for speed in (1.0, 1.5, 1.5, 1.5)]
    engine.run([], until=0.6)
    leads = [s.output.runs_out - engine.gpu.now for s in engine.streams]
    assert not any(s.result.settled for s in engine.streams) and max(leads) - min(leads) < 1.0
    engine.run([])
    assert [1] in engine.vocoder.pushed and [8] in engine.vocoder.pushed
    assert (
        len(fast.result.audio.samples) == round(400 * SAMPLES / 1.5)
        and len(plain.result.audio.samples) == 400 * SAMPLES
    )


def test_a_listener_at_twice_the_speed_takes_the_place_of_two():
    engine = Engine(slots=8)
    engine.admission.sustain(4.6)  # of which live listeners get 0.9: four of them
    first = [engine.submit(63, speed=speed) for speed in (2.0, 1.0, 1.0, 0.5)]
    engine.run([], until=0.01)
    assert [s.slot != NO_SLOT for s in first] == [True, True, True, False]
    engine.run([])
    assert all(s.result.audio.finish_reason == "eos" for s in first)
    slow = [engine.submit(63, speed=0.5) for _ in range(8)]
    engine.run([], until=0.01)
    assert all(s.slot != NO_SLOT for s in slow)
    engine.run([])
    alone = engine.submit(63, speed=4.0)
    engine.admission.sustain(0.5)
    engine.run([])
    assert alone.result.audio.finish_reason == "eos", "alone everybody gets a slot"


@pytest.mark.slow
def test_full_launches_and_large_pushes_under_load():
    engine = Engine()
    for _ in range(64):
        engine.submit(630)
    began, worked = engine.gpu.now, engine.gpu.worked
    engine.run([])
    assert 64 * 630 * FRAME_S / (engine.gpu.now - began) > 200, "seconds of audio a second"
    assert (engine.gpu.worked - worked) / (engine.gpu.now - began) > 0.97, "the GPU does not wait"
    assert sum(map(len, engine.decoder.order)) / len(engine.decoder.order) > 7.9
    assert sum(map(sum, engine.vocoder.pushed)) / len(engine.vocoder.pushed) > 40


@pytest.mark.parametrize("count", [2, 8, 16])
def test_who_came_one_after_the_other_are_soon_launched_together(fresh_seed, count):
    """Two halves by turns take twice as long."""
    engine, rng = Engine(slots=17, width=16), random.Random(fresh_seed)
    engine.run([(at, lambda: engine.submit(126)) for at in sorted(rng.random() * 0.02 for _ in range(count))])
    launches = engine.decoder.order
    assert sum(map(len, launches)) / len(launches) > 0.8 * count
    assert all(s.output.lead > 0 for s in engine.streams)


def test_alone_nobody_waits_for_company():
    engine = Engine()
    stream = engine.submit(63)
    engine.run([])
    assert 1000 * (stream.output.first_chunk - stream.stopwatch.arrived) < 4 and stream.result.audio.frames == 63
    assert stream.result.audio.compute_s < 63 * 0.0022
    assert engine.vocoder.pushed == [[1], [2], [4], *[[8]] * 7]


def test_a_cancelled_stream_costs_no_further_launch(fresh_seed):
    engine, rng = Engine(slots=24), random.Random(fresh_seed)
    for _ in range(24):
        engine.submit(200)
    engine.run([], until=0.2 + rng.random() * 0.1)
    gone = rng.sample(engine.streams, 9)
    for stream in gone:
        engine.core.cancel(stream)
    slots, launches = {s.slot for s in gone}, len(engine.decoder.order)
    engine.run([], until=0.05)
    assert not slots & {slot for launch in engine.decoder.order[launches:] for slot in launch}
    assert all(s.result.done.is_set() and s.result.audio.finish_reason == "cancelled" for s in gone)
    engine.run([])
    assert sorted(engine.slots.free) == list(range(24)) and not engine.loop.pipeline.in_flight


def test_beyond_its_bounds_it_refuses_and_who_waits_too_long_is_told():
    engine = Engine(slots=8, max_queue=4, queue_timeout=0.5)
    for _ in range(13):
        engine.submit(1000)
    assert engine.refused == 1
    engine.run([], until=0.6)
    told = [s for s in engine.streams if s.result.error]
    assert told == engine.streams[8:] and all(isinstance(s.result.error, EngineBusy) for s in told)
    assert engine.admission.counts["timed_out"] == 4 and engine.admission.counts["busy"] == 1


def test_as_many_wait_as_the_queue_holds_where_fewer_run_than_there_are_slots():
    engine = Engine(slots=8, max_queue=3)
    engine.admission.sustain(2.5)  # of which live listeners get 0.9: two of them
    for _ in range(13):
        engine.submit(63)
    assert len(engine.streams) == 5 and engine.refused == 8
    engine.run([])
    for _ in range(13):
        engine.submit(63)
    assert len(engine.streams) == 10, "the places come back, and no others"


# ---------------------------------------------------------------- who must not have more than is theirs


def live_beside(disturb) -> tuple[float, float]:
    """The least lead of 8 live listeners, and a new caller's TTFC in ms, while `disturb(engine)` has its way."""
    engine = Engine(slots=40)
    live = [engine.submit(800) for _ in range(8)]
    engine.run([], until=0.5)
    wake = disturb(engine)
    came = engine.gpu.now
    new = []
    engine.run([(0.0, wake), (0.05, lambda: new.append(engine.submit(63)))], until=20)
    assert engine.gpu.now - came < 20
    return min(s.output.lead for s in live), 1000 * (new[0].output.first_chunk - new[0].stopwatch.arrived)


def paused(engine):
    """16 streams whose text comes again after a minute."""
    streams = [engine.submit(900, rows=10) for _ in range(16)]
    engine.run([], until=60)
    return lambda: [engine.push_text(stream, 900, True) for stream in streams]


@pytest.mark.parametrize("schedule", [None, (1000,), (1, 1000), (1, 100_000)])
def test_whose_text_paused_or_who_wants_long_chunks_does_not_come_before_all_others(schedule):
    long_chunks = lambda engine: lambda: [engine.submit(900, schedule=schedule) for _ in range(16)]  # noqa: E731
    lead, ttfc = live_beside(long_chunks if schedule else paused)
    assert lead > 0 and ttfc < 80


def test_a_paused_stream_does_not_hurry_anybody():
    medians = []
    for count in (0, 1):
        engine = Engine()
        for _ in range(count):
            engine.submit(900, rows=5)
        engine.run([(5.0, lambda engine=engine: [engine.submit(63) for _ in range(56)])])
        medians.append(quantile(engine.ttfc_ms(), 0.5))
    assert medians[1] < 1.1 * medians[0]


def test_what_was_held_for_company_is_handed_out_when_the_text_runs_out():
    engine = Engine(slots=24)
    for _ in range(16):
        engine.submit(3000)
    engine.run([], until=0.5)
    stream = engine.submit(1000, schedule=(4, 16), rows=11)
    engine.run([], until=1.0)
    assert stream.idle and stream.output.handed_frames == 12


# ---------------------------------------------------------------- anything at all


def launches_in_flight(loop) -> int:
    return sum(isinstance(work, Launch) for work in loop.pipeline.in_flight)


@pytest.mark.parametrize("trial", [*range(15), *map(slow_case, range(15, 60))])
def test_whatever_comes_slots_and_places_come_back_and_all_is_said(fresh_seed, trial):
    """Callers, cancels, text in pieces, references, failures of every part, at random; no turn that spins, no rest
    while there is something to do, no frame overwritten in the ring."""
    rng = random.Random(fresh_seed + trial)
    slots, follows = rng.choice((1, 2, 3, 8, 24)), rng.random() < 0.75
    options = {"width": rng.choice((1, 2, 8)), "most_frames": rng.choice((8, 13, 128)), "follows": follows}
    engine = Engine(
        slots=slots, max_queue=rng.choice((0, 3, 20)), queue_timeout=rng.choice((0.0, 0.05, 5.0)), **options
    )
    core, admission, loop, open_text = engine.core, engine.admission, engine.loop, []
    sustained = math.inf
    if rng.random() < 0.3:
        sustained = rng.choice((0.1, 2, 5, 100))
        admission.sustain(sustained)
    places = len(admission.places)
    references = [torch.zeros(n, GROUPS, dtype=torch.int64) for n in (20, 60, 120)]
    voices = [SimpleNamespace(ref_codes=codes, digest=bytes([i])) for i, codes in enumerate(references)]

    def arrive() -> None:
        schedule = rng.choice(((1, 2, 4, 8), (1,), (3,), (2, 9, 1), (16,), (50,), (4, 1, 16), (8,)))
        stream = engine.submit(
            rng.choice((0, 1, 5, 20, 63, 200)),
            schedule,
            rows=rng.choice((None, None, 0, 1, 5)),
            voice=rng.choice((None, None, *voices)),
            max_frames=rng.choice((1, 2, 7, 8, 9, 60, 4000)),
            speed=rng.choice((1.0, 1.0, 1.0, 0.5, 3.0)),
        )
        if stream and not stream.text_complete:
            open_text.append(stream)

    def one_of(streams: list[SpeechSequence]) -> SpeechSequence | None:
        streams = [stream for stream in streams if not stream.result.settled]
        return rng.choice(streams) if streams else None

    def cancel() -> None:
        if stream := one_of(engine.streams):
            core.cancel(stream)

    def text() -> None:
        if stream := one_of(open_text):
            ended = rng.random() < 0.3
            engine.push_text(stream, rng.randint(0, 4), ended)
            if ended:
                open_text.remove(stream)

    def fail_outside() -> None:
        if stream := one_of(engine.streams):
            admission.settle(stream, error=ValueError("its listener"))
            admission.wake()

    def fail() -> None:
        part = rng.choice((engine.decoder, engine.vocoder))
        part.failing = rng.choice(("start", "launch", "collect", "fault"))
        loop.failures.in_a_row = 0

    coming, at = deque(), engine.gpu.now
    for _ in range(rng.randint(5, 120)):
        at += rng.expovariate(rng.choice((20, 200, 1000)))
        coming.append((at, rng.choices((arrive, cancel, text, fail_outside, fail), (10, 2, 6, 1, 1))[0]))
    spins, state = 0, None
    while True:
        while coming and coming[0][0] <= engine.gpu.now:
            coming.popleft()[1]()
        went_on = loop.turn()
        used = [stream.slot for stream in engine.slots.running]
        assert sorted(used + engine.slots.free) == list(range(slots)) and launches_in_flight(loop) <= 2
        assert len(used) <= 1 or sum(s.request.speed for s in engine.slots.running) <= 0.9 * sustained
        before, counted = state, (used, loop.pipeline.in_flight, engine.slots.waiting, admission.open)
        state = (engine.gpu.now, *map(len, counted))
        spins = spins + 1 if went_on and state == before else 0
        assert spins < 50
        if went_on or admission.inbox.qsize():
            continue
        assert not loop.pipeline.in_flight and not loop.held
        assert not (engine.slots.waiting and engine.slots.available(engine.slots.waiting[0]))
        for stream in engine.slots.running:
            assert stream.starved and stream.input.rows.empty()
            assert stream.output.handed_frames == len(stream.output.codes)
        if coming:
            engine.gpu.now = max(engine.gpu.now, coming[0][0])
        elif engine.slots.waiting:
            engine.gpu.now = max(engine.gpu.now, engine.slots.waiting[0].deadline)
        elif not admission.open:
            break
        for stream in [] if coming or engine.slots.waiting else list(admission.open):
            core.cancel(stream) if rng.random() < 0.5 else engine.push_text(stream, 0, True)
    assert not admission.unsettled and len(admission.places) == places
    assert admission.counts["utterances"] == len(engine.streams) == sum(admission.counts[end] for end in ENDS)
    for stream in engine.streams:
        assert stream.result.done.is_set() and (stream.result.error is None) == (stream.result.audio is not None)
        if audio := stream.result.audio:
            numbers = np.arange(audio.frames)
            assert np.array_equal(audio.codes[:, 0], numbers)
            samples, speed = audio.samples, stream.request.speed
            if speed == 1:
                assert np.array_equal(samples.reshape(-1, SAMPLES)[:, 0] * 4096, numbers)
            elif audio.finish_reason == "cancelled":
                assert len(samples) <= round(len(numbers) * SAMPLES / speed)
            else:
                assert len(samples) == round(len(numbers) * SAMPLES / speed)
