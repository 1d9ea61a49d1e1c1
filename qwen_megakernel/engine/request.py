"""Checks what a caller asks for, as far as that is possible without the text."""

import logging
import numbers
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from qwen_megakernel.checkpoint.config import ModelConfig, SamplingParams
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.errors import (
    BackendError,
    InstructError,
    RequestError,
    SamplingError,
    SpeakerError,
    TextError,
    VoiceError,
)
from qwen_megakernel.model.conditioning import Conditioning
from qwen_megakernel.model.edges import FADE_S, check_trim
from qwen_megakernel.model.prompt import PromptBuilder
from qwen_megakernel.model.text import check_unicode
from qwen_megakernel.model.time_stretch import check_speed
from qwen_megakernel.model.voice import Voice
from qwen_megakernel.text.front_end import TextFrontEnd
from qwen_megakernel.text.lexicon import Lexicon
from qwen_megakernel.text.pauses import LONGEST_PAUSE_S
from qwen_megakernel.text.spoken_text import SpokenText

log = logging.getLogger(__name__)

_MOST_SIZES, _MOST_CHUNK = 1000, 100_000
TRIM_TO_S = 0.05
"""Seconds of silence that trimming leaves by default."""
CHUNK_SCHEDULE = (1, 2, 4, 8)
"""Frames per chunk: the first sound after one frame, then larger portions; the last size repeats."""


class RequestOptions(TypedDict, total=False):
    """How to say a text; see `TTSEngine.submit`."""

    chunk_frames: int | Sequence[int] | None
    speaker: str | None
    language: str | None
    instruct: str | None
    voice: Voice | None
    non_streaming_mode: bool | None
    sampling: SamplingParams
    max_frames: int | None
    runaway_guard: bool
    speed: float
    trim: str
    silence_s: float
    normalize: str
    lexicon: Lexicon | None
    lenient: bool
    pause_s: float
    reproducible: bool


@dataclass(frozen=True)
class Request:
    """A checked request with every default filled in; only its text is still to be checked. `judge_length`: the runaway
    guard tells babble by how long the text should take."""

    conditioning: Conditioning
    non_streaming_mode: bool
    sampling: SamplingParams
    max_frames: int
    runaway_guard: bool
    judge_length: bool
    chunk_frames: tuple[int, ...]
    speed: float
    trim: str
    silence_s: float
    front_end: TextFrontEnd
    before_s: float
    after_s: float
    reproducible: bool

    def around(self, text: SpokenText) -> "Request":
        """This request with the silence around a text. The speech's own silence next to a pause is cut, so that the
        pause has its exact length."""
        before_s = self.before_s + text.before_s - (FADE_S if text.begins_at_pause else 0.0)  # kept for the fade
        sides = {"start": before_s > 0 or self.trim in ("start", "both")}
        sides["end"] = text.ends_at_pause or self.trim in ("end", "both")
        trim = "both" if all(sides.values()) else next((side for side, cut in sides.items() if cut), "none")
        silence_s = 0.0 if before_s > 0 or text.ends_at_pause else self.silence_s
        return replace(self, trim=trim, silence_s=silence_s, before_s=before_s, after_s=text.after_s)


class RequestChecker:
    """Checks requests against what one checkpoint can do."""

    def __init__(self, checkpoint: Checkpoint, prompts: PromptBuilder, *, allow_foreign_voice: bool = False):
        """
        Raises:
            BackendError: `allow_foreign_voice` is not True or False.
        """
        if not isinstance(allow_foreign_voice, bool):
            raise BackendError(f"allow_foreign_voice must be True or False, got {allow_foreign_voice!r}")
        self._config, self._fingerprint, self._prompts = checkpoint.config, checkpoint.fingerprint, prompts
        self._allow_foreign, self._told_of_foreign = allow_foreign_voice, False

    def check(
        self,
        *,
        whole: bool,
        speaker: str | None = None,
        language: str | None = None,
        instruct: str | None = None,
        voice: Voice | None = None,
        non_streaming_mode: bool | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        max_frames: int | None = None,
        runaway_guard: bool = True,
        chunk_frames: int | Sequence[int] | None = None,
        speed: float = 1.0,
        trim: str = "none",
        silence_s: float = TRIM_TO_S,
        normalize: str = "off",
        lexicon: Lexicon | None = None,
        lenient: bool = False,
        pause_s: float = 0.0,
        reproducible: bool = False,
    ) -> Request:
        """`whole`: the text is there already. `TTSEngine.submit` explains the others.

        Raises:
            RequestError: by kind, see errors.py.
        """
        flags = {"runaway_guard": runaway_guard, "reproducible": reproducible, "lenient": lenient}
        for name, flag in (flags | {"non_streaming_mode": non_streaming_mode}).items():
            if not (isinstance(flag, bool) or flag is None and name == "non_streaming_mode"):
                raise RequestError(f"{name} must be True or False, got {flag!r}")
        if non_streaming_mode and not whole:
            raise RequestError("text in pieces needs the streaming layout: leave non_streaming_mode out with text=None")
        if not whole and (normalize != "off" or lexicon is not None):
            raise RequestError(
                "text in pieces is spoken as it is: leave normalize and lexicon out with text=None, and push what "
                "TextFrontEnd.stream() makes of the text"
            )
        if not isinstance(sampling, SamplingParams):
            raise SamplingError(f"sampling must be a SamplingParams, got {type(sampling).__name__}")
        check_trim(trim, silence_s)
        if lexicon is not None and not isinstance(lexicon, Lexicon):
            raise RequestError(f"lexicon must be a Lexicon (Lexicon.load), got {type(lexicon).__name__}")
        number = isinstance(pause_s, numbers.Real) and not isinstance(pause_s, bool)
        if not number or not 0 <= pause_s <= LONGEST_PAUSE_S:
            raise RequestError(f"pause_s must be 0 to {LONGEST_PAUSE_S:g} seconds, got {pause_s!r}")
        language = self._prompts.known_language(language)
        return Request(
            conditioning=Conditioning(
                speaker=self._speaker(speaker, voice),
                language=language,
                instruct=self._instruct(instruct),
                voice=self._voice(voice),
            ),
            non_streaming_mode=whole and not self._is_base if non_streaming_mode is None else non_streaming_mode,
            sampling=sampling.over(self._config.sampling, seed=secrets.randbits(63)),
            max_frames=self._config.max_frames if max_frames is None else _count(max_frames, "max_frames"),
            runaway_guard=runaway_guard,
            judge_length=not self._config.random_weights,
            chunk_frames=chunk_schedule(chunk_frames),
            speed=check_speed(speed),
            trim=trim,
            silence_s=float(silence_s),
            front_end=TextFrontEnd(language, normalize, lexicon, lenient),
            before_s=float(pause_s),
            after_s=0.0,
            reproducible=reproducible,
        )

    @property
    def _is_base(self) -> bool:
        return self._config.variant == "base"

    def _speaker(self, speaker: str | None, voice: Voice | None) -> str | None:
        if speaker is not None and not isinstance(speaker, str):
            raise SpeakerError(f"speaker must be a string, got {speaker!r}")
        if self._config.variant != "custom_voice":
            if speaker:
                raise SpeakerError(
                    f"this checkpoint ({self._config.variant}) has no named speakers, got {speaker!r}: leave it out"
                )
            return None
        if voice is not None:
            if speaker:
                raise SpeakerError(f"speaker={speaker!r} and voice= both say who speaks: give one of them")
            return None
        if speaker is None and self._prompts.speakers:
            return self._prompts.speakers[0]
        return self._prompts.known_speaker(speaker) if speaker else None

    def _instruct(self, instruct: str | None) -> str | None:
        if instruct is not None and not isinstance(instruct, str):
            raise InstructError(f"instruct must be a string, got {type(instruct).__name__}")
        try:
            check_unicode(instruct or "", "instruct")
        except TextError as error:  # its type would blame the text
            raise InstructError(str(error)) from None
        if instruct and not self._config.honours_instruct:
            log.warning(
                "instruct is ignored: this checkpoint (%s, %s) does not take it",
                self._config.variant,
                self._config.size,
            )
            return None
        return instruct

    def _voice(self, voice: Voice | None) -> Voice | None:
        if voice is None:
            if self._is_base:
                raise VoiceError(
                    "a Base checkpoint needs a voice: pass voice=engine.create_voice(ref_audio), "
                    "on the command line --ref-audio"
                )
            return None
        fitting = fitting_voice(voice, self._config, self._fingerprint, allow_foreign=self._allow_foreign)
        if not self._is_base and not self._told_of_foreign:
            self._told_of_foreign = True
            log.warning(
                "an experiment: a voice of a Base checkpoint speaks on CustomVoice, by its speaker vector alone. The "
                "reference implementation does not do that, and we have not listened to it"
            )
        return fitting


def foreign_hint(variant: str) -> str:
    """What to add to the message when a checkpoint of this variant refuses a voice."""
    if variant != "custom_voice":
        return ""
    return (
        ". As an experiment allow_foreign_voice=True (--allow-foreign-voice) lets it speak with the speaker vector of "
        "a Base checkpoint's voice"
    )


def fitting_voice(voice: Voice, config: ModelConfig, fingerprint: str, *, allow_foreign: bool = False) -> Voice:
    """The voice in the form in which a checkpoint of this config and fingerprint speaks with it.

    Args:
        allow_foreign: on CustomVoice a Base checkpoint's voice comes back as its speaker vector alone, which takes the
            place of a named speaker's row. No prompt of CustomVoice has reference codes or text, so they are left out.

    Raises:
        VoiceError: the two do not fit; says why.
    """
    if config.variant != "base" and not (config.variant == "custom_voice" and allow_foreign):
        raise VoiceError(f"voice= needs a Base checkpoint; this one is {config.variant}{foreign_hint(config.variant)}")
    if not isinstance(voice, Voice):
        raise VoiceError(f"voice must be a Voice (create_voice or Voice.load), got {type(voice).__name__}")
    voice.check()
    hidden, groups = config.talker.stack.hidden_size, config.talker.num_code_groups
    width = len(voice.speaker_embedding)
    if config.variant != "base":
        if width != hidden:
            raise VoiceError(
                f"this voice's speaker vector has {width} numbers, but this checkpoint needs {hidden}: make the "
                "voice with the Base checkpoint of the same size"
            )
        return replace(voice, ref_codes=None, ref_text=None)
    if voice.fingerprint != fingerprint:
        raise VoiceError(
            f"this voice was made by another checkpoint ({voice.fingerprint or 'unknown'}, "
            f"this one is {fingerprint}); make it again from its reference audio"
        )
    ok = width == hidden
    if voice.ref_codes is not None:
        known = range(config.codec.vocoder.codebook_size)
        ok = ok and voice.ref_codes.shape[1] == groups
        ok = ok and int(voice.ref_codes.min()) in known and int(voice.ref_codes.max()) in known
    if not ok:
        raise VoiceError(
            f"broken voice: expected a vector of {hidden} numbers and codes [frames, {groups}]; make it again"
        )
    return voice


def check_call(text: str | None, on_chunk: Callable | None, on_end: Callable | None) -> None:
    """Raises RequestError for arguments of the wrong type."""
    if text is not None and not isinstance(text, str):
        raise TextError(f"text must be a string, got {type(text).__name__}")
    for name, callback in (("on_chunk", on_chunk), ("on_end", on_end)):
        if callback is not None and not callable(callback):
            raise RequestError(f"{name} must be callable, got {type(callback).__name__}")


def whole_text(text: str) -> str:
    """The text of a call that takes no pieces.

    Raises:
        TextError: it is None.
    """
    if text is None:
        raise TextError("text must be a string; text that comes in pieces needs submit()")
    return text


def _count(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise RequestError(f"{name} must be an integer of at least 1, got {value!r}")
    return int(value)


def chunk_schedule(chunk_frames: int | Sequence[int] | None) -> tuple[int, ...]:
    """Frames per chunk, checked; the last number repeats.

    Raises:
        RequestError: none or too many, or not integers of 1 to 100,000.
    """
    if chunk_frames is None:
        return CHUNK_SCHEDULE
    several = isinstance(chunk_frames, Sequence) and not isinstance(chunk_frames, (str, bytes))
    schedule = tuple(chunk_frames) if several else (chunk_frames,)
    if not 0 < len(schedule) <= _MOST_SIZES:
        raise RequestError(f"chunk_frames must name 1 to {_MOST_SIZES} sizes, got {len(schedule)}")
    checked = tuple(_count(n, "chunk_frames") for n in schedule)
    if max(checked) > _MOST_CHUNK:
        raise RequestError(f"chunk_frames must be 1 to {_MOST_CHUNK:,} frames each")
    return checked
