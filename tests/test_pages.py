"""Pages of keys and values that utterances share, on the pretended GPU of test_schedule.py: none leaks, each has one
owner, nobody lacks one, and who comes later changes nothing of what is said."""

from collections import deque
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule import Decoder, Engine, Vocoder

from qwen_megakernel import BackendError, EngineBusy, OutOfMemoryError, TTSEngine
from qwen_megakernel.backend.interfaces import LoadedModel
from qwen_megakernel.backend.sizes import PAGE_POSITIONS
from qwen_megakernel.checkpoint.synthetic import synthetic_config
from qwen_megakernel.engine.device_pipeline import DevicePipeline
from qwen_megakernel.engine.memory import Need, kv_bytes, shared_pages, told_of_memory
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.engine.runaway import RunawayGuard
from qwen_megakernel.engine.sequence import SpeechSequence
from qwen_megakernel.engine.text_path import HeadFinder
from qwen_megakernel.errors import KernelFault

SLOT_PAGES = 4
POSITIONS = SLOT_PAGES * PAGE_POSITIONS - 10
LISTENER = ValueError("its listener")


def check_pages(engine: Engine) -> None:
    slots = engine.slots
    held = [page for stream in slots.running for page in stream.pages]
    assert sorted(held + slots.free_pages) == list(range(slots.pages)), "each page is free or has one owner"
    assert slots.filled_pages <= slots.reserved_pages == len(held)
    for stream in slots.running:
        assert stream.launched <= stream.longest
        assert len(stream.pages) * PAGE_POSITIONS >= stream.positions(stream.longest)


@cache
def said_alone(frames: int, letters: int, max_frames: int, prompt_rows: int) -> tuple[int, str]:
    engine = Engine(slots=1, max_positions=POSITIONS)
    stream = engine.submit(frames, letters=letters, max_frames=max_frames, prompt_rows=prompt_rows)
    engine.run([])
    return stream.result.audio.frames, stream.result.audio.finish_reason


ARRIVAL = st.fixed_dictionaries(
    {
        "frames": st.sampled_from((0, 1, 63, 120, 400, 400)),
        "letters": st.sampled_from((0, 1, 1, 10, 30)),
        "max_frames": st.sampled_from((1, 60, 4000, 4000)),
        "prompt_rows": st.sampled_from((1, 20, 64, 65, 130)),
        "rows": st.sampled_from((None, None, 0, 1, 5)),
    }
)
WHICH = st.integers(0, 99)
EVENT = st.one_of(
    st.tuples(st.just("arrive"), ARRIVAL),
    st.tuples(st.just("arrive"), ARRIVAL),
    st.tuples(
        st.just("text"), st.tuples(WHICH, st.sampled_from((0, 1, 5, 80)), st.sampled_from((0, 10, 30)), st.booleans())
    ),
    st.tuples(st.just("cancel"), WHICH),
    st.tuples(st.just("leave"), WHICH),
    st.tuples(st.just("fail"), st.sampled_from(("start", "launch", "collect", "fault"))),
)


@settings(deadline=None, max_examples=300)
@given(
    events=st.lists(st.tuples(st.sampled_from((0.0, 0.001, 0.02, 0.1)), EVENT), min_size=5, max_size=80),
    slots=st.sampled_from((1, 3, 12)),
    more_pages=st.sampled_from((0, 1, 5, 40)),
    options=st.fixed_dictionaries({"width": st.sampled_from((1, 8)), "follows": st.booleans()}),
)
def test_whatever_comes_pages_come_back_and_nobody_lacks_one(events, slots, more_pages, options):
    """`Decoder.fill` finds out if somebody else wrote into a page."""
    engine = Engine(slots, 99, 86_400.0, pages=SLOT_PAGES + more_pages, max_positions=POSITIONS, **options)
    came, open_text = [], []

    def unsettled(streams: list[SpeechSequence], which: int) -> SpeechSequence | None:
        streams = [stream for stream in streams if not stream.result.settled]
        return streams[which % len(streams)] if streams else None

    def act(kind: str, how) -> None:
        if kind == "arrive":
            stream = engine.submit(**how)
            came.append((stream, how))
            open_text.extend([stream] if how["rows"] is not None else [])
        elif kind == "text" and (stream := unsettled(open_text, how[0])):
            _, rows, letters, ended = how
            engine.push_text(stream, rows, ended, letters)
            if ended:
                open_text.remove(stream)
        elif kind == "cancel" and (stream := unsettled(engine.streams, how)):
            engine.core.cancel(stream)
        elif kind == "leave" and (stream := unsettled(engine.streams, how)):
            engine.admission.settle(stream, error=LISTENER)
            engine.admission.wake()
        elif kind == "fail":
            engine.decoder.failing = how
            engine.loop.failures.in_a_row = 0

    coming, at, calm = deque(), engine.gpu.now, 0
    for gap, event in events:
        at += gap
        coming.append((at, event))
    while coming or engine.admission.open:
        while coming and coming[0][0] <= engine.gpu.now:
            act(*coming.popleft()[1])
        went_on = engine.loop.turn()
        check_pages(engine)
        calm = 0 if went_on or engine.admission.inbox.qsize() else calm + 1
        if calm and coming:
            engine.gpu.now = max(engine.gpu.now, coming[0][0])
        elif calm and open_text:  # everybody who rests waits for text, or for somebody who does
            engine.push_text(open_text.pop(0), 0, True)
        assert calm < 100, "who waits gets a slot, and who has one goes on"
    assert not engine.slots.running and engine.slots.reserved_pages == 0
    for stream, how in came:
        error, audio = stream.result.error, stream.result.audio
        if error:
            assert error is LISTENER or type(error) is KernelFault or str(error) in ("start", "launch", "collect")
        elif audio.finish_reason != "cancelled" and how["rows"] is None:
            whole = {name: value for name, value in how.items() if name != "rows"}
            assert (audio.frames, audio.finish_reason) == said_alone(**whole)
        if audio:
            assert np.array_equal(audio.codes[:, 0], np.arange(audio.frames))


@settings(deadline=None)
@given(
    text_rows=st.integers(0, 300),
    letters=st.integers(1, 200),
    late=st.booleans(),
    quiet=st.lists(st.booleans(), min_size=1, max_size=9),
)
def test_the_guard_has_a_verdict_by_the_frame_it_names(text_rows, letters, late, quiet):
    """`late`: the end of the text comes when all frames were seen that may be launched before it."""
    guard = RunawayGuard()
    guard.add_text("a" * letters)
    longest, frames = guard.longest(text_rows), 0
    while guard.verdict() is None:
        frames += 1
        used_up = frames >= text_rows and not (late and frames <= text_rows + 1)
        guard.see(np.array([frames]), used_up)
        guard.hear(np.full(1920, 0.0 if quiet[frames % len(quiet)] else 0.5, np.float32), 1)
    assert text_rows <= frames <= longest


def test_without_a_known_length_the_guard_names_no_frame():
    assert RunawayGuard().longest(5) == float("inf")


def test_a_thousand_speak_at_once_in_the_memory_of_two_hundred():
    """Of 2,048 positions each."""
    engine = Engine(slots=1024, max_queue=0, pages=200 * 32)
    for _ in range(1024):
        engine.submit(63, letters=72)
    engine.loop.turn()
    assert len(engine.slots.running) == 1024 and engine.slots.reserved_pages == 1024 * 6
    assert engine.slots.filled_pages < 2 * 1024
    for stream in engine.streams:
        engine.core.cancel(stream)
    engine.run([])
    assert engine.slots.reserved_pages == 0


def test_an_open_text_has_room_for_a_full_slot_and_gives_back_what_it_does_not_need():
    engine = Engine(slots=8, pages=40)
    speaking = engine.submit(63, letters=10, rows=5)
    engine.run([], until=0.1)
    assert len(speaking.pages) == 32
    waiting = engine.submit(63)
    engine.loop.turn()
    assert waiting in engine.slots.waiting and speaking.starved
    engine.push_text(speaking, 5, True, letters=20)
    engine.loop.turn()
    engine.loop.turn()
    assert len(speaking.pages) == 3 and len(waiting.pages) == 32
    engine.run([])
    assert {s.result.audio.finish_reason for s in engine.streams} == {"eos"}


def test_who_comes_first_is_served_first_though_later_ones_need_less():
    engine = Engine(slots=8, pages=SLOT_PAGES + 1, max_positions=POSITIONS)
    streams = [engine.submit(63, max_frames=most) for most in (100, 4000, 10)]
    engine.run([], until=0.001)
    assert engine.slots.running == streams[:1]
    engine.run([])
    ends = [s.result.audio.finish_reason for s in streams]
    assert ends == ["eos", "eos", "length"]


def test_who_waits_too_long_for_memory_is_told_which_option_to_raise():
    engine = Engine(slots=8, queue_timeout=0.05, pages=SLOT_PAGES, max_positions=POSITIONS)
    engine.submit(200, rows=0)
    late = engine.submit(1)
    engine.run([])
    assert isinstance(late.result.error, EngineBusy) and "raise kv_memory" in str(late.result.error)


def test_slots_that_share_nothing_wait_for_nothing():
    engine = Engine(slots=3)
    for _ in range(3):
        engine.submit(1000, rows=0)
    engine.run([], until=0.01)
    assert len(engine.slots.running) == 3 and engine.slots.pages == engine.slots.filled_pages == 0


def test_a_spare_with_fewer_slots_takes_over_with_these():
    engine = Engine(slots=6, pages=3 * SLOT_PAGES, max_positions=POSITIONS)
    decoder = Decoder(engine.gpu, 2, 1, pages=0)
    spare = LoadedModel(None, decoder, Vocoder(engine.gpu, decoder, True, 128), lambda: None)
    engine.loop._spare = lambda: DevicePipeline(spare, HeadFinder(), kept_voices=4, clock=engine.gpu.monotonic)
    for _ in range(9):
        engine.submit(30)
    engine.decoder.failing, engine.loop.failures.in_a_row = "fault", 2
    engine.run([])
    assert [type(s.result.error) for s in engine.streams] == [KernelFault] * 3 + [type(None)] * 6
    assert all(s.result.audio.finish_reason == "eos" for s in engine.streams[3:])
    assert engine.loop.fell_back and sorted(engine.slots.free) == [0, 1]
    assert engine.slots.pages == engine.slots.reserved_pages == 0


# ---------------------------------------------------------------- how much memory


def test_gib_become_pages_and_too_few_are_refused():
    stack = synthetic_config("0.6b").talker.stack
    kernel = SimpleNamespace(name="megakernel", dtype=torch.bfloat16)
    page = PAGE_POSITIONS * 2 * stack.num_layers * stack.num_kv_heads * stack.head_dim * 2
    shared = EngineOptions(max_streams=1024, kv_memory=40)
    assert shared_pages(shared, stack, kernel) == 40 * 2**30 // page
    assert kv_bytes(shared, stack, torch.bfloat16) == 40 * 2**30
    few = EngineOptions(max_streams=4, max_positions=100, kv_memory=40)
    assert shared_pages(few, stack, kernel) == 8, "no more than all slots can use"
    assert shared_pages(EngineOptions(), stack, kernel) is None
    with pytest.raises(BackendError, match=r"at least 0\.22 GiB, for one utterance of 2048 positions, got 0\.2"):
        shared_pages(EngineOptions(kv_memory=0.2), stack, kernel)


def test_too_much_is_refused_with_what_fits(monkeypatch):
    options = EngineOptions(max_streams=1024, kv_memory=90)
    need = Need.of(synthetic_config("0.6b"), torch.bfloat16, frozenset(), options)
    monkeypatch.setattr("qwen_megakernel.engine.memory._memory", lambda _device: 80 * 2**30)
    told = r"take 90\.00 GiB .* lower kv_memory: about 3\d\d slots of 2048 positions fit \(7\d\.\d\d GiB\)"
    with pytest.raises(OutOfMemoryError, match=told), told_of_memory("0.6b", torch.device("cpu"), need, options):
        pass


def test_memory_that_nobody_would_share_is_refused():
    with pytest.raises(BackendError, match="leave kv_memory out"):
        TTSEngine.load("demo", device="cpu", kv_memory=4)
    for wrong in (0, -1, "4", True, float("nan")):
        with pytest.raises(BackendError, match="GiB above 0"):
            EngineOptions(kv_memory=wrong)
