"""What test_world.py does its faults to: servers in processes of their own, a TCP proxy, nginx, and callers."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
from entrances import SocketClient
from waiting import PATIENCE_S, free_port, until
from websockets.sync.client import ClientConnection, connect

TEXTS = ["Hello there, how are you today?", "It is late. [pause 200ms] Good night, and sleep well.", "One, two, three."]
CALLERS, ROUNDS = 4, 2
NGINX = Path(__file__).parents[1] / "examples" / "proxies" / "nginx.conf"

TOKEN = "a secret of the tests"
BEARING = {"Authorization": f"Bearer {TOKEN}"}

CLOCK = """
import time
_time = time.time
time.time = lambda: _time() + float(open({path!r}).read() or 0)
"""
"""A server's `sitecustomize`: its clock is off by the seconds that a file says."""

Asked = tuple[str, int]
"""A text and a seed."""


class Server:
    """Attributes:
    alone: what it has said to each request before anybody else was there.
    """

    def __init__(
        self,
        *options: str,
        limits: tuple[str, ...] = (),
        log: str = os.devnull,
        model: str | Path = "demo",
        paths: tuple[Path, ...] = (),
        tls: Path | None = None,
        alone: dict[Asked, bytes] | None = None,
    ):
        """`limits`: of `prlimit`. `log`: a file for what it logs. `paths`: folders where Python looks first. `tls`: a
        folder with cert.pem and key.pem."""
        self.port = free_port()
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        self.socket_url = f"ws://127.0.0.1:{self.port}/v1/audio/speech/socket"
        command = [sys.executable, "-m", "qwen_megakernel", "serve", "--model", str(model), "--device", "cpu"]
        command += ["--port", str(self.port), "--max-streams", str(CALLERS), "--max-queue", "256"]
        command += ["--queue-timeout", str(PATIENCE_S), *options]
        command += ["--ssl-certfile", str(tls / "cert.pem"), "--ssl-keyfile", str(tls / "key.pem")] if tls else []
        search = [*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = os.environ | {"QWEN_MEGAKERNEL_TOKEN": TOKEN, "PYTHONPATH": os.pathsep.join(search)}
        self._command = [*(["prlimit", *limits] if limits else []), *command]
        self._log = log
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S, headers=BEARING, verify=not tls)
        self.start()
        asked = [(text, seed) for text in TEXTS for seed in range(2)]
        self.alone = alone or {one: self.say(one).content for one in asked}

    def start(self) -> None:
        """Again, if it has ended."""
        with open(self._log, "w") as file:
            self.process = subprocess.Popen(self._command, stderr=file, stdout=file, env=self._environment)
        until(lambda: self.process.poll() is not None or self.answers("/ready"))

    def answers(self, path: str) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.client.get(path).status_code == 200
        return False

    def ask(self, asked: Asked, url: str = "") -> httpx.Response:
        """`url`: of a proxy before it."""
        text, seed = asked
        body = {"model": "demo", "input": text, "voice": "ada", "seed": seed, "response_format": "pcm"}
        if url:
            return httpx.post(f"{url}/v1/audio/speech", json=body, timeout=PATIENCE_S, headers=BEARING)
        return self.client.post("/v1/audio/speech", json=body)

    def say(self, asked: Asked, url: str = "") -> httpx.Response:
        return self.ask(asked, url).raise_for_status()

    def same(self, asked: Asked, url: str = "") -> bool:
        """Is it the bytes of the same request alone?"""
        return self.say(asked, url).content == self.alone[asked]

    def whole_or_broken(self, asked: Asked, url: str = "") -> bool:
        """The same, or the connection breaks, or an error is told as one."""
        try:
            answer = self.ask(asked, url)
        except httpx.TransportError:
            return True
        if answer.status_code >= 500:
            return bool(answer.json()["error"]["message"])
        return answer.status_code == 200 and answer.content == self.alone[asked]

    def again(self, url: str = "") -> list[bool]:
        """Later, is each request answered as it was?"""
        return [self.same(asked, url) for asked in self.alone]

    @property
    def silent(self) -> bool:
        """Nobody is spoken to."""
        return bool(re.search(r'_streams{model="[^"]+"} 0\.0', self.client.get("/metrics").text))

    def at_rest(self) -> None:
        until(lambda: self.silent)

    def hold(self, stack: contextlib.ExitStack, count: int, sent: bytes = b"") -> None:
        """Connections that send this and then neither send nor read."""
        for _ in range(count):
            line = stack.enter_context(socket.create_connection(("127.0.0.1", self.port), PATIENCE_S))
            line.sendall(sent)

    def connect(self) -> ClientConnection:
        return connect(self.socket_url, open_timeout=PATIENCE_S, additional_headers=BEARING)

    def stop(self, seconds: float) -> None:
        """The process stands still."""
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.client.close()


@contextlib.contextmanager
def serving(*options: str, **how) -> Iterator[Server]:
    server = Server(*options, **how)
    try:
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def callers(
    server: Server, rng: random.Random, say: Callable[[Asked], bool] | None = None
) -> Iterator[list[Future[bool]]]:
    """So many ask at once, `ROUNDS` times; the block begins while they are spoken to."""
    with ThreadPoolExecutor(CALLERS) as pool:
        asked = [rng.choice(list(server.alone)) for _ in range(CALLERS * ROUNDS)]
        told = [pool.submit(say or server.same, one) for one in asked]
        until(lambda: not server.silent)
        yield told


class Proxy:
    """Passes bytes and ends on between clients and a server. `stalled`: it does not."""

    def __init__(self, port: int):
        self._port, self._lines = port, []
        self.stalled = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._lines.append((client, server))
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        more = b"some"
        while more:
            more = b""
            with contextlib.suppress(OSError):  # a reset is an end: else who is at the other end would wait for ever
                more = source.recv(4096)
            while self.stalled.is_set():
                time.sleep(0.01)
            with contextlib.suppress(OSError):
                sink.sendall(more) if more else sink.shutdown(socket.SHUT_WR)

    def lose_clients(self) -> None:
        """Half-closed: clients are gone, and their servers are not told."""
        self.stalled.set()
        for client, _ in self._lines:
            client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stalled.clear()
        for line in (self._listener, *(end for pair in self._lines for end in pair)):
            line.close()


@contextlib.contextmanager
def nginx(folder: Path, ports: list[int]) -> Iterator[str]:
    """Its URL: the example's configuration before these servers, without TLS."""
    port, text = free_port(), NGINX.read_text()
    for old, new in zip(("127.0.0.1:8000", "127.0.0.1:8001"), ports, strict=True):
        text = text.replace(old, f"127.0.0.1:{new}")
    text = "\n".join(line for line in text.splitlines() if "ssl_" not in line)
    text = text.replace("listen 443 ssl", f"listen 127.0.0.1:{port}").replace("tts.example", "localhost")
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = f"daemon off;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
    config += f"http {{\naccess_log off;\n{paths}{text}\n}}\n"
    (folder / "nginx.conf").write_text(config)
    process = subprocess.Popen([shutil.which("nginx"), "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"])
    try:
        until(lambda: process.poll() is not None or answers(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False


# ---------------------------------------------------------------- what callers do who do everything


def over_http(server: Server, asked: Asked, rng: random.Random) -> bytes:
    return server.say(asked).content


def over_socket(server: Server, asked: Asked, rng: random.Random) -> bytes:
    with server.connect() as line:
        client = SocketClient(line)
        assert client.hear(asked[0], seed=asked[1])["finish_reason"] == "eos"
        return client.pcm["a"]


def in_pieces(server: Server, asked: Asked, rng: random.Random) -> bytes:
    """A word at a time, at any pace."""
    with server.connect() as line:
        client = SocketClient(line)
        for number, word in enumerate(asked[0].split(" ")):
            first = {} if number else {"voice": "ada", "seed": asked[1]}
            client.say("text", "a", text=f" {word}" if number else word, **first)
            time.sleep(rng.uniform(0, 0.02))
        client.say("end", "a")
        assert client.until("end", "a")["finish_reason"] == "eos"
        return client.pcm["a"]


def hang_up(server: Server, asked: Asked, rng: random.Random) -> None:
    """In the midst of an answer."""
    text, seed = asked
    body = {"model": "demo", "input": text, "voice": "ada", "seed": seed, "response_format": "pcm"}
    with server.client.stream("POST", "/v1/audio/speech", json=body) as answer:
        for _, _ in zip(range(rng.randrange(4)), answer.iter_raw(), strict=False):
            pass


def cancel(server: Server, asked: Asked, rng: random.Random) -> None:
    """Some of three contexts of a socket, or the whole socket; text that never ends."""
    with server.connect() as line:
        client = SocketClient(line)
        for context in "abc":
            client.say("text", context, text=asked[0], end=rng.random() < 0.5, voice="ada", seed=asked[1])
        time.sleep(rng.uniform(0, 0.2))
        for context in rng.sample("abc", rng.randrange(3)):
            client.say("cancel", context)
            assert client.until("end", context)["finish_reason"] in ("cancelled", "eos")


def wrong(server: Server, asked: Asked, rng: random.Random) -> None:
    """Refused, and said why."""
    body = {"model": "demo", "input": asked[0], "voice": "ada"}
    body |= rng.choice([{"voice": "nobody"}, {"input": ""}, {"speed": 99}, {"input": "x" * 5000}, {"seed": "one"}])
    answer = server.client.post("/v1/audio/speech", json=body)
    assert answer.status_code == 400 and json.loads(answer.content)["error"]["message"]


WAYS = (over_http, over_http, over_socket, in_pieces, in_pieces, hang_up, cancel, wrong)
