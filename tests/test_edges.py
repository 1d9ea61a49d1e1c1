"""Silence at the ends of speech: what is cut, that it clicks nowhere, that chunks join, what an engine makes of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import probed
from waiting import slow_case, until

from qwen_megakernel import RequestError, SamplingParams, TTSEngine
from qwen_megakernel.choices import TRIMS
from qwen_megakernel.model.edges import SILENCE, Edges

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
    loud = np.full(100, 0.5, np.float32)
    out = trimmed(np.concatenate([hum, loud, hum]), "both", 0.05)
    assert abs(out[0]) < 1e-4 and abs(out[-1]) < 1e-4 and np.abs(out[:1000]).max() > 0.002
    assert np.abs(np.diff(out[: round(0.04 * RATE)])).max() < 5e-5


@pytest.mark.parametrize("trim, left_s", [("start", 0.05), ("end", 0.05), ("both", 0.05), ("none", 1.0)])
def test_of_silence_alone_only_the_given_length_is_left_and_what_is_short_stays_as_it_is(trim, left_s):
    assert len(trimmed(np.zeros(RATE, np.float32), trim)) == round(left_s * RATE)
    samples = speech(0.02, 0.03)
    assert np.array_equal(trimmed(samples, trim), samples)


@settings(max_examples=100, deadline=None)
@given(
    trim=st.sampled_from(TRIMS),
    ends=st.tuples(st.floats(0, 0.3), st.floats(0, 0.3)),
    silence_s=st.floats(0, 0.2),
    cuts=st.lists(st.integers(0, int(1.3 * RATE)), max_size=30).map(tuple),
)
def test_however_the_input_is_cut_the_output_is_the_same(trim, ends, silence_s, cuts):
    samples = speech(*ends)
    assert np.array_equal(trimmed(samples, trim, silence_s, cuts), trimmed(samples, trim, silence_s))


WRONG = [({"trim": trim}, "trim must be one of none, start, end, both, got") for trim in ("", "all", 1, True)]
WRONG += [
    ({"trim": "both", "silence_s": silence_s}, "silence_s must be a number from 0 to 2 seconds, got")
    for silence_s in (-0.1, 2.1, float("nan"), "0.1", True)
]


@pytest.mark.parametrize("wrong, told", WRONG)
def test_an_unknown_trim_and_an_impossible_silence_are_refused(engine, wrong, told):
    with pytest.raises(RequestError, match=told):
        engine.check(**wrong)


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


def test_the_speech_is_what_it_is_without_trimming(engine):
    sampling = SamplingParams(seed=3)
    whole = engine.generate(TEXT, sampling=sampling, chunk_frames=1)
    both = engine.generate(TEXT, sampling=sampling, trim="both", chunk_frames=1)
    assert np.array_equal(both.codes, whole.codes) and np.array_equal(both.samples, trimmed(whole.samples, "both"))
    assert max(silent_ends(both.samples)) < 0.0501 < max(silent_ends(whole.samples))
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
    assert len(chunks[0].codes) > 5 and silent_ends(chunks[0].samples)[0] == pytest.approx(0.02, abs=1e-3)


def test_wrong_values_are_refused_at_the_border(engine):
    for wrong in ({"trim": "all"}, {"trim": "both", "silence_s": 3.0}):
        with pytest.raises(RequestError):
            engine.submit(TEXT, **wrong)
    until(lambda: engine.health()["streams"] == 0)
