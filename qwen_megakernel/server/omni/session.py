"""One client of vLLM-Omni's streaming socket: its messages in their order, its settings and voices."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.websockets import WebSocket

from qwen_megakernel.errors import RequestError, VoiceError
from qwen_megakernel.model.voice import MOST_REF_TEXT
from qwen_megakernel.server.api_error import ApiError, listed
from qwen_megakernel.server.omni.config import SessionConfig, check_fields, read_config, string_of
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

log = logging.getLogger(__name__)

_VOICE_FIELDS = {"voice": "name", "audio": "audio_data", "text": "ref_text"}


class Session(SocketLine):
    """Answers all messages but text.

    Attributes:
        config: None: the client has sent no settings yet.
        utterance: number of the utterance that comes or is spoken now.
        busy: the client waits for an answer.
        timestamps: messages to be sent once the utterance is spoken.
    """

    idle_words = "no request came; send input.done to keep a socket open"

    def __init__(self, websocket: WebSocket, service: EngineService):
        super().__init__(websocket, service)
        may = {"voice.add": service.options.allow_upload, "session.config": service.options.allow_clone}
        self._long = {kind for kind in may if may[kind]}
        self._longest = max(service.limits.max_body, MAX_RECORDING * bool(self._long))
        self._inbox: asyncio.Queue[str | None] = asyncio.Queue()
        self._unread = 0  # characters in the inbox
        self.config: SessionConfig | None = None
        self.utterance = 0
        self.busy = False
        self.timestamps: list[dict[str, Any]] = []

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
        return self.busy

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
        if told.status == 500 and not told.retryable:
            log.error("a message could not be answered", exc_info=error)
        self.service.journal.fail(self.record, told, **more)
        self.put(error_message(told, **more))

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
                self.config = await read_config(message, self.service)
            elif kind == "input.done":
                self.put_done(0)
            elif kind == "session.close":
                self.put_end()
            else:
                self.put(await self._answer_voice(kind, message))
        except Exception as error:
            self.put_error(error, _VOICE_FIELDS if kind.startswith("voice.") else None)

    def put_done(self, sentences: int) -> None:
        """Send session.done, the answer to every input.done."""
        for told in self.timestamps:
            self.put(told)
        self.timestamps = []
        self.put({"type": "session.done", "utterance_index": self.utterance, "total_sentences": sentences})
        self.utterance += 1

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
