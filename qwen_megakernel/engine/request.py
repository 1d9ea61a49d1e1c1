"""The border: what a caller asks for is checked here, as far as it can be without the text."""

import logging
import numbers
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from qwen_megakernel.checkpoint.config import SamplingParams
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.errors import InstructError, RequestError, SamplingError, SpeakerError, TextError, VoiceError
from qwen_megakernel.model.conditioning import Conditioning
from qwen_megakernel.model.prompt import PromptBuilder
from qwen_megakernel.model.text import check_unicode
from qwen_megakernel.model.time_stretch import check_speed
from qwen_megakernel.model.voice import Voice

log = logging.getLogger(__name__)

_MOST_SIZES, _MOST_CHUNK = 1000, 100_000
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


DEFAULTS: RequestOptions = {
    "chunk_frames": None,
    "speaker": None,
    "language": None,
    "instruct": None,
    "voice": None,
    "non_streaming_mode": None,
    "sampling": SamplingParams(),
    "max_frames": None,
    "runaway_guard": True,
    "speed": 1.0,
}
"""What `TTSEngine.submit` takes where an option is left out."""


@dataclass(frozen=True)
class Request:
    """A request that can be served if its text can; every default filled in. `judge_length`: the runaway guard tells
    babble by how long the text should take."""

    conditioning: Conditioning
    non_streaming_mode: bool
    sampling: SamplingParams
    max_frames: int
    runaway_guard: bool
    judge_length: bool
    chunk_frames: tuple[int, ...]
    speed: float


class RequestChecker:
    """Knows what one checkpoint can be asked for."""

    def __init__(self, checkpoint: Checkpoint, prompts: PromptBuilder):
        self._config, self._fingerprint, self._prompts = checkpoint.config, checkpoint.fingerprint, prompts

    def check(
        self,
        *,
        whole: bool,
        speaker: str | None,
        language: str | None,
        instruct: str | None,
        voice: Voice | None,
        non_streaming_mode: bool | None,
        sampling: SamplingParams,
        max_frames: int | None,
        runaway_guard: bool,
        chunk_frames: int | Sequence[int] | None,
        speed: float,
    ) -> Request:
        """`whole`: the text is there already. The rest is `TTSEngine.submit`'s.

        Raises:
            RequestError: by kind, see errors.py.
        """
        for name, flag in (("non_streaming_mode", non_streaming_mode), ("runaway_guard", runaway_guard)):
            if not (isinstance(flag, bool) or flag is None and name == "non_streaming_mode"):
                raise RequestError(f"{name} must be True or False, got {flag!r}")
        if non_streaming_mode and not whole:
            raise RequestError("text in pieces needs the streaming layout: leave non_streaming_mode out with text=None")
        if not isinstance(sampling, SamplingParams):
            raise SamplingError(f"sampling must be a SamplingParams, got {type(sampling).__name__}")
        sampling = sampling.over(self._config.sampling)
        return Request(
            conditioning=Conditioning(
                speaker=self._speaker(speaker),
                language=self._prompts.known_language(language),
                instruct=self._instruct(instruct),
                voice=self._voice(voice),
            ),
            non_streaming_mode=whole and voice is None if non_streaming_mode is None else non_streaming_mode,
            sampling=sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(63)),
            max_frames=self._config.max_frames if max_frames is None else _count(max_frames, "max_frames"),
            runaway_guard=runaway_guard,
            judge_length=not self._config.random_weights,
            chunk_frames=chunk_schedule(chunk_frames),
            speed=check_speed(speed),
        )

    def _speaker(self, speaker: str | None) -> str | None:
        if speaker is not None and not isinstance(speaker, str):
            raise SpeakerError(f"unknown speaker {speaker!r}: a speaker is a string")
        if self._config.variant != "custom_voice":
            if speaker:
                raise SpeakerError(f"this checkpoint ({self._config.variant}) has no named speakers, got {speaker!r}")
            return None
        if speaker is None and self._prompts.speakers:
            return self._prompts.speakers[0]
        return self._prompts.known_speaker(speaker) if speaker else None

    def _instruct(self, instruct: str | None) -> str | None:
        if instruct is not None and not isinstance(instruct, str):
            raise InstructError(f"instruct must be a string, got {type(instruct).__name__}")
        try:
            check_unicode(instruct or "", "instruct")
        except TextError as error:  # which would be about the text
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
            if self._config.variant == "base":
                raise VoiceError(
                    "a Base checkpoint speaks with a voice: pass voice=engine.create_voice(ref_audio), "
                    "on the command line --ref-audio"
                )
            return None
        if self._config.variant != "base":
            raise VoiceError(f"voice= needs a Base checkpoint; this one is {self._config.variant}")
        if not isinstance(voice, Voice):
            raise VoiceError(f"voice must be a Voice (create_voice or Voice.load), got {type(voice).__name__}")
        voice.check()
        if voice.fingerprint != self._fingerprint:
            raise VoiceError(
                f"this voice was made by another checkpoint ({voice.fingerprint or 'unknown'}, "
                f"this one is {self._fingerprint}); make it again from its reference audio"
            )
        hidden, groups = self._config.talker.stack.hidden_size, self._config.talker.num_code_groups
        ok = tuple(voice.speaker_embedding.shape) == (hidden,)
        if voice.ref_codes is not None:
            known = range(self._config.codec.vocoder.codebook_size)
            ok = ok and voice.ref_codes.ndim == 2 and voice.ref_codes.shape[1] == groups
            ok = ok and int(voice.ref_codes.min()) in known and int(voice.ref_codes.max()) in known
        if not ok:
            raise VoiceError(f"broken voice: expected a vector of {hidden} and codes [frames, {groups}]")
        return voice


def check_call(text: str | None, on_chunk: Callable | None, on_end: Callable | None) -> None:
    """Raises RequestError for arguments of the wrong type."""
    if text is not None and not isinstance(text, str):
        raise TextError(f"text must be a string, got {type(text).__name__}")
    for name, callback in (("on_chunk", on_chunk), ("on_end", on_end)):
        if callback is not None and not callable(callback):
            raise RequestError(f"{name} must be callable, got {type(callback).__name__}")


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
