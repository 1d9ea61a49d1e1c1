"""The attack rig: a server in a process of its own, raw sockets against it, and what it costs the server.

The server's loop measures itself: the most processor time between two of its beats. That does not depend on what else
the machine does, unlike the time on a clock.
"""

import asyncio
import base64
import contextlib
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

from waiting import PATIENCE_S, until
from websockets.sync.client import ClientConnection, connect

TOKEN = "a secret of the tests"
_ALLOWED_MB = 200
_ALLOWED_TIMES = 25
"""What an attack may cost: memory; and how many times as long as in peace its loop, or a listener, may wait."""
_BEAT_S = 0.005
_SAID = "Hello there, how are you today? " * 8


def main() -> None:
    """The server's process. Arguments: folder for what it tells, and more of `Limits` as JSON."""
    from qwen_megakernel.backend import select
    from qwen_megakernel.backend.interfaces import CpuSpeed
    from qwen_megakernel.engine.options import EngineOptions
    from qwen_megakernel.server.app import make_app, serve
    from qwen_megakernel.server.limits import Limits
    from qwen_megakernel.server.options import ServerOptions
    from qwen_megakernel.server.process import bind, load_for_good

    told, limits = Path(sys.argv[1]), Limits(**json.loads(sys.argv[2]))
    select.measure = lambda *_: CpuSpeed(1, {1: 1e-4})  # beside other work fewer utterances would run at once
    sizes = {"max_streams": 4, "max_positions": 256, "max_queue": 16, "queue_timeout": PATIENCE_S}
    options = EngineOptions(device="cpu", threads=1, **sizes)
    server = ServerOptions(token=TOKEN, limits=limits, allow_upload=True)
    app = make_app(lambda: load_for_good("demo", options), server, model="demo")
    life = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def beating(of) -> AsyncIterator[None]:
        beat = asyncio.create_task(_beat(told / "stall"))
        async with life(of):
            yield
        beat.cancel()

    app.router.lifespan_context = beating
    listener = bind("127.0.0.1", 0)
    (told / "port").write_text(str(listener.getsockname()[1]))
    sys.exit(serve(app, listener))


async def _beat(told: Path) -> None:
    """Keep the worst beat's processor time in a file, until somebody deletes it."""
    worst, before = 0.0, time.thread_time()
    while True:
        await asyncio.sleep(_BEAT_S)
        took, begun = time.thread_time() - before, not told.exists()
        if begun or took > worst:
            worst = 0.0 if begun else took
            new = told.with_suffix(".new")
            new.write_text(str(worst))
            new.replace(told)  # never half a number
        before = time.thread_time()


class Target:
    """The server under attack."""

    def __init__(self, process: subprocess.Popen, told: Path):
        self.process, self._told = process, told
        self.port = int((told / "port").read_text())
        self._lines: list[socket.socket] = []

    def line(self) -> socket.socket:
        line = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines.append(line)
        return line

    def close_lines(self) -> None:
        for line in self._lines:
            line.close()
        self._lines.clear()

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, token: bool = False) -> tuple[int, bytes]:
        """Status and body of an answer."""
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"} if token else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def speaker(self, path: str = "/v1/audio/speech/socket") -> ClientConnection:
        url = f"ws://127.0.0.1:{self.port}{path}"
        bearing = {"Authorization": f"Bearer {TOKEN}"}
        return connect(url, additional_headers=bearing, compression=None, open_timeout=PATIENCE_S, max_size=None)

    def raw_socket(self, path: str = "/v1/audio/speech/socket") -> socket.socket:
        """A WebSocket whose frames the caller makes."""
        line = self.line()
        key = base64.b64encode(os.urandom(16)).decode()
        upgrade = f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13"
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n{upgrade}\r\n\r\n"
        line.sendall(head.encode())
        got = b""
        while b"\r\n\r\n" not in got:
            got += line.recv(1)
        assert got.startswith(b"HTTP/1.1 101")
        return line

    @property
    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def reset_stall(self) -> None:
        (self._told / "stall").unlink(missing_ok=True)
        until(lambda: (self._told / "stall").exists())

    @property
    def stall_s(self) -> float:
        """The most processor time between two beats of its loop since `reset_stall`."""
        return float((self._told / "stall").read_text())

    def log(self) -> str:
        return (self._told / "log").read_text()


@contextlib.contextmanager
def target(folder: Path, **limits) -> Iterator[Target]:
    """A server, which must end well."""
    command = [sys.executable, str(Path(__file__)), str(folder), json.dumps(limits)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: (folder / "port").exists() and (folder / "port").read_text() != "" or process.poll() is not None)
        server = Target(process, folder)
        until(lambda: _answers(server) or process.poll() is not None)
        try:
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            ended = process.wait(timeout=PATIENCE_S)
            server.close_lines()
        assert ended == -signal.SIGTERM, server.log()
        assert "Traceback" not in server.log() and "Error" not in server.log(), server.log()
    finally:
        process.kill()
        process.wait()


def _answers(server: Target) -> bool:
    try:
        return server.ask("/ready")[0] == 200
    except OSError:
        return False


class Listener:
    """Somebody with the token who hears one utterance after the other."""

    def __init__(self, server: Target):
        self._server = server
        self._waits: list[float] = []
        self._wrong: list[Exception] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def _listen(self) -> None:
        try:
            with self._server.speaker() as line:
                for number in range(1_000_000):
                    if self._stop.is_set():
                        return
                    line.send(json.dumps({"type": "text", "context": str(number), "text": _SAID, "end": True}))
                    end, before = False, time.monotonic()
                    while not end:
                        message = line.recv(timeout=PATIENCE_S)
                        now = time.monotonic()
                        self._waits.append(now - before)
                        before = now
                        end = isinstance(message, str) and json.loads(message)["type"] in ("end", "error")
                        assert isinstance(message, bytes) or json.loads(message)["type"] != "error", message
        except Exception as error:
            self._wrong.append(error)

    def __enter__(self) -> "Listener":
        self._thread.start()
        until(lambda: len(self._waits) > 30 or self._wrong)
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join(timeout=PATIENCE_S)
        assert not self._wrong, self._wrong
        assert not self._thread.is_alive()

    def longest_wait(self, during: Callable[[], object]) -> float:
        """The longest wait between two of its messages, in seconds."""
        first = len(self._waits)
        during()
        begun = len(self._waits)
        until(lambda: len(self._waits) > begun + 5 or self._wrong)
        assert not self._wrong, self._wrong
        return max(self._waits[first:])


class Siege:
    """Measures attacks on a server by what the same costs in peace."""

    def __init__(self, server: Target, listener: Listener):
        self.server, self._listener = server, listener
        body = json.dumps({"model": "demo", "input": _SAID[:200], "response_format": "pcm"}).encode()
        ask = partial(server.ask, "/v1/audio/speech", "POST", body, token=True)
        self._calm_wait, self._calm_stall, _ = self._cost(ask)

    def _cost(self, during: Callable[[], object]) -> tuple[float, float, float]:
        before = self.server.memory_mb
        self.server.reset_stall()
        wait = self._listener.longest_wait(during)
        return wait, self.server.stall_s, self.server.memory_mb - before

    def attack(self, attack: Callable[[], object]) -> None:
        """Attack. Others must not notice."""

        def watched() -> None:
            thread = threading.Thread(target=attack_safely)
            thread.start()
            while thread.is_alive():
                assert self.server.ask("/ready")[0] == self.server.ask("/health")[0] == 200
                thread.join(timeout=0.2)

        def attack_safely() -> None:
            try:
                attack()
            except BaseException as error:
                wrong.append(error)

        wrong: list[BaseException] = []
        wait, stall, megabytes = self._cost(watched)
        if wrong:
            raise wrong[0]
        print(f"wait {wait:.2f} ({self._calm_wait:.2f}) s, stall {1000 * stall:.0f} ms, {megabytes:.0f} MB more")
        assert wait < _ALLOWED_TIMES * self._calm_wait, "the listener heard a gap"
        assert stall < _ALLOWED_TIMES * max(self._calm_stall, 0.002), "the event loop stood still"
        assert megabytes < _ALLOWED_MB
        assert "Traceback" not in self.server.log(), self.server.log()


@contextlib.contextmanager
def siege(folder: Path, **limits) -> Iterator[Siege]:
    """A server with a listener, which must end well."""
    with target(folder, **limits) as server, Listener(server) as listener:
        yield Siege(server, listener)


def frame(opcode: int, data: bytes = b"", *, end: bool = True) -> bytes:
    """A client's frame."""
    size = len(data)
    head = bytes([opcode | (0x80 if end else 0)])
    if size < 126:
        head += bytes([0x80 | size])
    else:
        head += struct.pack("!BH", 0x80 | 126, size) if size < 65536 else struct.pack("!BQ", 0x80 | 127, size)
    return head + bytes(4) + data  # a mask of zeros changes nothing


def send_all(line: socket.socket, data: bytes, most: int, seconds: float = 3.0) -> int:
    """Send `data` again and again, until so many bytes are sent, nobody takes them any more, or the line is closed.
    Returns the bytes that were taken."""
    line.setblocking(False)
    sent, end, rest = 0, time.monotonic() + seconds, data
    try:
        while sent < most and time.monotonic() < end:
            try:
                count = line.send(rest)
                sent += count
                rest = rest[count:] or data
                end = time.monotonic() + seconds
            except BlockingIOError:
                time.sleep(0.01)
    except OSError:
        pass
    return sent


def is_closed(line: socket.socket) -> bool:
    """The server has closed it; what it still sent is dropped."""
    line.setblocking(False)
    try:
        while line.recv(1 << 16):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


if __name__ == "__main__":
    main()
