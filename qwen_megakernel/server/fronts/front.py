"""A front: a process that speaks HTTP and WebSockets for an engine in another process."""

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import MutableSequence
from dataclasses import dataclass

from qwen_megakernel.model.voice import Voice
from qwen_megakernel.server.app import app_of, serve
from qwen_megakernel.server.fronts.remote import Link, RemoteEngine, RemoteMetrics, RemoteQuotas
from qwen_megakernel.server.limits import OpenCount
from qwen_megakernel.server.logs import set_up
from qwen_megakernel.server.options import ServerOptions
from qwen_megakernel.server.service import EngineService

log = logging.getLogger(__name__)

_SWITCH_S = 0.0005
"""The interpreter's switch interval. By Python's 5 ms a thread that cuts a long text would hold up the event loop."""


@dataclass(frozen=True)
class Place:
    """What a front is started with besides the server's options.

    Attributes:
        index: its number, from 0.
        line: its end of the socket to the engine's process.
        family, address: where all fronts listen.
        connections, sockets: how many are open, one number a front, in shared memory.
        later: others serve already, so it listens once it is ready.
        log_level: of the package.
    """

    index: int
    line: socket.socket
    family: int
    address: tuple
    connections: MutableSequence[int]
    sockets: MutableSequence[int]
    later: bool
    log_level: int


class FrontService(EngineService):
    """Its engine is in another process, which has loaded it and let it speak."""

    def __init__(self, link: Link, line: socket.socket, options: ServerOptions, *, model: str):
        """`line`: its end of the socket, for the link."""
        super().__init__(lambda: RemoteEngine(link, link.ready.result()), options, model=model)
        self._link, self._line = link, line
        self.quotas = RemoteQuotas(self.keys, link)

    async def _run_engine(self) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self._link, sock=self._line)
        await super()._run_engine()

    def _say_first(self, voice: Voice | None) -> None:
        gc.collect()
        gc.freeze()  # as `load_for_good`
        self._link.up()


def run_front(place: Place, options: ServerOptions, model: str) -> None:
    """Serve until the process is told to stop, or the engine is gone. It ends the process."""
    os.setsid()  # Ctrl-C is for the engine's process, which passes it on: told twice, a front would end at once
    set_up(options.log_format, front=place.index + 1)
    logging.getLogger("qwen_megakernel").setLevel(place.log_level)
    sys.setswitchinterval(_SWITCH_S)
    try:
        code = _serve(place, options, model)
    except Exception:  # multiprocessing would print it, which is no line of the log
        log.critical("a front has failed", exc_info=True)
        code = 1
    logging.shutdown()
    os._exit(code)  # a thread may still wait for the engine's process


def _serve(place: Place, options: ServerOptions, model: str) -> int:
    listener = socket.socket(place.family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(place.address)
    link = Link()
    connections, sockets = (OpenCount(numbers, place.index) for numbers in (place.connections, place.sockets))
    service = FrontService(link, place.line, options, model=model)
    app = app_of(service, RemoteMetrics(link), connections, sockets, until_ready=place.later)
    return serve(app, listener)
