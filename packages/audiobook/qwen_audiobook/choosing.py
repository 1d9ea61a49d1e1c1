"""Which chapters of a book are spoken, and how long they will take."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from qwen_audiobook.book import Book, Piece
from qwen_megakernel.commands.options import Pauses
from qwen_megakernel.errors import RequestError
from qwen_megakernel.speech.words import SpeechRate, weight, words_of

PREVIEW_S = 60.0  # of sound


def chapters_of(text: str) -> list[range]:
    """Read numbers of chapters, such as "3-7,12". Raises argparse's own error: they are none."""
    ranges = []
    for part in text.split(","):
        first, dash, last = (number.strip() for number in part.partition("-"))
        if not (first.isascii() and first.isdigit() and (last.isascii() and last.isdigit() or not dash)):
            raise argparse.ArgumentTypeError(f"expected numbers of chapters, such as 3-7,12, got {text!r}")
        ranges.append(range(int(first), int(last or first) + 1))
    return ranges


def chosen(book: Book, chapters: Sequence[range] | None, at_most_s: float | None, pauses: Pauses, speed: float) -> Book:
    """The book with these chapters, numbered from 1; None: all. They keep their numbers. `at_most_s`: expected seconds
    of sound after which it ends, at a sentence. Raises RequestError: the book has no such chapter."""
    pieces = book.pieces
    if chapters is not None:
        last = len(book.titles)
        for part in chapters:
            if not part or part.start < 1 or part.stop > last + 1:
                shown = f"{part.start}-{part.stop - 1}"
                raise RequestError(f"--chapters: the book has chapters 1 to {last}, got {shown}; see --list")
        numbers = {number for part in chapters for number in part}
        pieces = [piece for piece in pieces if piece.chapter + 1 in numbers]
    if at_most_s is not None:
        pieces = list(_beginning(pieces, at_most_s, pauses, speed))
    is_cut = pieces[-1:] != book.pieces[-1:]
    return replace(book, pieces=pieces, after_s=0.0 if is_cut else book.after_s)


def _beginning(pieces: Iterable[Piece], at_most_s: float, pauses: Pauses, speed: float) -> Iterator[Piece]:
    seconds = 0.0
    for piece in pieces:
        if seconds >= at_most_s:
            return
        seconds += expected_s([piece], pauses, speed)
        yield piece


def expected_s(pieces: Iterable[Piece], pauses: Pauses, speed: float) -> float:
    """Seconds of sound that the pieces will take, by the letters of their words."""
    rate = SpeechRate().seconds / speed
    return sum(
        rate * sum(map(weight, words_of(piece.text))) + max(pauses[piece.behind], piece.pause_s) for piece in pieces
    )


def listed_chapters(book: Book, pauses: Pauses, speed: float) -> Iterator[str]:
    """A line for each chapter, with its words and expected time, and one for all."""
    words = 0
    for chapter, group in groupby(book.pieces, lambda piece: piece.chapter):
        pieces = list(group)
        count = sum(len(words_of(piece.text)) for piece in pieces)
        words += count
        title = book.titles[chapter] or "(no title)"
        yield f"{chapter + 1:4}  {count:8,} words  {clock(expected_s(pieces, pauses, speed))}  {title}"
    yield f" all  {words:8,} words  {clock(expected_s(book.pieces, pauses, speed))}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, such as "1:02:03"."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
