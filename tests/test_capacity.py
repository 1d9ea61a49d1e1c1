"""More callers than slots: some wait, within bounds; memory that is not there is named."""

import contextlib
import logging

import numpy as np
import pytest
import torch
from callers import seeded
from waiting import PATIENCE_S, run_all, run_python, until

from qwen_megakernel import BackendError, EngineBusy, OutOfMemoryError
from qwen_megakernel.checkpoint.synthetic import synthetic_config
from qwen_megakernel.choices import WEIGHTS
from qwen_megakernel.engine.memory import Need
from qwen_megakernel.engine.options import EngineOptions

TEXT = "Hello there, how are you today?"


def hold(engine, count: int) -> list:
    """Utterances that keep a slot until they are ended: their text has begun and goes on."""
    held = []
    for _ in range(count):
        utterance = engine.submit()
        utterance.push_text("Hello there my ")
        held.append(utterance)
    until(lambda: engine.health()["running"] == count)
    return held


def test_one_more_than_slots_and_queue_is_refused_at_once(backend):
    with backend.load(max_streams=2, max_queue=3, queue_timeout=60) as engine:
        held = hold(engine, 2)
        waiting = [engine.submit(TEXT, sampling=seeded(i), max_frames=8) for i in range(3)]
        for _ in range(3):
            with pytest.raises(EngineBusy, match="2 streams .*3 more"):
                engine.submit(TEXT)
        assert engine.metrics()["busy"] == 3 and engine.health()["streams"] == 5
        held[0].cancel()
        said = [utterance.result(timeout=PATIENCE_S) for utterance in waiting]
        alone = [engine.generate(TEXT, sampling=seeded(i), max_frames=8) for i in range(3)]
        assert all(np.array_equal(a.codes, b.codes) for a, b in zip(said, alone, strict=True))
        assert said[2].timings.queue > said[0].timings.queue


def test_who_waits_too_long_is_told_and_the_others_go_on(backend):
    with backend.load(max_streams=1, max_queue=4, queue_timeout=0.3) as engine:
        held = hold(engine, 1)
        waiting = [engine.submit(TEXT) for _ in range(3)]
        for utterance in waiting:
            with pytest.raises(EngineBusy, match=r"0\.3 s"):
                utterance.result(timeout=PATIENCE_S)
        assert engine.metrics()["timed_out"] == 3 and engine.health()["queued"] == 0
        held[0].push_text("friend and more.")
        held[0].end_text()
        assert engine.submit(TEXT, max_frames=3).cancel() is None
        held[0].cancel()
        assert held[0].result(timeout=PATIENCE_S).frames > 0
        until(lambda: engine.health()["running"] == 0)  # its slot is given back behind its result
        assert engine.generate(TEXT, max_frames=3).frames == 3


def test_a_busy_slot_does_not_stretch_the_time_limit(backend):
    """The one in the slot speaks all the time, so that the engine never rests."""
    with backend.load(max_streams=1, queue_timeout=0.2) as engine:
        speaking = engine.submit(TEXT, max_frames=2000)
        with pytest.raises(EngineBusy):
            engine.generate(TEXT)
        assert not speaking.done
        speaking.cancel()


def test_waiting_can_be_cancelled_and_closed(backend):
    with backend.load(max_streams=1, queue_timeout=60) as engine:
        held = hold(engine, 1)
        waiting = [engine.submit(TEXT) for _ in range(3)]
        waiting[1].cancel()
        assert waiting[1].result(timeout=PATIENCE_S).finish_reason == "cancelled" and not waiting[0].done
        run_all(engine.close)
        for utterance in (held[0], waiting[0], waiting[2]):
            assert utterance.done and utterance.result().finish_reason == "cancelled"


def test_who_comes_and_goes_does_not_lengthen_the_queue(backend):
    with backend.load(max_streams=1, max_queue=2, queue_timeout=60) as engine:
        (held,) = hold(engine, 1)
        for _ in range(50):
            with contextlib.suppress(EngineBusy):
                engine.submit(TEXT).cancel()
        until(lambda: engine.health()["streams"] <= 1)
        assert engine.health()["queued"] == 0 and engine.health()["streams"] == 1
        held.cancel()
    assert engine.health()["running"] == engine.health()["queued"] == 0


def test_an_utterance_without_text_takes_a_place_but_no_slot(backend):
    with backend.load(max_streams=1, max_queue=2) as engine:
        silent = [engine.submit() for _ in range(2)]
        assert engine.generate(TEXT, max_frames=3).frames == 3
        until(lambda: engine.health()["running"] == 0)  # its slot is given back behind its result
        assert engine.health()["streams"] == 2
        spoken = engine.submit()
        with pytest.raises(EngineBusy):
            engine.submit()
        for utterance in (*silent, spoken):
            utterance.cancel()


def test_the_memory_of_the_slots_is_printed_at_load(backend, caplog):
    caplog.set_level(logging.DEBUG, "qwen_megakernel")
    with backend.load(max_streams=3, max_positions=640) as engine:
        stack = engine.config.talker.stack
        size = 3 * 640 * 2 * stack.num_layers * stack.num_kv_heads * stack.head_dim
        size *= 2 if backend.name == "megakernel" else 4
    assert "3 slots of 640 positions" in caplog.text and f"{size / 2**20:.1f} MiB for keys and values" in caplog.text


def test_memory_that_the_machine_has_not_names_the_setting_to_lower(backend):
    told = r"8 slots \(max_streams\) of 10{12} positions .* lower max_streams .*: not one slot of that size fits"
    with pytest.raises(OutOfMemoryError, match=told):
        backend.load(max_positions=10**12)
    assert issubclass(OutOfMemoryError, BackendError)


def test_too_many_slots_are_refused_with_the_number_that_fits(backend, monkeypatch):
    with backend.load(max_streams=1) as engine:
        config, limits = engine.config, EngineOptions(max_streams=10**6)
    dtype = torch.bfloat16 if backend.name == "megakernel" else torch.float32
    need = Need.of(config, dtype, frozenset(), limits)
    stack = config.talker.stack
    assert need.slot == 2048 * 2 * stack.num_layers * stack.num_kv_heads * stack.head_dim * dtype.itemsize
    memory = 2 * need.talker + need.vocoder + 2**30 + 5 * need.slot
    fits = need.slots_in(memory)
    assert fits >= 5 and need.slots_in(0) == 0
    for more in (-(2**28), 2**30):  # below and above what the vocoder's larger pushes take
        assert need.slots_in(memory + more + need.slot) == need.slots_in(memory + more) + 1
    monkeypatch.setattr("qwen_megakernel.engine.memory._memory", lambda _device: memory)
    with pytest.raises(OutOfMemoryError, match=rf"10{{6}} slots .*{fits} slots of 2048 positions"):
        backend.load(max_streams=10**6)


@pytest.mark.slow
@pytest.mark.parametrize("size, weights, gib", [("0.6b", "fp8", 3.6), ("1.7b", "fp8", 7.5), ("1.7b", "bf16", 7.5)])
def test_one_slot_fits_a_small_card(size, weights, gib):
    """What cards of 4 and 8 GB leave to a process."""
    need = Need.of(synthetic_config(size), torch.bfloat16, WEIGHTS[weights], EngineOptions(max_streams=1))
    assert need.slots_in(int(gib * 2**30)) >= 1


LIMITED = """
import sys, torch
from qwen_megakernel import TTSEngine

total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(float(sys.argv[3]) * 2**30 / total)
with TTSEngine.load(sys.argv[1], backend="megakernel", weights=sys.argv[2], max_streams=1) as engine:
    print(engine.generate("Hello there.", max_frames=4).frames)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("size, weights, gib", [("0.6b", "fp8", 3.0), ("1.7b", "bf16", 6.9)])
def test_one_slot_speaks_on_a_small_card(tiny, size, weights, gib):
    """Cards of 4 and 8 GB, of which a CUDA context takes half a gigabyte."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs a Hopper GPU")
    folder = tiny("custom_voice", size=size, codec="real", eos_gain=0.0)
    assert run_python(LIMITED, str(folder), weights, str(gib)) == "4\n"


def test_memory_that_others_have_taken_names_it_too(backend, monkeypatch):
    def full(*_args, **_kwargs):
        if backend.name == "torch":
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return torch.empty(2**50, device="cuda")

    monkeypatch.setattr("qwen_megakernel.backend.select.Backend.vocoder", full)
    with pytest.raises(OutOfMemoryError, match=r"no room for .* 5 slots \(max_streams\) .* lower max_streams"):
        backend.load(max_streams=5)


def test_other_failures_at_load_are_not_called_memory(backend, monkeypatch):
    def broken(*_args, **_kwargs):
        raise RuntimeError("something else")

    monkeypatch.setattr("qwen_megakernel.backend.select.Backend.vocoder", broken)
    with pytest.raises(RuntimeError, match="something else"):
        backend.load()
    assert torch.zeros(1).sum() == 0
