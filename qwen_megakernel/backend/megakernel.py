"""MegakernelFrameDecoder: has the weights packed, owns the device buffers, launches one kernel per frame.

The kernel itself is csrc/frame/ (start with layer.cuh). One launch is a frame of up to 8 sequences, or as many rows of
a prompt. A wide kernel takes up to 16, and CUDA graphs of kernels up to 256. Cards with less shared memory take fewer
(targets.py, TARGETS).
"""

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from qwen_megakernel.backend.build import load_extension
from qwen_megakernel.backend.interfaces import RECENT_FRAMES, SlotSequence, Watch, check_launch, check_start
from qwen_megakernel.backend.pack import pack, pack_stack, places
from qwen_megakernel.backend.paged_prefill import LEAST, MOST, PagedPrefill
from qwen_megakernel.backend.sizes import (
    COMPUTE_WARPS,
    DIMS,
    FIRST_LOOKED_UP,
    GROUPS,
    HEAD_DIM,
    MLP_PACKET,
    PACKET,
    PAGE_POSITIONS,
    SPIN_LIMIT,
    SPLITS,
    TELLINGS,
    TOLD,
    padded_mlp,
)
from qwen_megakernel.checkpoint.config import MIN_FRAMES, ModelConfig, StackConfig, TalkerConfig
from qwen_megakernel.checkpoint.fp8 import SCALE, parts_in
from qwen_megakernel.errors import BackendError, KernelFault, SpeechError
from qwen_megakernel.model.prompt import Prefix, Prompt
from qwen_megakernel.model.sampling import Draw
from qwen_megakernel.sampling_params import SamplingParams

log = logging.getLogger(__name__)

TABLES_LEAVE = 4 * 2**30
"""Bytes of a GPU's memory that tables leave free: for the vocoder, its streams, and who else uses the card."""


STAGES = tuple(
    f"{stack} {stage}"
    for stack in ("talker", "predictor")
    for stage in ("qkv", "attention", "o", "gate_up", "down", "head", "draw")
)
"""Stages that the stage clock adds up in block 0 (csrc/frame/params.h, `Stage`). A wait counts for the next stage."""


def why_other_sizes(config: ModelConfig) -> str | None:
    """Why the kernel does not take a model of these sizes; None: it does."""
    talker, predictor = config.talker, config.talker.code_predictor

    def dims(s: StackConfig) -> tuple[int, ...]:
        return s.hidden_size, padded_mlp(s.intermediate_size), s.num_heads, s.num_kv_heads

    fits = talker.stack.hidden_size in DIMS and talker.num_code_groups == GROUPS
    if fits:
        large, small = DIMS[talker.stack.hidden_size]
        fits = large == (*dims(talker.stack), talker.vocab_size) and predictor.stack.num_layers <= small[4]
        fits = fits and small[:4] + small[5:] == (*dims(predictor.stack), predictor.vocab_size)
    for stack in (talker.stack, predictor.stack):
        fits = fits and stack.head_dim == HEAD_DIM and stack.rms_norm_eps == 1e-6
    return None if fits else "it is compiled for the published checkpoints and the demo voice; this one has other sizes"


def _pack_weights(
    config: TalkerConfig, tensors: Mapping[str, Tensor], fp8: Collection[str], positions: int, blocks: int
) -> dict[str, Tensor]:
    """All tensors that the kernel reads, by the names in csrc/frame/frame_bindings.cpp. `tensors`: every `talker.*`
    tensor. `fp8`: parts (fp8.PARTS) whose weights are E4M3. `positions`: of the RoPE tables. `blocks`: of a launch."""
    name, groups = "talker.code_predictor", config.num_code_groups
    large, small = config.stack, config.code_predictor.stack
    heads = [f"{name}.lm_head.{g}.weight" for g in range(groups - 1)]
    embeddings = [f"{name}.model.codec_embedding.{g}.weight" for g in range(groups - 1)]
    packed = {
        **{f"talker.{n}": t for n, t in pack_stack(large, tensors, "talker.model", positions, blocks).items()},
        **{f"predictor.{n}": t for n, t in pack_stack(small, tensors, f"{name}.model", groups, blocks).items()},
        "codec_head": pack(tensors["talker.codec_head.weight"], blocks),
        "lm_heads": torch.stack([pack(tensors[head], blocks) for head in heads]),
        "code0_embedding": tensors["talker.model.codec_embedding.weight"].contiguous(),
        "code_embedding": torch.stack([tensors[embedding] for embedding in embeddings]),
    }
    if large.hidden_size != small.hidden_size:
        adapter = f"{name}.small_to_mtp_projection"
        packed["adapter"] = pack(tensors[f"{adapter}.weight"], blocks)
        packed["adapter_bias"] = tensors[f"{adapter}.bias"].float()
    if "codec_head" in fp8:
        packed["codec_head_scales"] = tensors[f"talker.codec_head.weight{SCALE}"]
    if "lm_heads" in fp8:
        packed["lm_head_scales"] = torch.stack([tensors[f"{head}{SCALE}"] for head in heads])
    return packed


def _make_exchange(
    config: TalkerConfig, columns: int, many: int, blocks: int, device: torch.device
) -> dict[str, Tensor]:
    """The memory through which blocks of a launch exchange vectors (csrc/frame/params.h, `Exchange`). `many`: columns
    of the widest launch, which uses the logits."""
    stacks = (config.stack, config.code_predictor.stack)
    heads, hidden = max(s.num_heads for s in stacks), max(s.hidden_size for s in stacks)
    mlp = max(padded_mlp(s.intermediate_size) for s in stacks)
    words = {  # of a column: 2 a tagged value, 4 a packet
        "x.qkv": 2 * HEAD_DIM * max(s.num_heads + 2 * s.num_kv_heads for s in stacks),
        "x.part": 4 * heads * SPLITS * HEAD_DIM // 2,
        "x.attn": 4 * heads * HEAD_DIM // PACKET,
        "x.h_attn": 4 * hidden // PACKET,
        "x.mlp": 4 * mlp // MLP_PACKET,
        "x.h_mlp": 4 * hidden // PACKET,
        "x.adapted": 4 * hidden // PACKET,
        "x.logits": 4 * config.vocab_size,
        "x.drawn": 2 * blocks,
    }
    rows = {name: columns for name in words} | {"x.logits": max(columns, many)}
    return {name: torch.zeros(rows[name] * n, dtype=torch.int32, device=device) for name, n in words.items()}


def _columns(config: TalkerConfig, slots: int, extension: ModuleType) -> int:
    """Columns of the widest launch."""
    few, most = int(extension.COLUMNS), int(extension.MOST_COLUMNS)
    if slots <= few:
        return few
    return max(most, min(slots, int(extension.BATCH_COLUMNS)))


def _make_batch(config: TalkerConfig, columns: int, device: torch.device) -> dict[str, Tensor]:
    """What launches of many columns hand from kernel to kernel (csrc/frame/params.h, `Batch`)."""
    talker, predictor = stacks = (config.stack, config.code_predictor.stack)
    hidden = max(s.hidden_size for s in stacks)

    def vector(values: int) -> Tensor:  # of bf16
        return torch.zeros(2 * columns * values, dtype=torch.uint8, device=device)

    def floats(*shape: int) -> Tensor:
        return torch.zeros(columns, *shape, device=device)

    residuals = ("batch.input", "batch.after_attention", "batch.after_mlp")
    shape = (predictor.num_kv_heads, columns, DIMS[talker.hidden_size][1][4], 2, GROUPS, HEAD_DIM)
    return {
        **{name: vector(hidden) for name in residuals},
        **{f"{name}_squares": floats(COMPUTE_WARPS) for name in residuals},
        "batch.attended": vector(max(s.num_heads for s in stacks) * HEAD_DIM),
        "batch.gated": vector(max(padded_mlp(s.intermediate_size) for s in stacks)),
        "batch.qkv": floats(max(s.num_heads + 2 * s.num_kv_heads for s in stacks) * HEAD_DIM),
        "batch.residual": floats(hidden),
        "batch.hidden": floats(talker.hidden_size),
        "batch.inverse": floats(),
        "batch.code": torch.zeros(columns, dtype=torch.int32, device=device),
        "batch.frame_kv": torch.zeros(shape, dtype=torch.bfloat16, device=device),
    }


def _make_key_values(
    config: TalkerConfig, pages: int, columns: int, extension: ModuleType, device: torch.device
) -> dict[str, Tensor]:
    """The talker's pages, and the code predictor's keys and values if shared memory has no room for them."""
    stack, wide = config.stack, columns > extension.COLUMNS
    in_shared = extension.FRAME_KV_SHARED and not wide
    layers = DIMS[stack.hidden_size][1][4]
    frame_kv = 1 if in_shared else extension.BLOCKS * layers * 2 * GROUPS * HEAD_DIM
    shape = (pages, stack.num_layers, 2, stack.num_kv_heads, PAGE_POSITIONS, HEAD_DIM)
    return {
        "kv": torch.zeros(shape, dtype=torch.bfloat16, device=device),
        "frame_kv": torch.zeros(frame_kv, dtype=torch.bfloat16, device=device),
    }


def _make_tables(talker_hidden: int, device: torch.device) -> dict[str, Tensor]:
    """What layer 0 of the code predictor makes of each code (csrc/frame/params.h, `Tables`), not filled yet."""
    hidden, _, heads, kv_heads, _, codes = DIMS[talker_hidden][1]
    rows = (GROUPS - FIRST_LOOKED_UP, codes)
    width = 2 * (heads + kv_heads) * HEAD_DIM  # q, k, v, and what rounding left of q
    tables = {"tables.heads": torch.empty(*rows, width, dtype=torch.bfloat16, device=device)}
    if hidden != talker_hidden:
        tables["tables.adapted"] = torch.empty(*rows, hidden, device=device)
    return tables


def table_bytes(talker_hidden: int) -> int:
    """Memory of the tables for a talker of that width."""
    return sum(table.nbytes for table in _make_tables(talker_hidden, torch.device("meta")).values())


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process may still take: what torch holds but does not use counts, and its limit too."""
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    # torch 2.7 has no such function.
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: 1.0)
    return min(free + torch.cuda.memory_reserved(device) - used, int(share(device) * total) - used)


def why_no_tables(talker_hidden: int, device: torch.device) -> str | None:
    """Why there are no tables beside what the GPU holds now; None: there are. Codes are the same with and without."""
    size, free = table_bytes(talker_hidden), free_memory(device)
    if free >= size + TABLES_LEAVE:
        return None
    return f"{size / 2**20:.0f} MiB would leave less than {TABLES_LEAVE / 2**30:.0f} of {free / 2**30:.1f} free GiB"


@dataclass(eq=False, kw_only=True)
class _Sequence(SlotSequence):
    # Of the watched heads in its latest frames, each at its number modulo TELLINGS.
    queries: Tensor  # fp32 [TELLINGS, heads, HEAD_DIM]
    telling: np.ndarray  # fp32 [TELLINGS, layers, heads, TOLD], in pinned memory
    read: int = 0  # frames of which it was read


class MegakernelFrameDecoder:
    """The CUDA backend (see `FrameDecoder`): bf16 or E4M3 weights, fp32 accumulation and residual."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        *,
        slots: int,
        max_positions: int,
        pages: int | None = None,
        tables: bool | None = None,
        extension: ModuleType | None = None,
    ):
        """`tensors`: every `talker.*` tensor, bf16 on one CUDA device. FP8 parts (fp8.py) are float8_e4m3fn with
        scales. `pages`: that the slots share; None: `max_positions` for each. `tables`: look up what layer 0 of the
        code predictor makes of a code, which changes no code; None: if there is room (`why_no_tables`). `extension`:
        `Build.load`'s, for these weights; None: it is loaded here. Raises BackendError: the kernel was not written for
        these dims, or cannot be compiled here. KernelFault: the GPU gave up while it filled the tables."""
        talker = config.talker
        device = tensors["talker.model.norm.weight"].device
        if obstacle := why_other_sizes(config):
            raise BackendError(obstacle)
        fp8 = parts_in(tensors)
        extension = extension or load_extension(device, fp8)
        self.slots = slots
        self.max_positions = max_positions
        self.width = columns = _columns(talker, slots, extension)
        self.narrow = min(columns, extension.MOST_COLUMNS)
        self._eos_id = talker.codec_eos_id
        self._pages = -(-max_positions // PAGE_POSITIONS)  # of a slot, at most
        self.pages = pages or slots * self._pages
        self.buffers = {
            **_pack_weights(talker, tensors, fp8, self._pages * PAGE_POSITIONS, extension.BLOCKS),
            **_make_exchange(talker, extension.MOST_COLUMNS, columns, extension.BLOCKS, device),
            **_make_key_values(talker, self.pages, columns, extension, device),
        }
        if columns > extension.MOST_COLUMNS:
            self.buffers |= _make_batch(talker, extension.BATCH_COLUMNS, device)
        hidden = talker.stack.hidden_size
        if tables is None:
            obstacle = why_no_tables(hidden, device)
            tables = obstacle is None
            log.info("the code predictor's tables: %s", obstacle or f"{table_bytes(hidden) / 2**20:.0f} MiB")
        if tables:
            self.buffers |= _make_tables(hidden, device)
        self.weight_bytes = sum(t.nbytes for name, t in self.buffers.items() if name != "kv")
        settings = {
            "eos_id": talker.codec_eos_id,
            "first_suppressed_id": talker.first_suppressed_id,
            "min_frames": MIN_FRAMES,
            "spin_limit": SPIN_LIMIT,
            "columns": columns,
            "heads": talker.stack.num_heads,
        }
        stack, groups = talker.stack, talker.num_code_groups
        self._launcher = extension.Launcher(stack.hidden_size, slots, self.buffers, settings)
        self._fault = self._launcher.fault()
        if tables:
            self._launcher.fill_tables()
            if self._fault.numpy()[0]:
                raise KernelFault("a wait inside the kernel took longer than its limit, while it filled its tables")
        self._sequences: dict[int, _Sequence] = {}
        self._launches: deque[list[_Sequence]] = deque()  # uncollected
        self._untold: list[_Sequence] = []  # of the launch that was collected last, unless what is told of it was read
        self.prefixes: WeakKeyDictionary[Prefix, Tensor] = WeakKeyDictionary()
        self._page_tables = torch.zeros(slots, self._pages, dtype=torch.int32, device=device)
        self._rows = torch.zeros(slots, stack.hidden_size, device=device)  # next inputs
        residuals = torch.zeros_like(self._rows)  # of prompts' last rows, behind the talker
        self._seen = torch.zeros(slots, talker.vocab_size, dtype=torch.uint8, device=device)
        self.recent_codes = torch.zeros(slots, RECENT_FRAMES, groups, dtype=torch.int32, device=device)
        self._nothing = torch.zeros(stack.hidden_size, dtype=torch.bfloat16, device=device)
        stored = torch.float8_e4m3fn if "talker" in fp8 else torch.bfloat16
        listed = places(stack, extension.BLOCKS, stored)
        self._long = PagedPrefill(extension, stack, self.buffers, listed, page=PAGE_POSITIONS, pages=self._pages)
        self._heads = stack.num_layers, stack.num_heads
        # For one watched head of each slot; where all are watched, `start` makes more.
        queries = torch.zeros(slots, TELLINGS, 1, HEAD_DIM, device=device)
        telling = torch.zeros(slots, TELLINGS, 1, TOLD, pin_memory=True)
        self._watching = list(zip(queries.unbind(), telling.unbind(), strict=True))
        of_slot = (self._page_tables, self._seen, self._rows, residuals, self.recent_codes)
        self._of_slot = list(zip(*of_slot, strict=True))

    @torch.inference_mode()
    def start(
        self,
        slot: int,
        prompt: Prompt,
        sampling: SamplingParams,
        pages: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> None:
        last = len(prompt.rows) - 1
        check_start(self, slot, len(prompt.rows))
        pages = pages or range(slot * self._pages, (slot + 1) * self._pages)
        if slot in self._sequences:
            self._sequences[slot].over = True
        (queries, telling), shape = self._watching[slot], (1, 1)
        if watch and not watch.head:
            shape = self._heads
            queries = queries.new_empty(TELLINGS, shape[0] * shape[1], HEAD_DIM)
            telling = torch.empty(TELLINGS, shape[0] * shape[1], TOLD, pin_memory=True)
        self._sequences[slot] = _Sequence(
            trailing=prompt.trailing.contiguous(),
            pad=prompt.pad.contiguous(),
            text_open=prompt.text_open,
            frames=min(self.max_positions, len(pages) * PAGE_POSITIONS) - last,
            watch=watch,
            queries=queries,
            telling=telling.numpy().reshape(TELLINGS, *shape, TOLD),
        )
        # Few calls, because each lets other threads run Python. What can wait comes after the kernel's launch.
        prefix = prompt.prefix
        kept = prefix and self.prefixes.get(prefix)
        done = prefix.rows if prefix else 0
        self._launcher.begin(slot, pages, *self._of_slot[slot], kept, done)
        if watch:
            first = watch.head.layer * self._heads[1] + watch.head.head if watch.head else 0
            self._launcher.watch(slot, queries, telling, first, watch.text_at)
        if prefix and kept is None:
            self._keep_prefix(slot, prefix, prompt.rows[: prefix.rows])
        if last - done >= LEAST:
            done += self._prefill_many(slot, prompt.rows[done:last], done)
        self._launcher.enter(slot, prompt.rows, done)
        settings = {"repetition_penalty": sampling.repetition_penalty}
        for kind, draw in (("code0", Draw.code0(sampling)), ("predictor", Draw.predictor(sampling))):
            settings |= {f"{kind}_sample": draw.do_sample, f"{kind}_temperature": draw.temperature}
            settings |= {f"{kind}_top_k": draw.top_k, f"{kind}_top_p": draw.top_p}
        self._launcher.set_sampling(slot, settings, sampling.seed or 0)
        self._set_text(slot)

    def _keep_prefix(self, slot: int, prefix: Prefix, rows: Tensor) -> None:
        """Compute the prefix's keys and values in the slot, and keep a copy of its pages."""
        rows = rows.float()
        self._launcher.prefill(slot, rows[self._prefill_many(slot, rows, 0) :])  # by columns what `PagedPrefill` left
        pages = self._page_tables[slot, : -(-len(rows) // PAGE_POSITIONS)]
        self.prefixes[prefix] = self.buffers["kv"].index_select(0, pages)

    def _prefill_many(self, slot: int, rows: Tensor, position: int) -> int:
        """Prefill by `PagedPrefill` while there are many rows. Returns how many it took."""
        rest = len(rows) % MOST
        many = len(rows) - rest if rest < LEAST else len(rows)
        if many:
            self._long.run(self._page_tables[slot], rows[:many], position)
            self._launcher.seek(slot, position + many, 0)
        return many

    @torch.inference_mode()
    def extend(self, slot: int, rows: Tensor, ended: bool) -> None:
        sequence = self._sequences[slot]
        sequence.extend(self._rows[slot], sequence.launched, rows, ended)
        self._set_text(slot)

    def _set_text(self, slot: int) -> None:
        """Set the trailing rows and what follows them: nothing while more will come, else the pad."""
        sequence = self._sequences[slot]
        self._launcher.set_text(slot, sequence.trailing, self._nothing if sequence.text_open else sequence.pad)

    def launch(self, slots: Sequence[int]) -> None:
        check_launch(slots, self.width, self._sequences, len(self._launches), self.max_positions)
        sequences = [self._sequences[slot] for slot in slots]
        watches = [sequence.watch for sequence in sequences]
        texts = [n for w in watches for n in ((w.first, len(w.text)) if w else (0, 0))] if any(watches) else []
        self._launcher.decode(list(slots), texts)
        for sequence in sequences:
            sequence.launched += 1
        self._launches.append(sequences)

    def collect(self) -> list[np.ndarray | SpeechError | None]:
        if not self._launches:
            raise RuntimeError("nothing is launched: launch() first, then collect() once for every launch")
        sequences = self._launches.popleft()
        # By numpy, because every operation on tensors gives other threads a turn.
        results = self._launcher.collect().numpy()[: len(sequences)].astype(np.int64)
        self._read_told()  # of the launch before
        self._untold = [sequence for sequence in sequences if sequence.watch]
        if self._fault.numpy()[0]:
            raise KernelFault("a wait inside the kernel took longer than its limit")
        ends, broken = results[:, 0] == self._eos_id, results[:, -1] != 0
        collected = zip(sequences, results[:, :-1], ends.tolist(), broken.tolist(), strict=True)
        return [sequence.say(*frame) for sequence, *frame in collected]

    def told(self, slot: int) -> list[np.ndarray]:
        if self._untold:
            self._launcher.await_told()
            self._read_told()
        return self._sequences[slot].take_told()

    def _read_told(self) -> None:
        for sequence in self._untold:
            sequence.told.append(sequence.telling[sequence.read % TELLINGS].copy())
            sequence.read += 1
        self._untold = []

    def observe(self) -> tuple[Tensor, Tensor]:
        """Make every later launch write into the two tensors returned, by column: the talker's hidden state, fp32
        [width, hidden], and raw logits, fp32 [width, groups, vocab]. It writes only a group's own candidates."""
        device = self._rows.device
        hidden = torch.zeros(self.width, self._rows.shape[1], device=device)
        logits = torch.zeros(self.width, self.recent_codes.shape[2], self._seen.shape[1], device=device)
        self._launcher.observe(hidden, logits, None)
        return hidden, logits

    @torch.inference_mode()
    def recover(self) -> None:
        """After a KernelFault: forget it, every sequence and every kept prefix. Epochs only grow, so they stay."""
        while self._launches:
            self._launches.popleft()
            self._launcher.collect()
        self._launcher.await_told()  # it reads and writes memory of sequences
        self._untold = []
        self._sequences.clear()
        self.prefixes.clear()
        self._fault.zero_()
