"""Recorder: a push of the vocoder as a CUDA graph. VocoderMemory: what its kernels read and write besides weights."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qwen_megakernel.backend.cuda_graphs import capturing
from qwen_megakernel.backend.sizes import PUSH_FRAMES, PUSH_ROWS, SPIN_LIMIT
from qwen_megakernel.backend.vocoder_weights import VocoderWeights, padded
from qwen_megakernel.checkpoint.codec_config import VocoderConfig
from qwen_megakernel.model.vocoder import DILATIONS, history_shapes

NONE, SNAKE, GELU = range(3)  # `Activation` in csrc/vocoder/vocoder.h


class _Nothing:
    """In the extension's place: calls nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_arguments, **_named: None


class VocoderMemory:
    """One vocoder's tensors on its device. Recorded pushes hold their addresses, so none is ever replaced."""

    def __init__(self, config: VocoderConfig, weights: VocoderWeights, slots: int, most: int, device: torch.device):
        """`most`: frames of the largest push."""
        self.device = device
        # Each layer's past of a sequence: [rows, channels]; the transformer's rings of keys and values
        # [layers, 2, heads, ring, head_dim].
        past = {name: (rows, padded(channels)) for name, (rows, channels) in history_shapes(config).items()}
        rings = (config.num_layers, 2, config.num_heads, config.sliding_window - 1 + PUSH_FRAMES, config.head_dim)
        shapes: dict[str, tuple[int, ...]] = {**past, "rings": rings}
        sizes = [math.prod(shape) for shape in shapes.values()]
        everything = torch.zeros(slots, sum(sizes), device=device)
        parts = zip(shapes.items(), everything.split(sizes, dim=1), strict=True)
        # The past that the layers of each slot look back to: [slots, ...] by layer name.
        self.state: dict[str, Tensor] = {name: part.unflatten(1, shape) for (name, shape), part in parts}
        self.position = torch.zeros(slots, dtype=torch.int64, device=device)  # frames that the transformer has taken in
        # For each slot its state as one tensor, and its position; both are reset, saved and restored together.
        self.of_slot = list(zip(everything, self.position, strict=True))
        # A push's inputs (csrc/vocoder/vocoder.h, `PushInputs`).
        self.frames = torch.zeros(2 + 5 * PUSH_ROWS, dtype=torch.int32, device=device)  # `Frames`, of no frame
        self.embedding = torch.zeros(most * config.codebook_dim, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)  # an address
        self.fault = torch.zeros(1, dtype=torch.int32, pin_memory=True)  # not 0 after a wait gave up
        self.rooms: list[Tensor] = []  # memory for the buffers between the layers; the last is the largest
        width = config.num_heads * config.head_dim
        exchange = {"h": config.hidden_size, "qkv": 3 * width, "attended": width, "gated": config.intermediate_size}
        like = partial(torch.zeros, dtype=torch.int32, device=device)
        # Tensors and sizes for `extension.transform`.
        self.layers = {name: like(most * values, 2) for name, values in exchange.items()} | weights.layers
        self.layers["vectors"] = torch.empty(most * sum(exchange.values()), device=device)
        self.layers |= {"rings": self.state["rings"], "position": self.position, "fault": self.fault, "epoch": like(1)}
        self.layer_sizes = {"blocks": weights.blocks, "shared_bytes": weights.shared_bytes, "spin_limit": SPIN_LIMIT}
        self.layer_sizes |= {"columns_out": len(weights.layers["bias_out"]), "hidden": config.hidden_size}
        self.layer_sizes |= {"window": config.sliding_window, "intermediate": config.intermediate_size}

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


class Recorder:
    """Records the kernels of a push with room for a given number of frames."""

    def __init__(
        self,
        extension: ModuleType,
        config: VocoderConfig,
        weights: VocoderWeights,
        memory: VocoderMemory,
        exact: bool,
        room: int,
        *,
        skim: bool = False,
    ):
        """`exact`: fp32 products, not TF32. `room`: frames. `skim`: end after the transformer: no sound is wanted."""
        self._kernels = extension
        self._config = config
        self._w = weights
        self._m = memory
        self._exact = exact
        self._room = room
        self._skim = skim
        # With histories kept once, at the end, the blocks' buffers take 8 MB a frame. Keeping them after every block
        # or unit (3 MB a frame) lets the next reuse buffers. It takes 6 us each: too much for one frame.
        self._sparing = room > 8
        self._most_sparing = room > 16
        self._extension: Any = extension
        self._buffers: dict[str, Tensor] = {}

    def record(self) -> Any:
        """The recording, for `Pushes`."""
        with capturing(self._m.device):
            self._extension = _Nothing()
            self._run()  # shows which buffers it needs
            self._extension = self._kernels
            self._buffers = self._m.make_room({name: buffer.numel() for name, buffer in self._buffers.items()})
            self._run()  # outside a recording: this loads kernels
            torch.cuda.current_stream().synchronize()
            recording = self._kernels.Recording(self._m.frames)
            try:
                self._run()
            except BaseException:
                recording.abandon()
                raise
            recording.end()
        return recording

    def _run(self) -> None:
        m, c = self._m, self._config
        self._histories: list[tuple[Tensor, Tensor, int]] = []
        self._turns = 0
        # The first convolution, the transformer and the first upsampling.
        x = self._buffer("upsample.0 out", self._room * c.upsampling_ratios[0] * padded(c.latent_dim))
        past = self._past("pre_conv", m.embedding, 1)
        self._extension.transform(m.embedding, past, m.frames, self._room, x, m.layers, m.layer_sizes, c.rms_norm_eps)
        if not self._skim:
            self._sound(x)
        self._keep(m.position)

    def _sound(self, x: Tensor) -> None:
        extension, frames, c, w = self._extension, self._m.frames, self._config, self._w
        rows = 1  # of a frame
        for i, ratio in enumerate(c.upsampling_ratios):
            if i:
                x = self._convolve(x, rows, f"upsample.{i}", out=f"upsample.{i} out")  # fp32, as the norm reads it
            rows *= ratio
            y = self._buffer("normed", self._room * rows * padded(c.latent_dim))
            past = self._past(f"upsample.{i}", x, rows)
            extension.depthwise_norm(x, past, frames, self._room, rows, *w.depthwise[i], 1e-6, y)
            y = self._convolve(y, rows, f"upsample.{i}.pwconv1", activated="wide", activation=GELU)
            x = self._convolve(y, rows, f"upsample.{i}.pwconv2", residual=x, activated=f"decoder.{i} in")
        x = self._convolve(x, rows, "decoder.0", keep="decoder.0", activated=self._after(0), snake="decoder.1.block.0")
        blocks = len(c.upsample_rates)
        for i, rate in enumerate(c.upsample_rates, start=1):
            x = self._block(x, rows, i, rate, after=f"decoder.{i + 1}" + (".block.0" if i < blocks else ""))
            rows *= rate
            if self._sparing and not self._most_sparing:
                self._keep()
        last = f"decoder.{blocks + 2}"
        past = self._past(last, x, rows)
        extension.convolve_to_sound(x, past, frames, self._room, rows, *w.sound, self._m.place)

    def _keep(self, position: Tensor | None = None) -> None:
        """Save the newest rows of the histories since the last call as their past, so that buffers can be reused.
        `position`: goes on, too."""
        self._extension.keep_histories(self._histories, self._m.frames, self._room, position)
        self._histories = []

    def _buffer(self, name: str, values: int) -> Tensor:
        """The buffer of that name, of at least that many values. It has no memory until `make_room` gave it some."""
        if name not in self._buffers or self._buffers[name].numel() < values:
            self._buffers[name] = torch.empty(values, device="meta")
        return self._buffers[name]

    def _past(self, name: str, fresh: Tensor, rows: int) -> Tensor:
        self._histories.append((fresh, self._m.state[name], rows))
        return self._m.state[name]

    def _convolve(
        self,
        x: Tensor,
        rows: int,
        name: str,
        *,
        out: str | Tensor | None = None,
        activated: str | None = None,
        behind: Any = None,
        **others: Any,
    ) -> Tensor:
        """Apply weight and bias of `name` to x, which holds halves (csrc/vocoder/halves.cuh). The result is in the
        buffer named `activated`, as halves, or else in `out`, as fp32. `behind`: a convolution whose result is the
        input in x's place, and stays within the launch. `others`: as `_convolution` has them."""
        values = self._room * rows * len(self._w.matrices[name][1])
        if isinstance(out, str):
            out = self._buffer(out, values)
        after = self._buffer(activated, values) if activated else None
        convolution = self._convolution(x, rows, name, out=out, activated=after, **others)
        if behind is None:
            self._extension.convolve(convolution, None)
        else:
            self._extension.convolve(behind, convolution)
        result = out if after is None else after
        assert result is not None, "`out` or `activated` is given"
        return result

    def _convolution(
        self,
        x: Tensor,
        rows: int,
        name: str,
        *,
        keep: str | None = None,
        dilation: int = 1,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        activated: Tensor | None = None,
        activation: int = NONE,
        snake: str | None = None,
    ) -> Any:
        weight, bias = self._w.matrices[name]
        frequency, scale = self._w.snakes[snake] if snake else (None, None)
        return self._extension.Convolution(
            fresh=x, past=self._past(keep, x, rows) if keep else None, frames=self._m.frames, room=self._room,
            rows=rows, dilation=dilation, weight=weight, bias=bias, residual=residual, out=out, activated=activated,
            activation=SNAKE if snake else activation, frequency=frequency, scale=scale, exact=self._exact,
        )  # fmt: skip

    def _turn(self) -> str:
        """The next of three buffers. The one before it may still be read, and the third may not be kept yet."""
        self._turns += 1
        return f"turn {self._turns % 3}"

    def _before(self, i: int, unit: int) -> str:
        """The buffer for the input of a block's residual unit."""
        if self._most_sparing:
            return self._turn()
        return f"block.{unit} in" if self._sparing else f"decoder.{i}.{unit} in"

    def _after(self, i: int) -> str:
        """The buffer for the result of block i, which the next block reads."""
        if self._most_sparing:
            return self._turn()
        return f"between.{i % 2 if self._sparing else i}"

    def _block(self, x: Tensor, rows: int, i: int, rate: int, after: str) -> Tensor:
        """Transposed convolution and three residual units; `after`: the SnakeBeta that follows them."""
        name = f"decoder.{i}"
        channels = len(self._w.matrices[f"{name}.2.conv2"][1])
        residual = self._buffer("residual", self._room * rows * rate * channels)
        x = self._convolve(
            x, rows, f"{name}.up", keep=f"{name}.up", out=residual, activated=self._before(i, 2),
            snake=f"{name}.block.2.act1",
        )  # fmt: skip
        rows *= rate
        joined = self._most_sparing and self._kernels.can_follow(channels)
        for unit, dilation in enumerate(DILATIONS, start=2):
            first, behind = f"{name}.{unit}.conv1", None
            wanted: dict[str, Any] = {"keep": f"{name}.{unit}", "dilation": dilation}
            wanted["snake"] = f"{name}.block.{unit}.act2"
            if joined:
                behind = self._convolution(x, rows, first, **wanted)
            else:
                x = self._convolve(x, rows, first, activated=self._turn() if self._most_sparing else "unit", **wanted)
                if self._most_sparing:
                    self._keep()
            last = unit == len(DILATIONS) + 1
            x = self._convolve(
                x, rows, f"{name}.{unit}.conv2", behind=behind, residual=residual, out=None if last else residual,
                activated=self._after(i) if last else self._before(i, unit + 1),
                snake=after if last else f"{name}.block.{unit + 1}.act1",
            )  # fmt: skip
            if joined and unit != 3:  # three buffers in turn hold two histories besides what is written
                self._keep()
        return x
