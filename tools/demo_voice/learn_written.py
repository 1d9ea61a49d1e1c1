#!/usr/bin/env python3
"""learn_written.py WRITTEN.jsonl.gz OLD_DIR OUT_DIR SECONDS [--utterances N] [--minutes M] [--device D] ...

A voice that reads plain text learns what people write. It speaks the plain form of every text itself (spoken.npz of
OUT_DIR); then its copy learns the same probabilities of the same codes from the written form. OLD_DIR: see unpack.py.
OUT_DIR gets `tok`, whose tokens include typographic marks and letters with accents, and `tts.pt`.
"""

import argparse
import gzip
import json
import time
from dataclasses import dataclass
from pathlib import Path

import make_tokenizer
import numpy as np
import pace
import speak
import torch
import written_text
from batches import Corpus
from train_talker import Training
from tts import CB, GUIDED

BATCH = 1024
HEADS = [(layer, head) for layer, heads in GUIDED.items() for head, what in heads if what == "here"]
LIKE = {"’": "'", "‘": "'", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "—": ",", "–": ",", "…": "."}
SHORTENED = ["’s", "’t"]  # the others are two tokens in ASCII
PROMPT = 9  # rows before the first token of the text: role, tags, speaker, start


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("texts")
    p.add_argument("old", type=Path)
    p.add_argument("folder", type=Path)
    p.add_argument("seconds", type=float)
    p.add_argument("--utterances", type=int, default=20000)
    p.add_argument("--speaking", type=float, default=150, help="seconds at most for the speech to learn from")
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--device", default="cuda")
    p.add_argument("--lr", type=float, default=5e-4)
    p.add_argument("--rows", type=int, default=128)
    p.add_argument("--picks", type=int, default=8192)
    p.add_argument("--short", type=float, default=0.0)
    p.add_argument("--guide", type=float, default=0.3)
    p.add_argument("--init", help="tts.pt of an earlier run, with the same tokens; default: the old voice")
    a = p.parse_args()
    a.tokenizer, a.out = str(a.folder / "tok"), str(a.folder / "tts.pt")
    return a


def grow(old, folder):
    """The tokenizer with more tokens, and the old network with rows for them: each begins as its plain form."""
    new = folder / "tok"
    make_tokenizer.extend(old / "tok", new, [*LIKE, *written_text.LETTERS, *SHORTENED])
    before, after = make_tokenizer.load(old / "tok"), make_tokenizer.load(new)
    stored = torch.load(old / "tts.pt")
    rows = stored["net"]["model.text_embedding.weight"].float()
    base = before.get_vocab_size()
    size = make_tokenizer.special(new)["size"]
    grown = rows.new_zeros(size, rows.shape[1])
    grown[:base] = rows[:base]
    grown[-len(make_tokenizer.SPECIALS) :] = rows[base:]
    for text in [*LIKE, *written_text.LETTERS, *SHORTENED]:
        plain = "".join(LIKE.get(c) or written_text.plain_letter(c) for c in text)
        grown[after.encode(text).ids] = rows[before.encode(plain).ids].mean(0)
    stored["net"]["model.text_embedding.weight"] = grown
    torch.save(stored, folder / "grown.pt")


class Watch:
    """Collects the probabilities of every frame, and where in the text the voice was, of a batch."""

    def __init__(self, mids, device):
        width = max(map(len, mids))
        self.mids = torch.tensor([list(m) + [0] * (width - len(m)) for m in mids], device=device)
        self.count = torch.tensor([len(m) for m in mids], device=device)
        self.pads, self.soft0, self.soft, self.place = None, [], [], []

    def __call__(self, logits, others, scores):
        self.soft0.append(logits.float().softmax(-1).half())
        self.soft.append(others.float().softmax(-1).half())
        rows = scores[HEADS[0][0]].shape[-1]
        at = self.pads[:, None] + PROMPT + torch.arange(self.mids.shape[1], device=self.mids.device)
        there = (at < rows) & (torch.arange(at.shape[1], device=at.device) < self.count[:, None])
        place = 0.0
        for layer, head in HEADS:
            s = scores[layer][:, head].gather(1, at.clamp(max=rows - 1)).masked_fill(~there, -torch.inf)
            place = place + (s.softmax(-1) * self.mids).sum(-1) / len(HEADS)
        self.place.append(place)


def spoken(args):
    """The old voice says the plain texts. Writes spoken.npz; returns the probabilities of every frame, [frames, CB + 1]
    and [frames, 15, CB], on the device."""
    rows = [json.loads(line) for line in gzip.open(args.texts, "rt", encoding="utf-8")][: args.utterances]
    voice = speak.Voice(args.old / "tts.pt", args.old / "codec.pt", args.old / "tok", args.device)
    order = sorted(range(len(rows)), key=lambda k: len(rows[k]["plain"]))
    codes, places, table, soft0, soft, at, began = [], [], [], [], [], 0, time.monotonic()
    batches = [order[first : first + BATCH] for first in range(0, len(order), BATCH)]
    np.random.default_rng(0).shuffle(batches)
    for number, chosen in enumerate(batches):
        if time.monotonic() - began > args.speaking:
            break
        texts = [rows[k]["plain"] for k in chosen]
        mids = [[(a + b) / 2 for a, b in voice.tok.encode(t).offsets] for t in texts]
        speakers, stream = [k % 2 for k in chosen], number % 2 == 1
        watch = Watch(mids, args.device)
        prompts = [len(m) + 2 if not stream else 1 for m in mids]
        watch.pads = torch.tensor([max(prompts) - n for n in prompts], device=args.device)
        par = (0.5, 20, 0.5, 20) if number % 4 < 2 else (0.7, 50, 0.7, 50)
        limit = min(200, int(1.25 * len(texts[-1]) + 20))  # frames: who does not end by then is left out
        made, ends = voice.codes(texts, speakers, stream, par=par, seed=number, watch=watch, limit=limit)
        probabilities = [torch.stack(watch.soft0, 1), torch.stack(watch.soft, 1)]
        place = torch.stack(watch.place, 1).cpu().numpy()
        for b, (k, end) in enumerate(zip(chosen, ends, strict=True)):
            letters = len(texts[b]) + 8
            if not 0.35 * letters < end < 1.3 * letters + 12:  # it did not end, or not where it should
                continue
            table.append((k, speakers[b], at, end))
            codes.append(made[b].byte().cpu().numpy())
            reached = np.maximum.accumulate(place[b, :end] - 0.6).clip(0, len(texts[b]))
            places.append(np.round(reached * 64).astype(np.uint16))
            soft0.append(probabilities[0][b, :end])
            soft.append(probabilities[1][b, :end])
            at += end
        print(f"{at} frames, {time.monotonic() - began:.0f} s", flush=True)
        del probabilities, watch
    np.savez(
        args.folder / "spoken.npz",
        codes=np.concatenate(codes),
        rows=np.array(table, np.int32),
        place=np.concatenate(places),
    )
    hours = at * 0.08 / 3600
    print(f"{len(table)} texts spoken out of {len(rows)}, {hours:.1f} h, {time.monotonic() - began:.0f} s", flush=True)
    return torch.cat(soft0), torch.cat(soft)


@dataclass
class Tokens:
    """As the tokenizers library gives them, but with places in the plain text."""

    ids: list
    offsets: list


class Learning(Training):
    phone_weight = 0.0  # nobody knows the phonemes of what it said

    def __init__(self, args):
        self.soft0, self.soft = spoken(args)
        super().__init__(args)

    def open_corpus(self):
        """Variants: written, plain, written, and written with BPE-dropout."""
        data = dict(np.load(self.args.folder / "spoken.npz"))
        data["rows"] = data["rows"][np.random.default_rng(1).permutation(len(data["rows"]))]
        data["phone"] = np.zeros((len(data["codes"]), 2), np.uint8)
        rows = [json.loads(line) for line in gzip.open(self.args.texts, "rt", encoding="utf-8")]
        chosen = [rows[i] for i in data["rows"][:, 0]]

        def tokens(kind, dropout=None):
            t = make_tokenizer.load(self.args.tokenizer, dropout)
            for row, e in zip(chosen, t.encode_batch([row[kind] for row in chosen]), strict=True):
                at = row["at"] if kind == "written" else range(len(row["plain"]) + 1)
                yield Tokens(e.ids, [(at[a], at[b]) for a, b in e.offsets])

        variants = [list(tokens("written")), list(tokens("plain")), list(tokens("written", 0.05))]
        return Corpus(data, [row["plain"] for row in rows], variants, self.special, self.args.device)

    def objective(self, d, guide_weight):
        if guide_weight:  # not while it validates
            asked = (d["target"] >= 0).flatten()
            soft0 = self.soft0[d["frame"].flatten()].float()
            ends = torch.nn.functional.one_hot(torch.tensor(CB, device=self.dev), CB + 1)
            soft0 = torch.where((d["target"].flatten() == CB)[:, None], ends, soft0) * asked[:, None]
            d = d | {"soft0": soft0, "soft": self.soft[d["frame"].flatten()[d["pick"]]].float()}
        return super().objective(d, guide_weight)


def main():
    args = arguments()
    clock = pace.Pace(args.seconds, args.minutes)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    grow(args.old, args.folder)
    args.init = args.init or str(args.folder / "grown.pt")
    training = Learning(args)
    torch.manual_seed(1)
    tables = training.batches(lambda: False)
    training.save(0)
    clock.train(training, lambda fraction: training.train_step(next(tables), fraction))


if __name__ == "__main__":
    main()
