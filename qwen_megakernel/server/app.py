"""`qwen-megakernel serve`: one engine behind HTTP and a WebSocket, in a process that a supervisor restarts."""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from functools import partial
from typing import Any

import anyio.lowlevel
import uvicorn
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.websockets import WebSocket

from qwen_megakernel import __version__
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.choices import SOCKET_PATH
from qwen_megakernel.errors import BackendError
from qwen_megakernel.server.connections import CountedConnections, protocols_of
from qwen_megakernel.server.guard import OPEN, Guard
from qwen_megakernel.server.limits import OpenCount
from qwen_megakernel.server.logs import FewLines, flush
from qwen_megakernel.server.metrics import AnyMetrics, Metrics, add_state
from qwen_megakernel.server.omni.api import PATH as STREAM_PATH
from qwen_megakernel.server.omni.api import Stream
from qwen_megakernel.server.openai import api as openai
from qwen_megakernel.server.options import ServerOptions
from qwen_megakernel.server.origins import Origins
from qwen_megakernel.server.page import DOCS, add_docs, add_page
from qwen_megakernel.server.page import PATH as PAGE
from qwen_megakernel.server.process import END_S, ENGINE_GONE, drop_stalled, exit_within
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.server.socket.api import Socket
from qwen_megakernel.server.socket_line import MAX_RECORDING, SocketLine
from qwen_megakernel.server.tasks import in_thread
from qwen_megakernel.server.watch import Watched
from qwen_megakernel.speech.engine import TTSEngine

log = logging.getLogger(__name__)

_FEW_LINES = FewLines()
_LINGER_S = 2.0  # after the drain, until connections are dropped


def make_app(
    load: Callable[[], TTSEngine],
    options: ServerOptions | None = None,
    *,
    model: str,
    config: ModelConfig | None = None,
    until_ready: bool = False,
) -> FastAPI:
    """The whole API as an ASGI app. `app.state.service` is its `EngineService`, which takes the same arguments.
    `app.state.max_message` is the largest WebSocket message, in bytes.

    Args:
        load: makes the engine, once the app has started.
        options: None: the defaults of `ServerOptions`.
        until_ready: the app has started once requests are served. Without an engine its start fails.

    Raises:
        BackendError: `allow_origins` are wrong.
        CheckpointError, VoiceError: the checkpoint cannot speak with the voices, or an alias leads nowhere.
    """
    service = EngineService(load, options or ServerOptions(), model=model, config=config)
    sockets = OpenCount()
    connections = OpenCount()
    return app_of(service, Metrics(service, sockets, connections), connections, sockets, until_ready=until_ready)


def app_of(
    service: EngineService,
    metrics: AnyMetrics,
    connections: OpenCount,
    sockets: OpenCount,
    *,
    until_ready: bool = False,
) -> FastAPI:
    """As `make_app`, over a service of one's own. `connections`, `sockets`: those that are open."""
    options = service.options
    service.journal.counts = metrics

    @contextlib.asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        service.start()
        await anyio.lowlevel.checkpoint()  # Starlette waits by it: load its parts now, not while somebody speaks
        try:
            while until_ready and service.state == "loading":
                await asyncio.sleep(0.05)
            if until_ready and service.gone.is_set():
                raise RuntimeError(f"the engine could not be made ready: {service.error}")
            yield
        finally:
            await service.drain()
            await service.close()

    about: dict[str, Any] = {"title": "qwen_megakernel", "version": __version__, "docs_url": None, "redoc_url": None}
    lines: dict[str, type[SocketLine]] = {SOCKET_PATH: Socket, STREAM_PATH: Stream}
    guard = Middleware(
        Guard,
        service,
        Origins(options.allow_origins, has_token=service.keys.needed),
        paths={PAGE, DOCS, "/openapi.json", "/metrics", *OPEN, *openai.PATHS},
        sockets={SOCKET_PATH: "socket", STREAM_PATH: "stream"},
        open_sockets=sockets,
        bodies=openai.largest_bodies(options),
    )
    app = FastAPI(**about, lifespan=life, middleware=[guard])
    app.state.service = service
    app.state.connections, app.state.metrics = connections, metrics
    openai.add_api(app, service)
    add_state(app, service, metrics)
    for path, kind in lines.items():
        _add_socket(app, path, kind)
    # Twice the real limit: a client that sends a little more gets an error, not a broken connection.
    recordings = options.allow_upload or options.allow_clone
    app.state.max_message = max(options.limits.max_body * 4, MAX_RECORDING * 2 * recordings)
    if options.ui:
        add_page(app)
    if not service.keys.needed:
        add_docs(app)
    return app


def _add_socket(app: FastAPI, path: str, kind: type[SocketLine]) -> None:
    @app.websocket(path)
    async def run(websocket: WebSocket) -> None:
        await kind(websocket, app.state.service).run()


def config_of(app: FastAPI, **more: Any) -> uvicorn.Config:
    """uvicorn's options for an app of `make_app`. `more`: further ones."""
    service: EngineService = app.state.service
    limits, options = service.limits, service.options
    http, ws = protocols_of(limits, app.state.connections, service.journal)
    config = uvicorn.Config(
        app,
        http=http,
        ws=ws,
        access_log=False,  # journal.py writes one, and knows what a request was about
        log_level="warning",
        ws_ping_timeout=limits.idle_s,  # we disconnect a client that does not read sooner, and say why
        ws_max_size=app.state.max_message,
        ws_per_message_deflate=False,  # PCM hardly shrinks, and compressing the first chunk would delay it
        timeout_keep_alive=max(1, round(limits.idle_s)),
        timeout_graceful_shutdown=3,  # after the drain
        log_config=None,  # its lines go where ours go
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        ssl_keyfile_password=options.ssl_keyfile_password,
        ssl_ca_certs=options.ssl_ca_certs and str(options.ssl_ca_certs),
        ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE,
        **more,
    )
    logging.getLogger("uvicorn.error").addFilter(_FEW_LINES)
    config.load()
    if config.ssl and options.ssl_certfile:
        files = [path for path in (options.ssl_certfile, options.ssl_keyfile) if path]
        service.watched.append(Watched("the certificate", files, partial(_renew, config.ssl, options)))
        http.tls, config.ssl = config.ssl, None  # our connections begin TLS themselves
    return config


def check_certificate(options: ServerOptions) -> None:
    """Raises BackendError: the files for TLS cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if options.ssl_certfile:
            _renew(context, options)
        if options.ssl_ca_certs:
            context.load_verify_locations(options.ssl_ca_certs)
    except OSError as error:
        files = [str(path) for path in (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs) if path]
        words = f"the files for TLS, {', '.join(files)}, cannot be used: {error.strerror or error}"
        remedy = "give a certificate and its key, PEM, with --ssl-keyfile-password if it has one"
        raise BackendError(f"{words}; {remedy}") from None


def _renew(context: ssl.SSLContext, options: ServerOptions) -> None:
    """New connections get the certificate as its files are now. A first context tries it: where the key does not fit
    yet, the served one would be left without either."""
    assert options.ssl_certfile
    password = options.ssl_keyfile_password or ""  # None would ask at the terminal, and wait for ever
    for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
        each.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password)


class _Server(uvicorn.Server):
    """At SIGTERM it first lets running utterances end."""

    def __init__(self, config: uvicorn.Config, service: EngineService, connections: OpenCount):
        super().__init__(config)
        self.server_state.connections = CountedConnections(connections)
        self._service = service
        self._stopping = False

    def handle_exit(self, sig: int, frame) -> None:
        if self._stopping or sig == signal.SIGINT or not self.started:
            super().handle_exit(sig, frame)
        else:
            self._stopping = True
            loop = asyncio.get_running_loop()
            context = Context()  # the signal may come amid a request's code
            loop.call_soon_threadsafe(lambda: loop.create_task(self._drain_and_exit(sig, frame)), context=context)

    async def _drain_and_exit(self, sig: int, frame) -> None:
        open_now, options = len(self._service.sessions), self._service.options
        words = "stopping: requests are taken for %g s more; then running speech (%d now) has %g s to end"
        log.info(words, options.grace_seconds, open_now, options.drain_seconds)
        await self._service.drain()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets=None) -> None:
        """Clients that do not take the end of their answer, or do not send the end of their request, have a moment."""

        def drop_all() -> None:
            ours: Any = self.server_state.connections
            for connection in list(ours):
                connection.drop()

        self._service.journal.over = True
        late = asyncio.get_running_loop().call_later(_LINGER_S, drop_all)
        await super().shutdown(sockets)
        late.cancel()
        await in_thread(flush)

    async def on_tick(self, counter: int) -> bool:
        if self._service.gone.is_set():
            if not self.should_exit:
                exit_within(END_S)
            self.should_exit = True
        return await super().on_tick(counter)


def serve(app: FastAPI, listener: socket.socket) -> int:
    """Serve on a bound socket until the process is told to stop or the engine is gone.

    Returns:
        The process's exit code.
    """
    service: EngineService = app.state.service
    config = config_of(app)
    drop_stalled(listener, service.limits.idle_s)
    _Server(config, service, app.state.connections).run(sockets=[listener])
    if service.wrong_default:  # starting it again would not help
        raise service.wrong_default
    return ENGINE_GONE if service.gone.is_set() else 0
