"""Whether an engine fits its device's memory, and what takes it."""

import logging
import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from qwen_megakernel.backend.interfaces import FEW_SLOTS, LoadedModel
from qwen_megakernel.checkpoint.config import ModelConfig, StackConfig
from qwen_megakernel.checkpoint.fp8 import part_of
from qwen_megakernel.checkpoint.tensors import TEXT_TABLE, talker_tensors, vocoder_tensors
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.errors import OutOfMemoryError

log = logging.getLogger(__name__)

_BESIDE = 3 * 2**28  # bytes of a GPU that a CUDA context, graphs and buffers take beside weights and slots

_BESIDE_MORE = 9 * 2**25
"""Bytes that the vocoder's larger pushes need with more than `FEW_SLOTS` (vocoder_graphs.py, `graph_rooms`)."""


@dataclass(frozen=True)
class Need:
    """What an engine needs of its device's memory, in bytes."""

    talker: int  # weights of talker and code predictor
    vocoder: int  # its weights, fp32
    slot: int  # keys and values of one slot

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, fp8: Collection[str], options: EngineOptions) -> "Need":
        """fp8: parts (fp8.PARTS) whose weights are E4M3."""
        weights = sum(
            math.prod(shape) * (1 if part_of(name) in fp8 else dtype.itemsize)
            for name, shape in talker_tensors(config.talker).items()
            if name != TEXT_TABLE
        )
        vocoder = sum(4 * math.prod(shape) for shape in vocoder_tensors(config.codec).values())
        return cls(weights, vocoder, kv_bytes(options, config.talker.stack, dtype) // options.max_streams)

    def slots_in(self, memory: int) -> int:
        """How many slots fit into `memory` bytes. While the kernel packs the talker's weights, they are there twice."""
        left = memory - max(2 * self.talker, self.talker + self.vocoder) - _BESIDE
        few = max(0, left) // self.slot
        return few if few <= FEW_SLOTS else max(FEW_SLOTS, (left - _BESIDE_MORE) // self.slot)


def kv_bytes(options: EngineOptions, stack: StackConfig, dtype: torch.dtype) -> int:
    """Memory of the talker's keys and values."""
    row = 2 * stack.num_layers * stack.num_kv_heads * stack.head_dim * dtype.itemsize
    return options.max_streams * options.max_positions * row


def memory_of(loaded: LoadedModel, stack: StackConfig, dtype: torch.dtype, options: EngineOptions) -> dict[str, int]:
    """Bytes that a loaded model takes on its device, by part. `stack` and `dtype` are the talker's."""
    memory = {
        "talker and code predictor": loaded.decoder.weight_bytes,
        "keys and values": kv_bytes(options, stack, dtype),
        "vocoder": loaded.vocoder.weight_bytes,
        "vocoder's streams": options.max_streams * loaded.vocoder.slot_bytes,
    }
    parts = ", ".join(f"{size(count)} for {part}" for part, count in memory.items())
    log.debug("%d slots of %d positions: %s", options.max_streams, options.max_positions, parts)
    return memory


@contextmanager
def told_of_memory(model: str, device: torch.device, need: Need, options: EngineOptions) -> Iterator[None]:
    """If memory is short, raise an error that says what takes it and how much would fit. Raises OutOfMemoryError: at
    once if weights, keys and values alone do not fit; else in place of torch's."""
    memory, wanted = _memory(device), options.max_streams * need.slot
    fits = need.slots_in(memory)
    told = (
        f"{options.max_streams} slots (max_streams) of {options.max_positions} positions (max_positions) take "
        f"{size(wanted)} for keys and values alone, the weights {size(need.talker + need.vocoder)}; "
        "lower max_streams or max_positions"
    )
    if fits:
        told += f": about {fits} slots of {options.max_positions} positions fit"
    else:
        told += ", take weights='fp8' or a smaller model: not one slot of that size fits"
    # A CPU would grant the memory, and the process would be killed later.
    if need.talker + need.vocoder + wanted > memory:
        raise OutOfMemoryError(f"{device} has {size(memory)} of memory: {told}")
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # By its message too, because torch has a type of error for the GPU's memory alone.
        words = str(error).lower()
        typed = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not (typed or "memory" in words and "alloc" in words):
            raise
        raise OutOfMemoryError(f"no room for {model} on {device}: {told} ({error})") from None


def _memory(device: torch.device) -> int:
    """The device's memory in bytes. For a GPU, without what other processes have taken."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def size(count: int) -> str:
    """Bytes, for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
