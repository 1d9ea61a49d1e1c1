"""Made-up streams for tests of frame decoders: prompts, settings, decoders over tiny checkpoints."""

import numpy as np
import torch

from qwen_megakernel import SamplingParams
from qwen_megakernel.backend.torch_decoder import TorchFrameDecoder
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.sampling_params import GREEDY

PUBLISHED = SamplingParams(True, 0.9, 50, 1.0, 1.05, True, 0.9, 50, 1.0)
SETTINGS = {
    "greedy": GREEDY,
    "as published": PUBLISHED,
    "other numbers": SamplingParams(temperature=0.6, subtalker_temperature=1.2, repetition_penalty=1.3),
    "top-p": SamplingParams(top_p=0.8, subtalker_top_p=0.9),
    "top-p alone": SamplingParams(top_k=0, top_p=0.95, subtalker_top_k=0, subtalker_top_p=0.7),
    "everything": SamplingParams(top_k=0, subtalker_top_k=0),
    "greedy code 0": SamplingParams(do_sample=False, subtalker_top_k=7),
    "greedy codes 1 to 15": SamplingParams(top_k=7, subtalker_dosample=False),
}
"""Every step of the draws, in and out of use."""

Said = list[np.ndarray | None]


def decoder_over(folder, *, device: str = "cpu", slots: int = 3, max_positions: int = 600) -> TorchFrameDecoder:
    """In fp32."""
    checkpoint = Checkpoint.open(folder)
    tensors = checkpoint.talker(torch.device(device), torch.float32)
    embeddings = Embeddings(checkpoint.config.talker, tensors)
    return TorchFrameDecoder(checkpoint.config, tensors, embeddings, slots=slots, max_positions=max_positions)


def start(
    decoder, slot: int, *, stream: int = 0, rows: int = 9, sampling: SamplingParams = GREEDY, seed: int = 7, watch=None
) -> None:
    """Every `stream` is another prompt, with three rows of trailing text."""
    generator = torch.Generator().manual_seed(stream)
    like = decoder._states[0].row

    def normal(count: int) -> torch.Tensor:
        return torch.randn(count, like.shape[1], generator=generator).to(like)

    prompt = Prompt(normal(rows), normal(3), normal(1)[0])
    decoder.start(slot, prompt, sampling.over(PUBLISHED).over(SamplingParams(seed=seed)), watch=watch)


def say(decoder, slot: int, frames: int) -> Said:
    """One frame after the other."""
    said = []
    for _ in range(frames):
        decoder.launch([slot])
        said += decoder.collect()
    return said


def same(ours: Said, theirs: Said) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a is b if a is None or b is None else np.array_equal(a, b) for a, b in pairs)


def interleaved(decoder, slots: list[int], frames: int, ahead: int) -> dict[int, Said]:
    """Frames of several slots: launches of all of them, of one, of the others in turn, `ahead` of them at a time."""
    left = dict.fromkeys(slots, frames)
    said = {slot: [] for slot in slots}
    turn, queued = 0, []
    while queued or any(left.values()):
        wanted = slots[turn % len(slots) :] + slots[: turn % len(slots)]
        wanted = [slot for slot in wanted[: 1 + turn % 3] if left[slot]]
        turn += 1
        if wanted:
            decoder.launch(wanted)
            queued.append(wanted)
            for slot in wanted:
                left[slot] -= 1
        if len(queued) == ahead or not any(left.values()):
            for slot, codes in zip(queued.pop(0), decoder.collect(), strict=True):
                said[slot].append(codes)
    return said
