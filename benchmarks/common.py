"""What the benchmarks share: models, floors, servers, and what each reports about itself."""

import argparse
import asyncio
import contextlib
import datetime
import functools
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from qwen_check.bench import read_bytes_s, weight_bytes
from qwen_megakernel.backend import build
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.synthetic import NO_EOS, write_checkpoint
from qwen_megakernel.checkpoint.tensors import expected_tensors

CLAIMED = (
    "beside it, not measured here: a published single-kernel port of the same model claims TTFC 50.5 to 81.6 ms and "
    "RTF 0.177 to 0.234 on an RTX 5090"
)

MODELS = "BENCHMARK_MODELS"
UTC = "%Y-%m-%dT%H:%M:%SZ"
H200_TB_S = 4.67  # measured: bulk copies of 16 KB by 128 blocks


def machine() -> str:
    gpu = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"no GPU, {torch.get_num_threads()} CPU threads"
    )
    return f"{gpu}, torch {torch.__version__}, Python {platform.python_version()}"


def _git(*command: str) -> str:
    """What git says in this file's repository; "" if it is not installed or there is no repository."""
    try:
        return subprocess.run(("git", *command), capture_output=True, text=True, cwd=Path(__file__).parent).stdout
    except OSError:
        return ""


def commit() -> str:
    """The commit of this file's repository; "-dirty": with uncommitted changes other than benchmark results."""
    name = _git("rev-parse", "--short", "HEAD").strip()
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude)results")
    return name + ("-dirty" if changed else "") if name else "unknown"


def commit_time() -> str:
    """When that commit was made, in UTC, such as "2026-11-25T20:44:42Z"."""
    stamp = _git("show", "-s", "--format=%ct", "HEAD").strip()
    return datetime.datetime.fromtimestamp(int(stamp), datetime.UTC).strftime(UTC) if stamp else "unknown"


@contextlib.contextmanager
def build_with(**other: tuple[str, ...]) -> Iterator[None]:
    """Kernels made inside are built with other `DEFINES` or `SOURCES` of backend/build.py."""
    with mock.patch.multiple(build, **other):
        yield


def about(size: str) -> dict:
    """The first fields of every benchmark's last line."""
    return {"machine": machine(), "commit": commit(), "size": size}


def positive(text: str) -> int:
    """For argparse: a whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def above_0(text: str) -> float:
    """For argparse: a number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {number:g}")
    return number


def new_file(text: str) -> Path:
    """For argparse: a writable file. A bad one is refused before anything is measured."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


@functools.cache
def read_tb_s() -> float:
    """How fast this machine reads its memory. For an H200 it was measured by bulk copies; else PyTorch measures now."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return H200_TB_S if "H200" in machine() else read_bytes_s(device) / 1e12


def read_ms(size: int) -> float:
    """Milliseconds that this machine takes to read `size` bytes."""
    return size / read_tb_s() * 1e-9


@contextlib.contextmanager
def random_model(size: str, variant: str = "custom_voice") -> Iterator[str]:
    """A checkpoint folder with random weights that never end their speech. run_all.py names a folder that the
    benchmarks of a run share."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(os.environ.get(MODELS, temporary)) / f"random-{size}-{variant}"
        if not (folder / "speech_tokenizer" / "model.safetensors").is_file():  # written last
            write_checkpoint(folder, size=size, variant=variant, eos_gain=NO_EOS)
        yield str(folder)


@contextlib.contextmanager
def busy_loop() -> Iterator[None]:
    """While inside, an event loop of this process computes in pure Python for 8 of every 10 ms."""
    stop = threading.Event()

    async def load() -> None:
        while not stop.is_set():
            until = time.perf_counter() + 0.008
            while time.perf_counter() < until:
                pass
            await asyncio.sleep(0.002)

    thread = threading.Thread(target=lambda: asyncio.run(load()))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_until_ready(url: str, alive: Callable[[], bool] = lambda: True, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and alive():
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise TimeoutError(f"{url} is not ready after {seconds} s" if alive() else f"the server of {url} has ended")


@contextlib.contextmanager
def server(model: str, *options: str) -> Iterator[str]:
    """Start `qwen-megakernel serve` in its own process and wait until it is ready; its URL."""
    port = free_port()
    command = [sys.executable, "-m", "qwen_megakernel.cli", "serve", "--model", model, "--port", str(port), *options]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/ready", lambda: process.poll() is None)
            yield f"http://127.0.0.1:{port}"
        except TimeoutError:
            log.seek(0)
            print(log.read(), file=sys.stderr)
            raise
        finally:
            process.terminate()


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def spread(values: list[float]) -> dict[str, float]:
    """What the last lines say of a repeated measurement."""
    return {"p50": statistics.median(values), "p95": quantile(values, 0.95), "n": len(values)}


def floors_ms(config: ModelConfig) -> dict[str, float]:
    """Milliseconds that this machine takes to read all weights once: "pass", 8 prompt rows through the talker; "frame";
    "vocoder", a push of its matrices."""
    main, codec = expected_tensors(config)
    element = 2 if torch.cuda.is_available() else 4  # bf16, fp32
    talker, frame = weight_bytes({name: element * math.prod(shape) for name, shape in main.items()})
    vocoder = sum(4 * math.prod(s) for n, s in codec.items() if n.startswith("decoder.") and "quantizer" not in n)
    return {"pass": read_ms(talker), "frame": read_ms(frame), "vocoder": read_ms(vocoder)}


def first_audio_floor_ms(config: ModelConfig) -> float:
    """Milliseconds to read everything before the first chunk of one frame: a frame's weights, of which the talker's
    also serve a prompt of up to 16 rows, and the vocoder's."""
    floors = floors_ms(config)
    return floors["frame"] + floors["vocoder"]
