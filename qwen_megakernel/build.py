"""JIT of the kernel through torch.utils.cpp_extension: compiled once per source and architecture, then cached."""

import functools
import hashlib
import logging
import os
import time
from pathlib import Path
from types import ModuleType

import torch

from qwen_megakernel.errors import BackendError

log = logging.getLogger(__name__)

SOURCES = ("frame.cu", "bindings.cpp")
FLAGS = ("-O3", "-std=c++20", "--expt-relaxed-constexpr")


def source_folder() -> Path:
    """csrc beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / SOURCES[0]).is_file():
            return folder
    raise BackendError(f"the kernel's sources are missing: no csrc/{SOURCES[0]} in or beside {package}")


def why_no_build(device: torch.device) -> str | None:
    """What keeps the kernel from being compiled for a CUDA device; None if nothing does."""
    from torch.utils import cpp_extension

    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"it is written for Hopper (compute capability 9.0), this GPU has {major}.{minor}"
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    if multiprocessors < 128:
        return f"its 128 blocks must be resident at once, this GPU has {multiprocessors} multiprocessors"
    if cpp_extension.CUDA_HOME is None:
        return "nvcc was not found; install the CUDA toolkit or set CUDA_HOME"
    return None


@functools.cache
def load_extension(device: torch.device) -> ModuleType:
    """Compile (once; 17 s beside an H200) and load the kernel for this machine's GPU.

    Raises:
        BackendError: another GPU, no compiler, or the compiler's own words.
    """
    from torch.utils import cpp_extension

    obstacle = why_no_build(device)
    if obstacle:
        raise BackendError(f"the kernel cannot be compiled here: {obstacle}")
    major, minor = torch.cuda.get_device_capability(device)
    folder = source_folder()
    files = sorted(p for p in folder.iterdir() if p.suffix in {".cu", ".cuh", ".h", ".cpp"})
    digest = hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in files) + " ".join(FLAGS).encode())
    name = f"qwen_megakernel_{major}{minor}_{digest.hexdigest()[:12]}"
    arch = os.environ.get("TORCH_CUDA_ARCH_LIST")
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}a"
    start = time.monotonic()
    log.info("compiling the kernel (once, under a minute) as %s", name)
    try:
        module = cpp_extension.load(
            name, [str(folder / s) for s in SOURCES], extra_cflags=["-O2", "-std=c++20"], extra_cuda_cflags=list(FLAGS)
        )
    except (RuntimeError, OSError) as error:
        raise BackendError(f"the kernel could not be compiled: {error}") from error
    finally:
        if arch is None:
            del os.environ["TORCH_CUDA_ARCH_LIST"]
        else:
            os.environ["TORCH_CUDA_ARCH_LIST"] = arch
    log.info("kernel ready after %.1f s", time.monotonic() - start)
    return module
