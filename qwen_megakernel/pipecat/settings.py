"""SpeechSettings: what may change while a pipeline runs, and the checks that need no model."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Self

from pipecat.services.settings import TTSSettings
from pipecat.utils.types import NOT_GIVEN, NotGiven

from qwen_megakernel.checkpoint.config import SamplingParams
from qwen_megakernel.checkpoint.languages import find_language
from qwen_megakernel.errors import InstructError, LanguageError, RequestError, SpeakerError
from qwen_megakernel.model.edges import check_trim
from qwen_megakernel.model.time_stretch import check_speed
from qwen_megakernel.text.front_end import check_normalize


@dataclass
class SpeechSettings(TTSSettings):
    """Settings that may change while a pipeline runs. A change applies to the next sentence (SENTENCE mode) or opens a
    new utterance (TOKEN mode).

    Parameters:
        model: The checkpoint. Fixed once the service is made.
        voice: A speaker of the checkpoint. None: the first speaker.
        language: `Language`, a code such as "de-DE", or a name such as "german". None: auto.
        instruct: How to say it, if the checkpoint takes instructs.
        temperature: For code 0 and for codes 1 to 15; None: the checkpoint's.
        top_k: The same.
        top_p: The same.
        repetition_penalty: None: the checkpoint's.
        seed: None: a fresh one for every utterance.
        speed: 0.25 to 4.0 times as fast as the model speaks, at its pitch. None: 1.0.
        normalize: "auto" turns digits, Markdown, links and emojis into words (docs/text.md). None: "off".
        trim: "start", "end" or "both": where an utterance's silence is cut to 50 ms. None: "none".
        non_streaming_mode: True: the model sees a whole sentence before it speaks; not possible in TOKEN mode. None:
            what suits the voice.
    """

    instruct: str | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    temperature: float | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    top_k: int | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    top_p: float | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    repetition_penalty: float | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    seed: int | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    speed: float | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    normalize: str | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    trim: str | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    non_streaming_mode: bool | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)

    @classmethod
    def unset(cls, model: str | None) -> Self:
        """Settings with the checkpoint's own values for everything but the model."""
        return cls(
            model=model,
            voice=None,
            language=None,
            instruct=None,
            temperature=None,
            top_k=None,
            top_p=None,
            repetition_penalty=None,
            seed=None,
            speed=None,
            normalize=None,
            trim=None,
            non_streaming_mode=None,
        )


def sampling_of(settings: SpeechSettings) -> SamplingParams:
    """Raises:
    SamplingError: a value out of its range.
    """
    return SamplingParams.for_both(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        repetition_penalty=settings.repetition_penalty,
        seed=settings.seed,
    )


def speed_of(settings: SpeechSettings) -> float:
    """Raises RequestError for what `check_speed` refuses."""
    return 1.0 if settings.speed is None else check_speed(settings.speed)


def text_options_of(settings: SpeechSettings) -> dict[str, str]:
    """`normalize` and `trim` of `TTSEngine.submit`.

    Raises:
        RequestError: an unknown value.
    """
    normalize = "off" if settings.normalize is None else settings.normalize
    trim = "none" if settings.trim is None else settings.trim
    check_normalize(normalize)
    check_trim(trim, 0.0)
    return {"normalize": normalize, "trim": trim}


def layout_of(settings: SpeechSettings, *, in_tokens: bool) -> bool | None:
    """
    Args:
        in_tokens: the service is in TOKEN mode.

    Returns:
        `non_streaming_mode`.

    Raises:
        RequestError: it is not a bool, or is True in TOKEN mode.
    """
    mode = settings.non_streaming_mode
    if mode is not None and not isinstance(mode, bool):
        raise RequestError(f"non_streaming_mode must be True, False or None, got {mode!r}")
    if mode and in_tokens:
        raise RequestError(
            "non_streaming_mode=True needs whole sentences, but in TOKEN mode text comes in pieces: leave "
            "non_streaming_mode out, or take TextAggregationMode.SENTENCE"
        )
    return mode


def check_names(
    settings: SpeechSettings,
    voices: Collection[str] | None,
    languages: Sequence[str] | None,
    *,
    unseen: str,
    no_voices: str,
) -> None:
    """Check voice, language and instruct.

    Args:
        voices: the known voices; None: not known yet, so only a blank name is refused.
        languages: the known languages, likewise.
        unseen: words for an error message: what is not known yet.
        no_voices: words for an error message if there are no known voices.

    Raises:
        SpeakerError, LanguageError: unknown; the message lists the known ones.
        InstructError: the instruct is not a string.
    """
    voice, language, instruct = settings.voice, settings.language, settings.instruct
    if language is not None and not isinstance(language, str):
        raise LanguageError(f"language must be a string or a Language, got {type(language).__name__}")
    if instruct is not None and not isinstance(instruct, str):
        raise InstructError(f"instruct must be a string, got {type(instruct).__name__}")
    if isinstance(voice, str) and not _is_among(voice, voices):
        raise SpeakerError(f"unknown voice {voice!r}; known: {', '.join(voices or ()) or no_voices}")
    if language is not None and languages is not None:
        find_language(language, languages)
    elif language is not None and not language.strip():
        raise LanguageError(f"unknown language {language!r}; known: {unseen}")


def _is_among(name: str, known: Collection[str] | None) -> bool:
    return bool(name.strip()) and (known is None or name.lower() in {one.lower() for one in known})
