"""SpeechSettings: what may change while a pipeline runs, and what can be checked of it without the model."""

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
        instruct: How to say it, if the checkpoint takes it.
        temperature: Of both kinds of codes; None: the checkpoint's.
        top_k: The same.
        top_p: The same.
        repetition_penalty: None: the checkpoint's.
        seed: None: a fresh one for every utterance.
        speed: 0.25 to 4.0 times as fast as the model speaks, at its pitch. None: 1.0.
        normalize: "auto" turns digits, Markdown, links and emojis into words (docs/text.md). None: "off".
        trim: "start", "end" or "both": where silence of an utterance is cut to 50 ms. None: "none".
        non_streaming_mode: True lets the model see a whole sentence before it speaks, which TOKEN mode cannot. None:
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
        """Everything but the model as the checkpoint has it."""
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
        RequestError: it is no bool, or True where text comes in pieces.
    """
    mode = settings.non_streaming_mode
    if mode is not None and not isinstance(mode, bool):
        raise RequestError(f"non_streaming_mode must be True, False or None, got {mode!r}")
    if mode and in_tokens:
        raise RequestError(
            "non_streaming_mode=True shows the model a whole sentence, but in TOKEN mode text comes in pieces, which "
            "needs the streaming layout: leave non_streaming_mode out, or take TextAggregationMode.SENTENCE"
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
        voices: the known ones; None: not known yet, so that only a blank name is refused.
        languages: the same.
        unseen: names, in an error, what is not known yet.
        no_voices: stands, in an error, where the list of known voices is empty.

    Raises:
        SpeakerError, LanguageError: unknown; the message lists the known ones.
        InstructError: the instruct is no string.
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
