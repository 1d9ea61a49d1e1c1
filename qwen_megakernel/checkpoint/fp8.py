"""FP8 weights: E4M3 with one scale per output channel. Activations and sums stay as they are.

A quantised matrix W [N, K] is float8_e4m3fn values Q and fp32 scales s: W[n] is about Q[n] * s[n]. Our scales are
powers of two: the smallest that keeps every value of the row within E4M3's 448, and at least 2^-100. E4M3 is a
floating-point format, so a scale that used its full range would not round any finer. With powers of two, Q * s is exact
in bf16. So the kernel makes bit-identical codes from E4M3 weights and from `dequantize`d bf16 weights.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from qwen_megakernel.choices import WEIGHTS
from qwen_megakernel.errors import CheckpointError

SCALE = "_scale"  # the suffix of a quantised tensor's name that names its scales

LARGEST = 448.0  # the largest value of E4M3

_LEAST = -100  # smallest exponent of a scale: keeps the smallest products far above bf16's smallest value

_PATTERNS = {
    "talker": r"talker\.model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight",
    "predictor": r"talker\.code_predictor\.model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight",
    "codec_head": r"talker\.codec_head\.weight",
    "lm_heads": r"talker\.code_predictor\.lm_head\.\d+\.weight",
}


def name_of(parts: frozenset[str]) -> str | tuple[str, ...]:
    """Parts in the form that `parts_of` takes: their name, or a sorted tuple if they have none."""
    return next((name for name, of in WEIGHTS.items() if of == parts), tuple(sorted(parts)))


def part_of(tensor: str) -> str | None:
    """The part that a checkpoint's tensor belongs to; None: it is never quantised."""
    return next((part for part, pattern in _PATTERNS.items() if re.fullmatch(pattern, tensor)), None)


def quantize(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] of any float dtype -> float8_e4m3fn [N, K], rounded to nearest even, and scales, fp32 [N]. Raises
    CheckpointError: a weight is not finite, or beyond 2^127; bf16 could not hold it if rounded up."""
    rows = matrix.float()
    largest = rows.abs().amax(dim=1)
    if not bool((largest <= 2.0**127).all()):  # False for NaN too
        raise CheckpointError("a weight is not finite, or too large for bf16; download the checkpoint again")
    mantissa, exponent = torch.frexp(largest / LARGEST)  # mantissa in [0.5, 1), or 0 for 0
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1).clamp(min=_LEAST)
    exponent = torch.where(mantissa == 0, 0, exponent)
    scale = (exponent + 127 << 23).to(torch.int32).view(torch.float32)  # 2^exponent, independent of the device's pow
    return (rows / scale[:, None]).to(torch.float8_e4m3fn), scale


def quantize_parts(tensors: dict[str, Tensor], fp8: frozenset[str]) -> None:
    """Quantise every tensor of these parts in place, and add its scales. Tensors that are E4M3 already stay. Raises
    CheckpointError: a weight cannot be quantised; the message names its tensor."""
    for name in [name for name in tensors if part_of(name) in fp8 and name + SCALE not in tensors]:
        try:
            tensors[name], tensors[name + SCALE] = quantize(tensors[name])
        except CheckpointError as error:
            raise CheckpointError(f"tensor {name!r}: {error}") from None


def quantized(tensors: Mapping[str, Tensor], fp8: frozenset[str]) -> dict[str, Tensor]:
    """A copy of the dict in which the tensors of these parts are E4M3, with their scales."""
    out = dict(tensors)
    quantize_parts(out, fp8)
    return out


def dequantize(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Q [N, K] and scales [N] -> the matrix in `dtype`, exact in bf16 if the scales are powers of two."""
    return (matrix.float() * scale[:, None]).to(dtype)


def parts_in(names: Iterable[str]) -> frozenset[str]:
    """The parts that are E4M3, from the names of all tensors and scales."""
    parts = (part_of(name.removesuffix(SCALE)) for name in names if name.endswith(SCALE))
    return frozenset(part for part in parts if part)


def dequantized(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A copy of the dict in which E4M3 tensors are dequantised, without their scales."""
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name in plain:
        if name + SCALE in tensors:
            plain[name] = dequantize(plain[name], tensors[name + SCALE], dtype)
    return plain


def flaw(matrix: Tensor, scale: Tensor) -> str | None:
    """Why a stored matrix and its scales cannot be used; None: they can."""
    again = "quantise the bf16 checkpoint again"
    if not bool(torch.isfinite(scale).all()) or not bool((scale > 0).all()):
        return f"its scales must be finite and above 0; {again}"
    if bool(((matrix.view(torch.uint8) & 0x7F) == 0x7F).any()):
        return f"a weight is not a number; {again}"
    if bool((matrix.float().abs().amax(dim=1) * scale > 2.0**127).any()):
        return f"a weight times its scale is too large for bf16; {again}"
    return None
