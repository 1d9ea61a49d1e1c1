"""The command line: `qwen-megakernel speak`, `serve`, `verify`, `bench`, `build`, `quantize` and `doctor`."""

import argparse
import logging
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import soundfile
import torch
from tqdm import tqdm

from qwen_megakernel import SamplingParams, TTSEngine, TTSError, __version__
from qwen_megakernel.backend.build import find_ninja, load_extension
from qwen_megakernel.backend.select import BACKENDS, select_backend, select_device
from qwen_megakernel.check import bench
from qwen_megakernel.check.verify import FRAMES, verify
from qwen_megakernel.checkpoint.fp8 import WEIGHTS, parts_of
from qwen_megakernel.checkpoint.load import DEMO, DEMO_NOTICE, PUBLISHED, Checkpoint, name_of_model
from qwen_megakernel.checkpoint.quantize import quantize_checkpoint
from qwen_megakernel.engine.stream import Audio, Chunk
from qwen_megakernel.errors import BackendError, RequestError
from qwen_megakernel.model.conditioning import AUTO
from qwen_megakernel.model.text import split_sentences
from qwen_megakernel.model.voice import Voice, check_ref_options
from qwen_megakernel.server.service import TOKEN

MAX_PIECE_CHARS = 300
"""Longer text is spoken in pieces cut at sentence ends."""

_KINDS = f"{', '.join(WEIGHTS)}, or parts of it such as talker,lm_heads"
_WEIGHTS_HELP = f"{_KINDS} (docs/fp8.md); default: as the checkpoint has them"


def _weights(text: str) -> str | list[str]:
    weights = text if text in WEIGHTS else text.split(",")
    try:
        parts_of(weights)
    except BackendError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return weights


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("qwen_megakernel").setLevel(logging.INFO)
    try:
        return args.run(args)
    except TTSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our PCM has gone
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qwen-megakernel", description="Speak with Qwen3-TTS.")
    parser.add_argument("--version", action="version", version=f"qwen-megakernel {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

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

    about = "speak for other processes: OpenAI's HTTP API and a WebSocket"
    serve = commands.add_parser("serve", help=about, description=about + " (docs/serving.md).")
    serve.set_defaults(run=_serve)
    serve.add_argument("--model", default=DEMO, help=f"folder, hub id such as {PUBLISHED[1]}, or {DEMO!r}")
    serve.add_argument("--host", default="127.0.0.1", help="default: %(default)s; off loopback a token is needed")
    serve.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    serve.add_argument("--token", help=f"that clients must bear; better in the environment, as {TOKEN}")
    serve.add_argument("--max-streams", type=int, default=64, help="utterances at once, default: %(default)s")
    serve.add_argument(
        "--max-positions",
        type=int,
        default=1024,
        help="prompt and frames of one utterance, default: %(default)s",
    )
    serve.add_argument(
        "--voices", metavar="DIR", type=Path, help="saved voices (Voice.save), each known by its file's name"
    )
    serve.add_argument("--log-texts", action="store_true", help="log what is said, not lengths and times alone")
    serve.add_argument("--allow-upload", action="store_true", help="clients may make voices of recordings (Base)")
    serve.add_argument("--ui", action="store_true", help="a web page at / to try it with")
    serve.add_argument("--backend", choices=BACKENDS, default="auto")
    serve.add_argument("--weights", type=_weights, help=_WEIGHTS_HELP)
    serve.add_argument("--device", help="cpu, cuda, cuda:1; default: a GPU if there is one")

    about = "does what we claim hold for a checkpoint? compare with the reference, and listen"
    check = commands.add_parser(
        "verify", help=about, description=about[0].upper() + about[1:] + " (docs/verification.md)."
    )
    check.set_defaults(run=_verify)
    check.add_argument("--model", required=True, help=f"folder, hub id such as {PUBLISHED[1]}, or {DEMO!r}")
    check.add_argument(
        "--output", metavar="DIR", help="where to write: new or empty; default: verify-<name of the model>"
    )
    check.add_argument("--backend", choices=BACKENDS, default="auto")
    check.add_argument("--device", help="cpu, cuda, cuda:1; default: a GPU if there is one")
    check.add_argument("--weights", type=_weights, help=_WEIGHTS_HELP)
    check.add_argument("--frames", type=int, default=FRAMES, help="of an utterance at most; default: %(default)s")
    check.add_argument("--seed", type=int, default=0, help="of the takes to listen to; default: %(default)s")
    check.add_argument("--ref-audio", metavar="PATH", help="whose voice to clone (Base); default: a synthetic sound")
    check.add_argument("--ref-text", help="what the reference audio says: in-context cloning is compared too")

    about = "make a checkpoint with FP8 weights of one in bf16 (docs/fp8.md)"
    quantize = commands.add_parser("quantize", help=about, description=about[0].upper() + about[1:] + ".")
    quantize.set_defaults(run=_quantize)
    quantize.add_argument("model", help=f"folder, hub id, or {DEMO!r}")
    quantize.add_argument("output", type=Path, help="folder to write, not there yet")
    quantize.add_argument("--weights", type=_weights, default="fp8", help=f"{_KINDS}; default: %(default)s")

    about = "compile the kernel for this machine's GPU, so that no first use has to wait for it"
    build = commands.add_parser("build", help=about, description=about[0].upper() + about[1:] + ".")
    build.set_defaults(run=_build)
    build.add_argument("--weights", type=_weights, default="bf16", help=f"{_KINDS}: each is a build of its own")

    about = "how fast it is on this machine, beside the floor of its memory; minutes"
    measure = commands.add_parser("bench", help=about, description=about[0].upper() + about[1:] + ".")
    measure.set_defaults(run=_bench)
    measure.add_argument("--model", help="folder or hub id; default: random weights on a GPU, else the demo voice")
    measure.add_argument("--size", choices=("0.6b", "1.7b"), help="of random weights, on a GPU; default: 0.6b")
    measure.add_argument("--backend", choices=BACKENDS, default="auto")
    measure.add_argument("--weights", type=_weights, help=_WEIGHTS_HELP)
    measure.add_argument("--device", help="cpu, cuda, cuda:1; default: a GPU if there is one")

    doctor = commands.add_parser("doctor", help="what this machine can do", description="What this machine can do.")
    doctor.set_defaults(run=_doctor)
    return parser


def add_voice_options(parser: argparse._ActionsContainer) -> None:
    """Who speaks, how, and on what."""
    parser.add_argument(
        "--model", default=DEMO, help=f"folder, hub id such as {PUBLISHED[1]}, or {DEMO!r} (default: {DEMO_NOTICE})"
    )
    parser.add_argument("--speaker", help="a named speaker (CustomVoice); default: the checkpoint's first")
    parser.add_argument("--language", help="default: auto")
    parser.add_argument("--instruct", help="how to say it (VoiceDesign, 1.7B CustomVoice)")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--voice", metavar="PATH", help="a saved voice, of this checkpoint (Base)")
    whose.add_argument("--ref-audio", metavar="PATH", help="whose voice to clone (Base)")
    parser.add_argument("--ref-text", help="what the reference audio says: closer cloning")
    parser.add_argument("--seed", type=int, help="same text and seed, same speech; default: a fresh one")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--weights", type=_weights, help=_WEIGHTS_HELP)
    parser.add_argument("--device", help="cpu, cuda, cuda:1; default: a GPU if there is one")


def check_voice_options(args: argparse.Namespace) -> Voice | None:
    """What needs no model: the saved voice, if one is named.

    Raises:
        RequestError: the options do not go together; VoiceError: the file is no voice, or the text blank.
    """
    check_ref_options(args.ref_audio, args.ref_text)
    if args.speaker is not None and (args.voice is not None or args.ref_audio is not None):
        raise RequestError(
            "--speaker is one of the checkpoint's; --voice and --ref-audio bring another: give one of them"
        )
    return None if args.voice is None else Voice.load(args.voice)


# ---------------------------------------------------------------- speak


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
    options = {"backend": args.backend, "device": args.device, "weights": args.weights}
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
    """Before anything is loaded or spoken: is --output "-", or could a WAV be written there?

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
    """A WAV file (16 bit) or raw PCM16 on standard output. Unless streaming, the file appears when it is whole."""

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
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # at its exit Python would try again
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
    print("languages: " + ", ".join((AUTO, *talker.named_languages)))
    if model == DEMO:
        print(f"note: {DEMO_NOTICE}")
    return 0


# ---------------------------------------------------------------- serve


def _serve(args: argparse.Namespace) -> int:
    try:
        from qwen_megakernel.server import app as serve
        from qwen_megakernel.server.guard import is_loopback
    except ModuleNotFoundError as error:
        raise BackendError(f"serving needs {error.name}: install the extra [serve]") from None
    token = (args.token or os.environ.get(TOKEN) or "").strip() or None
    if token is None and not is_loopback(args.host):
        raise BackendError(f"--host {args.host} can be reached by others: set {TOKEN}, or listen on 127.0.0.1")
    if args.voices and not args.voices.is_dir():
        raise RequestError(f"--voices: no folder {str(args.voices)!r}")
    options = {"backend": args.backend, "device": args.device}
    options |= {"max_streams": args.max_streams, "max_positions": args.max_positions}
    name, variant = name_of_model(args.model), serve.check_model(args.model, **options)
    app = serve.make_app(
        lambda: serve.load_for_good(args.model, weights=args.weights, max_queue=args.max_streams, **options),
        model=name,
        variant=variant,
        token=token,
        voices=args.voices,
        upload=args.allow_upload,
        ui=args.ui,
        log_texts=args.log_texts,
    )
    print(f"serving {name} on http://{args.host}:{args.port}", file=sys.stderr)
    code = serve.serve(app, args.host, args.port)
    if code:  # a thread may wait for a device that does not answer, and the process for the thread
        logging.shutdown()
        os._exit(code)
    return code


# ---------------------------------------------------------------- verify


def _verify(args: argparse.Namespace) -> int:
    options = {"backend": args.backend, "device": args.device, "weights": args.weights, "output": args.output}
    options |= {"frames": args.frames, "seed": args.seed, "ref_audio": args.ref_audio, "ref_text": args.ref_text}
    return 0 if verify(args.model, **options) else 1


# ---------------------------------------------------------------- build


def _build(args: argparse.Namespace) -> int:
    device, start = select_device("cuda"), time.monotonic()
    folder = Path(load_extension(device, parts_of(args.weights)).__file__).parent
    print(f"ready   in {time.monotonic() - start:.1f} s\ncached  in {folder}")
    return 0


# ---------------------------------------------------------------- quantize


def _quantize(args: argparse.Namespace) -> int:
    fp8 = parts_of(args.weights)
    if not fp8:
        raise BackendError("--weights bf16 quantises nothing")
    quantize_checkpoint(args.model, args.output, fp8, print)
    print(f"wrote   {args.output.resolve()}")
    return 0


# ---------------------------------------------------------------- bench


def _bench(args: argparse.Namespace) -> int:
    bench.run(args.model, size=args.size, backend=args.backend, device=args.device, weights=args.weights)
    return 0


# ---------------------------------------------------------------- doctor


def _doctor(_args: argparse.Namespace) -> int:
    device = select_device(None)
    backend, reason = select_backend("auto", device)
    rows = [
        ("qwen-megakernel", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"),
        ("torch", f"{torch.__version__}, built for CUDA {torch.version.cuda or '- (CPU build)'}"),
        ("GPU", _gpu()),
        ("driver", _output_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])),
        ("nvcc", _output_line(["nvcc", "--version"], -2)),
        ("ninja", _output_line([find_ninja() or "ninja", "--version"])),
        ("checkpoints", _cached_checkpoints()),
        ("backend", f"{backend} on {device}: {reason}"),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none that torch can use"
    cards = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        cards.append(f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}")
    return "; ".join(cards)


def _output_line(command: list[str], line: int = 0) -> str:
    """One line of a program's output, or why there is none."""
    if not shutil.which(command[0]):
        return f"{command[0]} not found"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return (done.stdout or done.stderr).strip().splitlines()[line].strip()
    except (OSError, subprocess.TimeoutExpired, IndexError) as error:
        return f"{command[0]} failed: {error!r}"


def _cached_checkpoints() -> str:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cached = [r.repo_id for r in scan_cache_dir().repos if "qwen3-tts" in r.repo_id.lower()]
    except CacheNotFound:
        cached = []
    listed = ", ".join(sorted(cached)) if cached else "none in the hub cache"
    return f"{DEMO} (bundled, {DEMO_NOTICE}); {listed} ({constants.HF_HUB_CACHE})"


if __name__ == "__main__":
    sys.exit(main())
