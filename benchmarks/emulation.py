"""Another target's path of the kernel on a Hopper GPU, for `make emulate` and tests (EMULATE=sm_86x64 pytest -m gpu).

It compiles the target's defines and PTX for sm_90: the same branches, ring, columns and blocks as on the target's
cards. Their machine code, caches, memory and speed are not tested.
"""

import contextlib
from collections.abc import Iterator

import torch

from qwen_megakernel.backend import build, card, vocoder_graphs, vocoder_weights
from qwen_megakernel.backend.targets import TARGETS, Target

PTX = {"80": "compute_80", "86": "compute_86", "89": "compute_89", "120a": "compute_90", "121a": "compute_90"}
"""PTX that stands in for an architecture's own code. Other architectures share sm_90a's path."""

EMULATED = tuple(name for name, target in TARGETS.items() if target.arch in PTX or target.arch == "90a")


def pretend(name: str) -> Target:
    """Make this process build and run the path of a target of EMULATED from now on."""
    target = TARGETS[name]
    card.target_of = lambda *_: target
    if target.arch in PTX:
        build.FLAGS = (*build.FLAGS, f"-gencode=arch={PTX[target.arch]},code=sm_90")
    for module in (vocoder_graphs, vocoder_weights):
        module.transformer_room = lambda _device: (target.multiprocessors, (target.shared_kb - 1) * 1024)
    return target


@contextlib.contextmanager
def confined(multiprocessors: int) -> Iterator[bool]:
    """Launches inside run on that many multiprocessors; False: driver or torch cannot confine them."""
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    if multiprocessors >= whole:
        yield True
        return
    try:
        from torch.cuda.green_contexts import GreenContext

        context = GreenContext.create(num_sms=multiprocessors, device_id=0)
        context.set_context()
    except (ImportError, RuntimeError):  # an older torch, or a driver without green contexts
        yield False
        return
    try:
        yield True
    finally:
        context.pop_context()
