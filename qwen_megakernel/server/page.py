"""The pages at / and /docs, to try the server with, and the headers that keep other sites out."""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

PATH, DOCS = "/", "/docs"


def add_page(app: FastAPI) -> None:
    """Add the page: one file, the same for everybody. It holds no secrets and uses only the API."""
    _add(app, PATH, "page.html", {"require-trusted-types-for": "'script'", "trusted-types": "'none'"})


def add_docs(app: FastAPI) -> None:
    """Add Swagger UI for servers without a token. It shows /openapi.json and sends requests. Its script comes from a
    public network: a browser runs it only if it is the very file that we looked at, and lets it reach only this
    server."""
    _add(app, DOCS, "docs.html", {})


def _add(app: FastAPI, path: str, file: str, rules: dict[str, str]) -> None:
    """
    Args:
        file: the page's name, in this folder.
        rules: of the Content-Security-Policy, in addition to the rules of every page.
    """
    page = Path(__file__).with_name(file).read_text(encoding="utf-8")
    rules |= {
        "script-src": _sources(page, "script", "js"),
        "style-src": _sources(page, "style", "css"),
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",  # for the empty icon, without which browsers ask for /favicon.ico
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in rules.items()),
        "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }

    @app.get(path, include_in_schema=False)
    async def show() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)


def _sources(page: str, tag: str, ending: str) -> str:
    """What a policy recognises: the page's own scripts or styles by their hashes, others' files by their addresses."""
    inside = re.findall(f"<{tag}>(.*?)</{tag}>", page, flags=re.S)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inside)
    files = re.findall(rf'"(https:[^"]+\.{ending})" integrity=', page)
    return " ".join([*(f"'sha256-{digest}'" for digest in digests), *files])
