"""Weights as the frame kernel reads them: one ribbon per block, in reading order, of ready mma fragments."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_megakernel.backend.sizes import COMPUTE_WARPS as WARPS
from qwen_megakernel.backend.sizes import MLP_PACKET, PACKET, SUMS_AT_ONCE, padded_mlp
from qwen_megakernel.checkpoint.config import StackConfig
from qwen_megakernel.checkpoint.fp8 import SCALE
from qwen_megakernel.model.transformer import rope_tables


def block_rows(rows: int, blocks: int, multiple: int = 8) -> int:
    """Rows of a matrix that one block owns (csrc/frame/dims.cuh)."""
    return -(-rows // (blocks * multiple)) * multiple


def row_parts(rows: int, k: int, blocks: int) -> int:
    """Into how many parts a block cuts its rows, to multiply them one after the other (csrc/frame/dims.cuh)."""
    share = rows * blocks // 128
    chains = min(4 if share <= 16 else 2 if share == 32 else 1, k // (WARPS * 16))
    return next(parts for parts in (1, 2, 4, 8) if rows // parts * chains <= SUMS_AT_ONCE)


def pack(matrix: Tensor, blocks: int, packet: int = PACKET, rows: int | None = None) -> Tensor:
    """One matrix as the blocks read it: bf16 or float8_e4m3fn [N, K] -> uint8 [blocks, bytes of a block].

    Block b owns rows b * `rows` ..., padded with zeros. It reads them part by part. Its 16 warps share K as the
    exchange hands it out: lane q of warp w gets every fourth packet of the warp's share. Four of a lane's values make
    one mma step. The fragments lie ready for the lanes: tiles of 16 rows, or tiles of 8 rows and two steps where
    the rows are no multiple of 16.
    """
    rows, k = rows or block_rows(len(matrix), blocks), matrix.shape[1]
    fp8 = matrix.dtype == torch.float8_e4m3fn
    matrix = matrix.view(torch.uint8) if fp8 else matrix
    matrix = F.pad(matrix, (0, 0, 0, blocks * rows - len(matrix)))
    parts = blocks * row_parts(rows, k, blocks)
    rows = rows * blocks // parts
    # column = (warp, packet of a lane, lane % 4, value) -> (warp, lane % 4, step, half, pair)
    lanes = matrix.reshape(parts * rows, WARPS, -1, 4, packet).transpose(2, 3).reshape(-1, WARPS, 4, k // 256, 2, 2)
    if rows % 16 == 0:
        # row = (part, tile, upper half, lane / 4) -> part, step, tile, warp, lane / 4, lane % 4, half, upper, pair
        tiles = lanes.reshape(parts, rows // 16, 2, 8, WARPS, 4, -1, 2, 2).permute(0, 6, 1, 4, 3, 5, 7, 2, 8)
    else:
        # row = (part, tile, lane / 4) -> part, pair of steps, tile, warp, lane / 4, lane % 4, step, half, pair
        lanes = F.pad(lanes, (0, 0, 0, 0, 0, k // 256 % 2))
        tiles = lanes.reshape(parts, rows // 8, 8, WARPS, 4, -1, 2, 2, 2).permute(0, 5, 1, 3, 2, 4, 6, 7, 8)
    tiles = tiles.reshape(parts, -1).view(torch.uint8)
    tiles = F.pad(tiles, (0, -tiles.shape[1] % (2 * WARPS * 32 * 16)))  # pairs of 16 bytes a compute thread
    if fp8:
        # part, two units, lane, two words of a unit, (first or second pair, value) -> a lane's 16 bytes. In each word
        # the second pair is in bytes 0 and 2, the first one in 1 and 3 (csrc/frame/fp8.cuh).
        units = tiles.reshape(parts, -1, 2, WARPS * 32, 2, 2, 2).permute(0, 1, 3, 2, 4, 6, 5)
        tiles = units.flip(-1)
    return tiles.reshape(blocks, -1).contiguous()


def pack_stack(
    config: StackConfig, tensors: Mapping[str, Tensor], prefix: str, positions: int, blocks: int
) -> dict[str, Tensor]:
    """A stack's ribbon (layer after layer: qkv, o, gate and up alternating, down), norms and RoPE tables. E4M3 weights
    also have scales, for the same rows."""

    def stacked(name: str) -> Tensor:
        return torch.stack([tensors[f"{prefix}.layers.{i}.{name}.weight"] for i in range(config.num_layers)])

    def joined(i: int, suffix: str = "") -> tuple[Tensor, ...]:
        q, k, v, o = (tensors[f"{prefix}.layers.{i}.self_attn.{n}_proj.weight{suffix}"] for n in "qkvo")
        gate, up, down = (tensors[f"{prefix}.layers.{i}.mlp.{n}_proj.weight{suffix}"] for n in ("gate", "up", "down"))
        return torch.cat([q, k, v]), o, torch.stack([gate, up], dim=1).flatten(0, 1), down

    fp8 = f"{prefix}.layers.0.self_attn.q_proj.weight{SCALE}" in tensors
    norm, scales = tensors[f"{prefix}.norm.weight"], []
    listed = places(config, blocks, torch.float8_e4m3fn if fp8 else torch.bfloat16)
    size = config.num_layers * sum(place.size for place in listed)
    ribbon, end = torch.empty(blocks, size, dtype=torch.uint8, device=norm.device), 0  # filled in place: no second copy
    for i in range(config.num_layers):
        for matrix, place in zip(joined(i), listed, strict=True):
            padding = (0, place.shape[1] - matrix.shape[1], 0, place.shape[0] - len(matrix))
            padded = F.pad(matrix.view(torch.uint8) if fp8 else matrix, padding)
            end += place.size
            ribbon[:, end - place.size : end] = pack(padded.view(matrix.dtype), blocks, place.packet, place.rows)
        if fp8:
            of_rows = zip(joined(i, SCALE), listed, strict=True)
            scales += [F.pad(scale, (0, place.shape[0] - len(scale)), value=1.0) for scale, place in of_rows]
    cos, sin = rope_tables(positions, config.head_dim, config.rope_theta, norm.device, torch.float32)
    return {
        "ribbon": ribbon,
        "input_norm": stacked("input_layernorm"),
        "post_norm": stacked("post_attention_layernorm"),
        "q_norm": stacked("self_attn.q_norm"),
        "k_norm": stacked("self_attn.k_norm"),
        "norm": norm,
        "rope_cos": cos[:, : config.head_dim // 2].contiguous(),
        "rope_sin": sin[:, : config.head_dim // 2].contiguous(),
    } | ({"scales": torch.cat(scales).view(config.num_layers, -1)} if fp8 else {})


class Place(NamedTuple):
    """Where a layer's matrix is in the ribbon."""

    name: str
    shape: tuple[int, int]  # (rows, k) as the kernel has them
    rows: int  # of a block
    packet: int
    size: int  # bytes of a block


def places(config: StackConfig, blocks: int, dtype: torch.dtype = torch.bfloat16) -> list[Place]:
    """A layer's matrices in the ribbon's order."""
    hidden, mlp, width = config.hidden_size, padded_mlp(config.intermediate_size), config.num_heads * config.head_dim
    qkv = width + 2 * config.num_kv_heads * config.head_dim
    matrices = (
        ("qkv", (qkv, hidden), block_rows(qkv, blocks), PACKET),
        ("o", (hidden, width), block_rows(hidden, blocks), PACKET),
        ("gate_up", (2 * mlp, hidden), 2 * block_rows(mlp, blocks, 24), PACKET),
        ("down", (hidden, mlp), block_rows(hidden, blocks), MLP_PACKET),
    )

    def size(shape: tuple[int, int], rows: int, packet: int) -> int:
        return pack(torch.empty(shape, dtype=dtype, device="meta"), blocks, packet, rows).shape[1]

    return [Place(name, shape, rows, packet, size(shape, rows, packet)) for name, shape, rows, packet in matrices]
