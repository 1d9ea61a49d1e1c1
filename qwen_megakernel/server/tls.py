"""TLS of a connection that has its place already. uvicorn agrees on TLS before it hears of a connection, which then has
no place and no limit."""

import contextlib
import ssl
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class TlsConnection(HttpToolsProtocol):
    """uvicorn's connection.

    Attributes:
        tls: None: there is none.
        early: what has come while TLS is agreed on, first its own bytes and then ours; None: it is not.
    """

    tls: ssl.SSLContext | None = None
    early: bytearray | None = None

    def begin_tls(self) -> None:
        """Call it in `connection_made`."""
        if self.tls:
            self.early = bytearray()
            self._agreeing = self.loop.create_task(self._agree(self.tls))
            self.loop.call_soon(self.loop.call_soon, self._pass_on)  # behind TLS's own `connection_made`

    async def _agree(self, tls: ssl.SSLContext) -> None:
        transport = None
        with contextlib.suppress(OSError):
            transport = await self.loop.start_tls(self.transport, self, tls, server_side=True)
        early, self.early = self.early, None
        if transport is None or transport.is_closing():  # lost, or dropped: some loops return it all the same
            self.connection_lost(None)
            return
        super().connection_made(transport)
        self.data_received(bytes(early or b""))

    def _pass_on(self) -> None:
        """uvloop reads before TLS has begun."""
        tls: Any = self.transport.get_protocol()
        while self.early and not self.transport.is_closing():
            room = tls.get_buffer(len(self.early))
            part = self.early[: len(room)]
            del self.early[: len(part)]
            room[: len(part)] = part
            tls.buffer_updated(len(part))
