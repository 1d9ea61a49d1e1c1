"""PagedPrefill: keys and values of long prompts, many rows at a time, through cuBLAS under CUDA graphs.

The persistent kernel takes 8 rows of a prompt in 0.48 ms and is the fastest there is for a few sentences. Then it pays
to lay its weights out plainly again, layer by layer (csrc/unpack.cu: they are not kept twice), for products of many
rows. Arithmetic as the kernel's: bf16 products, everything between them and the residual in fp32.
"""

from collections.abc import Mapping
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_megakernel.config import StackConfig
from qwen_megakernel.frame_graphs import attended, capture, capturing

LEAST = 96
"""Rows from which this is faster than the kernel's columns: 5.2 ms for up to 128 on an H200, whose layers are 50 small
kernels each (docs/log.md)."""

MOST = 256
"""Rows of a graph, at most."""

_ROWS = (128, MOST)


class PagedPrefill:
    """One stack's layers over the kernel's own weights and pages. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        extension: ModuleType,
        config: StackConfig,
        buffers: Mapping[str, Tensor],
        places: list[tuple[str, tuple[int, int], int, int, int]],
        *,
        page: int,
        pages: int,
    ):
        """
        Args:
            buffers: the frame decoder's: kv, ribbon, norms and RoPE tables by their names there.
            places: of the matrices of one layer in the ribbon: name, (rows, k), rows of a block, packet, bytes of a
                block.
            page: positions of a page.
            pages: of a slot, which lie one after the other.
        """
        self._extension, self._config, self._page = extension, config, page
        self._w = {name.removeprefix("talker."): t for name, t in buffers.items() if name.startswith("talker.")}
        self._kv, self._places = buffers["kv"], places
        self._layer_bytes = sum(size for *_, size in places)
        device = self._kv.device
        self._plain = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape, *_ in places}
        self._rows = torch.zeros(MOST, config.hidden_size, device=device)
        self._at = torch.zeros(MOST, dtype=torch.int64, device=device)
        self._pages = torch.arange(pages, device=device)
        self._limit = pages * page
        pool = torch.cuda.graph_pool_handle()
        lengths = sorted({attended(positions, self._limit) for positions in range(1, self._limit + 1)})
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        for length in reversed(lengths):
            for rows in _ROWS:
                with capturing(device):
                    self._graphs[rows, length] = capture(partial(self._layers, rows, length), pool)

    def run(self, first_page: int, rows: Tensor, position: int) -> None:
        """Keys and values of consecutive rows.

        Args:
            first_page: of the slot.
            rows: fp32 [n, hidden].
            position: of the first row; what is before it is in the pages.
        """
        for part in rows.split(MOST):
            n = len(part)
            size = next(size for size in _ROWS if n <= size)
            # What fills a graph up is its last row again, which says the same twice.
            self._rows[:n].copy_(part)
            self._rows[n:size].copy_(part[-1:].expand(size - n, -1))
            torch.arange(position, position + size, out=self._at[:size])
            self._at[:size].clamp_(max=position + n - 1)
            torch.arange(first_page, first_page + len(self._pages), out=self._pages)
            self._graphs[size, attended(position + n, self._limit)].replay()
            position += n

    def _layers(self, rows: int, length: int) -> None:
        c, w, x, at = self._config, self._w, self._rows[:rows], self._at[:rows]
        page, offset, seen = self._pages[at // self._page], at % self._page, self._pages[: -(-length // self._page)]
        keys_at = torch.arange(len(seen) * self._page, device=x.device)
        mask = torch.zeros(rows, len(keys_at), dtype=torch.bfloat16, device=x.device)
        mask.masked_fill_(keys_at > at[:, None], float("-inf"))
        stale = (keys_at > at[-1])[:, None]  # what another stream left there may be no number
        turn = [w[f"rope_{name}"][at][:, None] for name in ("cos", "sin")]
        for i in range(c.num_layers):
            start = i * self._layer_bytes
            for name, _, block_rows, packet, size in self._places:
                self._extension.unpack(w["ribbon"], start, block_rows, packet, self._plain[name])
                start += size
            qkv = F.linear(self._normed(x, w["input_norm"][i]), self._plain["qkv"]).float()
            q, k, v = qkv.unflatten(1, (-1, c.head_dim)).split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
            kv = self._kv[:, i]
            kv[:, 0][page, :, offset] = self._turned(k, w["k_norm"][i], *turn).bfloat16()
            kv[:, 1][page, :, offset] = v.bfloat16()
            if i + 1 == c.num_layers:
                return
            k, v = kv[seen].permute(1, 2, 0, 3, 4).flatten(2, 3).masked_fill_(stale, 0)  # [kv heads, length, head_dim]
            q = self._turned(q, w["q_norm"][i], *turn).bfloat16().transpose(0, 1)
            y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)
            x = x + F.linear(y[0].transpose(0, 1).flatten(1), self._plain["o"])
            both = F.linear(self._normed(x, w["post_norm"][i]), self._plain["gate_up"])
            gate, up = both.float().unflatten(1, (-1, 2)).unbind(2)
            x = x + F.linear((F.silu(gate) * up).bfloat16(), self._plain["down"])

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return (F.rms_norm(x, x.shape[-1:], None, self._config.rms_norm_eps) * weight).bfloat16()

    def _turned(self, x: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[rows, heads, head_dim], each head normed and rotated, in fp32."""
        left, right = (F.rms_norm(x, x.shape[-1:], None, self._config.rms_norm_eps) * norm).chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
