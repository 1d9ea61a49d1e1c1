"""Shared fixtures: tiny checkpoints are written once per run, engines are closed at the end."""

import os
import secrets
from pathlib import Path

import pytest
import torch

from qwen_megakernel import TTSEngine
from qwen_megakernel.synthetic import write_checkpoint

FRAMES_COMPARED = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FRAMES_COMPARED] = {}


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    compared = config.stash[FRAMES_COMPARED]
    if compared:
        terminalreporter.write_line(f"oracle: {sum(compared.values())} frames compared over {len(compared)} cases")


@pytest.fixture(autouse=True)
def fresh_seed():
    """Every test draws anew; what it drew from is printed with a failure, and REPEAT_SEED repeats it."""
    seed = int(os.environ.get("REPEAT_SEED", secrets.randbits(31)))
    torch.manual_seed(seed)
    print(f"REPEAT_SEED={seed}")


@pytest.fixture
def count_frames(request):
    """Adds a case's frames to the total that the run prints."""
    return lambda name, frames: request.config.stash[FRAMES_COMPARED].__setitem__(name, frames)


@pytest.fixture(scope="session")
def checkpoint_root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def tiny(checkpoint_root):
    """tiny(variant, size="tiny", ...) -> folder of a synthetic checkpoint, written at first use."""

    def write(variant: str, **options) -> Path:
        name = "-".join([variant, *(f"{k}{v}" for k, v in sorted(options.items()))])
        folder = checkpoint_root / name
        if not folder.exists():
            write_checkpoint(folder, variant=variant, **options)
        return folder

    return write


@pytest.fixture(scope="session")
def engine_for():
    """engine_for(model, ...) -> a CPU engine that the whole run shares."""
    engines: dict = {}

    def get(model, **options) -> TTSEngine:
        key = (str(model), *sorted(options.items()))
        if key not in engines:
            engines[key] = TTSEngine.load(model, backend="torch", device="cpu", dtype=torch.float32, **options)
        return engines[key]

    yield get
    for engine in engines.values():
        engine.close()
