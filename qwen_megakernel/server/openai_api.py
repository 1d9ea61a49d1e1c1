"""The HTTP API: speech in OpenAI's shape, voices, health, metrics."""

import asyncio
import io
import logging
import reprlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import numpy as np
import soundfile
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from qwen_megakernel.errors import AudioError, TextTooLongError, TTSError
from qwen_megakernel.model.pcm import pcm16, wav_header
from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.service import EngineService

log = logging.getLogger(__name__)

MEDIA = {"wav": "audio/wav", "pcm": "audio/pcm", "mp3": "audio/mpeg", "flac": "audio/flac", "opus": "audio/ogg"}
_FILES = {"mp3": {"format": "MP3"}, "flac": {"format": "FLAC"}, "opus": {"format": "OGG", "subtype": "OPUS"}}
MAX_SEED = 2**63 - 1
_DISCONNECT_POLL_S = 0.25  # how often it is checked that a waiting client is still connected
_FIELD_NAMES = {("/v1/audio/speech", "text"): "input", ("/v1/voices", "voice"): "name"}
"""Fields that these paths call by another name than the rest of the API."""


def _check_speed(speed: Any) -> Any:
    if isinstance(speed, bool) or speed != 1:
        words = "only speed 1.0 is supported, got {speed}: leave it out"
        raise PydanticCustomError("speed", words, {"speed": reprlib.repr(speed)})
    return speed


class SpeechRequest(BaseModel):
    """What OpenAI's `audio.speech.create` sends, and `language` and `seed`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(max_length=256, description="The model that is served.")
    input: str = Field(min_length=1, description="What to say.")
    voice: str = Field("default", max_length=64, description="A name of /v1/voices.")
    instructions: str | None = Field(None, max_length=2000, description="How to say it, where the model takes it.")
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] = Field(
        "mp3", description="wav and pcm (16 bit, mono) are streamed while they are made."
    )
    speed: Annotated[float, BeforeValidator(_check_speed)] = Field(
        1.0, description="1.0: it cannot be changed.", json_schema_extra={"minimum": 1, "maximum": 1}
    )
    stream_format: Literal["audio"] = "audio"
    language: str | None = Field(None, max_length=64, description='A name or code, as "english", "en"; none: auto.')
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="The same request and seed, the same speech.")


class VoiceRequest(BaseModel):
    """A recording to make a voice of."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=64, description="a-z 0-9 _ -")
    audio: str = Field(description="A recording of 0.5 to 60 seconds, base64.")
    text: str | None = Field(None, max_length=10_000, pattern=r"\S", description="What it says: closer cloning.")


_BODIES: dict[str, type[BaseModel]] = {"/v1/audio/speech": SpeechRequest, "/v1/voices": VoiceRequest}
"""What is sent to which path."""


class _Refused(Exception):
    """A request that is answered with an error. `param`: the field of the request that is wrong."""

    def __init__(self, error: ApiError, param: str | None = None):
        self.error, self.param = error, param


def add_api(app: FastAPI, service: EngineService, metrics: Metrics, *, upload: bool) -> None:
    """Add the routes. `upload`: clients may make voices."""
    app.include_router(_routes(service, metrics, upload))
    app.add_exception_handler(_Refused, lambda _request, e: error_response(e.error, e.param))
    app.add_exception_handler(TTSError, lambda request, e: _of_tts_error(e, request.url.path))
    app.add_exception_handler(RequestValidationError, _of_validation_error)
    app.add_exception_handler(
        HTTPException, lambda request, e: error_response(_of_http(request, e, upload), headers=e.headers)
    )
    app.add_exception_handler(Exception, lambda _request, e: error_response(ApiError.of(e)))


def error_response(error: ApiError, param: str | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """In OpenAI's shape. `param`: the field of the request that is wrong, where it is not called `error.field`."""
    kind = "invalid_request_error" if error.status < 500 and not error.retryable else "server_error"
    body = {"message": error.message, "type": kind, "param": param or error.field, "code": error.code}
    headers = dict(headers or {}) | ({"Retry-After": "1"} if error.retryable else {})
    return JSONResponse({"error": body | {"retryable": error.retryable}}, error.status, headers=headers)


def _of_tts_error(error: TTSError, path: str) -> JSONResponse:
    told = ApiError.of(error)
    return error_response(told, _FIELD_NAMES.get((path, told.field)))


def _of_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    kind, got = first["type"], first.get("input")
    known = next(", ".join(body.model_fields) for path, body in _BODIES.items() if request.url.path.endswith(path))
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    if kind == "json_invalid":  # its place is a character's, not a field's
        return error_response(ApiError(400, "invalid", f"the body must be JSON: {first['ctx']['error']}"))
    if isinstance(got, bytes):  # FastAPI parses a body of this Content-Type only
        media = request.headers.get("content-type", "")[:80]
        words = f"send JSON with the header Content-Type: application/json, got Content-Type {media!r}"
        return error_response(ApiError(415, "invalid", words))
    if kind == "missing":
        words = f"{where or 'the body'} is missing: send a JSON object; its fields: {known}"
    elif kind == "extra_forbidden":
        words = f"unknown field {where[:80]!r}; known: {known}"
    elif kind == "speed":
        words = first["msg"]
    elif not where:
        words = f"the body must be a JSON object, got {reprlib.repr(got)}"
    else:
        words = f"{where}: {first['msg']}, got {reprlib.repr(got)}"
    return error_response(ApiError(400, "invalid", words), where or None)


def _of_http(request: Request, error: HTTPException, upload: bool) -> ApiError:
    """What Starlette and FastAPI refuse by themselves."""
    asked, words = f"{request.method[:20]} {request.url.path[:80]!r}", str(error.detail)
    if error.status_code == 400:
        words = "the body cannot be read as JSON: send UTF-8, without deep nesting or numbers of thousands of digits"
    elif error.status_code == 405 and request.url.path == "/v1/voices" and request.method == "POST" and not upload:
        words = "this server makes no voices of recordings: start it with --allow-upload"
    elif error.status_code == 405:
        words = f"there is no {asked}, only {(error.headers or {}).get('Allow', 'other methods')}"
    elif error.status_code == 404:
        words = (
            f"there is no {asked}: speech is POST /v1/audio/speech, or the WebSocket /v1/audio/speech/socket; "
            "GET /openapi.json lists the rest"
        )
    return ApiError(error.status_code, "invalid", words)


def _routes(service: EngineService, metrics: Metrics, upload: bool) -> APIRouter:
    routes = APIRouter()
    errors: dict[int | str, dict[str, Any]] = {
        code: {"description": words, "content": {"application/json": {}}}
        for code, words in (
            (400, "It can never be served."),
            (404, "Another model is served."),
            (415, "The Content-Type is not JSON's."),
            (429, "Too many callers; try again."),
            (500, "This utterance failed."),
            (503, "Not ready, or no longer."),
        )
    }
    success = {200: {"description": "The audio.", "content": {media: {} for media in MEDIA.values()}}}

    @routes.post("/v1/audio/speech", responses=success | errors, response_class=Response)
    async def speech(body: SpeechRequest, of: Request) -> Response:
        service.check_ready()
        if body.model != service.model:
            words = f"this server's model is {service.model!r}, got {body.model[:80]!r}"
            raise _Refused(ApiError(404, "model_not_found", words), "model")
        if (size := len(body.input)) > (most := service.limits.max_text):
            raise _Refused(ApiError(400, "invalid", f"input has {size} characters, at most {most} are taken"), "input")
        request = service.request(body.voice, language=body.language, instruct=body.instructions, seed=body.seed)
        pieces = await service.pieces(body.input, request)
        rate, media = service.engine.sample_rate, MEDIA[body.response_format]
        headers = {"X-Seed": str(request["sampling"].seed)}
        audio = _RequestAudio(service, metrics, pieces, request)
        await audio.begin(of)  # an error before the first chunk has an HTTP status of its own
        if body.response_format not in _FILES:
            header = wav_header(rate) if body.response_format == "wav" else b""
            return _StreamedAudio(audio, header, media_type=media, headers=headers)
        samples = await audio.whole(of)
        data = await asyncio.to_thread(_encode, samples, rate, body.response_format)
        return Response(data, media_type=media, headers=headers)

    @routes.get("/v1/models")
    async def models() -> dict:
        one = {"id": service.model, "object": "model", "created": 0, "owned_by": "qwen_megakernel"}
        return {"object": "list", "data": [one]}

    @routes.get("/v1/voices", responses={503: errors[503]})
    async def voices() -> dict:
        service.check_ready()
        listed = [{"id": name, "object": "voice"} for name in service.voice_names()]
        more = {"languages": list(service.engine.languages), "cloning": service.can_clone}
        more["instructions"] = service.takes_instructions
        return {"object": "list", "data": listed} | more

    if upload:

        @routes.post("/v1/voices", status_code=201, responses={400: errors[400], 503: errors[503]})
        async def add_voice(body: VoiceRequest) -> dict:
            service.check_ready()
            if len(body.audio) > service.limits.max_upload * 4 // 3 + 4:
                raise AudioError(f"the recording may have {service.limits.max_upload} bytes: send a shorter one")
            await service.saved_voices.add(service.engine, body.name, body.audio, body.text)
            return {"id": body.name, "object": "voice"}

    @routes.get("/health", responses={503: errors[503]})
    async def health() -> JSONResponse:
        """200 while the process is worth keeping, also while it loads."""
        alive = service.state not in ("dead", "failed")
        told = {"status": service.state} | ({"error": service.error} if service.error else {})
        if service.engine:
            told["engine"] = {name: value for name, value in service.engine.health().items() if name != "error"}
        return JSONResponse(told, 200 if alive else 503)

    @routes.get("/ready", responses={503: errors[503]})
    async def ready() -> JSONResponse:
        """200 when requests are served: after a first utterance was spoken, until the server is told to stop."""
        return JSONResponse({"status": service.state}, 200 if service.state == "ready" else 503)

    @routes.get("/metrics", response_class=Response)
    async def prometheus(request: Request) -> Response:
        """For Prometheus."""
        text, media = metrics.render(request.headers.get("accept", ""))
        return Response(text, media_type=media)

    return routes


class _RequestAudio:
    """The audio of one request: its pieces of text, spoken one after the other."""

    def __init__(self, service: EngineService, metrics: Metrics, pieces: list[str], request: dict):
        self._service, self._metrics, self._pieces, self._request = service, metrics, pieces, request
        self._samples = self._speak()
        self._first: np.ndarray | None = None

    async def begin(self, request: Request) -> None:
        """Wait for the first chunk.

        Raises:
            TTSError: why nothing can be spoken.
            _Refused: the client has disconnected meanwhile.
        """
        first = asyncio.ensure_future(anext(self._samples, None))
        try:
            while not (await asyncio.wait([first], timeout=_DISCONNECT_POLL_S))[0]:
                if await request.is_disconnected():
                    raise _Refused(ApiError(408, "idle", "the client has gone"))
            self._first = first.result()
        finally:
            if not first.done():
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                await self.close()

    async def _speak(self) -> AsyncIterator[np.ndarray]:
        for piece in self._pieces:
            async with self._service.speak(piece, self._request) as utterance:
                async for chunk in utterance:
                    yield chunk.samples
                audio = utterance.audio
                self._metrics.record(audio)
            if audio.finish_reason == "length":  # what is left of the text was not spoken
                raise TextTooLongError(audio.why_cut(self._service.engine.config.max_frames))

    async def whole(self, request: Request) -> np.ndarray:
        """All samples; fewer if the client has disconnected.

        Raises:
            TTSError: the utterance failed, or its speech was cut.
        """
        samples = [np.zeros(0, np.float32) if self._first is None else self._first]
        try:
            async for more in self._samples:
                samples.append(more)
                if await request.is_disconnected():
                    break
        finally:
            await self.close()
        return np.concatenate(samples)

    async def stream(self, header: bytes) -> AsyncIterator[bytes]:
        """`header`, then PCM."""
        yield header + (b"" if self._first is None else pcm16(self._first))
        async for samples in self._samples:
            yield pcm16(samples)

    async def close(self) -> None:
        """Cancel what is still being spoken."""
        await self._samples.aclose()


class _StreamedAudio(StreamingResponse):
    """Closes its audio whatever the client does: a generator that nobody reads any more would not close itself.

    If the speech fails or is cut, the answer has no end, and the server closes the connection."""

    def __init__(self, audio: _RequestAudio, header: bytes, **options):
        super().__init__(audio.stream(header), **options)
        self._audio = audio

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except TTSError as error:
            log.error("an answer ends early: %s", error)
        finally:
            await self._audio.close()


def _encode(samples: np.ndarray, rate: int, name: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.clip(samples, -1.0, 1.0), rate, **_FILES[name])
    return file.getvalue()
