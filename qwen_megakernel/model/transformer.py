"""Ids -> rows -> hidden states: the embedding tables, and the Qwen3 decoder stack in plain PyTorch.

It computes one slot at a time: rows are [T, hidden], without a batch axis, so a sequence's codes depend on nothing but
its own request. Tensor names are the checkpoint's. Rounding follows the reference implementation: RMSNorm rounds to the
model's dtype before its weight is applied; RoPE's cosines are computed in fp32 and then rounded.
"""

import math
from collections.abc import Mapping, Sequence
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_megakernel.checkpoint.config import StackConfig, TalkerConfig

_SMALL_LAYER = 16 << 20  # bytes of its weights. `OneRow` copies part of them; a layer of 0.6B has 60 MB
TOLD = 16  # values that tell how a head attended to the text
_TEXT_ROWS = 16  # rows that `Embeddings.text` projects at a time


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last axis in fp32, rounded to x's dtype, then times weight."""
    return weight * F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


def rope_frequencies(head_dim: int, theta: float) -> Tensor:
    """Angles a position, fp32 [head_dim / 2]: theta^(-2i/head_dim)."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def rope_tables(
    positions: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin, each [positions, head_dim]: pair (i, i + head_dim/2) turns by position * theta^(-2i/head_dim)."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * rope_frequencies(head_dim, theta)
    angles = torch.cat((angles, angles), dim=-1).to(device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., T, head_dim] by cos and sin [..., T, head_dim] (rotate-half pairing)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix` and a dot, by the rest of their names."""
    return {name.removeprefix(f"{prefix}."): t for name, t in tensors.items() if name.startswith(f"{prefix}.")}


class KVCache:
    """Keys and values of one slot, each [layers, kv_heads, positions, head_dim]. Rows beyond the caller's position are
    stale. `Transformer.forward` reads them only if it is given a `length`, and then with a weight of 0."""

    def __init__(self, config: StackConfig, positions: int, device: torch.device, dtype: torch.dtype):
        shape = (config.num_layers, config.num_kv_heads, positions, config.head_dim)
        self.k = torch.empty(shape, device=device, dtype=dtype)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        # Views of each layer's keys and values, each [1, kv_heads, positions, head_dim].
        self.layers = list(zip(self.k[:, None].unbind(), self.v[:, None].unbind(), strict=True))
        # Queries of the last row that was computed alone, of layers that are watched, for `told`.
        self.queries = torch.zeros(config.num_layers, config.num_heads, config.head_dim, device=device, dtype=dtype)
        self.watched = range(0)

    def told(self, length: int, layers: slice, heads: slice, text: slice, first: int) -> Tensor:
        """How heads of the last row attended to the text, of `length` rows up to its own: fp32 [layers, heads, TOLD].
        `text`: the rows of the tokens. See `FrameDecoder.told`."""
        keys, queries = self.k[layers, :, :length].float(), self.queries[layers].float()
        scores = queries.view(*keys.shape[:2], -1, keys.shape[3]) @ keys.transpose(2, 3) / math.sqrt(keys.shape[3])
        weights = scores.view(*queries.shape[:2], length)[:, heads].softmax(-1)
        attention = F.pad(weights[..., text], (0, first + TOLD))  # zeros behind the last token
        behind = attention.flip(-1).cumsum(-1).flip(-1)
        found = [torch.full_like(behind[..., 0], first), behind[..., 0], attention.argmax(-1)]
        return torch.cat([torch.stack(found, -1), behind[..., first : first + TOLD - len(found)]], -1)


class OneRow:
    """`Transformer.forward` for one fp32 row on a CPU: PyTorch multiplies matrices, numpy does the small steps between.
    The sums are the same except for their last bits.

    A small model's frame costs operators, not arithmetic. The demo voice makes 37 passes through a layer for each
    frame. One small operator takes 2 to 8 us in PyTorch, and about 1 us in numpy. Not thread-safe: its buffers are
    written by every call."""

    def __init__(
        self, config: StackConfig, layers: Sequence[Mapping[str, Tensor]], norm: Tensor, cos: Tensor, sin: Tensor
    ):
        """`layers`: tensors by their names without "weight". `cos`, `sin`: `rope_tables`'."""
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._eps = config.rms_norm_eps
        self._norm = norm
        self._layers = [_OneRowLayer(w, heads, kv_heads) for w in layers]
        # Most buffers have views by PyTorch and by numpy (n).
        self._x, self._y = torch.empty(2, len(norm))
        self._xn, self._yn = self._x.numpy(), self._y.numpy()
        self._qkv = torch.empty((heads + 2 * kv_heads) * dim)
        self._qkv_parts = self._qkv.split([len(weight) for weight in self._layers[0].qkv])
        self._qkn, self._vn = np.split(self._qkv.numpy().reshape(-1, dim), [heads + kv_heads])
        turned = torch.empty(heads + kv_heads, dim)
        self._turned, self._crossed = turned.numpy(), np.empty_like(self._qkn)
        self._squares = np.empty(heads + kv_heads, np.float32)
        # RoPE turns (left, right) to (left * cos - right * sin, right * cos + left * sin).
        halves = (-1, 2, dim // 2)
        self._cos, self._sin = cos.numpy(), sin.numpy().reshape(halves) * np.array([[-1], [1]], np.float32)
        self._right_left, self._crossed_halves = self._qkn.reshape(halves)[:, ::-1], self._crossed.reshape(halves)
        self._q = turned[:heads].view(1, kv_heads, -1, dim)  # heads that share a key are rows of one query
        self._turned_queries = turned[:heads]
        self._kn = self._turned[heads:]
        self._gate_up = torch.empty(2 * config.intermediate_size)
        self._gate_up_parts = self._gate_up.split([len(weight) for weight in self._layers[0].gate_up])
        self._gate, self._up = self._gate_up.chunk(2)

    def forward(self, x: Tensor, position: int, cache: KVCache) -> Tensor:
        """The row x [hidden] -> [hidden], after the final norm. Its keys and values are written to the cache."""
        self._x.copy_(x)
        end = position + 1
        with np.errstate(all="ignore"):  # a broken checkpoint's logits are not finite, and `Frame.step` tells
            for i, (layer, (keys, values)) in enumerate(zip(self._layers, cache.layers, strict=True)):
                self._norm_and_multiply(layer.input_norm, layer.qkv, self._qkv_parts)
                self._norm_and_turn(layer.head_norms, position)
                keys, values = keys[:, :, :end], values[:, :, :end]
                keys.numpy()[0, :, position], values.numpy()[0, :, position] = self._kn, self._vn
                if i in cache.watched:
                    cache.queries[i].copy_(self._turned_queries)
                y = F.scaled_dot_product_attention(self._q, keys, values)
                self._x.addmv_(layer.o, y.reshape(-1))
                self._norm_and_multiply(layer.mlp_norm, layer.gate_up, self._gate_up_parts)
                self._x.addmv_(layer.down, F.silu(self._gate, inplace=True).mul_(self._up))
            out: Tensor = self._norm * self._x * self._scale()
        return out

    def _scale(self) -> float:
        """1 / rms(x)."""
        return 1.0 / math.sqrt(float(self._xn.dot(self._xn)) / len(self._xn) + self._eps)

    def _norm_and_multiply(self, norm: np.ndarray, weights: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Products of matrices and RMSNorm of x."""
        np.multiply(self._xn, norm, out=self._yn)
        scale = self._scale()
        for weight, out in zip(weights, outs, strict=True):
            torch.addmv(out, weight, self._y, beta=0, alpha=scale, out=out)

    def _norm_and_turn(self, norms: np.ndarray, position: int) -> None:
        """RMSNorm and RoPE of q and k, [heads + kv_heads, head_dim], into `turned`."""
        x, turned, squares = self._qkn, self._turned, self._squares
        np.vecdot(x, x, out=squares)
        squares /= x.shape[1]
        squares += self._eps
        np.sqrt(squares, out=squares)
        x /= squares[:, None]
        x *= norms
        np.multiply(x, self._cos[position], out=turned)
        np.multiply(self._right_left, self._sin[position], out=self._crossed_halves)
        turned += self._crossed


class _OneRowLayer:
    """A layer's weights, as `OneRow` reads them: matrices are PyTorch's, norms numpy's.

    Small matrices that multiply the same row are joined, and stored by columns: their product then takes a fifth to two
    fifths less time (docs/log/2026-11-26.md#demo-voice-vocoder)."""

    def __init__(self, w: Mapping[str, Tensor], heads: int, kv_heads: int):
        self.input_norm, self.mlp_norm = w["input_layernorm"].numpy(), w["post_attention_layernorm"].numpy()
        q, k = w["self_attn.q_norm"].numpy(), w["self_attn.k_norm"].numpy()
        self.head_norms = np.stack([q] * heads + [k] * kv_heads)
        self.qkv = [w[f"self_attn.{name}_proj"] for name in "qkv"]
        self.gate_up = [w["mlp.gate_proj"], w["mlp.up_proj"]]
        if sum(tensor.nbytes for tensor in w.values()) <= _SMALL_LAYER:
            self.qkv, self.gate_up = ([torch.cat(some).t().contiguous().t()] for some in (self.qkv, self.gate_up))
        self.o, self.down = w["self_attn.o_proj"], w["mlp.down_proj"]


class Transformer:
    """One stack: pre-norm attention (GQA, per-head QK norm, RoPE, causal) and SwiGLU, then a final norm.

    M-RoPE's three axes hold the same position for every row of this model, so a row has one position here. config.py
    refuses a checkpoint that would need more.
    """

    def __init__(self, config: StackConfig, tensors: Mapping[str, Tensor], prefix: str, max_positions: int):
        self.config = config
        self._norm = tensors[f"{prefix}.norm.weight"]
        self._layers = [
            {name.removesuffix(".weight"): tensor for name, tensor in below(tensors, f"{prefix}.layers.{i}").items()}
            for i in range(config.num_layers)
        ]
        self._cos, self._sin = rope_tables(
            max_positions, config.head_dim, config.rope_theta, self._norm.device, self._norm.dtype
        )
        exact = self._norm.device.type == "cpu" and self._norm.dtype == torch.float32
        self._one_row = OneRow(config, self._layers, self._norm, self._cos, self._sin) if exact else None

    def forward(self, rows: Tensor, position: int | Tensor, cache: KVCache, length: int | None = None) -> Tensor:
        """Run consecutive rows of one slot and append their keys and values to its cache. `rows`: [T, hidden] in the
        model's dtype. `position`: of the first row; rows 0..position-1 must be in the cache. Or int64 [T] on the
        device, the position of every row: a captured CUDA graph then reads it anew in every replay. `cache`: read and
        written. `length`: with a tensor of positions, how many rows of the cache attention reads. It must be more than
        any position, and all these rows must be finite. Returns [T, hidden], after the final norm."""
        if self._one_row and not isinstance(position, Tensor) and len(rows) <= 2:  # more are worth one matrix product
            return torch.stack([self._one_row.forward(row, n, cache) for n, row in enumerate(rows, position)])
        x = self._run(rows, position, cache, length)
        return rms_norm(x, self._norm, self.config.rms_norm_eps)

    def prefill(self, rows: Tensor, position: int, cache: KVCache) -> None:
        """Only append the keys and values of `rows`. The last layer computes nothing else."""
        self._run(rows, position, cache, None, keys_only=True)

    def _run(
        self, rows: Tensor, position: int | Tensor, cache: KVCache, length: int | None, *, keys_only: bool = False
    ) -> Tensor:
        """`forward` without the final norm. `keys_only`: it ends with the last layer's keys and values; what it returns
        means nothing."""
        c, x, mask = self.config, rows, None
        at: Tensor | slice
        if isinstance(position, Tensor):
            assert length is not None
            at = position
            ahead = torch.arange(length, device=x.device) > at[:, None]
            mask = torch.zeros(ahead.shape, device=x.device, dtype=x.dtype).masked_fill(ahead, -math.inf)
        else:
            length = position + len(rows)
            at = slice(position, length)
            # One row sees the whole cache; a prompt that starts at 0 is plainly causal; anything else needs the mask.
            if position and len(rows) > 1:
                mask = torch.ones(len(rows), length, dtype=torch.bool, device=x.device).tril(position)
        cos, sin = self._cos[at], self._sin[at]
        for i, w in enumerate(self._layers):
            y = rms_norm(x, w["input_layernorm"], c.rms_norm_eps)
            k = apply_rope(self._heads(F.linear(y, w["self_attn.k_proj"]), w["self_attn.k_norm"]), cos, sin)
            cache.k[i, :, at] = k
            cache.v[i, :, at] = self._heads(F.linear(y, w["self_attn.v_proj"]))
            if keys_only and w is self._layers[-1]:
                break
            q = apply_rope(self._heads(F.linear(y, w["self_attn.q_proj"]), w["self_attn.q_norm"]), cos, sin)
            if len(rows) == 1 and i in cache.watched:
                cache.queries[i].copy_(q[:, 0])
            y = self._attend(q, cache.k[None, i, :, :length], cache.v[None, i, :, :length], mask)
            x = x + F.linear(y, w["self_attn.o_proj"])
            y = rms_norm(x, w["post_attention_layernorm"], c.rms_norm_eps)
            y = F.silu(F.linear(y, w["mlp.gate_proj"])) * F.linear(y, w["mlp.up_proj"])
            x = x + F.linear(y, w["mlp.down_proj"])
        return x

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [heads, T, head_dim] over k and v [1, kv_heads, length, head_dim] -> [T, heads * head_dim]."""
        if q.shape[1] == 1:  # heads that share a key become rows of one query, so that no kernel repeats the cache
            q = q.view(1, self.config.num_kv_heads, -1, self.config.head_dim)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(1, -1)
        y = F.scaled_dot_product_attention(q[None], k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return y[0].transpose(0, 1).flatten(1)

    def _heads(self, x: Tensor, norm: Tensor | None = None) -> Tensor:
        """[T, heads * head_dim] -> [heads, T, head_dim], each head normed if a weight is given."""
        x = torch.unflatten(x, -1, (-1, self.config.head_dim))
        return (x if norm is None else rms_norm(x, norm, self.config.rms_norm_eps)).transpose(0, 1)


def sum_of_embeddings(groups: list[Tensor]) -> Tensor:
    """Embeddings of all code groups, [F, hidden] each -> their sum, [F, hidden] (fp32 accumulation, rounded once)."""
    return torch.stack(groups, dim=1).sum(1)


class Embeddings:
    """Turns ids into rows of the talker. Every row has the talker's width, those of codes 1..15 too: in 1.7B the code
    predictor is narrower and has an adapter of its own. No method waits for the device."""

    def __init__(self, config: TalkerConfig, tensors: Mapping[str, Tensor], extension: ModuleType | None = None):
        """`tensors`: `Checkpoint.talker`'s; the text's table is on the CPU. `extension`: `Build.load`'s,
        where the other tensors are bf16 on a GPU. The text projection is then one call."""
        self._extension = extension
        self._table = tensors["talker.model.text_embedding.weight"]
        self._device = tensors["talker.model.norm.weight"].device
        self._pinned = self._device.type == "cuda"  # only a copy from pinned memory is queued without a wait
        self._fc1 = [tensors[f"talker.text_projection.linear_fc1.{n}"] for n in ("weight", "bias")]
        self._fc2 = [tensors[f"talker.text_projection.linear_fc2.{n}"] for n in ("weight", "bias")]
        predictor = "talker.code_predictor.model.codec_embedding"
        self._codes = [tensors["talker.model.codec_embedding.weight"]]
        self._codes += [tensors[f"{predictor}.{group}.weight"] for group in range(config.num_code_groups - 1)]
        if extension is not None:
            for power in range(10):  # torch keeps pinned memory by powers of two; new memory costs a millisecond
                self.text([0] * 2**power)

    def share(self, tables: Sequence[Tensor]) -> None:
        """Use a frame decoder's copies of the codes' embeddings, one table per code group, in place of our own."""
        self._codes = list(tables)

    def text(self, ids: Sequence[int]) -> Tensor:
        """Text ids -> [n, hidden]: embedding, then the two-layer text projection.

        Without our kernel, rows are projected `_TEXT_ROWS` at a time: a row's last bits may depend on how many are
        multiplied together, and the same text may come whole or in pieces.
        """
        self._check(ids)
        if self._extension is not None:
            projected: Tensor = self._extension.project_text(ids, self._table, *self._fc1, *self._fc2)
            return projected
        padded = [*ids, *[0] * (-len(ids) % _TEXT_ROWS)]
        rows = torch.empty(len(padded), self._table.shape[1], dtype=self._table.dtype, pin_memory=self._pinned)
        # numpy gathers the bytes, because torch would wake a thread on every core for it.
        np.take(self._table.view(torch.uint8).numpy(), padded, axis=0, out=rows.view(torch.uint8).numpy(), mode="clip")
        rows = rows.to(self._device, non_blocking=True)
        blocks = [F.linear(F.silu(F.linear(block, *self._fc1)), *self._fc2) for block in torch.split(rows, _TEXT_ROWS)]
        return torch.cat(blocks)[: len(ids)]

    def text_between(self, before: Tensor, ids: Sequence[int], added: Tensor, after: Tensor) -> Tensor:
        """`text` of the ids plus `added`, [hidden], between rows [n, hidden] before and after it."""
        if self._extension is None:
            return torch.cat([before, self.text(ids) + added, after])
        self._check(ids)
        rows: Tensor = self._extension.prompt_rows(before, ids, self._table, *self._fc1, *self._fc2, added, after)
        return rows

    def _check(self, ids: Sequence[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < len(self._table):
            raise IndexError(f"text ids must be in 0..{len(self._table) - 1}, got {min(ids)} to {max(ids)}")

    def code0(self, ids: Sequence[int]) -> Tensor:
        """Codec-vocabulary ids (codes, tags, speakers) -> [n, hidden]."""
        codes = torch.tensor(ids, dtype=torch.long, pin_memory=self._pinned)
        return self.code(0, codes.to(self._device, non_blocking=True))

    def code(self, group: int, codes: Tensor) -> Tensor:
        """Codes of one group, any shape [...] -> [..., hidden]."""
        return F.embedding(codes, self._codes[group])

    def frames(self, codes: Tensor) -> Tensor:
        """Codes [F, groups] -> [F, hidden], the sum over groups (fp32 accumulation, rounded once)."""
        return sum_of_embeddings([self.code(group, codes[:, group]) for group in range(len(self._codes))])
