"""The architectures the kernel is compiled for, and what each gets."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """An architecture that the kernel is compiled for, and the smallest card named for it."""

    card: str
    multiprocessors: int
    shared_kb: int  # of a multiprocessor
    threads: int  # that a multiprocessor can hold
    columns: int  # sequences, or prompt rows, of a launch
    wide: int  # sequences of a launch of the wide kernel; 0: there is none
    blocks: int  # resident per multiprocessor

    @property
    def defines(self) -> tuple[str, ...]:
        """The compiler's flags for csrc/frame/dims.cuh. CUDA keeps 1 KB of a block's shared memory for itself."""
        sizes = {"COLUMNS": self.columns, "WIDE_COLUMNS": self.wide, "BLOCKS_PER_SM": self.blocks}
        sizes["SHARED_KB"] = self.shared_kb // self.blocks - 1
        return tuple(f"-DQMK_{name}={size}" for name, size in sizes.items())


TARGETS = {
    #               card, multiprocessors, KB, threads, columns, wide, blocks
    "80": Target("A100", 108, 164, 2048, 4, 0, 2),
    "86": Target("RTX 3090", 82, 100, 1536, 2, 0, 2),
    "89": Target("RTX 4090", 128, 100, 1536, 4, 0, 1),
    "90a": Target("H200", 132, 228, 2048, 8, 16, 1),
    "100a": Target("B200", 148, 228, 2048, 8, 16, 1),
    "120a": Target("RTX 5070 Ti", 70, 100, 1536, 2, 0, 2),
}
"""By architecture. Columns: partial sums of a column take 8 KB at 1.7B, and the weight ring needs what is left."""


def architecture(device: torch.device) -> str | None:
    """The key of TARGETS that fits a CUDA device."""
    return next((arch for arch in TARGETS if arch.rstrip("a") == capability(device)), None)


def capability(device: torch.device) -> str:
    """Of a CUDA device, as "90"."""
    return "{}{}".format(*torch.cuda.get_device_capability(device))
