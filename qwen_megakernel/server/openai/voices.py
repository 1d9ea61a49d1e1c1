"""Voices over HTTP: list, make, replace, delete. A recording comes in base64 within JSON, or as a file in a form."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from qwen_megakernel.errors import RequestError
from qwen_megakernel.server.api_error import ApiError, Refused, listed
from qwen_megakernel.server.openai.bodies import (
    AUDIO_MODELS,
    AUDIO_VOICES,
    VOICES,
    OmniVoiceRequest,
    RecordingRequest,
    VoiceRequest,
    check_not_compressed,
    checked,
    described,
    media_of,
    read_json,
)
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.speech.saved_voices import check_base64_size, recording_too_long

_FORM_PIECE = 64 << 10  # bytes of a form to parse at once; other tasks run in between
_MAX_FIELD = 64 << 10  # bytes of a form's field other than the recording
_Body = TypeVar("_Body", bound=RecordingRequest)

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the client is told of a broken form; the log is not


def add_voices(routes: APIRouter, service: EngineService) -> None:
    """Add the routes. Those that make, replace and delete voices only if the operator allows it."""
    errors: dict[int | str, dict[str, Any]] = {
        code: {"description": "See docs/serving.md."} for code in (400, 404, 415, 503)
    }

    @routes.get(AUDIO_VOICES.removeprefix("/v1"), responses={503: errors[503]}, include_in_schema=False)
    @routes.get(AUDIO_VOICES, responses={503: errors[503]})
    async def audio_voices(legacy: bool = False) -> dict:
        """As Open WebUI, Kokoro-FastAPI's and vLLM-Omni's clients expect them; `legacy`: names alone."""
        service.check_ready()
        names = [*service.voice_names(), *service.aliases]
        uploaded = [{"name": name} for name in service.saved_voices.by_name]
        return {
            "voices": names if legacy else [{"id": name, "name": name} for name in names],
            "uploaded_voices": uploaded,
        }

    @routes.get(AUDIO_MODELS.removeprefix("/v1"), include_in_schema=False)
    @routes.get(AUDIO_MODELS)
    async def audio_models() -> dict:
        """As Open WebUI expects them."""
        return {"models": [{"id": name, "name": name} for name in service.models]}

    @routes.get(VOICES, responses={503: errors[503]})
    async def voices() -> dict:
        engine = service.check_ready()
        return {
            "object": "list",
            "data": [{"id": name, "object": "voice"} for name in service.voice_names()],
            "aliases": service.aliases,
            "languages": list(engine.languages),
            "cloning": service.can_clone,
            "clones": service.clones,
            "instructions": service.takes_instructions,
        }

    if not service.options.allow_upload:
        return

    async def made(request: Request, kind: type[VoiceRequest]) -> str:
        """The name of the new voice."""
        service.check_ready()
        body, recording = await _read(request, kind, service.limits.max_upload)
        await service.add_voice(body.name, recording, body.text)
        return body.name

    async def deleted(name: str) -> str:
        """The name of the voice, which is a saved one no more."""
        service.check_ready()
        name = _saved(service, name)
        await service.saved_voices.remove(name)
        return name

    @routes.post(VOICES, status_code=201, responses=errors, openapi_extra=described(VoiceRequest))
    async def add_voice(request: Request) -> dict:
        return {"id": await made(request, VoiceRequest), "object": "voice"}

    @routes.post(AUDIO_VOICES, responses=errors, openapi_extra=described(OmniVoiceRequest))
    async def add_omni_voice(request: Request) -> dict:
        """As vLLM-Omni's clients make a voice."""
        return {"success": True, "voice": {"name": await made(request, OmniVoiceRequest)}}

    @routes.delete(AUDIO_VOICES + "/{name}", responses=errors)
    async def delete_omni_voice(name: str) -> dict:
        await deleted(name)
        return {"success": True, "message": f"Voice '{name}' deleted successfully"}

    @routes.put(VOICES + "/{name}", responses=errors, openapi_extra=described(RecordingRequest))
    async def replace_voice(name: str, request: Request) -> dict:
        engine = service.check_ready()
        name = _saved(service, name)
        body, recording = await _read(request, RecordingRequest, service.limits.max_upload)
        await service.saved_voices.add(engine, name, recording, body.text, replace=True)
        return {"id": name, "object": "voice"}

    @routes.delete(VOICES + "/{name}", responses=errors)
    async def delete_voice(name: str) -> dict:
        return {"id": await deleted(name), "object": "voice", "deleted": True}


def _saved(service: EngineService, name: str) -> str:
    """The saved voice of this name, in upper or lower case.

    Raises:
        Refused: there is no such voice.
    """
    if name.lower() not in service.saved_voices.by_name:
        known = listed(service.saved_voices.by_name) or "none"
        words = f"there is no saved voice {name[:80]!r}; known: {known}"
        raise Refused(ApiError(404, "invalid", words, field="name"))
    return name.lower()


async def _read(request: Request, kind: type[_Body], max_upload: int) -> tuple[_Body, str | bytes]:
    """The fields of a request, and its recording: base64 from JSON, or bytes from a form.

    Raises:
        Refused: the body is neither JSON nor such a form, or a field is wrong.
        RequestError: it cannot be read, or the recording is too long.
    """
    if media_of(request) == "multipart/form-data":
        check_not_compressed(request)
        fields, content = await _read_form(request, max_upload)
        return checked(fields | {"audio": ""}, kind), content  # the recording has come as a file
    body = await read_json(request, kind, "; or send a form, as multipart/form-data")
    check_base64_size(body.audio, max_upload)
    return body, body.audio


async def _read_form(request: Request, max_upload: int) -> tuple[dict[str, Any], bytes]:
    """A form's fields, and the bytes of its file."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        body = memoryview(await request.body())
        for start in range(0, len(body), _FORM_PIECE):
            yield bytes(body[start : start + _FORM_PIECE])
            await asyncio.sleep(0)

    words = "the form cannot be read: send the file audio and the fields name and text, each of them once"
    parser = MultiPartParser(request.headers, pieces(), max_files=1, max_fields=4, max_part_size=_MAX_FIELD)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError):
        raise RequestError(words) from None
    try:
        fields = dict(form.multi_items())
        if len(fields) < len(form.multi_items()):
            raise RequestError(f"{words}; one came twice")
        recording = fields.pop("audio", None) or fields.pop("audio_sample", None)
        if not isinstance(recording, UploadFile):
            raise RequestError("audio must be a file of the form: send it with a file name", field="audio")
        content = await recording.read()
        if len(content) > max_upload:
            raise recording_too_long(max_upload)
        return fields, content
    finally:
        await form.close()
