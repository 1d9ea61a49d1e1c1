"""Where a model runs: the device, and a `Backend` that puts the model there."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen_megakernel.backend.build import Build
from qwen_megakernel.backend.card import why_no_gpu
from qwen_megakernel.backend.cpu_threads import measure
from qwen_megakernel.backend.cuda_graphs import synchronize
from qwen_megakernel.backend.interfaces import FrameDecoder, LoadedModel, Vocoder
from qwen_megakernel.backend.megakernel import MegakernelFrameDecoder
from qwen_megakernel.backend.torch_decoder import TorchFrameDecoder
from qwen_megakernel.backend.vocoder_graphs import GraphVocoder, why_no_graphs
from qwen_megakernel.checkpoint.fp8 import dequantized
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.errors import BackendError
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.model.vocoder import TorchVocoder
from qwen_megakernel.sampling_params import SamplingParams

log = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Backend:
    """The plan of an engine: how a checkpoint runs on a device. `Selection.choose` makes it once; others read it."""

    name: str  # "torch" or "megakernel"
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype  # of talker and code predictor
    fp8: frozenset[str] = frozenset()  # parts (fp8.PARTS) whose weights are E4M3
    vocoder_dtype: str = "float32"  # as `dtypes.vocoder_dtype_of` returns it
    build: Build | None = None  # our kernels for this card and these weights; None: PyTorch alone computes
    vocoder_obstacle: str | None = None  # why the vocoder's kernels must not be used; None: they may be
    # Why this backend: what was asked for, what is in the way, a card's record or the self-check's verdict.
    reason: str = "asked for"
    threads: int | None = None  # that PyTorch computes with on a CPU; None: measure the best number
    # Is called when our kernels are given up, so that "auto" takes PyTorch from then on. None: there is no verdict to
    # void, because the card has a record of ours, or because PyTorch alone computes.
    void: Callable[[], None] | None = None

    def frame_decoder(
        self, tensors: Mapping[str, Tensor], *, slots: int, max_positions: int, pages: int | None = None
    ) -> tuple[Embeddings, FrameDecoder]:
        """Row maker and frame decoder over every `talker.*` tensor. PyTorch's dequantises E4M3 weights. `pages`: that
        the kernel's slots share; None: enough for all of them."""
        config = self.checkpoint.config
        if self.name == "torch":
            embeddings, plain = Embeddings(config.talker, tensors), dequantized(tensors, self.dtype)
            return embeddings, TorchFrameDecoder(config, plain, embeddings, slots=slots, max_positions=max_positions)
        assert self.build, "`Selection.choose` has made it"
        extension = self.build.load()
        embeddings = Embeddings(config.talker, tensors, extension)
        decoder = MegakernelFrameDecoder(
            config, tensors, slots=slots, max_positions=max_positions, pages=pages, extension=extension
        )
        embeddings.share([decoder.buffers["code0_embedding"], *decoder.buffers["code_embedding"]])
        return embeddings, decoder

    @torch.inference_mode()
    def load(self, slots: int, max_positions: int, pages: int | None = None) -> LoadedModel:
        """Put the model onto the device. `pages`: see `frame_decoder`. Raises CheckpointError or BackendError: it
        cannot be loaded here."""
        config, tensors = self.checkpoint.config, self.checkpoint.talker(self.device, self.dtype, self.fp8)
        embeddings, decoder = self.frame_decoder(tensors, slots=slots, max_positions=max_positions, pages=pages)
        del tensors  # the kernel has its own copy; this makes room for the vocoder's weights
        model = LoadedModel(embeddings, decoder, self.vocoder(slots, decoder.recent_codes), check_device)
        if self.device.type != "cpu":
            return model
        return replace(model, cpu=measure(model, SamplingParams(seed=0).over(config.sampling), self.threads))

    def vocoder(self, slots: int, recent_codes: Tensor | None = None) -> Vocoder:
        """CUDA graphs of our kernels where they can run, else eager PyTorch. `recent_codes`: the frame decoder's
        (`FrameDecoder.recent_codes`). Raises BackendError: "tf32" was asked for and our kernels cannot run."""
        config, tensors = self.checkpoint.config.codec.vocoder, self.checkpoint.vocoder(self.device, torch.float32)
        dtype, obstacle = self.vocoder_dtype, self.vocoder_obstacle
        if dtype == "bfloat16":
            return TorchVocoder(config, tensors, slots=slots, dtype=torch.bfloat16)
        if self.build is not None and obstacle is None:
            obstacle = why_no_graphs(config, self.device)
            if obstacle is None:
                try:
                    extension = self.build.load()
                except BackendError as error:  # PyTorch serves where nothing can be compiled
                    obstacle = str(error)
                else:
                    exact = dtype == "float32"
                    return GraphVocoder(extension, config, tensors, slots=slots, exact=exact, recent_codes=recent_codes)
        if dtype == "tf32":
            raise BackendError(f"vocoder_dtype='tf32' needs the vocoder's kernels, and {obstacle}; use 'float32'")
        if obstacle is not None:
            log.warning("the vocoder runs on PyTorch, which takes several times as long: %s", obstacle)
        return TorchVocoder(config, tensors, slots=slots)

    def spare(self) -> "Backend | None":
        """The backend that takes over when our kernels fail: the same on PyTorch alone. None: this is already it."""
        if self.build is None or not (self.name == "megakernel" or self.vocoder_obstacle is None):
            return None
        return replace(self, name="torch", vocoder_dtype="float32", build=None, vocoder_obstacle=None, void=None)


def check_device() -> None:
    """Raises CUDA's own error if a device of this process is lost."""
    if torch.cuda.is_initialized():
        synchronize()
