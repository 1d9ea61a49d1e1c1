#!/usr/bin/env python3
"""train_talker.py CODES.npz TEXTS.gz TOKENIZER_DIR OUT.pt SECONDS [--device D] [--init TTS.pt]
[--lr X] ...

Trains talker and code predictor together, teacher-forced.
"""

import argparse
import gzip
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor

import make_tokenizer
import numpy as np
import torch
from batches import Corpus
from tts import G, PhoneHead, Talker, losses

p = argparse.ArgumentParser()
for name in ("codes", "texts", "tokenizer", "out"):
    p.add_argument(name)
p.add_argument("seconds", type=float)
p.add_argument("--device", default="cuda")
p.add_argument("--init")
p.add_argument("--lr", type=float, default=2e-3)
p.add_argument("--rows", type=int, default=128)
p.add_argument("--picks", type=int, default=8192)
p.add_argument("--short", type=float, default=0.06, help="share of the time on short sentences only")
p.add_argument("--guide", type=float, default=1.0)
args = p.parse_args()
dev, cuda = args.device, args.device == "cuda"
R, PICKS = args.rows, args.picks
torch.manual_seed(0)
rng = np.random.default_rng(0)
torch.backends.cuda.matmul.allow_tf32 = True
SPECIAL = make_tokenizer.special(args.tokenizer)
GROUP_WEIGHT = torch.tensor([0.9**j + 0.1 for j in range(G - 1)], device=dev)
GROUP_WEIGHT = GROUP_WEIGHT / GROUP_WEIGHT.sum()

net, phone_head = Talker(SPECIAL["size"]).to(dev), PhoneHead().to(dev)
if args.init:
    start = torch.load(args.init)
    net.load_state_dict({k: v.float() for k, v in start["net"].items()})
    phone_head.load_state_dict({k: v.float() for k, v in start["phone_head"].items()})
both = [*net.parameters(), *phone_head.parameters()]
print("talker and predictor:", sum(q.numel() for q in net.parameters()), "parameters", flush=True)
ema = [q.detach().clone() for q in both]
decay = [q for q in both if q.dim() > 1]
plain = [q for q in both if q.dim() == 1]
groups = [{"params": decay, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}]
opt = torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.98), fused=cuda)


def objective(d, guide_weight):
    with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
        m = losses(net, phone_head, d)
    loss = 2 * m["ce0"] + 4 * (m["ce"] * GROUP_WEIGHT).sum()
    return loss + guide_weight * m["guide"] + 0.5 * m["phone"], m


t0 = time.time()
data = np.load(args.codes)
data = {k: data[k] for k in data.files}
lines = gzip.open(args.texts, "rt").read().strip("\n").split("\n")
chosen = [lines[i] for i in data["rows"][:, 0]]
tokenizations = [
    make_tokenizer.load(args.tokenizer, drop).encode_batch(chosen) for drop in (None, 0.1, 0.1)
]  # two with BPE-dropout, against rote learning
corpus = Corpus(data, lines, tokenizations, SPECIAL, dev)
U = len(data["rows"])
VAL = min(400, U // 10)
train_set, frames = np.arange(VAL, U), corpus.frames
short_set = train_set[frames[VAL:] <= 64]
print(f"{U} utterances, {int(frames.sum())} frames, ready in {time.time() - t0:.0f} s", flush=True)
pool = ThreadPoolExecutor(1)


def packing(short):
    return pool.submit(corpus.pack, short_set if short else train_set, rng)


def batches(is_short):
    coming, short = packing(is_short()), is_short()
    while True:
        table = coming.result()
        now, short = short, is_short()
        coming = packing(short)
        table = torch.from_numpy(table).to(dev)
        for k in range(0, len(table) - R + 1, R):
            if now and not is_short():
                break
            yield table[k : k + R]


def swap():
    with torch.no_grad():
        for a, b in zip(both, ema, strict=True):
            c = a.detach().clone()
            a.copy_(b)
            b.copy_(c)


@torch.no_grad()
def validate():
    """Mean losses on held-out utterances; with random text the c0 loss must be much worse."""
    r = np.random.default_rng(5)
    table = torch.from_numpy(corpus.pack(np.arange(VAL), r, plain=1.1)).to(dev)
    if len(table) < R:
        table = table.repeat(-(-R // len(table)), 1, 1)
    state, acc = torch.get_rng_state(), []
    for k in range(0, len(table) - R + 1, R):
        d = corpus.build(table[k : k + R], PICKS, noise=False)
        m = objective(d, 0.0)[1]
        word = (d["text"] < SPECIAL["size"] - len(make_tokenizer.SPECIALS)) & (d["span"][..., 0] < 9e3)
        other = torch.randint(256, SPECIAL["size"] - 40, word.shape, device=dev)
        m2 = objective(d | {"text": torch.where(word, other, d["text"])}, 0.0)[1]
        acc.append(
            torch.cat(
                [
                    m["ce0"][None],
                    m2["ce0"][None],
                    m["acc0"][None],
                    m["phone"][None],
                    m["hits"],
                    m["ce"],
                    m["acc"],
                ]
            ).float()
        )
    torch.set_rng_state(state)
    v = [round(x, 3) for x in torch.stack(acc).mean(0).tolist()]
    return {
        "ce0": v[0],
        "ce0_random_text": v[1],
        "acc0": v[2],
        "phone": v[3],
        "hits": v[4:7],
        "ce": v[7:22],
        "acc": v[22:],
    }


def save(step):
    """Averaged weights, rounded as they will be shipped."""
    swap()
    val = validate()

    def half(m):
        return {k: v.bfloat16().cpu() for k, v in m.state_dict().items()}

    torch.save(
        {"net": half(net), "phone_head": half(phone_head), "val": val, "step": step},
        args.out + ".new",
    )
    os.replace(args.out + ".new", args.out)
    swap()
    print(f"   saved at step {step}", val, flush=True)


t0, step, saved = time.time(), 0, 0.0


def fraction():
    return (time.time() - t0) / args.seconds


for table in batches(lambda: fraction() < args.short):
    frac = fraction()
    if frac >= 1:
        break
    cos = 0.5 * (1 + math.cos(math.pi * frac))
    lr = args.lr * min(1, (step + 1) / 500) * (cos * 0.99 + 0.01)
    for g in opt.param_groups:
        g["lr"] = lr
    loss, m = objective(corpus.build(table, PICKS), args.guide * max(0.1, 1 - frac))
    opt.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(both, 1.0)
    opt.step()
    with torch.no_grad():
        torch._foreach_lerp_(ema, [q.detach() for q in both], 1 - min(0.999, step / (step + 20)))
    if step % (250 if cuda else 10) == 0:
        ce = m["ce"].tolist()
        hits = [round(x, 3) for x in m["hits"].tolist()]
        print(
            f"step {step} t {time.time() - t0:.0f}s lr {lr:.1e} "
            f"c0 {m['ce0'].item():.3f} c1 {ce[0]:.2f} "
            f"c8 {ce[7]:.2f} c15 {ce[14]:.2f} guide {m['guide'].item():.2f} hits {hits} "
            f"phone {m['phone'].item():.2f} norm {norm.item():.2f}",
            flush=True,
        )
        assert math.isfinite(m["ce0"].item())
    if frac - saved > 0.1:
        saved = frac
        save(step)
    step += 1
save(step)
print("done", step, "steps", flush=True)
