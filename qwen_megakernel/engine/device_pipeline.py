"""DevicePipeline: frame decoder, then vocoder. It does what the scheduler decided.

A vocoder that `follows` reads codes on the device, after the launch that makes them. So a launch, its pushes and the
next launch are queued ahead of time, and the GPU does not wait for the host. With another vocoder on a GPU one thing
comes after the other: a frame, its codes, the vocoder, its sound. On a CPU the vocoder computes in a thread of its own,
beside the frames that come next.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen_megakernel.backend.cpu_threads import use_threads
from qwen_megakernel.backend.interfaces import LoadedModel
from qwen_megakernel.engine.scheduler import Push, runs_out_soon
from qwen_megakernel.engine.sequence import SpeechSequence
from qwen_megakernel.engine.text_path import HeadFinder
from qwen_megakernel.errors import SpeechError
from qwen_megakernel.model.vocoder import Sounds, VocoderState

VOCODER_THREAD = "qwen_megakernel vocoder"


@dataclass(frozen=True, eq=False)
class Launch:
    """One frame of each of these sequences."""

    sequences: list[SpeechSequence]
    began: float  # by the pipeline's clock


@dataclass(frozen=True, eq=False)
class Pushed:
    """A push whose sound was not collected. `wait` waits for it."""

    push: Push
    wait: Callable[[], Sounds]
    done: Callable[[], bool] = lambda: True  # False: `wait` would wait, and a frame may be computed meanwhile

    @property
    def sequences(self) -> list[SpeechSequence]:
        return self.push.sequences


class DevicePipeline:
    """Not thread-safe: one thread owns it."""

    def __init__(self, model: LoadedModel, finder: HeadFinder, *, kept_voices: int, clock: Callable[[], float]):
        """`kept_voices`: for how many voices to keep the vocoder's state after the reference: the latest used."""
        self.decoder = model.decoder
        self._finder = finder
        self._vocoder = model.vocoder
        self._beside = VocoderThread(model.cpu.threads) if model.cpu else None
        self._frame_s = 1.0 / model.cpu.frames_per_s if model.cpu else 0.0
        self.most_frames = model.vocoder.most_frames if self._vocoder.follows else 0  # of a push; 0: none is shared
        self._clock = clock
        self._kept_voices = kept_voices
        self.in_flight: deque[Launch | Pushed] = deque()  # not collected, in the order in which it was queued
        self.references: dict[bytes, VocoderState] = {}  # by a voice's digest; the latest used last

    def start(self, sequence: SpeechSequence) -> None:
        """Compute a sequence's prompt."""
        prompt = sequence.prompt
        if prompt is None:
            return  # another thread has ended it meanwhile
        sequence.steady = self._vocoder.steady
        path = self._finder.path(prompt.text_at, sequence.input.tokens)
        sequence.follow(path, told=self._finder.head is not None, judges=self._finder.judges)
        self.decoder.start(sequence.slot, prompt, sequence.request.sampling, sequence.pages, path)
        self._in_turn(self._vocoder.reset, sequence.slot)
        voice = sequence.request.conditioning.voice
        if voice is None or voice.ref_codes is None:
            sequence.prefilled([])
        else:
            sequence.voice_digest = voice.digest
            sequence.prefilled(self._vocoder.portions(voice.ref_codes))

    def hear_reference(self, sequence: SpeechSequence, reads: bool) -> None:
        """Take a cloned voice's reference through the vocoder before its utterance. This happens once per voice. A call
        takes one portion, so that other sequences get frames in between. `reads`: this sequence does so; otherwise it
        waits until another one has."""
        state = self.references.pop(sequence.voice_digest, None)
        if state is not None:
            self._in_turn(self._vocoder.restore, sequence.slot, state)
        elif reads:
            self._in_turn(self._vocoder.listen, sequence.slot, sequence.reference.pop(0))
            if sequence.reference:
                return
            state = self._in_turn(self._vocoder.save, sequence.slot)
        else:
            return
        self.references[sequence.voice_digest] = state
        if len(self.references) > self._kept_voices:
            del self.references[next(iter(self.references))]
        sequence.reference_heard()

    def read_text(self, sequence: SpeechSequence) -> bool:
        """Give the frame decoder the text rows that came for a sequence since it was started. Returns whether they
        complete the text."""
        was_open = not sequence.text_complete
        incoming = sequence.input.rows
        while not incoming.empty():
            rows, sequence.text_complete = incoming.get()
            sequence.text_rows += len(rows)
            self.decoder.extend(sequence.slot, rows, sequence.text_complete)
        return was_open and sequence.text_complete

    def _in_turn(self, function: Callable[..., Any], *args: Any) -> Any:
        """A call of the vocoder, after the pushes that it was given."""
        return self._beside.call(function, *args).result() if self._beside else function(*args)

    @property
    def has_room(self) -> bool:
        """May another frame be launched?"""
        if self._beside and len(self.in_flight) == 1 and isinstance(push := self.in_flight[0], Pushed):
            # This thread sees the sound only after what it computes itself. No listener may run out meanwhile.
            now = self._clock() + self._frame_s
            soon = any(runs_out_soon(sequence, now) for sequence in push.sequences if not sequence.result.settled)
            return not (soon or push.done())
        if not self._vocoder.follows:
            return not self.in_flight
        # One launch is computed while another is queued. A third would only delay new callers.
        return sum(isinstance(work, Launch) for work in self.in_flight) < 2

    @property
    def sound_first(self) -> bool:
        """Would a new prompt hold up sound that is computed now?"""
        return self._beside is not None and bool(self.in_flight)

    @property
    def computed(self) -> list[SpeechSequence]:
        """Sequences with a launched frame whose codes nobody has seen."""
        return [s for work in self.in_flight if isinstance(work, Launch) for s in work.sequences]

    def launch(self, sequences: list[SpeechSequence]) -> list[SpeechSequence]:
        """Launch a frame of each. Returns the sequences whose new frame the vocoder may get already."""
        self.decoder.launch([s.slot for s in sequences])
        for sequence in sequences:
            sequence.launch()
        self.in_flight.append(Launch(sequences, self._clock()))
        return sequences if self._vocoder.follows else []

    def behind_codes(self, launched: list[SpeechSequence], ended: list[SpeechSequence]) -> list[SpeechSequence]:
        """The sequences whose frames the vocoder may get once codes were seen. `ended`: those without more frames."""
        return ended if self._vocoder.follows else launched

    def push(self, push: Push) -> None:
        """Give the vocoder its frames."""
        pushed = self._push(push)
        for sequence, frames in zip(push.sequences, push.frames, strict=True):
            sequence.give(frames, sequence in push.short)
        self.in_flight.append(pushed)

    def _push(self, push: Push) -> Pushed:
        slots = [s.slot for s in push.sequences]
        if self._vocoder.follows:
            return Pushed(push, self._vocoder.follow(slots, [s.given for s in push.sequences], push.frames))
        (sequence,), (frames,) = push.sequences, push.frames
        codes = torch.from_numpy(np.stack(sequence.output.codes[sequence.given : sequence.given + frames]))
        if self._beside:
            coming = self._beside.call(self._vocoder.push, slots, codes[None])
            return Pushed(push, lambda: finite(coming.result().float()), coming.done)
        sound = self._vocoder.push(slots, codes[None])
        return Pushed(push, lambda: finite(sound.float().cpu()))

    def pop(self) -> Launch | Pushed:
        """Take the oldest work, or a launch in place of a push that is not done; `codes` or `sound` waits for it."""
        work = self.in_flight[0]
        if isinstance(work, Pushed) and not work.done():
            work = next((later for later in self.in_flight if isinstance(later, Launch)), work)
        self.in_flight.remove(work)
        for sequence in work.sequences:
            if isinstance(work, Launch):
                sequence.in_flight = False
            else:
                sequence.pushes -= 1
        return work

    def codes(self) -> list[np.ndarray | SpeechError | None]:
        """Wait for the codes of the popped launch, one entry for each sequence: see `FrameDecoder.collect`."""
        return self.decoder.collect()

    def follow(self, sequence: SpeechSequence) -> None:
        """See where a sequence's frames of speech attended, as far as that is told: all, once their sound is there."""
        if path := sequence.path:
            for told in self.decoder.told(sequence.slot):
                if path.frames < len(sequence.output.codes):
                    path.see(told)

    def add_frame(self, sequence: SpeechSequence, codes: np.ndarray | SpeechError | None) -> None:
        """Give a sequence its collected frame. Where speech ends, it may tell which head follows the text."""
        sequence.add_frame(codes)
        # A frame tells of 13 tokens from where the path stood at its launch. With the sound, 8 frames later, it may
        # stand beyond them. On a GPU this would wait for what is told.
        if sequence.path and (codes is None or self._beside):
            self.follow(sequence)
        if codes is None and sequence.path:
            self._finder.judge(sequence.path, sequence.output.sound)

    @staticmethod
    def sound(pushed: Pushed) -> list[np.ndarray | None]:
        """Wait for the sound of a popped push: fp32 [frames, 1920] for each sequence. None: it is not finite."""
        sounds = zip(pushed.wait(), pushed.push.frames, strict=True)
        return [sound if sound is None else sound.numpy().reshape(frames, -1) for sound, frames in sounds]

    def forget(self) -> None:
        """Drop work in flight and kept references: after a KernelFault no state of a slot is trusted."""
        self.in_flight.clear()
        self.references.clear()

    def recover(self) -> None:
        """Make frame decoder and vocoder usable again after a KernelFault."""
        self._in_turn(self._vocoder.recover)
        self.decoder.recover()

    def drain(self) -> None:
        """Wait for all work in flight: memory that the device still writes to must not be freed."""
        while self.in_flight:
            work = self.in_flight.popleft()
            with contextlib.suppress(Exception):  # the engine has ended, and everybody is told why
                self.codes() if isinstance(work, Launch) else work.wait()

    def close(self) -> None:
        """End the vocoder's thread."""
        if self._beside:
            self._beside.close()


def finite(sounds: Iterable[Tensor]) -> Sounds:
    return [sound if sound.isfinite().all() else None for sound in sounds]


class VocoderThread:
    """On a CPU it computes the vocoder's calls, one after the other. Not thread-safe: one thread makes the calls.

    A `ThreadPoolExecutor` would keep Python from ending while a call hangs. It also takes no calls once Python ends,
    but an engine may still be at work then."""

    def __init__(self, threads: int):
        """`threads`: how many PyTorch uses for a call."""
        self._threads = threads
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Compute `function(*args)` after the calls before it. Raises RuntimeError: the process can have no more
        threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=VOCODER_THREAD, daemon=True)
            thread.start()
            self._thread = thread
            self.call(use_threads, self._threads).result()
        future: Future[Any] = Future()
        self._calls.put((future, partial(function, *args)))
        return future

    def close(self) -> None:
        """End the thread after the calls so far."""
        if self._thread:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    @torch.inference_mode()
    def _run(self) -> None:
        while call := self._calls.get():
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del call, future, function  # while it waits, it must keep no tensors
