#!/usr/bin/env python3
"""encode.py AUDIO_DIR CODEC.pt OUT.npz [--minutes M] [--device D]: codes of every utterance, each
encoded alone between silences. Files that an earlier call encoded with the same encoder and codebooks
lie in OUT.npz.parts, whatever the decoder is; status 3: more is to do."""

import argparse
import hashlib
import sys
import time
from pathlib import Path

import codec as codec_module
import numpy as np
import pace
import torch
from codec import HOP

PAD = 8  # frames of silence on both sides


@torch.no_grad()
def codes_of(audio, rows, enc, vq):
    """uint8 codes [frames, 16] of a stream whose utterances `rows` lists"""
    codes = torch.zeros(len(audio) // HOP, 16, dtype=torch.uint8, device=audio.device)
    batch = 40000 if audio.is_cuda else 1000  # frames: what fits a CPU's caches takes a sixth of the time
    order, i = np.argsort(rows[:, 3], kind="stable"), 0
    while i < len(order):
        longest = rows[order[min(i + 255, len(order) - 1)], 3] + 2 * PAD
        q = rows[order[i : i + min(512, max(1, batch // int(longest)))]]
        i += len(q)
        T = int(q[:, 3].max())
        pos, n = (torch.tensor(q[:, k], device=audio.device).long() for k in (2, 3))
        t = torch.arange(-PAD * HOP, (T + PAD) * HOP, device=audio.device)[None]
        x = audio[(pos[:, None] * HOP + t).clamp(0, len(audio) - 1)].float() / 32768
        x = x * ((t >= 0) & (t < n[:, None] * HOP))
        c = vq(enc(x))[2][:, PAD : PAD + T].to(torch.uint8)
        k = torch.arange(T, device=audio.device)[None]
        m = k < n[:, None]
        codes[(pos[:, None] + k)[m]] = c[m]
    return codes.cpu().numpy()


def fingerprint(enc, vq):
    """The same for codecs that make the same codes."""
    digest = hashlib.sha256(vq.books.cpu().numpy().tobytes())
    for _, value in sorted(enc.state_dict().items()):
        digest.update(value.cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("audio", type=Path)
    p.add_argument("codec")
    p.add_argument("out")
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--device", default="cuda")
    a = p.parse_args()
    end, t0 = time.monotonic() + 60 * a.minutes, time.monotonic()
    torch.backends.cudnn.allow_tf32 = True
    enc, vq, _ = codec_module.load(a.codec, a.device)
    folder = Path(a.out + ".parts") / fingerprint(enc, vq)
    folder.mkdir(parents=True, exist_ok=True)
    parts, total = {"rows": [], "codes": [], "place": [], "phone": []}, 0
    for file in sorted(a.audio.glob("audio_*.npy")):
        extra = np.load(file.with_name(file.name.replace("audio_", "rows_")).with_suffix(".npz"))
        rows, part = extra["rows"], folder / file.name
        if not part.exists():
            if time.monotonic() > end:
                print(f"{total} frames encoded: run the command again", flush=True)
                sys.exit(pace.MORE)
            audio = torch.from_numpy(np.load(file)).to(a.device)
            with pace.whole(part) as f:
                np.save(f, codes_of(audio, rows, enc, vq))
        codes = np.load(part)
        rows[:, 2] += total
        total += len(codes)
        for name, value in (("rows", rows), ("codes", codes), ("place", extra["place"]), ("phone", extra["phone"])):
            parts[name].append(value)
    with pace.whole(a.out) as f:
        np.savez_compressed(f, **{k: np.concatenate(v) for k, v in parts.items()})
    print(f"{total} frames encoded in {time.monotonic() - t0:.0f} s", flush=True)


if __name__ == "__main__":
    main()
