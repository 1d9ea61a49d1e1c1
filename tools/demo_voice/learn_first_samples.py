#!/usr/bin/env python3
"""learn_first_samples.py SPOKEN.npz OLD_CODEC.pt NEW_CODEC.pt OUT.pt [STEPS]

What learn_start.py leaves of the click is the same in every utterance. The decoder's last block alone unlearns it:
its first 2 ms become what the old decoder makes behind silence, all else stays. Minutes on a CPU.
"""

import copy
import sys

import numpy as np
import pace
import torch
from codec import HOP, load_decoder
from tts import G

CLICK, FADE = 48, 48  # samples to unlearn, and over which that fades
COUNT, FRAMES = 48, 3  # utterances, and frames of each; in the midst of speech the first frame is context


def before_last(decoder, z):
    """What the last block gets, for latents [B, T, 48]."""
    h = decoder.frame(z)
    for pair in decoder.upsample:
        for part in pair:
            h = part(h)
    for part in decoder.decoder[:-3]:
        h = part(h)
    return h


def last(parts, h):
    for part in parts:
        h = part(h)
    return h[:, 0]


def main():
    spoken, old, new, out = sys.argv[1:5]
    steps = int(sys.argv[5]) if len(sys.argv) > 5 else 600
    torch.manual_seed(0)
    (teacher, books), (decoder, _) = load_decoder(old), load_decoder(new)
    data = np.load(spoken)
    codes, rows = torch.from_numpy(data["codes"]).long(), data["rows"]
    rows = rows[rows[:, 3] > 8 + FRAMES]

    def latents(starts, count):
        some = codes[torch.as_tensor(starts)[:, None] + torch.arange(count)]
        return sum(books[j][some[..., j]] for j in range(G))

    pick = np.random.default_rng(0).permutation(len(rows))[: 2 * COUNT]
    first, midst = rows[pick[:COUNT], 2].astype(np.int64), rows[pick[COUNT:], 2].astype(np.int64) + 5
    silence = latents([int(rows[pick[0], 2] + rows[pick[0], 3] - 1)], 1).expand(COUNT, 8, -1)
    with torch.no_grad():
        began, went = latents(first, FRAMES), latents(midst, FRAMES)
        parts = decoder.decoder[-3:]
        x0, x1 = before_last(decoder, began), before_last(decoder, went)
        y0, y1 = last(parts, x0), last(parts, x1)
        quiet = teacher.wave(teacher.frame(torch.cat([silence, began], 1)))[:, 8 * HOP :]
        keep = ((torch.arange(y0.shape[1]) - CLICK) / FADE).clamp(0, 1)
        y0 = y0 * keep + quiet * (1 - keep)
    parts = copy.deepcopy(parts).train()
    opt = torch.optim.Adam(parts.parameters(), 1e-3, betas=(0.8, 0.99))
    weight = 1 + 300 * (torch.arange(y0.shape[1]) < CLICK + FADE)
    for step in range(steps):
        for g in opt.param_groups:
            g["lr"] = 1e-3 * (1.001 - step / steps)
        some = torch.randperm(COUNT)[:6]
        error0 = last(parts, x0[some]) - y0[some]
        error1 = (last(parts, x1[some]) - y1[some])[:, HOP:]
        loss = (error0.pow(2) * weight).mean() + error1.pow(2).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 50 == 0 or step == steps - 1:
            rest = error1.abs().mean() / y1[some][:, HOP:].abs().mean()
            print(
                f"step {step}: first samples at most {(error0 + y0[some])[:, :CLICK].abs().max().item():.4f}, "
                f"rest differs by {rest.item():.2%}",
                flush=True,
            )
    for k, part in enumerate(parts, len(decoder.decoder) - len(parts)):
        decoder.decoder[k] = part
    dec = {k: v.half() for k, v in decoder.state_dict().items()}
    with pace.whole(out) as f:
        torch.save({"dec": dec, "books": books.half()}, f)


if __name__ == "__main__":
    main()
