"""Subtitles as SubRip (.srt) or WebVTT (.vtt). Packages for these also read and edit; writing takes few lines."""

import html
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qwen_megakernel.commands.output import check_writable, new_file
from qwen_megakernel.errors import RequestError

ENDINGS = (".srt", ".vtt")


@dataclass(frozen=True)
class Cue:
    """A subtitle.

    Attributes:
        first, last: when it is shown, in seconds.
        text: one line.
    """

    first: float
    last: float
    text: str


def check_subtitles(path: str) -> None:
    """Raises RequestError: the path's ending names no subtitle format, or nothing can be written there."""
    if Path(path).suffix.lower() not in ENDINGS:
        raise RequestError(
            f"--subtitles: {path!r} does not end in a format of subtitles: end it in {' or '.join(ENDINGS)}"
        )
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
    """The text of the subtitle file. `ending`: one of `ENDINGS`."""
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
