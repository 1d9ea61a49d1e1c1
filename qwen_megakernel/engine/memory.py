"""Whether an engine fits its device's memory, and what takes it."""

import logging
import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from qwen_megakernel.backend.interfaces import FEW_SLOTS, LoadedModel
from qwen_megakernel.backend.select import Backend
from qwen_megakernel.backend.sizes import PAGE_POSITIONS
from qwen_megakernel.checkpoint.config import ModelConfig, StackConfig
from qwen_megakernel.checkpoint.fp8 import part_of
from qwen_megakernel.checkpoint.tensors import TEXT_TABLE, talker_tensors, vocoder_tensors
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.errors import BackendError, OutOfMemoryError

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
    keys_values: int  # of all slots

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, fp8: Collection[str], options: EngineOptions) -> "Need":
        """fp8: parts (fp8.PARTS) whose weights are E4M3."""
        weights = sum(
            math.prod(shape) * (1 if part_of(name) in fp8 else dtype.itemsize)
            for name, shape in talker_tensors(config.talker).items()
            if name != TEXT_TABLE
        )
        vocoder = sum(4 * math.prod(shape) for shape in vocoder_tensors(config.codec).values())
        stack = config.talker.stack
        return cls(weights, vocoder, options.max_positions * _row_bytes(stack, dtype), kv_bytes(options, stack, dtype))

    def slots_in(self, memory: int) -> int:
        """How many slots fit into `memory` bytes. While the kernel packs the talker's weights, they are there twice."""
        left = memory - max(2 * self.talker, self.talker + self.vocoder) - _BESIDE
        few = max(0, left) // self.slot
        return few if few <= FEW_SLOTS else max(FEW_SLOTS, (left - _BESIDE_MORE) // self.slot)


def _row_bytes(stack: StackConfig, dtype: torch.dtype) -> int:
    """Memory of the talker's keys and values of one position."""
    return 2 * stack.num_layers * stack.num_kv_heads * stack.head_dim * dtype.itemsize


def kv_bytes(options: EngineOptions, stack: StackConfig, dtype: torch.dtype) -> int:
    """Memory of the talker's keys and values."""
    slots = options.max_streams * options.max_positions * _row_bytes(stack, dtype)
    return slots if options.kv_memory is None else min(slots, int(options.kv_memory * 2**30))


def pages_of_slot(options: EngineOptions) -> int:
    """Pages of keys and values of a full slot."""
    return -(-options.max_positions // PAGE_POSITIONS)


def shared_pages(options: EngineOptions, stack: StackConfig, backend: Backend) -> int | None:
    """How many pages of keys and values the slots share; None: `kv_memory` is not given. Raises BackendError: this
    backend has no pages, or they hold less than one slot, and the longest utterances could never begin."""
    if options.kv_memory is None:
        return None
    if backend.name != "megakernel":
        raise BackendError("kv_memory needs the megakernel, and PyTorch computes here: leave kv_memory out")
    slot, page = pages_of_slot(options), PAGE_POSITIONS * _row_bytes(stack, backend.dtype)
    pages = int(options.kv_memory * 2**30 / page)
    if pages < slot:
        raise BackendError(
            f"kv_memory must be at least {math.ceil(100 * slot * page / 2**30) / 100} GiB, for one utterance of "
            f"{options.max_positions} positions, got {options.kv_memory:g}; raise it or lower max_positions"
        )
    return min(pages, options.max_streams * slot)


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
    memory, wanted = _memory(device), need.keys_values
    fits = need.slots_in(memory)
    lower = "kv_memory"
    if options.kv_memory is None:
        lower = "max_streams or max_positions, or with the megakernel set kv_memory"
    told = (
        f"{options.max_streams} slots (max_streams) of {options.max_positions} positions (max_positions) take "
        f"{size(wanted)} for keys and values alone, the weights {size(need.talker + need.vocoder)}; "
        f"lower {lower}"
    )
    if fits:
        told += f": about {fits} slots of {options.max_positions} positions fit ({size(fits * need.slot)})"
    else:
        told += ", take weights='fp8' or a smaller model: not one slot of that size fits"
    # A CPU would grant the memory, and the process would be killed later.
    if need.talker + need.vocoder + wanted > memory:
        raise OutOfMemoryError(f"{device} has {size(memory)} of memory: {told}")
    try:
        yield
    except Exception as error:
        if not OutOfMemoryError.of(error):
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
