"""The sound of a long text: pieces are spoken at once and heard in order, with pauses and equal loudness."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from loudness import integrated_loudness

from qwen_megakernel.commands.book_text import Break, Piece
from qwen_megakernel.engine.audio import Audio, Chunk
from qwen_megakernel.engine.utterance import ChunkStream
from qwen_megakernel.model.edges import SILENCE, Edges
from qwen_megakernel.speech.options import TRIM_TO_S

HIGHEST_PEAK = 10 ** (-1 / 20)
"""-1 dBFS: some decoders of compressed sound clip louder peaks."""


def in_order(
    pieces: Iterable[Piece],
    stream: Callable[[Piece], ChunkStream],
    hear: Callable[[Piece, ChunkStream], Iterator[Chunk | Audio]],
    ahead: int,
) -> Iterator[tuple[Piece, Chunk | Audio]]:
    """Speak many pieces at once. Closing the iterator cancels open pieces.

    Each chunk that comes out begins one more piece, so that the first chunk waits for no other piece.

    Args:
        stream: begins to speak a piece.
        hear: yields the piece's chunks as they are made, then its `Audio`.
        ahead: most pieces to have open at once.

    Yields:
        What `hear` yields for each piece, in the order of the pieces.

    Raises:
        TTSError: as `stream` and `hear`.
    """
    left, opened = iter(pieces), deque[tuple[Piece, ChunkStream]]()

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


class Leveller:
    """Gains that bring each piece to the same loudness.

    Attributes:
        held_down: number of pieces left quieter, because their peaks would exceed `HIGHEST_PEAK`.
    """

    def __init__(self, target: float, sample_rate: int):
        """`target`: loudness in LUFS, by ITU-R BS.1770. `sample_rate`: in Hz."""
        self._target = target
        self._rate = sample_rate
        self._gain = 1.0  # of the last piece that could be measured
        self.held_down = 0

    def gain(self, samples: np.ndarray) -> float:
        """`samples`: fp32 [n], a whole piece. A silent piece, or one below 0.4 s, gets the gain of the piece before.
        Returns the factor for these samples."""
        try:
            measured = integrated_loudness(samples, self._rate)
        except ValueError:  # too short for BS.1770's blocks
            measured = -np.inf
        if np.isfinite(measured):
            self._gain = 10 ** ((self._target - measured) / 20)
        peak = float(np.abs(samples).max(initial=0.0))
        if peak * self._gain <= HIGHEST_PEAK:
            return self._gain
        self.held_down += 1
        return HIGHEST_PEAK / peak


class Pauses(NamedTuple):
    """Seconds of silence before a piece, one value for each `Break` between it and the piece before."""

    clause: float
    sentence: float
    paragraph: float
    chapter: float


class Binder:
    """Joins pieces: cuts the silence at their ends and puts pauses between. A pause is exact to the sample, from the
    last audible sample of a piece to the first audible one of the next.

    The engine could cut the silence too. But its vocoder would then take each frame alone, which costs a third more
    time on a CPU.
    """

    def __init__(
        self,
        write: Callable[[np.ndarray], None],
        sample_rate: int,
        pauses: Pauses | None,
        leveller: Leveller | None = None,
    ):
        """`write`: takes the sound, fp32 [n]. `sample_rate`: in Hz. `pauses`: None: cut nothing and add no silence."""
        self._write = write
        self._rate = sample_rate
        self._pauses = pauses
        self._leveller = leveller
        self.new_file()
        # The current piece:
        self._edges: Edges | None = None
        self._pause = 0  # samples of silence before it; 0 also once they are there
        self._first: int | None = None  # its first sample that is not silent
        self._held: list[np.ndarray] = []  # samples that wait to be measured
        self.seconds = 0.0
        """Seconds of sound in all files together."""

    def new_file(self) -> None:
        self._written = 0  # samples of this file
        self._tail = 0  # silent samples at its end

    def begin(self, piece: Piece) -> None:
        self._first = None
        self._held = []
        if self._pauses:
            pause_s = self._pauses[piece.behind] if self._written else 0.0
            if piece.pause_s:  # the text asks for it; between paragraphs it can only lengthen a pause
                pause_s = piece.pause_s if piece.behind <= Break.SENTENCE else max(pause_s, piece.pause_s)
            self._pause = round(pause_s * self._rate)
            # Some silence is left so that no faint sound is cut. It counts as part of the pause.
            self._edges = Edges("both", min(TRIM_TO_S, min(self._pauses) / 2), self._rate)

    def add(self, samples: np.ndarray) -> None:
        """Add the next samples of the piece, fp32 [n]."""
        if self._edges:
            samples = self._edges.push(samples)
        self._take(samples)

    def end(self) -> tuple[float, float]:
        """End the piece. Returns when its speech begins and ends, in seconds of this file."""
        if self._edges:
            self._take(self._edges.finish())
        if self._leveller and self._held:
            whole = np.concatenate(self._held)
            self._put(whole, self._leveller.gain(whole))
        last = self._written - self._tail
        first = last if self._first is None else self._first
        return first / self._rate, last / self._rate

    def silence(self, seconds: float) -> None:
        """Make the silence after the last piece this long, including silence that is already there."""
        self._out(np.zeros(max(0, round(seconds * self._rate) - self._tail), np.float32))

    def _take(self, samples: np.ndarray) -> None:
        if not len(samples):
            return
        if self._leveller:
            self._held.append(samples)
        else:
            self._put(samples, 1.0)

    def _put(self, samples: np.ndarray, gain: float) -> None:
        loud = np.flatnonzero(np.abs(samples) > SILENCE)
        lead = int(loud[0]) if len(loud) else len(samples)
        self._out(np.zeros(max(0, self._pause - self._tail - lead), np.float32))
        self._pause = 0
        if len(loud):
            if self._first is None:
                self._first = self._written + lead
            self._tail = len(samples) - 1 - int(loud[-1])
        else:
            self._tail += len(samples)
        self._out(samples if gain == 1 else samples * np.float32(gain))

    def _out(self, samples: np.ndarray) -> None:
        if len(samples):
            self._write(samples)
            self._written += len(samples)
            self.seconds += len(samples) / self._rate
