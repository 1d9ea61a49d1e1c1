"""The command line: what all commands of `qwen-megakernel` take. What they do is in commands/.

A command's code is imported once it runs, so that help, versions and words about wrong options come at once.
"""

import argparse
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from qwen_megakernel import TTSError, __version__
from qwen_megakernel.choices import (
    BACKENDS,
    DEMO,
    FORMATS,
    MANIFEST,
    MODEL_SIZES,
    PUBLISHED,
    SYNTHETIC_SIZES,
    VARIANTS,
    VERIFIED_FRAMES,
)
from qwen_megakernel.commands.idle import RULES, refuse_idle
from qwen_megakernel.commands.options import (
    WEIGHTS_CHOICES,
    WEIGHTS_HELP,
    CommandParser,
    add_command,
    add_engine_options,
    add_reading_options,
    add_recordings,
    add_server_options,
    add_voice_options,
    an_integer,
    shown,
    told,
    weights_of,
)
from qwen_megakernel.errors import memory_told
from qwen_megakernel.server.logs import flush, set_up

log = logging.getLogger(__name__)


class _Printable(logging.Formatter):
    """Of names in files too, which the log shows."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record), keep="\n\t")


def main(argv: list[str] | None = None, imported: Callable[[], None] = lambda: None) -> int:
    """Run a command line; None: the process's. `imported`: called once the command's code is there. Returns the
    process's exit code."""
    args = make_parser().parse_args(argv)
    undo = set_up(form) if (form := getattr(args, "log_format", None)) else lambda: None
    try:
        function = function_of(args)
        imported()
        return run(args, function)
    finally:
        undo()


def function_of(args: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    """What runs the command. To import it takes seconds."""
    module, _, name = args.run.partition(":")
    return getattr(import_module(module if "." in module else f"qwen_megakernel.commands.{module}"), name)


def run(args: argparse.Namespace, function: Callable[[argparse.Namespace], int]) -> int:
    """Run a command, and tell errors in a line. Returns the process's exit code."""
    try:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Printable("%(message)s"))
        logging.basicConfig(handlers=[handler])
        logging.getLogger("qwen_megakernel").setLevel(logging.DEBUG if args.verbose else logging.INFO)
        refuse_idle(args, args.parser, args.rules)
        with memory_told():
            return function(args)
    except TTSError as error:
        _say(told(error, args), args)
        return 1
    except KeyboardInterrupt:
        _say("interrupted", args, logging.INFO)
        return 130
    except BrokenPipeError:  # the process that read our PCM is gone
        return 1
    except Exception:
        if not _logs_json(args):
            raise
        log.critical("the command has failed", exc_info=True)
        return 1


def _logs_json(args: argparse.Namespace) -> bool:
    """Each line on standard error must be an object."""
    return getattr(args, "log_format", None) == "json"


def _say(words: str, args: argparse.Namespace, level: int = logging.ERROR) -> None:
    """Tell why the command ends, behind what its log still holds."""
    if _logs_json(args):
        log.log(level, words)
    else:
        flush()
        print(words, file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qwen-megakernel", description="Speak with Qwen3-TTS.")
    parser.add_argument("--version", action="version", version=f"qwen-megakernel {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    for add in (_add_speak, _add_batch, _add_voices, _add_serve, _add_wyoming, _add_tools):
        add(commands)
    for name, command in commands.choices.items():
        command.set_defaults(rules=RULES.get(name, ()))
        command.add_argument("-v", "--verbose", action="store_true", help="log more, such as what takes memory")
    return parser


def _add_speak(commands: argparse._SubParsersAction) -> None:
    speak = add_command(commands, "speak", "speak:speak", "text in, sound out")
    add_reading_options(speak, "text", "--voice")
    speak.add_argument("--list-speakers", action="store_true", help="print the model's speakers and languages")


def _add_batch(commands: argparse._SubParsersAction) -> None:
    about = "make a sound file of every line of a file"
    batch = add_command(commands, "batch", "batch:run", about, " (docs/batch.md)")
    batch.add_argument("input", metavar="INPUT", help="JSONL, CSV or plain text, one utterance a line; - for stdin")
    batch.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help=f"where files and {MANIFEST} go")
    batch.add_argument("--input-format", choices=("jsonl", "csv", "text"), help="default: by the name's ending")
    endings = [ending[1:] for ending in FORMATS]
    batch.add_argument("--format", choices=endings, default="wav", help="format of the files; default: %(default)s")
    batch.add_argument("--voices", metavar="DIR", type=Path, help="saved voices that lines and --voice may name (Base)")
    add_engine_options(batch, without=("max_queue", "queue_timeout"), max_streams=None, max_positions=1024)
    add_voice_options(batch, "batch")


def _add_voices(commands: argparse._SubParsersAction) -> None:
    """Add the command `voices` with its subcommands."""
    about = "saved voices: list, show, make, check"
    voices = commands.add_parser("voices", help=about, description=f"{about.capitalize()} (docs/voices.md).")
    actions = voices.add_subparsers(required=True, metavar="ACTION", parser_class=CommandParser)

    listing = add_command(actions, "list", "voices:list_voices", "list the voices of a folder")
    listing.add_argument("folder", metavar="DIR", type=Path)

    show = add_command(actions, "show", "voices:show_voice", "show what is in a voice's file")
    show.add_argument("file", metavar="FILE", type=Path)

    make = add_command(actions, "make", "voices:make_voice", "make a voice from recordings")
    _add_model(make)
    add_recordings(make, required=True)
    make.add_argument("--no-trim", action="store_true", help="keep the silence at the ends of recordings")
    make.add_argument("-o", "--output", metavar="FILE", required=True, help="file to write, such as me.safetensors")

    about = "tell whether a voice fits a checkpoint"
    check = add_command(actions, "check", "voices:check_voice", about, ". Exit code 1: it does not")
    check.add_argument("file", metavar="FILE", type=Path)
    _add_model(check)
    about = "an experiment: CustomVoice speaks with a Base checkpoint's voice (docs/voices.md)"
    check.add_argument("--allow-foreign-voice", action="store_true", help=about)

    for parser in (listing, show, check):
        parser.add_argument("--json", action="store_true", help="print it as JSON")
    for parser in actions.choices.values():  # SUPPRESS: keep a -v that came before the action
        parser.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="log more")


def _add_model(parser: argparse.ArgumentParser) -> None:
    about = f"folder, hub id such as {PUBLISHED[0]} (downloaded if need be), or {DEMO!r}"
    parser.add_argument("--model", required=True, help=about)


def _add_serve(commands: argparse._SubParsersAction) -> None:
    about = "speak for other processes: OpenAI's HTTP API and a WebSocket"
    serve = add_command(commands, "serve", "serve:serve", about, " (docs/serving.md)")
    add_server_options(serve, "serve", streams=64)
    add = serve.add_argument
    add("--host", default="127.0.0.1", help="default: %(default)s; other addresses need a token")
    add("--port", type=an_integer, default=8000, help="default: %(default)s")
    fronts = "processes that speak HTTP for the engine's, which then does nothing else; default: %(default)s, itself"
    add("--front-processes", metavar="N", type=an_integer, default=0, help=fronts)


def _add_wyoming(commands: argparse._SubParsersAction) -> None:
    about = "speak for Home Assistant: a Wyoming server"
    wyoming = add_command(commands, "wyoming", "serve:wyoming", about, " (docs/home_assistant.md)")
    add_server_options(wyoming, "wyoming", streams=4)
    add = wyoming.add_argument
    add("--host", default="127.0.0.1", help="default: %(default)s; other addresses need --allow-network")
    add("--port", type=an_integer, default=10200, help="default: %(default)s")
    trust = "serve other machines too, without a token: the protocol has none"
    add("--allow-network", action="store_true", help=trust)


def _add_tools(commands: argparse._SubParsersAction) -> None:
    """Add what checks, makes and measures."""
    about = "compare a checkpoint's speech with the reference, by numbers and by ear"
    add = add_command(commands, "verify", "qwen_check.commands:verify", about, " (docs/verification.md)").add_argument
    add("--model", required=True, help=f"folder, hub id such as {PUBLISHED[1]}, or {DEMO!r}")
    add("--output", metavar="DIR", help="where to write: new or empty; default: verify-<name of the model>")
    add("--backend", choices=BACKENDS, default="auto")
    add("--device", help="cpu, cuda, cuda:1; default: a GPU if there is one")
    add("--weights", type=weights_of, help=WEIGHTS_HELP)
    add("--frames", type=an_integer, default=VERIFIED_FRAMES, help="most frames of an utterance; default: %(default)s")
    add("--seed", type=an_integer, default=0, help="seed of the takes to listen to; default: %(default)s")
    add("--ref-audio", metavar="PATH", help="recording of the voice to clone (Base); default: a synthetic sound")
    add("--ref-text", help="what the recording says; with it in-context cloning is compared too")

    about = "make a checkpoint with FP8 weights from one in bf16 (docs/fp8.md)"
    add = add_command(commands, "quantize", "tools:quantize", about).add_argument
    add("model", help=f"folder, hub id, or {DEMO!r}")
    add("output", type=Path, help="new folder to write")
    add("--weights", type=weights_of, default="fp8", help=f"{WEIGHTS_CHOICES}; default: %(default)s")

    about = "make a checkpoint from one and its LoRA adapters (docs/voices.md)"
    add = add_command(commands, "merge", "tools:merge", about).add_argument
    add("model", help=f"folder, hub id, or {DEMO!r}")
    add("adapters", nargs="+", metavar="adapter", help="folder that PEFT has saved")
    add("output", type=Path, help="new folder to write")

    about = "make a checkpoint with random weights, to try every step without a download; what it says is noise"
    add = add_command(commands, "synthetic", "tools:synthetic", about, " (docs/voices.md)").add_argument
    add("output", type=Path, help="new folder to write")
    add("--variant", choices=VARIANTS, default="base", help="default: %(default)s, which clones voices")
    about = "tiny: 4 MB; 0.6b and 1.7b: as large as the published ones; default: %(default)s"
    add("--size", choices=SYNTHETIC_SIZES, default="tiny", help=about)
    add("--seed", type=an_integer, default=0, help="of the weights; default: %(default)s")

    about = "compile the kernel for this machine's GPU, so that the first use does not wait"
    add = add_command(commands, "build", "tools:build", about).add_argument
    add("--weights", type=weights_of, default="bf16", help=f"{WEIGHTS_CHOICES}: each is a build of its own")

    about = "measure the speed on this machine, beside the floor that its memory sets; takes minutes"
    add = add_command(commands, "bench", "qwen_check.commands:bench", about).add_argument
    add("--model", help="folder or hub id; default: random weights on a GPU, else the demo voice")
    add("--size", choices=MODEL_SIZES[:2], help="size of the random weights, on a GPU; default: 0.6b")
    add("--backend", choices=BACKENDS, default="auto")
    add("--weights", type=weights_of, help=WEIGHTS_HELP)
    add("--device", help="cpu, cuda, cuda:1; default: a GPU if there is one")

    about = "tell what this machine can do, and what is known about the kernel on it"
    add = add_command(commands, "doctor", "qwen_check.commands:doctor", about).add_argument
    add("--json", action="store_true", help="print JSON, to report an issue")
    check = "check the kernel on this GPU now, up to a minute; exit code 1 if it fails"
    add("--check", action="store_true", help=check)
    add("--size", choices=MODEL_SIZES, help="size to check; default: 0.6b")
    add("--weights", type=weights_of, help=f"weights to check: {WEIGHTS_CHOICES}; default: bf16")


if __name__ == "__main__":
    sys.exit(main())
