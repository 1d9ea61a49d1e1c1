"""Teacher forcing: an utterance whose codes are given, computed in one pass in plain PyTorch.

Errors of the kernel, of bf16 and of FP8 are measured against it in fp32 (verify.py, tests, benchmarks).
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_megakernel.backend.megakernel import MegakernelFrameDecoder
from qwen_megakernel.checkpoint.config import TalkerConfig
from qwen_megakernel.errors import SpeechError
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.model.transformer import Embeddings, KVCache, Transformer
from qwen_megakernel.sampling_params import SamplingParams

_PARTS = {"hidden": slice(1), "logits of code 0": slice(1, 2), "other logits": slice(2, None)}
"""Parts of what `teacher_forced` returns. Each part's error is reported separately."""


@torch.inference_mode()
def observed(
    kernel: MegakernelFrameDecoder, slot: int, prompt: Prompt, sampling: SamplingParams, frames: int
) -> list[Tensor]:
    """Let the kernel compute a sequence of at most `frames` frames, on its own. Returns its codes int64 [n, groups],
    hidden states fp32 [n, hidden] and logits fp32 [n, groups, vocab], on its device."""
    hidden, logits = kernel.observe()
    kernel.start(slot, prompt, sampling)
    made: list[tuple[Tensor, ...]] = []
    while len(made) < frames:
        kernel.launch([slot])
        codes = kernel.collect()[0]
        if isinstance(codes, SpeechError):
            raise codes
        if codes is None:
            break
        made.append((torch.from_numpy(codes), hidden[0].clone(), logits[0].clone()))
    return [torch.stack(part).to(hidden.device) for part in zip(*made, strict=True)]


def errors(
    hidden: Tensor, logits: Tensor, rounded: Sequence[Tensor], exact: Sequence[Tensor]
) -> Iterator[tuple[str, float, float]]:
    """How far the kernel is from fp32, and how far PyTorch in bf16 is. `hidden`, `logits`: the kernel's (`observed`).
    `rounded`, `exact`: what `teacher_forced` returned for the same codes, in bf16 and in fp32. Yields (part, the
    kernel's error of it, bf16's): the mean of |x - y| / |y| over rows x and fp32's rows y."""
    kernel = [hidden, *(logits[:, group, : row.shape[1]] for group, row in enumerate(exact[1:]))]

    def mean(of: Sequence[Tensor], part: slice) -> float:
        pairs = zip(of[part], exact[part], strict=True)
        return float(torch.stack([(x - y).norm(dim=1) / y.norm(dim=1) for x, y in pairs]).mean())

    for name, part in _PARTS.items():
        yield name, mean(kernel, part), mean(rounded, part)


def teacher_forced(config: TalkerConfig, tensors: Mapping[str, Tensor], prompt: Prompt, codes: Tensor) -> list[Tensor]:
    """The hidden states, fp32 [frames, hidden], then the logits of each code group, fp32 [frames, candidates]."""
    hidden = teacher_forced_talker(config, tensors, prompt, codes)
    return [hidden.float(), *teacher_forced_logits(config, tensors, hidden, codes)]


@torch.inference_mode()
def teacher_forced_talker(config: TalkerConfig, tensors: Mapping[str, Tensor], prompt: Prompt, codes: Tensor) -> Tensor:
    """The talker's hidden states for given codes. `tensors`: every `talker.*` tensor, all of the dtype to compute in;
    none may be E4M3. `prompt`: its rows are rounded to that dtype. `codes`: int64 [frames, 16], where the tensors are.
    Returns [frames, hidden] of that dtype: for each frame the hidden state that its code 0 is drawn from."""
    norm, frames = tensors["talker.model.norm.weight"], len(codes)
    text = torch.cat([prompt.trailing, prompt.pad.expand(frames, -1)])[: frames - 1].to(norm)
    rows = torch.cat([prompt.rows.to(norm), Embeddings(config, tensors).frames(codes[:-1]) + text])
    cache = KVCache(config.stack, len(rows), norm.device, norm.dtype)
    return Transformer(config.stack, tensors, "talker.model", len(rows)).forward(rows, 0, cache)[-frames:]


@torch.inference_mode()
def teacher_forced_logits(
    config: TalkerConfig, tensors: Mapping[str, Tensor], hidden: Tensor, codes: Tensor
) -> list[Tensor]:
    """The logits of every code of every frame, from the codec head and the code predictor. `hidden`: what
    `teacher_forced_talker` returned for these codes. Returns for each of the 16 code groups its raw logits, fp32
    [frames, candidates]."""
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
