"""Packed training batches: utterances in the official CustomVoice layouts, side by side in rows of
fixed length, built on the device."""

from collections import deque

import numpy as np
import torch
from tts import CB, IDS, LANG, G

T, MAX_PER_ROW = 256, 16
FAR = 1e4


class Corpus:
    """Codes, places, phonemes and token ids of all utterances, on the device.

    tokenizations: for each of several tokenizations, one list of (ids, offsets) per utterance."""

    def __init__(self, data, texts, tokenizations, special, device):
        self.dev, self.special = device, special

        def put(a):
            return torch.from_numpy(a).to(device)

        self.codes, self.phone = put(data["codes"]), put(data["phone"])
        place = data["place"].astype(np.float32) / 64
        self.place = put(place)
        rows = data["rows"]
        self.frames = rows[:, 3].astype(np.int64)
        self.speaker, self.first, self.count = (put(rows[:, k].astype(np.int64)) for k in (1, 2, 3))
        self.chars = put(np.array([len(texts[i]) for i in rows[:, 0]], np.float32))
        self.tokens, self.token_counts = [], []
        for enc in tokenizations:
            n = np.array([len(e.ids) for e in enc], np.int64)
            first = np.concatenate([[0], np.cumsum(n)[:-1]])
            ids = np.concatenate([np.array(e.ids, np.int64) for e in enc])
            span = np.concatenate([np.array(e.offsets, np.float32) for e in enc])
            self.tokens.append((put(ids), put(span), put(first), put(n)))
            self.token_counts.append(n)
        self.variants = len(tokenizations)
        flat = [torch.cat([t[k] for t in self.tokens]) for k in (0, 1)]
        self.ids, self.spans = flat
        sizes = np.cumsum([0] + [len(t[0]) for t in self.tokens])[:-1]
        self.tok_first = torch.stack([t[2] + int(s) for t, s in zip(self.tokens, sizes, strict=False)])
        self.tok_count = torch.stack([t[3] for t in self.tokens])
        c = IDS
        think = [
            c["codec_think_id"],
            c["codec_think_bos_id"],
            LANG["english"],
            c["codec_think_eos_id"],
        ]
        auto = [c["codec_nothink_id"], c["codec_think_bos_id"], c["codec_think_eos_id"], 0]
        self.tags = torch.tensor([auto, think], device=device)
        self.role = torch.tensor(special["role"], device=device)

    def length(self, u, stream, lang, variant):
        """Rows that utterances take (numpy): prompt and frames."""
        n = np.stack(self.token_counts)[variant, u]
        return 3 + lang + 4 + 1 + np.where(stream, 1, n + 2) + self.frames[u]

    def pack(self, utterances, rng, plain=0.6):
        """Random layouts for the utterances, packed into rows of T.
        Returns int arrays [rows, MAX_PER_ROW, 5]: utterance, stream, lang, variant, start."""
        u = rng.permutation(utterances)
        stream, lang = rng.random(len(u)) < 0.5, rng.random(len(u)) < 0.5
        variant = np.where(rng.random(len(u)) < plain, 0, rng.integers(0, self.variants, len(u)))
        size = self.length(u, stream, lang, variant)
        items = np.stack([u, stream, lang, variant, size], 1).astype(np.int64)
        items = items[size <= T]
        stacks = [deque() for _ in range(T + 1)]
        for k, s in enumerate(items[:, 4].tolist()):
            stacks[s].append(k)
        used = np.zeros(len(items), bool)
        out = []
        smallest = min((s for s in range(T + 1) if stacks[s]), default=T)
        for k in range(len(items)):
            if used[k]:
                continue
            row, left, s = [], T, int(items[k, 4])
            stacks[s].popleft()  # the first one left of its size is k itself
            while True:
                used[k] = True
                row.append((k, T - left))
                left -= s
                if len(row) == MAX_PER_ROW:
                    break
                s = left
                while s >= smallest and not stacks[s]:
                    s -= 1
                if s < smallest:
                    break
                k = stacks[s].pop()
            out.append(row)
        table = np.full((len(out), MAX_PER_ROW, 5), -1, np.int64)
        table[:, :, 4] = T
        for r, row in enumerate(out):
            for j, (k, start) in enumerate(row):
                table[r, j] = (*items[k, :4], start)
        return table[rng.permutation(len(table))]

    def build(self, table, picks, noise=True):
        """The rows of a packed table (see pack), and everything the losses need."""
        dev, sp = self.dev, self.special
        R = len(table)
        t = torch.arange(T, device=dev)[None].expand(R, T)
        seg = (t[..., None] >= table[:, None, :, 4]).sum(-1) - 1

        def of(k):
            return table[..., k].gather(1, seg)

        u, stream, lang, variant = of(0), of(1) > 0, of(2), of(3)
        t = t - of(4)
        F_, first = self.count[u], self.first[u]
        o, n = self.tok_first[variant, u], self.tok_count[variant, u]
        tags = lang + 4  # tags and speaker
        pre = 3 + tags + 1
        P = pre + torch.where(stream, 1, n + 2)
        live = t < P + F_
        i = t - pre  # place in the text
        f = t - P  # frame whose codes are the input of this row
        g = f + 1  # frame predicted at this row
        in_text = (i >= 0) & (i < n) & (f < F_)
        at = (o + i.clamp(min=0)).clamp(max=len(self.ids) - 1)
        text = torch.where(i == n, sp["eos"], sp["pad"])
        text = torch.where(in_text, self.ids[at], text)
        before = torch.where(t < 3, self.role[t.clamp(max=2)], sp["pad"])
        text = torch.where(i >= 0, text, torch.where(i == -1, sp["bos"], before))
        tag = self.tags[lang, (t - 3).clamp(0, 3)]
        tag = torch.where(t - 3 == tags - 1, CB + 900 + self.speaker[u], tag)
        codec = torch.where(t < 3, -1, torch.where(i < -1, tag, IDS["codec_pad_id"]))
        codec = torch.where(t == P - 1, IDS["codec_bos_id"], torch.where(t >= P, -2, codec))
        codec = torch.where(live, codec, -1)
        text = torch.where(live, text, sp["pad"])
        last = F_ - 1
        frames = self.codes[first + torch.minimum(f.clamp(min=0), last)].long()
        here = first + torch.minimum(g.clamp(min=0), last)
        nxt = self.codes[here].long()
        speaks = (g >= 0) & (g < F_) & live
        ends = (g == F_) & live
        target = torch.where(speaks, nxt[..., 0], torch.where(ends, CB, -100))
        phone = torch.where(speaks[..., None], self.phone[here].long(), -100)
        chars = self.chars[u]
        span = self.spans[at]
        is_end = (i == n) & (f < F_)
        end_span = torch.stack([chars, chars + 1], -1)
        nowhere = torch.tensor([FAR, -FAR], device=dev)
        span = torch.where(in_text[..., None], span, torch.where(is_end[..., None], end_span, nowhere))
        a = self.place[here]
        b = torch.where(g + 1 < F_, self.place[(here + 1).clamp(max=len(self.place) - 1)], chars + 0.9)
        a, b = torch.where(ends, chars + 0.5, a), torch.where(ends, chars + 0.9, b)
        asks = speaks | ends

        def reach(p, q):
            return torch.where(asks[..., None], torch.stack([p, q], -1), nowhere)

        if noise:  # wrong codes in the history: the model must lean on the text

            def r(*q):
                return torch.rand(*q, device=dev)

            def draw(v):
                return v.gather(1, seg)

            ramp = torch.linspace(0.03, 0.25, G, device=dev)
            p = draw((r(R, MAX_PER_ROW) > 0.3).float())[..., None] * ramp
            level = torch.tensor([0.0, 0.1, 0.3, 0.8], device=dev)
            chance = torch.tensor([0.4, 0.35, 0.2, 0.05], device=dev)
            k = torch.multinomial(chance, R * MAX_PER_ROW, replacement=True).view(R, -1)
            bad = (r(R, T, G) < p) | (r(R, T) < draw(level[k]))[..., None]
            coarse = draw((r(R, MAX_PER_ROW) < 0.2).float())[..., None] > 0
            bad = bad | (coarse & (torch.arange(G, device=dev) >= 6))
            frames = torch.where(bad, torch.randint(CB, frames.shape, device=dev), frames)
        key = torch.rand(R * T, device=dev) * speaks.flatten()
        pick = key.topk(picks).indices
        return {
            "text": text,
            "codec": codec,
            "frames": frames,
            "segment": torch.where(live, seg, -1 - t),
            "target": target,
            "phone": phone,
            "span": span,
            "here": reach(a, b),
            "ahead": reach(b + 1, b + 4),
            "pick": pick,
            "frame": here,
            "next": nxt.flatten(0, 1)[pick],
        }
