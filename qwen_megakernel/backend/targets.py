"""What the kernel is compiled for: an architecture and a number of blocks, and the settings of each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """An architecture and a number of blocks, and the smallest card that we know for them."""

    arch: str  # nvcc's name, such as "90a"
    blocks: int  # of a launch; one runs on each multiprocessor
    card: str
    multiprocessors: int  # of that card

    @property
    def name(self) -> str:
        """A name such as "sm_86x64"."""
        return f"sm_{self.arch}x{self.blocks}"

    @property
    def shared_kb(self) -> int:
        """Shared memory of a multiprocessor in KB."""
        return _SHARED_KB.get(self.arch, 100)

    @property
    def columns(self) -> int:
        """Sequences, or prompt rows, of a launch."""
        return _COLUMNS[self.shared_kb, self.blocks]

    @property
    def wide(self) -> int:
        """Sequences of a launch of the wide kernel; 0: there is none."""
        return 16 if self.blocks == 128 and self.shared_kb == 228 else 0

    @property
    def batch(self) -> int:
        """Sequences of a launch of the graphs for many; 0: there are none. Their products are Hopper's wgmma."""
        return 256 if self.wide and self.arch == "90a" else 0

    @property
    def defines(self) -> tuple[str, ...]:
        """The compiler's flags for csrc/frame/dims.cuh. CUDA keeps 1 KB of a block's shared memory for itself."""
        sizes = {"BLOCKS": self.blocks, "COLUMNS": self.columns, "WIDE_COLUMNS": self.wide}
        sizes |= {"BATCH_COLUMNS": self.batch}
        sizes |= {"SHARED_KB": self.shared_kb - 1, "PRODUCER_WARPS": 4 if self.arch in _MOVES_REGISTERS else 1}
        return tuple(f"-DQMK_{name}={size}" for name, size in sizes.items())


_SHARED_KB = {"80": 164, "90a": 228, "100a": 228, "103a": 228}
"""Shared memory of a multiprocessor by architecture; others have 100 KB."""

_COLUMNS = {(100, 128): 8, (100, 64): 4, (100, 32): 2, (164, 128): 8, (164, 64): 8, (164, 32): 4}
_COLUMNS |= {(228, 128): 8, (228, 64): 8, (228, 32): 4}
"""Columns by shared memory and blocks. For 1.7B, a block's partial sums take 7 KB a column with 128 blocks, 15 with 64
and 29 with 32. The weight ring needs the rest."""

_MOVES_REGISTERS = ("90a", "100a", "103a")
"""Architectures on which the producer warps can hand registers to the compute warps."""

BLOCKS = (128, 64, 32)  # blocks of a launch: the first number for which the card has enough multiprocessors

TARGETS = {
    target.name: target
    for target in (
        Target("80", 64, "A100", 108),
        Target("80", 32, "A30", 56),
        Target("86", 64, "RTX 3080", 68),
        Target("86", 32, "RTX 3060 Ti", 38),
        Target("89", 128, "RTX 4090", 128),
        Target("89", 64, "RTX 4070 Ti Super", 66),
        Target("89", 32, "RTX 4060 Ti", 34),
        Target("90a", 128, "H200", 132),
        Target("90a", 64, "H20", 78),
        Target("90a", 32, "H100, a MIG slice 2g.20gb", 32),
        Target("100a", 128, "B200", 148),
        Target("103a", 128, "B300", 148),
        Target("120a", 128, "RTX 5090", 170),
        Target("120a", 64, "RTX 5070 Ti", 70),
        Target("120a", 32, "RTX 5060 Ti", 36),
        Target("121a", 32, "GB10", 48),
    )
}
"""By name."""

ARCHITECTURES = tuple(dict.fromkeys(target.arch for target in TARGETS.values()))


def architecture(capability: str) -> str | None:
    """nvcc's name of the architecture of a compute capability, such as "90", if the kernel is compiled for it."""
    return next((arch for arch in ARCHITECTURES if arch.rstrip("a") == capability), None)


def target_of(capability: str, multiprocessors: int) -> Target | None:
    """What the kernel is compiled for on a card; None: too old, too new, or too few multiprocessors."""
    blocks = next((blocks for blocks in BLOCKS if blocks <= multiprocessors), None)
    arch = architecture(capability)
    if arch is None or blocks is None:
        return None
    # A slice of a large card has fewer multiprocessors than any card of its architecture.
    return TARGETS.get(f"sm_{arch}x{blocks}") or Target(arch, blocks, "such a card", blocks)
