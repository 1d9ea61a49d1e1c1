"""The server's three entrances, asked in the same few words: HTTP, our socket, vLLM-Omni's streaming socket."""

import contextlib
import json
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import PATIENCE_S, TEXT, Running, connect, post, stream
from waiting import brief_case, slow_case
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from qwen_megakernel.server.openai.bodies import SPEECH

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def fuzzed(strategy: st.SearchStrategy, server: str = "server") -> Callable[[Callable], Callable]:
    """A test that is given a fixture and examples of it, few of them in `make test`."""
    shares = {"deadline": None, "suppress_health_check": list(HealthCheck)}

    def decorate(test: Callable) -> Callable:
        @pytest.mark.parametrize("examples", [brief_case(15), slow_case(80)])
        def each(request, caplog, examples):
            fixture = request.getfixturevalue(server)

            @settings(max_examples=examples, **shares)
            @given(strategy)
            def check(sent) -> None:
                test(fixture, sent)

            with caplog.at_level(logging.DEBUG):
                check()
            assert "Traceback" not in caplog.text and not [record for record in caplog.records if record.exc_info]

        each.__name__, each.__doc__ = test.__name__, test.__doc__
        return each

    return decorate


@dataclass
class Heard:
    """What came of a text. `error`: with message, code, retryable and field, if one came."""

    pcm: bytes
    error: dict[str, Any] | None = None


class SocketClient:
    """Sends on our socket, and sorts what comes by context."""

    def __init__(self, line: ClientConnection):
        self.line = line
        self.hello = json.loads(line.recv(timeout=PATIENCE_S))
        self.names: dict[int, str] = {}
        self.pcm: dict[str, bytes] = {}
        self.told: list[dict] = []

    def say(self, kind: str, context: str | None = None, **more) -> None:
        named = {} if context is None else {"context": context}
        self.line.send(json.dumps({"type": kind} | named | more))

    def take(self) -> dict | None:
        """The next message; None: it was audio."""
        message = self.line.recv(timeout=PATIENCE_S)
        if isinstance(message, bytes):
            name = self.names[int.from_bytes(message[:4], "little")]
            self.pcm[name] += message[4:]
            return None
        told = json.loads(message)
        self.told.append(told)
        if told["type"] == "begin":
            self.names[told["number"]] = told["context"]
            self.pcm[told["context"]] = b""
        return told

    def until(self, kind: str, context: str | None = None) -> dict:
        while True:
            told = self.take()
            if told and told["type"] == kind and told.get("context") == context:
                return told

    def hear(self, text: str, context: str = "a", **settings) -> dict:
        """Its end, once a whole text is spoken, with ada's voice and the seed 5 unless told otherwise."""
        self.say("text", context, **{"text": text, "end": True, "voice": "ada", "seed": 5} | settings)
        return self.until("end", context)

    def words(self, context: str = "a") -> list[tuple[str, float]]:
        told = [m["words"] for m in self.told if m["type"] == "words" and m["context"] == context]
        return [(word, at) for words in told for word, at in words]

    def answers(self) -> bool:
        self.say("ping")
        return self.until("pong") == {"type": "pong"}

    def drain(self) -> None:
        """Take what comes until the server closes the socket."""
        while True:
            self.take()


class StreamClient(SocketClient):
    """Sends on vLLM-Omni's socket, and keeps what comes.

    Attributes:
        told: every message; a binary one as {"type": "audio"}.
        pcm: of the latest audio.start.
    """

    def __init__(self, line: ClientConnection):
        self.line, self.told, self.pcm = line, [], b""

    def say(self, kind: str, **fields) -> None:
        self.line.send(json.dumps({"type": kind} | fields))

    def configure(self, **more) -> None:
        config = {"task_type": "CustomVoice", "response_format": "pcm", "stream_audio": True, "voice": "ada", "seed": 5}
        self.say("session.config", **(config | more))

    def speak(self, *pieces: str, end: bool = True) -> None:
        for piece in pieces:
            self.say("input.text", text=piece)
        if end:
            self.say("input.done")

    def hear(self, *pieces: str) -> dict:
        """Its audio.done, once all of a text is spoken."""
        self.speak(*pieces)
        return self.until("audio.done")

    def take(self) -> dict:
        message = self.line.recv(timeout=PATIENCE_S)
        if isinstance(message, bytes):
            self.pcm += message
            message = '{"type": "audio"}'
        told = json.loads(message)
        self.told.append(told)
        if told["type"] == "audio.start":
            self.pcm = b""
        return told

    def until(self, kind: str) -> dict:
        while (told := self.take())["type"] != kind:
            pass
        return told

    def words_of(self, done: dict) -> list[str]:
        return done["timestamp_info"]["word_alignment"]["words"]

    def answers(self) -> bool:
        """As LiveKit's keep-alive asks it."""
        self.say("input.done")
        return self.take()["type"] == "session.done"


class Entrance:
    """Attributes:
    path: of the HTTP request or of the WebSocket.
    text: its name for what is to be said.
    client: who speaks with it; None: there is no socket.
    streams: a whole text has the streaming layout unless told otherwise.
    """

    path: str
    text, client, streams = "text", None, False

    def say(self, server: Running, text: Any = TEXT, **settings: Any) -> Heard:
        """Of a whole text, with ada's voice and the seed 5 unless told otherwise."""
        raise NotImplementedError

    def url(self, server: Running) -> str:
        return f"ws://127.0.0.1:{server.port}{self.path}"

    def _asked(self, text: str, end: bool = True) -> list[dict]:
        """The messages that ask for it."""
        raise NotImplementedError

    @contextlib.contextmanager
    def opened(self, server: Running, text: str, end: bool = True) -> Iterator[socket.socket]:
        """The line of a client to whom a text is being said. end: the text is complete."""
        with connect(self.url(server)) as line:
            for message in self._asked(text, end):
                line.send(json.dumps(message))
            while not isinstance(line.recv(timeout=PATIENCE_S), bytes):
                pass
            yield line.socket

    def status(self, server: Running, headers: dict[str, str]) -> int:
        """With what a client of these headers is let in, or not."""
        try:
            with connect(self.url(server), additional_headers=headers):
                return 101
        except InvalidStatus as refused:
            return refused.response.status_code

    def messages(self, text: str, end: bool = True) -> Sequence[dict]:
        """To the app itself: a text is asked for."""
        told = [{"type": "websocket.receive", "text": json.dumps(message)} for message in self._asked(text, end)]
        return [{"type": "websocket.connect"}, *told]


class Http(Entrance):
    path, text = SPEECH, "input"

    def say(self, server: Running, text: Any = TEXT, **settings: Any) -> Heard:
        body = {"model": "demo", "input": text, "voice": "ada", "seed": 5, "response_format": "pcm"} | settings
        kind = {"content-type": "application/json"}
        answer = post(server.url + SPEECH, content=json.dumps(body), headers=kind)  # json.dumps writes NaN too
        if answer.status_code == 200:
            return Heard(answer.content)
        error = answer.json()["error"]
        assert ("retry-after" in answer.headers) == error["retryable"] and "Traceback" not in answer.text
        return Heard(b"", error | {"field": error["param"]})

    @contextlib.contextmanager
    def opened(self, server: Running, text: str, end: bool = True) -> Iterator[socket.socket]:
        body = {"model": "demo", "input": text, "response_format": "pcm"}
        with stream("POST", server.url + SPEECH, json=body) as answer:
            chunks = answer.iter_raw()
            next(chunks)
            yield answer.extensions["network_stream"].get_extra_info("socket")

    def status(self, server: Running, headers: dict[str, str]) -> int:
        return post(server.url + SPEECH, json={"model": "demo", "input": "Hi."}, headers=headers).status_code

    def messages(self, text: str, end: bool = True) -> Sequence[dict]:
        body = {"model": "demo", "input": text, "response_format": "pcm"}
        return [{"type": "http.request", "body": json.dumps(body).encode()}]


class Socket(Entrance):
    path, client = "/v1/audio/speech/socket", SocketClient

    def say(self, server: Running, text: Any = TEXT, **settings: Any) -> Heard:
        with connect(self.url(server)) as line:
            client = SocketClient(line)
            if client.hello["type"] == "error":
                return Heard(b"", client.hello)
            client.say("text", "a", **{"text": text, "end": True, "voice": "ada", "seed": 5} | settings)
            while (told := client.take()) is None or told["type"] not in ("end", "error"):
                pass
            if told["type"] == "error":
                assert told["context"] == "a" and client.answers(), "it fails alone"
                return Heard(b"", told)
            return Heard(client.pcm.get("a", b""))

    def _asked(self, text: str, end: bool = True) -> list[dict]:
        return [{"type": "text", "context": "a", "text": text, "end": end}]


class Stream(Entrance):
    path, client, streams = "/v1/audio/speech/stream", StreamClient, True

    def say(self, server: Running, text: Any = TEXT, **settings: Any) -> Heard:
        with connect(self.url(server)) as line:
            client = StreamClient(line)
            with contextlib.suppress(ConnectionClosed):  # what it was told before can still be read
                client.configure(**settings)
                client.speak(text)
            while (told := client.take())["type"] not in ("audio.done", "error"):
                pass
            if told["type"] == "error":
                return Heard(b"", told)
            return Heard(client.pcm)

    def _asked(self, text: str, end: bool = True) -> list[dict]:
        asked = [{"type": "session.config", "response_format": "pcm"}, {"type": "input.text", "text": text}]
        return asked + [{"type": "input.done"}] * end


NO_MESSAGE = [
    ("", "must be JSON"),
    ("{", "must be JSON"),
    ("[]", r"must be a JSON object, got \[\]"),
    (b"\0" * 8, "JSON in a text frame, got a binary one"),
    ("[" * 8000, "must be JSON"),
    ("x" * 8193, "has 8193 characters, at most 8192"),
]
"""Of both sockets, and how it is told: a regular expression."""
ENTRANCES = {"http": Http(), "socket": Socket(), "stream": Stream()}
