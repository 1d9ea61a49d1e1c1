"""Metrics of a server that has no HTTP of its own, for Prometheus."""

import asyncio
from dataclasses import replace

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from qwen_megakernel.server.connections import CountedConnections, protocols_of
from qwen_megakernel.server.limits import OpenCount
from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.process import drop_stalled
from qwen_megakernel.server.service import EngineService

_CONNECTIONS = 16  # open at once


async def listen(service: EngineService, connections: OpenCount, host: str, port: int) -> asyncio.Server:
    """Count what the service does, and answer every request at this port with it. `connections`: the server's own.
    Raises OSError: it cannot listen."""
    service.journal.counts = metrics = Metrics(service, OpenCount(), connections)
    count, state, loop = OpenCount(), ServerState(), asyncio.get_running_loop()
    state.connections = CountedConnections(count)
    limits = replace(service.limits, connections=_CONNECTIONS)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        text, media = metrics.text(Request(scope).headers.get("accept", ""))
        await Response(text, media_type=media)(scope, receive, send)

    http, _ = protocols_of(limits, count, service.journal)
    config = uvicorn.Config(answer, http=http, ws="none", lifespan="off", access_log=False, log_config=None)
    config.load()
    made = lambda: http(config=config, server_state=state, app_state={}, _loop=loop)  # noqa: E731
    server = await loop.create_server(made, host, port, backlog=_CONNECTIONS)
    for listener in server.sockets:
        drop_stalled(listener, limits.idle_s)
    return server
