"""Shared fixtures: tiny checkpoints are written once per run, engines are closed at the end."""

import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from fixtures import *  # noqa: F403
from kept import Kept, kept
from machines import pretend
from probes import probed
from waiting import PATIENCE_S

from qwen_megakernel import TTSEngine

FRAMES_COMPARED = "frames compared"
PATIENT = {"queue_timeout": PATIENCE_S}
"""Options of an engine whose time-outs are not what is tested: a busy machine must not meet them."""
if "PYTEST_XDIST_WORKER" in os.environ:  # a process per core: with more threads than cores they take each other's time
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start


if target := os.environ.get("EMULATE"):  # `make emulate`: another target's path of the kernel on a Hopper GPU
    sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
    from emulation import pretend

    pretend(target)


def pytest_terminal_summary(terminalreporter) -> None:
    """Of tests in other processes too: a report brings its properties along."""
    properties = [pair for report in terminalreporter.stats.get("passed", []) for pair in report.user_properties]
    compared = [frames for name, frames in properties if name == FRAMES_COMPARED]
    if compared:
        terminalreporter.write_line(f"oracle: {sum(compared)} frames compared over {len(compared)} cases")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """Imports leave hardly any garbage, and the garbage collector would take a third of their time."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def collections_are_quick():
    """The garbage collector leaves alone what was in memory before a file's tests. With torch, Pipecat and all tests
    there, a full collection takes a second. Some tests ask for many, and whatever makes many objects causes some."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def cycles_free_their_gpu_memory():
    yield
    if torch.cuda.is_initialized():
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def freed_gpu_memory_goes_back():
    """PyTorch would keep it, 71 GB in the kernel's tests; another process on the same GPU may need it."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def machine(monkeypatch):
    """machine(capability, multiprocessors, name, nvcc, driver, ninja): see `machines.pretend`."""
    return partial(pretend, monkeypatch)


@pytest.fixture
def count_frames(request):
    """Adds a case's frames to the total that the run prints."""
    return lambda frames: request.node.user_properties.append((FRAMES_COMPARED, frames))


@pytest.fixture(scope="session")
def engine_for():
    """engine_for(model, ...) -> a CPU engine that the whole run shares; see `probes.probed`."""
    engines: dict = {}

    def get(model, **options) -> TTSEngine:
        key = (str(model), *sorted(options.items()))
        if key not in engines:
            options = {"backend": "torch", "device": "cpu", "dtype": torch.float32, **PATIENT} | options
            engines[key] = probed(model, **options)
        return engines[key]

    yield get
    for engine in engines.values():
        engine.close()


class Backend:
    """Where the engine's tests run: the PyTorch backend on a CPU, or the megakernel on a GPU."""

    def __init__(self, name: str, tiny: Callable[..., Path], engine_for: Callable[..., TTSEngine]):
        self.name, self._tiny, self._engine_for = name, tiny, engine_for
        kernel = name == "megakernel"
        self.device = "cuda" if kernel else "cpu"
        self._options = {"backend": name, "device": self.device, **PATIENT}
        self._options["dtype"] = torch.bfloat16 if kernel else torch.float32
        self._size = "demo" if kernel else "tiny"

    def folder(self, variant: str = "custom_voice", eos_gain: float = 0.0, size: str | None = None) -> Path:
        """A checkpoint that it can run; end of speech stays away unless asked for."""
        return self._tiny(variant, size=size or self._size, eos_gain=eos_gain)

    def load(self, folder: Path | str | None = None, **options) -> TTSEngine:
        """An engine that a test may break."""
        return TTSEngine.load(folder or self.folder(), **(self._options | options))

    def demo(self, **options) -> Kept:
        """The demo's engine that the whole run shares."""
        return kept("demo", **(self._options | {"max_streams": 4} | options))

    def probed(self, folder: Path | str | None = None, **options) -> TTSEngine:
        """The same with parts that a test may replace."""
        return probed(folder or self.folder(), **(self._options | options))

    def engine(self, *args, **options) -> TTSEngine:
        """An engine over `folder(...)` that the whole run shares."""
        return self._engine_for(self.folder(*args, **options), **self._options)


@pytest.fixture(scope="session", params=["torch", pytest.param("megakernel", marks=pytest.mark.gpu)])
def backend(request, tiny, engine_for) -> Backend:
    if request.param == "megakernel" and (
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)
    ):
        pytest.skip("needs a Hopper GPU")
    return Backend(request.param, tiny, engine_for)


@pytest.fixture
def own_engine(backend):
    """An engine that a test may break."""
    with backend.probed(max_streams=3) as engine:
        yield engine


@pytest.fixture(scope="module")
def siege(request, tmp_path_factory):
    """A server with a listener, and with the limits of the module's `LIMITS`."""
    import attacks

    with attacks.siege(tmp_path_factory.mktemp("server"), **request.module.LIMITS) as siege:
        yield siege


@pytest.fixture
def attacked(siege):
    """The same. What a test leaves open is closed."""
    yield siege
    siege.server.close_lines()
