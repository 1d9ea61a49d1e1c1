"""`make kernels`: compile the kernel for every target with nvcc alone, and tell whether its blocks fit the cards. It
also checks the syntax of the bindings. `--skip NAME ...` leaves targets out. Of `--syntax NAME ...` only the syntax is
checked, in a tenth of the time: all templates in use are made, and no code.

CUDA refuses a build with too many registers or too much shared memory only at its launch. ptxas's report, the output of
csrc/frame/footprint.cu and TARGETS reveal that without a GPU.
"""

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch.utils import cpp_extension

from qwen_megakernel.backend.build import FLAGS, SOURCES, source_folder
from qwen_megakernel.backend.card import find_nvcc, no_nvcc
from qwen_megakernel.backend.targets import TARGETS, Target
from qwen_megakernel.errors import BackendError

MODELS = {256: "demo", 1024: "0.6B", 2048: "1.7B"}  # models by the talker's width

REGISTERS = 65536
PARTITIONS = 4
"""Of a multiprocessor, on every target. A warp lies in one partition and takes registers in units of 256."""

OTHER_KERNELS = (
    *(name for name in SOURCES if name.endswith(".cu") and not name.startswith("frame/")),
    "frame/text_heads.cu",
    "frame/weights_alone.cu",
)
"""Sources of the prompt's and the vocoder's kernels, of word times', and of a benchmark's."""

BINDINGS = tuple(name for name in SOURCES if name.endswith(".cpp"))

COMPILERS = 2  # compilers that run at once. Each takes a core and about 1 GB.


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of one kernel."""

    registers: int
    spill_stores: int  # bytes a thread
    spill_loads: int
    static_shared: int  # bytes


@dataclass(frozen=True)
class Launch:
    """What csrc/frame/footprint.cu prints of one kernel."""

    threads: int
    dynamic_shared: int  # bytes
    ring: int  # of these


def parse_ptxas(report: str) -> dict[int, Compiled]:
    """Parse what `nvcc -Xptxas -v` writes. Keys are the talker's width in the kernel's mangled name. Raises
    BackendError: a figure is missing for a kernel."""
    found = {}
    for part in report.split("Compiling entry function")[1:]:
        width = re.search(r"StackDimsILi(\d+)E", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)  # absent where there is none
        if not (width and spills and registers):
            raise BackendError(f"expected a kernel's dims, registers and spills from ptxas, got: {part.strip()}")
        numbers = (registers[1], *spills.groups(), shared[1] if shared else 0)
        found[int(width[1])] = Compiled(*map(int, numbers))
    return found


def blocks_per_multiprocessor(target: Target, registers: int, threads: int, shared: int) -> tuple[int, str]:
    """How many blocks fit at once, and what limits them. shared: bytes of a block."""
    warps = -(-threads // 32)
    a_warp = -(-registers * 32 // 256) * 256
    limits = {
        "registers": REGISTERS // PARTITIONS // a_warp * PARTITIONS // warps,
        # CUDA keeps 1 KB a block for itself and hands out shared memory in units of 128 bytes.
        "shared memory": target.shared_kb * 1024 // (-(-shared // 128) * 128 + 1024),
    }
    least = min(limits, key=limits.__getitem__)
    return limits[least], least


def compile_frame(nvcc: str, target: Target, wide: bool) -> tuple[int, dict[int, Compiled], dict[int, Launch]]:
    """Compile a target's frame kernels for its columns, or for its wide ones. Return these columns, and what ptxas and
    footprint.cu say."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "footprint"
        flags = [*FLAGS, *target.defines, *(["-DQMK_WIDE"] if wide else []), f"-arch=sm_{target.arch}", "-Xptxas", "-v"]
        compiled = _compile([nvcc, *flags, "-o", program, source_folder() / "frame/footprint.cu"], target.name)
        printed = subprocess.run([program], capture_output=True, text=True, check=True)
    rows = [[int(word) for word in line.split()] for line in printed.stdout.splitlines()]
    launches = {width: Launch(*row) for width, *row in rows}
    return target.wide if wide else target.columns, parse_ptxas(compiled.stdout + compiled.stderr), launches


def compile_batch(nvcc: str, target: Target) -> None:
    """Compile a target's kernels for many columns, which check their own memory."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*FLAGS, *target.defines, f"-arch=sm_{target.arch}", "-c", "-o", f"{folder}/frame_batch.o"]
        _compile([nvcc, *flags, source_folder() / "frame/frame_batch.cu"], target.name)


def compile_other(nvcc: str, arch: str, name: str) -> None:
    """Compile one of `OTHER_KERNELS`."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*FLAGS, f"-arch=sm_{arch}", "-c", "-o", f"{folder}/other.o"]
        _compile([nvcc, *flags, source_folder() / name], f"sm_{arch}")


def check_syntax(nvcc: str, target: Target, name: str) -> None:
    """Check a source's syntax for a target."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*FLAGS, *target.defines, f"-arch=sm_{target.arch}", "-ptx", "-fdevice-syntax-only"]
        _compile([nvcc, *flags, "-o", f"{folder}/none.ptx", source_folder() / name], target.name)


def check_bindings(nvcc: str) -> None:
    """Check the syntax of `BINDINGS` with torch's headers. Otherwise mistakes appear only on a GPU machine. All are one
    file to the compiler, because these headers take most of the time."""
    with tempfile.TemporaryDirectory() as folder:
        # A torch without CUDA lacks this header, which holds only its build options.
        choices = Path(folder) / "c10/cuda/impl/cuda_cmake_macros.h"
        choices.parent.mkdir(parents=True)
        choices.touch()
        source = Path(folder) / "bindings.cpp"
        source.write_text("".join(f'#include "{source_folder() / name}"\n' for name in BINDINGS), encoding="utf-8")
        includes = [*cpp_extension.include_paths("cpu"), sysconfig.get_path("include"), folder]
        flags = ["-std=c++20", "-DTORCH_EXTENSION_NAME=checked", *(f"-isystem={path}" for path in includes)]
        told = ["-x", "c++", "-c", *flags, "-Xcompiler", "-fsyntax-only", "-o", f"{folder}/none.o"]
        _compile([nvcc, *told, source], "bindings")


def _compile(command: Sequence[str | Path], what: str) -> subprocess.CompletedProcess[str]:
    """Raise the compiler's message as a BackendError."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BackendError(f"{what}: {' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done


def judge(
    target: Target, columns: int, kernels: Mapping[int, Compiled], launches: Mapping[int, Launch]
) -> tuple[list[Sequence[object]], list[str]]:
    """Rows of the table, and a sentence for every kernel that does not fit the target."""
    rows: list[Sequence[object]] = []
    failures = []
    if not kernels.keys() == launches.keys() == MODELS.keys():
        wanted = f"kernels for talkers of width {', '.join(map(str, MODELS))}"
        return [], [f"{target.name}: expected {wanted}, got {sorted(kernels)} compiled and {sorted(launches)} launched"]
    for width, model in MODELS.items():
        kernel, launch = kernels[width], launches[width]
        shared = kernel.static_shared + launch.dynamic_shared
        blocks, limit = blocks_per_multiprocessor(target, kernel.registers, launch.threads, shared)
        card = f"{target.card} ({target.multiprocessors})"
        spilt = f"{kernel.spill_stores}/{kernel.spill_loads}"
        rows.append([target.name, card, model, columns, launch.threads, kernel.registers, spilt, shared, launch.ring])
        if blocks < 1:
            failures.append(f"{target.name}, {model}: no block fits a multiprocessor; not enough {limit}")
        if target.multiprocessors < target.blocks:
            failures.append(f"{target.name}: {target.card} has {target.multiprocessors} multiprocessors")
    return rows, failures


HEAD = ["target", "card (multiprocessors)", "model", "columns", "threads", "registers", "spilt B", "shared B", "ring B"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile the kernel for every target. Does it fit the cards?")
    parser.add_argument("--skip", nargs="+", choices=TARGETS, default=(), metavar="NAME", help="targets to leave out")
    parser.add_argument(
        "--syntax", nargs="+", choices=TARGETS, default=(), metavar="NAME", help="check the syntax only"
    )
    args = parser.parse_args(arguments)
    targets = [target for name, target in TARGETS.items() if name not in (*args.skip, *args.syntax)]
    try:
        nvcc = find_nvcc()
        if nvcc is None:
            raise BackendError(no_nvcc())
        with ThreadPoolExecutor(COMPILERS) as pool:
            # The longest first. No compiler is left alone with a long one at the end.
            bindings = pool.submit(check_bindings, nvcc)
            kinds = [(target, wide) for target in targets for wide in (False, True) if target.wide or not wide]
            frames = [(target, pool.submit(compile_frame, nvcc, target, wide)) for target, wide in kinds]
            others = [pool.submit(compile_batch, nvcc, t) for t in targets if t.batch]
            archs = dict.fromkeys(t.arch for t in targets)
            others += [pool.submit(compile_other, nvcc, arch, name) for arch in archs for name in OTHER_KERNELS]
            sources = ("frame/footprint.cu", *OTHER_KERNELS)
            others += [pool.submit(check_syntax, nvcc, TARGETS[t], name) for t in args.syntax for name in sources]
            kernels = [(target, frame.result()) for target, frame in frames]
            for other in (bindings, *others):
                other.result()
    except BackendError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    table: list[Sequence[object]] = [HEAD]
    failures = []
    for target, kernel in kernels:
        rows, wrong = judge(target, *kernel)
        table += rows
        failures += wrong
    widths = [max(len(str(cell)) for cell in column) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(f"{cell!s:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
