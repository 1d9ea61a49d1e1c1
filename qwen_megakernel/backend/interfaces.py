"""What an engine needs from a backend: a `FrameDecoder` for talker and code predictor, and a `Vocoder`.

frame.py defines a frame. Code 0 may be end of speech, which ends the sequence without a frame.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qwen_megakernel.checkpoint.config import TextHead
from qwen_megakernel.errors import SpeechError
from qwen_megakernel.model.prompt import Prefix, Prompt
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.model.vocoder import Portion, Sounds, VocoderState
from qwen_megakernel.sampling_params import SamplingParams

AHEAD = 4  # how many launches may be uncollected
LAUNCH_SLOTS = 16  # most slots of one launch of PyTorch
PUSH_FRAMES = 8  # most frames of a slot in one push of `Vocoder.follow`
FEW_SLOTS = 16  # with more slots, a GPU's vocoder has larger pushes, which need more memory
RECENT_FRAMES = 16
"""Frames of every slot that `FrameDecoder.recent_codes` holds: while a push waits for more frames, others are made."""


@dataclass(eq=False)
class Watch:
    """Whose attention to the tokens of a text a decoder tells, in each frame of a sequence. It reads this when it
    computes a frame; only the engine's thread changes it."""

    text_at: int  # see `Prompt.text_at`
    text: Sequence[int]  # the tokens so far; it only grows
    head: TextHead | None  # None: all heads of all layers
    first: int = 0  # see `FrameDecoder.told`

    @property
    def layers(self) -> slice:
        return slice(self.head.layer, self.head.layer + 1) if self.head else slice(None)

    @property
    def heads(self) -> slice:
        """Of each of these layers."""
        return slice(self.head.head, self.head.head + 1) if self.head else slice(None)


class FrameDecoder(Protocol):
    """One backend's talker and code predictor over a fixed number of slots. Not thread-safe: one thread owns it."""

    slots: int
    max_positions: int
    width: int
    """Slots that a launch computes together. This is cheaper than one by one, but an error then hits all of them."""
    narrow: int
    """Slots of a quick launch. Up to twice as many take less time in two quick ones than in one of all."""
    weight_bytes: int  # memory of everything but keys and values
    pages: int
    """Pages of keys and values that the slots share, of PAGE_POSITIONS positions each (sizes.py). 0: they share none,
    and each slot has room for `max_positions`."""

    @property
    def recent_codes(self) -> Tensor | None:
        """int32 [slots, RECENT_FRAMES, groups] on the device, or None. After a launch, in CUDA stream order, row
        f % RECENT_FRAMES holds frame f of a slot. End of speech appears there as a code 0."""

    def start(
        self,
        slot: int,
        prompt: Prompt,
        sampling: SamplingParams,
        pages: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> None:
        """Begin a sequence in a slot: prefill the prompt, all but its last row at least. A prompt's prefix is computed
        separately. Its keys and values are kept as long as the `Prefix` lives, and other prompts with that prefix copy
        them.
        `slot`: 0..slots-1; its old content is lost. `prompt`: at most `max_positions` - 1 rows. `sampling`: every field
        set; the seed too if anything is drawn. `pages`: that hold its positions, in order; no sequence that may still
        be launched has one of them. Empty: the slot's own, in a decoder with pages for every slot. `watch`: see `told`.
        """

    def extend(self, slot: int, rows: Tensor, ended: bool) -> None:
        """Append text rows [n, hidden] to the slot's trailing rows, for a text that comes in pieces. `ended`: they are
        the last."""

    def launch(self, slots: Sequence[int]) -> None:
        """Queue the next frame of some sequences, without waiting for it.

        The caller stops before a slot is full: each frame needs one more position. A frame may be launched before its
        own text row has come, because only the next frame reads that row. The next frame must wait for it.

        `slots`: 1 to `width` different ones, or PyTorch's `LAUNCH_SLOTS`, each started. Nothing is queued if it raises:
        ValueError for other slots, a full slot, or one whose text rows have not come; RuntimeError if `AHEAD` launches
        are uncollected."""

    def collect(self) -> list[np.ndarray | SpeechError | None]:
        """Wait for the oldest uncollected launch and return its frames, in the order of its slots. Returns codes int64
        [groups], or None at end of speech. Frames after a sequence's end, and frames of a sequence whose
        slot was started again, are None too. A SpeechError where the model's logits are not numbers: the sequence is
        over. Raises RuntimeError: nothing is launched. KernelFault: the GPU gave up and every sequence is lost;
        `recover()` makes the decoder usable again."""

    def told(self, slot: int) -> list[np.ndarray]:
        """How watched heads attended to the text, in the slot's frames that were collected since the last call, in
        order: fp32 [layers, heads, TOLD] each. The values of a head are `Watch.first` as it was at the launch, the
        attention to all tokens, the token with the most of it, and then, for each token from the first on, the
        attention to it and to all tokens behind it. All rows up to the frame's input have 1 together."""

    def recover(self) -> None:
        """After a KernelFault: forget every sequence, every launch and every kept prefix."""

    @property
    def prefixes(self) -> Collection[Prefix]:
        """Those whose keys and values are kept."""


class Vocoder(Protocol):
    """One backend's vocoder over a fixed number of slots. Not thread-safe: one call at a time. A slot's samples depend
    on its codes since `reset`, and not on how they were cut into pushes (within 2e-5)."""

    slots: int
    groups: int  # codes of a frame
    most_frames: int  # frames of a push of `follow`, at most; 0 without it
    steady: bool
    """A slot's samples depend, to the bit, on nothing but its codes. Otherwise their last bits also depend on the cut
    into pushes and on the other slots there."""
    follows: bool  # can it read codes on the device, right after the launch that makes them (`follow`)?

    @property
    def weight_bytes(self) -> int:
        """Memory of everything but slots' states."""

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot's state."""

    def reset(self, slot: int) -> None:
        """Forget what a slot heard: it starts from silence again."""

    def save(self, slot: int) -> VocoderState:
        """A copy of what a slot keeps of the past; see `restore`."""

    def restore(self, slot: int, state: VocoderState) -> None:
        """Go on in a slot where `state` was saved, bit for bit."""

    def portions(self, codes: Tensor) -> list[Portion]:
        """Cut a reference recording's codes, int64 [frames, groups], into portions for successive `listen` calls."""

    def listen(self, slot: int, portion: Portion) -> None:
        """Take in frames whose sound is not wanted. The sequence's own frames follow them."""

    def push(self, slots: Sequence[int], codes: Tensor) -> Tensor:
        """Decode the next frames of some slots. `slots`: distinct ones. `codes`: int64 [len(slots), frames, groups] on
        the host; frames >= 1, the same count for every slot. Returns PCM [len(slots), frames * 1920], -1..1, 24 kHz, in
        the vocoder's dtype."""

    def follow(self, slots: Sequence[int], first: Sequence[int], frames: Sequence[int]) -> Callable[[], Sounds]:
        """Queue a push after the frame decoder's launches, of codes that are not yet collected. Only if it `follows`.
        `slots`: distinct ones. `first`: of each slot, the number of its first frame. `frames`: 1 to `PUSH_FRAMES` of
        each slot, from the frame decoder's `recent_codes`; together at most `most_frames`. Returns a function that
        waits for the push and returns each slot's PCM. From end of speech on, PCM is noise."""

    def recover(self) -> None:
        """After a KernelFault: every slot's state is lost; reset or restore it."""


@dataclass(frozen=True)
class CpuSpeed:
    """How fast a model is on a CPU."""

    threads: int  # that PyTorch computes with
    seconds: Mapping[int, float]  # of a frame and its sound, by the number of threads that was tried

    @property
    def frames_per_s(self) -> float:
        """Frames a second with the chosen number of threads."""
        return 1.0 / self.seconds[self.threads]

    def __str__(self) -> str:
        def tell(count: int) -> str:
            return f"{1000 * self.seconds[count]:.1f} ms with {count} CPU thread{'s' * (count > 1)}"

        others = [tell(count) for count in self.seconds if count != self.threads]
        return "a frame and its sound take " + tell(self.threads) + (f" ({', '.join(others)})" if others else "")


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint on a device, as a backend computes with it."""

    embeddings: Embeddings  # makes prompt rows, in callers' threads
    decoder: FrameDecoder
    vocoder: Vocoder
    check_device: Callable[[], None]  # raises the device's own error if it is lost
    cpu: CpuSpeed | None = None  # None: not a CPU, so PyTorch's own number of threads is used


@dataclass(eq=False, kw_only=True)
class SlotSequence:
    """What every backend's frame decoder knows of the sequence in a slot."""

    trailing: Tensor  # [n, hidden], text rows
    pad: Tensor  # [hidden], what follows them
    text_open: bool  # more of them will come
    frames: int  # most that may be launched
    watch: Watch | None = None
    told: list[np.ndarray] = field(default_factory=list)  # of collected frames; see `FrameDecoder.told`
    launched: int = 0
    over: bool = False  # it ended, or its slot was started again

    def say(self, codes: np.ndarray, ends: bool, broken: bool) -> np.ndarray | SpeechError | None:
        """What `FrameDecoder.collect` returns for a frame. `ends`: its code 0 is end of speech. `broken`: its logits
        are not numbers."""
        if self.over:
            return None
        self.over = ends or broken
        if broken:
            return SpeechError(
                "the model's logits are not finite: check this utterance's voice, or the weights if all utterances fail"
            )
        return None if self.over else codes

    def take_told(self) -> list[np.ndarray]:
        told, self.told = self.told, []
        return told

    def extend(self, row: Tensor, made: int, rows: Tensor, ended: bool) -> None:
        """Append text rows. If the last of the `made` frames lacked its own, add it now to `row`, the next input."""
        if made > len(self.trailing) and len(rows):
            row.add_(rows[0])
        self.trailing = torch.cat([self.trailing, rows])
        self.text_open = not ended


def check_start(decoder: FrameDecoder, slot: int, rows: int) -> None:
    """Raises ValueError for a slot, or a number of prompt rows, that `FrameDecoder.start` cannot take."""
    if not 0 <= slot < decoder.slots or not 1 <= rows <= decoder.max_positions:
        raise ValueError(
            f"slot must be in 0..{decoder.slots - 1} and the prompt of 1..{decoder.max_positions} rows, "
            f"got slot {slot} and {rows} rows"
        )


def check_launch(
    slots: Sequence[int], most: int, sequences: Mapping[int, SlotSequence], uncollected: int, positions: int
) -> None:
    """Raise the errors of `FrameDecoder.launch`. `most`: slots of a launch. `sequences` has one for every started
    slot."""
    if not 1 <= len(slots) <= most or len(set(slots)) < len(slots):
        raise ValueError(f"a launch takes 1 to {most} different slots, got {list(slots)}")
    if uncollected == AHEAD:
        raise RuntimeError(f"{AHEAD} launches wait to be collected, and no more may: collect() one first")
    for slot in slots:
        if slot not in sequences:
            raise ValueError(f"slot {slot} holds no sequence: start() it first")
        sequence = sequences[slot]
        if sequence.launched == sequence.frames:
            raise ValueError(f"slot {slot} is full: its sequence used all {positions} positions")
        if sequence.text_open and sequence.launched > len(sequence.trailing):
            raise ValueError(f"slot {slot} waits for text: extend() it first")
