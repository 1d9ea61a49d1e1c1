"""`serve --front-processes`: the engine in this process, and HTTP in others, which all listen on one port.

    clients ─► front ─┐
    clients ─► front ─┴─ sockets ─► hub ─► engine

The system gives each connection to one of the fronts. This process starts them, and starts one anew that has ended.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.server.fronts.front import Place, run_front
from qwen_megakernel.server.fronts.hub import MOST_UNSENT, Hub, Line
from qwen_megakernel.server.limits import OpenCount
from qwen_megakernel.server.logs import flush
from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.options import ServerOptions
from qwen_megakernel.server.process import ENGINE_GONE, exit_within
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.speech.engine import TTSEngine

log = logging.getLogger(__name__)

_TELL_S = 0.2  # between two messages to the fronts about the engine
_MOST_UNHEARD = 100  # a front that answers none of so many hangs
_SHUTDOWN_S = 10.0  # that a front has to end, after the time that its utterances have


@dataclass
class _Front:
    process: Any  # of multiprocessing
    line: Line


class Fronts:
    """The engine and its front processes."""

    def __init__(
        self,
        load: Callable[[], TTSEngine],
        options: ServerOptions,
        *,
        model: str,
        config: ModelConfig | None,
        count: int,
    ):
        """Takes what `make_app` takes, and raises what it raises. `count`: of front processes."""
        self._context = multiprocessing.get_context("spawn")
        self._connections, self._sockets = (self._context.RawArray("q", count) for _ in range(2))
        self._service = EngineService(load, options, model=model, config=config)
        limits = options.limits
        shares = {name: max(1, getattr(limits, name) // count) for name in ("clones", "clones_a_minute")}
        self._options = replace(options, limits=replace(limits, **shares))
        counts = OpenCount(self._sockets), OpenCount(self._connections)
        self._hub = Hub(self._service, Metrics(self._service, *counts))
        self._fronts: list[_Front] = []
        self._all_up = False  # at least once
        self._stop = asyncio.Event()
        self._signals: list[int] = []

    def serve(self, listener: socket.socket) -> int:
        """Serve until the process is told to stop, or the engine is gone.

        Args:
            listener: bound, and not listening: it keeps the port for the fronts.

        Returns:
            The process's exit code.
        """
        return asyncio.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> int:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # set late: so no other server has the port
        self._listener = listener
        service, loop = self._service, asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        service.start()
        try:
            self._fronts = [self._started(index) for index in range(len(self._connections))]
            while not (self._stop.is_set() or service.gone.is_set()):
                self._look_after_fronts()
                await self._tell()
            await self._end_fronts()
        finally:
            for front in self._fronts:
                front.process.kill()
            await service.close()
            self._hub.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        if service.wrong_default:  # starting it again would not help
            raise service.wrong_default
        flush()
        if self._signals:
            signal.raise_signal(self._signals[0])  # as uvicorn ends a server
        return ENGINE_GONE

    def _signalled(self, number: int) -> None:
        self._signals.append(number)
        self._stop.set()

    def _started(self, index: int, *, later: bool = False) -> _Front:
        ours, theirs = socket.socketpair()
        address, counts = self._listener.getsockname(), (self._connections, self._sockets)
        level = logging.getLogger("qwen_megakernel").level
        place = Place(index, theirs, self._listener.family, address, *counts, later, level)
        arguments = place, self._options, self._service.model
        process = self._context.Process(target=run_front, args=arguments, name=f"front {index + 1}", daemon=True)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: until it has a session of its own
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        theirs.close()
        return _Front(process, self._hub.add(ours))

    async def _tell(self) -> None:
        """Tell the fronts about the engine, and wait a moment."""
        self._hub.tell(all_up=self._all_up)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TELL_S):
                await self._stop.wait()

    def _look_after_fronts(self) -> None:
        self._all_up |= all(front.line.up for front in self._fronts)
        if not self._hub.writes:
            self._service.give_up("dead", "the thread that writes to the fronts has ended")
        for index, front in enumerate(self._fronts):
            line, process = front.line, front.process
            hangs = line.up and (line.unheard > _MOST_UNHEARD or line.unsent > MOST_UNSENT)
            if process.is_alive() and (hangs or line.lost):
                log.error("front %d %s: it is killed", index + 1, "hangs" if hangs else "has left")
                process.kill()
                process.join(_TELL_S)  # else it is looked after again
            if process.is_alive():
                continue
            line.end()
            self._connections[index] = self._sockets[index] = 0
            code = process.exitcode
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            told = f"front {index + 1} (process {process.pid}) has ended {how}"
            others_serve = self._all_up and any(other.line.up for other in self._fronts)
            if not (line.up or others_serve):
                self._service.give_up("failed", f"{told} before it could serve")
                return
            log.error("%s: its utterances are cancelled, and another one starts", told)
            self._fronts[index] = self._started(index, later=True)

    async def _end_fronts(self) -> None:
        """Let the fronts end, with their utterances if we were told to stop, and kill those that do not."""
        service, options = self._service, self._service.options
        end = time.monotonic() + options.grace_seconds + options.drain_seconds + _SHUTDOWN_S
        if service.gone.is_set():  # they hear of it and end by themselves
            end = time.monotonic() + _SHUTDOWN_S
            exit_within(2 * _SHUTDOWN_S)
        else:
            service.state = "draining"
            self._pass_on()
        told = 1
        while any(front.process.is_alive() for front in self._fronts) and time.monotonic() < end:
            if len(self._signals) > told:  # at once, but their logs tell what was cut
                told, end = len(self._signals), min(end, time.monotonic() + _SHUTDOWN_S)
                self._pass_on()
            self._stop.clear()
            await self._tell()

    def _pass_on(self) -> None:
        """Send the last signal to the fronts."""
        for front in self._fronts:
            if not front.line.up:  # nobody speaks there, and it does not hear SIGINT while it imports
                front.process.kill()
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(front.process.pid, self._signals[-1])
