"""What holds at each of the server's three entrances: what is said, what is refused, and who may not or goes away."""

import asyncio
import dataclasses
import re
import socket

import pytest
from entrances import ENTRANCES
from probes import kill, probed
from serving import PATIENCE_S, TEXT, asgi, connect, get, places_taken, ready, running, said, same, small_demo, until
from websockets.exceptions import ConnectionClosed

from qwen_megakernel import BackendError, TTSEngine
from qwen_megakernel.server.limits import Limits

SHORT = "Hello there."
LIMITS = Limits(max_text=600, max_body=8192, contexts=3, idle_s=10 * PATIENCE_S, total_s=10 * PATIENCE_S)
SOCKETS = {name: entrance for name, entrance in ENTRANCES.items() if entrance.client}
at_every_entrance = pytest.mark.parametrize("entrance", ENTRANCES.values(), ids=ENTRANCES)
at_both_sockets = pytest.mark.parametrize("entrance", SOCKETS.values(), ids=SOCKETS)


@pytest.fixture(scope="module")
def server():
    with ready(small_demo, limits=LIMITS) as server:
        yield server


# ---------------------------------------------------------------- what is said


@at_every_entrance
@pytest.mark.parametrize("mode", [None, True, False])
def test_the_layout_of_whole_text_can_be_chosen(server, entrance, mode):
    settings = {} if mode is None else {"non_streaming_mode": mode}
    heard = entrance.say(server, SHORT, voice="MAX", language="en-US", **settings)
    mode = False if mode is None and entrance.streams else mode
    assert same(heard.pcm, said(server, SHORT, speaker="max", language="english", non_streaming_mode=mode))


@at_every_entrance
def test_whole_text_longer_than_a_slot_is_said_piece_by_piece(server, entrance):
    text = " ".join([TEXT] * 3)
    pieces = server.service.engine.pieces(text, speaker="ada")
    heard = entrance.say(server, text, non_streaming_mode=True)
    assert len(pieces) > 1 and heard.pcm == b"".join(said(server, piece) for piece in pieces)


# ---------------------------------------------------------------- what is refused

ALL, WEB, HTTP = tuple(ENTRANCES), tuple(SOCKETS), ("http",)
SPEED = "speed must be a number"
REFUSED = [
    (ALL, "text", 3, "must be a string, got 3"),
    (ALL, "text", "x" * 601, "at most 600|has 601"),
    (("http",), "text", " \n", "blank"),
    *((("http",), "text", text, "nothing to speak") for text in ("...", "*", "\U0001f44d", "%")),
    (("http", "stream"), "model", "tts-2", "this server's model is 'demo', got 'tts-2'"),
    (ALL, "voice", "alloy", "unknown voice 'alloy'; known: ada"),
    (ALL, "voice", "../ada", "unknown voice"),
    (ALL, "voice", "ada(0.5)+max(0.5)", "must be one name, .*a mean of speakers is none .*; known: ada"),
    *((HTTP, "volume_multiplier", value, "volume_multiplier must be") for value in (-1, 11, "loud", True)),
    (ALL, "voice", 3, "voice must be a"),
    (ALL, "language", "klingon", r"unknown language 'klingon'; known: auto, english \(en\)"),
    (WEB, "instructions", "Slowly.", "leave them out"),
    (ALL, "instructions", "x" * 2001, "instructions .*at most 2000"),
    (ALL, "speed", 4.5, f"{SPEED} from 0.25 to 4, got 4.5"),
    (ALL, "speed", 10**400, f"{SPEED} from 0.25 to 4, got 1000"),
    (ALL, "speed", float("nan"), f"{SPEED} from 0.25 to 4, got nan"),
    (ALL, "speed", True, f"{SPEED}.*got True"),
    (ALL, "speed", "fast", f"{SPEED}.*got 'fast'"),
    (ALL, "seed", -1, "seed must be"),
    (ALL, "seed", 2**64, "seed must be"),
    (ALL, "seed", True, "seed must be an integer.*got True"),
    (ALL, "seed", "5.5", "seed must be an integer.*got '5.5'"),
    (ALL, "normalize", "yes", "normalize must be .*got 'yes'"),
    (ALL, "normalize", True, "normalize must be .*got True"),
    (ALL, "trim", "all", "trim must be .*got 'all'"),
    (ALL, "non_streaming_mode", 1, "non_streaming_mode must be true or false, got 1"),
    (ALL, "temperature", 0, "temperature"),
    (ALL, "ref_audio", "/etc/passwd", "ref_audio"),
    (ALL, "dance", 1, "unknown (field|option) 'dance'.*; known: "),
    (HTTP, "text", "", "input"),
    (HTTP, "text", "\ud800", "input"),
    (HTTP, "voice", {"id": "alloy"}, "unknown voice 'alloy'; known: ada"),
    (HTTP, "voice", {"id": 3}, r"""voice must be a name, or an object such as {"id": "ada"}, got {'id': 3}"""),
    (HTTP, "voice", "x" * 65, "voice must have at most 64 characters"),
    (HTTP, "response_format", "vorbis", "'mp3', 'opus', 'aac', 'flac', 'wav' or 'pcm', got 'vorbis'"),
    (HTTP, "stream_format", "events", "stream_format must be 'audio' or 'sse', got 'events'"),
    (HTTP, "\ud800", 1, "a field's name must be valid Unicode"),
    *((HTTP, "retries", value, "retries must be") for value in (-1, 6, 1.5, "two", True)),
    (("socket",), "end", "yes", "end must be true or false, got 'yes'"),
    (("socket",), "end", False, "text that comes in pieces needs the streaming layout: leave non_streaming_mode"),
    (("socket",), "chunk_frames", [0], "chunk_frames"),
    (("socket",), "chunk_frames", [1, 10**400], "chunk_frames"),
    (("stream",), "task_type", "Base", "is a CustomVoice checkpoint, got task_type 'Base': set task_type to"),
    (("stream",), "task_type", "VoiceDesign", "is a CustomVoice checkpoint"),
    (("stream",), "response_format", "wav", "stream_audio needs response_format 'pcm', got 'wav'"),
    (("stream",), "response_format", "vorbis", "response_format must be one of mp3, .*got 'vorbis'"),
    (("stream",), "stream_audio", 1, "stream_audio must be true or false, got 1"),
    (("stream",), "sample_rate", 11025, "sample_rate must be one of 8000, "),
    (("stream",), "timestamp_type", "phoneme", "must be word, got"),
    (("stream",), "timestamp_transport_strategy", "late", "must be sync or async"),
    (("stream",), "word_timestamps", 1, "must be true or false"),
    (("stream",), "split_granularity", "word", "must be none or sentence or clause"),
    (WEB, "x_vector_only_mode", 1, "must be true or false"),
    (WEB, "speaker_embedding", ["x"], "must be 1 to 8192 numbers"),
    (("stream",), "stream_format", "sse", "unknown field"),
    (("stream",), "max_new_tokens", 0, "at least 1"),
    (("stream",), "initial_codec_chunk_frames", 1001, "0 to 1000"),
]
"""Where, a setting, its value, and words of the refusal: a regular expression."""


@pytest.mark.parametrize(
    "where, setting, value, words",
    [(name, *row) for names, *row in REFUSED for name in names],
    ids=lambda part: str(part)[:25].encode("ascii", "replace").decode(),
)
def test_what_cannot_be_said_is_refused_with_field_and_remedy(server, where, setting, value, words):
    entrance = ENTRANCES[where]
    settings = {setting: value} | ({"non_streaming_mode": True} if setting == "end" else {})
    heard = entrance.say(server, **settings)
    assert heard.error and not heard.pcm, "it was spoken"
    assert re.search(words, heard.error["message"]), heard.error
    assert heard.error["retryable"] is False and heard.error["code"] in ("invalid", "model_not_found")
    field = entrance.text if setting == "text" else setting
    assert heard.error.get("field") in (field, "non_streaming_mode", "text", None), "a field that the request has"
    server.at_rest()


@at_every_entrance
def test_a_full_server_is_busy_and_may_be_asked_again(server, entrance):
    with places_taken(server.service.engine, 8):
        error = entrance.say(server).error
        assert error["code"] == "busy" and error["retryable"] is True
    server.at_rest()
    assert entrance.say(server, "Hi.").pcm


@at_every_entrance
def test_where_there_is_no_engine_yet_it_is_told_to_try_again(entrance):
    def never() -> TTSEngine:
        raise BackendError("not today")

    with running(never) as server:
        until(lambda: server.service.state == "failed")
        error = entrance.say(server).error
        assert error["code"] == "closing" and error["retryable"] is True
        if entrance.client:
            with connect(entrance.url(server)) as line, pytest.raises(ConnectionClosed):
                entrance.client(line).drain()
            assert line.close_code == 1013


def test_a_dead_engine_is_told():
    with running(lambda: probed("demo", max_streams=1)) as server:
        until(lambda: server.service.state == "ready")
        kill(server.service.engine)
        for entrance in ENTRANCES.values():
            error = entrance.say(server).error
            assert error["code"] in ("dead", "closing") and error["retryable"] is True
        until(lambda: get(f"{server.url}/health").status_code == 503)
        assert get(f"{server.url}/health").json()["status"] == "dead" and server.service.gone.is_set()


# ---------------------------------------------------------------- who may not


def test_without_the_token_nobody_is_let_in():
    with running(small_demo, token="secret") as server:
        for entrance in ENTRANCES.values():
            for given in ({}, *({"authorization": f"{words}"} for words in ("Bearer wrong", "Basic secret", "secret"))):
                assert entrance.status(server, given) == 401
        until(lambda: server.service.state == "ready")
        for entrance in ENTRANCES.values():
            for scheme in ("Bearer", "Api-Key"):
                assert entrance.status(server, {"authorization": f"{scheme} secret"}) in (101, 200)


@at_every_entrance
def test_pages_of_others_are_not_let_in(server, entrance):
    assert entrance.status(server, {"origin": "https://evil.example"}) == 403


@at_both_sockets
def test_sockets_are_counted(entrance):
    with running(small_demo, limits=dataclasses.replace(LIMITS, connections=2)) as server:
        until(lambda: server.service.state == "ready")
        with connect(entrance.url(server)), connect(entrance.url(server)):
            assert entrance.status(server, {}) == 503
        until(lambda: entrance.status(server, {}) == 101)


# ---------------------------------------------------------------- who goes away, who stalls


@pytest.mark.parametrize("where, end", [*((name, True) for name in ALL), *((name, False) for name in WEB)])
def test_who_hangs_up_frees_the_slot(server, where, end):
    before = server.service.engine.metrics()["cancelled"]
    with ENTRANCES[where].opened(server, " ".join([TEXT] * 8), end) as line:
        line.shutdown(socket.SHUT_RDWR)
    server.at_rest()
    assert server.service.engine.metrics()["cancelled"] == before + 1


@at_every_entrance
def test_who_does_not_read_is_let_go(entrance):
    """A connection that takes a few chunks and then no more."""
    taken, messages = [], [*entrance.messages(" ".join([TEXT] * 4))]

    async def stall(message) -> None:
        taken.append(message)
        if len(taken) > 4 and message["type"] in ("websocket.send", "http.response.body"):
            await asyncio.Event().wait()

    async def receive():
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    asgi(small_demo, entrance.path, receive, stall, limits=dataclasses.replace(LIMITS, idle_s=0.5))
    assert len(taken) > 4
    if not entrance.client:
        assert [len(message["body"]) for message in taken[1:3]] == [2 * 1920, 2 * 2 * 1920], "chunk by chunk"
        assert len(taken) == 5 and taken[-1]["more_body"], "uvicorn closes the connection of an answer without an end"


@at_both_sockets
def test_a_text_that_does_not_go_on_is_ended_and_who_says_nothing_is_let_go(entrance):
    with running(small_demo, limits=dataclasses.replace(LIMITS, text_s=0.3, idle_s=1.0)) as server:
        until(lambda: server.service.state == "ready")
        with connect(entrance.url(server)) as line:
            client = entrance.client(line)
            for message in entrance.messages("Hello there, ", end=False)[1:]:
                line.send(message["text"])
            with pytest.raises(ConnectionClosed):
                client.drain()
        text, idle = (told for told in client.told if told["type"] == "error")
        assert "no more text came" in text["message"] and idle["code"] == "idle" and line.close_code == 1001
        server.at_rest()
