"""A book's pieces into its files: equal loudness, chapters and subtitles."""

from dataclasses import replace

import numpy as np
from loudness import integrated_loudness

from qwen_audiobook.book import Book, Piece
from qwen_audiobook.files import BookFiles, Cue
from qwen_audiobook.kept import KeptSpeech
from qwen_megakernel.commands import pieces
from qwen_megakernel.commands.narrate import Binder
from qwen_megakernel.commands.options import Pauses
from qwen_megakernel.model.pcm import pcm16

HIGHEST_PEAK = 10 ** (-1 / 20)  # -1 dBFS: some decoders of compressed sound clip louder peaks


class Leveller:
    """Gains that bring each piece to the same loudness."""

    def __init__(self, target: float, sample_rate: int):
        """`target`: loudness in LUFS, by ITU-R BS.1770. `sample_rate`: in Hz."""
        self._target = target
        self._rate = sample_rate
        self._gain = 1.0  # of the last piece that could be measured
        self.held_down = 0  # pieces left quieter, because their peaks would exceed `HIGHEST_PEAK`

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

    def told(self) -> list[str]:
        """A line about the pieces that were held down, if there are any."""
        if not self.held_down:
            return []
        quiet = f"{self.held_down} pieces stay below {self._target:g} LUFS"
        return [f"quiet   {quiet}, because their peaks are at -1 dBFS"]


class BookBinder(Binder):
    """Joins the pieces of a book. It begins a file for each chapter where there are several, marks chapters, and tells
    when each sentence is heard."""

    def __init__(
        self,
        files: BookFiles,
        book: Book,
        sample_rate: int,
        pauses: Pauses | None,
        leveller: Leveller | None,
        kept: KeptSpeech | None = None,
    ):
        """`sample_rate`: in Hz. `pauses`: None: there is one piece, and it stays as the engine speaks it. `kept`: keeps
        each piece's sound."""
        gain_of = None if leveller is None else leveller.gain
        super().__init__(lambda samples: files.write(pcm16(samples)), sample_rate, pauses, gain_of)
        self._files = files
        self._book = book
        self._piece: Piece | None = None
        self._ended: Piece | None = None  # the last piece that ended
        self._kept = kept
        self._sound: list[np.ndarray] = []  # of the current piece
        self.spoken = 0  # pieces that ended

    def begin(self, piece: pieces.Piece) -> None:
        assert isinstance(piece, Piece)
        begins_file = (self._piece is None or piece.chapter != self._piece.chapter) and self._files.begin_chapter()
        self._piece = piece
        if begins_file:  # with its first word: a pause between chapters lies between their files
            self.new_file()
            piece = replace(piece, pause_s=0.0)
        super().begin(piece)

    def add(self, samples: np.ndarray) -> None:
        if self._kept:
            self._sound.append(samples)
        super().add(samples)

    def add_spoken(self, piece: Piece, samples: np.ndarray) -> None:
        """Add a whole piece whose sound was kept, fp32 [n]."""
        self.begin(piece)
        super().add(samples)
        self._end()

    def end(self) -> tuple[float, float]:
        if self._kept and self._piece:
            self._kept.keep(self._piece, np.concatenate(self._sound or [np.zeros(0, np.float32)]))
            self._sound = []
        return self._end()

    def _end(self) -> tuple[float, float]:
        first, last = super().end()
        piece, before = self._piece, self._ended
        assert piece is not None
        if before is None or before.chapter != piece.chapter:
            self._files.mark_chapter(first, self._book.titles[piece.chapter] or str(piece.chapter + 1))
        cue = Cue(first, last, self._book.sentences[piece.sentence])
        self._files.add_cue(cue, goes_on=before is not None and before.sentence == piece.sentence)
        self._ended = piece
        self.spoken += 1
        return first, last
