"""The pages at / and /docs, to try the server with, and the headers that keep other sites out."""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

PATH, DOCS = "/", "/docs"
_SWAGGER = "https://cdn.jsdelivr.net/npm/swagger-ui-dist@5.35.0"
_SCRIPT, _STYLE = f"{_SWAGGER}/swagger-ui-bundle.js", f"{_SWAGGER}/swagger-ui.css"
_INTEGRITY = {  # `openssl dgst -sha384 -binary FILE | base64`, of the files in npm's package of that version
    _SCRIPT: "sha384-gjRm0bEPMeTmMh5jT2cHccIwCUZSTd8YC+j0d0sXw0MdGEfScduGpSyF3ZSSLkX9",
    _STYLE: "sha384-WlYgdmXYOOBWL5apwjDEZwN+U3HmXSSu5R6V5aGxEcf7z+KuRNwBhoxKVN1i3D5I",
}
_NOTE = "Swagger UI is loaded from cdn.jsdelivr.net, which needs the internet. /openapi.json says the same without it."


def add_page(app: FastAPI) -> None:
    """Add the page: one file, the same for everybody. It holds no secrets and uses only the API."""
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    rules = {"require-trusted-types-for": "'script'", "trusted-types": "'none'"}
    _add(app, PATH, page, rules | {"script-src": _hashes(page, "script"), "style-src": _hashes(page, "style")})


def add_docs(app: FastAPI) -> None:
    """Add Swagger UI for servers without a token. It shows /openapi.json and sends requests. Its script comes from a
    public network: a browser runs it only if it is the very file that we looked at, and lets it reach only this
    server."""
    script, style = (f'"{url}" integrity="{_INTEGRITY[url]}" crossorigin="anonymous"' for url in (_SCRIPT, _STYLE))
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>qwen_megakernel</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href={style}>
</head>
<body>
<div id="swagger-ui">{_NOTE}</div>
<script src={script}></script>
<script>SwaggerUIBundle({{ url: "openapi.json", dom_id: "#swagger-ui" }})</script>
</body>
</html>
"""  # Swagger UI replaces the note
    _add(app, DOCS, page, {"script-src": f"{_hashes(page, 'script')} {_SCRIPT}", "style-src": _STYLE})


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
