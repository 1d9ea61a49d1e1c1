"""What is handed out of an utterance: its frames become chunks, and in the end its audio."""

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from qwen_megakernel.engine.audio import Audio, Chunk, Stopwatch, Timings
from qwen_megakernel.engine.callbacks import CallbackRunner, DirectCalls
from qwen_megakernel.engine.input import Request
from qwen_megakernel.engine.text_path import TextPath
from qwen_megakernel.model.edges import Edges, Padding
from qwen_megakernel.model.time_stretch import TimeStretch


def chunk_size(schedule: tuple[int, ...], index: int) -> int:
    """Frames of a chunk. The last size of the schedule repeats."""
    return schedule[min(index, len(schedule) - 1)]


class ChunkPlan:
    """Which chunks the frames fill that the vocoder was given. The engine's thread owns it."""

    def __init__(self, schedule: tuple[int, ...]):
        """`schedule`: frames per chunk."""
        self._schedule = schedule
        self._frames = 0  # that fill chunks
        self._chunks = 0  # these chunks
        self.full_at = schedule[0]  # frames in all that fill one chunk more

    def fill(self, frames: int, short: bool) -> None:
        """The vocoder was given so many frames in all. `short`: the last one ends a chunk, full or not."""
        while frames >= self.full_at:
            self._begin_next(self.full_at)
        if short and self._frames < frames:
            self._begin_next(frames)

    def _begin_next(self, frames: int) -> None:
        self._frames = frames
        self._chunks += 1
        self.full_at = frames + chunk_size(self._schedule, self._chunks)


class Result:
    """What reaches an utterance's caller. The engine's thread gives the chunks. The thread that settles the sequence
    (`Admission`) writes the rest; it may be any."""

    def __init__(self, on_chunk: Callable[[Chunk], None] | None, on_end: Callable[[], None] | None):
        # The caller's callbacks, and what calls them. None: there are none, or the last call was made.
        self.on_chunk = on_chunk
        self.on_end = on_end
        self.callbacks: CallbackRunner | DirectCalls | None = None
        self.chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()  # None comes behind the last one
        # One of them is there once it is `settled`.
        self.audio: Audio | None = None
        self.error: BaseException | None = None
        self.settled = False  # it has its audio or its error; its callbacks may still run
        self.done = threading.Event()  # set after the last callback

    def give(self, chunk: Chunk) -> None:
        self.chunks.put(chunk)
        callbacks, on_chunk = self.callbacks, self.on_chunk  # another thread may end it meanwhile
        if callbacks and on_chunk:
            callbacks.call(partial(on_chunk, chunk))


class Output:
    """The frames of one utterance that were made, and what was handed out of them. The engine's thread owns it; whoever
    settles the sequence, in any thread, calls `assemble`."""

    def __init__(self, request: Request, stopwatch: Stopwatch, result: Result, *, sample_rate: int, groups: int):
        """`groups`: codes of a frame."""
        self._request = request
        self._stopwatch = stopwatch
        self._result = result
        self._sample_rate = sample_rate
        self._groups = groups
        self.codes: list[np.ndarray] = []  # int64 [groups] each, of the frames seen
        self.sound: list[np.ndarray] = []  # fp32 [1920] each, of the first of these frames
        self.path: TextPath | None = None  # tells when tokens begin
        self.judges = False  # it also tells whether text was lost
        self._token_s: list[float] = []  # see `Audio.token_s`; of the tokens that were handed out
        self.effects: list[Edges | TimeStretch | Padding] = []  # change the sound before it is handed out
        edges = Edges(request.trim, request.silence_s, sample_rate)
        pauses = request.before_s > 0 or request.after_s > 0
        if request.trim != "none" or pauses:
            self.effects.append(edges)
        if request.speed != 1:
            self.effects.append(TimeStretch(request.speed, sample_rate))
        if pauses:
            self.effects.append(Padding(request.before_s, request.after_s, sample_rate, edges, request.speed))
        self._changed: list[np.ndarray] = []  # fp32 [n] each, what was handed out if there are effects
        self._to_come: list[np.ndarray] = []  # codes of frames that go out with the next chunk
        self._chunks = 0  # handed out
        self._samples = 0  # of these
        self.handed_frames = 0  # frames that went out
        self.first_chunk: float | None = None  # when it was handed out, by the stopwatch's clock; None: none was
        self.runs_out: float | None = None  # when the listener has heard all that was handed out; None: nothing was
        self.lead: float | None = None  # see `Audio.lead_s`

    def add_sound(self, sound: np.ndarray) -> np.ndarray:
        """Take what the vocoder made: fp32 [frames, 1920]. Frames from end of speech on are noise. Returns others."""
        sound = sound[: len(self.codes) - len(self.sound)]
        self.sound += list(sound)
        return sound

    def hand_out(self, presentable: int, *, short: bool, last: bool) -> None:
        """Hand out chunks of the first `presentable` frames. `short`: the last chunk need not be full. `last`: no frame
        will follow, so what effects hold back goes out too."""
        while not self._result.settled and (left := presentable - self.handed_frames) > 0:
            size = chunk_size(self._request.chunk_frames, self._chunks)
            if left < size and not (last or short):
                break
            self._hand_out_frames(min(left, size))
        if self.effects and last and not self._result.settled:
            rest = np.zeros(0, np.float32)
            for effect in self.effects:
                rest = np.concatenate([effect.push(rest), effect.finish()])
            if len(rest) or self._to_come:
                self._hand_out(rest)

    def _hand_out_frames(self, frames: int) -> None:
        first, last = self.handed_frames, self.handed_frames + frames
        # `np.concatenate` would give up the interpreter for every frame: 61 us a chunk with 256 utterances.
        sound: list[Any] = self.sound[first:last]  # mypy does not know that an array is a buffer
        samples = np.frombuffer(bytearray().join(sound), np.float32)
        for effect in self.effects:
            samples = effect.push(samples)
        self._to_come += self.codes[first:last]
        self.handed_frames = last
        if len(samples):  # else an effect has cut them all, or holds them
            self._hand_out(samples)

    def _hand_out(self, samples: np.ndarray) -> None:
        """Hand out the next chunk: fp32 [n]."""
        tokens = self._tokens(self._samples + len(samples))
        chunk = Chunk(samples, self._stack(self._to_come), self._sample_rate, tokens)
        self._to_come = []
        now, seconds = self._stopwatch.clock(), len(samples) / self._sample_rate
        if self.first_chunk is None:
            self.first_chunk = now
            self._stopwatch.mark("first_chunk")
        else:
            lead = self._samples / self._sample_rate - (now - self.first_chunk)
            self.lead = lead if self.lead is None else min(self.lead, lead)
        self.runs_out = max(self.runs_out or now, now) + seconds
        self._chunks += 1
        if self.effects:
            self._changed.append(samples.copy())  # the listener may write to the chunk's own
        self._samples += len(samples)
        self._result.give(chunk)

    def _tokens(self, samples: int) -> tuple[float, ...] | None:
        """When the next tokens begin that do so within so many samples of what is handed out."""
        if not self.path:
            return None
        told = len(self._token_s)
        for at in self.path.starts[told:]:
            place = at * self._sample_rate
            for effect in self.effects:
                place = effect.place(place)
            if place > samples:
                break
            self._token_s.append(max(0.0, place / self._sample_rate))
        return tuple(self._token_s[told:])

    def _stack(self, codes: list[np.ndarray]) -> np.ndarray:
        """Codes, int64 [groups] each -> int64 [n, groups]."""
        return np.array(codes, np.int64).reshape(-1, self._groups)  # `np.stack` takes three times as long

    def assemble(self, reason: str) -> Audio:
        """All that was handed out."""
        now = self._stopwatch.clock()
        arrived = now if self._stopwatch.arrived is None else self._stopwatch.arrived
        spoken = self.handed_frames
        return Audio(
            sound=list(self._changed) if self.effects else self.sound[:spoken],
            codes=self._stack(self.codes[:spoken]),
            finish_reason=reason,
            seed=self._request.seed,
            sample_rate=self._sample_rate,
            ttfc_s=None if self.first_chunk is None else self.first_chunk - arrived,
            compute_s=now - arrived,
            lead_s=self.lead,
            timings=Timings(**self._stopwatch.stages),
            token_s=tuple(self._token_s) if self.path else None,
            lost=self._lost() if reason == "eos" else (),
        )

    def _lost(self) -> tuple[int, ...]:
        """See `Audio.lost`. A path that was not told of every frame knows nothing."""
        path = self.path
        return tuple(path.lost) if path and self.judges and path.frames == len(self.codes) else ()

    def forget(self) -> None:
        """The sequence has ended: `assemble` has copied what is still needed."""
        self.codes = []
        self.sound = []
        self.effects = []
        self._changed = []
