"""Command line options that several commands share: weights, voice, settings, device and output."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from qwen_megakernel.backend.select import BACKENDS, select_device
from qwen_megakernel.checkpoint.config import SamplingParams
from qwen_megakernel.checkpoint.fp8 import WEIGHTS, parts_of
from qwen_megakernel.checkpoint.load import DEMO, DEMO_NOTICE, PUBLISHED
from qwen_megakernel.commands.output import OUT, PLAYERS
from qwen_megakernel.errors import BackendError, RequestError
from qwen_megakernel.model.edges import TRIMS
from qwen_megakernel.model.time_stretch import check_speed
from qwen_megakernel.model.voice import Voice, check_ref_options
from qwen_megakernel.speech.encoders import ENDINGS
from qwen_megakernel.text.front_end import NORMALIZE
from qwen_megakernel.text.lexicon import Lexicon

LAYOUTS = {"whole": True, "streaming": False}
"""Value of --layout -> `non_streaming_mode`."""

WEIGHTS_CHOICES = f"{', '.join(WEIGHTS)}, or parts of it such as talker,lm_heads"
WEIGHTS_HELP = f"{WEIGHTS_CHOICES} (docs/fp8.md); default: as the checkpoint has them"


def refuse_unknown_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """If a word is an option that the parser does not have, end the process as argparse does, with the usage. The
    message names the most similar option."""
    known = list(parser._option_string_actions)
    for word in words:
        if word == "--":
            return
        name = word.partition("=")[0]
        # As in argparse: a word with a space is a value, and an option may be abbreviated.
        if name.startswith("--") and " " not in word and not any(option.startswith(name) for option in known):
            near = get_close_matches(name, known, n=1)
            parser.error(f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else ""))


class CommandParser(argparse.ArgumentParser):
    """A command's parser. It refuses unknown arguments itself, because argparse would print the whole program's
    usage."""

    def parse_known_args(self, args=None, namespace=None):
        if self._subparsers is None:  # else its commands know their options
            refuse_unknown_options(self, args)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            if unknown[0].startswith("-"):
                self.error(f"unknown option {unknown[0]}")
            near = ", such as --text" if "--text" in self._option_string_actions else ""
            self.error(f"unexpected words: {' '.join(unknown)}; put them behind an option{near}")
        return namespace, unknown


def weights_of(text: str) -> str | list[str]:
    """The value of --weights, as `TTSEngine.load` takes it. Raises argparse's own error for anything else."""
    weights = text if text in WEIGHTS else text.split(",")
    try:
        parts_of(weights)
    except BackendError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return weights


def add_recordings(parser: argparse._ActionsContainer, **options) -> None:
    """Add --ref-audio, which may be given several times. `options`: argparse's."""
    words = "recording of the voice to clone (Base); give it again for more of the same speaker"
    parser.add_argument("--ref-audio", metavar="PATH", action="append", help=words, **options)


def add_ref_text(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--ref-text", help="what the (first) recording says, for a closer voice")


def add_foreign_voice(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--allow-foreign-voice",
        action="store_true",
        help="an experiment: CustomVoice speaks with a Base checkpoint's voice (docs/voices.md)",
    )


def add_threads(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--threads", type=int, help="CPU threads to compute with; default: the fastest number, measured"
    )


def add_adapters(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--adapter",
        metavar="PATH",
        action="append",
        default=[],
        help="a LoRA adapter of the model, a folder in PEFT's format; may be given several times",
    )


def add_engine_of_server(parser: argparse._ActionsContainer, *, streams: int) -> None:
    """Add the options for a server's model, device and log. `streams`: the default of --max-streams."""
    parser.add_argument("--model", default=DEMO, help=f"folder, hub id such as {PUBLISHED[1]}, or {DEMO!r}")
    add_adapters(parser)
    parser.add_argument("--max-streams", type=int, default=streams, help="utterances at once; default: %(default)s")
    parser.add_argument(
        "--max-positions",
        type=int,
        default=1024,
        help="positions of a slot: an utterance's prompt and frames; default: %(default)s",
    )
    parser.add_argument(
        "--voices", metavar="DIR", type=Path, help="folder of saved voices (Voice.save), each named by its file"
    )
    add_foreign_voice(parser)
    add_text_options(parser)
    parser.add_argument("--log-texts", action="store_true", help="log the texts too, not only lengths and times")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--weights", type=weights_of, help=WEIGHTS_HELP)
    parser.add_argument("--device", help="cpu, cuda, cuda:1; default: a GPU if there is one")
    add_threads(parser)


def add_text_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that say how written text is prepared for speaking."""
    about = "auto turns digits, Markdown and links into words (docs/text.md); default: %(default)s"
    parser.add_argument("--normalize", choices=NORMALIZE, default="off", help=about)
    parser.add_argument("--lexicon", metavar="PATH", help="JSON or CSV file of words and how to read them")


def lexicon_of(args: argparse.Namespace) -> Lexicon | None:
    """The lexicon that the options name. Raises TextError for a file that is no lexicon."""
    return None if args.lexicon is None else Lexicon.load(args.lexicon)


def add_served_names(parser: argparse._ActionsContainer) -> None:
    """Add the options that give a server's model and voices more names."""
    more = "may be given several times"
    parser.add_argument(
        "--served-name", metavar="NAME", action="append", default=[], help=f"another name of the model; {more}"
    )
    parser.add_argument(
        "--voice-alias",
        metavar="ALIAS=VOICE",
        type=_alias_of,
        action="append",
        default=[],
        help=f"another name of a voice, such as alloy=ada; {more}",
    )


def _alias_of(text: str) -> tuple[str, str]:
    alias, equals, voice = (part.strip() for part in text.partition("="))
    if not (alias and equals and voice):
        raise argparse.ArgumentTypeError(f"expected ALIAS=VOICE, such as alloy=ada, got {text!r}")
    return alias, voice


def add_voice_options(parser: argparse._ActionsContainer, seed: str = "a new one each time") -> None:
    """Add the options for voice, manner and device. `seed`: the default of --seed, in words."""
    parser.add_argument(
        "--model", default=DEMO, help=f"folder, hub id such as {PUBLISHED[1]}, or {DEMO!r} (default: {DEMO_NOTICE})"
    )
    add_adapters(parser)
    parser.add_argument("--speaker", help="a named speaker (CustomVoice); default: the checkpoint's first")
    parser.add_argument("--language", help="a name or code, such as english, en or en-US; default: auto")
    parser.add_argument("--instruct", help="how to say it (VoiceDesign, 1.7B CustomVoice)")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--voice", metavar="PATH", help="file of a saved voice, made with this checkpoint (Base)")
    add_recordings(whose)
    add_ref_text(parser)
    add_foreign_voice(parser)
    parser.add_argument("--seed", type=int, help=f"the same text and seed give the same speech; default: {seed}")
    parser.add_argument("--temperature", type=float, help="how freely codes are drawn; default: the checkpoint's")
    parser.add_argument(
        "--top-k", type=int, help="draw from the k likeliest codes, 0: from all; default: the checkpoint's"
    )
    parser.add_argument(
        "--top-p", type=float, help="draw from the likeliest codes of this total probability; default: the checkpoint's"
    )
    parser.add_argument(
        "--repetition-penalty", type=float, help="above 1: code 0 repeats less; default: the checkpoint's"
    )
    add_text_options(parser)
    parser.add_argument("--trim", choices=TRIMS, default="none", help="where to cut silence; default: %(default)s")
    parser.add_argument("--speed", type=float, default=1.0, help="0.25 to 4.0 times as fast, at the same pitch")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="whole: the model sees the whole text before it speaks; default: whole, but streaming with a cloned voice",
    )
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--weights", type=weights_of, help=WEIGHTS_HELP)
    parser.add_argument("--device", help="cpu, cuda, cuda:1; default: a GPU if there is one")
    add_threads(parser)


_SLOTS = {"cuda": 32, "cpu": 2}
"""Utterances at once by default. A CPU computes them one by one; the second is ready when the first ends."""


def slots_of(args: argparse.Namespace) -> int:
    """How many utterances to speak at once: --max-streams, or what suits the device.

    Raises:
        RequestError: --max-streams is below one.
        BackendError: there is no such device.
    """
    slots = args.max_streams if args.max_streams is not None else _SLOTS[select_device(args.device).type]
    if slots < 1:
        raise RequestError(f"--max-streams must be at least 1, got {slots}")
    return slots


def add_output_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that say where speech goes."""
    parser.add_argument(
        "-o",
        "--output",
        metavar="PATH",
        help=f"sound file, by its ending {', '.join(ENDINGS)}; - for raw PCM16 on stdout; default: {OUT}",
    )
    parser.add_argument(
        "--play", action="store_true", help=f"play it with {', '.join(PLAYERS)}; without --output no file is kept"
    )


def sampling_of(args: argparse.Namespace, seed: int | None) -> SamplingParams:
    """How the model's codes are drawn, code 0 and codes 1 to 15 alike.

    Raises:
        SamplingError: a value out of its range.
    """
    return SamplingParams.for_both(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
        seed=seed,
    )


def check_voice_options(args: argparse.Namespace) -> Voice | None:
    """Make the checks that need no model, and load the saved voice if --voice names one.

    Raises:
        RequestError: the options do not go together, or the speed is out of range.
        SamplingError: a sampling value is out of range.
        VoiceError: the file is no voice, or --ref-text is blank.
        AudioError: too many recordings.
    """
    sampling_of(args, args.seed)
    check_speed(args.speed)
    check_ref_options(args.ref_audio, args.ref_text)
    if args.speaker is not None and (args.voice is not None or args.ref_audio is not None):
        raise RequestError(
            "--speaker names a voice of the checkpoint, --voice and --ref-audio bring another: give one of them"
        )
    if args.allow_foreign_voice and args.voice is None and getattr(args, "voices", None) is None:
        raise RequestError("--allow-foreign-voice needs a saved voice: give --voice too")
    return None if args.voice is None else Voice.load(args.voice)
