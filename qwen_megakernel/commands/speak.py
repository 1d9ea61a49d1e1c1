"""`qwen-megakernel speak`: text in, sound out."""

import argparse
import logging
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from qwen_megakernel import TTSEngine
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.choices import DEMO, DEMO_NOTICE, OUT
from qwen_megakernel.commands.book_files import BookFiles, Place, check_subtitles, numbered, tags_of
from qwen_megakernel.commands.book_lines import Markdown
from qwen_megakernel.commands.book_source import Source, read_source
from qwen_megakernel.commands.book_text import MAX_PIECE_CHARS, Book, Piece, check_speakers, read_book
from qwen_megakernel.commands.narrate import Narrated, Progress, narrate
from qwen_megakernel.commands.options import (
    check_voice,
    engine_options,
    shown,
    slots_of,
    voice_options,
    voices_in,
)
from qwen_megakernel.commands.output import check_writable, checked_output, play
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.errors import LanguageError, RequestError, TextError
from qwen_megakernel.model.conditioning import AUTO
from qwen_megakernel.model.voice import Voice, text_of
from qwen_megakernel.speech.options import RequestOptions
from qwen_megakernel.speech.request import SpeechRequest
from spoken_text.cutting import split_evenly
from spoken_text.finder import Candidates, Conversation, language_of
from spoken_text.front_end import TextFrontEnd
from spoken_text.languages import find_language, listed
from spoken_text.spoken_text import SpokenText

log = logging.getLogger(__name__)

_LINES_TO_TELL = 200  # of a book tell its language
_POSITIONS = 1024
"""Positions of a slot if there are several: room for one piece. A transcribed reference may need more."""
WAIT_S = 3600.0  # for a slot: nobody listens while a file is made


def speak(args: argparse.Namespace) -> int:
    if args.list_speakers:
        return _list_speakers(args.model)
    source = Source(Markdown(args.text)) if args.text is not None else read_source(args.file)
    if not any(line.text.strip() for line in source.lines):
        where = "the text" if args.file in (None, "-") else f"the text of --file {args.file}"
        raise RequestError(f"{where} is blank; give it with --text, --file or on standard input")
    options = voice_options(args, "speak")
    if args.save_voice is not None and args.ref_audio is None:
        raise RequestError("--save-voice keeps the voice of --ref-audio; give both")
    output = checked_output(args)
    if args.keep_partial and output in ("-", None):
        raise RequestError("--keep-partial keeps a file; name it with --output")
    if options.get("retries") and (output == "-" or args.stream):
        why = "says a piece again before anybody hears it, so it needs a file"
        raise RequestError(f"--retries {why}: leave out --stream, and name the file with --output")
    if args.save_voice is not None:
        check_writable("--save-voice", args.save_voice)
    voices = _check_book_options(args, output)
    if args.ref_audio is None and not args.speakers:
        check_voice(Checkpoint.open(args.model).config.variant, options)  # before the model is loaded
    front_end = _front_end(args.model, options, source)
    by_sentence = args.subtitles is not None
    book = read_book(source.lines, front_end, by_sentence=by_sentence, speakers=args.speakers, footnotes=args.footnotes)
    # One seed for all pieces, so that the printed seed reproduces the whole text.
    given = options.get("seed")
    options["seed"] = seed = secrets.randbits(31) if given is None else given
    with ExitStack() as stack:
        stack.enter_context(ended_like_ctrl_c())
        path = output if output is not None else str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / OUT)
        given_tags = {"title": args.title, "author": args.author}
        tags = source.tags | {name: value for name, value in given_tags.items() if value is not None}
        places = _places_of(args, path, book, tags)
        with _load(args, [options.get("voice"), *voices.values()], len(book.pieces)) as engine:
            if args.ref_audio is not None:
                options["voice"] = voice = engine.create_voice(args.ref_audio, args.ref_text)
                if args.save_voice is not None:
                    voice.save(args.save_voice)
            requests = _Requests(engine, options, voices)
            pieces = requests.pieces(book.pieces)
            texts, speed = [piece.text for piece in pieces], options.get("speed") or 1.0
            progress = Progress(texts, speed, each_chunk=args.stream)
            # A text of one piece stays as the engine speaks it.
            pauses = args.pause if len(pieces) > 1 or args.subtitles is not None else None
            if pauses is None and args.pause != args.parser.get_default("pause"):
                log.warning("--pause changes nothing: the text is one piece")
            with BookFiles(places, engine.sample_rate, keep_partial=args.keep_partial) as files, progress:
                told = narrate(engine, book, pieces, requests.of, files, progress, pauses, args.loudness)
            _report(args, places if output else [], engine, told, seed)
        if args.play:
            play(Path(path))
    return 0


def _front_end(model: str, options: RequestOptions, source: Source) -> TextFrontEnd:
    """What makes spoken text of the source, by options that are taken out of these. If no language is named, it is the
    one that the source names for itself, or one that is found, of those that the model has. Raises TextError: see
    `TextFrontEnd`. Raises CheckpointError: see `Checkpoint.open`."""
    normalize, lexicon = options.pop("normalize", None) or "off", options.pop("lexicon", None)
    language, languages = options.get("language"), None
    if language in (None, AUTO) and (normalize != "off" or lexicon):
        languages, language = Checkpoint.open(model).config.talker.named_languages, source.tags.get("language", AUTO)
        with suppress(LanguageError):  # the model does not have it
            language = find_language(language, languages)
        if language == AUTO:
            text = "\n".join(line.text for line in islice(source.lines, _LINES_TO_TELL))
            language = language_of(text, Candidates.of(languages))
    return TextFrontEnd(language, normalize, lexicon, languages=languages).in_conversation(Conversation())


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
    if args.voices is not None and not (args.speakers or args.voice):
        raise RequestError("--voices has the voices for --speakers, or the one that --voice names: give both")
    return voices_in(args.voices)


def _places_of(args: argparse.Namespace, output: str, book: Book, tags: dict[str, str]) -> list[Place]:
    """The checked places where the book's sound goes. `tags`: of the whole book. Raises TextError: there is nothing to
    say. Raises RequestError: one of them cannot be written."""
    if not book.pieces:
        raise TextError("the text has nothing to speak: it needs words besides pauses and signs")
    if not args.split:
        return [Place(output, args.subtitles, tags_of(tags))]
    count = len(book.titles)
    subtitles = [None] * count if args.subtitles is None else numbered(args.subtitles, count)
    each = [tags_of(tags, (n, title or str(n))) for n, title in enumerate(book.titles, 1)]
    places = [Place(*parts) for parts in zip(numbered(output, count), subtitles, each, strict=True)]
    for place in places:
        check_writable("--output", place.path)
        if place.subtitles is not None:
            check_subtitles(place.subtitles)
    return places


def _load(args: argparse.Namespace, voices: Sequence[Voice | str | None], pieces: int) -> TTSEngine:
    """An engine with a slot for each piece, but no more slots than suit the device."""
    slots = min(slots_of(args), pieces)
    heard = [voice for voice in voices if isinstance(voice, Voice) and voice.ref_codes is not None]
    transcribed = text_of(args.ref_text) is not None or bool(heard)
    options = engine_options(args, max_streams=slots, max_queue=2 * slots, queue_timeout=WAIT_S)
    if slots > 1 and not transcribed and args.max_positions == EngineOptions.max_positions:
        options = replace(options, max_positions=_POSITIONS)
    return TTSEngine.load(args.model, options)


class _Requests:
    def __init__(self, engine: TTSEngine, options: RequestOptions, voices: dict[str, Voice]):
        """`options`: for pieces that name no speaker. `voices`: saved voices, by the names that pieces may use."""
        self._engine = engine
        self._options = options
        self._voices = voices

    def pieces(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces, checked and cut to fit a slot. With several pieces, joining them cuts silence, not `trim`. Raises
        RequestError: as `TTSEngine.submit`."""
        base = self._engine.variant == "base"
        none = "name the folder of saved voices with --voices" if base else "this checkpoint has no named speakers"
        check_speakers(pieces, [*self._engine.speakers, *self._voices], none)
        fitting: list[Piece] = []  # those that do not fit a slot are cut again
        for piece in pieces:
            parts = self._engine.parts(SpokenText(piece.text), self.of(piece))
            fitting.extend(piece.cut(part.text for part in parts))
        if len(fitting) > 1 and self._options.get("silence_s") is not None:
            log.warning("silence_s changes nothing in a text of several pieces: --pause says how far apart they are")
        if len(fitting) > 1:  # PyTorch's last bits of samples would depend on how pieces are cut into pushes
            self._options = self._options | {"reproducible": True, "trim": "none"}
        return fitting

    def of(self, piece: Piece) -> SpeechRequest:
        """The request for one piece. A checkpoint's speaker takes precedence over a saved voice of the same name."""
        who: RequestOptions = {}
        if piece.speaker in self._engine.speakers:
            who = {"speaker": piece.speaker, "voice": None}
        elif piece.speaker is not None:
            who = {"speaker": None, "voice": self._voices[piece.speaker]}
        check_voice(self._engine.variant, self._options | who)
        return self._engine.request(**self._options | who)


def parts_of(engine: TTSEngine, text: str, request: SpeechRequest) -> list[SpokenText]:
    """Cut a text at sentence ends into parts that are spoken one after the other. Raises RequestError: as
    `TTSEngine.parts`."""
    if not text.strip():
        raise TextError("text must not be blank")
    request = request.for_text(text)
    return [part for piece in split_evenly(text, MAX_PIECE_CHARS) for part in engine.parts(piece, request)]


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM and a closed terminal like Ctrl-C, so that they leave no half file either."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(args: argparse.Namespace, places: list[Place], engine: TTSEngine, told: Narrated, seed: int) -> None:
    lines = []
    for place in places:
        lines.append(f"wrote   {'PCM16 on standard output' if place.path == '-' else Path(place.path).resolve()}")
        if place.subtitles is not None:
            lines.append(f"wrote   {Path(place.subtitles).resolve()}")
    rtf = told.wall_s / told.seconds if told.seconds else float("inf")
    ttfc = "none" if told.ttfc_s is None else f"{1000 * told.ttfc_s:.1f} ms"
    length = f"{told.seconds:.2f} s, {told.frames} frames"
    lines.append(f"speech  {length}, ended by: {', '.join(told.ends)}, seed {seed}")
    lines.append(f"speed   TTFC {ttfc}, RTF {rtf:.3f} ({engine.backend} backend)")
    if told.retries:
        lines.append(f"retries {told.retries}, because speech did not find its end")
    if told.held_down:
        quiet = f"{told.held_down} pieces stay below {args.loudness:g} LUFS"
        lines.append(f"quiet   {quiet}, because their peaks are at -1 dBFS")
    if args.model == DEMO:
        lines.append(f"voice   {DEMO_NOTICE}")
    print("\n".join(lines), file=sys.stderr if args.output == "-" else sys.stdout)


def _list_speakers(model: str) -> int:
    config = Checkpoint.open(model).config
    talker = config.talker
    print(f"{model}: {config.variant}")
    for name in talker.speakers:
        same = talker.same_speaker(name)
        about = f"another name of {same}" if same else talker.dialects.get(name)
        print(shown(f"  {name} ({about})" if about else f"  {name}"))
    if config.variant == "base":
        print("  no named speakers: clone a voice with --ref-audio")
    if config.variant == "voice_design":
        print("  no named speakers: describe the voice with --instruct")
    print(shown("languages: " + listed((AUTO, *talker.named_languages))))
    if model == DEMO:
        print(f"note: {DEMO_NOTICE}")
    return 0
