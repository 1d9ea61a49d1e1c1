"""Where a model runs: the device, and a `Backend` that puts the model there."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen_megakernel.backend.build import load_extension, why_no_build, why_no_gpu
from qwen_megakernel.backend.cpu_threads import measure
from qwen_megakernel.backend.cuda_graphs import synchronize
from qwen_megakernel.backend.interfaces import FrameDecoder, LoadedModel, Vocoder
from qwen_megakernel.backend.megakernel import MegakernelFrameDecoder
from qwen_megakernel.backend.torch_decoder import TorchFrameDecoder
from qwen_megakernel.backend.vocoder_graphs import GraphVocoder, why_no_graphs
from qwen_megakernel.checkpoint.codec_config import VocoderConfig
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.fp8 import dequantized, parts_in
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.errors import BackendError
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.model.vocoder import TorchVocoder
from qwen_megakernel.sampling_params import SamplingParams

log = logging.getLogger(__name__)

MAX_THREADS = 256


def select_device(device: str | torch.device | None) -> torch.device:
    """The device to run on; None takes a CUDA GPU if there is one. Raises BackendError: there is no such device."""
    given = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError, ValueError):  # its message lists devices that we do not take
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise BackendError(f"device must be 'cpu' or 'cuda[:n]', got {str(given)!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"device {device} was asked for, but torch can use no CUDA GPU: {why_no_gpu()}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BackendError(f"device {device} was asked for, but the last is cuda:{torch.cuda.device_count() - 1}")
    return device


def check_threads(threads: int | None, device: torch.device) -> None:
    """Raises BackendError for a number of CPU threads that no engine on this device can have."""
    if threads is None:
        return
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise BackendError(f"threads must be an integer in 1..{MAX_THREADS}, got {threads!r}")
    if device.type != "cpu":
        raise BackendError(f"threads is for a CPU, but the device is {device}: leave threads out")


def make_embeddings(backend: str, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Embeddings:
    """The row maker for a backend that `select_backend` chose, over every `talker.*` tensor."""
    device = tensors["talker.model.norm.weight"].device
    return Embeddings(
        config.talker, tensors, load_extension(device, parts_in(tensors)) if backend == "megakernel" else None
    )


def make_decoder(
    backend: str,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    embeddings: Embeddings,
    *,
    slots: int,
    max_positions: int,
) -> FrameDecoder:
    """The frame decoder of a backend that `select_backend` chose, over every `talker.*` tensor. For PyTorch, E4M3
    weights are dequantised."""
    if backend == "torch":
        tensors = dequantized(tensors, tensors["talker.model.norm.weight"].dtype)
        return TorchFrameDecoder(config, tensors, embeddings, slots=slots, max_positions=max_positions)
    decoder = MegakernelFrameDecoder(config, tensors, slots=slots, max_positions=max_positions)
    embeddings.share([decoder.buffers["code0_embedding"], *decoder.buffers["code_embedding"]])
    return decoder


def make_vocoder(
    config: VocoderConfig,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    dtype: str,
    *,
    slots: int,
    recent_codes: Tensor | None = None,
    fp8: Collection[str] = (),
    obstacle: str | None = None,
) -> Vocoder:
    """The vocoder over every fp32 `decoder.*` tensor: CUDA graphs of our kernels where they can run, else eager
    PyTorch. `dtype`: as `dtypes.vocoder_dtype_of` returns it. `recent_codes`: the frame decoder's
    (`FrameDecoder.recent_codes`). `fp8`: FP8 parts of the frame decoder, whose build holds the vocoder's kernels too.
    `obstacle`: why our kernels must not be used on a GPU; None: they may be. Raises BackendError: "tf32" was asked for
    and our kernels cannot run."""
    if dtype == "bfloat16":
        return TorchVocoder(config, tensors, slots=slots, dtype=torch.bfloat16)
    if device.type == "cpu":
        obstacle = "the device is a CPU"
    else:
        obstacle = obstacle or why_no_build(device) or why_no_graphs(config, device)
    if obstacle is None:
        try:
            extension = load_extension(device, fp8)
        except BackendError as error:  # PyTorch serves where nothing can be compiled
            obstacle = str(error)
        else:
            exact = dtype == "float32"
            return GraphVocoder(extension, config, tensors, slots=slots, exact=exact, recent_codes=recent_codes)
    if dtype == "tf32":
        raise BackendError(f"vocoder_dtype='tf32' needs the vocoder's kernels, and {obstacle}; use 'float32'")
    if device.type == "cuda":
        log.warning("the vocoder runs on PyTorch, which takes several times as long: %s", obstacle)
    return TorchVocoder(config, tensors, slots=slots)


@dataclass(frozen=True)
class Backend:
    """How a checkpoint runs on a device.

    Attributes:
        void: is called when our kernels are given up, so that "auto" takes PyTorch from then on. None: there is no
            verdict to void, because the card has a record of ours, or because PyTorch alone computes.
    """

    name: str  # "torch" or "megakernel"
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype  # of talker and code predictor
    fp8: frozenset[str] = frozenset()  # parts (fp8.PARTS) whose weights are E4M3
    vocoder_dtype: str = "float32"  # as `dtypes.vocoder_dtype_of` returns it
    own_kernels: bool = True  # False: the vocoder is PyTorch's too
    vocoder_obstacle: str | None = None  # why the vocoder's kernels must not be used; None: they may be
    threads: int | None = None  # that PyTorch computes with on a CPU; None: measure the best number
    void: Callable[[], None] | None = None

    @torch.inference_mode()
    def load(self, slots: int, max_positions: int) -> LoadedModel:
        """Put the model onto the device. Raises CheckpointError or BackendError: it cannot be loaded here."""
        config, tensors = self.checkpoint.config, self.checkpoint.talker(self.device, self.dtype, self.fp8)
        embeddings = make_embeddings(self.name, config, tensors)
        decoder = make_decoder(self.name, config, tensors, embeddings, slots=slots, max_positions=max_positions)
        del tensors  # the kernel has its own copy; this makes room for the vocoder's weights
        model = LoadedModel(embeddings, decoder, self._vocoder(slots, decoder.recent_codes), check_device)
        if self.device.type != "cpu":
            return model
        return replace(model, cpu=measure(model, SamplingParams(seed=0).over(config.sampling), self.threads))

    def _vocoder(self, slots: int, recent_codes: Tensor | None) -> Vocoder:
        config, tensors = self.checkpoint.config.codec.vocoder, self.checkpoint.vocoder(self.device, torch.float32)
        if not self.own_kernels:
            return TorchVocoder(config, tensors, slots=slots)
        what = (config, tensors, self.device, self.vocoder_dtype)
        fp8 = self.fp8 if self.name == "megakernel" else frozenset()  # a build that exists
        return make_vocoder(*what, slots=slots, recent_codes=recent_codes, fp8=fp8, obstacle=self.vocoder_obstacle)

    def spare(self) -> "Backend | None":
        """The backend that takes over when our kernels fail: the same on PyTorch alone. None: this is already it."""
        vocoder = self.own_kernels and self.vocoder_obstacle is None
        if self.device.type != "cuda" or not (self.name == "megakernel" or vocoder):
            return None
        return replace(self, name="torch", own_kernels=False, void=None)


def check_device() -> None:
    """Raises CUDA's own error if a device of this process is lost."""
    if torch.cuda.is_initialized():
        synchronize()
