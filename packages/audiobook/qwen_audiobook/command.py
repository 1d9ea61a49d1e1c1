"""`qwen-audiobook`: a book in, sound files and subtitles out."""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from qwen_audiobook.binding import BookBinder, Leveller
from qwen_audiobook.book import Book, Piece, check_speakers, read_book
from qwen_audiobook.choosing import PREVIEW_S, chosen, clock, expected_s, listed_chapters
from qwen_audiobook.cover import check_cover, cover_file
from qwen_audiobook.files import BookFiles, Place, check_subtitles, numbered, tags_of
from qwen_audiobook.kept import KeptSpeech, digest_of
from qwen_audiobook.lines import Markdown
from qwen_audiobook.read_along import check_read_along, write_read_along
from qwen_audiobook.source import Source, read_source
from qwen_megakernel import TTSEngine
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.choices import MPEG4, OUT
from qwen_megakernel.commands.narrate import narrate
from qwen_megakernel.commands.options import check_voice, shown, voices_in
from qwen_megakernel.commands.output import check_writable, play
from qwen_megakernel.commands.speak import (
    check_not_blank,
    check_words,
    checked,
    ended_like_ctrl_c,
    fitting,
    front_end_of,
    joined,
    load,
    make_voice,
    progress_of,
    report,
)
from qwen_megakernel.errors import LanguageError, RequestError
from qwen_megakernel.model.conditioning import AUTO
from qwen_megakernel.model.voice import Voice
from qwen_megakernel.speech.options import RequestOptions
from qwen_megakernel.speech.request import SpeechRequest
from spoken_text.languages import find_language, listed

_WORTH_TELLING_S = 60.0  # of sound


def narrate_book(args: argparse.Namespace) -> int:
    """Run the command. Returns the process's exit code. Raises TTSError: a line for people."""
    source = Source(Markdown(args.text)) if args.text is not None else read_source(args.file, args.matter)
    check_not_blank(args, not any(line.text.strip() for line in source.lines))
    options, output = checked(args)
    voices = _check_book_options(args, output)
    cover = _cover_of(args, source)
    if args.ref_audio is None and not (args.speakers or args.list):
        check_voice(Checkpoint.open(args.model).config.variant, options)  # before the model is loaded
    whole = _read(args, source, options)
    check_words(whole.pieces)
    book = chosen(whole, args.chapters, PREVIEW_S if args.preview else None, args.pause, args.speed or 1.0)
    if args.list:
        print(shown("\n".join(listed_chapters(book, args.pause, args.speed or 1.0)), keep="\n"))
        return 0
    if (seconds := expected_s(book.pieces, args.pause, args.speed or 1.0)) > _WORTH_TELLING_S:
        count = len({piece.chapter for piece in book.pieces})
        print(f"book    {count} chapters, about {clock(seconds)} of sound", file=sys.stderr)
    with ExitStack() as stack:
        stack.enter_context(ended_like_ctrl_c())
        path = output if output is not None else str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / OUT)
        given_tags = {"title": args.title, "author": args.author}
        tags = source.tags | {name: value for name, value in given_tags.items() if value is not None}
        places = _places_of(args, path, book, tags)
        kept = _kept(args, output, options, voices, book)
        if kept:
            stack.enter_context(kept)
            options["seed"] = kept.seed if kept.seed is not None else options["seed"]
            args.threads = args.threads or kept.threads
        with load(args, [options.get("voice"), *voices.values()], len(book.pieces)) as engine:
            make_voice(args, engine, options)
            requests = _Requests(engine, options, voices)
            pieces = requests.pieces(book.pieces)
            # A text of one piece stays as the engine speaks it.
            pauses = args.pause if len(pieces) > 1 or _by_sentence(args) else None
            leveller = None if args.loudness is None else Leveller(args.loudness, engine.sample_rate)
            if kept:
                kept.begin(options["seed"], engine.threads)
            with (
                BookFiles(places, engine.sample_rate, keep_partial=args.keep_partial, cover=cover) as files,
                progress_of(args, pieces) as progress,
            ):
                binder = BookBinder(files, book, engine.sample_rate, pauses, leveller, kept)
                try:
                    for piece, sound in zip(pieces, kept.spoken(pieces) if kept else (), strict=False):
                        binder.add_spoken(piece, sound)
                    before = binder.spoken
                    progress.skip(before)
                    told = narrate(engine, pieces[before:], book.after_s, requests.of, binder, progress)
                except BaseException:
                    if kept:
                        where = f"stopped behind piece {binder.spoken} of {len(pieces)}, seed {options['seed']}"
                        print(f"{where}; run the same command again to go on", file=sys.stderr)
                    raise
            wrote = [name for place in places for name in (place.path, place.subtitles) if name is not None]
            if args.read_along is not None:
                write_read_along(args.read_along, book, places, tags, cover)
                wrote.append(args.read_along)
            more = leveller.told() if leveller else []
            more += [f"kept    {before} pieces were spoken before"] if before else []
            report(args, wrote if output else [], engine, told, options, more)
        if args.play:
            play(Path(path))
    return 0


def _read(args: argparse.Namespace, source: Source, options: RequestOptions) -> Book:
    """The book in pieces. The language that it names is put into the options if they name none."""
    told = source.tags.get("language")
    front_end = front_end_of(args.model, options, source.lines, told).of_book(source.markup)
    if told and options.get("language") in (None, AUTO):
        known = Checkpoint.open(args.model).config.talker.named_languages
        try:
            options["language"] = find_language(told, known)
        except LanguageError:
            why = f"the book is in {told!r}, which the model does not have: {listed(known)}"
            print(shown(f"text    {why}"), file=sys.stderr)
    return read_book(
        source.lines,
        front_end,
        by_sentence=_by_sentence(args),
        speakers=args.speakers,
        footnotes=args.footnotes,
        scene_s=(args.pause.paragraph + args.pause.chapter) / 2,
        quotes=args.quotes,
    )


def _by_sentence(args: argparse.Namespace) -> bool:
    """Must the time of each sentence be known?"""
    return args.subtitles is not None or args.read_along is not None


def _kept(
    args: argparse.Namespace, output: str | None, options: RequestOptions, voices: dict[str, Voice], book: Book
) -> KeptSpeech | None:
    """Where the speech of a book of several pieces is kept; None: the sound goes into no file, or nothing can be kept
    here. Raises RequestError: another process speaks it."""
    if output in (None, "-") or len(book.pieces) < 2 or Path(output).exists() and not Path(output).is_file():
        return None
    given = {name: value for name, value in options.items() if name != "seed" or args.seed is not None}
    try:
        return KeptSpeech(output, digest_of(args, given, voices), book.pieces)
    except OSError as error:
        print(f"warning no speech is kept for another run: {error}; XDG_CACHE_HOME names a folder", file=sys.stderr)
        return None


def _check_book_options(args: argparse.Namespace, output: str | None) -> dict[str, Voice]:
    """Make the checks that need neither text nor model, and load the voices of --voices. `output`: as `checked_output`
    returns it. Returns saved voices by their names. Raises RequestError: the options do not go together, or a value is
    out of range. Raises VoiceError: a file in --voices is no voice."""
    if args.split and output in ("-", None):
        raise RequestError("--split chapters writes a file for each chapter: name them with --output, such as book.wav")
    if args.split and args.play:
        raise RequestError("--split chapters writes several files, and --play plays one: give one of the two")
    if args.subtitles is not None:
        check_subtitles(args.subtitles)
    if args.read_along is not None:
        check_read_along(args.read_along, output)
    if args.voices is not None and not (args.speakers or args.quotes or args.voice):
        raise RequestError(
            "--voices has the voices for --speakers, or the one that --voice or --quotes names: give both"
        )
    return voices_in(args.voices)


def _cover_of(args: argparse.Namespace, source: Source) -> bytes | None:
    """The picture for the sound file: that of --cover, else the book's own. Raises RequestError: the file of --cover is
    none."""
    if args.cover is not None:
        return cover_file(args.cover)
    holds_one = (args.output or "").lower().endswith(MPEG4) or args.read_along is not None
    if source.cover is None or not holds_one:
        return None
    if why := check_cover(source.cover):
        print(f"warning the book's cover is left out: {why}", file=sys.stderr)
        return None
    return source.cover


def _places_of(args: argparse.Namespace, output: str, book: Book, tags: dict[str, str]) -> list[Place]:
    """The checked places where the book's sound goes. `tags`: of the whole book. Raises RequestError: one of them
    cannot be written."""
    if not args.split:
        return [Place(output, args.subtitles, tags_of(tags))]
    count = len(book.titles)
    subtitles = [None] * count if args.subtitles is None else numbered(args.subtitles, count)
    each = [tags_of(tags, (n, title or str(n))) for n, title in enumerate(book.titles, 1)]
    all_places = [Place(*parts) for parts in zip(numbered(output, count), subtitles, each, strict=True)]
    places = [all_places[chapter] for chapter in sorted({piece.chapter for piece in book.pieces})]
    for place in places:
        check_writable("--output", place.path)
        if place.subtitles is not None:
            check_subtitles(place.subtitles)
    return places


@dataclass
class _Requests:
    _engine: TTSEngine
    _options: RequestOptions  # for pieces that name no speaker
    _voices: dict[str, Voice]  # saved ones, by the names that pieces may use

    def pieces(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces, checked and cut to fit a slot. Raises SpeakerError: one names an unknown speaker. Raises
        RequestError: as `TTSEngine.submit`."""
        base = self._engine.variant == "base"
        none = "name the folder of saved voices with --voices" if base else "this checkpoint has no named speakers"
        check_speakers(pieces, [*self._engine.speakers, *self._voices], none)
        pieces = fitting(self._engine, pieces, self.of)
        if len(pieces) > 1:
            self._options = joined(self._options)
        return pieces

    def of(self, piece: Piece) -> SpeechRequest:
        """The request for one piece. A checkpoint's speaker takes precedence over a saved voice of the same name."""
        who: RequestOptions = {}
        if piece.speaker in self._engine.speakers:
            who = {"speaker": piece.speaker, "voice": None}
        elif piece.speaker is not None:
            who = {"speaker": None, "voice": self._voices[piece.speaker]}
        check_voice(self._engine.variant, self._options | who)
        return self._engine.request(**self._options | who)
