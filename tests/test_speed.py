"""Speech at another speed: how long it is, that its pitch stays, that chunks join, and what it changes in an engine."""

import numpy as np
import pytest
from callers import say, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import PATIENCE_S, slow_case, until

from qwen_megakernel import RequestError, TTSEngine
from qwen_megakernel.choices import FASTEST, SLOWEST
from qwen_megakernel.engine import output
from qwen_megakernel.model.time_stretch import TimeStretch
from qwen_megakernel.speech.words import GUESS, SpeechRate, WordTimes

RATE, FRAME = 24000, 1920
SPEEDS = (0.25, 0.5, 0.77, 0.95, 1.05, 1.25, 1.5, 2.0, 3.1, 4.0)
TEXT = "Hello there, how are you today?"
LONG_TEXT = "The weather is fine today, so we will walk to the river and have our lunch there."
NOISE = np.random.default_rng(1)


def stretched(samples: np.ndarray, speed: float, cuts: list[int] | None = None) -> np.ndarray:
    stretch = TimeStretch(speed, RATE)
    parts = [stretch.push(part) for part in np.split(samples, cuts or [])]
    return np.concatenate([*parts, stretch.finish()])


def seconds(count: float) -> np.ndarray:
    return np.arange(round(count * RATE)) / RATE


def noisy(samples: np.ndarray, level: float = 0.02) -> np.ndarray:
    return (samples + level * NOISE.standard_normal(len(samples))).astype(np.float32)


def voice(hz: float, count: float = 2.0) -> np.ndarray:
    """A buzz with 20 harmonics, as vocal cords make it."""
    return noisy(sum(np.sin(2 * np.pi * k * hz * seconds(count)) / k for k in range(1, 21)) * 0.2)


def loudest_hz(samples: np.ndarray) -> float:
    size = 1 << 20
    return np.abs(np.fft.rfft(samples * np.hanning(len(samples)), size)).argmax() * RATE / size


def pitches(samples: np.ndarray) -> np.ndarray:
    """Of the voiced ones among windows of 50 ms, by autocorrelation: [windows, 2], the window's middle in seconds and
    its pitch in Hz."""
    found, size, lags = [], RATE // 20, range(RATE // 400, RATE // 70)
    for begin in range(0, len(samples) - size, size // 4):
        part = samples[begin : begin + size].astype(np.float64)
        if np.sqrt((part**2).mean()) < 0.02:
            continue
        alike = [
            np.dot(part[:-lag], part[lag:]) / np.sqrt(np.dot(part[:-lag], part[:-lag]) * np.dot(part[lag:], part[lag:]))
            for lag in lags
        ]
        peaks = [i for i in range(1, len(alike) - 1) if alike[i - 1] <= alike[i] > alike[i + 1]]
        high = [i for i in peaks if alike[i] > max(0.9, 0.97 * max(alike))]
        if high:  # the first of them: multiples of the period are as much alike
            left, top, right = alike[high[0] - 1 : high[0] + 2]
            lag = lags[high[0]] + 0.5 * (left - right) / (left - 2 * top + right)
            found.append(((begin + size / 2) / RATE, RATE / lag))
    return np.array(found)


def deviations(before: np.ndarray, after: np.ndarray, speed: float) -> np.ndarray:
    """By how much the pitch of each window of `after` differs from the nearest one that was within 50 ms of there."""
    found = []
    for at, hz in after:
        there = before[np.abs(before[:, 0] - at * speed) < 0.05, 1]
        if len(there):
            found.append(np.abs(there / hz - 1).min())
    return np.array(found)


# ---------------------------------------------------------------- the stretching alone


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("hz", [70, slow_case(110), 220, slow_case(440), 1000])
def test_a_tone_keeps_its_pitch_and_loudness(hz, speed):
    tone = noisy(0.4 * np.sin(2 * np.pi * hz * seconds(5)))
    out = stretched(tone, speed)
    assert out.dtype == np.float32 and len(out) == round(len(tone) / speed)
    assert loudest_hz(out) == pytest.approx(hz, rel=0.01)
    assert out.std() == pytest.approx(tone.std(), rel=0.03) and np.abs(out).max() <= np.abs(tone).max() + 1e-6


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("hz", [85, slow_case(120), slow_case(210), 300])
def test_a_voice_keeps_its_pitch(hz, speed):
    out = pitches(stretched(voice(hz), speed))[:, 1]
    assert len(out) > 10 and np.median(np.abs(out / hz - 1)) < 0.01
    assert np.mean(np.abs(out / hz - 1) < 0.02) > 0.9


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_chirp_rises_as_much_faster(speed):
    """At every tenth of it the output has the frequency that the input has there."""
    at = seconds(5)
    chirp = noisy(0.4 * np.sin(2 * np.pi * (300 * at + 30 * at**2)))  # 300 to 600 Hz
    out = stretched(chirp, speed)
    for tenth in range(1, 10):
        middle = len(out) * tenth // 10
        half = min(RATE // 20, len(out) // 20)
        assert loudest_hz(out[middle - half : middle + half]) == pytest.approx(300 + 30 * tenth, rel=0.01)


@settings(max_examples=60)
@given(
    speed=st.one_of(st.sampled_from(SPEEDS), st.floats(SLOWEST, FASTEST)),
    length=st.integers(0, RATE),
    cuts=st.lists(st.integers(0, RATE), max_size=40),
    kind=st.sampled_from(("voice", "tone", "silence", "noise")),
)
def test_however_the_input_is_cut_the_output_is_the_same(speed, length, cuts, kind):
    samples = {
        "voice": SOME_VOICE,
        "tone": np.sin(2 * np.pi * 200 * seconds(1)).astype(np.float32),  # whose periods are all alike
        "silence": np.zeros(RATE, np.float32),
        "noise": SOME_NOISE,
    }[kind][:length]
    whole = stretched(samples, speed)
    assert len(whole) == round(length / speed)
    pieces = stretched(samples, speed, sorted(min(cut, length) for cut in cuts))
    assert np.array_equal(whole, pieces)


SOME_VOICE, SOME_NOISE = voice(110, 1.0), noisy(np.zeros(RATE), 0.2)


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("size", [1, 100, FRAME, 8 * FRAME])
def test_at_most_60_ms_are_held_back_and_every_frame_yields_sound(size, speed):
    samples, stretch, made = np.resize(SOME_NOISE, 20 * size), TimeStretch(speed, RATE), 0
    for begin in range(0, len(samples), size):
        out = stretch.push(samples[begin : begin + size])
        made += len(out)
        held_s = (begin + size) / RATE - speed * made / RATE
        assert 0 <= held_s < 0.06
        assert len(out) or size < FRAME


# ---------------------------------------------------------------- an engine's speech


@pytest.fixture(scope="module")
def demo(engine_for) -> TTSEngine:
    return engine_for("demo")


@pytest.mark.parametrize("speed", [0.6, 1.7])
@pytest.mark.slow
def test_speech_is_so_much_shorter_and_says_the_same_at_the_same_pitch(demo, speed):
    off, resampled = [], []
    for speaker, text in (("ada", TEXT), ("max", LONG_TEXT)):
        request = {"speaker": speaker, "sampling": seeded(3)}
        plain, audio = demo.generate(text, **request), demo.generate(text, **request, speed=speed)
        assert np.array_equal(plain.codes, audio.codes) and audio.finish_reason == "eos"
        assert len(audio.samples) == round(len(plain.samples) / speed)
        assert audio.duration_s == pytest.approx(plain.duration_s / speed, rel=0.02)
        assert audio.rtf == audio.compute_s / audio.duration_s
        before, after = pitches(plain.samples), pitches(audio.samples)
        off.append(deviations(before, after, speed))
        resampled.append(deviations(before, after * [1, speed], speed))
        assert audio.samples.std() == pytest.approx(plain.samples.std(), rel=0.1)
    off, resampled = np.concatenate(off), np.concatenate(resampled)
    assert len(off) > 30 and np.median(off) < 0.01 and np.quantile(off, 0.8) < 0.03
    assert np.median(resampled) > 0.05, "what merely plays faster would be found out"


@pytest.mark.parametrize("speed", [slow_case(0.25), 1.5, slow_case(4.0)])
def test_chunks_of_any_size_join_to_what_generate_returns(demo, speed):
    request = {"speaker": "ada", "sampling": seeded(3), "speed": speed, "max_frames": 20}
    audio = demo.generate(TEXT, **request)
    for chunk_frames in (None, 1, (2, 5, 1), 500):
        stream = demo.stream(TEXT, **request, chunk_frames=chunk_frames)
        chunks = list(stream)
        assert np.array_equal(np.concatenate([c.samples for c in chunks]), audio.samples), chunk_frames
        assert np.array_equal(np.concatenate([c.codes for c in chunks]), audio.codes)
        assert all(len(c.samples) for c in chunks) and all(len(c.codes) for c in chunks[:-1])
        assert np.array_equal(stream.utterance.result().samples, audio.samples)


def test_the_first_chunk_comes_with_the_same_frame(own_engine):
    for speed in SPEEDS:
        first = next(own_engine.stream(TEXT, speed=speed, max_frames=5))
        assert len(first.codes) == 1 and len(first.samples) >= (FRAME - 0.06 * RATE) / speed


def test_text_in_pieces_is_said_at_the_speed(demo):
    request = {"speaker": "ada", "sampling": seeded(3), "speed": 1.5}
    audio = say(demo.submit(**request), *(f"{word} " for word in TEXT.split())).result(timeout=PATIENCE_S)
    assert len(audio.samples) == round(audio.frames * FRAME / 1.5)


@pytest.mark.parametrize("frames", [1, 2, 12])
def test_speech_that_a_limit_ends_is_whole_too(own_engine, frames):
    for speed in (0.25, 1.5, 4.0):
        audio = own_engine.generate(TEXT, max_frames=frames, speed=speed)
        assert audio.finish_reason == "length" and len(audio.samples) == round(frames * FRAME / speed)


def test_a_cancelled_utterance_drops_what_was_held_back(own_engine):
    stream = own_engine.stream(TEXT, max_frames=2000, chunk_frames=1, speed=1.5)
    chunks = [next(stream)]
    stream.utterance.cancel()
    chunks += stream
    audio = stream.utterance.result(timeout=PATIENCE_S)
    assert audio.finish_reason == "cancelled" and all(len(c.codes) for c in chunks)
    assert np.array_equal(np.concatenate([c.samples for c in chunks]), audio.samples)
    assert len(audio.samples) < round(audio.frames * FRAME / 1.5)
    until(lambda: own_engine.snapshot().at_rest)


def test_at_1_nothing_is_stretched(own_engine, monkeypatch):
    request = {"sampling": seeded(3), "max_frames": 20}
    plain = own_engine.generate(TEXT, **request)

    def never(*_args):
        raise AssertionError("nothing is to be stretched at 1.0")

    monkeypatch.setattr(output, "TimeStretch", never)
    for speed in (1.0, 1, np.float32(1)):
        chunks = list(own_engine.stream(TEXT, **request, speed=speed))
        assert [len(c.samples) for c in chunks] == [n * FRAME for n in (1, 2, 4, 8, 5)]
        assert np.concatenate([c.samples for c in chunks]).tobytes() == plain.samples.tobytes()
    with pytest.raises(AssertionError, match="at 1.0"):
        own_engine.generate(TEXT, **request, speed=1.01)


WRONG = [0, -1, 0.2499, 4.01, 10**400, float("nan"), float("inf"), True, False, "1.5", [1.5], 1.5j]


@pytest.mark.parametrize("speed", WRONG, ids=lambda speed: str(speed)[:9])
def test_a_speed_that_cannot_be_is_refused_with_the_range(own_engine, speed):
    with pytest.raises(RequestError, match=r"speed .*0\.25 to 4") as refused:
        own_engine.submit(TEXT, speed=speed)
    assert len(str(refused.value)) < 150
    for call in (own_engine.request, lambda **request: own_engine.pieces(TEXT, **request)):
        with pytest.raises(RequestError, match="speed"):
            call(speed=speed)
    assert own_engine.health()["streams"] == 0


@pytest.mark.parametrize("speed", [0.25, 4, 1, np.float32(1.5), np.int64(2)])
def test_numbers_of_any_kind_are_speeds(own_engine, speed):
    own_engine.request(speed=speed)


# ---------------------------------------------------------------- words


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_word_times_follow_the_speed(speed):
    """Words begin so much sooner, by a rate that is learned of the voice and not of the speed."""
    plain_rate, rate = SpeechRate(), SpeechRate()
    for _ in range(2):  # at first the rate is a guess
        plain, times = WordTimes(plain_rate), WordTimes(rate, speed)
        told: list = []
        faster: list = []
        for words, by, found in ((plain, 1.0, told), (times, speed, faster)):
            words.add(TEXT)
            for _ in range(2):
                words.hear(np.full(round(24000 / by), 0.1, np.float32), 24000)
                found += words.due()
            found += words.finish()
        assert [word for word, _ in faster] == TEXT.split()
        assert [at for _, at in faster] == pytest.approx([at / speed for _, at in told])
        assert rate.seconds == pytest.approx(plain_rate.seconds) and rate.seconds != GUESS
