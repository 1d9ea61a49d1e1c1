"""MegakernelFrameDecoder: packs weights into ribbons, owns the device buffers, launches one kernel per frame.

The kernel itself is csrc/ (start with layer.cuh). So far one stream runs a launch and prompts are prefilled
row by row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qwen_megakernel.build import load_extension, why_no_build
from qwen_megakernel.config import MIN_FRAMES, ModelConfig, SamplingParams, StackConfig
from qwen_megakernel.errors import BackendError, KernelFault
from qwen_megakernel.prompt import Prompt
from qwen_megakernel.sampling import Draw
from qwen_megakernel.transformer import rope_tables

BLOCKS, WARPS, PAGE = 128, 16, 64
SPIN_LIMIT = 20_000_000
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
        return f"it needs an NVIDIA GPU, the device is {device}"
    if device.index:
        return f"it runs on the first GPU only so far, the device is {device}"
    if dtype not in (None, torch.bfloat16):
        return f"it computes in bfloat16, asked for {dtype}"
    obstacle = why_no_build(device)
    if obstacle or config is None:
        return obstacle
    talker, predictor = config.talker, config.talker.code_predictor
    dims = (talker.stack.hidden_size, talker.stack.intermediate_size, talker.stack.num_layers)
    fits = dims in ((1024, 3072, 28), (2048, 6144, 28)) and (talker.vocab_size, predictor.vocab_size) == (3072, 2048)
    small = (predictor.stack.hidden_size, predictor.stack.intermediate_size, predictor.stack.num_layers)
    fits = fits and small == (1024, 3072, 5) and talker.num_code_groups == 16
    for stack in (talker.stack, predictor.stack):
        fits = fits and (stack.num_heads, stack.num_kv_heads, stack.head_dim) == (16, 8, 128)
        fits = fits and stack.rms_norm_eps == 1e-6
    return None if fits else "it is compiled for the published 0.6B and 1.7B dims, and this checkpoint has others"


def pack(matrix: Tensor) -> Tensor:
    """One matrix as the blocks read it: bf16 [N, K] -> uint8 [128, N * K * 2 / 128].

    Block b owns rows b * N/128 ... Its warps share K; every lane finds the 8 values of its mma fragment side by
    side. Tiles are 16 rows x 16 columns, or 8 x 32 where a block's rows do not come in sixteens: then the
    fragment's upper half holds the same rows 16 columns on (csrc/matvec.cuh).
    """
    rows, k = matrix.shape[0] // BLOCKS, matrix.shape[1]
    if rows % 16 == 0:
        # row = (tile, upper half, lane / 4), column = (warp, tile, half, lane % 4, pair)
        tiles = matrix.reshape(BLOCKS, rows // 16, 2, 8, WARPS, k // WARPS // 16, 2, 4, 2)
        tiles = tiles.permute(0, 5, 1, 4, 3, 7, 6, 2, 8)
    else:
        # row = (tile, lane / 4), column = (warp, tile, upper half, half, lane % 4, pair)
        tiles = matrix.reshape(BLOCKS, rows // 8, 8, WARPS, k // WARPS // 32, 2, 2, 4, 2)
        tiles = tiles.permute(0, 4, 1, 3, 2, 7, 6, 5, 8)
    return tiles.reshape(BLOCKS, -1).contiguous().view(torch.uint8)


def pack_stack(config: StackConfig, tensors: Mapping[str, Tensor], prefix: str, positions: int) -> dict[str, Tensor]:
    """A stack's ribbon (layer after layer: qkv, o, gate and up alternating, down), norms and RoPE tables."""

    def stacked(name: str) -> Tensor:
        return torch.stack([tensors[f"{prefix}.layers.{i}.{name}.weight"] for i in range(config.num_layers)])

    parts = []
    for i in range(config.num_layers):
        w = {n: tensors[f"{prefix}.layers.{i}.{n}_proj.weight"] for n in ("self_attn.q", "self_attn.k", "self_attn.v")}
        gate, up = (tensors[f"{prefix}.layers.{i}.mlp.{n}_proj.weight"] for n in ("gate", "up"))
        parts += [pack(torch.cat(list(w.values()))), pack(tensors[f"{prefix}.layers.{i}.self_attn.o_proj.weight"])]
        parts += [pack(torch.stack([gate, up], dim=1).flatten(0, 1))]
        parts += [pack(tensors[f"{prefix}.layers.{i}.mlp.down_proj.weight"])]
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
    }


@dataclass
class _Slot:
    row: Tensor  # fp32 [hidden], the next input
    seen: Tensor  # uint8 [codec vocabulary]
    pages: Tensor  # int32 [pages]
    prompt: Prompt | None = None
    sampling: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    position: int = 0
    frame: int = 0


class MegakernelFrameDecoder:
    """The CUDA backend (see `FrameDecoder`): bf16 weights, fp32 accumulation and residual."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], *, slots: int, max_positions: int):
        """
        Args:
            tensors: every `talker.*` tensor, bf16 on one CUDA device.

        Raises:
            BackendError: dims the kernel was not written for, or it cannot be compiled here.
        """
        talker, predictor = config.talker, config.talker.code_predictor
        obstacle = why_no_megakernel(tensors["talker.model.norm.weight"].device, torch.bfloat16, config)
        if obstacle:
            raise BackendError(obstacle)
        self.slots, self.max_positions = slots, max_positions
        self._eos_id = talker.codec_eos_id
        device = tensors["talker.model.norm.weight"].device
        hidden, groups = talker.stack.hidden_size, talker.num_code_groups
        pages = -(-max_positions // PAGE)

        def exchange(n: int) -> Tensor:
            return torch.zeros(n, dtype=torch.int64, device=device)

        name = "talker.code_predictor"
        buffers = {
            **{f"talker.{n}": t for n, t in pack_stack(talker.stack, tensors, "talker.model", max_positions).items()},
            **{f"predictor.{n}": t for n, t in pack_stack(predictor.stack, tensors, f"{name}.model", groups).items()},
            "codec_head": pack(tensors["talker.codec_head.weight"]),
            "lm_heads": torch.stack([pack(tensors[f"{name}.lm_head.{g}.weight"]) for g in range(groups - 1)]),
            "code0_embedding": tensors["talker.model.codec_embedding.weight"],
            "code_embedding": torch.stack(
                [tensors[f"{name}.model.codec_embedding.{g}.weight"] for g in range(groups - 1)]
            ),
            "x.qkv": exchange(4096),
            "x.attn": exchange(8 * 2048),
            "x.split": exchange(16 * 8 * 2),
            "x.h_attn": exchange(hidden),
            "x.mlp": exchange(talker.stack.intermediate_size),
            "x.h_mlp": exchange(hidden),
            "x.adapted": exchange(1024),
            "x.logits": exchange(talker.vocab_size),
            "x.noisy": exchange(talker.vocab_size),
            "fault": torch.zeros(1, dtype=torch.int32, device=device),
            "kv": torch.zeros(slots * pages, 28, 2, 8, PAGE, 128, dtype=torch.bfloat16, device=device),
            "codes": torch.zeros(groups, dtype=torch.int32, device=device),
        }
        if hidden != 1024:
            adapter = f"{name}.small_to_mtp_projection"
            buffers["adapter"] = pack(tensors[f"{adapter}.weight"])
            buffers["adapter_bias"] = tensors[f"{adapter}.bias"].float()
        self._codes, self._fault = buffers["codes"], buffers["fault"]
        settings = {
            "eos_id": talker.codec_eos_id,
            "first_suppressed_id": talker.first_suppressed_id,
            "min_frames": MIN_FRAMES,
            "spin_limit": SPIN_LIMIT,
        }
        self._launcher = load_extension().Launcher(hidden, {n: t.contiguous() for n, t in buffers.items()}, settings)
        self._layers, self._frame_epochs = talker.stack.num_layers, talker.stack.num_layers + groups * 5
        self._epoch = 0
        self._slots = [
            _Slot(
                row=torch.zeros(hidden, device=device),
                seen=torch.zeros(talker.vocab_size, dtype=torch.uint8, device=device),
                pages=torch.arange(s * pages, (s + 1) * pages, dtype=torch.int32, device=device),
            )
            for s in range(slots)
        ]

    @torch.inference_mode()
    def start(self, slot: int, prompt: Prompt, sampling: SamplingParams) -> None:
        s = self._slots[slot]
        s.prompt, s.position, s.frame, s.seed = prompt, 0, 0, sampling.seed or 0
        s.sampling = {"repetition_penalty": sampling.repetition_penalty}
        for kind, draw in (("code0", Draw.code0(sampling)), ("predictor", Draw.predictor(sampling))):
            s.sampling |= {f"{kind}_sample": draw.do_sample, f"{kind}_temperature": draw.temperature}
            s.sampling |= {f"{kind}_top_k": draw.top_k, f"{kind}_top_p": draw.top_p}
        s.seen.zero_()
        rows = prompt.rows.float()
        for row in rows[:-1]:
            self._launch(s, row, prefill=True)
            s.position += 1
        s.row.copy_(rows[-1])

    @torch.inference_mode()
    def decode(self, slot: int) -> Tensor | None:
        s = self._slots[slot]
        self._launch(s, s.row)
        codes = self._codes.cpu().long()
        if int(self._fault):
            raise KernelFault("a wait inside the kernel outlasted its limit; call recover()")
        s.position += 1
        s.frame += 1
        return None if codes[0] == self._eos_id else codes

    def recover(self) -> None:
        """After a KernelFault: forget it. Epochs only grow, so nothing else needs a reset; streams must start anew."""
        self._fault.zero_()

    def _launch(
        self,
        s: _Slot,
        row: Tensor,
        *,
        prefill: bool = False,
        hidden_out: Tensor | None = None,
        logits_out: Tensor | None = None,
        stage_ns: Tensor | None = None,
    ) -> None:
        trailing = s.prompt.trailing
        text = trailing[s.frame] if s.frame < len(trailing) else s.prompt.pad
        self._launcher.launch(
            row, s.row, text, s.pages, s.seen, s.position, s.frame, prefill, self._epoch,
            s.sampling, s.seed, hidden_out, logits_out, stage_ns,
        )  # fmt: skip
        self._epoch = (self._epoch + (self._layers if prefill else self._frame_epochs)) & 0xFFFFFFFF
