"""The options of speech: one table. Every entrance takes, checks and documents what the table says.

A field of `RequestOptions` is an option: its name, its type, an `Option` with the rest, and below it what it says.
CONTRIBUTING.md says how to add one.

A server's client checks its options with this module, and a command's help shows them: it imports no torch, no numpy.
"""

import ast
import inspect
import numbers
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast, get_args, get_type_hints

from qwen_megakernel.choices import FASTEST, LONGEST_PAUSE_S, LONGEST_S, MOST_CHUNK, NORMALIZE, SLOWEST, TRIMS
from qwen_megakernel.errors import InstructError, LanguageError, RequestError, SpeakerError, SpeedError, TextError

if TYPE_CHECKING:
    from qwen_megakernel.model.voice import Voice
    from qwen_megakernel.sampling_params import SamplingParams
    from spoken_text.lexicon import Lexicon
else:
    SamplingParams = Voice = Lexicon = object  # their modules need numpy, torch and num2words

COMMANDS = ("speak", "batch", "demo")
CLIENTS = ("http", "socket", "stream")
SERVERS = ("serve", "wyoming")
BOTS = ("pipecat", "remote")
ENTRANCES = ("python", *COMMANDS, "line", *CLIENTS, *SERVERS, *BOTS)
"""`TTSEngine`'s methods; commands; a line that `batch` reads; the server's clients over HTTP, our socket and
vLLM-Omni's; servers' commands, for what clients leave out; Pipecat's services, with the engine here or in a server."""

MOST_RETRIES = 100
_MOST_SIZES = 1000  # of a schedule of chunks
TRIM_TO_S = 0.05
MOST_TEXT = 2000  # characters of a string from a client


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def _schedule(value: Any, name: str) -> tuple[int, ...]:
    """Frames per chunk, from one size or several. The last one repeats."""
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    sizes = tuple(value) if several else (value,)
    if not 0 < len(sizes) <= _MOST_SIZES:
        raise RequestError(f"{name} must name 1 to {_MOST_SIZES} sizes, got {len(sizes)}")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or not 1 <= int(size) <= MOST_CHUNK:
            wanted = f"an integer or a list of integers, each of 1 to {MOST_CHUNK:,} frames"
            raise RequestError(f"{name} must be {wanted}, got {reprlib.repr(size)}")
    return tuple(int(size) for size in sizes)


def _sampled(value: Any, name: str) -> Any:
    from qwen_megakernel.sampling_params import SamplingParams

    return getattr(SamplingParams(**{name: value}), name)


def _sampling(value: Any, name: str) -> Any:
    from qwen_megakernel.sampling_params import SamplingParams

    return _a(SamplingParams, value, name)


def _lexicon(value: Any, name: str) -> Any:
    from spoken_text.lexicon import Lexicon

    return _a(Lexicon, value, name)


def _load_lexicon(path: str) -> Any:
    from spoken_text.lexicon import Lexicon

    return Lexicon.load(path)


@dataclass(frozen=True)
class Option:
    """What an option is, besides its name, its types and what it says."""

    default: Any = None  # what None stands for, if it is not the checkpoint's
    least: float | None = None  # the range of a number, in `unit`
    most: float | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()  # the values of a string
    # Takes a value and its name, returns the checked value. None: the type, range and choices say what is right.
    check: Callable[[Any, str], Any] | None = None
    error: type[RequestError] = RequestError  # what a wrong value raises
    names: Mapping[str, str] = field(default_factory=dict)  # entrance -> the option's name there, if it has another
    without: Mapping[str, str] = field(default_factory=dict)  # entrance -> why it does not take the option
    needs: str = ""  # an option without which, or with its default, this one changes nothing
    words: Mapping[str, Any] = field(default_factory=dict)  # a command line's words for the values
    load: Callable[[str], Any] | None = None  # on a command line: makes the value of a file's name or a list
    typed: str = ""  # the line of help for a command line, where values are written otherwise
    file: str = ""  # the same for commands that take a file's path
    name: str = ""  # `RequestOptions`' name and types
    kinds: tuple[type, ...] = ()

    @property
    def about(self) -> str:
        """One line of help."""
        return _texts()[self.name]

    @property
    def wanted(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        kind = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}[self.kinds[0]]
        if self.most is not None:
            return f"{kind} from {self.least:g} to {self.most:g} {self.unit}".rstrip()
        return kind if self.least is None else f"{kind} of at least {self.least:g} {self.unit}".rstrip()

    def checked(self, value: Any, name: str | None = None, most_text: int | None = None) -> Any:
        """The value in its own type; None stays None.

        Args:
            name: what the caller calls the option.
            most_text: the most characters of a string.

        Raises:
            RequestError: it is of another type, too long or out of range. `field` is the name.
        """
        if value is None:
            return None
        name = name or self.name
        try:
            if most_text is not None and isinstance(value, str) and len(value) > most_text:
                raise self.error(f"{name} has {len(value)} characters, at most {most_text} are allowed")
            if self.check:
                return self.check(value, name)
            kind = self.kinds[0]
            wide = {int: numbers.Integral, float: numbers.Real}.get(kind, kind)
            fits = isinstance(value, wide) and isinstance(value, bool) is (kind is bool)
            fits = fits and (not self.choices or value in self.choices)
            fits = fits and (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
            if not fits:
                raise self.error(f"{name} must be {self.wanted}, got {reprlib.repr(value)}")
            return value if kind is str else kind(value)
        except RequestError as error:
            error.field = name
            raise


def _without(*reasons: tuple[Iterable[str], str]) -> dict[str, str]:
    return {entrance: why for entrances, why in reasons for entrance in entrances}


def _a(kind: type, value: Any, name: str) -> Any:
    if not isinstance(value, kind):
        raise RequestError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    return value


def _voice(value: Any, name: str) -> Any:
    if not isinstance(value, str) and not hasattr(value, "speaker_embedding"):  # a `Voice`
        raise SpeakerError(f"{name} must be a voice's name or a Voice, got {reprlib.repr(value)}")
    return value


_HEARD = (*CLIENTS[1:], *SERVERS, *BOTS)
_NAMED = _without(((*CLIENTS, *SERVERS, *BOTS), "voice names a speaker too"))
_RETRIES = _without((("demo", *_HEARD), "what a listener has heard cannot be said again"))
_FILES = _without((("batch", "line"), "nobody listens while a file is made"))
_LEXICON = _without((("line", *CLIENTS, "remote"), "the operator gives one: --lexicon"))
_PAUSE = _without((ENTRANCES[1:], "write [pause 500ms] into the text"))
_OURS = _without((ENTRANCES[1:], "the entrance decides it"))
_FLAT = _without((ENTRANCES[1:], "its values are options of their own"))
_MANNER = dict.fromkeys(CLIENTS, "instructions")
_LAYOUT = dict.fromkeys((*COMMANDS, *SERVERS), "layout")
_FRAMES = {"stream": "max_new_tokens"}
_FIRST = {"stream": "initial_codec_chunk_frames"}
_TYPED_SIZES = "frames of 80 ms per chunk: a number, or several such as 1,2,4 whose last repeats; default: 1,2,4,8"
_TYPED_LAYOUT = (
    "whole: the model sees the whole text before it speaks; streaming: each frame comes with the next token of text; "
    "default: whole, but streaming with a cloned voice"
)
_VOICE_FILE = "file of a saved voice (Base); a speaker's name goes to --speaker"
_SAMPLED = Option(check=_sampled)


class RequestOptions(TypedDict, total=False):
    """How to say a text: the options of `TTSEngine.submit`. None is an option's default."""

    speaker: Annotated[str | None, Option(error=SpeakerError, without=_NAMED)]
    """a named speaker; default: the first"""
    voice: Annotated[Voice | str | None, Option(check=_voice, file=_VOICE_FILE)]
    """a saved voice, or a speaker"""
    language: Annotated[str | None, Option("auto", error=LanguageError)]
    """a name or code, such as en-US"""
    instruct: Annotated[str | None, Option(error=InstructError, names=_MANNER)]
    """how to say it, if the model heeds it"""
    seed: Annotated[int | None, _SAMPLED]
    """the same text and seed give the same speech; default: a new one each time"""
    temperature: Annotated[float | None, _SAMPLED]
    """how freely codes are drawn; default: the checkpoint's"""
    top_k: Annotated[int | None, _SAMPLED]
    """draw from the k likeliest codes, 0: from all; default: the checkpoint's"""
    top_p: Annotated[float | None, _SAMPLED]
    """draw from codes of this total probability; default: the checkpoint's"""
    repetition_penalty: Annotated[float | None, _SAMPLED]
    """above 1: code 0 repeats less; default: the checkpoint's"""
    sampling: Annotated[SamplingParams | None, Option(check=_sampling, without=_FLAT)]
    """all of these"""
    speed: Annotated[float | None, Option(1.0, SLOWEST, FASTEST, error=SpeedError)]
    """times as fast, at the same pitch"""
    trim: Annotated[str | None, Option("none", choices=TRIMS)]
    """where to cut silence"""
    silence_s: Annotated[float | None, Option(TRIM_TO_S, 0, LONGEST_S, "seconds", needs="trim")]
    """seconds of silence that trim leaves"""
    normalize: Annotated[str | None, Option("off", choices=NORMALIZE, error=TextError)]
    """auto: digits, Markdown and links become words"""
    lexicon: Annotated[Lexicon | None, Option(check=_lexicon, load=_load_lexicon, without=_LEXICON)]
    """words with other spellings to read"""
    non_streaming_mode: Annotated[
        bool | None, Option(names=_LAYOUT, words={"whole": True, "streaming": False}, typed=_TYPED_LAYOUT)
    ]
    """true: the model sees the whole text before it speaks; default: true, but false with a cloned voice"""
    max_frames: Annotated[int | None, Option(None, 1, names=_FRAMES)]
    """at most so many frames of 80 ms; default: what fits"""
    chunk_frames: Annotated[
        int | Sequence[int] | None,
        Option(None, 1, MOST_CHUNK, check=_schedule, load=_sizes, typed=_TYPED_SIZES, names=_FIRST, without=_FILES),
    ]
    """frames of 80 ms per chunk, one number or a schedule whose last number repeats; default: 1, 2, 4, 8, 8, ..."""
    retries: Annotated[int | None, Option(0, 0, MOST_RETRIES, without=_RETRIES)]
    """how often to say it again if it ends badly"""
    pause_s: Annotated[float | None, Option(0.0, 0, LONGEST_PAUSE_S, "seconds", without=_PAUSE)]
    """seconds of silence before it"""
    lenient: Annotated[bool | None, Option(False, without=_OURS)]
    """leave out tags that cannot be followed"""
    runaway_guard: Annotated[bool | None, Option(True, without=_OURS)]
    """end speech that does not end by itself"""
    reproducible: Annotated[bool | None, Option(False, without=_OURS)]
    """samples depend on the request alone"""


@cache
def _texts() -> dict[str, str]:
    """What stands below each field of `RequestOptions`, where editors find it too."""
    (fields,) = ast.parse(inspect.getsource(RequestOptions)).body
    assert isinstance(fields, ast.ClassDef)
    return {
        ast.unparse(field.target): ast.literal_eval(text.value)
        for field, text in pairwise(fields.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


@cache
def table() -> dict[str, Option]:
    """All options, by `RequestOptions`' names."""
    rows = {}
    for name, hint in get_type_hints(RequestOptions, include_extras=True).items():
        kinds, option = get_args(hint)
        rows[name] = replace(option, name=name, kinds=tuple(kind for kind in get_args(kinds) if kind is not NoneType))
    return rows


@cache
def options_of(entrance: str) -> dict[str, Option]:
    """The options that an entrance takes, by their names there."""
    return {row.names.get(entrance, name): row for name, row in table().items() if entrance not in row.without}


def why_not(name: str, entrance: str) -> str | None:
    """Why an entrance does not take this option; None: it is no option, or it is taken."""
    row = table().get(name)
    return row.without.get(entrance) if row else None


def idle(options: Mapping[str, Any]) -> dict[str, str]:
    """The given options that change nothing beside the others, each with the one that it needs. By `RequestOptions`'
    names."""
    rows, given = table(), {name for name, value in options.items() if value is not None}
    return {
        name: row.needs
        for name, row in rows.items()
        if name in given and row.needs and options.get(row.needs) in (None, rows[row.needs].default)
    }


def read_options(given: Mapping[str, Any], entrance: str, *, also: Iterable[str] = ()) -> RequestOptions:
    """What an entrance was given, checked as far as no model is needed, by `RequestOptions`' names. None is left out.

    Args:
        also: fields of the entrance that are no options, for a message.

    Raises:
        RequestError: an option that the entrance does not take, or a value of another type or out of range.
    """
    known = options_of(entrance)
    read: dict[str, Any] = {}
    for name, value in given.items():
        row = known.get(name)
        if row is None:
            wanted = why_not(name, entrance) or f"known: {', '.join([*also, *known])}"
            raise RequestError(f"unknown option {name[:40]!r}; {wanted}", field=name[:40])
        if (checked := row.checked(value, name, MOST_TEXT if entrance in CLIENTS else None)) is not None:
            read[row.name] = checked
    return cast(RequestOptions, read)
