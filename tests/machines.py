"""Machines that a test pretends to run on."""

from types import SimpleNamespace

import pytest
import torch

from qwen_check import doctor
from qwen_megakernel.backend import build, card, megakernel


def pretend(
    patch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    multiprocessors: int,
    name: str,
    nvcc: tuple[int, int] | None = (13, 0),
    driver: tuple[int, int] | None = (13, 0),
    ninja: bool = True,
    free_gib: float = 100.0,
) -> None:
    """What a machine with one GPU says of itself."""
    properties = SimpleNamespace(name=name, multi_processor_count=multiprocessors)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    patch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    for module in (megakernel, doctor):
        patch.setattr(module, "free_memory", lambda _device: int(free_gib * 2**30))
    for module in (card, build):
        patch.setattr(module, "find_nvcc", lambda: "nvcc" if nvcc else None)
        patch.setattr(module, "pip_toolkit", lambda: None)
        patch.setattr(module, "find_ninja", lambda: "/tools/ninja" if ninja else None)
    patch.setattr(card, "nvcc_version", lambda _nvcc: nvcc)
    patch.setattr(card, "driver_version", lambda: driver)
