"""Checks what an engine is loaded with, and whether it fits the device's memory."""

import logging
import math
import numbers
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

import torch

from qwen_megakernel.backend.interfaces import FEW_SLOTS, LoadedModel
from qwen_megakernel.checkpoint.config import ModelConfig, StackConfig
from qwen_megakernel.checkpoint.fp8 import part_of
from qwen_megakernel.checkpoint.tensors import TEXT_TABLE, talker_tensors, vocoder_tensors
from qwen_megakernel.engine.watchdog import Patience
from qwen_megakernel.errors import BackendError, OutOfMemoryError
from qwen_megakernel.model.prompt import KEPT_VOICES

log = logging.getLogger(__name__)

DAY = 86_400

_BESIDE = 3 * 2**28  # bytes of a GPU that a CUDA context, graphs and buffers take beside weights and slots

_BESIDE_MORE = 9 * 2**25
"""Bytes that the vocoder's larger pushes need with more than `FEW_SLOTS` (vocoder_graphs.py, `graph_rooms`)."""

_LEAST = {"max_streams": 1, "max_positions": 16, "max_queue": 0, "kept_voices": 1}


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is loaded with besides its model: the arguments of `TTSEngine.load`. The line beside a type is its
    help on a command line, and in an editor (`EngineArguments`).

    Attributes:
        backend: "torch", "megakernel" (published dims, bfloat16, a GPU of targets.py's TARGETS) or "auto", which takes
            the megakernel where it is known to be right and faster. An untried card is checked once, for up to a
            minute. A log line says what was taken and why.
        device: None takes a CUDA GPU if there is one, else the CPU.
        dtype: of talker and code predictor: "float32", "bfloat16" or the torch.dtype of that name; None is bfloat16 on
            a GPU and float32 on a CPU.
        weights: which weights are E4M3: "bf16" (none), "fp8", "fp8-predictor", or a list of some of fp8.PARTS. They are
            quantised now unless the checkpoint has them so; the rest has `dtype`. None: as the checkpoint has them.
            PyTorch computes with the same weights, dequantised, and saves no memory. More: docs/fp8.md.
        adapters: folders of LoRA adapters in PEFT's format, merged in this order, before anything is quantised.
        max_streams: utterances at once, each in its own slot. Fewer run if the device sustains fewer for live
            listeners, which is measured (`health()["sustained"]`).
        max_positions: rows of one slot: the prompt's and one per frame.
        max_queue: further utterances that may wait for a slot; any more fail at once with `EngineBusy`.
        queue_timeout: seconds that an utterance waits for a slot before it fails with `EngineBusy`.
        kept_voices: how many voices (with language and instruct) are kept, the latest used: keys and values of the
            prompt's opening, and the vocoder's state after the reference. For 0.6B a voice takes about 8 MB; with a
            transcribed reference of 10 s about 30 MB for each text layout.
        vocoder_dtype: "float32", "tf32" (GPU only), "bfloat16" (slow: not through our kernels), or the torch.dtype of
            such a name.
        threads: CPU threads to compute frames with, and as many to compute sound. None measures now and takes the
            fewest that are about as fast as any, at most `torch.get_num_threads()`. That number itself stays as it is.
        fallback: "torch": PyTorch takes over, many times slower, after three faults of our kernels in a row (two on a
            card that was only checked). None: the engine then dies. On such a card backend="auto" implies "torch".
        allow_foreign_voice: an experiment: a Base checkpoint's voice speaks on CustomVoice (docs/voices.md).
        patience: how long the watchdog waits.

    Raises:
        BackendError: one has the wrong type or is out of range.
    """

    backend: Annotated[str, "auto, megakernel or torch"] = "auto"
    device: Annotated[str | torch.device | None, "cpu, cuda, cuda:1; default: a GPU if there is one"] = None
    dtype: Annotated[str | torch.dtype | None, "float32 or bfloat16; default: bfloat16 on a GPU"] = None
    weights: Annotated[str | Collection[str] | None, "which weights are FP8"] = None
    adapters: Annotated[Collection[str | Path], "a LoRA adapter of the model, a folder in PEFT's format"] = ()
    max_streams: Annotated[int, "utterances at once"] = 8
    max_positions: Annotated[int, "positions of a slot: an utterance's prompt and frames"] = 2048
    max_queue: Annotated[int, "utterances that may wait for a slot"] = 8
    queue_timeout: Annotated[float, "seconds that an utterance may wait for a slot"] = 5.0
    kept_voices: Annotated[int, "voices whose beginnings are kept"] = KEPT_VOICES
    vocoder_dtype: Annotated[str | torch.dtype, "float32, tf32 or bfloat16"] = "float32"
    threads: Annotated[int | None, "CPU threads to compute with; default: the fastest number, measured"] = None
    fallback: Annotated[str | None, "torch: PyTorch takes over if the kernels fail"] = None
    allow_foreign_voice: Annotated[
        bool, "an experiment: CustomVoice speaks with a Base checkpoint's voice (docs/voices.md)"
    ] = False
    patience: Annotated[Patience, "how long the watchdog waits"] = Patience()

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < least:
                raise BackendError(f"{name} must be an integer of at least {least}, got {count!r}")
        timeout = self.queue_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not 0 <= timeout <= DAY:
            raise BackendError(f"queue_timeout must be 0 to {DAY} seconds, got {timeout!r}")
        if self.fallback is not None and not (isinstance(self.fallback, str) and self.fallback == "torch"):
            raise BackendError(f"fallback must be None or 'torch', got {self.fallback!r}")
        if not isinstance(self.allow_foreign_voice, bool):
            raise BackendError(f"allow_foreign_voice must be True or False, got {self.allow_foreign_voice!r}")
        if not isinstance(self.patience, Patience):
            raise BackendError(f"patience must be a Patience, got {type(self.patience).__name__}")

    def kv_bytes(self, stack: StackConfig, dtype: torch.dtype) -> int:
        """Memory of the talker's keys and values."""
        row = 2 * stack.num_layers * stack.num_kv_heads * stack.head_dim * dtype.itemsize
        return self.max_streams * self.max_positions * row


class EngineArguments(TypedDict, total=False):
    """Fields of `EngineOptions` as arguments, for type checkers and editors."""

    # fields: `python tools/options_table.py` writes them
    backend: str
    """auto, megakernel or torch"""
    device: str | torch.device | None
    """cpu, cuda, cuda:1; default: a GPU if there is one"""
    dtype: str | torch.dtype | None
    """float32 or bfloat16; default: bfloat16 on a GPU"""
    weights: str | Collection[str] | None
    """which weights are FP8"""
    adapters: Collection[str | Path]
    """a LoRA adapter of the model, a folder in PEFT's format"""
    max_streams: int
    """utterances at once"""
    max_positions: int
    """positions of a slot: an utterance's prompt and frames"""
    max_queue: int
    """utterances that may wait for a slot"""
    queue_timeout: float
    """seconds that an utterance may wait for a slot"""
    kept_voices: int
    """voices whose beginnings are kept"""
    vocoder_dtype: str | torch.dtype
    """float32, tf32 or bfloat16"""
    threads: int | None
    """CPU threads to compute with; default: the fastest number, measured"""
    fallback: str | None
    """torch: PyTorch takes over if the kernels fail"""
    allow_foreign_voice: bool
    """an experiment: CustomVoice speaks with a Base checkpoint's voice (docs/voices.md)"""
    patience: Patience
    """how long the watchdog waits"""
    # end


@dataclass(frozen=True)
class Need:
    """What an engine needs of its device's memory, in bytes."""

    talker: int  # weights of talker and code predictor
    vocoder: int  # its weights, fp32
    slot: int  # keys and values of one slot

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, fp8: Collection[str], options: EngineOptions) -> "Need":
        """fp8: parts (fp8.PARTS) whose weights are E4M3."""

        def bytes_of(name: str, shape: tuple[int, ...]) -> int:
            return math.prod(shape) * (1 if part_of(name) in fp8 else dtype.itemsize)

        weights = sum(bytes_of(*item) for item in talker_tensors(config.talker).items() if item[0] != TEXT_TABLE)
        vocoder = sum(4 * math.prod(shape) for shape in vocoder_tensors(config.codec).values())
        return cls(weights, vocoder, options.kv_bytes(config.talker.stack, dtype) // options.max_streams)

    def slots_in(self, memory: int) -> int:
        """How many slots fit into `memory` bytes. While the kernel packs the talker's weights, they are there twice."""
        left = memory - max(2 * self.talker, self.talker + self.vocoder) - _BESIDE
        few = max(0, left) // self.slot
        return few if few <= FEW_SLOTS else max(FEW_SLOTS, (left - _BESIDE_MORE) // self.slot)


def memory_of(loaded: LoadedModel, stack: StackConfig, dtype: torch.dtype, options: EngineOptions) -> dict[str, int]:
    """Bytes that a loaded model takes on its device, by part. `stack` and `dtype` are the talker's."""
    memory = {
        "talker and code predictor": loaded.decoder.weight_bytes,
        "keys and values": options.kv_bytes(stack, dtype),
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
