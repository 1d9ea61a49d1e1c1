"""What clients send as JSON: how it is read, its fields, and the messages for wrong ones."""

import asyncio
import json
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, TypeVar, cast

from fastapi import Request
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from qwen_megakernel.errors import RequestError
from qwen_megakernel.model.voice import MOST_REF_TEXT
from qwen_megakernel.server.api_error import ApiError, Refused
from qwen_megakernel.server.clones import CLONE_FIELDS, MOST_NUMBERS, Clone, read_clone
from qwen_megakernel.server.fields import FIELDS, told_apart
from qwen_megakernel.server.limits import MOST_VALUES, too_many_values
from qwen_megakernel.speech.options import MOST_TEXT, Option, RequestOptions, options_of, why_not
from qwen_megakernel.speech.saved_voices import MOST_NAME

SPEECH, BATCH, VOICES = "/v1/audio/speech", "/v1/audio/speech/batch", "/v1/voices"
"""Paths that take a body; /v1/voices/{name} takes one too."""
MODELS = "/v1/models"
AUDIO_VOICES, AUDIO_MODELS = "/v1/audio/voices", "/v1/audio/models"
"""Where Open WebUI, Kokoro-FastAPI's and vLLM-Omni's clients ask for voices and models, some of them without /v1."""

_FIELD_NAMES = {(SPEECH, "text"): "input", (BATCH, "text"): "input", (VOICES, "voice"): "name"}
_FIELD_NAMES |= {(AUDIO_VOICES, "voice"): "name", (AUDIO_VOICES, "text"): "ref_text"}
"""Fields that these paths call by another name than the rest of the API."""

_SHORT = 64 << 10  # bytes of JSON; they are parsed in 0.3 ms
_MOST_FIELDS, _MOST_INPUTS = 100, 1000  # of an object; of a list, whose own limit is the server's
_OURS = "ours"  # marks an error whose message is already a whole sentence
_WORDS = {
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode: leave out lone surrogates",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "model_type": "must be a JSON object",
    "model_attributes_type": "must be a JSON object",
    "dict_type": "must be a JSON object",
    "too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
}
"""Pydantic's error types that our fields can cause -> message for the client."""


def _name_of_voice(voice: Any) -> Any:
    """The voice's name. OpenAI's clients send a string, or an object with an id."""
    name = voice["id"] if isinstance(voice, dict) and list(voice) == ["id"] else voice
    if not isinstance(name, str):
        words = 'voice must be a name, or an object such as {"id": "ada"}, got {voice}'
        raise PydanticCustomError(_OURS, words, {"voice": reprlib.repr(voice)})
    return name


def _few(inputs: Any) -> Any:
    """A list whose entries may each be checked."""
    if isinstance(inputs, list) and len(inputs) > _MOST_INPUTS:
        words = "inputs has {count} entries, at most {most} are allowed"
        raise PydanticCustomError(_OURS, words, {"count": len(inputs), "most": _MOST_INPUTS})
    return inputs


def _item_of_text(item: Any) -> Any:
    return {"input": item} if isinstance(item, str) else item


_VOICE_SCHEMA = {
    "anyOf": [
        {"type": "string", "maxLength": MOST_NAME},
        {
            "type": "object",
            "properties": {"id": {"type": "string", "maxLength": MOST_NAME}},
            "required": ["id"],
            "additionalProperties": False,
        },
    ]
}
_VoiceName = Annotated[str, Field(max_length=MOST_NAME), BeforeValidator(_name_of_voice), WithJsonSchema(_VOICE_SCHEMA)]
_Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


def _field(name: str, option: Option) -> Any:
    """An option of speech as a field: its type, its check and what /openapi.json says of it."""
    if name == "voice":
        return _VoiceName | None, Field(None, description="A name or alias from /v1/voices; without it: the default.")

    def check(value: Any) -> Any:
        try:
            return option.checked(value, name, MOST_TEXT)
        except RequestError as error:
            raise PydanticCustomError(_OURS, "{words}", {"words": str(error)}) from None

    schema = {"minimum": option.least, "maximum": option.most, "enum": option.choices and list(option.choices)}
    told: Any = {key: value for key, value in schema.items() if value not in (None, ())}
    kinds: Any = reduce(or_, option.kinds)
    kind: Any = Annotated[kinds, BeforeValidator(check), Field(json_schema_extra=told)]
    return kind | None, Field(None, description=option.about)


def _about(name: str, **limits: Any) -> Any:
    return Field(None, description=FIELDS[name].about, **limits)


class _Fields(BaseModel):
    """An object with a known set of fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        """Every unknown field would make an error of its own."""
        if isinstance(given, dict) and len(given) > _MOST_FIELDS:
            words = "a JSON object here has at most {most} fields, got {count}"
            raise PydanticCustomError(_OURS, words, {"count": len(given), "most": _MOST_FIELDS})
        return given


class _How(_Fields):
    task_type: Literal["CustomVoice", "VoiceDesign", "Base"] | None = _about("task_type")
    ref_audio: str | list[str] | None = _about("ref_audio")
    ref_text: str | None = _about("ref_text", max_length=MOST_REF_TEXT)
    x_vector_only_mode: bool | None = _about("x_vector_only_mode")
    speaker_embedding: list[float] | None = _about("speaker_embedding", max_length=MOST_NUMBERS)
    speakers: bool | None = _about("speakers")
    volume_multiplier: float | None = _about("volume_multiplier", ge=0, le=10)
    _ignored: list[str] = PrivateAttr(default_factory=list)
    _came: frozenset[str] = PrivateAttr(default=frozenset())  # names of fields, as the client wrote them

    @model_validator(mode="wrap")
    @classmethod
    def _tell_apart(cls, given: Any, handler: ModelWrapValidatorHandler["_How"]) -> "_How":
        """Take other servers' names of fields too."""
        if not isinstance(given, dict):
            return handler(given)
        try:
            fields, ignored = told_apart(given, "http")
        except RequestError as error:
            raise PydanticCustomError(_OURS, "{words}", {"words": str(error), "field": error.field}) from None
        made = handler(fields)
        made._ignored, made._came = ignored, frozenset(given)
        return made

    @property
    def ignored(self) -> list[str]:
        """Names of fields that change nothing here."""
        return self._ignored

    def clone(self) -> Clone | None:
        """The voice that the request brings along."""
        given = {name: getattr(self, name) for name in CLONE_FIELDS}
        return read_clone({name: value for name, value in given.items() if value is not None})

    def options(self) -> RequestOptions:
        """The options of speech that were given, by their own names."""
        given = {row.name: getattr(self, name) for name, row in options_of("http").items()}
        return cast(RequestOptions, {name: value for name, value in given.items() if value is not None})


_MOST_RETRIES = 5  # of a client
_OPTIONS = options_of("http") | {"retries": replace(options_of("http")["retries"], most=_MOST_RETRIES)}
_FIELDS: dict[str, Any] = {name: _field(name, option) for name, option in _OPTIONS.items()}
_ABOUT = "What one request, or one input of a batch, may say about its speech."
HowToSpeak: Any = create_model("HowToSpeak", __base__=_How, __doc__=_ABOUT, **_FIELDS)


class SpeechBody(HowToSpeak):
    """The fields of OpenAI's `audio.speech.create`, and the options of speech."""

    model: str | None = Field(None, max_length=256, description="A name from /v1/models; without it: the served one.")
    input: str = Field(min_length=1, description="What to say.")
    stream: bool | None = _about("stream")
    sample_rate: int | None = _about("sample_rate")
    word_timestamps: bool | None = _about("word_timestamps")
    response_format: _Format | None = Field(None, description="Without it: mp3. All but flac are streamed.")
    stream_format: Literal["audio", "sse"] | None = Field(
        None, description="sse: events with pieces of audio in base64."
    )


class BatchItem(HowToSpeak):
    """One input of a batch. The batch's settings hold for what it leaves out."""

    input: str = Field(min_length=1, description="What to say.")


_TEXT_OR_ITEM = WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "object"}]})


class BatchBody(HowToSpeak):
    """Several texts at once. Its settings are the defaults for its inputs."""

    model: str | None = Field(None, max_length=256, description="A name from /v1/models; without it: the served one.")
    sample_rate: int | None = _about("sample_rate")
    inputs: Annotated[
        list[Annotated[BatchItem, BeforeValidator(_item_of_text), _TEXT_OR_ITEM]], BeforeValidator(_few)
    ] = Field(min_length=1, description="Texts, or objects with input and options of speech.")
    response_format: _Format | None = Field(None, description="Without it: mp3.")

    @property
    def has_items(self) -> bool:
        """A client of vLLM-Omni's asks, which calls the inputs so."""
        return "items" in self._came


class RecordingRequest(_Fields):
    """A recording that replaces the one of an existing voice."""

    audio: str = Field(description="A recording of 0.5 to 60 seconds, in base64 or as a data URL.")
    text: str | None = Field(
        None, max_length=10_000, description="What the recording says, for a closer voice; blank: no text."
    )


class VoiceRequest(RecordingRequest):
    """A recording for a new voice."""

    name: str = Field(min_length=1, max_length=MOST_NAME, description="a-z 0-9 _ -")


class OmniVoiceRequest(VoiceRequest):
    """A recording for a new voice, as vLLM-Omni's clients send it."""

    text: str | None = Field(None, max_length=10_000, alias="ref_text", description="What the recording says.")
    consent: str | None = Field(None, max_length=MOST_TEXT, description="Changes nothing.")
    speaker_description: str | None = Field(None, max_length=MOST_TEXT, description="Changes nothing.")


def error_of(error: Exception, path: str) -> ApiError:
    """The error that ended a request to `path`. Its field has the name that it has there."""
    told = ApiError.of(error)
    if isinstance(error, Refused):
        return told
    return replace(told, field=_FIELD_NAMES.get((path, told.field or ""), told.field))


# ---------------------------------------------------------------- reading

_Body = TypeVar("_Body", bound=_Fields)


async def read_json(request: Request, kind: type[_Body], or_else: str = "") -> _Body:
    """The fields of a request. A long body is parsed off the event loop.

    Args:
        or_else: the accepted media types besides JSON's, in words.

    Raises:
        RequestError: the body is no JSON.
        Refused: it is of another media type or compressed, or its fields are wrong.
    """
    # Simple clients name no type. A browser lets pages of other sites send that too; the guard refuses those pages.
    media = media_of(request)
    if media and media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        got = request.headers.get("content-type", "")[:80]
        words = f"send JSON with the header Content-Type: application/json, got Content-Type {got!r}{or_else}"
        raise Refused(ApiError(415, "invalid", words))
    check_not_compressed(request)
    body = await request.body()
    if not body.strip():
        raise Refused(ApiError(400, "invalid", _missing("the body", kind)))
    return checked(_parsed(body) if len(body) <= _SHORT else await asyncio.to_thread(_parsed, body), kind)


def check_not_compressed(request: Request) -> None:
    """Raises Refused: the body is compressed."""
    if (coding := request.headers.get("content-encoding", "").lower()) not in ("", "identity"):
        words = f"the body must not be compressed, got Content-Encoding {coding[:80]!r}: send it as it is"
        raise Refused(ApiError(415, "invalid", words))


def media_of(request: Request) -> str:
    """The body's media type in lower case, without parameters; empty if the client names none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _parsed(body: bytes) -> Any:
    if too_many_values(body):  # to read them would hold the interpreter, and so the event loop
        raise RequestError(f"the body has more than {MOST_VALUES} values or commas: send less at once")
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise RequestError(f"the body must be JSON: {error}") from None
    except (ValueError, RecursionError):  # no UTF-8, a number too long, or nested too deeply
        words = "send UTF-8, without deep nesting or numbers of thousands of digits"
        raise RequestError(f"the body cannot be read as JSON: {words}") from None


def checked(fields: Any, kind: type[_Body]) -> _Body:
    """Raises Refused: a field is wrong."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        words, field = _why_wrong(error.errors()[0], kind)
        raise Refused(ApiError(400, "invalid", words, field=field)) from None


def described(kind: type[BaseModel]) -> dict[str, Any]:
    """What /openapi.json says of the body. A recording may come as a form, too."""
    schema = kind.model_json_schema()
    content = {"application/json": {"schema": schema}}
    if issubclass(kind, RecordingRequest):
        file = {"audio": {"type": "string", "format": "binary"}}
        content["multipart/form-data"] = {"schema": schema | {"properties": schema["properties"] | file}}
    return {"requestBody": {"required": True, "content": content}}


def _listed(body: type[BaseModel]) -> str:
    """A body's own fields, then the fields that it shares with other bodies."""
    return ", ".join(sorted(body.model_fields, key=HowToSpeak.model_fields.__contains__))


def _missing(what: str, kind: type[BaseModel]) -> str:
    return f"{what} is missing: send a JSON object; its fields: {_listed(kind)}"


def _why_wrong(error: Mapping[str, Any], body: type[BaseModel]) -> tuple[str, str | None]:
    """
    Args:
        error: pydantic's error for a body.

    Returns:
        A message for the client, and the wrong field; None if the whole body is wrong.
    """
    kind, got = error["type"], reprlib.repr(error.get("input"))
    named = error.get("ctx", {}).get("field")
    parts = [str(part) for part in error["loc"]]
    if len(parts) > 1:  # a field of an input
        body = BatchItem
    where = ".".join(parts)[:80].encode("utf-8", "replace").decode()
    if kind == "missing":
        words = _missing(where, body)
    elif kind == "extra_forbidden":
        words = f"unknown field {where!r}; {why_not(where, 'http') or f'known: {_listed(body)}'}"
    elif kind == _OURS:
        words = error["msg"]
        where = f"{where}.{named}" if where and named else named or where
    elif not where and kind == "string_unicode":
        words = f"a field's name {_WORDS[kind]}, got {got}"
    elif not where:
        words = f"the body must be a JSON object, got {got}"
    else:
        words = f"{where} {_WORDS[kind].format_map(error.get('ctx', {}))}, got {got}"
    return words, where or None
