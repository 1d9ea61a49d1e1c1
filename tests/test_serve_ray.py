"""Ray Serve with two replicas on the CPU: who is sent where, and what becomes of calls when a replica goes."""

import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import anyio
import httpx
import pytest
import torch
from measure_replicas import ENVIRONMENT
from serving import PATIENCE_S, until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.model.pcm import pcm16

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),  # it describes its settings in an older way
]

TEXT = "Hello there, how are you today?"
LONG = " ".join([TEXT] * 20)
OPTIONS = {"device": "cpu", "max_streams": 4, "max_positions": 512}
PORT = 8137
URL, SOCKET = f"http://127.0.0.1:{PORT}", f"ws://127.0.0.1:{PORT}/v1/audio/speech/socket"


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("QWEN_MEGAKERNEL_TOKEN", raising=False)
        from ray import serve

        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": PORT})
            deploy()
            yield
        finally:
            serve.shutdown()
            ray.shutdown()


@pytest.fixture(scope="module")
def engine():
    """With as many threads as Ray gives a replica of one CPU: sums in another order round otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with TTSEngine.load("demo", **OPTIONS) as engine:
        yield engine
    torch.set_num_threads(threads)


def deploy(**options) -> None:
    from ray import serve

    from qwen_megakernel.serve_ray import Args, app

    serve.run(app(Args(model="demo", min_replicas=2, **(OPTIONS | options))), name="default")


def said(engine: TTSEngine, seed: int, text: str = TEXT) -> bytes:
    return pcm16(engine.generate(text, speaker="ada", sampling=SamplingParams(seed=seed)).samples)


LATER = (429, 503)
"""On a slow machine a replica's queue may time out, and a killed one does not answer: a client asks again."""


def post(seed: int, text: str = TEXT, form: str = "pcm", url: str = URL, again: tuple = LATER) -> httpx.Response:
    """`again`: the statuses behind which the same is asked once more."""
    body = {"model": "demo", "input": text, "voice": "ada", "seed": seed, "response_format": form}
    end = time.monotonic() + PATIENCE_S
    while True:
        answer = httpx.post(f"{url}/v1/audio/speech", json=body, timeout=PATIENCE_S)
        if answer.status_code not in again or time.monotonic() > end:
            return answer


class Long:
    """A long text's audio, read by a thread. `began`: the first of it is here."""

    def __init__(self, seed: int, url: str = URL, text: str = LONG):
        self.seed, self.url, self.text, self.pcm, self.replica, self.error = seed, url, text, b"", None, None
        self.left = False
        self.began = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.began.wait(PATIENCE_S)

    def _read(self) -> None:
        body = {"model": "demo", "input": self.text, "voice": "ada", "seed": self.seed, "response_format": "pcm"}
        try:
            while not self.replica:  # until it is not busy, as in `post`
                with httpx.stream("POST", f"{self.url}/v1/audio/speech", json=body, timeout=PATIENCE_S) as response:
                    if response.status_code in LATER:
                        continue
                    self.replica = response.headers["X-Replica"]
                    for data in response.iter_raw():
                        self.pcm += data
                        self.began.set()
                        if self.left:
                            return
        except httpx.HTTPError as error:
            self.error = error

    def leave(self) -> None:
        """Hang up at the next chunk."""
        self.left = True

    @property
    def going_on(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(timeout=PATIENCE_S)
        assert not self.going_on


def long_pcm(engine: TTSEngine, seed: int) -> bytes:
    return b"".join(said(engine, seed, piece) for piece in engine.pieces(LONG))


def check_sockets(lines: list[ClientConnection], victim: str) -> None:
    """Those of the lost replica are told and closed; the others answer."""
    for line in lines:
        if line.response.headers["X-Replica"] == victim:
            told = json.loads(line.recv(timeout=PATIENCE_S))
            assert (told["type"], told["code"], told["retryable"]) == ("error", "dead", True)
            with pytest.raises(ConnectionClosed) as closed:
                line.recv(timeout=PATIENCE_S)
            assert closed.value.rcvd.code == 1013
        else:
            line.send('{"type": "ping"}')
            assert json.loads(line.recv(timeout=PATIENCE_S)) == {"type": "pong"}


def replicas() -> dict[str, int]:
    """Process ids by the names in X-Replica, of those that are alive."""
    from ray._private.state import actors

    alive = [actor for actor in actors().values() if actor["State"] == "ALIVE"]
    return {a["Name"].split("#")[-1]: a["Pid"] for a in alive if a["Name"].startswith("SERVE_REPLICA::")}


def test_many_calls_reach_both_replicas_and_each_is_what_the_engine_says(cluster, engine):
    answers, end = [], time.monotonic() + PATIENCE_S
    # Which replica gets a call is drawn at random between those with room, so a few may all go to one.
    while {answer.headers["X-Replica"] for answer in answers} != set(replicas()):
        assert time.monotonic() < end, "one replica never got a call"
        first = len(answers)
        with ThreadPoolExecutor(8) as pool:
            answers += pool.map(post, range(first, first + 8))
    for seed, answer in enumerate(answers):
        assert answer.status_code == 200 and answer.headers["X-Seed"] == str(seed)
        assert answer.content == said(engine, seed)


def test_audio_is_streamed(cluster, engine):
    call = Long(3)
    assert call.going_on, "the first audio came with the last"
    call.join()
    assert call.pcm == long_pcm(engine, 3)


def test_a_websocket_speaks(cluster, engine):
    with connect(SOCKET, open_timeout=PATIENCE_S) as line:
        assert line.response.headers["X-Replica"] in replicas()
        assert json.loads(line.recv())["type"] == "hello"
        opening = {"type": "text", "context": "a", "text": TEXT, "end": True, "voice": "ada", "seed": 5}
        line.send(json.dumps(opening))
        pcm, told = b"", {}
        while told.get("type") != "end":
            message = line.recv(timeout=PATIENCE_S)
            if isinstance(message, bytes):
                pcm += message[4:]
            else:
                told = json.loads(message)
    assert pcm == said(engine, 5)


def test_a_client_that_leaves_frees_its_slot(cluster):
    body = {"model": "demo", "input": LONG, "voice": "ada", "response_format": "pcm"}
    with httpx.stream("POST", f"{URL}/v1/audio/speech", json=body, timeout=PATIENCE_S) as response:
        replica = response.headers["X-Replica"]
        next(response.iter_raw())

    def freed() -> bool:
        answer = httpx.get(f"{URL}/metrics", timeout=PATIENCE_S)
        lines = ('qwen_megakernel_streams{model="demo"} 0.0',)
        return answer.headers["X-Replica"] == replica and all(line in answer.text.splitlines() for line in lines)

    until(freed)


def test_errors_are_the_api_s_own(cluster):
    answer = httpx.post(f"{URL}/v1/audio/speech", json={"model": "other", "input": TEXT, "voice": "ada"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


def test_a_killed_replica_fails_its_own_calls_only_and_is_replaced(cluster, engine):
    calls = [Long(seed) for seed in range(3)]
    while len({call.replica for call in calls}) < 2:  # the router draws
        calls.append(Long(len(calls)))
    victim = calls[0].replica
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as opened:
        lines = [opened.enter_context(connect(SOCKET, open_timeout=PATIENCE_S))]
        while len({line.response.headers["X-Replica"] for line in lines}) < 2:
            lines.append(opened.enter_context(connect(SOCKET, open_timeout=PATIENCE_S)))
        for line in lines:  # before the kill: behind it the victim's greeting may be lost on its way
            assert json.loads(line.recv(timeout=PATIENCE_S))["type"] == "hello"
        pid = replicas()[victim]
        assert all(call.going_on for call in calls), "they ended before the kill: make LONG longer"
        os.kill(pid, signal.SIGKILL)
        after = pool.submit(post, 5)
        check_sockets(lines, victim)  # before the calls end: that may take longer than a socket may be silent
        for call in calls:
            call.join()
            if call.replica == victim:
                assert isinstance(call.error, httpx.RemoteProtocolError), call.error  # no last chunk: it is not whole
            else:
                assert call.error is None and call.pcm == long_pcm(engine, call.seed)
        assert after.result().content == said(engine, 5)
    until(lambda: len(replicas()) == 2 and victim not in replicas())
    fresh = set()
    until(lambda: fresh.add(post(1).headers["X-Replica"]) or fresh == set(replicas()))


def test_a_call_that_was_not_answered_yet_is_told_to_try_again(cluster):
    with ThreadPoolExecutor(4) as pool:
        # Answered when they are whole.
        answers = [pool.submit(post, seed, LONG, "flac", again=(429,)) for seed in range(4)]
        streamed = Long(9)
        os.kill(replicas()[streamed.replica], signal.SIGKILL)
        streamed.join()
        answers = [answer.result() for answer in answers]
    lost = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(lost) < 4
    for answer in lost:
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
        error = answer.json()["error"]
        assert error["code"] == "dead" and error["retryable"] is True
    until(lambda: len(replicas()) == 2)


def test_a_rolling_restart_ends_what_is_said_and_refuses_nobody(cluster, engine):
    until(lambda: len(replicas()) == 2)
    before = set(replicas())
    calls = [Long(seed) for seed in range(2)]
    statuses, ended = [], threading.Event()

    def call_on() -> None:
        while not ended.is_set():
            statuses.append(post(1, "Hello.", again=(429,)).status_code)

    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call_on)
        deploy(drain_s=90.0)
        ended.set()
        calling.result()
    for call in calls:
        call.join()
        assert call.error is None and call.pcm == long_pcm(engine, call.seed)
    assert len(statuses) > 3 and set(statuses) == {200}
    until(lambda: len(replicas()) == 2 and not before & set(replicas()))


def test_an_engine_that_is_gone_is_not_healthy():
    from qwen_megakernel.serve_ray import Args, app

    replica = app(Args(device="cpu"))._bound_deployment.func_or_class
    gone = threading.Event()
    service = SimpleNamespace(gone=gone, state="dead", error="a fault")
    holder = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(service=service)))
    replica.check_health(holder)
    gone.set()
    with pytest.raises(RuntimeError, match="dead: a fault"):
        replica.check_health(holder)


@pytest.mark.parametrize(("client", "status"), [("127.0.0.1", 200), ("192.0.2.7", 403)])
def test_without_a_token_the_proxy_s_own_machine_is_served(client, status):
    from starlette.responses import PlainTextResponse

    from qwen_megakernel.server.ray.app import _OnlyLoopback

    async def main() -> int:
        transport = httpx.ASGITransport(_OnlyLoopback(PlainTextResponse("served")), client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await http.get("/v1/models")).status_code

    assert anyio.run(main) == status


@pytest.mark.parametrize("name", ["one_box", "cluster"])
def test_the_examples_are_configurations(name):
    import yaml
    from ray.serve.schema import ServeDeploySchema

    from qwen_megakernel.serve_ray import Args, app

    path = Path(__file__).parent.parent / "examples" / "ray" / f"{name}.yaml"
    (told,) = ServeDeploySchema(**yaml.safe_load(path.read_text())).applications
    module, name = told.import_path.split(":")
    assert getattr(import_module(module), name) is app and told.route_prefix == "/"
    Args(**told.args)
    assert {deployment.name for deployment in told.deployments} <= {app(Args(**told.args))._bound_deployment.name}
