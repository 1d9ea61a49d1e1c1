"""The command line: `qwen-megakernel speak`, `serve`, `verify`, `bench`, `build`, `quantize` and `doctor`."""

import argparse
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from qwen_megakernel import TTSError, __version__
from qwen_megakernel.backend.build import find_ninja, find_nvcc, load_extension, no_nvcc
from qwen_megakernel.backend.interfaces import CpuSpeed
from qwen_megakernel.backend.select import BACKENDS, Backend, select_backend, select_device
from qwen_megakernel.check import bench
from qwen_megakernel.check.verify import FRAMES, verify
from qwen_megakernel.checkpoint.fp8 import parts_of
from qwen_megakernel.checkpoint.load import DEMO, DEMO_NOTICE, PUBLISHED, Checkpoint, name_of_model
from qwen_megakernel.checkpoint.quantize import quantize_checkpoint
from qwen_megakernel.cli_options import (
    WEIGHTS_CHOICES,
    WEIGHTS_HELP,
    CommandParser,
    add_served_names,
    add_threads,
    weights_of,
)
from qwen_megakernel.cli_speak import add_speak
from qwen_megakernel.errors import BackendError, RequestError
from qwen_megakernel.server.service import TOKEN


def main(argv: list[str] | None = None) -> int:
    try:
        args = _parser().parse_args(argv)
        logging.basicConfig(format="%(message)s", stream=sys.stderr)
        logging.getLogger("qwen_megakernel").setLevel(logging.DEBUG if args.verbose else logging.INFO)
        return args.run(args)
    except TTSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the process that read our PCM is gone
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qwen-megakernel", description="Speak with Qwen3-TTS.")
    parser.add_argument("--version", action="version", version=f"qwen-megakernel {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    for add in (add_speak, _add_serve, _add_verify, _add_quantize, _add_build, _add_bench, _add_doctor):
        add(commands)
    for command in commands.choices.values():
        command.add_argument("-v", "--verbose", action="store_true", help="log more, such as what memory goes to")
    return parser


# ---------------------------------------------------------------- serve


def _add_serve(commands: argparse._SubParsersAction) -> None:
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
    add_served_names(serve)
    serve.add_argument("--log-texts", action="store_true", help="log what is said, not lengths and times alone")
    serve.add_argument("--allow-upload", action="store_true", help="clients may make voices of recordings (Base)")
    serve.add_argument("--ui", action="store_true", help="a web page at / to try it with")
    serve.add_argument("--backend", choices=BACKENDS, default="auto")
    serve.add_argument("--weights", type=weights_of, help=WEIGHTS_HELP)
    serve.add_argument("--device", help="cpu, cuda, cuda:1; default: a GPU if there is one")
    add_threads(serve)


def _serve(args: argparse.Namespace) -> int:
    try:
        from qwen_megakernel.server import app as serve
        from qwen_megakernel.server.guard import is_loopback
    except ModuleNotFoundError as error:
        raise BackendError(f"serving needs {error.name}: install the extra [serve]") from None
    if args.token is not None and not args.token.strip():
        raise BackendError("--token is empty: give a token, or leave the option out")
    token = (args.token or os.environ.get(TOKEN) or "").strip() or None
    if token is None and not is_loopback(args.host):
        raise BackendError(f"--host {args.host} can be reached by others: set {TOKEN}, or listen on 127.0.0.1")
    if args.voices and not args.voices.is_dir():
        raise RequestError(f"--voices: no folder {str(args.voices)!r}")
    options = {"backend": args.backend, "device": args.device}
    options |= {"max_streams": args.max_streams, "max_positions": args.max_positions}
    name, config = name_of_model(args.model), serve.check_model(args.model, **options)
    app = serve.make_app(
        lambda: serve.load_for_good(
            args.model, weights=args.weights, max_queue=args.max_streams, threads=args.threads, **options
        ),
        model=name,
        config=config,
        token=token,
        voices=args.voices,
        served_names=args.served_name,
        aliases=dict(args.voice_alias),
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


def _add_verify(commands: argparse._SubParsersAction) -> None:
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
    check.add_argument("--weights", type=weights_of, help=WEIGHTS_HELP)
    check.add_argument("--frames", type=int, default=FRAMES, help="of an utterance at most; default: %(default)s")
    check.add_argument("--seed", type=int, default=0, help="of the takes to listen to; default: %(default)s")
    check.add_argument("--ref-audio", metavar="PATH", help="whose voice to clone (Base); default: a synthetic sound")
    check.add_argument("--ref-text", help="what the reference audio says: in-context cloning is compared too")


def _verify(args: argparse.Namespace) -> int:
    options = {"backend": args.backend, "device": args.device, "weights": args.weights, "output": args.output}
    options |= {"frames": args.frames, "seed": args.seed, "ref_audio": args.ref_audio, "ref_text": args.ref_text}
    return 0 if verify(args.model, **options) else 1


# ---------------------------------------------------------------- build


def _add_build(commands: argparse._SubParsersAction) -> None:
    about = "compile the kernel for this machine's GPU, so that no first use has to wait for it"
    build = commands.add_parser("build", help=about, description=about[0].upper() + about[1:] + ".")
    build.set_defaults(run=_build)
    build.add_argument(
        "--weights", type=weights_of, default="bf16", help=f"{WEIGHTS_CHOICES}: each is a build of its own"
    )


def _build(args: argparse.Namespace) -> int:
    device, start = select_device("cuda"), time.monotonic()
    folder = Path(load_extension(device, parts_of(args.weights)).__file__).parent
    print(f"ready   in {time.monotonic() - start:.1f} s\ncached  in {folder}")
    return 0


# ---------------------------------------------------------------- quantize


def _add_quantize(commands: argparse._SubParsersAction) -> None:
    about = "make a checkpoint with FP8 weights of one in bf16 (docs/fp8.md)"
    quantize = commands.add_parser("quantize", help=about, description=about[0].upper() + about[1:] + ".")
    quantize.set_defaults(run=_quantize)
    quantize.add_argument("model", help=f"folder, hub id, or {DEMO!r}")
    quantize.add_argument("output", type=Path, help="folder to write, not there yet")
    quantize.add_argument("--weights", type=weights_of, default="fp8", help=f"{WEIGHTS_CHOICES}; default: %(default)s")


def _quantize(args: argparse.Namespace) -> int:
    fp8 = parts_of(args.weights)
    if not fp8:
        raise BackendError("--weights bf16 quantises nothing")
    quantize_checkpoint(args.model, args.output, fp8, print)
    print(f"wrote   {args.output.resolve()}")
    return 0


# ---------------------------------------------------------------- bench


def _add_bench(commands: argparse._SubParsersAction) -> None:
    about = "how fast it is on this machine, beside the floor of its memory; minutes"
    measure = commands.add_parser("bench", help=about, description=about[0].upper() + about[1:] + ".")
    measure.set_defaults(run=_bench)
    measure.add_argument("--model", help="folder or hub id; default: random weights on a GPU, else the demo voice")
    measure.add_argument("--size", choices=("0.6b", "1.7b"), help="of random weights, on a GPU; default: 0.6b")
    measure.add_argument("--backend", choices=BACKENDS, default="auto")
    measure.add_argument("--weights", type=weights_of, help=WEIGHTS_HELP)
    measure.add_argument("--device", help="cpu, cuda, cuda:1; default: a GPU if there is one")


def _bench(args: argparse.Namespace) -> int:
    bench.run(args.model, size=args.size, backend=args.backend, device=args.device, weights=args.weights)
    return 0


# ---------------------------------------------------------------- doctor


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    doctor = commands.add_parser("doctor", help="what this machine can do", description="What this machine can do.")
    doctor.set_defaults(run=_doctor)


def _doctor(_args: argparse.Namespace) -> int:
    device = select_device(None)
    backend, reason = select_backend("auto", device)
    rows = [
        ("qwen-megakernel", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"),
        ("torch", f"{torch.__version__}, built for CUDA {torch.version.cuda or '- (CPU build)'}"),
        ("GPU", _gpu()),
        ("driver", _output_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])),
        ("nvcc", f"{_output_line([nvcc, '--version'], -2)} ({nvcc})" if (nvcc := find_nvcc()) else no_nvcc()),
        ("ninja", _output_line([find_ninja() or "ninja", "--version"])),
        ("checkpoints", _cached_checkpoints()),
        ("backend", f"{backend} on {device}: {reason}"),
    ]
    if device.type == "cpu":
        rows.append(("CPU", f"with the {DEMO} voice, {_cpu_speed()}"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def _cpu_speed() -> CpuSpeed:
    device = torch.device("cpu")
    return Backend("torch", Checkpoint.open(DEMO), device, torch.float32).load(slots=1, max_positions=16).cpu


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
