"""Command line options that several commands share: the engine's, those of speech, and where speech goes.

Help shows them, so what takes long to import is imported by the functions that need it.
"""

import argparse
import os
import sys
import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin, get_type_hints

from qwen_megakernel.choices import (
    AUDIOBOOK,
    BACKENDS,
    DEMO,
    DEMO_NOTICE,
    ENDINGS,
    LOG_FORMATS,
    LONGEST_PAUSE_S,
    OUT,
    PARTS,
    PLAYERS,
    PUBLISHED,
    WEIGHTS,
    parts_of,
)
from qwen_megakernel.commands.config import PREFIX, actions_of, config_file, from_environment, from_file
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.errors import BackendError, RequestError, VoiceError
from qwen_megakernel.server.limits import Limits
from qwen_megakernel.server.options import OPENAI_NAMES, ServerOptions, rows_of
from qwen_megakernel.speech.options import COMMANDS, SERVERS, RequestOptions, options_of, read_options, table

if TYPE_CHECKING:
    from qwen_megakernel.model.voice import Voice

WEIGHTS_CHOICES = f"{', '.join(WEIGHTS)}, or parts of it such as talker,lm_heads"
WEIGHTS_HELP = f"{WEIGHTS_CHOICES} (docs/fp8.md); default: as the checkpoint has them"

_PAUSES = "0.45,0.9,1.8"  # a sentence's is about the model's own
_OF_BOOKS = "split subtitles read-along speakers quotes footnotes matter chapters list preview cover".split()
_OF_BOOKS += ["title", "author", "loudness"]


def shown(text: str, keep: str = "") -> str:
    """Make a text safe to print. What comes from a file may hold characters that a terminal takes for commands. `keep`:
    such characters that stay, as line breaks."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def told(error: Exception, args: argparse.Namespace) -> str:
    """An error as a line for standard error. Where it begins with the name of an argument in Python, which is an option
    here, it names the option."""
    name, must, rest = str(error).partition(" must ")
    words = f"{_flag(name)}{must}{rest}" if must and name in vars(args) else str(error)
    return shown(f"error: {words}", keep="\n\t")


def refuse_unknown_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """If a word is an option that the parser does not have, end the process as argparse does, with the usage. The
    message names the most similar option."""
    known = list(parser._option_string_actions)
    for word in words:
        if word == "--":
            return
        name = word.partition("=")[0]
        row = table().get(name.removeprefix("--").replace("-", "_"))
        # As in argparse: a word with a space is a value, and an option may be abbreviated, but not by another's name.
        meant = name in known if row else any(option.startswith(name) for option in known)
        if name.startswith("--") and " " not in word and not meant:
            near = get_close_matches(name, known, n=1)
            refused = [row.without[e] for e in (*COMMANDS, *SERVERS) if e in row.without] if row else []
            if name.removeprefix("--") in _OF_BOOKS:
                refused = [f"it is for books, which {AUDIOBOOK} reads"]
            hint = f": {refused[0]}" if refused and refused[0] else f"; did you mean {near[0]}?" if near else ""
            parser.error(f"unknown option {name}{hint}")


class CommandParser(argparse.ArgumentParser):
    """A command's parser. It refuses unknown arguments itself, because argparse would print the whole program's
    usage.

    Attributes:
        configured: a file and the environment may give its options too.
    """

    configured = False

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else args
        if self._subparsers is None:  # else its commands know their options
            refuse_unknown_options(self, args)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            if unknown[0].startswith("-"):
                self.error(f"unknown option {unknown[0]}")
            near = ", such as --text" if "--text" in self._option_string_actions else ""
            self.error(f"unexpected words: {' '.join(unknown)}; put them behind an option{near}")
        if self.configured:
            self._add_configured(args, namespace)
        return namespace, unknown

    def _add_configured(self, args: Sequence[str], namespace: argparse.Namespace) -> None:
        """Give the namespace the options of file and environment that the command line lacks, and `sources`: where each
        option comes from."""
        actions, typed = actions_of(self), self._given(args)
        namespace.sources = {}
        layers = [("environment", partial(from_environment, os.environ, actions))]
        if path := config_file(typed):
            layers.insert(0, (f"file {path}", partial(from_file, path, actions)))
        try:
            for source, read in layers:
                words, off = read()
                for name, value in {**self._given(words), **off}.items():
                    setattr(namespace, name, value)
                    namespace.sources[name] = source
        except BackendError as error:
            self.error(shown(str(error)))
        for name, value in typed.items():
            setattr(namespace, name, value)
            namespace.sources[name] = "command line"

    def _given(self, words: Sequence[str]) -> dict[str, Any]:
        """The options that these words give, without defaults."""
        defaults = [(action, action.default) for action in self._actions]
        try:
            for action, _ in defaults:
                action.default = argparse.SUPPRESS
            given, _ = super().parse_known_args(list(words), argparse.Namespace())
        finally:
            for action, default in defaults:
                action.default = default
        return {name: value for name, value in vars(given).items() if name not in self._defaults}


def add_command(commands: argparse._SubParsersAction, name: str, run: str, about: str, more: str = "") -> CommandParser:
    """Add a command. `run`: the function that runs it, as "module of commands/:name"; it is imported only then. The
    description is `about` and `more`."""
    parser = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}{more}.")
    parser.set_defaults(run=run, parser=parser)
    return parser


def weights_of(text: str) -> str | list[str]:
    """The value of --weights, as `TTSEngine.load` takes it. Raises argparse's own error for anything else."""
    weights = text if text in WEIGHTS else text.split(",")
    try:
        parts_of(weights)
    except BackendError:
        words = f"expected {', '.join(WEIGHTS)}, or some of {','.join(PARTS)}, got {text!r}"
        raise argparse.ArgumentTypeError(words) from None
    return weights


class Pauses(NamedTuple):
    """Seconds of silence before a piece, one value for each `Break` between it and the piece before."""

    clause: float
    sentence: float
    paragraph: float
    chapter: float


def pauses_of(text: str) -> Pauses:
    """Read pauses. A missing pause is twice the one before. A clause's pause is a third of a sentence's."""
    try:
        seconds = [float(part) for part in text.split(",")]
    except ValueError:
        seconds = []
    if not 1 <= len(seconds) <= 3 or not all(0 <= s <= LONGEST_PAUSE_S for s in seconds):
        raise argparse.ArgumentTypeError(
            f"expected one to three seconds from 0 to {LONGEST_PAUSE_S:g}, such as 0.45,0.9,1.8, got {text!r}"
        )
    while len(seconds) < 3:
        seconds.append(min(LONGEST_PAUSE_S, 2 * seconds[-1]))
    return Pauses(seconds[0] / 3, *seconds)


def _reader_of(kind: type) -> Callable[[str], Any]:
    """Reads a number for argparse, whose own words for a wrong one do not say what was expected."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            wanted = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}") from None

    return read


an_integer, a_number = _reader_of(int), _reader_of(float)

_ENGINE: dict[str, dict[str, Any]] = {
    "backend": {"choices": BACKENDS},
    "dtype": {"choices": ("float32", "bfloat16"), "help": "default: bfloat16 on a GPU, float32 on a CPU"},
    "weights": {"type": weights_of, "help": WEIGHTS_HELP},
    "vocoder_dtype": {"choices": ("float32", "tf32", "bfloat16"), "help": "tf32: on a GPU; default: float32"},
    "fallback": {"choices": ("torch",)},
    "allow_foreign_voice": {"action": "store_true"},
}
_DEFAULTS = {"max_streams": "32 on a GPU, 2 on a CPU", "max_queue": "as --max-streams"}  # where a command has its own


def add_engine_options(
    parser: argparse._ActionsContainer, *, without: Collection[str] = (), **defaults: int | None
) -> None:
    """Add --model and the options of `EngineOptions`. `without`: those that the command chooses itself. `**defaults`:
    where they are not `EngineOptions`' own."""
    notice = f"folder, hub id such as {PUBLISHED[1]}, or {DEMO!r} (default: {DEMO_NOTICE})"
    parser.add_argument("--model", default=DEMO, help=notice)
    hints = get_type_hints(EngineOptions, include_extras=True)
    for field in fields(EngineOptions):
        if field.name in ("patience", *without):
            continue
        kind, about = get_args(hints[field.name])
        plain = get_args(kind)[0] if get_origin(kind) is types.UnionType else kind
        how: dict[str, Any] = {"dest": field.name, "default": defaults.get(field.name, field.default), "help": about}
        if field.name == "adapters":
            about += "; may be given several times"
            how |= {"action": "append", "default": [], "metavar": "PATH", "help": about}
        elif plain in (int, float):
            how |= {"type": an_integer if plain is int else a_number}
            if how["default"] is not None:
                how["help"] += "; default: %(default)s"
            elif field.name in _DEFAULTS:
                how["help"] += f"; default: {_DEFAULTS[field.name]}"
        flag = "--adapter" if field.name == "adapters" else _flag(field.name)
        parser.add_argument(flag, **how | _ENGINE.get(field.name, {}))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def engine_options(args: argparse.Namespace, **changes: Any) -> EngineOptions:
    """The engine's options of a command line. `changes` replace them."""
    names = [field.name for field in fields(EngineOptions) if hasattr(args, field.name)]
    return EngineOptions(**{name: getattr(args, name) for name in names} | changes)


_SLOTS = {"cuda": 32, "cpu": 2}
"""Utterances at once by default. A CPU computes them one by one; the second is ready when the first ends."""


def slots_of(args: argparse.Namespace) -> int:
    """How many utterances to speak at once: --max-streams, or what suits the device. Raises RequestError: --max-streams
    is below one. Raises BackendError: there is no such device."""
    from qwen_megakernel.backend.select import select_device

    slots = args.max_streams if args.max_streams is not None else _SLOTS[select_device(args.device).type]
    if slots < 1:
        raise RequestError(f"--max-streams must be at least 1, got {slots}")
    return slots


def add_speech_options(parser: argparse._ActionsContainer, entrance: str) -> None:
    """Add the options of speech that this entrance takes."""
    for name, row in options_of(entrance).items():
        about = (row.file if entrance in COMMANDS else "") or row.typed or row.about
        default = "" if row.default is None or "default:" in about else f"; default: {row.default}"
        how: dict[str, Any] = {"help": about + default}
        if row.kinds[0] in (int, float) and not row.load:
            how["type"] = an_integer if row.kinds[0] is int else a_number
        if row.name in ("voice", "lexicon") and entrance in COMMANDS or row.name == "lexicon":
            how["metavar"] = "PATH"
        if row.choices or row.words:
            how["choices"] = row.choices or tuple(row.words)
        parser.add_argument(_flag(name), **how)


def speech_options(args: argparse.Namespace, entrance: str) -> RequestOptions:
    """The options of speech that were given on a command line. Raises RequestError: a value is out of range, or a file
    cannot be read."""
    given = {}
    for name, row in options_of(entrance).items():
        if (value := getattr(args, name)) is None:
            continue
        if row.words:
            value = row.words[value]
        elif row.load:
            try:
                value = row.load(value)
            except ValueError as error:
                if isinstance(error, RequestError):
                    raise
                wanted = row.typed.partition("; default")[0]
                raise RequestError(f"{_flag(name)} must be {wanted}, got {value!r}", field=name) from None
        given[name] = value
    return read_options(given, entrance)


def add_recordings(parser: argparse._ActionsContainer, **options: Any) -> None:
    """Add --ref-audio, which may be given several times, and --ref-text. `options`: argparse's for the former."""
    words = "recording of the voice to clone (Base); give it again for more of the same speaker"
    parser.add_argument("--ref-audio", metavar="PATH", action="append", help=words, **options)
    parser.add_argument("--ref-text", help="what the (first) recording says, for a closer voice")


def add_voice_options(parser: argparse._ActionsContainer, entrance: str) -> None:
    """Add the options of speech, and those that make a voice of recordings."""
    add_speech_options(parser, entrance)
    add_recordings(parser)


def voice_options(args: argparse.Namespace, entrance: str) -> RequestOptions:
    """The options of speech, after the checks that need no model. --voice, which names one of --voices or a file, is
    loaded. Raises RequestError: the options do not go together, a value is out of range, or --voices is no folder.
    Raises VoiceError: there is no such voice, the file is none, or --ref-text is too long. Raises AudioError: too many
    recordings, or one cannot be read."""
    from qwen_megakernel.model.voice import Voice, check_ref_options

    options = speech_options(args, entrance)
    voice, speaker = options.get("voice"), options.get("speaker")
    if voice is not None and args.ref_audio is not None:
        raise RequestError("--voice and --ref-audio both say whose voice: give one of them")
    if speaker is not None and (voice is not None or args.ref_audio is not None):
        other = "--voice and --ref-audio bring another: give one of them"
        raise RequestError(f"--speaker names a voice of the checkpoint, {other}")
    if args.allow_foreign_voice and voice is None and getattr(args, "voices", None) is None:
        raise RequestError("--allow-foreign-voice needs a saved voice: give --voice too")
    check_ref_options(args.ref_audio, args.ref_text)
    if isinstance(voice, str):
        folder = getattr(args, "voices", None)
        saved = voices_in(folder)
        if voice.lower() not in saved and folder is not None and not Path(voice).is_file():
            why = f"is neither a voice in --voices {folder} nor a file; voices there: {', '.join(saved) or 'none'}"
            raise VoiceError(f"--voice {voice!r} {why}")
        options["voice"] = saved.get(voice.lower()) or Voice.load(voice)
    return options


def check_voice(variant: str, options: RequestOptions) -> None:
    """Check that there is a voice where the checkpoint, of this variant, needs one. Raises VoiceError: it is
    missing."""
    if variant == "base" and options.get("voice") is None and not options.get("speaker"):
        words = "give a saved one with --voice FILE, or make one of a recording with --ref-audio FILE"
        raise VoiceError(f"a Base checkpoint needs a voice: {words}")


def add_server_options(parser: CommandParser, entrance: str, *, streams: int) -> None:
    """Add the options of a server and of its engine. `streams`: the default of --max-streams."""
    parser.configured = True
    about = f"TOML file of options, named as here; {PREFIX}* variables and the command line go before it"
    parser.add_argument("--config", metavar="FILE", help=about)
    parser.add_argument("--print-config", action="store_true", help="print the options in force as TOML, and end")
    add_engine_options(parser, max_streams=streams, max_positions=1024, max_queue=None)
    add_speech_options(parser, entrance)
    for name, (kind, row) in rows_of(entrance).items():
        default = getattr(ServerOptions(), name)
        how: dict[str, Any] = {"dest": name, "help": row.about}
        if kind is bool:
            how |= {"action": argparse.BooleanOptionalAction, "default": None}
        elif get_origin(kind) is types.UnionType:
            how |= {"metavar": row.metavar, "type": an_integer if get_args(kind)[0] is int else get_args(kind)[0]}
        elif kind in (str, float):
            how |= {"metavar": row.metavar, "default": default, "help": f"{row.about}; default: %(default)s"}
            how |= {"choices": LOG_FORMATS} if name == "log_format" else {"type": a_number}
        else:
            about = f"{row.about}; may be given several times"
            how |= {"metavar": row.metavar, "action": "append", "default": [], "help": about}
            how["type"] = _alias_of if name == "voice_aliases" else str
        parser.add_argument(_flag(row.typed or name), **how)


def server_options(args: argparse.Namespace, entrance: str, **changes: Any) -> ServerOptions:
    """The server's options of a command line. `changes` replace them. Raises RequestError: as `speech_options`. Raises
    BackendError: no client could send the token or a served name."""
    given = {field.name: getattr(args, field.name) for field in fields(ServerOptions) if hasattr(args, field.name)}
    given = {name: value for name, value in given.items() if value is not None}
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    aliases = given.pop("voice_aliases", ())
    given["voice_aliases"] = dict(alias for alias in aliases if alias != OPENAI_NAMES)
    given |= {"openai_voices": OPENAI_NAMES in aliases, "defaults": speech_options(args, entrance)}
    given["lexicon_file"] = Path(args.lexicon) if args.lexicon else None
    given["limits"] = Limits.of(args.max_streams)
    return ServerOptions(**given | changes)


def voices_in(folder: Path | None) -> "dict[str, Voice]":
    """The saved voices of --voices by their names. Raises RequestError: no such folder. Raises VoiceError: a file is no
    voice."""
    from qwen_megakernel.speech.saved_voices import SavedVoices

    if folder is None:
        return {}
    if not folder.is_dir():
        raise RequestError(f"--voices: no folder {str(folder)!r}; name one that holds saved voices")
    return SavedVoices(folder).by_name


def _alias_of(text: str) -> tuple[str, str] | str:
    if text.strip().lower() == OPENAI_NAMES:
        return OPENAI_NAMES
    alias, equals, voice = (part.strip() for part in text.partition("="))
    if not (alias and equals and voice):
        raise argparse.ArgumentTypeError(f"expected ALIAS=VOICE, such as alloy=ada, or {OPENAI_NAMES}, got {text!r}")
    return alias, voice


def add_output_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that say where speech goes."""
    where = f"sound file, by its ending {', '.join(ENDINGS)}; - for raw PCM16 on stdout; default: {OUT}"
    parser.add_argument("-o", "--output", metavar="PATH", help=where)
    player = f"play it with {', '.join(PLAYERS)}; without --output no file is kept"
    parser.add_argument("--play", action="store_true", help=player)


def add_reading_options(parser: argparse._ActionsContainer, kinds: str, voices: str) -> None:
    """Add the options of a command that reads a text aloud. `kinds`: of texts that --file may be. `voices`: what
    --voices is for."""
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", help="what to say")
    text.add_argument("--file", metavar="PATH", help=f"read the {kinds} of this file, or - for standard input")
    add_output_options(parser)
    parser.add_argument("--keep-partial", action="store_true", help="after an interrupt, keep what was said so far")
    about = f"seconds of silence between pieces of a long text; default: {_PAUSES}"
    parser.add_argument(
        "--pause", metavar="SENTENCE[,PARAGRAPH[,CHAPTER]]", type=pauses_of, default=pauses_of(_PAUSES), help=about
    )
    parser.add_argument("--voices", metavar="DIR", type=Path, help=f"saved voices for {voices} (Base)")
    add_engine_options(parser, without=("max_queue", "queue_timeout"), max_streams=None)
    add_voice_options(parser, "speak")
    parser.add_argument("--save-voice", metavar="PATH", help="save the voice of --ref-audio, for --voice and `serve`")
    parser.add_argument("--stream", action="store_true", help="print when each chunk came")
