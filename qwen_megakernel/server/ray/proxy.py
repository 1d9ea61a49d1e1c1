"""Middleware for Ray Serve's proxies: it tells a client that its replica is lost. Without it the client gets a bare
500, or its WebSocket is cut.

Every Ray node needs this in its environment:
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=qwen_megakernel.serve_ray_proxy.middleware`.
"""

import json

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOST = {"code": "dead", "message": "the engine is gone; try again", "retryable": True}  # as ApiError.of(EngineDied)
_LATER = 1013  # closing code


def middleware() -> list[Middleware]:
    """Serve calls this in each of its proxies."""
    return [Middleware(LostReplica)]


class LostReplica:
    """ASGI middleware. If a replica dies before it answers, Serve's proxy returns no answer. If audio has begun, the
    audio is cut: an HTTP client sees it because the last chunk is missing.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = accepted = over = False

        async def received() -> Message:
            nonlocal over
            message = await receive()
            over |= message["type"].endswith(".disconnect")
            return message

        async def sent(message: Message) -> None:
            nonlocal begun, accepted, over
            begun = True
            accepted |= message["type"] == "websocket.accept"
            over |= message["type"] == "websocket.close"
            await send(message)

        await self._app(scope, received, sent)
        if over or scope["type"] not in ("http", "websocket"):
            return
        if not begun:
            error = {"type": "server_error", "param": None} | _LOST
            await JSONResponse({"error": error}, 503, headers={"Retry-After": "1"})(scope, receive, send)
        elif accepted:
            await send({"type": "websocket.send", "text": json.dumps({"type": "error"} | _LOST)})
            await send({"type": "websocket.close", "code": _LATER})
