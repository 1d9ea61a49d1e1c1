"""Which backend an engine takes: by what was asked for, what can run here, and what is known of the card."""

import logging
from collections.abc import Collection
from functools import partial

import torch

from qwen_megakernel.backend.build import driver_version, why_no_build, why_no_gpu
from qwen_megakernel.backend.megakernel import why_no_megakernel
from qwen_megakernel.backend.select import Backend, check_threads, select_device
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.dtypes import dtype_of, vocoder_dtype_of
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.choices import BACKENDS, parts_of
from qwen_megakernel.errors import BackendError
from qwen_megakernel.trust import auto
from qwen_megakernel.trust.verdicts import Key, record_of, size_of, void

log = logging.getLogger(__name__)


def select_backend(
    backend: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    config: ModelConfig | None = None,
    fp8: Collection[str] = (),
    *,
    may_check: bool = False,
) -> tuple[str, str]:
    """(backend to use, reason) for a backend name. "auto" takes the megakernel if it can run and there is evidence that
    it is right and faster than PyTorch (auto.py). `dtype`, `config`: of the checkpoint; None: any that fits. `fp8`:
    parts (fp8.PARTS) whose weights are E4M3. `may_check`: if "auto" has no evidence, compile and check the kernel now.
    This takes up to a minute, once. False, or no `config`: assume that it is right. Raises BackendError: the name is
    unknown, the megakernel cannot run like this, or the environment variable for "auto" is not in `auto.MODES`."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise BackendError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    asked, why = backend, "asked for"
    if backend == "auto" and (mode := auto.mode()) != "check":
        asked, why = mode, f"{auto.VARIABLE}={mode} asks for it"
    if asked == "torch":
        return "torch", why
    obstacle = why_no_megakernel(device, dtype, config)
    if obstacle is None:
        if asked == "megakernel":
            return "megakernel", why
        taken, obstacle = auto.decide(device, size_of(config) if config else None, fp8, may_check=may_check)
        if taken:
            return "megakernel", obstacle
    if backend == "megakernel":
        raise BackendError(f"the megakernel cannot run here: {obstacle}; use backend='torch'")
    return "torch", f"no megakernel: {obstacle}"


class Selection:
    """How an engine shall run, by `TTSEngine.load`'s arguments. It is made before a checkpoint is looked for, and
    refuses what can run with none.

    Raises:
        BackendError: the backend, device, dtype, weights or number of threads cannot be used here.
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
        self.backend = backend
        self.device = select_device(device)
        self.dtype = dtype_of(("bfloat16" if self.device.type == "cuda" else "float32") if dtype is None else dtype)
        self.vocoder_dtype = vocoder_dtype_of(vocoder_dtype)
        if self.vocoder_dtype == "tf32" and self.device.type == "cpu":
            raise BackendError("vocoder_dtype='tf32' needs an NVIDIA GPU, the device is a CPU; use 'float32'")
        self.fp8 = None if weights is None else parts_of(weights)
        check_threads(threads, self.device)
        self.threads = threads
        select_backend(backend, self.device, self.dtype)

    def choose(self, checkpoint: Checkpoint) -> Backend:
        """The backend for a checkpoint, logged in one line. "auto" may check the kernel first. Raises BackendError: see
        `select_backend`."""
        device, size = self.device, size_of(checkpoint.config)
        fp8 = checkpoint.fp8 if self.fp8 is None else self.fp8
        name, reason = select_backend(self.backend, device, self.dtype, checkpoint.config, fp8, may_check=True)
        built = fp8 if name == "megakernel" else frozenset()
        obstacle = voids = None
        if device.type == "cuda":
            told = name == "megakernel" and (self.backend == name or auto.mode() == name)  # whatever the evidence says
            obstacle = None if told else auto.why_no_vocoder(device, size, built)
            own_kernels = name == "megakernel" or obstacle is None
            if own_kernels and size and not record_of(device) and not why_no_build(device):
                voids = partial(void, Key.of(device, size, built), "two kernel faults in service")
        kind = str(self.dtype).removeprefix("torch.") + (f", FP8: {', '.join(sorted(fp8))}" if fp8 else "")
        if device.type == "cpu":
            why = why_no_gpu() if driver_version() else "no NVIDIA GPU was found"
            log.info("PyTorch speaks on the CPU%s", "" if torch.cuda.is_available() else f": {why}")
            log.debug("backend %s, %s (%s)", name, kind, reason)
        else:
            log.info("backend %s on %s, %s (%s)", name, device, kind, reason)
        what = (name, checkpoint, device, self.dtype, fp8, self.vocoder_dtype)
        return Backend(*what, vocoder_obstacle=obstacle, threads=self.threads, void=voids)
