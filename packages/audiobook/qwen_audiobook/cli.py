"""The options of `qwen-audiobook`: those of `qwen-megakernel speak`, and more for books."""

import argparse
import math
from pathlib import Path

from qwen_audiobook import __version__
from qwen_audiobook.choosing import chapters_of
from qwen_audiobook.lines import FOOTNOTES, MATTER
from qwen_megakernel.choices import MPEG4
from qwen_megakernel.commands.idle import Idle
from qwen_megakernel.commands.options import CommandParser, add_reading_options

_QUIETEST, _LOUDEST = -40.0, -5.0  # LUFS


def _has_no_tags(args: argparse.Namespace) -> bool:
    return args.output in (None, "-") or Path(args.output).suffix.lower() in ("", ".wav")


_TAG = (
    "is a tag, and neither WAV nor raw PCM has tags: name another file with --output, such as book.m4b, or leave the "
    "tag out"
)


def _holds_no_cover(args: argparse.Namespace) -> bool:
    return not (args.output or "").lower().endswith(MPEG4) and args.read_along is None


_COVER = "is a picture for .m4a and .m4b: name such a file with --output, or leave it out"
_RULES = (
    Idle("title", _has_no_tags, _TAG),
    Idle("author", _has_no_tags, _TAG),
    Idle("cover", _holds_no_cover, _COVER),
)


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="qwen-audiobook", description="Speak a book with Qwen3-TTS: chapters, subtitles, speakers, loudness."
    )
    parser.set_defaults(parser=parser, rules=_RULES)
    parser.add_argument("--version", action="version", version=f"qwen-audiobook {__version__}")
    add_reading_options(parser, "text, Markdown or EPUB", "--speakers and --voice")
    add = parser.add_argument
    add("--split", choices=("chapters",), help="write a file for each chapter, such as out-01.wav")
    add("--subtitles", metavar="PATH", help="write sentences and their times to this .srt or .vtt file")
    add("--read-along", metavar="PATH", help="write an EPUB with text and sound whose readers mark what is spoken")
    add("--speakers", action="store_true", help='a line that begins with "[ada] " is spoken by ada')
    about = "leave footnotes out, or read them at their chapter's end; default: %(default)s"
    add("--footnotes", choices=FOOTNOTES, default=FOOTNOTES[0], help=about)
    about = (
        "leave out contents, imprint, index and the like where an EPUB marks them, or read all; default: %(default)s"
    )
    add("--matter", choices=MATTER, default=MATTER[0], help=about)
    add("--chapters", metavar="3-7,12", type=chapters_of, help="speak only these, by their numbers in --list")
    add("--list", action="store_true", help="print the chapters with their words and expected times, and speak nothing")
    add("--preview", action="store_true", help="speak only the first minute")
    add("--quotes", metavar="NAME", help="the speaker, or voice of --voices, of what stands in quotation marks")
    add("--cover", metavar="PATH", help="a JPEG or PNG for .m4a and .m4b; default: the EPUB's own cover")
    add("--title", help="the book's title for the files' tags; default: the text's own")
    add("--author", help="the book's author for the files' tags; default: the text's own")
    add("--loudness", metavar="LUFS", type=loudness_of, help="give every piece this loudness, such as -19")
    add("-v", "--verbose", action="store_true", help="log more, such as what takes memory")
    return parser


def loudness_of(text: str) -> float:
    """Read a loudness in LUFS. Raises argparse's own error: it is none, or out of range."""
    try:
        loudness = float(text)
    except ValueError:
        loudness = math.nan
    if not _QUIETEST <= loudness <= _LOUDEST:
        raise argparse.ArgumentTypeError(
            f"expected a number of LUFS from {_QUIETEST:g} to {_LOUDEST:g}, such as -19, got {text!r}"
        )
    return loudness
