"""The demo voice, heard by a recogniser (Debian's pocketsphinx, US English), skipped where that is missing."""

import re
import shutil
import subprocess

import numpy as np
import pytest
import soundfile
import soxr

from qwen_megakernel import SamplingParams

pytestmark = pytest.mark.skipif(not shutil.which("pocketsphinx_continuous"), reason="needs pocketsphinx")

NUMBERS = "One two three four five."
OTHER = "The children are playing in the garden."


@pytest.fixture
def heard(engine_for, tmp_path):
    """heard(text, seed) -> the words that pocketsphinx makes of the demo voice's speech."""

    def recognise(text: str, seed: int, **request) -> list[str]:
        audio = engine_for("demo").generate(text, sampling=SamplingParams(seed=seed), **request)
        assert audio.finish_reason == "eos"
        speech = soxr.resample(audio.samples, audio.sample_rate, 16000)
        speech = np.concatenate([np.zeros(3200), 0.6 * speech / np.abs(speech).max(), np.zeros(4800)])
        # Digital silence throws the recogniser's noise estimate off.
        speech += np.random.default_rng(0).standard_normal(len(speech)) * 2e-4
        soundfile.write(tmp_path / "speech.wav", speech, 16000)
        command = ["pocketsphinx_continuous", "-infile", str(tmp_path / "speech.wav"), "-logfn", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return re.findall(r"[a-z']+", done.stdout.lower())

    return recognise


@pytest.mark.parametrize("non_streaming_mode", [True, False])
def test_numbers_are_understood(heard, non_streaming_mode):
    """By the clearest speaker, in three of five attempts at least four of the five words."""
    words = re.findall("[a-z]+", NUMBERS.lower())
    said = [heard(NUMBERS, seed, speaker="max", non_streaming_mode=non_streaming_mode) for seed in range(1, 6)]
    hits = [sum(word in attempt for word in words) for attempt in said]
    assert sorted(hits)[2] >= 4, said


@pytest.mark.parametrize("speaker", ["ada", "max", "oliver"])
def test_another_text_is_not_heard_as_numbers(heard, speaker):
    words = re.findall("[a-z]+", NUMBERS.lower())
    said = heard(OTHER, 1, speaker=speaker)
    assert sum(word in said for word in words) <= 1, said
