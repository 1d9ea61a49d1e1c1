"""The HTTP API: what clients of OpenAI's shape get, and what nobody gets out of it."""

import asyncio
import base64
import http.client
import io
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
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
from probes import kill, probed
from serving import (
    PATIENCE_S,
    Running,
    asgi,
    get,
    hold_second_piece,
    places_taken,
    ready,
    running,
    slots_taken,
    stream,
    until,
)
from serving import post as http_post

from qwen_megakernel import BackendError, EngineClosed, EngineDied, SamplingParams, TTSEngine, Voice, VoiceError
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.checkpoint.synthetic import NO_EOS
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.app import make_app
from qwen_megakernel.server.limits import Limits
from qwen_megakernel.server.service import OPENAI_MODELS

TEXT = "Hello there, how are you today?"
SPEECH = "/v1/audio/speech"
OPTIONS = {"device": "cpu", "max_streams": 4, "max_positions": 160, "max_queue": 4, "queue_timeout": PATIENCE_S}


def demo() -> TTSEngine:
    return TTSEngine.load("demo", **OPTIONS)


@pytest.fixture(scope="module")
def server():
    with ready(demo, limits=Limits(max_text=600, max_body=8192)) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(server: Running, **body) -> httpx.Response:
    body = {"model": "demo", "input": TEXT, "voice": "ada"} | body
    return http_post(server.url + SPEECH, json=body)


def said(server: Running, text: str = TEXT, seed: int = 5, **options) -> np.ndarray:
    sampling = SamplingParams(seed=seed)
    return server.service.engine.generate(text, sampling=sampling, **({"speaker": "ada"} | options)).samples


def test_openais_client_gets_what_the_engine_says(server, client):
    pcm = client.audio.speech.create(
        model="demo", voice="ada", input=TEXT, response_format="pcm", extra_body={"seed": 5, "language": "en-US"}
    )
    assert pcm.response.headers["content-type"] == "audio/pcm" and pcm.response.headers["x-seed"] == "5"
    assert pcm.content == pcm16(said(server, language="english"))


@pytest.mark.parametrize("name", ["mp3", "flac", "opus", "aac", "wav"])
def test_every_format_holds_the_same_speech(server, client, name):
    options = {} if name == "mp3" else {"response_format": name}  # OpenAI's default
    made = client.audio.speech.create(model="demo", voice="max", input=TEXT, extra_body={"seed": 5}, **options)
    truth = said(server, speaker="max")
    if name == "aac":  # libsndfile does not read it
        with av.open(io.BytesIO(made.content)) as file:
            samples = np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)])
            rate = file.streams.audio[0].rate
    else:
        samples, rate = soundfile.read(io.BytesIO(made.content), dtype="float32")
    assert rate == 24000 and abs(len(samples) - len(truth)) <= 2400
    if name in ("wav", "flac"):
        assert np.array_equal(np.rint(samples * 32767), np.rint(truth * 32767)) or np.abs(samples - truth).max() < 1e-4


def test_pcm_comes_while_it_is_made(server, monkeypatch):
    """The second piece of the text is not begun before the first was heard."""
    text, (pieces, heard) = " ".join([TEXT] * 8), hold_second_piece(monkeypatch, server.service.engine)
    with stream("POST", server.url + SPEECH, json={"model": "demo", "input": text, "response_format": "pcm"}) as r:
        chunks = r.iter_raw()
        first = next(chunks)
        heard.set()
        whole = first + b"".join(chunks)
    assert first and len(pieces) > 1 and len(whole) > 3 * 48000


def test_a_fresh_seed_is_told_and_repeats(server):
    first = post(server, response_format="pcm")
    again = post(server, response_format="pcm", seed=int(first.headers["x-seed"]))
    assert first.content == again.content and len(first.content)


def test_long_text_is_said_sentence_by_sentence(server):
    text = " ".join([TEXT] * 4)
    made = post(server, input=text, response_format="pcm", seed=1)
    pieces = server.service.engine.pieces(text)
    assert len(pieces) > 1
    assert made.content == b"".join(pcm16(said(server, piece, seed=1)) for piece in pieces)


@pytest.mark.parametrize(
    "text",
    [
        "Привет, как дела? Сегодня хорошая погода, и мы идём гулять в парк. " * 4,
        "今天天气很好，我们去公园散步吧。" * 12,
        "Hello there, how are you? " * 4 + "x" * 400,
    ],
    ids=["russian", "chinese", "a word of 400"],
)
def test_few_characters_that_are_many_tokens_are_said_whole(tiny, text):
    folder = tiny("custom_voice", eos_gain=4.0)
    with running(lambda: TTSEngine.load(folder, **OPTIONS), model="tiny") as server:
        until(lambda: server.service.state == "ready")
        made = post(server, model="tiny", input=text, voice="default", response_format="pcm", seed=1)
        engine = server.service.engine
        pieces = [engine.generate(piece, sampling=SamplingParams(seed=1)) for piece in engine.pieces(text)]
    assert made.status_code == 200 and made.content == b"".join(pcm16(piece.samples) for piece in pieces)


@pytest.fixture
def endless(tiny):
    """Its speech fills every slot."""
    folder = tiny("custom_voice", eos_gain=NO_EOS)
    load = lambda: TTSEngine.load(folder, device="cpu", max_streams=1, max_positions=48)  # noqa: E731
    with running(load, model="tiny") as server:
        until(lambda: server.service.state == "ready")
        yield server


@pytest.mark.parametrize("response_format", ["pcm", "mp3", "opus", "aac"])
def test_speech_that_its_slot_cuts_ends_the_connection_early(endless, caplog, response_format):
    body, heard = {"model": "tiny", "input": "Hello.", "response_format": response_format}, b""
    with stream("POST", endless.url + SPEECH, json=body) as response:
        assert response.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            for data in response.iter_raw():
                heard += data
    assert len(heard) > (10 * 1920 * 2 if response_format == "pcm" else 1000)
    endless.at_rest()
    assert "an answer ends early: speech was cut after" in caplog.text and "Traceback" not in caplog.text


def test_speech_that_its_slot_cuts_is_no_whole_file(endless):
    refused = post(endless, model="tiny", input="Hello.", voice="default", response_format="flac")
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "input" and "speech was cut after" in error["message"]


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_curl(server):
    body = json.dumps({"model": "demo", "input": TEXT, "voice": "ada", "response_format": "wav", "seed": 5})
    command = ["curl", "-s", "-H", "Content-Type: application/json", "-d", body, server.url + SPEECH]
    wav = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=True).stdout
    assert wav[:4] == b"RIFF" and wav[44:] == pcm16(said(server))


REFUSED = [
    ({"input": ""}, 400, "input"),
    ({"input": " \n"}, 400, "blank"),
    ({"input": "x" * 601}, 400, "601 characters"),
    ({"input": "\ud800"}, 400, ""),
    ({"input": 3}, 400, "input"),
    ({"model": "tts-2"}, 404, "this server's model is 'demo', got 'tts-2'; known: demo, tts-1, tts-1-hd, gpt-4o-mini-"),
    ({"voice": "alloy"}, 400, "known: ada"),
    ({"voice": "../ada"}, 400, "unknown voice"),
    ({"voice": {"id": "alloy"}}, 400, "unknown voice 'alloy'; known: ada"),
    ({"voice": {"id": 3}}, 400, 'voice must be a name, or an object such as {"id": "ada"}, got {\'id\': 3}'),
    ({"voice": "x" * 65}, 400, "voice must have at most 64 characters"),
    ({"speed": 4.5}, 400, "speed must be a number from 0.25 to 4.0, got 4.5"),
    ({"speed": 10**400}, 400, "speed must be a number from 0.25 to 4.0, got 1000"),
    ({"speed": float("nan")}, 400, "speed must be a number from 0.25 to 4.0, got nan"),
    ({"speed": True}, 400, "speed must be a number from 0.25 to 4.0, got True"),
    ({"speed": "fast"}, 400, "speed must be a number from 0.25 to 4.0, got 'fast'"),
    ({"response_format": "vorbis"}, 400, "'mp3', 'opus', 'aac', 'flac', 'wav' or 'pcm', got 'vorbis'"),
    ({"non_streaming_mode": 1}, 400, "non_streaming_mode must be true or false, got 1"),
    ({"language": "klingon"}, 400, "unknown language 'klingon'; known: auto, english (en)"),
    ({"seed": -1}, 400, "seed"),
    ({"seed": True}, 400, "seed"),
    ({"seed": 2**63}, 400, "seed"),
    ({"stream_format": "events"}, 400, "stream_format must be 'audio' or 'sse', got 'events'"),
    ({"ref_audio": "/etc/passwd"}, 400, "unknown field 'ref_audio'; known: model, input, response_format, "),
    ({"\ud800": 1}, 400, "a field's name must be valid Unicode"),
    ({"temperature": 0.5}, 400, "unknown field 'temperature'; known: model"),
]


@pytest.mark.parametrize("wrong, status, words", REFUSED, ids=[str(wrong)[:40] for wrong, _, _ in REFUSED])
def test_what_cannot_be_said_is_refused_in_openais_shape(server, wrong, status, words):
    body = json.dumps({"model": "demo", "input": TEXT, "voice": "ada"} | wrong)
    refused = http_post(server.url + SPEECH, content=body, headers={"content-type": "application/json"})
    error = refused.json()["error"]
    assert refused.status_code == status and words in error["message"] and error["type"] == "invalid_request_error"
    assert error["retryable"] is False and "Traceback" not in refused.text
    assert error["param"] in (*wrong, None), "a field that the request has"


@pytest.mark.parametrize("variant, size", [("custom_voice", "tiny-adapter"), ("voice_design", "tiny")])
def test_instructions_change_the_speech_where_the_model_takes_them(tiny, variant, size):
    folder = tiny(variant, size=size, eos_gain=4.0)
    with running(lambda: TTSEngine.load(folder, **OPTIONS), model="tiny") as server:
        until(lambda: server.service.state == "ready")
        assert get(f"{server.url}/v1/voices").json()["instructions"] is True
        same = {"model": "tiny", "voice": "default", "response_format": "pcm", "seed": 5}
        made = post(server, **same, instructions="Slowly.")
        assert made.content == pcm16(said(server, speaker=None, instruct="Slowly."))
        assert made.content != post(server, **same).content


def test_a_body_that_is_no_json_or_too_long_is_refused(server):
    url, kind = server.url + SPEECH, {"content-type": "application/json"}
    for body in (b"{", b"notjson"):
        refused = http_post(url, content=body, headers=kind)
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] is None
        assert error["message"].startswith("the body must be JSON: ")
    assert http_post(url, content=b"[" * 8000, headers=kind).status_code == 400
    assert http_post(url, content=b" " * 8193, headers=kind).status_code == 413
    assert http_post(url, content=iter([b" " * 4096] * 3), headers=kind).status_code == 413


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "the body is missing: send a JSON object; its fields: model, input, response_format"),
        (b'{"model": "demo"}', "input is missing: send a JSON object; its fields: model, input, response_format"),
        (b"[1]", "the body must be a JSON object, got [1]"),
        (b'{"input": "\xe4"}', "the body cannot be read as JSON: send UTF-8"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "without deep nesting or numbers of thousands of digits"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_body_that_is_no_request_is_told_what_to_be(server, content, words):
    refused = http_post(server.url + SPEECH, content=content, headers={"content-type": "application/json"})
    assert refused.status_code == 400 and words in refused.json()["error"]["message"]


@pytest.mark.parametrize("kind", [None, "", "application/json; charset=utf-8", "application/vnd.a+json"])
def test_json_is_taken_as_such_and_without_a_content_type(server, kind):
    content = json.dumps({"model": "demo", "input": TEXT, "voice": "ada", "response_format": "pcm", "seed": 5})
    headers = {} if kind is None else {"content-type": kind}
    assert http_post(server.url + SPEECH, content=content, headers=headers).content == pcm16(said(server))


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data", "json"])
def test_another_content_type_is_told_the_right_one(server, kind):
    """The first is what curl -d sends."""
    content = json.dumps({"model": "demo", "input": TEXT})
    refused = http_post(server.url + SPEECH, content=content, headers={"content-type": kind})
    words = f"send JSON with the header Content-Type: application/json, got Content-Type {kind!r}"
    assert refused.status_code == 415 and refused.json()["error"]["message"] == words


def test_nothing_is_there_but_what_is_told(server):
    def asked(method: str, path: str, status: int) -> str:
        answer = httpx.request(method, server.url + path, timeout=PATIENCE_S)
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
    post(server, response_format="pcm")
    after = get(f"{server.url}/metrics").text
    count = lambda text, name: float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name)))  # noqa: E731
    for name in ("qwen_megakernel_utterances_total", "qwen_megakernel_ttfc_seconds_count"):
        assert count(after, name) == count(before, name) + 1
    assert count(after, "qwen_megakernel_ready") == 1 and TEXT not in after


# ---------------------------------------------------------------- who may not, who goes away, who stalls


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}])
def test_pages_of_others_are_not_served_without_a_token(server, headers):
    refused = get(f"{server.url}/v1/models", headers=headers)
    told = refused.json()["error"]["message"]
    assert refused.status_code == 403 and "evil.example" in told and told.endswith(": start the server with a token")


def test_with_a_token_nothing_is_told_without_it():
    with running(demo, token="secret") as server:
        until(lambda: server.service.state == "ready")
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            for path in ("/v1/models", "/v1/voices", "/metrics", "/openapi.json", "/docs", "/nothing"):
                refused = get(server.url + path, headers=headers)
                assert refused.status_code == 401 and "secret" not in refused.text
                assert refused.headers["www-authenticate"] == "Bearer"
                words = "that is not this server's token" if headers else "this server has a token"
                told = refused.json()["error"]["message"]
                assert told == f"{words}: send the header Authorization: Bearer TOKEN"
        flood = [http_post(server.url + SPEECH, content=b"x" * 5000).status_code for _ in range(200)]
        assert set(flood) == {401} and server.service.engine.metrics()["utterances"] == 0
        assert get(f"{server.url}/health").status_code == get(f"{server.url}/ready").status_code == 200
        bearing = {"authorization": "Bearer secret", "host": "bots.example"}
        assert get(f"{server.url}/v1/models", headers=bearing).status_code == 200
        assert get(f"{server.url}/docs", headers=bearing).status_code == 404, "a browser could not send the token"


def request_bytes(text: str, response_format: str = "pcm") -> bytes:
    body = json.dumps({"model": "demo", "input": text, "response_format": response_format}).encode()
    head = f"POST {SPEECH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("response_format", ["pcm", "mp3"])
def test_who_hangs_up_frees_the_slot(server, response_format):
    for _ in range(3):
        before = server.service.engine.metrics()["cancelled"]
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.sendall(request_bytes(" ".join([TEXT] * 8), response_format))
            until(lambda: server.service.engine.health()["streams"] == 1)
        server.at_rest()
        assert server.service.engine.metrics()["cancelled"] == before + 1


def test_who_does_not_read_is_let_go():
    """A connection that takes a few chunks and then no more."""
    taken, body = [], json.dumps({"model": "demo", "input": " ".join([TEXT] * 8), "response_format": "pcm"}).encode()

    async def stall(message) -> None:
        taken.append(message)
        if len(taken) > 3:
            await asyncio.Event().wait()

    messages = [{"type": "http.request", "body": body}]

    async def receive():
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": SPEECH, "headers": headers, "query_string": b""}
    asgi(demo, scope, receive, stall, limits=Limits(idle_s=0.5))
    assert [len(message["body"]) for message in taken[1:3]] == [2 * 1920, 2 * 2 * 1920], "chunk by chunk"
    assert len(taken) == 4 and taken[-1]["more_body"], "uvicorn closes the connection of an answer without an end"


def test_500_connects_and_aborts_leave_nothing(server):
    for i in range(500):
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.sendall(request_bytes(TEXT)[: i % 200])
    until(lambda: post(server, response_format="pcm").status_code == 200)  # some had asked for speech
    server.at_rest()


def test_a_body_that_never_comes_is_not_waited_for():
    with running(demo, limits=Limits(idle_s=0.5)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as line:
            line.sendall(request_bytes(TEXT)[:-5])
            assert b" 408 " in line.recv(4096).split(b"\r\n")[0]


def test_a_connection_that_says_nothing_is_closed():
    with running(demo, limits=Limits(header_s=2.0)) as server:
        until(lambda: server.service.state == "ready")
        used = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
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
        assert [line.recv(100) for line in lines] == [b""] * 20
        for line in lines:
            line.close()
        assert ready(), "a connection that was used is not closed after the same time"
        used.close()


def test_who_hangs_up_in_the_queue_leaves_it(server):
    with slots_taken(server.service.engine):
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.sendall(request_bytes(TEXT))
            until(lambda: len(server.service.utterances) == 1)
        until(lambda: not server.service.utterances)
    server.at_rest()


@pytest.mark.parametrize(
    "headers, status",
    [({"origin": "http://["}, 403), ({"host": "["}, 403), ({"accept": "application/openmetrics-text;version=x"}, 200)],
    ids=str,
)
def test_broken_headers_are_no_errors_of_ours(server, headers, status):
    assert get(f"{server.url}/metrics", headers=headers).status_code == status


@pytest.mark.parametrize("token", ["", "two words\n", "g\u00e4ste", " x"])
def test_a_token_that_no_client_can_send_is_refused(token):
    with pytest.raises(BackendError, match="token"):
        make_app(demo, model="demo", token=token)


def test_more_than_slots_and_queue_are_busy_and_may_try_again(server):
    with places_taken(server.service.engine, 8):
        refused = post(server)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "busy" and refused.json()["error"]["retryable"] is True
    server.at_rest()
    assert post(server).status_code == 200


# ---------------------------------------------------------------- life


@pytest.mark.parametrize("log_texts", [False, True])
def test_texts_are_logged_only_where_that_was_asked_for(caplog, log_texts):
    with caplog.at_level("DEBUG"), running(demo, log_texts=log_texts) as server:
        until(lambda: server.service.state == "ready")
        assert post(server, input="A secret.", response_format="pcm").status_code == 200
        post(server, input="A secret.", voice="nobody")
    assert ("A secret." in caplog.text) == log_texts


def test_before_it_is_ready_it_says_so(monkeypatch):
    go, warmed = threading.Event(), []

    def late() -> TTSEngine:
        assert go.wait(PATIENCE_S)
        engine = demo()
        reset = engine.reset_metrics
        monkeypatch.setattr(engine, "reset_metrics", lambda: warmed.append(engine.metrics()["utterances"]) or reset())
        return engine

    with running(late) as server:
        assert get(f"{server.url}/health").json() == {"status": "loading"}
        assert get(f"{server.url}/ready").status_code == 503
        refused = post(server)
        assert refused.status_code == 503 and refused.json()["error"]["retryable"] is True
        go.set()
        until(lambda: get(f"{server.url}/ready").status_code == 200)
        assert warmed == [1] and not any(server.service.engine.metrics().values()), "the warm-up is not counted"
        assert "qwen_megakernel_utterances_total 0.0" in get(f"{server.url}/metrics").text


@pytest.mark.parametrize("error, traceback", [(BackendError("no room here"), False), (ValueError("a bug"), True)])
def test_why_it_could_not_be_loaded_is_logged_with_a_traceback_only_of_a_bug(caplog, error, traceback):
    def fails() -> TTSEngine:
        raise error

    with running(fails) as server:
        until(lambda: server.service.state == "failed")
        assert get(f"{server.url}/health").json() == {"status": "failed", "error": str(error)}
    assert caplog.text.count(f"the engine is failed: {error}") == 1 and ("Traceback" in caplog.text) == traceback


def test_a_dead_engine_is_told():
    with running(lambda: probed("demo", **OPTIONS)) as server:
        until(lambda: server.service.state == "ready")
        kill(server.service.engine)
        refused = post(server, response_format="pcm")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "dead"
        until(lambda: get(f"{server.url}/health").status_code == 503)
        assert post(server).json()["error"]["code"] == "dead"
        assert get(f"{server.url}/health").json()["status"] == "dead"
        assert server.service.gone.is_set()


def test_the_code_of_an_engine_that_ended_follows_its_type_and_not_its_words():
    assert [ApiError.of(kind("it died; it is dead")).code for kind in (EngineDied, EngineClosed)] == ["dead", "closing"]


SERVER = """
import sys
sys.path.insert(0, sys.argv[3])
from probes import kill, probed
from qwen_megakernel.server import app as serve
from qwen_megakernel.server.app import make_app
from qwen_megakernel.server.limits import Limits

def load():
    engine = probed("demo", max_streams=2, max_positions=512)
    if sys.argv[2] == "dies":
        submit = engine.submit
        def broken(text, *args, **options):
            if text == "die":
                kill(engine)
            return submit(text, *args, **options)
        engine.submit = broken
    return engine

sys.exit(serve.serve(serve.make_app(load, model="demo", limits=Limits(drain_s=600)), "127.0.0.1", int(sys.argv[1])))
"""


@pytest.fixture
def process():
    started = []

    def start(how: str) -> tuple[subprocess.Popen, str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
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


def test_a_process_whose_engine_died_ends_for_its_supervisor(process):
    server, url = process("dies")
    http_post(url + SPEECH, json={"model": "demo", "input": "die"})
    assert server.wait(timeout=PATIENCE_S) == 70


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
    assert pcm == pcm16(whole)
    assert server.wait(timeout=PATIENCE_S) == -signal.SIGTERM


# ---------------------------------------------------------------- voices


def test_saved_voices_are_served_by_their_names(tiny, tmp_path):
    folder = tiny("base", size="tiny", eos_gain=2.0)
    options = {"device": "cpu", "max_streams": 2, "max_positions": 512}
    samples = np.random.default_rng(1).uniform(-0.3, 0.3, 24000).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, 24000, format="WAV", subtype="FLOAT")
    with TTSEngine.load(folder, **options) as engine:
        engine.create_voice((samples, 24000)).save(tmp_path / "anna.safetensors")
        voice = Voice.load(tmp_path / "anna.safetensors")
        truth = engine.generate(TEXT, voice=voice, sampling=SamplingParams(seed=5), max_frames=None).samples
    with running(lambda: TTSEngine.load(folder, **options), voices=tmp_path, upload=True) as server:
        until(lambda: server.service.state == "ready")
        assert post(server, voice="anna", response_format="pcm", seed=5).content == pcm16(truth)
        audio = base64.b64encode(file.getvalue()).decode()
        add = lambda **body: http_post(f"{server.url}/v1/voices", json=body)  # noqa: E731
        assert add(name="ben", audio=audio).status_code == 201
        assert (tmp_path / "ben.safetensors").is_file()
        assert post(server, voice="ben", response_format="pcm", seed=5).status_code == 200
        for wrong, field in (
            ({"name": "ben", "audio": audio}, "name"),
            ({"name": "../x", "audio": audio}, "name"),
            ({"name": "carl", "audio": "?"}, "audio"),
            ({"name": "carl", "audio": base64.b64encode(b"no sound").decode()}, "audio"),
            ({"name": "carl", "audio": "/etc/passwd"}, "audio"),
            ({"name": "carl", "audio": audio, "text": " "}, "text"),
        ):
            refused = add(**wrong)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == field, wrong
        assert sorted(path.name for path in tmp_path.iterdir()) == ["anna.safetensors", "ben.safetensors"]


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
    with running(load, voices=tmp_path, allow_foreign_voice=True) as server:
        until(lambda: server.service.state == "ready")
        assert server.service.voice_names()[-1] == "anna" and len(server.service.voice_names()) > 1
        for name, samples in truth.items():
            answer = post(server, voice=name, response_format="pcm", seed=5, instructions="Slowly.")
            assert answer.content == pcm16(samples), name


@pytest.mark.parametrize(
    "name, allowed, message", [("ryan", True, "has a speaker 'ryan' already"), ("anna", False, "")]
)
def test_foreign_voices_that_cannot_be_served_are_told_before_it_starts(tiny, tmp_path, name, allowed, message):
    config = Checkpoint.open(tiny("custom_voice", size="tiny-adapter", eos_gain=2.0)).config
    Voice.nobody(config.talker.stack.hidden_size, "of a Base checkpoint").save(tmp_path / f"{name}.safetensors")
    with pytest.raises(VoiceError, match=message or r"saved voices need a Base .*custom_voice.*--allow-foreign-voice"):
        make_app(lambda: None, model="x", config=config, voices=tmp_path, allow_foreign_voice=allowed)


def test_an_upload_that_takes_too_long_leaves_no_voice(tiny, tmp_path, monkeypatch):
    """And its name can be had by the next one."""
    folder, wait, made = tiny("base", size="tiny", eos_gain=2.0), threading.Event(), threading.Event()
    file = io.BytesIO()
    soundfile.write(file, np.random.default_rng(1).uniform(-0.3, 0.3, 24000), 24000, format="WAV")
    body = {"name": "ben", "audio": base64.b64encode(file.getvalue()).decode()}
    options = {"device": "cpu", "max_streams": 2, "max_positions": 512}
    with TTSEngine.load(folder, **options) as engine:
        voice = engine.create_voice((np.random.default_rng(1).uniform(-0.3, 0.3, 24000).astype(np.float32), 24000))

    def create(*_args) -> Voice:
        assert wait.wait(PATIENCE_S)
        made.set()
        return voice

    monkeypatch.setattr(TTSEngine, "create_voice", create)
    limits = Limits(total_s=1.0)
    with running(lambda: TTSEngine.load(folder, **options), voices=tmp_path, upload=True, limits=limits) as server:
        until(lambda: server.service.state == "ready")
        add = lambda: http_post(f"{server.url}/v1/voices", json=body).status_code  # noqa: E731
        assert add() == 408
        wait.set()
        until(made.is_set)
        assert not server.service.voice_names() and not list(tmp_path.iterdir())
        until(lambda: add() == 201)
        assert server.service.voice_names() == ["ben"]


def test_a_server_without_voices_yet_says_how_they_are_made(tiny):
    folder = tiny("base", size="tiny", eos_gain=2.0)
    with running(lambda: TTSEngine.load(folder, **OPTIONS), upload=True) as server:
        until(lambda: server.service.state == "ready")
        for voice in ("default", "anna"):
            refused = post(server, voice=voice)
            error = refused.json()["error"]
            assert refused.status_code == 400 and error["param"] == "voice"
            assert error["message"].startswith("there are no voices yet: POST /v1/voices")


def test_without_leave_nobody_makes_voices(server):
    assert http_post(f"{server.url}/v1/voices", json={"name": "x", "audio": ""}).status_code == 405


def test_hosts_that_others_reach_need_a_token(capsys, monkeypatch):
    from qwen_megakernel import cli

    monkeypatch.delenv(cli.TOKEN, raising=False)
    assert cli.main(["serve", "--host", "0.0.0.0"]) == 1
    assert f"set {cli.TOKEN}" in capsys.readouterr().err


def test_health_needs_no_library(server):
    with urllib.request.urlopen(f"{server.url}/health") as told:
        assert json.load(told)["status"] == "ready"


def test_nothing_that_fits_or_breaks_the_description_is_an_error_of_ours(server):
    description = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in description.get_all_operations()]
    assert {operation.path for operation in operations} >= {SPEECH, "/v1/models", "/v1/voices", "/health", "/metrics"}
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    for operation in operations:
        for mode in modes if operation.path == SPEECH else modes[:1]:

            @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
            @given(operation.as_strategy(generation_mode=mode))
            def check(case) -> None:
                answer = case.call(timeout=PATIENCE_S)
                assert answer.status_code < 500, answer.text
                if answer.status_code >= 400:
                    error = answer.json()["error"]
                    assert error["message"] and error["code"] and "site-packages" not in answer.text

            check()
