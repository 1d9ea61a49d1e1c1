"""A text's pieces through an engine: many are spoken at once, and they are heard in order, with pauses."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from qwen_megakernel import TTSEngine
from qwen_megakernel.commands.options import Pauses
from qwen_megakernel.commands.pieces import Break, Piece
from qwen_megakernel.engine.audio import Audio, Chunk
from qwen_megakernel.engine.utterance import ChunkStream
from qwen_megakernel.model.edges import Edges
from qwen_megakernel.speech.options import TRIM_TO_S
from qwen_megakernel.speech.request import SpeechRequest
from qwen_megakernel.speech.retries import say_well
from qwen_megakernel.speech.words import SpeechRate, weight, words_of
from spoken_text.spoken_text import SpokenText

_P = TypeVar("_P", bound=Piece)


def in_order(
    pieces: Iterable[_P],
    stream: Callable[[_P], ChunkStream],
    hear: Callable[[_P, ChunkStream], Iterator[Chunk | Audio]],
    ahead: int,
) -> Iterator[tuple[_P, Chunk | Audio]]:
    """Speak many pieces at once. Each chunk that comes out begins one more piece, so that the first chunk waits for no
    other piece. Closing the iterator cancels open pieces.

    `stream`: begins to speak a piece. `hear`: yields the piece's chunks as they are made, then its `Audio`. `ahead`:
    most pieces to have open at once. Yields what `hear` yields for each piece, in the order of the pieces. Raises
    TTSError: as `stream` and `hear`."""
    left, opened = iter(pieces), deque[tuple[_P, ChunkStream]]()

    def begin() -> None:
        if len(opened) < ahead and (piece := next(left, None)) is not None:
            opened.append((piece, stream(piece)))

    begin()
    try:
        while opened:
            piece, chunks = opened[0]
            for heard in hear(piece, chunks):
                yield piece, heard
                begin()
            opened.popleft()
            begin()
    finally:
        for _, chunks in opened:
            chunks.close()


class Binder:
    """Joins pieces: cuts the silence at their ends and puts pauses between. A pause is exact to the sample, from where
    the speech of a piece ends to where that of the next begins (`SpeechBounds`).

    The engine could cut the silence too. But its vocoder would then take each frame alone, which costs a third more
    time on a CPU.
    """

    def __init__(
        self,
        write: Callable[[np.ndarray], None],
        sample_rate: int,
        pauses: Pauses | None,
        gain_of: Callable[[np.ndarray], float] | None = None,
    ):
        """`write`: takes the sound, fp32 [n]. `sample_rate`: in Hz. `pauses`: None: cut nothing and add no silence.
        `gain_of`: the factor for a whole piece, fp32 [n]; None: the sound stays as it is and is not held back."""
        self._write = write
        self._rate = sample_rate
        self.pauses = pauses
        self._gain_of = gain_of
        self.new_file()
        # The current piece:
        self._edges = Edges("none", 0.0, sample_rate)
        self._pause = 0  # samples of silence before it
        self._start: int | None = None  # sample of this file that is its first, behind the pause; None: none yet
        self._held: list[np.ndarray] = []  # samples that wait to be measured
        self.seconds = 0.0  # of sound in all files together

    def new_file(self) -> None:
        self._written = 0  # samples of this file
        self._tail = 0  # silent samples at its end

    def begin(self, piece: Piece) -> None:
        self._edges = Edges("none", 0.0, self._rate)
        self._pause = 0
        self._start = None
        self._held = []
        if self.pauses:
            pause_s = self.pauses[piece.behind] if self._written else 0.0
            if piece.pause_s:  # the text asks for it; between paragraphs it can only lengthen a pause
                pause_s = piece.pause_s if piece.behind <= Break.SENTENCE else max(pause_s, piece.pause_s)
            self._pause = round(pause_s * self._rate)
            # Some silence is left so that no faint sound is cut. It counts as part of the pause.
            self._edges = Edges("both", min(TRIM_TO_S, min(self.pauses) / 2), self._rate)

    def add(self, samples: np.ndarray) -> None:
        """Add the next samples of the piece, fp32 [n]."""
        self._take(self._edges.push(samples))

    def end(self) -> tuple[float, float]:
        """End the piece. Returns when its speech begins and ends, in seconds of this file."""
        self._take(self._edges.finish())
        if self._gain_of and self._held:
            whole = np.concatenate(self._held)
            self._put(whole, self._gain_of(whole))
        start = self._written if self._start is None else self._start
        if self._edges.begin is None:  # no speech: it lengthens the silence behind the last one
            first = last = start - self._tail
        else:
            first, last = start + self._edges.begin, start + self._edges.end
        self._tail = self._written - last
        return first / self._rate, last / self._rate

    def silence(self, seconds: float) -> None:
        """Make the silence after the last piece this long, including silence that is already there."""
        self._out(np.zeros(max(0, round(seconds * self._rate) - self._tail), np.float32))

    def _take(self, samples: np.ndarray) -> None:
        if not len(samples):
            return
        if self._gain_of:
            self._held.append(samples)
        else:
            self._put(samples, 1.0)

    def _put(self, samples: np.ndarray, gain: float) -> None:
        if self._start is None:
            lead = self._edges.begin or 0
            self._out(np.zeros(max(0, self._pause - self._tail - lead), np.float32))
            self._start = self._written
        self._out(samples if gain == 1 else samples * np.float32(gain))

    def _out(self, samples: np.ndarray) -> None:
        if len(samples):
            self._write(samples)
            self._written += len(samples)
            self.seconds += len(samples) / self._rate


class Progress:
    """Shows when each chunk came, or estimated percent and time left. The estimate uses the words' letters and the
    length of earlier pieces. It stays below 100 % until the end, because a piece may take longer than estimated."""

    MOST = 0.99

    def __init__(self, pieces: list[str], speed: float, *, each_chunk: bool = False):
        self._speed = speed
        self._each_chunk = each_chunk
        self._weights = [sum(map(weight, words_of(piece))) for piece in pieces]
        self._rate = SpeechRate()
        self._number = 0  # of the current piece
        self._seconds = 0.0  # of that piece so far, at the model's own speed

    def __enter__(self) -> "Progress":
        self._start = time.monotonic()
        shown = "speaking {percentage:3.0f} %|{bar}| about {remaining} left, by the text's length{postfix}"
        hidden = True if self._each_chunk else None  # None: a bar in terminals only
        self._bar = tqdm(total=sum(self._weights), bar_format=shown, smoothing=0, leave=False, disable=hidden)
        self._bar.set_postfix_str(f"piece 1 of {len(self._weights)}")
        return self

    def skip(self, pieces: int) -> None:
        """So many of the first pieces were spoken before, which took none of this time."""
        self._number, self._start = pieces, time.monotonic()
        self._bar.reset(self._bar.total)
        self._bar.n = self._bar.initial = sum(self._weights[:pieces])

    def chunk(self, chunk: Chunk) -> None:
        if self._each_chunk:
            print(f"{1000 * (time.monotonic() - self._start):8.1f} ms  {len(chunk.codes)} frames", file=sys.stderr)
        self._seconds += self._speed * len(chunk.samples) / chunk.sample_rate
        self._show()

    def piece_ends(self) -> None:
        self._rate.learn(self._weights[self._number], self._seconds)
        self._number, self._seconds = self._number + 1, 0.0
        if self._number < len(self._weights):
            self._bar.set_postfix_str(f"piece {self._number + 1} of {len(self._weights)}", refresh=False)
            self._show()

    def _show(self) -> None:
        said = min(self._seconds / self._rate.seconds, self._weights[self._number])
        said = min(sum(self._weights[: self._number]) + said, self.MOST * self._bar.total)
        self._bar.update(said - self._bar.n)

    def __exit__(self, *_error: object) -> None:
        self._bar.close()


@dataclass
class Narrated:
    """What was spoken."""

    frames: int = 0  # of the model
    seconds: float = 0.0  # of sound, with pauses
    wall_s: float = 0.0  # seconds that speaking took
    ttfc_s: float | None = None  # the first piece's
    ends: list[str] = field(default_factory=list)  # how pieces ended, each kind once
    retries: int = 0  # how often a piece was spoken again

    def add(self, audio: Audio) -> None:
        if not self.ends:
            self.ttfc_s = audio.ttfc_s
        self.frames += len(audio.codes)
        self.retries += audio.attempts - 1
        if audio.finish_reason not in self.ends:
            self.ends.append(audio.finish_reason)


def narrate(
    engine: TTSEngine,
    pieces: Sequence[_P],
    after_s: float,
    request_of: Callable[[_P], SpeechRequest],
    binder: Binder,
    progress: Progress,
) -> Narrated:
    """Speak the pieces and join them in order. Twice as many are open at once as the engine has slots.

    `pieces`: each fits a slot. `after_s`: seconds of silence behind the last one. `request_of`: how to speak a piece.
    With retries a piece is heard only once it is whole. `binder`: joins them. Without pauses there is one piece, and it
    stays as the engine speaks it. Raises TTSError: a piece cannot be spoken, or its sound cannot be written."""
    told, began = Narrated(), time.monotonic()
    begun: _P | None = None

    def stream(piece: _P) -> ChunkStream:
        return ChunkStream(engine.begin(text_of(piece), request_of(piece)))

    def text_of(piece: _P) -> SpokenText:
        if binder.pauses is not None:
            return SpokenText(piece.text)
        return SpokenText(piece.text, piece.pause_s, after_s, ends_at_pause=after_s > 0)  # the only piece

    def hear(piece: _P, first: ChunkStream) -> Iterator[Chunk | Audio]:
        request = request_of(piece)
        if request.retries:
            yield from _heard_well(engine, text_of(piece), first, request)
        else:
            yield from first
            yield first.utterance.result()

    for piece, heard in in_order(pieces, stream, hear, 2 * engine.slots):
        if piece is not begun:
            begun = piece
            binder.begin(piece)
        if isinstance(heard, Chunk):
            progress.chunk(heard)
            binder.add(heard.samples)
        else:
            binder.end()
            told.add(heard)
            progress.piece_ends()
    if binder.pauses is not None:
        binder.silence(after_s)
    told.seconds, told.wall_s = binder.seconds, time.monotonic() - began
    return told


def _heard_well(
    engine: TTSEngine, text: SpokenText, first: ChunkStream, request: SpeechRequest
) -> Iterator[Chunk | Audio]:
    """A whole piece as one chunk. `first`: the first attempt, which has already begun."""
    begun = [first]

    def say(request: SpeechRequest) -> Audio:
        return (begun.pop().utterance if begun else engine.begin(text, request)).result()

    audio = say_well(say, request, engine.count_retry)
    yield Chunk(audio.samples, audio.codes, audio.sample_rate)
    yield audio
