"""SpeechSequence: one utterance as the engine's loop counts it, frame by frame.

Callers never touch tensors of the engine's thread: text rows go in through a queue (input.py), chunks come out through
another (output.py).
"""

from collections.abc import Callable
from enum import Enum

import numpy as np

from qwen_megakernel.backend.interfaces import PUSH_FRAMES, RECENT_FRAMES
from qwen_megakernel.engine.audio import FRAME_S, Chunk, Stopwatch
from qwen_megakernel.engine.input import Input, Request
from qwen_megakernel.engine.output import ChunkPlan, Output, Result
from qwen_megakernel.engine.runaway import RunawayGuard
from qwen_megakernel.engine.seat import Seat
from qwen_megakernel.engine.text_path import HeadTrial, TextPath
from qwen_megakernel.errors import SpeechError
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.model.vocoder import Portion

NO_SLOT = -1

LONG_CHUNK = 16
"""Frames; a longer chunk gets no priority beyond its first 16, two full chunks of the default schedule. Without this
limit a caller who asked for 10**7 frames came before everybody (docs/log/2026-11-21.md#many-callers-h200)."""


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
    """What the loop counts of an utterance. A caller's thread makes it, and builds its prompt; from `enqueue` on the
    engine's thread alone writes to it."""

    def __init__(
        self,
        request: Request,
        on_chunk: Callable[[Chunk], None] | None,
        on_end: Callable[[], None] | None,
        *,
        sample_rate: int,
        groups: int,
        clock: Callable[[], float],
    ):
        """`groups`: codes of a frame."""
        self.request = request
        self.input = Input()  # what callers fill, in their threads
        self.stopwatch = Stopwatch(clock)  # its caller's until `enqueue`, then the engine's thread's
        self.result = Result(on_chunk, on_end)  # what reaches the caller; any thread may settle it
        # What is handed out, in the engine's thread.
        self.output = Output(request, self.stopwatch, self.result, sample_rate=sample_rate, groups=groups)
        # Ends a runaway; None: nothing does. Callers' threads add text, all else is the engine's thread's.
        self.guard = RunawayGuard() if request.runaway_guard else None
        self.plan = ChunkPlan(request.chunk_frames)
        self._heard_frame_s = FRAME_S / request.speed
        self._state = State.WAITING_TEXT
        self.prompt: Prompt | None = None
        self.text_rows = 0  # trailing rows that the frame decoder has
        self.text_complete = False  # no more text rows will come
        self.max_frames = 0
        self.longest = 0  # frames that it can need: no more are launched
        self.pages: list[int] = []  # of keys and values, for all positions that it can need
        self._prompt_rows = 0
        self.deadline = 0.0  # for getting a slot
        self.seat: Seat | None = None  # it is one of several utterances of somebody
        self.slot = NO_SLOT
        self.steady = False  # the vocoder is
        self.reference: list[Portion] = []  # what the vocoder has yet to hear of the reference recording
        self.voice_digest = b""  # of a voice with a reference recording: Voice.digest
        self.launched = 0  # frames
        self.in_flight = False  # a launched frame whose codes nobody has seen
        self.given = 0  # frames that the vocoder was given; they may be computed later
        self.pushes = 0  # uncollected ones
        self.reason: str | None = None  # why it ends with the frames it has
        self.runaway: str | None = None  # the guard's kind, if that is the reason
        self._due: tuple[float, int] | None = None  # what `due_at` knows; None: something has changed since
        self.path: TextPath | HeadTrial | None = None  # see `follow`

    def follow(self, path: TextPath | HeadTrial | None, told: bool, judges: bool) -> None:
        """It has begun. `path`: sees its attention; None: nobody tells it. `told`: so the caller is told of tokens.
        `judges`: see `HeadFinder`."""
        self.path = path
        if self.guard and judges and isinstance(path, TextPath):
            self.guard.reached, self.output.judges = path.reached, True
        self.output.path = path if told and isinstance(path, TextPath) else None

    @property
    def state(self) -> State:
        """Any thread may settle a sequence; the other states are the engine thread's."""
        return State.DONE if self.result.settled else self._state

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
        self._prompt_rows = len(prompt.rows)
        self.max_frames = self.longest = min(self.request.max_frames, max_positions - len(prompt.rows) + 1)
        self.limit()
        self.deadline = self.stopwatch.begin() + queue_timeout
        self._state = State.QUEUED

    def limit(self) -> None:
        """Once its text is complete, the guard ends it within a number of frames that is known."""
        if self.guard and self.text_complete:
            self.longest = int(min(self.max_frames, self.guard.longest(self.text_rows)))

    def positions(self, frames: int) -> int:
        """Positions that its prompt and so many frames take. The prompt's last row is the first frame's input."""
        return self._prompt_rows - 1 + frames

    def enter(self, slot: int, pages: list[int]) -> None:
        """It has a slot, and pages for `positions(longest)`."""
        self.slot = slot
        self.pages = pages
        self.stopwatch.mark("queue")
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
        self.stopwatch.mark("prefill")

    def end(self, reason: str) -> None:
        """No frame will follow those it has."""
        self.reason = reason
        self._state = State.DRAINING

    def forget(self) -> None:
        """It has ended. An utterance that is still held keeps the audio, but not what was needed to make it."""
        self.prompt = None
        self.reference = []
        self.input.forget()
        self.output.forget()

    @property
    def speaking(self) -> bool:
        """Its first frame can be launched or was."""
        return self._state in (State.RUNNING, State.DRAINING)

    @property
    def ready(self) -> bool:
        """Can its next frame be launched? Not while the device keeps codes that the vocoder still needs."""
        if self.in_flight or self._state is not State.RUNNING or self.result.settled:
            return False
        room = self.launched < self.longest and self.launched - self.given < RECENT_FRAMES
        return room and (self.text_complete or not self.starved)

    @property
    def starved(self) -> bool:
        """Its next frame needs a text row that has not come: that of the frame before it."""
        return not self.text_complete and self.launched > self.text_rows and self.speaking

    @property
    def idle(self) -> bool:
        """Starved, and no row is on its way."""
        return self.starved and not self.input.news

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
        other pitch periods (docs/log/2026-11-22.md#speech-another-speed)."""
        return bool(self.output.effects) and not self.steady

    def vocoder_due(self, short: bool) -> bool:
        """Are the frames launched so far worth a push? After `PUSH_FRAMES` they are, whatever the chunks: a push takes
        no more of them, and the runaway guard listens that often. `short`: its chunk ends with them, full or not."""
        missing = self.missing
        if missing <= 0:
            return False
        last = self.reason is not None or self.launched == self.longest
        most = 1 if self.one_by_one else PUSH_FRAMES
        return last or short or missing >= most or self.launched >= self.plan.full_at

    def due_at(self, frame_s: float) -> float:
        """When its next frame must begin so that its listener hears no gap, if a frame takes `frame_s`. Before the
        first chunk it is the text's arrival plus the audio launched: a long first chunk is no more urgent than others.
        """
        if self._due is None:
            self._due = self._find_due()
        runs_out, frames = self._due
        return runs_out - frame_s * frames

    def _find_due(self) -> tuple[float, int]:
        """(when it must be made, frames that it takes); it is asked far more often than it changes."""
        output = self.output
        if output.runs_out is None:
            return (self.stopwatch.arrived or 0.0) + self._heard_frame_s * self.launched, 0
        patience = self._heard_frame_s * max(0, self.launched - output.handed_frames - LONG_CHUNK)
        lacking = self.plan.full_at - self.launched
        return output.runs_out + patience, min(max(1, lacking), LONG_CHUNK)

    def launch(self) -> None:
        """Its next frame was launched."""
        self.launched += 1
        self.in_flight = True
        self._due = None

    def add_frame(self, codes: np.ndarray | SpeechError | None) -> None:
        """Take one more frame, int64 [groups], or None at end of speech."""
        if isinstance(codes, SpeechError):
            raise codes
        seen = self.output.codes
        if codes is None:
            self.end(self.reason or "eos")
            self.launched = len(seen)
            return
        if not seen:
            self.stopwatch.mark("first_frame")
        seen.append(codes)
        if self.guard:
            self.guard.see(codes, self.text_complete and len(seen) >= self.text_rows)
        if len(seen) == self.max_frames:
            self.end(self.reason or "length")

    def give(self, frames: int, short: bool) -> None:
        """The vocoder was given so many more frames. `short`: the last launched ends a chunk, full or not."""
        self.given += frames
        self.pushes += 1
        self.plan.fill(self.given, short and self.given == self.launched)
        self._due = None

    def add_sound(self, sound: np.ndarray | None) -> None:
        """Take what the vocoder made: fp32 [frames, 1920]. Raises SpeechError: None, because it is not finite."""
        if sound is None:
            told = "the model's samples are not finite"
            raise SpeechError(f"{told}: check this utterance's voice, or the weights if all utterances fail")
        sound = self.output.add_sound(sound)
        if self.guard and len(sound):
            self.guard.hear(sound, len(sound))

    def hand_out(self, short: bool = False) -> str | None:
        """Hand out whole chunks, or all there is if `short` or at the end. Returns the finish reason at the end."""
        if self.reason and (self.pushes or self.missing > 0):
            return None  # after the last push
        presentable = len(self.output.sound)
        if self.guard:
            if runaway := self.guard.verdict(at_limit=self.reason == "length"):
                self.runaway = runaway
                self.end("runaway")
            if self.reason not in ("eos", "length"):
                presentable = min(presentable, self.guard.presentable)
        self.output.hand_out(presentable, short=short, last=self.reason is not None)
        self._due = None
        return self.reason
