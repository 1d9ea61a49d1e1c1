"""The HTTP API: what clients of OpenAI's shape get, and what nobody gets out of it. See also test_entrances.py."""

import asyncio
import base64
import contextlib
import http.client
import io
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import av
import httpx
import numpy as np
import openai
import pytest
import schemathesis
import soundfile
import torch
from hypothesis import HealthCheck, given, settings
from serving import (
    PATIENCE_S,
    TEXT,
    access,
    audio_of,
    cloning,
    connect,
    endless,
    get,
    post,
    ready,
    recording,
    request,
    running,
    said,
    slots_taken,
    small_demo,
    stream,
    until,
)
from waiting import free_port
from websockets.exceptions import InvalidStatus

from qwen_megakernel import (
    BackendError,
    EngineClosed,
    EngineDied,
    SamplingParams,
    TTSEngine,
    Voice,
    VoiceError,
    __version__,
)
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.choices import SOCKET_PATH
from qwen_megakernel.errors import KernelFault, OutOfMemoryError, SpeechCutError, SpeechError
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.server.api_error import ApiError, listed
from qwen_megakernel.server.app import app_of, make_app
from qwen_megakernel.server.connections import HttpConnection
from qwen_megakernel.server.limits import Limits, OpenCount
from qwen_megakernel.server.logs import FewLines
from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.openai.bodies import BATCH, SPEECH
from qwen_megakernel.server.options import ServerOptions
from qwen_megakernel.server.service import OPENAI_MODELS, EngineService

OPTIONS = {"device": "cpu", "max_streams": 4, "max_positions": 160, "max_queue": 4, "queue_timeout": PATIENCE_S}


@pytest.fixture(scope="module")
def server():
    with ready(small_demo, limits=Limits(max_text=600, max_body=8192)) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openais_client_gets_what_the_engine_says(server, client):
    pcm = client.audio.speech.create(
        model="demo", voice="ada", input=TEXT, response_format="pcm", extra_body={"seed": 5, "language": "en-US"}
    )
    assert pcm.response.headers["content-type"] == "audio/pcm" and pcm.response.headers["x-seed"] == "5"
    assert pcm.content == said(server, language="english")


@pytest.mark.parametrize("name", ["mp3", "flac", "opus", "aac", "wav"])
def test_every_format_holds_the_same_speech(server, client, name):
    options = {} if name == "mp3" else {"response_format": name}  # OpenAI's default
    made = client.audio.speech.create(model="demo", voice="max", input=TEXT, extra_body={"seed": 5}, **options)
    truth = audio_of(server, speaker="max").samples
    if name == "aac":  # libsndfile does not read it
        with av.open(io.BytesIO(made.content)) as file:
            samples = np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)])
            rate = file.streams.audio[0].rate
    else:
        samples, rate = soundfile.read(io.BytesIO(made.content), dtype="float32")
    assert rate == 24000 and abs(len(samples) - len(truth)) <= 2400
    if name in ("wav", "flac"):
        assert np.array_equal(np.rint(samples * 32767), np.rint(truth * 32767)) or np.abs(samples - truth).max() < 1e-4


def test_a_fresh_seed_is_told_and_repeats(server):
    first = server.post(response_format="pcm")
    again = server.post(response_format="pcm", seed=int(first.headers["x-seed"]))
    assert first.content == again.content and len(first.content)


@pytest.fixture(scope="module")
def short(tiny):
    with endless(tiny) as server:
        yield server


@pytest.mark.parametrize("response_format", ["pcm", "mp3", "opus", "aac"])
def test_speech_that_its_slot_cuts_ends_the_connection_early(short, caplog, response_format):
    caplog.set_level("INFO")
    body, heard = {"model": "demo", "input": "Hello.", "response_format": response_format}, b""
    with stream("POST", short.url + SPEECH, json=body) as response:
        assert response.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            for data in response.iter_raw():
                heard += data
    assert len(heard) > (10 * 1920 * 2 if response_format == "pcm" else 1000)
    short.at_rest()
    told = access(caplog, 1)[0]
    assert told["status"] == 200 and told["code"] == "failed" and "speech was cut after" in told["error"]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("variant, size", [("custom_voice", "tiny-adapter"), ("voice_design", "tiny")])
def test_instructions_change_the_speech_where_the_model_takes_them(tiny, variant, size):
    folder = tiny(variant, size=size, eos_gain=4.0)
    with ready(lambda: TTSEngine.load(folder, **OPTIONS)) as server:
        assert get(f"{server.url}/v1/voices").json()["instructions"] is True
        same = {"voice": "default", "response_format": "pcm", "seed": 5}
        made = server.post(**same, instructions="Slowly.")
        assert made.content == said(server, speaker=None, instruct="Slowly.")
        assert made.content != server.post(**same).content


BODIES = [
    (b"{", 400, "the body must be JSON: "),
    (b"notjson", 400, "the body must be JSON: "),
    (b"[" * 8000, 400, ""),
    (b" " * 8193, 413, ""),
    (iter([b" " * 4096] * 3), 413, ""),
    (b"", 400, "the body is missing: send a JSON object; its fields: model, input"),
    (b'{"model": "demo"}', 400, "input is missing: send a JSON object; its fields: model, input"),
    (b"[1]", 400, "the body must be a JSON object, got [1]"),
    (b'{"input": "\xe4"}', 400, "the body cannot be read as JSON: send UTF-8"),
    (b'{"seed": ' + b"9" * 5000 + b"}", 400, "without deep nesting or numbers of thousands of digits"),
]


@pytest.mark.parametrize(
    "path, body, words",
    [
        (SPEECH, {str(n): 0 for n in range(101)}, "a JSON object here has at most 100 fields, got 101"),
        (SPEECH, {"voice": [0] * 3000}, "voice must be a name"),
        (BATCH, {"model": "demo", "inputs": [0] * 1001}, "inputs has 1001 entries, at most 1000 are allowed"),
    ],
)
def test_many_mistakes_are_one_error(server, path, body, words):
    content = json.dumps(body).replace(" ", "")
    refused = post(server.url + path, content=content, headers={"content-type": "application/json"})
    assert refused.status_code == 400 and words in refused.json()["error"]["message"] and len(refused.content) < 500


def test_a_list_in_a_message_is_cut():
    assert listed(["a"]) == "a" and listed([str(n) for n in range(12)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


def test_a_flood_of_lines_is_counted_and_not_logged():
    few, lines = FewLines(3), []
    for second, count in ((1, 5), (2, 1), (3, 2)):
        for _ in range(count):
            record = logging.LogRecord("a", logging.WARNING, "", 0, "%s came", ("x",), None)
            record.created = second + 0.5
            if few.filter(record):
                lines.append(record.getMessage())
    assert lines == ["x came"] * 3 + ["x came (and 2 more lines)"] + ["x came"] * 2


@pytest.mark.parametrize("content, status, words", BODIES, ids=lambda value: str(value)[:20])
def test_a_body_that_is_no_request_is_told_what_to_be(server, content, status, words):
    refused = post(server.url + SPEECH, content=content, headers={"content-type": "application/json"})
    error = refused.json()["error"]
    assert refused.status_code == status and words in error["message"] and error["type"] == "invalid_request_error"
    assert error["param"] == ("input" if words.startswith("input") else None)


def test_json_is_taken_as_such_and_without_a_content_type_and_another_one_is_told_so(server):
    """`curl -d` sends application/x-www-form-urlencoded."""
    content = json.dumps({"model": "demo", "input": "Hi.", "voice": "ada", "response_format": "pcm", "seed": 5})
    for kind in (None, "", "application/json; charset=utf-8", "application/vnd.a+json"):
        headers = {} if kind is None else {"content-type": kind}
        assert post(server.url + SPEECH, content=content, headers=headers).content == said(server, "Hi.")
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data", "json"):
        refused = post(server.url + SPEECH, content=content, headers={"content-type": kind})
        words = f"send JSON with the header Content-Type: application/json, got Content-Type {kind!r}"
        assert refused.status_code == 415 and refused.json()["error"]["message"] == words


def test_nothing_is_there_but_what_is_told(server):
    def asked(method: str, path: str, status: int) -> str:
        answer = request(method, server.url + path)
        assert answer.status_code == status
        return answer.json()["error"]["message"]

    for path in ("/audio/speech", f"{SPEECH}/socket", "/"):  # a base URL without /v1; no WebSocket; no page
        told = asked("POST", path, 404)
        ways = f"speech is POST {SPEECH}, or the WebSocket {SPEECH}/socket; GET /openapi.json lists the rest"
        assert told == f"there is no POST {path!r}: {ways}"
    assert asked("GET", SPEECH, 405) == f"there is no GET {SPEECH!r}: use POST"
    assert "start it with --allow-upload" in asked("POST", "/v1/voices", 405)


def test_models_and_voices_are_listed(server, client):
    assert [model.id for model in client.models.list()] == ["demo", *OPENAI_MODELS]
    assert client.models.retrieve("tts-1").id == "tts-1"
    with pytest.raises(openai.NotFoundError, match="known: demo, tts-1"):
        client.models.retrieve("whisper-1")
    listed = get(f"{server.url}/v1/voices").json()
    assert [voice["id"] for voice in listed["data"]] == list(server.service.engine.speakers)
    assert listed["languages"] == list(server.service.engine.languages) and listed["instructions"] is False


def test_metrics_count(server):
    before = get(f"{server.url}/metrics").text
    server.post(response_format="pcm")
    after = get(f"{server.url}/metrics").text
    total = lambda text, name: sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))  # noqa: E731
    for name in ("qwen_megakernel_utterances_total", "qwen_megakernel_first_audio_seconds_count"):
        assert total(after, name) == total(before, name) + 1
    assert total(after, "qwen_megakernel_ready") == 1 and TEXT not in after


# ---------------------------------------------------------------- who may not, who goes away, who stalls


def test_without_a_token_pages_of_others_are_not_served_and_broken_headers_are_no_errors_of_ours(server):
    for headers, remedy in (
        ({"host": "evil.example"}, ": start the server with a token"),
        ({"origin": "https://evil.example"}, "start the server with --allow-origin ORIGIN"),
        ({"x-forwarded-for": "evil.example"}, ": start the server with a token"),
    ):
        refused = get(f"{server.url}/v1/models", headers=headers)
        told = refused.json()["error"]["message"]
        assert refused.status_code == 403 and ("evil.example" in told or "x-forwarded-for" in told)
        assert told.endswith(remedy)
    for headers in ({"origin": "http://["}, {"host": "["}):
        assert get(f"{server.url}/metrics", headers=headers).status_code == 403
    accept = {"accept": "application/openmetrics-text;version=x"}
    assert get(f"{server.url}/metrics", headers=accept).status_code == 200


@pytest.mark.parametrize(
    "header", ["forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"]
)
def test_without_a_token_no_proxy_is_answered(server, header):
    refused = get(f"{server.url}/v1/models", headers={header: "x"})
    assert refused.status_code == 403 and f"got the header {header}:" in refused.json()["error"]["message"]


def test_paths_and_sockets_that_are_not_there_get_no_metrics_of_their_own(server):
    for path in ("/nowhere", f"{SPEECH}/nowhere"):
        assert get(server.url + path).status_code == 404
    with pytest.raises(InvalidStatus):
        connect(f"ws://127.0.0.1:{server.port}/nowhere")
    metrics = lambda: get(f"{server.url}/metrics").text  # noqa: E731
    until(lambda: 'protocol="websocket"' in metrics())
    assert 'path="other"' in metrics() and "nowhere" not in metrics()


def test_no_more_sockets_are_opened_than_there_may_be_connections():
    """They are counted in all processes of a server."""
    service = EngineService(lambda: None, ServerOptions(limits=Limits(connections=3)), model="demo")
    sockets, sent = OpenCount([2, 1]), []
    app = app_of(service, Metrics(service, sockets, OpenCount()), OpenCount(), sockets)
    scope = {"type": "websocket", "path": SOCKET_PATH, "headers": [(b"host", b"localhost")]}
    scope["extensions"] = {"websocket.http.response": {}}

    async def send(message) -> None:
        sent.append(message)

    asyncio.run(app(scope, None, send))
    assert sent[0]["status"] == 503 and b'"busy"' in sent[1]["body"]


@pytest.mark.parametrize(
    "error, status, retryable",
    [
        (KernelFault("x"), 503, True),
        (OutOfMemoryError("x"), 503, True),
        (SpeechCutError("x"), 500, True),
        (SpeechError("x"), 500, False),
    ],
)
def test_what_another_server_might_do_is_told_as_such(error, status, retryable):
    told = ApiError.of(error)
    assert (told.status, told.code, told.retryable) == (status, "failed", retryable)


def test_with_a_token_nothing_is_told_without_it():
    with ready(small_demo, token="secret") as server:
        for path in ("/", "/v1/models", "/v1/voices", "/metrics", "/openapi.json", "/docs", "/nothing"):
            for headers in ({}, {"authorization": "Bearer wrong"}):
                refused = get(server.url + path, headers=headers)
                assert refused.status_code == 401 and "secret" not in refused.text
                assert refused.headers["www-authenticate"] == "Bearer"
                words = "that is not this server's token" if headers else "this server has a token"
                told = refused.json()["error"]["message"]
                assert told == f"{words}: send the header Authorization: Bearer TOKEN"
        flood = [post(server.url + SPEECH, content=b"x" * 5000).status_code for _ in range(20)]
        assert set(flood) == {401} and server.service.engine.metrics()["utterances"] == 0
        assert get(f"{server.url}/health").status_code == get(f"{server.url}/ready").status_code == 200
        bearing = {"authorization": "Bearer secret", "host": "bots.example"}
        assert get(f"{server.url}/v1/models", headers=bearing).status_code == 200
        assert get(f"{server.url}/docs", headers=bearing).status_code == 404, "a browser could not send the token"


def request_bytes(text: str, response_format: str = "pcm") -> bytes:
    body = json.dumps({"model": "demo", "input": text, "response_format": response_format}).encode()
    head = f"POST {SPEECH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@pytest.mark.slow
def test_500_connects_and_aborts_leave_nothing(server):
    for i in range(500):
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.sendall(request_bytes(TEXT)[: i % 200])
    until(lambda: server.post(response_format="pcm").status_code == 200)  # some had asked for speech
    server.at_rest()


def test_a_body_that_never_comes_is_not_waited_for():
    with running(small_demo, limits=Limits(idle_s=0.5)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as line:
            line.sendall(request_bytes(TEXT)[:-5])
            assert b" 408 " in line.recv(4096).split(b"\r\n")[0]


def test_a_connection_that_says_nothing_or_half_a_head_is_closed(caplog):
    with caplog.at_level(logging.INFO), running(small_demo, limits=Limits(header_s=2.0)) as server:
        until(lambda: server.service.state == "ready")
        used = http.client.HTTPConnection("127.0.0.1", server.port)
        used.auto_open = 0  # once it is closed, it stays so
        used.connect()

        def ready() -> bool:
            used.request("GET", "/ready")
            with used.getresponse() as response:
                response.read()
                return response.status == 200

        assert ready()
        lines = [socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) for _ in range(20)]
        for line in lines[::2]:
            line.sendall(b"POST /v1/audio/speech HTTP/1.1\r\nHost: local")
        assert [line.recv(100).partition(b"\r")[0] for line in lines] == [b"HTTP/1.1 408 Request Timeout", b""] * 10
        for line in lines:
            line.close()
        late = [each.fields for each in caplog.records if each.name == "qwen_megakernel.access"]
        assert [(told["status"], told["code"]) for told in late] == [(408, "idle")] * 10
        assert ready(), "a connection that was used is not closed after the same time"
        used.close()


def answer_of(line: socket.socket) -> bytes:
    """The next answer, which is JSON. Its body may come by itself."""
    answer = b""
    while not answer.endswith(b"}"):
        assert (more := line.recv(4096))
        answer += more
    return answer


def test_half_a_head_behind_a_request_is_not_waited_for():
    with ready(small_demo, limits=Limits(header_s=0.5)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as line:
            for head, status in ((b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 200), (b"GET /hea", 408)):
                line.sendall(head)
                assert answer_of(line).startswith(b"HTTP/1.1 %d" % status)


def test_a_head_that_came_while_the_event_loop_stood_still_is_read(server, monkeypatch):
    """It came in time. uvloop looks at its timers before it reads."""
    read = HttpConnection.data_received

    def stand_still(connection, data):
        if data == b"G":
            waiting = list(connection.resting)[-2]
            waiting._stop_timer()
            waiting.limits = Limits(header_s=0.05)
            waiting._start_timer()
            line.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            time.sleep(0.1)
        read(connection, data)

    monkeypatch.setattr(HttpConnection, "data_received", stand_still)
    connect = lambda: socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)  # noqa: E731
    with connect() as line, connect() as other:
        other.sendall(b"G")
        assert line.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("kept", [False, True])
def test_a_request_that_came_while_the_event_loop_stood_still_is_answered(kept, monkeypatch):
    """Its body, or all of it on a kept connection."""
    read, body = HttpConnection.data_received, json.dumps({"model": "demo", "voice": "ada", "input": TEXT}).encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % SPEECH.encode()
    head += b"Content-Length: %d\r\n\r\n" % len(body)

    def stand_still():
        line.sendall(head + body if kept else body)
        time.sleep(3.5)

    def and_stand_still(connection, data):
        if data == b"G":
            stand_still()
        read(connection, data)
        if data == head:
            connection.loop.call_later(0.2, stand_still)  # its body is waited for by then

    monkeypatch.setattr(HttpConnection, "data_received", and_stand_still)
    with ready(small_demo, limits=Limits(idle_s=3)) as server:
        connect = partial(socket.create_connection, ("127.0.0.1", server.port), timeout=PATIENCE_S)
        with connect() as line, connect() as other:
            line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" if kept else head)
            if kept:
                assert answer_of(line).startswith(b"HTTP/1.1 200")
                other.sendall(b"G")
            assert line.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_body_that_comes_in_pieces_does_not_count_as_a_head():
    text = TEXT + 500 * " "
    with ready(small_demo, limits=Limits(max_head=300)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = request_bytes(text)
            for at in range(0, len(asked), 99):
                line.sendall(asked[at : at + 99])
                time.sleep(0.01)
            assert line.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path, body", [(SPEECH, b"2001\r\n" + 8193 * b" "), ("/health", b"")])
def test_a_body_that_is_too_long_is_refused_before_its_end(server, path, body):
    """The server takes 8192 bytes of speech, and none for its health."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as line:
        line.sendall(head.encode() + body)
        assert line.recv(4096).startswith(b"HTTP/1.1 413")


def test_heads_of_one_connection_do_not_add_up():
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-More: %s\r\n\r\n" % (200 * b"x")
    with ready(small_demo, limits=Limits(max_head=300)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as line:
            for _ in range(3):
                line.sendall(health)
                assert answer_of(line).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("behind", [1, 2])
def test_no_more_requests_wait_behind_one_than_may(behind):
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with ready(small_demo, limits=Limits(pipelined=1)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as line:
            with slots_taken(server.service.engine):
                line.sendall(request_bytes(TEXT))
                until(lambda: server.service.sessions)
                line.sendall(health * behind)
                if behind == 2:
                    with contextlib.suppress(ConnectionResetError):
                        assert line.recv(4096) == b"", "the connection ends"
                    return
            answer = b""
            while answer.count(b"HTTP/1.1 200") < 2:
                answer += line.recv(4096)


def test_who_hangs_up_in_the_queue_leaves_it(server):
    with slots_taken(server.service.engine):
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.sendall(request_bytes(TEXT))
            until(lambda: len(server.service.sessions) == 1)
        until(lambda: not server.service.sessions)
    server.at_rest()


@pytest.mark.parametrize("token", ["", "two words\n", "g\u00e4ste", " x"])
def test_a_token_that_no_client_can_send_is_refused(token):
    with pytest.raises(BackendError, match="token"):
        make_app(small_demo, ServerOptions(token=token), model="demo")


# ---------------------------------------------------------------- life


@pytest.mark.parametrize("log_texts", [False, True])
def test_texts_are_logged_only_where_that_was_asked_for(caplog, log_texts):
    with caplog.at_level("DEBUG"), ready(small_demo, log_texts=log_texts) as server:
        assert server.post(input="A secret.", response_format="pcm").status_code == 200
        server.post(input="A secret.", voice="nobody")
    assert ("A secret." in caplog.text) == log_texts


def test_before_it_is_ready_it_says_so(monkeypatch):
    go, warmed = threading.Event(), []

    def late() -> TTSEngine:
        assert go.wait(PATIENCE_S)
        engine = small_demo()
        engine.reset_metrics()
        reset = engine.reset_metrics
        monkeypatch.setattr(engine, "reset_metrics", lambda: warmed.append(engine.metrics()["utterances"]) or reset())
        return engine

    with running(late) as server:
        assert get(f"{server.url}/health").json() == {"status": "loading", "version": __version__}
        assert get(f"{server.url}/ready").status_code == 503
        refused = server.post()
        assert refused.status_code == 503 and refused.json()["error"]["retryable"] is True
        go.set()
        until(lambda: get(f"{server.url}/ready").status_code == 200)
        assert warmed == [1] and not any(server.service.engine.metrics().values()), "the warm-up is not counted"
        assert "qwen_megakernel_utterances_total{" not in get(f"{server.url}/metrics").text


@pytest.mark.parametrize("error, traceback", [(BackendError("no room here"), False), (ValueError("a bug"), True)])
def test_why_it_could_not_be_loaded_is_logged_with_a_traceback_only_of_a_bug(caplog, error, traceback):
    def fails() -> TTSEngine:
        raise error

    with running(fails) as server:
        until(lambda: server.service.state == "failed")
        assert get(f"{server.url}/health").json() == {"status": "failed", "error": str(error), "version": __version__}
    assert caplog.text.count(f"the engine is failed: {error}") == 1 and ("Traceback" in caplog.text) == traceback


def test_the_code_of_an_engine_that_ended_follows_its_type_and_not_its_words():
    assert [ApiError.of(kind("it died; it is dead")).code for kind in (EngineDied, EngineClosed)] == ["dead", "closing"]


SERVER = """
import sys
sys.path.insert(0, sys.argv[3])
from probes import kill, probed
from qwen_megakernel.server import app as serve
from qwen_megakernel.server.app import make_app
from qwen_megakernel.server.openai.bodies import SPEECH
from qwen_megakernel.server.limits import Limits
from qwen_megakernel.server.options import ServerOptions
from qwen_megakernel.server.process import bind

def load():
    engine = probed("demo", max_streams=2, max_positions=512)
    if sys.argv[2] == "dies":
        begin = engine.begin
        def broken(text, *args, **kwargs):
            if str(text) == "die":
                kill(engine)
            return begin(text, *args, **kwargs)
        engine.begin = broken
    return engine

listener = bind("127.0.0.1", int(sys.argv[1]))
sys.exit(serve.serve(serve.make_app(load, ServerOptions(drain_seconds=600), model="demo"), listener))
"""


@pytest.fixture
def process():
    started = []

    def start(how: str) -> tuple[subprocess.Popen, str]:
        port = free_port()
        command = [sys.executable, "-W", "ignore", "-c", SERVER, str(port), how, str(Path(__file__).parent)]
        started.append(subprocess.Popen(command))
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            try:
                return get(f"{url}/ready").status_code == 200
            except httpx.TransportError:
                return False

        until(ready)
        return started[-1], url

    yield start
    for each in started:
        each.kill()
        each.wait()


@pytest.mark.slow
def test_a_process_whose_engine_died_ends_for_its_supervisor(process):
    server, url = process("dies")
    post(url + SPEECH, json={"model": "demo", "input": "die"})
    assert server.wait(timeout=PATIENCE_S) == 70


@pytest.mark.slow
def test_sigterm_lets_what_is_being_said_be_said(process):
    server, url = process("lives")
    text, seed = " ".join([TEXT] * 3), 3
    body = {"model": "demo", "input": text, "voice": "ada", "response_format": "pcm", "seed": seed}
    with stream("POST", url + SPEECH, json=body) as response:
        chunks = response.iter_raw()
        pcm = next(chunks)
        server.send_signal(signal.SIGTERM)
        pcm += b"".join(chunks)
    with TTSEngine.load("demo", device="cpu", max_streams=1, max_positions=512) as engine:
        whole = engine.generate(text, speaker="ada", sampling=SamplingParams(seed=seed)).samples
    heard = np.frombuffer(pcm, "<i2") / 32767
    assert len(heard) == len(whole) and np.abs(heard - whole).max() < 1e-4, "another process may add in another order"
    assert server.wait(timeout=PATIENCE_S) == -signal.SIGTERM


# ---------------------------------------------------------------- voices


def test_voices_of_a_base_checkpoint_are_served_by_another_where_that_is_allowed(tiny, tmp_path):
    """Beside its speakers, the first of whom is still the default."""
    folder = tiny("custom_voice", size="tiny-adapter", eos_gain=2.0)
    options = {"device": "cpu", "max_streams": 2, "max_positions": 512, "allow_foreign_voice": True}
    with TTSEngine.load(folder, **options) as engine:
        anna = Voice(torch.randn(engine.config.talker.stack.hidden_size), None, None, "of a Base checkpoint")
        anna.save(tmp_path / "anna.safetensors")
        said = {"sampling": SamplingParams(seed=5), "instruct": "Slowly."}
        truth = {"anna": engine.generate(TEXT, voice=anna, **said).samples}
        truth["default"] = engine.generate(TEXT, **said).samples
    load = lambda: TTSEngine.load(folder, **options)  # noqa: E731
    with ready(load, voices=tmp_path, allow_foreign_voice=True) as server:
        assert server.service.voice_names()[-1] == "anna" and len(server.service.voice_names()) > 1
        for name, samples in truth.items():
            answer = server.post(voice=name, response_format="pcm", seed=5, instructions="Slowly.")
            assert answer.content == pcm16(samples), name


@pytest.mark.parametrize(
    "name, allowed, message", [("ryan", True, "has a speaker 'ryan' already"), ("anna", False, "")]
)
def test_foreign_voices_that_cannot_be_served_are_told_before_it_starts(tiny, tmp_path, name, allowed, message):
    config = Checkpoint.open(tiny("custom_voice", size="tiny-adapter", eos_gain=2.0)).config
    Voice.nobody(config.talker.stack.hidden_size, "of a Base checkpoint").save(tmp_path / f"{name}.safetensors")
    with pytest.raises(VoiceError, match=message or r"saved voices need a Base .*custom_voice.*--allow-foreign-voice"):
        make_app(lambda: None, ServerOptions(voices=tmp_path, allow_foreign_voice=allowed), model="x", config=config)


def test_an_upload_that_takes_too_long_leaves_no_voice(tiny, tmp_path, monkeypatch):
    """And its name can be had by the next one."""
    wait, made = threading.Event(), threading.Event()
    body = {"name": "ben", "audio": base64.b64encode(recording()).decode()}
    with cloning(tiny, voices=tmp_path, allow_upload=True, limits=Limits(total_s=1.0)) as server:
        voice = server.service.engine.placeholder_voice()

        def create(*_args) -> Voice:
            assert wait.wait(PATIENCE_S)
            made.set()
            return voice

        monkeypatch.setattr(server.service.engine, "create_voice", create)
        add = lambda: post(f"{server.url}/v1/voices", json=body).status_code  # noqa: E731
        assert add() == 408
        wait.set()
        until(made.is_set)
        assert not server.service.voice_names() and not list(tmp_path.iterdir())
        until(lambda: add() == 201)
        assert server.service.voice_names() == ["ben"]


def test_hosts_that_others_reach_need_a_token(capsys, monkeypatch):
    from qwen_megakernel import cli
    from qwen_megakernel.choices import TOKEN

    monkeypatch.delenv(TOKEN, raising=False)
    assert cli.main(["serve", "--host", "0.0.0.0"]) == 1
    assert f"set {TOKEN}" in capsys.readouterr().err


@pytest.mark.slow
def test_nothing_that_fits_or_breaks_the_description_is_an_error_of_ours(server):
    description = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in description.get_all_operations()]
    assert {operation.path for operation in operations} >= {SPEECH, "/v1/models", "/v1/voices", "/health", "/metrics"}
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    for operation in operations:
        for mode in modes if operation.path == SPEECH else modes[:1]:

            @settings(max_examples=25, suppress_health_check=list(HealthCheck))
            @given(operation.as_strategy(generation_mode=mode))
            def check(case) -> None:
                answer = case.call(timeout=PATIENCE_S)
                assert answer.status_code < 500, answer.text
                if answer.status_code >= 400:
                    error = answer.json()["error"]
                    assert error["message"] and error["code"] and "site-packages" not in answer.text

            check()
