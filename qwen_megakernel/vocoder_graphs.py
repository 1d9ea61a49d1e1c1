"""GraphVocoder: the vocoder on a GPU, a push of 1, 2, 4 or 8 frames as one CUDA graph of csrc/vocoder.cu's kernels.

The arithmetic is vocoder.py's, arranged for few and small launches: rows of channels throughout, so that every
convolution and transposed convolution is a matrix product whose activation, bias and residual are part of its kernel;
layer scales and norms' weights folded into the matrices behind them; keys and values in rings. fp32 products are made
of three TF32 ones on the tensor cores (hi x hi + hi x lo + lo x hi), which keeps fp32's precision; "tf32" makes one.
Codes and PCM cross to and from the device within the graph, through pinned memory.
"""

from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_megakernel.config import VocoderConfig
from qwen_megakernel.frame_graphs import CAPTURING
from qwen_megakernel.vocoder import DILATIONS, VocoderState, check_push, make_codebook, make_snakes

_NONE, _SNAKE, _GELU, _GATE = range(4)  # Activation in csrc/vocoder.h
_FRAMES = (8, 4, 2, 1)  # of a graph
_MOST = 16  # streams x frames of a graph: more fill the card no better, and their buffers grow


def _padded(channels: int) -> int:
    """The kernels take channels by 32; the demo voice has 12."""
    return -(-channels // 32) * 32


def why_no_graphs(config: VocoderConfig) -> str | None:
    """What keeps these dims from the kernels."""
    widths = (config.codebook_dim, config.latent_dim, config.hidden_size, config.num_heads * config.head_dim)
    if any(width % 32 for width in (*widths, config.intermediate_size)) or config.head_dim not in (32, 64):
        return "the vocoder's kernels take widths by 32 and heads of 32 or 64"
    if config.latent_dim > 1024:
        return "the vocoder's kernels take a latent width of at most 1,024"
    if config.sliding_window - 1 + max(_FRAMES) > 80:
        return f"the vocoder's kernels take a window of at most {81 - max(_FRAMES)} frames"
    return None


class GraphVocoder:
    """Takes what `Vocoder` takes and gives its samples within 2e-5, which is also how far a stream's samples may differ
    with the company it is pushed in: how a sum is cut depends on the rows of all. Not thread-safe: one thread owns it.

    Attributes:
        slots: how many streams it holds.
        groups: codes of a frame.
        together: streams that are worth a push of their own.
    """

    together = 8

    def __init__(
        self,
        extension: ModuleType,
        config: VocoderConfig,
        tensors: Mapping[str, Tensor],
        *,
        slots: int,
        exact: bool = True,
    ):
        """
        Args:
            extension: `build.load_extension`'s.
            tensors: every `decoder.*` tensor of the speech tokenizer, fp32, on one CUDA device.
            exact: fp32; False: TF32.
        """
        self.slots, self.groups = slots, config.num_quantizers
        self._extension, self._config, self._exact = extension, config, exact
        self._w = _Weights(config, {name.removeprefix("decoder."): tensor for name, tensor in tensors.items()})
        self._device = self._w.codebook.device
        self._state = self._make_state()
        self._position = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._heard = [0] * slots  # the same on the host
        self._slots = torch.zeros(self.together, dtype=torch.int32, device=self._device)
        self._room: dict[str, Tensor] = {}  # the graphs run one after the other and share it
        self._graphs: dict[tuple[int, int], _Graph] = {}
        with torch.cuda.device(self._device):
            self._capture_stream = torch.cuda.Stream()
            for frames in _FRAMES:
                for streams in range(min(slots, self.together, _MOST // frames), 0, -1):  # the largest makes room first
                    self._graphs[streams, frames] = _Graph(self, streams, frames)

    @torch.inference_mode()
    def reset(self, slot: int) -> None:
        """Forget a stream: its slot starts from silence again."""
        self._position[slot], self._heard[slot] = 0, 0
        # Together: 20 launches would cost more than a frame. What a ring holds beyond the position is not read.
        torch._foreach_zero_([t[slot] for name, t in self._state.items() if not name.startswith(("keys.", "values."))])

    @torch.inference_mode()
    def save(self, slot: int) -> VocoderState:
        """A copy of what a stream left behind; see `restore`."""
        return VocoderState(self._heard[slot], {name: t[slot].clone() for name, t in self._state.items()})

    @torch.inference_mode()
    def restore(self, slot: int, state: VocoderState) -> None:
        """Go on in a slot where `state` was saved, bit for bit."""
        self._position[slot] = self._heard[slot] = state.position
        for name, tensor in self._state.items():
            tensor[slot] = state.tensors[name]

    @property
    def slot_bytes(self) -> int:
        """Memory of one stream's state."""
        return sum(t[0].nbytes for t in self._state.values())

    @torch.inference_mode()
    def push(self, slots: Sequence[int], codes: Tensor) -> Tensor:
        """Decode the next frames of some streams.

        Args:
            slots: distinct slot numbers.
            codes: int64 [len(slots), frames, groups] on the host; frames >= 1, the same count for every slot of a call.

        Returns:
            fp32 PCM, [len(slots), frames * 1920], -1..1, on the host.
        """
        check_push(self, slots, codes)
        pieces, first = [], 0
        with torch.cuda.device(self._device):
            while first < codes.shape[1]:
                frames = next(f for f in _FRAMES if f <= codes.shape[1] - first)
                together = min(self.together, _MOST // frames)
                part = codes[:, first : first + frames]
                runs = [
                    self._graphs[len(some), frames].run(some, part[i : i + together])
                    for i in range(0, len(slots), together)
                    if (some := slots[i : i + together])
                ]
                pieces.append(torch.cat(runs))
                first += frames
                for slot in slots:
                    self._heard[slot] += frames
        return torch.cat(pieces, dim=1)

    def _make_state(self) -> dict[str, Tensor]:
        """What every layer that looks back keeps of the past, by layer name: [slots, rows, channels], and keys and
        values as rings [slots, heads, ring, head_dim]."""
        c = self._config
        rows = {"pre_conv": (2, c.codebook_dim), "decoder.0": (6, c.latent_dim)}
        for i in range(len(c.upsampling_ratios)):
            rows[f"upsample.{i}"] = (6, c.latent_dim)
        channels = c.decoder_dim
        for i in range(1, len(c.upsample_rates) + 1):
            rows[f"decoder.{i}.up"] = (1, channels)
            channels //= 2
            for unit, dilation in enumerate(DILATIONS, start=2):
                rows[f"decoder.{i}.{unit}"] = (6 * dilation, channels)
        rows[f"decoder.{len(c.upsample_rates) + 2}"] = (6, channels)
        shapes = {name: (count, _padded(channels)) for name, (count, channels) in rows.items()}
        ring = c.sliding_window - 1 + max(_FRAMES)
        for i in range(c.num_layers):
            shapes[f"keys.{i}"] = shapes[f"values.{i}"] = (c.num_heads, ring, c.head_dim)
        return {name: torch.zeros((self.slots, *shape), device=self._device) for name, shape in shapes.items()}

    def room(self, name: str, values: int) -> Tensor:
        """A buffer of at least so many values, one for each name."""
        if name not in self._room or self._room[name].numel() < values:
            self._room[name] = torch.empty(values, device=self._device)
        return self._room[name]


class _Graph:
    """A push of some streams and frames, recorded."""

    def __init__(self, vocoder: GraphVocoder, streams: int, frames: int):
        self._v, self._streams, self._frames = vocoder, streams, frames
        c = vocoder._config
        self._samples = frames * c.samples_per_frame
        self._codes = torch.zeros(streams, frames, c.num_quantizers, dtype=torch.int32).pin_memory()
        self._slots = torch.arange(streams, dtype=torch.int32).pin_memory()
        self._pcm = torch.empty(streams, self._samples).pin_memory()
        self._histories: list[tuple[Tensor, Tensor, int]] = []
        current, stream = torch.cuda.current_stream(), vocoder._capture_stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._run()  # outside of a graph first: buffers are made, kernels loaded
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Other engines go on using the GPU meanwhile: only this thread's calls may spoil the capture.
        with CAPTURING, torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._run()
        current.wait_stream(stream)
        for slot in range(streams):
            vocoder.reset(slot)
        # What only the recording needed: a cycle would keep a dropped engine's memory until the next full collection.
        del self._v, self._histories

    def run(self, slots: Sequence[int], codes: Tensor) -> Tensor:
        self._codes.copy_(codes)
        self._slots.copy_(torch.tensor(slots, dtype=torch.int32))
        self._graph.replay()
        torch.cuda.current_stream().synchronize()
        return self._pcm.clone()

    # ------------------------------------------------------------ what is recorded

    def _run(self) -> None:
        v, c, w, rows = self._v, self._v._config, self._v._w, self._frames
        self._histories = []
        v._slots[: self._streams].copy_(self._slots, non_blocking=True)
        codes = v.room("codes", self._codes.numel()).view(torch.int32)[: self._codes.numel()]
        codes.copy_(self._codes.view(-1), non_blocking=True)
        x = self._buffer("embedding", rows, c.codebook_dim)
        v._extension.sum_codebooks(codes, w.codebook, self._streams * rows, x)
        x = self._convolve(x, rows, "pre_conv", keep="pre_conv", out="pre_conv out")
        x = self._transformer(x, rows)
        for i, ratio in enumerate(c.upsampling_ratios):
            x = self._convolve(x, rows, f"upsample.{i}", out=f"upsample.{i} out")
            rows *= ratio
            y = self._buffer("normed", rows, c.latent_dim)
            v._extension.depthwise_norm(
                x, self._past(f"upsample.{i}", x, rows), v._slots, self._streams, rows, *w.depthwise[i], 1e-6, y
            )
            y = self._convolve(y, rows, f"upsample.{i}.pwconv1", activated="wide", activation=_GELU)
            x = self._convolve(y, rows, f"upsample.{i}.pwconv2", residual=x, out=f"decoder.{i} in")
        x = self._convolve(
            x, rows, "decoder.0", keep="decoder.0", activated="decoder.1.up in", snake="decoder.1.block.0"
        )
        blocks = len(c.upsample_rates)
        for i, rate in enumerate(c.upsample_rates, start=1):
            x = self._block(x, rows, i, rate, after=f"decoder.{i + 1}" + (".block.0" if i < blocks else ""))
            rows *= rate
        last = f"decoder.{blocks + 2}"
        pcm = v.room("pcm", self._pcm.numel())[: self._pcm.numel()]
        v._extension.convolve_to_sound(x, self._past(last, x, rows), v._slots, self._streams, rows, *w.sound, pcm)
        listed = self._listed = v._extension.list_histories(self._histories) if not _recording() else self._listed
        widest = max(past.shape[2] for _, past, _ in self._histories)
        v._extension.keep_histories(listed, widest, v._slots, v._position, self._streams, self._frames)
        self._pcm.view(-1).copy_(pcm, non_blocking=True)

    def _buffer(self, name: str, rows: int, channels: int) -> Tensor:
        return self._v.room(name, self._streams * rows * _padded(channels))

    def _past(self, name: str, fresh: Tensor, rows: int) -> Tensor:
        self._histories.append((fresh, self._v._state[name], rows))
        return self._v._state[name]

    def _convolve(
        self,
        x: Tensor,
        rows: int,
        name: str,
        *,
        keep: str | None = None,
        dilation: int = 1,
        residual: Tensor | None = None,
        out: str | Tensor | None = None,
        activated: str | None = None,
        activation: int = _NONE,
        snake: str | None = None,
        rms: bool = False,
    ) -> Tensor:
        """Weight and bias of `name` over x, with `rms` over its rows' root mean squares; the result lies in a buffer
        named `activated`, or else `out`."""
        v, (weight, bias) = self._v, self._v._w.matrices[name]
        values = self._streams * rows * weight.shape[2]
        if isinstance(out, str):
            out = v.room(out, values)
        after = v.room(activated, values) if activated else None
        frequency, scale = v._w.snakes[snake] if snake else (None, None)
        v._extension.convolve(
            x, self._past(keep, x, rows) if keep else None, v._slots, self._streams, rows, dilation, weight, bias,
            residual, out, after, _SNAKE if snake else activation, frequency, scale, v._exact,
            v._config.rms_norm_eps if rms else 0.0,
        )  # fmt: skip
        return out if after is None else after

    def _transformer(self, x: Tensor, rows: int) -> Tensor:
        v, c = self._v, self._v._config
        name, state = "pre_transformer", v._state
        attended = self._buffer("attended", rows, c.num_heads * c.head_dim)
        x = self._convolve(x, rows, f"{name}.input_proj", out="hidden")
        for i in range(c.num_layers):
            qkv = self._convolve(x, rows, f"{name}.{i}.qkv", out="wide", rms=True)
            v._extension.attend(
                qkv, state[f"keys.{i}"], state[f"values.{i}"], v._slots, v._position, v._w.inv_freq,
                self._streams, rows, c.sliding_window, attended,
            )  # fmt: skip
            self._convolve(attended, rows, f"{name}.{i}.o", residual=x, out=x)
            y = self._convolve(x, rows, f"{name}.{i}.gate_up", activated="wide", activation=_GATE, rms=True)
            self._convolve(y, rows, f"{name}.{i}.down", residual=x, out=x)
        return self._convolve(x, rows, f"{name}.output_proj", out="transformer out", rms=True)

    def _block(self, x: Tensor, rows: int, i: int, rate: int, after: str) -> Tensor:
        """Transposed convolution and three residual units; `after`: the SnakeBeta behind them."""
        name = f"decoder.{i}"
        out_values = self._streams * rows * self._v._w.matrices[f"{name}.up"][0].shape[2]
        stream = self._v.room("stream", out_values)
        x = self._convolve(
            x, rows, f"{name}.up", keep=f"{name}.up", out=stream, activated=f"{name}.2 in", snake=f"{name}.block.2.act1"
        )
        rows *= rate
        for unit, dilation in enumerate(DILATIONS, start=2):
            y = self._convolve(
                x, rows, f"{name}.{unit}.conv1", keep=f"{name}.{unit}", dilation=dilation, activated="unit",
                snake=f"{name}.block.{unit}.act2",
            )  # fmt: skip
            last = unit == len(DILATIONS) + 1
            x = self._convolve(
                y, rows, f"{name}.{unit}.conv2", residual=stream, out=None if last else stream,
                activated=f"{name}.{unit + 1} in", snake=after if last else f"{name}.block.{unit + 1}.act1",
            )  # fmt: skip
        return x


def _recording() -> bool:
    return torch.cuda.is_current_stream_capturing()


class _Weights:
    """The checkpoint's tensors as the kernels want them; `matrices`: name -> ([taps, channels, columns], [columns])."""

    def __init__(self, config: VocoderConfig, w: Mapping[str, Tensor]):
        c = config
        self._w = w
        self.codebook = _pad(make_codebook(c, w), 2)
        self.snakes = {n: (_pad(f, 0), _pad(s, 0)) for n, (f, s) in make_snakes(w).items()}
        half = c.head_dim // 2
        self.inv_freq = 1.0 / c.rope_theta ** (torch.arange(half, dtype=torch.float32) / half)
        self.inv_freq = self.inv_freq.to(self.codebook.device)
        self.matrices: dict[str, tuple[Tensor, Tensor]] = {}
        self.depthwise: list[tuple[Tensor, ...]] = []
        self._convolution("pre_conv", "pre_conv.conv")
        self._transformer(c)
        for i, ratio in enumerate(c.upsampling_ratios):
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
        self.sound = (_pad(w[f"{last}.weight"][0].T, 1), w[f"{last}.bias"])
        del self._w  # the checkpoint's own tensors, 460 MB at the published dims

    def _transformer(self, c: VocoderConfig) -> None:
        w, name = self._w, "pre_transformer"
        self._linear(f"{name}.input_proj", w[f"{name}.input_proj.weight"], w[f"{name}.input_proj.bias"])
        for i in range(c.num_layers):
            layer = f"{name}.layers.{i}"
            norm, post = (w[f"{layer}.{n}_layernorm.weight"] for n in ("input", "post_attention"))
            qkv = torch.cat([w[f"{layer}.self_attn.{p}_proj.weight"] for p in "qkv"])
            self._linear(f"{name}.{i}.qkv", qkv * norm)
            scale = w[f"{layer}.self_attn_layer_scale.scale"][:, None]
            self._linear(f"{name}.{i}.o", scale * w[f"{layer}.self_attn.o_proj.weight"])
            # gate and up, column by column beside each other
            both = torch.stack([w[f"{layer}.mlp.{p}_proj.weight"] for p in ("gate", "up")], dim=1).flatten(0, 1)
            self._linear(f"{name}.{i}.gate_up", both * post)
            scale = w[f"{layer}.mlp_layer_scale.scale"][:, None]
            self._linear(f"{name}.{i}.down", scale * w[f"{layer}.mlp.down_proj.weight"])
        weight, bias = w[f"{name}.output_proj.weight"], w[f"{name}.output_proj.bias"]
        self._linear(f"{name}.output_proj", weight * w[f"{name}.norm.weight"], bias)

    def _linear(self, name: str, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [columns, channels]."""
        matrix = _pad(_pad(weight.T, 0), 1)
        bias = torch.zeros(weight.shape[0], device=weight.device) if bias is None else bias
        self.matrices[name] = (matrix[None].contiguous(), _pad(bias, 0))

    def _convolution(self, name: str, source: str) -> None:
        """[out, in, taps] -> [taps, in, out]"""
        weight = self._w[f"{source}.weight"].permute(2, 1, 0)
        self.matrices[name] = (_pad(_pad(weight, 1), 2).contiguous(), _pad(self._w[f"{source}.bias"], 0))

    def _transposed(self, name: str, source: str, rate: int) -> None:
        """[in, out, blocks * rate] -> [blocks, in, rate * out]: an output block of `rate` rows is a row of `rate * out`
        columns, and belongs to its own input and the ones before it, the oldest first."""
        weight = _pad(_pad(self._w[f"{source}.weight"], 0), 1).unflatten(2, (-1, rate))  # [in, out, blocks, rate]
        weight = weight.flip(2).permute(2, 0, 3, 1).flatten(2)
        self.matrices[name] = (weight.contiguous(), _pad(self._w[f"{source}.bias"], 0).repeat(rate))


def _pad(x: Tensor, dim: int) -> Tensor:
    """With zeros up to what the kernels take."""
    missing = _padded(x.shape[dim]) - x.shape[dim]
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]).contiguous()
