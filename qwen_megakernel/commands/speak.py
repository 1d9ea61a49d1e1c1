"""`qwen-megakernel speak`: text in, sound out."""

import argparse
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qwen_megakernel import TTSEngine
from qwen_megakernel.checkpoint.languages import listed
from qwen_megakernel.checkpoint.load import DEMO, DEMO_NOTICE, Checkpoint
from qwen_megakernel.commands.options import (
    LAYOUTS,
    add_output_options,
    add_voice_options,
    check_voice_options,
    lexicon_of,
    sampling_of,
)
from qwen_megakernel.commands.output import OUT, SpeechFile, check_writable, checked_output, play, write_stdout
from qwen_megakernel.engine.audio import Audio, Chunk
from qwen_megakernel.engine.request import RequestOptions
from qwen_megakernel.engine.retries import check_retries
from qwen_megakernel.engine.word_times import SpeechRate, weight, words_of
from qwen_megakernel.errors import RequestError, TextError
from qwen_megakernel.model.conditioning import AUTO
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.model.text import split_sentences

MAX_PIECE_CHARS = 300
"""Longer text is spoken in pieces cut at sentence ends."""


def add_speak(commands: argparse._SubParsersAction) -> None:
    """Add the command `speak`."""
    speak = commands.add_parser("speak", help="text in, sound out", description="Text in, sound out.")
    speak.set_defaults(run=_speak)
    text = speak.add_mutually_exclusive_group()
    text.add_argument("--text", help="what to say")
    text.add_argument("--file", metavar="PATH", help="read the text from a UTF-8 file, or - for standard input")
    add_output_options(speak)
    speak.add_argument("--keep-partial", action="store_true", help="interrupted, keep in the file what was said so far")
    add_voice_options(speak)
    speak.add_argument("--save-voice", metavar="PATH", help="keep the voice of --ref-audio, for --voice and `serve`")
    speak.add_argument("--stream", action="store_true", help="tell when every chunk came")
    speak.add_argument(
        "--retries",
        type=int,
        default=0,
        help="say a piece again, with the next seed, so often at most, where it ends badly; default: %(default)s",
    )
    speak.add_argument("--list-speakers", action="store_true", help="print the model's speakers and languages")


def _speak(args: argparse.Namespace) -> int:
    if args.list_speakers:
        return _list_speakers(args.model)
    text = _read_text(args)
    if not text.strip():
        raise RequestError("the text is blank; give it with --text, --file or on standard input")
    voice = check_voice_options(args)
    if args.save_voice is not None and args.ref_audio is None:
        raise RequestError("--save-voice keeps the voice of --ref-audio; give both")
    output = checked_output(args)
    if args.keep_partial and output in ("-", None):
        raise RequestError("--keep-partial keeps a file; name it with --output")
    if check_retries(args.retries) and (output == "-" or args.stream):
        raise RequestError(
            "--retries says a piece again before anybody hears it, so it goes with a file: leave out --stream, and "
            "name the file with --output"
        )
    if args.save_voice is not None:
        check_writable("--save-voice", args.save_voice)
    # One seed for all pieces, so that the printed one says the whole text again.
    seed = secrets.randbits(31) if args.seed is None else args.seed
    sampling = sampling_of(args, seed)
    options = {"backend": args.backend, "device": args.device, "weights": args.weights, "threads": args.threads}
    options["adapters"] = args.adapter
    options["allow_foreign_voice"] = args.allow_foreign_voice
    with ExitStack() as stack:
        stack.enter_context(ended_like_ctrl_c())
        path = output
        if output is None:
            path = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / OUT)
        with TTSEngine.load(args.model, **options, max_streams=1) as engine:
            if args.ref_audio is not None:
                voice = engine.create_voice(args.ref_audio, args.ref_text)
                if args.save_voice is not None:
                    voice.save(args.save_voice)
            request = {"speaker": args.speaker, "language": args.language, "instruct": args.instruct, "voice": voice}
            request |= {"sampling": sampling, "speed": args.speed, "non_streaming_mode": LAYOUTS.get(args.layout)}
            request |= {"normalize": args.normalize, "lexicon": lexicon_of(args), "trim": args.trim}
            pieces = pieces_of(engine, text, request)
            audios = []
            progress = _ChunkTimes() if args.stream else _Progress(pieces, args.speed)
            with _sink(path, engine.sample_rate, args.keep_partial) as write, progress:

                def hear(chunk: Chunk) -> None:
                    progress.chunk(chunk)
                    write(pcm16(chunk.samples))

                for piece in pieces:
                    audios.append(_say(engine, piece, args.retries, request, hear))
                    progress.piece_ends()
            _report(args, output, engine, audios, seed)
        if args.play:
            play(Path(path))
    return 0


def pieces_of(engine: TTSEngine, text: str, request: dict[str, Any]) -> list[str]:
    """Cut a text at sentence ends into pieces that are spoken one after the other.

    Args:
        request: how they are spoken, as `TTSEngine.submit` takes it.

    Raises:
        RequestError: as `TTSEngine.pieces`.
    """
    parts = split_sentences(text, MAX_PIECE_CHARS)
    if not parts:
        raise TextError("text must not be blank")
    return [piece for part in parts for piece in engine.pieces(part, **request)]


def _say(engine: TTSEngine, piece: str, retries: int, request: RequestOptions, hear: Callable[[Chunk], None]) -> Audio:
    """What may have to be said again is heard once it is whole."""
    if retries:
        audio = engine.generate(piece, retries=retries, **request)
        hear(Chunk(audio.samples, audio.codes, audio.sample_rate))
        return audio
    stream = engine.stream(piece, **request)
    for chunk in stream:
        hear(chunk)
    return stream.utterance.result()


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Whoever ends this process, or closes its terminal, leaves no half file behind either."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only that thread hears signals
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read_text(args: argparse.Namespace) -> str:
    if args.text is not None:
        return args.text
    try:
        if args.file in (None, "-"):
            if args.file is None and sys.stdin.isatty():
                raise RequestError("no text: give --text, --file or standard input")
            return sys.stdin.buffer.read().decode("utf-8-sig")  # a byte order mark is not text
        return Path(args.file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the text cannot be read: {error}") from None


@contextmanager
def _sink(path: str, rate: int, keep_partial: bool):
    """A function that takes PCM16."""
    if path == "-":
        yield write_stdout
        return
    file = SpeechFile(path, rate, keep_partial=keep_partial)
    try:
        with file:
            yield file.write
    finally:
        if file.kept:
            print(f"kept    {file.path}: what was said so far", file=sys.stderr)


class _ChunkTimes:
    """Tells when every chunk came."""

    def __enter__(self) -> "_ChunkTimes":
        self._start = time.monotonic()
        return self

    def chunk(self, chunk: Chunk) -> None:
        ms = 1000 * (time.monotonic() - self._start)
        print(f"{ms:8.1f} ms  {len(chunk.codes)} frames", file=sys.stderr)

    def piece_ends(self) -> None:
        pass

    def __exit__(self, *_error: object) -> None:
        pass


class _Progress:
    """Shows percent and time left, by estimate: how long words take to say goes by their letters, and by how long the
    pieces before took. Below 100 % to the end: a piece is not over before it is."""

    MOST = 0.99

    def __init__(self, pieces: list[str], speed: float):
        self._speed = speed
        self._weights = [sum(map(weight, words_of(piece))) for piece in pieces]
        self._rate = SpeechRate()
        self._number = 0  # of the piece that is spoken
        self._seconds = 0.0  # of it so far, as the model says it

    def __enter__(self) -> "_Progress":
        shown = "speaking {percentage:3.0f} %|{bar}| about {remaining} left, by the text's length{postfix}"
        self._bar = tqdm(total=sum(self._weights), bar_format=shown, smoothing=0, leave=False)
        self._bar.set_postfix_str(f"piece 1 of {len(self._weights)}")
        return self

    def chunk(self, chunk: Chunk) -> None:
        self._seconds += self._speed * len(chunk.samples) / chunk.sample_rate
        self._show()

    def piece_ends(self) -> None:
        self._rate.learn(self._weights[self._number], self._seconds)
        self._number, self._seconds = self._number + 1, 0.0
        if self._number < len(self._weights):
            self._bar.set_postfix_str(f"piece {self._number + 1} of {len(self._weights)}", refresh=False)
            self._show()

    def _show(self) -> None:
        said = min(self._seconds / self._rate.seconds, self._weights[self._number])
        said = min(sum(self._weights[: self._number]) + said, self.MOST * self._bar.total)
        self._bar.update(said - self._bar.n)

    def __exit__(self, *_error: object) -> None:
        self._bar.close()


def _report(args: argparse.Namespace, output: str | None, engine: TTSEngine, audios: list[Audio], seed: int) -> None:
    frames = sum(len(a.codes) for a in audios)
    seconds = sum(a.duration_s for a in audios)
    compute = sum(a.compute_s for a in audios)
    reasons = ", ".join(dict.fromkeys(a.finish_reason for a in audios))
    lines = [f"wrote   {'PCM16 on standard output' if output == '-' else Path(output).resolve()}"] if output else []
    lines += [
        f"speech  {seconds:.2f} s, {frames} frames, ended by: {reasons}, seed {seed}",
        f"speed   TTFC {1000 * audios[0].ttfc_s:.1f} ms, RTF {compute / seconds:.3f} ({engine.backend} backend)",
    ]
    if again := sum(audio.attempts - 1 for audio in audios):
        lines.append(f"retries {again}, since speech did not find its end")
    if args.model == DEMO:
        lines.append(f"voice   {DEMO_NOTICE}")
    print("\n".join(lines), file=sys.stderr if output == "-" else sys.stdout)


def _list_speakers(model: str) -> int:
    config = Checkpoint.open(model).config
    talker = config.talker
    print(f"{model}: {config.variant}")
    for name in talker.speakers:
        dialect = f" ({talker.dialects[name]})" if name in talker.dialects else ""
        print(f"  {name}{dialect}")
    if config.variant == "base":
        print("  no named speakers: clone a voice with --ref-audio")
    if config.variant == "voice_design":
        print("  no named speakers: describe the voice with --instruct")
    print("languages: " + listed((AUTO, *talker.named_languages)))
    if model == DEMO:
        print(f"note: {DEMO_NOTICE}")
    return 0
