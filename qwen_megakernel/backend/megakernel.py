"""MegakernelFrameDecoder: packs weights into ribbons, owns the device buffers, launches one kernel per frame.

The kernel itself is csrc/ (start with layer.cuh). One launch is a frame of up to 8 streams, of up to 16 by a kernel of
its own, or up to 8 rows of a prompt; fewer on cards with less shared memory (build.py, TARGETS).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_megakernel.backend.build import BLOCKS, load_extension, why_no_build, why_no_gpu
from qwen_megakernel.backend.interfaces import RECENT_FRAMES, SlotSequence, check_launch
from qwen_megakernel.backend.paged_prefill import LEAST, MOST, PagedPrefill
from qwen_megakernel.checkpoint.config import MIN_FRAMES, ModelConfig, SamplingParams, StackConfig
from qwen_megakernel.checkpoint.fp8 import SCALE, parts_in
from qwen_megakernel.errors import BackendError, KernelFault, SpeechError
from qwen_megakernel.model.prompt import Prefix, Prompt
from qwen_megakernel.model.sampling import Draw
from qwen_megakernel.model.transformer import rope_tables

WARPS, PAGE = 16, 64
PACKET, MLP_PACKET = 4, 6
"""Values that travel together (csrc/exchange.cuh)."""

DIMS = {
    # talker: hidden, MLP, heads, KV heads, codec vocabulary; code predictor: the same, most layers, codes
    1024: ((1024, 3072, 16, 8, 3072), (1024, 3072, 16, 8, 5, 2048)),
    2048: ((2048, 6144, 16, 8, 3072), (1024, 3072, 16, 8, 5, 2048)),
    256: ((256, 384, 4, 2, 1152), (256, 384, 2, 1, 2, 128)),
}
"""What csrc/dims.cuh has, by talker width: published 0.6B and 1.7B, the bundled demo voice."""

SPIN_LIMIT = 4_000_000
"""Polls before a wait inside the kernel gives up: seconds on a healthy card."""

STAGES = tuple(
    f"{stack} {stage}"
    for stack in ("talker", "predictor")
    for stage in ("qkv", "attention", "o", "gate_up", "down", "head", "draw")
)
"""What the kernel's stage clock adds up in block 0 (csrc/params.h, `Stage`); a wait belongs to the stage behind it."""


def why_no_megakernel(device: torch.device, dtype: torch.dtype | None, config: ModelConfig | None) -> str | None:
    """What keeps the kernel from running like this; None if nothing does. A `dtype` or `config` of None always fits."""
    if device.type != "cuda":
        needed = f"it needs an NVIDIA GPU, the device is {device}"
        return needed if torch.cuda.is_available() else f"{needed}: {why_no_gpu()}"
    if dtype not in (None, torch.bfloat16):
        return f"it computes in bfloat16, asked for {dtype}"
    obstacle = why_no_build(device)
    if obstacle or config is None:
        return obstacle
    talker, predictor = config.talker, config.talker.code_predictor

    def dims(s: StackConfig) -> tuple[int, ...]:
        return s.hidden_size, s.intermediate_size, s.num_heads, s.num_kv_heads

    large, small = DIMS.get(talker.stack.hidden_size, (None, None))
    fits = large == (*dims(talker.stack), talker.vocab_size) and talker.num_code_groups == 16
    fits = fits and small[:4] + small[5:] == (*dims(predictor.stack), predictor.vocab_size)
    fits = fits and predictor.stack.num_layers <= small[4]
    for stack in (talker.stack, predictor.stack):
        fits = fits and stack.head_dim == 128 and stack.rms_norm_eps == 1e-6
    return None if fits else "it is compiled for the published and the demo voice's dims, this checkpoint has others"


def block_rows(rows: int, multiple: int = 8) -> int:
    """Rows of a matrix that one block owns (csrc/dims.cuh)."""
    return -(-rows // (BLOCKS * multiple)) * multiple


def pack(matrix: Tensor, packet: int = PACKET, rows: int | None = None) -> Tensor:
    """One matrix as the blocks read it: bf16 or float8_e4m3fn [N, K] -> uint8 [128, bytes of a block].

    Block b owns rows b * `rows` ..., padded with zeros. Its 16 warps share K as the exchange hands it out: lane q of
    warp w gets every fourth packet of its share. Of these values, 4 at a time make a step of the mma, whose fragments
    the lanes find ready: tiles of 16 rows, or of 8 rows and two steps where the rows do not come in sixteens.
    """
    rows, k = rows or block_rows(len(matrix)), matrix.shape[1]
    fp8 = matrix.dtype == torch.float8_e4m3fn
    matrix = matrix.view(torch.uint8) if fp8 else matrix
    matrix = F.pad(matrix, (0, 0, 0, BLOCKS * rows - len(matrix)))
    # column = (warp, packet of a lane, lane % 4, value) -> (warp, lane % 4, step, half, pair)
    lanes = matrix.reshape(BLOCKS * rows, WARPS, -1, 4, packet).transpose(2, 3).reshape(-1, WARPS, 4, k // 256, 2, 2)
    if rows % 16 == 0:
        # row = (block, tile, upper half, lane / 4) -> block, step, tile, warp, lane / 4, lane % 4, half, upper, pair
        tiles = lanes.reshape(BLOCKS, rows // 16, 2, 8, WARPS, 4, -1, 2, 2).permute(0, 6, 1, 4, 3, 5, 7, 2, 8)
    else:
        # row = (block, tile, lane / 4) -> block, pair of steps, tile, warp, lane / 4, lane % 4, step, half, pair
        lanes = F.pad(lanes, (0, 0, 0, 0, 0, k // 256 % 2))
        tiles = lanes.reshape(BLOCKS, rows // 8, 8, WARPS, 4, -1, 2, 2, 2).permute(0, 5, 1, 3, 2, 4, 6, 7, 8)
    tiles = tiles.reshape(BLOCKS, -1).view(torch.uint8)
    tiles = F.pad(tiles, (0, -tiles.shape[1] % (2 * 512 * 16)))  # pairs of 16 bytes a compute thread
    if fp8:
        # block, two units, lane, two words of a unit, (first or second pair, value) -> a lane's 16 bytes, and in a word
        # the second pair in bytes 0 and 2, the first one in 1 and 3: csrc/fp8.cuh
        units = tiles.reshape(BLOCKS, -1, 2, WARPS * 32, 2, 2, 2).permute(0, 1, 3, 2, 4, 6, 5)
        tiles = units.flip(-1).reshape(BLOCKS, -1)
    return tiles.contiguous()


def pack_stack(config: StackConfig, tensors: Mapping[str, Tensor], prefix: str, positions: int) -> dict[str, Tensor]:
    """A stack's ribbon (layer after layer: qkv, o, gate and up alternating, down), norms and RoPE tables; of E4M3
    weights the scales too, of the same rows."""

    def stacked(name: str) -> Tensor:
        return torch.stack([tensors[f"{prefix}.layers.{i}.{name}.weight"] for i in range(config.num_layers)])

    def joined(i: int, suffix: str = "") -> tuple[Tensor, ...]:
        q, k, v, o = (tensors[f"{prefix}.layers.{i}.self_attn.{n}_proj.weight{suffix}"] for n in "qkvo")
        gate, up, down = (tensors[f"{prefix}.layers.{i}.mlp.{n}_proj.weight{suffix}"] for n in ("gate", "up", "down"))
        return torch.cat([q, k, v]), o, torch.stack([gate, up], dim=1).flatten(0, 1), down

    fp8 = f"{prefix}.layers.0.self_attn.q_proj.weight{SCALE}" in tensors
    parts, scales = [], []
    for i in range(config.num_layers):
        for matrix, (_, shape, block, packet) in zip(joined(i), layer_matrices(config), strict=True):
            padding = (0, shape[1] - matrix.shape[1], 0, shape[0] - len(matrix))
            padded = F.pad(matrix.view(torch.uint8) if fp8 else matrix, padding)
            parts.append(pack(padded.view(matrix.dtype), packet, block))
        if fp8:
            of_rows = zip(joined(i, SCALE), layer_matrices(config), strict=True)
            scales += [F.pad(scale, (0, shape[0] - len(scale)), value=1.0) for scale, (_, shape, *_) in of_rows]
    norm = tensors[f"{prefix}.norm.weight"]
    cos, sin = rope_tables(positions, config.head_dim, config.rope_theta, norm.device, torch.float32)
    return {
        "ribbon": torch.cat(parts, dim=1).contiguous(),
        "input_norm": stacked("input_layernorm"),
        "post_norm": stacked("post_attention_layernorm"),
        "q_norm": stacked("self_attn.q_norm"),
        "k_norm": stacked("self_attn.k_norm"),
        "norm": norm,
        "rope_cos": cos[:, : config.head_dim // 2].contiguous(),
        "rope_sin": sin[:, : config.head_dim // 2].contiguous(),
    } | ({"scales": torch.cat(scales).view(config.num_layers, -1)} if fp8 else {})


def layer_matrices(config: StackConfig) -> list[tuple[str, tuple[int, int], int, int]]:
    """A layer's matrices in the ribbon's order: name, (rows, k) as the kernel has them, rows of a block, packet."""
    hidden, mlp, width = config.hidden_size, padded_mlp(config), config.num_heads * config.head_dim
    qkv = width + 2 * config.num_kv_heads * config.head_dim
    return [
        ("qkv", (qkv, hidden), block_rows(qkv), PACKET),
        ("o", (hidden, width), block_rows(hidden), PACKET),
        ("gate_up", (2 * mlp, hidden), 2 * block_rows(mlp, 24), PACKET),
        ("down", (hidden, mlp), block_rows(hidden), MLP_PACKET),
    ]


def places(
    config: StackConfig, dtype: torch.dtype = torch.bfloat16
) -> list[tuple[str, tuple[int, int], int, int, int]]:
    """Where they lie, for `PagedPrefill`: the same, and bytes of a block."""
    like = {"dtype": dtype, "device": "meta"}
    listed = layer_matrices(config)
    return [(n, shape, rows, p, pack(torch.empty(shape, **like), p, rows).shape[1]) for n, shape, rows, p in listed]


def padded_mlp(config: StackConfig) -> int:
    """The MLP's width in the kernel: whole packets for every lane."""
    return -(-config.intermediate_size // 768) * 768


class MegakernelFrameDecoder:
    """The CUDA backend (see `FrameDecoder`): bf16 or E4M3 weights, fp32 accumulation and residual."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], *, slots: int, max_positions: int):
        """
        Args:
            tensors: every `talker.*` tensor, bf16 on one CUDA device; of parts that are FP8 (fp8.py) float8_e4m3fn, and
                their scales.

        Raises:
            BackendError: dims the kernel was not written for, or it cannot be compiled here.
        """
        talker, predictor = config.talker, config.talker.code_predictor
        device = tensors["talker.model.norm.weight"].device
        obstacle = why_no_megakernel(device, torch.bfloat16, config)
        if obstacle:
            raise BackendError(obstacle)
        fp8 = parts_in(tensors)
        extension = load_extension(device, fp8)
        self.slots, self.max_positions = slots, max_positions
        self.width = columns = extension.MOST_COLUMNS if slots > extension.COLUMNS else extension.COLUMNS
        wide = columns > extension.COLUMNS
        self._eos_id = talker.codec_eos_id
        self._pages = -(-max_positions // PAGE)
        groups = talker.num_code_groups
        large, small = talker.stack, predictor.stack

        def exchange(words: int) -> Tensor:
            return torch.zeros(columns * words, dtype=torch.int32, device=device)

        name = "talker.code_predictor"
        heads = max(large.num_heads, small.num_heads)
        hidden, mlp = max(large.hidden_size, small.hidden_size), max(padded_mlp(large), padded_mlp(small))
        frame_kv = BLOCKS * (2 if wide else 1) * DIMS[large.hidden_size][1][4] * 2 * 16 * 128
        if extension.FRAME_KV_SHARED and not wide:
            frame_kv = 1
        self.buffers = {
            **{f"talker.{n}": t for n, t in pack_stack(large, tensors, "talker.model", self._pages * PAGE).items()},
            **{f"predictor.{n}": t for n, t in pack_stack(small, tensors, f"{name}.model", groups).items()},
            "codec_head": pack(tensors["talker.codec_head.weight"]),
            "lm_heads": torch.stack([pack(tensors[f"{name}.lm_head.{g}.weight"]) for g in range(groups - 1)]),
            "code0_embedding": tensors["talker.model.codec_embedding.weight"].contiguous(),
            "code_embedding": torch.stack(
                [tensors[f"{name}.model.codec_embedding.{g}.weight"] for g in range(groups - 1)]
            ),
            # csrc/params.h, `Exchange`: 2 words a tagged value, 4 a packet
            "x.qkv": exchange(2 * 128 * max(s.num_heads + 2 * s.num_kv_heads for s in (large, small))),
            "x.part": exchange(4 * heads * 8 * 128),
            "x.attn": exchange(heads * 128),
            "x.h_attn": exchange(hidden),
            "x.mlp": exchange(4 * mlp // MLP_PACKET),
            "x.h_mlp": exchange(hidden),
            "x.adapted": exchange(hidden),
            "x.logits": exchange(4 * talker.vocab_size),
            "x.drawn": exchange(2 * BLOCKS),
            "kv": torch.zeros(
                slots * self._pages,
                large.num_layers,
                2,
                large.num_kv_heads,
                PAGE,
                128,
                dtype=torch.bfloat16,
                device=device,
            ),
            "frame_kv": torch.zeros(frame_kv, dtype=torch.bfloat16, device=device),
        }
        if large.hidden_size != small.hidden_size:
            adapter = f"{name}.small_to_mtp_projection"
            self.buffers["adapter"] = pack(tensors[f"{adapter}.weight"])
            self.buffers["adapter_bias"] = tensors[f"{adapter}.bias"].float()
        if "codec_head" in fp8:
            self.buffers["codec_head_scales"] = tensors[f"talker.codec_head.weight{SCALE}"]
        if "lm_heads" in fp8:
            scales = [tensors[f"{name}.lm_head.{g}.weight{SCALE}"] for g in range(groups - 1)]
            self.buffers["lm_head_scales"] = torch.stack(scales)
        settings = {
            "eos_id": talker.codec_eos_id,
            "first_suppressed_id": talker.first_suppressed_id,
            "min_frames": MIN_FRAMES,
            "spin_limit": SPIN_LIMIT,
            "columns": columns,
        }
        self._launcher = extension.Launcher(large.hidden_size, slots, self.buffers, settings)
        self._fault = self._launcher.fault()
        self._streams: dict[int, SlotSequence] = {}
        self._launches: deque[list[SlotSequence]] = deque()  # uncollected
        self._prefixes: WeakKeyDictionary[Prefix, Tensor] = WeakKeyDictionary()
        pages = torch.arange(slots * self._pages, dtype=torch.int32, device=device)
        self._page_tables = pages.view(slots, self._pages)
        self._rows = torch.zeros(slots, large.hidden_size, device=device)  # next inputs
        self._seen = torch.zeros(slots, talker.vocab_size, dtype=torch.uint8, device=device)
        self.recent_codes = torch.zeros(slots, RECENT_FRAMES, groups, dtype=torch.int32, device=device)
        self._nothing = torch.zeros(large.hidden_size, dtype=torch.bfloat16, device=device)
        where = {"page": PAGE, "pages": self._pages}
        stored = torch.float8_e4m3fn if "talker" in fp8 else torch.bfloat16
        self._long = PagedPrefill(extension, large, self.buffers, places(large, stored), **where)
        self._of_slot = list(zip(self._page_tables, self._seen, self._rows, self.recent_codes, strict=True))

    @property
    def weight_bytes(self) -> int:
        """Memory of everything but keys and values."""
        return sum(t.nbytes for name, t in self.buffers.items() if name != "kv")

    @torch.inference_mode()
    def start(self, slot: int, prompt: Prompt, sampling: SamplingParams) -> None:
        last = len(prompt.rows) - 1
        if not 0 <= slot < self.slots or not 0 <= last < self.max_positions:
            raise ValueError(
                f"slot must be in 0..{self.slots - 1} and the prompt of 1..{self.max_positions} rows, "
                f"got slot {slot} and {last + 1} rows"
            )
        settings = {"repetition_penalty": sampling.repetition_penalty}
        for kind, draw in (("code0", Draw.code0(sampling)), ("predictor", Draw.predictor(sampling))):
            settings |= {f"{kind}_sample": draw.do_sample, f"{kind}_temperature": draw.temperature}
            settings |= {f"{kind}_top_k": draw.top_k, f"{kind}_top_p": draw.top_p}
        if slot in self._streams:
            self._streams[slot].over = True
        self._streams[slot] = SlotSequence(
            trailing=prompt.trailing.contiguous(),
            pad=prompt.pad.contiguous(),
            text_open=prompt.text_open,
            frames=self.max_positions - last,
        )
        pages, seen, row, recent = self._of_slot[slot]
        self._launcher.begin(slot, pages, seen, row, recent, settings, sampling.seed or 0)
        rows = prompt.rows.float()
        done = self._enter_prefix(slot, prompt) if prompt.prefix else 0
        self._prefill(slot, rows[done:last], done)
        row.copy_(rows[last])
        seen.zero_()
        self._set_text(slot)

    def _enter_prefix(self, slot: int, prompt: Prompt) -> int:
        """Keys and values of the prompt's prefix, kept or computed, a copy of whole pages; its length."""
        rows, kept = prompt.prefix.rows, self._prefixes.get(prompt.prefix)
        first = slot * self._pages
        pages = self.buffers["kv"][first : first + -(-rows // PAGE)]
        if kept is not None:
            pages.copy_(kept)
            self._launcher.seek(slot, rows, 0)
        else:
            self._prefill(slot, prompt.rows[:rows].float(), 0)
            self._prefixes[prompt.prefix] = pages.clone()
        return rows

    def _prefill(self, slot: int, rows: Tensor, position: int) -> None:
        """Many rows at a time as long as there are many, then by columns."""
        rest = len(rows) % MOST
        many = len(rows) - rest if rest < LEAST else len(rows)
        if many:
            self._long.run(slot * self._pages, rows[:many], position)
            self._launcher.seek(slot, position + many, 0)
        self._launcher.prefill(slot, rows[many:])

    @torch.inference_mode()
    def extend(self, slot: int, rows: Tensor, ended: bool) -> None:
        stream = self._streams[slot]
        stream.extend(self._rows[slot], stream.launched, rows, ended)
        self._set_text(slot)

    def _set_text(self, slot: int) -> None:
        """Behind rows that have yet to come there is nothing, else the pad."""
        stream = self._streams[slot]
        self._launcher.set_text(slot, stream.trailing, self._nothing if stream.text_open else stream.pad)

    def launch(self, slots: Sequence[int]) -> None:
        if len(slots) > self.width:
            raise ValueError(f"a launch of this GPU's build takes 1 to {self.width} slots, got {list(slots)}")
        check_launch(slots, self._streams, len(self._launches), self.max_positions)
        self._launcher.decode(list(slots))
        streams = [self._streams[slot] for slot in slots]
        for stream in streams:
            stream.launched += 1
        self._launches.append(streams)

    def collect(self) -> list[Tensor | SpeechError | None]:
        if not self._launches:
            raise RuntimeError("nothing is launched: launch() first, then collect() once for every launch")
        streams = self._launches.popleft()
        said = self._launcher.collect()[: len(streams)].long()
        codes, broken = said[:, :-1], said[:, -1].tolist()
        if self._fault.item():
            raise KernelFault("a wait inside the kernel outlasted its limit")
        return [stream.say(frame, self._eos_id, *of) for stream, frame, *of in zip(streams, codes, broken, strict=True)]

    def observe(self) -> tuple[Tensor, Tensor]:
        """From now on every launch leaves in these tensors, by column, the talker's hidden state, fp32 [width, hidden],
        and the raw logits, fp32 [width, groups, vocab]; what is beyond a group's candidates is not written."""
        like = {"dtype": torch.float32, "device": self._rows.device}
        hidden = torch.zeros(self.width, self._rows.shape[1], **like)
        logits = torch.zeros(self.width, self.recent_codes.shape[2], self._seen.shape[1], **like)
        self._launcher.observe(hidden, logits, None)
        return hidden, logits

    @torch.inference_mode()
    def recover(self) -> None:
        """After a KernelFault: forget it, every stream and every kept prefix. Epochs only grow, they need no reset."""
        while self._launches:
            self._launches.popleft()
            self._launcher.collect()
        self._streams.clear()
        self._prefixes.clear()
        self._fault.zero_()
