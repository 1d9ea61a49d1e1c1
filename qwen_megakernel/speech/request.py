"""SpeechRequest: how to say a text, checked once against a checkpoint. Nothing else travels behind the entrances."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.engine.audio import CHUNK_SCHEDULE
from qwen_megakernel.engine.input import Request
from qwen_megakernel.errors import InstructError, RequestError, SpeakerError, TextError, VoiceError
from qwen_megakernel.model.conditioning import Conditioning
from qwen_megakernel.model.edges import FADE_S
from qwen_megakernel.model.prompt import PromptText
from qwen_megakernel.model.voice import Voice
from qwen_megakernel.sampling_params import SamplingParams
from qwen_megakernel.speech.options import idle, read_options, table
from spoken_text.cutting import check_unicode
from spoken_text.finder import Conversation
from spoken_text.front_end import Reading, TextFrontEnd
from spoken_text.spoken_text import SpokenText

log = logging.getLogger(__name__)

_DRAWN = ("temperature", "top_k", "top_p", "repetition_penalty", "seed")


@dataclass(frozen=True)
class SpeechRequest(Request):
    """What a session speaks a text by: the engine's request, and what concerns the text."""

    front_end: TextFrontEnd  # makes spoken text of written text
    normalizes: bool  # the front end may leave words out
    lenient: bool  # a language model wrote the text
    retries: int  # how often at most speech that ends badly is said again
    whole: bool  # the caller wants the layout that needs the whole text
    capped: bool  # the caller says how long speech may be, so reaching that is no error
    attempt: int = 1  # which one this is: the first, or one after speech that ended badly

    def around(self, text: SpokenText) -> "SpeechRequest":
        """This request with the silence around a text. The speech's own silence next to a pause is cut, so that the
        pause has its exact length."""
        before_s = self.before_s + text.before_s - (FADE_S if text.begins_at_pause else 0.0)  # kept for the fade
        sides = {"start": before_s > 0 or self.trim in ("start", "both")}
        sides["end"] = text.ends_at_pause or self.trim in ("end", "both")
        trim = "both" if all(sides.values()) else next((side for side, cut in sides.items() if cut), "none")
        silence_s = 0.0 if before_s > 0 or text.ends_at_pause else self.silence_s
        return replace(self, trim=trim, silence_s=silence_s, before_s=before_s, after_s=text.after_s)

    def in_pieces(self) -> "SpeechRequest":
        """This request for a text that comes in pieces.

        Raises:
            RequestError: the layout needs the whole text.
        """
        if self.whole:
            raise RequestError(
                "text that comes in pieces needs the streaming layout: leave non_streaming_mode out, or give the whole "
                "text at once",
                field="non_streaming_mode",
            )
        return replace(self, non_streaming_mode=False)

    def for_text(self, text: str) -> "SpeechRequest":
        """This request for parts of a text, whose language is found once."""
        return replace(self, front_end=self.front_end.for_text(text))

    def in_conversation(self, conversation: Conversation) -> "SpeechRequest":
        """This request for the next text of a caller."""
        return replace(self, front_end=self.front_end.in_conversation(conversation))


def check_begun(request: object, reading: object = None) -> None:
    """Raises RequestError: this is not what `TTSEngine.request` makes, or no `Reading`."""
    if not isinstance(request, SpeechRequest):
        raise RequestError(f"request must come from TTSEngine.request(), got {type(request).__name__}")
    if not isinstance(reading, Reading | None):
        raise RequestError(f"reading must be a Reading or None, got {type(reading).__name__}")


OF_TEXT = ("normalize", "lexicon", "lenient")
"""Options that say how written text becomes spoken text."""


def text_front_end(options: Mapping[str, Any], language: str | None, languages: Sequence[str] | None) -> TextFrontEnd:
    """What makes spoken text of written text.

    Args:
        options: those of `OF_TEXT`, where they are given.
        language: the text's.
        languages: those that a text may be in.

    Raises:
        TextError: see `TextFrontEnd`.
    """
    given = {name: options[name] for name in OF_TEXT if options.get(name) is not None}
    return TextFrontEnd(language, languages=languages, **given)


class RequestChecker:
    """Checks options against what one checkpoint can do."""

    def __init__(self, checkpoint: Checkpoint, prompts: PromptText, *, allow_foreign_voice: bool = False):
        self._checkpoint, self._config = checkpoint, checkpoint.config
        self._prompts = prompts
        self._allow_foreign = allow_foreign_voice
        if allow_foreign_voice and self._config.variant != "custom_voice":
            what = f"it is for CustomVoice checkpoints, and this one is {self._config.variant}"
            log.warning("allow_foreign_voice changes nothing: %s", what)
        self._told_of_foreign = False
        self._told_idle: set[str] = set()  # options
        self._told_of = {checkpoint.fingerprint}  # fingerprints of voices

    def check(self, given: Mapping[str, Any]) -> SpeechRequest:
        """
        Args:
            given: of `RequestOptions`.

        Raises:
            RequestError: by kind, see errors.py.
        """
        read = read_options(given, "python")
        for name, needed in idle(read).items():
            if name not in self._told_idle:
                self._told_idle.add(name)
                log.warning("%s changes nothing without %s: give both, or leave %s out", name, needed, name)
        options: dict[str, Any] = {name: row.default for name, row in table().items()} | read
        voice, language = options["voice"], self._prompts.known_language(read.get("language"))
        whole = options["non_streaming_mode"]
        return SpeechRequest(
            conditioning=Conditioning(
                speaker=self._speaker(options["speaker"], voice),
                language=language,
                instruct=self._instruct(options["instruct"]),
                voice=self._voice(voice),
            ),
            non_streaming_mode=not self._is_base if whole is None else whole,
            sampling=_sampling(read).over(self._config.sampling, seed=secrets.randbits(63)),
            max_frames=options["max_frames"] or self._config.max_frames,
            runaway_guard=options["runaway_guard"],
            judge_length=not self._config.random_weights,
            chunk_frames=options["chunk_frames"] or CHUNK_SCHEDULE,
            speed=options["speed"],
            trim=options["trim"],
            silence_s=options["silence_s"],
            before_s=options["pause_s"],
            after_s=0.0,
            reproducible=options["reproducible"],
            front_end=text_front_end(options, language, self._prompts.languages),
            normalizes=options["normalize"] == "auto",
            lenient=options["lenient"],
            retries=options["retries"],
            whole=whole is True,
            capped=options["max_frames"] is not None,
        )

    @property
    def _is_base(self) -> bool:
        return self._config.variant == "base"

    def _speaker(self, speaker: str | None, voice: Voice | None) -> str | None:
        if self._config.variant != "custom_voice":
            if speaker:
                raise SpeakerError(
                    f"speaker must be left out, got {speaker!r}: this checkpoint ({self._config.variant}) has no named "
                    f"speakers; {'give a voice' if self._is_base else 'describe the voice with instruct'}"
                )
            return None
        if voice is not None:
            if speaker:
                raise SpeakerError(f"speaker={speaker!r} and voice= both say who speaks: give one of them")
            return None
        if speaker is None and self._prompts.speakers:
            return self._prompts.speakers[0]
        if not speaker:
            return None
        name = self._prompts.known_speaker(speaker)
        if (same := self._config.talker.same_speaker(name)) is not None:
            log.warning("speaker %r is another name of %r in this checkpoint", name, same)
        return name

    def _instruct(self, instruct: str | None) -> str | None:
        try:
            check_unicode(instruct or "", "instruct")
        except TextError as error:  # its type would blame the text
            raise InstructError(str(error)) from None
        if instruct and not self._config.honours_instruct:
            checkpoint = f"{self._config.variant}, {self._config.size}"
            log.warning("instruct is ignored: this checkpoint (%s) does not take it", checkpoint)
            return None
        return instruct

    def _voice(self, voice: Voice | None) -> Voice | None:
        if voice is None:
            if self._is_base:
                raise VoiceError(
                    "a Base checkpoint needs a voice: pass voice=engine.create_voice(ref_audio) or Voice.load(path)"
                )
            return None
        fitting = fitting_voice(voice, self._checkpoint, allow_foreign=self._allow_foreign)
        if voice.fingerprint not in self._told_of and self._is_base:
            self._told_of.add(voice.fingerprint)
            log.info("a voice %s", self._checkpoint.origin(voice.fingerprint))
        if not self._is_base and not self._told_of_foreign:
            self._told_of_foreign = True
            log.warning(
                "an experiment: a voice of a Base checkpoint speaks on CustomVoice, by its speaker vector alone. The "
                "reference implementation does not do that, and we have not listened to it"
            )
        return fitting


def _sampling(read: Mapping[str, Any]) -> SamplingParams:
    """How codes are drawn: `sampling`, or its values one by one, for code 0 and for codes 1 to 15 alike.

    Raises:
        RequestError: both were given.
    """
    drawn = {name: read[name] for name in _DRAWN if name in read}
    if drawn and "sampling" in read:
        raise RequestError(f"sampling and {next(iter(drawn))} both say how codes are drawn: give one of them")
    sampling: SamplingParams | None = read.get("sampling")
    return sampling or SamplingParams.for_both(**drawn)


def foreign_hint(variant: str) -> str:
    """What to add to the message when a checkpoint of this variant refuses a voice."""
    if variant != "custom_voice":
        return ""
    return (
        ". As an experiment allow_foreign_voice=True (--allow-foreign-voice) lets it speak with the speaker vector of "
        "a Base checkpoint's voice"
    )


def fitting_voice(voice: Voice, checkpoint: Checkpoint, *, allow_foreign: bool = False) -> Voice:
    """The voice in the form in which a checkpoint speaks with it.

    Args:
        allow_foreign: on CustomVoice a Base checkpoint's voice comes back as its speaker vector alone, which takes the
            place of a named speaker's row. No prompt of CustomVoice has reference codes or text, so they are left out.

    Raises:
        VoiceError: the two do not fit; says why.
    """
    config = checkpoint.config
    if config.variant != "base" and not (config.variant == "custom_voice" and allow_foreign):
        raise VoiceError(
            f"a saved voice needs a Base checkpoint; this one is {config.variant}{foreign_hint(config.variant)}"
        )
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
    if checkpoint.origin(voice.fingerprint) is None:
        raise VoiceError(
            f"this voice was made by another checkpoint, with other encoders ({voice.fingerprint or 'unknown'}, "
            f"this one is {checkpoint.fingerprint}); make it again from its reference audio"
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
