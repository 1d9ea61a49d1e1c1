"""Building the kernel: targets and their flags, sizes, what keeps it from being built, `make kernels`."""

import dataclasses
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import compile_kernels as kernels
import pytest
import torch
from compile_kernels import MODELS, Compiled, Launch
from torch.utils import cpp_extension
from waiting import until

from qwen_megakernel import cli
from qwen_megakernel.backend import build, card, megakernel
from qwen_megakernel.backend.card import Card
from qwen_megakernel.backend.interfaces import LAUNCH_SLOTS
from qwen_megakernel.backend.megakernel import STAGES, MegakernelFrameDecoder
from qwen_megakernel.backend.select import select_device
from qwen_megakernel.backend.sizes import SIZES, built_for, check_sizes
from qwen_megakernel.backend.targets import TARGETS
from qwen_megakernel.backend.vocoder_recorder import GELU, NONE, SNAKE
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.choices import PARTS
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.errors import BackendError
from qwen_megakernel.trust import selection
from qwen_megakernel.trust.selection import Selection, resolve

GPU = torch.device("cuda")
H200 = ((9, 0), 132, "H200")
HOPPER = TARGETS["sm_90ax128"]
CSRC = build.source_folder()
ROOT = Path(__file__).parents[1]


def of(width: int) -> str:
    """A kernel's mangled name, but for its ends."""
    return f"frame_kernelINS_9ModelDimsINS_9StackDimsILi{width}ELi3072EEENS3_ILi1024ELi3072EEEEEv"


PTXAS = f"""ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{of(2048)}' for 'sm_90a'
ptxas info    : Function properties for {of(2048)}
    16 bytes stack frame, 20 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 96 registers, used 2 barriers, 16 bytes cumulative stack size, 1120 bytes cmem[0]
ptxas info    : Compiling entry function '{of(256)}' for 'sm_90a'
ptxas info    : Function properties for {of(256)}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 56 registers, used 2 barriers, 640 bytes smem
ptxas info    : Compile time = 510.435 ms
"""


# ---------------------------------------------------------------- targets


@pytest.mark.parametrize(
    "name, numbers", [("sm_86x64", (64, 4, 0, 0, 99, 1)), ("sm_90ax128", (128, 8, 16, 256, 227, 4))]
)
def test_a_targets_flags(name, numbers):
    names = ("BLOCKS", "COLUMNS", "WIDE_COLUMNS", "BATCH_COLUMNS", "SHARED_KB", "PRODUCER_WARPS")
    assert TARGETS[name].defines == tuple(f"-DQMK_{name}={n}" for name, n in zip(names, numbers, strict=True))


@pytest.mark.parametrize(
    "capability, multiprocessors, target",
    [
        ((8, 0), 108, "sm_80x64"),  # A100
        ((8, 0), 56, "sm_80x32"),  # A30
        ((8, 6), 82, "sm_86x64"),  # RTX 3090
        ((8, 6), 80, "sm_86x64"),  # A10G
        ((8, 6), 46, "sm_86x32"),  # RTX 3070
        ((8, 6), 28, None),  # RTX 3060
        ((8, 9), 128, "sm_89x128"),  # RTX 4090
        ((8, 9), 142, "sm_89x128"),  # L40S
        ((8, 9), 76, "sm_89x64"),  # RTX 4080
        ((8, 9), 58, "sm_89x32"),  # L4
        ((8, 9), 24, None),  # RTX 4060
        ((9, 0), 132, "sm_90ax128"),  # H100, H200
        ((9, 0), 114, "sm_90ax64"),  # H100 PCIe
        ((9, 0), 78, "sm_90ax64"),  # H20
        ((10, 0), 148, "sm_100ax128"),  # B200
        ((10, 3), 148, "sm_103ax128"),  # B300
        ((10, 0), 70, "sm_100ax64"),  # a slice of a B200
        ((12, 0), 170, "sm_120ax128"),  # RTX 5090
        ((12, 0), 84, "sm_120ax64"),  # RTX 5080
        ((12, 0), 48, "sm_120ax32"),  # RTX 5070
        ((12, 1), 48, "sm_121ax32"),  # GB10
        ((7, 5), 40, None),  # T4
        ((8, 7), 16, None),  # Orin
    ],
)
def test_the_number_of_blocks_follows_the_card(capability, multiprocessors, target, machine):
    machine(capability, multiprocessors, "a card")
    chosen = Card.of(GPU).target
    assert target == (chosen and chosen.name)
    assert chosen is None or (chosen.blocks <= multiprocessors and chosen.columns >= 2)


def test_what_the_table_hands_over_is_what_the_sources_read():
    dims = source("frame/dims.cuh")
    for target in TARGETS.values():
        for define in target.defines:
            name = define.removeprefix("-D").split("=")[0]
            assert len(re.findall(rf"\b{name}\b", dims)) > 1, name
        assert max(target.columns, target.wide) <= LAUNCH_SLOTS


def smallest(target) -> tuple:
    """A target's smallest card, as `machine` takes it."""
    number = target.arch.rstrip("a")
    return (int(number[:-1]), int(number[-1])), target.multiprocessors, target.card


@pytest.mark.parametrize("name", TARGETS)
def test_the_smallest_card_of_a_target_is_accepted(name, machine):
    machine(*smallest(TARGETS[name]))
    assert Card.of(GPU).obstacle is None


# ---------------------------------------------------------------- sources and sizes


def source(name: str) -> str:
    return (CSRC / name).read_text(encoding="utf-8")


def in_python(constant: str) -> str:
    """kMlpPacket -> MLP_PACKET"""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", constant.removeprefix("k")).upper()


def enumerators(header: str, name: str) -> list[str]:
    return re.findall(r"\bk[A-Z]\w*", re.search(rf"enum (?:class )?{name}\b[^{{]*{{(.*?)}}", source(header), re.S)[1])


def test_python_has_the_sizes_of_csrc():
    found = re.findall(r"^constexpr int (k\w+) = (\d+);", source("sizes.h"), re.M)
    assert len(found) == source("sizes.h").count("constexpr")
    assert {in_python(name): int(size) for name, size in found} == SIZES


def test_the_extension_exports_every_size():
    exported = re.findall(r'sizes\["(\w+)"\] = qmk::(\w+);', source("bindings.cpp"))
    assert all(name == in_python(constant) for name, constant in exported)
    assert sorted(name for name, _ in exported) == sorted(SIZES)


def test_python_has_the_dims_that_the_kernel_is_compiled_for():
    text = re.sub(r"\s+", " ", source("frame/dims.cuh"))
    published = re.search(r"using PublishedPredictor = (StackDims<.*?>);", text)[1]
    stack = r"StackDims<(\d+), (\d+), (\d+), (\d+), (\d+), kFp8(?:Talker|Predictor)>"
    models = re.findall(r"using Dims\w+ = ModelDims<(.*?)>;", text)
    found = {}
    for model in models:
        found_in = re.fullmatch(rf"{stack}, {stack}, (\d+), (\d+)", model.replace("PublishedPredictor", published))
        numbers = map(int, found_in.groups())
        hidden, mlp, _, heads, kv, small, small_mlp, layers, small_heads, small_kv, vocab, codes = numbers
        found[hidden] = (hidden, mlp, heads, kv, vocab), (small, small_mlp, small_heads, small_kv, layers, codes)
    assert len(models) == 3 and found == built_for(HOPPER, ())["DIMS"]


@pytest.mark.parametrize(
    ("part", "change", "fits"),
    [
        ("talker", {}, True),
        ("talker", {"intermediate_size": 700}, True),  # padded to 768
        ("talker", {"intermediate_size": 776}, False),
        ("talker", {"num_kv_heads": 1}, False),
        ("talker", {"hidden_size": 512}, False),
        ("talker", {"rms_norm_eps": 1e-5}, False),
        ("predictor", {"intermediate_size": 512}, True),
        ("predictor", {"num_layers": 1}, True),
        ("predictor", {"num_layers": 3}, False),
    ],
)
def test_models_that_the_kernel_is_compiled_for(part, change, fits):
    replace, config = dataclasses.replace, Checkpoint.open("demo").config
    talker, predictor = config.talker, config.talker.code_predictor
    if part == "talker":
        talker = replace(talker, stack=replace(talker.stack, **change))
    else:
        talker = replace(talker, code_predictor=replace(predictor, stack=replace(predictor.stack, **change)))
    told = megakernel.why_other_sizes(replace(config, talker=talker))
    assert told is None if fits else "this one has other sizes" in told


def test_names_and_numbers_of_enumerators_are_the_same_in_python():
    *stages, count = enumerators("frame/params.h", "Stage")
    assert count == "kStages" and [in_python(stage).lower() for stage in stages] == [
        name.removeprefix("talker ") for name in STAGES[: len(stages)]
    ]
    assert len(STAGES) == 2 * len(stages)
    assert enumerators("vocoder/vocoder.h", "Activation") == ["kNone", "kSnake", "kGelu"]
    assert (NONE, SNAKE, GELU) == (0, 1, 2)


def test_the_bits_of_fp8_weights_are_in_pythons_order():
    found = re.findall(r"kFp8(\w+) = QMK_FP8 & (\d+)", source("frame/dims.cuh"))
    assert {in_python(name).lower(): int(bit) for name, bit in found} == {
        part: 1 << PARTS.index(part) for part in PARTS
    }


def test_a_build_of_other_sizes_is_refused():
    told = built_for(HOPPER, {"lm_heads"})
    check_sizes(SimpleNamespace(**told), HOPPER, {"lm_heads"})
    other = SimpleNamespace(**told | {"SIZES": {**SIZES, "RECENT_FRAMES": 8, "NEW": 1}, "COLUMNS": 4})
    with pytest.raises(BackendError) as refused:
        check_sizes(other, HOPPER, set())
    for sentence in (
        "SIZES['RECENT_FRAMES']: expected 16, got 8;",
        "SIZES['NEW']: expected nothing, got 1;",
        "FP8['lm_heads']: expected False, got True;",
        "COLUMNS: expected 8, got 4;",
        "reinstall the package",
    ):
        assert sentence in str(refused.value)
    assert str(refused.value).count("expected") == 4
    del told["DIMS"]
    with pytest.raises(BackendError, match=r"DIMS\[1024\]: expected .*, got nothing"):
        check_sizes(SimpleNamespace(**told), HOPPER, {"lm_heads"})


def test_every_source_is_compiled_under_a_name_of_its_own():
    """torch names objects by stem alone."""
    compiled = {path.relative_to(CSRC).as_posix() for suffix in ("cu", "cpp") for path in CSRC.rglob(f"*.{suffix}")}
    assert compiled == {*build.SOURCES, "frame/footprint.cu", "frame/weights_alone.cu"}
    assert len({Path(name).stem for name in build.SOURCES}) == len(build.SOURCES)


def test_every_include_is_beside_its_file_or_above_it():
    """No flag says where to look: nvcc and torch find the same files."""
    for path in CSRC.rglob("*.*"):
        for name in re.findall(r'^#include "(.*)"', path.read_text(encoding="utf-8"), re.M):
            assert (path.parent / name).is_file(), (path, name)


# ---------------------------------------------------------------- what keeps it from being built


@pytest.mark.parametrize(
    "said, sentence",
    [
        (((7, 5), 72, "Quadro RTX 8000"), "sm_121a; this Quadro RTX 8000 is sm_75"),
        (((8, 6), 28, "RTX 3060"), "needs at least 32 multiprocessors, and this RTX 3060 has 28; use a larger GPU"),
        ((*H200, None), "nvcc was not found in "),
        ((*H200, (13, 0), (13, 0), False), "ninja was not found on PATH or beside this Python; pip install ninja"),
        (
            (*H200, (13, 0), (12, 8)),
            "too old: it runs CUDA 12.8, but nvcc is for CUDA 13.0; update the driver or set CUDA_HOME",
        ),
        ((*H200, (11, 5)), "nvcc is too old: it is of CUDA 11.5, and this H200 needs 12.3 or newer; "),
        (((10, 3), 148, "B300", (12, 8)), "it is of CUDA 12.8, and this B300 needs 12.9 or newer; "),
    ],
)
def test_says_what_is_in_the_way_and_auto_takes_torch(said, sentence, machine):
    machine(*said)
    assert sentence in Card.of(GPU).obstacle
    with pytest.raises(BackendError, match=re.escape(sentence)):
        build.load_extension(GPU)
    with pytest.raises(BackendError, match=re.escape(sentence)):
        Selection("megakernel", GPU)
    backend, reason, _ = Selection("auto", GPU).decide()
    assert backend == "torch" and sentence in reason


@pytest.mark.parametrize("cuda, capability, told", [("12.6", (9, 0), "12.6"), ("12.6", (12, 1), "12.9")])
def test_before_cuda_13_it_names_the_toolkit_because_pip_has_no_nvcc(cuda, capability, told, machine, monkeypatch):
    machine(capability, 132, "a card", (12, 0), (12, 9))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert f"install the CUDA {told} toolkit and set CUDA_HOME" in Card.of(GPU).obstacle
    assert "pip install" not in Card.of(GPU).obstacle + card.no_nvcc()


def test_the_oldest_nvcc_of_every_architecture_will_do(machine):
    for target in TARGETS.values():
        least = card._LEAST_NVCC.get(target.arch, card._LEAST_OF_SOURCES)
        machine(*smallest(target), least)
        assert Card.of(GPU).obstacle is None
        machine(*smallest(target), (least[0], least[1] - 1))
        assert "is too old" in Card.of(GPU).obstacle


def test_an_nvcc_of_pips_that_an_old_one_hides_is_named(machine, monkeypatch):
    machine(*H200, (11, 5))
    monkeypatch.setattr(card, "pip_toolkit", lambda: Path("/site/nvidia/cu13"))
    assert Card.of(GPU).obstacle.endswith("needs 12.3 or newer; set CUDA_HOME=/site/nvidia/cu13")


@pytest.mark.parametrize("cuda, release", [(None, "13.0"), ("13.2", "13.2")])
def test_a_shell_takes_pips_command_as_it_is_printed(cuda, release, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(card, "pip_toolkit", lambda: None)  # of this machine
    command = re.search(r"; (pip install .*?), or install the CUDA toolkit", card.no_nvcc())[1]
    assert "*" not in re.sub(r"'[^']*'", "", command), "a shell expands it"
    assert shlex.split(command) == ["pip", "install", *(f"{name}=={release}.*" for name in card._PIP_COMPILER)]
    if cuda is None:
        assert command in (ROOT / "docs" / "cards.md").read_text(encoding="utf-8")


def test_a_driver_of_the_same_major_version_will_do_if_it_takes_as_many_parameters(machine):
    machine(*H200, nvcc=(12, 9), driver=(12, 4))
    assert Card.of(GPU).obstacle is None
    machine(*H200, nvcc=(12, 9), driver=(12, 0))
    told = "the NVIDIA driver is too old: it runs CUDA 12.0, not 12.1; update the driver"
    assert Card.of(GPU).obstacle == told


@pytest.mark.parametrize(
    "driver, told",
    [
        (None, "PyTorch speaks on the CPU: no NVIDIA GPU was found"),
        ((12, 4), "PyTorch speaks on the CPU: the NVIDIA driver is too old: it runs CUDA 12.4, but torch"),
    ],
)
def test_the_log_says_why_the_cpu_speaks(driver, told, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for module in (card, selection):
        monkeypatch.setattr(module, "driver_version", lambda: driver)
    with caplog.at_level(logging.INFO, "qwen_megakernel"):
        resolve("demo", EngineOptions())
    assert caplog.messages[0].startswith(told)


@pytest.mark.parametrize(
    "cuda, driver, sentence",
    [
        (None, None, "is built without CUDA; install a build with it"),
        ("13.0", None, "there is no NVIDIA driver; install one"),
        ("13.0", (12, 4), "the NVIDIA driver is too old: it runs CUDA 12.4, but torch"),
        ("13.0", (13, 0), "look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
    ],
)
def test_says_why_torch_sees_no_gpu(cuda, driver, sentence, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(card, "driver_version", lambda: driver)
    with pytest.raises(BackendError, match=sentence):
        select_device("cuda")
    with pytest.raises(BackendError, match=sentence):
        Selection("megakernel")
    assert cli.main(["build"]) == 1
    assert re.match(f"error: .*{sentence}", capsys.readouterr().err)


# ---------------------------------------------------------------- building it


def linked(name, settings, target, fp8=()):
    """What `cpp_extension.load` leaves and returns."""
    file = Path(settings["build_directory"]) / f"{name}.so"
    file.write_text("the kernel")
    return SimpleNamespace(__file__=str(file), **built_for(target, fp8))


@pytest.fixture
def fresh(machine, monkeypatch, tmp_path):
    """The folder of an H200's build, on a pretended one, where nothing is built and no build is kept in memory."""
    machine(*H200)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_loaded", build._loaded.__wrapped__)
    return build.cache_folder(HOPPER)


@pytest.mark.parametrize("name, torchs", [("sm_80x64", "8.0"), ("sm_90ax128", "9.0a"), ("sm_120ax32", "12.0a")])
def test_both_compilers_get_the_targets_flags_and_the_log_says_where(
    name, torchs, machine, monkeypatch, tmp_path, caplog, capsys
):
    given = {}
    target = TARGETS[name]

    def load(name, sources, **settings):
        given.update(settings, name=name, arch=os.environ["TORCH_CUDA_ARCH_LIST"], path=os.environ["PATH"])
        assert all(Path(source).is_file() for source in sources)
        return linked(name, settings, target)

    machine(*smallest(target))
    monkeypatch.setattr(cpp_extension, "load", load)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0")
    monkeypatch.setattr(build, "_loaded", build._loaded.__wrapped__)  # nothing is kept
    with caplog.at_level(logging.INFO, "qwen_megakernel"):
        assert cli.main(["build"]) == 0
    folder = tmp_path / given["name"]
    assert given["arch"] == torchs and os.environ["TORCH_CUDA_ARCH_LIST"] == "7.0"
    assert given["path"] == os.environ["PATH"] + os.pathsep + "/tools"
    for flags in (given["extra_cflags"], given["extra_cuda_cflags"]):
        assert set(target.defines) <= set(flags)
    assert f"building the kernel for {name} in {folder}" in caplog.text
    assert capsys.readouterr().out.splitlines()[-1] == f"cached  in {folder}"
    assert {file.name for file in folder.iterdir()} == {"lock", f"{folder.name}.so"}


def test_builds_for_other_weights_have_their_own_flags(fresh, monkeypatch):
    flags = {}

    def load(name, sources, **settings):
        flags[name] = settings["extra_cuda_cflags"], settings["extra_cflags"]
        bits = next((int(flag.partition("=")[2]) for flag in settings["extra_cflags"] if "QMK_FP8" in flag), 0)
        fp8 = {part for i, part in enumerate(PARTS) if bits >> i & 1}
        return linked(name, settings, HOPPER, fp8)

    monkeypatch.setattr(cpp_extension, "load", load)
    for weights in ("bf16", "fp8", "fp8-predictor"):
        assert cli.main(["build", "--weights", weights]) == 0
    told = [[flag for flag in both[0] if "FP8" in flag] for both in flags.values()]
    assert told == [[], ["-DQMK_FP8=15"], ["-DQMK_FP8=10"]]
    assert told == [[flag for flag in both[1] if "FP8" in flag] for both in flags.values()]


def test_both_compilers_get_every_macro_that_the_sources_ask_for(fresh, monkeypatch):
    """With a macro that only one of them has, kernel and bindings disagree. frame_wide.cu defines one of its own."""
    text = "".join(path.read_text(encoding="utf-8") for path in CSRC.rglob("*.*"))
    asked = set(re.findall(r"^#if(?:n?def)? (QMK_\w+)$", text, re.M)) - {"QMK_WIDE"}
    given = []

    def load(name, _sources, **settings):
        given.extend((settings["extra_cflags"], settings["extra_cuda_cflags"]))
        return linked(name, settings, HOPPER, PARTS)

    monkeypatch.setattr(cpp_extension, "load", load)
    monkeypatch.setattr(build, "DEFINES", (build.STAGE_CLOCK,))
    assert build.cache_folder(HOPPER) != fresh, "a folder of its own"
    build.load_extension(GPU, PARTS)
    cpp, cuda = ({flag for flag in flags if flag.startswith("-DQMK_")} for flags in given)
    assert cpp == cuda
    assert asked == {"QMK_STAGE_CLOCK", "QMK_FP8", "QMK_COLUMNS", "QMK_WIDE_COLUMNS", "QMK_BATCH_COLUMNS"}
    assert asked <= {flag.removeprefix("-D").partition("=")[0] for flag in cpp}


@pytest.mark.slow
@pytest.mark.skipif(card.find_nvcc() is None, reason="needs nvcc")
def test_the_kernel_compiles_with_the_documented_macros(tmp_path):
    macros = [build.STAGE_CLOCK, "-DQMK_FP8=10"]
    command = [card.find_nvcc(), *build.FLAGS, *HOPPER.defines, *macros, f"-arch=sm_{HOPPER.arch}", "-ptx"]
    # All templates in use are made, and no code: that takes a tenth of the time.
    command += ["-fdevice-syntax-only", "-o", tmp_path / "frame.ptx"]
    kernels._compile([*command, CSRC / "frame/frame.cu"], "frame.cu with all macros")


def test_a_build_waits_for_another_one_and_goes_on_when_that_is_killed(fresh, monkeypatch, caplog):
    monkeypatch.setattr(cpp_extension, "load", lambda name, _sources, **settings: linked(name, settings, HOPPER))
    (fresh / "building-1234").mkdir(parents=True)
    (fresh / "building-1234" / f"{fresh.name}.so").write_text("half a ker")
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", hold, fresh / "lock"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other, ThreadPoolExecutor() as pool:
        other.stdout.readline()
        with caplog.at_level(logging.INFO, "qwen_megakernel"):
            loading = pool.submit(build.load_extension, GPU)
            try:
                until(lambda: loading.done() or "waiting for another process that builds" in caplog.text)
                assert not loading.done() and "building the kernel" not in caplog.text
            finally:
                other.kill()
            loading.result()
    assert {file.name for file in fresh.iterdir()} == {"lock", f"{fresh.name}.so"}
    assert (fresh / f"{fresh.name}.so").read_text() == "the kernel"


def test_a_failed_build_leaves_nothing_and_is_told(fresh, monkeypatch):
    def load(_name, _sources, build_directory, **_settings):
        (Path(build_directory) / "frame.o").touch()
        raise RuntimeError("ninja: build stopped")

    monkeypatch.setattr(cpp_extension, "load", load)
    with pytest.raises(BackendError, match=f"{fresh}.*ninja: build stopped"):
        build.load_extension(GPU)
    assert [file.name for file in fresh.iterdir()] == ["lock"]


@pytest.mark.parametrize("locks", [True, False])
def test_what_another_process_built_is_loaded(locks, fresh, monkeypatch, caplog):
    """Also from a folder that nobody can write, or whose file system has no locks."""
    fresh.mkdir()
    library = fresh / f"{fresh.name}.so"
    library.write_text("the kernel")
    if not locks:
        (fresh / "lock").mkdir()  # so it cannot be opened
    monkeypatch.setattr(build, "_imported", lambda file: linked(file.stem, {"build_directory": file.parent}, HOPPER))
    with caplog.at_level(logging.INFO, "qwen_megakernel"):
        assert build.load_extension(GPU).__file__ == str(library)
    assert "building" not in caplog.text and "kernel ready after" in caplog.text


def test_the_linker_finds_the_runtime_that_pip_brought(fresh, tmp_path, monkeypatch):
    def load(name, _sources, **settings):
        (flag,) = settings["extra_ldflags"]
        assert Path(flag.removeprefix("-L"), "libcudart.so").read_text() == "the runtime"
        return linked(name, settings, HOPPER)

    toolkit = tmp_path / "cu13"
    (toolkit / "lib").mkdir(parents=True)
    (toolkit / "lib" / "libcudart.so.13").write_text("the runtime")
    monkeypatch.setattr(build, "pip_toolkit", lambda: toolkit)
    monkeypatch.setattr(build, "find_nvcc", lambda: str(toolkit / "bin" / "nvcc"))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(cpp_extension, "load", load)
    build.load_extension(GPU)
    assert cpp_extension.CUDA_HOME == str(toolkit)


def test_builds_with_other_flags_have_other_folders(monkeypatch):
    folders = {build.cache_folder(target) for target in TARGETS.values()}
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-lineinfo"))
    assert len(folders | {build.cache_folder(target) for target in TARGETS.values()}) == 2 * len(TARGETS)


@pytest.mark.parametrize("owner, name", [(torch, "__version__"), (sys, "version")])
def test_a_build_with_another_torch_or_python_has_another_folder(monkeypatch, owner, name):
    before = build.cache_folder(HOPPER)
    monkeypatch.setattr(owner, name, "another")
    assert build.cache_folder(HOPPER) != before


def test_builds_of_other_sources_have_other_folders(tmp_path, monkeypatch):
    shutil.copytree(CSRC, tmp_path / "csrc")
    before = build.cache_folder(HOPPER)
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path / "csrc")
    assert build.cache_folder(HOPPER) == before
    for name in ("ptx.cuh", "frame/layer.cuh", "vocoder/vocoder.h"):
        with (tmp_path / "csrc" / name).open("a", encoding="utf-8") as file:
            file.write("// more\n")
        assert build.cache_folder(HOPPER) != before
        before = build.cache_folder(HOPPER)
    (tmp_path / "csrc" / "ptx.cuh").rename(tmp_path / "csrc" / "frame" / "ptx.cuh")
    assert build.cache_folder(HOPPER) != before


def test_a_launch_of_more_sequences_than_the_build_has_columns_is_refused():
    decoder = MegakernelFrameDecoder.__new__(MegakernelFrameDecoder)
    decoder.width, decoder._sequences, decoder._launches, decoder.max_positions = 4, {}, [], 64
    with pytest.raises(ValueError, match="1 to 4 .*4"):
        decoder.launch(range(5))


@pytest.mark.parametrize("hidden, mib", [(1024, 336), (2048, 448)])
def test_tables_are_made_where_they_leave_room(hidden, mib, monkeypatch):
    """Of what the GPU has free, and of what the process may take."""
    size, leave = megakernel.table_bytes(hidden), megakernel.TABLES_LEAVE
    assert size == mib * 2**20
    said = {"mem_get_info": (0, 2**40), "memory_reserved": 3 * 2**30, "memory_allocated": 2**30}
    for name, value in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, value=value: value)
    share = 1.0
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: share)
    assert megakernel.free_memory(GPU) == 2 * 2**30
    told = f"{mib} MiB would leave less than 4 of 2.0 free GiB"
    assert megakernel.why_no_tables(hidden, GPU) == told
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (size + leave - 2 * 2**30, 2**40))
    assert megakernel.why_no_tables(hidden, GPU) is None
    share = 3 / 1024
    assert megakernel.why_no_tables(hidden, GPU) == told


# ---------------------------------------------------------------- make kernels


def test_reads_ptxas_and_shows_what_it_cannot_read():
    assert kernels.parse_ptxas(PTXAS) == {2048: Compiled(96, 20, 36, 0), 256: Compiled(56, 0, 0, 640)}
    with pytest.raises(BackendError, match="got: .*sm_90a"):
        kernels.parse_ptxas(PTXAS.replace("Used", "Took"))


@pytest.mark.parametrize(
    "name, registers, threads, shared_kb, expected",
    [
        ("sm_80x64", 56, 544, 81, (2, "registers")),
        ("sm_80x64", 64, 544, 81, (1, "registers")),  # 34 warps of 2,048 registers: a partition would need to hold 9
        ("sm_80x64", 32, 544, 82, (1, "shared memory")),  # 1 KB of the block's is CUDA's
        ("sm_90ax128", 96, 640, 227, (1, "registers")),
        ("sm_90ax128", 128, 640, 227, (0, "registers")),
    ],
)
def test_resident_blocks(name, registers, threads, shared_kb, expected):
    assert kernels.blocks_per_multiprocessor(TARGETS[name], registers, threads, shared_kb * 1024) == expected


def test_a_grid_that_is_not_resident_on_the_smallest_card_and_a_kernel_that_was_not_compiled_fail():
    target, fits, fat = TARGETS["sm_86x64"], Compiled(96, 0, 0, 0), Compiled(128, 0, 0, 0)
    launches = {width: Launch(544, 80 * 1024, 32768) for width in MODELS}
    rows, failures = kernels.judge(target, 4, {256: fits, 1024: fits, 2048: fat}, launches)
    assert len(rows) == 3 and rows[2][:2] == ["sm_86x64", "RTX 3080 (68)"]
    assert failures == ["sm_86x64, 1.7B: no block fits a multiprocessor; not enough registers"]
    assert kernels.judge(target, 4, dict.fromkeys(MODELS, fits), launches)[1] == []
    small = dataclasses.replace(target, multiprocessors=40)
    assert "RTX 3080 has 40 multiprocessors" in kernels.judge(small, 4, dict.fromkeys(MODELS, fits), launches)[1][0]

    assert "sm_90ax128: expected kernels for talkers of width 256" in kernels.judge(HOPPER, 8, {1024: fits}, {})[1][0]


@pytest.mark.slow
def test_make_kernels_without_nvcc_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    command = [sys.executable, ROOT / "tools" / "compile_kernels.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr == f"error: {card.no_nvcc()}\n"
    assert f"nvcc was not found in CUDA_HOME={tmp_path}; " in done.stderr


def test_targets_can_be_left_out(monkeypatch, capsys):
    kept = ["sm_80x64", "sm_90ax128"]
    compiled, checked = [], []
    fits = dict.fromkeys(MODELS, Compiled(96, 0, 0, 0))
    launch = dict.fromkeys(MODELS, Launch(544, 80 * 1024, 32768))
    monkeypatch.setattr(kernels, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(kernels, "compile_frame", lambda _nvcc, target, wide: (4 + 4 * wide, fits, launch))
    monkeypatch.setattr(kernels, "compile_batch", lambda _nvcc, _target: None)
    monkeypatch.setattr(kernels, "compile_other", lambda _nvcc, arch, name: compiled.append((arch, name)))
    monkeypatch.setattr(kernels, "check_syntax", lambda _nvcc, target, name: checked.append((target.name, name)))
    monkeypatch.setattr(kernels, "check_bindings", lambda _nvcc: None)
    looked_at = {"sm_120ax64"}
    assert kernels.main(["--syntax", *looked_at, "--skip", *(TARGETS.keys() - set(kept) - looked_at)]) == 0
    assert checked == [("sm_120ax64", name) for name in ("frame/footprint.cu", *kernels.OTHER_KERNELS)]
    rows = capsys.readouterr().out.splitlines()[1:]
    assert list(dict.fromkeys(row.split()[0] for row in rows)) == kept
    assert sorted(compiled) == sorted((arch, name) for arch in ("80", "90a") for name in kernels.OTHER_KERNELS)
    with pytest.raises(SystemExit):
        kernels.main(["--skip", "sm_99"])
    assert "sm_99" in capsys.readouterr().err


def an_nvcc(toolkit: Path, *lines: str) -> Path:
    """A script in its place in a toolkit's folder."""
    (toolkit / "bin").mkdir(parents=True)
    nvcc = toolkit / "bin" / "nvcc"
    nvcc.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    nvcc.chmod(0o755)
    return nvcc


def test_nvcc_is_looked_for_where_torch_looks(tmp_path, monkeypatch):
    nvcc = an_nvcc(tmp_path, "echo 'Cuda compilation tools, release 12.8, V12.8.93'")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}")
    assert card.find_nvcc() == str(nvcc) and card.nvcc_version(str(nvcc)) == (12, 8)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "elsewhere"))
    assert card.find_nvcc() is None


def test_nvcc_from_pip_is_found_last(tmp_path, monkeypatch):
    of_pip, own = an_nvcc(tmp_path / "site" / "nvidia" / "cu13"), an_nvcc(tmp_path / "own")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PATH", str(own.parent))
    assert card.find_nvcc() == str(own)
    which = shutil.which

    def without_cuda(name, path=None):
        return None if path in (None, "/usr/local/cuda/bin") else which(name, path=path)

    monkeypatch.setattr(shutil, "which", without_cuda)
    assert card.find_nvcc() == str(of_pip)


def test_ninja_is_found_beside_python_where_path_does_not_lead(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(card.sysconfig, "get_path", lambda _kind: str(tmp_path))
    assert card.find_ninja() is None
    (tmp_path / "ninja").touch(mode=0o755)
    assert card.find_ninja() == str(tmp_path / "ninja")


@pytest.mark.skipif(card.find_nvcc() is None, reason="needs nvcc")
def test_a_binding_that_is_no_c_plus_plus_is_told(tmp_path, monkeypatch):
    (tmp_path / "right.cpp").write_text("#include <cuda_runtime.h>\nint f(cudaError_t error) { return error; }\n")
    (tmp_path / "wrong.cpp").write_text("int f() { return g(); }\n")
    monkeypatch.setattr(kernels, "source_folder", lambda: tmp_path)
    monkeypatch.setattr(kernels, "BINDINGS", ("right.cpp",))
    kernels.check_bindings(card.find_nvcc())
    monkeypatch.setattr(kernels, "BINDINGS", ("right.cpp", "wrong.cpp"))
    with pytest.raises(BackendError, match=r"(?s)bindings: .*wrong\.cpp:1:.*g.{1,3} was not declared"):
        kernels.check_bindings(card.find_nvcc())


def test_a_compilers_failure_is_told_in_its_words(tmp_path, monkeypatch, capsys):
    an_nvcc(tmp_path, "echo 'nvcc fatal: no such architecture' >&2", "exit 1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert kernels.main([]) == 1
    assert "sm_80x64: " in (said := capsys.readouterr().err) and "nvcc fatal: no such architecture" in said
