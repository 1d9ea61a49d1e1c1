"""FrameDecoder: what an engine needs of a backend, and the plain PyTorch backend.

A frame is frame.py's; code 0 may be end of speech, which ends the stream without a frame.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from qwen_megakernel.backend.cuda_graphs import FrameGraphs, Job, clear
from qwen_megakernel.checkpoint.config import ModelConfig, SamplingParams
from qwen_megakernel.errors import SpeechError
from qwen_megakernel.model.frame import Draws, Frame, SlotState, draws_of
from qwen_megakernel.model.prompt import Prefix, Prompt
from qwen_megakernel.model.transformer import Embeddings

AHEAD = 4
"""Launches that may be uncollected."""
LAUNCH_SLOTS = 16
"""Slots of one launch, at most."""
RECENT_FRAMES = 8
"""Frames of every slot that `FrameDecoder.recent_codes` holds."""


class FrameDecoder(Protocol):
    """One backend's talker and code predictor over a fixed number of slots. Not thread-safe: one thread
    owns it."""

    slots: int
    max_positions: int
    width: int
    """Slots that a launch computes together: cheaper than one by one, but an error is then all of theirs."""
    recent_codes: Tensor | None
    """int32 [slots, RECENT_FRAMES, groups] on the device, or None: behind a launch, in its stream's order, frame f of a
    slot stands at row f % RECENT_FRAMES, end of speech as the code 0 it is."""

    weight_bytes: int
    """Memory of the weights."""

    def start(self, slot: int, prompt: Prompt, sampling: SamplingParams) -> None:
        """Begin a stream in a slot: everything of the prompt but its last row is prefilled. A prompt's prefix is
        computed by itself; what comes of it is kept as long as the `Prefix` lives, and other prompts with it copy it.

        Args:
            slot: 0..slots-1; what was in it before is gone.
            prompt: at most `max_positions` - 1 rows.
            sampling: every field set; the seed too where anything is drawn.
        """

    def extend(self, slot: int, rows: Tensor, ended: bool) -> None:
        """More text rows [n, hidden] behind the trailing ones of the slot's prompt: its text comes in pieces. With
        `ended` they are the last."""

    def launch(self, slots: Sequence[int]) -> None:
        """Queue the next frame of some streams, without waiting for it.

        The caller stops before a slot is full: a frame needs one position more than the one before it. A frame whose
        own text row has not come may be launched, because only the next one hears of it; that one has to wait.

        Args:
            slots: 1 to `LAUNCH_SLOTS` different ones, each started.

        Raises:
            ValueError: other slots, one that is full, or whose text rows have not come; nothing was queued.
            RuntimeError: `AHEAD` launches are uncollected; nothing was queued.
        """

    def collect(self) -> list[Tensor | SpeechError | None]:
        """What the oldest uncollected launch said, in the order of its slots; waits until it is there.

        Returns:
            Codes int64 [groups] on the CPU, or None at end of speech. Frames behind a stream's end, and frames of
            a stream whose slot was started again, are None too. A SpeechError where the model's logits are no numbers:
            the stream is over.

        Raises:
            RuntimeError: nothing is launched.
            KernelFault: the GPU gave up; every stream is lost, `recover()` makes the decoder usable again.
        """

    def recover(self) -> None:
        """After a KernelFault: forget every stream, every launch and every kept prefix."""


@dataclass(eq=False, kw_only=True)
class SlotStream:
    """What a frame decoder knows of the stream in a slot, whatever it computes with."""

    trailing: Tensor  # [n, hidden], text rows
    pad: Tensor  # [hidden], what follows them
    text_open: bool  # more of them will come
    frames: int  # that may be launched at most
    launched: int = 0
    over: bool = False  # it ended, or its slot was started again

    def say(self, codes: Tensor, eos_id: int, broken: bool) -> Tensor | SpeechError | None:
        """What `FrameDecoder.collect` says of a frame; `broken`: its logits are no numbers."""
        if self.over:
            return None
        self.over = broken or bool(codes[0] == eos_id)
        if broken:
            return SpeechError("the model's logits are no numbers: its weights or this utterance's prompt are broken")
        return None if self.over else codes

    def extend(self, row: Tensor, made: int, rows: Tensor, ended: bool) -> None:
        """More text rows. Where the last of the `made` frames went without, `row`, which it left as the next input,
        gets its own now."""
        if made > len(self.trailing) and len(rows):
            row.add_(rows[0])
        self.trailing, self.text_open = torch.cat([self.trailing, rows]), not ended


def check_launch(slots: Sequence[int], streams: Mapping[int, SlotStream], uncollected: int, positions: int) -> None:
    """Refuse what `FrameDecoder.launch` refuses; `streams`: of every started slot."""
    if not 1 <= len(slots) <= LAUNCH_SLOTS or len(set(slots)) < len(slots):
        raise ValueError(f"a launch takes 1 to {LAUNCH_SLOTS} different slots, got {list(slots)}")
    if uncollected == AHEAD:
        raise RuntimeError(f"{AHEAD} launches may be uncollected and are: collect() one first")
    for slot in slots:
        if slot not in streams:
            raise ValueError(f"slot {slot} holds no stream: start() it first")
        stream = streams[slot]
        if stream.launched == stream.frames:
            raise ValueError(f"slot {slot} is full: its stream used all {positions} positions")
        if stream.text_open and stream.launched > len(stream.trailing):
            raise ValueError(f"slot {slot} waits for text: extend() it first")


@dataclass(eq=False, kw_only=True)
class _Stream(SlotStream):
    state: SlotState
    draws: Draws
    position: int  # of the next frame's input row
    frame: int = 0  # the next to be computed

    def enter_frame(self) -> int:
        """Put the next frame's text row in place, nothing where it has yet to come; the position of its input row."""
        if self.frame < len(self.trailing):
            self.state.text.copy_(self.trailing[self.frame])
        elif self.text_open:
            self.state.text.zero_()
        else:
            self.state.text.copy_(self.pad)
        self.frame += 1
        self.position += 1
        return self.position - 1


class TorchFrameDecoder:
    """The PyTorch backend (see `FrameDecoder`). Slots run singly, in the dtype of the tensors.

    On a CUDA device a launch queues CUDA graphs. On a CPU a frame is computed when it is collected: one that nobody
    wants any more then costs nothing.
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
        self.slots, self.max_positions, self.width = slots, max_positions, 1
        self.recent_codes = None
        self.weight_bytes = sum(t.nbytes for name, t in tensors.items() if "text_embedding" not in name)
        self._eos_id = config.talker.codec_eos_id
        self._frame = Frame(config.talker, tensors, embeddings, max_positions)
        head = tensors["talker.codec_head.weight"]
        self._states = [SlotState(config.talker, max_positions, head.device, head.dtype) for _ in range(slots)]
        self._graphs: FrameGraphs | None = None
        if head.is_cuda:
            self._graphs = FrameGraphs(self._frame, self._states, max_positions, ahead=AHEAD, width=LAUNCH_SLOTS)
        self._streams: dict[int, _Stream] = {}
        self._prefixes: WeakKeyDictionary[Prefix, tuple[Tensor, Tensor]] = WeakKeyDictionary()
        self._launches: deque[tuple[list[_Stream], Callable[[int], Tensor]]] = deque()

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
        state = self._states[slot]
        self._streams[slot] = _Stream(
            state=state,
            draws=draws_of(sampling),
            trailing=prompt.trailing,
            pad=prompt.pad,
            text_open=prompt.text_open,
            position=last,
            frames=self.max_positions - last,
        )
        state.start(prompt.rows[last:], last, sampling)
        done = self._enter_prefix(prompt, state) if prompt.prefix else 0
        if last > done:
            self._frame.prefill(prompt.rows[done:last], state, done)

    def _enter_prefix(self, prompt: Prompt, state: SlotState) -> int:
        """Keys and values of the prompt's prefix, kept or computed; its length."""
        rows, kept = prompt.prefix.rows, self._prefixes.get(prompt.prefix)
        keys, values = state.cache.k[:, :, :rows], state.cache.v[:, :, :rows]
        if kept:
            keys.copy_(kept[0])
            values.copy_(kept[1])
        else:
            self._frame.prefill(prompt.rows[:rows], state)
            self._prefixes[prompt.prefix] = keys.clone(), values.clone()
        return rows

    @torch.inference_mode()
    def extend(self, slot: int, rows: Tensor, ended: bool) -> None:
        stream = self._streams[slot]
        stream.extend(stream.state.row, stream.frame, rows, ended)

    @torch.inference_mode()
    def launch(self, slots: Sequence[int]) -> None:
        check_launch(slots, self._streams, len(self._launches), self.max_positions)
        streams = [self._streams[slot] for slot in slots]
        for stream in streams:
            stream.launched += 1
        if self._graphs:
            fetch = self._graphs.launch([Job(s.state, s.draws, s.enter_frame() + 1) for s in streams])
        else:
            fetch = partial(self._compute, streams)
        self._launches.append((streams, fetch))

    @torch.inference_mode()
    def collect(self) -> list[Tensor | SpeechError | None]:
        if not self._launches:
            raise RuntimeError("nothing is launched: launch() first, then collect() once for every launch")
        streams, fetch = self._launches.popleft()
        return [None if stream.over else self._said(stream, fetch(i)) for i, stream in enumerate(streams)]

    def _compute(self, streams: list[_Stream], i: int) -> Tensor:
        """The next frame of one of them, without a graph."""
        stream = streams[i]
        self._frame.step(stream.state, stream.draws, stream.enter_frame())
        return stream.state.codes.to("cpu", copy=True)

    def _said(self, stream: _Stream, codes: Tensor) -> Tensor | SpeechError | None:
        broken = bool(codes[0] < 0)
        if broken:
            clear([stream.state])
        return stream.say(codes, self._eos_id, broken)

    def recover(self) -> None:
        self._launches.clear()
        self._streams.clear()
        self._prefixes.clear()
