"""vLLM-Omni's streaming socket, which LiveKit's Qwen3-TTS client speaks: docs/livekit.md, docs/serving.md."""

import asyncio
import logging
import reprlib
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from starlette.websockets import WebSocket

from qwen_megakernel.errors import RequestError, TextTooLongError, VoiceError
from qwen_megakernel.model.voice import MOST_REF_TEXT
from qwen_megakernel.server.api_error import ApiError, listed
from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.omni.config import SessionConfig, check_fields, read_config, string_of
from qwen_megakernel.server.omni.speech import REMEDY, StreamSpeech
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.server.socket_line import (
    MAX_RECORDING,
    MAX_UNREAD,
    CloseSocket,
    SocketLine,
    error_message,
    parse_message,
    protocol_error,
)
from qwen_megakernel.speech.saved_voices import MOST_NAME
from spoken_text.finder import Conversation

log = logging.getLogger(__name__)

PATH = "/v1/audio/speech/stream"
_GLANCES = 3
"""Turns of the event loop, some 20 us each, in which the end of a text may still come before its speech begins."""

_VOICE_FIELDS = {"voice": "name", "audio": "audio_data", "text": "ref_text"}


def add_stream(app: FastAPI, service: EngineService, metrics: Metrics) -> None:
    """Add the route."""

    @app.websocket(PATH)
    async def stream(websocket: WebSocket) -> None:
        with metrics.sockets.track_inprogress():
            await _Stream(websocket, service).run()


class _Stream(SocketLine):
    """One client's session. One task answers its messages in order, so it speaks one utterance at a time."""

    idle_words = "no request came; send input.done to keep a socket open"

    def __init__(self, websocket: WebSocket, service: EngineService):
        super().__init__(websocket, service)
        may = {"voice.add": service.options.allow_upload, "session.config": service.options.allow_clone}
        self._long = {kind for kind in may if may[kind]}
        self._longest = max(service.limits.max_body, MAX_RECORDING * bool(self._long))
        self.conversation = Conversation()
        self._timestamps: list[dict[str, Any]] = []  # to be sent once all is spoken
        self._inbox: asyncio.Queue[str | None] = asyncio.Queue()
        self._unread = 0  # characters in the inbox
        self._config: SessionConfig | None = None
        self._utterances = 0
        self._busy = False  # the client waits for an answer

    # ------------------------------------------------------------ messages

    def _handle(self, text: str | None) -> None:
        limits = self.service.limits
        most = limits.contexts * limits.max_body + MAX_RECORDING * bool(self._long)
        self._unread += len(text or "")
        if self._unread > most or self._inbox.qsize() >= MAX_UNREAD:
            raise protocol_error(
                f"more than {MAX_UNREAD} messages or {most} characters wait: send more only as they are answered"
            )
        self._inbox.put_nowait(text)

    def _listens(self) -> bool:
        return self._busy

    def _jobs(self) -> Iterable[Coroutine[Any, Any, None]]:
        return (self._answer_all(),)

    @property
    def has_message(self) -> bool:
        """`next_message` need not wait."""
        return not self._inbox.empty()

    async def next_message(self) -> tuple[str, dict[str, Any]]:
        """Type and fields of the next valid message. Others are answered with an error."""
        while True:
            text = await self._inbox.get()
            size = len(text or "")
            self._unread -= size
            try:
                message = parse_message(text, self._longest)
                kind = check_fields(message)
                if kind not in self._long and size > (most := self.service.limits.max_body):
                    raise RequestError(f"a message has {size} characters, at most {most}: send its text in pieces")
                return kind, message
            except (CloseSocket, RequestError) as refused:  # one message is wrong; the session goes on
                self.put_error(refused)

    def put_error(self, error: Exception, names: Mapping[str, str] | None = None, **more: Any) -> None:
        """Tell the client of an exception.

        Args:
            names: the API's field names -> this message's names, where they differ.
            more: further fields, which say what the error is about.
        """
        told = error.error if isinstance(error, CloseSocket) and error.error else ApiError.of(error)
        told = replace(told, field=names.get(told.field, told.field)) if names and told.field else told
        if told.status == 500:
            log.error("a message could not be answered", exc_info=error)
        self.put(error_message(told, **more))

    async def _answer_all(self) -> None:
        while True:
            kind, message = await self.next_message()
            self._busy = True
            try:
                if kind == "input.text":
                    await self._speak(message)
                else:
                    await self.answer(kind, message)
            finally:
                self._busy = False

    async def answer(self, kind: str, message: dict[str, Any], *, speaking: bool = False) -> None:
        """Answer a message other than text.

        Args:
            speaking: an utterance's text is open.
        """
        try:
            if kind == "session.config":
                if speaking:
                    words = "session.config comes too late for this utterance: send input.done first"
                    raise RequestError(words, field="type")
                self._config = await read_config(message, self.service)
            elif kind == "input.done":
                self._put_done(0)
            elif kind == "session.close":
                self.put_end()
            else:
                self.put(await self._answer_voice(kind, message))
        except Exception as error:
            self.put_error(error, _VOICE_FIELDS if kind.startswith("voice.") else None)

    # ------------------------------------------------------------ voices

    async def _answer_voice(self, kind: str, message: dict[str, Any]) -> dict[str, Any]:
        """
        Raises:
            TTSError: the request cannot be carried out.
        """
        service = self.service
        service.check_ready()
        saved = service.saved_voices
        if kind == "voice.list":
            uploaded = [{"name": name} for name in saved.by_name]
            return {"type": "voice.list.result", "voices": list(service.engine.speakers), "uploaded_voices": uploaded}
        if not service.options.allow_upload:
            raise RequestError("this server makes and deletes no voices: start it with --allow-upload", field="type")
        name = string_of(message, "name", most=MOST_NAME)
        if kind == "voice.add":
            recording = string_of(message, "audio_data")
            text = None
            if message.get("ref_text") is not None:
                text = string_of(message, "ref_text", most=MOST_REF_TEXT, blank=True)
            await service.add_voice(name, recording, text)
            return {"type": "voice.add.result", "success": True, "voice": {"name": name}}
        if name.lower() not in saved.by_name:
            known = listed(saved.by_name) or "none"
            raise VoiceError(f"there is no saved voice {name!r}; known: {known}")
        await saved.remove(name.lower())
        return {"type": f"{kind}.result", "success": True, "name": name}

    # ------------------------------------------------------------ speech

    async def _speak(self, message: dict[str, Any]) -> None:
        """One utterance, from its first text to its session.done."""
        if self._config is None:
            self.put_error(RequestError("there are no settings yet: send session.config first", field="type"))
            return
        text, sentences, speaks = _Text(self), 0, True
        try:
            text.add(message)
            while speaks and await text.begins():
                if not self._config.whole:
                    await text.glance()
                speech = StreamSpeech(self, self._config, text, self._utterances, sentences)
                speaks = await speech.speak()
                sentences += not speech.wordless
        except Exception as error:
            self.put_error(error, utterance_index=self._utterances)
        self._busy = False  # after an error, a silent client is disconnected
        while not text.complete:
            await text.skip()
        self._put_done(sentences)

    def keep_timestamps(self, told: dict[str, Any]) -> None:
        """A message for the end of the utterance."""
        self._timestamps.append(told)

    def _put_done(self, sentences: int) -> None:
        """Send session.done, the answer to every input.done."""
        for told in self._timestamps:
            self.put(told)
        self._timestamps = []
        self.put({"type": "session.done", "utterance_index": self._utterances, "total_sentences": sentences})
        self._utterances += 1


class _Text:
    """The text of one utterance, as its client sends it.

    Attributes:
        pending: text that has come but is not spoken yet.
        complete: its input.done has come.
    """

    def __init__(self, stream: _Stream):
        self._stream = stream
        self._characters = 0
        self.pending = ""
        self.complete = False

    def add(self, message: dict[str, Any]) -> None:
        """Take an `input.text`.

        Raises:
            RequestError: the message has no text, or the utterance has too much.
        """
        text, most = message.get("text"), self._stream.service.limits.max_text
        if not isinstance(text, str):
            raise RequestError(f"text must be a string, got {reprlib.repr(text)}", field="text")
        self._characters += len(text)
        if self._characters > most:
            words = f"an utterance may have at most {most} characters, this one has {self._characters}"
            raise TextTooLongError(f"{words}: send input.done sooner, and then the rest")
        self.pending += text

    async def begins(self) -> bool:
        """Wait until there is something to speak. Blanks alone take no slot. False: the text ended before that.

        Raises:
            RequestError: as `read`.
        """
        while not self.complete and not self.pending.strip():
            await self.read()
        self.pending = self.pending.lstrip()
        return bool(self.pending)

    async def glance(self) -> None:
        """Take what is there already. A client with a whole text sends its input.done right behind it; the text is then
        spoken as a whole, which saves a call into the engine.

        Raises:
            RequestError: as `read`.
        """
        for _ in range(_GLANCES):
            while not self.complete and self._stream.has_message:
                await self.read()
            await asyncio.sleep(0)

    async def take_whole(self) -> str:
        """Wait for the end of a text that must come in one message.

        Raises:
            RequestError: another message with text came, or the end did not come in time.
        """
        came = self._characters
        while not self.complete:
            await self.read()
            if self._characters > came:
                words = "non_streaming_mode needs the whole text in one input.text, but more came"
                raise RequestError(f"{words}: send it whole, or set non_streaming_mode to false", field="text")
        whole, self.pending = self.pending, ""
        return whole

    async def read(self) -> None:
        """Wait for the next piece of text, or for the text's end. Answer other messages meanwhile.

        Raises:
            RequestError: nothing came in time, or the piece is refused.
        """
        patience = self._stream.service.limits.text_s
        try:
            async with asyncio.timeout(patience):
                await self._read()
        except TimeoutError:
            raise RequestError(f"no more text came for {patience:g} s: {REMEDY}") from None

    async def _read(self) -> None:
        while True:
            kind, message = await self._stream.next_message()
            if kind == "input.text":
                self.add(message)
                return
            if kind == "input.done":
                self.complete = True
                return
            await self._stream.answer(kind, message, speaking=True)

    def take(self) -> str:
        """The text that has come since the last call."""
        text, self.pending = self.pending, ""
        return text

    async def skip(self) -> None:
        """Drop the next piece of text: the utterance is over."""
        kind, message = await self._stream.next_message()
        self.complete = kind == "input.done"
        if kind not in ("input.text", "input.done"):
            await self._stream.answer(kind, message, speaking=True)
