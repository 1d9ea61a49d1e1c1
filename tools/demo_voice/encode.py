#!/usr/bin/env python3
"""encode.py AUDIO_DIR CODEC.pt OUT.npz [device]: codes of every utterance, each encoded alone
between silences."""

import glob
import os
import sys
import time

import numpy as np
import torch
from codec import HOP, RVQ, MelEncoder

PAD = 8  # frames of silence on both sides


def main():
    src, codec, out = sys.argv[1:4]
    dev = sys.argv[4] if len(sys.argv) > 4 else "cuda"
    torch.set_grad_enabled(False)
    torch.backends.cudnn.allow_tf32 = True
    ck = torch.load(codec)
    enc, vq = MelEncoder().eval(), RVQ().eval()
    enc.load_state_dict({k: v.float() for k, v in ck["enc"].items()})
    vq.books.copy_(ck["books"].float())
    enc, vq, t0 = enc.to(dev), vq.to(dev), time.time()
    parts = {"rows": [], "codes": [], "place": [], "phone": []}
    total = 0
    for f in sorted(glob.glob(f"{src}/audio_*.npy")):
        a = torch.from_numpy(np.load(f)).to(dev)
        extra = np.load(f.replace("audio_", "rows_").replace(".npy", ".npz"))
        r = extra["rows"]
        codes = torch.zeros(len(a) // HOP, 16, dtype=torch.uint8, device=dev)
        order, i = np.argsort(r[:, 3], kind="stable"), 0
        while i < len(order):
            longest = r[order[min(i + 255, len(order) - 1)], 3] + 2 * PAD
            q = r[order[i : i + min(512, max(1, int(40000 // longest)))]]
            i += len(q)
            T = int(q[:, 3].max())
            pos, n = (torch.tensor(q[:, k], device=dev).long() for k in (2, 3))
            t = torch.arange(-PAD * HOP, (T + PAD) * HOP, device=dev)[None]
            x = a[(pos[:, None] * HOP + t).clamp(0, len(a) - 1)].float() / 32768
            x = x * ((t >= 0) & (t < n[:, None] * HOP))
            c = vq(enc(x))[2][:, PAD : PAD + T].to(torch.uint8)
            k = torch.arange(T, device=dev)[None]
            m = k < n[:, None]
            codes[(pos[:, None] + k)[m]] = c[m]
        r[:, 2] += total
        total += len(codes)
        for k, v in (("rows", r), ("codes", codes.cpu().numpy())):
            parts[k].append(v)
        for k in ("place", "phone"):
            parts[k].append(extra[k])
        del a
    with open(out + ".new", "wb") as f:
        np.savez(f, **{k: np.concatenate(v) for k, v in parts.items()})
    os.replace(out + ".new", out)
    print(f"{total} frames encoded in {time.time() - t0:.0f} s", flush=True)


if __name__ == "__main__":
    main()
