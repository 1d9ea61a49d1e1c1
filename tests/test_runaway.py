"""Loops that the model falls into, with forced codes: they end, the listener hears a second of them, and speech goes on
however slow it is and however long it rests."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from callers import say
from probes import probed, token_count
from telling import told_of
from waiting import PATIENCE_S, slow_case, until

from qwen_check.verify import unspoken
from qwen_megakernel import RequestError, SamplingParams
from qwen_megakernel.checkpoint.config import TextHead
from qwen_megakernel.engine.runaway import (
    BABBLE_AT_LIMIT,
    BABBLE_SLACK,
    BABBLE_TIMES,
    HANDED_OUT,
    HELD_SLACK,
    HELD_TIMES,
    LETTER_FRAMES,
    VERDICT,
    RunawayGuard,
    letters_of,
)
from qwen_megakernel.engine.text_path import HeadFinder
from qwen_megakernel.model.prompt import Prompt

TEXT = "Hello there, how are you today?"
Frames = list[np.ndarray]


@pytest.fixture(scope="module")
def engine(backend):
    with backend.probed(max_streams=1) as engine:
        yield engine


def force(engine, monkeypatch, frames: Frames) -> list[Prompt]:
    """The decoder says exactly these frames; None is end of speech. Prompts that it is given."""
    said, prompts = iter(frames), []
    monkeypatch.setattr(engine.probes.decoder, "start", lambda slot, prompt, *_: prompts.append(prompt))
    monkeypatch.setattr(engine.probes.decoder, "launch", lambda slots: None)
    monkeypatch.setattr(engine.probes.decoder, "collect", lambda: [next(said)])
    return prompts


def noise(count: int) -> Frames:
    return [torch.randint(0, 128, (16,)).numpy() for _ in range(count)]


@pytest.mark.parametrize("period", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk_frames", [None, slow_case(1), slow_case(5), 50])
def test_a_loop_ends_and_a_second_of_it_is_heard(engine, monkeypatch, period, chunk_frames):
    speech, loop = noise(random.randint(5, 60)), noise(period) * 100
    force(engine, monkeypatch, speech + loop)
    stream = engine.stream(TEXT, max_frames=200, chunk_frames=chunk_frames)
    heard = np.concatenate([chunk.codes for chunk in stream])
    audio = stream.utterance.result()
    assert audio.finish_reason == "runaway" and np.array_equal(audio.codes, heard)
    assert audio.frames == len(speech) + HANDED_OUT and len(audio.samples) == audio.frames * 1920
    assert np.array_equal(heard, np.stack(speech + loop)[: audio.frames])


def test_the_guard_can_be_turned_off(engine, monkeypatch):
    force(engine, monkeypatch, noise(9) + noise(1) * 100)
    audio = engine.generate(TEXT, max_frames=90, runaway_guard=False)
    assert audio.finish_reason == "length" and audio.frames == 90


def test_the_guard_waits_for_the_text_to_be_used_up(engine, monkeypatch):
    """In the streaming layout the text comes beside the frames: what repeats before it has ended may go on."""
    force(engine, monkeypatch, noise(1) * 300)
    rows = token_count(engine.model, TEXT * 3)
    audio = engine.generate(TEXT * 3, non_streaming_mode=False, max_frames=250)
    assert audio.finish_reason == "runaway" and rows <= audio.frames <= rows + HANDED_OUT
    force(engine, monkeypatch, noise(1) * 300)
    utterance = engine.submit(max_frames=120)
    utterance.push_text(TEXT * 15)
    assert utterance.result(timeout=PATIENCE_S).finish_reason == "length", "its text was never ended"


SPEECH = {
    "with pauses of two seconds": lambda: [*noise(20), *noise(1) * 25, *noise(20), *noise(1) * 25, *noise(20)],
    "ten times as slow as any": lambda: [frame for frame in noise(30) for _ in range(12)],
    "with a loop that the model ends itself": lambda: noise(10) + noise(1) * (VERDICT - 2),
    "that ends at the first step it may": lambda: noise(1),
    "of two frames": lambda: noise(2),
}


@pytest.mark.parametrize("kind", SPEECH)
def test_speech_is_heard_as_it_is(engine, monkeypatch, kind):
    speech = SPEECH[kind]()
    force(engine, monkeypatch, [*speech, None])
    stream = engine.stream(TEXT)
    heard = np.concatenate([chunk.codes for chunk in stream])
    audio = stream.utterance.result()
    assert audio.finish_reason == "eos" and np.array_equal(audio.codes, np.stack(speech))
    assert np.array_equal(heard, audio.codes), "nothing is lost, nothing out of order"
    assert len(audio.samples) == len(speech) * 1920


@pytest.mark.parametrize("frames", [14, 30, 37, 38])
def test_a_limit_within_a_loop_lets_no_more_of_it_through(engine, monkeypatch, frames):
    force(engine, monkeypatch, noise(20) + noise(1) * 100)
    audio = engine.generate(TEXT, max_frames=20 + frames)
    assert audio.finish_reason == "runaway" and audio.frames == 20 + HANDED_OUT


@pytest.mark.slow
def test_no_end_ever_is_the_frame_limits_affair(engine, monkeypatch):
    prompts = force(engine, monkeypatch, noise(2100))
    audio = engine.generate(TEXT)
    limit = min(engine.config.max_frames, 2048 - len(prompts[0].rows))
    assert audio.finish_reason == "length" and audio.frames == pytest.approx(limit, abs=3)


def test_cancelling_in_a_loop_keeps_what_was_heard(engine, monkeypatch):
    heard = []
    utterance = None

    def listen(chunk):
        heard.append(chunk.codes)
        if sum(map(len, heard)) >= 13:
            utterance.cancel()

    force(engine, monkeypatch, noise(10) + noise(1) * 30 + noise(200))
    utterance = engine.submit(TEXT, on_chunk=listen, chunk_frames=1)
    audio = utterance.result()
    assert audio.finish_reason == "cancelled" and np.array_equal(audio.codes, np.concatenate(heard))


# ---------------------------------------------------------------- near silence


def sound(level: float, frames: int = 1) -> np.ndarray:
    return (level * torch.randn(frames * 1920)).numpy()


def run_of(guard: RunawayGuard, level: float, frames: int) -> None:
    for _ in range(frames):
        guard.see(torch.randint(0, 2048, (16,)).numpy(), True)
        guard.hear(sound(level), 1)


@pytest.mark.parametrize("loud, quiet", [(0.1, 5e-4), (0.05, 0.0), (0.01, 4e-4)])
def test_stationary_silence_of_changing_codes_is_a_loop(loud, quiet):
    guard = RunawayGuard()
    run_of(guard, loud, 30)
    run_of(guard, quiet, 37)  # just under the 3 s of the documents
    assert guard.verdict() is None and guard.presentable == 30 + HANDED_OUT
    run_of(guard, quiet, 1)
    assert guard.verdict() == "silence" and guard.presentable == 30 + HANDED_OUT


@pytest.mark.parametrize("_draw", range(20))
def test_the_verdict_does_not_depend_on_how_many_frames_come_at_once(fresh_seed, _draw):
    """Also if the sound comes long after the codes, and speech goes on after a silence that is long enough."""
    rng, codes, levels = random.Random(fresh_seed), [], []
    while len(codes) < 250:
        run = rng.randint(VERDICT - 6, VERDICT + 6)
        codes += noise(1) * run if rng.random() < 0.3 else noise(run)
        levels += [rng.choice((0.0, 0.1))] * run

    def decided(most: int) -> tuple[str | None, int]:
        guard, seen, heard = RunawayGuard(), 0, 0
        while guard.verdict() is None and heard < len(codes):
            frames = min(rng.randint(1, most), len(codes) - heard)
            while seen < min(len(codes), heard + frames + rng.randint(0, 2 * most - 2)):
                guard.see(codes[seen], seen >= 30)
                seen += 1
            guard.hear(np.concatenate([sound(level) for level in levels[heard : heard + frames]]), frames)
            heard += frames
        return guard.verdict(), guard.presentable

    one_by_one = decided(1)
    assert decided(8) == decided(8) == one_by_one


def test_a_click_in_every_frame_leaves_silence_a_loop():
    guard = RunawayGuard()
    run_of(guard, 0.1, 30)
    for _ in range(VERDICT):
        frame = sound(1e-4)
        at = random.randrange(1880)
        frame[at : at + random.randint(1, 40)] = random.uniform(0.05, 0.9)
        guard.see(torch.randint(0, 2048, (16,)).numpy(), True)
        guard.hear(frame, 1)
    assert guard.verdict() == "silence" and guard.presentable == 30 + HANDED_OUT


def test_silence_from_the_first_frame_is_a_loop():
    guard = RunawayGuard()
    run_of(guard, 0.0, VERDICT)
    assert guard.verdict() == "silence" and guard.presentable == HANDED_OUT


@pytest.mark.parametrize("loud, soft", [(0.1, 0.003), (0.02, 0.0008), (0.3, 0.006)])
def test_soft_speech_is_not_silence(loud, soft):
    guard = RunawayGuard()
    run_of(guard, loud, 20)
    run_of(guard, soft, 100)
    assert guard.verdict() is None and guard.presentable == 120


@pytest.mark.parametrize("chunk_frames", [None, slow_case(100)])
def test_the_demo_voices_silence_is_recognised(demo, monkeypatch, chunk_frames):
    """Its own quietest frames, in an order that never repeats."""
    spoken = demo.generate("One. Two. Three. Four.", sampling=SamplingParams(seed=3))
    levels = np.sqrt(np.square(spoken.samples.reshape(-1, 1920)).mean(axis=1))
    quiet = [spoken.codes[i] for i in np.argsort(levels)[:4]]
    speech = list(spoken.codes)
    endless = [random.choice(quiet) for _ in range(200)]
    force(demo, monkeypatch, speech + endless)
    audio = demo.generate(TEXT, max_frames=len(speech) + 150, chunk_frames=chunk_frames)
    assert audio.finish_reason == "runaway" and audio.frames <= len(speech) + HANDED_OUT + 2
    pause = [random.choice(quiet) for _ in range(25)]
    force(demo, monkeypatch, [*speech, *pause, *speech, None])
    assert demo.generate(TEXT).frames == 2 * len(speech) + 25


# ---------------------------------------------------------------- babble


@pytest.fixture(scope="module")
def demo():
    """Random weights babble whatever the text is; the demo voice does not."""
    with probed("demo", max_streams=1) as engine:
        yield engine


@pytest.fixture
def counts(demo):
    """counts() -> what the demo voice's engine has counted since the test began."""
    before = Counter(demo.metrics())
    return lambda: Counter(demo.metrics()) - before


def frames_of(text: str, times: float, slack: int) -> int:
    return int(times * LETTER_FRAMES * letters_of(text) + slack)


@pytest.mark.parametrize("chunk_frames", [None, slow_case(1)])
@pytest.mark.parametrize("layout", [True, False, "pieces"])
def test_speech_that_goes_on_long_after_its_text_is_babble(demo, counts, monkeypatch, chunk_frames, layout):
    babble = noise(500)
    force(demo, monkeypatch, babble)
    monkeypatch.setattr(demo.probes.decoder, "extend", lambda slot, rows, ended: None)
    if layout == "pieces":
        audio = say(demo.submit(chunk_frames=chunk_frames), *TEXT).result(timeout=PATIENCE_S)
    else:
        audio = demo.generate(TEXT, non_streaming_mode=layout, chunk_frames=chunk_frames)
    assert audio.finish_reason == "runaway" and audio.frames == frames_of(TEXT, HELD_TIMES, HELD_SLACK)
    assert np.array_equal(audio.codes, np.stack(babble[: audio.frames]))
    counted = counts()
    assert counted["runaway"] == counted["runaway_babble"] == 1, counted
    assert frames_of(TEXT, BABBLE_TIMES, BABBLE_SLACK) <= counted["frames"] <= frames_of(TEXT, 5, 2 * BABBLE_SLACK)


def test_speech_four_times_as_slow_as_any_is_heard_as_it_is(demo, monkeypatch):
    speech = noise(frames_of(TEXT, BABBLE_TIMES, BABBLE_SLACK))
    force(demo, monkeypatch, [*speech, None])
    stream = demo.stream(TEXT)
    heard = np.concatenate([chunk.codes for chunk in stream])
    assert stream.utterance.result().finish_reason == "eos"
    assert np.array_equal(heard, np.stack(speech)), "nothing is lost, nothing out of order"


def test_at_its_limit_long_speech_is_whole_and_far_too_long_speech_is_babble(demo, monkeypatch):
    most = frames_of(TEXT, BABBLE_AT_LIMIT, BABBLE_SLACK)
    for frames, why, heard in ((most, "length", most), (most + 1, "runaway", frames_of(TEXT, HELD_TIMES, HELD_SLACK))):
        force(demo, monkeypatch, noise(500))
        audio = demo.generate(TEXT, max_frames=frames)
        assert (audio.finish_reason, audio.frames) == (why, heard)


def test_no_length_is_judged_while_text_may_come_nor_without_the_guard(demo, monkeypatch):
    force(demo, monkeypatch, noise(600))
    assert demo.generate(TEXT, runaway_guard=False).finish_reason == "length"
    guard = RunawayGuard()
    guard.add_text("Yes.")
    for _ in range(500):
        guard.see(noise(1)[0], False)
    guard.hear(sound(0.1, 500), 500)
    assert guard.verdict() is None and guard.presentable == 500
    for _ in range(10):
        guard.see(noise(1)[0], True)
    guard.hear(sound(0.1, 10), 10)
    assert guard.verdict() == "babble" and guard.presentable == 500


def test_random_weights_are_not_judged_by_their_length(engine, monkeypatch):
    force(engine, monkeypatch, noise(400))
    assert engine.generate("Yes.", max_frames=400).finish_reason == "length"


def test_runaways_are_counted_by_their_kind(demo, counts, monkeypatch):
    for frames in (noise(9) + noise(2) * 100, noise(300), noise(9) + noise(1) * 100):
        force(demo, monkeypatch, frames)
        assert demo.generate(TEXT).finish_reason == "runaway"
    counted = counts()
    assert [counted[f"runaway_{kind}"] for kind in ("repeats", "babble", "silence")] == [2, 1, 0]
    assert counted["runaway"] == 3


@pytest.mark.parametrize(
    "text",
    [
        "Hello there, how are you today?",
        "你好，今天天气很好。",
        "1,250,000 %",
        "U.S.A.",
        "Müller's cafe\u0301 🙂",
        "한국어 문장입니다.",
    ],
)
def test_letters_add_up_wherever_a_text_is_cut(text):
    at = random.randint(0, len(text))
    assert letters_of(text) == pytest.approx(letters_of(text[:at]) + letters_of(text[at:])) and letters_of(text) > 0


# ---------------------------------------------------------------- the path through the text


def follows(engine, monkeypatch, places: list[int]) -> None:
    """After `force`: the head attends to these tokens, one a frame."""
    collect, told, places = engine.probes.decoder.collect, [], iter(places)

    def collected() -> Frames:
        told.append(next(places, 0))
        return collect()

    def take_told(_slot) -> Frames:
        path = engine._core.loop.slots.running[0].path
        attention = np.eye(99, dtype=np.float32)[told]
        told.clear()
        return list(told_of(attention, path.first)[:, None, None])

    monkeypatch.setattr(engine.probes.decoder, "collect", collected)
    monkeypatch.setattr(engine.probes.decoder, "told", take_told)


def reading(tokens: int) -> list[int]:
    """The tokens that frames attend to, two frames each."""
    return [frame // 2 for frame in range(2 * tokens)]


def path_of(guard: RunawayGuard, *runs: tuple[int, float, bool, bool]) -> str | None:
    """The verdict after runs of (frames, level, does the path go on with each frame?, is the text used up?)."""
    guard.reached = reached = [1]
    guard.see(noise(1)[0], False)
    guard.hear(sound(0.1), 1)
    for frames, level, goes_on, used_up in runs:
        for _ in range(frames):
            reached.append(reached[-1] + goes_on)
            guard.see(noise(1)[0], used_up)
            guard.hear(sound(level), 1)
    return guard.verdict()


@pytest.mark.parametrize(
    "runs, verdict",
    [
        ([(90, 0.1, True, True), (VERDICT, 0.1, False, True)], "standstill"),
        ([(90, 0.1, True, True), (VERDICT - 1, 0.1, False, True)], None),
        ([(9, 0.1, True, True), (30, 0.1, False, True), (1, 0.1, True, True), (30, 0.1, False, True)], None),
        ([(90, 0.1, True, True), (20, 0.1, False, True), (30, 0, False, True), (17, 0.1, False, True)], None),
        ([(90, 0.1, True, True), (20, 0.1, False, True), (30, 0, False, True), (18, 0.1, False, True)], "standstill"),
        ([(99, 0.1, False, False), (9, 0.1, True, True)], None),
        ([(99, 0.1, False, False), (37, 0.1, False, True)], None),
        ([(99, 0.1, False, False), (38, 0.1, False, True)], "standstill"),
    ],
    ids=["loop", "nearly", "slow", "pause", "loop and pause", "starved", "starved, then nearly", "starved, then loop"],
)
def test_speech_that_does_not_get_on_with_its_text_is_a_loop(runs, verdict):
    guard = RunawayGuard()
    assert path_of(guard, *runs) == verdict
    if runs[0][2] and verdict and len(runs) == 2:
        assert guard.presentable == 91 + HANDED_OUT


@pytest.mark.parametrize("layout", [True, False, "pieces"])
@pytest.mark.parametrize("back", [0, 5])
def test_a_loop_before_the_end_of_the_text(demo, counts, monkeypatch, layout, back):
    """The head stands still, or goes back to a token again and again."""
    speech = noise(16 + 300)
    force(demo, monkeypatch, speech)
    follows(demo, monkeypatch, reading(8) + [7 - i % (back + 1) for i in range(300)])
    monkeypatch.setattr(demo.probes.decoder, "extend", lambda slot, rows, ended: None)
    text = TEXT * 2
    if layout == "pieces":
        audio = say(demo.submit(), *text).result(timeout=PATIENCE_S)
    else:
        audio = demo.generate(text, non_streaming_mode=layout)
    begin = 15 if layout is True else token_count("demo", text) - 1  # the text is used up with this frame
    assert audio.finish_reason == "runaway"
    assert begin <= audio.frames - HANDED_OUT <= begin + 12, "frames that happen to be silent do not count"
    assert np.array_equal(audio.codes, np.stack(speech[: audio.frames])) and audio.lost == ()
    assert counts()["runaway_standstill"] == 1


def test_text_that_was_left_out_is_said_again(demo, counts, monkeypatch):
    tokens = token_count("demo", TEXT * 2)
    whole = reading(tokens)
    for text, said, lost in (
        (TEXT * 2, whole[: 2 * (tokens - 6)], ()),
        (TEXT * 2, whole[: 2 * (tokens - 7)], range(tokens - 7, tokens)),
        (TEXT * 2, whole[:4] + whole[2 * 9 :], range(2, 9)),
        (TEXT * 2, whole[:4] + whole[2 * 8 :], ()),
        (TEXT * 2, whole[2 * 9 :] + whole[: 2 * 9], ()),
        (TEXT * 2, whole[:4] + [5] + whole[2 * 11 :], (2, 3, 4, 6, 7, 8, 9, 10)),  # a mumble
        (TEXT * 2, whole[:4] + [4, 6] + whole[2 * 10 :], ()),
        (TEXT * 2, [*range(tokens)], ()),  # as fast as anybody speaks
        (TEXT * 2, [], range(tokens)),
        ("One - - - - - - - - - - -", [0, 0, 0, 0], ()),
    ):
        force(demo, monkeypatch, [*noise(len(said)), None])
        follows(demo, monkeypatch, said)
        audio = demo.generate(text)
        assert (audio.finish_reason, audio.frames, audio.lost) == ("eos", len(said), tuple(lost))
    assert counts()["lost"] == 4 and counts()["retries"] == 0
    force(demo, monkeypatch, [*noise(8), None, *noise(2 * tokens), None])
    follows(demo, monkeypatch, [*whole[:8], 0, *whole, 0])
    audio = demo.generate(TEXT * 2, retries=3)
    assert (audio.attempts, audio.lost, len(audio.token_s)) == (2, (), tokens)


def test_verify_tells_the_words_that_were_left_out(demo, monkeypatch):
    text = "One two three. " + TEXT
    spelt = demo.spelt(demo.tokens(text).text)
    whole = reading(len(spelt))
    for said, words in (
        (whole, []),
        (whole[:-4], spelt[-2:]),
        (whole[:-2], ""),
        (whole[:2] + whole[-2:] * 6, spelt[1:-1]),  # the path passes three tokens a frame
    ):
        force(demo, monkeypatch, [*noise(len(said)), None])
        follows(demo, monkeypatch, said)
        assert unspoken(demo, text, demo.generate(text)) == "".join(words).strip()


def test_a_text_that_has_to_wait_for_more_is_neither(demo, monkeypatch):
    force(demo, monkeypatch, [*noise(250), None])
    follows(demo, monkeypatch, [3] * 200 + [3 + i // 2 for i in range(51)])
    monkeypatch.setattr(demo.probes.decoder, "extend", lambda slot, rows, ended: None)
    utterance = demo.submit()
    utterance.push_text(TEXT * 30)
    until(lambda: len(utterance._sequence.output.codes) >= 190)
    utterance.end_text()
    audio = utterance.result(timeout=PATIENCE_S)
    assert audio.finish_reason == "eos" and audio.frames == 250


def test_a_head_that_was_found_late_judges_nothing(demo, monkeypatch):
    """Else the same request would end otherwise, by what was said before."""
    monkeypatch.setattr(demo._core.finder, "judges", False)
    for frames in (16, 90):
        speech = noise(frames)
        force(demo, monkeypatch, [*speech, None])
        follows(demo, monkeypatch, reading(8) + [7] * 100)
        audio = demo.generate(TEXT * 2)
        assert (audio.finish_reason, audio.frames, audio.lost, len(audio.token_s)) == ("eos", frames, (), 8)
    assert HeadFinder(TextHead(0, 0, 0.0)).judges and not HeadFinder(keep=print).judges


# ---------------------------------------------------------------- said again


def ends(engine, monkeypatch, whys: list[str]) -> list[int]:
    """So does each utterance end. The seeds that they are said with."""
    seeds, frames, whys = [], iter(()), iter(whys)

    def start(_slot, _prompt, sampling, *_pages) -> None:
        nonlocal frames
        seeds.append(sampling.seed)
        frames = iter(
            {"eos": [*noise(20), None], "runaway": noise(9) + noise(1) * 100, "length": noise(512)}[next(whys)]
        )

    monkeypatch.setattr(engine.probes.decoder, "start", start)
    monkeypatch.setattr(engine.probes.decoder, "launch", lambda slots: None)
    monkeypatch.setattr(engine.probes.decoder, "collect", lambda: [next(frames)])
    return seeds


@pytest.mark.parametrize(
    "retries, whys, attempts",
    [
        (0, ["runaway"], 1),
        (3, ["eos"], 1),
        (3, ["runaway", "length", "eos"], 3),
        (2, ["length", "length", "runaway"], 3),
    ],
)
def test_what_ends_badly_is_said_again_with_the_next_seeds(demo, counts, monkeypatch, retries, whys, attempts):
    seed = random.choice([7, 2**63 - 2])
    seeds = ends(demo, monkeypatch, whys)
    audio = demo.generate(TEXT, retries=retries, max_frames=50, sampling=SamplingParams(seed=seed, temperature=0.7))
    assert seeds == [(seed + i) % 2**63 for i in range(attempts)]
    assert (audio.attempts, audio.seed, audio.finish_reason) == (attempts, seeds[-1], whys[-1])
    assert counts()["retries"] == attempts - 1 and counts()["utterances"] == attempts


def test_a_fresh_seed_is_followed_by_its_next_ones(demo, monkeypatch):
    seeds = ends(demo, monkeypatch, ["length", "eos"])
    assert demo.generate(TEXT, retries=1, max_frames=50).attempts == 2
    assert seeds[1] == (seeds[0] + 1) % 2**63


def test_an_attempt_says_what_its_seed_says(demo, monkeypatch):
    """The second one of this request is the request with the next seed."""
    request = {"speaker": "ada", "max_frames": 30}
    again = demo.generate(TEXT * 3, retries=1, sampling=SamplingParams(seed=4), **request)
    assert again.attempts == 2 and again.seed == 5
    assert np.array_equal(again.codes, demo.generate(TEXT * 3, sampling=SamplingParams(seed=5), **request).codes)


@pytest.mark.parametrize("retries", [-1, 101, 1.0, True, "2"])
def test_retries_that_are_no_number_of_them_are_refused(demo, counts, retries):
    with pytest.raises(RequestError, match=r"retries .*0 to 100"):
        demo.generate(TEXT, retries=retries)
    assert counts()["utterances"] == 0, "before anything is said"
