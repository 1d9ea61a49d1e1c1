"""Where a spoken text goes: one file, or one file per chapter, and subtitles."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from qwen_megakernel.commands.output import SpeechFile, write_stdout
from qwen_megakernel.commands.subtitles import Cue, write_subtitles


@dataclass
class Place:
    """One sound file and its subtitles.

    Attributes:
        path: path of the sound file; "-" for PCM16 on standard output.
        subtitles: path of its subtitles; None for none.
        cues: the subtitles so far.
    """

    path: str
    subtitles: str | None = None
    cues: list[Cue] = field(default_factory=list)


def numbered(path: str, count: int) -> list[str]:
    """Paths for `count` chapters: "a/book.wav" becomes "a/book-01.wav", "a/book-02.wav" and so on."""
    place, digits = Path(path), max(2, len(str(count)))
    return [str(place.with_name(f"{place.stem}-{n:0{digits}}{place.suffix}")) for n in range(1, count + 1)]


class BookFiles:
    """A context manager that writes files. Each file appears at its place once it is whole. If the `with` block fails,
    the unfinished file is deleted; files that are whole stay."""

    def __init__(self, places: Sequence[Place], rate: int, *, keep_partial: bool):
        """`places`: one, or one per chapter. `rate`: sample rate in Hz. `keep_partial`: see `SpeechFile`. Subtitles are
        kept only with whole files."""
        self._places = places
        self._rate = rate
        self._keep_partial = keep_partial
        self._number = 0  # of the current place
        self._begun = False  # a chapter
        self._stack = ExitStack()
        self._file: SpeechFile | None = None

    def __enter__(self) -> "BookFiles":
        self._open()
        return self

    def begin_chapter(self) -> bool:
        """Begin the next chapter. Does it go into another file than the chapter before? Raises RequestError: the
        previous file, or its subtitles, cannot be written."""
        another = self._begun and len(self._places) > 1
        if another:
            self._finish()
            self._number += 1
            self._open()
        self._begun = True
        return another

    def mark_chapter(self, start: float, title: str) -> None:
        """Mark where the chapter's speech begins, in seconds of its file."""
        if self._file:
            self._file.mark_chapter(start, title)

    def write(self, pcm: bytes) -> None:
        """Append PCM16, little-endian."""
        if self._file:
            self._file.write(pcm)
        else:
            write_stdout(pcm)

    def add_cue(self, cue: Cue, *, goes_on: bool) -> None:
        """Add a subtitle of this chapter. `goes_on`: instead extend the one before to this one's end."""
        cues = self._places[self._number].cues
        if goes_on:
            cues[-1] = replace(cues[-1], last=cue.last)
        else:
            cues.append(cue)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
            return
        try:
            self._stack.__exit__(kind, error, traceback)
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
