"""The HTTP API: speech in OpenAI's shape, voices, health, metrics."""

import asyncio
import io
import logging
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import numpy as np
import soundfile
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from qwen_megakernel.errors import RequestError, TextTooLongError, TTSError
from qwen_megakernel.model.pcm import pcm16, wav_header
from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.service import EngineService, Problem

log = logging.getLogger(__name__)

MEDIA = {"wav": "audio/wav", "pcm": "audio/pcm", "mp3": "audio/mpeg", "flac": "audio/flac", "opus": "audio/ogg"}
_FILES = {"mp3": {"format": "MP3"}, "flac": {"format": "FLAC"}, "opus": {"format": "OGG", "subtype": "OPUS"}}
MAX_SEED = 2**63 - 1
_LOOK_S = 0.25  # between two looks whether a client that waits is still there
_NAMES = {("/v1/audio/speech", "text"): "input", ("/v1/voices", "voice"): "name"}
"""Of a request, where they are not called as everywhere else."""


class SpeechRequest(BaseModel):
    """What OpenAI's `audio.speech.create` sends, with `language` and `seed` besides."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(max_length=256, description="The model that is served.")
    input: str = Field(min_length=1, description="What to say.")
    voice: str = Field("default", max_length=64, description="A name of /v1/voices.")
    instructions: str | None = Field(None, max_length=2000, description="How to say it, where the model takes it.")
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] = Field(
        "mp3", description="wav and pcm (16 bit, mono) are streamed while they are made."
    )
    speed: Annotated[float, Field(ge=1, le=1, strict=False)] = Field(1.0, description="1.0: it cannot be changed.")
    stream_format: Literal["audio"] = "audio"
    language: str | None = Field(None, max_length=64, description="A name of the model's languages; none: auto.")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="The same request and seed, the same speech.")


class VoiceRequest(BaseModel):
    """A voice to be made of a recording."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=64, description="a-z 0-9 _ -")
    audio: str = Field(description="A recording of 0.5 to 60 seconds, base64.")
    text: str | None = Field(None, max_length=10_000, pattern=r"\S", description="What it says: closer cloning.")


class _Refused(Exception):
    """A request that is answered with a problem."""

    def __init__(self, problem: Problem, param: str | None = None):
        self.problem, self.param = problem, param


def add_api(app: FastAPI, service: EngineService, metrics: Metrics, *, upload: bool) -> None:
    """`upload`: clients may make voices."""
    app.include_router(_routes(service, metrics, upload))
    app.add_exception_handler(_Refused, lambda _request, e: answer(e.problem, e.param))
    app.add_exception_handler(TTSError, lambda request, e: _of_error(e, request.url.path))
    app.add_exception_handler(RequestValidationError, lambda _request, e: _invalid(e))
    app.add_exception_handler(HTTPException, lambda _request, e: answer(_of_http(e), headers=e.headers))
    app.add_exception_handler(Exception, lambda _request, e: answer(Problem.of(e)))


def answer(problem: Problem, param: str | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """In OpenAI's shape."""
    kind = "invalid_request_error" if problem.status < 500 and not problem.retryable else "server_error"
    error = {"message": problem.message, "type": kind, "param": param or problem.field, "code": problem.code}
    headers = dict(headers or {}) | ({"Retry-After": "1"} if problem.retryable else {})
    return JSONResponse({"error": error | {"retryable": problem.retryable}}, problem.status, headers=headers)


def _of_error(error: TTSError, path: str) -> JSONResponse:
    problem = Problem.of(error)
    return answer(problem, _NAMES.get((path, problem.field)))


def _invalid(error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    if first["type"] == "json_invalid":  # whose place is a character's
        return answer(Problem(400, "invalid", f"the body must be JSON: {first['ctx']['error']}"))
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return answer(Problem(400, "invalid", f"{where or 'the body'}: {first['msg']}"), where or None)


def _of_http(error: HTTPException) -> Problem:
    return Problem(error.status_code, "invalid", str(error.detail))


def _routes(service: EngineService, metrics: Metrics, upload: bool) -> APIRouter:
    routes = APIRouter()
    errors: dict[int | str, dict[str, Any]] = {
        code: {"description": words, "content": {"application/json": {}}}
        for code, words in (
            (400, "It can never be served."),
            (404, "Another model is served."),
            (429, "Too many callers; try again."),
            (500, "This utterance failed."),
            (503, "Not ready, or no longer."),
        )
    }
    audio = {200: {"description": "The audio.", "content": {media: {} for media in MEDIA.values()}}}

    @routes.post("/v1/audio/speech", responses=audio | errors, response_class=Response)
    async def speech(body: SpeechRequest, of: Request) -> Response:
        service.check_ready()
        if body.model != service.model:
            raise _Refused(Problem(404, "model_not_found", f"this server speaks with {service.model!r}"), "model")
        if len(body.input) > service.limits.max_text:
            raise _Refused(Problem(400, "invalid", f"input has {len(body.input)} characters, at most "
                                   f"{service.limits.max_text} are taken"), "input")  # fmt: skip
        request = service.request(body.voice, language=body.language, instruct=body.instructions, seed=body.seed)
        pieces = await service.pieces(body.input, request)
        rate, media = service.engine.sample_rate, MEDIA[body.response_format]
        headers = {"X-Seed": str(request["sampling"].seed)}
        sound = _Sound(service, metrics, pieces, request)
        await sound.begin(of)  # what fails before the first sound has a status of its own
        if body.response_format not in _FILES:
            header = wav_header(rate) if body.response_format == "wav" else b""
            return _Streamed(sound, header, media_type=media, headers=headers)
        samples = await sound.whole(of)
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
        return {"object": "list", "data": listed} | more

    if upload:

        @routes.post("/v1/voices", status_code=201, responses={400: errors[400], 503: errors[503]})
        async def add_voice(body: VoiceRequest) -> dict:
            service.check_ready()
            if len(body.audio) > service.limits.max_upload * 4 // 3 + 4:
                raise RequestError(f"audio may have {service.limits.max_upload} bytes")
            await service.add_voice(body.name, body.audio, body.text)
            return {"id": body.name, "object": "voice"}

    @routes.get("/health", responses={503: errors[503]})
    async def health() -> JSONResponse:
        """Is the process worth keeping? While it loads, too."""
        alive = service.state not in ("dead", "failed")
        told = {"status": service.state} | ({"error": service.error} if service.error else {})
        if service.engine:
            told["engine"] = {name: value for name, value in service.engine.health().items() if name != "error"}
        return JSONResponse(told, 200 if alive else 503)

    @routes.get("/ready", responses={503: errors[503]})
    async def ready() -> JSONResponse:
        """May it be sent requests? Not before a first utterance has been said."""
        return JSONResponse({"status": service.state}, 200 if service.state == "ready" else 503)

    @routes.get("/metrics", response_class=Response)
    async def tell_metrics(request: Request) -> Response:
        """For Prometheus."""
        text, media = metrics.tell(request.headers.get("accept", ""))
        return Response(text, media_type=media)

    return routes


class _Sound:
    """A text's pieces said one after the other; the first chunk is there before the response begins."""

    def __init__(self, service: EngineService, metrics: Metrics, pieces: list[str], request: dict):
        self._service, self._metrics, self._pieces, self._request = service, metrics, pieces, request
        self._said = self._say()
        self._first: np.ndarray | None = None

    async def begin(self, request: Request) -> None:
        """
        Raises:
            TTSError: why nothing can be said.
            _Refused: the client has gone while it waited for its turn.
        """
        first = asyncio.ensure_future(anext(self._said, None))
        try:
            while not (await asyncio.wait([first], timeout=_LOOK_S))[0]:
                if await request.is_disconnected():
                    raise _Refused(Problem(408, "idle", "the client has gone"))
            self._first = first.result()
        finally:
            if not first.done():
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                await self.close()

    async def _say(self) -> AsyncIterator[np.ndarray]:
        for piece in self._pieces:
            async with self._service.saying(piece, self._request) as speech:
                async for chunk in speech:
                    yield chunk.samples
                self._metrics.heard(speech.audio)
            if speech.audio.finish_reason == "length":  # what is left of the text was not said
                raise TextTooLongError(
                    f"speech was cut after {speech.audio.duration_s:.1f} s, which is all that a slot and the "
                    "checkpoint allow: send the text in shorter parts, or another seed"
                )

    async def whole(self, request: Request) -> np.ndarray:
        """All of it, unless the client has gone.

        Raises:
            TTSError: it failed, or was cut.
        """
        samples = [np.zeros(0, np.float32) if self._first is None else self._first]
        try:
            async for more in self._said:
                samples.append(more)
                if await request.is_disconnected():
                    break
        finally:
            await self.close()
        return np.concatenate(samples)

    async def stream(self, header: bytes) -> AsyncIterator[bytes]:
        yield header + (b"" if self._first is None else pcm16(self._first))
        async for samples in self._said:
            yield pcm16(samples)

    async def close(self) -> None:
        """What is still being said is cancelled."""
        await self._said.aclose()


class _Streamed(StreamingResponse):
    """Closes its sound whatever becomes of the client: a generator that nobody asks any more would not. Speech that
    fails or is cut leaves the answer without its end: the server then closes the connection."""

    def __init__(self, sound: _Sound, header: bytes, **options):
        super().__init__(sound.stream(header), **options)
        self._sound = sound

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except TTSError as error:
            log.error("an answer ends early: %s", error)
        finally:
            await self._sound.close()


def _encode(samples: np.ndarray, rate: int, name: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.clip(samples, -1.0, 1.0), rate, **_FILES[name])
    return file.getvalue()
