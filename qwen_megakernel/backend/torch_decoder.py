"""The PyTorch backend's frame decoder: a frame as a CUDA graph on a GPU, computed step by step on a CPU."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from qwen_megakernel.backend.cuda_graphs import FrameGraphs, Job, clear
from qwen_megakernel.backend.interfaces import AHEAD, LAUNCH_SLOTS, SlotSequence, Watch, check_launch, check_start
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.errors import SpeechError
from qwen_megakernel.model.frame import Draws, Frame, SlotState, draws_of
from qwen_megakernel.model.prompt import Prefix, Prompt
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.sampling_params import SamplingParams


@dataclass(eq=False, kw_only=True)
class _Sequence(SlotSequence):
    state: SlotState
    draws: Draws
    position: int  # the position of the next frame's input row
    frame: int = 0  # the next one to compute

    def enter_frame(self) -> int:
        """Put the next frame's text row in place, or zeros if it has not come; the position of its input row."""
        if self.frame < len(self.trailing):
            self.state.text.copy_(self.trailing[self.frame])
        elif self.text_open:
            self.state.text.zero_()
        else:
            self.state.text.copy_(self.pad)
        self.frame += 1
        self.position += 1
        return self.position - 1

    def tell(self) -> Tensor | None:
        """How the watched heads attended in the frame that was computed last: see `KVCache.told`."""
        if not (watch := self.watch):
            return None
        text = slice(watch.text_at, min(watch.text_at + len(watch.text), self.position))
        return self.state.cache.told(self.position, watch.layers, watch.heads, text, watch.first)


class TorchFrameDecoder:
    """The PyTorch backend (see `FrameDecoder`). Slots run singly, in the dtype of the tensors.

    On a CUDA device a launch queues CUDA graphs. On a CPU a frame is computed only when it is collected, so that an
    unwanted frame costs nothing.
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
        """`tensors`: every `talker.*` tensor, of one device and dtype. `embeddings`: they use the same tensors."""
        self.slots = slots
        self.max_positions = max_positions
        self.width = self.narrow = 1
        self.pages = 0
        self.recent_codes = None
        self.weight_bytes = sum(t.nbytes for name, t in tensors.items() if "text_embedding" not in name)
        self._eos_id = config.talker.codec_eos_id
        self._frame = Frame(config.talker, tensors, embeddings, max_positions)
        head = tensors["talker.codec_head.weight"]
        self._states = [SlotState(config.talker, max_positions, head.device, head.dtype) for _ in range(slots)]
        self._graphs: FrameGraphs | None = None
        if head.is_cuda:
            self._graphs = FrameGraphs(self._frame, self._states, max_positions, ahead=AHEAD, width=LAUNCH_SLOTS)
        self._sequences: dict[int, _Sequence] = {}
        self.prefixes: WeakKeyDictionary[Prefix, tuple[Tensor, Tensor]] = WeakKeyDictionary()
        self._launches: deque[tuple[list[_Sequence], Callable[[int], tuple[Tensor, Tensor | None]]]] = deque()

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
        if slot in self._sequences:
            self._sequences[slot].over = True
        state = self._states[slot]
        self._sequences[slot] = _Sequence(
            state=state,
            draws=draws_of(sampling),
            trailing=prompt.trailing,
            pad=prompt.pad,
            text_open=prompt.text_open,
            position=last,
            frames=self.max_positions - last,
            watch=watch,
        )
        state.cache.watched = range(len(state.cache.queries))[watch.layers] if watch else range(0)
        state.start(prompt.rows[last:], last, sampling)
        done = self._enter_prefix(prompt.prefix, prompt.rows, state) if prompt.prefix else 0
        if last > done:
            self._frame.prefill(prompt.rows[done:last], state, done)

    def _enter_prefix(self, prefix: Prefix, rows: Tensor, state: SlotState) -> int:
        """Put keys and values of the prompt's prefix, kept or computed now, into the cache; its length."""
        keys, values = state.cache.k[:, :, : prefix.rows], state.cache.v[:, :, : prefix.rows]
        if kept := self.prefixes.get(prefix):
            keys.copy_(kept[0])
            values.copy_(kept[1])
        else:
            self._frame.prefill(rows[: prefix.rows], state)
            self.prefixes[prefix] = keys.clone(), values.clone()
        return prefix.rows

    @torch.inference_mode()
    def extend(self, slot: int, rows: Tensor, ended: bool) -> None:
        sequence = self._sequences[slot]
        sequence.extend(sequence.state.row, sequence.frame, rows, ended)

    @torch.inference_mode()
    def launch(self, slots: Sequence[int]) -> None:
        check_launch(slots, LAUNCH_SLOTS, self._sequences, len(self._launches), self.max_positions)
        sequences = [self._sequences[slot] for slot in slots]
        for sequence in sequences:
            sequence.launched += 1
        if self._graphs:
            fetch = self._graphs.launch([Job(s.state, s.draws, s.enter_frame() + 1, s.tell) for s in sequences])
        else:
            fetch = partial(self._compute, sequences)
        self._launches.append((sequences, fetch))

    @torch.inference_mode()
    def collect(self) -> list[np.ndarray | SpeechError | None]:
        if not self._launches:
            raise RuntimeError("nothing is launched: launch() first, then collect() once for every launch")
        sequences, fetch = self._launches.popleft()
        return [None if sequence.over else self._said(sequence, *fetch(i)) for i, sequence in enumerate(sequences)]

    def told(self, slot: int) -> list[np.ndarray]:
        return self._sequences[slot].take_told()

    def _compute(self, sequences: list[_Sequence], i: int) -> tuple[Tensor, Tensor | None]:
        """The next frame of sequence i, without a graph."""
        sequence = sequences[i]
        self._frame.step(sequence.state, sequence.draws, sequence.enter_frame())
        return sequence.state.codes.to("cpu", copy=True), sequence.tell()

    def _said(self, sequence: _Sequence, codes: Tensor, told: Tensor | None) -> np.ndarray | SpeechError | None:
        first = int(codes[0])
        if told is not None:
            sequence.told.append(told.numpy())
        if first < 0:
            clear([sequence.state])
        return sequence.say(codes.numpy(), first == self._eos_id, broken=first < 0)

    def recover(self) -> None:
        self._launches.clear()
        self._sequences.clear()
        self.prefixes.clear()
