"""How the errors of the API over HTTP become answers."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from qwen_megakernel.errors import TTSError
from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.openai.bodies import AUDIO_VOICES, BATCH, SPEECH, VOICES, why_wrong
from qwen_megakernel.server.refusals import error_body, error_response

_FIELD_NAMES = {(SPEECH, "text"): "input", (BATCH, "text"): "input", (VOICES, "voice"): "name"}
_FIELD_NAMES |= {(AUDIO_VOICES, "voice"): "name", (AUDIO_VOICES, "text"): "ref_text"}
"""Fields that these paths call by another name than the rest of the API."""


class Refused(Exception):
    """A request that is answered with an error. `param`: the request's wrong field."""

    def __init__(self, error: ApiError, param: str | None = None):
        self.error = error
        self.param = param


def error_of(error: Exception, path: str) -> dict[str, Any]:
    """The error object for the error that ended a request to `path`."""
    return error_body(*_told(error, path))


def _told(error: Exception, path: str) -> tuple[ApiError, str | None]:
    """The error, and the wrong field's name at `path`, if it has another name there."""
    if isinstance(error, Refused):
        return error.error, error.param
    told = ApiError.of(error)
    return told, _FIELD_NAMES.get((path, told.field or ""))


def add_refusals(app: FastAPI, *, upload: bool) -> None:
    """Answer every error of the app in this shape. `upload`: clients may make voices."""

    def of_error(request: Request, error: Exception) -> JSONResponse:
        return error_response(*_told(error, request.url.path))

    for kind in (Refused, TTSError, Exception):
        app.add_exception_handler(kind, of_error)
    app.exception_handler(RequestValidationError)(_of_validation_error)
    app.add_exception_handler(
        HTTPException, lambda request, e: error_response(_of_http(request, e, upload), headers=e.headers)
    )


def wrong_media(request: Request, more: str = "") -> Refused:
    """A body whose Content-Type is not JSON. `more`: the other accepted types, in words."""
    media = request.headers.get("content-type", "")[:80]
    words = f"send JSON with the header Content-Type: application/json, got Content-Type {media!r}"
    return Refused(ApiError(415, "invalid", words + more))


def _of_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    if first["type"] == "json_invalid":  # its location is a character, not a field
        return error_response(ApiError(400, "invalid", f"the body must be JSON: {first['ctx']['error']}"))
    if isinstance(first.get("input"), bytes):  # FastAPI parses a body of this Content-Type only
        return error_response(wrong_media(request).error)
    words, field = why_wrong(first, request.url.path)
    return error_response(ApiError(400, "invalid", words), field)


def _of_http(request: Request, error: HTTPException, upload: bool) -> ApiError:
    """The error for a request that Starlette or FastAPI refuses itself."""
    path = request.url.path
    asked, words = f"{request.method[:20]} {path[:80]!r}", str(error.detail)
    changes_voices = path in (VOICES, AUDIO_VOICES) and request.method == "POST"
    changes_voices |= path.startswith((f"{VOICES}/", f"{AUDIO_VOICES}/"))
    if error.status_code == 400:
        words = "the body cannot be read as JSON: send UTF-8, without deep nesting or numbers of thousands of digits"
    elif error.status_code in (404, 405) and changes_voices and not upload:
        words = "this server makes no voices from recordings: start it with --allow-upload"
    elif error.status_code == 405:
        words = f"there is no {asked}: use {(error.headers or {}).get('Allow', 'another method')}"
    elif error.status_code == 404:
        words = (
            f"there is no {asked}: speech is POST /v1/audio/speech, or the WebSocket /v1/audio/speech/socket; "
            "GET /openapi.json lists the rest"
        )
    return ApiError(error.status_code, "invalid", words)
