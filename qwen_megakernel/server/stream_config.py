"""What a client may send on /v1/audio/speech/stream: the fields of its messages, and the settings of its session."""

import reprlib
from dataclasses import dataclass
from typing import Any

from qwen_megakernel.engine.audio import CHUNK_SCHEDULE
from qwen_megakernel.errors import TTSError
from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.speech.options import RequestOptions, options_of, read_options, why_not

_TASKS = {"custom_voice": "CustomVoice", "voice_design": "VoiceDesign", "base": "Base"}
"""A checkpoint's variant -> the protocol's name for it."""

_STRINGS = ("model", "task_type")
"""The protocol's settings that are no options of speech."""
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
_MAX_SETTING = 2000  # characters
_FIRST, _MAX_FIRST = "initial_codec_chunk_frames", 1000  # frames of a first chunk
FIELDS: dict[str, tuple[str, ...]] = {
    "session.config": (*_STRINGS, *options_of("stream"), *_ONLY),
    "input.text": ("text",),
    "input.done": (),
    "session.close": (),
    "voice.add": ("name", "audio_data", "ref_text", "audio_format", "consent"),
    "voice.list": (),
    "voice.delete": ("name",),
    "voice.remove": ("name",),
}
"""Type of a message -> its fields besides `type`."""


class RefusedMessage(TTSError):
    """A message that is refused. `error`: what the client is told."""

    def __init__(self, words: str, field: str | None = None, code: str = "invalid"):
        super().__init__(words)
        self.error = ApiError(400, code, words, code == "busy", field)


@dataclass(frozen=True)
class SessionConfig:
    """Attributes:
    options: of speech.
    words: tell when each word is spoken.
    whole: the model sees the whole text before it speaks. An utterance is then one `input.text`, then `input.done`.
    """

    options: RequestOptions
    words: bool
    whole: bool


def check_fields(message: dict[str, Any]) -> str:
    """
    Args:
        message: a client's message.

    Returns:
        Its type.

    Raises:
        RefusedMessage: the type is unknown, or a field does not belong to it.
    """
    kind = message.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise RefusedMessage(f"type must be one of {', '.join(FIELDS)}, got {reprlib.repr(kind)}", "type")
    for name in message:
        if name in _NOT_SERVED and kind == "session.config":
            words = "a session cannot clone a voice: add one with voice.add, then name it as voice"
            raise RefusedMessage(f"{name} is not supported; {words}", name)
        if name != "type" and name not in FIELDS[kind]:
            known = ", ".join(FIELDS[kind]) or "none"
            wanted = why_not(name, "stream") or f"known: {known}"
            raise RefusedMessage(f"unknown field {name[:40]!r} of {kind}; {wanted}", name[:40])
    return kind


def string_of(message: dict[str, Any], name: str, *, most: int | None = None, blank: bool = False) -> str:
    """A field's value, which must be a string.

    Args:
        most: the largest allowed number of characters; None: no limit.
        blank: it may be blank.

    Raises:
        RefusedMessage: it is not such a string.
    """
    value = message.get(name)
    if not isinstance(value, str) or not (blank or value.strip()):
        wanted = "a string" if blank else "a string that is not blank"
        raise RefusedMessage(f"{name} must be {wanted}, got {reprlib.repr(value)}", name)
    if most is not None and len(value) > most:
        raise RefusedMessage(f"{name} has {len(value)} characters, at most {most} are allowed", name)
    return value


def read_config(message: dict[str, Any], service: EngineService) -> SessionConfig:
    """The settings of a `session.config`, checked as for an utterance.

    Raises:
        RefusedMessage, RequestError: nothing could be spoken with these settings.
        EngineClosed: the server is not ready, or no longer.
    """
    service.check_ready()
    given = {name: value for name, value in message.items() if name != "type" and value is not None}
    options = {}
    for name, value in given.items():
        if name in options_of("stream"):
            options[name] = value
        elif name in _STRINGS:
            string_of(given, name, most=_MAX_SETTING)
        else:
            _check_only(name, value)
    if "response_format" not in given:
        words = "response_format must be 'pcm', but is missing: send it, audio is 16 bit PCM"
        raise RefusedMessage(words, "response_format")
    engine = service.engine
    if (model := given.get("model", service.model)) not in service.models:
        raise RefusedMessage(f"this server's model is {service.model!r}, got {model[:80]!r}: leave model out", "model")
    served = _TASKS[engine.variant]
    if (task := given.get("task_type", served)) != served:
        words = f"this server's model {service.model!r} is a {served} checkpoint, got task_type {task[:40]!r}"
        words += f": set task_type to {served!r}, or start a server with another model"
        raise RefusedMessage(words, "task_type")
    if _FIRST in options:
        options[_FIRST] = _first_chunk(options[_FIRST])
    read = read_options(options, "stream")
    request = service.request(read, lenient=True)
    return SessionConfig(read, words="timestamp_type" in given, whole=request.whole)


def _first_chunk(first: Any) -> tuple[int, ...] | None:
    """Frames per chunk, for a client that names the first size; 0 stands for the default."""
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= _MAX_FIRST:
        words = f"{_FIRST} must be an integer from 0 to {_MAX_FIRST} frames of 80 ms, got {reprlib.repr(first)}"
        raise RefusedMessage(words, _FIRST)
    return (first, *(size for size in CHUNK_SCHEDULE if size > first)) if first else None


def _check_only(name: str, value: Any) -> None:
    wanted, why = _ONLY[name]
    if isinstance(value, bool) is not isinstance(wanted, bool) or value != wanted:
        raise RefusedMessage(f"{name} must be {wanted!r}, got {reprlib.repr(value)}: {why}", name)
