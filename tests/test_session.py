"""SpeechSession: how the server and the Pipecat service speak without holding up their event loop."""

import asyncio
import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import uvloop
from callers import sounds
from kept import kept
from waiting import PATIENCE_S, until_in_loop

from qwen_megakernel import Chunk, EngineBusy, NoWordsError, RequestError
from qwen_megakernel.engine.seat import Seat
from qwen_megakernel.errors import TextEndedError
from qwen_megakernel.model.turn_text import Turn, TurnText
from qwen_megakernel.speech.events import Ended, Words
from qwen_megakernel.speech.patience import within
from qwen_megakernel.speech.session import FLUSH, SpeechSession
from qwen_megakernel.speech.words import SpeechRate
from spoken_text.front_end import Reading, TextFrontEnd
from spoken_text.spoken_text import SpokenText

WHOLE = SimpleNamespace(finish_reason="eos", duration_s=0.5, compute_s=0.1)
REQUEST = SimpleNamespace(seed=5, retries=0, lenient=False, capped=False, normalizes=False)


def chunk(n: int) -> Chunk:
    return Chunk(np.full(10, n, np.float32), np.zeros((0, 16), np.int64), 24000)


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
    """`gate`: `begin` waits for it. `asked`: the requests that have begun."""

    measures_words = False

    def __init__(self, error: Exception | None = None):
        self.asked = []
        self.error, self.gate, self.entered, self.made = error, threading.Event(), threading.Event(), []

    def turn(self, request, reading=None):
        return Turn(TextFrontEnd(), TurnText(len, 1000))

    def parts(self, text, request, reading=None):
        return [SpokenText(text)]

    def seat(self):
        return Seat(lambda: None, lambda: None, set(), lambda: None)

    def begin(self, text, request, on_chunk, on_end, seat):
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        if self.error:
            raise self.error
        self.asked.append(request)
        self.made.append(FakeUtterance(on_chunk, on_end))
        return self.made[0]


def opened(executor) -> tuple[FakeEngine, SpeechSession]:
    """An engine that begins at once, and a session."""
    engine = FakeEngine()
    engine.gate.set()
    return engine, SpeechSession(engine, executor, REQUEST)


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def test_a_long_chunk_comes_in_blocks_between_which_others_have_their_turn(executor):
    engine, long = FakeEngine(), np.arange(5 * 24000, dtype=np.float32)
    engine.gate.set()
    session, turns = SpeechSession(engine, executor, REQUEST), []
    await session.begin("a")
    made = engine.made[0]
    made.on_chunk(Chunk(long, np.zeros((0, 16), np.int64), 24000))
    made.done = True
    made.on_end()
    heard = []
    async for samples in sounds(session):
        heard.append(samples)
        asyncio.get_running_loop().call_soon(turns.append, len(heard))
        if len(heard) > 1:
            assert turns[-1] == len(heard) - 1
    assert [len(block) for block in heard] == [48000, 48000, 24000] and np.array_equal(np.concatenate(heard), long)


@pytest.mark.parametrize("opening", ["", "a"])
async def test_chunks_come_in_order_and_then_the_whole(executor, opening):
    engine, session = opened(executor)
    assert not session.begun and not session.done
    await session.begin(None, opening)
    for text in "abc".removeprefix(opening):
        await session.push_text(text)
    await session.end_text()
    made = engine.made[0]

    def speak():
        for n in range(5):
            made.on_chunk(chunk(n))
        made.done = True
        made.on_end()

    threading.Thread(target=speak).start()
    assert session.begun and session.audio is None
    assert [int(samples[0]) async for samples in sounds(session)] == [0, 1, 2, 3, 4]
    session.cancel()
    assert session.audio is WHOLE and session.done
    assert [text for text, _ in made.calls] == ["a", "b", "c", None] and made.cancels == 0
    assert threading.get_ident() not in {thread for _, thread in made.calls}, "nothing computes on the loop"


async def test_the_engine_posts_to_the_loop_itself(engine_for, executor):
    engine = engine_for("demo", max_streams=2)
    session, posts = SpeechSession(engine, executor, engine.request(max_frames=12, chunk_frames=1)), []
    post = asyncio.get_running_loop().call_soon_threadsafe
    session._loop = SimpleNamespace(
        call_soon_threadsafe=lambda *call: (posts.append(threading.current_thread().name), post(*call)),
        run_in_executor=asyncio.get_running_loop().run_in_executor,
    )
    await session.begin("Hello there.")
    chunks = [samples async for samples in sounds(session)]
    assert set(posts) == {"qwen_megakernel engine"} and len(posts) == len(chunks) + 1


@pytest.mark.parametrize("how", [None, "cancel", "task"])
async def test_the_loop_goes_on_while_the_prompt_is_built_and_may_cancel_it(executor, how):
    """A session that is cancelled before its utterance exists ends that as soon as it does."""
    engine = FakeEngine()
    session = SpeechSession(engine, executor, REQUEST)
    beginning = asyncio.create_task(session.begin("Hello."))
    await until_in_loop(engine.entered.is_set)
    assert not beginning.done()
    if how == "cancel":
        session.cancel()
    elif how == "task":
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
    engine.gate.set()
    await until_in_loop(lambda: engine.made and bool(engine.made[0].cancels) == bool(how))
    await asyncio.gather(beginning, return_exceptions=bool(how))
    assert engine.made[0].cancels == bool(how)


async def test_why_it_cannot_be_said_is_raised(executor):
    engine = FakeEngine(EngineBusy("full"))
    engine.gate.set()
    session = SpeechSession(engine, executor, REQUEST)
    with pytest.raises(EngineBusy):
        await session.begin("Hello.")
    assert not session.begun
    session.cancel()


def test_a_session_whose_loop_is_closed_is_cancelled(executor):
    engine = FakeEngine()
    engine.gate.set()

    async def main():
        session = SpeechSession(engine, executor, REQUEST)
        await session.begin("Hello.")
        return session

    session = asyncio.run(main())
    engine.made[0].on_chunk(chunk(0))
    assert engine.made[0].cancels == 1 and session.begun


async def test_a_session_with_another_part_to_come_is_not_done(executor):
    engine, session = opened(executor)
    await session.begin(None, "Hello. [pause 1s] There.")
    await session.flush()  # the current part has all its text, and would refuse that
    engine.made[0].done = True
    assert not session.done
    session.cancel()


async def test_a_writer_who_stalls_before_the_first_word_ends_nothing(executor):
    engine, session = opened(executor)
    await session.begin(None, " ")
    session._parts.end_part()
    assert not engine.made[0].cancels and not session._parts.superseded
    session.cancel()


async def test_what_is_repeated_is_said_as_the_last_time(executor):
    engine, other = FakeEngine(), SimpleNamespace(**vars(REQUEST) | {"seed": 6})
    engine.gate.set()
    session = SpeechSession(engine, executor, REQUEST)
    await session.begin("Hello.")
    session._parts.repeat(other)
    session._parts.repeat()
    assert [request.seed for request in engine.asked] == [5, 6, 6]
    session.cancel()


@pytest.mark.parametrize("reason", ["eos", "length", "cancelled"])
async def test_text_goes_on_behind_a_part_that_has_ended_by_itself_alone(reason, executor):
    def refuse(text):
        raise TextEndedError("")

    engine, session = opened(executor)
    await session.begin(None, "Hello.")
    engine.made[0].done, engine.made[0].push_text = True, refuse
    engine.made[0].result = lambda: SimpleNamespace(finish_reason=reason)
    with contextlib.nullcontext() if reason == "eos" else pytest.raises(TextEndedError):
        await session.push_text(" There.")
    assert session._parts.has_next == (reason == "eos")
    session.cancel()


async def test_a_pause_waits_for_the_text_behind_it(executor):
    engine, session = opened(executor)
    await session.begin(None, "Hello. [pause 1s]")
    assert not session._parts.has_next
    await session.push_text(" There.")
    await session.flush()
    assert session._parts.has_next
    session.cancel()


async def test_a_part_for_which_there_is_no_slot_can_begin_later(executor):
    engine, session = opened(executor)
    engine.parts = lambda *_: [SpokenText("Hello."), SpokenText("There.")]
    await session.begin("Hello. There.")
    engine.error = EngineBusy("")
    with pytest.raises(EngineBusy):
        session._parts.begin_next(None)
    assert session._parts.has_next
    session.cancel()


async def test_blanks_behind_words_are_no_part_without_words(executor):
    engine, session = opened(executor)
    await session.begin(None, "Hello.")
    for piece in (" ", "[pause 1s]", " There."):
        await session.push_text(piece)
    assert engine.made[0].calls[-1][0] is None and not engine.made[0].cancels, "it is said to its end"
    session.cancel()


# ---------------------------------------------------------------- with an engine


@pytest.fixture(scope="module")
def engine():
    return kept("demo", device="cpu", threads=1, max_streams=1, max_queue=0)


def run(engine, executor, text, pieces=(), within_s=PATIENCE_S, how=None, **options):
    """The session of a text, or of pieces that are fed to it, and its events."""

    async def feed():
        for piece in pieces:
            yield piece
        if text is None and within_s < PATIENCE_S:
            await asyncio.Event().wait()

    async def main():
        request = engine.request(speaker="ada", seed=5, **options)
        session = SpeechSession(engine, executor, request if text else request.in_pieces(), **how or {})
        try:
            await session.begin(text)
            if text is None:
                session.feed(feed(), within_s, "send the rest")
            return session, [event async for event in session.events()]
        finally:
            await session.close()

    return asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_pieces_that_are_fed_are_the_text(engine, executor):
    session, events = run(engine, executor, None, ["Hello ", "there, ", "my friend.", FLUSH])
    whole = engine.generate("Hello there, my friend.", speaker="ada", seed=5, non_streaming_mode=False)
    assert np.array_equal(session.audio.codes, whole.codes)
    assert isinstance(events[-1], Ended) and events[-1].seconds == session.audio.duration_s


async def test_an_opening_that_is_all_of_its_text_goes_on_where_its_turn_was(engine, executor):
    reading = Reading()
    request = engine.request(speaker="ada", seed=5, language="en", normalize="auto").in_pieces()
    for opening in ("<think>The user is here.", " Greet them.</think> Hello there."):
        session = SpeechSession(engine, executor, request, reading=reading)
        await session.begin(None, opening, ended=True)
        with contextlib.suppress(NoWordsError):
            async for _ in session.events():
                pass
        await session.close()
    alone = engine.generate("Hello there.", speaker="ada", seed=5, language="en", non_streaming_mode=False)
    assert np.array_equal(session.audio.codes, alone.codes)


async def test_an_opening_that_is_all_of_its_text_has_its_pauses(engine, executor):
    session = SpeechSession(engine, executor, engine.request(speaker="ada", seed=5).in_pieces())
    await session.begin(None, "Hello. [pause 9s] There.", ended=True)
    async for _ in session.events():
        pass
    await session.close()
    assert session.audio.duration_s > 9


async def test_each_part_has_the_silence_that_was_asked_for(engine, executor):
    session = SpeechSession(engine, executor, engine.request(speaker="ada", seed=5, pause_s=3.0).in_pieces())
    await session.begin(None, "Hello there.")
    session._parts.end_part()
    await session.push_text(" Good night.")
    await session.end_text()
    async for _ in session.events():
        pass
    await session.close()
    assert [part.duration_s > 3 for part in session._said] == [True, True]


def test_a_writer_that_is_too_slow_is_told(engine, executor):
    with pytest.raises(RequestError, match="0.05 s"):
        run(engine, executor, None, ["Hello "], within_s=0.05)


def test_what_cannot_be_pushed_ends_the_session(engine, executor):
    with pytest.raises(RequestError, match="Unicode"):
        run(engine, executor, None, ["Hello ", "\ud800"])


def test_words_are_told_as_they_are_made_or_at_the_end(engine, executor):
    text = "Hello there, how are you today?"
    _, events = run(engine, executor, text, how={"rate": SpeechRate()})
    assert [word for event in events if isinstance(event, Words) for word, _ in event.words] == text.split()
    session, events = run(engine, executor, text, how={"rate": SpeechRate(), "words_at_end": True})
    (told,) = (event for event in events if isinstance(event, Words))
    assert events[-1] is told and [word for word, _ in told.words] == text.split()
    assert all(0 <= at < session.audio.duration_s for _, at in told.words)


def test_what_ends_badly_is_said_again_before_it_is_heard(engine, executor):
    before = engine.metrics()["retries"]
    session, events = run(engine, executor, "Hello there.", retries=2, max_frames=3)
    assert [event.attempts for event in events if isinstance(event, Ended)] == [3]
    assert engine.metrics()["retries"] == before + 2 and session.audio.seed == 7
    assert len([event for event in events if type(event).__name__ == "Sound"]) == 1


def test_text_in_pieces_is_not_said_again(engine, executor):
    session, events = run(engine, executor, None, ["Hello there."], retries=2, max_frames=3)
    assert [event.attempts for event in events if isinstance(event, Ended)] == [1]
    assert session.audio.finish_reason == "length"


def test_a_patient_session_waits_for_a_slot(engine, executor):
    utterance = engine.submit(speaker="ada")
    with pytest.raises(EngineBusy):
        run(engine, executor, "Hello.")
    threading.Timer(0.3, utterance.cancel).start()  # a slot that is taken for a while
    session, _ = run(engine, executor, "Hello.", how={"patient": True})
    once = engine.generate("Hello.", speaker="ada", seed=5)
    assert np.array_equal(session.audio.codes, once.codes), "and is then said once"


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_came_while_the_process_stood_still_came_in_time(loop):
    async def heard() -> list[bytes]:
        told = []
        for seconds in (0.2, 0.1):
            ours, theirs = socket.socketpair()
            reader, writer = await asyncio.open_connection(sock=ours)

            def stand_still(theirs=theirs):
                theirs.sendall(b"in time")
                time.sleep(0.3)

            if not told:
                asyncio.get_running_loop().call_later(0.05, stand_still)
            try:
                async with within(seconds) as limit:
                    told.append(await reader.readexactly(7))
            except TimeoutError:
                assert limit.expired()
                told.append(b"nothing")
            writer.close()
            theirs.close()
        return told

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(heard()) == [b"in time", b"nothing"]
