"""When words begin, by the talker's attention: the path through made-up attention, the words of changed text, and the
demo voice as it speaks."""

import asyncio
import json
import random
import shutil
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from callers import cut, seeded
from kept import kept
from telling import told_of

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.checkpoint.config import ModelConfig, TextHead
from qwen_megakernel.checkpoint.load import DEMO_FOLDER
from qwen_megakernel.engine import text_path
from qwen_megakernel.engine.audio import FRAME_S, joined
from qwen_megakernel.engine.text_path import HeadFinder, HeadTrial, TextPath
from qwen_megakernel.errors import CheckpointError
from qwen_megakernel.speech.events import Sound, Words
from qwen_megakernel.speech.measured_words import MeasuredWords
from qwen_megakernel.speech.session import SpeechSession
from qwen_megakernel.speech.words import words_of
from qwen_megakernel.trust import text_heads
from spoken_text.front_end import TextFrontEnd

sys.path.insert(0, str(Path(__file__).parent.parent / "tools" / "demo_voice"))
import as_typed

RATE = 24000
FRONT_END = TextFrontEnd("english", "auto")


@pytest.fixture
def rng(fresh_seed):
    return random.Random(fresh_seed)


# ---------------------------------------------------------------- the path


def attention_of(starts: list[float], frames: int) -> np.ndarray:
    """fp32 [frames, tokens]: around each start, in frames, half a frame's attention goes over to the next token."""
    passed = np.clip(0.5 + 0.5 * (np.arange(frames)[:, None] - np.array(starts)), 0, 1)
    passed[:, 0] = 1
    return (passed - np.pad(passed[:, 1:], ((0, 0), (0, 1)))).astype(np.float32)


def path_over(attention: np.ndarray, offset_s: float = 0.0, lag: int = 0) -> TextPath:
    """`lag`: frames that are told before the path has seen the one before."""
    path, told = TextPath(0, range(attention.shape[1]), TextHead(0, 1, offset_s)), deque()
    for frame in attention:
        told.append(told_of(frame, path.first)[None, None])
        if len(told) > lag:
            path.see(told.popleft())
    for left in told:
        path.see(left)
    return path


def test_made_up_attention_gives_exact_times(rng):
    starts = [0.0, *accumulate(rng.uniform(2.1, 6) for _ in range(30))]
    found = path_over(attention_of(starts, int(starts[-1]) + 3), offset_s=0.08).starts
    assert found == pytest.approx([0.08 + FRAME_S * start for start in starts], abs=1e-4)


def test_a_path_that_is_told_later_is_the_same(rng):
    """A GPU tells a frame from the token on to which the path had got when the frame was launched."""
    shape = np.full(rng.randrange(30, 60), 0.03)
    attention = np.random.default_rng(rng.randrange(2**31)).dirichlet(shape, 60).astype(np.float32)
    for told in (attention, attention_of([0.0, *accumulate(rng.uniform(0.9, 4) for _ in range(50))], 60)):
        assert path_over(told, lag=2).starts == path_over(told).starts


def test_what_the_path_has_passed_stays_passed(rng):
    """Attention that jumps about: times never go back, and a frame passes three tokens at most."""
    attention = np.random.default_rng(rng.randrange(2**31)).dirichlet(np.full(40, 0.05), 60).astype(np.float32)
    path, before = TextPath(0, range(40), TextHead(0, 0, 0.0)), []
    for frame in attention:
        path.see(told_of(frame, path.first)[None, None])
        assert path.starts[: len(before)] == before and len(path.starts) <= len(before) + 3 + (not before)
        before = list(path.starts)
    assert before == sorted(before)


SPOKEN = [np.zeros(1920, np.float32)] * 2 + [np.full(1920, 0.3, np.float32)]
"""Sound of an utterance whose speech begins after two frames."""


def test_a_head_is_found_by_how_it_goes_through_the_text(rng):
    """One of 12 follows; the others jump about, or look elsewhere. Its tokens are heard some frames later."""
    where, noise = (rng.randrange(3), rng.randrange(4)), np.random.default_rng(rng.randrange(2**31))
    late, kept = rng.uniform(-1.5, 1.5), []
    finder = HeadFinder(keep=kept.append)
    while not finder.head:
        heard = [0.0, *(2 + at for at in accumulate(rng.uniform(3.6, 4.4) for _ in range(12)))]
        path = finder.path(0, range(13))
        for frame in attention_of([0.0, *(start - late for start in heard[1:])], int(heard[-1]) + 5):
            heads = noise.dirichlet(np.full(13, 0.1), (3, 4))
            heads[0, 0] *= 0.3
            heads[where] = frame
            path.see(told_of(heads[path.layers, path.heads], path.first))
        finder.judge(path, SPOKEN)
    assert kept == [finder.head] and (finder.head.layer, finder.head.head) == where
    assert finder.head.offset_s == pytest.approx(FRAME_S * late - 0.1, abs=0.03), "0.1: the speech's onset"
    assert isinstance(finder.path(0, []), TextPath)


def test_the_search_for_a_head_ends(rng):
    kept, noise = [], np.random.default_rng(rng.randrange(2**31))
    finder = HeadFinder(keep=kept.append)
    assert [isinstance(finder.path(0, []), HeadTrial) for _ in range(100)].count(True) == 20
    assert HeadFinder().path(0, []) is None, "nobody keeps what is found"
    trial = HeadTrial(0, range(13))
    for _ in range(200):
        trial.see(told_of(noise.dirichlet(np.full(13, 0.1), (3, 4))))
    finder.judge(trial, SPOKEN)
    assert kept == [None] and finder.head is None and finder.path(0, []) is None


# ---------------------------------------------------------------- words

CHANGED = [
    ("It is 5 km now", "It is five kilometers now", [0, 1, 2, 3, 4]),
    ("It costs $3.50 today", "It costs three dollars fifty cents today", [0, 1, 2, 6]),
    ("On May 4, 2024. We go", "On May fourth, twenty twenty-four. We go", [0, 1, 2, 3, 5, 6]),
    ("**So** — yes, Zoë!", "So yes, Zoe!", [0, 1, 1, 2]),
    ("the 3 of the 4", "the three of the four", [0, 1, 2, 3, 4]),
    ("7 3, 0 4 21 8", "seven three, zero four twenty-one eight", [0, 1, 2, 3, 4, 5]),
    ("3,250 4 $3.50", "three thousand, two hundred and fifty four three dollars, fifty cents", [0, 6, 7]),
    ("Ask Dr. No at 5", "Ask Doctor No at five", [0, 1, 2, 3, 4]),
]
"""As it is written, as it is spoken, and with which spoken word each written one begins."""


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("written, spoken, begins", CHANGED)
def test_written_words_begin_with_the_spoken_ones(rng, written, spoken, begins, pieces):
    tokens = [spoken[start : start + 2] for start in range(0, len(spoken), 2)]
    starts = [0.1, *accumulate((rng.uniform(0.05, 0.3) for _ in tokens[1:]), initial=0.4)][: len(tokens)]
    words = MeasuredWords(lambda ids: [tokens[i] for i in ids], FRONT_END.fragment)
    for piece in cut(written, rng) if pieces else [written]:
        words.add(piece)
    words.hear(np.full(round(starts[-1] * RATE) + 4800, 0.3, np.float32), RATE)
    ends = list(accumulate(map(len, tokens)))
    places = [spoken.index(word, at) for word, at in zip(spoken.split(), _places(spoken), strict=True)]
    expected = [starts[next(i for i, end in enumerate(ends) if end > places[word])] for word in begins]
    told, known = [], 0
    for count in range(1, len(tokens) + 1):
        known = max(known, rng.randint(count, len(tokens)))
        words.enter(list(range(known)), starts[count - 1 : count])
        told += words.due()
        assert len(told) == sum(at <= starts[count - 1] for at in expected)
    told += words.finish()
    assert [word for word, _ in told] == words_of(written)
    assert [at for _, at in told] == pytest.approx(expected)


def _places(text: str) -> list[int]:
    return [0, *(i + 1 for i, c in enumerate(text) if c == " ")]


WRITTEN = (
    "the man paid 3,250 dollars on May 4, 2024 and 5 5 0 9 to Mr. it's 7:45 p.m. $3.50 19% — 555-0192 e.g. café".split()
)


def test_a_row_of_changed_words_is_told_as_it_is_spoken(rng):
    """Numbers read alone may be said otherwise; the words that stay tell where the text is."""
    late, off, texts = 0, 0, [" ".join(rng.choices(WRITTEN, k=60)) for _ in range(20)]
    for text in texts:
        spoken = "".join(part for part in FRONT_END.whole(text) if isinstance(part, str)).split()
        words, told = MeasuredWords(lambda ids, spoken=spoken: [f" {spoken[i]}" for i in ids], FRONT_END.fragment), []
        words.add(text)
        words.hear(np.full(len(spoken) * RATE, 0.3, np.float32), RATE)
        for count in range(len(spoken)):
            words.enter(list(range(len(spoken))), [float(count)])
            told += words.due()
        off += sum(word != spoken[int(at)] for word, at in told if word.isalpha())
        late += len(words.finish())
    assert off + late <= 48, "of 1,200 words"


def test_no_word_begins_in_the_silence_before_the_speech():
    words = MeasuredWords(lambda ids: ["Hello", " there"][: len(ids)], str)
    words.add("Hello there")
    words.hear(np.zeros(RATE // 2, np.float32), RATE)
    words.enter([0, 1], [0.1])
    assert words.due() == []
    words.hear(np.full(RATE, 0.3, np.float32), RATE)
    words.enter([0, 1], [0.8])
    assert words.due() == [("Hello", pytest.approx(0.5, abs=0.01)), ("there", 0.8)]


# ---------------------------------------------------------------- the demo voice


async def _told(engine, executor, text: str, pieces: list[str] | None, most: int, options: dict) -> list:
    request = engine.request(**options)
    rate = engine.rates.of(request.conditioning)
    session = SpeechSession(engine, executor, request.in_pieces() if pieces else request, rate=rate)
    await session.begin(None if pieces else text)
    for piece in pieces or ():
        await session.push_text(piece)
    if pieces:
        await session.end_text()
    found, seconds = [], 0.0
    async for event in session.events():
        if isinstance(event, Sound):
            seconds += len(event.samples) / RATE
        elif isinstance(event, Words):
            assert event.measured == engine.measures_words
            assert all(at <= seconds for _, at in event.words)
            found += event.words
            if len(found) >= most:
                session.cancel()
    assert [at for _, at in found] == sorted(at for _, at in found)
    return found


def told(engine, text: str, pieces: list[str] | None = None, most: int = 10**9, **options) -> list[tuple[str, float]]:
    """The words that a session tells. None is told before its sound. After `most` of them it is cancelled."""
    with ThreadPoolExecutor(2) as executor:
        return asyncio.run(_told(engine, executor, text, pieces, most, options))


def test_the_demo_voices_words_are_measured_whole_and_in_pieces(rng):
    engine, text = kept("demo"), " ".join(rng.sample(as_typed.sentences(), 2))
    how = {"speaker": rng.choice(("ada", "max")), "sampling": seeded(rng.randrange(1000)), "normalize": "auto"}
    whole = told(engine, text, non_streaming_mode=False, **how)
    pieces = told(engine, text, cut(text, rng), **how)
    assert [word for word, _ in whole] == [word for word, _ in pieces] == words_of(text)
    assert [at for _, at in pieces] == pytest.approx([at for _, at in whole], abs=FRAME_S)


def test_codes_are_the_same_without(monkeypatch, rng):
    text, how = rng.choice(as_typed.sentences()), {"sampling": seeded(rng.randrange(1000))}
    with_times = kept("demo").generate(text, **how)
    monkeypatch.setattr(text_heads, "finder_of", lambda *_: HeadFinder())
    with TTSEngine.load("demo") as engine:
        without = engine.generate(text, **how)
    assert np.array_equal(with_times.codes, without.codes) and np.array_equal(with_times.samples, without.samples)
    assert without.token_s is None and len(with_times.token_s) >= len(engine.tokens(text).text) - 2
    assert list(with_times.token_s) == sorted(with_times.token_s)
    assert 0 <= with_times.token_s[0] and with_times.token_s[-1] <= with_times.duration_s


def test_a_path_hears_of_a_frame_before_the_next_one_is_computed(monkeypatch, rng):
    """A frame tells of 13 tokens from where the path stood at its launch. With the sound, it would be beyond them."""
    gone, see = [], TextPath.see

    def spy(path, told):
        gone.append(path.first - int(told.flat[0]))
        see(path, told)

    monkeypatch.setattr(TextPath, "see", spy)
    kept("demo").generate(rng.choice(as_typed.sentences()), seed=rng.randrange(1000))
    assert set(gone) == {0}


def test_trim_speed_and_pauses_change_times(rng):
    """Tokens begin where the changed sound has them."""
    engine, text, sampling = kept("demo"), rng.choice(as_typed.sentences()), SamplingParams(seed=rng.randrange(1000))
    plain = engine.generate(text, sampling=sampling)
    fast = engine.generate(text, sampling=sampling, speed=2.0)
    assert list(fast.token_s) == pytest.approx([at / 2 for at in plain.token_s][: len(fast.token_s)])
    cut_s = plain.duration_s - engine.generate(text, sampling=sampling, trim="start").duration_s
    trimmed = engine.generate(text, sampling=sampling, trim="start").token_s
    assert trimmed == pytest.approx([max(0.0, at - cut_s) for at in plain.token_s])
    both = joined([plain, fast])
    assert both.token_s[len(plain.token_s)] == pytest.approx(plain.duration_s + fast.token_s[0])


def test_an_interruption_tells_only_what_was_spoken(rng):
    text = " ".join(as_typed.sentences()[:3])
    found = told(kept("demo"), text, most=3, sampling=seeded(rng.randrange(1000)))
    assert 3 <= len(found) < len(words_of(text)) and [word for word, _ in found] == words_of(text)[: len(found)]


def test_random_weights_keep_estimates(tiny, engine_for):
    engine = engine_for(tiny("custom_voice", eos_gain=0.0))
    told(engine, "Hello there, how are you?", max_frames=12)
    assert not engine.measures_words and engine.generate("Hello there.", max_frames=4).token_s is None


def demo_with(folder: Path, text_head) -> Path:
    """The demo voice with another head in its config, or without one."""
    shutil.copytree(DEMO_FOLDER, folder)
    config = json.loads((folder / "config.json").read_text()) | {"text_head": text_head}
    if text_head is None:
        del config["text_head"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_a_checkpoint_that_names_no_head_is_searched_while_it_speaks(tmp_path, monkeypatch):
    """What was found is kept, and told by doctor."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    folder, texts = demo_with(tmp_path / "voice", None), as_typed.sentences()
    with TTSEngine.load(folder, device="cpu", threads=1) as engine:
        assert not engine.measures_words
        for seed, text in enumerate(texts):
            assert engine.generate(text, sampling=seeded(seed)).token_s is None
            if head := engine._core.finder.head:
                break
    assert (head.layer, head.head, head.offset_s) in [(3, 2, pytest.approx(0.08, abs=0.05))]
    with TTSEngine.load(folder, device="cpu", threads=1) as engine:
        assert engine.measures_words and engine._core.finder.head == head
        assert engine.generate(texts[0]).token_s
    [told_of_it] = text_heads.told()
    assert told_of_it.startswith(f"{folder}: measured, because head 2 of layer 3 follows the text")


def test_what_an_engine_says_at_load_is_not_searched(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    with TTSEngine.load(demo_with(tmp_path / "voice", None), device="cpu", threads=1) as engine:
        finder = engine._core.finder
        engine._warm_up()
        assert finder._tries == text_path._TRIES
        engine.generate("Hello there.", max_frames=2)
        assert finder._tries == text_path._TRIES - 1


def test_random_weights_have_no_such_head(tmp_path, monkeypatch, tiny):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "voice"
    shutil.copytree(tiny("custom_voice", eos_gain=4.0), folder)  # speech that ends soon
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"random_weights": False}))
    monkeypatch.setattr(text_path, "_FRAMES", 20)
    for _ in range(2):  # the second time it is known
        with TTSEngine.load(folder, device="cpu", threads=1) as engine:
            for seed in range(60):
                audio = engine.generate("Hello there, how are you?", sampling=seeded(seed), max_frames=60)
                if not engine._core.finder._tries:
                    break
            assert audio.token_s is None and not engine.measures_words
    assert text_heads.told() == [f"{folder}: estimated, because no head of its talker follows the text"]


@pytest.mark.parametrize("wrong", [{"layer": 5}, {"head": 4}, {"layer": -1}, {"offset_s": "late"}, {"head": 1.5}])
def test_a_wrong_head_of_a_checkpoint_is_refused(tmp_path, wrong):
    folder = demo_with(tmp_path / "voice", {"layer": 3, "head": 2, "offset_s": 0.08} | wrong)
    with pytest.raises(CheckpointError, match="text_head"):
        ModelConfig.from_folder(folder)
