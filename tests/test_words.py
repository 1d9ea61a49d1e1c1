"""When words begin: WordTimes against made-up speech whose words are known, and who shares a pace."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.load import DEMO_FOLDER
from qwen_megakernel.errors import CheckpointError
from qwen_megakernel.model.conditioning import Conditioning
from qwen_megakernel.model.voice import Voice
from qwen_megakernel.speech import rates
from qwen_megakernel.speech.rates import SpeechRates
from qwen_megakernel.speech.words import GUESS, SpeechRate, WordTimes, weight, words_of
from spoken_text.normalize import Silence

RATE = 24000
TEXT = "We looked for it everywhere, but nobody knew. Then Ada found the key, and all of us went home. Was it late?"


@pytest.fixture
def rng(fresh_seed):
    return np.random.default_rng(fresh_seed)


def noise(rng, seconds: float) -> np.ndarray:
    return rng.choice([-0.3, 0.3], round(seconds * RATE)).astype(np.float32)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE), np.float32)


def spoken(rng, text: str, pace: float, *, lead: float = 0.3, pause: float = 0.35) -> tuple[np.ndarray, list[float]]:
    """Speech at `pace` seconds for a unit of weight, with pauses behind marks; and where each word begins."""
    parts, starts = [silence(lead)], []
    for word in words_of(text):
        starts.append(sum(map(len, parts)) / RATE)
        parts.append(noise(rng, pace * weight(word)))
        if word[-1] in ".,?":
            parts.append(silence(pause))
    return np.concatenate(parts), starts


def told(times: WordTimes, samples: np.ndarray, rng, heard: int = 0) -> list[float]:
    """The times of all words, told while the sound comes in chunks of any length. `heard`: samples that have come."""
    found = []
    while heard < len(samples):
        chunk = samples[heard : heard + int(rng.integers(1, RATE))]
        times.hear(chunk, RATE)
        heard += len(chunk)
        due = times.due()
        assert all(at < heard / RATE for _, at in due), "no word before its sound"
        found += due
    return [at for _, at in found + times.finish()]


@pytest.mark.parametrize("speed", [1.0, 0.5, 2.0])
def test_pauses_are_no_speech_and_correct_the_pace_while_it_is_spoken(rng, speed):
    """The guess is wrong by up to a fifth. An error lasts until the next pause, at any length of the pauses."""
    pace = GUESS * (1 + rng.choice([-1, 1]) * rng.uniform(0.1, 0.2))
    samples, starts = spoken(rng, TEXT, pace / speed, lead=rng.uniform(0, 1), pause=rng.uniform(0.25, 2) / speed)
    rate, cut = SpeechRate(), len(samples) // 2
    times = WordTimes(rate, speed)
    times.add(TEXT)
    times.hear(samples[:cut], RATE)
    early = times.due()
    assert abs(rate.seconds - pace) < abs(GUESS - pace) * 0.7, "it has learned before the end"
    found = [at for _, at in early] + told(times, samples, rng, cut)
    errors = np.abs(np.array(found) - starts)
    first = TEXT.split().index("Then")
    assert errors.max() < 0.5 / speed and errors[first:].mean() < 0.05 / speed, errors


@pytest.mark.parametrize("cut", [1, 2, 7])
def test_text_may_come_in_pieces_that_are_cut_anywhere(rng, cut):
    samples, _ = spoken(rng, TEXT, GUESS)
    whole, times = times_of(TEXT), WordTimes(SpeechRate())
    for start in range(0, len(TEXT), cut):
        times.add(TEXT[start : start + cut])
    for words in (whole, times):
        words.hear(samples, RATE)
    found = times.due() + times.finish()
    assert [word for word, _ in found] == TEXT.split() and found == whole.due() + whole.finish()


@pytest.mark.parametrize("seconds", [0.1, 1.7])
def test_silence_around_the_speech_is_not_spread_over_words(rng, seconds):
    text = "Hello there"
    samples, starts = spoken(rng, text, GUESS, lead=seconds)
    found = told(times_of(text), np.concatenate([samples, silence(rng.uniform(0.05, 3))]), rng)
    assert found == pytest.approx(starts, abs=0.025)


def times_of(text: str, rate: SpeechRate | None = None) -> WordTimes:
    times = WordTimes(rate or SpeechRate())
    times.add(text)
    return times


def test_a_pause_at_no_mark_is_where_a_word_ends(rng):
    text = "The people of the village met"
    samples, starts = spoken(rng, text, GUESS, lead=0)
    at = round(starts[3] * RATE)
    found = told(times_of(text), np.concatenate([samples[:at], silence(0.4), samples[at:]]), rng)
    assert found == pytest.approx([*starts[:3], *(start + 0.4 for start in starts[3:])], abs=0.05)


def test_a_pause_before_the_last_word_is_not_the_end(rng):
    """The voice drew the words out, so their end is where the last one was expected to end."""
    first, last = "and it may rain during the", "night."
    pace = GUESS * rng.uniform(1.2, 1.3)
    before, after = noise(rng, pace * sum(map(weight, first.split()))), noise(rng, pace * weight(last))
    times = times_of(f"{first} {last}")
    found = told(times, np.concatenate([before, silence(0.3), after, silence(0.3)]), rng)
    assert found[-1] == pytest.approx(len(before) / RATE + 0.3, abs=0.05)


def test_a_noise_behind_the_speech_is_no_word(rng):
    text = "and it may rain during the night."
    words = noise(rng, GUESS * sum(map(weight, text.split())))
    alone = told(times_of(text), np.concatenate([words, silence(0.3)]), rng)
    noisy = told(times_of(text), np.concatenate([words, silence(0.3), noise(rng, 0.07), silence(0.3)]), rng)
    assert noisy == pytest.approx(alone, abs=0.02)


def test_the_next_pause_tells_which_word_ended_at_one(rng):
    """A pause before "dry," looks like the one behind it, until that comes too."""
    parts, starts, said = [], [], {"and": 0.17, "dry,": 0.35}
    for word in words_of("The weather today is mild and dry, with a little wind from the west."):
        starts.append(sum(map(len, parts)) / RATE)
        parts += [noise(rng, GUESS * weight(word)), silence(said.get(word, 0.0))]
    times = times_of("The weather today is mild and dry, with a little wind from the west.", SpeechRate(GUESS * 1.02))
    assert told(times, np.concatenate(parts), rng) == pytest.approx(starts, abs=0.15)


def test_sound_without_a_pause_is_spread_by_length(rng):
    samples, starts = spoken(rng, TEXT, GUESS * 1.1, lead=0, pause=0)
    errors = np.abs(np.array(told(times_of(TEXT), samples, rng)) - starts)
    assert errors.max() < 0.15 * len(samples) / RATE and errors[-1] < 0.5


def test_speech_that_pauses_nowhere_near_a_mark_is_still_told_whole(rng):
    parts = [part for _ in range(20) for part in (noise(rng, rng.uniform(0.03, 0.5)), silence(rng.uniform(0.1, 0.6)))]
    found = told(times_of(TEXT), np.concatenate(parts), rng)
    assert len(found) == len(words_of(TEXT)) and found == sorted(found)


def test_a_slow_writer_leaves_no_word_untold(rng):
    samples, starts = spoken(rng, "One two three", GUESS, lead=0)
    times = times_of("One two three")
    times.hear(samples, RATE)
    waits = times.due()
    times.flush()
    assert len(waits) < 3 and [at for _, at in waits + times.due()] == pytest.approx(starts, abs=0.02)


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 100])
def test_words_that_are_left_out_take_no_time(cut):
    text = "<think>One two three four five. Six seven.</think> Hello there."
    times = WordTimes(SpeechRate(), silence=Silence())
    for start in range(0, len(text), cut):
        times.add(text[start : start + cut])
    times.hear(np.full(48000, 0.1, np.float32), 24000)
    said = dict(times.finish())
    assert said["two"] == said["six" if "six" in said else "Six"] < 0.8 < said["there."]


def test_a_part_that_is_whole_ends_with_a_word(rng):
    """No pause is heard there. Its voice is faster than the guess."""
    first, second = "One two three four five six. ", "Seven eight nine."
    samples, _ = spoken(rng, first, 0.75 * GUESS, lead=0, pause=0)
    rate = SpeechRate()
    times = times_of(first + second, rate)
    times.hear(samples, RATE)
    times.end_part()
    assert [word for word, _ in times.due()] == first.split() and rate.seconds < GUESS
    more, _ = spoken(rng, second, 0.75 * GUESS, lead=0)
    found = told(times, np.concatenate([samples, more]), rng, len(samples))
    assert found[0] == pytest.approx(len(samples) / RATE, abs=0.02)


def test_a_part_ends_before_the_text_so_far_does(rng):
    """The voice drew the words of the part out, so their end is where the next part's word was expected to end."""
    first, last = "and it may rain during the", "night."
    times = times_of(f"{first} {last}")
    times.hear(noise(rng, GUESS * rng.uniform(1.2, 1.3) * sum(map(weight, first.split()))), RATE)
    times.end_part()
    assert [word for word, _ in times.due()] == first.split()


def test_a_pace_is_not_learned_from_other_words(rng):
    rate = SpeechRate()
    for seconds in (0.0, 0.01, 1e3):
        rate.learn(10, seconds)
    rate.learn(0.0, 0.0)
    assert rate.seconds == GUESS
    for _ in range(30):
        rate.learn(20, 20 * 0.05)
    assert rate.seconds == pytest.approx(0.05, rel=0.01)


# ---------------------------------------------------------------- who shares a pace


def checkpoint(fingerprint="a.b", adapters=(), shipped=None) -> SimpleNamespace:
    talker = SimpleNamespace(speakers={"ada": 1, "max": 2, "oliver": 2})
    config = SimpleNamespace(talker=talker, seconds_per_letter=shipped or {})
    return SimpleNamespace(fingerprint=fingerprint, adapters=adapters, config=config)


def voice(seed: int) -> Voice:
    return Voice(torch.full((4,), float(seed)), None, None, "a.b")


@pytest.fixture
def no_rates():
    rates._rate.cache_clear()
    yield
    rates._rate.cache_clear()


def test_a_pace_belongs_to_checkpoint_voice_language_and_instruct(no_rates):
    def pace(conditioning=("ada", "english"), **of):
        return SpeechRates(checkpoint(**of)).of(Conditioning(*conditioning))

    same = pace()
    others = [
        pace(("max", "english")),
        pace(("ada", "german")),
        pace(("ada", "english", "Slowly.")),
        pace((None, "english", None, voice(1))),
        pace((None, "english", None, voice(2))),
        pace(fingerprint="a.c"),
        pace(adapters=[SimpleNamespace(folder="/tmp/adapter")]),
    ]
    assert len(set(map(id, [same, *others]))) == 1 + len(others)
    assert pace() is same, "another engine of this checkpoint goes on with it"
    assert pace((None, "english", None, voice(1))) is others[3], "made anew from the same recording"
    assert pace(("oliver", "english")) is others[0], "another name of max"


def test_an_instruct_begins_with_the_pace_of_the_voice(no_rates):
    plain, slow = Conditioning("ada", "english"), Conditioning("ada", "english", "Slowly.")
    paces = SpeechRates(checkpoint(shipped={"ada": 0.04}))
    paces.of(plain).learn(100, 4.5)
    assert paces.of(slow).seconds == paces.of(plain).seconds != 0.04


def test_paces_are_bounded_and_the_last_used_stay(no_rates):
    paces = SpeechRates(checkpoint())
    first, second = paces.of(Conditioning("ada", "0")), paces.of(Conditioning("ada", "1"))
    for number in range(2, rates._MOST + 1):
        paces.of(Conditioning("ada", str(number)))
        assert paces.of(Conditioning("ada", "0")) is first
    assert paces.of(Conditioning("ada", "1")) is not second and rates._rate.cache_info().currsize <= rates._MOST


def test_the_demo_voices_own_pace_comes_with_it(no_rates):
    shipped = ModelConfig.from_folder(DEMO_FOLDER).seconds_per_letter
    assert set(shipped) == {"ada", "max"} and all(0.04 < seconds < 0.08 for seconds in shipped.values())
    paces = SpeechRates(checkpoint(shipped=shipped))
    assert [paces.of(Conditioning(name)).seconds for name in ("ada", "max", "oliver")] == [
        shipped[name] for name in ("ada", "max", "max")
    ]
    assert SpeechRates(checkpoint(fingerprint="x.y")).of(Conditioning("ada")).seconds == GUESS


@pytest.mark.parametrize("wrong", [{"nobody": 0.05}, {"ada": 0}, {"ada": 7.0}, {"ada": "fast"}, [0.05], {"ada": True}])
def test_a_wrong_pace_of_a_checkpoint_is_refused(tmp_path, wrong):
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "voice", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"seconds_per_letter": wrong}))
    with pytest.raises(CheckpointError, match="seconds_per_letter"):
        ModelConfig.from_folder(folder)
