"""What callers, listeners and hardware do to an engine, one by one: docs/reliability.md, row by row."""

import contextlib
import dataclasses
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from probes import ProbedBackend, fail, kill
from waiting import PATIENCE_S, until

from qwen_megakernel import (
    CallbackError,
    EngineClosed,
    EngineDied,
    KernelFault,
    OutOfMemoryError,
    SamplingParams,
    SpeechError,
)
from qwen_megakernel.engine import watchdog
from qwen_megakernel.engine.callbacks import CallbackRunner
from qwen_megakernel.engine.options import Patience
from qwen_megakernel.engine.output import Output

TEXT = "Hello there, how are you today?"
SEEDED = SamplingParams(seed=5)
FAULT = KernelFault("a wait gave up")


@pytest.fixture
def patience() -> Patience:
    """The watchdog's. Until a test lowers it nobody is called stuck or lost."""
    return Patience(device_s=2 * PATIENCE_S, callback_s=2 * PATIENCE_S, look_s=0.05)


def lower(patience: Patience, name: str, seconds: float) -> None:
    object.__setattr__(patience, name, seconds)  # it is frozen, and the engine has it already


@pytest.fixture
def engine(backend, patience):
    with backend.probed(max_streams=3, patience=patience) as engine:
        yield engine


def no_thread(_self) -> None:
    raise RuntimeError("can't start new thread")


def alone(engine, frames: int = 20):
    return engine.generate(TEXT, sampling=SEEDED, max_frames=frames)


def speak_of(vocoder) -> str:
    """The method by which it speaks."""
    return "follow" if vocoder.follows else "push"


# ---------------------------------------------------------------- listeners


def test_a_stuck_listener_fails_its_own_utterance_and_takes_no_slot(engine, patience):
    before, release, heard = alone(engine), threading.Event(), []
    listen = lambda chunk: (heard.append(chunk), release.wait(PATIENCE_S))  # noqa: E731
    stuck = [engine.submit(TEXT, listen, max_frames=9) for _ in range(3)]
    until(lambda: engine.health()["running"] == 0)
    assert engine.health()["streams"] == 3 and np.array_equal(alone(engine).samples, before.samples)
    lower(patience, "callback_s", 0.5)
    for utterance in stuck:
        with pytest.raises(CallbackError, match=r"0\.5 s"):
            utterance.result(timeout=PATIENCE_S)
    assert engine.metrics()["stuck"] == 3 and engine.metrics()["failed"] == 3
    until(lambda: engine.health()["streams"] == 0)
    release.set()
    until(lambda: not any(thread.name == "qwen_megakernel callbacks" for thread in threading.enumerate()))
    assert len(heard) == 3, "who was given up gets no further chunk"
    assert engine.health()["status"] == "ok" and alone(engine).frames == 20


@pytest.mark.parametrize("how", ["stuck", "raises"])
def test_speech_ends_with_its_listener_although_its_text_is_open(engine, patience, how):
    release = threading.Event()

    def listen(_chunk) -> None:
        if how == "raises":
            raise ValueError("its listener")
        release.wait(PATIENCE_S)

    lower(patience, "callback_s", 0.2)
    open_text = engine.submit(on_chunk=listen)
    open_text.push_text(TEXT)
    with pytest.raises((CallbackError, ValueError)):
        open_text.result(timeout=PATIENCE_S)
    until(lambda: engine.snapshot().at_rest)
    release.set()


@pytest.mark.parametrize("how", ["close", "the engine dies"])
def test_a_stuck_listener_is_left_behind_after_the_end_too(engine, patience, how):
    entered, release, ended = threading.Event(), threading.Event(), threading.Event()
    stuck = lambda _chunk: (entered.set(), release.wait(PATIENCE_S))  # noqa: E731
    said = engine.submit(TEXT, stuck, on_end=ended.set, max_frames=3)
    assert entered.wait(PATIENCE_S)
    lower(patience, "callback_s", 0.5)
    if how == "close":
        engine.close()
    else:
        kill(engine)
        with pytest.raises(EngineClosed):
            alone(engine)
    with pytest.raises((CallbackError, EngineClosed)):
        said.result(timeout=PATIENCE_S)
    assert ended.wait(PATIENCE_S) and engine.health()["streams"] == 0
    release.set()


def test_a_stuck_listeners_end_does_not_stop_the_watchdog(engine, patience):
    lower(patience, "callback_s", 0.5)
    lock = threading.Lock()
    lock.acquire()

    def take(*_) -> None:
        with lock:
            pass

    for _ in range(2):
        stuck = engine.submit(TEXT, take, on_end=take, max_frames=3)
        with pytest.raises(CallbackError):
            stuck.result(timeout=PATIENCE_S)
    lock.release()


@pytest.mark.parametrize("at_work", ["a listener", "the device"])
def test_a_process_that_was_stopped_for_hours_takes_nobody_for_stuck(engine, monkeypatch, at_work):
    now, release, collect = [0.0], threading.Event(), engine.probes.decoder.collect

    def an_hour_later() -> float:
        now[0] += 3600
        return now[0]

    def wait(*_args) -> None:
        release.wait(PATIENCE_S)

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=an_hour_later))
    if at_work == "the device":
        engine.probes.decoder.collect = lambda: (wait(), collect())[1]
    utterance = engine.submit(TEXT, wait, max_frames=2)
    until(lambda: engine.health()["running"] == (at_work == "the device"))
    begun = now[0]
    until(lambda: now[0] > begun + 8 * 3600 or engine.health()["status"] != "ok")
    release.set()
    assert utterance.result(timeout=PATIENCE_S).frames == 2 and engine.health()["status"] == "ok"


def test_what_a_callback_raises_while_its_utterance_is_put_together_is_not_lost(engine, monkeypatch):
    assemble = Output.assemble

    assembling = threading.Event()

    def slowly(output, *args):
        assembling.set()
        until(lambda: output._result.error)
        return assemble(output, *args)

    def broken(chunk) -> None:
        assert assembling.wait(PATIENCE_S)
        raise ValueError("the last chunk's listener")

    monkeypatch.setattr(Output, "assemble", slowly)
    with pytest.raises(ValueError, match="last chunk's"):
        engine.submit(TEXT, broken, max_frames=1).result(timeout=PATIENCE_S)
    assert engine.metrics()["failed"] == 1


@pytest.mark.parametrize("ended", [False, True])
def test_without_threads_a_request_with_callbacks_is_refused_and_takes_nothing(engine, monkeypatch, ended):
    """`ended`: before its caller tries to start its thread."""
    hand_over = engine._core.hand_over

    def slowly(sequence, *args, **options):
        hand_over(sequence, *args, **options)
        until(lambda: sequence.result.settled)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        if ended:
            patch.setattr(engine._core, "hand_over", slowly)
        for _ in range(12):
            with pytest.raises(RuntimeError, match="new thread"):
                engine.submit(TEXT, lambda _chunk: None, max_frames=3)
    until(lambda: engine.health()["streams"] == 0)
    assert alone(engine).frames == 20


def test_a_second_start_of_the_callbacks_does_not_take_a_failed_one_for_done(monkeypatch):
    """Engine and caller start the thread at once, and the process has no more threads."""
    tried, fails = threading.Event(), threading.Event()

    def none(_self):
        tried.set()
        fails.wait(PATIENCE_S)
        raise RuntimeError("can't start new thread")

    runner = CallbackRunner(lambda error: None)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(time.sleep, [0.01] * 2))  # its threads are there
        monkeypatch.setattr(runner.thread, "start", partial(none, None))
        first = pool.submit(runner.start)
        assert tried.wait(PATIENCE_S)
        second = pool.submit(runner.start)
        time.sleep(0.02)
        assert not second.done()
        fails.set()
        assert all("new thread" in str(start.exception()) for start in (first, second))


def test_a_slow_listener_keeps_nobody_waiting(engine):
    heard, others_done = [], threading.Event()

    def slow(chunk) -> None:
        others_done.wait(PATIENCE_S)
        heard.append(chunk)

    slow_one = engine.submit(TEXT, slow, chunk_frames=1, max_frames=5)
    for _ in range(3):
        alone(engine, frames=2)
    assert not slow_one.done and not heard
    others_done.set()
    audio = slow_one.result(timeout=PATIENCE_S)
    assert len(heard) == 5 and np.array_equal(np.concatenate([c.samples for c in heard]), audio.samples)


def test_an_unread_iterator_holds_nobody_up_and_keeps_its_chunks(engine):
    unread = [engine.stream(TEXT, sampling=SEEDED, max_frames=20) for _ in range(3)]
    until(lambda: engine.health()["streams"] == 0)
    whole = alone(engine)
    for stream in unread:
        assert np.array_equal(np.concatenate([chunk.samples for chunk in stream]), whole.samples)


# ---------------------------------------------------------------- kernels and the device


def test_two_kernel_faults_in_a_row_end_what_runs_and_are_survived(engine):
    whole, decoder, recovered = alone(engine), engine.probes.decoder, []
    recover = decoder.recover
    decoder.recover = lambda: recovered.append(recover())
    running = [engine.submit(TEXT, max_frames=2000) for _ in range(2)]
    until(lambda: engine.health()["running"] == 2)
    fail(decoder, "collect", FAULT, times=2)
    for call in (*(utterance.result for utterance in running), lambda: alone(engine)):
        with pytest.raises(KernelFault):
            call()
    assert np.array_equal(alone(engine).codes, whole.codes) and len(recovered) == 2
    assert engine.health()["status"] == "ok" and engine.metrics()["kernel_faults"] == 2


@pytest.mark.parametrize("part", ["decoder", "vocoder"])
def test_three_in_a_row_are_the_end(engine, part):
    if part == "vocoder":
        engine.probes.vocoder.recover = lambda: None
    probe = getattr(engine.probes, part)
    fail(probe, "collect" if part == "decoder" else speak_of(probe), FAULT, times=9)
    for _ in range(3):
        with pytest.raises(KernelFault):
            alone(engine)
    until(lambda: engine.health()["status"] == "dead")
    with pytest.raises(EngineDied, match="a wait gave up"):
        alone(engine)


class WithSpare(ProbedBackend):
    """PyTorch has a spare here too: itself."""

    def spare(self):
        return dataclasses.replace(self.real, name="torch", build=None)


@pytest.fixture
def with_spare(backend):
    with backend.probed(max_streams=3, fallback="torch", wrap=WithSpare) as engine:
        yield engine


def test_three_in_a_row_make_pytorch_take_over_where_that_was_asked_for(with_spare):
    engine, device = with_spare, with_spare.probes.device
    whole = alone(engine)
    fail(engine.probes.decoder, "collect", FAULT, times=9)
    for _ in range(3):
        with pytest.raises(KernelFault):
            alone(engine)
    said = [engine.submit(TEXT, sampling=SEEDED, max_frames=20) for _ in range(4)]
    assert all(utterance.result(timeout=PATIENCE_S).frames == 20 for utterance in said)
    if device.type == "cpu":
        assert np.array_equal(said[0].result().codes, whole.codes)
    assert engine.backend == engine.health()["backend"] == "torch" and engine.health()["status"] == "ok"


@pytest.mark.parametrize(
    "method, error, kind, told",
    [
        ("launch", RuntimeError("launch failed"), RuntimeError, "launch failed"),
        ("collect", RuntimeError("frame broke"), RuntimeError, "frame broke"),
        ("start", torch.OutOfMemoryError("Tried to allocate 2.00 GiB"), OutOfMemoryError, "lower max_streams"),
    ],
)
def test_what_fails_once_fails_those_in_it_and_the_engine_goes_on(engine, method, error, kind, told):
    whole = alone(engine)
    fail(engine.probes.decoder, method, error, after=4 if method == "collect" else 0)
    with pytest.raises(kind, match=told):
        alone(engine)
    assert np.array_equal(alone(engine).samples, whole.samples) and engine.health()["status"] == "ok"


@pytest.mark.parametrize("where", ["start", "launch"])
def test_a_lost_device_is_reported_to_all_and_ends_the_engine(engine, monkeypatch, where):
    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.probes.decoder, where, lost)
    monkeypatch.setattr(engine.probes, "check_device", lost)
    said = []
    with contextlib.suppress(EngineClosed):  # it may be dead before all have come
        said += [engine.submit(TEXT)]
        said += [engine.submit(TEXT)]
    for utterance in said:
        with pytest.raises((EngineClosed, RuntimeError), match="illegal memory access"):
            utterance.result(timeout=PATIENCE_S)
    until(lambda: engine.health()["status"] == "dead")
    assert "illegal memory access" in engine.health()["error"]
    with pytest.raises(EngineClosed, match="illegal memory access"):
        engine.submit(TEXT)


@pytest.mark.parametrize("closing, threads", [(False, True), (True, True), (False, False)])
def test_a_device_that_does_not_answer_ends_the_engine_and_nobody_hangs(
    engine, patience, monkeypatch, closing, threads
):
    """`threads`: the process can have more of them."""
    waits, release, collect = threading.Event(), threading.Event(), engine.probes.decoder.collect
    ended = []

    def silent():
        waits.set()
        release.wait(2 * PATIENCE_S)
        return collect()

    monkeypatch.setattr(engine.probes.decoder, "collect", silent)
    said = [engine.submit(TEXT, lambda _chunk: None, on_end=lambda: ended.append(1)) for _ in range(4)]
    assert waits.wait(PATIENCE_S)
    if not threads:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    lower(patience, "device_s", 0.3)
    if closing:
        engine.close()
    try:
        for utterance in said:
            with pytest.raises(EngineClosed, match=r"0\.3 s"):
                utterance.result(timeout=PATIENCE_S)
        until(lambda: len(ended) == 4)
        assert engine.health()["status"] == "dead" and "did not answer" in engine.health()["error"]
        with pytest.raises(EngineClosed):
            engine.submit(TEXT)
        engine.close()
        assert engine.snapshot().alive, "it waits for the device, and close() does not wait for it"
    finally:
        release.set()
        until(lambda: not engine.snapshot().alive)


def test_samples_that_are_no_numbers_are_an_error_and_no_sound(engine, monkeypatch):
    vocoder = engine.probes.vocoder
    name = speak_of(vocoder)
    speak, whole = getattr(vocoder, name), alone(engine)

    def broken(slots, *args):
        said = speak(slots, *args)
        if callable(said):  # test_gpu.py: samples that are no numbers become None there
            return lambda: [None, *said()[1:]]
        said[0] = torch.nan
        return said

    with monkeypatch.context() as patch:
        patch.setattr(vocoder, name, broken)
        with pytest.raises(SpeechError, match="not finite"):
            alone(engine)
    assert np.array_equal(alone(engine).samples, whole.samples), "nothing of it stays"


@pytest.mark.slow
def test_a_prompt_of_no_numbers_is_an_error_and_harms_nobody_else(engine, monkeypatch):
    """In company and in every slot; who speaks there next hears nothing of it."""
    whole, start, broken = alone(engine), engine.probes.decoder.start, SamplingParams(seed=99)

    def breaks(slot, prompt, sampling, *pages) -> None:
        if sampling.seed == broken.seed:
            prompt = dataclasses.replace(prompt, rows=prompt.rows * torch.nan, prefix=None)
        start(slot, prompt, sampling, *pages)

    monkeypatch.setattr(engine.probes.decoder, "start", breaks)
    for _ in range(3):
        others = [engine.submit(TEXT, sampling=SEEDED, max_frames=20) for _ in range(2)]
        failing = engine.submit(TEXT, sampling=broken)
        with pytest.raises(SpeechError, match="not finite"):
            failing.result(timeout=PATIENCE_S)
        assert all(np.array_equal(other.result(timeout=PATIENCE_S).codes, whole.codes) for other in others)
    again = [engine.submit(TEXT, sampling=SEEDED, max_frames=20) for _ in range(3)]
    assert all(np.array_equal(utterance.result(timeout=PATIENCE_S).codes, whole.codes) for utterance in again)
    assert engine.health()["status"] == "ok" and engine.metrics()["failed"] == 3


# ---------------------------------------------------------------- the end


def test_draining_finishes_what_is_open_and_takes_no_more(engine):
    whole = alone(engine, frames=40)
    said = [engine.submit(TEXT, sampling=SEEDED, max_frames=40) for _ in range(4)]
    closing = threading.Thread(target=engine.close, kwargs={"drain_s": PATIENCE_S})
    closing.start()
    until(lambda: engine.health()["status"] != "ok")
    with pytest.raises(EngineClosed):
        engine.submit(TEXT)
    closing.join(timeout=2 * PATIENCE_S)
    assert not closing.is_alive()
    assert all(np.array_equal(utterance.result().samples, whole.samples) for utterance in said)
    assert engine.health()["status"] == "closed"


def test_draining_is_bounded(engine):
    endless = engine.submit(TEXT, max_frames=2000, runaway_guard=False)
    engine.close(drain_s=0.1)
    assert endless.result().finish_reason == "cancelled", "else it would have come to its frame limit"


SIGTERM = """
import signal, sys, threading
from qwen_megakernel import SamplingParams, TTSEngine

engine = TTSEngine.load("demo", backend={backend!r}, queue_timeout=120)

def stop(*_):
    engine.close(drain_s=120)
    done = [utterance.result() for utterance in said]
    sys.exit(0 if all(audio.finish_reason != "cancelled" and audio.frames for audio in done) else 3)

signal.signal(signal.SIGTERM, stop)
said = [engine.submit("Hello my friend, how are you?", sampling=SamplingParams(seed=i)) for i in range(4)]
print("open", flush=True)
threading.Event().wait()
"""


@pytest.mark.slow
def test_sigterm_with_streams_open_drains_and_ends(backend):
    command = [sys.executable, "-c", SIGTERM.format(backend=backend.name)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"open\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors.decode()


BESIDE = """
from qwen_megakernel import TTSEngine

engine = TTSEngine.load("demo", backend="megakernel")
print("speaking", flush=True)
while True:
    for utterance in [engine.submit("Hello my friend, how are you?") for _ in range(8)]:
        utterance.result()
"""


@pytest.mark.gpu
def test_a_process_beside_us_on_the_gpu_may_be_killed(engine):
    if engine.backend != "megakernel":
        pytest.skip("needs the kernel")
    whole = alone(engine)
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", BESIDE], stdout=subprocess.PIPE) as beside:
            try:
                assert beside.stdout.readline() == b"speaking\n"
                assert all(np.array_equal(alone(engine).codes, whole.codes) for _ in range(20))
            finally:
                beside.kill()
        assert all(np.array_equal(alone(engine).samples, whole.samples) for _ in range(20))
    assert engine.health()["status"] == "ok"
