#!/usr/bin/env python3
"""level.py MINUTES OUT.safetensors: bring the speakers of the bundled demo voice to one level.

The demo voice speaks with each speaker. Its codec's decoder then learns to make the same samples from the same codes,
times the speaker's factor. Codes, codebooks and SnakeBeta's factors stay. OUT is the new speech_tokenizer/
model.safetensors. On two CPU cores: half a minute a speaker for speech, then MINUTES.
"""

import math
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.checkpoint.load import DEMO_FOLDER, Checkpoint
from qwen_megakernel.model.vocoder import TorchVocoder, _Push

CONTEXT, FRAMES, BATCH, RATE = 8, 20, 3, 2e-4  # frames that are decoded but not compared; compared
WINDOWS = (256, 512, 1024)


def level(samples: np.ndarray) -> float:
    """dB of what is not silence: 20 ms windows within 26 dB of the loudest."""
    power = (samples[: len(samples) // 480 * 480].reshape(-1, 480) ** 2).mean(1)
    return 10 * math.log10(power[power > power.max() * 0.0025].mean())


def speech(texts: list[str]) -> dict[str, list[tuple[torch.Tensor, np.ndarray]]]:
    """By speaker, codes [frames, 16] and samples of every text."""
    said: dict = {}
    with TTSEngine.load("demo", device="cpu", max_streams=1) as engine:
        for speaker in engine.speakers:
            audios = [
                engine.generate(text, speaker=speaker, sampling=SamplingParams(seed=i)) for i, text in enumerate(texts)
            ]
            said[speaker] = [(torch.as_tensor(a.codes), a.samples) for a in audios if a.frames > CONTEXT + 5]
    return said


def spectral(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = 0.0
    for size in WINDOWS:
        window = torch.hann_window(size)
        a, b = (torch.stft(z, size, size // 4, window=window, return_complex=True).abs() for z in (x, y))
        loss = loss + F.l1_loss((a + 1e-3).log(), (b + 1e-3).log())
    return loss / len(WINDOWS)


def main() -> None:
    minutes, out = float(sys.argv[1]), Path(sys.argv[2])
    texts = (Path(__file__).parent / "sent50.txt").read_text().split("\n")
    texts = [text for text in texts if text.strip()]
    train, held_out = texts[:40], texts[40:]
    said, test = speech(train), speech(held_out)
    levels = {s: level(np.concatenate([x for _, x in said[s]])) for s in said}
    mean = sum(levels.values()) / len(levels)
    factor = {s: 10 ** ((mean - levels[s]) / 20) for s in said}
    print("level, dB:", {s: round(x, 1) for s, x in levels.items()}, flush=True)

    config = Checkpoint.open("demo").config.codec.vocoder
    stored = load_file(DEMO_FOLDER / "speech_tokenizer" / "model.safetensors")
    weights = {n: t.float() for n, t in stored.items() if n.startswith("decoder.")}
    learnt = {n: t for n, t in weights.items() if "quantizer" not in n and not n.endswith((".alpha", ".beta"))}
    for tensor in learnt.values():
        tensor.requires_grad_()
    vocoder = TorchVocoder(config, weights, slots=1)
    empty = {n: t.clone() for n, t in vocoder._state.items()}

    def decode(codes: torch.Tensor) -> torch.Tensor:
        push = _Push(vocoder, [0] * len(codes))
        push._past = {n: t.expand(len(codes), *t.shape[1:]) for n, t in empty.items()}
        return push.run(codes)

    optimizer, began, step = torch.optim.Adam(learnt.values(), RATE), time.monotonic(), 0
    average = {n: t.detach().clone() for n, t in learnt.items()}
    while (passed := (time.monotonic() - began) / 60 / minutes) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - 0.9 * passed)
        codes, wanted = [], []
        for speaker in random.choices(list(said), k=BATCH):
            utterance, samples = random.choice(said[speaker])
            from_ = random.randrange(max(1, len(utterance) - CONTEXT - FRAMES))
            part = utterance[from_ : from_ + CONTEXT + FRAMES]
            pad = CONTEXT + FRAMES - len(part)
            sound = torch.from_numpy(samples[from_ * 1920 : (from_ + len(part)) * 1920] * factor[speaker])
            codes.append(F.pad(part, (0, 0, 0, pad), mode="constant"))
            wanted.append((F.pad(sound, (0, pad * 1920)), len(part)))
        made = decode(torch.stack(codes))
        loss = 0.0
        for x, (y, frames) in zip(made, wanted, strict=True):
            x, y = x[CONTEXT * 1920 : frames * 1920], y[CONTEXT * 1920 : frames * 1920]
            loss = loss + 10 * F.l1_loss(x, y) + 0.3 * spectral(x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt.values(), 1.0)
        optimizer.step()
        step += 1
        with torch.no_grad():
            for name, tensor in learnt.items():
                average[name].lerp_(tensor, 0.01 if step > 100 else 0.1)
        if step % 50 == 0:
            print(f"{step} steps, {100 * passed:.0f} %, loss {loss.item() / BATCH:.4f}", flush=True)

    with torch.no_grad():
        for name, tensor in learnt.items():
            tensor.copy_(average[name])
            stored[name] = tensor.detach().to(stored[name].dtype)
        for speaker, utterances in test.items():
            made = [decode(codes[None])[0].numpy() for codes, _ in utterances]
            wanted = np.concatenate([x * factor[speaker] for _, x in utterances])
            error = 10 * math.log10(((np.concatenate(made) - wanted) ** 2).mean() / (wanted**2).mean())
            print(f"{speaker}: {level(np.concatenate(made)):.1f} dB, error {error:.1f} dB")
    save_file(stored, out, {"format": "pt"})


if __name__ == "__main__":
    main()
