"""One row through a `Transformer` on a CPU, in few operators.

There a small model's frame costs operators, not arithmetic. The demo voice makes 35 passes through a layer for each
frame, and each operator takes 2 to 20 us, whatever its size. So this is `Transformer.forward` for one fp32 row with 23
operators a layer in place of 43. The sums are the same except for their last bits.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_megakernel.checkpoint.config import StackConfig


class OneRow:
    """Not thread-safe: its buffers are written by every call. Its weights are `Transformer`'s, fp32 on the CPU."""

    def __init__(self, config: StackConfig, layers: Sequence[Mapping[str, Tensor]], norm: Tensor):
        self._config = config
        self._layers = layers
        self._norm = norm
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._qkv = torch.empty(heads + 2 * kv_heads, dim)
        self._q, self._k, self._v = (part.view(-1) for part in torch.split(self._qkv, [heads, kv_heads, kv_heads]))
        self._gate, self._up = torch.empty(2, config.intermediate_size)
        self._head_norms = [self._weights_twice(w["self_attn.q_norm"], w["self_attn.k_norm"]) for w in layers]

    def _weights_twice(self, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        """[heads + kv_heads, 2 * head_dim]: see `_norm_and_turn`."""
        c = self._config
        return torch.cat((q_norm.expand(c.num_heads, -1), k_norm.expand(c.num_kv_heads, -1))).repeat(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: int, k: Tensor, v: Tensor) -> Tensor:
        """The row x [hidden], and cos and sin [head_dim] of its position -> [hidden], after the final norm. The row's
        keys and values are written to the cache, k and v [layers, kv_heads, positions, head_dim], at `position`."""
        heads, kv_heads, dim = self._config.num_heads, self._config.num_kv_heads, self._config.head_dim
        for i, w in enumerate(self._layers):
            y, scale = x * w["input_layernorm"], self._scale(x)
            for name, out in (("q", self._q), ("k", self._k), ("v", self._v)):
                torch.addmv(out, w[f"self_attn.{name}_proj"], y, beta=0, alpha=scale, out=out)
            turned = self._norm_and_turn(self._qkv[: heads + kv_heads], self._head_norms[i], cos, sin)
            k[i, :, position] = turned[heads:]
            v[i, :, position] = self._qkv[heads + kv_heads :]
            q = turned[:heads].view(kv_heads, -1, dim)
            y = F.scaled_dot_product_attention(q[None], k[None, i, :, : position + 1], v[None, i, :, : position + 1])
            x = torch.addmv(x, w["self_attn.o_proj"], y.reshape(-1))
            y, scale = x * w["post_attention_layernorm"], self._scale(x)
            torch.addmv(self._gate, w["mlp.gate_proj"], y, beta=0, alpha=scale, out=self._gate)
            torch.addmv(self._up, w["mlp.up_proj"], y, beta=0, alpha=scale, out=self._up)
            x = torch.addmv(x, w["mlp.down_proj"], F.silu(self._gate).mul_(self._up))
        return x * self._norm * self._scale(x)

    def _scale(self, x: Tensor) -> float:
        """1 / rms(x)."""
        return 1.0 / math.sqrt(torch.dot(x, x).item() / len(x) + self._config.rms_norm_eps)

    def _norm_and_turn(self, heads: Tensor, weights: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """RMSNorm and RoPE of q and k, [heads + kv_heads, head_dim].

        A head joined to its negative has mean 0, so layer_norm, one operator, is RMSNorm. The rotate-half pairing's
        (-right, left) is then the middle of the two.
        """
        dim = heads.shape[1]
        both = F.layer_norm(torch.cat((-heads, heads), 1), (2 * dim,), None, None, self._config.rms_norm_eps) * weights
        return both[:, dim:] * cos + both[:, dim // 2 : dim + dim // 2] * sin
