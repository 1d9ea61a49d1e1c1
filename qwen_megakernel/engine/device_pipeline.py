"""DevicePipeline: frame decoder, then vocoder. It does what the scheduler decided.

`QueuedPipeline` queues work on a GPU ahead of time. `DirectPipeline` computes one piece after the other. They differ
in when the vocoder may get a frame: as soon as the frame was launched, or once its codes were seen.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qwen_megakernel.backend.interfaces import LoadedModel
from qwen_megakernel.engine.scheduler import Push
from qwen_megakernel.engine.sequence import SpeechSequence
from qwen_megakernel.errors import SpeechError
from qwen_megakernel.model.vocoder import VocoderState


@dataclass(frozen=True, eq=False)
class Launch:
    """One frame of each of these sequences.

    Attributes:
        began: by the pipeline's clock.
    """

    sequences: list[SpeechSequence]
    began: float


@dataclass(frozen=True, eq=False)
class Pushed:
    """A push whose sound was not collected. `wait` returns it: fp32 [samples] on the host for each sequence."""

    push: Push
    wait: Callable[[], list[Tensor]]

    @property
    def sequences(self) -> list[SpeechSequence]:
        return self.push.sequences


class DevicePipeline(ABC):
    """Not thread-safe: one thread owns it.

    Attributes:
        slots, max_positions: the frame decoder's.
        width: the most sequences in a launch.
        groups: codes of a frame.
        in_flight: work that was queued and not collected, in the order in which the device computes it.
        kept_references: voices whose vocoder state is kept.
    """

    most_frames = 0
    """Of a vocoder push, which sequences share. 0: they do not."""

    def __init__(self, model: LoadedModel, *, kept_voices: int, clock: Callable[[], float] = time.monotonic):
        """
        Args:
            kept_voices: for how many voices to keep the vocoder's state after the reference: the latest used.
        """
        self._decoder, self._vocoder, self._check_device = model.decoder, model.vocoder, model.check_device
        self.slots, self.max_positions = model.decoder.slots, model.decoder.max_positions
        self.width, self.groups = model.decoder.width, model.vocoder.groups
        self._clock, self._kept_voices = clock, kept_voices
        self.in_flight: deque[Launch | Pushed] = deque()
        self._references: dict[bytes, VocoderState] = {}  # by a voice's digest; the latest used last

    # ------------------------------------------------------------ a sequence begins

    def start(self, sequence: SpeechSequence) -> None:
        """Compute a sequence's prompt."""
        sequence.steady = self._vocoder.steady
        self._decoder.start(sequence.slot, sequence.prompt, sequence.request.sampling)
        self._vocoder.reset(sequence.slot)
        voice = sequence.request.conditioning.voice
        if voice is None or voice.ref_codes is None:
            sequence.prefilled([])
        else:
            sequence.voice_digest = voice.digest
            sequence.prefilled(self._vocoder.portions(voice.ref_codes))

    def hear_reference(self, sequence: SpeechSequence, reads: bool) -> None:
        """Take a cloned voice's reference through the vocoder before its utterance. This happens once per voice. A call
        takes one portion, so that other sequences get frames in between.

        Args:
            reads: this sequence does so; otherwise it waits until another one has.
        """
        state = self._references.pop(sequence.voice_digest, None)
        if state is not None:
            self._vocoder.restore(sequence.slot, state)
        elif reads:
            self._vocoder.listen(sequence.slot, sequence.reference.pop(0))
            if sequence.reference:
                return
            state = self._vocoder.save(sequence.slot)
        else:
            return
        self._references[sequence.voice_digest] = state
        if len(self._references) > self._kept_voices:
            del self._references[next(iter(self._references))]
        sequence.reference_heard()

    def read_text(self, sequence: SpeechSequence) -> None:
        """Give the frame decoder the text rows that came for a sequence since it was started."""
        while not sequence.incoming.empty():
            rows, sequence.text_complete = sequence.incoming.get()
            sequence.text_rows += len(rows)
            self._decoder.extend(sequence.slot, rows, sequence.text_complete)

    # ------------------------------------------------------------ frames and sound

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """May another frame be launched?"""

    @property
    def computed(self) -> list[SpeechSequence]:
        """Sequences with a launched frame whose codes nobody has seen."""
        return [s for work in self.in_flight if isinstance(work, Launch) for s in work.sequences]

    def launch(self, sequences: list[SpeechSequence]) -> list[SpeechSequence]:
        """Launch a frame of each. Returns the sequences whose new frame the vocoder may get already."""
        self._decoder.launch([s.slot for s in sequences])
        for sequence in sequences:
            sequence.launched += 1
            sequence.in_flight = True
        self.in_flight.append(Launch(sequences, self._clock()))
        return self._behind_launch(sequences)

    @abstractmethod
    def _behind_launch(self, sequences: list[SpeechSequence]) -> list[SpeechSequence]:
        """The sequences whose new frame the vocoder may get as soon as it was launched."""

    @abstractmethod
    def behind_codes(self, launched: list[SpeechSequence], ended: list[SpeechSequence]) -> list[SpeechSequence]:
        """The sequences whose frames the vocoder may get once codes were seen. `ended`: those without more frames."""

    def push(self, push: Push) -> None:
        """Give the vocoder its frames."""
        wait = self._push(push)
        for sequence, frames in zip(push.sequences, push.frames, strict=True):
            sequence.give(frames, sequence in push.short)
        self.in_flight.append(Pushed(push, wait))

    @abstractmethod
    def _push(self, push: Push) -> Callable[[], list[Tensor]]: ...

    def pop(self) -> Launch | Pushed:
        """Take the oldest work; `codes` or `sound` waits for it."""
        work = self.in_flight.popleft()
        for sequence in work.sequences:
            if isinstance(work, Launch):
                sequence.in_flight = False
            else:
                sequence.pushes -= 1
        return work

    def codes(self) -> list[Tensor | SpeechError | None]:
        """Wait for the codes of the popped launch, one entry for each sequence: see `FrameDecoder.collect`."""
        return self._decoder.collect()

    @staticmethod
    def sound(pushed: Pushed) -> list[np.ndarray]:
        """Wait for the sound of a popped push: fp32 [frames, 1920] for each sequence."""
        return [x.numpy().reshape(n, -1) for x, n in zip(pushed.wait(), pushed.push.frames, strict=True)]

    # ------------------------------------------------------------ when something went wrong

    def check_device(self) -> None:
        """Raises the device's error if the device is lost."""
        self._check_device()

    def forget(self) -> None:
        """Drop work in flight and kept references: after a KernelFault no state of a slot is trusted."""
        self.in_flight.clear()
        self.forget_references()

    def recover(self) -> None:
        """Make frame decoder and vocoder usable again after a KernelFault."""
        self._vocoder.recover()
        self._decoder.recover()

    def drain(self) -> None:
        """Wait for all work in flight: memory that the device still writes to must not be freed."""
        while self.in_flight:
            work = self.in_flight.popleft()
            with contextlib.suppress(Exception):  # the engine has ended, and everybody is told why
                self.codes() if isinstance(work, Launch) else work.wait()

    # ------------------------------------------------------------ what is kept

    def forget_references(self) -> None:
        self._references.clear()

    @property
    def kept_references(self) -> int:
        return len(self._references)

    @property
    def kept_prefixes(self) -> int:
        """Prompt openings whose keys and values the frame decoder keeps."""
        return self._decoder.kept_prefixes


class QueuedPipeline(DevicePipeline):
    """The vocoder reads codes on the device, after the launch that makes them. So a launch, its pushes and the next
    launch are queued ahead of time, and the GPU does not wait for the host."""

    def __init__(self, model: LoadedModel, **options):
        super().__init__(model, **options)
        self.most_frames = model.vocoder.most_frames

    @property
    def has_room(self) -> bool:
        # One launch is computed while another is queued. A third would only delay new callers.
        return sum(isinstance(work, Launch) for work in self.in_flight) < 2

    def _behind_launch(self, sequences: list[SpeechSequence]) -> list[SpeechSequence]:
        return sequences

    def behind_codes(self, launched: list[SpeechSequence], ended: list[SpeechSequence]) -> list[SpeechSequence]:
        return ended

    def _push(self, push: Push) -> Callable[[], list[Tensor]]:
        slots, first = [s.slot for s in push.sequences], [s.given for s in push.sequences]
        return self._vocoder.follow(slots, first, push.frames)


class DirectPipeline(DevicePipeline):
    """One thing after the other: a frame, its codes, the vocoder, its sound."""

    @property
    def has_room(self) -> bool:
        return not self.in_flight

    def _behind_launch(self, sequences: list[SpeechSequence]) -> list[SpeechSequence]:
        return []

    def behind_codes(self, launched: list[SpeechSequence], ended: list[SpeechSequence]) -> list[SpeechSequence]:
        return launched

    def _push(self, push: Push) -> Callable[[], list[Tensor]]:
        (sequence,), (frames,) = push.sequences, push.frames
        codes = torch.from_numpy(np.stack(sequence.codes[sequence.given : sequence.given + frames]))
        sound = self._vocoder.push([sequence.slot], codes[None])
        return lambda: list(sound.float().cpu())


def make_pipeline(model: LoadedModel, **options) -> DevicePipeline:
    """The pipeline for a model's vocoder; `options` are `DevicePipeline`'s."""
    return (QueuedPipeline if model.vocoder.follows else DirectPipeline)(model, **options)
