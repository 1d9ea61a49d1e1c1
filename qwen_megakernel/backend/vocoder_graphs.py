"""GraphVocoder: the vocoder on a GPU, a push of 1, 2, 4 or 8 frames as one CUDA graph of csrc/vocoder.cu's kernels.

The arithmetic is vocoder.py's, arranged for few and small launches: rows of channels throughout, so that every
convolution and transposed convolution is a matrix product whose activation, bias and residual are part of its kernel;
layer scales and norms' weights folded into the matrices behind them; keys and values in rings. fp32 products are made
of three TF32 ones on the tensor cores (hi x hi + hi x lo + lo x hi), which keeps fp32's precision; "tf32" makes one.
Codes come with the launch, or from where the frame kernel left them on the device; PCM leaves through pinned memory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_megakernel.backend.cuda_graphs import capturing, synchronize
from qwen_megakernel.checkpoint.codec_config import VocoderConfig
from qwen_megakernel.errors import KernelFault
from qwen_megakernel.model.vocoder import DILATIONS, Portion, VocoderState, check_push, make_codebook, make_snakes

_NONE, _SNAKE, _GELU = range(3)  # Activation in csrc/vocoder.h
SPIN_LIMIT = 4_000_000
"""Polls before a wait inside the transformer's kernel gives up: seconds on a healthy card."""

_EPOCHS_LAST = 2**18  # pushes: of some hundred graphs at most, with 44 epochs each
_FRAMES = (8, 4, 2, 1)  # of a graph
_MOST = 16  # streams x frames of a graph (kMostPushed): more fill the card no better, and their buffers grow


def _padded(channels: int) -> int:
    """The kernels take channels by 32; the demo voice has 12."""
    return -(-channels // 32) * 32


def transformer_blocks(config: VocoderConfig, device: torch.device) -> int:
    """Blocks of the transformer's kernel: all run at once, and each owns some of the hidden columns."""
    most = min(128, torch.cuda.get_device_properties(device).multi_processor_count)
    return -(-config.hidden_size // -(-config.hidden_size // most))


def why_no_graphs(config: VocoderConfig, device: torch.device) -> str | None:
    """What keeps these dims on this GPU from the kernels."""
    widths = (config.codebook_dim, config.latent_dim, config.hidden_size, config.num_heads * config.head_dim)
    if any(width % 32 for width in (*widths, config.intermediate_size)) or config.head_dim not in (32, 64):
        return "the vocoder's kernels take widths by 32 and heads of 32 or 64"
    if config.latent_dim > 1024:
        return "the vocoder's kernels take a latent width of at most 1,024"
    if config.sliding_window - 1 + max(_FRAMES) > 80:
        return f"the vocoder's kernels take a window of at most {81 - max(_FRAMES)} frames"
    if config.num_quantizers != 16:
        return "the vocoder's kernels take 16 codes a frame"
    # As csrc/vocoder_layers.cu has them: columns of a block, of every product, and what it keeps in shared memory.
    blocks, width = transformer_blocks(config, device), config.num_heads * config.head_dim
    columns_out = config.upsampling_ratios[0] * config.latent_dim
    all_columns = (config.hidden_size, 3 * width, config.intermediate_size, columns_out)
    hidden, qkv, inner, out = (-(-columns // blocks) for columns in all_columns)
    if max(hidden, qkv, 2 * inner, out) > 32:
        return "the vocoder's transformer of this width needs a GPU of more multiprocessors"
    if any((blocks - 1) * -(-columns // blocks) >= columns for columns in all_columns[:3]):
        return "the vocoder's transformer needs columns for every block"
    first = hidden * config.codebook_dim
    floats = max(first, hidden * width) + max(first, 2 * inner * config.hidden_size)
    floats += max(first, hidden * config.intermediate_size) + max(qkv, out) * config.hidden_size
    rows = _MOST * max(config.codebook_dim, config.intermediate_size, config.hidden_size, width)
    floats += max(rows, 80 * (2 * config.head_dim + 9) + 8 * (4 * config.head_dim + 80))  # or a head's attention
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 * 1024)
    if 4 * floats + 5 * 1024 > room:
        return "the vocoder's transformer of this width does not fit the GPU's shared memory"
    return None


class GraphVocoder:
    """Takes what `TorchVocoder` takes and gives its samples within 2e-5, which is also how far a stream's samples may
    differ with the company it is pushed in: how a sum is cut depends on the rows of all. Not thread-safe: one thread
    owns it.

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
        recent_codes: Tensor | None = None,
    ):
        """
        Args:
            extension: `build.load_extension`'s.
            tensors: every `decoder.*` tensor of the speech tokenizer, fp32, on one CUDA device.
            exact: fp32; False: TF32.
            recent_codes: the frame decoder's (`FrameDecoder.recent_codes`), for `follow`.
        """
        self.slots, self.groups = slots, config.num_quantizers
        self._extension, self._config, self._exact = extension, config, exact
        self._device = next(iter(tensors.values())).device
        with capturing(self._device):  # cuBLAS, which this needs, keeps 32 MB for every stream it has seen
            self._w = _Weights(config, {name.removeprefix("decoder."): tensor for name, tensor in tensors.items()})
        self._recent_codes = recent_codes
        shapes = self._state_shapes()
        sizes = [math.prod(shape) for shape in shapes.values()]
        state = torch.zeros(
            slots, sum(sizes), device=self._device
        )  # one piece a slot: reset, saved and restored at once
        parts = zip(shapes.items(), state.split(sizes, dim=1), strict=True)
        self._state = {name: part.unflatten(1, shape) for (name, shape), part in parts}
        self._position = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._of_slot = list(zip(state, self._position, strict=True))
        self._slots = torch.zeros(self.together, dtype=torch.int32, device=self._device)
        self._embedding = torch.zeros(_MOST * config.codebook_dim, device=self._device)
        self._place = torch.zeros(1, dtype=torch.int64, device=self._device)  # an address: where a push's PCM goes
        self._fault = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._layers, self._layer_sizes = self._make_layers()
        self._queued = 0
        self._rooms: list[Tensor] = []  # the last of them is the largest
        self._graphs = {}  # (streams, frames) -> recording
        self._skims = {}  # frames -> recording of a push of one stream that ends behind the transformer
        with torch.cuda.device(self._device):
            unwanted = torch.zeros(_MOST * config.samples_per_frame, device=self._device)
            read = (self._w.codebook, self._slots, self._embedding, self._place)
            self._pushes = extension.Pushes(*read, unwanted, config.samples_per_frame)
            self._place.fill_(unwanted.data_ptr())
            for frames in _FRAMES:
                for streams in range(min(slots, self.together, _MOST // frames), 0, -1):  # the largest makes room first
                    self._graphs[streams, frames] = _Recorder(self, streams, frames).record()
                self._skims[frames] = _Recorder(self, 1, frames, skim=True).record()
        for slot in range(slots):
            self.reset(slot)

    @torch.inference_mode()
    def reset(self, slot: int) -> None:
        """Forget a stream: its slot starts from silence again."""
        for tensor in self._of_slot[slot]:
            tensor.zero_()

    @torch.inference_mode()
    def save(self, slot: int) -> VocoderState:
        """A copy of what a stream left behind; see `restore`."""
        everything, position = self._of_slot[slot]
        return VocoderState({"all": everything.clone(), "position": position.clone()})

    @torch.inference_mode()
    def restore(self, slot: int, state: VocoderState) -> None:
        """Go on in a slot where `state` was saved, bit for bit."""
        everything, position = self._of_slot[slot]
        everything.copy_(state.tensors["all"])
        position.copy_(state.tensors["position"])

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights, and of what lies between the layers of a push."""
        w = self._w
        tensors = [w.codebook, w.layers["weights"], *self._rooms, *(m for m, _ in w.matrices.values())]
        return sum(t.nbytes for t in tensors)

    @property
    def slot_bytes(self) -> int:
        """Memory of one stream's state."""
        return self._of_slot[0][0].nbytes

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
        codes = codes.contiguous()

        def launch(some: Sequence[int], at: int, first: int, frames: int) -> int:
            part = codes[at : at + len(some), first : first + frames].contiguous()
            return self._pushes.launch(self._graphs[len(some), frames], some, part, True)

        return self._queue(slots, codes.shape[1], launch)()

    def portions(self, codes: Tensor) -> list[Portion]:
        """A reference, int64 [frames, groups], for `listen`: one after the other. The transformer looks back for good,
        the convolutions behind it for 10 frames: only so many go through them, 6 times as fast."""
        skimmed = max(0, len(codes) - self._reach)
        skims = [Portion(some, False) for some in codes[:skimmed].split(64)] if skimmed else []
        return [*skims, Portion(codes[skimmed:], True)]

    def listen(self, slot: int, portion: Portion) -> None:
        """Go on from frames whose sound nobody wants: what a stream's own frames follow on. Queued, not waited for."""
        codes = portion.codes[None].contiguous()
        check_push(self, [slot], codes)

        def launch(some: Sequence[int], _: int, first: int, frames: int) -> int:
            recording = self._graphs[1, frames] if portion.whole else self._skims[frames]
            return self._pushes.launch(recording, some, codes[:, first : first + frames].contiguous(), False)

        self._queue([slot], codes.shape[1], launch)

    @property
    def _reach(self) -> int:
        """Frames that the convolutions behind the transformer look back for, all together."""
        c = self._config
        rows, reach = 1, 0.0
        for ratio in c.upsampling_ratios:
            rows *= ratio
            reach += 6 / rows
        reach += 6 / rows
        for rate in c.upsample_rates:
            reach += 1 / rows
            rows *= rate
            reach += 6 * sum(DILATIONS) / rows
        return math.ceil(reach + 6 / rows)

    @property
    def follows(self) -> bool:
        """Can it read codes on the device?"""
        return self._recent_codes is not None

    def follow(self, slots: Sequence[int], first: Sequence[int], frames: int) -> Callable[[], Tensor]:
        """Queue a push behind what the frame decoder has launched, of codes that nobody has seen yet: of slot i the
        `frames` (at most 8) from `first[i]`. What comes of a frame at or behind end of speech is noise, in its samples
        and in the slot until that is reset.

        Returns:
            What waits for it, and is then its PCM as `push` returns it; call it before 64 more graphs are queued.
        """

        def launch(some: Sequence[int], at: int, offset: int, frames: int) -> int:
            begins = [f + offset for f in first[at : at + len(some)]]
            return self._pushes.follow(self._graphs[len(some), frames], some, frames, self._recent_codes, begins)

        return self._queue(slots, frames, launch)

    def _queue(self, slots: Sequence[int], frames: int, launch: Callable[..., int]) -> Callable[[], Tensor]:
        """Launch a push in graphs of the sizes there are."""
        slots, runs, first = list(slots), [], 0  # runs: portions of frames, each of portions of slots
        self._queued += 1
        if self._queued % _EPOCHS_LAST == 0:  # a value published 2^32 values ago must not look new
            self._forget_epochs()
        while first < frames:
            size = next(f for f in _FRAMES if f <= frames - first)
            together = min(self.together, _MOST // size)
            portions = [(at, slots[at : at + together]) for at in range(0, len(slots), together)]
            runs.append([(launch(some, at, first, size), len(some), size) for at, some in portions])
            first += size

        def collect() -> Tensor:
            portions = [[self._pushes.collect(*run) for run in portion] for portion in runs]
            if self._fault.item():
                raise KernelFault("a wait inside the vocoder's kernel outlasted its limit")
            parts = [part[0] if len(part) == 1 else torch.cat(part) for part in portions]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

        return collect

    def recover(self) -> None:
        """After a KernelFault: every stream's state is suspect, and to be reset or restored."""
        synchronize(self._device)
        self._forget_epochs()
        self._fault.zero_()

    def _forget_epochs(self) -> None:
        for name in ("h", "qkv", "attended", "gated", "epoch"):
            self._layers[name].zero_()

    def _state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what every layer that looks back keeps of the past, by layer name: [rows, channels], and of the
        transformer rings of keys and values [layers, 2, heads, ring, head_dim]."""
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
        shapes["rings"] = (c.num_layers, 2, c.num_heads, c.sliding_window - 1 + max(_FRAMES), c.head_dim)
        return shapes

    def _make_layers(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What `extension.transform` takes: tensors, sizes."""
        c, exchange = self._config, {}
        width = c.num_heads * c.head_dim
        for name, values in (
            ("h", c.hidden_size),
            ("qkv", 3 * width),
            ("attended", width),
            ("gated", c.intermediate_size),
        ):
            exchange[name] = torch.zeros(_MOST * values, 2, dtype=torch.int32, device=self._device)
        tensors = exchange | self._w.layers | {"rings": self._state["rings"]}
        tensors |= {"position": self._position, "fault": self._fault}
        tensors["epoch"] = torch.zeros(1, dtype=torch.int32, device=self._device)
        sizes = {"blocks": self._w.blocks, "columns_out": len(self._w.layers["bias_out"])}
        sizes |= {"hidden": c.hidden_size, "window": c.sliding_window}
        return tensors, sizes | {"intermediate": c.intermediate_size, "spin_limit": SPIN_LIMIT}

    def make_room(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Buffers of so many values. The graphs share them, because they run one after the other."""
        each = [-(-size // 64) * 64 for size in sizes.values()]  # 256 bytes: as torch aligns its own
        if not self._rooms or self._rooms[-1].numel() < sum(each):
            self._rooms.append(torch.empty(sum(each), device=self._device))
        return dict(zip(sizes, self._rooms[-1][: sum(each)].split(each), strict=True))


class _Recorder:
    """Runs the kernels of a push of so many streams and frames, to be recorded; `skim`: up to the transformer."""

    def __init__(self, vocoder: GraphVocoder, streams: int, frames: int, *, skim: bool = False):
        self._v, self._streams, self._frames, self._skim = vocoder, streams, frames, skim
        # Buffers of all blocks at once are 6 MB a frame, with histories kept once, at the end. To keep them after every
        # block, so that the next has the same buffers, takes 6 us each: too much for a frame alone, little for many.
        self._sparing = streams * frames > _MOST // 2
        self._buffers: dict[str, Tensor] = {}

    def record(self):
        """The recording, for `Pushes`."""
        with capturing(self._v._device):
            self._run()  # outside of a recording first: kernels are loaded, and it is seen which buffers it takes
            torch.cuda.current_stream().synchronize()
            self._buffers = self._v.make_room({name: buffer.numel() for name, buffer in self._buffers.items()})
            recording = self._v._extension.Recording(self._v._slots)
            try:
                self._run()
            except BaseException:
                recording.abandon()
                raise
            recording.end()
        return recording

    def _run(self) -> None:
        v, c, rows = self._v, self._v._config, self._frames
        self._histories: list[tuple[Tensor, Tensor, int]] = []
        # Through the first convolution, the transformer and the first upsampling.
        x = self._buffer("upsample.0 out", self._streams * rows * c.upsampling_ratios[0] * _padded(c.latent_dim))
        past = self._past("pre_conv", v._embedding, rows)
        v._extension.transform(
            v._embedding, past, v._slots, self._streams, rows, x, v._layers, v._layer_sizes, c.rms_norm_eps
        )
        if not self._skim:
            self._sound(x, rows)
        self._keep(self._frames)

    def _sound(self, x: Tensor, rows: int) -> None:
        v, c, w = self._v, self._v._config, self._v._w
        for i, ratio in enumerate(c.upsampling_ratios):
            if i:
                x = self._convolve(x, rows, f"upsample.{i}", out=f"upsample.{i} out")
            rows *= ratio
            y = self._buffer("normed", self._streams * rows * _padded(c.latent_dim))
            v._extension.depthwise_norm(
                x, self._past(f"upsample.{i}", x, rows), v._slots, self._streams, rows, *w.depthwise[i], 1e-6, y
            )
            y = self._convolve(y, rows, f"upsample.{i}.pwconv1", activated="wide", activation=_GELU)
            x = self._convolve(y, rows, f"upsample.{i}.pwconv2", residual=x, out=f"decoder.{i} in")
        x = self._convolve(x, rows, "decoder.0", keep="decoder.0", activated="between.0", snake="decoder.1.block.0")
        blocks = len(c.upsample_rates)
        for i, rate in enumerate(c.upsample_rates, start=1):
            x = self._block(x, rows, i, rate, after=f"decoder.{i + 1}" + (".block.0" if i < blocks else ""))
            rows *= rate
            if self._sparing:
                self._keep()
        last = f"decoder.{blocks + 2}"
        v._extension.convolve_to_sound(x, self._past(last, x, rows), v._slots, self._streams, rows, *w.sound, v._place)

    def _keep(self, positions: int = 0) -> None:
        """The newest rows of the histories since the last call become their past, so that buffers can be used again."""
        v = self._v
        v._extension.keep_histories(self._histories, v._slots, v._position, self._streams, positions)
        self._histories = []

    def _buffer(self, name: str, values: int) -> Tensor:
        """Of at least so many values, one for each name."""
        if name not in self._buffers or self._buffers[name].numel() < values:
            self._buffers[name] = torch.empty(values, device=self._v._device)
        return self._buffers[name]

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
    ) -> Tensor:
        """Weight and bias of `name` over x; the result lies in a buffer named `activated`, or else `out`."""
        v, (weight, bias) = self._v, self._v._w.matrices[name]
        values = self._streams * rows * weight.shape[2]
        if isinstance(out, str):
            out = self._buffer(out, values)
        after = self._buffer(activated, values) if activated else None
        frequency, scale = v._w.snakes[snake] if snake else (None, None)
        v._extension.convolve(
            x, self._past(keep, x, rows) if keep else None, v._slots, self._streams, rows, dilation, weight, bias,
            residual, out, after, _SNAKE if snake else activation, frequency, scale, v._exact,
        )  # fmt: skip
        return out if after is None else after

    def _block(self, x: Tensor, rows: int, i: int, rate: int, after: str) -> Tensor:
        """Transposed convolution and three residual units; `after`: the SnakeBeta behind them."""
        name = f"decoder.{i}"
        out_values = self._streams * rows * self._v._w.matrices[f"{name}.up"][0].shape[2]
        stream, mine = self._buffer("stream", out_values), "block" if self._sparing else name
        x = self._convolve(
            x, rows, f"{name}.up", keep=f"{name}.up", out=stream, activated=f"{mine}.2 in", snake=f"{name}.block.2.act1"
        )
        rows *= rate
        for unit, dilation in enumerate(DILATIONS, start=2):
            y = self._convolve(
                x, rows, f"{name}.{unit}.conv1", keep=f"{name}.{unit}", dilation=dilation, activated="unit",
                snake=f"{name}.block.{unit}.act2",
            )  # fmt: skip
            last = unit == len(DILATIONS) + 1
            following = f"between.{i % 2 if self._sparing else i}" if last else f"{mine}.{unit + 1} in"
            x = self._convolve(
                y, rows, f"{name}.{unit}.conv2", residual=stream, out=None if last else stream,
                activated=following, snake=after if last else f"{name}.block.{unit + 1}.act1",
            )  # fmt: skip
        return x


class _Weights:
    """The checkpoint's tensors as the kernels want them; `matrices`: name -> ([taps, channels, columns], [columns])."""

    def __init__(self, config: VocoderConfig, w: Mapping[str, Tensor]):
        c = config
        self._w = w
        self.codebook = _pad(make_codebook(c, w), 2)
        self.snakes = {n: (_pad(f, 0), _pad(s, 0)) for n, (f, s) in make_snakes(w).items()}
        self.blocks = transformer_blocks(c, self.codebook.device)
        self.matrices: dict[str, tuple[Tensor, Tensor]] = {}
        self.depthwise: list[tuple[Tensor, ...]] = []
        self.layers = self._transformer(c)
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
        self.sound = (_pad(w[f"{last}.weight"][0].T, 1), w[f"{last}.bias"])
        del self._w  # the checkpoint's own tensors, 460 MB at the published dims

    def _transformer(self, c: VocoderConfig) -> dict[str, Tensor]:
        """`weights` as csrc/vocoder.h says (`Layers`), norms' weights and layer scales in them; other constants."""
        w, name, stream = self._w, "pre_transformer", []

        def add(matrix: Tensor, together: int = 1) -> None:
            """[columns, K]; so many columns stay in one block."""
            each = together * -(-len(matrix) // (together * self.blocks))
            stream.append(F.pad(matrix, (0, 0, 0, each * self.blocks - len(matrix))).flatten())

        # Nothing but sums stands between the first convolution and the input's projection, nor between the output's and
        # the first upsampling: each pair is one matrix, multiplied in fp64.
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
        half = c.head_dim // 2
        inv_freq = 1.0 / c.rope_theta ** (torch.arange(half, dtype=torch.float32) / half)
        return {
            "weights": torch.cat(stream),
            "bias_in": bias_in,
            "bias_out": (up @ bias + up_bias).float(),
            "inv_freq": inv_freq.to(self.codebook.device),
        }

    def _linear(self, name: str, weight: Tensor, bias: Tensor) -> None:
        """weight: [columns, channels]."""
        matrix = _pad(_pad(weight.T, 0), 1)
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
