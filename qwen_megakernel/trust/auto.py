"""What `backend="auto"` takes on a GPU: the kernel where there is evidence that it is right and faster than PyTorch.

A card with a record of ours starts at once. Any other card that the kernel can be compiled for is checked once. The
check runs in its own process (qwen_check/self_check.py), so an illegal access or a hang there leaves our CUDA context
intact. It prints lines of JSON:

    {"done": 0.35, "what": "..."}     progress
    {"frame": {...}}                  the result for the frame kernel (verdicts.FramePart)
    {"vocoder": {...}}                the result for the vocoder's kernels (verdicts.Part), the last line
    {"unfinished": "..."}             why the check could not be completed
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from typing import IO

import torch
from tqdm import tqdm

from qwen_megakernel.backend.build import Build, alone
from qwen_megakernel.errors import BackendError
from qwen_megakernel.trust.verdicts import (
    MOST_BYTES,
    TRY_AGAIN,
    Evidence,
    FramePart,
    Key,
    Part,
    Verdict,
    file_of,
    keep,
    part_of,
    read,
)

log = logging.getLogger(__name__)

VARIABLE = "QWEN_MEGAKERNEL_AUTO"
MODES = ("check", "megakernel", "torch")
"""Values of VARIABLE. "check" decides by evidence. The others make "auto" take that backend, where it can run."""

TIME_LIMIT_S = 60.0
"""Time limit of a check. It is made to take 40 s if a launch takes 15 ms, ten times as long as on an H200."""

LOCK_S = TIME_LIMIT_S + 30  # how long one process waits for another's check

_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGTRAP")
"""Signals that a process causes itself. Others come from outside and say nothing about the kernel."""

_ONE_AT_A_TIME = threading.Lock()  # threads of this process


def mode() -> str:
    """What the environment asks "auto" to do. Raises BackendError: the variable's value is not in MODES."""
    value = os.environ.get(VARIABLE, MODES[0])
    if value not in MODES:
        raise BackendError(f"{VARIABLE} must be one of {', '.join(MODES)}, got {value!r}; set one of them, or unset it")
    return value


def checked(device: torch.device, known: Evidence) -> Evidence:
    """The evidence about a CUDA device. Where there is none, our kernels are compiled and checked now, which may take
    TIME_LIMIT_S."""
    if known.key is None or known.record or known.verdict:
        return known
    return replace(known, verdict=check(device, known.build, known.key, again=False))


def check(device: torch.device, build: Build, key: Key, *, again: bool = True) -> Verdict:
    """Check our kernels on a CUDA device, keep the verdict and log it. `again`: False: accept a verdict that another
    thread or process has reached."""
    try:
        build.load()  # compiled here, so that the time limit covers the check alone
        path, does = file_of(key).with_suffix(".lock"), f"checks the kernel on this {key.card}"
        with _ONE_AT_A_TIME, alone(path, does, LOCK_S):
            if not again and (known := read(key)):
                return known
            told = "checking the kernel on this %s, once, in up to %.0f s; %s=torch skips this check"
            log.info(told, key.card, TIME_LIMIT_S, VARIABLE)
            verdict = _verdict_of(key, *_run(command(device, key)))
            keep(verdict)
    except (BackendError, TimeoutError) as error:
        verdict = Verdict(key, FramePart(False, str(error)), Part(False, str(error)), finished=False)
        keep(verdict)
    if verdict.good:
        log.info("%s", verdict)
    else:
        log.warning("%s%s; %s", verdict, "" if verdict.frame.taken else "; PyTorch speaks", TRY_AGAIN)
    return verdict


def command(device: torch.device, key: Key) -> list[str]:
    """The command that starts the check's process. -P keeps it from importing from the current folder."""
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return [sys.executable, "-P", "-m", "qwen_check.self_check", str(index), key.size, key.weights]


@dataclass
class _Said:
    """What the check's process has said so far."""

    begun: bool = False  # the check of the kernel. Before that, no failure is the kernel's fault
    frame: FramePart | None = None
    vocoder: Part | None = None
    unfinished: str | None = None

    @property
    def complete(self) -> bool:
        return self.vocoder is not None or self.unfinished is not None

    def hear(self, line: bytes, bar: tqdm) -> None:
        """Take in a line. One of another form comes from elsewhere, such as a library."""
        try:
            match json.loads(line):
                case {"done": float(done), "what": str(what)}:
                    self.begun |= done > 0
                    bar.n = done
                    bar.set_description_str(what)
                case {"frame": frame}:
                    self.frame = part_of(FramePart, frame, "frame")
                case {"vocoder": vocoder}:
                    self.vocoder = part_of(Part, vocoder, "vocoder")
                case {"unfinished": str(why)}:
                    self.unfinished = why
                case _:
                    raise ValueError
        except BackendError as error:
            self.unfinished = f"the output of its process cannot be read: the self-check: {error}"
        except (ValueError, RecursionError):
            log.debug("the self-check's process also printed %r", line[:200])


def _run(argv: list[str]) -> tuple[_Said, str, bool]:
    """Run the check's process: (what it said, how it ended, is that the kernel's fault)."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    said, end = _Said(), time.monotonic() + TIME_LIMIT_S
    try:
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
            )
            try:
                in_time = _listen(process, said, end)
            finally:
                with contextlib.suppress(subprocess.TimeoutExpired):  # one whose GPU hangs may survive even this
                    if process.poll() is None:
                        process.kill()
                    process.wait(10)
            if not in_time:
                return said, f"it did not end within {TIME_LIMIT_S:g} s", said.begun
            return said, *_end_of(process.returncode, errors)
    except (OSError, ValueError) as error:
        return said, f"its process could not be started: {error}", False


def _listen(process: subprocess.Popen[bytes], said: _Said, end: float) -> bool:
    """Read the process's output until it ends. False: `end`, by time.monotonic, came first."""
    out = process.stdout
    assert out, "it is a pipe"

    def hear() -> None:
        form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}"
        with out, tqdm(total=1.0, desc="self-check", bar_format=form, leave=False, disable=None) as bar:  # in terminals
            while not said.complete and (line := out.readline(MOST_BYTES)):
                said.hear(line, bar)
        if not said.complete:  # otherwise it does not matter how it exits
            process.wait()

    thread = threading.Thread(target=hear, name="qwen_megakernel self-check", daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < end:
        thread.join(0.1)
    return not thread.is_alive()


def _end_of(code: int | None, errors: IO[bytes]) -> tuple[str, bool]:
    """How a process that did not finish ended, and whether that is the kernel's fault."""
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"its process was ended by {name}", name in _CRASHES
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - MOST_BYTES))
    last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    return f"its process ended with code {code} and no result" + (f": {last[:500]}" if last else ""), False


def _verdict_of(key: Key, said: _Said, end: str, by_kernel: bool) -> Verdict:
    if said.unfinished is not None:
        end, by_kernel = said.unfinished, False
    if said.frame is None:
        return Verdict(key, FramePart(False, end), Part(False, end), finished=by_kernel)
    if said.vocoder is not None:
        return Verdict(key, said.frame, said.vocoder)
    return Verdict(key, said.frame, Part(False, end), finished=by_kernel or not said.frame.correct)
