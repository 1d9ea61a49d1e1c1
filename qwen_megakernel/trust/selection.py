"""Which backend an engine takes: by what was asked for, what can run here, and what is known of the card."""

import logging
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from qwen_megakernel.backend.build import Build
from qwen_megakernel.backend.card import Card, driver_version, why_no_gpu
from qwen_megakernel.backend.megakernel import why_other_sizes
from qwen_megakernel.backend.select import Backend, select_device
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.dtypes import dtype_of, vocoder_dtype_of
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.choices import BACKENDS, parts_of
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.errors import BackendError
from qwen_megakernel.trust import auto
from qwen_megakernel.trust.verdicts import SIZES, Evidence, void

log = logging.getLogger(__name__)

MAX_THREADS = 256


def resolve(model: str | Path, options: EngineOptions) -> Backend:
    """The plan of an engine, logged in one line. "auto" may check the kernel first, which takes up to a minute, once.
    Raises CheckpointError: see `Checkpoint.open`. BackendError: see `Selection`, `Selection.decide`."""
    selection = Selection(
        options.backend, options.device, options.dtype, options.weights, options.vocoder_dtype, options.threads
    )
    plan = selection.choose(Checkpoint.open(model, options.adapters))
    kind = str(plan.dtype).removeprefix("torch.") + (f", FP8: {', '.join(sorted(plan.fp8))}" if plan.fp8 else "")
    if plan.device.type == "cpu":
        why = why_no_gpu() if driver_version() else "no NVIDIA GPU was found"
        log.info("PyTorch speaks on the CPU%s", "" if torch.cuda.is_available() else f": {why}")
        log.debug("backend %s, %s (%s)", plan.name, kind, plan.reason)
    else:
        log.info("backend %s on %s, %s (%s)", plan.name, plan.device, kind, plan.reason)
    return plan


class Decision(NamedTuple):
    backend: str  # "torch" or "megakernel"
    reason: str
    evidence: Evidence | None  # None: it was not asked for, or the kernel cannot run


class Selection:
    """How an engine shall run, by `TTSEngine.load`'s arguments. It is made before a checkpoint is looked for, looks at
    device and environment once, and refuses what can run with no checkpoint.

    Raises:
        BackendError: the backend, device, dtype, weights or number of threads cannot be used here, or the environment
            variable for "auto" is not in `auto.MODES`.
    """

    def __init__(
        self,
        backend: str = "auto",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        weights: str | Collection[str] | None = None,
        vocoder_dtype: str | torch.dtype = "float32",
        threads: int | None = None,
    ):
        self.device = select_device(device)
        if threads is not None:
            if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
                raise BackendError(f"threads must be an integer in 1..{MAX_THREADS}, got {threads!r}")
            if self.device.type != "cpu":
                raise BackendError(f"threads is for a CPU, but the device is {self.device}: leave threads out")
        self.card = Card.of(self.device) if self.device.type == "cuda" else None
        self.dtype = dtype_of(("bfloat16" if self.card else "float32") if dtype is None else dtype)
        self.vocoder_dtype = vocoder_dtype_of(vocoder_dtype)
        if self.vocoder_dtype == "tf32" and self.device.type == "cpu":
            raise BackendError("vocoder_dtype='tf32' needs an NVIDIA GPU, the device is a CPU; use 'float32'")
        self.fp8 = None if weights is None else parts_of(weights)
        self.threads = threads
        if not isinstance(backend, str) or backend not in BACKENDS:
            raise BackendError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self.backend, self._asked, self._why = backend, backend, "asked for"
        if backend == "auto" and (mode := auto.mode()) != "check":
            self._asked, self._why = mode, f"{auto.VARIABLE}={mode} asks for it"
        if backend == "megakernel":
            self.decide()

    def decide(
        self, config: ModelConfig | None = None, fp8: Collection[str] = (), *, may_check: bool = False
    ) -> Decision:
        """The backend for a checkpoint's `config`; None: for any that fits. "auto" takes the megakernel if it can run
        and there is evidence that it is right and faster than PyTorch (auto.py). `fp8`: parts (fp8.PARTS) whose weights
        are E4M3. `may_check`: if "auto" has no evidence, compile and check the kernel now. False, or no `config`:
        assume that it is right. Raises BackendError: the megakernel was asked for and cannot run like this."""
        if self._asked == "torch":
            return Decision("torch", self._why, None)
        obstacle, evidence = self._obstacle(config), None
        if obstacle is None:
            if self._asked == "megakernel":
                return Decision("megakernel", self._why, None)
            try:
                evidence = self._evidence(fp8, config)
            except BackendError as error:
                obstacle = str(error)
            else:
                evidence = auto.checked(self.device, evidence) if may_check else evidence
                taken, obstacle = evidence.frame
                if taken:
                    return Decision("megakernel", obstacle, evidence)
        if self.backend == "megakernel":
            raise BackendError(f"the megakernel cannot run here: {obstacle}; use backend='torch'")
        return Decision("torch", f"no megakernel: {obstacle}", evidence)

    def _obstacle(self, config: ModelConfig | None) -> str | None:
        """Why the frame kernel cannot run like this; None: it can. A `config` of None always fits."""
        if self.card is None:
            needed = f"it needs an NVIDIA GPU, but the device is {self.device}"
            return needed if torch.cuda.is_available() else f"{needed}: {why_no_gpu()}"
        if self.dtype != torch.bfloat16:
            return f"it computes in bfloat16, but dtype is {self.dtype}"
        return self.card.obstacle or (why_other_sizes(config) if config else None)

    def _evidence(self, fp8: Collection[str], config: ModelConfig | None) -> Evidence:
        """What is known of our kernels on this card. Raises BackendError: they cannot be compiled, or their sources are
        missing."""
        assert self.card, "`_obstacle` has looked"
        return Evidence.of(Build.of(self.card, fp8), SIZES.get(config.talker.stack.hidden_size) if config else None)

    def choose(self, checkpoint: Checkpoint) -> Backend:
        """The plan for a checkpoint. "auto" may check the kernel first. Raises BackendError: see `decide`; or the
        kernel's sources are missing."""
        fp8 = checkpoint.fp8 if self.fp8 is None else self.fp8
        name, reason, evidence = self.decide(checkpoint.config, fp8, may_check=True)
        plan = Backend(
            name, checkpoint, self.device, self.dtype, fp8, self.vocoder_dtype, reason=reason, threads=self.threads
        )
        if self.card is None:
            return plan
        if self.card.obstacle:
            return replace(plan, vocoder_obstacle=self.card.obstacle)
        try:
            if evidence is None or (name == "torch" and fp8):  # PyTorch's frames need no build for FP8 weights
                evidence = self._evidence(fp8 if name == "megakernel" else (), checkpoint.config)
        except BackendError as error:
            if name == "megakernel":
                raise
            return replace(plan, vocoder_obstacle=str(error))
        told = name == "megakernel" and self._asked == name  # whatever the evidence says
        obstacle = None if told else evidence.vocoder_obstacle
        own_kernels = name == "megakernel" or obstacle is None
        voids = None
        if own_kernels and evidence.key and not evidence.record:
            voids = partial(void, evidence.key, "two kernel faults in service")
        return replace(plan, build=evidence.build, vocoder_obstacle=obstacle, void=voids)
