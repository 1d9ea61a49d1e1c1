"""Guard: checks each request's token, origin, body size and time before the API sees it."""

import asyncio
import base64
import binascii
import logging
from collections.abc import Collection, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected

from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.keys import Key
from qwen_megakernel.server.limits import OpenCount
from qwen_megakernel.server.origins import Origins, came_by_proxy, is_own, is_preflight, split
from qwen_megakernel.server.page import PATH as PAGE
from qwen_megakernel.server.process import is_loopback
from qwen_megakernel.server.records import CURRENT, Record
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.speech.patience import within

log = logging.getLogger(__name__)

OPEN = ("/health", "/ready", "/version")
"""Supervisors ask these paths without a token; the answers say nothing about any client."""

_HEADS = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_SCHEMES = ("bearer", "api-key")  # in any case of letters; the second is what LiveKit's Qwen3-TTS client sends


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer to a request that failed, in OpenAI's shape. The request's record has the error then."""
    if record := CURRENT.get():
        record.error = error
    more = {"Retry-After": str(error.retry_s)} if error.retryable else {}
    return JSONResponse({"error": error.body}, error.status, headers={**(headers or {}), **more})


class Guard:
    """ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        service: EngineService,
        origins: Origins,
        *,
        paths: Collection[str],
        sockets: Mapping[str, str],
        open_sockets: OpenCount,
        bodies: Mapping[str, int],
    ):
        """
        Args:
            service: if it needs no keys, loopback clients are trusted, except web pages of other sites. A browser on
                this machine lets such pages send requests too. The page at / needs no key, because it asks for it.
            origins: of other sites whose pages may use the server.
            paths: of HTTP, that are counted each by itself.
            sockets: paths of WebSockets -> names of their protocols.
            open_sockets: is counted here.
            bodies: path -> bytes of the largest body, where it may be larger than `max_body`. A path that ends with a
                slash stands for those right below it.
        """
        self._app = app
        self._service = service
        self._keys = service.keys
        self._origins = origins
        self._limits = service.limits
        self._page = service.options.ui
        self._paths = paths
        self._sockets = sockets
        self._bodies = bodies
        self._open_sockets = open_sockets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        with self._service.journal.entry(self._record_of(scope)) as record:
            await self._serve(scope, receive, send, record)

    def _record_of(self, scope: Scope) -> Record:
        headers, path = Headers(scope=scope), scope["path"]
        is_socket = scope["type"] == "websocket"
        return Record(
            protocol=self._sockets.get(path, "websocket") if is_socket else "http",
            id=headers.get("x-request-id", ""),
            client=(scope.get("client") or ("",))[0],
            method="" if is_socket else scope["method"][:20],
            path=path,
            route=path if path in (self._sockets if is_socket else self._paths) else "other",
            traceparent=headers.get("traceparent", ""),
        )

    async def _serve(self, scope: Scope, receive: Receive, send: Send, record: Record) -> None:
        headers, is_socket = Headers(scope=scope), scope["type"] == "websocket"
        preflight = not is_socket and is_preflight(scope["method"], headers)
        told = self._told(record, {} if is_socket or preflight else self._origins.shared(headers), send)
        try:
            await self._answer(scope, receive, told, record, preflight=preflight)
        except asyncio.CancelledError:
            if not is_socket:
                record.error = ApiError(503, "closing", "the answer was cut: the server has ended")
            raise
        except ClientDisconnected:  # a WebSocket's client has gone before its answer
            pass
        except Exception as failure:  # of ours: it must not end up in a log without the request's id
            log.exception("a request failed")
            record.error = record.error or ApiError.of(failure)
            if record.status is None:
                await error_response(record.error)(scope, receive, told)

    async def _answer(self, scope: Scope, receive: Receive, told: Send, record: Record, *, preflight: bool) -> None:
        headers, is_socket = Headers(scope=scope), scope["type"] == "websocket"
        if preflight:
            await self._answer_to_preflight(headers)(scope, receive, told)
            return
        if not is_socket and scope["method"] == "HEAD":  # the protocol leaves out the body
            scope = dict(scope, method="GET")
        if error := self._check_access(scope, record) or (self._check_socket(scope) if is_socket else None):
            more = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
            await error_response(error, headers=more)(scope, receive, told)  # before a WebSocket is accepted
        elif not is_socket:
            await self._run_within_limits(scope, receive, told)
        else:
            self._open_sockets.here += 1
            try:
                await self._app(scope, receive, told)
            finally:
                self._open_sockets.here -= 1

    def _check_access(self, scope: Scope, record: Record) -> ApiError | None:
        """Why the client is refused; None if it is not. The record gets the name of its key."""
        headers = Headers(scope=scope)
        if scope["path"] in OPEN:
            return None
        if self._keys.needed:
            if key := self._key_of(scope, headers):
                record.key = key.name
                return None
            if self._is_page(scope):
                return None
            words = "that is not this server's token" if "authorization" in headers else "this server has a token"
            return ApiError(401, "unauthorized", f"{words}: send the header Authorization: Bearer TOKEN")
        host = headers.get("host", "localhost")  # every browser sends it; some old programs do not
        if not is_loopback(split(f"//{host}").hostname or ""):
            words = f"without a token this server answers only localhost, not {host[:80]!r}"
            return ApiError(403, "forbidden", f"{words}: start the server with a token")
        if proxy := came_by_proxy(headers):
            words = f"without a token this server answers no proxy, got the header {proxy}"
            return ApiError(403, "forbidden", f"{words}: start the server with a token")
        return None if self._origins.may_ask(headers) else _foreign(headers)

    def _answer_to_preflight(self, headers: Headers) -> Response:
        told = self._origins.answer_to_preflight(headers)
        return error_response(_foreign(headers)) if told is None else Response(status_code=204, headers=told)

    def _key_of(self, scope: Scope, headers: Headers) -> Key | None:
        """The key is in the header, or in a subprotocol, because browsers cannot set a WebSocket's headers. Only our
        own page and listed ones may use the subprotocol. The key is in base64url there, which subprotocols allow."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() in _SCHEMES and (key := self._keys.of(given.strip().encode("latin-1"))):
            return key
        if not (is_own(headers) or self._origins.are_listed(headers.get("origin", ""))):
            return None
        for name in scope.get("subprotocols", ()):
            if key := self._keys.of(_unpacked(name)):
                return key
        return None

    def _check_socket(self, scope: Scope) -> ApiError | None:
        if self._open_sockets.total >= self._limits.connections:
            return ApiError(503, "busy", "too many sockets are open; try again", True)
        if scope["path"] not in self._sockets:
            words = f"there is no WebSocket at {scope['path'][:80]!r}: use {' or '.join(self._sockets)}"
            return ApiError(404, "invalid", words)
        # A proxy can ask another server now; once a socket is accepted it cannot.
        if self._service.state in ("loading", "draining") and not self._service.serves:
            return ApiError(503, "closing", f"the server is {self._service.state}; try again", True)
        return None

    def _is_page(self, scope: Scope) -> bool:
        return self._page and scope["type"] == "http" and scope["path"] == PAGE

    async def _run_within_limits(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app, with limits on the body's size, each wait for the client, and the whole request."""
        answered = False

        async def send_in_time(message: Message) -> None:
            nonlocal answered
            answered = True
            async with within(self._limits.idle_s):
                await send(message)

        try:
            async with asyncio.timeout(self._limits.total_s):
                async with within(self._limits.idle_s):
                    body = await self._body(scope, receive)
                if body is None:
                    words = f"the body is too long: send at most {self._max_body(scope)} bytes"
                    error = ApiError(413, "invalid", words)
                    await error_response(error, headers={"Connection": "close"})(scope, receive, send_in_time)
                    return
                whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

                async def receive_again() -> Message:  # the body, then what follows: the client's disconnect
                    return whole.pop() if whole else await receive()

                await self._app(scope, receive_again, send_in_time)
        except TimeoutError:
            if answered:
                record = CURRENT.get()
                assert record
                record.error = ApiError(408, "slow", "the client does not read what it asked for")
                return  # the answer is incomplete, so the server closes the connection
            most = f"{self._limits.idle_s:g} s for its body, or {self._limits.total_s:g} s in all"
            error = ApiError(408, "idle", f"the request took more than {most}: send it at once, with less text")
            await error_response(error, headers={"Connection": "close"})(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if it is too long."""
        most = self._max_body(scope)
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "0")
        if not most and "transfer-encoding" in headers:  # nobody may hold a connection by a body that is not wanted
            return None
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

    def _max_body(self, scope: Scope) -> int:
        """The largest allowed body of this request, in bytes."""
        if scope["path"] in OPEN or self._is_page(scope):
            return 0
        path, below = scope["path"], f"{scope['path'].rpartition('/')[0]}/"
        return self._bodies.get(path) or self._bodies.get(below) or self._limits.max_body

    def _told(self, record: Record, headers: Mapping[str, str], send: Send) -> Send:
        """A `send` that notes the answer, and adds these headers and the request's id to it."""

        async def send_told(message: Message) -> None:
            if message["type"] in _HEADS:
                record.status = message.get("status", 101)
                added = MutableHeaders(scope=message)
                added.update(headers)
                added["X-Request-Id"] = record.id
                if self._service.state == "draining" and message["type"] == "http.response.start":
                    added["Connection"] = "close"  # the client's next request goes to another server
            await send(message)

        return send_told


def _unpacked(subprotocol: str) -> bytes:
    """The key in a subprotocol; empty if there is none."""
    scheme, _, packed = subprotocol.partition(".")
    if scheme.lower() != "bearer":
        return b""
    try:
        return base64.urlsafe_b64decode(packed.encode("utf-8", "replace") + b"==")
    except binascii.Error:
        return b""


def _foreign(headers: Headers) -> ApiError:
    """The refusal of a page of another site."""
    origin = headers.get("origin", "")[:80]
    words = f"this server answers no page of another site, got Origin {origin!r}"
    return ApiError(403, "forbidden", f"{words}: if you trust it, start the server with --allow-origin ORIGIN")
