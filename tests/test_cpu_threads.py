"""How many threads PyTorch computes with on a CPU."""

import logging
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from probes import fail, probed
from waiting import PATIENCE_S, until

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.backend import cpu_threads, select
from qwen_megakernel.backend.interfaces import CpuSpeed, LoadedModel
from qwen_megakernel.engine import device_pipeline
from qwen_megakernel.engine.scheduler import Push
from qwen_megakernel.engine.text_path import HeadFinder
from qwen_megakernel.errors import BackendError


class Pretended:
    """A model whose frames take so many seconds with so many threads, by its own clock."""

    def __init__(self, seconds: dict[int, float]):
        self.seconds, self.now, self.tried = seconds, 0.0, []
        self.embeddings = SimpleNamespace(code0=lambda ids: torch.zeros(len(ids), 4))
        nothing = {"start": lambda *_: None, "launch": lambda *_: None, "recover": lambda: None}
        self.decoder = SimpleNamespace(collect=self._compute, **nothing)
        self.vocoder = SimpleNamespace(groups=16, push=lambda *_: None, reset=lambda _: None)

    def _compute(self) -> None:
        self.tried.append(torch.get_num_threads())
        self.now += self.seconds[self.tried[-1]]

    def measure(self, threads: int | None = None) -> CpuSpeed:
        return cpu_threads.measure(self, SamplingParams(), threads, clock=lambda: self.now)


def in_a_thread(call):
    said = []
    thread = threading.Thread(target=lambda: said.append(call()))
    thread.start()
    thread.join()
    return said[0]


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 0.020, 2: 0.016, 4: 0.045}, 1),  # a fifth less is not worth a second core
        ({1: 0.020, 2: 0.011, 4: 0.045}, 2),
        ({1: 0.020, 2: 0.011, 4: 0.006}, 4),
    ],
)
def test_the_fewest_threads_that_are_about_as_fast_as_any(four_threads, seconds, chosen):
    model = Pretended(seconds)
    speed = model.measure()
    assert speed.threads == chosen and set(model.tried) == {1, 2, 4}
    assert speed.seconds == pytest.approx(seconds) and speed.frames_per_s == pytest.approx(1 / seconds[chosen])
    assert f"{1000 * seconds[chosen]:.1f} ms with {chosen} CPU thread" in str(speed)
    assert torch.get_num_threads() == 4, "the caller's number stays"


def test_a_number_that_was_asked_for_is_the_only_one_tried():
    model = Pretended({3: 0.5})
    assert model.measure(3).threads == 3 and set(model.tried) == {3}


def test_a_slow_model_is_not_measured_for_long(four_threads):
    model = Pretended({1: 9.0, 2: 8.0, 4: 5.0})
    assert model.measure().threads == 4
    assert len(model.tried) == 2 * 3, "two frames with each number, once"


def test_a_number_of_threads_is_a_threads_own(four_threads):
    def use_three() -> tuple[int, int]:
        cpu_threads.use_threads(3)
        return torch.get_num_threads(), in_a_thread(torch.get_num_threads)

    assert in_a_thread(use_three) == (3, 4), "threads that begin later are left alone"
    assert torch.get_num_threads() == 4 and in_a_thread(torch.get_num_threads) == 4


def test_where_the_process_has_one_number_it_is_set(monkeypatch):
    process = SimpleNamespace(threads=8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: process.threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(process, "threads", count))
    cpu_threads.use_threads(2)
    assert process.threads == 2


def test_an_engine_computes_with_them_and_takes_as_many_listeners_as_the_cpu_sustains(monkeypatch, caplog):
    monkeypatch.setattr(select, "measure", lambda model, sampling, threads: CpuSpeed(3, {3: 0.030}))
    caplog.set_level(logging.DEBUG, "qwen_megakernel")
    with probed("demo", max_streams=8) as engine:
        seen, launch = [], engine.probes.decoder.real.launch
        engine.probes.decoder.launch = lambda slots: (seen.append(torch.get_num_threads()), launch(slots))
        engine.generate("Hello.", max_frames=2)
        assert set(seen) == {engine.threads} == {3}
        assert engine.health()["sustained"] == 2, "0.9 of 0.08 s / 0.030 s"
    assert "30.0 ms with 3 CPU threads" in caplog.text and "gaps" not in caplog.text


def test_frames_are_computed_beside_a_push_unless_a_listener_waits_for_it(monkeypatch):
    """At most one push waits behind the one that is computed. If frames waited for pushes, this would raise."""
    monkeypatch.setattr(device_pipeline, "runs_out_soon", lambda sequence, now: sequence.output.runs_out is None)
    frames, pushes = [], []
    with probed("demo", max_streams=1) as engine:
        collect, push = engine.probes.decoder.collect, engine.probes.vocoder.push

        def collected():
            frames.append(None)
            return collect()

        def computed(slots, codes):
            number = len(pushes)
            if 0 < number < 7:
                until(lambda: len(frames) == 8 + number + 1)
            time.sleep(0.02)
            pushes.append(len(frames))
            return push(slots, codes)

        engine.probes.decoder.collect, engine.probes.vocoder.push = collected, computed
        audio = engine.generate("Hello there, how are you?", max_frames=15, chunk_frames=(8, 1), runaway_guard=False)
    assert audio.frames == 15 and pushes == [8, *range(10, 16), 15]


def test_sound_goes_out_before_a_prompt_is_computed():
    model = LoadedModel(
        None, SimpleNamespace(width=1, narrow=1), SimpleNamespace(follows=False), None, CpuSpeed(1, {1: 0.02})
    )
    pipeline = device_pipeline.DevicePipeline(model, HeadFinder(), kept_voices=1, clock=lambda: 10.0)
    assert pipeline.has_room and not pipeline.sound_first
    for runs_out, done, room in ((11.0, False, True), (11.0, True, False), (10.08, False, False), (None, False, False)):
        output, result = SimpleNamespace(runs_out=runs_out), SimpleNamespace(settled=False)
        listener = SimpleNamespace(output=output, result=result)
        pipeline.in_flight.append(device_pipeline.Pushed(Push([listener], [8], []), list, lambda done=done: done))
        assert pipeline.has_room == room and pipeline.sound_first
        pipeline.in_flight.clear()


def test_a_thread_that_cannot_get_its_number_fails_the_call(monkeypatch):
    monkeypatch.setattr(device_pipeline, "use_threads", lambda count: 1 / 0)
    thread = device_pipeline.VocoderThread(2)
    with pytest.raises(ZeroDivisionError):
        thread.call(int)
    thread.close()


def test_what_the_vocoder_raises_in_its_thread_ends_its_utterance_only():
    others = threading.enumerate()  # other tests' engines'
    with probed("demo", max_streams=2) as engine:
        fail(engine.probes.vocoder, "push", ZeroDivisionError("no sound"), after=1)
        with pytest.raises(ZeroDivisionError, match="no sound"):
            engine.generate("Hello.", chunk_frames=1)
        assert engine.generate("Hello.").finish_reason == "eos"
        (thread,) = (t for t in threading.enumerate() if t.name == device_pipeline.VOCODER_THREAD and t not in others)
    assert not thread.is_alive()


def test_a_cpu_that_is_too_slow_is_told(monkeypatch, caplog):
    monkeypatch.setattr(select, "measure", lambda model, sampling, threads: CpuSpeed(1, {1: 0.8}))
    with probed("demo") as engine:
        assert engine.health()["sustained"] == 1
    assert "this CPU makes 0.10 s of speech a second" in caplog.text


@pytest.mark.parametrize("threads", [0, -1, True, 2.0, "2", 257])
def test_no_such_number_of_threads(threads):
    with pytest.raises(BackendError, match=r"threads .*1\.\.256"):
        TTSEngine.load("./nowhere", device="cpu", threads=threads)  # before a checkpoint is looked for


def test_threads_are_a_cpus(machine):
    machine((9, 0), 132, "NVIDIA H200")
    with pytest.raises(BackendError, match="threads"):
        TTSEngine.load("./nowhere", device="cuda", threads=2)


@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="PyTorch has one number for all threads")
def test_threads_that_build_prompts_compute_alone(four_threads):
    barrier = threading.Barrier(3, timeout=PATIENCE_S)
    with cpu_threads.prompt_threads(3) as pool:
        counts = [pool.submit(lambda: (barrier.wait(), torch.get_num_threads())[1]) for _ in range(3)]
        assert [count.result() for count in counts] == [1, 1, 1]
        assert torch.get_num_threads() == in_a_thread(torch.get_num_threads) == 4


def test_no_threads_that_build_prompts(monkeypatch):
    start, begun = threading.Thread.start, []

    def third_fails(thread):
        begun.append(thread)
        if sum(one.name.startswith("qwen_megakernel submit") for one in begun) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", third_fails)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        cpu_threads.prompt_threads(4)
    until(lambda: not any(one.is_alive() for one in begun))
