"""What an engine is loaded with, checked; and whether it fits."""

import numbers
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from qwen_megakernel.checkpoint.config import StackConfig
from qwen_megakernel.engine.watchdog import Patience
from qwen_megakernel.errors import BackendError, OutOfMemoryError
from qwen_megakernel.model.prompt import KEPT_VOICES

DAY = 86_400

_LEAST = {"max_streams": 1, "max_positions": 16, "max_queue": 0, "kept_voices": 1}


def check_sizes(**sizes: int) -> None:
    """Of `TTSEngine.load`'s arguments, those that are counts.

    Raises:
        BackendError: not an integer, or too small.
    """
    for name, count in sizes.items():
        if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < _LEAST[name]:
            raise BackendError(f"{name} must be an integer of at least {_LEAST[name]}, got {count!r}")


@dataclass(frozen=True)
class Limits:
    """How much an engine takes at once; `TTSEngine.load` says what each is.

    Raises:
        BackendError: one that cannot be.
    """

    max_streams: int = 8
    max_positions: int = 2048
    max_queue: int = 8
    queue_timeout: float = 5.0
    kept_voices: int = KEPT_VOICES
    patience: Patience = Patience()

    def __post_init__(self):
        counts = {name: getattr(self, name) for name in _LEAST}
        check_sizes(**counts)
        timeout = self.queue_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not 0 <= timeout <= DAY:
            raise BackendError(f"queue_timeout must be 0 to {DAY} seconds, got {timeout!r}")

    def kv_bytes(self, stack: StackConfig, dtype: torch.dtype) -> int:
        """Memory of the talker's keys and values."""
        row = 2 * stack.num_layers * stack.num_kv_heads * stack.head_dim * dtype.itemsize
        return self.max_streams * self.max_positions * row


@contextmanager
def told_of_memory(model: str, device: torch.device, kv_bytes: int, limits: Limits) -> Iterator[None]:
    """Where memory is short, an error that says what takes it.

    Raises:
        OutOfMemoryError: at once if keys and values alone do not fit; else in place of torch's.
    """
    wanted = (
        f"{limits.max_streams} slots (max_streams) of {limits.max_positions} positions (max_positions) take "
        f"{size(kv_bytes)} for keys and values alone; lower max_streams or max_positions"
    )
    if kv_bytes > _memory(device):  # a CPU would promise it, and the process be killed later
        raise OutOfMemoryError(f"{device} has {size(_memory(device))} of memory: {wanted}")
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"no room for {model} on {device}: {wanted}, or take a smaller model ({error})"
        ) from None


def _is_out_of_memory(error: BaseException) -> bool:
    """torch has a type for the GPU's memory alone."""
    told = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "memory" in told and "alloc" in told


def _memory(device: torch.device) -> int:
    """Bytes that the device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def size(count: int) -> str:
    """Bytes, for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
