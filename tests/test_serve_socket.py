"""The WebSocket: contexts of text in, PCM out; and what a hostile client gets."""

import asyncio
import contextlib
import dataclasses
import json
import random
import socket
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import PATIENCE_S, Running, asgi, connect, ready, running, small_demo, until
from starlette.websockets import WebSocketDisconnect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.checkpoint.synthetic import NO_EOS
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.server.limits import Limits
from qwen_megakernel.server.stream_api import PATH as STREAM
from qwen_megakernel.server.websocket_api import _SETTINGS, PATH

TEXT = "Hello there, how are you today?"
LIMITS = Limits(max_text=600, max_body=8192, contexts=3, idle_s=10 * PATIENCE_S, total_s=10 * PATIENCE_S)


@pytest.fixture(scope="module")
def server():
    with ready(small_demo, limits=LIMITS) as server:
        yield server


class Client:
    """Sends, and sorts what comes by context."""

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


@pytest.fixture
def client(server):
    with connect(server.socket_url) as line:
        yield Client(line)


def said(server: Running, text: str = TEXT, seed: int = 5, **options):
    return server.service.engine.generate(text, sampling=SamplingParams(seed=seed), speaker="ada", **options)


def test_it_introduces_itself(server, client):
    engine = server.service.engine
    assert client.hello == {
        "type": "hello",
        "model": "demo",
        "format": "pcm_s16le",
        "sample_rate": 24000,
        "voices": list(engine.speakers),
        "languages": list(engine.languages),
        "idle_seconds": LIMITS.idle_s,
        "max_characters": LIMITS.max_text,
        "settings": list(_SETTINGS),
    }
    client.say("ping")
    assert client.until("pong") == {"type": "pong"}


def test_whole_text_is_what_the_engine_says(server, client):
    client.say("text", "a", text=TEXT, end=True, voice="ada", language="EN", seed=5)
    end = client.until("end", "a")
    audio = said(server, language="english")
    assert client.pcm["a"] == pcm16(audio.samples)
    assert end["finish_reason"] == audio.finish_reason and end["seed"] == 5
    assert end["seconds"] == round(audio.duration_s, 3) and end["compute_seconds"] > 0


@pytest.mark.parametrize("mode", [True, False])
def test_the_layout_of_whole_text_can_be_chosen(server, client, mode):
    client.say("text", "a", text=TEXT, end=True, voice="ada", seed=5, non_streaming_mode=mode)
    client.until("end", "a")
    assert client.pcm["a"] == pcm16(said(server, non_streaming_mode=mode).samples)


@pytest.mark.parametrize("whole", [True, False])
def test_written_text_is_normalized_and_words_follow_pauses(server, client, whole):
    text = "**Hello** there. [pause 900ms] It is 5 km."
    settings = {"voice": "ada", "seed": 5, "language": "en", "normalize": "auto", "words": True}
    pieces = [text] if whole else ["**Hel", "lo** there. [pau", "se 900ms] It is 5", " km."]
    for number, piece in enumerate(pieces):
        client.say("text", "a", text=piece, **(settings if not number else {}), **({"end": True} if whole else {}))
    if not whole:
        client.say("end", "a")
    client.until("end", "a")
    said_of = [
        said(server, part, language="en", non_streaming_mode=whole)
        for part in ("Hello there.", "It is five kilometers.")
    ]
    samples = np.frombuffer(client.pcm["a"], "<i2")
    assert len(samples) / 24000 == pytest.approx(sum(audio.duration_s for audio in said_of) + 0.9, abs=0.3)
    times = [word for m in client.told if m["type"] == "words" for word in m["words"]]
    assert [word for word, _ in times] == ["**Hello**", "there.", "It", "is", "5", "km."]
    starts = dict(times)
    assert starts["It"] - starts["there."] > 0.9


def test_contexts_of_a_turn_are_read_as_one_text(server, client):
    settings = {"voice": "ada", "seed": 5, "language": "en", "normalize": "auto", "words": True}
    for name, text, turn in (
        ("a", "<think>The user is here.", "t"),
        ("b", " Greet them.</think> Hello there.", "t"),
        ("c", " Greet them.</think> Hello there.", "u"),
    ):
        client.say("text", name, text=text, end=True, turn=turn, **settings)
        client.until("end", name)
    ends = {m["context"]: m["seconds"] for m in client.told if m["type"] == "end"}
    assert ends["a"] == 0 and ends["b"] == pytest.approx(
        said(server, "Hello there.", language="en").duration_s, abs=0.001
    )
    assert ends["c"] > ends["b"], "of another turn: nothing is left out"
    assert [word for word, _ in next(m["words"] for m in client.told if m["type"] == "words")][-1] == "here."


def test_a_context_waits_for_the_text_of_the_one_before_it_in_its_turn(server, client):
    settings = {"voice": "ada", "seed": 5, "normalize": "auto", "turn": "t"}
    client.say("text", "a", text="Hello. <think>I am", **settings)
    client.say("text", "b", text=" done.</think> Yes.", end=True, **settings)
    client.say("text", "a", text=" not", end=True)
    client.until("end", "a")
    client.until("end", "b")
    ends = {m["context"]: m["seconds"] for m in client.told if m["type"] == "end"}
    assert ends["b"] == pytest.approx(said(server, "Yes.").duration_s, abs=0.001)


@pytest.mark.parametrize("text", ["...", "\U0001f389", "[pause]", "<emphasis></emphasis>"])
@pytest.mark.parametrize("whole", [True, False])
def test_text_without_words_ends_without_sound(server, client, text, whole):
    client.say("text", "a", text=text, voice="ada", seed=5, end=whole)
    if not whole:
        client.say("end", "a")
    end = client.until("end", "a")
    assert (end["finish_reason"], end["seconds"], client.pcm.get("a", b"")) == ("eos", 0, b"")


def test_an_odd_tag_does_not_silence_a_context(server, client):
    client.say("text", "a", text="Hello [pause] <audio>there.", end=True, voice="ada", seed=5)
    client.until("end", "a")
    assert client.pcm["a"] == pcm16(said(server, "Hello  there.").samples)


@pytest.mark.parametrize("speed", [0.5, 2])
def test_the_speed_is_heard_and_words_keep_pace(server, client, speed):
    ends, times = {}, {}
    for name, how in (("plain", {}), ("other", {"speed": speed})):
        client.say("text", name, text=TEXT, end=True, voice="ada", seed=5, words=True, **how)
        ends[name] = client.until("end", name)
        told = [m["words"] for m in client.told if m["type"] == "words" and m["context"] == name]
        times[name] = [at for words in told for _, at in words]
    assert client.pcm["other"] == pcm16(said(server, speed=speed).samples)
    assert ends["other"]["seconds"] == pytest.approx(ends["plain"]["seconds"] / speed, abs=1e-3)
    assert len(times["other"]) == len(TEXT.split()) and times["other"] == sorted(times["other"])
    assert times["other"][-1] <= ends["other"]["seconds"]


def test_text_in_pieces_is_the_streaming_layout(server, client, fresh_seed):
    rng, at, first = random.Random(fresh_seed), 0, True
    while at < len(TEXT):
        size = rng.randint(1, 9)
        client.say("text", "a", text=TEXT[at : at + size], **({"voice": "ada", "seed": 5} if first else {}))
        at, first = at + size, False
    client.say("end", "a")
    client.until("end", "a")
    assert client.pcm["a"] == pcm16(said(server, non_streaming_mode=False).samples)


def test_contexts_speak_side_by_side_each_as_if_alone(server, client):
    texts = {name: f"{TEXT} {name}" for name in ("eins", "zwei", "drei")}
    for number, (name, text) in enumerate(texts.items()):
        client.say("text", name, text=text, end=True, voice="ada", seed=number)
    ended = set()
    while ended != set(texts):
        told = client.take()
        if told and told["type"] == "end":
            ended.add(told["context"])
    for number, (name, text) in enumerate(texts.items()):
        assert client.pcm[name] == pcm16(said(server, text, number).samples), name


def test_text_that_crosses_an_end_opens_nothing(server, client):
    client.say("text", "a", text=TEXT, end=True, voice="ada", seed=5)
    client.until("end", "a")
    before = len(client.told)
    for kind, more in (("text", {"text": TEXT, "end": True}), ("end", {}), ("flush", {}), ("cancel", {})):
        client.say(kind, "a", **more)
    client.say("ping")
    client.until("pong")
    assert len(client.told) == before + 1 and server.service.engine.health()["streams"] == 0


def test_whole_text_longer_than_a_slot_is_cut_at_sentences(server, client):
    text = " ".join([TEXT] * 4)
    pieces = server.service.engine.pieces(text)
    assert len(pieces) > 1
    client.say("text", "a", text=text, end=True, voice="ada", seed=5, words=True)
    end = client.until("end", "a")
    assert client.pcm["a"] == b"".join(pcm16(said(server, piece).samples) for piece in pieces)
    words = [word for told in client.told if told["type"] == "words" for word in told["words"]]
    assert [word for word, _ in words] == text.split() and end["seconds"] == len(client.pcm["a"]) / 48000


def test_behind_a_piece_that_its_slot_cuts_nothing_is_said(tiny):
    folder = tiny("custom_voice", eos_gain=NO_EOS)
    load = lambda: TTSEngine.load(folder, device="cpu", max_streams=1, max_positions=48)  # noqa: E731
    with running(load, model="tiny") as server:
        until(lambda: server.service.state == "ready")
        assert len(server.service.engine.pieces(TEXT)) > 1
        with connect(server.socket_url) as line:
            client = Client(line)
            client.say("text", "a", text=TEXT, end=True)
            end = client.until("end", "a")
        assert end["finish_reason"] == "length" and end["seconds"] < 48 * 0.08
        assert len(client.pcm["a"]) == round(end["seconds"] * 48000)
        server.at_rest()


def test_cancel_frees_the_slot_and_others_go_on(server, client):
    long = " ".join([TEXT] * 10)
    client.say("text", "gone", text=long, end=True)
    client.say("text", "stays", text=TEXT, end=True, voice="ada", seed=5)
    client.until("begin", "gone")
    client.say("cancel", "gone")
    assert client.until("end", "gone")["finish_reason"] == "cancelled"
    if not any(told["type"] == "end" and told["context"] == "stays" for told in client.told):
        client.until("end", "stays")
    assert client.pcm["stays"] == pcm16(said(server).samples)
    client.say("cancel", "gone")  # its end has crossed this: nothing
    client.say("ping")
    client.until("pong")
    server.at_rest()


def test_a_context_can_be_cancelled_before_it_speaks(server, client):
    client.say("text", "a", text="Hel")
    client.say("cancel", "a")
    assert client.until("end", "a")["finish_reason"] == "cancelled"
    server.at_rest()


def test_words_come_with_their_times(server, client):
    client.say("text", "a", text=TEXT, end=True, words=True)
    end = client.until("end", "a")
    words = [word for told in client.told if told["type"] == "words" for word in told["words"]]
    assert [word for word, _ in words] == TEXT.split()
    times = [at for _, at in words]
    assert times == sorted(times) and times[0] == 0 and times[-1] <= end["seconds"]


def test_flush_speaks_what_is_held_back(server, client):
    client.say("text", "a", text="Hello", voice="ada", seed=5)
    client.say("flush", "a")
    client.until("begin", "a")
    while not client.pcm["a"]:
        client.take()
    client.say("end", "a")
    client.until("end", "a")


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"voice": "alloy"}, "known: ada"),
        ({"language": "klingon"}, "unknown language 'klingon'; known: auto, english (en)"),
        ({"instructions": "Slowly."}, "would ignore instructions: leave them out. VoiceDesign and 1.7B CustomVoice"),
        ({"text": " ", "end": True}, "blank"),
        ({"text": 3}, "text must be a string, got 3"),
        ({"end": "yes"}, "end must be true or false, got 'yes'"),
        ({"text": "x" * 601}, "may have at most 600 characters, this one has 601"),
        ({"seed": -1}, "seed"),
        ({"seed": True}, "seed must be an integer, got True"),
        ({"seed": "5"}, "seed must be an integer, got '5'"),
        ({"temperature": 0}, "temperature"),
        ({"chunk_frames": [0]}, "chunk_frames"),
        ({"chunk_frames": [1, 10**400]}, "chunk_frames"),
        ({"speed": 4.5}, "speed must be a number from 0.25 to 4.0, got 4.5"),
        ({"speed": float("nan")}, "speed must be a number from 0.25 to 4.0, got nan"),
        ({"speed": True}, "speed must be a number, got True"),
        ({"speed": "2"}, "speed must be a number, got '2'"),
        ({"pace": 2}, "unknown setting 'pace'"),
        ({"non_streaming_mode": 1}, "non_streaming_mode must be true or false, got 1"),
        (
            {"non_streaming_mode": True},
            "text that comes in pieces needs the streaming layout: leave non_streaming_mode",
        ),
        ({"instructions": "x" * 2001}, "instructions has 2001 characters, at most 2000"),
        ({"ref_audio": "/etc/passwd"}, "unknown setting"),
    ],
    ids=str,
)
def test_a_wrong_context_fails_alone(server, client, wrong, words):
    client.say("text", "good", text=TEXT, end=True, voice="ada", seed=5)
    client.say("text", "wrong", **({"text": TEXT} | wrong))
    error = client.until("error", "wrong")
    assert error["code"] == "invalid" and error["retryable"] is False
    assert any(part in error["message"] for part in words.split("|")), error
    if not any(told["type"] == "end" for told in client.told):
        client.until("end", "good")
    assert client.pcm["good"] == pcm16(said(server).samples)


def test_settings_come_first(server, client):
    client.say("text", "a", text="Hello ")
    client.say("text", "a", text="there.", voice="max")
    told = client.until("error", "a")["message"]
    assert told == "voice comes too late: settings go with a context's first message"
    server.at_rest()


@pytest.mark.parametrize("kind", ["flush", "end"])
def test_a_context_that_nobody_opened_is_told_so(server, client, kind):
    """Else its client would wait for an end that never comes. Its name can still be used."""
    client.say(kind, "a")
    error = client.until("error", "a")
    assert error["message"] == "there is no context 'a': a text message opens it" and error["code"] == "invalid"
    client.say("text", "a", text=TEXT, end=True, voice="ada", seed=5)
    client.until("end", "a")
    assert client.pcm["a"] == pcm16(said(server).samples)


@pytest.mark.parametrize("path", ["/", "/v1/audio/speech", "/v1/realtime"])
def test_a_socket_at_another_path_is_told_the_right_one(server, path):
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{server.port}{path}")
    response = refused.value.response
    told = json.loads(response.body)["error"]["message"]
    assert response.status_code == 404 and told == f"there is no WebSocket at {path!r}: use {PATH} or {STREAM}"


def test_too_many_contexts_are_busy(server, client):
    for name in "abc":
        client.say("text", name, text="Hello")
    client.say("text", "d", text="Hello")
    assert client.until("error", "d")["code"] == "busy"
    for name in "abc":
        client.say("cancel", name)
        client.until("end", name)
    server.at_rest()


def test_a_refused_context_stays_refused(server, client):
    for name in "abc":
        client.say("text", name, text="Hello")
    client.say("text", "d", text="Hello ", voice="max")
    assert client.until("error", "d")["code"] == "busy"
    client.say("cancel", "a")
    client.until("end", "a")
    client.say("text", "d", text="there.", end=True)
    for name in "bc":
        client.say("cancel", name)
        client.until("end", name)
    assert not [told for told in client.told if told.get("context") == "d" and told["type"] != "error"]
    server.at_rest()


def test_a_text_that_does_not_go_on_is_ended():
    with running(small_demo, limits=dataclasses.replace(LIMITS, text_s=0.3)) as server:
        until(lambda: server.service.state == "ready")
        with connect(server.socket_url) as line:
            client = Client(line)
            client.say("text", "a", text="Hel")
            assert "no more text came" in client.until("error", "a")["message"]
        server.at_rest()


def test_sockets_are_counted():
    with running(small_demo, limits=dataclasses.replace(LIMITS, connections=2)) as server:
        until(lambda: server.service.state == "ready")
        with connect(server.socket_url), connect(server.socket_url):
            with pytest.raises(InvalidStatus) as refused:
                connect(server.socket_url)
            assert refused.value.response.status_code == 503
        until(lambda: connects(server))


def connects(server: Running) -> bool:
    with contextlib.suppress(InvalidStatus), connect(server.socket_url):
        return True
    return False


def test_a_flood_that_nobody_reads_is_not_taken_in():
    """A client that pings and does not read is itself not read any more: what waits for it stays small."""
    sent = 0

    async def receive():
        nonlocal sent
        sent += 1
        return {"type": "websocket.receive", "text": '{"type": "ping"}'} if sent > 1 else {"type": "websocket.connect"}

    async def stall(message) -> None:
        """Until no more is taken in; then the client is gone."""
        if sent > 2 and message["type"] == "websocket.send":
            before = 0
            while before < sent:
                before = sent
                await asyncio.sleep(0.2)
            raise WebSocketDisconnect(1006)

    scope = {"type": "websocket", "path": PATH, "headers": [(b"host", b"localhost")], "query_string": b""}
    asgi(small_demo, scope, receive, stall, limits=LIMITS)
    assert 900 < sent < 1100


@pytest.mark.parametrize(
    "message, words",
    [
        ("", "must be JSON"),
        ("{", "must be JSON"),
        ("[]", "must be a JSON object, got []"),
        ("null", "must be a JSON object, got None"),
        ('"text"', "must be a JSON object, got 'text'"),
        ('{"type": "dance"}', "type must be text, flush, end, cancel or ping, got 'dance'"),
        ('{"context": "a"}', "type must be text, flush, end, cancel or ping, got 'None'"),
        ('{"type": "end"}', "context must be a string of 1 to 64 characters, got None"),
        ('{"type": "end", "context": ""}', "got ''"),
        ('{"type": "text", "context": 3, "text": "x"}', "got 3"),
        ('{"type": "flush", "context": "a", "x": 1}', "flush takes a context and no other field, got 'x'"),
        ('{"type": "ping", "context": "a"}', "ping takes no other field, got 'context'"),
        ('{"type": "ping", "x": 1}', "ping takes no other field, got 'x'"),
        (b"\0" * 8, "JSON in a text frame, got a binary one"),
        ('{"type":' * 1000, "must be JSON"),
        ("[" * 8000, "must be JSON"),
        ("x" * 8193, "has 8193 characters, at most 8192: send its text in pieces"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_message_ends_the_socket_and_its_contexts(server, client, message, words):
    client.say("text", "a", text=" ".join([TEXT] * 10), end=True)
    client.until("begin", "a")
    client.line.send(message)
    with pytest.raises(ConnectionClosed):
        while True:
            client.take()
    assert client.told[-1]["type"] == "error" and client.told[-1]["code"] == "protocol"
    assert words in client.told[-1]["message"]
    server.at_rest()


def test_who_asks_for_nothing_is_let_go(server, client):
    """After the server's own time: of two that are silent, the one whose server has more of it stays."""
    with running(small_demo, limits=dataclasses.replace(LIMITS, idle_s=1.0)) as short:
        until(lambda: short.service.state == "ready")
        with connect(short.socket_url) as line:
            idle = Client(line)
            with pytest.raises(ConnectionClosed):
                while True:
                    idle.take()
    assert idle.told[-1]["code"] == "idle" and line.close_code == 1001
    client.say("ping")
    assert client.until("pong") == {"type": "pong"}


def test_who_hangs_up_frees_every_slot(server):
    for _ in range(3):
        with connect(server.socket_url) as line:
            client = Client(line)
            for name in "abc":
                client.say("text", name, text=" ".join([TEXT] * 10), end=name != "c")
                client.until("begin", name)
            line.socket.shutdown(socket.SHUT_RDWR)
        server.at_rest()


def test_who_does_not_read_is_let_go():
    """A connection that takes a few messages and then no more."""
    taken, texts = [], [{"type": "text", "context": name, "text": " ".join([TEXT] * 8), "end": True} for name in "ab"]

    async def stall(message) -> None:
        taken.append(message)
        if len(taken) > 4 and message["type"] == "websocket.send":
            await asyncio.Event().wait()

    messages = [{"type": "websocket.connect"}]
    messages += [{"type": "websocket.receive", "text": json.dumps(text)} for text in texts]

    async def receive():
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    scope = {"type": "websocket", "path": PATH, "headers": [(b"host", b"localhost")], "query_string": b""}
    asgi(small_demo, scope, receive, stall, limits=dataclasses.replace(LIMITS, idle_s=0.5))
    assert len(taken) > 4


def test_500_sockets_come_and_go(server):
    def storm(luck: int) -> None:
        rng = random.Random(luck)
        for _ in range(50):
            with contextlib.suppress(ConnectionClosed, OSError, TimeoutError, InvalidStatus):
                with connect(server.socket_url, close_timeout=0.1) as line:
                    if rng.random() < 0.3:
                        line.send(json.dumps({"type": "text", "context": "a", "text": TEXT, "end": True}))
                    if rng.random() < 0.5:
                        line.socket.close()

    threads = [threading.Thread(target=storm, args=(random.random(),)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    server.at_rest()
    with connect(server.socket_url) as line:
        client = Client(line)
        client.say("text", "a", text=TEXT, end=True, voice="ada", seed=5)
        client.until("end", "a")
        assert client.pcm["a"] == pcm16(said(server).samples)


def test_without_the_token_nobody_is_let_in(server):
    with running(lambda: server.service.engine, token="secret") as guarded:
        guarded.service.close = _keep_engine(guarded)
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(InvalidStatus) as refused:
                connect(guarded.socket_url, additional_headers=headers)
            assert refused.value.response.status_code == 401
        until(lambda: guarded.service.state == "ready")
        with connect(guarded.socket_url, additional_headers={"Authorization": "Bearer secret"}) as line:
            assert Client(line).hello["model"] == "demo"


def _keep_engine(guarded: Running):
    """The server's fixture closes it."""
    close = guarded.service.close

    async def keep() -> None:
        guarded.service.engine = None
        await close()

    return keep


def test_pages_of_others_are_not_let_in(server):
    with pytest.raises(InvalidStatus) as refused:
        connect(server.socket_url, origin="https://evil.example")
    assert refused.value.response.status_code == 403


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
messages = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "flush", "end", "cancel", "ping"]) | junk},
    optional={
        "context": st.sampled_from("abcd") | junk,
        "text": st.text(max_size=40) | junk,
        "end": st.booleans() | junk,
        "voice": st.sampled_from(["ada", "max"]) | junk,
        "seed": st.integers(0, 9) | junk,
        "chunk_frames": st.integers(1, 8) | junk,
        "words": st.booleans() | junk,
    },
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(messages.map(json.dumps) | st.text(max_size=30) | st.binary(max_size=30), max_size=6))
def test_nothing_that_a_client_sends_is_an_error_of_ours(server, sent):
    with connect(server.socket_url, close_timeout=1) as line:
        client = Client(line)
        with contextlib.suppress(ConnectionClosed):
            for message in sent:
                line.send(message)
            for name in "abcd":
                client.say("cancel", name)
            client.say("ping")
            client.until("pong")
    assert not [told for told in client.told if told.get("code") == "failed"], client.told
    assert np.isfinite(len(client.pcm))
    server.at_rest()
