#!/usr/bin/env python3
"""train_codec.py AUDIO.npy OUT.pt SECONDS [--device D] [--init CODEC.pt] [--decoder-only] ...

AUDIO is one long int16 stream at 24 kHz, a multiple of 1920 samples.  --init starts from the
decoder of an earlier codec; --decoder-only also takes its encoder and codebooks and leaves them
alone, so that codes made with them stay valid.  Discriminators join at the share --gan of the time.
"""

import argparse
import time

import numpy as np
import torch
from codec import HOP, RVQ, Decoder, Discs, MelEncoder, Spectral

p = argparse.ArgumentParser()
p.add_argument("audio")
p.add_argument("out")
p.add_argument("seconds", type=float)
p.add_argument("--device", default="cuda")
p.add_argument("--init")
p.add_argument("--decoder-only", action="store_true")
p.add_argument("--gan", type=float, default=0.45)
p.add_argument("--gan-items", type=int, default=64, help="items of a batch the discriminators see")
p.add_argument("--lr", type=float, default=1e-3)
p.add_argument("--mel", type=float, default=2.0, help="weight of the mel loss")
p.add_argument("--ema", type=float, default=0.998)
args = p.parse_args()
dev, frozen = args.device, args.decoder_only
toy = dev == "cpu"
# items; frames of an item; frames of it decoded; of these left out of the loss
B, FRAMES, SLICE, WARM = (4, 40, 14, 6) if toy else (64, 96, 26, 6)
UNQUANTISED = 5 if toy else 150 if args.init else 300  # steps
torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
torch.backends.cudnn.benchmark = True

audio = torch.from_numpy(np.load(args.audio)).to(dev)
hold, audio = audio[-HOP * 1200 :], audio[: -HOP * 1200]  # the last 96 s are held out
enc, vq, dec = MelEncoder().to(dev), RVQ().to(dev), Decoder().to(dev)
spec, disc = Spectral().to(dev), Discs().to(dev)
if args.init:
    start = torch.load(args.init)

    def full(part):
        return {k: v.float() for k, v in part.items()}

    dec.load_state_dict(full(start["dec"]))
    if frozen:
        enc.load_state_dict(full(start["enc"]))
        vq.books.copy_(start["books"].float())
        enc.requires_grad_(False)
        vq.eval()


def count(m):
    return sum(q.numel() for q in m.parameters())


print(
    "parameters: decoder",
    count(dec),
    "encoder",
    count(enc),
    "discriminators",
    count(disc),
    "| hours of audio",
    len(audio) / 86.4e6,
    flush=True,
)
trained = [*dec.parameters()] if frozen else [*enc.parameters(), *dec.parameters()]
opt_g = torch.optim.AdamW(trained, args.lr, betas=(0.8, 0.99), weight_decay=1e-3)
opt_d = torch.optim.AdamW(disc.parameters(), 3e-4, betas=(0.8, 0.99))
ema = {k: v.detach().clone() for k, v in dec.state_dict().items()}
wave = dec.wave if toy else torch.compile(dec.wave)


def batch():
    i = torch.randint(len(audio) - FRAMES * HOP, (B,), device=dev)
    return audio[i[:, None] + torch.arange(FRAMES * HOP, device=dev)[None]].float() / 32768


@torch.no_grad()
def evaluate():
    """Losses of the averaged decoder on held-out audio, and how evenly the codes are used."""
    vq.eval()
    keep = {k: v.clone() for k, v in dec.state_dict().items()}
    dec.load_state_dict(ema)
    x = hold.float().view(-1, 100 * HOP) / 32768
    q, _, codes = vq(enc(x))
    sc, lm, mel = spec(dec(q), x)
    use = [torch.bincount(codes[..., j].flatten(), minlength=vq.k) for j in range(vq.n)]
    share = [u.float() / codes[..., 0].numel() for u in use]
    dec.load_state_dict(keep)
    vq.train(not frozen)
    return {
        "sc": round(float(sc) / 2, 4),
        "logmag": round(float(lm) / 2, 4),
        "mel": round(float(mel) / 3, 4),
        "perplexity": [round(float((-(v * (v + 1e-9).log()).sum()).exp()), 1) for v in share],
    }


def save(path):
    def half(part):
        return {k: v.half().cpu() for k, v in part.items()}

    result = evaluate()
    torch.save(
        {
            "dec": half(ema),
            "books": vq.books.half().cpu(),
            "enc": half(enc.state_dict()),
            "eval": result,
            "steps": step,
        },
        path,
    )
    print(f"saved at step {step}, {time.time() - t0:.0f} s:", result, flush=True)


def quantise(x):
    if frozen:
        with torch.no_grad():
            return vq(enc(x))[0], x.new_zeros(())
    y = enc(x)
    if step < UNQUANTISED:
        return y, y.new_zeros(())
    if step == UNQUANTISED:
        vq.kmeans(y.detach())
    some = torch.rand(B, device=dev) < 0.4
    return vq(y, torch.where(some, torch.randint(1, vq.n + 1, (B,), device=dev), vq.n))[:2]


t0, step, gan_steps, info = time.time(), 0, 0, {}
while (frac := (time.time() - t0) / args.seconds) < 1:
    for g in opt_g.param_groups:
        g["lr"] = args.lr * min(1, (step + 1) / 200) * (1.02 - frac)
    if frac >= args.gan and not gan_steps:
        save(args.out.replace(".pt", "_plain.pt"))
    x = batch()
    q, commit = quantise(x)
    h = dec.frame(q)
    s = int(torch.randint(FRAMES - SLICE + 1, ()))
    w = wave(h[..., s : s + SLICE])[:, WARM * HOP :]
    t = x[:, (s + WARM) * HOP : (s + SLICE) * HOP]
    sc, lm, mel = spec(w, t)
    loss = sc + lm + args.mel * mel + 0.25 * commit
    if frac >= args.gan:
        n = args.gan_items
        pairs = zip(disc(t[:n]), disc(w[:n].detach()), strict=True)
        ld = sum(((1 - a[0]) ** 2).mean() + (b[0] ** 2).mean() for a, b in pairs)
        opt_d.zero_grad(set_to_none=True)
        ld.backward()
        for g in opt_d.param_groups:
            g["lr"] = 3e-4 * (1 - frac) + 2e-5
        opt_d.step()
        gan_steps += 1
        if gan_steps > 100:
            fake = disc(w[:n])
            with torch.no_grad():
                real = disc(t[:n])
            adv = sum(((1 - f[0]) ** 2).mean() for f in fake)
            fm = sum(
                (a - b).abs().mean() / b.abs().mean().clamp(min=1e-3)
                for f, r in zip(fake, real, strict=True)
                for a, b in zip(f[1], r[1], strict=True)
            )
            loss = loss + min(1, (gan_steps - 100) / 300) * (0.15 * adv + 0.10 * fm)
            if step % 200 == 0:
                info = {"ld": float(ld), "adv": float(adv), "fm": float(fm)}
    opt_g.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 2.0)
    opt_g.step()
    with torch.no_grad():
        d = min(args.ema, step / (step + 20))
        torch._foreach_lerp_(list(ema.values()), list(dec.state_dict().values()), 1 - d)
    if step % (10 if toy else 200) == 0:
        print(
            f"step {step} t {time.time() - t0:.0f}s sc {sc.item() / 2:.3f} lm {lm.item() / 2:.3f} "
            f"mel {mel.item() / 3:.3f} commit {float(commit):.4f}",
            {k: round(v, 3) for k, v in info.items()},
            flush=True,
        )
    if step % 2000 == 1999:
        save(args.out)
    step += 1
save(args.out)
