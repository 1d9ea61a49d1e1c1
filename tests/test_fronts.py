"""Front processes: an engine in one process, HTTP in others. Most tests have the fronts in this process, on the sockets
and the protocol that processes use."""

import base64
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from entrances import SocketClient
from serving import (
    PATIENCE_S,
    TEXT,
    Front,
    Running,
    connect,
    fronts_of,
    get,
    post,
    ready,
    said,
    same,
    small_demo,
    stream,
    until,
)
from waiting import free_port, run_all

from qwen_megakernel import BackendError, EngineBusy, EngineDied, Voice, cli
from qwen_megakernel.errors import TextError
from qwen_megakernel.server.fronts import wire
from qwen_megakernel.server.fronts.hub import MOST_UNSENT, Line
from qwen_megakernel.server.fronts.serve import Fronts, _Front
from qwen_megakernel.server.fronts.wire import Frames, Kind
from qwen_megakernel.server.limits import Limits
from qwen_megakernel.server.openai.bodies import SPEECH
from qwen_megakernel.server.options import ServerOptions
from qwen_megakernel.server.process import bind
from spoken_text.spoken_text import SpokenText

WORDS = "hello there how are you today and now for something else good morning".split()
OPTIONS = {"limits": Limits(connections=12, spare_connections=2)}


@pytest.fixture(scope="module")
def engine():
    """The server of one process whose engine the fronts share."""
    with ready(small_demo) as server:
        yield server


@pytest.fixture(scope="module")
def fronts(engine):
    with fronts_of(engine.service, 2, **OPTIONS) as fronts:
        yield fronts


def calm(engine) -> None:
    until(lambda: engine.service.engine.health()["streams"] == 0)


def text_of(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 7))).capitalize() + "."


def over_http(front: Running, **body) -> bytes:
    return front.post(response_format="pcm", **body).content


def over_events(front: Running, **body) -> bytes:
    lines = front.post(response_format="pcm", stream_format="sse", **body).text.split("\n\n")[:-1]
    told = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert told[-1]["type"] == "speech.audio.done" and told[-1]["usage"]["output_tokens"] > 0
    return b"".join(base64.b64decode(one["audio"]) for one in told[:-1])


def over_socket(front: Running, **body) -> bytes:
    with connect(front.socket_url) as line:
        client = SocketClient(line)
        assert client.hear(body.pop("input"), **body)["finish_reason"] == "eos"
        return client.pcm["a"]


def in_pieces(front: Running, **body) -> bytes:
    """A word at a time."""
    first, *others = body.pop("input").split(" ")
    with connect(front.socket_url) as line:
        client = SocketClient(line)
        client.say("text", "a", text=first, voice="ada", **body)
        for word in others:
            client.say("text", "a", text=f" {word}")
        client.say("end", "a")
        assert client.until("end", "a")["finish_reason"] == "eos"
        return client.pcm["a"]


@pytest.mark.parametrize("way", [over_http, over_events, over_socket, in_pieces])
def test_random_requests_get_the_same_bytes_through_either_front(engine, fronts, way, fresh_seed):
    rng = random.Random(fresh_seed)
    for _ in range(3):
        text, seed = text_of(rng), rng.randrange(2**53)
        options = {"speed": rng.choice([1.0, 1.5]), "trim": rng.choice(["none", "both"])}
        truth = said(engine, text, seed, **options | ({"non_streaming_mode": False} if way is in_pieces else {}))
        made = way(rng.choice(fronts).server, input=text, seed=seed, **options)
        assert same(made, truth), (text, seed, options)
    calm(engine)


def test_words_have_the_same_measured_times_through_a_front(engine, fronts, fresh_seed):
    body = {"input": text_of(random.Random(fresh_seed)), "seed": fresh_seed, "stream": False, "word_timestamps": True}
    names = ("x-word-timestamps", "x-word-timestamps-measured")
    servers = engine, *(front.server for front in fronts)
    there, *here = (server.post(response_format="wav", **body).headers for server in servers)
    assert there["x-word-timestamps-measured"] == "true" and len(json.loads(there["x-word-timestamps"])) > 0
    assert all(headers[name] == there[name] for headers in here for name in names)


def test_many_at_once_over_both(engine, fronts, fresh_seed):
    rng = random.Random(fresh_seed)
    asked = [(rng.choice(fronts).server, text_of(rng), rng.randrange(2**53)) for _ in range(8)]

    def check(front, text: str, seed: int) -> None:
        assert same(front.post(input=text, seed=seed, response_format="pcm").content, said(engine, text, seed))

    for one in asked:
        said(engine, *one[1:])
    run_all(*(lambda one=one: check(*one) for one in asked))
    calm(engine)


def test_a_client_that_leaves_cancels_its_speech(engine, fronts):
    before = engine.service.engine.metrics()["cancelled"]
    body = {"model": "demo", "voice": "ada", "input": " ".join([TEXT] * 8), "response_format": "pcm"}
    with stream("POST", fronts[0].server.url + SPEECH, json=body) as response:
        next(response.iter_raw())
    calm(engine)
    assert engine.service.engine.metrics()["cancelled"] == before + 1


def error_of(answer) -> dict:
    """But for the request's id."""
    return {name: value for name, value in answer.json()["error"].items() if name != "request_id"}


def test_errors_and_a_full_engine_are_told_as_without_fronts(engine, fronts):
    for body in ({"voice": "nobody"}, {"input": "...", "normalize": "auto"}, {"seed": -1}):
        alone, front = (server.post(**body) for server in (engine, fronts[1].server))
        assert (front.status_code, error_of(front)) == (alone.status_code, error_of(alone)) and front.status_code == 400
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.callback(engine.service.engine.submit().cancel)
        alone, front = engine.post(), fronts[0].server.post()
        assert front.status_code == 429 and error_of(front) == error_of(alone)
    calm(engine)


def test_a_seat_passes_through_a_front_and_is_left(engine, fronts):
    seats, front = engine.service.engine._core.admission.seats, fronts[0]
    for hears_all in (True, False):
        body = {"model": "demo", "voice": "ada", "input": " ".join([TEXT] * 4), "response_format": "pcm"}
        with stream("POST", front.server.url + SPEECH, json=body) as response:
            chunks = response.iter_raw()
            next(chunks)
            assert len(seats) == len(front.line.seats) == 1
            for _ in chunks if hears_all else ():
                pass
        until(lambda: not seats and not front.line.seats)
    calm(engine)


def test_metrics_of_either_front_tell_of_both(fronts):
    def counted(front: Front) -> float:
        lines = get(front.server.url + "/metrics").text.splitlines()
        return float(next(line for line in lines if 'path="/v1/models"' in line and "_total" in line).split()[-1])

    for front in (*fronts, fronts[0]):
        assert get(front.server.url + "/v1/models").status_code == 200
    assert counted(fronts[0]) == counted(fronts[1]) == 3
    with connect(fronts[0].server.socket_url):
        assert "\nqwen_megakernel_sockets 1.0" in get(fronts[1].server.url + "/metrics").text
    told = [get(front.server.url + "/health").json() for front in fronts]
    assert [one["engine"]["max_streams"] for one in told] == [4, 4]


def test_connections_are_limited_over_all_fronts(fronts):
    most = OPTIONS["limits"].connections
    with contextlib.ExitStack() as stack:
        for number in range(most):
            stack.enter_context(connect(fronts[number % 2].server.socket_url))
        for front in fronts:
            busy = get(front.server.url + "/v1/models")
            assert busy.status_code == 503 and busy.json()["error"]["code"] == "busy"
            assert get(front.server.url + "/ready").status_code == 200
    until(lambda: get(fronts[1].server.url + "/v1/models").status_code == 200)


def test_a_front_that_is_lost_cancels_its_speech_and_the_other_goes_on(engine, caplog):
    with fronts_of(engine.service, 2) as (lost, kept):
        body = {"model": "demo", "voice": "ada", "input": " ".join([TEXT] * 8), "response_format": "pcm", "seed": 7}
        with stream("POST", lost.server.url + SPEECH, json=body) as response:
            chunks = response.iter_raw()
            next(chunks)
            lost.line.socket.shutdown(socket.SHUT_RDWR)
            with pytest.raises(httpx.RemoteProtocolError):
                for _ in chunks:
                    pass
        calm(engine)
        until(lambda: lost.line.lost and lost.server.service.gone.is_set())
        died = lost.server.post()
        assert died.status_code == 503 and died.json()["error"]["code"] == "dead"
        assert get(lost.server.url + "/health").json()["error"] == "the engine's process is gone"
        assert same(kept.server.post(response_format="pcm", seed=5).content, said(engine))


# ---------------------------------------------------------------- fronts that end


def test_a_line_counts_what_its_front_has_not_taken():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line, size = Line(ours), 1 << 20
        line.put(bytes(size), memoryview(bytes(size)))
        line.send()
        assert 0 < line.unsent < 2 * size
        left = 2 * size
        while left:
            left -= len(theirs.recv(left))
            line.send()
        assert line.unsent == 0 and not line.waits


class Process:
    """A front's process, which this process pretends."""

    pid, exitcode = 1, -signal.SIGKILL

    def __init__(self):
        self.alive = True

    def is_alive(self) -> bool:
        return self.alive

    def kill(self) -> None:
        self.alive = False

    def join(self, timeout: float) -> None:
        pass


@pytest.fixture
def looked_after(monkeypatch):
    """Two fronts that are up, and what looks after them."""
    fronts = Fronts(small_demo, ServerOptions(), model="demo", config=None, count=2)
    sockets = [socket.socket() for _ in range(4)]
    lines = map(Line, sockets)
    monkeypatch.setattr(fronts, "_started", lambda *_, **__: _Front(Process(), next(lines)))
    fronts._fronts = [fronts._started(), fronts._started()]
    for front in fronts._fronts:
        front.line.up = True
    fronts._look_after_fronts()
    yield fronts
    fronts._hub.close()
    for one in sockets:
        one.close()


def test_a_front_that_takes_nothing_is_replaced(looked_after, caplog):
    hangs, other = looked_after._fronts
    hangs.line.unsent = MOST_UNSENT + 1
    looked_after._look_after_fronts()
    assert hangs.line.lost and "front 1 hangs: it is killed" in caplog.text
    assert looked_after._fronts[0] is not hangs and looked_after._fronts[1] is other


def test_a_front_that_ends_before_it_can_serve_is_replaced_while_another_one_serves(looked_after):
    for _ in range(2):  # the second one is not up
        looked_after._fronts[0].process.alive = False
        looked_after._look_after_fronts()
    assert looked_after._service.state == "loading"
    looked_after._fronts[1].process.alive = looked_after._fronts[1].line.up = False
    looked_after._look_after_fronts()
    assert looked_after._service.state == "failed" and "before it could serve" in looked_after._service.error


# ---------------------------------------------------------------- the protocol


def test_a_request_arrives_as_it_was_sent(engine, fresh_seed):
    rng = random.Random(fresh_seed)
    seed = rng.randrange(2**64)
    request = engine.service.engine.request(speaker="max", seed=seed, top_p=rng.uniform(0.1, 1), speed=1.25, trim="end")
    text = SpokenText(text_of(rng) + " \U0001f600", before_s=rng.random(), ends_at_pause=True)
    data = wire.write_begin(7, text, request, 0) + wire.frame(Kind.PUSH, 8, "a\u00e4")
    frames, found, at = Frames(), [], 0
    while at < len(data):
        size = rng.randint(1, 400)
        found += frames.feed(data[at : at + size])
        at += size
    (kind, number, words, rest), (_, _, push, _) = found
    assert (kind, number, json.loads(push)) == (Kind.BEGIN, 7, "a\u00e4")
    again, read = wire.read_begin(json.loads(words), rest)
    assert again == text and read.sampling == request.sampling and read.seed == seed
    for name in ("max_frames", "chunk_frames", "speed", "trim", "judge_length", "non_streaming_mode", "reproducible"):
        assert getattr(read, name) == getattr(request, name)
    assert (read.conditioning.speaker, read.conditioning.voice) == ("max", None)


def test_a_voice_arrives_as_it_was_sent(engine):
    voice = Voice(torch.randn(16), torch.randint(9, (5, 16)), "Hi.", "made by a test")
    request = engine.service.engine.request(speaker="ada")
    spoken = replace(request.conditioning, voice=voice, speaker=None)
    data = wire.write_begin(1, None, replace(request, conditioning=spoken), 0)
    ((_, _, words, rest),) = Frames().feed(data)
    text, read = wire.read_begin(json.loads(words), rest)
    assert text is None and read.conditioning.voice and read.conditioning.voice.digest == voice.digest


@pytest.mark.parametrize("error", [EngineBusy("full"), TextError("bad", field="input"), EngineDied("gone")])
def test_an_error_arrives_as_it_was_raised(error):
    read = wire.read_error(json.loads(json.dumps(wire.write_error(error))))
    assert type(read) is type(error) and str(read) == str(error)
    assert getattr(read, "field", None) == getattr(error, "field", None)
    assert isinstance(wire.read_error({"kind": "SystemExit", "words": "1", "field": None}), RuntimeError)


# ---------------------------------------------------------------- processes


class Processes:
    """`serve --front-processes N` as a user starts it."""

    def __init__(self, folder: Path, fronts: int):
        self.port = port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "log"
        sizes = ["--max-streams", "4", "--max-positions", "512", "--queue-timeout", str(PATIENCE_S)]
        options = ["--model", "demo", "--device", "cpu", "--port", str(port), *sizes, "--front-processes", str(fronts)]
        command = [sys.executable, "-m", "qwen_megakernel", "serve", *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, start_new_session=True)
        until(self.is_ready)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def fronts(self) -> list[int]:
        pid = self.process.pid
        children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]

    def front_of(self, port: int) -> int:
        """The process that serves the client with this port."""
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        (inode,) = (row[9] for row in rows if row[2].endswith(f":{port:04X}"))
        for front in self.fronts():
            for file in Path(f"/proc/{front}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(file) == f"socket:[{inode}]":
                        return front
        raise AssertionError("no front has this connection")

    def streaming(self, times: int = 6):
        text = " ".join([TEXT] * times)
        body = {"model": "demo", "voice": "ada", "input": text, "response_format": "pcm", "seed": 5}
        return stream("POST", self.url + SPEECH, json=body)


@pytest.fixture
def processes(tmp_path, request):
    server = Processes(tmp_path, getattr(request, "param", 2))
    yield server
    server.process.kill()
    server.process.wait()


@pytest.mark.faults
def test_a_killed_front_is_replaced_and_sigterm_lets_speech_end(processes):
    alone = post(processes.url + SPEECH, json={"model": "demo", "input": TEXT, "response_format": "pcm", "seed": 5})
    before = processes.fronts()
    assert len(before) == 2 and alone.status_code == 200
    with pytest.raises(BackendError, match="in use"):  # so no second server gets a part of the callers
        bind("127.0.0.1", processes.port)
    with processes.streaming() as response:
        chunks = response.iter_raw()
        next(chunks)
        killed = processes.front_of(response.extensions["network_stream"].get_extra_info("client_addr")[1])
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            for _ in chunks:
                pass
    until(lambda: f"process {killed}) has ended by signal 9" in processes.log.read_text())
    until(lambda: len(processes.fronts()) == 2 and killed not in processes.fronts())
    until(lambda: '\nqwen_megakernel_streams{model="demo"} 0.0' in get(processes.url + "/metrics").text)
    with processes.streaming(2) as response:  # a busy machine must end it within the drain's 60 s
        chunks = response.iter_raw()
        heard = next(chunks)
        processes.process.send_signal(signal.SIGTERM)
        heard += b"".join(chunks)  # to its end, or this would raise
    assert len(heard) > 2 * 24000
    assert processes.process.wait(timeout=PATIENCE_S) == -signal.SIGTERM
    assert not any(Path(f"/proc/{front}").exists() for front in before)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1], indirect=True)
def test_ctrl_c_is_told_once_to_each_front(processes):
    """A terminal tells all processes of a group. Told twice, uvicorn ends with tracebacks."""
    with processes.streaming() as response:
        chunks = response.iter_raw()  # kept: its end would end the answer
        next(chunks)
        os.killpg(processes.process.pid, signal.SIGINT)
    assert processes.process.wait(timeout=PATIENCE_S) == 130  # as shells tell SIGINT
    assert "Traceback" not in processes.log.read_text()


@pytest.mark.faults
@pytest.mark.parametrize("processes", [1], indirect=True)
def test_fronts_end_with_their_engine(processes):
    fronts = processes.fronts()
    with processes.streaming() as response:
        chunks = response.iter_raw()
        next(chunks)
        processes.process.kill()
        with pytest.raises(httpx.TransportError):
            for _ in chunks:
                pass
    until(lambda: not any(Path(f"/proc/{front}").exists() for front in fronts))
    assert processes.log.read_text().count("the engine is dead: the engine's process is gone") == 1


def test_what_no_front_can_do_is_refused(capsys):
    for words, told in (
        (["--front-processes", "-1"], "--front-processes must be 0 to"),
        (["--front-processes", "2", "--allow-upload", "--voices", "."], "needs"),
    ):
        assert cli.main(["serve", "--model", "demo", "--device", "cpu", *words]) == 1
        assert told in capsys.readouterr().err
