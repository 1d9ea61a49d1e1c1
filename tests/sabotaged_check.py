"""The self-check's process with a kernel that is made wrong on purpose: `python sabotaged_check.py KIND DEVICE SIZE
WEIGHTS`. tests/test_self_check.py runs it on a GPU."""

import os
import sys

import torch

from qwen_check import self_check
from qwen_megakernel.backend import megakernel
from qwen_megakernel.backend.megakernel import MegakernelFrameDecoder as Kernel


def one_weight() -> type[Kernel]:
    """The top bit of a weight's exponent is flipped: of the last weight of block 0 that is not padding, which is the
    last layer's down projection."""

    class Wrong(Kernel):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            row = self.buffers["talker.ribbon"][0]
            last = int(row.view(torch.bfloat16).nonzero().max())
            row[2 * last + 1] ^= 0x40

    return Wrong


def race() -> type[Kernel]:
    """For three launches some weights have other signs, as if somebody wrote into them meanwhile."""

    class Wrong(Kernel):
        launches = 0

        def launch(self, slots) -> None:
            self.launches += 1
            if 200 <= self.launches < 203:
                self._turn()
            super().launch(slots)
            if 200 <= self.launches < 203:
                self._turn()

        def _turn(self) -> None:
            self.buffers["talker.ribbon"][:, 1:4096:2] ^= 0x80

    return Wrong


def lost_packets() -> type[Kernel]:
    """Somebody clears what the blocks tell each other, so that a wait inside the kernel never ends."""
    megakernel.SPIN_LIMIT = 1

    class Wrong(Kernel):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self._beside = torch.cuda.Stream()

        def launch(self, slots) -> None:
            super().launch(slots)
            with torch.cuda.stream(self._beside):
                for _ in range(50):
                    self.buffers["x.qkv"].zero_()

    return Wrong


def hang() -> type[Kernel]:
    """A kernel of PyTorch's that spins for hours stands before a launch."""

    class Wrong(Kernel):
        def launch(self, slots) -> None:
            torch.cuda._sleep(2**44)
            super().launch(slots)

    return Wrong


def illegal_access() -> type[Kernel]:
    """The page table points terabytes behind the pages, where nothing is mapped."""

    class Wrong(Kernel):
        def launch(self, slots) -> None:
            self._page_tables.fill_(2**31 - 1)
            super().launch(slots)

    return Wrong


def no_sabotage() -> type[Kernel]:
    return Kernel


if __name__ == "__main__":
    self_check.MegakernelFrameDecoder = globals()[sys.argv[1]]()
    self_check.main(*sys.argv[2:])
    os._exit(0)
