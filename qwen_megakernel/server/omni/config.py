"""What a client may send on /v1/audio/speech/stream: the fields of its messages, and the settings of its session."""

import reprlib
from dataclasses import dataclass
from typing import Any

from qwen_megakernel.errors import RequestError
from qwen_megakernel.server import fields
from qwen_megakernel.server.clones import CLONE_FIELDS, read_clone
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.speech.encoders import MEDIA
from qwen_megakernel.speech.options import Option, RequestOptions, options_of, read_options, why_not

_SETTINGS = ("model", "task_type", "response_format", "stream_audio", "sample_rate", "word_timestamps")
"""The protocol's settings that are no options of speech, besides those that bring a voice along."""
_CHOICES: dict[str, tuple[str, ...]] = {
    "split_granularity": ("none", "sentence", "clause"),  # text is always spoken as it comes
    "timestamp_type": ("word",),
    "timestamp_transport_strategy": ("sync", "async"),
}
_MAX_SETTING = 2000  # characters
_FLAG = Option(kinds=(bool,))
FIELDS: dict[str, tuple[str, ...]] = {
    "session.config": (*_SETTINGS, *CLONE_FIELDS, *options_of("stream"), *_CHOICES),
    "input.text": ("text",),
    "input.done": (),
    "session.close": (),
    "voice.add": ("name", "audio_data", "ref_text", "audio_format", "consent"),
    "voice.list": (),
    "voice.delete": ("name",),
    "voice.remove": ("name",),
}
"""Type of a message -> its fields besides `type`."""


@dataclass(frozen=True)
class SessionConfig:
    """Attributes:
    options: of speech.
    name: the audio's format, one of `MEDIA`.
    rate: its sample rate in Hz; None: the model's.
    streams: audio is sent as it is made, as PCM. Otherwise an utterance's audio is one message.
    words: how to tell when each word is spoken: "chunk" (with the audio), "sync" (behind it) or "async" (behind all);
        empty: not at all.
    whole: the model sees the whole text before it speaks. An utterance is then one `input.text`, then `input.done`.
    ignored: names of fields that change nothing here.
    """

    options: RequestOptions
    name: str
    rate: int | None
    streams: bool
    words: str
    whole: bool
    ignored: tuple[str, ...]


def check_fields(message: dict[str, Any]) -> str:
    """
    Args:
        message: a client's message.

    Returns:
        Its type.

    Raises:
        RequestError: the type is unknown, or a field does not belong to it.
    """
    kind = message.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise RequestError(f"type must be one of {', '.join(FIELDS)}, got {reprlib.repr(kind)}", field="type")
    for name in message:
        if kind == "session.config" and (other := fields.FIELDS.get(name)) and (other.ignored or other.same):
            continue
        if name != "type" and name not in FIELDS[kind]:
            known = ", ".join(FIELDS[kind]) or "none"
            wanted = why_not(name, "stream") or f"known: {known}"
            raise RequestError(f"unknown field {name[:40]!r} of {kind}; {wanted}", field=name[:40])
    return kind


def string_of(message: dict[str, Any], name: str, *, most: int | None = None, blank: bool = False) -> str:
    """A field's value, which must be a string.

    Args:
        most: the largest allowed number of characters; None: no limit.
        blank: it may be blank.

    Raises:
        RequestError: it is not such a string.
    """
    value = message.get(name)
    if not isinstance(value, str) or not (blank or value.strip()):
        wanted = "a string" if blank else "a string that is not blank"
        raise RequestError(f"{name} must be {wanted}, got {reprlib.repr(value)}", field=name)
    if most is not None and len(value) > most:
        raise RequestError(f"{name} has {len(value)} characters, at most {most} are allowed", field=name)
    return value


async def read_config(message: dict[str, Any], service: EngineService) -> SessionConfig:
    """The settings of a `session.config`, checked as for an utterance.

    Raises:
        RequestError: nothing could be spoken with these settings.
        EngineBusy: too many new voices were asked for.
        EngineClosed: the server is not ready, or no longer.
    """
    service.check_ready()
    given, ignored = fields.told_apart({name: value for name, value in message.items() if name != "type"}, "stream")
    options = {name: given.pop(name) for name in options_of("stream") if name in given}
    clone = read_clone({name: given.pop(name) for name in CLONE_FIELDS if name in given})
    for name in ("model", "task_type", "response_format"):
        if name in given:
            string_of(given, name, most=_MAX_SETTING)
    for name, choices in _CHOICES.items():
        if name in given and given[name] not in choices:
            raise RequestError(f"{name} must be {' or '.join(choices)}, got {reprlib.repr(given[name])}", field=name)
    if (model := given.get("model", service.model)) not in service.models:
        words = f"this server's model is {service.model!r}, got {model[:80]!r}: leave model out"
        raise RequestError(words, field="model")
    service.check_task(given.get("task_type"))
    timed = _FLAG.checked(given.get("word_timestamps"), "word_timestamps")
    streams = _FLAG.checked(given.get("stream_audio"), "stream_audio")
    name, rate = _format({"response_format": "pcm" if timed or streams else "wav"} | given)
    streams = name == "pcm" if streams is None else streams
    words = given.get("timestamp_transport_strategy", "sync") if "timestamp_type" in given else ""
    words = "chunk" if timed else words
    if name != "pcm" and (streams or words == "chunk"):
        field = "stream_audio" if streams else "word_timestamps"
        raise RequestError(f"{field} needs response_format 'pcm', got {name!r}", field="response_format")
    read = await service.cloned(read_options(options, "stream"), clone)
    request = service.request(read, lenient=True)
    ignored += service.idle(read)
    if "timestamp_transport_strategy" in given and (words == "chunk" or not words):
        ignored.append("timestamp_transport_strategy")
    return SessionConfig(read, name, rate, streams, words, request.whole, tuple(ignored))


def _format(given: dict[str, Any]) -> tuple[str, int | None]:
    """The audio's format and its sample rate."""
    name, rate = given["response_format"], given.get("sample_rate")
    if name not in MEDIA:
        words = f"response_format must be one of {', '.join(MEDIA)}, got {reprlib.repr(name)}"
        raise RequestError(words, field="response_format")
    fields.check_sound(name, rate)
    return name, rate
