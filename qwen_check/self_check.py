"""The process of the self-check: is the kernel right on this machine's card, and is it faster than PyTorch?

    python -m qwen_check.self_check DEVICE SIZE WEIGHTS

trust/auto.py starts it, reads the lines of JSON that it prints, and ends it after a minute. Weights are random, with
the dims of SIZE. If a launch takes 15 ms, the launches take some 20 s and everything else as long again.
"""

import json
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from qwen_check.bench import frame_ms, free_memory
from qwen_check.teacher_forcing import errors, observed, teacher_forced
from qwen_megakernel.backend.build import load_extension
from qwen_megakernel.backend.interfaces import AHEAD, PUSH_FRAMES, RECENT_FRAMES, Vocoder
from qwen_megakernel.backend.megakernel import MegakernelFrameDecoder
from qwen_megakernel.backend.torch_decoder import TorchFrameDecoder
from qwen_megakernel.backend.vocoder_graphs import GraphVocoder, why_no_graphs
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.fp8 import dequantized, quantized
from qwen_megakernel.checkpoint.load import DEMO_FOLDER
from qwen_megakernel.checkpoint.synthetic import random_talker, random_vocoder, synthetic_config
from qwen_megakernel.choices import DEMO, WEIGHTS, parts_of
from qwen_megakernel.errors import OutOfMemoryError, SpeechError, TTSError
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.model.vocoder import TorchVocoder
from qwen_megakernel.sampling_params import GREEDY, SamplingParams
from qwen_megakernel.trust.auto import TIME_LIMIT_S
from qwen_megakernel.trust.verdicts import FramePart, Part

LAUNCHES, SECONDS = 1000, 22.0
"""Number of launches with several sequences, and seconds after which it stops early. It always makes two rounds."""
FRAMES = 50  # frames of a sequence in a round
POSITIONS = 384
PROMPT_ROWS = (9, 300, 1, 20)
"""Rows of the prompts. In this order they are prefilled by columns, by the prefill's own kernels, not at all, and by
columns."""
COMPARED = 20  # frames of each of two sequences that are compared with fp32
PCM = 2e-5  # the largest allowed difference between samples of the vocoder's kernels and of PyTorch in fp32
PUSHES = (1, 1, 2, 4, 8, 3, 5, 16)  # frames of each vocoder push


_P = TypeVar("_P", bound=Part)


class Wrong(Exception):
    """A result is wrong; the message says which."""


def tell(**said: object) -> None:
    """Print a line for trust/auto.py."""
    print(json.dumps(said), flush=True)


def plain(error: Exception) -> str:
    """An error in one line."""
    first = str(error).strip().partition("\n")[0]
    return first if isinstance(error, Wrong | TTSError) else f"{type(error).__name__}: {first}"


def judged(check: Callable[[], _P], wrong: Callable[[str], _P]) -> _P:
    """The result of `check`, or that of `wrong` for the error that it raised. Raises Exception: memory ran out, which
    says nothing about the kernel."""
    try:
        return check()
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or OutOfMemoryError.of(error):
            raise
        return wrong(plain(error))


# ---------------------------------------------------------------- the model


@dataclass
class Model:
    """Random weights on a GPU."""

    config: ModelConfig
    stored: dict[str, Tensor]  # every `talker.*` tensor, bf16 or E4M3 with scales
    device: torch.device
    extension: ModuleType  # our kernels, built for these weights


def make_model(size: str, fp8: Collection[str], device: torch.device, extension: ModuleType) -> Model:
    """`size`: one of verdicts.SIZES' names. `fp8`: the parts (fp8.PARTS) that are E4M3."""
    config = ModelConfig.from_folder(DEMO_FOLDER) if size == DEMO else synthetic_config(size)
    tensors = random_talker(config, device, seed=0)
    tensors["talker.model.text_embedding.weight"] = torch.zeros(1, 1)  # no text is spoken; saves 0.6 GB
    return Model(config, quantized(tensors, frozenset(fp8)), device, extension)


def make_prompt(model: Model, slot: int) -> Prompt:
    """A slot's prompt: noise, with three trailing text rows."""
    rows, generator = PROMPT_ROWS[slot % len(PROMPT_ROWS)], torch.Generator(model.device).manual_seed(slot)
    shape = (rows + 4, model.config.talker.stack.hidden_size)
    noise = (torch.randn(shape, generator=generator, device=model.device) * 0.5).to(torch.bfloat16)
    return Prompt(noise[:rows], noise[rows:-1], noise[-1])


# ---------------------------------------------------------------- the frame kernel


def check_frame(model: Model) -> FramePart:
    """Check the frame kernel and time it. This empties `model.stored`. Raises what `judged` does."""
    figures: dict[str, Any] = {}  # FramePart's other fields, as far as the check came
    return judged(lambda: _check_frame(model, figures), lambda told: FramePart(False, told, **figures))


def _check_frame(model: Model, figures: dict[str, Any]) -> FramePart:
    config, norm = model.config, model.stored["talker.model.norm.weight"]
    sampling, build = SamplingParams().over(config.sampling), model.extension
    tell(done=0.1, what="comparing codes")
    slots = max(2, build.MOST_COLUMNS + (8 if build.BATCH_COLUMNS else 0))  # launches of every kernel
    kernel = MegakernelFrameDecoder(config, model.stored, slots=slots, max_positions=POSITIONS, extension=build)
    tensors = dequantized(model.stored, torch.bfloat16)
    model.stored = {}

    def launched(count: int) -> None:
        figures["launches"] = figures.get("launches", 0) + count
        tell(done=0.1 + 0.5 * min(1.0, figures["launches"] / LAUNCHES), what="comparing codes")

    check_codes(kernel, model, build.COLUMNS, launched)
    tell(done=0.6, what="timing frames")
    figures["kernel_ms"] = frame_ms(kernel, norm, sampling, 1, 100)
    greedy = GREEDY.over(config.sampling)
    seen = [observed(kernel, slot, make_prompt(model, slot), greedy, COMPARED) for slot in (0, 1)]
    if sum(len(made[0]) for made in seen if made) < 2 * COMPARED:
        raise Wrong("a sequence ended, but with these weights none should")
    del kernel
    free_memory()
    eager = TorchFrameDecoder(config, tensors, Embeddings(config.talker, tensors), slots=1, max_positions=POSITIONS)
    figures["torch_ms"] = frame_ms(eager, norm, sampling, 1, 60)
    del eager
    free_memory()
    tell(done=0.75, what="comparing with fp32")
    figures["error_ratio"] = check_errors(model, tensors, seen)
    told = "its codes are the same alone and beside others, and its error is below PyTorch bf16's"
    return FramePart(True, told, **figures)


def speak(kernel: MegakernelFrameDecoder, group: list[int], requests: list[tuple]) -> dict[int, list]:
    """Compute FRAMES frames of the slots in `group`, all in each launch, launched ahead as the engine does. Returns by
    slot the codes of every frame, or None from end of speech on."""
    said: dict[int, list] = {slot: [] for slot in group}
    for slot in group:
        kernel.start(slot, *requests[slot])
    launched = 0
    for collected in range(FRAMES):
        while launched < min(FRAMES, collected + AHEAD):
            kernel.launch(group)
            launched += 1
        for slot, codes in zip(group, kernel.collect(), strict=True):
            if isinstance(codes, SpeechError):
                raise codes
            said[slot].append(None if codes is None else codes.tolist())
    return said


def check_codes(kernel: MegakernelFrameDecoder, model: Model, narrow: int, launched: Callable[[int], None]) -> None:
    """Check that sequences get the same codes alone, again, and in full launches, in any column. `narrow`: columns of a
    launch of the narrow kernel. `launched`: is called with the number of launches of several sequences that were
    compared. Raises Wrong: the codes differ."""
    slots, draw, requests = list(range(kernel.slots)), random.Random(0), []
    for slot in slots:
        sampling = (SamplingParams(seed=slot) if slot % 3 else GREEDY).over(model.config.sampling)
        requests.append((make_prompt(model, slot), sampling))
    alone = {slot: speak(kernel, [slot], requests)[slot] for slot in slots}
    began, done, rounds = time.monotonic(), 0, 0
    while done < LAUNCHES and (rounds < 2 or time.monotonic() - began < SECONDS):
        order, width = draw.sample(slots, len(slots)), kernel.width if rounds else narrow
        groups = [order[at : at + width] for at in range(0, len(order), width)]
        for group in [*groups, order[:1]]:
            for slot, codes in speak(kernel, group, requests).items():
                if codes != alone[slot]:
                    frame = next(i for i, both in enumerate(zip(codes, alone[slot], strict=True)) if both[0] != both[1])
                    company = f"beside {len(group) - 1} others" if len(group) > 1 else "the second time"
                    raise Wrong(f"a sequence has other codes {company} than alone, from frame {frame} on")
        launched(FRAMES * len(groups))
        done, rounds = done + FRAMES * len(groups), rounds + 1


@torch.inference_mode()
def check_errors(model: Model, tensors: dict[str, Tensor], seen: Sequence[Sequence[Tensor]]) -> float:
    """Check that the kernel's hidden states and logits are no further from fp32 than those of PyTorch in bf16.
    `tensors`: every `talker.*` tensor, bf16; converted to fp32 in place. `seen`: what `observed` returned for each
    slot's prompt. Returns the largest ratio of the two errors. Raises Wrong: they are further away, or not numbers."""

    def forced() -> list[Tensor]:
        """`teacher_forced`, of all sequences one after the other."""
        every = [
            teacher_forced(model.config.talker, tensors, make_prompt(model, slot), codes)
            for slot, (codes, *_) in enumerate(seen)
        ]
        return [torch.cat(part) for part in zip(*every, strict=True)]

    rounded = forced()
    for name in tensors:
        tensors[name] = tensors[name].float()  # one by one: two full copies may not fit a small card
    _, hidden, logits = (torch.cat(part) for part in zip(*seen, strict=True))
    ratios = []
    for name, error, usual in errors(hidden, logits, rounded, forced()):
        if not error <= usual:  # also true for NaN
            raise Wrong(f"its error of {name} is {error:.1e}, above PyTorch bf16's {usual:.1e}")
        ratios.append(error / usual)
    return max(ratios)


# ---------------------------------------------------------------- the vocoder's kernels


def check_vocoder(model: Model) -> Part:
    """Check the vocoder's kernels and time them. Raises what `judged` does."""
    config = model.config.codec.vocoder
    if obstacle := why_no_graphs(config, model.device):
        return Part(True, f"not checked: {obstacle}")
    tensors = random_vocoder(model.config, model.device, seed=0)
    return judged(lambda: _check_vocoder(model, tensors), lambda told: Part(False, told))


@torch.inference_mode()
def _check_vocoder(model: Model, tensors: Mapping[str, Tensor]) -> Part:
    config, slots = model.config.codec.vocoder, list(range(8))
    codes = torch.randint(0, config.codebook_size, (len(slots), sum(PUSHES), config.num_quantizers))
    recent = codes[:, :RECENT_FRAMES].to(model.device, torch.int32).contiguous()
    kernels = GraphVocoder(model.extension, config, tensors, slots=len(slots), recent_codes=recent)
    eager = TorchVocoder(config, tensors, slots=1)

    def pushed() -> Tensor:
        for slot in slots:
            kernels.reset(slot)
        return torch.cat([kernels.push(slots, part) for part in codes.split(PUSHES, dim=1)], dim=1)

    ours, again = pushed(), pushed()
    tell(done=0.9, what="comparing the vocoder")
    for slot in slots:
        kernels.reset(slot)
    followed = kernels.follow(slots, [0] * len(slots), [1 + slot % PUSH_FRAMES for slot in slots])()
    if not torch.equal(ours, again):
        raise Wrong("the vocoder's kernels gave other samples the second time")
    for slot in slots:
        eager.reset(0)
        exact = eager.push([0], codes[slot][None])[0].cpu()
        for samples in (ours[slot], followed[slot]):
            error = math.nan if samples is None else float((samples - exact[: len(samples)]).abs().max())
            if not error <= PCM:  # also true for NaN
                told = f"differ from PyTorch's by {error:.1e}, more than {PCM:.0e}"
                raise Wrong(f"samples of the vocoder's kernels {told}")
    tell(done=0.95, what="timing the vocoder")
    kernel_ms, torch_ms = push_ms(kernels, codes[:1], 60), push_ms(eager, codes[:1], 12)
    return Part(True, "its samples match PyTorch's and are the same each time", kernel_ms, torch_ms)


def push_ms(vocoder: Vocoder, codes: Tensor, pushes: int) -> float:
    """Median milliseconds of one-frame pushes, until the samples are on the host. codes: int64 [1, frames, groups]."""
    times = []
    for i in range(pushes):
        began = time.perf_counter()
        vocoder.push([0], codes[:, [i % codes.shape[1]]]).cpu()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


# ---------------------------------------------------------------- the process


def main(index: str, size: str, weights: str) -> None:
    """Check, and print the results. A failure before the kernel runs says nothing about it."""
    # If the parent is gone and the GPU hangs, this process would never end. The alarm ends it.
    signal.alarm(2 * int(TIME_LIMIT_S))
    fp8 = parts_of(weights if weights in WEIGHTS else weights.split(","))
    tell(done=0.0, what="making a model")
    try:
        device = torch.device("cuda", int(index))
        model = make_model(size, fp8, device, load_extension(device, fp8))
        torch.cuda.synchronize(model.device)
        frame = check_frame(model)
        tell(frame=asdict(frame))
        free_memory()
        tell(done=0.85, what="making a vocoder")
        unchecked = Part(True, "not checked, because the frame kernel is wrong")
        tell(vocoder=asdict(check_vocoder(model) if frame.correct else unchecked))
    except Exception as error:
        tell(unfinished=plain(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # cleaning up a broken CUDA context may take long, or crash
