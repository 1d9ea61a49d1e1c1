"""`qwen-megakernel speak`: text in, WAV out."""

import argparse
import os
import secrets
import sys
import time
from pathlib import Path

import numpy as np
import soundfile
from tqdm import tqdm

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.checkpoint.languages import listed
from qwen_megakernel.checkpoint.load import DEMO, DEMO_NOTICE, Checkpoint
from qwen_megakernel.cli_options import add_voice_options, check_voice_options
from qwen_megakernel.engine.audio import Audio, Chunk
from qwen_megakernel.errors import RequestError
from qwen_megakernel.model.conditioning import AUTO
from qwen_megakernel.model.text import split_sentences

MAX_PIECE_CHARS = 300
"""Longer text is spoken in pieces cut at sentence ends."""


def add_speak(commands: argparse._SubParsersAction) -> None:
    """Add the command `speak`."""
    speak = commands.add_parser("speak", help="text in, WAV out", description="Text in, WAV out.")
    speak.set_defaults(run=_speak)
    text = speak.add_mutually_exclusive_group()
    text.add_argument("--text", help="what to say")
    text.add_argument("--file", metavar="PATH", help="read the text from a UTF-8 file, or - for standard input")
    speak.add_argument(
        "--output",
        default="out.wav",
        metavar="PATH",
        help="WAV (default: %(default)s), or - for raw PCM16 on stdout",
    )
    add_voice_options(speak)
    speak.add_argument("--save-voice", metavar="PATH", help="keep the voice of --ref-audio, for --voice and `serve`")
    speak.add_argument("--stream", action="store_true", help="write every chunk at once and tell when it came")
    speak.add_argument("--list-speakers", action="store_true", help="print the model's speakers and languages")


def _speak(args: argparse.Namespace) -> int:
    if args.list_speakers:
        return _list_speakers(args.model)
    parts = split_sentences(_read_text(args), MAX_PIECE_CHARS)
    if not parts:
        raise RequestError("the text is blank; give it with --text, --file or on standard input")
    voice = check_voice_options(args)
    if args.save_voice is not None and args.ref_audio is None:
        raise RequestError("--save-voice keeps the voice of --ref-audio; give both")
    check_wav(args.output)
    if args.save_voice is not None:
        _check_writable("--save-voice", args.save_voice)
    # One seed for all pieces, so that the printed one says the whole text again.
    seed = secrets.randbits(31) if args.seed is None else args.seed
    sampling = SamplingParams(seed=seed)
    options = {"backend": args.backend, "device": args.device, "weights": args.weights, "threads": args.threads}
    with TTSEngine.load(args.model, **options, max_streams=1) as engine:
        if args.ref_audio is not None:
            voice = engine.create_voice(args.ref_audio, args.ref_text)
            if args.save_voice is not None:
                voice.save(args.save_voice)
        request = {"speaker": args.speaker, "language": args.language, "instruct": args.instruct, "voice": voice}
        request["sampling"] = sampling
        pieces = [piece for part in parts for piece in engine.pieces(part, **request)]
        with _Output(args.output, engine.sample_rate, args.stream) as output:
            audios = []
            with tqdm(desc="speaking", unit=" frames", disable=args.stream, leave=False) as bar:
                for number, piece in enumerate(pieces, start=1):
                    stream = engine.stream(piece, **request)
                    bar.set_postfix_str(f"{number} of {len(pieces)} pieces")
                    for chunk in stream:
                        output.write(chunk)
                        bar.update(len(chunk.codes))
                    audios.append(stream.utterance.result())
        _report(args, engine, audios, seed)
    return 0


def check_wav(output: str) -> None:
    """Check, before anything is loaded or spoken, that --output is "-" or that a WAV can be written there.

    Raises:
        RequestError: it is the name of something else, or cannot be written.
    """
    if output == "-":
        return
    if Path(output).suffix.lower() not in ("", ".wav"):
        raise RequestError(f"--output: {output!r} would be a WAV by another name: end it in .wav")
    _check_writable("--output", output)


def _check_writable(option: str, output: str) -> None:
    path = Path(output)
    if not path.parent.is_dir():
        raise RequestError(f"{option}: no folder {str(path.parent)!r}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RequestError(f"{option}: {output!r} is a folder or cannot be written")


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


class _Output:
    """Writes a WAV file (16 bit), or raw PCM16 to standard output. Without --stream the file is written at the end."""

    def __init__(self, path: str, rate: int, stream: bool):
        self._path, self._rate, self._stream = path, rate, stream
        self._held: list[np.ndarray] = []
        self._start = time.monotonic()
        self._file: soundfile.SoundFile | None = None

    def __enter__(self) -> "_Output":
        return self

    def _write_wav(self, pcm: np.ndarray) -> None:
        try:
            if self._file is None:
                self._file = soundfile.SoundFile(self._path, "w", self._rate, 1, "PCM_16", format="WAV")
            self._file.write(pcm)
        except soundfile.SoundFileError as error:
            raise RequestError(f"--output {self._path}: {error}") from None

    @staticmethod
    def _write_stdout(pcm: bytes) -> None:
        try:
            sys.stdout.buffer.write(pcm)
            sys.stdout.buffer.flush()
        except OSError as error:
            # Python flushes standard output once more at its exit, where the error would be told again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                raise
            raise RequestError(f"--output -: {error}") from None

    def write(self, chunk: Chunk) -> None:
        if self._stream:
            ms = 1000 * (time.monotonic() - self._start)
            print(f"{ms:8.1f} ms  {len(chunk.codes)} frames", file=sys.stderr)
        pcm = np.rint(chunk.samples * 32767.0).astype("<i2")
        if self._path == "-":
            self._write_stdout(pcm.tobytes())
        elif self._stream:
            self._write_wav(pcm)
        else:
            self._held.append(pcm)

    def __exit__(self, kind, *_rest) -> None:
        if self._held and kind is None:
            self._write_wav(np.concatenate(self._held))
        if self._file:
            self._file.close()


def _report(args: argparse.Namespace, engine: TTSEngine, audios: list[Audio], seed: int) -> None:
    frames = sum(len(a.codes) for a in audios)
    seconds = sum(a.duration_s for a in audios)
    compute = sum(a.compute_s for a in audios)
    reasons = ", ".join(dict.fromkeys(a.finish_reason for a in audios))
    where = "PCM16 on standard output" if args.output == "-" else str(Path(args.output).resolve())
    lines = [
        f"wrote   {where}",
        f"speech  {seconds:.2f} s, {frames} frames, ended by: {reasons}, seed {seed}",
        f"speed   TTFC {1000 * audios[0].ttfc_s:.1f} ms, RTF {compute / seconds:.3f} ({engine.backend} backend)",
    ]
    if args.model == DEMO:
        lines.append(f"voice   {DEMO_NOTICE}")
    print("\n".join(lines), file=sys.stderr if args.output == "-" else sys.stdout)


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
