"""The HTTP API: speech in OpenAI's shape, one text or several; models, health, metrics."""

from contextlib import suppress
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from qwen_megakernel.server.answers import Batch, Speech, Streamed
from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.bodies import BATCH, SPEECH, BatchBody, SpeechBody
from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.refusals import Refused, add_refusals, invalid
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.server.voices_api import add_voices
from qwen_megakernel.speech.encoders import MEDIA, missing

with suppress(ModuleNotFoundError):
    import av  # noqa: F401 - loads FFmpeg now, so that no request waits for it

_DEFAULT_FORMAT = "mp3"  # OpenAI's

ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"description": words, "content": {"application/json": {}}}
    for code, words in (
        (400, "The request is wrong; it fails every time."),
        (404, "The server has another model."),
        (415, "The Content-Type is not JSON's."),
        (429, "Too many callers; try again later."),
        (500, "This utterance failed."),
        (503, "The server is starting, stopping or dead."),
    )
}


def add_api(app: FastAPI, service: EngineService, metrics: Metrics, *, upload: bool) -> None:
    """Add the routes. `upload`: clients may make, replace and delete voices."""
    routes = APIRouter()
    _add_speech(routes, service)
    _add_models(routes, service)
    add_voices(routes, service, upload=upload)
    _add_state(routes, service, metrics)
    app.include_router(routes)
    add_refusals(app, upload=upload)


def _add_speech(routes: APIRouter, service: EngineService) -> None:
    audio: dict[str, Any] = {kind: {} for kind in (*MEDIA.values(), "text/event-stream")}
    good: dict[int | str, Any] = {200: {"description": "The audio.", "content": audio}}

    @routes.post(SPEECH, responses=good | ERRORS, response_class=Response)
    async def speech(body: SpeechBody, of: Request) -> Response:
        name = _checked(service, body.model, body.response_format)
        if (size := len(body.input)) > (most := service.limits.max_text):
            raise invalid(f"input has {size} characters, at most {most} are allowed", "input")
        made = Speech(service, name)
        if body.retries and (made.streams or body.stream_format == "sse"):
            words = "retries needs an answer that is not streamed, because nobody must hear the first try"
            raise invalid(f"{words}: ask for response_format 'flac' without events, or for a batch", "retries")
        made.prepare(body.input, body.options())
        headers = {"X-Seed": str(made.seed)}
        if made.ignored:
            headers["X-Ignored"] = ", ".join(made.ignored)
        await made.begin(of)  # an error before the first chunk still sets the HTTP status
        if body.stream_format == "sse":
            return Streamed(made.events(), made, media_type="text/event-stream", headers=headers)
        if made.streams:
            return Streamed(made.encoded(), made, media_type=MEDIA[name], headers=headers)
        whole = await made.whole(of)
        if body.retries:
            headers["X-Attempts"] = str(made.attempts)
        return Response(whole, media_type=MEDIA[name], headers=headers)

    listed: dict[int | str, Any] = {200: {"content": {"application/json": {}}}}

    @routes.post(BATCH, responses=listed | ERRORS, response_class=Response)
    async def batch(body: BatchBody) -> Response:
        """Speak several texts. `data` holds audio in base64 or an error for each, in the order of `inputs`."""
        name = _checked(service, body.model, body.response_format)
        limits = service.limits
        if (count := len(body.inputs)) > limits.max_batch:
            raise invalid(f"inputs has {count} entries, at most {limits.max_batch} are allowed", "inputs")
        if (size := sum(len(item.input) for item in body.inputs)) > limits.max_batch_text:
            raise invalid(f"inputs have {size} characters, at most {limits.max_batch_text} are allowed", "inputs")
        shared = body.options()
        items = [(item.input, shared | item.options()) for item in body.inputs]
        return Streamed(Batch(service, name, items).parts(), media_type="application/json")


def _checked(service: EngineService, model: str, name: str | None) -> str:
    """The format of the answer. `name`: the format that the client asked for, if any.

    Raises:
        EngineClosed: the engine is not ready, or no longer.
        Refused: another model, or a format that cannot be made here.
    """
    service.check_ready()
    _check_model(service, model, "model")
    name = name or _DEFAULT_FORMAT
    if why := missing(name):
        raise invalid(why, "response_format")
    return name


def _check_model(service: EngineService, model: str, param: str | None = None) -> None:
    if model not in service.models:
        words = f"this server's model is {service.model!r}, got {model[:80]!r}; known: {', '.join(service.models)}"
        raise Refused(ApiError(404, "model_not_found", words), param)


def _add_models(routes: APIRouter, service: EngineService) -> None:
    def told(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "qwen_megakernel"}

    @routes.get("/v1/models")
    async def models() -> dict:
        """All names of the served model, its own first."""
        return {"object": "list", "data": [told(name) for name in service.models]}

    @routes.get("/v1/models/{model:path}", responses={404: ERRORS[404]})
    async def model(model: str) -> dict:
        _check_model(service, model)
        return told(model)


def _add_state(routes: APIRouter, service: EngineService, metrics: Metrics) -> None:
    @routes.get("/health", responses={503: ERRORS[503]})
    async def health() -> JSONResponse:
        """200 while the process should be kept, also while it loads."""
        alive = service.state not in ("dead", "failed")
        told: dict[str, Any] = {"status": service.state} | ({"error": service.error} if service.error else {})
        if service.loaded:
            told["engine"] = {name: value for name, value in service.engine.health().items() if name != "error"}
        return JSONResponse(told, 200 if alive else 503)

    @routes.get("/ready", responses={503: ERRORS[503]})
    async def ready() -> JSONResponse:
        """200 while requests are served: from the first spoken utterance until the server is told to stop."""
        return JSONResponse({"status": service.state}, 200 if service.state == "ready" else 503)

    @routes.get("/metrics", response_class=Response)
    async def prometheus(request: Request) -> Response:
        """Metrics for Prometheus."""
        text, media = metrics.render(request.headers.get("accept", ""))
        return Response(text, media_type=media)
