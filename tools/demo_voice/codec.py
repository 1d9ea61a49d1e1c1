"""Tiny 12.5 Hz codec.  `Decoder` has the layout and the parameter names of the Qwen3-TTS 12 Hz
speech tokenizer decoder; `MelEncoder` and `RVQ` exist for training only (phase-blind features in,
so that the codes follow from text and speaker)."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

CFG = dict(
    latent_dim=96,
    codebook_dim=96,
    codebook_size=128,
    decoder_dim=320,
    hidden_size=96,
    intermediate_size=192,
    head_dim=32,
    num_attention_heads=3,
    num_key_value_heads=3,
    num_hidden_layers=2,
    num_quantizers=16,
    rms_norm_eps=1e-5,
    rope_theta=10000,
    sliding_window=72,
    upsample_rates=[8, 5, 4, 3],
    upsampling_ratios=[2, 2],
)
HOP = 1920


# ---- decoder
class CConv(nn.Module):
    def __init__(s, i, o, k, d=1, groups=1):
        super().__init__()
        s.conv, s.pad = nn.Conv1d(i, o, k, dilation=d, groups=groups), (k - 1) * d

    def forward(s, x):
        return s.conv(F.pad(x, (s.pad, 0)))


class TConv(nn.Module):
    def __init__(s, i, o, k, r):
        super().__init__()
        s.conv, s.r = nn.ConvTranspose1d(i, o, k, stride=r), r

    def forward(s, x):
        return s.conv(x)[..., : x.shape[-1] * s.r]


class Snake(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.alpha, s.beta = nn.Parameter(torch.zeros(c)), nn.Parameter(torch.zeros(c))

    def forward(s, x):
        return x + torch.sin(x * s.alpha.exp()[:, None]) ** 2 / (s.beta.exp()[:, None] + 1e-9)


class Unit(nn.Module):
    def __init__(s, c, d):
        super().__init__()
        s.act1, s.conv1, s.act2, s.conv2 = Snake(c), CConv(c, c, 7, d), Snake(c), CConv(c, c, 1)

    def forward(s, x):
        return x + s.conv2(s.act2(s.conv1(s.act1(x))))


class Block(nn.Module):
    def __init__(s, i, o, r):
        super().__init__()
        s.block = nn.ModuleList([Snake(i), TConv(i, o, 2 * r, r)] + [Unit(o, d) for d in (1, 3, 9)])

    def forward(s, x):
        for b in s.block:
            x = b(x)
        return x


class ConvNeXt(nn.Module):
    def __init__(s, c, gamma=0.3):
        super().__init__()
        s.dwconv = CConv(c, c, 7, groups=c)
        s.norm, s.pwconv1, s.pwconv2 = (
            nn.LayerNorm(c, eps=1e-6),
            nn.Linear(c, 4 * c),
            nn.Linear(4 * c, c),
        )
        s.gamma = nn.Parameter(torch.full((c,), gamma))

    def forward(s, x):
        h = s.norm(s.dwconv(x).transpose(1, 2))
        return x + (s.gamma * s.pwconv2(F.gelu(s.pwconv1(h)))).transpose(1, 2)


class RMS(nn.Module):
    def __init__(s, n, eps):
        super().__init__()
        s.weight, s.eps = nn.Parameter(torch.ones(n)), eps

    def forward(s, x):
        return s.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + s.eps)).to(x.dtype)


class Scale(nn.Module):
    def __init__(s, n):
        super().__init__()
        s.scale = nn.Parameter(torch.full((n,), 0.3))

    def forward(s, x):
        return s.scale * x


def rope(T, hd, theta, device):
    a = torch.arange(T, device=device)[:, None] * (theta ** (-torch.arange(0, hd, 2, device=device) / hd))[None]
    a = torch.cat([a, a], -1)
    return a.cos(), a.sin()


def rotate(x, cos, sin):
    h = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., h:], x[..., :h]], -1) * sin


class Attn(nn.Module):
    def __init__(s, c):
        super().__init__()
        n = c["num_attention_heads"] * c["head_dim"]
        s.hd = c["head_dim"]
        s.q_proj, s.k_proj, s.v_proj = (nn.Linear(c["hidden_size"], n, bias=False) for _ in range(3))
        s.o_proj = nn.Linear(n, c["hidden_size"], bias=False)

    def forward(s, x, cos, sin, mask):
        B, T, _ = x.shape
        q, k, v = (p(x).view(B, T, -1, s.hd).transpose(1, 2) for p in (s.q_proj, s.k_proj, s.v_proj))
        o = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=mask)
        return s.o_proj(o.transpose(1, 2).reshape(B, T, -1))


class Mlp(nn.Module):
    def __init__(s, c):
        super().__init__()
        h, i = c["hidden_size"], c["intermediate_size"]
        s.gate_proj, s.up_proj, s.down_proj = (
            nn.Linear(h, i, bias=False),
            nn.Linear(h, i, bias=False),
            nn.Linear(i, h, bias=False),
        )

    def forward(s, x):
        return s.down_proj(F.silu(s.gate_proj(x)) * s.up_proj(x))


class Layer(nn.Module):
    def __init__(s, c):
        super().__init__()
        h = c["hidden_size"]
        s.self_attn, s.mlp = Attn(c), Mlp(c)
        s.input_layernorm, s.post_attention_layernorm = (
            RMS(h, c["rms_norm_eps"]),
            RMS(h, c["rms_norm_eps"]),
        )
        s.self_attn_layer_scale, s.mlp_layer_scale = Scale(h), Scale(h)

    def forward(s, x, *a):
        x = x + s.self_attn_layer_scale(s.self_attn(s.input_layernorm(x), *a))
        return x + s.mlp_layer_scale(s.mlp(s.post_attention_layernorm(x)))


class PreTransformer(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.c = c
        s.input_proj, s.output_proj = (
            nn.Linear(c["latent_dim"], c["hidden_size"]),
            nn.Linear(c["hidden_size"], c["latent_dim"]),
        )
        s.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        s.norm = RMS(c["hidden_size"], c["rms_norm_eps"])

    def forward(s, x):
        T = x.shape[1]
        cos, sin = rope(T, s.c["head_dim"], s.c["rope_theta"], x.device)
        i = torch.arange(T, device=x.device)
        mask = (i[None] <= i[:, None]) & (i[None] > i[:, None] - s.c["sliding_window"])
        x = s.input_proj(x)
        for layer in s.layers:
            x = layer(x, cos, sin, mask)
        return s.output_proj(s.norm(x))


class Decoder(nn.Module):
    """frame(z): quantised latents -> transformer output; wave(h): -> samples.
    z is the sum of code vectors (before output_proj)."""

    def __init__(s, c=CFG):
        super().__init__()
        L, D = c["latent_dim"], c["decoder_dim"]
        s.output_proj = nn.Conv1d(
            c["codebook_dim"] // 2, c["codebook_dim"], 1, bias=False
        )  # written to both rvq groups
        s.pre_conv, s.pre_transformer = CConv(c["codebook_dim"], L, 3), PreTransformer(c)
        s.upsample = nn.ModuleList(nn.ModuleList([TConv(L, L, r, r), ConvNeXt(L)]) for r in c["upsampling_ratios"])
        n = len(c["upsample_rates"])
        s.decoder = nn.ModuleList(
            [CConv(L, D, 7)]
            + [Block(D >> i, D >> i + 1, r) for i, r in enumerate(c["upsample_rates"])]
            + [Snake(D >> n), CConv(D >> n, 1, 7)]
        )

    def frame(s, z):  # [B, T, cb/2] -> [B, L, T]
        return s.pre_transformer(s.pre_conv(s.output_proj(z.transpose(1, 2))).transpose(1, 2)).transpose(1, 2)

    def wave(s, h):
        for a in s.upsample:
            for b in a:
                h = b(h)
        for b in s.decoder:
            h = b(h)
        return h[:, 0]

    def forward(s, z):
        return s.wave(s.frame(z)).clamp(-1, 1)


# ---- training side
def melbank(n_fft, n_mels, sr=24000, lo=0.0, hi=12000.0):
    def mel(f):
        return 2595 * math.log10(1 + f / 700)

    pts = torch.tensor([700 * (10 ** (m / 2595) - 1) for m in torch.linspace(mel(lo), mel(hi), n_mels + 2).tolist()])
    f = torch.linspace(0, sr / 2, n_fft // 2 + 1)
    up, dn = (
        (f[None] - pts[:-2, None]) / (pts[1:-1] - pts[:-2])[:, None],
        (pts[2:, None] - f[None]) / (pts[2:] - pts[1:-1])[:, None],
    )
    return torch.minimum(up, dn).clamp(min=0)


class MelEncoder(nn.Module):
    """log-mel (window 1024) and low linear bins (window 2048) at 100 Hz -> latents at 12.5 Hz.
    Training only.  Causal apart from half an analysis window (38 ms): with look-ahead the code of a
    frame betrays the frames to come, and a talker trained on such codes learns to continue them
    instead of reading the text (seen: see README, "What failed before")."""

    def __init__(s, dim=48, ch=192):
        super().__init__()
        s.register_buffer("fb", melbank(1024, 80), persistent=False)
        s.inp = nn.Conv1d(180, ch, 3)
        s.body = nn.ModuleList()
        for _ in range(3):
            s.body += [ConvNeXt(ch), nn.Conv1d(ch, ch, 4, stride=2)]
        s.tail, s.out = ConvNeXt(ch), nn.Conv1d(ch, dim, 1)

    def feats(s, x):
        o = []
        for n in (1024, 2048):
            p = (n - 240) // 2
            S = torch.stft(
                F.pad(x, (p, p)),
                n,
                240,
                window=torch.hann_window(n, device=x.device),
                center=False,
                return_complex=True,
            ).abs()
            o.append(((s.fb @ S) if n == 1024 else S[:, :100]).add(1e-2).log() / 3)
        return torch.cat(o, 1)

    def forward(s, x):
        h = s.inp(F.pad(s.feats(x), (2, 0)))
        for b in s.body:
            h = b(h) if isinstance(b, ConvNeXt) else b(F.pad(h, (2, 0)))
        return s.out(s.tail(h)).transpose(1, 2)


class RVQ(nn.Module):
    def __init__(s, n=16, k=128, d=48, decay=0.99):
        super().__init__()
        s.n, s.k, s.decay = n, k, decay
        s.register_buffer("books", torch.zeros(n, k, d))
        s.register_buffer("usage", torch.ones(n, k))
        s.register_buffer("sums", torch.zeros(n, k, d))

    @staticmethod
    def nearest(r, b):
        return (b.pow(2).sum(-1)[None] - 2 * r @ b.t()).argmin(-1)

    @torch.no_grad()
    def kmeans(s, y, iters=12):
        r = y.reshape(-1, y.shape[-1]).float()
        for j in range(s.n):
            b = r[torch.randperm(len(r), device=r.device)[: s.k]].clone()
            for _ in range(iters):
                i = s.nearest(r, b)
                c = torch.zeros(s.k, device=r.device).index_add_(0, i, torch.ones_like(i, dtype=torch.float))
                m = torch.zeros_like(b).index_add_(0, i, r) / c.clamp(min=1)[:, None]
                b = torch.where(c[:, None] > 0, m, r[torch.randint(len(r), (s.k,), device=r.device)])
            s.books[j], s.usage[j], s.sums[j] = b, 1.0 * len(r) / s.k, b * len(r) / s.k
            r = r - b[s.nearest(r, b)]

    def forward(s, y, keep=None):
        """keep [B]: how many quantisers each item uses.
        Returns straight-through latents, commitment loss, codes."""
        B, T, D = y.shape
        r, q, commit, codes = y.float(), torch.zeros_like(y, dtype=torch.float), 0.0, []
        for j in range(s.n):
            flat = r.detach().reshape(-1, D)
            i = s.nearest(flat, s.books[j])
            e = s.books[j][i].view(B, T, D)
            on = torch.ones(B, device=y.device) if keep is None else (keep > j).float()
            commit = commit + ((r - e).pow(2).mean((1, 2)) * on).mean()
            if s.training:
                with torch.no_grad():
                    w = on[:, None].expand(B, T).reshape(-1)
                    c = torch.zeros(s.k, device=y.device).index_add_(0, i, w)
                    m = torch.zeros(s.k, D, device=y.device).index_add_(0, i, flat * w[:, None])
                    s.usage[j].mul_(s.decay).add_(c, alpha=1 - s.decay)
                    s.sums[j].mul_(s.decay).add_(m, alpha=1 - s.decay)
                    s.books[j] = s.sums[j] / s.usage[j].clamp(min=1e-4)[:, None]
                    dead = s.usage[j] < 0.03 * w.sum() / s.k  # far below an even share: restart on a random residual
                    pick = flat[torch.randint(len(flat), (s.k,), device=y.device)]
                    s.books[j] = torch.where(dead[:, None], pick, s.books[j])
                    s.usage[j] = torch.where(dead, w.sum() / s.k * 0.3, s.usage[j])
                    s.sums[j] = torch.where(dead[:, None], pick * s.usage[j][:, None], s.sums[j])
            q = q + e * on[:, None, None]
            r = r - e * on[:, None, None]
            codes.append(i.view(B, T))
        return y + (q - y).detach(), commit / s.n, torch.stack(codes, -1)


FLOOR = 3e-3  # of magnitudes: a pause at -65 dB has 1e-2, and a decoder must not fill it with noise


class Spectral(nn.Module):
    """How far sound `a` is from `b` [B, T]: spectra's relative error, their log magnitudes, log-mel
    (each a sum over windows of 11 to 85 ms), and the waveform below 2 kHz (1: as far as silence is).
    Short windows and the waveform make sense because the codes tell the phase: see pitch_phase.py."""

    def __init__(s, res=((256, 20), (512, 40), (1024, 80), (2048, 120))):
        super().__init__()
        s.res = res
        for n, m in res:
            s.register_buffer(f"fb{n}", melbank(n, m), persistent=False)
        k = torch.sinc(torch.arange(-32, 33) / 6) * torch.hann_window(65, periodic=False)
        s.register_buffer("low", (k / k.sum())[None, None], persistent=False)

    def mags(s, x):
        return [
            torch.stft(x, n, n // 4, window=torch.hann_window(n, device=x.device), return_complex=True)
            .abs()
            .clamp(min=1e-5)
            for n, _ in s.res
        ]

    def forward(s, a, b):
        sc = lm = mel = 0.0
        for (n, _), A, B in zip(s.res, s.mags(a), s.mags(b), strict=False):
            fb = getattr(s, f"fb{n}")
            sc = sc + ((A - B).pow(2).sum((1, 2)) / B.pow(2).sum((1, 2)).clamp(min=1)).sqrt().mean()
            lm = lm + ((A + FLOOR).log() - (B + FLOOR).log()).abs().mean()
            mel = mel + ((fb @ A + FLOOR).log() - (fb @ B + FLOOR).log()).abs().mean()
        a, b = (F.conv1d(x[:, None], s.low, stride=4, padding=32)[:, 0] for x in (a, b))
        wave = ((a - b).pow(2).sum(1) / b.pow(2).sum(1).clamp(min=1)).sqrt().mean()
        return sc, lm, mel, wave


class DiscSTFT(nn.Module):
    def __init__(s, n, ch=32):
        super().__init__()
        s.n = n

        def c(i, o, st, d=1):
            return nn.Conv2d(i, o, (9, 3), stride=(st, 1), dilation=(1, d), padding=(4, d))

        s.layers = nn.ModuleList([c(2, ch, 2), c(ch, ch, 2), c(ch, ch, 2, 2), c(ch, ch, 2, 4)])
        s.out = nn.Conv2d(ch, 1, 3, padding=1)

    def forward(s, x):
        S = torch.stft(x, s.n, s.n // 4, window=torch.hann_window(s.n, device=x.device), return_complex=True)
        S = S / (S.abs() + 1e-3) * (S.abs() + 1e-3).log1p()
        h, fm = torch.stack([S.real, S.imag], 1), []
        for layer in s.layers:
            h = F.leaky_relu(layer(h), 0.1)
            fm.append(h)
        return s.out(h), fm


class DiscPeriod(nn.Module):
    def __init__(s, p, ch=(32, 96, 192, 192)):
        super().__init__()
        s.p, i = p, 1
        s.layers = nn.ModuleList()
        for o in ch:
            s.layers.append(nn.Conv2d(i, o, (5, 1), (3, 1), (2, 0)))
            i = o
        s.out = nn.Conv2d(i, 1, (3, 1), padding=(1, 0))

    def forward(s, x):
        x = x[:, : x.shape[1] // s.p * s.p]
        h, fm = x.view(x.shape[0], 1, -1, s.p), []
        for layer in s.layers:
            h = F.leaky_relu(layer(h), 0.1)
            fm.append(h)
        return s.out(h), fm


class Discs(nn.Module):
    def __init__(s):
        super().__init__()
        s.d = nn.ModuleList([DiscSTFT(n) for n in (256, 512, 1024, 2048)] + [DiscPeriod(p) for p in (2, 3, 5, 7, 11)])

    def forward(s, x):
        return [d(x) for d in s.d]


def load_decoder(path, device="cpu"):
    """Decoder and codebooks [16, 128, 48] of a codec, which may lack the encoder."""
    stored = torch.load(path, map_location="cpu")
    dec = Decoder().eval()
    dec.load_state_dict({k: v.float() for k, v in stored["dec"].items()})
    return dec.to(device), stored["books"].float().to(device)


def load(path, device="cpu"):
    """Encoder, quantiser and decoder of a trained codec."""
    stored = torch.load(path, map_location="cpu")
    enc, vq, dec = MelEncoder().eval(), RVQ().eval(), Decoder().eval()
    for part, name in ((enc, "enc"), (dec, "dec")):
        part.load_state_dict({k: v.float() for k, v in stored[name].items()})
    vq.books.copy_(stored["books"].float())
    return enc.to(device), vq.to(device), dec.to(device)
