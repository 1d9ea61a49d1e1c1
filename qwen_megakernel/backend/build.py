"""JIT of the kernel through torch.utils.cpp_extension: once per source, architecture and flags, then cached."""

import ctypes
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from qwen_megakernel.checkpoint.fp8 import PARTS
from qwen_megakernel.errors import BackendError

log = logging.getLogger(__name__)

BLOCKS = 128
"""Of a launch (csrc/dims.cuh). They wait for each other, so all must be resident at once."""

SOURCES = (
    "frame.cu",
    "frame_wide.cu",
    "text.cu",
    "prefill.cu",
    "vocoder.cu",
    "vocoder_layers.cu",
    "bindings.cpp",
    "vocoder_bindings.cpp",
)
FLAGS = ("-O3", "-std=c++20", "--expt-relaxed-constexpr")


@dataclass(frozen=True)
class Target:
    """An architecture that the kernel is compiled for, and the smallest card named for it."""

    card: str
    multiprocessors: int
    shared_kb: int  # of a multiprocessor
    threads: int  # that a multiprocessor can hold
    columns: int  # streams, or prompt rows, of a launch
    wide: int  # streams of a launch of the wide kernel; 0: there is none
    blocks: int  # resident per multiprocessor

    @property
    def defines(self) -> tuple[str, ...]:
        """What csrc/dims.cuh wants to know. CUDA keeps 1 KB of a block's shared memory for itself."""
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

RUN_ON = ("90a",)
"""Architectures on which the kernel was ever run; elsewhere `backend="auto"` leaves it alone."""


def architecture(device: torch.device) -> str | None:
    """The key of TARGETS that fits a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    return next((arch for arch in TARGETS if arch.rstrip("a") == f"{major}{minor}"), None)


def source_folder() -> Path:
    """csrc beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parents[1]
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / SOURCES[0]).is_file():
            return folder
    raise BackendError(f"the kernel's sources are missing: no csrc/{SOURCES[0]} in or beside {package}")


# ---------------------------------------------------------------- what keeps it from being built


def why_no_build(device: torch.device) -> str | None:
    """What keeps the kernel from being compiled for a CUDA device, and what to do; None if nothing does."""
    properties = torch.cuda.get_device_properties(device)
    arch = architecture(device)
    if arch is None:
        return f"it is compiled for sm_{', sm_'.join(TARGETS)}; this {properties.name} is sm_{_capability(device)}"
    resident = properties.multi_processor_count * TARGETS[arch].blocks
    if resident < BLOCKS:
        return (
            f"its {BLOCKS} blocks must be resident at once, and this {properties.name} holds {resident} "
            f"({properties.multi_processor_count} multiprocessors, {TARGETS[arch].blocks} each); use a larger GPU"
        )
    nvcc = find_nvcc()
    if nvcc is None:
        return NO_NVCC
    version = nvcc_version(nvcc)
    if version is None:
        return f"`{nvcc} --version` names no release; set CUDA_HOME to a CUDA toolkit"
    if find_ninja() is None:
        return "ninja was not found on PATH or beside this Python; pip install ninja"
    return why_driver_too_old(version, "nvcc", "or set CUDA_HOME to an older toolkit")


def why_untried(device: torch.device) -> str | None:
    """Why `backend="auto"` leaves a device alone that the kernel can be compiled for."""
    if architecture(device) in RUN_ON:
        return None
    return f"it has only been run on Hopper, this GPU is sm_{_capability(device)}; backend='megakernel' tries it"


def why_no_gpu() -> str:
    """Why torch sees no CUDA GPU, and what to do."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a build with it"
    if driver_version() is None:
        return "there is no NVIDIA driver; install one"
    too_old = why_driver_too_old(
        _version(torch.version.cuda), f"torch {torch.__version__}", "or install an older torch"
    )
    return too_old or "the driver shows it none; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def why_driver_too_old(needed: tuple[int, int], by: str, instead: str) -> str | None:
    """A driver runs what toolkits up to its own major version have built."""
    driver = driver_version()
    if driver is None or driver[0] >= needed[0]:
        return None
    return (
        f"the NVIDIA driver is too old: it runs CUDA {driver[0]}.{driver[1]}, {by} is of CUDA {needed[0]}.{needed[1]}; "
        f"update the driver {instead}"
    )


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the installed driver runs; asked of the driver, torch does not tell before it has failed."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


NO_NVCC = "nvcc was not found in CUDA_HOME, on PATH or in /usr/local/cuda; install the CUDA toolkit or set CUDA_HOME"


def find_nvcc() -> str | None:
    """Where torch.utils.cpp_extension looks for it, which a CPU build of torch would not tell."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=Path(home) / "bin")
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def find_ninja() -> str | None:
    """On PATH, or beside Python: pip puts it there, and PATH does not lead there where nobody activated the
    environment."""
    return shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))


@functools.cache
def nvcc_version(nvcc: str) -> tuple[int, int] | None:
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    release = re.search(r"release (\d+\.\d+)", said.stdout)
    return _version(release[1]) if release else None


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _capability(device: torch.device) -> str:
    return "{}{}".format(*torch.cuda.get_device_capability(device))


# ---------------------------------------------------------------- building it


def cache_folder(arch: str, fp8: Collection[str] = ()) -> Path:
    """Of a build for an architecture. Builds whose sources, flags, torch or Python differ have folders of their own."""
    from torch.utils import cpp_extension

    digest = hashlib.sha256(" ".join((*FLAGS, *_defines(arch, fp8), torch.__version__, sys.version)).encode())
    for path in sorted(source_folder().iterdir()):
        if path.suffix in {".cu", ".cuh", ".h", ".cpp"}:
            digest.update(path.name.encode() + path.read_bytes())
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root) / f"qwen_megakernel_sm{arch}_{digest.hexdigest()[:12]}"


def _defines(arch: str, fp8: Collection[str]) -> tuple[str, ...]:
    """What csrc/dims.cuh wants to know."""
    bits = sum(1 << PARTS.index(part) for part in fp8)
    return TARGETS[arch].defines + ((f"-DQMK_FP8={bits}",) if bits else ())


def load_extension(device: torch.device, fp8: Collection[str] = ()) -> ModuleType:
    """Compile (once; under a minute beside an H200) and load the kernel for a GPU of this machine.

    Args:
        fp8: parts (fp8.PARTS) whose weights are E4M3. Every choice of them is a build of its own.

    Raises:
        BackendError: what keeps it from being compiled, or the compiler's own words.
    """
    return _loaded(device, frozenset(fp8))


@functools.cache
def _loaded(device: torch.device, fp8: frozenset[str]) -> ModuleType:
    from torch.utils import cpp_extension

    obstacle = why_no_build(device)
    if obstacle:
        raise BackendError(f"the kernel cannot be compiled here: {obstacle}")
    arch = architecture(device)
    folder = cache_folder(arch, fp8)
    if (folder / "lock").exists():  # left behind by a build that was killed, it would be waited for without end
        log.info("waiting for another build in %s; if there is none, delete %s", folder, folder / "lock")
    elif not (folder / f"{folder.name}.so").exists():
        log.info("building the kernel for sm_%s in %s (once, under a minute)", arch, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _load(cpp_extension, folder, arch, _defines(arch, fp8))
    except (RuntimeError, OSError) as error:
        raise BackendError(f"the kernel could not be compiled in {folder}: {error}") from error


def _load(cpp_extension: ModuleType, folder: Path, arch: str, defines: tuple[str, ...]) -> ModuleType:
    start = time.monotonic()
    number, suffix = arch.rstrip("a"), "a" if arch.endswith("a") else ""
    told = {"TORCH_CUDA_ARCH_LIST": f"{number[:-1]}.{number[-1]}{suffix}"}  # "90a" -> "9.0a"
    told["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(find_ninja()).parent)])
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        module = cpp_extension.load(
            folder.name,
            [str(source_folder() / s) for s in SOURCES],
            extra_cflags=["-O2", "-std=c++20", *defines],
            extra_cuda_cflags=[*FLAGS, *defines],
            build_directory=str(folder),
        )
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    log.info("kernel ready after %.1f s", time.monotonic() - start)
    return module
