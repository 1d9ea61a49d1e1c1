"""What is known of the kernel on a card: records of cards that we ran ourselves, and verdicts of the self-check.

A verdict is one small JSON file in `folder()`. It holds for one card, driver, torch and build of the kernel, and for
one size and choice of FP8 weights. When any of these changes, no file is found and the check runs again.
"""

import hashlib
import json
import logging
import math
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch

from qwen_megakernel.backend.build import Build, cache_root
from qwen_megakernel.backend.card import Card
from qwen_megakernel.backend.sizes import DIMS
from qwen_megakernel.checkpoint.fp8 import name_of
from qwen_megakernel.choices import MODEL_SIZES
from qwen_megakernel.errors import BackendError
from qwen_megakernel.files import check_own, own_folder
from spoken_text.files import read_file

log = logging.getLogger(__name__)

SIZES = dict(zip(DIMS, MODEL_SIZES, strict=True))
"""Names of the sizes that the kernel is compiled for, by the talker's width (`hidden_size`)."""

MOST_BYTES = 64 * 1024  # the largest verdict file, and the longest line of the check's process, that is read

TRY_AGAIN = "`qwen-megakernel doctor --check` tries it again"

_HELD: dict["Key", "Verdict"] = {}  # verdicts of this process that have no file


@dataclass(frozen=True)
class Record:
    """A card on which we ran the kernel's tests. It needs no check."""

    card: str  # a word of its name
    capability: str  # such as "90"
    multiprocessors: int  # a slice of it (MIG) or a smaller card of that name has fewer, and no record
    frame_ms: Mapping[str, tuple[float, float]]  # milliseconds of a frame by size, for one stream and for eight

    def __str__(self) -> str:
        times = ", ".join(f"{size} {one:.2f} ms" for size, (one, _) in self.frame_ms.items())
        return f"we ran the kernel on an {self.card}: a frame of one stream takes {times}"


RECORDS = (
    Record("H100", "90", 132, {"0.6b": (1.179, 1.342), "1.7b": (1.796, 1.962)}),
    Record("H200", "90", 132, {"0.6b": (0.986, 1.171), "1.7b": (1.405, 1.607)}),
)


def record_of(card: Card) -> Record | None:
    """Our record of a card."""
    for record in RECORDS:
        same = (record.capability, record.multiprocessors) == (card.capability, card.multiprocessors)
        if same and re.search(rf"\b{record.card}\b", card.name):
            return record
    return None


@dataclass(frozen=True)
class Key:
    """What a verdict holds for."""

    card: str  # its name
    multiprocessors: int
    driver: str  # the newest CUDA that it runs, such as "13.0"; "none" where no driver tells
    torch: str
    build: str  # name of the build's folder, which depends on sources, flags, torch and Python
    size: str  # one of SIZES' names
    weights: str  # "bf16", "fp8", "fp8-predictor", or parts such as "codec_head,talker"

    @classmethod
    def of(cls, build: Build, size: str) -> "Key":
        name = name_of(build.fp8)
        return cls(
            card=build.card.name,
            multiprocessors=build.card.multiprocessors,
            driver=".".join(map(str, build.card.driver or ("none",))),
            torch=torch.__version__,
            build=build.folder.name,
            size=size,
            weights=name if isinstance(name, str) else ",".join(name),
        )


@dataclass(frozen=True)
class Part:
    """The check's result for the frame kernel, or for the vocoder's kernels."""

    correct: bool  # nothing wrong was found
    reason: str
    kernel_ms: float | None = None  # of one stream's frame; None: not measured
    torch_ms: float | None = None  # the same with PyTorch

    @property
    def taken(self) -> bool:
        """Does "auto" take it: is it right, and faster than PyTorch?"""
        if self.kernel_ms is None or self.torch_ms is None:
            return False
        return self.correct and self.kernel_ms < self.torch_ms

    def __str__(self) -> str:
        if not self.correct:
            return f"wrong: {self.reason}"
        if self.kernel_ms is None or self.torch_ms is None:
            return self.reason
        verb = "faster" if self.taken else "not faster"
        return f"correct, {verb} than PyTorch: a frame takes {self.kernel_ms:.2f} ms, PyTorch's {self.torch_ms:.2f} ms"


@dataclass(frozen=True)
class FramePart(Part):
    launches: int = 0  # whose codes were compared
    error_ratio: float | None = None  # the kernel's error against fp32 over that of PyTorch bf16; None: not measured

    def __str__(self) -> str:
        ratio = "" if self.error_ratio is None else f", its error is {self.error_ratio:.2f} times PyTorch bf16's"
        return f"{super().__str__()} ({self.launches:,} launches{ratio})"


AnyPart = TypeVar("AnyPart", bound=Part)


@dataclass(frozen=True)
class Verdict:
    """The self-check's verdict on the frame kernel and the vocoder's kernels.

    Attributes:
        finished: False: the check learnt nothing about the kernel, for example because its process was killed. Such a
            verdict holds for this process only and is not kept.
    """

    key: Key
    frame: FramePart
    vocoder: Part
    finished: bool = True

    @property
    def good(self) -> bool:
        """Was everything that can run checked, and was nothing wrong found?"""
        return self.finished and self.frame.correct and self.vocoder.correct

    def __str__(self) -> str:
        where = f"{self.key.card}, {self.key.size}, {self.key.weights}"
        if not self.finished:
            reason = (self.vocoder if self.frame.correct else self.frame).reason
            return f"the self-check on this {where} could not be finished: {reason}"
        return f"self-check on this {where}: kernel {self.frame}; vocoder {self.vocoder}"

    def to_json(self) -> dict[str, Any]:
        """The form that is kept, and that `from_json` takes."""
        return {"key": asdict(self.key), "frame": asdict(self.frame), "vocoder": asdict(self.vocoder)}

    @classmethod
    def from_json(cls, value: object, key: Key) -> "Verdict":
        """Raises BackendError: it belongs to another key, or something is missing or wrong."""
        if not isinstance(value, dict) or value.get("key") != asdict(key):
            raise BackendError("it is for another card, driver, torch or build")
        return cls(key, part_of(FramePart, value.get("frame"), "frame"), part_of(Part, value.get("vocoder"), "vocoder"))


def part_of(kind: type[AnyPart], value: object, name: str) -> AnyPart:
    """A part from JSON. Raises BackendError: something is missing or wrong."""
    if not isinstance(value, dict):
        raise BackendError(f"{name} is {value!r}")
    kinds = get_type_hints(kind)
    figures: dict[str, Any] = {field: value.get(field) for field in kinds}
    for field, figure in figures.items():
        if not isinstance(figure, kinds[field]) or (isinstance(figure, float) and not math.isfinite(figure)):
            raise BackendError(f"{name}: {field} is {figure!r}")
    return kind(**figures)


def folder() -> Path:
    """Where verdicts are kept: beside the builds."""
    return cache_root() / "qwen_megakernel_verdicts"


def file_of(key: Key) -> Path:
    """The file of a verdict."""
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:12]
    return folder() / f"{key.build}_{key.size}_{key.weights.replace(',', '+')}_{digest}.json"


def read(key: Key) -> Verdict | None:
    """The verdict of a key. None: there is none, or it cannot be read, which a warning reports."""
    if key in _HELD:
        return _HELD[key]
    path = file_of(key)
    try:
        if not path.exists():
            return None
        with own_folder(path.parent) as own:
            check_own(own / path.name, path)
            return Verdict.from_json(json.loads(read_file(own / path.name, "a verdict", MOST_BYTES)), key)
    except (BackendError, ValueError, RecursionError, OSError) as error:
        log.warning("the verdict %s cannot be used and is ignored: %s", path, error)
        return None


def keep(verdict: Verdict) -> None:
    """Write a verdict to its file. An unfinished one holds for this process alone. So does one that cannot be written,
    which a warning reports."""
    _HELD[verdict.key] = verdict
    if not verdict.finished:
        return
    path = file_of(verdict.key)
    try:
        with own_folder(path.parent) as own:
            write(own / path.name, json.dumps(verdict.to_json(), indent=2))
    except OSError as error:
        log.warning(
            "the verdict cannot be saved in %s, so it holds for this process alone: %s; make room there, or set "
            "TORCH_EXTENSIONS_DIR to a folder that can be written",
            path.parent,
            error,
        )
    else:
        _HELD.pop(verdict.key, None)


def write(path: Path, text: str) -> None:
    """Write atomically, so that readers never see a partial file."""
    beside = path.with_name(f".{path.stem}.{os.getpid()}.{threading.get_ident()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.chmod(0o600)  # whatever the umask is: see `check_own`
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@dataclass(frozen=True)
class Evidence:
    """What is known of a build on its card, for models of one size."""

    build: Build
    key: Key | None  # what a verdict holds for; None: the size is not known, or the frame kernel has no such size
    record: Record | None  # ours of the card
    verdict: Verdict | None  # the self-check's

    @classmethod
    def of(cls, build: Build, size: str | None) -> "Evidence":
        """`size`: one of SIZES' names; None: any."""
        key = Key.of(build, size) if size else None
        return cls(build, key, record_of(build.card), read(key) if key else None)

    @property
    def frame(self) -> tuple[bool, str]:
        """(does "auto" take the frame kernel, and why)."""
        if self.verdict is not None:
            taken = self.verdict.frame.taken
            return taken, str(self.verdict) if taken else f"{self.verdict}; {TRY_AGAIN}"
        if self.record is not None:
            return True, str(self.record)
        return True, "it can run here; the self-check at the first load decides"

    @property
    def vocoder_obstacle(self) -> str | None:
        """Why "auto" does not take the vocoder's kernels; None: it takes them."""
        if self.verdict is not None:
            vocoder = self.verdict.vocoder
            return None if vocoder.taken else f"self-check on this {self.build.card.name}: {vocoder}"
        if self.record is not None:
            return None
        return "its kernels have not been checked on this card; backend='auto' checks them with the frame kernel"


def void(key: Key, reason: str) -> None:
    """Make "auto" take PyTorch from now on: set the kept verdict to wrong, or make one that says so."""
    known = read(key) or Verdict(key, FramePart(False, reason), Part(False, reason))
    frame = replace(known.frame, correct=False, reason=reason)
    vocoder = replace(known.vocoder, correct=False, reason=reason)
    verdict = Verdict(key, frame, vocoder)
    log.error("%s; backend='auto' takes PyTorch from now on; %s", verdict, TRY_AGAIN)
    keep(verdict)
