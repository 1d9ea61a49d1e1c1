"""Seats: who was admitted keeps its place and its slot to the end of its text, whoever waits."""

import asyncio
import contextlib
import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from test_schedule import Engine
from waiting import PATIENCE_S, until, until_in_loop

from qwen_megakernel import EngineBusy, TextError, TTSEngine
from qwen_megakernel.speech.events import Sound
from qwen_megakernel.speech.session import SpeechSession

TEXT = "Hello there. [pause 200ms] How are you? [pause 200ms] It is late."
HOW = {"speaker": "ada", "seed": 5}


class Caller:
    """Says some parts one after the other, with one seat."""

    def __init__(self, engine: Engine, parts: int, rng: random.Random):
        self.engine, self.parts, self.rng = engine, parts, rng
        self.seat, self.stream, self.said, self.rests = engine.admission.seat(), None, 0, 0

    def act(self) -> None:
        """In a turn of the engine."""
        if self.stream and not self.stream.result.settled or self.rests:
            self.rests = max(0, self.rests - 1)
        elif self.said == self.parts:
            self.seat.leave()
        else:
            self.stream = self.engine.submit(self.rng.choice((1, 20, 63)), seat=self.seat)
            assert self.stream or not self.said, "who was admitted is refused"
            self.said += self.stream is not None
            self.rests = self.rng.choice((0, 0, 3, 50))


@pytest.mark.parametrize("slots", [1, 3])
def test_whoever_waits_nobody_comes_between_the_parts(fresh_seed, slots):
    rng = random.Random(fresh_seed)
    engine = Engine(slots=slots, max_queue=4)
    callers = [Caller(engine, rng.choice((1, 2, 5)), rng) for _ in range(12)]
    spoke = set()
    for _ in range(100_000):
        for caller in rng.sample(callers, len(callers)):
            caller.act()
        if len(engine.admission.places) > 1:
            engine.submit(20)
        engine.loop.turn()
        begun = {c for c in callers if c.said and not c.seat.left and (c in spoke or c.stream in engine.slots.running)}
        spoke |= begun
        running = sum(stream.seat is None for stream in engine.slots.running)
        assert running + len(begun) <= slots, "each who has begun has a slot, whether it speaks or not"
        if all(caller.seat.left for caller in callers):
            break
        engine.gpu.compute(0.01)
    engine.run([])
    assert spoke == set(callers)
    assert len(engine.admission.places) == slots + 4 and not engine.admission.seats and not engine.slots.kept


@pytest.fixture(scope="module")
def engine():
    with TTSEngine.load("demo", device="cpu", threads=1, max_streams=1, max_queue=2) as engine:
        yield engine


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as executor:
        yield executor


def everything_is_free(engine: TTSEngine) -> bool:
    admission, slots = engine._core.admission, engine._core.loop.slots
    return len(admission.places) == 3 and not admission.seats and not slots.kept and len(slots.free) == 1


class Crowd:
    """Fills the queue as soon as there is a place, until the session has ended."""

    def __init__(self, engine: TTSEngine, heard: list[str]):
        self.engine, self.heard, self.over = engine, heard, threading.Event()
        self.thread = threading.Thread(target=self.come)

    def come(self) -> None:
        while not self.over.is_set():
            try:
                self.engine.submit("Hi.", lambda _chunk: self.heard.append("a stranger"), max_frames=2, **HOW)
            except EngineBusy:
                self.over.wait(0.001)

    def __enter__(self) -> "Crowd":
        self.thread.start()
        until(lambda: not self.engine._core.admission.places)
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        self.thread.join()
        until(lambda: everything_is_free(self.engine))


async def said(engine, executor, how, heard=None) -> np.ndarray:
    """A session's samples. `heard`: a crowd comes once it has begun; who is heard, in order."""
    options = {"retries": 2, "max_frames": 3} if how == "retries" else {}
    request = engine.request(**HOW, **options)
    session = SpeechSession(engine, executor, request.in_pieces() if how == "pieces" else request)
    samples = []
    try:
        await (session.begin(None, TEXT, ended=True) if how == "pieces" else session.begin(TEXT))
        with contextlib.nullcontext() if heard is None else Crowd(engine, heard):
            async for event in session.events():
                if isinstance(event, Sound):
                    samples.append(event.samples)
                    if heard is not None:
                        heard.append("the caller")
    finally:
        await session.close()
    return np.concatenate(samples)


@pytest.mark.parametrize("how", ["whole", "pieces", "retries"])
def test_a_text_of_several_parts_is_said_to_its_end(engine, executor, how):
    """There is one slot, and the queue is always full."""
    alone, heard = asyncio.run(said(engine, executor, how)), []
    assert np.array_equal(asyncio.run(said(engine, executor, how, heard)), alone)
    mine = heard.count("the caller")
    assert heard[:mine] == ["the caller"] * mine and (mine > 2 or how == "retries")


async def test_a_part_that_a_slow_writer_ended_is_followed_by_the_next_one(engine, executor):
    heard = []
    session = SpeechSession(engine, executor, engine.request(**HOW).in_pieces())
    await session.begin(None, "Hello there.")

    async def hear():
        async for event in session.events():
            if isinstance(event, Sound):
                heard.append("the caller")

    hearing = asyncio.create_task(hear())
    await session._end_stalled_part(session._stalls.text_at)
    with Crowd(engine, heard):
        try:
            await until_in_loop(lambda: session._parts.utterance.done)
            await session.push_text(" How are you?")
            await session.end_text()
            await hearing
        finally:
            await session.close()
    mine = heard.count("the caller")
    assert heard[:mine] == ["the caller"] * mine


@pytest.mark.parametrize("end", ["cancel", "drop", "close", "refused text"])
async def test_however_a_session_ends_its_place_is_free(engine, executor, end):
    session = SpeechSession(engine, executor, engine.request(**HOW).in_pieces())
    await session.begin(None, "Hello there. [pause 200ms] How are")
    await until_in_loop(lambda: engine._core.admission.seats)
    if end == "cancel":
        session.cancel()
    elif end == "close":
        await session.close()
    elif end == "refused text":
        with pytest.raises(TextError):
            await session.push_text("\ud800")
        session.cancel()
    del session
    gc.collect()
    await until_in_loop(lambda: everything_is_free(engine))
    assert engine.generate("Hi.", max_frames=2, **HOW).frames == 2


def test_a_drain_lets_a_text_of_several_parts_end(executor):
    engine = TTSEngine.load("demo", device="cpu", threads=1, max_streams=1)
    alone = asyncio.run(said(engine, executor, "whole"))

    async def main():
        saying = asyncio.create_task(said(engine, executor, "whole"))
        await until_in_loop(lambda: engine._core.admission.seats)
        await asyncio.to_thread(engine.close, PATIENCE_S)
        return await saying

    assert np.array_equal(asyncio.run(main()), alone)
