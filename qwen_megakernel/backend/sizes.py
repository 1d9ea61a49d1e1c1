"""Sizes that Python and csrc/sizes.h must agree on, and the check that a build has the same.

The extension exports what it was compiled with, and `check_sizes` compares that at load. A test that needs no GPU
compares csrc/sizes.h with this file.
"""

from collections.abc import Collection
from types import ModuleType
from typing import Any

from qwen_megakernel.backend import interfaces
from qwen_megakernel.backend.targets import Target
from qwen_megakernel.choices import PARTS
from qwen_megakernel.errors import BackendError
from qwen_megakernel.model import transformer

LAUNCHES_AHEAD = interfaces.AHEAD
PUSH_FRAMES = interfaces.PUSH_FRAMES
RECENT_FRAMES = interfaces.RECENT_FRAMES
TOLD = transformer.TOLD
TELLINGS = LAUNCHES_AHEAD + 1

COMPUTE_WARPS = 16  # compute warps of a block
HEAD_DIM, GROUPS = 128, 16
FIRST_LOOKED_UP = 2  # position of the code predictor from which tables hold what it reads (csrc/frame/params.h)
SPLITS = 16  # most parts that a query head's context is cut into
PAGE_POSITIONS = 64  # positions of a page of keys and values
SUMS_AT_ONCE = 128  # sums of its rows of a matrix that a block keeps at once
PACKET, MLP_PACKET = 4, 6  # values that travel together (csrc/frame/exchange.cuh)
LAYER_MATRICES = 4

PUSH_ROWS = 128
"""Most frames of a vocoder push. Only engines of many slots use them all, because the buffers grow with them."""
PUSHES_AHEAD = 64  # how many pushes may be uncollected
CHANNEL_TILE = 32  # the vocoder's convolutions have a multiple of this many channels
LOW_SCALE = 2048  # scale of the low one of the two fp16 halves of a value (csrc/vocoder/halves.cuh)
WIDEST_NORM = 1024
TRANSFORMER_ROWS, TRANSFORMER_RESIDUALS = 16, 512
"""Rows that the vocoder's transformer multiplies at once; a block's hidden columns x the most rows of a push."""
TRANSFORMER_TAPS, TRANSFORMER_COLUMNS, TRANSFORMER_RING = 3, 22, 80
"""For the vocoder's transformer: taps of the convolution before it; most hidden columns of a block; most positions of
its keys and values. 22 columns suffice for the published 512 on 24 multiprocessors."""

SIZES = {name: value for name, value in vars().items() if name.isupper() and isinstance(value, int)}
"""Those above: the same sizes as in csrc/sizes.h, which writes PAGE_POSITIONS as kPagePositions."""

SPIN_LIMIT = 4_000_000  # polls before a wait inside a kernel gives up: seconds on a healthy card

DIMS = {
    # talker: hidden, MLP, heads, KV heads, codec vocabulary; code predictor: the same, most layers, codes
    1024: ((1024, 3072, 16, 8, 3072), (1024, 3072, 16, 8, 5, 2048)),
    2048: ((2048, 6144, 16, 8, 3072), (1024, 3072, 16, 8, 5, 2048)),
    256: ((256, 768, 4, 2, 1152), (256, 768, 2, 1, 2, 128)),
}
"""The models the kernel is compiled for (csrc/frame/dims.cuh), by talker width: the published 0.6B and 1.7B, and the
demo voice. Their MLPs are `padded_mlp`: narrower ones fit too."""


def padded_mlp(width: int) -> int:
    """An MLP's width in the kernel: two whole packets for each of a warp's four lanes that share a column."""
    step = COMPUTE_WARPS * 4 * 2 * MLP_PACKET
    return -(-width // step) * step


def built_for(target: Target, fp8: Collection[str]) -> dict[str, Any]:
    """Attributes that the extension must have, by name, when the parts `fp8` (fp8.PARTS) are E4M3."""
    return {
        "SIZES": SIZES,
        "DIMS": DIMS,
        "FP8": {part: part in fp8 for part in PARTS},
        "BLOCKS": target.blocks,
        "COLUMNS": target.columns,
        "MOST_COLUMNS": max(target.columns, target.wide),
        "BATCH_COLUMNS": target.batch,
    }


def check_sizes(extension: ModuleType, target: Target, fp8: Collection[str]) -> None:
    """Compare a loaded extension with what Python packs for it. Raises BackendError, which names every difference."""
    wrong = []
    for name, expected in built_for(target, fp8).items():
        pairs = {name: (expected, getattr(extension, name, "nothing"))}
        if isinstance(expected, dict):
            got = getattr(extension, name, {})
            pairs = {f"{name}[{k!r}]": (expected.get(k, "nothing"), got.get(k, "nothing")) for k in expected | got}
        wrong += [f"{told}: expected {a}, got {b}" for told, (a, b) in pairs.items() if a != b]
    if wrong:
        raise BackendError(
            f"the kernel was built with sizes that this Python code does not expect: {'; '.join(wrong)}; reinstall the "
            "package, or if you changed csrc/sizes.h or csrc/frame/dims.cuh, change backend/sizes.py with it"
        )
