"""MegakernelWebsocketTTSService in real Pipecat pipelines, against a server that speaks docs/serving.md by a script.

Its voice is a ramp as long as the text."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable
from http import HTTPStatus

import numpy as np
import pytest
from pipecat.frames.frames import (
    CancelFrame,
    ErrorFrame,
    Frame,
    FunctionCallsStartedFrame,
    InterruptionFrame,
    LLMAssistantPushAggregationFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMTextFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    TTSStartedFrame,
    TTSStoppedFrame,
    TTSTextFrame,
    TTSUpdateSettingsFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.services.tts_service import TextAggregationMode
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory
from pipelines import NO_TIME_OUT, Until, came, log_of_services, of, one_start_and_stop, pcm, play, turn
from waiting import free_port
from waiting import until_in_loop as until
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from qwen_megakernel import RequestError
from qwen_megakernel.choices import SOCKET_PATH as PATH
from qwen_megakernel.offline_llm import OfflineLLM
from qwen_megakernel.pipecat import remote
from qwen_megakernel.pipecat.address import socket_url
from qwen_megakernel.websocket_tts import MegakernelWebsocketTTSService

Settings = MegakernelWebsocketTTSService.Settings
SENTENCE, TOKEN = TextAggregationMode.SENTENCE, TextAggregationMode.TOKEN
in_both_modes = pytest.mark.parametrize("mode", [SENTENCE, TOKEN])
HELLO = {
    "type": "hello",
    "model": "demo",
    "sample_rate": 24000,
    "format": "pcm_s16le",
    "voices": ["ada", "max"],
    "languages": ["auto", "english", "german"],
}
BASES = ("", "/", "/v1", "/v1/", "/v1/audio", "/v1/audio/speech", PATH, PATH + "/")
A_LETTER = 480  # samples: 20 ms
CHUNK = 1920


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine may take longer than the 5 s that the service waits for a server."""
    monkeypatch.setattr(remote, "_CONNECT_S", 120.0)


@pytest.fixture
def log():
    with log_of_services() as lines:
        yield lines


def voice_of(text: str) -> np.ndarray:
    """What the server makes of a text: loud from its first sample on, and of no other text the same."""
    n = A_LETTER * len(text)
    return (2000 + np.arange(n) % 997 + 100 * (sum(text.encode()) % 50)).astype("<i2")


class Server:
    """`script(server, context, text)` may do what it likes in front of the audio; True: it was all there is to do."""

    def __init__(self, token: str | None = None, hello: dict | None = None, script: Callable | None = None):
        self.token, self.hello, self.script = token, hello or HELLO, script
        self.path = PATH
        self.heard: list[dict] = []  # every message of every client
        self.sockets = 0
        self.pause = 0.0  # seconds between chunks
        self.most = 0  # contexts that spoke at once
        self._texts: dict[str, str] = {}
        self._speaking: dict[str, asyncio.Task] = {}
        self._numbers = 0

    async def __aenter__(self) -> "Server":
        self._server = await serve(self._talk, "127.0.0.1", 0, process_request=self._admit)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"ws://127.0.0.1:{port}{PATH}"
        return self

    async def __aexit__(self, *_) -> None:
        self._server.close()
        await self._server.wait_closed()

    def _admit(self, connection: ServerConnection, request):
        if request.path != self.path:
            return connection.respond(HTTPStatus.NOT_FOUND, "nothing here\n")
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return connection.respond(HTTPStatus.UNAUTHORIZED, "wrong token\n")
        return None

    async def _talk(self, socket: ServerConnection) -> None:
        self.socket = socket
        self.sockets += 1
        await self.send(self.hello)
        with contextlib.suppress(ConnectionClosed):
            async for message in socket:
                await self._take(json.loads(message))
        for task in self._speaking.values():
            task.cancel()
        self._texts.clear()

    async def _take(self, message: dict) -> None:
        self.heard.append(message)
        kind, name = message["type"], message.get("context")
        if kind == "ping":
            await self.send({"type": "pong"})
        elif kind == "text":
            self._texts[name] = self._texts.get(name, "") + message["text"]
        elif kind == "cancel" and name in self._speaking:
            self._speaking[name].cancel()
        if kind == "end" or message.get("end"):
            self._speaking[name] = asyncio.create_task(self._speak(name, self._texts.pop(name)))
            self.most = max(self.most, len(self._speaking))

    async def _speak(self, name: str, text: str) -> None:
        try:
            if self.script is None or not await self.script(self, name, text):
                await self.say(name, text)
                await self.end(name, text)
        except asyncio.CancelledError:
            await self.end(name, "", "cancelled")
        finally:
            self._speaking.pop(name, None)

    async def send(self, message: dict | bytes) -> None:
        with contextlib.suppress(ConnectionClosed):
            await self.socket.send(message if isinstance(message, bytes) else json.dumps(message))

    async def say(self, name: str, text: str, samples: np.ndarray | None = None) -> None:
        self._numbers += 1
        number, samples = self._numbers, voice_of(text) if samples is None else samples
        await self.send({"type": "begin", "context": name, "number": number, "seed": 7})
        words, at = text.split(), 0
        for i in range(0, len(samples), CHUNK):
            await self.send(number.to_bytes(4, "little") + samples[i : i + CHUNK].tobytes())
            due = []
            while words and at < i + CHUNK:
                due.append([words[0], at / 24000])
                at += A_LETTER * (len(words.pop(0)) + 1)
            if due:
                await self.send({"type": "words", "context": name, "words": due})
            await asyncio.sleep(self.pause)

    async def end(self, name: str, text: str, reason: str = "eos") -> None:
        took = {"seconds": A_LETTER * len(text) / 24000, "compute_seconds": 0.01}
        await self.send({"type": "end", "context": name, "finish_reason": reason, "seed": 7} | took)

    async def fail(self, name: str | None, code: str, message: str) -> None:
        context = {"context": name} if name else {}
        await self.send({"type": "error", **context, "code": code, "message": message, "retryable": code == "busy"})

    def of(self, kind: str) -> list[dict]:
        return [message for message in self.heard if message["type"] == kind]


def run(frames: list[Frame | Until], server: Server, rate: int = 24000, token: str | None = None, **options):
    """Everything that came out, downstream and upstream, up to an EndFrame behind the last; and the service."""

    async def speak():
        async with server:
            service = MegakernelWebsocketTTSService(url=server.url, token=token, **options)
            down, up = await play(service, frames, rate=rate)
            return down, up, service

    return asyncio.run(speak())


def voices_of(*texts: str) -> np.ndarray:
    return np.concatenate([voice_of(text) for text in texts])


# ---------------------------------------------------------------- what is heard


def test_sentences_are_contexts_of_their_own_and_one_turn():
    server = Server()
    down, up, _ = run(turn("Hello there. ", "How are you? ", "Fine."), server)
    assert np.array_equal(pcm(down), voices_of("Hello there.", "How are you?", "Fine."))
    assert one_start_and_stop(down) and not of(up, ErrorFrame)
    texts = server.of("text")
    assert [m["text"] for m in texts] == ["Hello there.", "How are you?", "Fine."]
    assert all(m["end"] and m["words"] for m in texts) and len({m["context"] for m in texts}) == 3
    assert all(1 <= len(m["context"]) <= 64 for m in texts) and not server.of("cancel") and server.sockets == 1


def test_tokens_become_one_context_that_ends_with_the_turn():
    server = Server()
    tokens = ["Hel", "lo the", "re, ", "how are y", "ou?"]
    down, up, _ = run(turn(*tokens, pause=0.01), server, text_aggregation_mode=TOKEN)
    assert np.array_equal(pcm(down), voice_of("".join(tokens)))
    assert one_start_and_stop(down) and not of(up, ErrorFrame)
    texts = server.of("text")
    assert [m["text"] for m in texts] == tokens and len({m["context"] for m in texts}) == 1
    assert "words" in texts[0] and not any("words" in m or "end" in m for m in texts[1:])
    assert [m["type"] for m in server.heard[-2:]] == ["text", "end"]


def test_a_turn_may_begin_before_the_last_one_was_heard():
    async def hold(server, name, text):
        """Both have begun before one of them ends."""
        await until(lambda: server.most == 2)

    server = Server(script=hold)
    ended = Until(lambda _: server.of("end"))
    frames = [*turn("One two three four."), ended, *turn("Five six.")]
    down, up, _ = run(frames, server, text_aggregation_mode=TOKEN)
    assert np.array_equal(pcm(down), voices_of("One two three four.", "Five six."))
    assert one_start_and_stop(down, 2) and not of(up, ErrorFrame) and not server.of("cancel")
    assert server.most == 2, "both spoke at once"


def test_before_a_function_call_what_was_written_is_flushed():
    server = Server()
    call = FunctionCallsStartedFrame(function_calls=[])
    flushed = Until(lambda _: server.of("flush"))
    frames = [*turn("Let ", "me look")[:-1], call, flushed, LLMTextFrame(" it up."), LLMFullResponseEndFrame()]
    down, up, _ = run(frames, server, text_aggregation_mode=TOKEN)
    assert [m["type"] for m in server.heard] == ["text", "text", "flush", "text", "end"] and not of(up, ErrorFrame)
    assert np.array_equal(pcm(down), voice_of("Let me look it up."))


def test_leading_silence_is_cut_and_words_come_earlier_by_as_much():
    async def after_silence(server, name, text):
        await server.say(name, text, np.concatenate([np.zeros(7200, "<i2"), voice_of(text)]))
        await server.end(name, text)
        return True

    for trim, left in ((True, 240), (False, 7200)):
        server = Server(script=after_silence)
        down, _, _ = run([TTSSpeakFrame("Hello there.")], server, trim_leading_silence=trim)
        assert len(pcm(down)) == left + len(voice_of("Hello there."))
        hello, there = of(down, TTSTextFrame)
        assert (there.pts - hello.pts) / 1e9 == pytest.approx(0.0 if trim else 6 * A_LETTER / 24000, abs=1e-3)


# ---------------------------------------------------------------- words


@in_both_modes
def test_words_come_in_order_with_the_times_of_their_context(mode):
    server = Server()
    down, _, _ = run(turn("Hello there. ", "How are you?"), server, text_aggregation_mode=mode)
    words = of(down, TTSTextFrame)
    assert [w.text.strip() for w in words] == ["Hello", "there.", "How", "are", "you?"]
    assert all(w.metadata["time_is_estimated"] for w in words)
    starts = [(w.pts - words[0].pts) / 1e9 for w in words]
    letters = [0, 6, 12, 16, 20] if mode is SENTENCE else [0, 6, 13, 17, 21]
    assert starts == pytest.approx([n * A_LETTER / 24000 for n in letters], abs=1e-3)


@in_both_modes
def test_what_ends_a_message_comes_before_the_words_of_the_next(mode):
    """A transport hands on by pts. The server makes each speech at once, and its first word begins at 0."""
    frames = [TTSSpeakFrame("One moment please."), TTSSpeakFrame("Yes."), *turn("Here you are."), *turn("Bye.")]
    down, up, _ = run(frames, Server(), text_aggregation_mode=mode)
    ends = LLMAssistantPushAggregationFrame, LLMFullResponseEndFrame
    timed = [frame for frame in down if isinstance(frame, (TTSTextFrame, *ends))]
    told = [getattr(frame, "text", "|").strip() for frame in sorted(timed, key=lambda frame: frame.pts)]
    assert " ".join(told) == "One moment please. | Yes. | Here you are. | Bye. |" and not of(up, ErrorFrame)


# ---------------------------------------------------------------- interruptions


@in_both_modes
def test_an_interruption_cancels_its_context_and_keeps_the_socket(mode, log):
    """The server speaks on for a while, as if the cancel were late: nothing of it is heard."""
    long = "One two three four five six seven eight nine ten, and so on."

    async def stubborn(server, name, text):
        if text == long:
            server.pause = 0.2
            await asyncio.shield(asyncio.create_task(server.say(name, text)))

    server = Server(script=stubborn)
    interrupted = [came(TTSAudioRawFrame), InterruptionFrame(), came(InterruptionFrame)]
    frames = [*turn(long), *interrupted, *turn("Hello there.")]
    down, up, _ = run(frames, server, text_aggregation_mode=mode)
    at = next(i for i, f in enumerate(down) if isinstance(f, InterruptionFrame))
    starts = [i for i, f in enumerate(down) if isinstance(f, TTSStartedFrame)]
    assert len(starts) == 2 and starts[0] < at < starts[1] and not of(up, ErrorFrame)
    assert of(down[:at], TTSAudioRawFrame) and not of(down[at : starts[1]], TTSAudioRawFrame)
    assert np.array_equal(pcm(down[at:]), voice_of("Hello there."))
    first, second = dict.fromkeys(m["context"] for m in server.of("text"))
    assert [m["context"] for m in server.of("cancel")] == [first] and server.sockets == 1
    told = [line for line in log if line.startswith("INFO")]
    assert "0 utterances ended, interrupted" in told[0] and "1 utterances ended" in told[1] and len(told) == 2


async def test_a_cancel_frame_stops_at_once():
    """Not when the server has spoken its first chunk out, after an hour."""
    frames = [*turn("One two three four five six seven eight nine ten."), came(TTSAudioRawFrame), CancelFrame()]
    async with Server() as server:
        server.pause = 3600.0
        service = MegakernelWebsocketTTSService(url=server.url)
        await play(service, frames, end=False)
    assert service._websocket is None and not service._sessions


@pytest.mark.parametrize("mode, utterances", [(SENTENCE, 2), (TOKEN, 1)])
def test_the_log_has_a_line_a_turn_and_details_in_debug(log, mode, utterances):
    service = run(turn("One. ", "Two."), Server(), text_aggregation_mode=mode)[2]
    *details, turns = log
    assert len(details) == utterances and all(re.fullmatch(r"DEBUG .* 0\.\d\d s, eos, seed 7", one) for one in details)
    assert re.fullmatch(rf"INFO {service}: 0\.\d\d s of speech, {utterances} utterances ended, RTF 0\.\d\d", turns)


# ---------------------------------------------------------------- settings


def update(**settings) -> TTSUpdateSettingsFrame:
    return TTSUpdateSettingsFrame(delta=Settings(**settings))


def test_settings_travel_with_the_first_text_and_change_with_the_next():
    server = Server()
    settings = Settings(
        voice="ada", language=Language.EN_US, instruct="gently", seed=3, temperature=0.5, top_k=np.int64(9), speed=2
    )
    frames = [TTSSpeakFrame("One."), update(voice="Max", language="de", seed=None, speed=None), TTSSpeakFrame("Two.")]
    down, up, service = run(frames, server, settings=settings, chunk_frames=(1, 4))
    first, second = server.of("text")
    asked = {"language": "english", "instructions": "gently", "temperature": 0.5, "top_k": 9, "chunk_frames": [1, 4]}
    assert first.items() >= (asked | {"voice": "ada", "seed": 3, "speed": 2.0}).items() and "top_p" not in first
    assert (
        second.items() >= (asked | {"voice": "Max", "language": "german"}).items()
        and not {"seed", "speed"} & second.keys()
    )
    assert not of(up, ErrorFrame) and service.settings.model == "demo"


@pytest.mark.parametrize("text", ["As Ada.", "Is it plan B? ", "“As Ada.”\n", "你好。", "Wait…"])
def test_a_finished_sentence_keeps_the_settings_that_it_was_written_for(text):
    server = Server()
    frames = [*turn(*text)[:-1], update(voice="max"), *turn(" As ")[1:-1], update(voice="ada"), *turn("who?")[1:]]
    down, up, _ = run(frames, server, settings=Settings(voice="ada"))
    assert [(m["text"].strip(), m["voice"]) for m in server.of("text")] == [(text.strip(), "ada"), ("As who?", "ada")]
    assert one_start_and_stop(down) and not of(up, ErrorFrame)


def test_in_token_mode_all_that_was_written_keeps_its_settings():
    server = Server()
    frames = [*turn("As ", "Ada")[:-1], update(voice="max"), *turn(" and ", "Max.")[1:]]
    down, up, _ = run(frames, server, settings=Settings(voice="ada"), text_aggregation_mode=TOKEN)
    said = [(m["text"].strip(), m.get("voice")) for m in server.of("text")]
    assert said == [("As", "ada"), ("Ada", None), ("and", "max"), ("Max.", None)] and not of(up, ErrorFrame)


async def test_a_change_that_is_queued_while_the_llm_writes_holds_from_the_next_answer_on():
    async with Server() as server:
        service = MegakernelWebsocketTTSService(url=server.url, settings=Settings(voice="ada"))
        asked = [LLMContextFrame(LLMContext([{"role": "user", "content": "Tell a story."}])) for _ in range(2)]
        frames = [asked[0], came(TTSStartedFrame), update(voice="max"), asked[1]]
        await play(Pipeline([OfflineLLM(token_s=0.001), service]), frames)
    assert [m["voice"] for m in server.of("text")] == ["ada"] * 4 + ["max"] * 4


def test_a_refused_change_does_not_cut_the_sentence():
    server = Server()
    down, up, _ = run([*turn('"Hello.')[:-1], update(voice="bob"), *turn('"')[1:]], server)
    assert [m["text"].strip() for m in server.of("text")] == ['"Hello."'] and len(of(up, ErrorFrame)) == 1


@pytest.mark.parametrize(
    "settings, message", [(Settings(voice="bob"), "known: ada, max"), (Settings(model="another"), "has 'demo'")]
)
def test_what_the_server_does_not_have_is_an_error_of_the_set_up(settings, message):
    """As with the other service where the model comes late: `setup` raises, of which Pipecat makes this."""
    down, up, service = run(turn("Hello."), Server(), settings=settings)
    (error,) = of(up, ErrorFrame)
    assert message in error.error and error.category is ErrorCategory.INVALID_REQUEST and not service.is_usable
    assert one_start_and_stop(down)


# ---------------------------------------------------------------- errors


@in_both_modes
@pytest.mark.parametrize(
    "code, category",
    [
        ("busy", ErrorCategory.RATE_LIMIT),
        ("invalid", ErrorCategory.APPLICATION),
        ("closing", ErrorCategory.SERVER),
        ("failed", ErrorCategory.SERVER),
    ],
)
def test_what_the_server_refuses_is_one_error_and_the_next_turn_speaks(mode, code, category):
    async def refuse(server, name, text):
        if text == "Hello there.":
            await server.fail(name, code, "all 4 streams are taken")
            return True

    server = Server(script=refuse)
    frames = [*turn("Hello there."), came(TTSStoppedFrame), *turn("How are you?")]
    down, up, service = run(frames, server, text_aggregation_mode=mode, **NO_TIME_OUT)
    (error,) = of(up, ErrorFrame)
    assert error.category is category and "all 4 streams are taken" in error.error and service.is_usable
    assert one_start_and_stop(down, 2) and np.array_equal(pcm(down), voice_of("How are you?"))


def test_an_utterance_that_ends_before_its_text_takes_no_more_of_it():
    """What was on its way opened another context of this name: it is cancelled."""

    async def cut(server: Server, message: dict) -> None:
        server.heard.append(message)
        if message.get("text") == "One two ":
            await server.say(message["context"], "One")
            await server.end(message["context"], "One", "length")

    server = Server()
    server._take = lambda message: cut(server, message)
    cancelled = Until(lambda _: server.of("cancel"))
    frames = [*turn("One two ")[:-1], cancelled, *turn("three ", "four ", "five.")[1:]]
    down, up, _ = run(frames, server, text_aggregation_mode=TOKEN)
    assert [e.category for e in of(up, ErrorFrame)] == [ErrorCategory.APPLICATION] and one_start_and_stop(down)
    assert [m["type"] for m in server.heard] == ["text", "cancel"] and np.array_equal(pcm(down), voice_of("One"))


def test_an_error_of_the_socket_is_told_and_costs_nothing():
    async def complain(server, name, text):
        await server.fail(None, "idle", "no message for 60 s")

    down, up, service = run([TTSSpeakFrame("Hello there.")], Server(script=complain))
    assert [e.category for e in of(up, ErrorFrame)] == [ErrorCategory.CONNECTIVITY] and service.is_usable
    assert np.array_equal(pcm(down), voice_of("Hello there."))


# ---------------------------------------------------------------- the connection


@in_both_modes
def test_a_socket_that_breaks_ends_what_was_said_and_the_next_turn_speaks_on_a_new_one(mode):
    heard = []

    async def drop(server, name, text):
        if server.sockets == 1:
            await server.say(name, text)
            await until(lambda: heard)
            server.socket.transport.abort()
            return True

    server = Server(script=drop)
    whole = Until(lambda down: len(pcm(down)) == len(voice_of("Hello there.")) and (heard.append(True) or True))
    frames = [*turn("Hello there."), whole, came(TTSStoppedFrame), *turn("How are you?")]
    down, up, service = run(frames, server, text_aggregation_mode=mode)
    (error,) = of(up, ErrorFrame)
    assert error.category is ErrorCategory.CONNECTIVITY and "send the text again" in error.error and service.is_usable
    assert server.sockets == 2 and one_start_and_stop(down, 2)
    assert np.array_equal(pcm(down), voices_of("Hello there.", "How are you?"))


@in_both_modes
def test_a_turn_goes_on_in_a_new_context_behind_a_break(mode):
    async def drop(server, name, text):
        if server.sockets == 1:
            server.socket.transport.abort()
            return True

    async def drop_at_text(server: Server, message: dict) -> None:
        if server.sockets == 1:
            server.socket.transport.abort()
        else:
            await Server._take(server, message)

    server = Server(script=drop)
    if mode is TOKEN:
        server._take = lambda message: drop_at_text(server, message)
    broke = came(TTSStoppedFrame)
    frames = [*turn("Hello there. ", "Fine, ")[:-1], broke, LLMTextFrame("how are you?"), *turn()[-1:]]
    down, up, _ = run(frames, server, text_aggregation_mode=mode)
    assert [e.category for e in of(up, ErrorFrame)] == [ErrorCategory.CONNECTIVITY]
    assert np.array_equal(pcm(down), voice_of("Fine, how are you?" if mode is SENTENCE else "how are you?"))
    assert server.sockets == 2 and one_start_and_stop(down, 2)


def test_a_wrong_token_is_an_error_and_no_hang():
    down, up, _ = run(turn("Hello."), Server(token="right"), token="right")
    assert np.array_equal(pcm(down), voice_of("Hello.")) and not of(up, ErrorFrame)
    down, up, service = run(turn("Hello there."), Server(token="right"), token="wrong")
    (error,) = of(up, ErrorFrame)
    assert error.category is ErrorCategory.AUTHENTICATION and not service.is_usable
    assert "answered HTTP 401: that is not its token; give the service the server's token (token=)" in error.error
    assert not of(down, TTSAudioRawFrame) and one_start_and_stop(down)
    _, up, _ = run([], Server(token="right"))
    assert "HTTP 401: it has a token; give the service the server's token (token=)" in of(up, ErrorFrame)[0].error


def test_a_wrong_path_is_an_error_that_names_the_right_one():
    server = Server()
    server.path = "/elsewhere"
    down, up, service = run([], server)
    (error,) = of(up, ErrorFrame)
    assert error.category is ErrorCategory.INVALID_REQUEST and not service.is_usable
    port = server.url.split(":")[2].split("/")[0]
    assert f"HTTP 404: no socket is there; give url=ws://127.0.0.1:{port}{PATH}" in error.error


@pytest.mark.parametrize("status, said", [(403, {"error": {"message": "localhost only"}}), (502, "bad gateway")])
def test_another_refusal_says_what_the_server_says(status, said):
    server, body = Server(), said if isinstance(said, str) else json.dumps(said)
    server._admit = lambda connection, _: connection.respond(HTTPStatus(status), body)
    _, up, _ = run([], server)
    words = "localhost only" if status == 403 else "bad gateway"
    assert of(up, ErrorFrame)[0].error.endswith(f"answered HTTP {status}: {words}")


@pytest.mark.parametrize(
    "url, socket",
    [
        *((f"{scheme}://host:8000{path}", f"ws://host:8000{PATH}") for scheme in ("ws", "http") for path in BASES),
        ("HTTPS://host", f"wss://host{PATH}"),
        ("https://host/tts/", f"wss://host/tts{PATH}"),
        (f"wss://host/tts{PATH}?key=1", f"wss://host/tts{PATH}?key=1"),
        ("ws://host/tts/v1", f"ws://host/tts{PATH}"),
        ("ws://host/own/path", "ws://host/own/path"),
        ("ws://user:pass@[::1]:80", f"ws://user:pass@[::1]:80{PATH}"),
    ],
)
def test_a_servers_url_is_completed(url, socket):
    assert socket_url(url) == socket


@pytest.mark.parametrize(
    "url", ["", "host:8000", "localhost", "ftp://host", "ws://", "http:///v1", "ws://host:a", None, 7]
)
def test_what_is_no_servers_url_is_refused(url):
    with pytest.raises(RequestError, match=f"such as ws://HOST:8000 or wss://HOST, or end with {PATH}, got {url!r}"):
        MegakernelWebsocketTTSService(url=url)


@in_both_modes
async def test_without_a_server_every_error_names_it_and_says_what_to_start(mode):
    url = f"ws://127.0.0.1:{free_port()}{PATH}"
    service = MegakernelWebsocketTTSService(url=url, text_aggregation_mode=mode)
    down, up = await play(service, [*turn("Hello there."), came(TTSStoppedFrame)])
    errors = of(up, ErrorFrame)
    assert len(errors) == 2 and {e.category for e in errors} == {ErrorCategory.CONNECTIVITY} and service.is_usable
    for error in errors:  # in setup, then by the text
        assert f"cannot reach {url}: ConnectionRefusedError" in error.error
        assert error.error.endswith("; start `qwen-megakernel serve`")
    assert not of(down, TTSAudioRawFrame) and one_start_and_stop(down)


def test_a_server_that_is_not_there_yet_is_tried_again_by_the_next_text(monkeypatch):
    server, connect = Server(), MegakernelWebsocketTTSService._websocket_connect
    tries = []

    async def late(self, url, **options):
        tries.append(url)
        return await connect(self, "ws://127.0.0.1:1" if len(tries) == 1 else url, **options)

    monkeypatch.setattr(MegakernelWebsocketTTSService, "_websocket_connect", late)
    down, up, _ = run(turn("Hello there."), server)
    assert [e.category for e in of(up, ErrorFrame)] == [ErrorCategory.CONNECTIVITY] and len(tries) == 2
    assert "cannot speak yet: " in of(up, ErrorFrame)[0].error
    assert np.array_equal(pcm(down), voice_of("Hello there."))


@pytest.mark.parametrize(
    "hello, category",
    [
        (HELLO | {"format": "opus"}, ErrorCategory.SERVER),
        ({"type": "error", "code": "busy", "message": "full", "retryable": True}, ErrorCategory.RATE_LIMIT),
    ],
)
def test_a_server_that_says_something_else_first_is_not_spoken_with(hello, category):
    server = Server(hello=hello)
    _, up, _ = run([], server)
    assert [e.category for e in of(up, ErrorFrame)] == [category]


def test_a_server_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(remote, "_CONNECT_S", 0.3)
    server = Server()
    server.send = lambda message: asyncio.sleep(0)
    _, up, _ = run([], server)
    (error,) = of(up, ErrorFrame)
    assert error.category is ErrorCategory.CONNECTIVITY and "did not answer" in error.error


def test_an_idle_socket_is_kept_alive(monkeypatch):
    monkeypatch.setattr(remote, "_PING_S", 0.1)
    server, began = Server(), time.monotonic()
    pinged = Until(lambda _: len(server.of("ping")) >= 3)
    down, up, _ = run([pinged, *turn("Hello.")], server)
    assert server.sockets == 1 and not of(up, ErrorFrame) and len(pcm(down))
    assert len(server.of("ping")) <= (time.monotonic() - began) / 0.1, "no more often than asked for"


def test_the_trace_of_pipecat_goes_on_in_the_server():
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    service = MegakernelWebsocketTTSService(url="ws://127.0.0.1:1")
    of_context = SpanContext(0xAB, 0xCD, is_remote=False, trace_flags=TraceFlags(1))
    service._tts_spans = {"a": {"span": NonRecordingSpan(of_context)}}  # as Pipecat's tracing keeps them
    assert service._trace_of("a") == {"traceparent": f"00-{0xAB:032x}-{0xCD:016x}-01"}
    assert service._trace_of("b") == {}
