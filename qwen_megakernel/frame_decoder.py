"""FrameDecoder: what an engine needs of a backend, and the plain PyTorch backend.

One frame of one stream:

    hidden = talker(input row)                    after the final norm
    code 0 = draw(codec head(hidden))             end of speech ends the stream, without a frame
    codes 1..15: the code predictor reads hidden and code 0's embedding, then each code it drew
    next input row = sum of the 16 embeddings + next text row, or pad when the text is used up
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_megakernel.config import ModelConfig, SamplingParams
from qwen_megakernel.prompt import Prompt
from qwen_megakernel.sampling import Code0Rules, Draw, gumbel_noise
from qwen_megakernel.transformer import Embeddings, KVCache, Transformer

AHEAD = 4
"""Launches that may be uncollected."""
LAUNCH_SLOTS = 8
"""Slots of one launch, at most."""


class FrameDecoder(Protocol):
    """One backend's talker and code predictor over a fixed number of slots. Not thread-safe: one thread
    owns it."""

    slots: int
    max_positions: int

    def start(self, slot: int, prompt: Prompt, sampling: SamplingParams) -> None:
        """Begin a stream in a slot: everything of the prompt but its last row is prefilled.

        Args:
            slot: 0..slots-1; what was in it before is gone.
            prompt: at most `max_positions` - 1 rows.
            sampling: every field set, the seed too.
        """

    def launch(self, slots: Sequence[int]) -> None:
        """Queue the next frame of some streams, without waiting for it.

        The caller stops before a slot is full: a frame needs one position more than the one before it.

        Args:
            slots: 1 to `LAUNCH_SLOTS` different ones, each started.

        Raises:
            ValueError: other slots, or one that is full; nothing was queued.
            RuntimeError: `AHEAD` launches are uncollected; nothing was queued.
        """

    def collect(self) -> list[Tensor | None]:
        """What the oldest uncollected launch said, in the order of its slots; waits until it is there.

        Returns:
            Codes int64 [groups] on the CPU, or None at end of speech. Frames behind a stream's end, and frames of
            a stream whose slot was started again, are None too.

        Raises:
            RuntimeError: nothing is launched.
        """


def check_launch(slots: Sequence[int], room: Mapping[int, int], uncollected: int, positions: int) -> None:
    """Refuse what `FrameDecoder.launch` refuses; `room`: frames that the stream of each started slot may still have."""
    if not 1 <= len(slots) <= LAUNCH_SLOTS or len(set(slots)) < len(slots):
        raise ValueError(f"a launch takes 1 to {LAUNCH_SLOTS} different slots, got {list(slots)}")
    if uncollected == AHEAD:
        raise RuntimeError(f"{AHEAD} launches may be uncollected and are: collect() one first")
    for slot in slots:
        if slot not in room:
            raise ValueError(f"slot {slot} holds no stream: start() it first")
        if room[slot] == 0:
            raise ValueError(f"slot {slot} is full: its stream used all {positions} positions")


@dataclass(eq=False)
class _Stream:
    cache: KVCache
    prompt: Prompt
    sampling: SamplingParams
    rules: Code0Rules
    row: Tensor  # [1, hidden], the next input
    position: int  # of that row
    room: int  # frames that may still be launched
    frame: int = 0
    over: bool = False  # it ended, or its slot was started again


class TorchFrameDecoder:
    """The eager PyTorch backend (see `FrameDecoder`). Slots run singly, in the dtype of the tensors.

    A frame is computed when it is collected: one that nobody wants any more then costs nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        embeddings: Embeddings,
        *,
        slots: int,
        max_positions: int,
    ):
        """
        Args:
            tensors: every `talker.*` tensor, all on one device and of one dtype.
            embeddings: over the same tensors.
        """
        self.slots, self.max_positions = slots, max_positions
        self._config, self._embed = config.talker, embeddings
        predictor = "talker.code_predictor"
        self._talker = Transformer(config.talker.stack, tensors, "talker.model", max_positions)
        self._head = tensors["talker.codec_head.weight"]
        groups = config.talker.num_code_groups
        self._predictor = Transformer(config.talker.code_predictor.stack, tensors, f"{predictor}.model", groups)
        self._heads = [tensors[f"{predictor}.lm_head.{group}.weight"] for group in range(groups - 1)]
        adapter = [f"{predictor}.small_to_mtp_projection.{n}" for n in ("weight", "bias")]
        self._adapter = [tensors[n] for n in adapter if n in tensors]  # empty where both stacks have one width
        self._device, dtype = self._head.device, self._head.dtype
        self._caches = [KVCache(config.talker.stack, max_positions, self._device, dtype) for _ in range(slots)]
        self._predictor_cache = KVCache(config.talker.code_predictor.stack, groups, self._device, dtype)
        self._streams: dict[int, _Stream] = {}
        self._launches: deque[list[_Stream]] = deque()

    @torch.inference_mode()
    def start(self, slot: int, prompt: Prompt, sampling: SamplingParams) -> None:
        last = len(prompt.rows) - 1
        if not 0 <= slot < self.slots or not 0 <= last < self.max_positions:
            raise ValueError(
                f"slot must be in 0..{self.slots - 1} and the prompt of 1..{self.max_positions} rows, "
                f"got slot {slot} and {last + 1} rows"
            )
        if slot in self._streams:
            self._streams[slot].over = True
        rules = Code0Rules(self._config, sampling.repetition_penalty, self._device)
        self._streams[slot] = _Stream(
            self._caches[slot], prompt, sampling, rules, prompt.rows[last:], last, room=self.max_positions - last
        )
        if last:
            self._talker.forward(prompt.rows[:last], 0, self._caches[slot])

    def launch(self, slots: Sequence[int]) -> None:
        check_launch(
            slots,
            {slot: stream.room for slot, stream in self._streams.items()},
            len(self._launches),
            self.max_positions,
        )
        streams = [self._streams[slot] for slot in slots]
        for stream in streams:
            stream.room -= 1
        self._launches.append(streams)

    @torch.inference_mode()
    def collect(self) -> list[Tensor | None]:
        if not self._launches:
            raise RuntimeError("nothing is launched: launch() first, then collect() once for every launch")
        return [None if stream.over else self._frame(stream) for stream in self._launches.popleft()]

    def _frame(self, s: _Stream) -> Tensor | None:
        hidden = self._talker.forward(s.row, s.position, s.cache)
        logits = s.rules(F.linear(hidden, self._head)[0].float(), s.frame)
        draw = Draw.code0(s.sampling)
        code0 = draw(logits, self._noise(s, draw, range(1), self._config.vocab_size)[0])
        if code0 == self._config.codec_eos_id:
            s.over = True
            return None
        s.rules.remember(code0)
        codes = self._predict(s, hidden, code0)
        text = s.prompt.trailing[s.frame] if s.frame < len(s.prompt.trailing) else s.prompt.pad
        s.row = self._embed.frames(codes[None]) + text
        s.position += 1
        s.frame += 1
        return codes.cpu()

    def _predict(self, s: _Stream, hidden: Tensor, code0: Tensor) -> Tensor:
        """Codes 1..15 behind code 0: int64 [groups]."""
        draw = Draw.predictor(s.sampling)
        groups = range(1, len(self._heads) + 1)
        noise = self._noise(s, draw, groups, self._heads[0].shape[0])
        codes = [code0]
        rows, position = torch.cat([hidden, self._embed.code(0, code0)[None]]), 0
        for group in groups:
            if self._adapter:
                rows = F.linear(rows, *self._adapter)
            out = self._predictor.forward(rows, position, self._predictor_cache)
            logits = F.linear(out[-1], self._heads[group - 1]).float()
            codes.append(draw(logits, noise[group - 1]))
            position += len(rows)
            if group < groups.stop - 1:
                rows = self._embed.code(group, codes[-1])[None]
        return torch.stack(codes)

    def _noise(self, s: _Stream, draw: Draw, groups: range, vocab_size: int) -> Tensor | list[None]:
        """One row of noise per group; a greedy draw needs none."""
        if not draw.do_sample:
            return [None] * len(groups)
        return gumbel_noise(s.sampling.seed, s.frame, groups, vocab_size, self._device)
