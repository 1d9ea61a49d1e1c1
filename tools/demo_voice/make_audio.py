#!/usr/bin/env python3
"""make_audio.py TEXTS.gz ESPEAK_DIR OUT_DIR COUNT [WORKERS]

Speak COUNT texts.  Each worker writes one int16 stream at 24 kHz in which utterances follow each
other on frame boundaries (1920 samples), a table of (text index, speaker, first frame, frames),
and per frame the place in the text and two phonemes.
"""

import gzip
import os
import sys
import time
from multiprocessing import Process

import numpy as np
import synth
from scipy.signal import resample_poly

LEAD, TAIL, MAX_FRAMES = 150, 170, 192  # silence in milliseconds; frames


def utterance(text, speaker):
    """(float samples at 24 kHz padded to whole frames, place per frame, phonemes) or None."""
    wav, events = synth.speak(text, speaker)
    wav, start = synth.trim(wav)
    if wav is None:
        return None
    y = resample_poly(wav.astype(np.float32), 160, 147)
    y = np.concatenate([np.zeros(24 * LEAD), y, np.zeros(24 * TAIL)])
    y = np.pad(y, (0, -len(y) % 1920)) * 0.8
    return y, *synth.alignment(text, events, start, LEAD, len(y) // 1920)


def work(w, workers, texts, espeak, out):
    synth.init(espeak)
    names, rng = list(synth.SPEAKERS), np.random.default_rng(w)
    parts, rows, place, phone, pos = [], [], [], [], 0
    for i in range(w, len(texts), workers):
        k = int(rng.choice(len(names), p=synth.SHARE))
        u = utterance(texts[i], names[k])
        if u is None or len(u[1]) > MAX_FRAMES:
            continue
        parts.append(np.clip(np.round(u[0]), -32768, 32767).astype(np.int16))
        place.append(u[1])
        phone.append(u[2])
        rows.append((i, k, pos, len(u[1])))
        pos += len(u[1])
    np.save(f"{out}/audio_{w:02d}.npy", np.concatenate(parts))
    np.savez(
        f"{out}/rows_{w:02d}.npz",
        rows=np.array(rows, np.int32),
        place=np.concatenate(place),
        phone=np.concatenate(phone),
    )


def main():
    src, espeak, out, count = sys.argv[1:5]
    n = int(sys.argv[5]) if len(sys.argv) > 5 else os.cpu_count()
    os.makedirs(out, exist_ok=True)
    texts = gzip.open(src, "rt").read().strip("\n").split("\n")[: int(count)]
    t = time.time()
    workers = [Process(target=work, args=(w, n, texts, espeak, out)) for w in range(n)]
    for p in workers:
        p.start()
    for p in workers:
        p.join()
    assert all(p.exitcode == 0 for p in workers)
    rows = [np.load(f"{out}/rows_{w:02d}.npz")["rows"] for w in range(n)]
    hours = sum(int(r[:, 3].sum()) for r in rows) / 45000
    kept = sum(map(len, rows))
    print(f"{kept} of {len(texts)} texts, {hours:.1f} h in {time.time() - t:.0f} s", flush=True)


if __name__ == "__main__":
    main()
