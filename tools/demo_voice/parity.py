#!/usr/bin/env python3
"""parity.py CHECKPOINT TTS.pt CODEC.pt TOKENIZER_DIR: greedy speech of the official classes and of
our own must be the same samples, in both layouts, with and without a language."""

import sys

import numpy as np
import torch
from qwen_tts import Qwen3TTSModel
from speak import Voice
from teacher import SPEAKERS

TEXT = "Hello there, how can I help you today? It's 25 degrees."


def main():
    checkpoint, tts, codec, tokenizer = sys.argv[1:5]
    official = Qwen3TTSModel.from_pretrained(checkpoint, dtype=torch.float32)
    own = Voice(tts, codec, tokenizer)
    own.net.load_state_dict({k: v.bfloat16().float() for k, v in own.net.state_dict().items()})
    for stream in (False, True):
        for language in ("English", "Auto"):
            for k, name in enumerate(SPEAKERS):
                w, rate = official.generate_custom_voice(
                    text=TEXT,
                    speaker=name,
                    language=language,
                    non_streaming_mode=not stream,
                    do_sample=False,
                    subtalker_dosample=False,
                    max_new_tokens=61,
                )
                codes, _ = own.codes([TEXT], [k], stream, lang=language == "English", par=(0, 1, 0, 1), limit=60)
                v = own.wave(codes[0])
                same = len(w[0]) == len(v)
                gap = float(np.abs(w[0][: len(v)] - v[: len(w[0])]).max())
                print(
                    f"stream {stream} {language} {name}: {len(w[0]) / rate:.2f} s, "
                    f"same length {same}, largest difference {gap:.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
