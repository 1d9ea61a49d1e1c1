"""Where a spoken text goes: one file, or one per chapter, and subtitles as SubRip (.srt) or WebVTT (.vtt). Packages for
subtitles also read and edit; writing takes few lines."""

import html
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qwen_megakernel.commands.output import SpeechFile, check_writable, new_file, write_stdout
from qwen_megakernel.errors import RequestError

SUBTITLES = (".srt", ".vtt")


@dataclass(frozen=True)
class Cue:
    """A subtitle."""

    first: float  # when it is shown, in seconds
    last: float
    text: str  # one line


def check_subtitles(path: str) -> None:
    """Raises RequestError: the path's ending names no subtitle format, or nothing can be written there."""
    if Path(path).suffix.lower() not in SUBTITLES:
        why = f"{path!r} does not end in a format of subtitles"
        raise RequestError(f"--subtitles: {why}: end it in {' or '.join(SUBTITLES)}")
    check_writable("--subtitles", path)


def write_subtitles(path: str, cues: Iterable[Cue]) -> None:
    """Write subtitles. The file appears at its place once it is whole. Raises RequestError: the file cannot be
    written."""
    try:
        with new_file(Path(path).resolve()) as file:  # a link's target, so that the link stays
            file.write(text_of(cues, Path(path).suffix.lower()).encode())
    except OSError as error:
        raise RequestError(f"--subtitles {path}: {error.strerror or error}; name another place") from None


def text_of(cues: Iterable[Cue], ending: str) -> str:
    """The text of the subtitle file. `ending`: one of `SUBTITLES`."""
    blocks = ["WEBVTT\n"] if ending == ".vtt" else []
    mark = "." if ending == ".vtt" else ","
    for number, cue in enumerate(cues, 1):
        # SubRip has no escapes, and players recognise a line of times by its arrow.
        text = html.escape(cue.text, quote=False) if ending == ".vtt" else cue.text.replace("-->", "→")
        blocks.append(f"{number}\n{_time(cue.first, mark)} --> {_time(cue.last, mark)}\n{text}\n")
    return "\n".join(blocks)


def _time(seconds: float, mark: str) -> str:
    whole, ms = divmod(round(1000 * seconds), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{mark}{ms:03}"


@dataclass
class Place:
    """One sound file and its subtitles."""

    path: str  # "-" for PCM16 on standard output
    subtitles: str | None = None  # path of its subtitles
    tags: Mapping[str, str] = field(default_factory=dict)  # of the sound file
    cues: list[Cue] = field(default_factory=list)  # the subtitles so far


def tags_of(book: Mapping[str, str], chapter: tuple[int, str] | None = None) -> dict[str, str]:
    """The tags of a sound file. `book`: its "title", "author" and "language", as far as they are known. `chapter`:
    number and title of the one that the file holds; None: it holds all."""
    known = {"artist": book.get("author"), "album": book.get("title"), "language": book.get("language")}
    if chapter is None:
        known["title"] = book.get("title")
    elif book:
        known |= {"title": chapter[1], "track": str(chapter[0])}
    return {name: value for name, value in known.items() if value}


def numbered(path: str, count: int) -> list[str]:
    """Paths for `count` chapters: "a/book.wav" becomes "a/book-01.wav", "a/book-02.wav" and so on."""
    place, digits = Path(path), max(2, len(str(count)))
    return [str(place.with_name(f"{place.stem}-{n:0{digits}}{place.suffix}")) for n in range(1, count + 1)]


class BookFiles:
    """A context manager that writes files. Each file appears at its place once it is whole. If the `with` block fails,
    the unfinished file is deleted; files that are whole stay."""

    def __init__(self, places: Sequence[Place], rate: int, *, keep_partial: bool, cover: bytes | None = None):
        """`places`: one, or one per chapter. `rate`: sample rate in Hz. `keep_partial`, `cover`: see `SpeechFile`.
        Subtitles are kept only with whole files."""
        self._places = places
        self._rate = rate
        self._keep_partial = keep_partial
        self._cover = cover
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

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self._finish()
        else:
            self._stack.__exit__(kind, *error)

    def _open(self) -> None:
        place = self._places[self._number]
        if place.path != "-":
            keep, cover = self._keep_partial, self._cover
            file = SpeechFile(place.path, self._rate, keep_partial=keep, long=True, tags=place.tags, cover=cover)
            self._file = self._stack.enter_context(file)

    def _finish(self) -> None:
        self._stack.close()
        place = self._places[self._number]
        if place.subtitles is not None:
            write_subtitles(place.subtitles, place.cues)
