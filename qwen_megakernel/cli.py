"""The command line: all commands of `qwen-megakernel`. The longer ones are in commands/."""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from qwen_megakernel import TTSEngine, TTSError, __version__
from qwen_megakernel.backend.build import load_extension
from qwen_megakernel.backend.select import BACKENDS, select_device
from qwen_megakernel.check import bench, doctor
from qwen_megakernel.check.verify import FRAMES, verify
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.fp8 import parts_of
from qwen_megakernel.checkpoint.load import DEMO, PUBLISHED, name_of_model
from qwen_megakernel.checkpoint.merge import merge_checkpoint
from qwen_megakernel.checkpoint.quantize import quantize_checkpoint
from qwen_megakernel.commands.batch import add_batch
from qwen_megakernel.commands.options import (
    OPENAI_NAMES,
    WEIGHTS_CHOICES,
    WEIGHTS_HELP,
    CommandParser,
    add_command,
    add_served_names,
    add_server_options,
    engine_options,
    speech_options,
    weights_of,
)
from qwen_megakernel.commands.output import shown
from qwen_megakernel.commands.speak import add_speak
from qwen_megakernel.commands.voices import add_voices
from qwen_megakernel.errors import BackendError, RequestError
from qwen_megakernel.server.process import check_model, is_loopback, load_for_good
from qwen_megakernel.server.service import TOKEN
from qwen_megakernel.trust.verdicts import SIZES


class _Printable(logging.Formatter):
    """Of names in files too, which the log shows."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record), keep="\n\t")


def main(argv: list[str] | None = None) -> int:
    try:
        args = _parser().parse_args(argv)
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Printable("%(message)s"))
        logging.basicConfig(handlers=[handler])
        logging.getLogger("qwen_megakernel").setLevel(logging.DEBUG if args.verbose else logging.INFO)
        return args.run(args)
    except TTSError as error:
        print(shown(f"error: {error}", keep="\n\t"), file=sys.stderr)
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
    adders = (add_speak, add_batch, add_voices, _add_serve, _add_wyoming, _add_verify, _add_quantize, _add_merge)
    for add in (*adders, _add_build, _add_bench, _add_doctor):
        add(commands)
    for command in commands.choices.values():
        command.add_argument("-v", "--verbose", action="store_true", help="log more, such as what takes memory")
    return parser


def _add_serve(commands: argparse._SubParsersAction) -> None:
    about = "speak for other processes: OpenAI's HTTP API and a WebSocket"
    serve = add_command(commands, "serve", _serve, about, " (docs/serving.md)")
    add_server_options(serve, "serve", streams=64)
    add = serve.add_argument
    add("--host", default="127.0.0.1", help="default: %(default)s; other addresses need a token")
    add("--port", type=int, default=8000, help="default: %(default)s")
    add("--token", help=f"token that clients must send; safer in the environment variable {TOKEN}")
    add_served_names(serve)
    add("--allow-upload", action="store_true", help="let clients make voices from recordings (Base)")
    add("--allow-clone", action="store_true", help="let a request bring the recording of its voice along (Base)")
    origin = "let web pages of this origin use the server, such as https://example.com; '*' needs a token"
    add("--allow-origin", metavar="ORIGIN", action="append", default=[], help=f"{origin}; may be repeated")
    add("--ui", action="store_true", help="serve a web page at /, to try the server")


def _serve(args: argparse.Namespace) -> int:
    try:
        from qwen_megakernel.server import app as serve
    except ModuleNotFoundError as error:
        raise BackendError(f"serving needs {error.name}: in the checkout, pip install -e '.[serve]'") from None
    if args.token is not None and not args.token.strip():
        raise BackendError("--token is empty: give a token, or leave the option out")
    token = (args.token or os.environ.get(TOKEN) or "").strip() or None
    if token is None and not is_loopback(args.host):
        raise BackendError(f"--host {args.host} can be reached by others: set {TOKEN}, or listen on 127.0.0.1")
    name, config, load = _engine_of_server(args)
    app = serve.make_app(
        load,
        model=name,
        config=config,
        token=token,
        voices=args.voices,
        allow_foreign_voice=args.allow_foreign_voice,
        served_names=args.served_name,
        aliases=dict(alias for alias in args.voice_alias if alias != OPENAI_NAMES),
        openai_voices=OPENAI_NAMES in args.voice_alias,
        defaults=speech_options(args, "serve"),
        upload=args.allow_upload,
        clone=args.allow_clone,
        origins=args.allow_origin,
        ui=args.ui,
        log_texts=args.log_texts,
    )
    print(f"serving {name} on http://{args.host}:{args.port}", file=sys.stderr)
    return _end_of_server(serve.serve(app, args.host, args.port))


def _engine_of_server(args: argparse.Namespace) -> tuple[str, ModelConfig | None, Callable[[], TTSEngine]]:
    """The model's name for clients, its checkpoint's config if known, and a function that loads the engine. Raises
    TTSError: the engine could never be loaded."""
    if args.voices and not args.voices.is_dir():
        raise RequestError(f"--voices: no folder {str(args.voices)!r}")
    if args.allow_foreign_voice and not args.voices:
        raise RequestError("--allow-foreign-voice needs the voices of --voices: give both")
    options = engine_options(args, max_queue=args.max_streams if args.max_queue is None else args.max_queue)
    return name_of_model(args.model), check_model(args.model, options), lambda: load_for_good(args.model, options)


def _end_of_server(code: int) -> int:
    if code:  # else the process might wait for a thread whose device does not answer
        logging.shutdown()
        os._exit(code)
    return code


def _add_wyoming(commands: argparse._SubParsersAction) -> None:
    about = "speak for Home Assistant: a Wyoming server"
    wyoming = add_command(commands, "wyoming", _wyoming, about, " (docs/home_assistant.md)")
    add_server_options(wyoming, "wyoming", streams=4)
    add = wyoming.add_argument
    add("--host", default="127.0.0.1", help="default: %(default)s; other addresses need --allow-network")
    add("--port", type=int, default=10200, help="default: %(default)s")
    trust = "serve other machines too, without a token: the protocol has none"
    add("--allow-network", action="store_true", help=trust)


def _wyoming(args: argparse.Namespace) -> int:
    try:
        from qwen_megakernel.server import wyoming_api
    except ModuleNotFoundError as error:
        how = "in the checkout, pip install -e '.[wyoming]'"
        raise BackendError(f"the Wyoming server needs {error.name}: {how}") from None
    where = f"{args.host}:{args.port}"
    if not is_loopback(args.host):
        if not args.allow_network:
            why = "can be reached by others, and Wyoming has no token"
            raise BackendError(f"--host {args.host} {why}: on a network that you trust, give --allow-network")
        print(f"warning: everybody who reaches {where} can use it: Wyoming has no token", file=sys.stderr)
    name, config, load = _engine_of_server(args)
    print(f"serving {name} on tcp://{where} once it is ready", file=sys.stderr)
    code = wyoming_api.serve(
        load,
        args.host,
        args.port,
        model=name,
        variant=config and config.variant,
        defaults=speech_options(args, "wyoming"),
        voices=args.voices,
        allow_foreign_voice=args.allow_foreign_voice,
        log_texts=args.log_texts,
    )
    return _end_of_server(code)


def _add_verify(commands: argparse._SubParsersAction) -> None:
    about = "compare a checkpoint's speech with the reference, by numbers and by ear"
    add = add_command(commands, "verify", _verify, about, " (docs/verification.md)").add_argument
    add("--model", required=True, help=f"folder, hub id such as {PUBLISHED[1]}, or {DEMO!r}")
    add("--output", metavar="DIR", help="where to write: new or empty; default: verify-<name of the model>")
    add("--backend", choices=BACKENDS, default="auto")
    add("--device", help="cpu, cuda, cuda:1; default: a GPU if there is one")
    add("--weights", type=weights_of, help=WEIGHTS_HELP)
    add("--frames", type=int, default=FRAMES, help="most frames of an utterance; default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the takes to listen to; default: %(default)s")
    add("--ref-audio", metavar="PATH", help="recording of the voice to clone (Base); default: a synthetic sound")
    add("--ref-text", help="what the recording says; with it in-context cloning is compared too")


def _verify(args: argparse.Namespace) -> int:
    names = ("backend", "device", "weights", "output", "frames", "seed", "ref_audio", "ref_text")
    return 0 if verify(args.model, **{name: getattr(args, name) for name in names}) else 1


def _add_build(commands: argparse._SubParsersAction) -> None:
    about = "compile the kernel for this machine's GPU, so that the first use does not wait"
    add = add_command(commands, "build", _build, about).add_argument
    add("--weights", type=weights_of, default="bf16", help=f"{WEIGHTS_CHOICES}: each is a build of its own")


def _build(args: argparse.Namespace) -> int:
    device, start = select_device("cuda"), time.monotonic()
    folder = Path(str(load_extension(device, parts_of(args.weights)).__file__)).parent
    print(f"ready   in {time.monotonic() - start:.1f} s\ncached  in {folder}")
    return 0


def _add_quantize(commands: argparse._SubParsersAction) -> None:
    about = "make a checkpoint with FP8 weights from one in bf16 (docs/fp8.md)"
    add = add_command(commands, "quantize", _quantize, about).add_argument
    add("model", help=f"folder, hub id, or {DEMO!r}")
    add("output", type=Path, help="new folder to write")
    add("--weights", type=weights_of, default="fp8", help=f"{WEIGHTS_CHOICES}; default: %(default)s")


def _quantize(args: argparse.Namespace) -> int:
    fp8 = parts_of(args.weights)
    if not fp8:
        raise BackendError("--weights bf16 quantises nothing: give fp8, or parts of it")
    quantize_checkpoint(args.model, args.output, fp8, print)
    print(f"wrote   {args.output.resolve()}")
    return 0


def _add_merge(commands: argparse._SubParsersAction) -> None:
    about = "make a checkpoint from one and its LoRA adapters (docs/voices.md)"
    add = add_command(commands, "merge", _merge, about).add_argument
    add("model", help=f"folder, hub id, or {DEMO!r}")
    add("adapters", nargs="+", metavar="adapter", help="folder that PEFT has saved")
    add("output", type=Path, help="new folder to write")


def _merge(args: argparse.Namespace) -> int:
    merge_checkpoint(args.model, args.adapters, args.output, print)
    print(f"wrote   {args.output.resolve()}")
    return 0


def _add_bench(commands: argparse._SubParsersAction) -> None:
    about = "measure the speed on this machine, beside the floor that its memory sets; takes minutes"
    add = add_command(commands, "bench", _bench, about).add_argument
    add("--model", help="folder or hub id; default: random weights on a GPU, else the demo voice")
    add("--size", choices=("0.6b", "1.7b"), help="size of the random weights, on a GPU; default: 0.6b")
    add("--backend", choices=BACKENDS, default="auto")
    add("--weights", type=weights_of, help=WEIGHTS_HELP)
    add("--device", help="cpu, cuda, cuda:1; default: a GPU if there is one")


def _bench(args: argparse.Namespace) -> int:
    bench.run(args.model, size=args.size, backend=args.backend, device=args.device, weights=args.weights)
    return 0


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    about = "tell what this machine can do, and what is known about the kernel on it"
    add = add_command(commands, "doctor", _doctor, about).add_argument
    add("--json", action="store_true", help="print JSON, to report an issue")
    check = "check the kernel on this GPU now, up to a minute; exit code 1 if it fails"
    add("--check", action="store_true", help=check)
    add("--size", choices=tuple(SIZES.values()), help="size to check; default: 0.6b")
    add("--weights", type=weights_of, help=f"weights to check: {WEIGHTS_CHOICES}; default: bf16")


def _doctor(args: argparse.Namespace) -> int:
    if not args.check and (args.size is not None or args.weights is not None):
        raise RequestError("--size and --weights need --check: give --check too")
    fp8 = parts_of(args.weights or "bf16")
    return doctor.run(check=args.check, size=args.size or "0.6b", fp8=fp8, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
