"""SpeechSettings: what may change while a pipeline runs, and the checks that need no model."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Self

from pipecat.services.settings import TTSSettings
from pipecat.utils.types import NOT_GIVEN

from qwen_megakernel.checkpoint.languages import find_language
from qwen_megakernel.errors import LanguageError, RequestError, SpeakerError
from qwen_megakernel.speech.options import RequestOptions, options_of, read_options

OPTIONS = options_of("pipecat")
_OURS = [name for name in OPTIONS if name not in ("voice", "language")]  # Pipecat's own settings have these two

# Any: type checkers cannot see fields that a table makes.
_Options: Any = make_dataclass(
    "_Options", [(name, Any, field(default_factory=lambda: NOT_GIVEN)) for name in _OURS], bases=(TTSSettings,)
)


@dataclass
class SpeechSettings(_Options):
    """The model, which is fixed once the service is made, and the options of speech (docs/options.md). None is an
    option's default. A change applies to the next sentence (SENTENCE mode) or opens a new utterance (TOKEN mode).

    `voice` is a speaker of the checkpoint, or a voice of the server. `language` is a `Language`, a code or a name.
    """

    @classmethod
    def unset(cls, model: str | None) -> Self:
        """Settings with every option's default."""
        return cls(model=model, **dict.fromkeys(OPTIONS))

    def options(self, entrance: str, *, in_tokens: bool) -> RequestOptions:
        """The options that are set, checked as far as no model is needed.

        Args:
            entrance: "pipecat" or "remote".
            in_tokens: the service is in TOKEN mode.

        Raises:
            RequestError: a value of another type or out of range, or text in pieces cannot be spoken like this.
        """
        given = {name: getattr(self, name) for name in OPTIONS}
        options = read_options({name: value for name, value in given.items() if value is not None}, entrance)
        if options.get("non_streaming_mode") and in_tokens:
            raise RequestError(
                "non_streaming_mode=True needs whole sentences, but in TOKEN mode text comes in pieces: leave "
                "non_streaming_mode out, or take TextAggregationMode.SENTENCE"
            )
        return options


def check_names(
    settings: SpeechSettings,
    voices: Collection[str] | None,
    languages: Sequence[str] | None,
    *,
    unseen: str,
    no_voices: str,
) -> None:
    """Check voice and language.

    Args:
        voices: the known voices; None: not known yet, so only a blank name is refused.
        languages: the known languages, likewise.
        unseen: words for an error message: what is not known yet.
        no_voices: words for an error message if there are no known voices.

    Raises:
        SpeakerError, LanguageError: unknown; the message lists the known ones.
    """
    voice, language = settings.voice, settings.language
    if language is not None and not isinstance(language, str):
        raise LanguageError(f"language must be a string or a Language, got {type(language).__name__}")
    if isinstance(voice, str) and not _is_among(voice, voices):
        raise SpeakerError(f"unknown voice {voice!r}; known: {', '.join(voices or ()) or no_voices}")
    if language is not None and languages is not None:
        find_language(language, languages)
    elif language is not None and not language.strip():
        raise LanguageError(f"unknown language {language!r}; known: {unseen}")


def _is_among(name: str, known: Collection[str] | None) -> bool:
    return bool(name.strip()) and (known is None or name.lower() in {one.lower() for one in known})
