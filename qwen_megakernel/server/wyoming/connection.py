"""One client of the Wyoming server: its events come in, speech goes out."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

import numpy as np
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.error import Error
from wyoming.event import Event, async_write_event
from wyoming.info import Describe
from wyoming.ping import Ping, Pong
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart, SynthesizeStop, SynthesizeStopped

from qwen_megakernel.errors import NoWordsError, RequestError, SpeechCutError, TextTooLongError
from qwen_megakernel.model.pcm import BYTES, pcm16
from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.records import Record, serving
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.server.tasks import first_of
from qwen_megakernel.server.wyoming.events import ProtocolError, Request, Silence, read_event, text_of
from qwen_megakernel.speech.events import Ended, Sound
from qwen_megakernel.speech.options import read_options
from qwen_megakernel.speech.patience import within
from qwen_megakernel.speech.request import SpeechRequest
from qwen_megakernel.speech.session import SpeechSession
from spoken_text.finder import Conversation

log = logging.getLogger(__name__)

_LINGER_S = 2.0  # time for a client to read why its connection ends


class Connection:
    """One client. One task reads its events; another speaks the requests one by one.

    An error ends the connection, because Home Assistant would go on waiting for audio.

    Attributes:
        rests_since: when it last began to rest, by the event loop's clock.
    """

    def __init__(
        self,
        service: EngineService,
        info: Event,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ):
        """
        Args:
            info: the answer to `describe`.
        """
        self._service = service
        self._limits = service.limits
        self._info = info
        self._reader = reader
        self._writer = writer
        self._conversation = Conversation()
        peer = writer.get_extra_info("peername") or ("",)
        self._record = Record("wyoming", client=peer[0], route="wyoming")
        self._inbox: asyncio.Queue[Request] = asyncio.Queue()
        self._unread = 0  # total size of the inbox, by `_size`
        self._open = False  # the client has sent synthesize-start but not yet synthesize-stop
        self._speaking = False
        self._told_failure: Exception | None = None  # of a request; the journal has it
        self._complete = False  # a stream's synthesize-stop was taken
        self._streamed = 0  # a stream's characters so far
        self._samples = 0  # sent for this request
        self.rests_since = asyncio.get_running_loop().time()

    @property
    def rests(self) -> bool:
        """The client waits for nothing."""
        return not (self._speaking or self._unread)

    async def run(self) -> None:
        """Run until the client is gone or must be disconnected."""
        error = None
        try:
            with serving(self._record):
                await first_of(self._receive(), self._speak_all())
        except ConnectionError:  # the client is gone
            pass
        except Exception as failure:
            error = ApiError.of(failure)
            if error.status == 500 and not error.retryable:
                log.exception("a request failed")
            if failure is not self._told_failure:
                self._service.journal.refuse(self._record.child(), error)
        finally:
            self._service.unsent_sockets.discard(self)
            await self._close(error)

    async def refuse(self, error: ApiError) -> None:
        """Send the reason without waiting for the client."""
        self._service.journal.refuse(self._record, error)
        with contextlib.suppress(OSError):
            await self._tell_error(error)
        self._writer.close()

    async def _tell_error(self, error: ApiError) -> None:
        event = Error(error.message, error.code).event()
        event.data["request_id"] = self._record.id
        await async_write_event(event, self._writer)

    async def _close(self, error: ApiError | None) -> None:
        """Tell the client why, if it still reads. Read and drop what it still sends: otherwise the system would reset
        the connection, and the client might never see the error."""
        with contextlib.suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(_LINGER_S):
                if error:
                    await self._tell_error(error)
                    self._writer.write_eof()
                    while await self._reader.read(self._limits.max_body):
                        pass
                self._writer.close()
                await self._writer.wait_closed()
        self._writer.transport.abort()

    async def _send(self, event: Event) -> None:
        """
        Raises:
            ConnectionError: the client is gone, or does not read.
        """
        try:
            async with within(self._limits.idle_s):
                await async_write_event(event, self._writer)
        except OSError:  # TimeoutError is one
            raise ConnectionAbortedError from None

    # ------------------------------------------------------------ from the client

    async def _receive(self) -> None:
        """Read until the client is gone. Never wait for speech here, so that a lost client is noticed at once."""
        while True:
            try:
                event = await read_event(self._reader, most=self._limits.max_body, idle_s=self._limits.idle_s)
            except Silence:
                if not self.rests:  # the client is waiting for speech
                    continue
                raise
            if event is None:
                return
            self.rests_since = asyncio.get_running_loop().time()
            await self._handle(event)
            await asyncio.sleep(0)  # a flood of events must not keep other tasks waiting

    async def _handle(self, event: Event) -> None:
        if Describe.is_type(event.type):
            await self._send(self._info)
        elif Ping.is_type(event.type):
            text = None if event.data.get("text") is None else text_of(event)
            await self._send(Pong(text).event())
        elif SynthesizeStart.is_type(event.type):
            if self._open:
                raise ProtocolError("synthesize-start came twice: send synthesize-stop between them")
            self._open = True
            self._put(Request.of(event))
        elif SynthesizeChunk.is_type(event.type) or SynthesizeStop.is_type(event.type):
            if not self._open:
                raise ProtocolError(f"{event.type} came without synthesize-start: send that first")
            self._open = SynthesizeChunk.is_type(event.type)
            self._put(Request.of(event))
        elif Synthesize.is_type(event.type) and not self._open:  # within a stream it repeats the text for older servers
            self._put(Request.of(event))

    def _put(self, asked: Request) -> None:
        self._unread += _size(asked)
        if self._unread > 4 * self._limits.max_text:
            raise ProtocolError(
                f"more than {4 * self._limits.max_text} characters wait to be spoken: wait for audio-stop"
            )
        self._inbox.put_nowait(asked)

    async def _take(self) -> Request:
        asked = await self._inbox.get()
        self._unread -= _size(asked)
        return asked

    # ------------------------------------------------------------ speech

    async def _speak_all(self) -> None:
        while True:
            asked = await self._take()
            self._speaking = True
            self._service.unsent_sockets.add(self)
            with self._service.journal.entry(self._record.child()):
                try:
                    await self._speak_in_time(asked)
                except Exception as failure:
                    self._told_failure = failure
                    raise
            self._speaking = False
            self.rests_since = asyncio.get_running_loop().time()
            self._service.unsent_sockets.discard(self)

    async def _speak_in_time(self, asked: Request) -> None:
        try:
            async with asyncio.timeout(self._limits.total_s):
                await self._speak(asked)
        except TimeoutError:
            raise RequestError(f"the request took more than {self._limits.total_s:g} s: send less text") from None

    async def _speak(self, asked: Request) -> None:
        """Speak one `synthesize`, or one stream from its `synthesize-start` on."""
        service = self._service
        service.check_ready()
        options = read_options({"voice": asked.voice, "language": asked.language}, "wyoming")
        request = service.request(options, lenient=True).in_conversation(self._conversation)
        self._samples = 0
        try:
            if Synthesize.is_type(asked.kind):
                self._check_length(len(asked.text))
                async with service.speak(asked.text, request) as session:
                    await self._tell(session)
            else:
                await self._speak_stream(request)
        except NoWordsError:  # the answer has no audio
            pass
        if not self._samples:
            await self._send(AudioStart(timestamp=0, **self._audio_kind()).event())
        await self._send(AudioStop(timestamp=self._milliseconds()).event())
        if SynthesizeStart.is_type(asked.kind):
            await self._send(SynthesizeStopped().event())

    async def _speak_stream(self, request: SpeechRequest) -> None:
        """Speak text that comes in pieces, while it comes."""
        self._complete = False
        self._streamed = 0
        seconds, remedy = self._limits.text_s, "send synthesize-stop at its end"
        text = ""
        while not text:  # blanks alone take no slot
            if self._complete:
                return
            try:
                async with within(seconds):
                    text = (await self._next_text()).lstrip()
            except TimeoutError:
                raise RequestError(f"no more text came for {seconds:g} s: {remedy}") from None
        async with self._service.speak(None, request.in_pieces(), text) as session:
            session.feed(self._texts(), seconds, remedy)
            await self._tell(session)

    async def _texts(self) -> AsyncGenerator[str, None]:
        """The pieces of text behind the first one."""
        while not self._complete:
            text = await self._next_text()
            await self._service.take_text(text)
            yield text

    async def _next_text(self) -> str:
        """The next piece of a stream's text; "" at its end.

        Raises:
            RequestError: there is too much text.
        """
        asked = await self._take()
        self._complete = SynthesizeStop.is_type(asked.kind)
        self._streamed += len(asked.text)
        self._check_length(self._streamed)
        return asked.text

    def _check_length(self, characters: int) -> None:
        if characters > self._limits.max_text:
            most = self._limits.max_text
            raise TextTooLongError(
                f"a request may have at most {most} characters, this one has {characters}: send it in two"
            )

    async def _tell(self, session: SpeechSession) -> None:
        """Send what is spoken."""
        async for event in session.events():
            if isinstance(event, Sound):
                await self._send_audio(event.samples)
            elif isinstance(event, Ended) and event.cut:
                words = "the speech was cut: the model did not find the end of a sentence before its slot was full"
                raise SpeechCutError(f"{words}. Try again, or raise --max-positions")

    async def _send_audio(self, samples: np.ndarray) -> None:
        kind = self._audio_kind()
        if not self._samples:
            await self._send(AudioStart(timestamp=0, **kind).event())
        audio = AudioChunk(audio=pcm16(samples), timestamp=self._milliseconds(), **kind)
        await self._send(audio.event())
        self._samples += len(samples)

    def _audio_kind(self) -> dict[str, int]:
        return {"rate": self._service.engine.sample_rate, "width": BYTES, "channels": 1}

    def _milliseconds(self) -> int:
        """Length of the audio that was sent for this request."""
        return 1000 * self._samples // self._service.engine.sample_rate


def _size(asked: Request) -> int:
    """Size in characters. An event without text counts too."""
    return 1 + len(asked.text)
