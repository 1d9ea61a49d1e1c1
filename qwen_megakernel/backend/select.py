"""Where a model runs: which device, which backend, and a frame decoder for it."""

import logging
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from qwen_megakernel.backend.build import load_extension, why_no_build, why_no_gpu
from qwen_megakernel.backend.frame_decoder import FrameDecoder, TorchFrameDecoder
from qwen_megakernel.backend.megakernel import MegakernelFrameDecoder, why_no_megakernel
from qwen_megakernel.backend.targets import why_untried
from qwen_megakernel.backend.vocoder_graphs import GraphVocoder, why_no_graphs
from qwen_megakernel.checkpoint.config import ModelConfig, VocoderConfig
from qwen_megakernel.checkpoint.fp8 import dequantized, parts_in
from qwen_megakernel.errors import BackendError
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.model.vocoder import Vocoder

log = logging.getLogger(__name__)

BACKENDS = ("auto", "megakernel", "torch")
VOCODER_DTYPES = ("float32", "tf32", "bfloat16")


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
    if device is None or device.type not in ("cpu", "cuda"):
        raise BackendError(f"device must be 'cpu' or 'cuda[:n]', got {str(given)!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"device {device} was asked for, but torch can use no CUDA GPU: {why_no_gpu()}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BackendError(f"device {device} was asked for, but torch sees {torch.cuda.device_count()} CUDA GPUs")
    return device


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
) -> Vocoder | GraphVocoder:
    """The vocoder over every fp32 `decoder.*` tensor: CUDA graphs of our kernels where they have been run, else eager
    PyTorch.

    Args:
        dtype: one of `VOCODER_DTYPES`.
        recent_codes: the frame decoder's (`FrameDecoder.recent_codes`).
        fp8: of the frame decoder's weights: its build has the vocoder's kernels too.

    Raises:
        BackendError: "tf32" where our kernels cannot run.
    """
    if dtype == "bfloat16":
        return Vocoder(config, tensors, slots=slots, dtype=torch.bfloat16)
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
    return Vocoder(config, tensors, slots=slots)
