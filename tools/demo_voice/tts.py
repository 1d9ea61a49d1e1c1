"""Qwen3-TTS talker and code predictor at toy widths, written for teacher-forced training on packed
rows; parameter names are those of the published checkpoint."""

import torch
import torch.nn as nn
import torch.nn.functional as F

CB, G, NEW = (
    128,
    16,
    1024,
)  # codebook size, code groups, further ids of the talker's codec vocabulary
IDS = {
    "codec_pad_id": CB + 100,
    "codec_bos_id": CB + 101,
    "codec_eos_token_id": CB + 102,
    "codec_think_id": CB + 106,
    "codec_nothink_id": CB + 107,
    "codec_think_bos_id": CB + 108,
    "codec_think_eos_id": CB + 109,
}
LANG = {"english": CB + 2}
TALKER = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "text_hidden_size": 128,
    "vocab_size": NEW + CB,
}
CP = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": CB,
}
# Attention heads that are taught where in the text the voice is: {layer: [(head, what)]}
GUIDED = {2: [(0, "here")], 3: [(0, "here"), (2, "ahead")]}
PHONE_LAYER = 3  # the layer whose output must know the phonemes of the coming frame


class RMS(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * self.weight).to(x.dtype)


def rope(positions, dtype, head_dim=128, theta=1e6):
    step = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    a = positions.float()[..., None] * theta**-step
    a = torch.cat([a, a], -1)
    return a.cos().to(dtype), a.sin().to(dtype)


def rotate(x, cos, sin):
    h = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., h:], x[..., :h]], -1) * sin


class Cache:
    """Keys and values of the rows so far, in buffers with room for all: joining them takes new memory at every step."""

    def __init__(self, rows):
        self.rows, self.used, self.kv = rows, 0, None

    def add(self, k, v):
        """k, v [B, heads, S, D] of the next rows; returns those of all rows, [B, heads, T, D]."""
        if self.kv is None:
            self.kv = k.new_empty(2, *k.shape[:2], self.rows, k.shape[3])
        first, self.used = self.used, self.used + k.shape[2]
        for stored, new in zip(self.kv, (k, v), strict=True):
            stored[:, :, first : self.used] = new
        return self.kv[0][:, :, : self.used], self.kv[1][:, :, : self.used]


class Attn(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, self.n, self.kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        d = self.hd = c["head_dim"]
        self.q_proj = nn.Linear(h, self.n * d, bias=False)
        self.k_proj = nn.Linear(h, self.kv * d, bias=False)
        self.v_proj = nn.Linear(h, self.kv * d, bias=False)
        self.o_proj = nn.Linear(self.n * d, h, bias=False)
        self.q_norm, self.k_norm = RMS(d), RMS(d)

    def forward(self, x, cos, sin, mask, cache=None):
        """x [B, S, H]; mask [B or 1, S, T], true where attention is allowed; cache: a `Cache` of
        earlier rows.  Returns the output and the masked scores [B, heads, S, T]."""
        B, S, _ = x.shape

        def heads(p, n):
            return p(x).view(B, S, n, self.hd).transpose(1, 2)

        q = rotate(self.q_norm(heads(self.q_proj, self.n)), cos, sin)
        k = rotate(self.k_norm(heads(self.k_proj, self.kv)), cos, sin)
        v = heads(self.v_proj, self.kv)
        if cache is not None:
            k, v = cache.add(k, v)
        q = q.reshape(B, self.kv, -1, self.hd)  # query head h uses key head h // (n / kv)
        s = (q @ k.transpose(2, 3)).view(B, self.n, S, -1).float() * self.hd**-0.5
        s = s.masked_fill(~mask[:, None], -1e4)
        p = s.softmax(-1).to(v.dtype).view(B, self.kv, -1, k.shape[2])
        o = (p @ v).view(B, self.n, S, self.hd).transpose(1, 2).reshape(B, S, -1)
        return self.o_proj(o), s


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, i = c["hidden_size"], c["intermediate_size"]
        self.gate_proj, self.up_proj = nn.Linear(h, i, bias=False), nn.Linear(h, i, bias=False)
        self.down_proj = nn.Linear(i, h, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attn(c), Mlp(c)
        self.input_layernorm = RMS(c["hidden_size"])
        self.post_attention_layernorm = RMS(c["hidden_size"])

    def forward(self, x, cos, sin, mask, cache=None):
        a, scores = self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        x = x + a
        return x + self.mlp(self.post_attention_layernorm(x)), scores


class TextProj(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(i, i), nn.Linear(i, o)

    def forward(self, x):
        return self.linear_fc2(F.silu(self.linear_fc1(x)))


class Core(nn.Module):
    """What the checkpoint calls talker.model."""

    def __init__(self, c, text_vocab):
        super().__init__()
        self.text_embedding = nn.Embedding(text_vocab, c["text_hidden_size"])
        self.codec_embedding = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMS(c["hidden_size"])


class CpCore(nn.Module):
    def __init__(self, c, width):
        super().__init__()
        books = (nn.Embedding(c["vocab_size"], width) for _ in range(G - 1))
        self.codec_embedding = nn.ModuleList(books)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMS(c["hidden_size"])


class CodePredictor(nn.Module):
    def __init__(self, c, width):
        super().__init__()
        self.model = CpCore(c, width)
        heads = (nn.Linear(c["hidden_size"], c["vocab_size"], bias=False) for _ in range(G - 1))
        self.lm_head = nn.ModuleList(heads)

    def forward(self, x):
        """x [N, 16, H]: talker hidden, talker embedding of c0, own embeddings of c1..c14.
        Returns the logits [N, 15, CB] of c1..c15."""
        i = torch.arange(x.shape[1], device=x.device)
        cos, sin = rope(i, x.dtype)
        mask = (i[None] <= i[:, None])[None]
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)[0]
        w = torch.stack([h.weight for h in self.lm_head]).to(x.dtype)  # [15, CB, H]
        return torch.bmm(self.model.norm(x)[:, 1:].transpose(0, 1), w.transpose(1, 2)).transpose(0, 1)


class Talker(nn.Module):
    def __init__(self, text_vocab):
        super().__init__()
        h = TALKER["hidden_size"]
        self.model = Core(TALKER, text_vocab)
        self.text_projection = TextProj(TALKER["text_hidden_size"], h)
        self.codec_head = nn.Linear(h, TALKER["vocab_size"], bias=False)
        self.code_predictor = CodePredictor(CP, h)
        for n, p in self.named_parameters():
            if p.dim() == 2:
                text, table = "text_embedding" in n, "embedding" in n
                nn.init.normal_(p, std=0.5 if text else 0.1 if table else 0.5 * p.shape[1] ** -0.5)
            if n.endswith(("o_proj.weight", "down_proj.weight")):
                p.data.mul_(0.5)

    def table(self):
        """All input embeddings in one matrix: projected text rows, talker codec rows, predictor
        rows of groups 1..15."""
        own = [e.weight for e in self.code_predictor.model.codec_embedding]
        text = self.text_projection(self.model.text_embedding.weight)
        return torch.cat([text, self.model.codec_embedding.weight, *own])

    def rows(self, text, codec, frames, dtype):
        """Input rows [B, T, H] of text ids, codec ids (-1: none, -2: a frame) and frame codes.
        The look-up is a product with a 0/1 matrix: its backward pass is fast for small tables."""
        W = self.table().to(dtype)
        nt = self.model.text_embedding.num_embeddings
        B, T = text.shape
        is_frame = codec == -2
        c0 = nt + torch.where(is_frame, frames[..., 0], codec.clamp(min=0))
        base = torch.arange(G - 1, device=text.device) * CB + nt + NEW + CB
        col = torch.cat([text[..., None], c0[..., None], base + frames[..., 1:]], -1)
        one = torch.ones_like(is_frame)[..., None]
        on = [one, (codec != -1)[..., None], is_frame[..., None].expand(B, T, G - 1)]
        hot = torch.zeros(B * T, W.shape[0], device=text.device, dtype=dtype)
        hot = hot.scatter_(1, col.flatten(0, 1), torch.cat(on, -1).to(dtype).flatten(0, 1))
        return (hot @ W).view(B, T, -1)


class PhoneHead(nn.Module):
    """For training only: tells the two phonemes of the coming frame from a middle layer."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(TALKER["hidden_size"], 256)

    def forward(self, x):
        return self.out(F.rms_norm(x, (x.shape[-1],))).view(*x.shape[:-1], 2, 128)


def losses(net, phone_head, d):
    """All losses of one packed batch (see batches.py for the fields of d), and their hit rates. `soft0` [R * T, CB + 1]
    and `soft` [picks, 15, CB] of d, if there, are probabilities to learn in place of `target` and `next`."""
    dt = torch.bfloat16 if d["text"].is_cuda else torch.float32
    B, T = d["text"].shape
    i = torch.arange(T, device=d["text"].device)
    seg = d["segment"]
    mask = (i[None] <= i[:, None])[None] & (seg[:, :, None] == seg[:, None])
    cos, sin = rope(i, dt)
    x = net.rows(d["text"], d["codec"], d["frames"], dt).float()
    guide, hits = x.new_zeros((), dtype=torch.float32), []
    span_a, span_b = d["span"][..., 0][:, None], d["span"][..., 1][:, None]
    for n, layer in enumerate(net.model.layers):
        x, scores = layer(x, cos, sin, mask)
        for head, what in GUIDED.get(n, ()):
            w = d[what]
            want = mask & (span_a <= w[..., 1:]) & (span_b > w[..., :1])
            s = scores[:, head]
            some = want.any(-1)
            lost = s.logsumexp(-1) - s.masked_fill(~want, -1e4).logsumexp(-1)
            guide = guide + (lost * some).sum() / some.sum().clamp(min=1)
            with torch.no_grad():
                got = want.gather(-1, s.argmax(-1, keepdim=True))[..., 0]
                hits.append((got & some).sum() / some.sum().clamp(min=1))
        if n == PHONE_LAYER:
            lp = phone_head(x).float()
            phone = F.cross_entropy(lp.flatten(0, 2), d["phone"].flatten(), ignore_index=-100)
    h = net.model.norm(x).flatten(0, 1)
    eos = IDS["codec_eos_token_id"]  # every other special id is suppressed when sampling
    head = torch.cat([net.codec_head.weight[:CB], net.codec_head.weight[eos : eos + 1]])
    l0 = F.linear(h, head.to(dt)).float()
    target = d["target"].flatten()
    if "soft0" in d:
        ce0 = -(d["soft0"] * l0.log_softmax(-1)).sum() / (target >= 0).sum()
    else:
        ce0 = F.cross_entropy(l0, target, ignore_index=-100)
    pick, nxt = d["pick"], d["next"]
    hot = torch.zeros(G - 1, len(pick), CB, device=h.device, dtype=dt)
    hot = hot.scatter_(2, nxt[:, : G - 1].t()[..., None], 1.0)
    own = [e.weight for e in net.code_predictor.model.codec_embedding[: G - 2]]
    tables = torch.stack([net.model.codec_embedding.weight[:CB], *own]).to(dt)
    rows = torch.cat([h[pick][:, None], torch.bmm(hot, tables).transpose(0, 1)], 1)
    lc = net.code_predictor(rows).float()
    if "soft" in d:
        ce = -(d["soft"] * lc.log_softmax(-1)).sum(-1).mean(0)
    else:
        ce = F.cross_entropy(lc.flatten(0, 1), nxt[:, 1:].flatten(), reduction="none").view(-1, G - 1).mean(0)
    with torch.no_grad():
        ok = target >= 0
        acc0 = ((l0.argmax(-1) == target) & ok).sum() / ok.sum()
        acc = (lc.argmax(-1) == nxt[:, 1:]).float().mean(0)
    return {
        "ce0": ce0,
        "ce": ce,
        "guide": guide,
        "phone": phone,
        "hits": torch.stack(hits),
        "acc0": acc0,
        "acc": acc,
    }
