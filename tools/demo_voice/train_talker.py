#!/usr/bin/env python3
"""train_talker.py CODES.npz TEXTS.gz TOKENIZER_DIR OUT.pt SECONDS [--minutes M] [--device D]
[--init TTS.pt] [--lr X] ...

Trains talker and code predictor together, teacher-forced. SECONDS is the whole training, in as many
calls as it takes: a call goes on from OUT.pt.state, and status 3 says that more is to do.
"""

import argparse
import gzip
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import make_tokenizer
import numpy as np
import pace
import torch
from batches import Corpus
from tts import G, PhoneHead, Talker, losses


def arguments():
    p = argparse.ArgumentParser()
    for name in ("codes", "texts", "tokenizer", "out"):
        p.add_argument(name)
    p.add_argument("seconds", type=float)
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--device", default="cuda")
    p.add_argument("--init")
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--rows", type=int, default=128)
    p.add_argument("--picks", type=int, default=8192)
    p.add_argument("--short", type=float, default=0.06, help="share of the time on short sentences only")
    p.add_argument("--guide", type=float, default=1.0)
    return p.parse_args()


def open_corpus(args, special):
    data = np.load(args.codes)
    data = {k: data[k] for k in data.files}
    # Utterances that are held out come first: they must be of both speakers.
    data["rows"] = data["rows"][np.random.default_rng(1).permutation(len(data["rows"]))]
    lines = gzip.open(args.texts, "rt").read().strip("\n").split("\n")
    chosen = [lines[i] for i in data["rows"][:, 0]]
    tokenizations = [
        make_tokenizer.load(args.tokenizer, drop).encode_batch(chosen) for drop in (None, 0.1, 0.1)
    ]  # two with BPE-dropout, against rote learning
    return Corpus(data, lines, tokenizations, special, args.device)


class Training:
    phone_weight = 0.5

    def __init__(self, args):
        self.args, self.dev, self.cuda = args, args.device, args.device == "cuda"
        self.special = make_tokenizer.special(args.tokenizer)
        weight = torch.tensor([0.9**j + 0.1 for j in range(G - 1)], device=self.dev)
        self.group_weight = weight / weight.sum()
        self.net, self.phone_head = Talker(self.special["size"]).to(self.dev), PhoneHead().to(self.dev)
        if args.init:
            start = torch.load(args.init, map_location=self.dev)
            self.net.load_state_dict({k: v.float() for k, v in start["net"].items()})
            if "phone_head" in start:  # not in what unpack.py makes of a checkpoint
                self.phone_head.load_state_dict({k: v.float() for k, v in start["phone_head"].items()})
        self.both = [*self.net.parameters(), *self.phone_head.parameters()]
        self.ema = [q.detach().clone() for q in self.both]
        decay = [q for q in self.both if q.dim() > 1]
        plain = [q for q in self.both if q.dim() == 1]
        groups = [{"params": decay, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}]
        self.opt = torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.98), fused=self.cuda)
        self.step, self.before = 0, 0.0
        if (state := Path(args.out + ".state")).exists():
            stored = torch.load(state, map_location=self.dev)
            for name in ("net", "phone_head", "opt"):
                getattr(self, name).load_state_dict(stored[name])
            self.ema, self.step, self.before = (stored[k] for k in ("ema", "step", "trained"))
            print(f"goes on at step {self.step}, {self.before:.0f} s trained", flush=True)
        self.rng = np.random.default_rng(self.step)
        self.corpus = self.open_corpus()
        self.held = min(400, len(self.corpus.frames) // 10)
        self.all = np.arange(self.held, len(self.corpus.frames))
        self.short = self.all[self.corpus.frames[self.held :] <= 64]

    def open_corpus(self):
        return open_corpus(self.args, self.special)

    def objective(self, d, guide_weight):
        with torch.autocast("cuda", torch.bfloat16, enabled=self.cuda):
            m = losses(self.net, self.phone_head, d)
        loss = 2 * m["ce0"] + 4 * (m["ce"] * self.group_weight).sum()
        return loss + guide_weight * m["guide"] + self.phone_weight * m["phone"], m

    def batches(self, is_short):
        pool, R = ThreadPoolExecutor(1), self.args.rows

        def packing(short):
            return pool.submit(self.corpus.pack, self.short if short else self.all, self.rng)

        coming, short = packing(is_short()), is_short()
        while True:
            table = coming.result()
            if len(table) < R:
                raise ValueError(
                    f"{len(table)} rows of utterances do not fill a batch of {R}: make more, or fewer --rows"
                )
            now, short = short, is_short()
            coming = packing(short)
            table = torch.from_numpy(table).to(self.dev)
            for k in range(0, len(table) - R + 1, R):
                if now and not is_short():
                    break
                yield table[k : k + R]

    @torch.no_grad()
    def swap(self):
        for a, b in zip(self.both, self.ema, strict=True):
            c = a.detach().clone()
            a.copy_(b)
            b.copy_(c)

    @torch.no_grad()
    def validate(self):
        """Mean losses on held-out utterances; with random text the c0 loss must be much worse."""
        R = self.args.rows
        table = self.corpus.pack(np.arange(self.held), np.random.default_rng(5), plain=1.1)
        table = torch.from_numpy(table).to(self.dev)
        if len(table) < R:
            table = table.repeat(-(-R // len(table)), 1, 1)
        state, acc = torch.get_rng_state(), []
        for k in range(0, len(table) - R + 1, R):
            d = self.corpus.build(table[k : k + R], self.args.picks, noise=False)
            m = self.objective(d, 0.0)[1]
            word = (d["text"] < self.special["size"] - len(make_tokenizer.SPECIALS)) & (d["span"][..., 0] < 9e3)
            other = torch.randint(256, self.special["size"] - 40, word.shape, device=self.dev)
            m2 = self.objective(d | {"text": torch.where(word, other, d["text"])}, 0.0)[1]
            single = [m["ce0"][None], m2["ce0"][None], m["acc0"][None], m["phone"][None]]
            acc.append(torch.cat([*single, m["hits"], m["ce"], m["acc"]]).float())
        torch.set_rng_state(state)
        v = [round(x, 3) for x in torch.stack(acc).mean(0).tolist()]
        names = ("ce0", "ce0_random_text", "acc0", "phone")
        return dict(zip(names, v, strict=False)) | {"hits": v[4:7], "ce": v[7:22], "acc": v[22:]}

    def train_step(self, table, fraction):
        cos = 0.5 * (1 + math.cos(math.pi * fraction))
        lr = self.args.lr * min(1, (self.step + 1) / 500) * (cos * 0.99 + 0.01)
        for g in self.opt.param_groups:
            g["lr"] = lr
        d = self.corpus.build(table, self.args.picks)
        loss, m = self.objective(d, self.args.guide * max(0.1, 1 - fraction))
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.both, 1.0)
        self.opt.step()
        with torch.no_grad():
            keep = min(0.999, self.step / (self.step + 20))
            torch._foreach_lerp_(self.ema, [q.detach() for q in self.both], 1 - keep)
        if self.step % (250 if self.cuda else 1) == 0:
            ce = m["ce"].tolist()
            hits = [round(x, 3) for x in m["hits"].tolist()]
            print(
                f"step {self.step} {fraction:.1%} lr {lr:.1e} c0 {m['ce0'].item():.3f} c1 {ce[0]:.2f} "
                f"c8 {ce[7]:.2f} c15 {ce[14]:.2f} guide {m['guide'].item():.2f} hits {hits} "
                f"phone {m['phone'].item():.2f} norm {norm.item():.2f}",
                flush=True,
            )
            if not math.isfinite(m["ce0"].item()):
                raise FloatingPointError(f"the loss should be a number, got {m['ce0'].item()}: try a lower --lr")
        self.step += 1

    def save(self, trained):
        """Averaged weights, rounded as they will be shipped, and the state that the next call goes on from."""
        self.swap()
        val = self.validate()

        def half(m):
            return {k: v.bfloat16().cpu() for k, v in m.state_dict().items()}

        result = {"net": half(self.net), "phone_head": half(self.phone_head), "val": val, "step": self.step}
        self.swap()
        state = {name: getattr(self, name).state_dict() for name in ("net", "phone_head", "opt")}
        state |= {"ema": self.ema, "step": self.step, "trained": trained}
        pace.save(self.args.out, result, state)
        print(f"saved at step {self.step}, {trained:.0f} s:", val, flush=True)


def main():
    args = arguments()
    clock = pace.Pace(args.seconds, args.minutes)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    training = Training(args)
    torch.manual_seed(training.step)
    count = sum(q.numel() for q in training.net.parameters())
    print(f"{count} parameters, {len(training.corpus.frames)} utterances", flush=True)
    tables = training.batches(lambda: clock.fraction < args.short)
    clock.train(training, lambda fraction: training.train_step(next(tables), fraction))


if __name__ == "__main__":
    main()
