"""Wyoming's events for a server: the library reads them, their sizes and their content are checked here."""

import asyncio
import reprlib
from dataclasses import dataclass
from typing import Any, cast

from wyoming.event import Event, async_read_event
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart

from qwen_megakernel.errors import RequestError, TextError
from qwen_megakernel.server.api_error import ApiError, Refused
from qwen_megakernel.speech.patience import within
from qwen_megakernel.speech.saved_voices import MOST_NAME
from spoken_text.cutting import check_unicode

_VOICE = ("name", "speaker", "language")


class ProtocolError(Refused):
    """Bytes or events that break the protocol: the connection ends."""

    def __init__(self, words: str):
        super().__init__(ApiError(400, "protocol", words))


class Silence(Refused):
    """No event came in time."""


class _Within:
    """A client's stream as the library reads an event of it, within limits of size and time."""

    def __init__(self, reader: asyncio.StreamReader, most: int, idle_s: float):
        self._reader = reader
        self._most = most
        self._idle_s = idle_s
        self.header = b""

    async def readline(self) -> bytes:
        try:
            async with within(self._idle_s):
                self.header = await self._reader.readuntil(b"\n")
        except TimeoutError:
            words = f"no request came for {self._idle_s:g} s; connect again"
            raise Silence(ApiError(408, "idle", words)) from None
        except asyncio.LimitOverrunError:
            raise ProtocolError(f"the header of an event has more than {self._most} bytes") from None
        return self.header

    async def readexactly(self, length: Any) -> bytes:
        """`length` is what the client has sent, of any type."""
        if not isinstance(length, int) or isinstance(length, bool) or length > self._most:
            words = f"data_length and payload_length must be numbers of bytes, at most {self._most}"
            raise ProtocolError(f"{words}, got {reprlib.repr(length)}")
        try:
            async with within(self._idle_s):
                return await self._reader.readexactly(length)
        except TimeoutError:
            raise ProtocolError(f"an event did not come whole within {self._idle_s:g} s") from None


async def read_event(reader: asyncio.StreamReader, *, most: int, idle_s: float) -> Event | None:
    """The next event of a client.

    Args:
        reader: its limit must be `most`.
        most: largest size in bytes of an event's header, and likewise of its data and of its payload.
        idle_s: seconds to wait for each of these.

    Returns:
        The event without its payload, which no event for us has. None: the client is gone.

    Raises:
        ProtocolError: it is no event, or too large.
        Silence: it did not come in time. If its header had not come, another call may follow.
    """
    stream = _Within(reader, most, idle_s)
    try:
        event = await async_read_event(cast(asyncio.StreamReader, stream))
    except (asyncio.IncompleteReadError, OSError):
        return None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):  # the library looks at no types
        event = None
    if event is None or not isinstance(event.type, str) or not isinstance(event.data, dict | None):
        wanted = "a line of JSON, an object with a string as type and an object as data"
        raise ProtocolError(f"an event must be {wanted}, got {stream.header[:80]!r}")
    return Event(event.type, event.data or {})


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
        if value is not None and not (isinstance(value, str) and len(value) <= MOST_NAME):
            got = reprlib.repr(value)
            raise RequestError(f"{field} of a voice must be a string of at most {MOST_NAME} characters, got {got}")
    name, speaker, language = given
    if name is not None and speaker is not None and name.lower() != speaker.lower():
        raise RequestError(f"a voice here has one speaker, got name {name!r} and speaker {speaker!r}: send one of them")
    return name if name is not None else speaker, language
