"""What a client may send on /v1/audio/speech/stream: the fields of its messages, and the settings of its session."""

import reprlib
from dataclasses import dataclass
from typing import Any

from qwen_megakernel.engine.request import CHUNK_SCHEDULE
from qwen_megakernel.errors import TTSError
from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.service import EngineService

_TASKS = {"custom_voice": "CustomVoice", "voice_design": "VoiceDesign", "base": "Base"}
"""A checkpoint's variant -> the protocol's name for it."""

_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "model": ("a string", (str,)),
    "voice": ("a string", (str,)),
    "task_type": ("a string", (str,)),
    "language": ("a string", (str,)),
    "instructions": ("a string", (str,)),
    "max_new_tokens": ("an integer", (int,)),
    "initial_codec_chunk_frames": ("an integer", (int,)),
    "seed": ("an integer", (int,)),
    "temperature": ("a number", (int, float)),
    "top_k": ("an integer", (int,)),
    "top_p": ("a number", (int, float)),
    "repetition_penalty": ("a number", (int, float)),
    "speed": ("a number", (int, float)),
    "normalize": ("a string", (str,)),
    "trim": ("a string", (str,)),
    "non_streaming_mode": ("true or false", (bool,)),
}
_ONLY: dict[str, tuple[Any, str]] = {
    "response_format": ("pcm", "audio is 16 bit PCM"),
    "stream_audio": (True, "audio is always sent as it is made"),
    "sample_rate": (24000, "the model speaks at this rate"),
    "split_granularity": ("none", "text is spoken as it comes, not by sentences"),
    "timestamp_type": ("word", "leave it out for no times"),
    "timestamp_transport_strategy": ("sync", "word times come with audio.done"),
    "word_timestamps": (False, "ask for timestamp_type 'word' instead"),
    "x_vector_only_mode": (False, "a voice made without ref_text does this"),
}
"""The protocol's settings of which only one value is served: that value, and the reason."""

_NOT_SERVED = ("ref_audio", "ref_text", "speaker_embedding")
_PASSED = (
    "voice",
    "language",
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "speed",
    "normalize",
    "trim",
    "non_streaming_mode",
)  # the service's names for them
_MAX_SETTING = 2000  # characters
_MAX_FIRST = 1000  # frames of a first chunk
FIELDS: dict[str, tuple[str, ...]] = {
    "session.config": (*_KINDS, *_ONLY),
    "input.text": ("text",),
    "input.done": (),
    "session.close": (),
    "voice.add": ("name", "audio_data", "ref_text", "audio_format", "consent"),
    "voice.list": (),
    "voice.delete": ("name",),
    "voice.remove": ("name",),
}
"""Type of a message -> its fields besides `type`."""


class Refused(TTSError):
    """A message that is refused. `error`: what the client is told."""

    def __init__(self, words: str, field: str | None = None, code: str = "invalid"):
        super().__init__(words)
        self.error = ApiError(400, code, words, code == "busy", field)


@dataclass(frozen=True)
class SessionConfig:
    """Attributes:
    settings: arguments of `EngineService.request`.
    words: tell when each word is spoken.
    capped: the client has set how long an utterance may be.
    """

    settings: dict[str, Any]
    words: bool
    capped: bool

    @property
    def whole(self) -> bool:
        """The model sees the whole text before it speaks. An utterance is then one `input.text`, then `input.done`."""
        return self.settings.get("non_streaming_mode") is True


def check_fields(message: dict[str, Any]) -> str:
    """
    Args:
        message: a client's message.

    Returns:
        Its type.

    Raises:
        Refused: the type is unknown, or a field does not belong to it.
    """
    kind = message.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise Refused(f"type must be one of {', '.join(FIELDS)}, got {reprlib.repr(kind)}", "type")
    for name in message:
        if name in _NOT_SERVED and kind == "session.config":
            words = "a session cannot clone a voice: add one with voice.add, then name it as voice"
            raise Refused(f"{name} is not supported; {words}", name)
        if name != "type" and name not in FIELDS[kind]:
            known = ", ".join(FIELDS[kind]) or "none"
            raise Refused(f"unknown field {name[:40]!r} of {kind}; known: {known}", name[:40])
    return kind


def string_of(message: dict[str, Any], name: str, *, most: int | None = None, needed: bool = True) -> str | None:
    """A field's value, which must be a string and not blank.

    Args:
        most: the largest allowed number of characters; None: no limit.
        needed: the field must be there.

    Raises:
        Refused: it is not such a string.
    """
    value = message.get(name)
    if value is None and not needed:
        return None
    if not isinstance(value, str) or not value.strip():
        raise Refused(f"{name} must be a string that is not blank, got {reprlib.repr(value)}", name)
    if most is not None and len(value) > most:
        raise Refused(f"{name} has {len(value)} characters, at most {most} are allowed", name)
    return value


def read_config(message: dict[str, Any], service: EngineService) -> SessionConfig:
    """The settings of a `session.config`, checked as for an utterance.

    Raises:
        Refused, RequestError: nothing could be spoken with these settings.
        EngineClosed: the server is not ready, or no longer.
    """
    service.check_ready()
    given = {name: value for name, value in message.items() if name != "type" and value is not None}
    for name, value in given.items():
        if name in _KINDS:
            _check_kind(name, value)
        else:
            _check_only(name, value)
    if "response_format" not in given:
        raise Refused("response_format must be 'pcm', but is missing: send it, audio is 16 bit PCM", "response_format")
    engine = service.engine
    if (model := given.get("model", service.model)) not in service.models:
        raise Refused(f"this server's model is {service.model!r}, got {model[:80]!r}: leave model out", "model")
    served = _TASKS[engine.variant]
    if (task := given.get("task_type", served)) != served:
        words = f"this server's model {service.model!r} is a {served} checkpoint, got task_type {task[:40]!r}"
        raise Refused(f"{words}: set task_type to {served!r}, or start a server with another model", "task_type")
    settings = {name: given[name] for name in _PASSED if name in given}
    if "instructions" in given:
        settings["instruct"] = given["instructions"]
    if "max_new_tokens" in given:
        settings["max_frames"] = given["max_new_tokens"]
    if first := given.get("initial_codec_chunk_frames"):
        settings["chunk_frames"] = (first, *(size for size in CHUNK_SCHEDULE if size > first))
    engine.check(**service.request(**settings))
    return SessionConfig(settings, words="timestamp_type" in given, capped="max_new_tokens" in given)


def _check_kind(name: str, value: Any) -> None:
    words, kinds = _KINDS[name]
    if not isinstance(value, kinds) or isinstance(value, bool) is not (kinds == (bool,)):
        raise Refused(f"{name} must be {words}, got {reprlib.repr(value)}", name)
    if isinstance(value, str) and len(value) > _MAX_SETTING:
        raise Refused(f"{name} has {len(value)} characters, at most {_MAX_SETTING} are allowed", name)
    if name == "initial_codec_chunk_frames" and not 0 <= value <= _MAX_FIRST:
        raise Refused(f"{name} must be 0 to {_MAX_FIRST} frames of 80 ms, got {reprlib.repr(value)}", name)
    if name == "max_new_tokens" and not 1 <= value:
        raise Refused(f"{name} must be at least 1 frame of 80 ms, got {reprlib.repr(value)}", name)


def _check_only(name: str, value: Any) -> None:
    wanted, why = _ONLY[name]
    if isinstance(value, bool) is not isinstance(wanted, bool) or value != wanted:
        raise Refused(f"{name} must be {wanted!r}, got {reprlib.repr(value)}: {why}", name)
