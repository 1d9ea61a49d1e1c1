"""Sizes that Python and csrc/sizes.h must agree on, and the check that a build has the same.

The extension exports what it was compiled with, and `check_sizes` compares that at load. A test that needs no GPU
compares csrc/sizes.h with this file.
"""

from collections.abc import Collection, Mapping
from types import ModuleType

from qwen_megakernel.backend.interfaces import AHEAD, PUSH_FRAMES, RECENT_FRAMES
from qwen_megakernel.backend.targets import Target
from qwen_megakernel.checkpoint.fp8 import PARTS
from qwen_megakernel.errors import BackendError

WARPS = 16
"""Compute warps of a block."""
HEAD_DIM, GROUPS = 128, 16
SPLITS = 16
"""Most parts that a query head's context is cut into."""
PAGE = 64
"""Positions of a page of keys and values."""
SUMS_AT_ONCE = 128
"""Sums of its rows of a matrix that a block keeps at once."""
PACKET, MLP_PACKET = 4, 6
"""Values that travel together (csrc/frame/exchange.cuh)."""
LAYER_MATRICES = 4

PUSH_ROWS = 128
"""Most frames of a vocoder push. Only engines of many slots use them all, because the buffers grow with them."""
PUSHES_AHEAD = 64
"""How many pushes may be uncollected."""
CHANNEL_TILE = 32
"""The vocoder's convolutions have a multiple of this many channels."""
LOW_SCALE = 2048
"""Scale of the low one of the two fp16 halves of a value (csrc/vocoder/halves.cuh)."""
WIDEST_NORM = 1024
TRANSFORMER_ROWS, TRANSFORMER_RESIDUALS = 16, 512
"""Rows that the vocoder's transformer multiplies at once; a block's hidden columns x the most rows of a push."""
TRANSFORMER_TAPS, TRANSFORMER_COLUMNS, TRANSFORMER_RING = 3, 22, 80
"""For the vocoder's transformer: taps of the convolution before it; most hidden columns of a block; most positions of
its keys and values. 22 columns suffice for the published 512 on 24 multiprocessors."""

SIZES = {
    "COMPUTE_WARPS": WARPS,
    "HEAD_DIM": HEAD_DIM,
    "SPLITS": SPLITS,
    "GROUPS": GROUPS,
    "PACKET": PACKET,
    "MLP_PACKET": MLP_PACKET,
    "PAGE_POSITIONS": PAGE,
    "LAUNCHES_AHEAD": AHEAD,
    "SUMS_AT_ONCE": SUMS_AT_ONCE,
    "RECENT_FRAMES": RECENT_FRAMES,
    "LAYER_MATRICES": LAYER_MATRICES,
    "PUSH_FRAMES": PUSH_FRAMES,
    "PUSH_ROWS": PUSH_ROWS,
    "PUSHES_AHEAD": PUSHES_AHEAD,
    "CHANNEL_TILE": CHANNEL_TILE,
    "LOW_SCALE": LOW_SCALE,
    "WIDEST_NORM": WIDEST_NORM,
    "TRANSFORMER_ROWS": TRANSFORMER_ROWS,
    "TRANSFORMER_RESIDUALS": TRANSFORMER_RESIDUALS,
    "TRANSFORMER_TAPS": TRANSFORMER_TAPS,
    "TRANSFORMER_COLUMNS": TRANSFORMER_COLUMNS,
    "TRANSFORMER_RING": TRANSFORMER_RING,
}
"""The same sizes as in csrc/sizes.h, which writes PAGE_POSITIONS as kPagePositions."""

DIMS = {
    # talker: hidden, MLP, heads, KV heads, codec vocabulary; code predictor: the same, most layers, codes
    1024: ((1024, 3072, 16, 8, 3072), (1024, 3072, 16, 8, 5, 2048)),
    2048: ((2048, 6144, 16, 8, 3072), (1024, 3072, 16, 8, 5, 2048)),
    256: ((256, 384, 4, 2, 1152), (256, 384, 2, 1, 2, 128)),
}
"""The models the kernel is compiled for (csrc/frame/dims.cuh), by talker width: the published 0.6B and 1.7B, and the
demo voice."""


def padded_mlp(width: int) -> int:
    """An MLP's width in the kernel: two whole packets for each of a warp's four lanes that share a column."""
    step = WARPS * 4 * 2 * MLP_PACKET
    return -(-width // step) * step


def built_for(target: Target, fp8: Collection[str]) -> dict[str, Mapping[object, object] | int]:
    """Attributes that the extension must have, by name, when the parts `fp8` (fp8.PARTS) are E4M3."""
    dims = {
        width: tuple((hidden, padded_mlp(mlp), *rest) for hidden, mlp, *rest in stacks)
        for width, stacks in DIMS.items()
    }
    return {
        "SIZES": SIZES,
        "DIMS": dims,
        "FP8": {part: part in fp8 for part in PARTS},
        "BLOCKS": target.blocks,
        "COLUMNS": target.columns,
        "MOST_COLUMNS": max(target.columns, target.wide),
    }


def check_sizes(extension: ModuleType, target: Target, fp8: Collection[str]) -> None:
    """Compare a loaded extension with what Python packs for it.

    Raises:
        BackendError: they differ; the message names every difference.
    """
    wrong = []
    for name, expected in built_for(target, fp8).items():
        got = getattr(extension, name, {} if isinstance(expected, Mapping) else "nothing")
        if not isinstance(expected, Mapping):
            expected, got = {name: expected}, {name: got}
        for key in [*expected, *(key for key in got if key not in expected)]:
            if expected.get(key, "nothing") != got.get(key, "nothing"):
                told = f"{name}[{key!r}]" if key != name else name
                wrong.append(f"{told}: expected {expected.get(key, 'nothing')}, got {got.get(key, 'nothing')}")
    if wrong:
        raise BackendError(
            f"the kernel was built with sizes that this Python code does not expect: {'; '.join(wrong)}; reinstall the "
            "package, or if you changed csrc/sizes.h or csrc/frame/dims.cuh, change backend/sizes.py with it"
        )
