"""Wyoming's events for a server. Their size is checked before they are read, their content before it is used."""

import asyncio
import json
import reprlib
from dataclasses import dataclass
from typing import Any

from wyoming.event import Event
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart

from qwen_megakernel.errors import RequestError, TextError
from spoken_text.cutting import check_unicode

_MAX_NAME = 64  # characters of a voice's or a language's name
_VOICE = ("name", "speaker", "language")


class ProtocolError(Exception):
    """Bytes or events that break the protocol: the connection ends."""


class Silence(Exception):
    """No event, or only part of one, came in time."""


async def read_event(reader: asyncio.StreamReader, *, most: int, idle_s: float) -> Event | None:
    """The next event of a client.

    Args:
        reader: its limit must be `most`.
        most: largest size in bytes of an event's header, and likewise of its data and of its payload.
        idle_s: seconds to wait for a header, and again for the rest of the event.

    Returns:
        The event without its payload, which no event for us has. None: the client is gone.

    Raises:
        ProtocolError: it is no event, or too large.
        Silence: it did not come in time. If its header had not come, another call may follow.
    """
    try:
        async with asyncio.timeout(idle_s):
            line = await reader.readuntil(b"\n")
    except TimeoutError:
        raise Silence("no request came") from None
    except asyncio.LimitOverrunError:
        raise ProtocolError(f"the header of an event has more than {most} bytes") from None
    except (asyncio.IncompleteReadError, OSError):
        return None
    header = _object(line, "the header of an event")
    kind, data = header.get("type"), header.get("data")
    if not isinstance(kind, str):
        raise ProtocolError(f"type must be a string, got {reprlib.repr(kind)}")
    if not isinstance(data, dict | None):
        raise ProtocolError(f"data must be a JSON object, got {reprlib.repr(data)}")
    lengths = [_length(header, name, most) for name in ("data_length", "payload_length")]
    try:
        async with asyncio.timeout(idle_s):
            more, _ = [await reader.readexactly(length) for length in lengths]
    except TimeoutError:
        raise ProtocolError(f"an event did not come whole within {idle_s:g} s") from None
    except (asyncio.IncompleteReadError, OSError):
        return None
    return Event(kind, (data or {}) | (_object(more, "the data of an event") if more else {}))


def _length(header: dict[str, Any], name: str, most: int) -> int:
    length = header.get(name)
    if length is None:
        return 0
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        raise ProtocolError(f"{name} must be a number of bytes, got {reprlib.repr(length)}")
    if length > most:
        raise ProtocolError(f"{name} is {reprlib.repr(length)}, at most {most} bytes are allowed")
    return length


def _object(text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what} must be JSON: {str(error)[:80]!r}") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} must be a JSON object, got {reprlib.repr(value)}")
    return value


@dataclass(frozen=True)
class Request:
    """What a client asks for by one event. The event's other content is dropped.

    Attributes:
        kind: the event's type.
        text: "" for events without text.
        voice, language: None: the client does not say.
    """

    kind: str
    text: str = ""
    voice: str | None = None
    language: str | None = None

    @classmethod
    def of(cls, event: Event) -> "Request":
        """
        Args:
            event: a synthesize, synthesize-start, synthesize-chunk or synthesize-stop.

        Raises:
            RequestError: the event is malformed, or its text is SSML.
        """
        has_text = Synthesize.is_type(event.type) or SynthesizeChunk.is_type(event.type)
        has_voice = Synthesize.is_type(event.type) or SynthesizeStart.is_type(event.type)
        text = text_of(event) if has_text else ""
        voice, language = _voice_of(event) if has_voice else (None, None)
        return cls(event.type, text, voice, language)


def text_of(event: Event) -> str:
    """
    Raises:
        TextError: the text is missing, not a string, or not valid Unicode.
    """
    text = event.data.get("text")
    if not isinstance(text, str):
        raise TextError(f"{event.type}: text must be a string, got {reprlib.repr(text)}")
    check_unicode(text)
    return text


def _voice_of(event: Event) -> tuple[str | None, str | None]:
    """Voice and language."""
    if event.data.get("text_format") not in (None, "text"):
        got = reprlib.repr(event.data["text_format"])
        raise RequestError(f"text_format must be 'text', got {got}: send plain text")
    voice = event.data.get("voice")
    if voice is None:
        return None, None
    if not isinstance(voice, dict):
        raise RequestError(f"voice must be an object with {', '.join(_VOICE)}, got {reprlib.repr(voice)}")
    given = [voice.get(field) for field in _VOICE]
    for field, value in zip(_VOICE, given, strict=True):
        if value is not None and not (isinstance(value, str) and len(value) <= _MAX_NAME):
            got = reprlib.repr(value)
            raise RequestError(f"{field} of a voice must be a string of at most {_MAX_NAME} characters, got {got}")
    name, speaker, language = given
    if name is not None and speaker is not None and name.lower() != speaker.lower():
        raise RequestError(f"a voice here has one speaker, got name {name!r} and speaker {speaker!r}: send one of them")
    return name if name is not None else speaker, language
