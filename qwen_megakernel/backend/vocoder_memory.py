"""VocoderMemory: what the vocoder's kernels read and write on a GPU, besides their weights."""

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from qwen_megakernel.backend.sizes import PUSH_FRAMES, PUSH_ROWS, TRANSFORMER_TAPS
from qwen_megakernel.backend.vocoder_weights import VocoderWeights, padded
from qwen_megakernel.checkpoint.codec_config import VocoderConfig
from qwen_megakernel.model.vocoder import DILATIONS

SPIN_LIMIT = 4_000_000  # polls before a wait inside the transformer's kernel gives up: seconds on a healthy card


class VocoderMemory:
    """One vocoder's tensors on its device. Recorded pushes hold their addresses, so none is ever replaced.

    Attributes:
        state: the past that the layers of each slot look back to: [slots, ...] by layer name.
        position: int64 [slots], frames that the transformer has taken in.
        of_slot: for each slot its state as one tensor, and its position; both are reset, saved and restored together.
        frames, embedding, place: a push's inputs (csrc/vocoder/vocoder.h, `PushInputs`); place: an address.
        fault: int32 [1] in pinned memory, not 0 after a wait gave up.
        layers, layer_sizes: tensors and sizes for `extension.transform`.
        rooms: memory for the buffers between the layers; the last is the largest.
    """

    def __init__(self, config: VocoderConfig, weights: VocoderWeights, slots: int, rows: int, device: torch.device):
        """rows: frames of the largest push."""
        self.device = device
        shapes = _state_shapes(config)
        sizes = [math.prod(shape) for shape in shapes.values()]
        everything = torch.zeros(slots, sum(sizes), device=device)
        parts = zip(shapes.items(), everything.split(sizes, dim=1), strict=True)
        self.state: dict[str, Tensor] = {name: part.unflatten(1, shape) for (name, shape), part in parts}
        self.position = torch.zeros(slots, dtype=torch.int64, device=device)
        self.of_slot = list(zip(everything, self.position, strict=True))
        self.frames = torch.zeros(2 + 5 * PUSH_ROWS, dtype=torch.int32, device=device)  # `Frames`, of no frame
        self.embedding = torch.zeros(rows * config.codebook_dim, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.fault = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.layers, self.layer_sizes = self._make_layers(config, weights, rows)
        self.rooms: list[Tensor] = []

    def make_room(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Buffers of the given sizes in values. All graphs share them, because they run one after the other."""
        each = [-(-size // 64) * 64 for size in sizes.values()]  # multiples of 256 bytes, as torch aligns its own
        if not self.rooms or self.rooms[-1].numel() < sum(each):
            self.rooms.append(torch.empty(sum(each), device=self.device))
        return dict(zip(sizes, self.rooms[-1][: sum(each)].split(each), strict=True))

    def forget_epochs(self) -> None:
        """Reset the epochs, so that no block takes an old value of the transformer's exchange for a new one."""
        for name in ("h", "qkv", "attended", "gated", "epoch"):
            self.layers[name].zero_()

    def _make_layers(
        self, c: VocoderConfig, weights: VocoderWeights, rows: int
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Tensors and sizes for `extension.transform`."""
        width = c.num_heads * c.head_dim
        exchange = {"h": c.hidden_size, "qkv": 3 * width, "attended": width, "gated": c.intermediate_size}
        like = partial(torch.zeros, dtype=torch.int32, device=self.device)
        tensors = {name: like(rows * values, 2) for name, values in exchange.items()} | weights.layers
        tensors |= {"rings": self.state["rings"], "position": self.position, "fault": self.fault, "epoch": like(1)}
        return tensors, {
            "blocks": weights.blocks,
            "shared_bytes": weights.shared_bytes,
            "columns_out": len(weights.layers["bias_out"]),
            "hidden": c.hidden_size,
            "window": c.sliding_window,
            "intermediate": c.intermediate_size,
            "spin_limit": SPIN_LIMIT,
        }


def _state_shapes(c: VocoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of each layer's past of a sequence, by layer name: [rows, channels]. The transformer has rings of keys and
    values [layers, 2, heads, ring, head_dim]."""
    rows = {"pre_conv": (TRANSFORMER_TAPS - 1, c.codebook_dim), "decoder.0": (6, c.latent_dim)}
    for i in range(len(c.upsampling_ratios)):
        rows[f"upsample.{i}"] = (6, c.latent_dim)
    channels = c.decoder_dim
    for i in range(1, len(c.upsample_rates) + 1):
        rows[f"decoder.{i}.up"] = (1, channels)
        channels //= 2
        for unit, dilation in enumerate(DILATIONS, start=2):
            rows[f"decoder.{i}.{unit}"] = (6 * dilation, channels)
    rows[f"decoder.{len(c.upsample_rates) + 2}"] = (6, channels)
    rings = (c.num_layers, 2, c.num_heads, c.sliding_window - 1 + PUSH_FRAMES, c.head_dim)
    return {name: (count, padded(channels)) for name, (count, channels) in rows.items()} | {"rings": rings}
