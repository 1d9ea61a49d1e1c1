"""The HTTP API: speech in OpenAI's shape, one text or several; models; how errors are answered."""

import json
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from qwen_megakernel.errors import RequestError, TTSError
from qwen_megakernel.server.api_error import ApiError, Refused
from qwen_megakernel.server.fields import check_sound
from qwen_megakernel.server.guard import error_response
from qwen_megakernel.server.metrics import UNREADY
from qwen_megakernel.server.openai.answers import Speech, Streamed, batch_json, while_connected, whole_file
from qwen_megakernel.server.openai.bodies import (
    AUDIO_MODELS,
    AUDIO_VOICES,
    BATCH,
    MODELS,
    SPEECH,
    VOICES,
    BatchBody,
    SpeechBody,
    described,
    error_of,
    read_json,
)
from qwen_megakernel.server.openai.voices import add_voices
from qwen_megakernel.server.options import ServerOptions
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.speech.encoders import MEDIA, StreamEncoder

with suppress(ModuleNotFoundError):
    import av  # noqa: F401 - loads FFmpeg now, so that no request waits for it

PATHS = (SPEECH, BATCH, MODELS, VOICES, AUDIO_MODELS, AUDIO_VOICES)

_DEFAULT_FORMAT = "mp3"  # OpenAI's
_MOST_WORDS_HEADER = 4096  # bytes, as vLLM-Omni has it

ERRORS = UNREADY | {
    code: {"description": words, "content": {"application/json": {}}}
    for code, words in (
        (400, "The request is wrong; it fails every time."),
        (404, "The server has another model."),
        (415, "The Content-Type is not JSON's."),
        (429, "Too many callers; try again later."),
        (500, "This utterance failed."),
    )
}


def add_api(app: FastAPI, service: EngineService) -> None:
    """Add the routes, and the answers to what they refuse."""
    routes = APIRouter()
    _add_speech(routes, service)
    _add_models(routes, service)
    add_voices(routes, service)
    app.include_router(routes)
    _add_refusals(app, upload=service.options.allow_upload)


def largest_bodies(options: ServerOptions) -> dict[str, int]:
    """Bytes of the largest bodies, by path, as `Guard` takes them: base64 of recordings is larger than texts."""
    text, recording = options.limits.max_body, options.limits.max_upload * 4 // 3
    brought, made = recording * options.allow_clone, text + recording * options.allow_upload
    sizes = {SPEECH: text + brought, BATCH: 4 * text + brought}
    return sizes | dict.fromkeys((VOICES, AUDIO_VOICES, f"{VOICES}/"), made)


def _add_speech(routes: APIRouter, service: EngineService) -> None:
    audio: dict[str, Any] = {kind: {} for kind in (*MEDIA.values(), "text/event-stream")}
    good: dict[int | str, Any] = {200: {"description": "The audio.", "content": audio}}

    @routes.post(SPEECH, responses=good | ERRORS, response_class=Response, openapi_extra=described(SpeechBody))
    async def speech(of: Request) -> Response:
        body = await read_json(of, SpeechBody)
        name = _checked(service, body)
        if (size := len(body.input)) > (most := service.limits.max_text):
            raise RequestError(f"input has {size} characters, at most {most} are allowed", field="input")
        events = body.stream_format == "sse" or (
            body.stream_format is None and body.stream is True and "text/event-stream" in of.headers.get("accept", "")
        )
        whole = body.stream is False and not events
        encoder = StreamEncoder(name, service.engine.sample_rate, body.sample_rate, whole=whole)
        streams = events or encoder.streams
        if body.retries and streams:
            words = "retries needs an answer that is not streamed, because nobody must hear the first try"
            raise RequestError(f"{words}: send stream: false, or a batch", field="retries")
        options = await service.cloned(body.options(), body.clone())
        how = {"speakers": body.speakers is True, "volume": body.volume_multiplier}
        how |= {"times": body.word_timestamps is True, "whole": not streams}
        made = Speech(service, encoder, body.input, options, **how)
        headers = {"X-Seed": str(made.seed)}
        ignored = [
            *body.ignored,
            *made.ignored,
            *(["word_timestamps"] if body.word_timestamps and streams and not events else []),
            *(["stream"] if body.stream is not None and body.stream is not streams else []),  # flac, or events
        ]
        if ignored:
            headers["X-Ignored"] = ", ".join(ignored)
        async with while_connected(of.receive):
            await made.begin()  # an error before the first chunk still sets the HTTP status
            file = b"" if streams else await made.whole()
        if events:
            return Streamed(made.events(), made, media_type="text/event-stream", headers=headers)
        if streams:
            return Streamed(made.encoded(), made, media_type=MEDIA[name], headers=headers)
        if body.retries or made.attempts > 1:
            headers["X-Attempts"] = str(made.attempts)
        if made.clipped:
            headers["X-Clipped"] = str(made.clipped)
        if body.word_timestamps:
            headers |= _words_header(made)
        return whole_file(file, headers, MEDIA[name])

    listed: dict[int | str, Any] = {200: {"content": {"application/json": {}}}}

    @routes.post(BATCH, responses=listed | ERRORS, response_class=Response, openapi_extra=described(BatchBody))
    async def batch(of: Request) -> Response:
        """Speak several texts. `data` holds audio in base64 or an error for each, in the order of `inputs`."""
        body = await read_json(of, BatchBody)
        name = _checked(service, body)
        limits = service.limits
        if (count := len(body.inputs)) > limits.max_batch:
            raise RequestError(f"inputs has {count} entries, at most {limits.max_batch} are allowed", field="inputs")
        if (size := sum(len(item.input) for item in body.inputs)) > limits.max_batch_text:
            words = f"inputs have {size} characters, at most {limits.max_batch_text} are allowed"
            raise RequestError(words, field="inputs")
        shared = await service.cloned(body.options(), body.clone())
        items = []
        for item in body.inputs:
            service.check_task(item.task_type)
            own = await service.cloned(item.options(), item.clone())
            speakers = body.speakers if item.speakers is None else item.speakers
            volume = body.volume_multiplier if item.volume_multiplier is None else item.volume_multiplier
            items.append((item.input, shared | own, {"speakers": speakers is True, "volume": volume}))
        ignored = dict.fromkeys([*body.ignored, *(name for item in body.inputs for name in item.ignored)])
        headers = {"X-Ignored": ", ".join(ignored)} if ignored else {}
        parts = batch_json(service, name, body.sample_rate, items, omni=body.has_items)
        return Streamed(parts, media_type="application/json", headers=headers)


def _words_header(made: Speech) -> dict[str, str]:
    """When each word is spoken, as vLLM-Omni tells it."""
    told = json.dumps([word.in_ms for word in made.words])
    if len(told) > _MOST_WORDS_HEADER:
        return {"X-Word-Timestamps-Omitted": f"more than {_MOST_WORDS_HEADER} bytes: ask for events"}
    return {"X-Word-Timestamps": told, "X-Word-Timestamps-Measured": str(made.measured).lower()}


def _checked(service: EngineService, body: SpeechBody | BatchBody) -> str:
    """The format of the answer.

    Raises:
        EngineClosed: the engine is not ready, or no longer.
        Refused: another model, or a format that cannot be made here.
    """
    service.check_ready()
    if body.model is not None:
        _check_model(service, body.model, field="model")
    service.check_task(body.task_type)
    name = body.response_format or _DEFAULT_FORMAT
    check_sound(name, body.sample_rate)
    return name


def _check_model(service: EngineService, model: str, field: str | None = None) -> None:
    if model not in service.models:
        words = f"this server's model is {service.model!r}, got {model[:80]!r}; known: {', '.join(service.models)}"
        raise Refused(ApiError(404, "model_not_found", words, field=field))


def _add_models(routes: APIRouter, service: EngineService) -> None:
    def told(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "qwen_megakernel"}

    @routes.get(MODELS)
    async def models() -> dict:
        """All names of the served model, its own first."""
        return {"object": "list", "data": [told(name) for name in service.models]}

    @routes.get(MODELS + "/{model:path}", responses={404: ERRORS[404]})
    async def model(model: str) -> dict:
        _check_model(service, model)
        return told(model)


# ---------------------------------------------------------------- errors


def _add_refusals(app: FastAPI, *, upload: bool) -> None:
    """Answer every error of the app in OpenAI's shape. `upload`: clients may make voices."""

    def of_error(request: Request, error: Exception) -> JSONResponse:
        return error_response(error_of(error, request.url.path))

    for kind in (Refused, TTSError, Exception):
        app.add_exception_handler(kind, of_error)
    app.exception_handler(RequestValidationError)(_of_parameters)
    app.add_exception_handler(
        HTTPException, lambda request, e: error_response(_of_http(request, e, upload), headers=e.headers)
    )


def _of_parameters(_request: Request, error: RequestValidationError) -> JSONResponse:
    """The answer to wrong parameters of a URL. FastAPI reads nothing else of a request."""
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return error_response(ApiError(400, "invalid", f"{name}: {first['msg']}", field=name))


def _of_http(request: Request, error: HTTPException, upload: bool) -> ApiError:
    """The error for a request that Starlette or FastAPI refuses itself."""
    path = request.url.path
    asked, words = f"{request.method[:20]} {path[:80]!r}", str(error.detail)
    changes_voices = path in (VOICES, AUDIO_VOICES) and request.method == "POST"
    changes_voices |= path.startswith((f"{VOICES}/", f"{AUDIO_VOICES}/"))
    if error.status_code in (404, 405) and changes_voices and not upload:
        words = "this server makes no voices from recordings: start it with --allow-upload"
    elif error.status_code == 405:
        words = f"there is no {asked}: use {(error.headers or {}).get('Allow', 'another method')}"
    elif error.status_code == 404:
        words = (
            f"there is no {asked}: speech is POST /v1/audio/speech, or the WebSocket /v1/audio/speech/socket; "
            "GET /openapi.json lists the rest"
        )
    return ApiError(error.status_code, "invalid", words)
