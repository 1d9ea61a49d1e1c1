#!/usr/bin/env python3
"""train_codec.py AUDIO_DIR OUT.pt SECONDS [--minutes M] [--device D] [--init CODEC.pt] ...

AUDIO_DIR: see teacher.py. SECONDS is the whole training, in as many calls as it takes: a call
goes on from OUT.pt.state, and status 3 says that more is to do. --init starts from an earlier
codec. Discriminators begin anew and join at the share --gan of the time (2: never).
"""

import argparse
from pathlib import Path

import numpy as np
import pace
import torch
from codec import HOP, RVQ, Decoder, Discs, MelEncoder, Spectral

HELD_OUT = 600  # frames of every speaker, out of the first file


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("audio", type=Path)
    p.add_argument("out")
    p.add_argument("seconds", type=float)
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--device", default="cuda")
    p.add_argument("--init")
    p.add_argument("--gan", type=float, default=0.45)
    p.add_argument("--items", type=int, default=64, help="of a batch")
    p.add_argument("--gan-items", type=int, default=32, help="items of a batch the discriminators see")
    p.add_argument("--part", type=int, default=26, help="frames of an item that are decoded")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--mel", type=float, default=2.0, help="weight of the mel loss")
    p.add_argument("--linear", type=float, default=0.5, help="weight of the losses of linear spectra")
    p.add_argument("--wave", type=float, default=2.0, help="weight of the waveform's loss")
    p.add_argument("--ema", type=float, default=0.999)
    return p.parse_args()


def sound(folder, device):
    """(int16 stream to learn from, int16 stream held out)"""
    parts, held, met = [], [], set()
    for file in sorted(folder.glob("audio_*.npy")):
        a = torch.from_numpy(np.load(file))
        if (speaker := file.name.split("_")[1]) not in met:
            met.add(speaker)
            size = HOP * min(HELD_OUT, len(a) // HOP // 4)
            held.append(a[:size])
            a = a[size:]
        parts.append(a)
    if not parts:
        raise FileNotFoundError(f"{folder} should hold audio_*.npy: run teacher.py first")
    return torch.cat(parts).to(device), torch.cat(held).to(device)


class Training:
    def __init__(self, args):
        self.args, self.dev = args, args.device
        toy = self.dev == "cpu"
        # items; frames of an item; frames of it decoded; of these left out of the loss
        self.sizes = (4, 40, 9, 6) if toy else (args.items, 96, args.part, 6)
        self.every = 1 if toy else 200
        self.audio, self.held = sound(args.audio, self.dev)
        self.enc, self.vq, self.dec = MelEncoder().to(self.dev), RVQ().to(self.dev), Decoder().to(self.dev)
        self.spec, self.disc = Spectral().to(self.dev), Discs().to(self.dev, memory_format=torch.channels_last)
        self.unquantised = 2 if toy else 300  # steps
        self.step = self.gan_steps = 0
        self.info, self.before = {}, 0.0
        if args.init:
            self.begin_from(torch.load(args.init, map_location=self.dev))
        self.trained = [*self.enc.parameters(), *self.dec.parameters()]
        self.opt_g = torch.optim.AdamW(self.trained, args.lr, betas=(0.8, 0.99), weight_decay=1e-3)
        self.opt_d = torch.optim.AdamW(self.disc.parameters(), 3e-4, betas=(0.8, 0.99))
        self.ema = {k: v.detach().clone() for k, v in self.dec.state_dict().items()}
        self.saved = ("enc", "vq", "dec", "disc", "opt_g", "opt_d")
        if (state := Path(args.out + ".state")).exists():
            stored = torch.load(state, map_location=self.dev)
            for name in self.saved:
                getattr(self, name).load_state_dict(stored[name])
            self.ema, self.step, self.gan_steps, self.before = (
                stored[k] for k in ("ema", "step", "gan_steps", "trained")
            )
            print(f"goes on at step {self.step}, {self.before:.0f} s trained", flush=True)
        self.wave = self.dec.wave if toy else torch.compile(self.dec.wave)

    def begin_from(self, codec):
        for name in ("enc", "dec"):
            getattr(self, name).load_state_dict({k: v.float() for k, v in codec[name].items()})
        self.vq.books.copy_(codec["books"].float())
        self.vq.usage.fill_(self.sizes[0] * self.sizes[1] / self.vq.k)
        self.vq.sums.copy_(self.vq.books * self.vq.usage[..., None])
        self.unquantised = -1

    def batch(self):
        B, frames = self.sizes[:2]
        i = HOP * torch.randint(len(self.audio) // HOP - frames, (B,), device=self.dev)  # the codec's own frames
        return self.audio[i[:, None] + torch.arange(frames * HOP, device=self.dev)[None]].float() / 32768

    def quantise(self, x):
        y = self.enc(x)
        if self.step < self.unquantised:
            return y, y.new_zeros(())
        if self.step == self.unquantised:
            self.vq.kmeans(y.detach())
        some, B, n = torch.rand(len(x), device=self.dev) < 0.4, len(x), self.vq.n
        return self.vq(y, torch.where(some, torch.randint(1, n + 1, (B,), device=self.dev), n))[:2]

    def judge(self, sound):
        """Of every discriminator, (verdicts, features of its layers)."""
        with torch.autocast(self.dev, torch.bfloat16, enabled=self.dev != "cpu"):
            return self.disc(sound)

    def adversarial(self, real_sound, made):
        """One step of the discriminators; the decoder's loss against them."""
        n = self.args.gan_items
        real_sound, made = real_sound[:n], made[:n]
        real, fake = self.judge(real_sound), self.judge(made.detach())
        loss = sum(((1 - verdict.float()) ** 2).mean() for verdict, _ in real)
        loss = loss + sum((verdict.float() ** 2).mean() for verdict, _ in fake)
        self.opt_d.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_d.step()
        self.gan_steps += 1
        if self.gan_steps <= 100:
            return 0.0
        self.disc.requires_grad_(False)  # the decoder's step needs no gradients of their weights
        fake = self.judge(made)
        self.disc.requires_grad_(True)
        adv = sum(((1 - verdict.float()) ** 2).mean() for verdict, _ in fake)
        # What they saw in the real sound before their step is near enough, and saves a pass.
        features = sum(
            (a - b.detach()).abs().mean().float() / b.detach().abs().mean().float().clamp(min=1e-3)
            for f, r in zip(fake, real, strict=True)
            for a, b in zip(f[1], r[1], strict=True)
        )
        if self.step % self.every == 0:
            self.info = {"ld": float(loss.detach()), "adv": float(adv.detach()), "fm": float(features.detach())}
        return min(1, (self.gan_steps - 100) / 300) * (0.15 * adv + 0.10 * features)

    def train_step(self, fraction):
        args, (_, frames, part, warm) = self.args, self.sizes
        for g in self.opt_g.param_groups:
            g["lr"] = args.lr * min(1, (self.step + 1) / 200) * (1.02 - fraction)
        for g in self.opt_d.param_groups:
            g["lr"] = 3e-4 * (1 - fraction) + 2e-5
        x = self.batch()
        q, commit = self.quantise(x)
        h = self.dec.frame(q)
        s = int(torch.randint(frames - part + 1, ()))
        made = self.wave(h[..., s : s + part])[:, warm * HOP :]
        wanted = x[:, (s + warm) * HOP : (s + part) * HOP]
        sc, lm, mel, wave = self.spec(made, wanted)
        loss = args.linear * (sc + lm) + args.mel * mel + args.wave * wave + 0.25 * commit
        if fraction >= args.gan:
            loss = loss + self.adversarial(wanted, made)
        self.opt_g.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 2.0)
        self.opt_g.step()
        with torch.no_grad():
            d = min(args.ema, self.step / (self.step + 20))
            torch._foreach_lerp_(list(self.ema.values()), list(self.dec.state_dict().values()), 1 - d)
        if self.step % self.every == 0:
            print(
                f"step {self.step} {fraction:.1%} sc {sc.item() / 4:.3f} lm {lm.item() / 4:.3f} "
                f"mel {mel.item() / 4:.3f} wave {wave.item():.3f} commit {commit.item():.4f}",
                {k: round(v, 3) for k, v in self.info.items()},
                flush=True,
            )
        self.step += 1

    @torch.no_grad()
    def evaluate(self):
        """Losses of the averaged decoder on held-out audio, and how evenly the codes are used."""
        self.vq.eval()
        keep = {k: v.clone() for k, v in self.dec.state_dict().items()}
        self.dec.load_state_dict(self.ema)
        size = min(100 * HOP, len(self.held))
        x = self.held[: len(self.held) // size * size].float().view(-1, size) / 32768
        q, _, codes = self.vq(self.enc(x))
        sc, lm, mel, wave = self.spec(self.dec(q), x)
        use = [torch.bincount(codes[..., j].flatten(), minlength=self.vq.k) for j in range(self.vq.n)]
        share = [u.float() / codes[..., 0].numel() for u in use]
        self.dec.load_state_dict(keep)
        self.vq.train()
        return {
            "sc": round(float(sc) / 4, 4),
            "logmag": round(float(lm) / 4, 4),
            "mel": round(float(mel) / 4, 4),
            "wave": round(float(wave), 4),
            "perplexity": [round(float((-(v * (v + 1e-9).log()).sum()).exp()), 1) for v in share],
        }

    def save(self, trained):
        """The codec so far (halves), and the state that the next call goes on from."""

        def half(part):
            return {k: v.half().cpu() for k, v in part.items()}

        result = self.evaluate()
        codec = {
            "dec": half(self.ema),
            "enc": half(self.enc.state_dict()),
            "books": self.vq.books.half().cpu(),
            "eval": result,
            "steps": self.step,
        }
        state = {name: getattr(self, name).state_dict() for name in self.saved}
        state |= {"ema": self.ema, "step": self.step, "gan_steps": self.gan_steps, "trained": trained}
        pace.save(self.args.out, codec, state)
        print(f"saved at step {self.step}, {trained:.0f} s:", result, flush=True)


def main():
    args = arguments()
    clock = pace.Pace(args.seconds, args.minutes)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    training = Training(args)
    torch.manual_seed(training.step)
    hours = len(training.audio) / 86.4e6
    sizes = {n: sum(q.numel() for q in getattr(training, n).parameters()) for n in ("dec", "enc", "disc")}
    print(f"{hours:.2f} hours of audio; parameters: {sizes}", flush=True)
    clock.train(training, training.train_step)


if __name__ == "__main__":
    main()
