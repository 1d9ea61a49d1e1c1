"""Teacher forcing: an utterance whose codes are given, computed in one pass in plain PyTorch.

Errors of the kernel, of bf16 and of FP8 are measured against it in fp32 (verify.py, tests, benchmarks).
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_megakernel.checkpoint.config import TalkerConfig
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.model.transformer import Embeddings, KVCache, Transformer

PARTS_OF_ERROR = {"hidden": slice(1), "logits of code 0": slice(1, 2), "other logits": slice(2, None)}
"""Parts of a list of hidden states and logits of 16 code groups. Each part's error is reported separately."""


def mean_error(of: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The mean of |x - y| / |y| over all rows x of `of` and y of `exact`, each a list of fp32 [frames, n]."""
    pairs = zip(of, exact, strict=True)
    return float(torch.stack([(x - y).norm(dim=1) / y.norm(dim=1) for x, y in pairs]).mean())


@torch.inference_mode()
def teacher_forced_talker(config: TalkerConfig, tensors: Mapping[str, Tensor], prompt: Prompt, codes: Tensor) -> Tensor:
    """The talker's hidden states for given codes.

    Args:
        tensors: every `talker.*` tensor, all of the dtype to compute in; none may be E4M3.
        prompt: its rows are rounded to that dtype.
        codes: int64 [frames, 16], where the tensors are.

    Returns:
        [frames, hidden] of that dtype: for each frame the hidden state that its code 0 is drawn from.
    """
    norm, frames = tensors["talker.model.norm.weight"], len(codes)
    text = torch.cat([prompt.trailing, prompt.pad.expand(frames, -1)])[: frames - 1].to(norm)
    rows = torch.cat([prompt.rows.to(norm), Embeddings(config, tensors).frames(codes[:-1]) + text])
    cache = KVCache(config.stack, len(rows), norm.device, norm.dtype)
    return Transformer(config.stack, tensors, "talker.model", len(rows)).forward(rows, 0, cache)[-frames:]


@torch.inference_mode()
def teacher_forced_logits(
    config: TalkerConfig, tensors: Mapping[str, Tensor], hidden: Tensor, codes: Tensor
) -> list[Tensor]:
    """The logits of every code of every frame, from the codec head and the code predictor.

    Args:
        hidden: what `teacher_forced_talker` returned for these codes.

    Returns:
        For each of the 16 code groups its raw logits, fp32 [frames, candidates].
    """
    name, groups, stack = "talker.code_predictor", config.num_code_groups, config.code_predictor.stack
    embed, predictor = Embeddings(config, tensors), Transformer(stack, tensors, f"{name}.model", groups)
    cache = KVCache(stack, groups, hidden.device, hidden.dtype)
    adapter = [tensors[n] for n in (f"{name}.small_to_mtp_projection.{w}" for w in ("weight", "bias")) if n in tensors]
    behind = []
    for row, frame in zip(hidden, codes, strict=True):
        rows = torch.cat([row[None], *(embed.code(group, frame[None, group]) for group in range(groups - 1))])
        behind.append(predictor.forward(F.linear(rows, *adapter) if adapter else rows, 0, cache))
    outs = torch.stack(behind).unbind(1)[1:]  # the rows that codes 1..15 are drawn from
    heads = [tensors[f"{name}.lm_head.{group}.weight"] for group in range(groups - 1)]
    logits = [F.linear(hidden, tensors["talker.codec_head.weight"])]
    return [row.float() for row in logits + [F.linear(out, head) for out, head in zip(outs, heads, strict=True)]]
