"""Where a server's socket is, and what it says if it refuses the connection.

This module imports no torch, because a server's client needs none.
"""

import json
from urllib.parse import urlsplit, urlunsplit

from websockets.exceptions import InvalidStatus
from websockets.http11 import Response

from qwen_megakernel.choices import SOCKET_PATH
from qwen_megakernel.errors import RequestError

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_BEGINNINGS = [SOCKET_PATH.rsplit("/", parts)[0] for parts in range(5)]  # "/v1/audio/speech" ... "/v1", ""
_MOST_WORDS = 300  # characters of a server's answer in an error message


def socket_url(url: str) -> str:
    """The URL of a server's socket. `url`: that URL, or the server's, such as http://HOST:8000, ws://HOST/v1 or
    https://HOST/PREFIX. A proxy's own path for the socket stands behind ws:// or wss://. Raises RequestError: it is no
    URL of a server."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in _SCHEMES and parts.hostname and parts.port != 0  # reading a wrong port raises
    except (ValueError, TypeError, AttributeError):
        known = False
    if not known:
        raise RequestError(
            f"url must be a server's, such as ws://HOST:8000 or wss://HOST, or end with {SOCKET_PATH}, got {url!r}",
            field="url",
        )
    path = parts.path.rstrip("/")
    if path.endswith(SOCKET_PATH):
        begins = path.removesuffix(SOCKET_PATH)
    else:
        begins = next(path.removesuffix(some) for some in _BEGINNINGS if path.endswith(some))
        if begins and begins == path and parts.scheme.startswith("ws"):
            return url
    return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, begins + SOCKET_PATH, parts.query, ""))


class HandshakeRefused(InvalidStatus):
    """The server answered the handshake with an HTTP error. The message says what to do."""

    def __init__(self, response: Response, url: str, token: str | None):
        super().__init__(response)
        self._url, self._token = url, token

    def __str__(self) -> str:
        status = self.response.status_code
        if status == 401:
            why = "that is not its token" if self._token else "it has a token"
            # Pipecat strikes out what stands behind "token=", but not a bracket.
            return f"{self._url} answered HTTP 401: {why}; give the service the server's token (token=)"
        if status == 404:
            host = urlsplit(self._url)
            right = f"{host.scheme}://{host.netloc}{SOCKET_PATH}"
            return f"{self._url} answered HTTP 404: no socket is there; give url={right}, behind a proxy with its path"
        return f"{self._url} answered HTTP {status}: {_words(self.response.body)}"


def _words(body: bytes | bytearray | None) -> str:
    """What an answer says: our servers' message, or its text."""
    text = bytes(body or b"").decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:_MOST_WORDS].strip() or "no reason given"
