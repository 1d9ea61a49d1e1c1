"""SpeechSettings: what may change while a pipeline runs, and the checks that need no model."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pipecat.services.settings import TTSSettings
from pipecat.transcriptions.language import Language
from pipecat.utils.types import NOT_GIVEN, NotGiven

from qwen_megakernel.errors import LanguageError, RequestError, SpeakerError
from qwen_megakernel.speech.options import RequestOptions, options_of, read_options
from spoken_text.languages import find_language
from spoken_text.lexicon import Lexicon

OPTIONS = options_of("pipecat")


@dataclass
class SpeechSettings(TTSSettings):
    """The model, which is fixed once the service is made, and the options of speech (docs/options.md). None is an
    option's default."""

    voice: str | None | NotGiven = NOT_GIVEN
    """A speaker of the checkpoint, or a voice of the server. None: the first."""
    language: Language | str | None | NotGiven = NOT_GIVEN
    """A `Language`, a code or a name. None: auto."""
    # fields: `python tools/options_table.py` writes them
    instruct: str | None | NotGiven = NOT_GIVEN
    """how to say it, if the model heeds it"""
    seed: int | None | NotGiven = NOT_GIVEN
    """the same text and seed give the same speech; default: a new one each time"""
    temperature: float | None | NotGiven = NOT_GIVEN
    """how freely codes are drawn; default: the checkpoint's"""
    top_k: int | None | NotGiven = NOT_GIVEN
    """draw from the k likeliest codes, 0: from all; default: the checkpoint's"""
    top_p: float | None | NotGiven = NOT_GIVEN
    """draw from codes of this total probability; default: the checkpoint's"""
    repetition_penalty: float | None | NotGiven = NOT_GIVEN
    """above 1: code 0 repeats less; default: the checkpoint's"""
    speed: float | None | NotGiven = NOT_GIVEN
    """times as fast, at the same pitch (a number from 0.25 to 4); default: 1.0"""
    trim: str | None | NotGiven = NOT_GIVEN
    """where to cut silence (one of none, start, end, both); default: none"""
    silence_s: float | None | NotGiven = NOT_GIVEN
    """seconds of silence that trim leaves (a number from 0 to 2 seconds); default: 0.05"""
    normalize: str | None | NotGiven = NOT_GIVEN
    """auto: digits, Markdown and links become words (one of off, auto); default: off"""
    lexicon: Lexicon | None | NotGiven = NOT_GIVEN
    """words with other spellings to read"""
    non_streaming_mode: bool | None | NotGiven = NOT_GIVEN
    """true: the model sees the whole text before it speaks; default: true, but false with a cloned voice"""
    max_frames: int | None | NotGiven = NOT_GIVEN
    """at most so many frames of 80 ms; default: what fits (an integer of at least 1)"""
    chunk_frames: int | Sequence[int] | None | NotGiven = NOT_GIVEN
    """frames of 80 ms per chunk, one number or a schedule whose last number repeats; default: 1, 2, 4, 8, 8, ..."""
    # end

    @classmethod
    def unset(cls, model: str | None) -> Self:
        """Settings with every option's default."""
        defaults: dict[str, Any] = dict.fromkeys(OPTIONS)
        return cls(model=model, **defaults)

    def options(self, entrance: str, *, in_tokens: bool) -> RequestOptions:
        """The options that are set, checked as far as no model is needed. `entrance`: "pipecat" or "remote".
        `in_tokens`: the service is in TOKEN mode. Raises RequestError: a value of another type or out of range, or text
        in pieces cannot be spoken like this."""
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
