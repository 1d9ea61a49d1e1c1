"""SpeechSequence: one utterance as the engine computes it, frame by frame, and what was handed to its listener.

Callers never touch tensors of the engine's thread: text rows go in through a queue, chunks come out through another.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np
from torch import Tensor

from qwen_megakernel.backend.interfaces import PUSH_FRAMES, RECENT_FRAMES
from qwen_megakernel.engine.audio import Audio, Chunk, Timings
from qwen_megakernel.engine.callbacks import CallbackRunner, DirectCalls
from qwen_megakernel.engine.runaway import RunawayGuard
from qwen_megakernel.errors import SpeechError
from qwen_megakernel.model.conditioning import Conditioning
from qwen_megakernel.model.edges import Edges, Padding
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.model.prompt_pieces import PromptPieces
from qwen_megakernel.model.time_stretch import TimeStretch
from qwen_megakernel.model.vocoder import Portion
from qwen_megakernel.sampling_params import SamplingParams

FRAME_S = 0.08  # seconds of audio of a frame: the model's 12.5 frames a second

NO_SLOT = -1

LONG_CHUNK = 16
"""Frames; a longer chunk gets no priority beyond its first 16, two full chunks of the default schedule. Without this
limit a caller who asked for 10**7 frames came before everybody (docs/log.md, 2026-11-21)."""


@dataclass(frozen=True)
class Request:
    """A checked request with every default filled in."""

    conditioning: Conditioning
    non_streaming_mode: bool
    sampling: SamplingParams
    max_frames: int
    runaway_guard: bool
    judge_length: bool  # the runaway guard tells babble by how long the text should take
    chunk_frames: tuple[int, ...]
    speed: float
    trim: str
    silence_s: float
    before_s: float  # seconds of silence before the speech, and after it
    after_s: float
    reproducible: bool


class State(Enum):
    """The stages of a sequence. Each leads to the next, and any of them to DONE."""

    WAITING_TEXT = "its first word is not whole yet"
    QUEUED = "its prompt is built; it waits for a slot"
    PREFILLING = "it has a slot; its prompt is computed next"
    REFERENCE = "the vocoder gets the codes of the reference recording"
    RUNNING = "frames are launched"
    DRAINING = "its last frame is computed; the rest of its audio follows"
    DONE = "it has its audio or its error"


class SpeechSequence:
    """Callers' threads fill in the text. Once the engine's thread has the prompt, it owns all below the line."""

    def __init__(
        self,
        request: Request,
        on_chunk: Callable[[Chunk], None] | None = None,
        on_end: Callable[[], None] | None = None,
        *,
        sample_rate: int,
        groups: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`groups`: codes of a frame."""
        self.request = request
        self.on_chunk = on_chunk
        self.on_end = on_end
        self.clock = clock
        self.seed = request.sampling.seed or 0  # a checked request has one
        self._sample_rate = sample_rate
        self._groups = groups
        self._heard_frame_s = FRAME_S / request.speed
        self.lock = threading.Lock()  # of the text
        self.text_open = True  # more may be pushed
        self.pieces: PromptPieces | None = None  # where the text does not come whole
        self.incoming: queue.SimpleQueue[tuple[Tensor, bool]] = queue.SimpleQueue()  # rows; is the text complete?
        self.cancelled = False
        self.callbacks: CallbackRunner | DirectCalls | None = None
        self.settled = False  # it has its audio or its error; its callbacks may still run
        self.done = threading.Event()
        self.chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self.audio: Audio | None = None
        self.error: BaseException | None = None
        self.arrived: float | None = None  # when its text did
        self.timings: dict[str, float] = {}
        # ------------------------------------------------ the engine's thread
        self._state = State.WAITING_TEXT
        self.prompt: Prompt | None = None
        self.text_rows = 0  # trailing rows that the frame decoder has
        self.text_complete = False  # no more text rows will come
        self.max_frames = 0
        self.deadline = 0.0  # for getting a slot
        self.slot = NO_SLOT
        self.steady = False  # the vocoder is
        self.in_flight = False  # a launched frame whose codes nobody has seen
        self.pushes = 0  # uncollected ones
        self.reference: list[Portion] = []  # what the vocoder has yet to hear of the reference recording
        self.voice_digest = b""  # of a voice with a reference recording: Voice.digest
        self.stage_began = 0.0
        self.guard = RunawayGuard() if request.runaway_guard else None
        self.launched = 0  # frames
        self.given = 0  # frames that the vocoder was given; they may be computed later
        self.codes: list[np.ndarray] = []  # int64 [groups] each, of the frames seen
        self.sound: list[np.ndarray] = []  # fp32 [1920] each, of the first of these frames
        self._effects: list[Edges | TimeStretch | Padding] = []
        edges = Edges(request.trim, request.silence_s, sample_rate)
        pauses = request.before_s > 0 or request.after_s > 0
        if request.trim != "none" or pauses:
            self._effects.append(edges)
        if request.speed != 1:
            self._effects.append(TimeStretch(request.speed, sample_rate))
        if pauses:
            self._effects.append(Padding(request.before_s, request.after_s, sample_rate, edges, request.speed))
        self._changed: list[np.ndarray] = []  # fp32 [n] each, what was handed out if there are effects
        self._to_come: list[np.ndarray] = []  # codes of frames whose sound an effect has cut, or holds
        self.reason: str | None = None  # why it ends with the frames it has
        self.runaway: str | None = None  # the guard's kind, if that is the reason
        self._planned = 0  # frames given that fill chunks
        self._chunks_planned = 0  # these chunks
        self.handed_frames = 0
        self.handed_samples = 0
        self.chunks_given = 0
        self.first_chunk: float | None = None  # when it was handed out
        self.runs_out: float | None = None  # when its listener has heard all that was handed out
        self.lead: float | None = None  # see Audio.lead_s

    @property
    def state(self) -> State:
        """Any thread may settle a sequence; the other states are the engine thread's."""
        return State.DONE if self.settled else self._state

    def add_text(self, text: str) -> None:
        """Tell the guard more of the text, in a caller's thread, so that it knows how long the speech should take.
        Random weights babble whatever the text is, so they are not judged."""
        if self.guard and self.request.judge_length:
            self.guard.add_text(text)

    def enqueue(self, prompt: Prompt, text_complete: bool, max_positions: int, queue_timeout: float) -> None:
        """Its prompt is built."""
        self.prompt = prompt
        self.text_rows = len(prompt.trailing)
        self.text_complete = text_complete
        self.max_frames = min(self.request.max_frames, max_positions - len(prompt.rows) + 1)
        self.stage_began = self.clock()
        self.deadline = self.stage_began + queue_timeout
        self._state = State.QUEUED

    def enter(self, slot: int) -> None:
        """It has a slot."""
        self.slot = slot
        self.mark("queue")
        self._state = State.PREFILLING

    def prefilled(self, reference: list[Portion]) -> None:
        """Its prompt is computed. `reference`: what the vocoder must hear before the first frame."""
        self.reference = reference
        self._state = State.REFERENCE
        if not reference:
            self.reference_heard()

    def reference_heard(self) -> None:
        self.reference = []
        self._state = State.RUNNING
        self.mark("prefill")

    def end(self, reason: str) -> None:
        """No frame will follow those it has."""
        self.reason = reason
        self._state = State.DRAINING

    def mark(self, stage: str) -> None:
        """A stage is over: the time since the previous one belongs to it."""
        now = self.clock()
        self.timings[stage] = now - self.stage_began
        self.stage_began = now

    def forget(self) -> None:
        """It has ended. An utterance that is still held keeps the audio, but not what was needed to make it."""
        self.prompt = None
        self.pieces = None
        self.reference = []
        self.incoming = queue.SimpleQueue()
        self.codes = []
        self.sound = []
        self._changed = []
        self._effects = []

    @property
    def speaking(self) -> bool:
        """Its first frame can be launched or was."""
        return self._state in (State.RUNNING, State.DRAINING)

    @property
    def ready(self) -> bool:
        """Can its next frame be launched? Not while the device keeps codes that the vocoder still needs."""
        busy = self.in_flight or self.missing >= RECENT_FRAMES or self.launched >= self.max_frames
        return self.state is State.RUNNING and not busy and not self.starved

    @property
    def starved(self) -> bool:
        """Its next frame needs a text row that has not come, so it waits. A frame depends on the text row of the frame
        before it."""
        return self.speaking and not self.text_complete and self.launched > self.text_rows

    @property
    def idle(self) -> bool:
        """Starved, and no row is on its way."""
        return self.starved and self.incoming.empty() and not self.cancelled

    @property
    def missing(self) -> int:
        """Frames launched that the vocoder was not given."""
        return self.launched - self.given

    @property
    def alone(self) -> bool:
        """Do its frames go alone, in whole chunks? Then its samples' last bits depend on nothing else."""
        return self.request.reproducible and not self.steady

    @property
    def one_by_one(self) -> bool:
        """Do its frames go one by one? An effect's cuts depend on the samples' last bits: other chunks would leave out
        other pitch periods (docs/log.md, 2026-11-22)."""
        return bool(self._effects) and not self.steady

    def vocoder_due(self, short: bool) -> bool:
        """Are the frames launched so far worth a push? After `PUSH_FRAMES` they are, whatever the chunks: a push takes
        no more of them, and the runaway guard listens that often. `short`: its chunk ends with them, full or not."""
        if self.missing <= 0:
            return False
        last = self.reason is not None or self.launched == self.max_frames
        most = 1 if self.one_by_one else PUSH_FRAMES
        return last or short or self.missing >= most or self._to_chunk <= 0

    @property
    def _to_chunk(self) -> int:
        """Frames that its next chunk lacks."""
        return self.chunk_size(self._chunks_planned) - (self.launched - self._planned)

    def chunk_size(self, index: int) -> int:
        """Frames of a chunk."""
        schedule = self.request.chunk_frames
        return schedule[min(index, len(schedule) - 1)]

    def due_at(self, frame_s: float) -> float:
        """When its next frame must begin so that its listener hears no gap, if a frame takes `frame_s`. Before the
        first chunk it is the text's arrival plus the audio launched: a long first chunk is no more urgent than others.
        """
        if self.runs_out is None:
            return (self.arrived or 0.0) + self._heard_frame_s * self.launched
        patience = self._heard_frame_s * max(0, self.launched - self.handed_frames - LONG_CHUNK)
        return self.runs_out + patience - frame_s * min(max(1, self._to_chunk), LONG_CHUNK)

    def add_frame(self, codes: Tensor | SpeechError | None) -> bool:
        """Take one more frame, int64 [groups], or None at end of speech. Returns whether it is a frame of speech."""
        if isinstance(codes, SpeechError):
            raise codes
        if codes is None:
            self.end(self.reason or "eos")
            self.launched = len(self.codes)
            return False
        if not self.codes:
            self.mark("first_frame")
        frame = codes.numpy()
        self.codes.append(frame)
        if self.guard:
            self.guard.see(frame, self.text_complete and len(self.codes) >= self.text_rows)
        if len(self.codes) == self.max_frames:
            self.end(self.reason or "length")
        return True

    def give(self, frames: int, short: bool) -> None:
        """The vocoder was given so many more frames. `short`: the last launched ends a chunk, full or not."""
        self.given += frames
        self.pushes += 1
        while (size := self.chunk_size(self._chunks_planned)) <= self.given - self._planned:
            self._planned += size
            self._chunks_planned += 1
        if short and self._planned < self.given == self.launched:
            self._planned = self.given
            self._chunks_planned += 1

    def add_sound(self, sound: np.ndarray) -> None:
        """Take what the vocoder made: fp32 [frames, 1920]. Its frames from end of speech on are noise."""
        sound = sound[: len(self.codes) - len(self.sound)]
        if not np.isfinite(sound).all():
            told = "the model's samples are not finite"
            raise SpeechError(f"{told}: check this utterance's voice, or the weights if all utterances fail")
        if self.guard and len(sound):
            self.guard.hear(sound, len(sound))
        self.sound += list(sound)

    def hand_out(self, short: bool = False) -> str | None:
        """Hand out whole chunks, or all there is if `short` or at the end. Returns the finish reason at the end."""
        if self.reason and (self.pushes or self.missing > 0):
            return None  # after the last push
        presentable = len(self.sound)
        if self.guard:
            if runaway := self.guard.verdict(at_limit=self.reason == "length"):
                self.runaway = runaway
                self.end("runaway")
            if self.reason not in ("eos", "length"):
                presentable = min(presentable, self.guard.presentable)
        while not self.settled and (left := presentable - self.handed_frames) > 0:
            size = self.chunk_size(self.chunks_given)
            if left < size and not (self.reason or short):
                break
            self._hand_out_frames(min(left, size))
        if self._effects and self.reason and not self.settled:
            rest = np.zeros(0, np.float32)
            for effect in self._effects:
                rest = np.concatenate([effect.push(rest), effect.finish()])
            if len(rest) or self._to_come:
                self._hand_out(rest, [])
        return self.reason

    def _hand_out_frames(self, frames: int) -> None:
        first, last = self.handed_frames, self.handed_frames + frames
        samples, codes = np.concatenate(self.sound[first:last]), self.codes[first:last]
        for effect in self._effects:
            samples = effect.push(samples)
        self.handed_frames = last
        if len(samples):
            self._hand_out(samples, codes)
        else:
            self._to_come += codes

    def _hand_out(self, samples: np.ndarray, codes: list[np.ndarray]) -> None:
        """Hand out the next chunk: fp32 [n], int64 [groups] each."""
        chunk = Chunk(samples, self._stack([*self._to_come, *codes]), self._sample_rate)
        self._to_come = []
        now, seconds = self.clock(), len(samples) / self._sample_rate
        if self.first_chunk is None:
            self.first_chunk = now
            self.mark("first_chunk")
        else:
            lead = self.handed_samples / self._sample_rate - (now - self.first_chunk)
            self.lead = lead if self.lead is None else min(self.lead, lead)
        self.runs_out = max(self.runs_out or now, now) + seconds
        self.chunks_given += 1
        if self._effects:
            self._changed.append(samples.copy())  # the listener may write to the chunk's own
        self.handed_samples += len(samples)
        self.chunks.put(chunk)
        callbacks, on_chunk = self.callbacks, self.on_chunk  # another thread may end it meanwhile
        if callbacks and on_chunk:
            callbacks.call(partial(on_chunk, chunk))

    def _stack(self, codes: list[np.ndarray]) -> np.ndarray:
        """Codes, int64 [groups] each -> int64 [n, groups]."""
        return np.stack(codes) if codes else np.zeros((0, self._groups), np.int64)

    def assemble(self, reason: str) -> Audio:
        now = self.clock()
        arrived = now if self.arrived is None else self.arrived
        spoken = self.handed_frames
        sound = self._changed if self._effects else self.sound[:spoken]
        return Audio(
            samples=np.concatenate(sound) if sound else np.zeros(0, np.float32),
            codes=self._stack(self.codes[:spoken]),
            finish_reason=reason,
            seed=self.seed,
            sample_rate=self._sample_rate,
            ttfc_s=None if self.first_chunk is None else self.first_chunk - arrived,
            compute_s=now - arrived,
            lead_s=self.lead,
            timings=Timings(**self.timings),
        )
