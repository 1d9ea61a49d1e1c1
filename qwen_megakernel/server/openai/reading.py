"""Bodies of requests: JSON -> checked fields. Long ones are parsed off the event loop."""

import asyncio
import json
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from qwen_megakernel.errors import RequestError
from qwen_megakernel.server.limits import MOST_VALUES, too_many_values
from qwen_megakernel.server.openai.refusals import wrong_media

_SHORT = 64 << 10  # bytes; they are parsed in 0.3 ms
_Body = TypeVar("_Body", bound=BaseModel)


async def read_json(request: Request, kind: type[_Body]) -> _Body:
    """The fields of a request.

    Raises:
        Refused, RequestValidationError: the body is no JSON, or its fields are wrong.
    """
    if not is_json(media_of(request)):
        raise wrong_media(request)
    return checked(await parsed(await request.body()), kind)


def media_of(request: Request) -> str:
    """The body's media type in lower case, without parameters; empty if the client names none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def is_json(media: str) -> bool:
    """JSON's media type, or none: simple clients send none."""
    return not media or media == "application/json" or (media.startswith("application/") and media.endswith("+json"))


async def parsed(body: bytes) -> Any:
    """The value of JSON. Raises Refused: it is none."""
    return _parse(body) if len(body) <= _SHORT else await asyncio.to_thread(_parse, body)


def checked(fields: Any, kind: type[_Body]) -> _Body:
    """Raises RequestValidationError: a field is wrong."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def described(kind: type[BaseModel]) -> dict[str, Any]:
    """What /openapi.json says of the body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


def _parse(body: bytes) -> Any:
    if not body.strip():
        raise RequestValidationError([{"type": "missing", "loc": ("body",), "input": None}])
    if too_many_values(body):  # to read them would hold the interpreter, and so the event loop
        raise RequestError(f"the body has more than {MOST_VALUES} values or commas: send less at once")
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise RequestError(f"the body must be JSON: {error}") from None
    except (ValueError, RecursionError):  # no UTF-8, a number too long, or nested too deeply
        words = "send UTF-8, without deep nesting or numbers of thousands of digits"
        raise RequestError(f"the body cannot be read as JSON: {words}") from None
