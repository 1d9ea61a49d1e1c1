"""The decoder stack, however a sequence is cut; long prompts many rows at a time, as they are recorded for a GPU."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from qwen_megakernel.backend import paged_prefill as prefill
from qwen_megakernel.backend.pack import pack_stack, places
from qwen_megakernel.backend.sizes import PAGE_POSITIONS as PAGE
from qwen_megakernel.backend.sizes import padded_mlp
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.model.transformer import KVCache, Transformer, apply_rope, rope_tables

CPU = torch.device("cpu")
PAGES, BLOCKS = 10, 64


def test_prefill_in_any_cut_equals_row_by_row(tiny):
    checkpoint = Checkpoint.open(tiny("custom_voice"))
    config = checkpoint.config.talker.stack
    stack = Transformer(config, checkpoint.talker(CPU, torch.float32), "talker.model", 64)
    rows = torch.randn(40, config.hidden_size)
    whole = stack.forward(rows, 0, KVCache(config, 64, CPU, torch.float32))
    cuts = sorted(random.sample(range(1, 40), 5))
    for bounds in ([0, *cuts, 40], list(range(41))):
        cache = KVCache(config, 64, CPU, torch.float32)
        cache.k.fill_(torch.nan)  # what is past the position must never be read
        cache.v.fill_(torch.nan)
        parts = [stack.forward(rows[a:b], a, cache) for a, b in zip(bounds, bounds[1:], strict=False)]
        assert (torch.cat(parts) - whole).abs().max() < 1e-4, bounds
        filled = KVCache(config, 64, CPU, torch.float32)
        for a, b in zip(bounds, bounds[1:], strict=False):
            stack.prefill(rows[a:b], a, filled)
        for kept, kind in ((filled.k, cache.k), (filled.v, cache.v)):
            assert (kept - kind)[:, :, :40].abs().max() < 1e-4, bounds


def test_rope_depends_on_the_distance_alone():
    cos, sin = rope_tables(50, 32, 1e6, CPU, torch.float32)
    q, k = torch.randn(1, 32), torch.randn(1, 32)

    def score(i: int, j: int) -> torch.Tensor:
        return apply_rope(q, cos[i : i + 1], sin[i : i + 1]) @ apply_rope(k, cos[j : j + 1], sin[j : j + 1]).T

    assert (score(9, 4) - score(45, 40)).abs() < 1e-4 * score(9, 4).abs().clamp(min=1)
    assert (score(9, 4) - score(9, 3)).abs() > 1e-4


# ---------------------------------------------------------------- many rows at a time


class Extension:
    """What csrc/prompt/prefill.cu computes, in PyTorch. Its matrices come from the checkpoint."""

    def __init__(self, plain: dict[int, torch.Tensor]):
        self.plain = plain  # by their place in the ribbon

    def unpack(self, ribbon, start, scales, block_rows, packets, sizes, outs):
        for size, out in zip(sizes, outs, strict=True):
            out.copy_(self.plain[start])
            start += size

    @staticmethod
    def add_norm(x, delta, weight, eps, y):
        x += 0 if delta is None else delta
        y.copy_(F.rms_norm(x, x.shape[-1:], None, eps) * weight)

    @staticmethod
    def place_heads(qkv, q_norm, k_norm, cos, sin, kv, at, pages, eps, q):
        def turned(x, norm):
            left, right = (F.rms_norm(x.float(), x.shape[-1:], None, eps) * norm).chunk(2, dim=-1)
            c, s = cos[at][:, None], sin[at][:, None]
            return torch.cat([left * c - right * s, right * c + left * s], dim=-1).bfloat16()

        parts = qkv.unflatten(1, (-1, q.shape[2])).split([len(q), kv.shape[2], kv.shape[2]], dim=1)
        q.copy_(turned(parts[0], q_norm).transpose(0, 1))
        page, offset = pages[at // kv.shape[3]], at % kv.shape[3]
        kv[:, 0][page, :, offset], kv[:, 1][page, :, offset] = turned(parts[1], k_norm), parts[2]

    @staticmethod
    def gather(kv, at, pages, keys, values):
        count = keys.shape[1] // kv.shape[3]
        for to, which in ((keys, 0), (values, 1)):
            heads = kv[pages[:count], which].transpose(0, 1).flatten(1, 2)
            to.copy_(heads.repeat_interleave(len(to) // len(heads), dim=0))
            to[:, int(at[-1]) + 1 :] = 0

    @staticmethod
    def gate(both, out):
        gate, up = both.float().unflatten(1, (-1, 2)).unbind(2)
        out.copy_(F.silu(gate) * up)


@pytest.fixture(scope="module")
def talker():
    checkpoint = Checkpoint.open("demo")
    return checkpoint.config.talker.stack, checkpoint.talker(CPU, torch.bfloat16)


@pytest.fixture
def paged(talker, monkeypatch):
    """That the kernels compute what stands in for them is shown on a GPU (test_megakernel.py)."""
    stack, tensors = talker
    plain, at, wider = {}, 0, padded_mlp(stack.intermediate_size) - stack.intermediate_size
    for i in range(stack.num_layers):
        w = {name.split(f"layers.{i}.")[-1]: t for name, t in tensors.items() if f"talker.model.layers.{i}." in name}
        matrices = {
            "qkv": torch.cat([w[f"self_attn.{n}_proj.weight"] for n in "qkv"]),
            "o": w["self_attn.o_proj.weight"],
            "gate_up": torch.stack([w[f"mlp.{n}_proj.weight"] for n in ("gate", "up")], dim=1).flatten(0, 1),
            "down": F.pad(w["mlp.down_proj.weight"], (0, wider)),
        }
        matrices["gate_up"] = F.pad(matrices["gate_up"], (0, 0, 0, 2 * wider))
        for name, shape, *_, size in places(stack, BLOCKS):
            assert matrices[name].shape == shape
            plain[at] = matrices[name]
            at += size
    packed = pack_stack(stack, tensors, "talker.model", PAGES * PAGE, BLOCKS)
    assert packed["ribbon"].shape[1] == at
    monkeypatch.setattr(prefill, "capture", lambda step, pool: SimpleNamespace(replay=step))
    monkeypatch.setattr(prefill, "capturing", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    extension = Extension(plain)
    kv = torch.zeros(3 * PAGES, stack.num_layers, 2, stack.num_kv_heads, PAGE, stack.head_dim, dtype=torch.bfloat16)
    buffers = {f"talker.{name}": tensor for name, tensor in packed.items()} | {"kv": kv}
    return prefill.PagedPrefill(extension, stack, buffers, places(stack, BLOCKS), page=PAGE, pages=PAGES), kv


@torch.inference_mode()
@pytest.mark.parametrize("position, rows", [(0, 48), (0, 300), (9, 129), (130, 256), (0, PAGES * PAGE)])
def test_pages_hold_the_keys_and_values_of_the_plain_transformer(talker, paged, position, rows):
    """Within bf16, in pages in no order where somebody left no numbers. All others keep what they have."""
    (stack, tensors), (many, kv) = talker, paged
    x, end = torch.randn(position + rows, stack.hidden_size) * 0.5, position + rows
    cache = KVCache(stack, PAGES * PAGE, CPU, torch.float32)
    plain = Transformer(stack, {n: t.float() for n, t in tensors.items()}, "talker.model", PAGES * PAGE)
    plain.forward(x, 0, cache)
    expected = torch.stack([cache.k, cache.v], dim=1)[..., :end, :]
    pages, others = torch.randperm(len(kv), dtype=torch.int32).split([PAGES, len(kv) - PAGES])
    kv[pages] = torch.nan
    for at in range(position):
        kv[pages[at // PAGE], ..., at % PAGE, :] = expected[..., at, :].bfloat16()
    many.run(pages, x[position:], position)
    got = kv[pages].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[..., :end, :].float()
    assert (got - expected).norm() <= 0.03 * expected.norm()
    assert (got[0] - expected[0]).norm() <= 0.01 * expected[0].norm(), "the first layer rounds little"
    assert not kv[others].any()
