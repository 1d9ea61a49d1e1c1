"""Where a model runs: which device, which backend, and a `Backend` that puts the model there."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen_megakernel.backend.build import load_extension, why_no_build, why_no_gpu
from qwen_megakernel.backend.cpu_threads import measure
from qwen_megakernel.backend.cuda_graphs import synchronize
from qwen_megakernel.backend.interfaces import FrameDecoder, LoadedModel, Vocoder
from qwen_megakernel.backend.megakernel import MegakernelFrameDecoder, why_no_megakernel
from qwen_megakernel.backend.targets import why_untried
from qwen_megakernel.backend.torch_decoder import TorchFrameDecoder
from qwen_megakernel.backend.vocoder_graphs import GraphVocoder, why_no_graphs
from qwen_megakernel.checkpoint.codec_config import VocoderConfig
from qwen_megakernel.checkpoint.config import ModelConfig, SamplingParams
from qwen_megakernel.checkpoint.fp8 import dequantized, parts_in
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.errors import BackendError
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.model.vocoder import TorchVocoder

log = logging.getLogger(__name__)

MAX_THREADS = 256

BACKENDS = ("auto", "megakernel", "torch")


def select_backend(
    backend: str, device: torch.device, dtype: torch.dtype | None = None, config: ModelConfig | None = None
) -> tuple[str, str]:
    """(backend to use, reason) for a backend name; "auto" takes the megakernel where it can run and has been run.

    Raises:
        BackendError: an unknown name, or a megakernel that cannot run like this.
    """
    if backend not in BACKENDS:
        raise BackendError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch":
        return "torch", "asked for"
    obstacle = why_no_megakernel(device, dtype, config)
    if obstacle is None and backend == "auto":
        obstacle = why_untried(device)
    if obstacle is None:
        return "megakernel", "asked for" if backend == "megakernel" else "this GPU and checkpoint can run it"
    if backend == "megakernel":
        raise BackendError(f"the megakernel cannot run here: {obstacle}; use backend='torch'")
    return "torch", f"no megakernel: {obstacle}"


def select_device(device: str | torch.device | None) -> torch.device:
    """The device to run on; None takes a CUDA GPU if there is one.

    Raises:
        BackendError: no such device here.
    """
    given = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):  # whose message lists devices that are not taken here
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise BackendError(f"device must be 'cpu' or 'cuda[:n]', got {str(given)!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"device {device} was asked for, but torch can use no CUDA GPU: {why_no_gpu()}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BackendError(f"device {device} was asked for, but torch sees {torch.cuda.device_count()} CUDA GPUs")
    return device


def check_threads(threads: int | None, device: torch.device) -> None:
    """Raises BackendError for a number of CPU threads that no engine on this device can have."""
    if threads is None:
        return
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise BackendError(f"threads must be an integer in 1..{MAX_THREADS}, got {threads!r}")
    if device.type != "cpu":
        raise BackendError(f"threads are a CPU's, and the device is {device}: leave threads out")


def make_embeddings(backend: str, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Embeddings:
    """What makes the rows for a backend that `select_backend` chose, over every `talker.*` tensor."""
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
    """The frame decoder of a backend that `select_backend` chose, over every `talker.*` tensor. PyTorch's has E4M3
    weights dequantised."""
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
) -> Vocoder:
    """The vocoder over every fp32 `decoder.*` tensor: CUDA graphs of our kernels where they have been run, else eager
    PyTorch.

    Args:
        dtype: as `dtypes.vocoder_dtype_of` returns it.
        recent_codes: the frame decoder's (`FrameDecoder.recent_codes`).
        fp8: of the frame decoder's weights: its build has the vocoder's kernels too.

    Raises:
        BackendError: "tf32" where our kernels cannot run.
    """
    if dtype == "bfloat16":
        return TorchVocoder(config, tensors, slots=slots, dtype=torch.bfloat16)
    if device.type == "cpu":
        obstacle = "the device is a CPU"
    else:
        obstacle = why_no_build(device) or why_untried(device) or why_no_graphs(config, device)
    if obstacle is None:
        try:
            extension = load_extension(device, fp8)
        except BackendError as error:  # PyTorch goes on where nothing can be compiled
            obstacle = str(error)
        else:
            options = {"slots": slots, "exact": dtype == "float32", "recent_codes": recent_codes}
            return GraphVocoder(extension, config, tensors, **options)
    if dtype == "tf32":
        raise BackendError(f"vocoder_dtype='tf32' needs the vocoder's kernels, and {obstacle}; use 'float32'")
    if device.type == "cuda":
        log.warning("the vocoder runs on PyTorch, which takes several times as long: %s", obstacle)
    return TorchVocoder(config, tensors, slots=slots)


@dataclass(frozen=True)
class Backend:
    """How a checkpoint runs on a device.

    Attributes:
        name: "torch" or "megakernel", as `select_backend` chose.
        dtype: of talker and code predictor.
        fp8: parts (fp8.PARTS) whose weights are E4M3.
        vocoder_dtype: see `dtypes.vocoder_dtype_of`.
        own_kernels: False: the vocoder is PyTorch's too.
        threads: that PyTorch computes with on a CPU; None: the best number is measured.

    Raises:
        BackendError: `threads` is no such number, or the device is no CPU.
    """

    name: str
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    fp8: frozenset[str] = frozenset()
    vocoder_dtype: str = "float32"
    own_kernels: bool = True
    threads: int | None = None

    def __post_init__(self):
        check_threads(self.threads, self.device)

    @torch.inference_mode()
    def load(self, slots: int, max_positions: int) -> LoadedModel:
        """Put the model onto the device.

        Raises:
            CheckpointError, BackendError: it cannot be had here.
        """
        config, tensors = self.checkpoint.config, self.checkpoint.talker(self.device, self.dtype, self.fp8)
        embeddings = make_embeddings(self.name, config, tensors)
        decoder = make_decoder(self.name, config, tensors, embeddings, slots=slots, max_positions=max_positions)
        del tensors  # the kernel has its own copy: room for the vocoder's
        model = LoadedModel(embeddings, decoder, self._vocoder(slots, decoder.recent_codes), check_device)
        if self.device.type != "cpu":
            return model
        return replace(model, cpu=measure(model, SamplingParams(seed=0).over(config.sampling), self.threads))

    def _vocoder(self, slots: int, recent_codes: Tensor | None) -> Vocoder:
        config, tensors = self.checkpoint.config.codec.vocoder, self.checkpoint.vocoder(self.device, torch.float32)
        if not self.own_kernels:
            return TorchVocoder(config, tensors, slots=slots)
        fp8 = self.fp8 if self.name == "megakernel" else ()  # of the build that is there
        options = {"slots": slots, "recent_codes": recent_codes, "fp8": fp8}
        return make_vocoder(config, tensors, self.device, self.vocoder_dtype, **options)

    def spare(self) -> "Backend | None":
        """What takes over where our kernels fail: the same on PyTorch alone. None: this is it."""
        return replace(self, name="torch", own_kernels=False) if self.name != "torch" else None


def check_device() -> None:
    """Raises what CUDA raises, if a device of this process is lost."""
    if torch.cuda.is_initialized():
        synchronize()
