"""Refusals: how an error becomes an answer of HTTP, in OpenAI's shape."""

from typing import Any

from fastapi.responses import JSONResponse

from qwen_megakernel.server.api_error import ApiError


def error_body(error: ApiError, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object, with `retryable` added. `param`: the wrong field, if `error.field` does not name it."""
    kind = "invalid_request_error" if error.status < 500 and not error.retryable else "server_error"
    told = {"message": error.message, "type": kind, "param": param or error.field, "code": error.code}
    return told | {"retryable": error.retryable}


def error_response(error: ApiError, param: str | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """The answer to a request that failed; see `error_body`."""
    headers = dict(headers or {}) | ({"Retry-After": "1"} if error.retryable else {})
    return JSONResponse({"error": error_body(error, param)}, error.status, headers=headers)
