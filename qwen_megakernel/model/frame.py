"""A row -> the 16 codes of a frame, and the next row: arithmetic on tensors, run as it stands or captured into a CUDA
graph.

    hidden = talker(input row)                    after the final norm
    code 0 = draw(codec head(hidden))
    codes 1..15: the code predictor reads hidden and code 0's embedding, then each code it drew
    next input row = sum of the 16 embeddings + the frame's text row

Nothing here waits for the device. Code 0 tells whether speech has ended, once the caller reads it.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_megakernel.checkpoint.config import TalkerConfig
from qwen_megakernel.model.sampling import Code0Rules, Draw, filled, gumbel_from_bits, key_schedule, philox
from qwen_megakernel.model.transformer import Embeddings, KVCache, Transformer, sum_of_embeddings
from qwen_megakernel.sampling_params import SamplingParams

Draws = tuple[Draw, Draw]  # the draw of code 0, and the draw of codes 1..15


def draws_of(sampling: SamplingParams) -> Draws:
    """The draws of a request, whose settings have no None left (`SamplingParams.over`)."""
    return Draw.code0(sampling), Draw.predictor(sampling)


class SlotState:
    """All that a frame of one slot reads and writes, apart from weights. Tensors are written in place and never
    replaced, because a captured graph knows them by their address."""

    def __init__(self, config: TalkerConfig, max_positions: int, device: torch.device, dtype: torch.dtype):
        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.cache = KVCache(config.stack, max_positions, device, dtype)  # the talker's
        self.row = torch.zeros(1, config.stack.hidden_size, device=device, dtype=dtype)  # the talker's next input
        self.text = torch.zeros_like(self.row[0])  # the row of text that the caller writes before every frame
        self.codes = integers(config.num_code_groups)  # of the last frame
        self.position = integers(1)  # of `row`
        self.frame = integers()  # the next frame's number, from 0
        self.keys = integers(10, 2)  # `key_schedule` of the seed
        self.numbers = torch.zeros(2, 2, dtype=torch.float32, device=device)  # `Draw.numbers` of the two draws
        self.rules = Code0Rules(config, 1.0, device)  # with the history of the sequence

    def start(self, row: Tensor, position: int, sampling: SamplingParams) -> None:
        """Begin a sequence whose first frame reads `row` [1, hidden] at `position`."""
        self.row.copy_(row)
        self.position.fill_(position)
        self.frame.zero_()
        # CUDA stages pageable memory before such a copy returns, so the copy need not wait for frames in flight.
        self.keys.copy_(torch.tensor(key_schedule(sampling.seed or 0)), non_blocking=True)
        numbers = [draw.numbers for draw in draws_of(sampling)]
        self.numbers.copy_(torch.tensor(numbers, dtype=torch.float32), non_blocking=True)
        self.rules.restart(filled(sampling.repetition_penalty))


class Frame:
    """Talker, code predictor and draws of one frame."""

    def __init__(self, config: TalkerConfig, tensors: Mapping[str, Tensor], embeddings: Embeddings, max_positions: int):
        """`tensors`: every `talker.*` tensor, all on one device and of one dtype. `embeddings`: over the same ones."""
        predictor, stack = "talker.code_predictor", config.code_predictor.stack
        groups = config.num_code_groups
        self._embed = embeddings
        self._talker = Transformer(config.stack, tensors, "talker.model", max_positions)
        self._predictor = Transformer(stack, tensors, f"{predictor}.model", groups)
        self._heads = [tensors["talker.codec_head.weight"]]
        self._heads += [tensors[f"{predictor}.lm_head.{group}.weight"] for group in range(groups - 1)]
        adapter = [f"{predictor}.small_to_mtp_projection.{n}" for n in ("weight", "bias")]
        self._adapter = [tensors[n] for n in adapter if n in tensors]  # empty where both stacks have the same width
        device = self._heads[0].device
        self._predictor_cache = KVCache(stack, groups, device, self._heads[0].dtype)
        # Philox counters of every candidate of every group, one after the other.
        self._sizes = [len(head) for head in self._heads]
        self._candidate = torch.cat([torch.arange(size, device=device) for size in self._sizes])
        self._group = torch.cat([torch.full((size,), group, device=device) for group, size in enumerate(self._sizes)])
        self._zero = torch.zeros((), dtype=torch.int64, device=device)

    def prefill(self, rows: Tensor, state: SlotState, position: int = 0) -> None:
        """Write keys and values of rows [T, hidden] to a slot's cache, from `position` on."""
        self._talker.prefill(rows, position, state.cache)

    def step(self, s: SlotState, draws: Draws, position: int | Tensor, length: int | None = None) -> None:
        """Compute one frame and make the state ready for the next one. `s`: read and written. Afterwards `s.codes`
        holds the frame's codes; the first is -1 if any logit is not finite. `draws`: their shapes are used;
        their numbers come from `s`. `position`: of `s.row`; for a captured graph `s.position` itself, which it reads in
        every replay. `length`: see `Transformer.forward`."""
        first, rest = draws
        numbers = [pair.unbind() for pair in s.numbers]
        noise = self._noise(s) if first.do_sample or rest.do_sample else [None] * len(self._heads)
        hidden = self._talker.forward(s.row, position, s.cache, length)
        logits = [F.linear(hidden, self._heads[0])[0].float()]  # of every group, before rules hide any
        codes = [first(s.rules(logits[0], s.frame), noise[0], numbers[0])]
        s.rules.remember(codes[0])
        drawn = [self._embed.code(0, codes[0])[None]]
        rows, at = torch.cat([hidden, *drawn]), 0
        for group in range(1, len(self._heads)):
            if self._adapter:
                rows = F.linear(rows, *self._adapter)
            out = self._predictor.forward(rows, at, self._predictor_cache)
            at += len(rows)
            logits.append(F.linear(out[-1], self._heads[group]).float())
            codes.append(rest(logits[-1], noise[group], numbers[1]))
            rows = self._embed.code(group, codes[-1])[None]
            drawn.append(rows)
        torch.stack(codes, out=s.codes)
        s.row.copy_(sum_of_embeddings(drawn) + s.text)
        s.codes[0].masked_fill_(~torch.cat(logits).isfinite().all(), -1)
        s.position.add_(1)
        s.frame.add_(1)

    def _noise(self, s: SlotState) -> tuple[Tensor, ...]:
        """fp32 [vocab] for every group."""
        bits = philox((self._candidate, self._group, s.frame, self._zero), s.keys)
        return torch.split(gumbel_from_bits(bits), self._sizes)
