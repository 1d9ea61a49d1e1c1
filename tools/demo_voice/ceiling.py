#!/usr/bin/env python3
"""ceiling.py CODEC.pt ESPEAK_DIR SENTENCES.txt [WORKERS] [groups ...]: words recognised in espeak's
own speech, and in the same speech after the codec (all groups, or the first few)."""

import sys

import asr


def main():
    codec, espeak, sentences = sys.argv[1:4]
    pool = asr.open_pool(int(sys.argv[4]) if len(sys.argv) > 4 else 1)
    import make_audio
    import synth
    import torch
    from codec import RVQ, Decoder, MelEncoder

    torch.set_grad_enabled(False)
    torch.set_num_threads(4)
    ck = torch.load(codec)
    enc, vq, dec = MelEncoder().eval(), RVQ().eval(), Decoder().eval()
    enc.load_state_dict({k: v.float() for k, v in ck["enc"].items()})
    dec.load_state_dict({k: v.float() for k, v in ck["dec"].items()})
    vq.books.copy_(ck["books"].float())
    synth.init(espeak)
    texts = open(sentences).read().strip().split("\n")
    for name in synth.SPEAKERS:
        waves = {"espeak": []}
        for t in texts:
            y = make_audio.utterance(t, name)[0] / 32768
            waves["espeak"].append(y)
            codes = vq(enc(torch.tensor(y, dtype=torch.float32)[None]))[2]
            for n in [int(v) for v in sys.argv[5:]] or [16]:
                z = sum(vq.books[j][codes[..., j]] for j in range(n))
                waves.setdefault(f"codec, {n} groups", []).append(dec(z)[0].numpy())
        for k, w in waves.items():
            print(name, k, asr.score(texts, asr.transcribe(w, pool)), flush=True)


if __name__ == "__main__":
    main()
