"""SpeechSession: how the server and the Pipecat service speak without holding up their event loop."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from waiting import PATIENCE_S

from qwen_megakernel import EngineBusy
from qwen_megakernel.model.turn_text import Turn, TurnText
from qwen_megakernel.speech.session import SpeechSession
from qwen_megakernel.text.front_end import TextFrontEnd
from qwen_megakernel.text.spoken_text import SpokenText

WHOLE = SimpleNamespace(finish_reason="eos")


class FakeUtterance:
    """Says what the test tells it to."""

    def __init__(self, on_chunk, on_end):
        self.on_chunk, self.on_end = on_chunk, on_end
        self.done, self.cancels, self.calls = False, 0, []

    def push_text(self, text):
        self.calls.append((text, threading.get_ident()))

    def end_text(self):
        self.calls.append((None, threading.get_ident()))

    def cancel(self):
        self.cancels += 1

    def result(self):
        return WHOLE


class FakeEngine:
    """`gate`: `submit` waits for it."""

    def __init__(self, error: Exception | None = None):
        self.error, self.gate, self.entered, self.made = error, threading.Event(), threading.Event(), []

    def turn(self, **request):
        return Turn(TextFrontEnd(), TurnText(len, 1000))

    def pieces(self, text, **request):
        return [SpokenText(text)]

    def submit(self, text, on_chunk, *, on_end, **request):
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        if self.error:
            raise self.error
        self.made.append(FakeUtterance(on_chunk, on_end))
        return self.made[0]


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("opening", ["", "a"])
async def test_chunks_come_in_order_and_then_the_whole(executor, opening):
    engine = FakeEngine()
    engine.gate.set()
    utterance = SpeechSession(engine, executor)
    assert not utterance.begun and not utterance.done
    await utterance.submit(None, opening)
    for text in "abc".removeprefix(opening):
        await utterance.push_text(text)
    await utterance.end_text()
    made = engine.made[0]

    def speak():
        for chunk in range(5):
            made.on_chunk(chunk)
        made.done = True
        made.on_end()

    threading.Thread(target=speak).start()
    assert utterance.begun and utterance.audio is None
    assert [chunk async for chunk in utterance] == [0, 1, 2, 3, 4]
    utterance.cancel()
    assert utterance.audio is WHOLE and utterance.done
    assert [text for text, _ in made.calls] == ["a", "b", "c", None] and made.cancels == 0
    assert threading.get_ident() not in {thread for _, thread in made.calls}, "nothing computes on the loop"


async def test_the_engine_posts_to_the_loop_itself(engine_for, executor):
    utterance, posts = SpeechSession(engine_for("demo", max_streams=2), executor), []
    post = asyncio.get_running_loop().call_soon_threadsafe
    utterance._loop = SimpleNamespace(
        call_soon_threadsafe=lambda *call: (posts.append(threading.current_thread().name), post(*call)),
        run_in_executor=asyncio.get_running_loop().run_in_executor,
    )
    await utterance.submit("Hello there.", max_frames=12, chunk_frames=1)
    chunks = [chunk async for chunk in utterance]
    assert set(posts) == {"qwen_megakernel engine"} and len(posts) == len(chunks) + 1


async def test_the_loop_goes_on_while_the_prompt_is_built(executor):
    engine = FakeEngine()
    submitting = asyncio.create_task(SpeechSession(engine, executor).submit("Hello."))
    await until(engine.entered.is_set)
    assert not submitting.done()
    engine.gate.set()
    await submitting


@pytest.mark.parametrize("how", ["cancel", "task"])
async def test_an_utterance_that_is_cancelled_before_it_exists_ends_at_once(executor, how):
    engine = FakeEngine()
    utterance = SpeechSession(engine, executor)
    submitting = asyncio.create_task(utterance.submit("Hello."))
    await until(engine.entered.is_set)
    if how == "cancel":
        utterance.cancel()
    else:
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
    engine.gate.set()
    await until(lambda: engine.made and engine.made[0].cancels)
    await asyncio.gather(submitting, return_exceptions=True)
    assert engine.made[0].cancels == 1


async def test_why_it_cannot_be_said_is_raised(executor):
    engine = FakeEngine(EngineBusy("full"))
    engine.gate.set()
    utterance = SpeechSession(engine, executor)
    with pytest.raises(EngineBusy, match="full"):
        await utterance.submit("Hello.")
    assert not utterance.begun
    utterance.cancel()


def test_an_utterance_whose_loop_is_closed_is_cancelled(executor):
    engine = FakeEngine()
    engine.gate.set()

    async def main():
        utterance = SpeechSession(engine, executor)
        await utterance.submit("Hello.")
        return utterance

    utterance = asyncio.run(main())
    engine.made[0].on_chunk(0)
    assert engine.made[0].cancels == 1 and utterance.begun
