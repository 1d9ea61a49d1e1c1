#!/usr/bin/env python3
"""teacher.py TEXTS.gz OUT_DIR SPEAKER HOURS [--minutes M] [--workers N] [--device D] [--style FILE]

Speak texts with a speaker's teacher until OUT_DIR holds HOURS of the speaker. ada learns from
hibari's heart, which runs on many CPU cores; max from Kokoro's am_michael, best on a GPU.

One file holds a share of the texts: `audio_NAME.npy` is an int16 stream at 24 kHz in which
utterances follow each other on frame boundaries (1920 samples); `rows_NAME.npz` has a table of
(text index, speaker, first frame, frames), and per frame the place in the text and two phonemes.
Run the command again to go on: files that exist are kept. Status 3: more is to be made.
"""

import argparse
import functools
import gzip
import json
import os
import sys
import time
from collections import deque
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pace
from pitch_phase import HOP, RATE, in_phase

SPEAKERS = ("ada", "max")
PITCH = {"ada": (120, 400), "max": (60, 260)}  # Hz
LEAD, TAIL, PAUSE = 1920, 3840, 2400  # samples: before and after speech, and more between sentences
LEVEL, MAX_FRAMES = -21.2, 192  # dB where it speaks


# ---- text to phonemes
class Reader:
    """Sentences of a text: phoneme ids, and which of them a word's characters are."""

    def __init__(self):
        import hibari.tts
        from hibari.g2p import G2P
        from hibari.g2p.normalize import normalize

        self.g2p, self.normalize, self.split = G2P(), normalize, hibari.tts.Hibari.split_sentences
        self.vocab = json.loads((Path(hibari.tts.ASSETS) / "vocab.json").read_text(encoding="utf-8"))

    def sentence(self, text):
        """ids with 0 at both ends; words: (first id, end, first character, end)"""
        ids, words, at = [0], [], 0
        for token in self.g2p.phonemize_tokens(self.g2p.tokenize(self.normalize(text))):
            first, place = len(ids), text.find(token.text, at, at + len(token.text) + 12)
            ids += [self.vocab[c] for c in token.phonemes or "" if c in self.vocab]
            if place >= 0:
                at = place + len(token.text)
                if len(ids) > first and any(c.isalnum() for c in token.text):
                    words.append((first, len(ids), place, at))
            if token.whitespace:
                ids.append(self.vocab[" "])
        return [*ids, 0], words

    def read(self, text):
        """(place of the sentence in the text, ids, words) of every sentence"""
        at, out = 0, []
        for part in self.split(text):
            at = text.index(part, at)
            ids, words = self.sentence(part)
            if 3 <= len(ids) <= 510:
                out.append((at, ids, words))
        return out


@functools.cache
def phone_numbers():
    """Phoneme id -> small number; 0 for what is silent. A stress mark is None: it belongs to the sound after it."""
    vocab = Reader().vocab
    silent = set(' ;:,.!?—…"()“”')
    return {0: 0} | {v: None if c in "ˈˌ" else 0 if c in silent else k + 1 for k, (c, v) in enumerate(vocab.items())}


# ---- phonemes to sound: speak(list of ids) -> list of (samples, samples of every id)
class Hibari:
    def __init__(self):
        import onnx
        import onnxruntime
        from hibari import dsp
        from hibari.voices import voice_path

        model = onnx.load(voice_path("heart"))
        durations = onnx.helper.make_tensor_value_info("/Clip_output_0", onnx.TensorProto.FLOAT, None)
        model.graph.output.append(durations)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.session, self.dsp = onnxruntime.InferenceSession(model.SerializeToString(), options), dsp
        self.frame = 2 * dsp.HOP  # samples that a duration of 1 stands for

    def speak(self, sentences):
        out = []
        for ids in sentences:
            feed = {"ids": np.array([ids], np.int64), "speed": np.ones(1, np.float32)}
            *parts, durations = self.session.run(None, feed)
            samples = self.dsp.synth(*(p[0] for p in parts), np.random.default_rng(0))
            out.append((samples, durations.ravel().round().astype(np.int64) * self.frame))
        return out


class Kokoro:
    def __init__(self, style, device="cpu"):
        import kokoro_torch
        import torch

        self.net, self.batch = kokoro_torch.load(device), 400 if device == "cpu" else 12000
        self.styles = torch.from_numpy(np.fromfile(style, np.float32).reshape(-1, 256))

    def speak(self, sentences):
        return self.net.speak(sentences, self.styles, self.batch)


def open_teacher(speaker, style, device="cpu"):
    return Hibari() if speaker == "ada" else Kokoro(style, device)


# ---- sound to training data
def level(samples):
    """dB of what is not silence: 20 ms windows within 26 dB of the loudest."""
    power = (samples[: len(samples) // 480 * 480].reshape(-1, 480).astype(np.float64) ** 2).mean(1)
    return 10 * np.log10(power[power > power.max() * 0.0025].mean())


def trim(samples):
    """Where the sound begins and ends: 10 ms windows within 40 dB of the loudest."""
    power = (samples[: len(samples) // 240 * 240].reshape(-1, 240) ** 2).mean(1)
    loud = np.flatnonzero(power > power.max() * 1e-4)
    return int(loud[0]) * 240, int(loud[-1] + 1) * 240


def utterance(text, sentences, spoken, speaker):
    """(int16 samples in whole frames, place of every frame, its two phonemes), or None if nothing
    is loud or it is too long. The pitch is in phase with the frames. A place is 64 times the
    character that is spoken when the frame begins; after the last word it goes on to that of the
    end-of-text token."""
    numbers = phone_numbers()
    sound, times, chars, phones, length = [], [], [], [], 0
    for (at, ids, words), (samples, durations) in zip(sentences, spoken, strict=True):
        if durations.sum() != len(samples) or len(durations) != len(ids):
            raise ValueError(
                f"{len(ids)} phonemes should last {len(samples)} samples, got {len(durations)} of {durations.sum()}"
            )
        if len(samples) < 480 or np.abs(samples).max() < 1e-3:
            return None
        begin, end = trim(samples)
        gap = LEAD + (PAUSE if sound else 0)
        piece = np.pad(samples, (gap, TAIL))[begin : end + gap + TAIL].copy()
        fade = np.linspace(0, 1, 240, dtype=np.float32)
        piece[:240] *= fade
        piece[-240:] *= fade[::-1]
        edges = np.concatenate([[0], np.cumsum(durations)]) - begin + gap
        edges = edges.clip(0, len(piece)) + length
        for first, stop, c0, c1 in words:
            times += [edges[first], edges[stop]]
            chars += [at + c0, at + c1]
        known = 0
        for k in range(len(ids) - 1, -1, -1):
            known = known if numbers[ids[k]] is None else numbers[ids[k]]
            phones.append((edges[k], known))
        sound.append(piece)
        length += len(piece)
    y = np.concatenate(sound)
    y = y * min(10 ** ((LEVEL - level(y)) / 20), 0.95 / np.abs(y).max())
    y = np.pad(y, (0, -len(y) % HOP))
    frames = len(y) // HOP
    if frames > MAX_FRAMES or not times:
        return None
    y = in_phase(y, *PITCH[speaker]).clip(-1, 1)
    t = np.maximum.accumulate(np.array([*times, times[-1] + HOP]))
    c = np.maximum.accumulate(np.array([*chars, len(text) + 0.9]))
    place = np.round(np.interp(np.arange(frames) * HOP, t, c) * 64).astype(np.uint16)
    phones = np.array(sorted(phones))
    k = (
        np.searchsorted(phones[:, 0], np.arange(frames)[:, None] * HOP + np.array([HOP // 4, 3 * HOP // 4]), "right")
        - 1
    )
    phone = np.where(k >= 0, phones[k.clip(0), 1], 0).astype(np.uint8)
    return np.round(y * 32767).astype(np.int16), place, phone


def save(file, speaker, first, texts, read, spoken):
    """Write one file of utterances. The audio comes last: where it exists, all does."""
    parts, rows, place, phone, pos, at = [], [], [], [], 0, 0
    for i, (text, sentences) in enumerate(zip(texts, read, strict=True)):
        mine, at = spoken[at : at + len(sentences)], at + len(sentences)
        made = utterance(text, sentences, mine, speaker) if mine else None
        if made is None:
            continue
        for out, value in zip((parts, place, phone), made, strict=True):
            out.append(value)
        rows.append((first + i, SPEAKERS.index(speaker), pos, len(made[1])))
        pos += len(made[1])
    extra = file.with_name(file.name.replace("audio_", "rows_")).with_suffix(".npz")
    arrays = dict(rows=np.array(rows, np.int32), place=np.concatenate(place), phone=np.concatenate(phone))
    with pace.whole(extra) as f:
        np.savez(f, **arrays)
    with pace.whole(file) as f:
        np.save(f, np.concatenate(parts))
    return pos


_reader, _teacher = [], []


def start(speaker, style, speaks):
    os.environ["OMP_NUM_THREADS"] = "1"
    _reader.append(Reader())
    if speaks:
        import torch

        torch.set_num_threads(1)
        _teacher.append(open_teacher(speaker, style))


def read_all(texts):
    return [_reader[0].read(t) for t in texts]


def make(file, speaker, first, texts):
    read = read_all(texts)
    return save(file, speaker, first, texts, read, _teacher[0].speak([s[1] for r in read for s in r]))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("texts")
    p.add_argument("out", type=Path)
    p.add_argument("speaker", choices=SPEAKERS)
    p.add_argument("hours", type=float)
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--workers", type=int, default=os.cpu_count())
    p.add_argument("--device", default="cpu", help="where Kokoro speaks")
    p.add_argument("--style", help="am_michael.bin of the package kokoro-js")
    p.add_argument("--share", type=int, default=512, help="texts of a file")
    a = p.parse_args()
    end = time.monotonic() + 60 * a.minutes
    a.out.mkdir(parents=True, exist_ok=True)
    texts = gzip.open(a.texts, "rt").read().strip("\n").split("\n")
    gpu = a.speaker == "max" and a.device != "cpu"
    pool = get_context("fork").Pool(a.workers, start, (a.speaker, a.style, not gpu))  # before CUDA is touched
    teacher = open_teacher(a.speaker, a.style, a.device) if gpu else None
    frames, waiting, began = 0, deque(), time.monotonic()
    todo = a.hours * 3600 * RATE / HOP
    # The speakers take turns with the texts.
    for number, first in enumerate(range(SPEAKERS.index(a.speaker) * a.share, len(texts), a.share * len(SPEAKERS))):
        some = texts[first : first + a.share]
        file = a.out / f"audio_{a.speaker}_{a.share}_{number:04d}.npy"
        if file.exists():
            frames += np.load(file, mmap_mode="r").shape[0] // HOP
            continue
        # Made so far, and what is in the making if it is as long as four seconds a text.
        while waiting and (len(waiting) >= 2 * a.workers or frames + 50 * a.share * len(waiting) >= todo):
            frames += pace.result(waiting.popleft(), end, pool)
        if frames >= todo or time.monotonic() > end:
            break
        if gpu:
            chunk = -(-len(some) // a.workers)
            read = pool.map(read_all, [some[k : k + chunk] for k in range(0, len(some), chunk)])
            read = [r for part in read for r in part]
            spoken = teacher.speak([s[1] for r in read for s in r])
            waiting.append(pool.apply_async(save, (file, a.speaker, first, some, read, spoken)))
        else:
            waiting.append(pool.apply_async(make, (file, a.speaker, first, some)))
    while waiting:
        frames += pace.result(waiting.popleft(), end, pool)
    hours = frames * HOP / RATE / 3600
    print(f"{a.speaker}: {hours:.2f} of {a.hours:g} h, {time.monotonic() - began:.0f} s in this call", flush=True)
    sys.exit(0 if frames >= todo else pace.MORE)


if __name__ == "__main__":
    main()
