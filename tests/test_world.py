"""The world's faults, each against a server of its own: `make test-faults`. Who survives gets the bytes of the same
request made alone. At the end it prints the table that docs/reliability.md shows."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from waiting import PATIENCE_S, free_port, until

pytestmark = pytest.mark.faults

TEXTS = ["Hello there, how are you today?", "It is late. [pause 200ms] Good night, and sleep well.", "One, two, three."]
CALLERS, ROUNDS = 4, 2
HELD: dict[tuple[str, str], list[bool]] = {}
"""By fault and promise: did it hold, try by try?"""


@pytest.fixture(scope="module", autouse=True)
def report(request):
    yield
    lines = ["| fault | promise | held of tried |", "|---|---|---|"]
    lines += [f"| {fault} | {promise} | {sum(held)} of {len(held)} |" for (fault, promise), held in HELD.items()]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "\n".join(lines))


class Server:
    def __init__(self, *options: str, files: int | None = None):
        """`files`: the hard limit of open files."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "qwen_megakernel", "serve", "--model", "demo", "--device", "cpu"]
        command += ["--port", str(self.port), "--max-streams", str(CALLERS), "--max-queue", "64"]
        command += ["--queue-timeout", str(PATIENCE_S), *options]
        command = [*(["prlimit", f"--nofile={files}:{files}"] if files else []), *command]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
        until(lambda: self.process.poll() is not None or self.answers("/ready"))
        asked = [(text, seed) for text in TEXTS for seed in range(2)]
        self.alone = {one: self.say(one) for one in asked}

    def answers(self, path: str) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.client.get(path).status_code == 200
        return False

    def say(self, asked: tuple[str, int]) -> bytes:
        text, seed = asked
        body = {"model": "demo", "input": text, "voice": "ada", "seed": seed, "response_format": "pcm"}
        return self.client.post("/v1/audio/speech", json=body).raise_for_status().content

    def same(self, asked: tuple[str, int]) -> bool:
        """Is it the bytes of the same request alone?"""
        return self.say(asked) == self.alone[asked]

    def hold(self, stack: contextlib.ExitStack, count: int, sent: bytes = b"") -> None:
        """Connections that send this and then neither send nor read."""
        for _ in range(count):
            line = stack.enter_context(socket.create_connection(("127.0.0.1", self.port), PATIENCE_S))
            line.sendall(sent)


@contextlib.contextmanager
def serving(*options: str, **limits: int) -> Iterator[Server]:
    server = Server(*options, **limits)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        server.client.close()


@contextlib.contextmanager
def callers(server: Server, rng: random.Random) -> Iterator[list[Future[bool]]]:
    """So many ask at once, `ROUNDS` times; the block begins while they are spoken to."""
    with ThreadPoolExecutor(CALLERS) as pool:
        asked = [rng.choice(list(server.alone)) for _ in range(CALLERS * ROUNDS)]
        told = [pool.submit(server.same, one) for one in asked]
        until(lambda: server.client.get("/metrics").text.find('streams{model="demo"} 0.0') < 0)
        yield told


def judge(fault: str, promise: str, held: list[bool]) -> None:
    HELD[fault, promise] = held
    assert held and all(held)


def test_stopped_and_continued(fresh_seed):
    with serving() as server, callers(server, random.Random(fresh_seed)) as told:
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(20)
        server.process.send_signal(signal.SIGCONT)
        judge("the process stands still for 20 s", "all get all their sound", [one.result() for one in told])


@pytest.mark.parametrize("files", [None, 256])
def test_silent_connections(files, fresh_seed):
    fault = "600 silent connections" + (f", {files} files allowed" if files else "")
    with serving(files=files) as server, callers(server, random.Random(fresh_seed)) as told:
        with contextlib.ExitStack() as stack:
            healthy = []
            for _ in range(60):
                server.hold(stack, 10, b"POST /v1/audio/speech HTTP/1.1\r\n")
                healthy.append(httpx.get(f"{server.url}/health", timeout=10).status_code == 200)
            judge(fault, "`/health` answers", healthy)
            judge(fault, "all get all their sound", [one.result() for one in told])


def test_cancels_and_callers_who_do_not_read(fresh_seed):
    rng = random.Random(fresh_seed)
    with serving() as server, callers(server, rng) as told, contextlib.ExitStack() as stack:
        body = b'{"model": "demo", "voice": "ada", "response_format": "pcm", "input": "%s"}' % TEXTS[1].encode()
        head = b"POST /v1/audio/speech HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        for _ in range(100):
            with contextlib.ExitStack() as short:
                server.hold(rng.choice((stack, short)), 1, head + b"content-length: %d\r\n\r\n" % len(body) + body)
                time.sleep(rng.uniform(0, 0.05))
        judge("100 callers hang up or do not read", "the others get all their sound", [one.result() for one in told])
        stack.close()
        until(lambda: server.client.get("/metrics").text.find('streams{model="demo"} 0.0') >= 0)
        again = [server.same(asked) for asked in server.alone]
        judge("100 callers hang up or do not read", "later requests are what they were", again)


def test_sigterm(fresh_seed):
    with serving("--grace-seconds", "2") as server, callers(server, random.Random(fresh_seed)) as told:
        until(lambda: sum(one.running() for one in told) == CALLERS)
        running = [one for one in told if one.running()]
        server.process.send_signal(signal.SIGTERM)
        judge("SIGTERM", "who is spoken to gets all the sound", [one.result() for one in running])


def test_a_front_is_killed(fresh_seed):
    rng = random.Random(fresh_seed)
    with serving("--front-processes", "2") as server, callers(server, rng) as told:
        children = f"/proc/{server.process.pid}/task/{server.process.pid}/children"
        with open(children) as file:
            os.kill(int(file.read().split()[-1]), signal.SIGKILL)
        ends = [one.exception() or one.result() for one in told]
        whole = [end is True or isinstance(end, httpx.TransportError) for end in ends]
        judge("a front process is killed", "an answer is whole, or its connection breaks", whole)
        until(lambda: server.answers("/ready"))
        again = [server.same(asked) for asked in server.alone]
        judge("a front process is killed", "later requests are what they were", again)
