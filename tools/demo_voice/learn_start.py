#!/usr/bin/env python3
"""learn_start.py SPOKEN.npz OLD_CODEC.pt OUT.pt SECONDS [--minutes M] [--device D]

The decoder learns to begin from silence. The codec was trained on parts of long speech, so chance decided what an empty
past sounds like: a click. A copy of the decoder learns to say the first frames of an utterance as the old one says them
behind frames of silence. In the midst of speech it learns to stay as it is. SPOKEN.npz: see learn_written.py.
"""

import argparse
import copy

import numpy as np
import pace
import torch
from codec import HOP, Spectral, load_decoder
from tts import G

SILENT = 8  # frames of silence before the old decoder's beginning
FIRST, PART, WARM = 10, 16, 6  # frames of a beginning; of a part from the midst; of these left out of the loss


def arguments():
    p = argparse.ArgumentParser()
    for name in ("spoken", "old", "out"):
        p.add_argument(name)
    p.add_argument("seconds", type=float)
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--device", default="cuda")
    p.add_argument("--items", type=int, default=32, help="beginnings of a batch, and parts")
    p.add_argument("--lr", type=float, default=4e-4)
    return p.parse_args()


class Learning:
    before = 0.0

    def __init__(self, args):
        self.args, self.dev = args, args.device
        self.old, self.books = load_decoder(args.old, self.dev)
        self.old.requires_grad_(False)
        self.new = copy.deepcopy(self.old).requires_grad_(True)
        data = np.load(args.spoken)
        self.codes = torch.from_numpy(data["codes"]).to(self.dev)
        rows = data["rows"][data["rows"][:, 3] >= FIRST]
        self.firsts = torch.from_numpy(rows[:, 2].astype(np.int64)).to(self.dev)
        ends = rows[:, 2] + rows[:, 3] - 1  # a last frame is silent: the quietest of some
        some = self.codes[torch.from_numpy(ends[:64].astype(np.int64)).to(self.dev)]
        some = self.sound(some[:, None].repeat(1, 6, 1))
        self.silence = self.codes[int(ends[int(some[:, -HOP:].abs().amax(1).argmin())])]
        self.opt = torch.optim.AdamW(self.new.parameters(), args.lr, betas=(0.8, 0.99), weight_decay=0.0)
        self.ema = {k: v.detach().clone() for k, v in self.new.state_dict().items()}
        self.spec = Spectral().to(self.dev)
        self.step = 0
        self.weight = 1 + 30 * torch.exp(-torch.arange(HOP, device=self.dev) / 240)  # of the first samples
        self.every = 100 if self.dev != "cpu" else 1

    def latents(self, codes):
        """[B, T, 16] -> [B, T, 48]"""
        return sum(self.books[j][codes[..., j].long()] for j in range(G))

    @torch.no_grad()
    def sound(self, codes):
        return self.old.wave(self.old.frame(self.latents(codes)))

    def batch(self, starts, count):
        return self.codes[starts[:, None] + torch.arange(count, device=self.dev)]

    def train_step(self, fraction):
        for g in self.opt.param_groups:
            g["lr"] = self.args.lr * min(1, (self.step + 1) / 100) * (1.01 - fraction)
        n = self.args.items
        first = self.batch(self.firsts[torch.randint(len(self.firsts), (n,), device=self.dev)], FIRST)
        part = self.batch(torch.randint(len(self.codes) - PART, (n,), device=self.dev), PART)
        wanted = self.sound(torch.cat([self.silence.expand(n, SILENT, G), first], 1))[:, SILENT * HOP :]
        made = self.new.wave(self.new.frame(self.latents(first)))
        begin = ((made - wanted)[:, :HOP].abs() * self.weight).mean()
        jumps = (made.diff(dim=1) - wanted.diff(dim=1))[:, :240].abs().mean() + made[:, 0].abs().mean()
        sc, lm, mel, wave = self.spec(made, wanted)
        kept = self.sound(part)[:, WARM * HOP :]
        same = self.new.wave(self.new.frame(self.latents(part)))[:, WARM * HOP :]
        _, lm2, mel2, _ = self.spec(same, kept)  # the others have no gradient where nothing differs
        error = ((same - kept).abs().mean(1) / kept.abs().mean(1).clamp(min=1e-3)).mean()
        loss = 20 * begin + 20 * jumps + 0.5 * (sc + lm) + 2 * mel + 2 * wave
        loss = loss + 0.5 * lm2 + 2 * mel2 + 8 * error
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.new.parameters(), 2.0)
        self.opt.step()
        with torch.no_grad():
            d = min(0.998, self.step / (self.step + 20))
            torch._foreach_lerp_(list(self.ema.values()), list(self.new.state_dict().values()), 1 - d)
        if self.step % self.every == 0:
            print(
                f"step {self.step} {fraction:.1%} start: first 20 ms at most {made[:, :480].abs().max().item():.4f} "
                f"error {begin.item():.5f} wave {wave.item():.3f} mel {mel.item() / 4:.3f}; "
                f"midst: error {error.item():.4f} mel {mel2.item() / 4:.4f}",
                flush=True,
            )
        self.step += 1

    def save(self, trained):
        dec = {k: v.half().cpu() for k, v in self.ema.items()}
        with pace.whole(self.args.out) as f:
            torch.save({"dec": dec, "books": self.books.half().cpu()}, f)
        print(f"saved at step {self.step}, {trained:.0f} s", flush=True)


def main():
    args = arguments()
    clock = pace.Pace(args.seconds, args.minutes)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    learning = Learning(args)
    clock.train(learning, learning.train_step)


if __name__ == "__main__":
    main()
