"""ApiError: what a client is told when something goes wrong, over HTTP and over the WebSocket."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import Any

from qwen_megakernel.errors import (
    AudioError,
    EngineBusy,
    EngineClosed,
    EngineDied,
    InstructError,
    KernelFault,
    LanguageError,
    OutOfMemoryError,
    RequestError,
    SpeakerError,
    SpeechCutError,
    SpeedError,
    TextError,
    TTSError,
    VoiceError,
)
from qwen_megakernel.server.records import CURRENT

_FIELDS = {
    SpeakerError: "voice",
    VoiceError: "voice",
    LanguageError: "language",
    InstructError: "instructions",
    SpeedError: "speed",
    TextError: "text",
    AudioError: "audio",
}


_LISTED = 10


def listed(names: Collection[str]) -> str:
    """Names for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(islice(names, _LISTED)) + more


@dataclass(frozen=True)
class ApiError:
    """Attributes:
    status: the HTTP status.
    code: what went wrong, as docs/serving.md lists it.
    message: text for the client.
    retryable: the same request may succeed later, or on another server.
    field: the request's wrong field; None if there is no single one.
    why: the reason for metrics, where the code alone does not tell it.
    retry_s: seconds after which to try again.
    """

    status: int
    code: str
    message: str
    retryable: bool = False
    field: str | None = None
    why: str = ""
    retry_s: int = 1

    @property
    def reason(self) -> str:
        """For metrics: one of a few words."""
        return self.why or self.code

    @classmethod
    def of(cls, error: BaseException) -> "ApiError":
        """What a client is told about an exception."""
        error = OutOfMemoryError.of(error) or error
        if isinstance(error, Refused):
            return error.error
        if isinstance(error, RequestError):
            field = error.field or next((name for kind, name in _FIELDS.items() if isinstance(error, kind)), None)
            return cls(400, "invalid", str(error), field=field)
        if isinstance(error, EngineBusy):
            return cls(429, "busy", str(error), True)
        if isinstance(error, EngineClosed):
            code = "dead" if isinstance(error, EngineDied) else "closing"
            return cls(503, code, "this server cannot speak now; try again later, or another server", True)
        if isinstance(error, (KernelFault, OutOfMemoryError)):
            return cls(503, "failed", f"{type(error).__name__}: {error}", True)
        if isinstance(error, SpeechCutError):
            return cls(500, "failed", str(error), True)
        if isinstance(error, TTSError):
            return cls(500, "failed", f"{type(error).__name__}: {error}")
        return cls(500, "failed", "the server failed; its log says why")

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object, with `retryable` and the id of the request added."""
        kind = "invalid_request_error" if self.status < 500 and not self.retryable else "server_error"
        told = {"message": self.message, "type": kind, "param": self.field, "code": self.code}
        served = CURRENT.get()
        return told | {"retryable": self.retryable} | ({"request_id": served.id} if served else {})


class Refused(Exception):
    """A request that is answered with an error of its own."""

    def __init__(self, error: ApiError):
        self.error = error
