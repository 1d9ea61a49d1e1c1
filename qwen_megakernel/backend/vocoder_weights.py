"""The vocoder's weights as its kernels read them: convolutions are matrices, with norms and layer scales folded in."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_megakernel.backend.sizes import CHANNEL_TILE, LOW_SCALE
from qwen_megakernel.checkpoint.codec_config import VocoderConfig
from qwen_megakernel.errors import CheckpointError
from qwen_megakernel.model.transformer import rope_frequencies
from qwen_megakernel.model.vocoder import DILATIONS, make_codebook, make_snakes, transposed_taps


def padded(channels: int) -> int:
    """Round up to whole tiles, which the kernels need. The demo voice has only 12 channels."""
    return -(-channels // CHANNEL_TILE) * CHANNEL_TILE


def pad(x: Tensor, dim: int) -> Tensor:
    """Pad a dimension with zeros to whole tiles."""
    missing = padded(x.shape[dim]) - x.shape[dim]
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]).contiguous()


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> fp16, high and low of x = high + low / LOW_SCALE, as csrc/vocoder/halves.cuh makes them. Together they
    have 22 bits. Values beyond fp16's range become its largest."""
    most = torch.finfo(torch.float16).max
    high = x.clamp(-most, most).half()
    return high, (x - high).mul_(LOW_SCALE).clamp_(-most, most).half()


def packed(matrix: Tensor) -> Tensor:
    """fp32 [taps, channels, columns] -> fp16 [taps, channels / 32, columns, 64], as `Convolution::weight` in
    csrc/vocoder/vocoder.h has it: high halves, low ones, in swizzled chunks of 8."""
    taps, channels, columns = matrix.shape
    blocks = channels // CHANNEL_TILE
    out = matrix.new_empty(taps, blocks, columns, 8, 8, dtype=torch.float16)
    device = matrix.device
    places = torch.arange(8, device=device) ^ (torch.arange(columns, device=device) % 8)[:, None]  # [columns, chunks]
    for to, tap in zip(out, matrix, strict=True):  # one by one: small cards have no room for copies of all
        of_columns = tap.unflatten(0, (blocks, 4, 8)).permute(0, 3, 1, 2)  # [blocks, columns, chunks, 8]
        chunks = torch.cat(halves(of_columns), dim=2)
        torch.gather(chunks, 2, places[None, :, :, None].expand_as(chunks), out=to)
    return out.flatten(3)


def transformer_room(device: torch.device) -> tuple[int, int]:
    """What the transformer's kernel can use on a GPU: multiprocessors, at most 128, and bytes of shared memory a block.
    A test replaces this function to simulate a smaller GPU."""
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 48 * 1024)
    return min(128, properties.multi_processor_count), shared_bytes


def transformer_blocks(config: VocoderConfig, multiprocessors: int) -> int:
    """Blocks of the transformer's kernel. All run at once, and each owns some of the hidden columns."""
    return -(-config.hidden_size // -(-config.hidden_size // multiprocessors))


class VocoderWeights:
    """The checkpoint's fp32 tensors as the kernels read them."""

    def __init__(self, config: VocoderConfig, w: Mapping[str, Tensor]):
        """Raises CheckpointError: a tensor is not finite, which the kernels' clamps would hide."""
        finite = torch.stack([tensor.isfinite().all() for tensor in w.values()]).tolist()
        if wrong := [name for name, ok in zip(w, finite, strict=True) if not ok]:
            raise CheckpointError(f"tensor {wrong[0]!r} of the vocoder is not finite; get the checkpoint again")
        c = config
        self._w = w
        self.codebook = pad(make_codebook(c, w), 2)  # [groups, size, channels]
        # SnakeBeta's factors: name -> ([channels], [channels]).
        self.snakes = {n: (pad(f, 0), pad(s, 0)) for n, (f, s) in make_snakes(w).items()}
        multiprocessors, self.shared_bytes = transformer_room(self.codebook.device)
        self.blocks = transformer_blocks(c, multiprocessors)  # of the transformer's kernel, with `shared_bytes` each
        # Convolutions: name -> (fp16 [taps, channels / 32, columns, 64], see `packed`; [columns]).
        self.matrices: dict[str, tuple[Tensor, Tensor]] = {}
        # For each upsampling: kernel [7, channels], bias, gain and shift of the norm.
        self.depthwise: list[tuple[Tensor, ...]] = []
        self.layers = self._transformer(c)  # tensors for the transformer's kernel
        for i, ratio in enumerate(c.upsampling_ratios):
            if i:  # the first is part of the transformer's last matrix
                self._transposed(f"upsample.{i}", f"upsample.{i}.0.conv", ratio)
            name = f"upsample.{i}.1"
            kernel = w[f"{name}.dwconv.conv.weight"][:, 0].T
            parts = (kernel, w[f"{name}.dwconv.conv.bias"], w[f"{name}.norm.weight"], w[f"{name}.norm.bias"])
            self.depthwise.append(tuple(p.contiguous() for p in parts))
            self._linear(f"upsample.{i}.pwconv1", w[f"{name}.pwconv1.weight"], w[f"{name}.pwconv1.bias"])
            gamma = w[f"{name}.gamma"]
            self._linear(
                f"upsample.{i}.pwconv2", gamma[:, None] * w[f"{name}.pwconv2.weight"], gamma * w[f"{name}.pwconv2.bias"]
            )
        self._convolution("decoder.0", "decoder.0.conv")
        for i, rate in enumerate(c.upsample_rates, start=1):
            self._transposed(f"decoder.{i}.up", f"decoder.{i}.block.1.conv", rate)
            for unit in range(2, 2 + len(DILATIONS)):
                for conv in ("conv1", "conv2"):
                    self._convolution(f"decoder.{i}.{unit}.{conv}", f"decoder.{i}.block.{unit}.{conv}.conv")
        last = f"decoder.{len(c.upsample_rates) + 2}.conv"
        self.sound = (pad(w[f"{last}.weight"][0].T, 1), w[f"{last}.bias"])  # the last convolution: [7, channels], [1]
        del self._w  # the checkpoint's own tensors, 460 MB at the published dims

    def _transformer(self, c: VocoderConfig) -> dict[str, Tensor]:
        """The tensors of `Layers` in csrc/vocoder/vocoder.h: `weights`, with norm weights and layer scales folded in,
        biases and constants."""
        w, name, ribbon = self._w, "pre_transformer", []

        def add(matrix: Tensor, together: int = 1) -> None:
            """Append [columns, K]. Every `together` neighbouring columns stay in one block."""
            each = together * -(-len(matrix) // (together * self.blocks))
            ribbon.append(F.pad(matrix, (0, 0, 0, each * self.blocks - len(matrix))).flatten())

        # The first convolution and the input projection are both linear, so they become one matrix, multiplied in fp64.
        # The same holds for the output projection and the first upsampling.
        inner, bias = (w[f"{name}.input_proj.{n}"].double() for n in ("weight", "bias"))
        taps = w["pre_conv.conv.weight"].double().permute(2, 0, 1)  # [3, latent, codebook_dim]
        for tap in taps:
            add((inner @ tap).float())
        bias_in = (inner @ w["pre_conv.conv.bias"].double() + bias).float()
        for i in range(c.num_layers):
            layer = f"{name}.layers.{i}"
            norm, post = (w[f"{layer}.{n}_layernorm.weight"] for n in ("input", "post_attention"))
            add(torch.cat([w[f"{layer}.self_attn.{p}_proj.weight"] for p in "qkv"]) * norm)
            add(w[f"{layer}.self_attn_layer_scale.scale"][:, None] * w[f"{layer}.self_attn.o_proj.weight"])
            both = torch.stack([w[f"{layer}.mlp.{p}_proj.weight"] for p in ("gate", "up")], dim=1).flatten(0, 1)
            add(both * post, together=2)
            add(w[f"{layer}.mlp_layer_scale.scale"][:, None] * w[f"{layer}.mlp.down_proj.weight"])
        up = w["upsample.0.0.conv.weight"].double().permute(2, 1, 0).flatten(0, 1)  # [ratio * latent, latent]
        up_bias = w["upsample.0.0.conv.bias"].double().repeat(c.upsampling_ratios[0])
        outer, bias = (w[f"{name}.output_proj.{n}"].double() for n in ("weight", "bias"))
        add((up @ outer * w[f"{name}.norm.weight"]).float())
        return {
            "weights": torch.cat(ribbon),
            "bias_in": bias_in,
            "bias_out": (up @ bias + up_bias).float(),
            "inv_freq": rope_frequencies(c.head_dim, c.rope_theta).to(self.codebook.device),
        }

    def _linear(self, name: str, weight: Tensor, bias: Tensor) -> None:
        """weight: [columns, channels]."""
        matrix = pad(pad(weight.T, 0), 1)
        self.matrices[name] = (packed(matrix[None]), pad(bias, 0))

    def _convolution(self, name: str, source: str) -> None:
        """[out, in, taps] -> [taps, in, out]"""
        weight = self._w[f"{source}.weight"].permute(2, 1, 0)
        self.matrices[name] = (packed(pad(pad(weight, 1), 2)), pad(self._w[f"{source}.bias"], 0))

    def _transposed(self, name: str, source: str, rate: int) -> None:
        """[in, out, blocks * rate] -> [blocks, in, rate * out]. An output block of `rate` rows is one row of
        `rate * out` columns. It depends on its own input and the ones before it, the oldest first."""
        weight = transposed_taps(pad(pad(self._w[f"{source}.weight"], 0), 1), rate)
        self.matrices[name] = (packed(weight), pad(self._w[f"{source}.bias"], 0).repeat(rate))
