"""Options of `speak` that make a long text a book: pauses, files by chapter, subtitles, speakers, loudness."""

import argparse
import math
from pathlib import Path

from qwen_megakernel.commands.book_files import Place, numbered
from qwen_megakernel.commands.book_sound import Pauses
from qwen_megakernel.commands.book_text import Book
from qwen_megakernel.commands.options import voices_in
from qwen_megakernel.commands.output import check_writable
from qwen_megakernel.commands.subtitles import check_subtitles
from qwen_megakernel.errors import RequestError, TextError
from qwen_megakernel.model.voice import Voice

_SENTENCE_S = 0.45  # about the model's own pause between sentences
_LONGEST_S = 10.0
_QUIETEST, _LOUDEST = -40.0, -5.0  # LUFS


def add_book_options(parser: argparse._ActionsContainer) -> None:
    """Add these options."""
    pauses = ",".join(f"{_SENTENCE_S * times:g}" for times in (1, 2, 4))
    about = f"seconds of silence between pieces of a long text; default: {pauses}"
    parser.add_argument(
        "--pause", metavar="SENTENCE[,PARAGRAPH[,CHAPTER]]", type=_pauses_of, default=_pauses_of(pauses), help=about
    )
    parser.add_argument("--split", choices=("chapters",), help="write a file for each chapter, such as out-01.wav")
    parser.add_argument("--subtitles", metavar="PATH", help="write sentences and their times to this .srt or .vtt file")
    parser.add_argument("--speakers", action="store_true", help='a line that begins with "[ada] " is spoken by ada')
    parser.add_argument("--voices", metavar="DIR", type=Path, help="saved voices for --speakers (Base)")
    about = "give every piece this loudness, such as -19"
    parser.add_argument("--loudness", metavar="LUFS", type=_loudness_of, help=about)


def _pauses_of(text: str) -> Pauses:
    """Read pauses. A missing pause is twice the one before. A clause's pause is a third of a sentence's."""
    try:
        seconds = [float(part) for part in text.split(",")]
    except ValueError:
        seconds = []
    if not 1 <= len(seconds) <= 3 or not all(0 <= s <= _LONGEST_S for s in seconds):
        raise argparse.ArgumentTypeError(
            f"expected one to three numbers of seconds from 0 to {_LONGEST_S:g}, such as 0.45,0.9,1.8, got {text!r}"
        )
    while len(seconds) < 3:
        seconds.append(min(_LONGEST_S, 2 * seconds[-1]))
    return Pauses(seconds[0] / 3, *seconds)


def _loudness_of(text: str) -> float:
    try:
        loudness = float(text)
    except ValueError:
        loudness = math.nan
    if not _QUIETEST <= loudness <= _LOUDEST:
        raise argparse.ArgumentTypeError(
            f"expected a number of LUFS from {_QUIETEST:g} to {_LOUDEST:g}, such as -19, got {text!r}"
        )
    return loudness


def check_book_options(args: argparse.Namespace, output: str | None) -> dict[str, Voice]:
    """Make the checks that need neither text nor model, and load the voices of --voices.

    Args:
        output: as `checked_output` returns it.

    Returns:
        Saved voices by their names.

    Raises:
        RequestError: the options do not go together, or a value is out of range.
        VoiceError: a file in --voices is no voice.
    """
    if args.split and output in ("-", None):
        raise RequestError("--split chapters writes a file for each chapter: name them with --output, such as book.wav")
    if args.split and args.play:
        raise RequestError("--split chapters writes several files, and --play plays one: give one of the two")
    if args.subtitles is not None:
        check_subtitles(args.subtitles)
    if args.voices is not None and not args.speakers:
        raise RequestError("--voices has the voices for --speakers: give both")
    return voices_in(args.voices)


def places_of(args: argparse.Namespace, output: str, book: Book) -> list[Place]:
    """The checked places where the book's sound goes. Raises TextError: there is nothing to say. Raises RequestError:
    one of them cannot be written."""
    if not book.pieces:
        raise TextError("the text has nothing to speak")
    if not args.split:
        return [Place(output, args.subtitles)]
    count = len(book.titles)
    subtitles = [None] * count if args.subtitles is None else numbered(args.subtitles, count)
    places = [Place(*paths) for paths in zip(numbered(output, count), subtitles, strict=True)]
    for place in places:
        check_writable("--output", place.path)
        if place.subtitles is not None:
            check_subtitles(place.subtitles)
    return places
