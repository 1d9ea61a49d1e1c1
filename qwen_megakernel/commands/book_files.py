"""Where a spoken text goes: one file or one a chapter, and its subtitles."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from qwen_megakernel.commands.output import SpeechFile, write_stdout
from qwen_megakernel.commands.subtitles import Cue, write_subtitles


@dataclass
class Place:
    """Where sound goes, one file of it.

    Attributes:
        path: of the sound file; "-" for PCM16 on standard output.
        subtitles: path of its subtitles; None for none.
        cues: the subtitles so far.
    """

    path: str
    subtitles: str | None = None
    cues: list[Cue] = field(default_factory=list)


def numbered(path: str, count: int) -> list[str]:
    """Paths for so many chapters: of "a/book.wav" these are "a/book-01.wav", "a/book-02.wav" and so on."""
    place, digits = Path(path), max(2, len(str(count)))
    return [str(place.with_name(f"{place.stem}-{n:0{digits}}{place.suffix}")) for n in range(1, count + 1)]


class BookFiles:
    """A context manager. A file is at its place once it is whole; if the `with` block fails, the one that is being
    written is not left. Files that were whole before stay."""

    def __init__(self, places: Sequence[Place], rate: int, *, keep_partial: bool):
        """
        Args:
            places: one, or one a chapter.
            rate: in Hz.
            keep_partial: see `SpeechFile`. Subtitles are kept with whole files alone.
        """
        self._places, self._rate, self._keep_partial = list(places), rate, keep_partial
        self._number = 0  # of the place that is written
        self._begun = False  # a chapter
        self._stack = ExitStack()
        self._file: SpeechFile | None = None

    def __enter__(self) -> "BookFiles":
        self._open()
        return self

    def begin_chapter(self) -> bool:
        """What comes belongs to the next chapter. Is it in another file than the chapter before?

        Raises:
            RequestError: the file before, or its subtitles, cannot be written.
        """
        another = self._begun and len(self._places) > 1
        if another:
            self._finish()
            self._number += 1
            self._open()
        self._begun = True
        return another

    def mark_chapter(self, start: float, title: str) -> None:
        """The chapter's speech begins at a second of its file."""
        if self._file:
            self._file.mark_chapter(start, title)

    def write(self, pcm: bytes) -> None:
        """Append PCM16, little-endian."""
        if self._file:
            self._file.write(pcm)
        else:
            write_stdout(pcm)

    def add_cue(self, cue: Cue, *, goes_on: bool) -> None:
        """Add a subtitle of this chapter. `goes_on`: the one before lasts until its end instead."""
        cues = self._places[self._number].cues
        if goes_on:
            cues[-1] = replace(cues[-1], last=cue.last)
        else:
            cues.append(cue)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._finish()
            return
        try:
            self._stack.__exit__(kind, *rest)
        finally:
            if self._file and self._file.kept:
                print(f"kept    {self._file.path}: what was said so far", file=sys.stderr)

    def _open(self) -> None:
        place = self._places[self._number]
        if place.path != "-":
            self._file = self._stack.enter_context(SpeechFile(place.path, self._rate, keep_partial=self._keep_partial))

    def _finish(self) -> None:
        self._stack.close()
        place = self._places[self._number]
        if place.subtitles is not None:
            write_subtitles(place.subtitles, place.cues)
        place.cues = []
