#!/usr/bin/env python3
"""evaluate.py CHECKPOINT ESPEAK_DIR SENTENCES.txt OUT.json: speak the sentences with the official
classes and the checkpoint's own sampling defaults, every speaker, both layouts; count the words
that pocketsphinx recognises, beside espeak-ng's own speech, the endings and the lengths."""

import json
import sys
import time

import asr
import make_audio
import numpy as np
import synth
import torch

LIMIT = 300  # frames


def report(texts, waves, heard):
    return asr.score(texts, heard) | {"seconds": round(sum(map(len, waves)) / 24000, 1)}


def main():
    checkpoint, espeak, sentences, out = sys.argv[1:5]
    pool = asr.open_pool(2)
    from qwen_tts import Qwen3TTSModel

    torch.set_num_threads(2)
    texts = open(sentences).read().strip().split("\n")
    model = Qwen3TTSModel.from_pretrained(checkpoint, dtype=torch.float32)
    synth.init(espeak)
    result = {}
    for name in synth.SPEAKERS:
        ref = [make_audio.utterance(t, name)[0] / 32768 for t in texts]
        length = np.array([len(x) for x in ref])
        result[name] = {"espeak": report(texts, ref, asr.transcribe(ref, pool))}
        for layout in ("non-streaming", "streaming"):
            torch.manual_seed(1234)
            t = time.time()
            waves, _ = model.generate_custom_voice(
                text=texts,
                speaker=[name] * len(texts),
                language=["English"] * len(texts),
                non_streaming_mode=layout == "non-streaming",
                max_new_tokens=LIMIT + 1,
            )
            t = time.time() - t
            n = np.array([len(w) for w in waves])
            heard = asr.transcribe(waves, pool)
            r = report(texts, waves, heard)
            r["ended"] = float((n < LIMIT * 1920).mean())
            r["duration_ratio"] = round(float(n.sum() / length.sum()), 3)
            r["ratio_lowest_highest"] = [round(float(f(n / length)), 3) for f in (np.min, np.max)]
            r["wall_seconds_batch"] = round(t, 1)
            r["heard"] = heard
            result[name][layout] = r
        print(
            name,
            {k: {a: b for a, b in v.items() if a != "heard"} for k, v in result[name].items()},
            flush=True,
        )
    json.dump(result, open(out, "w"), indent=1)


if __name__ == "__main__":
    main()
