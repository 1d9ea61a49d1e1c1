#!/usr/bin/env python3
"""word_pace.py CHECKPOINT: measure how many seconds each speaker takes for a letter, pauses left out, and write
them into the folder's config.json as `seconds_per_letter`. The times of words begin with this pace."""

import json
import sys
from pathlib import Path

import torch

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.speech.words import SpeechRate, WordTimes, weight, words_of


def measured(folder):
    """By speaker, the seconds. Each says held_out.txt, by turns in both layouts."""
    lines = Path(__file__).with_name("held_out.txt").read_text().splitlines()
    texts = [line for line in lines if line and not line.startswith("#")]
    paces = {}
    with TTSEngine.load(folder, device="cuda" if torch.cuda.is_available() else "cpu") as engine:
        for speaker in engine.speakers:
            if engine.config.talker.same_speaker(speaker):
                continue
            seconds = 0.0
            for i, text in enumerate(texts):
                how = dict(speaker=speaker, sampling=SamplingParams(seed=i), non_streaming_mode=i % 2 == 0)
                audio, times = engine.generate(text, **how), WordTimes(SpeechRate())
                times.hear(audio.samples, audio.sample_rate)
                seconds += times.spoken_s
            paces[speaker] = round(seconds / sum(weight(word) for text in texts for word in words_of(text)), 4)
    return paces


def write(folder):
    path = Path(folder) / "config.json"
    paces = measured(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds_per_letter": paces}, indent=2) + "\n")
    print(f"{path}: seconds_per_letter {paces}")


if __name__ == "__main__":
    write(sys.argv[1])
