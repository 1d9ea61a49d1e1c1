"""A turn longer than a slot: where its text is cut while it is written, and that it is said to its end."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from callers import parts_of, say, sounds
from hearing import spoken
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import PATIENCE_S, until_in_loop, until_spoken

from qwen_megakernel import EngineBusy, NoWordsError, SamplingParams, TextError, TTSEngine
from qwen_megakernel.model.turn_text import CLAUSE_FROM, SENTENCE_FROM, TurnText
from qwen_megakernel.speech.session import SpeechSession
from qwen_megakernel.speech.stall_watch import LONG_STALL_S
from spoken_text.lexicon import Lexicon
from spoken_text.sentence import STALL_S

WORDS = (*'Hello there and it is fine 3.5 Dr. so, well; end. right." 你好 。 ，'.split(), "\n\n")
texts = st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join)


def cut(text: str, room: int, cuts: list[int] | None = None) -> list[str]:
    """The parts of a text that comes in pieces, with as many tokens as letters."""
    turn, parts = TurnText(lambda word: len(word.strip()), room), [""]
    for piece in (text[a:b] for a, b in itertools.pairwise([0, *sorted(cuts or []), len(text)])):
        first, *others = turn.push(piece)
        parts[-1] += first
        parts += others
    parts[-1] += turn.finish()
    return parts


def test_a_part_ends_behind_the_first_sentence_above_its_share():
    assert SENTENCE_FROM < CLAUSE_FROM < 1.0
    text = "One two three. Four five six. Seven eight. Nine ten. The end."
    parts = cut(text, 48)
    assert parts == ["One two three. Four five six.", "Seven eight. Nine ten. The end."]
    assert cut(text, 1000) == [text]
    text = "One two three. Four of St. Five. Six. The end."
    assert cut(text, 38) == ["One two three. Four of St. Five.", "Six. The end."]


def test_a_long_sentence_is_cut_behind_a_clause_or_a_word():
    text = "One two three four, five six, seven eight nine ten"
    assert cut(text, 25) == ["One two three four, five six,", "seven eight nine ten"]
    assert cut("One two three four five six seven eight", 12) == ["One two three four", "five six seven", "eight"]


def test_chinese_is_cut_behind_its_marks():
    text = "今天天气很好。我们去河边，然后吃饭。好吗？"
    assert cut(text, 9) == ["今天天气很好。", "我们去河边，然后吃", "饭。好吗？"]
    assert cut(text, 16) == ["今天天气很好。我们去河边，", "然后吃饭。好吗？"]


@settings(max_examples=300)
@given(text=texts, room=st.integers(5, 60), cuts=st.lists(st.integers(0, 300), max_size=40))
def test_however_the_text_comes_it_is_cut_at_the_same_places(text, room, cuts):
    assert cut(text, room, cuts) == cut(text, room)


@settings(max_examples=300)
@given(text=texts, room=st.integers(5, 60))
def test_parts_joined_are_the_text_and_none_is_blank_or_too_long(text, room):
    parts = cut(text, room)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert all(part.strip() and not part[0].isspace() for part in parts[1:])
    longest = max(map(len, WORDS))
    for part in parts:  # marks never begin a part, so any number of them may follow its last word
        assert sum(map(len, part.rstrip("。， \n").split())) <= room + longest


@settings(max_examples=200)
@given(text=texts, room=st.integers(20, 60))
def test_words_never_wait_and_blanks_only_near_a_cut(text, room):
    turn, given_out = TurnText(lambda word: len(word.strip()), room), ""
    for taken, character in enumerate(text, 1):
        given_out += "".join(turn.push(character))
        assert "".join(given_out.split()) == "".join(text[:taken].split())
        if len(text[:taken].encode()) < SENTENCE_FROM * room:  # blanks count too: a tokenizer has tokens for them
            assert given_out == text[:taken]


# ---------------------------------------------------------------- an utterance in an event loop


SENTENCES = "It is late. We go home now. Are you there? The sun is out. He said so. That is all of it. "


@pytest.fixture(scope="module")
def engine():
    """Whose slots have room for 20 tokens."""
    options = {"threads": 1, "max_streams": 2, "max_positions": 140, "queue_timeout": PATIENCE_S}
    with TTSEngine.load("demo", device="cpu", **options) as engine:
        yield engine


@contextlib.asynccontextmanager
async def turn(engine, **request):
    with ThreadPoolExecutor(1) as executor:
        options = {"sampling": SamplingParams(seed=5), "speaker": "ada"} | request
        utterance = SpeechSession(engine, executor, engine.request(**options).in_pieces())
        await utterance.begin(None)
        try:
            yield utterance
        finally:
            utterance.cancel()


def cut_anywhere(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(len(text)), min(len(text), 12)))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


async def say_in_pieces(engine, text: str, rng: random.Random, **request):
    """The audio of a text that comes in pieces, whose chunks join to it."""
    async with turn(engine, **request) as utterance, asyncio.TaskGroup() as group:

        async def push():
            for piece in cut_anywhere(text, rng):
                await utterance.push_text(piece)
            await utterance.end_text()

        group.create_task(push())
        heard = [samples async for samples in sounds(utterance)]
    assert np.array_equal(np.concatenate(heard), utterance.audio.samples)
    return utterance.audio


def codes_of(engine, *parts: str) -> np.ndarray:
    """What these texts say, one utterance each."""
    said = [say(engine.submit(sampling=SamplingParams(seed=5), speaker="ada"), part) for part in parts]
    return np.concatenate([utterance.result(PATIENCE_S).codes for utterance in said])


@pytest.mark.slow
async def test_a_long_turn_is_said_to_its_end_part_by_part(engine, fresh_seed):
    text = SENTENCES * 2
    parts = parts_of(engine, text, speaker="ada")
    assert len(parts) > 2
    audio = await say_in_pieces(engine, text, random.Random(fresh_seed))
    assert np.array_equal(audio.codes, codes_of(engine, *parts))
    assert audio.finish_reason == "eos" and audio.duration_s > 140 * 0.08


async def test_with_max_frames_a_turn_is_one_utterance(engine):
    audio = await say_in_pieces(engine, "Yes. " * 10, random.Random(1), max_frames=30)
    assert audio.frames <= 30


@pytest.mark.parametrize("heard", [0, 3])
async def test_a_cancelled_turn_says_no_further_part(engine, heard):
    before = engine.metrics()["utterances"]
    async with turn(engine) as utterance:
        await utterance.push_text(SENTENCES * 3)
        events = sounds(utterance)
        for _ in range(heard):
            await anext(events)
        utterance.cancel()
        async for _ in events:
            pass
    assert utterance.audio.finish_reason == "cancelled" and engine.metrics()["utterances"] == before + 1
    assert engine.health()["streams"] == 0


async def test_a_part_that_gets_no_slot_says_why(engine, monkeypatch):
    def busy(*_args, **_options):
        raise EngineBusy("full")

    async with turn(engine) as utterance:
        await utterance.push_text(SENTENCES)
        await utterance.end_text()
        monkeypatch.setattr(engine, "begin", busy)
        with pytest.raises(EngineBusy):
            [samples async for samples in sounds(utterance)]


async def test_bad_text_is_refused_and_the_turn_goes_on(engine):
    async with turn(engine) as utterance:
        await utterance.push_text("Hello ")
        with pytest.raises(TextError):
            await utterance.push_text("\ud800")
        await utterance.push_text("there.")
        await utterance.end_text()
        assert [samples async for samples in sounds(utterance)] and utterance.audio.finish_reason == "eos"


# ---------------------------------------------------------------- pauses and words


def silences(samples: np.ndarray, rate: int) -> list[float]:
    """Seconds of the silences that are longer than the speech's own: in front, between, behind."""
    times = [0.0, *itertools.chain(*spoken(samples, rate)), len(samples) / rate]
    gaps = [end - begin for begin, end in zip(times[::2], times[1::2], strict=True)]
    return [gap for gap in gaps if gap > 0.6]


PAUSED = "[pause 700ms] Yes. <break time='800ms'/> No. [pause 0.9s][pause 100ms]It is."


async def test_pauses_are_exact_in_text_that_comes_in_pieces(engine, fresh_seed):
    audio = await say_in_pieces(engine, PAUSED, random.Random(fresh_seed))
    assert silences(audio.samples, engine.sample_rate) == pytest.approx([0.7, 0.8, 1.0], abs=0.05)


@pytest.mark.parametrize("speed", [1.0, 1.5])
def test_pauses_are_exact_in_whole_text(engine, speed):
    audio = engine.generate(PAUSED + "[pause 1.1s]", sampling=SamplingParams(seed=5), speaker="ada", speed=speed)
    assert silences(audio.samples, engine.sample_rate) == pytest.approx([0.7, 0.8, 1.0, 1.1], abs=0.05)


async def test_normalized_in_pieces_is_what_is_said_of_the_words(engine, fresh_seed):
    """With a lexicon, whose words may be cut anywhere."""
    request = {"normalize": "auto", "lexicon": Lexicon({"sql": "sequel"}), "language": "en"}
    audio = await say_in_pieces(engine, "**SQL** runs 5 km.", random.Random(fresh_seed), **request)
    words = await say_in_pieces(engine, "sequel runs five kilometers.", random.Random(fresh_seed), language="en")
    assert np.array_equal(audio.codes, words.codes)
    whole = {"sampling": SamplingParams(seed=5), "language": "en", "non_streaming_mode": True}
    of_text = engine.generate("**SQL** runs 5 km.", **(request | whole))
    assert np.array_equal(of_text.codes, engine.generate("sequel runs five kilometers.", **whole).codes)


@pytest.mark.parametrize("text", ["[pause 1s]", " <break/> ", "[pause 10ms] [pause 20ms]"])
async def test_pauses_alone_are_no_text(engine, text):
    with pytest.raises(TextError):
        engine.generate(text)
    with pytest.raises(ExceptionGroup) as raised:
        await say_in_pieces(engine, text, random.Random(1))
    assert "no letter or digit" in str(raised.value.exceptions)


def test_a_malformed_pause_is_refused(engine):
    for call in (engine.generate, engine.submit, engine.pieces):
        with pytest.raises(TextError, match="pause 500ms"):
            call("Hello [pause soon] there.")
    with pytest.raises(TextError, match="one utterance"):
        engine.submit("Hello. [pause 1s] There.")


async def test_a_flush_speaks_what_the_normalizer_holds(engine):
    async with turn(engine, normalize="auto", language="en") as utterance:
        await utterance.push_text("Hello there")
        await utterance.flush()
        assert len(await anext(sounds(utterance)))
        await utterance.end_text()


# ---------------------------------------------------------------- a writer that stalls


async def stalled(engine, first: str, then: str, stalls: Callable[[], Awaitable]):
    """The audio of an utterance whose writer stalls between two texts."""
    async with turn(engine) as utterance, asyncio.TaskGroup() as group:

        async def push():
            await utterance.push_text(first)
            await stalls()
            await utterance.push_text(then)
            await utterance.end_text()

        group.create_task(push())
        async for _ in sounds(utterance):
            pass
    return utterance.audio


async def test_a_stall_behind_a_sentence_does_not_cut_it(engine):
    first, then = "It is late for all of us.", " We go home."

    before = engine.metrics()["utterances"]

    def was_said() -> bool:
        """So long ago that its slot is free again."""
        return engine.health()["streams"] == 0 and engine.metrics()["utterances"] > before

    audio = await stalled(engine, first, then, lambda: until_in_loop(was_said))
    assert np.array_equal(audio.codes, codes_of(engine, first, then)) and audio.finish_reason == "eos"


async def test_a_stall_in_a_sentence_changes_nothing_for_a_while(engine, monkeypatch):
    async def a_second_passes() -> None:
        """For the event loop, once the engine waits for text. That is a stall behind a sentence, and none within."""
        assert STALL_S < 1.0 < LONG_STALL_S
        await asyncio.to_thread(until_spoken, engine, SimpleNamespace(seed=5, done=False))
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda now=loop.time: now() + 1.0)
        for _ in range(100):
            await asyncio.sleep(0)

    audio = await stalled(engine, "It is ", "late.", a_second_passes)
    assert np.array_equal(audio.codes, codes_of(engine, "It is late."))


async def test_a_flushed_text_is_spoken_to_its_end_without_a_full_stop(engine):
    codes = codes_of(engine, "Let me look")
    async with turn(engine) as utterance:
        await utterance.push_text("Let me look")
        await utterance.flush()
        heard, said = sounds(utterance), 0
        while said < len(codes) * 1920:
            said += len(await asyncio.wait_for(anext(heard), PATIENCE_S))
        await until_in_loop(lambda: engine.health()["streams"] == 0)  # its slot is free while the writer waits
        await utterance.end_text()
        assert not [samples async for samples in heard]
    assert np.array_equal(utterance.audio.codes, codes)


async def test_what_waits_for_its_language_is_spoken_if_the_writer_stalls(engine, monkeypatch):
    monkeypatch.setattr(engine._prompts, "languages", ("auto", "english", "german"))
    async with turn(engine, normalize="auto") as utterance:
        await utterance.push_text("5. ")  # in any language
        heard = sounds(utterance)
        assert len(await asyncio.wait_for(anext(heard), PATIENCE_S))
        await utterance.push_text("Wir haben 5 sehr schöne Hunde.")
        await utterance.end_text()
        assert [samples async for samples in heard]


@pytest.mark.parametrize("text", ["...", "[pause]", "[pause 1s]", "\U0001f389"])
async def test_text_without_words_says_so(engine, text):
    with pytest.raises(ExceptionGroup) as raised:
        await say_in_pieces(engine, text, random.Random(1), lenient=True)
    assert any(isinstance(error, NoWordsError) for error in raised.value.exceptions)
    with pytest.raises(NoWordsError):
        engine.generate(text, lenient=True)
    if text != "[pause]":
        with pytest.raises(NoWordsError):
            engine.submit(text)
