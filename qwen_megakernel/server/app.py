"""`qwen-megakernel serve`: one engine behind HTTP and a WebSocket, in a process that a supervisor looks after."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.middleware import Middleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from qwen_megakernel import __version__
from qwen_megakernel.backend.select import select_backend, select_device
from qwen_megakernel.checkpoint.load import Checkpoint, find_cached
from qwen_megakernel.engine.engine import TTSEngine
from qwen_megakernel.engine.options import check_sizes
from qwen_megakernel.errors import BackendError, CheckpointError
from qwen_megakernel.server.guard import Guard
from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.openai_api import add_api
from qwen_megakernel.server.page import add_page
from qwen_megakernel.server.service import EngineService, Limits
from qwen_megakernel.server.websocket_api import add_socket

log = logging.getLogger(__name__)

ENGINE_GONE = 70
"""Exit code (EX_SOFTWARE) of a server whose engine is dead or could not be loaded: start another."""


def make_app(
    load: Callable[[], TTSEngine],
    *,
    model: str,
    variant: str | None = None,
    token: str | None = None,
    voices: Path | None = None,
    upload: bool = False,
    ui: bool = False,
    log_texts: bool = False,
    limits: Limits | None = None,
) -> FastAPI:
    """The whole API as an ASGI app, with its `EngineService` in `app.state.service`.

    Args:
        load: makes the engine, once the app has started.
        model: the name that clients call the model by.
        variant: the checkpoint's, where it is known already (`check_model`).
        token: that clients must bear; None: only whoever calls us localhost is served.
        voices: a folder of saved voices.
        upload: clients may make voices (Base checkpoints).
        ui: there is a page at / to try it with.
        log_texts: what is said is told to the log.

    Raises:
        BackendError: a token that no client could send.
        CheckpointError, VoiceError: `voices` that the checkpoint cannot speak with.
    """
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
        raise BackendError("the token must be printable ASCII without spaces around it: a header carries it")
    limits = limits or Limits()
    options = {"variant": variant, "voices": voices, "limits": limits, "upload": upload, "log_texts": log_texts}
    service = EngineService(load, model=model, **options)
    metrics = Metrics(service)

    @contextlib.asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.drain()
            await service.close()

    max_upload = limits.max_upload * 4 // 3 + limits.max_body if upload else 0
    guard = Middleware(Guard, token=token, limits=limits, max_upload=max_upload, metrics=metrics, page=ui)
    about = {"title": "qwen_megakernel", "version": __version__, "docs_url": None, "redoc_url": None}
    app = FastAPI(**about, lifespan=life, middleware=[guard])
    app.state.service = service
    add_api(app, service, metrics, upload=upload)
    add_socket(app, service, metrics)
    if ui:
        add_page(app)
    return app


def check_model(model: str, *, backend: str, device: str | None, max_streams: int, max_positions: int) -> str | None:
    """What can be known of `TTSEngine.load`'s arguments without loading, so that a server which can never be ready does
    not begin to listen.

    Returns:
        The checkpoint's variant; None for a hub id that is not whole in the cache, which is left to the download.

    Raises:
        BackendError: sizes, device or backend cannot be had here.
        CheckpointError: no such model, or a folder that is none.
    """
    check_sizes(max_streams=max_streams, max_positions=max_positions)
    device = select_device(device)
    select_backend(backend, device)
    if (folder := find_cached(model)) is None:
        return None
    try:
        config = Checkpoint.open(folder).config
    except CheckpointError:
        if folder == Path(model).expanduser():
            raise
        return None
    select_backend(backend, device, config=config)
    return config.variant


def load_for_good(model: str, **options) -> TTSEngine:
    """For a process that does nothing else: what is there by then stays, and no garbage collection has to walk through
    it, with all of torch, while streams wait.

    Args:
        **options: `TTSEngine.load`'s.
    """
    engine = TTSEngine.load(model, **options)
    gc.collect()
    gc.freeze()
    return engine


def protocol_of(header_s: float) -> type[HttpToolsProtocol]:
    """uvicorn's, which waits for the head of a request for ever: here it closes who does not send one within
    `header_s` seconds."""

    class Protocol(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self._wait()
            super().data_received(data)

        def on_headers_complete(self) -> None:
            self._wait_no_longer()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._wait_no_longer()
            super().connection_lost(exc)

        def _wait(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(header_s, self.transport.close)

        def _wait_no_longer(self) -> None:
            if self._timer:
                self._timer.cancel()
                self._timer = None

    return Protocol


class _Server(uvicorn.Server):
    """Told to stop, it first lets what is being said be said."""

    def __init__(self, config: uvicorn.Config, service: EngineService):
        super().__init__(config)
        self._service, self._leaving = service, False

    def handle_exit(self, sig: int, frame) -> None:
        if self._leaving or sig == signal.SIGINT or not self.started:
            super().handle_exit(sig, frame)
        else:
            self._leaving = True
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._leave(sig, frame)))

    async def startup(self, sockets=None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def _leave(self, sig: int, frame) -> None:
        log.info(
            "told to stop: %d utterances may end within %g s", len(self._service.open), self._service.limits.drain_s
        )
        await self._service.drain()
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        if self._service.gone.is_set():
            if not self.should_exit:
                last = threading.Timer(self._service.limits.drain_s + 5, os._exit, (ENGINE_GONE,))
                last.daemon = True  # for a shutdown that waits for a device which does not answer
                last.start()
            self.should_exit = True
        return await super().on_tick(counter)


def serve(app: FastAPI, host: str, port: int) -> int:
    """Until it is told to stop, or its engine is gone; the process's exit code.

    Raises:
        BackendError: the port cannot be had.
    """
    service: EngineService = app.state.service
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        access_log=False,  # texts and voices are nobody's business; /metrics counts
        log_level="warning",
        http=protocol_of(service.limits.header_s),
        ws="websockets-sansio",
        ws_ping_timeout=service.limits.idle_s,  # who does not read is let go by us, with a word
        ws_max_size=service.limits.max_body * 4,
        ws_per_message_deflate=False,  # PCM does not get smaller, and its first chunk would wait for it
        limit_concurrency=service.limits.connections,
        timeout_keep_alive=int(service.limits.idle_s),
        timeout_graceful_shutdown=3,  # behind the drain
    )
    try:
        listener = config.bind_socket()  # before anything is loaded, which a process that ends would not wait for
    except (SystemExit, OverflowError):  # uvicorn has told why; no number of a port
        raise BackendError(f"cannot listen on {host}:{port}; choose another --port") from None
    _Server(config, service).run(sockets=[listener])
    return ENGINE_GONE if service.gone.is_set() else 0
