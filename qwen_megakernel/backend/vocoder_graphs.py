"""GraphVocoder: the vocoder on a GPU, a push of some frames as one CUDA graph of csrc/vocoder/'s kernels.

The arithmetic is vocoder.py's, arranged for few and small launches. Data are rows of channels throughout, so every
convolution and transposed convolution is a matrix product; its kernel also does activation, bias and residual. Layer
scales and norm weights are folded into neighbouring matrices. Keys and values lie in rings. Convolutions take values
as two fp16 halves (csrc/vocoder/halves.cuh). An fp32 product is three of theirs on the tensor cores (hi x hi + hi x lo
+ lo x hi), which keeps 22 bits; "tf32" uses one, with TF32's 11 bits. Codes come with the launch, or from where the
frame kernel left them on the device. PCM leaves through pinned memory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qwen_megakernel.backend.cuda_graphs import capturing, synchronize
from qwen_megakernel.backend.interfaces import FEW_SLOTS
from qwen_megakernel.backend.sizes import (
    CHANNEL_TILE,
    GROUPS,
    PUSH_FRAMES,
    PUSH_ROWS,
    TRANSFORMER_COLUMNS,
    TRANSFORMER_RESIDUALS,
    TRANSFORMER_RING,
    TRANSFORMER_ROWS,
    WIDEST_NORM,
)
from qwen_megakernel.backend.vocoder_recorder import Recorder, VocoderMemory
from qwen_megakernel.backend.vocoder_weights import VocoderWeights, transformer_blocks, transformer_room
from qwen_megakernel.checkpoint.codec_config import VocoderConfig
from qwen_megakernel.errors import KernelFault
from qwen_megakernel.model.vocoder import DILATIONS, Portion, Sounds, VocoderState, check_push

_EPOCHS_LAST = 2**26  # pushes, of 44 epochs each
_ROOMS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Frames that the graphs have room for. A push takes the smallest that will do."""
_FEW_FRAMES = 16  # a vocoder of `FEW_SLOTS` or fewer has no graphs of more frames, because of their memory


def graph_rooms(slots: int, hidden_columns: int) -> list[int]:
    """The frames that each graph of a vocoder has room for. `hidden_columns`: of a block of its transformer."""
    most = min(PUSH_ROWS if slots > FEW_SLOTS else _FEW_FRAMES, TRANSFORMER_RESIDUALS // hidden_columns)
    return [room for room in _ROOMS if room <= min(most, slots * PUSH_FRAMES)]


def why_no_graphs(config: VocoderConfig, device: torch.device) -> str | None:
    """Why the kernels cannot run these dims on this GPU; None: they can."""
    widths = (config.codebook_dim, config.latent_dim, config.hidden_size, config.num_heads * config.head_dim)
    if any(width % CHANNEL_TILE for width in (*widths, config.intermediate_size)) or config.head_dim not in (32, 64):
        return f"the vocoder's kernels need widths that are multiples of {CHANNEL_TILE}, and heads of 32 or 64"
    if config.latent_dim > WIDEST_NORM:
        return f"the vocoder's kernels take a latent width of at most {WIDEST_NORM:,}"
    if config.sliding_window - 1 + PUSH_FRAMES > TRANSFORMER_RING:
        return f"the vocoder's kernels take a window of at most {TRANSFORMER_RING + 1 - PUSH_FRAMES} frames"
    if config.num_quantizers != GROUPS:
        return f"the vocoder's kernels take {GROUPS} codes a frame"
    # The requirements of `transform` and `make_plan` in csrc/vocoder/transformer.cu.
    multiprocessors, shared_bytes = transformer_room(device)
    least = -(-config.hidden_size // TRANSFORMER_COLUMNS)
    if multiprocessors < least:
        return (
            f"the vocoder's transformer of width {config.hidden_size:,} needs {least} multiprocessors, and its kernel "
            f"can use {multiprocessors} of this GPU; use a larger GPU"
        )
    blocks, width = transformer_blocks(config, multiprocessors), config.num_heads * config.head_dim
    for columns in (3 * width, config.intermediate_size):
        if (blocks - 1) * -(-columns // blocks) >= columns:
            return f"the vocoder's transformer has matrices of {columns:,} columns, too few for its {blocks} blocks"
    # The least shared memory it needs, in floats: four chunks of a column, or of a gate and its up.
    values = (config.hidden_size, width, config.intermediate_size, config.codebook_dim)  # of a column
    chunk = max(2 * config.hidden_size, *values)
    sums = TRANSFORMER_ROWS * max(8, chunk // min(values))
    a_head = TRANSFORMER_RING * (2 * config.head_dim + 9) + PUSH_FRAMES * (4 * config.head_dim + TRANSFORMER_RING)
    scratch = TRANSFORMER_RESIDUALS + TRANSFORMER_ROWS  # residuals and factors
    needed = 4 * (sums + 4 * chunk + max(TRANSFORMER_ROWS * max(values), a_head) + scratch)
    if needed > shared_bytes:
        return (
            f"the vocoder's transformer of width {config.hidden_size:,} needs {-(-needed // 1024)} KB of shared memory "
            f"a block, but this GPU has {shared_bytes // 1024}; use another GPU"
        )
    return None


class GraphVocoder:
    """The vocoder on a GPU (see `Vocoder`). Its samples are `TorchVocoder`'s within 2e-5."""

    steady = True

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
        """`extension`: `Build.load`'s. `tensors`: every `decoder.*` tensor of the speech tokenizer, fp32, on
        one CUDA device. `exact`: fp32; False: TF32. `recent_codes`: the frame decoder's, for `follow`."""
        self.slots = slots
        self.groups = config.num_quantizers
        self.follows = recent_codes is not None
        self._extension = extension
        self._config = config
        self._recent_codes = recent_codes
        self._device = device = next(iter(tensors.values())).device
        with capturing(device):  # cuBLAS, which this needs, keeps 32 MB for every stream it has seen
            w = VocoderWeights(config, {name.removeprefix("decoder."): tensor for name, tensor in tensors.items()})
        rooms = graph_rooms(slots, -(-config.hidden_size // w.blocks))
        self.most_frames = rows = rooms[-1]
        self._weights = w  # the recordings hold addresses
        self._memory = m = VocoderMemory(config, w, slots, rows, device)
        self._queued = 0
        with torch.cuda.device(device):
            recorder = partial(Recorder, extension, config, w, m, exact)
            unwanted = torch.zeros(rows * config.samples_per_frame, device=device)
            self._pushes = extension.Pushes(
                w.codebook, m.frames, m.embedding, m.place, unwanted, config.samples_per_frame, rows
            )
            m.place.fill_(unwanted.data_ptr())
            # By room; the largest comes first and makes the memory.
            graphs = {room: recorder(room).record() for room in reversed(rooms)}
            self._graphs = dict(reversed(graphs.items()))
            self._skim = recorder(min(rows, PUSH_FRAMES), skim=True).record()
        held = [w.codebook, w.layers["weights"], *m.rooms, *(matrix for matrix, _ in w.matrices.values())]
        self.weight_bytes = sum(t.nbytes for t in held)
        self.slot_bytes = m.of_slot[0][0].nbytes
        for slot in range(slots):
            self.reset(slot)

    @torch.inference_mode()
    def reset(self, slot: int) -> None:
        self._extension.zero(self._memory.of_slot[slot])

    @torch.inference_mode()
    def save(self, slot: int) -> VocoderState:
        everything, position = self._memory.of_slot[slot]
        return {"all": everything.clone(), "position": position.clone()}

    @torch.inference_mode()
    def restore(self, slot: int, state: VocoderState) -> None:
        everything, position = self._memory.of_slot[slot]
        everything.copy_(state["all"])
        position.copy_(state["position"])

    @torch.inference_mode()
    def push(self, slots: Sequence[int], codes: Tensor) -> Tensor:
        check_push(slots, codes, self.slots, self.groups)
        sounds = []
        for some in codes.split(PUSH_FRAMES, dim=1):

            def launch(graph: Any, part: list[int], counts: list[int], at: int, some: Tensor = some) -> Any:
                listed = some[at : at + len(part)].flatten(0, 1).contiguous()
                return self._pushes.launch(graph, part, counts, listed, True)

            collect = self._queue(slots, [some.shape[1]] * len(slots), launch)
            sounds.append(torch.stack([sound for sound, _finite in collect()]))
        return torch.cat(sounds, dim=1)

    def portions(self, codes: Tensor) -> list[Portion]:
        """The transformer needs all frames, the convolutions after it only the last 10. This is 6 times as fast."""
        skimmed = max(0, len(codes) - self._reach)
        skims = [Portion(some, False) for some in codes[:skimmed].split(64)] if skimmed else []
        return [*skims, Portion(codes[skimmed:], True)]

    def listen(self, slot: int, portion: Portion) -> None:
        """Queues them, without waiting."""
        check_push([slot], portion.codes[None], self.slots, self.groups)
        for some in portion.codes.split(PUSH_FRAMES):
            graph = self._graph(len(some)) if portion.whole else self._skim
            self._count_push()
            self._pushes.launch(graph, [slot], [len(some)], some.contiguous(), False)

    @property
    def _reach(self) -> int:
        """How many frames all convolutions after the transformer look back together."""
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

    def follow(self, slots: Sequence[int], first: Sequence[int], frames: Sequence[int]) -> Callable[[], Sounds]:
        """More than `most_frames` are cut into several pushes. Collect them before PUSHES_AHEAD more are queued. A slot
        whose speech has ended holds noise until it is reset."""

        def launch(graph: Any, part: list[int], counts: list[int], at: int) -> Any:
            return self._pushes.follow(graph, part, counts, self._recent_codes, list(first[at : at + len(part)]))

        collect = self._queue(slots, frames, launch)
        return lambda: [sound if finite else None for sound, finite in collect()]

    def _queue(
        self, slots: Sequence[int], frames: Sequence[int], launch: Callable[[Any, list[int], list[int], int], Any]
    ) -> Callable[[], list[tuple[Tensor, bool]]]:
        """Launch frames in as few pushes as they fit into. Returns what waits for each slot's PCM, and whether it is
        finite."""
        runs: list[tuple[Any, list[int]]] = []  # tickets, and the frames of each slot
        at = 0
        while at < len(slots):
            to, room = at, self.most_frames
            while to < len(slots) and frames[to] <= room:
                room -= frames[to]
                to += 1
            counts = list(frames[at:to])
            self._count_push()
            runs.append((launch(self._graph(sum(counts)), list(slots[at:to]), counts, at), counts))
            at = to

        def collect() -> list[tuple[Tensor, bool]]:
            sounds = [sound for ticket, counts in runs for sound in self._pushes.collect(ticket, counts)]
            if self._memory.fault.numpy()[0]:
                raise KernelFault("a wait inside the vocoder's kernel took longer than its limit")
            return sounds

        return collect

    def _graph(self, frames: int) -> Any:
        """The smallest recording with room for so many frames."""
        return next(graph for room, graph in self._graphs.items() if room >= frames)

    def _count_push(self) -> None:
        self._queued += 1
        if self._queued % _EPOCHS_LAST == 0:  # a value published 2^32 values ago must not look new
            self._memory.forget_epochs()

    def recover(self) -> None:
        synchronize(self._device)
        self._memory.forget_epochs()
        self._memory.fault.zero_()
