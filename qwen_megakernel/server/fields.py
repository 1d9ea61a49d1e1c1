"""Fields of requests as clients of several servers send them: one table, for HTTP, batches and both sockets.

Sources: OpenAI's `audio.speech.create`, vLLM-Omni's `/v1/audio/speech` and its socket, Kokoro-FastAPI's
`/v1/audio/speech`, as of November 2026.
"""

import reprlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from qwen_megakernel.engine.audio import CHUNK_SCHEDULE
from qwen_megakernel.errors import RequestError
from qwen_megakernel.speech.encoders import RATES, missing
from qwen_megakernel.speech.options import options_of

OPENAI, OMNI, KOKORO = "OpenAI", "vLLM-Omni", "Kokoro-FastAPI"


@dataclass(frozen=True)
class Field:
    """A field that is no option of speech by its own name.

    Attributes:
        of: who documents it.
        about: what happens.
        same: it is another name of this field, or option of speech.
        change: makes the option's value of the field's.
        ignored: it changes nothing. The answer names it.
    """

    of: tuple[str, ...]
    about: str
    same: str = ""
    change: Callable[[Any, str], Any] | None = None
    ignored: bool = False


_MAX_FIRST = 1000  # frames of a first chunk
_KOKORO_LANGUAGES = dict(zip("abefijpz", "en en es fr it ja pt zh".split(), strict=True))


def _language(value: Any, _name: str) -> Any:
    return _KOKORO_LANGUAGES.get(value, value) if isinstance(value, str) else value


def _normalize(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        value = value.get("normalize", True)
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be an object with normalize: true or false", field=name)
    return "auto" if value else "off"


def _limit(value: Any, _name: str) -> Any:
    return 0 if value == -1 else value


def first_chunk(first: Any, name: str) -> tuple[int, ...] | None:
    """Frames per chunk, for a client that names the first size. 0 stands for the default."""
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= _MAX_FIRST:
        words = f"{name} must be an integer from 0 to {_MAX_FIRST} frames of 80 ms, got {reprlib.repr(first)}"
        raise RequestError(words, field=name)
    return (first, *(size for size in CHUNK_SCHEDULE if size > first)) if first else None


def check_sound(name: str, rate: Any) -> None:
    """
    Args:
        name: the audio's format, one of `MEDIA`.
        rate: its sample rate in Hz; None: the model's.

    Raises:
        RequestError: the format is not available here, or there is no such rate.
    """
    if why := missing(name):
        raise RequestError(why, field="response_format")
    if rate is not None and (isinstance(rate, bool) or rate not in RATES):
        words = f"sample_rate must be one of {', '.join(map(str, RATES))}, got {reprlib.repr(rate)}"
        raise RequestError(words, field="sample_rate")


def _ignored(of: str, about: str) -> Field:
    return Field((of,), about, ignored=True)


FIELDS: dict[str, Field] = {
    "model": Field((OPENAI, OMNI, KOKORO), "a name of /v1/models; without it: the served model"),
    "input": Field((OPENAI, OMNI, KOKORO), "the text"),
    "items": Field((OMNI,), "of a batch: the same as inputs, and the answer has vLLM-Omni's form", same="inputs"),
    "response_format": Field(
        (OPENAI, OMNI, KOKORO), "the audio's format; without it: mp3, on the socket wav (for word_timestamps pcm)"
    ),
    "stream_format": Field((OPENAI, OMNI), "audio, or sse for events"),
    "stream": Field(
        (OMNI, KOKORO), "false: one answer with its length; true, with the header Accept: text/event-stream: events"
    ),
    "sample_rate": Field((OMNI,), "8000 to 48000 Hz; without it: 24000"),
    "task_type": Field((OMNI,), "must name the served checkpoint's kind"),
    "word_timestamps": Field(
        (OMNI,), "true: when words are spoken; in events, in audio.chunk, or in X-Word-Timestamps if stream is false"
    ),
    "ref_audio": Field((OMNI,), "a recording to speak like, in base64 or as a data URL; with --allow-clone"),
    "ref_text": Field((OMNI,), "what the recording says"),
    "x_vector_only_mode": Field((OMNI,), "true: leave ref_text out"),
    "speaker_embedding": Field((OMNI,), "a voice's vector, in place of a recording; with --allow-clone"),
    "stream_audio": Field((OMNI,), "on the socket: audio as it is made; without it: if it is pcm"),
    "split_granularity": Field((OMNI,), "on the socket: text is spoken as it comes, whatever this says"),
    "timestamp_type": Field((OMNI,), "on the socket: word tells when words are spoken"),
    "timestamp_transport_strategy": Field((OMNI,), "on the socket: sync: with audio.done; async: before session.done"),
    "speakers": Field(("this server",), 'true: "[ada] ... [max] ..." in the text changes the voice'),
    "allow_voice_tags": Field((KOKORO,), "the same as speakers", same="speakers"),
    "speaker": Field((OMNI,), "the same as voice", same="voice"),
    "instruct": Field(("mlx-audio",), "the same as instructions", same="instruct"),
    "max_new_tokens": Field((OMNI,), "the same as max_frames", same="max_frames"),
    "max_tokens": Field((OMNI,), "the same as max_frames", same="max_frames"),
    "top_k": Field((OMNI,), "-1 is no limit, as 0", change=_limit),
    "initial_codec_chunk_frames": Field((OMNI,), "frames of the first chunk", same="chunk_frames", change=first_chunk),
    "lang_code": Field((KOKORO,), "the same as language, also by Kokoro's letters", same="language", change=_language),
    "normalization_options": Field(
        (KOKORO,), "its normalize: true is the same as normalize: auto", same="normalize", change=_normalize
    ),
    "volume_multiplier": Field(
        (KOKORO,), "a factor on the samples, 0 to 10; what exceeds full scale is cut off, and counted in X-Clipped"
    ),
    "user": _ignored(OPENAI, "changes nothing"),
    "extra_params": _ignored(OMNI, "other models' parameters"),
    "ref_audio_2": _ignored(OMNI, "other models' parameters"),
    "ambient_sound": _ignored(OMNI, "other models' parameters"),
    "duration_seconds": _ignored(OMNI, "other models' parameters"),
    "download_format": _ignored(KOKORO, "this server keeps no files"),
    "return_download_link": _ignored(KOKORO, "this server keeps no files"),
    "return_timing": _ignored(KOKORO, "ask for word_timestamps"),
    "voice_aliases": _ignored(KOKORO, "the operator's --voice-alias"),
    "ssml": _ignored(KOKORO, "<break> always works, other tags never"),
}  # fmt: skip
"""Name -> what it does. Options of speech by their own names are in `speech.options`."""

_IDLE: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "ref_text": lambda fields: "speaker_embedding" in fields,
    "x_vector_only_mode": lambda fields: "ref_audio" not in fields,
}
"""Name -> does it change nothing beside the others? It is then named like those that are ignored."""

_TEXTS = ("input", "text", "ref_text", "instructions", "ref_audio")  # blanks at their ends are kept
_SMALL = ("response_format", "stream_format", "normalize", "trim")  # known values are in lower case
_KINDS: dict[str, type] = dict.fromkeys(
    ("stream", "stream_audio", "speakers", "x_vector_only_mode", "word_timestamps"), bool
)
_KINDS |= {"sample_rate": int, "volume_multiplier": float}
_BOOLEANS = {"true": True, "false": False}
_MAX_NUMBER = 40  # characters of a number that is written as a string


def told_apart(given: Mapping[str, Any], entrance: str) -> tuple[dict[str, Any], list[str]]:
    """A client's fields by this server's names, and the names of those that change nothing.

    A blank string or null counts as absent, but for a text to speak. A number or a truth value may come as a string.

    Args:
        entrance: one of `options.CLIENTS`.

    Raises:
        RequestError: two names of one field have different values, or a value of a known field cannot be changed into
            what it stands for.
    """
    options = options_of(entrance)
    names = {row.name: name for name, row in options.items()}
    fields: dict[str, Any] = {}
    came: dict[str, str] = {}  # a field -> the name by which it came
    ignored: list[str] = []
    for name, value in given.items():
        field = FIELDS.get(name)
        there = names.get(field.same, field.same) if field and field.same else name
        known = field is not None or there in options
        absent = value is None or isinstance(value, str) and not value.strip() and name not in ("input", "text")
        if known and absent:
            continue
        if field and field.ignored:
            ignored.append(name)
            continue
        if isinstance(value, str) and known:
            value = _tidy(there, value, _KINDS.get(name) or (options[there].kinds[0] if there in options else str))
        if field and field.change:
            value = field.change(value, name)
        if there in came and fields[there] != value:
            words = f"{name} and {came[there]} are two names of one field, with different values: send one of them"
            raise RequestError(words, field=name)
        fields[there], came[there] = value, name
    return fields, ignored + [came[name] for name, is_idle in _IDLE.items() if fields.get(name) and is_idle(fields)]


def _tidy(name: str, value: str, kind: type) -> Any:
    """A string without blanks around it, or the number or truth value that it writes."""
    if name in _TEXTS:
        return value
    value = value.strip()
    if name in _SMALL:
        return value.lower()
    if kind is bool:
        return _BOOLEANS.get(value.lower(), value)
    if kind in (int, float) and len(value) <= _MAX_NUMBER:
        with suppress(ValueError):  # the field's own check says what it must be
            return kind(value)
    return value
