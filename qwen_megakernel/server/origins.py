"""Which web pages may use the server. A browser lets any page send requests, and tells the server the page's origin."""

import re
from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers

from qwen_megakernel.errors import BackendError

ANY, NONE = "*", "null"
"""Every origin; and the one that a browser names for a page without an origin, such as a file or a sandboxed frame."""

_ORIGIN = re.compile(r"(?!https?://$)[a-z][a-z\d+.-]*://(([\w.~%-]+|\[[\da-f:.]+\])(:\d{1,5})?)?", re.ASCII)
"""A host may be missing for a page of a file ("file://"). Other schemes: app, capacitor, chrome-extension, tauri."""
_OWN_PORT = re.compile(r"^(http://.*):80$|^(https://.*):443$")  # browsers leave it out
_METHODS = "GET, HEAD, POST, PUT, DELETE, OPTIONS"
_SHOWN = (
    "X-Seed, X-Ignored, X-Attempts, X-Clipped, X-Word-Timestamps, X-Word-Timestamps-Measured, "
    "X-Word-Timestamps-Omitted, Retry-After, Content-Disposition, X-Request-Id"
)
_MAX_AGE_S = "600"  # a browser asks again after that
_PROXYS = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")


class Origins:
    """The origins that may use a server, besides its own page and programs, which send none."""

    def __init__(self, allowed: Sequence[str], *, has_token: bool):
        """
        Args:
            allowed: such as "https://example.com:8443", "app://obsidian.md", "null", or "*".

        Raises:
            BackendError: an origin is malformed, or "*" or "null" is given without a token.
        """
        for origin in allowed:
            if origin in (ANY, NONE):
                if not has_token:
                    whose = "every web page" if origin == ANY else "the sandboxed frames of every web page"
                    words = f"--allow-origin '{origin}' lets {whose} use the server, so it needs a token: give --token"
                    raise BackendError(f"{words}, or name the pages' origins")
            elif not _ORIGIN.fullmatch(origin.lower()):
                words = (
                    "an origin is a scheme, a host and maybe a port, such as https://example.com or app://obsidian.md"
                )
                raise BackendError(f"{words}, got {origin[:80]!r}: leave out a path, a slash at its end, and wildcards")
        self._allowed = frozenset(_OWN_PORT.sub(r"\1\2", origin.lower()) for origin in allowed)

    def are_listed(self, origin: str) -> bool:
        """The operator has allowed pages of this origin."""
        return ANY in self._allowed or origin.lower() in self._allowed

    def may_ask(self, headers: Headers) -> bool:
        """The request is a program's, the server's own page's, or one of a listed page."""
        origin = headers.get("origin")
        return origin is None or is_own(headers) or self.are_listed(origin)

    def answer_to_preflight(self, headers: Headers) -> dict[str, str] | None:
        """The headers for a browser that asks whether a page may send a request. None: it may not."""
        origin = headers.get("origin", "")
        if not self.are_listed(origin):
            return None
        told = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": _MAX_AGE_S}
        if asked := headers.get("access-control-request-headers"):  # clients send many of their own
            told["Access-Control-Allow-Headers"] = asked
        if "access-control-request-private-network" in headers:  # Chrome asks, if the server is not on the internet
            told["Access-Control-Allow-Private-Network"] = "true"
        return told | {
            "Access-Control-Allow-Origin": origin,
            "Vary": "Origin, Access-Control-Request-Headers",
        }

    def shared(self, headers: Headers) -> dict[str, str]:
        """The headers with which a listed page may read the answer; none for others."""
        origin = headers.get("origin")
        if origin is None or not self.are_listed(origin):
            return {}
        told = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        return told | {"Access-Control-Expose-Headers": _SHOWN}


def is_preflight(method: str, headers: Headers) -> bool:
    return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def is_own(headers: Headers) -> bool:
    """The request is of a page that this server has sent."""
    parts = split(headers.get("origin", ""))
    return parts.scheme in ("http", "https") and parts.netloc == headers.get("host", "")


def came_by_proxy(headers: Headers) -> str | None:
    """The header by which a proxy tells that it forwards somebody's request; None: there is none."""
    return next((name for name in _PROXYS if name in headers), None)


def split(url: str) -> SplitResult:
    """A URL's parts; all are empty if it is malformed."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
