"""Vocoder: codes -> 24 kHz PCM, stateful and exact.

The speech tokenizer's decoder is strictly causal: a frame's 1,920 samples depend on its codes and on the
past, never on the future. So nothing has to be decoded twice or blended. Every layer that looks back keeps
the few columns that it will need again. Frames pushed in any portions give the samples that one decode of
the whole gives (within fp32 rounding, 2e-5).

    codes -> RVQ sum -> conv k3 -> 8-layer transformer (window 72) -> 2 x (upsample 2, ConvNeXt)
          -> conv k7 -> 4 x (SnakeBeta, transposed conv, 3 residual units) -> SnakeBeta, conv k7 -> clamp

Layer by layer after the decoder half of qwen_tts 0.1.1's tokenizer_12hz; tensor names are the checkpoint's.
All-zero state is the reference's zero padding. At the published dims a sequence's state is 1,298,496 values.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_megakernel.checkpoint.codec_config import VocoderConfig
from qwen_megakernel.model.transformer import apply_rope, below, rms_norm, rope_frequencies

DILATIONS = (1, 3, 9)
_FEW_VALUES = 20480  # PyTorch convolves an input of no more without oneDNN, and a matrix product takes half the time
_CUDNN_FLAGS = threading.Lock()  # they are the process's: another engine's push would turn ours to TF32


def make_codebook(config: VocoderConfig, w: Mapping[str, Tensor]) -> Tensor:
    """[groups, codebook_size, codebook_dim]: centroids, each times its quantizer's output projection, so that the RVQ
    is one gather and one sum."""
    tables = []
    for quantizer, layers in (("rvq_first", 1), ("rvq_rest", config.num_quantizers - 1)):
        project = w[f"quantizer.{quantizer}.output_proj.weight"][..., 0]
        for i in range(layers):
            book = f"quantizer.{quantizer}.vq.layers.{i}._codebook"
            usage = _told(w[f"{book}.cluster_usage"]).clamp(min=1e-5)
            tables.append(F.linear(w[f"{book}.embedding_sum"] / usage[:, None], project))
    return torch.stack(tables)


def make_snakes(w: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """SnakeBeta's factors: name -> (e^alpha, 1 / (e^beta + 1e-9)), each [channels]."""
    names = (n.removesuffix(".alpha") for n in w if n.endswith(".alpha"))
    return {n: (_told(w[f"{n}.alpha"]).exp(), 1.0 / (_told(w[f"{n}.beta"]).exp() + 1e-9)) for n in names}


def transposed_taps(weight: Tensor, rate: int) -> Tensor:
    """The weight [in, out, n * rate] of a transposed convolution with stride `rate` as [n, in, rate * out]: what each
    of n columns of its input, one after the other, adds to `rate` outputs."""
    parts: Tensor = weight.unflatten(2, (-1, rate)).flip(2)  # [in, out, n, rate]
    return parts.permute(2, 0, 3, 1).flatten(2)


def _told(x: Tensor) -> Tensor:
    """The tensor with NaN for infinity, which a later step would hide: samples that are NaN are found out."""
    return torch.where(x.isfinite(), x, torch.nan)


def history_shapes(c: VocoderConfig) -> dict[str, tuple[int, int]]:
    """What every convolution that looks back keeps of the past: (columns, channels) by layer name."""
    shapes = {"pre_conv": (2, c.codebook_dim), "decoder.0": (6, c.latent_dim)}  # inputs of the k3 conv, of the k7 conv
    for i in range(len(c.upsampling_ratios)):
        shapes[f"upsample.{i}"] = (6, c.latent_dim)  # inputs of the depthwise k7
    channels = c.decoder_dim
    for i in range(1, len(c.upsample_rates) + 1):
        shapes[f"decoder.{i}.up"] = (1, channels)  # input of the transposed conv
        channels //= 2
        for unit, dilation in enumerate(DILATIONS, start=2):
            shapes[f"decoder.{i}.{unit}"] = (6 * dilation, channels)  # inputs of a residual unit's k7
    return shapes | {f"decoder.{len(c.upsample_rates) + 2}": (6, channels)}  # inputs of the k7 conv


def check_push(slots: Sequence[int], codes: Tensor, most_slots: int, groups: int) -> None:
    """Raises ValueError for what `push` of a vocoder with `most_slots` slots cannot take."""
    if codes.ndim != 3 or codes.shape[0] != len(slots) or codes.shape[2] != groups:
        raise ValueError(f"codes must be [{len(slots)}, frames, {groups}], got {list(codes.shape)}")
    if codes.shape[1] < 1 or len(set(slots)) != len(slots) or not all(0 <= s < most_slots for s in slots):
        raise ValueError(
            f"a push needs at least one frame and distinct slots in 0..{most_slots - 1}, "
            f"got {codes.shape[1]} frames for {list(slots)}"
        )


VocoderState = dict[str, Tensor]  # of one sequence after some frames; only its vocoder understands it
Sounds = list[Tensor | None]
"""PCM of some slots: fp32 [frames * 1920] each on the host, in memory of its own. None: a sample is not finite."""


class Portion(NamedTuple):
    """Frames of a reference that the vocoder takes in one call."""

    codes: Tensor  # int64 [frames, groups]
    whole: bool  # through every layer; otherwise only as far as they affect what comes after the reference


class TorchVocoder:
    """Decodes several sequences, each in its own slot. Not thread-safe: one call at a time. The methods are those of
    backend/interfaces.py."""

    together = 1  # sequences that share a push, at most; so a sequence's samples are the same bits whatever else runs
    most_frames = 0  # of a push of `follow`, which it does not have
    steady = False
    follows = False

    def __init__(
        self, config: VocoderConfig, tensors: Mapping[str, Tensor], *, slots: int, dtype: torch.dtype | None = None
    ):
        """`tensors`: every `decoder.*` tensor of the speech tokenizer, one device, one dtype. `dtype`: to compute in;
        None is the tensors' own. Codebooks and SnakeBeta's factors are derived before they are rounded to it."""
        self.slots = slots
        self.groups = config.num_quantizers
        self._config = config
        self._w = {name.removeprefix("decoder."): tensor for name, tensor in tensors.items()}
        some = self._w["pre_conv.conv.weight"]
        self._device = some.device
        self._dtype = dtype or some.dtype
        self._codebook = make_codebook(config, self._w).to(self._dtype)
        # SnakeBeta's factors, each [channels, 1]
        self._snake = {n: tuple(f[:, None].to(self._dtype) for f in fs) for n, fs in make_snakes(self._w).items()}
        self._w = {name: tensor.to(self._dtype) for name, tensor in self._w.items()}
        # On a CPU a matrix product is faster than PyTorch's transposed convolution
        # (docs/log/2026-11-26.md#demo-voice-vocoder).
        self._products = self._device.type == "cpu"
        if self._products:
            strides = {f"upsample.{i}.0.conv": ratio for i, ratio in enumerate(config.upsampling_ratios)}
            strides |= {f"decoder.{i}.block.1.conv": rate for i, rate in enumerate(config.upsample_rates, start=1)}
            for name, rate in strides.items():
                taps = transposed_taps(self._w[f"{name}.weight"], rate)
                self._w[f"{name}.weight"] = taps.flatten(0, 1).T.contiguous()
                self._w[f"{name}.bias"] = self._w[f"{name}.bias"].repeat(rate)
        self._layers = [below(self._w, f"pre_transformer.layers.{i}") for i in range(config.num_layers)]
        self._convnext = [below(self._w, f"upsample.{i}.1") for i in range(len(config.upsampling_ratios))]
        self._inv_freq = rope_frequencies(config.head_dim, config.rope_theta).to(self._device)
        # Of every layer that looks back, by name; all zeros at first. Keys are kept after RoPE.
        shapes: dict[str, tuple[int, ...]] = {name: shape[::-1] for name, shape in history_shapes(config).items()}
        window = (config.num_heads, config.sliding_window - 1, config.head_dim)
        shapes |= {f"{kind}.{i}": window for kind in ("keys", "values") for i in range(config.num_layers)}
        zeros = partial(torch.zeros, device=self._device, dtype=self._dtype)
        self._state = {name: zeros((slots, *shape)) for name, shape in shapes.items()}
        self._position = torch.zeros(slots, dtype=torch.int64)  # frames pushed so far, per slot

    @torch.inference_mode()
    def reset(self, slot: int) -> None:
        self._position[slot] = 0
        for tensor in self._state.values():
            tensor[slot].zero_()

    @torch.inference_mode()
    def save(self, slot: int) -> VocoderState:
        """A copy of a sequence's state, 5 MB at the published dims."""
        tensors = self._state | {"position": self._position}
        return {name: tensor[slot].clone() for name, tensor in tensors.items()}

    @torch.inference_mode()
    def restore(self, slot: int, state: VocoderState) -> None:
        for name, tensor in (self._state | {"position": self._position}).items():
            tensor[slot] = state[name]

    def recover(self) -> None:
        """After a KernelFault. There is nothing to do: all state belongs to slots."""

    @property
    def weight_bytes(self) -> int:
        return self._codebook.nbytes + sum(t.nbytes for t in self._w.values())

    @property
    def slot_bytes(self) -> int:
        return sum(t[0].nbytes for t in self._state.values())

    @staticmethod
    def portions(codes: Tensor) -> list[Portion]:
        return [Portion(some, True) for some in torch.split(codes, 25)]

    def listen(self, slot: int, portion: Portion) -> None:
        self.push([slot], portion.codes[None])

    @torch.inference_mode()
    def push(self, slots: Sequence[int], codes: Tensor) -> Tensor:
        """Decode the next frames of some sequences, whose slots are distinct: codes int64 [len(slots), frames, groups],
        frames >= 1 -> PCM [len(slots), frames * 1920], -1..1, in the vocoder's dtype on its device."""
        check_push(slots, codes, self.slots, self.groups)
        step = _Push(self, slots)
        # By default cuDNN would convolve in TF32, and choose kernels whose results do not repeat.
        with _CUDNN_FLAGS, torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            pcm = step.run(codes.to(self._device))
        for name, tensor in step.state.items():
            self._state[name][step.slots] = tensor
        self._position[step.slots] += codes.shape[1]
        return pcm

    def follow(self, slots: Sequence[int], first: Sequence[int], frames: Sequence[int]) -> Callable[[], Sounds]:
        raise NotImplementedError("it does not follow: push codes from the host")


class _Push:
    """One forward pass: reads the vocoder's state of some slots, leaves the new state in `self.state`."""

    def __init__(self, vocoder: TorchVocoder, slots: Sequence[int]):
        self._v = vocoder
        self._c = vocoder._config
        self._w = vocoder._w
        # A slice is a view, a list copies: on a CPU a push of one frame takes 9.8 ms instead of 10.4.
        self.slots = slice(slots[0], slots[0] + 1) if len(slots) == 1 else list(slots)
        self._past = {name: tensor[self.slots] for name, tensor in vocoder._state.items()}
        self._position = vocoder._position[self.slots].to(vocoder._device)
        self.state: dict[str, Tensor] = {}

    def run(self, codes: Tensor) -> Tensor:
        c = self._c
        groups = torch.arange(c.num_quantizers, device=codes.device)
        x = self._v._codebook[groups, codes].sum(-2)  # [batch, frames, codebook_dim]
        x = self._causal_conv(x.transpose(1, 2), "pre_conv.conv", "pre_conv")
        x = self._transformer(x.transpose(1, 2)).transpose(1, 2)  # [batch, latent_dim, frames]
        for i, ratio in enumerate(c.upsampling_ratios):
            x = self._upsample(x, i, ratio)
        x = self._causal_conv(x, "decoder.0.conv", "decoder.0")
        for i, rate in enumerate(c.upsample_rates, start=1):
            x = self._decoder_block(x, f"decoder.{i}", rate)
        last = len(c.upsample_rates) + 1
        x = self._causal_conv(self._snake(x, f"decoder.{last}"), f"decoder.{last + 1}.conv", f"decoder.{last + 1}")
        return _told(x[:, 0]).clamp(-1.0, 1.0)

    def _with_past(self, x: Tensor, state: str, dim: int = -1) -> Tensor:
        """What was kept, then x [batch, channels, time]; keeps as much of the newest for the next push."""
        past = self._past[state]
        x = torch.cat([past, x], dim)
        self.state[state] = x.narrow(dim, x.shape[dim] - past.shape[dim], past.shape[dim])
        return x

    def _causal_conv(self, x: Tensor, name: str, state: str, dilation: int = 1, groups: int = 1) -> Tensor:
        weight, bias = self._w[f"{name}.weight"], self._w[f"{name}.bias"]
        x = self._with_past(x, state)
        if self._v._products and groups == 1 and x.numel() <= _FEW_VALUES:
            windows = x.unfold(-1, dilation * (weight.shape[2] - 1) + 1, 1)[..., ::dilation]  # [batch, in, time, taps]
            return F.linear(windows.transpose(1, 2).flatten(2), weight.flatten(1), bias).transpose(1, 2).contiguous()
        return F.conv1d(x, weight, bias, dilation=dilation, groups=groups)

    def _transposed_conv(self, x: Tensor, name: str, rate: int) -> Tensor:
        """Stride `rate`. Returns the outputs for which every input column that they need is there."""
        weight, bias = self._w[f"{name}.weight"], self._w[f"{name}.bias"]
        if not self._v._products:
            beyond = weight.shape[2] - rate
            x = F.conv_transpose1d(x, weight, bias, stride=rate)
            return x[..., beyond : x.shape[-1] - beyond]
        columns = weight.shape[1] // x.shape[1]
        windows = x.transpose(1, 2).unfold(1, columns, 1)  # [batch, time, in, columns]
        x = F.linear(windows.transpose(2, 3).flatten(2), weight, bias)  # [batch, time, rate * out]
        x = x.unflatten(2, (rate, -1)).flatten(1, 2)
        return x.transpose(1, 2).contiguous()

    def _snake(self, x: Tensor, name: str) -> Tensor:
        """SnakeBeta: x + sin(x * e^alpha)^2 / (e^beta + 1e-9)."""
        frequency, scale = self._v._snake[name]
        return torch.addcmul(x, scale, (x * frequency).sin_().square_())

    def _upsample(self, x: Tensor, i: int, ratio: int) -> Tensor:
        """Transposed conv whose kernel is its stride (columns do not overlap), then a ConvNeXt block."""
        name = f"upsample.{i}"
        x = self._transposed_conv(x, f"{name}.0.conv", ratio)
        w = self._v._convnext[i]
        y = self._causal_conv(x, f"{name}.1.dwconv.conv", name, groups=x.shape[1]).transpose(1, 2)
        y = F.layer_norm(y, y.shape[-1:], w["norm.weight"], w["norm.bias"], 1e-6)
        y = F.gelu(F.linear(y, w["pwconv1.weight"], w["pwconv1.bias"]))
        y = w["gamma"] * F.linear(y, w["pwconv2.weight"], w["pwconv2.bias"])
        return x + y.transpose(1, 2)

    def _decoder_block(self, x: Tensor, name: str, rate: int) -> Tensor:
        """SnakeBeta, transposed conv (kernel 2 * rate, stride rate, right end trimmed), residual units."""
        block = f"{name}.block"
        x = self._with_past(self._snake(x, f"{block}.0"), f"{name}.up")
        # An output block needs its own input column and the one before it: the first block belongs to the
        # kept column and the last to the next push.
        x = self._transposed_conv(x, f"{block}.1.conv", rate)
        for unit, dilation in enumerate(DILATIONS, start=2):
            y = self._snake(x, f"{block}.{unit}.act1")
            y = self._causal_conv(y, f"{block}.{unit}.conv1.conv", f"{name}.{unit}", dilation)
            y = self._snake(y, f"{block}.{unit}.act2")
            pointwise = f"{block}.{unit}.conv2.conv"
            x = F.conv1d(y, self._w[f"{pointwise}.weight"], self._w[f"{pointwise}.bias"]).add_(x)
        return x

    def _transformer(self, x: Tensor) -> Tensor:
        """[batch, frames, latent_dim] -> the same; attention over this frame and the window before it."""
        c, name = self._c, "pre_transformer"
        x = F.linear(x, self._w[f"{name}.input_proj.weight"], self._w[f"{name}.input_proj.bias"])
        positions = self._position[:, None] + torch.arange(x.shape[1], device=x.device)  # [batch, frames]
        angles = positions[..., None].float() * self._v._inv_freq
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = self._window_mask(x.shape[1])
        for i, w in enumerate(self._v._layers):
            y = rms_norm(x, w["input_layernorm.weight"], c.rms_norm_eps)
            q, k, v = (
                torch.unflatten(F.linear(y, w[f"self_attn.{p}_proj.weight"]), -1, (-1, c.head_dim)).transpose(1, 2)
                for p in "qkv"
            )
            k = self._with_past(apply_rope(k, cos, sin), f"keys.{i}", -2)
            v = self._with_past(v, f"values.{i}", -2)
            y = F.scaled_dot_product_attention(apply_rope(q, cos, sin), k, v, attn_mask=mask)
            y = F.linear(y.transpose(1, 2).flatten(2), w["self_attn.o_proj.weight"])
            x = x + w["self_attn_layer_scale.scale"] * y
            y = rms_norm(x, w["post_attention_layernorm.weight"], c.rms_norm_eps)
            y = F.silu(F.linear(y, w["mlp.gate_proj.weight"])) * F.linear(y, w["mlp.up_proj.weight"])
            x = x + w["mlp_layer_scale.scale"] * F.linear(y, w["mlp.down_proj.weight"])
        x = rms_norm(x, self._w[f"{name}.norm.weight"], c.rms_norm_eps)
        return F.linear(x, self._w[f"{name}.output_proj.weight"], self._w[f"{name}.output_proj.bias"])

    def _window_mask(self, frames: int) -> Tensor:
        """[batch, 1, frames, window - 1 + frames]: a frame sees itself and the window - 1 frames before it, but
        none from before its sequence began."""
        kept = self._c.sliding_window - 1
        device = self._position.device
        key = torch.arange(kept + frames, device=device)
        age = torch.arange(kept, kept + frames, device=device)[:, None] - key  # 0 is the frame itself
        visible = (age >= 0) & (age <= kept)
        begun = key >= kept - self._position[:, None]  # [batch, keys]
        return (visible & begun[:, None])[:, None]
