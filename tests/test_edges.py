"""Silence at the ends of speech: what is cut, that it clicks nowhere, that chunks join, what an engine makes of it.

Each signal is drawn anew. Where it holds clicks or noise, `spoken` tells where its speech is, by its level."""

import numpy as np
import pytest
from hearing import spoken
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import probed
from waiting import brief_case, slow_case

from qwen_megakernel import RequestError, SamplingParams, TTSEngine
from qwen_megakernel.choices import TRIMS
from qwen_megakernel.model.edges import SILENCE, Edges, Padding, silent_end_s

RATE = 24000
TEXT = "Hello there. How are you today?"


def trimmed(samples: np.ndarray, trim: str, silence_s: float = 0.05, cuts: tuple[int, ...] = ()) -> np.ndarray:
    edges = Edges(trim, silence_s, RATE)
    parts = [edges.push(part) for part in np.split(samples, sorted(cuts))]
    return np.concatenate([*parts, edges.finish()])


def speech(start_s: float, end_s: float, *, noise: float = 0.001) -> np.ndarray:
    """A tone of a second with a pause in it, between two silences."""
    tone = 0.3 * np.sin(2 * np.pi * 200 * np.arange(RATE) / RATE + 0.5)
    tone[RATE // 3 : 2 * RATE // 3] = 0
    parts = [np.zeros(round(start_s * RATE)), tone, np.zeros(round(end_s * RATE))]
    random = np.random.default_rng()
    return (np.concatenate(parts) + random.uniform(-noise, noise, sum(map(len, parts)))).astype(np.float32)


def silent_ends(samples: np.ndarray) -> tuple[float, float]:
    """Seconds before the first and behind the last loud sample."""
    loud = np.flatnonzero(np.abs(samples) > SILENCE)
    return loud[0] / RATE, (len(samples) - 1 - loud[-1]) / RATE


@pytest.mark.parametrize("trim", TRIMS)
@pytest.mark.parametrize("silence_s", [0.005, 0.05, 0.3])
def test_silence_is_cut_to_the_given_length(trim, silence_s):
    samples = speech(0.5, 0.7)
    before, after = silent_ends(trimmed(samples, trim, silence_s))
    whole = silent_ends(samples)
    assert before == pytest.approx(silence_s if trim in ("start", "both") else whole[0], abs=1e-3)
    assert after == pytest.approx(silence_s if trim in ("end", "both") else whole[1], abs=1e-3)


@pytest.mark.parametrize("trim", TRIMS[1:])
def test_the_speech_and_its_pauses_are_untouched(trim):
    samples = speech(0.5, 0.7)
    begin, end = round(0.5 * RATE), round(1.5 * RATE)
    out = trimmed(samples, trim)
    at = np.argmax(np.abs(out) > SILENCE)
    first = begin + np.argmax(np.abs(samples[begin:]) > SILENCE)
    assert np.array_equal(out[at : at + end - first], samples[first:end])


def test_a_cut_fades():
    """Silence that is a tone at -52 dBFS would begin at its height."""
    hum = (0.0025 * np.cos(2 * np.pi * 50 * np.arange(RATE) / RATE)).astype(np.float32)
    loud = np.full(500, 0.5, np.float32)
    out = trimmed(np.concatenate([hum, loud, hum]), "both", 0.05)
    assert abs(out[0]) < 1e-4 and abs(out[-1]) < 1e-4 and np.abs(out[:1000]).max() > 0.002
    assert np.abs(np.diff(out[: round(0.04 * RATE)])).max() < 5e-5


@pytest.mark.parametrize("trim, left_s", [("start", 0.05), ("end", 0.05), ("both", 0.05), ("none", 1.0)])
def test_of_silence_alone_only_the_given_length_is_left_and_what_is_short_stays_as_it_is(trim, left_s):
    assert len(trimmed(np.zeros(RATE, np.float32), trim)) == round(left_s * RATE)
    samples = speech(0.02, 0.03)
    assert np.array_equal(trimmed(samples, trim), samples)


@settings(max_examples=100)
@given(
    trim=st.sampled_from(TRIMS),
    ends=st.tuples(st.floats(0, 0.3), st.floats(0, 0.3)),
    silence_s=st.floats(0, 0.2),
    cuts=st.lists(st.integers(0, int(1.3 * RATE)), max_size=30).map(tuple),
)
def test_however_the_input_is_cut_the_output_is_the_same(trim, ends, silence_s, cuts):
    samples = disturbed(speech(*ends))
    out = trimmed(samples, trim, silence_s, cuts)
    assert np.array_equal(out, trimmed(samples, trim, silence_s))
    if trim == "none":
        assert np.array_equal(out, samples)


@settings(max_examples=30)
@given(st.floats(0.02, 0.4), st.floats(0, 0.4), st.lists(st.integers(0, int(1.3 * RATE)), max_size=30).map(sorted))
def test_added_silence_is_exact_however_the_input_is_cut(before_s, after_s, cuts):
    samples, outs = speech(0.1, 0.2), []
    samples[:40] = 0.5
    for parts in (np.split(samples, cuts), [samples]):
        edges = Edges("both", 0.0, RATE)
        padding = Padding(before_s, after_s, RATE, edges)
        out = [padding.push(edges.push(part)) for part in parts]
        outs.append(np.concatenate([*out, padding.push(edges.finish()), padding.finish()]))
    assert np.array_equal(*outs)
    assert silent_ends(outs[0]) == pytest.approx((before_s, max(after_s, 0.005)), abs=1e-3)


# ---------------------------------------------------------------- what is no speech, and what is


def disturbed(samples: np.ndarray) -> np.ndarray:
    """With clicks of up to 2 ms anywhere, also within speech."""
    random, samples = np.random.default_rng(), samples.copy()
    for at in random.integers(0, len(samples), random.integers(6)):
        samples[at : at + random.integers(1, 48)] += random.uniform(-0.9, 0.9)
    return samples


def click(random: np.random.Generator) -> np.ndarray:
    """A jump that dies away, up to 4 ms."""
    n = int(random.integers(1, 96))
    sign, height = random.choice([-1, 1]), 10 ** random.uniform(-1.5, 0)
    return (sign * height * np.exp(-4 * np.arange(n) / n)).astype(np.float32)


def warm_up(random: np.random.Generator) -> np.ndarray:
    """Noise that dies away, up to 40 ms, as a decoder may begin."""
    n = int(random.integers(100, 960))
    return (10 ** random.uniform(-2, 0) * random.uniform(-1, 1, n) * np.exp(-3 * np.arange(n) / n)).astype(np.float32)


@pytest.mark.parametrize("_draw", range(10))
@pytest.mark.parametrize("disturbance", ["click", "click at once", "warm-up"])
@pytest.mark.parametrize("silence_s", [0.0, 0.05, 0.3])
def test_what_clicks_before_speech_is_cut_and_never_heard(disturbance, silence_s, _draw, fresh_seed):
    random = np.random.default_rng(fresh_seed)
    begin = random.uniform(0.1, 0.5)
    samples = speech(begin, 0.3)
    at = 0
    if disturbance == "click":
        at = int(random.integers(RATE * (begin - 0.03)))
    noise = warm_up(random) if disturbance == "warm-up" else click(random)
    samples[at : at + len(noise)] += noise
    for trim in ("start", "both"):
        out = trimmed(samples, trim, silence_s)
        first = spoken(out, RATE)[0][0]
        assert first == pytest.approx(min(max(silence_s, 0.005), begin), abs=0.01)
        assert np.abs(out[: int((first - 0.001) * RATE)]).max(initial=0) < 2 * SILENCE, "no noise is left"
        assert np.abs(np.diff(out[:24], prepend=0)).max() < 0.003, "and no jump"
        at, tone = np.argmax(out > 0.1), samples[round(begin * RATE) :]
        tone = tone[np.argmax(tone > 0.1) :][: RATE // 2]
        assert np.array_equal(out[at : at + len(tone)], tone), "the speech is what it was"


@pytest.mark.parametrize("offset", [0.0, 0.02, -0.02])
@pytest.mark.parametrize("floor", [0.0, 0.0003, 0.0015])
def test_a_noise_floor_and_an_offset_are_silent(offset, floor, fresh_seed):
    random = np.random.default_rng(fresh_seed)
    samples = speech(0.4, 0.5, noise=0) + random.normal(0, floor, int(1.9 * RATE)) + offset
    out = trimmed(samples.astype(np.float32), "both", 0.05) - np.float32(offset)
    (begin, _), *_, (_, end) = spoken(out, RATE)
    assert begin == pytest.approx(0.05, abs=0.02) and len(out) / RATE - end == pytest.approx(0.05, abs=0.02)


ONSETS = {
    "h": [(0.06, 0.006, 0.03)],  # seconds of noise, and its level at the begin and the end
    "f": [(0.09, 0.004, 0.01)],
    "s": [(0.12, 0.004, 0.08)],
    "p": [(0.004, 0.05, 0.02), (0.05, 0.012, 0.008)],  # a burst, then breath
    "t": [(0.006, 0.1, 0.05), (0.06, 0.02, 0.008)],
    "k": [(0.008, 0.04, 0.02), (0.004, 0.001, 0.001), (0.004, 0.03, 0.01), (0.07, 0.02, 0.006)],  # a double burst
}


@pytest.mark.parametrize("_draw", range(5))
@pytest.mark.parametrize("consonant", ONSETS)
def test_no_part_of_a_soft_beginning_is_lost(consonant, _draw, fresh_seed):
    random = np.random.default_rng(fresh_seed)
    sounds = [np.linspace(a, b, int(s * RATE)) * random.normal(0, 1, int(s * RATE)) for s, a, b in ONSETS[consonant]]
    vowel = 0.2 * np.sin(2 * np.pi * random.uniform(90, 250) * np.arange(RATE // 2) / RATE)
    closure = random.integers(1000, 9000)
    whole = np.concatenate([np.zeros(closure), *sounds, vowel, np.zeros(5000)]).astype(np.float32)
    out = np.zeros_like(whole)
    rest = trimmed(whole, "start", 0.0)
    out[-len(rest) :] = rest
    begin = slice(closure, closure + sum(map(len, sounds)))
    assert np.square(whole - out).sum() < 1e-3 * np.square(whole[begin]).sum()
    assert len(whole) - len(rest) > closure - RATE // 50


def test_a_click_within_a_pause_stays_and_one_behind_the_speech_does_not(fresh_seed):
    random = np.random.default_rng(fresh_seed)
    samples = speech(0.2, 0.6)
    whole, noise = samples.copy(), click(random)
    at = round(random.uniform(0.58, 0.8) * RATE)  # within its pause
    whole[at : at + len(noise)] += noise
    begin, end = round(0.25 * RATE), round(1.15 * RATE)
    out = trimmed(whole, "both")
    plain = trimmed(samples, "both")
    assert len(out) == len(plain)
    assert np.abs(out - plain).max() == pytest.approx(np.abs(whole - samples)[begin:end].max())
    behind = samples.copy()
    at = round(random.uniform(1.3, 1.7) * RATE)
    behind[at : at + len(noise)] += noise
    assert np.array_equal(trimmed(behind, "both"), plain)
    assert silent_end_s(behind, RATE) == silent_end_s(samples, RATE) == pytest.approx(0.6, abs=0.002)


def test_clicks_alone_are_silence(fresh_seed):
    random = np.random.default_rng(fresh_seed)
    samples = np.zeros(RATE, np.float32)
    for at in range(1000, RATE, 3000):
        noise = click(random)
        samples[at : at + len(noise)] = noise
    assert silent_end_s(samples, RATE) == 1.0
    for trim in ("start", "both"):
        assert not trimmed(samples, trim).any() and len(trimmed(samples, trim)) == round(0.05 * RATE)


def test_nothing_is_held_back_once_speech_began_and_little_before():
    samples = speech(0.5, 0.0)
    edges, taken, given, waited = Edges("start", 0.05, RATE), 0, 0, 0
    for part in np.split(samples, range(24, len(samples), 24)):
        taken += len(part)
        given += len(edges.push(part))
        if edges.begin is None:
            waited = taken
        else:
            assert given == taken - edges.cut
    assert waited / RATE == pytest.approx(0.5, abs=0.02)


WRONG = [({"trim": trim}, "trim must be one of none, start, end, both, got") for trim in ("", "all", 1, True)]
WRONG += [
    ({"trim": "both", "silence_s": silence_s}, "silence_s must be a number from 0 to 2 seconds, got")
    for silence_s in (-0.1, 2.1, float("nan"), "0.1", True)
]


@pytest.mark.parametrize("wrong, told", WRONG)
def test_an_unknown_trim_and_an_impossible_silence_are_refused(engine, wrong, told):
    with pytest.raises(RequestError, match=told):
        engine.request(**wrong)


# ---------------------------------------------------------------- an engine


@pytest.fixture(scope="module")
def engine():
    with TTSEngine.load("demo", device="cpu", threads=1, max_streams=2) as engine:
        yield engine


@pytest.mark.parametrize("trim, speed", [slow_case("start", 1.0), slow_case("end", 1.3), ("both", 1.3)])
def test_chunks_join_to_the_trimmed_utterance(engine, trim, speed):
    request = {"sampling": SamplingParams(seed=3), "trim": trim, "speed": speed}
    audio = engine.generate(TEXT, **request)
    for chunk_frames in (1, 5, None):
        chunks = list(engine.stream(TEXT, chunk_frames=chunk_frames, **request))
        assert all(len(chunk.samples) for chunk in chunks)
        assert np.array_equal(np.concatenate([chunk.samples for chunk in chunks]), audio.samples)
        assert np.array_equal(np.concatenate([chunk.codes for chunk in chunks]), audio.codes)


TEXTS = (
    "Hello there.|She sells sea shells.|How are you today?|Please take your time.|The train leaves at noon.|It is late."
    "|Cats sleep all day.|He has found it.|Five fish swim.|Put the pot back.|Keep cool.|Paper and pens.|I think so."
    "|Yes.|Who is there?|Today it rains.|Can you help me?|Very well, thank you.|Most people know that.|No, not now."
    "|Open the door.|That was a good idea.|We will see each other.|Good morning.|Let me think."
).split("|")


@pytest.mark.parametrize("count", [brief_case(1), slow_case(8)])
def test_of_the_demo_voice_as_much_silence_is_left_as_was_asked_for(engine, count):
    """`silence_s` is left within 20 ms, and no jump is in the first millisecond. Soft consonants take
    longer than that to rise through -50 dBFS."""
    requests = [{"text": text, "speaker": speaker} for text in TEXTS[:count] for speaker in ("ada", "max")]
    for heard in engine.map(requests, trim="start", silence_s=0.05):
        samples = heard.audio.samples
        first, last = (spoken(samples, RATE, level_db=level)[0][0] for level in (-53, -47))
        assert first - 0.02 <= 0.05 <= last + 0.02, requests[heard.index]
        assert np.abs(np.diff(samples[:24], prepend=0)).max() < 0.02


def test_the_speech_is_what_it_is_without_trimming(engine):
    sampling = SamplingParams(seed=3)
    whole = engine.generate(TEXT, sampling=sampling, chunk_frames=1)
    both = engine.generate(TEXT, sampling=sampling, trim="both", chunk_frames=1)
    assert np.array_equal(both.codes, whole.codes) and np.array_equal(both.samples, trimmed(whole.samples, "both"))
    (begin, _), *_ = spoken(both.samples, RATE)
    assert begin == pytest.approx(0.05, abs=0.02) and len(both.samples) < len(whole.samples) - 2000
    assert both.duration_s < whole.duration_s


def test_silence_that_is_cut_is_no_first_chunk():
    """The first chunk that a listener gets holds sound. The frames that were cut are counted in it."""
    with probed("demo", max_streams=1) as engine:
        left = [5]  # frames that are silent

        def push(slots, codes):
            sound = engine.probes.vocoder.real.push(slots, codes)
            silent, left[0] = min(left[0], codes.shape[1]), max(0, left[0] - codes.shape[1])
            sound[:, : silent * 1920] = 0
            return sound

        engine.probes.vocoder.push = push
        chunks = list(engine.stream(TEXT, sampling=SamplingParams(seed=3), trim="start", silence_s=0.02))
    heard = np.concatenate([chunk.samples for chunk in chunks])
    assert len(chunks[0].codes) > 5 and spoken(heard, RATE)[0][0] == pytest.approx(0.02, abs=0.02)
