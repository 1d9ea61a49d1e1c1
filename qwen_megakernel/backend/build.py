"""JIT of the kernel through torch.utils.cpp_extension: once per source, architecture and flags, then cached."""

import contextlib
import functools
import hashlib
import importlib.util
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from qwen_megakernel.backend.card import Card, find_ninja, find_nvcc, pip_toolkit
from qwen_megakernel.backend.sizes import check_sizes
from qwen_megakernel.backend.targets import Target
from qwen_megakernel.choices import PARTS
from qwen_megakernel.errors import BackendError
from qwen_megakernel.files import check_own, own_folder

log = logging.getLogger(__name__)

SOURCES = (
    "frame/frame.cu",
    "frame/frame_wide.cu",
    "frame/frame_batch.cu",
    "frame/text_heads.cu",
    "prompt/text.cu",
    "prompt/prefill.cu",
    "vocoder/convolutions.cu",
    "vocoder/rows.cu",
    "vocoder/transformer.cu",
    "vocoder/transformer_wide.cu",
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


@dataclass(frozen=True)
class Build:
    """Our kernels, compiled for a card and for a choice of weights."""

    card: Card
    target: Target  # what they are compiled for; the card has one
    fp8: frozenset[str]  # parts (fp8.PARTS) whose weights are E4M3; each combination has its own build
    folder: Path  # where the build is kept

    @classmethod
    def of(cls, card: Card, fp8: Collection[str] = ()) -> "Build":
        """Nothing is compiled yet. Raises BackendError: it cannot be compiled for this card, or its sources are
        missing."""
        if card.obstacle or card.target is None:
            raise BackendError(f"the kernel cannot be compiled here: {card.obstacle}")
        return cls(card, card.target, frozenset(fp8), cache_folder(card.target, fp8))

    def load(self) -> ModuleType:
        """Compile (once; under a minute beside an H200) and load the kernels. Raises BackendError: they cannot be
        compiled (with the compiler's message), or their sizes differ from Python's."""
        return _loaded(self)


def load_extension(device: torch.device, fp8: Collection[str] = ()) -> ModuleType:
    """The kernels for a CUDA device, where nothing has resolved their build yet. Raises BackendError: as `Build`."""
    return Build.of(Card.of(device), fp8).load()


@functools.cache
def _loaded(build: Build) -> ModuleType:
    folder, target, fp8 = build.folder, build.target, build.fp8
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
    assert nvcc and ninja, "Card.obstacle has looked"
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
