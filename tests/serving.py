"""A server of the HTTP and WebSocket API inside the test process, on a free port or without one."""

import asyncio
import contextlib
import io
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import soundfile
import uvicorn
from fastapi import FastAPI
from kept import Kept, kept
from waiting import PATIENCE_S, until
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_socket

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.checkpoint.synthetic import NO_EOS
from qwen_megakernel.engine.audio import Audio
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.server.app import app_of, config_of, make_app
from qwen_megakernel.server.connections import CountedConnections
from qwen_megakernel.server.fronts.front import FrontService
from qwen_megakernel.server.fronts.hub import Hub, Line
from qwen_megakernel.server.fronts.remote import Link, RemoteMetrics
from qwen_megakernel.server.limits import OpenCount
from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.openai.bodies import SPEECH
from qwen_megakernel.server.options import ServerOptions
from qwen_megakernel.server.process import drop_stalled
from qwen_megakernel.server.service import EngineService

TEXT = "Hello there, how are you today?"
_client = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0))
get, post, stream, request = _client.get, _client.post, _client.stream, _client.request
"""As httpx has them, but for their 5 s of patience, and for certificates, which each of its calls loads anew."""


def connect(url: str, **options) -> ClientConnection:
    """A WebSocket, with our patience."""
    return open_socket(url, open_timeout=PATIENCE_S, **options)


MADE: dict[str, Audio] = {}
"""By the model and what was asked of it: the demo says the same to every test."""


class Running:
    """Attributes:
    url: http://127.0.0.1:port.
    """

    def __init__(self, port: int, service: EngineService):
        self.port, self.service = port, service
        self.url, self.socket_url = f"http://127.0.0.1:{port}", f"ws://127.0.0.1:{port}/v1/audio/speech/socket"
        self.stream_url = f"ws://127.0.0.1:{port}/v1/audio/speech/stream"

    def post(self, path: str = SPEECH, **body) -> httpx.Response:
        """The answer to a body: of ada and `TEXT` for speech, unless told otherwise."""
        speech = {"input": TEXT, "voice": "ada"} if path == SPEECH else {}
        return post(self.url + path, json={"model": "demo"} | speech | body)

    def at_rest(self, seconds: float = PATIENCE_S) -> None:
        until(lambda: not self.service.sessions and self.service.engine.health()["streams"] == 0, seconds)


def audio_of(server: Running, text: str = TEXT, seed: int = 5, **options) -> Audio:
    """What the server's engine says, with ada's voice unless told otherwise."""
    return made_by(server.service.engine, text, sampling=SamplingParams(seed=seed), **{"speaker": "ada"} | options)


def made_by(engine: TTSEngine, text: str, **options) -> Audio:
    """What an engine says; made once."""
    asked = f"{engine.backend} {engine.model} {engine.threads} {text!r} {sorted(options.items())}"
    if asked not in MADE:
        MADE[asked] = engine.generate(text, **options)
    return MADE[asked]


def said(server: Running, text: str = TEXT, seed: int = 5, **options) -> bytes:
    """Its PCM."""
    return pcm16(audio_of(server, text, seed, **options).samples)


def access(caplog, count: int) -> list[dict[str, Any]]:
    """The fields of the log's lines about requests, once so many have ended."""
    told = lambda: [each.fields for each in caplog.records if each.name == "qwen_megakernel.access"]  # noqa: E731
    until(lambda: len(told()) >= count)
    assert len(told()) == count, told()
    return told()


def recording(seed: int = 1, seconds: float = 1.0, rate: int = 24000, channels: int = 1) -> bytes:
    """A WAV of noise, from which a voice can be made."""
    file, samples = io.BytesIO(), np.random.default_rng(seed).uniform(-0.3, 0.3, (int(seconds * rate), channels))
    soundfile.write(file, samples.astype(np.float32), rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


@contextlib.contextmanager
def places_taken(engine: TTSEngine, count: int) -> Iterator[None]:
    """`count` utterances are open until the end of the block: their text never comes."""
    utterances = [engine.submit() for _ in range(count)]
    try:
        yield
    finally:
        for utterance in utterances:
            utterance.cancel()


@contextlib.contextmanager
def slots_taken(engine: TTSEngine) -> Iterator[None]:
    """Every slot is taken until the end of the block, by utterances whose text has begun and does not go on."""
    slots = engine.health()["max_streams"]
    with contextlib.ExitStack() as stack:
        for _ in range(slots):
            utterance = engine.submit()
            stack.callback(utterance.cancel)
            utterance.push_text("Hello there, ")
        until(lambda: engine.health()["running"] == slots)
        yield


@contextlib.contextmanager
def running(load: Callable[[], TTSEngine], port: int = 0, model: str = "demo", **options) -> Iterator[Running]:
    """Until the block ends; `load`'s engine is closed then. port: of a server that has ended, to come back there.
    options: those of `ServerOptions`."""
    with served(make_app(load, ServerOptions(**options), model=model), port) as server:
        yield server


@contextlib.contextmanager
def served(app: FastAPI, port: int = 0) -> Iterator[Running]:
    """An app, until the block ends."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        drop_stalled(listener, app.state.service.limits.idle_s)
        server = uvicorn.Server(config_of(app))
        server.server_state.connections = CountedConnections(app.state.connections)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            until(lambda: server.started)
            yield Running(listener.getsockname()[1], app.state.service)
        finally:
            server.should_exit = True
            thread.join(timeout=PATIENCE_S)
            assert not thread.is_alive(), "the server does not end"


@contextlib.contextmanager
def ready(load: Callable[[], TTSEngine], **options) -> Iterator[Running]:
    """The same once the engine is loaded; at the end nothing may run."""
    with running(load, **options) as server:
        until(lambda: server.service.state == "ready")
        yield server
        server.at_rest()


class Front(NamedTuple):
    """A front in this process: its server, and both ends of its socket."""

    server: Running
    line: Line
    link: Link


@contextlib.contextmanager
def fronts_of(service: EngineService, count: int, **options) -> Iterator[list[Front]]:
    """Fronts of a server's engine, in this process, until the block ends. options: those of `ServerOptions`."""
    connections, sockets = [0] * count, [0] * count
    hub, over = Hub(service, Metrics(service, OpenCount(sockets), OpenCount(connections))), threading.Event()

    def tell() -> None:
        while not over.wait(0.02):
            hub.tell(all_up=True)

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        with contextlib.ExitStack() as stack:
            fronts = []
            for index in range(count):
                ours, theirs = socket.socketpair()
                line, link = hub.add(ours), Link()
                front = FrontService(link, theirs, ServerOptions(**options), model="demo")
                counts = OpenCount(connections, index), OpenCount(sockets, index)
                app = app_of(front, RemoteMetrics(link), *counts)
                fronts.append(Front(stack.enter_context(served(app)), line, link))
            until(lambda: all(front.server.service.state == "ready" for front in fronts))
            yield fronts
    finally:
        over.set()
        teller.join()
        hub.close()


def endless(tiny) -> contextlib.AbstractContextManager[Running]:
    """A server whose speech fills every slot; `tiny` is the fixture."""
    folder = tiny("custom_voice", eos_gain=NO_EOS)
    return ready(lambda: TTSEngine.load(folder, device="cpu", max_streams=1, max_positions=48))


def cloning(tiny, **options) -> contextlib.AbstractContextManager[Running]:
    """A server for a Base checkpoint; `tiny` is the fixture."""
    folder, sizes = tiny("base", size="tiny", eos_gain=4.0), {"max_streams": 3, "max_positions": 512}
    return ready(lambda: TTSEngine.load(folder, device="cpu", queue_timeout=PATIENCE_S, **sizes), **options)


def asgi(load: Callable[[], TTSEngine], path: str, receive: Callable, send: Callable, **options) -> None:
    """One request to the app itself, by a client that is made of two functions; afterwards nothing of it is left."""
    kind = "websocket" if path.rpartition("/")[2] in ("socket", "stream") else "http"
    scope = {"type": kind, "path": path, "query_string": b""} | ({"method": "POST"} if kind == "http" else {})
    scope["headers"] = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    app = make_app(load, ServerOptions(**options), model="demo")

    async def main() -> None:
        async with app.router.lifespan_context(app):
            service = app.state.service
            await asyncio.to_thread(until, lambda: service.state != "loading")
            try:
                await asyncio.wait_for(app({"app": app} | scope, receive, send), PATIENCE_S)
            finally:
                assert not service.sessions
                await asyncio.to_thread(until, lambda: service.engine.health()["streams"] == 0)

    asyncio.run(main())


def small_demo(**options) -> Kept:
    sizes = {"max_streams": 4, "max_positions": 160, "max_queue": 4, "queue_timeout": PATIENCE_S}
    return kept("demo", device="cpu", **(sizes | options))


def hold_second_piece(monkeypatch, engine: TTSEngine) -> tuple[list[str], threading.Event]:
    """The pieces that the engine is given from now on, and an event that the second of them waits for."""
    pieces, heard, begin = [], threading.Event(), engine.begin

    def wait_and_begin(piece, *args, **options):
        pieces.append(str(piece))
        assert len(pieces) == 1 or heard.wait(PATIENCE_S)
        return begin(piece, *args, **options)

    monkeypatch.setattr(engine, "begin", wait_and_begin)
    return pieces, heard


def same(made: bytes, truth: bytes) -> bool:
    """But for the last bit: where speech waits for words, frames go through the vocoder in other company, and a CPU's
    sums depend on it."""
    made, truth = (np.frombuffer(pcm, "<i2").astype(int) for pcm in (made, truth))
    return len(made) == len(truth) and np.abs(made - truth).max() <= 1
