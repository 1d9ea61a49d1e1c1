"""Free-running speech from training checkpoints: batched generation with our own classes."""

import make_tokenizer
import numpy as np
import torch
import torch.nn.functional as F
from codec import load_decoder
from tts import CB, IDS, LANG, Cache, G, Talker, rope


def layout(ids, speaker, special, lang, stream):
    """Prompt rows (text ids, codec ids; -1: none) and the text ids that follow, frame by frame."""
    c, s = IDS, special
    if lang:
        tags = [
            c["codec_think_id"],
            c["codec_think_bos_id"],
            LANG["english"],
            c["codec_think_eos_id"],
        ]
    else:
        tags = [c["codec_nothink_id"], c["codec_think_bos_id"], c["codec_think_eos_id"]]
    tags.append(CB + 900 + speaker)
    text = [*s["role"], *[s["pad"]] * len(tags), s["bos"]]
    codec = [-1] * 3 + tags + [c["codec_pad_id"]]
    if stream:
        return [*text, ids[0]], [*codec, c["codec_bos_id"]], [*ids[1:], s["eos"]]
    codec += [c["codec_pad_id"]] * (len(ids) + 1) + [c["codec_bos_id"]]
    return [*text, *ids, s["eos"], s["pad"]], codec, []


def draw(logits, temperature, top_k, gen):
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    low = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
    p = logits.masked_fill(logits < low, -torch.inf).softmax(-1)
    return torch.multinomial(p, 1, generator=gen)[:, 0]


class Voice:
    def __init__(self, tts, codec, tokenizer, device="cpu"):
        self.dev = device
        self.special = make_tokenizer.special(tokenizer)
        self.tok = make_tokenizer.load(tokenizer)
        self.net = Talker(self.special["size"]).eval()
        self.net.load_state_dict({k: v.float() for k, v in torch.load(tts)["net"].items()})
        self.net = self.net.to(device)
        self.dec, self.books = load_decoder(codec, device)

    @torch.no_grad()
    def codes(self, texts, speakers, stream, lang=True, par=(0.5, 20, 0.5, 20), limit=200, seed=1, watch=None):
        """Codes [frames, 16] per text, and the frame at which the voice ended by itself, or -1. `watch` is called for
        every frame with its logits [B, CB + 1], [B, 15, CB] and attention scores, {layer: [B, heads, rows]}."""
        net, dev, sp = self.net, self.dev, self.special
        lay = [layout(self.tok.encode(t).ids, k, sp, lang, stream) for t, k in zip(texts, speakers, strict=True)]
        B, P = len(lay), max(len(a[0]) for a in lay)
        text = torch.tensor([[sp["pad"]] * (P - len(a[0])) + list(a[0]) for a in lay], device=dev)
        codec = torch.tensor([[-1] * (P - len(a[0])) + list(a[1]) for a in lay], device=dev)
        pads = torch.tensor([P - len(a[0]) for a in lay], device=dev)
        trail = torch.tensor([(a[2] + [sp["pad"]] * limit)[:limit] for a in lay], device=dev)
        gen = torch.Generator(dev).manual_seed(seed)
        T, K, ST, SK = par
        W = net.table()
        nt, cp = sp["size"], net.code_predictor
        x = W[text] + W[nt + codec.clamp(min=0)] * (codec >= 0)[..., None]
        cache = [Cache(P + limit) for _ in net.model.layers]
        done = torch.zeros(B, dtype=torch.bool, device=dev)
        ends = torch.full((B,), -1, device=dev)
        out = []
        eos = IDS["codec_eos_token_id"]
        head = torch.cat([net.codec_head.weight[:CB], net.codec_head.weight[eos : eos + 1]])
        for n in range(limit):
            S, total = x.shape[1], P + n
            q = torch.arange(total - S, total, device=dev)
            k = torch.arange(total, device=dev)
            mask = (k[None] <= q[:, None])[None] & (k[None, None] >= pads[:, None, None])
            mask = mask | (k[None] == q[:, None])[None]
            pos = (q[None] - pads[:, None]).clamp(min=0)
            cos, sin = (r[:, None] for r in rope(pos, x.dtype))
            seen = {}
            for i, layer in enumerate(net.model.layers):
                x, scores = layer(x, cos, sin, mask, cache[i])
                seen[i] = scores[:, :, -1]
            h = net.model.norm(x[:, -1])
            logits = F.linear(h, head).float()
            if n < 2:
                logits[:, CB] = -torch.inf
            c0 = draw(logits, T, K, gen)
            ends = torch.where(~done & (c0 == CB), n, ends)
            done |= c0 == CB
            if bool(done.all()):
                break
            c0 = c0.clamp(max=CB - 1)
            frame, others, y = [c0], [], torch.stack([h, net.model.codec_embedding.weight[c0]], 1)
            own = [Cache(G) for _ in cp.model.layers]
            for g in range(1, G):
                s = y.shape[1]
                p = torch.arange(g + 1 - s, g + 1, device=dev)
                m = (torch.arange(g + 1, device=dev)[None] <= p[:, None])[None]
                cos, sin = rope(p, y.dtype)
                for i, layer in enumerate(cp.model.layers):
                    y = layer(y, cos, sin, m, own[i])[0]
                others.append(cp.lm_head[g - 1](cp.model.norm(y[:, -1])))
                c = draw(others[-1], ST, SK, gen)
                frame.append(c)
                y = cp.model.codec_embedding[g - 1].weight[c][:, None]
            frame = torch.stack(frame, 1)
            out.append(frame)
            if watch:
                watch(logits, torch.stack(others, 1), seen)
            x = net.model.codec_embedding.weight[frame[:, 0]]
            for g in range(1, G):
                x = x + cp.model.codec_embedding[g - 1].weight[frame[:, g]]
            x = (x + W[trail[:, n]])[:, None]
        out = torch.stack(out, 1)
        return [out[b, : int(e)] if e >= 0 else out[b] for b, e in enumerate(ends)], ends.tolist()

    @torch.no_grad()
    def wave(self, codes):
        z = sum(self.books[j][codes[None, :, j]] for j in range(G))
        return self.dec(z)[0].float().cpu().numpy()


def say(voice, texts, speakers, stream, **kw):
    """(waves, which ended by themselves)"""
    codes, ends = voice.codes(texts, speakers, stream, **kw)
    return [voice.wave(c) for c in codes], np.array([e >= 0 for e in ends])
