#!/usr/bin/env python3
"""sweep.py TTS.pt CODEC.pt TOKENIZER_DIR OUT.json [--device D]
[--settings T,K,ST,SK ...] [--modes 0 1] [--workers W]

Words recognised, endings and lengths for several sampling settings, every speaker and layout.
"""

import argparse
import json
import time

import asr
import evaluate
import numpy as np


def main():
    p = argparse.ArgumentParser()
    for name in ("tts", "codec", "tokenizer", "out"):
        p.add_argument(name)
    p.add_argument("--device", default="cuda")
    p.add_argument("--settings", nargs="+", default=["0.5,20,0.5,20"])
    p.add_argument("--modes", nargs="+", type=int, default=[0, 1])
    p.add_argument("--speakers", nargs="+", type=int, default=[0, 1])
    p.add_argument("--workers", type=int, default=14)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    pool = asr.open_pool(a.workers) if a.workers else None
    import speak  # after the fork
    import teacher

    texts = evaluate.groups()["everyday"]
    n, rows = len(texts), []
    voice = speak.Voice(a.tts, a.codec, a.tokenizer, a.device)
    everybody = [k for k in a.speakers for _ in texts]
    for setting in a.settings:
        par = [float(v) for v in setting.split(",")]
        par = (par[0], int(par[1]), par[2], int(par[3]))
        for mode in a.modes:
            t = time.time()
            wavs, ended = speak.say(voice, texts * len(a.speakers), everybody, bool(mode), par=par, seed=a.seed)
            t1 = time.time()
            heard = asr.transcribe(wavs, pool)
            row = {"setting": setting, "streaming": mode, "ended": float(ended.mean())}
            for j, k in enumerate(a.speakers):
                s = slice(j * n, (j + 1) * n)
                row[teacher.SPEAKERS[k]] = asr.score(texts, heard[s])
                row[teacher.SPEAKERS[k]]["seconds"] = round(sum(map(len, wavs[s])) / 24000, 1)
            row["mean"] = round(float(np.mean([row[teacher.SPEAKERS[k]]["recognised"] for k in a.speakers])), 3)
            rows.append(row)
            print(json.dumps(row), f"{t1 - t:.0f}+{time.time() - t1:.0f} s", flush=True)
            print("   ", " | ".join(heard[:4]), flush=True)
    json.dump(rows, open(a.out, "w"), indent=1)


if __name__ == "__main__":
    main()
