"""PagedPrefill: keys and values of long prompts, many rows at a time, through cuBLAS under CUDA graphs.

The persistent kernel takes 16 rows of a prompt in 0.43 ms, which is fastest for a few sentences. For longer prompts it
pays to unpack the weights layer by layer for products of many rows (csrc/prompt/prefill.cu). They are not kept twice.
The arithmetic is the kernel's: bf16 products; everything between them and the residual in fp32.
"""

from collections.abc import Mapping
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qwen_megakernel.backend.cuda_graphs import attended, capture, capturing
from qwen_megakernel.backend.pack import Place
from qwen_megakernel.checkpoint.config import StackConfig

LEAST = 48
"""From this many rows it beats the kernel's columns. On an H200: 2.8 ms for up to 128 rows; 48 by columns take 2.9."""

MOST = 256  # most rows of a graph

_ROWS = (128, MOST)
# GPUs have the first one. It needs no build at load.
_ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class PagedPrefill:
    """One stack's layers over the kernel's own weights and pages. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        extension: ModuleType,
        config: StackConfig,
        buffers: Mapping[str, Tensor],
        places: list[Place],
        *,
        page: int,
        pages: int,
    ):
        """`buffers`: the frame decoder's: kv, ribbon, norms and RoPE tables by their names there. `places`: of the
        matrices of a layer. `page`: positions of a page. `pages`: of a slot, at most."""
        self._extension = extension
        self._config = config
        self._w = {name.removeprefix("talker."): t for name, t in buffers.items() if name.startswith("talker.")}
        self._kv = buffers["kv"]
        self._sizes = [place.size for place in places]
        self._places = ([place.rows for place in places], [place.packet for place in places], self._sizes)
        device = self._kv.device
        self._plain = {p.name: torch.empty(p.shape, dtype=torch.bfloat16, device=device) for p in places}
        self._rows = torch.zeros(MOST, config.hidden_size, device=device)
        self._at = torch.zeros(MOST, dtype=torch.int64, device=device)
        self._pages = torch.zeros(pages, dtype=torch.int64, device=device)
        self._limit = pages * page
        pool = torch.cuda.graph_pool_handle()
        lengths = sorted({attended(positions, self._limit) for positions in range(1, self._limit + 1)})
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        for length in reversed(lengths):
            for rows in _ROWS:
                with capturing(device):
                    self._graphs[rows, length] = capture(partial(self._layers, rows, length), pool)

    def run(self, pages: Tensor, rows: Tensor, position: int) -> None:
        """Compute keys and values of consecutive rows. `pages`: the slot's page table, int32 [pages]. `rows`: fp32
        [n, hidden]. `position`: of the first row; earlier positions are in the pages already."""
        self._pages.copy_(pages)
        for part in rows.split(MOST):
            n = len(part)
            size = next(size for size in _ROWS if n <= size)
            # The last row fills the graph up: it writes the same keys and values again.
            self._rows[:n].copy_(part)
            self._rows[n:size].copy_(part[-1:].expand(size - n, -1))
            torch.arange(position, position + size, out=self._at[:size])
            self._at[:size].clamp_(max=position + n - 1)
            self._graphs[size, attended(position + n, self._limit)].replay()
            position += n

    def _layers(self, rows: int, length: int) -> None:
        c, w, e, x, at = self._config, self._w, self._extension, self._rows[:rows], self._at[:rows]

        def halves(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=x.device)

        y, q = halves(rows, c.hidden_size), halves(c.num_heads, rows, c.head_dim)
        keys, values = (halves(c.num_heads, length, c.head_dim) for _ in range(2))
        gated = halves(rows, self._plain["down"].shape[1])
        mask = torch.zeros(rows, length, dtype=torch.bfloat16, device=x.device)
        mask.masked_fill_(torch.arange(length, device=x.device) > at[:, None], float("-inf"))
        delta = None
        for i in range(c.num_layers):
            scales = w["scales"][i] if "scales" in w else None
            e.unpack(w["ribbon"], i * sum(self._sizes), scales, *self._places, list(self._plain.values()))
            e.add_norm(x, delta, w["input_norm"][i], c.rms_norm_eps, y)
            qkv, kv = F.linear(y, self._plain["qkv"]), self._kv[:, i]
            turn = (w["rope_cos"], w["rope_sin"])
            e.place_heads(qkv, w["q_norm"][i], w["k_norm"][i], *turn, kv, at, self._pages, c.rms_norm_eps, q)
            if i + 1 == c.num_layers:
                return
            e.gather(kv, at, self._pages, keys, values)
            with sdpa_kernel(_ATTENTION):
                mixed = F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask)
            delta = F.linear(mixed[0].transpose(0, 1).flatten(1), self._plain["o"])
            e.add_norm(x, delta, w["post_norm"][i], c.rms_norm_eps, y)
            e.gate(F.linear(y, self._plain["gate_up"]), gated)
            delta = F.linear(gated, self._plain["down"])
