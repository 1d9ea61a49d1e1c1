"""JIT of the kernel through torch.utils.cpp_extension: once per source, architecture and flags, then cached."""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType

import torch

from qwen_megakernel.backend.sizes import check_sizes
from qwen_megakernel.backend.targets import ARCHITECTURES, BLOCKS, Target, architecture, capability, target_of
from qwen_megakernel.choices import PARTS
from qwen_megakernel.errors import BackendError
from qwen_megakernel.files import check_own, own_folder

log = logging.getLogger(__name__)

SOURCES = (
    "frame/frame.cu",
    "frame/frame_wide.cu",
    "prompt/text.cu",
    "prompt/prefill.cu",
    "vocoder/convolutions.cu",
    "vocoder/rows.cu",
    "vocoder/transformer.cu",
    "frame/frame_bindings.cpp",
    "prompt/prompt_bindings.cpp",
    "vocoder/vocoder_bindings.cpp",
    "bindings.cpp",
)
"""Paths in csrc. torch names objects by stem, so no two files may share a stem."""

FLAGS = ("-O3", "-std=c++20", "--expt-relaxed-constexpr")
"""nvcc's own."""

DEFINES: tuple[str, ...] = ()
"""Macros for both compilers besides those of target and weights. Benchmarks build with `STAGE_CLOCK`."""

STAGE_CLOCK = "-DQMK_STAGE_CLOCK"
"""Adds the clock that measures each stage of the frame kernel (csrc/frame/dims.cuh)."""


def source_folder() -> Path:
    """csrc beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parents[1]
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / SOURCES[0]).is_file():
            return folder
    raise BackendError(
        f"the kernel's sources are missing: no csrc/{SOURCES[0]} in or beside {package}; install the package again"
    )


# ---------------------------------------------------------------- why it cannot be built


def why_no_build(device: torch.device) -> str | None:
    """Why the kernel cannot be compiled for a CUDA device, and what to do; None: it can."""
    if torch.version.hip:
        return f"it needs an NVIDIA GPU, and torch {torch.__version__} is built for ROCm"
    properties = torch.cuda.get_device_properties(device)
    arch = architecture(device)
    if arch is None:
        return f"it is compiled for sm_{', sm_'.join(ARCHITECTURES)}; this {properties.name} is sm_{capability(device)}"
    if target_of(device) is None:
        return (
            f"it needs at least {min(BLOCKS)} multiprocessors, and this {properties.name} has "
            f"{properties.multi_processor_count}; use a larger GPU"
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
            f"{nvcc} is too old: it is of CUDA {_told(version)}, and this {properties.name} needs {_told(least)} or "
            f"newer; {_how_to_get_nvcc(least)}"
        )
    if find_ninja() is None:
        return "ninja was not found on PATH or beside this Python; pip install ninja"
    driver = driver_version()
    if driver is not None and (12, 0) <= driver < _LEAST_DRIVER:
        told = f"it runs CUDA {_told(driver)}, not {_told(_LEAST_DRIVER)}"
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


# ---------------------------------------------------------------- building it


def cache_root() -> Path:
    """The folder of all builds."""
    from torch.utils import cpp_extension

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())


def cache_folder(target: Target, fp8: Collection[str] = ()) -> Path:
    """The folder of one target's build. Builds with other sources, flags, torch or Python have other folders."""
    told = (*SOURCES, *FLAGS, *_defines(target, fp8), torch.__version__, sys.version)
    digest = hashlib.sha256(" ".join(told).encode())
    sources = source_folder()
    for path in sorted(sources.rglob("*")):
        if path.suffix in {".cu", ".cuh", ".h", ".cpp"}:
            digest.update(path.relative_to(sources).as_posix().encode() + path.read_bytes())
    return cache_root() / f"qwen_megakernel_{target.name}_{digest.hexdigest()[:12]}"


def _defines(target: Target, fp8: Collection[str]) -> tuple[str, ...]:
    """Both compilers' flags for csrc/frame/dims.cuh."""
    bits = sum(1 << PARTS.index(part) for part in fp8)
    return (*target.defines, *((f"-DQMK_FP8={bits}",) if bits else ()), *DEFINES)


def load_extension(device: torch.device, fp8: Collection[str] = ()) -> ModuleType:
    """Compile (once; under a minute beside an H200) and load the kernel for a GPU of this machine. `fp8`: parts
    (fp8.PARTS) whose weights are E4M3. Each combination has its own build. Raises BackendError: it cannot be compiled
    (with the compiler's message), or its sizes differ from Python's."""
    return _loaded(device, frozenset(fp8))


@functools.cache
def _loaded(device: torch.device, fp8: frozenset[str]) -> ModuleType:
    obstacle = why_no_build(device)
    target = target_of(device)
    if obstacle or target is None:
        raise BackendError(f"the kernel cannot be compiled here: {obstacle}")
    folder = cache_folder(target, fp8)
    library = folder / f"{folder.name}.so"
    start = time.monotonic()
    try:
        with own_folder(folder) as own, alone(folder / "lock", f"builds the kernel in {folder}") as locked:
            for left in own.glob("building-*") if locked else ():  # by a build that was killed
                shutil.rmtree(left, ignore_errors=True)
            kept = own / library.name
            if kept.exists():
                check_own(kept, library)
                module = _imported(kept)
                module.__file__ = str(library)
            else:
                module = _built(library, target, fp8)
    except (RuntimeError, OSError, ImportError) as error:
        raise BackendError(f"the kernel could not be compiled in {folder}: {error}") from error
    log.info("kernel ready after %.1f s", time.monotonic() - start)
    check_sizes(module, target, fp8)
    return module


@contextlib.contextmanager
def alone(path: Path, does: str, patience_s: float = math.inf) -> Iterator[bool]:
    """Let one process at a time in, by a lock on a file; the log says what another one `does`. The system frees the
    lock of a process that dies, so nobody has to delete it. Yields whether there is a lock: there is none if the folder
    cannot be written or locked, or is not this user's own. Raises TimeoutError: another process held it for longer than
    `patience_s` seconds."""
    import fcntl  # Linux only; no other system gets here

    try:
        with own_folder(path.parent) as own:
            file = (own / path.name).open("a")
    except OSError:
        yield False
        return
    with file:
        end, told, locked = time.monotonic() + patience_s, False, False
        while not locked:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise TimeoutError(f"another process has held {path} for {patience_s:.0f} s") from None
                if not told:
                    log.info("waiting for another process that %s", does)
                    told = True
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        yield locked


def _built(library: Path, target: Target, fp8: Collection[str]) -> ModuleType:
    """Build in a temporary folder, and move the file to its place when it is complete."""
    from torch.utils import cpp_extension

    log.info("building the kernel for %s in %s (once, under a minute)", target.name, library.parent)
    nvcc = find_nvcc()
    ninja = find_ninja()
    assert nvcc and ninja, "why_no_build() has looked"
    number = target.arch.rstrip("a")
    told = {
        "TORCH_CUDA_ARCH_LIST": f"{number[:-1]}.{number[-1]}{target.arch.removeprefix(number)}",  # "90a" -> "9.0a"
        "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(ninja).parent)]),
    }
    before = {name: os.environ.get(name) for name in told}
    defines = _defines(target, fp8)
    linker = []
    with tempfile.TemporaryDirectory(prefix="building-", dir=library.parent) as folder:
        if (toolkit := pip_toolkit()) and Path(nvcc).is_relative_to(toolkit):
            cpp_extension.CUDA_HOME = str(toolkit)
            # The linker looks for libcudart.so, and pip's package has only libcudart.so.13.
            Path(folder, "libcudart.so").symlink_to(next((toolkit / "lib").glob("libcudart.so.*")))
            linker = [f"-L{folder}"]
        os.environ.update(told)
        try:
            module: ModuleType = cpp_extension.load(
                library.stem,
                [str(source_folder() / s) for s in SOURCES],
                extra_cflags=["-O2", "-std=c++20", *defines],
                extra_cuda_cflags=[*FLAGS, *defines],
                extra_ldflags=linker,
                build_directory=folder,
            )
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        built = Path(folder, library.name)
        if built.exists():  # torch gives the file of a process's second attempt another name, which others cannot load
            built.chmod(0o700)  # whatever the umask is: see `check_own`
            built.replace(library)
            module.__file__ = str(library)
    return module


def _imported(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(library.stem, library)
    assert spec and spec.loader, "the name ends in .so"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
