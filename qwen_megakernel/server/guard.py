"""Guard: what every request passes before it is looked at: token, origin, size of its body, time."""

import asyncio
import base64
import hmac
import ipaddress
import json
import logging
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.openai_api import answer
from qwen_megakernel.server.page import PATH as PAGE
from qwen_megakernel.server.service import Limits, Problem

log = logging.getLogger(__name__)

OPEN = ("/health", "/ready")
"""Asked by supervisors, which have no token; they tell nothing of anybody."""

_KNOWN = (PAGE, "/v1/audio/speech", "/v1/models", "/v1/voices", "/health", "/ready", "/metrics", "/openapi.json")


class Guard:
    """ASGI middleware."""

    def __init__(
        self, app: ASGIApp, *, token: str | None, limits: Limits, max_upload: int, metrics: Metrics, page: bool
    ):
        """
        Args:
            token: clients must bear it; None: whoever reaches the loopback interface is trusted, but pages of a
                browser, which can reach it too, are not.
            max_upload: bytes of a body that brings a recording.
            page: there is one at /, which may be read without the token, since it asks for it.
        """
        self._app, self._token, self._limits, self._max_upload = app, token, limits, max_upload
        self._metrics, self._page, self._sockets = metrics, page, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        problem = self._refuses(scope)
        if scope["type"] == "websocket":
            if not problem and self._sockets >= self._limits.connections:
                problem = Problem(503, "busy", "too many sockets are open; try again", True)
            if problem:
                await _deny_socket(problem, send)
                return
            self._sockets += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._sockets -= 1
            return
        path = scope["path"] if scope["path"] in _KNOWN else "other"
        counted = self._counting(path, send)
        if problem:
            await answer(problem, headers=_challenge(problem))(scope, receive, counted)
            return
        await self._bounded(scope, receive, counted)

    def _refuses(self, scope: Scope) -> Problem | None:
        headers = Headers(scope=scope)
        if scope["path"] in OPEN:
            return None
        if self._token is not None:
            if self._bears_token(scope, headers) or self._is_page(scope):
                return None
            return Problem(401, "unauthorized", "send the server's token: Authorization: Bearer TOKEN")
        host = headers.get("host", "")
        if not is_loopback(_name_of(f"//{host}") or ""):
            return Problem(403, "forbidden", f"without a token only localhost is served, not {host[:80]!r}")
        origin = headers.get("origin")
        if origin is not None and _place_of(origin) != host:
            return Problem(403, "forbidden", "pages of other sites are not served without a token")
        return None

    def _bears_token(self, scope: Scope, headers: Headers) -> bool:
        """A browser cannot set a WebSocket's headers: our page, and no other site's, offers the token as a subprotocol,
        in letters that one may have."""
        given = headers.get("authorization", "").encode("latin-1")
        if hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return True
        if _place_of(headers.get("origin", "")) != headers.get("host", ""):
            return False
        wanted = b"bearer." + base64.urlsafe_b64encode(self._token.encode()).rstrip(b"=")
        offered = [name.encode("utf-8", "replace") for name in scope.get("subprotocols", ())]
        return any([hmac.compare_digest(name, wanted) for name in offered])

    def _is_page(self, scope: Scope) -> bool:
        return self._page and scope["type"] == "http" and scope["path"] == PAGE

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A body of so many bytes, nobody who stalls, and an end."""
        answered = False

        async def bounded_send(message: Message) -> None:
            nonlocal answered
            answered = True
            await asyncio.wait_for(send(message), self._limits.idle_s)

        try:
            async with asyncio.timeout(self._limits.total_s):
                body = await asyncio.wait_for(self._body(scope, receive), self._limits.idle_s)
                if body is None:
                    problem = Problem(413, "invalid", f"a body may have {self._most(scope)} bytes")
                    await answer(problem, headers={"Connection": "close"})(scope, receive, bounded_send)
                    return
                await self._app(scope, _replay(body, receive), bounded_send)
        except TimeoutError:
            if answered:
                log.info("a client was too slow")
                return  # an answer that is not complete: the server closes the connection
            problem = Problem(408, "idle", "the request took too long")
            await answer(problem, headers={"Connection": "close"})(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """None: too long."""
        most = self._most(scope)
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdecimal() or len(declared) > 12 or int(declared) > most:
            return None
        body, more = bytearray(), True
        while more and len(body) <= most:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(body) if len(body) <= most else None

    def _most(self, scope: Scope) -> int:
        """Bytes of a body."""
        if scope["path"] in OPEN or self._is_page(scope):
            return 0
        most = self._limits.max_body
        return max(self._max_upload, most) if scope["path"] == "/v1/voices" else most

    def _counting(self, path: str, send: Send) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(path, message["status"]).inc()
            await send(message)

        return counted


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body at once, then what comes behind it: that the client has gone."""
    told = False

    async def replayed() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _name_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _place_of(url: str) -> str | None:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _challenge(problem: Problem) -> dict[str, str]:
    return {"WWW-Authenticate": "Bearer"} if problem.status == 401 else {}


async def _deny_socket(problem: Problem, send: Send) -> None:
    """Before it is accepted: an HTTP answer."""
    body = json.dumps({"error": {"message": problem.message, "code": problem.code}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in _challenge(problem).items()]
    await send({"type": "websocket.http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
