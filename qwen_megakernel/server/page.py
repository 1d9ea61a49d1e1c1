"""The pages at / and /docs, to try the server with, and the headers that keep other sites out."""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse

PATH, DOCS = "/", "/docs"
_SWAGGER = "https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/"
_NOTE = "Swagger UI is loaded from cdn.jsdelivr.net, which needs the internet. /openapi.json says the same without it."


def add_page(app: FastAPI) -> None:
    """Add the page: one file, the same for everybody. It holds no secrets and uses only the API."""
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    rules = {"require-trusted-types-for": "'script'", "trusted-types": "'none'"}
    _add(app, PATH, page, rules | {"script-src": _hashes(page, "script"), "style-src": _hashes(page, "style")})


def add_docs(app: FastAPI) -> None:
    """Add Swagger UI for servers without a token. It shows /openapi.json and sends requests. Its script comes from a
    public network, so the page's policy lets it reach only this server."""
    html = get_swagger_ui_html(
        title="qwen_megakernel",
        openapi_url="openapi.json",
        swagger_js_url=f"{_SWAGGER}swagger-ui-bundle.js",
        swagger_css_url=f"{_SWAGGER}swagger-ui.css",
        swagger_favicon_url="data:,",
    )
    page = bytes(html.body).decode()
    page = page.replace('id="swagger-ui">', f'id="swagger-ui">{_NOTE}')  # Swagger UI replaces the note
    rules = {"script-src": f"{_hashes(page, 'script')} {_SWAGGER}", "style-src": _SWAGGER}
    _add(app, DOCS, page, rules)


def _add(app: FastAPI, path: str, page: str, rules: dict[str, str]) -> None:
    """
    Args:
        rules: of the Content-Security-Policy, in addition to the rules of every page.
    """
    rules |= {
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


def _hashes(page: str, tag: str) -> str:
    """The hashes by which a policy recognises the page's own scripts or styles."""
    inside = re.findall(f"<{tag}>(.*?)</{tag}>", page, flags=re.S)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inside)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
