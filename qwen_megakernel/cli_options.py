"""Command line options that several commands share: weights, and who speaks, how, and on what."""

import argparse

from qwen_megakernel.backend.select import BACKENDS
from qwen_megakernel.checkpoint.fp8 import WEIGHTS, parts_of
from qwen_megakernel.checkpoint.load import DEMO, DEMO_NOTICE, PUBLISHED
from qwen_megakernel.errors import BackendError, RequestError
from qwen_megakernel.model.voice import Voice, check_ref_options

WEIGHTS_CHOICES = f"{', '.join(WEIGHTS)}, or parts of it such as talker,lm_heads"
WEIGHTS_HELP = f"{WEIGHTS_CHOICES} (docs/fp8.md); default: as the checkpoint has them"


def weights_of(text: str) -> str | list[str]:
    """What --weights names, as `TTSEngine.load` takes it; argparse's own error for anything else."""
    weights = text if text in WEIGHTS else text.split(",")
    try:
        parts_of(weights)
    except BackendError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return weights


def add_threads(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--threads", type=int, help="to compute with on a CPU; default: measured")


def add_voice_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that say who speaks, how, and on what."""
    parser.add_argument(
        "--model", default=DEMO, help=f"folder, hub id such as {PUBLISHED[1]}, or {DEMO!r} (default: {DEMO_NOTICE})"
    )
    parser.add_argument("--speaker", help="a named speaker (CustomVoice); default: the checkpoint's first")
    parser.add_argument("--language", help="a name or code, such as english, en or en-US; default: auto")
    parser.add_argument("--instruct", help="how to say it (VoiceDesign, 1.7B CustomVoice)")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--voice", metavar="PATH", help="a saved voice, of this checkpoint (Base)")
    whose.add_argument("--ref-audio", metavar="PATH", help="whose voice to clone (Base)")
    parser.add_argument("--ref-text", help="what the reference audio says: closer cloning")
    parser.add_argument("--seed", type=int, help="same text and seed, same speech; default: a fresh one")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--weights", type=weights_of, help=WEIGHTS_HELP)
    parser.add_argument("--device", help="cpu, cuda, cuda:1; default: a GPU if there is one")
    add_threads(parser)


def check_voice_options(args: argparse.Namespace) -> Voice | None:
    """Check these options as far as that needs no model, and load the saved voice if --voice names one.

    Raises:
        RequestError: the options do not go together.
        VoiceError: the file is no voice, or --ref-text is blank.
    """
    check_ref_options(args.ref_audio, args.ref_text)
    if args.speaker is not None and (args.voice is not None or args.ref_audio is not None):
        raise RequestError(
            "--speaker is one of the checkpoint's; --voice and --ref-audio bring another: give one of them"
        )
    return None if args.voice is None else Voice.load(args.voice)
