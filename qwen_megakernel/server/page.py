"""The page at /, to try the server with: page.html, and the headers that keep other sites out."""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

PATH = "/"


def add_page(app: FastAPI) -> None:
    """Add the page: one file, the same for everybody. It holds no secrets and uses nothing but the API."""
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _policy(page),
        "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }

    @app.get(PATH, include_in_schema=False)
    async def show() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)


def _policy(page: str) -> str:
    """The page may use its own script and style, known by their hashes, and its own server; nothing else."""

    def hashes(tag: str) -> str:
        inside = re.findall(f"<{tag}>(.*?)</{tag}>", page, flags=re.S)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inside)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    rules = {
        "default-src": "'none'",
        "script-src": hashes("script"),
        "style-src": hashes("style"),
        "connect-src": "'self'",
        "img-src": "data:",  # an empty icon: without one a browser asks for /favicon.ico
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())
