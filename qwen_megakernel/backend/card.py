"""A GPU as the kernel sees it, and the tools that the kernel is compiled with: driver, nvcc and ninja."""

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qwen_megakernel.backend.targets import ARCHITECTURES, BLOCKS, Target, architecture, target_of


@dataclass(frozen=True)
class Card:
    """What a CUDA device says of itself, asked once."""

    name: str  # such as "NVIDIA H200"
    capability: str  # its compute capability, such as "90"
    multiprocessors: int  # a slice of a card (MIG) has fewer
    driver: tuple[int, int] | None  # the newest CUDA that its driver runs; None: no driver tells
    target: Target | None  # what the kernel is compiled for; None: the card is too old, too new or too small
    obstacle: str | None = None  # why the kernel cannot be compiled for it, and what to do; None: it can

    @classmethod
    def of(cls, device: torch.device) -> "Card":
        """The card of a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        name, count = properties.name, properties.multi_processor_count
        capability = "{}{}".format(*torch.cuda.get_device_capability(device))
        card = cls(name, capability, count, driver_version(), target_of(capability, count))
        return replace(card, obstacle=card._why_no_build())

    def _why_no_build(self) -> str | None:
        if torch.version.hip:
            return f"it needs an NVIDIA GPU, and torch {torch.__version__} is built for ROCm"
        arch = architecture(self.capability)
        if arch is None:
            return f"it is compiled for sm_{', sm_'.join(ARCHITECTURES)}; this {self.name} is sm_{self.capability}"
        if self.target is None:
            return (
                f"it needs at least {min(BLOCKS)} multiprocessors, and this {self.name} has "
                f"{self.multiprocessors}; use a larger GPU"
            )
        nvcc = find_nvcc()
        if nvcc is None:
            return no_nvcc()
        version = nvcc_version(nvcc)
        if version is None:
            return f"`{nvcc} --version` printed no release; set CUDA_HOME to a CUDA toolkit"
        least = _LEAST_NVCC.get(arch, _LEAST_OF_SOURCES)
        if version < least:
            return (
                f"{nvcc} is too old: it is of CUDA {_told(version)}, and this {self.name} needs {_told(least)} or "
                f"newer; {_how_to_get_nvcc(least)}"
            )
        if find_ninja() is None:
            return "ninja was not found on PATH or beside this Python; pip install ninja"
        if self.driver is not None and (12, 0) <= self.driver < _LEAST_DRIVER:
            told = f"it runs CUDA {_told(self.driver)}, not {_told(_LEAST_DRIVER)}"
            return f"the NVIDIA driver is too old: {told}; update the driver"
        return why_driver_too_old(version, "nvcc", "or set CUDA_HOME to an older toolkit")


def why_no_gpu() -> str:
    """Why torch sees no CUDA GPU, and what to do."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a build with it"
    if driver_version() is None:
        return "there is no NVIDIA driver; install one"
    too_old = why_driver_too_old(
        _version(torch.version.cuda), f"torch {torch.__version__}", "or install an older torch"
    )
    return too_old or "the driver shows no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def why_driver_too_old(needed: tuple[int, int], by: str, instead: str) -> str | None:
    """Why the driver is too old; None: it is not. A driver runs builds of toolkits up to its own major version."""
    driver = driver_version()
    if driver is None or driver[0] >= needed[0]:
        return None
    return (
        f"the NVIDIA driver is too old: it runs CUDA {_told(driver)}, but {by} is for CUDA {_told(needed)}; "
        f"update the driver {instead}"
    )


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the installed driver runs. The driver is asked, because torch tells only after it failed."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


_LEAST_DRIVER = (12, 1)  # older ones take 4 KB of a kernel's parameters, and `Push` in csrc/vocoder/vocoder.h has 8

_LEAST_OF_SOURCES = (12, 3)
"""The oldest nvcc for csrc: 128-bit loads and stores in ptx.cuh need PTX 8.3, and ptxas took all of csrc as that."""

_LEAST_NVCC = {"100a": (12, 8), "120a": (12, 8), "103a": (12, 9), "121a": (12, 9)}
"""The oldest nvcc that knows an architecture, where that is newer (PTX 8.6 to 8.8)."""

_PIP_COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-runtime")
"""nvcc, the code generator behind it, headers, and the runtime with its own, which a torch for CUDA has brought. The
runtime of another minor version has other headers than nvcc: `__nv_ldg_ui4_impl` was unresolved with 13.2 and 13.5."""


def no_nvcc() -> str:
    """A sentence that says nvcc is missing, and what to do."""
    home = _cuda_home()
    where = f"CUDA_HOME={home}" if home else "PATH, /usr/local/cuda or pip's packages"
    return f"nvcc was not found in {where}; {_how_to_get_nvcc()}"


def _how_to_get_nvcc(least: tuple[int, int] = (0, 0)) -> str:
    """What to do for an nvcc of the CUDA that torch was built for, or of `least`, whichever is newer."""
    if toolkit := pip_toolkit():
        return f"set CUDA_HOME={toolkit}"  # it was hidden, else it would have been found
    release = max(_version(torch.version.cuda or "13.0"), least)
    if release < (13, 0):  # nvidia-cuda-nvcc-cu12 holds ptxas, but no nvcc
        return f"install the CUDA {_told(release)} toolkit and set CUDA_HOME; pip has nvcc from CUDA 13 on"
    packages = " ".join(f"'{package}=={_told(release)}.*'" for package in _PIP_COMPILER)
    return f"pip install {packages}, or install the CUDA toolkit and set CUDA_HOME"


def find_nvcc() -> str | None:
    """Look where torch.utils.cpp_extension looks, which a CPU build of torch does not tell; then in pip's packages."""
    if home := _cuda_home():
        return shutil.which("nvcc", path=Path(home) / "bin")
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None and (toolkit := pip_toolkit()):
        found = shutil.which("nvcc", path=toolkit / "bin")
    return found


def _cuda_home() -> str | None:
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")


def pip_toolkit() -> Path | None:
    """The folder that holds CUDA's compiler where pip's packages brought one (`nvidia/cu13`)."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = map(Path, nvidia.submodule_search_locations or ()) if nvidia else ()
    return next((nvcc.parents[1] for folder in folders for nvcc in sorted(folder.glob("cu*/bin/nvcc"))), None)


def find_ninja() -> str | None:
    """Look on PATH, then beside Python, where pip puts it: PATH lacks that folder unless the environment is active."""
    return shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))


@functools.cache
def nvcc_version(nvcc: str) -> tuple[int, int] | None:
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    release = re.search(r"release (\d+\.\d+)", said.stdout)
    return _version(release[1]) if release else None


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _told(version: tuple[int, int]) -> str:
    return "{}.{}".format(*version)
