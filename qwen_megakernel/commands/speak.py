"""`qwen-megakernel speak`: text in, sound out. The command of qwen-audiobook is made of the same parts."""

import argparse
import logging
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from qwen_megakernel import TTSEngine
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.choices import AUDIOBOOK, DEMO, DEMO_NOTICE, MPEG4, OUT
from qwen_megakernel.commands.narrate import Binder, Narrated, Progress, narrate
from qwen_megakernel.commands.options import (
    check_voice,
    engine_options,
    shown,
    slots_of,
    voice_options,
)
from qwen_megakernel.commands.output import check_writable, checked_output, opened, play
from qwen_megakernel.commands.pieces import MAX_PIECE_CHARS, Break, Line, Piece, lines_of, read_pieces
from qwen_megakernel.commands.text_input import read_text
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.errors import LanguageError, RequestError, TextError
from qwen_megakernel.model.conditioning import AUTO
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.model.voice import Voice, text_of
from qwen_megakernel.speech.options import RequestOptions
from qwen_megakernel.speech.request import OF_TEXT, SpeechRequest, text_front_end
from spoken_text.cutting import split_evenly
from spoken_text.finder import Candidates, Conversation, language_of
from spoken_text.front_end import TextFrontEnd
from spoken_text.languages import find_language, listed
from spoken_text.spoken_text import SpokenText

log = logging.getLogger(__name__)
_P = TypeVar("_P", bound=Piece)

_LINES_TO_TELL = 200  # of a text tell its language
_POSITIONS = 1024
"""Positions of a slot if there are several: room for one piece. A transcribed reference may need more."""
WAIT_S = 3600.0  # for a slot: nobody listens while a file is made


def speak(args: argparse.Namespace) -> int:
    if args.list_speakers:
        return _list_speakers(args.model)
    text = args.text if args.text is not None else read_text(args.file)
    check_not_blank(args, not text.strip())
    options, output = checked(args)
    if args.voices is not None and not args.voice:
        raise RequestError("--voices has the voice that --voice names: give both")
    if args.ref_audio is None:
        check_voice(Checkpoint.open(args.model).config.variant, options)  # before the model is loaded
    pieces, after_s = read_pieces(text, front_end_of(args.model, options, lines_of(text)))
    check_words(pieces)
    if (output or "").lower().endswith(MPEG4) and any(piece.behind is Break.CHAPTER for piece in pieces[1:]):
        log.warning("the file gets no chapter marks: %s makes them", AUDIOBOOK)
    with ExitStack() as stack:
        stack.enter_context(ended_like_ctrl_c())
        path = output if output is not None else str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / OUT)
        with load(args, [options.get("voice")], len(pieces)) as engine:
            make_voice(args, engine, options)
            request = engine.request(**options)
            pieces = fitting(engine, pieces, lambda _piece: request)
            if len(pieces) > 1:
                request = engine.request(**joined(options))
            pauses = args.pause if len(pieces) > 1 else None  # a text of one piece stays as the engine speaks it
            with opened(path, engine.sample_rate, args.keep_partial) as write, progress_of(args, pieces) as progress:
                binder = Binder(lambda samples: write(pcm16(samples)), engine.sample_rate, pauses)
                told = narrate(engine, pieces, after_s, lambda _piece: request, binder, progress)
            report(args, [path] if output else [], engine, told, options)
        if args.play:
            play(Path(path))
    return 0


def check_not_blank(args: argparse.Namespace, is_blank: bool) -> None:
    """Raises RequestError: the text is blank."""
    if is_blank:
        where = "the text" if args.file in (None, "-") else f"the text of --file {args.file}"
        raise RequestError(f"{where} is blank; give it with --text, --file or on standard input")


def check_words(pieces: Sequence[Piece]) -> None:
    """Raises TextError: there is nothing to say."""
    if not pieces:
        raise TextError("the text has nothing to speak: it needs words besides pauses and signs")


def checked(args: argparse.Namespace) -> tuple[RequestOptions, str | None]:
    """The options of speech, with a seed, and the output as `checked_output` returns it, after the checks that need
    neither text nor model. Raises RequestError, VoiceError or AudioError: as `voice_options` and `checked_output`."""
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
    if options.get("seed") is None:  # one for all pieces, so that the printed one reproduces the whole text
        options["seed"] = secrets.randbits(31)
    return options, output


def front_end_of(
    model: str, options: RequestOptions, lines: Iterable[Line], language: str | None = None
) -> TextFrontEnd:
    """What makes spoken text of written text, by options that are taken out of these. `lines`: the text's. `language`:
    which the text names for itself. It counts if the options name none. Else one is found, of those that the model has.
    Raises TextError: see `TextFrontEnd`. Raises CheckpointError: see `Checkpoint.open`."""
    of_text = {name: options.pop(name, None) for name in OF_TEXT}  # type: ignore[misc]
    named, languages = options.get("language"), None
    if named in (None, AUTO) and (of_text["normalize"] == "auto" or of_text["lexicon"]):
        languages, named = Checkpoint.open(model).config.talker.named_languages, language or AUTO
        with suppress(LanguageError):  # the model does not have it
            named = find_language(named, languages)
        if named == AUTO:
            text = "\n".join(line.text for line in islice(lines, _LINES_TO_TELL))
            named = language_of(text, Candidates.of(languages))
    return text_front_end(of_text, named, languages).in_conversation(Conversation())


def load(args: argparse.Namespace, voices: Sequence[Voice | str | None], pieces: int) -> TTSEngine:
    """An engine with a slot for each piece, but no more slots than suit the device."""
    slots = min(slots_of(args), pieces)
    heard = [voice for voice in voices if isinstance(voice, Voice) and voice.ref_codes is not None]
    transcribed = text_of(args.ref_text) is not None or bool(heard)
    options = engine_options(args, max_streams=slots, max_queue=2 * slots, queue_timeout=WAIT_S)
    if slots > 1 and not transcribed and args.max_positions == EngineOptions.max_positions:
        options = replace(options, max_positions=_POSITIONS)
    return TTSEngine.load(args.model, options)


def make_voice(args: argparse.Namespace, engine: TTSEngine, options: RequestOptions) -> None:
    """If there is --ref-audio, make its voice, put it into the options, and keep it if that is asked for."""
    if args.ref_audio is not None:
        options["voice"] = voice = engine.create_voice(args.ref_audio, args.ref_text)
        if args.save_voice is not None:
            voice.save(args.save_voice)


def fitting(engine: TTSEngine, pieces: Iterable[_P], request_of: Callable[[_P], SpeechRequest]) -> list[_P]:
    """The pieces, cut again where they do not fit a slot. Raises RequestError: as `TTSEngine.submit`."""
    fitting: list[_P] = []
    for piece in pieces:
        parts = engine.parts(SpokenText(piece.text), request_of(piece))
        fitting.extend(piece.cut(part.text for part in parts))
    return fitting


def joined(options: RequestOptions) -> RequestOptions:
    """The options of pieces that are joined, which cuts their silence instead of `trim`. PyTorch's last bits of samples
    would depend on how pieces are cut into pushes."""
    if options.get("silence_s") is not None:
        log.warning("silence_s changes nothing in a text of several pieces: --pause says how far apart they are")
    return options | {"reproducible": True, "trim": "none"}


def progress_of(args: argparse.Namespace, pieces: Sequence[Piece]) -> Progress:
    if len(pieces) == 1 and args.pause != args.parser.get_default("pause"):
        log.warning("--pause changes nothing: the text is one piece")
    return Progress([piece.text for piece in pieces], args.speed or 1.0, each_chunk=args.stream)


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


def report(
    args: argparse.Namespace,
    wrote: Sequence[str],
    engine: TTSEngine,
    told: Narrated,
    options: RequestOptions,
    more: Sequence[str] = (),
) -> None:
    """Print what was made. `wrote`: paths, or "-". `more`: lines about the sound."""
    lines = [f"wrote   {'PCM16 on standard output' if path == '-' else Path(path).resolve()}" for path in wrote]
    rtf = told.wall_s / told.seconds if told.seconds else float("inf")
    ttfc = "none" if told.ttfc_s is None else f"{1000 * told.ttfc_s:.1f} ms"
    length = f"{told.seconds:.2f} s, {told.frames} frames"
    lines.append(f"speech  {length}, ended by: {', '.join(told.ends)}, seed {options['seed']}")
    lines.append(f"speed   TTFC {ttfc}, RTF {rtf:.3f} ({engine.backend} backend)")
    if told.retries:
        lines.append(f"retries {told.retries}, because speech did not find its end")
    lines += more
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
