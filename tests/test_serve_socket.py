"""Our WebSocket: contexts of text in, PCM out; and what a hostile client gets. See also test_entrances.py."""

import asyncio
import contextlib
import json
import random
import re
import time
from functools import partial
from types import SimpleNamespace

import pytest
from entrances import JUNK, NO_MESSAGE, SocketClient, fuzzed
from hypothesis import strategies as st
from serving import PATIENCE_S, TEXT, asgi, audio_of, connect, endless, ready, said, same, small_demo
from starlette.websockets import WebSocketDisconnect
from test_entrances import LIMITS
from waiting import run_all, slow_case, until_in_loop
from websockets.exceptions import ConnectionClosed, InvalidStatus

from qwen_megakernel.choices import SOCKET_PATH as PATH
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.server.limits import Limits
from qwen_megakernel.server.omni.api import PATH as STREAM
from qwen_megakernel.server.socket_line import SocketLine

LONG = " ".join([TEXT] * 10)
SPOKEN = {"end": True, "voice": "ada", "seed": 5}


@pytest.fixture(scope="module")
def server():
    with ready(small_demo, limits=LIMITS) as server:
        yield server


@pytest.fixture
def client(server):
    with connect(server.socket_url) as line:
        yield SocketClient(line)


def test_pings_are_counted_by_the_second():
    with ready(small_demo, limits=Limits(control_frames=2)) as server:
        with connect(server.socket_url, ping_interval=None) as line:
            for pause_s in (1, 0):
                for _ in range(2):
                    line.ping().wait(PATIENCE_S)
                time.sleep(pause_s)
            assert SocketClient(line).answers()


def test_a_message_that_came_while_the_event_loop_stood_still_is_read():
    def stand_still():
        client.say("text", "a", text=TEXT, **SPOKEN)
        time.sleep(3.5)

    with ready(small_demo, limits=Limits(idle_s=3)) as server, connect(server.socket_url) as line:
        client = SocketClient(line)
        server.service._tasks[0].get_loop().call_soon_threadsafe(stand_still)
        assert client.until("end", "a")["finish_reason"] == "eos"
        assert client.pcm["a"] == said(server)


def test_it_introduces_itself(server, client):
    engine, hello = server.service.engine, dict(client.hello)
    assert {"voice", "language", "seed", "speed", "words", "turn", "normalize"} <= set(hello.pop("settings"))
    assert hello == {
        "type": "hello",
        "model": "demo",
        "format": "pcm_s16le",
        "sample_rate": 24000,
        "voices": list(engine.speakers),
        "languages": list(engine.languages),
        "idle_seconds": LIMITS.idle_s,
        "max_characters": LIMITS.max_text,
    }
    assert client.answers()


def test_whole_text_is_what_the_engine_says_with_words_in_time(server, client):
    end, audio = client.hear(TEXT, language="EN", words=True), audio_of(server, language="english")
    assert client.pcm["a"] == pcm16(audio.samples)
    assert end["finish_reason"] == audio.finish_reason and end["seed"] == 5
    assert end["seconds"] == round(audio.duration_s, 3) and end["compute_seconds"] > 0
    words, times = zip(*client.words(), strict=True)
    assert list(words) == TEXT.split() and 0 <= times[0] < 0.15
    assert all(told["measured"] for told in client.told if told["type"] == "words")
    assert client.hear(TEXT, "fast", words=True, speed=2)["seconds"] == pytest.approx(end["seconds"] / 2, abs=1e-3)
    words, faster = zip(*client.words("fast"), strict=True)
    assert list(words) == TEXT.split() and faster[-1] <= end["seconds"] / 2
    assert list(times) == sorted(times) and list(faster) == sorted(faster) and times[-1] <= end["seconds"]


@pytest.mark.parametrize("whole", [slow_case(True), False])
def test_written_text_is_normalized_and_words_follow_pauses(server, client, whole):
    text = "**Hello** there. [pause 900ms] It is 5 km."
    settings = {"voice": "ada", "seed": 5, "language": "en", "normalize": "auto", "words": True}
    pieces = [text] if whole else ["**Hel", "lo** there. [pau", "se 900ms] It is 5", " km."]
    for number, piece in enumerate(pieces):
        client.say("text", "a", text=piece, **(settings if not number else {}), **({"end": True} if whole else {}))
    if not whole:
        client.say("end", "a")
    client.until("end", "a")
    parts = ("Hello there.", "It is five kilometers.")
    spoken = sum(audio_of(server, part, language="en", non_streaming_mode=whole).duration_s for part in parts)
    assert len(client.pcm["a"]) / 48000 == pytest.approx(spoken + 0.9, abs=0.3)
    assert [word for word, _ in client.words()] == ["**Hello**", "there.", "It", "is", "5", "km."]
    starts = dict(client.words())
    assert starts["It"] - starts["there."] > 0.9


def test_contexts_of_a_turn_are_read_as_one_text(server, client):
    settings = {"language": "en", "normalize": "auto", "words": True}
    seconds = {
        name: client.hear(text, name, turn=turn, **settings)["seconds"]
        for name, text, turn in (
            ("a", "<think>The user is here.", "t"),
            ("b", " Greet them.</think> Hello there.", "t"),
            ("c", " Greet them.</think> Hello there.", "u"),
        )
    }
    assert seconds["a"] == 0 and client.words("a")[-1][0] == "here."
    assert seconds["b"] == pytest.approx(audio_of(server, "Hello there.", language="en").duration_s, abs=0.001)
    assert seconds["c"] > seconds["b"], "of another turn: nothing is left out"


def test_a_context_waits_for_the_text_of_the_one_before_it_in_its_turn(server, client):
    settings = {"voice": "ada", "seed": 5, "normalize": "auto", "turn": "t"}
    client.say("text", "a", text="Hello. <think>I am", **settings)
    client.say("text", "b", text=" done.</think> Yes.", end=True, **settings)
    client.say("text", "a", text=" not", end=True)
    client.until("end", "a")
    seconds = client.until("end", "b")["seconds"]
    assert seconds == pytest.approx(audio_of(server, "Yes.").duration_s, abs=0.001)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("text", [" \n", "...", "\U0001f389", "[pause]", "<emphasis></emphasis>"])
def test_text_without_words_ends_without_sound(client, text, whole):
    client.say("text", "a", text=text, voice="ada", seed=5, end=whole)
    if not whole:
        client.say("end", "a")
    end = client.until("end", "a")
    assert (end["finish_reason"], end["seconds"], client.pcm.get("a", b"")) == ("eos", 0, b"")
    assert not any(told["type"] == "begin" for told in client.told)


def test_an_odd_tag_does_not_silence_a_context(server, client):
    client.hear("Hello [pause] <audio>there.")
    assert client.pcm["a"] == said(server, "Hello  there.")


def test_text_in_pieces_is_the_streaming_layout(server, client, fresh_seed):
    rng, at, first = random.Random(fresh_seed), 0, True
    while at < len(TEXT):
        size = rng.randint(1, 9)
        client.say("text", "a", text=TEXT[at : at + size], **({"voice": "ada", "seed": 5} if first else {}))
        at, first = at + size, False
    client.say("end", "a")
    client.until("end", "a")
    assert same(client.pcm["a"], said(server, non_streaming_mode=False))


def test_text_that_crosses_an_end_opens_nothing(server, client):
    client.hear(TEXT)
    before = len(client.told)
    for kind, more in (("text", {"text": TEXT, "end": True}), ("end", {}), ("flush", {}), ("cancel", {})):
        client.say(kind, "a", **more)
    assert client.answers()
    assert len(client.told) == before + 1 and server.service.engine.health()["streams"] == 0


@pytest.mark.slow
def test_whole_text_longer_than_a_slot_is_cut_at_sentences(server, client):
    text = " ".join([TEXT] * 3)
    pieces = server.service.engine.pieces(text)
    end = client.hear(text, words=True)
    assert len(pieces) > 1 and client.pcm["a"] == b"".join(said(server, piece) for piece in pieces)
    assert [word for word, _ in client.words()] == text.split() and end["seconds"] == len(client.pcm["a"]) / 48000


def test_behind_a_piece_that_its_slot_cuts_nothing_is_said(tiny):
    with endless(tiny) as server, connect(server.socket_url) as line:
        assert len(server.service.engine.pieces(TEXT)) > 1
        client = SocketClient(line)
        end = client.hear(TEXT, voice=None)
        assert end["finish_reason"] == "length" and end["seconds"] < 48 * 0.08
        assert len(client.pcm["a"]) == round(end["seconds"] * 48000)


def test_cancel_frees_the_slot_and_others_go_on(server, client):
    client.say("text", "gone", text=LONG, end=True)
    client.say("text", "stays", text=TEXT, **SPOKEN)
    client.until("begin", "gone")
    client.say("cancel", "gone")
    assert client.until("end", "gone")["finish_reason"] == "cancelled"
    if not any(told["type"] == "end" and told["context"] == "stays" for told in client.told):
        client.until("end", "stays")
    assert client.pcm["stays"] == said(server)
    client.say("cancel", "gone")  # its end has crossed this: nothing
    client.say("text", "early", text="Hel")
    client.say("cancel", "early")
    assert client.until("end", "early")["finish_reason"] == "cancelled"
    server.at_rest()


def test_a_wrong_context_fails_alone(server, client):
    client.say("text", "good", text=TEXT, **SPOKEN)
    client.say("text", "late", text="Hello ")
    client.say("text", "late", text="there.", voice="max")
    told = client.until("error", "late")["message"]
    assert told == "voice comes too late: settings go with a context's first message"
    if not any(told["type"] == "end" for told in client.told):
        client.until("end", "good")
    assert client.pcm["good"] == said(server)
    server.at_rest()


def test_flush_speaks_what_is_held_back(server, client):
    client.say("text", "a", text="Hello", voice="ada", seed=5)
    client.say("flush", "a")
    client.until("begin", "a")
    while not client.pcm["a"]:
        client.take()
    client.say("end", "a")
    client.until("end", "a")


def test_a_context_that_nobody_opened_is_told_so(server, client):
    """Else its client would wait for an end that never comes. Its name can still be used."""
    for kind in ("flush", "end"):
        client.say(kind, "a")
        error = client.until("error", "a")
        assert error["message"] == "there is no context 'a': a text message opens it" and error["code"] == "invalid"
    client.hear(TEXT)
    assert client.pcm["a"] == said(server)


@pytest.mark.parametrize("path", ["/", "/v1/audio/speech", "/v1/realtime"])
def test_a_socket_at_another_path_is_told_the_right_one(server, path):
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{server.port}{path}")
    response = refused.value.response
    told = json.loads(response.body)["error"]["message"]
    assert response.status_code == 404 and told == f"there is no WebSocket at {path!r}: use {PATH} or {STREAM}"


def test_too_many_contexts_are_busy_and_a_refused_one_stays_refused(server, client):
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

    asgi(small_demo, PATH, receive, stall, limits=LIMITS)
    assert 900 < sent < 1100


def test_sound_that_nobody_reads_is_not_kept_for_ever():
    """More than `max_unsent` closes the socket, long before the client counts as silent."""
    text = {"type": "text", "context": "a", "text": LONG, "end": True}
    told = iter([{"type": "websocket.connect"}, {"type": "websocket.receive", "text": json.dumps(text)}])
    sent = 0

    async def receive():
        message = next(told, None)
        return message or await asyncio.Event().wait()

    async def stall(message) -> None:
        nonlocal sent
        sent += len(message.get("bytes") or b"")
        if sent:
            await asyncio.Event().wait()

    limits = Limits(max_unsent=20_000, idle_s=10 * PATIENCE_S, total_s=10 * PATIENCE_S)
    asgi(small_demo, PATH, receive, stall, limits=limits)
    assert 0 < sent < 20_000


async def test_what_a_client_has_taken_does_not_count_as_unsent():
    """More than `max_unsent` may be sent over a socket, one message after the other."""

    class Heard(SocketLine):
        _handle = _listens = None

    class Client:
        scope, taken = {}, 0

        async def accept(self, subprotocol) -> None:
            pass

        async def receive(self) -> None:
            await asyncio.Event().wait()

        async def send_bytes(self, data: bytes) -> None:
            self.taken += len(data)

        async def close(self, code: int) -> None:
            pass

    client, service = Client(), SimpleNamespace(limits=Limits(max_unsent=1000), serves=True, unsent_sockets=set())
    line = Heard(client, service)
    running = asyncio.create_task(line.run())
    for _ in range(5):
        line.put_bytes(bytes(900))
        await until_in_loop(lambda: running.done() or not service.unsent_sockets)
    line.put_end()
    await running
    assert client.taken == 4500 and line.record.fields == {"close": 1000} and not line.record.error


@pytest.mark.parametrize(
    "message, words",
    [
        *NO_MESSAGE,
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
        ('{"type":' * 1000, "must be JSON"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_message_ends_the_socket_and_its_contexts(server, client, message, words):
    client.say("text", "a", text=LONG, end=True)
    client.until("begin", "a")
    client.line.send(message)
    with pytest.raises(ConnectionClosed):
        client.drain()
    assert client.told[-1]["type"] == "error" and client.told[-1]["code"] == "protocol"
    assert re.search(words, client.told[-1]["message"])
    server.at_rest()


@pytest.mark.slow
def test_500_sockets_come_and_go(server):
    def storm(rng: random.Random) -> None:
        for _ in range(50):
            with contextlib.suppress(ConnectionClosed, OSError, TimeoutError, InvalidStatus):
                with connect(server.socket_url, close_timeout=0.1) as line:
                    if rng.random() < 0.3:
                        line.send(json.dumps({"type": "text", "context": "a", "text": TEXT, "end": True}))
                    if rng.random() < 0.5:
                        line.socket.close()

    run_all(*[partial(storm, random.Random(random.random())) for _ in range(10)])
    server.at_rest()
    with connect(server.socket_url) as line:
        client = SocketClient(line)
        client.hear(TEXT)
        assert client.pcm["a"] == said(server)


messages = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "flush", "end", "cancel", "ping"]) | JUNK},
    optional={
        "context": st.sampled_from("abcd") | JUNK,
        "text": st.text(max_size=40) | JUNK,
        "end": st.booleans() | JUNK,
        "voice": st.sampled_from(["ada", "max"]) | JUNK,
        "seed": st.integers(0, 9) | JUNK,
        "chunk_frames": st.integers(1, 8) | JUNK,
        "words": st.booleans() | JUNK,
    },
)


@fuzzed(st.lists(messages.map(json.dumps) | st.text(max_size=30) | st.binary(max_size=30), max_size=6))
def test_nothing_that_a_client_sends_is_an_error_of_ours(server, sent):
    with connect(server.socket_url, close_timeout=1) as line:
        client = SocketClient(line)
        with contextlib.suppress(ConnectionClosed):
            for message in sent:
                line.send(message)
            for name in "abcd":
                client.say("cancel", name)
            client.answers()
    assert not [told for told in client.told if told.get("code") == "failed"], client.told
    server.at_rest()
