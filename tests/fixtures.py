"""Fixtures and hooks that all tests share, but those of packages/spoken-text: they need no torch."""

import asyncio
import inspect
import math
import os
import random
import secrets
from pathlib import Path

import loguru  # noqa: F401  # it reads LOGURU_LEVEL once; demo_pipeline.py sets that when it is imported
import pytest
import torch
from hypothesis import Phase, settings
from kept import ENGINES, kept

from qwen_megakernel import TTSEngine
from qwen_megakernel.backend import select
from qwen_megakernel.backend.interfaces import CpuSpeed
from qwen_megakernel.checkpoint.synthetic import write_checkpoint
from qwen_megakernel.engine import pace, warm_up
from qwen_megakernel.speech import engine as engine_module

settings.register_profile("patient", deadline=None)  # no test fails because the machine is busy
settings.register_profile("first", deadline=None, phases=[Phase.explicit, Phase.generate])  # no time for a shorter one
settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own."""
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        wanted = pyfuncitem._fixtureinfo.argnames
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
        return True
    return None


@pytest.fixture(autouse=True)
def fresh_seed():
    """Every test draws anew; what it drew from is printed with a failure, and REPEAT_SEED repeats it."""
    seed = int(os.environ.get("REPEAT_SEED", secrets.randbits(31)))
    torch.manual_seed(seed)
    random.seed(seed)
    print(f"REPEAT_SEED={seed}")
    return seed


@pytest.fixture(scope="session", autouse=True)
def device_speed():
    """The device counts as fast, for ever: beside other work it is slow, and fewer utterances would run at once."""

    def cpu(model, sampling, threads=None) -> CpuSpeed:
        return CpuSpeed(threads or 1, {threads or 1: 1e-4})

    def gpu(*args) -> float:
        return 1000 * warm_up.sustained(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "measure", cpu)
        patch.setattr(engine_module, "sustained", gpu)
        patch.setattr(pace, "_WINDOW_S", math.inf)
        yield


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


@pytest.fixture(scope="session", autouse=True)
def kept_engines_are_closed():
    yield
    for engine in ENGINES.values():
        engine.close()


@pytest.fixture
def loads_once(monkeypatch):
    """What calls `TTSEngine.load` gets an engine that the whole run shares."""
    monkeypatch.setattr(TTSEngine, "load", kept)
