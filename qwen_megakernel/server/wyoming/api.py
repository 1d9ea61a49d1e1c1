"""`qwen-megakernel wyoming`: the engine as Home Assistant's voice, over TCP. docs/home_assistant.md describes it."""

import asyncio
import logging
import signal
import socket
from typing import Any

from wyoming.event import Event
from wyoming.info import Attribution, Info, TtsProgram, TtsVoice

from qwen_megakernel import __version__
from qwen_megakernel.errors import BackendError, TTSError
from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.limits import OpenCount
from qwen_megakernel.server.logs import flush
from qwen_megakernel.server.process import END_S, ENGINE_GONE, drop_stalled, exit_within
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.server.tasks import cancelled, first_of
from qwen_megakernel.server.wyoming.connection import Connection
from qwen_megakernel.speech.saved_voices import DEFAULT_VOICE
from spoken_text.languages import codes_of

log = logging.getLogger(__name__)


class WyomingServer:
    """A Wyoming server over TCP. Make it and run it in one event loop.

    Attributes:
        open: counts its connections.
    """

    def __init__(self, service: EngineService):
        self.service = service
        self.open = OpenCount()
        self.info: Event | None = None
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()
        self._connections: dict[asyncio.Task[None], Connection] = {}

    def stop(self, *, drain: bool) -> None:
        """End `run`. `drain`: first let running utterances end. A second call never waits for them."""
        if not drain or self._stopping.is_set():
            self._at_once.set()
        self._stopping.set()

    async def run(self, listener: socket.socket) -> None:
        """Load the engine, then serve until `stop` or until the engine is gone (`service.gone`).

        Args:
            listener: a bound socket; it listens once the engine is ready.

        Raises:
            BackendError: the port has been taken since `bind`.
            RequestError: the checkpoint does not have a default voice or the like.
        """
        service = self.service
        service.start()
        try:
            while service.state == "loading" and not self._stopping.is_set():
                await asyncio.sleep(0.02)
            if service.state == "ready" and not self._stopping.is_set():
                self.info = _info(service)
                await self._serve(listener)
            if service.wrong_default:  # starting it again would not help
                raise service.wrong_default
        finally:
            service.journal.over = True
            listener.close()
            await cancelled(list(self._connections))
            await service.close()

    async def _serve(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        try:
            limits = self.service.limits
            # asyncio accepts up to `backlog` callers at once, before it tells of the first: each is an open file.
            most, backlog = limits.max_body, limits.spare_connections
            server = await asyncio.start_server(self._accept, sock=listener, limit=most, backlog=backlog)
        except OSError as error:
            raise BackendError(f"cannot listen on {host}:{port}: {error}; choose another --port") from None
        log.info("listening on %s:%d", host, port)
        await first_of(self._stopping.wait(), self.service.gone.wait())
        if not self.service.gone.is_set():
            await first_of(self.service.grace(), self._at_once.wait(), self.service.gone.wait())
        server.close()
        if not self.service.gone.is_set():
            await first_of(self.service.drain(), self._at_once.wait(), self.service.gone.wait())

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.info, "it listens once the engine is ready"
        connection = Connection(self.service, self.info, reader, writer)
        most = self.service.limits.connections
        if len(self._connections) >= most:  # nobody may take all places by saying nothing
            resting = [task for task, other in self._connections.items() if other.rests]
            if longest := min(resting, key=lambda task: self._connections[task].rests_since, default=None):
                del self._connections[longest]
                longest.cancel()
        if len(self._connections) < most:
            job = connection.run()
        else:
            job = connection.refuse(ApiError(503, "busy", "too many connections are open; try again", True))
        task = asyncio.create_task(job)  # our own task: asyncio logs an error if one of its tasks is cancelled
        self._connections[task] = connection
        self.open.here = len(self._connections)
        task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task, None)
        self.open.here = len(self._connections)


def _info(service: EngineService) -> Event:
    """The answer to `describe`."""
    about: dict[str, Any] = {
        "attribution": Attribution("Qwen3-TTS, Qwen team", "https://github.com/QwenLM/Qwen3-TTS"),
        "installed": True,
        "version": __version__,
    }
    languages = codes_of(service.engine.languages)
    voices = [
        TtsVoice(name=name, description=name, languages=languages, **about)
        for name in service.voice_names() or [DEFAULT_VOICE]
    ]
    about |= {"name": "qwen_megakernel", "description": f"Qwen3-TTS: {service.model}"}
    return Info(tts=[TtsProgram(voices=voices, supports_synthesize_streaming=True, **about)]).event()


async def tell_metrics(server: WyomingServer, host: str, port: int) -> asyncio.Server:
    """Count what the server does, and answer Prometheus at this port. Its connections have the limits of HTTP: whoever
    says nothing there takes no descriptors from those who speak. Returns what answers. Raises BackendError: packages
    are missing, or the port is taken."""
    try:
        from qwen_megakernel.server.scrapes import listen
    except ModuleNotFoundError as error:
        raise BackendError(f"--metrics-port needs {error.name}: in the checkout, pip install -e '.[serve]'") from None
    try:
        return await listen(server.service, server.open, host, port)
    except OSError as error:
        raise BackendError(f"cannot listen on {host}:{port}: {error}; choose another --metrics-port") from None


# ---------------------------------------------------------------- the process


def serve(service: EngineService, listener: socket.socket) -> int:
    """Serve until the process is told to stop or the engine is gone. SIGTERM lets running utterances end. Ctrl-C or a
    second signal ends them at once.

    Args:
        service: not started yet.
        listener: a socket of `bind`; it listens once the engine is ready, so that clients are refused until then.

    Returns:
        The process's exit code.

    Raises:
        BackendError: the port has been taken since `bind`.
        CheckpointError, RequestError: the checkpoint does not have such a voice or language.
    """
    drop_stalled(listener, service.limits.idle_s)
    told: list[int] = []

    async def main() -> None:
        server, loop = WyomingServer(service), asyncio.get_running_loop()
        if (port := service.options.metrics_port) is not None:
            await tell_metrics(server, listener.getsockname()[0], port)

        def stop(number: int) -> None:
            told.append(number)
            server.stop(drain=number == signal.SIGTERM)

        async def end_if_gone() -> None:
            await service.gone.wait()
            exit_within(END_S)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        watch = asyncio.create_task(end_if_gone())
        try:
            await server.run(listener)
        finally:
            watch.cancel()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    try:
        asyncio.run(main())
    except TTSError:
        raise
    except Exception as error:  # such as asyncio's own: it starts a thread to end others
        if not told:
            raise
        log.error("the server did not end in order: %r", error)
    flush()
    if service.gone.is_set():
        return ENGINE_GONE
    if told:  # the parent process sees that a signal ended this one
        signal.raise_signal(told[0])
    return 0
