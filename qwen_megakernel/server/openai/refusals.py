"""How the errors of the API over HTTP become answers."""

from dataclasses import replace

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from qwen_megakernel.errors import TTSError
from qwen_megakernel.server.api_error import ApiError, Refused
from qwen_megakernel.server.guard import error_response
from qwen_megakernel.server.openai.bodies import AUDIO_VOICES, BATCH, SPEECH, VOICES

_FIELD_NAMES = {(SPEECH, "text"): "input", (BATCH, "text"): "input", (VOICES, "voice"): "name"}
_FIELD_NAMES |= {(AUDIO_VOICES, "voice"): "name", (AUDIO_VOICES, "text"): "ref_text"}
"""Fields that these paths call by another name than the rest of the API."""


def error_of(error: Exception, path: str) -> ApiError:
    """The error that ended a request to `path`. Its field has the name that it has there."""
    told = ApiError.of(error)
    if isinstance(error, Refused):
        return told
    return replace(told, field=_FIELD_NAMES.get((path, told.field or ""), told.field))


def add_refusals(app: FastAPI, *, upload: bool) -> None:
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
