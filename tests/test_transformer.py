"""The decoder stack: however a sequence is cut into forward calls, the rows are the same."""

import numpy as np
import torch

from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.model.transformer import KVCache, Transformer, apply_rope, rope_tables


def test_prefill_in_any_cut_equals_row_by_row(tiny):
    checkpoint = Checkpoint.open(tiny("custom_voice"))
    config = checkpoint.config.talker.stack
    cpu = torch.device("cpu")
    stack = Transformer(config, checkpoint.talker(cpu, torch.float32), "talker.model", 64)
    rows = torch.randn(40, config.hidden_size)
    whole = stack.forward(rows, 0, KVCache(config, 64, cpu, torch.float32))
    cuts = sorted(
        np.random.default_rng(torch.randint(2**31, ()).item()).choice(np.arange(1, 40), 5, replace=False).tolist()
    )
    for bounds in ([0, *cuts, 40], list(range(41))):
        cache = KVCache(config, 64, cpu, torch.float32)
        cache.k.fill_(torch.nan)  # what is past the position must never be read
        cache.v.fill_(torch.nan)
        parts = [stack.forward(rows[a:b], a, cache) for a, b in zip(bounds, bounds[1:], strict=False)]
        assert (torch.cat(parts) - whole).abs().max() < 1e-4, bounds


def test_rope_depends_on_the_distance_alone():
    cos, sin = rope_tables(50, 32, 1e6, torch.device("cpu"), torch.float32)
    q, k = torch.randn(1, 32), torch.randn(1, 32)

    def score(i: int, j: int) -> torch.Tensor:
        return apply_rope(q, cos[i : i + 1], sin[i : i + 1]) @ apply_rope(k, cos[j : j + 1], sin[j : j + 1]).T

    assert (score(9, 4) - score(45, 40)).abs() < 1e-4 * score(9, 4).abs().clamp(min=1)
    assert (score(9, 4) - score(9, 3)).abs() > 1e-4
