"""What a server tells of itself: health, readiness, metrics."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.service import EngineService

UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"description": "The server is starting, stopping or dead.", "content": {"application/json": {}}}
}
"""What /openapi.json says of such an answer."""


def add_state(app: FastAPI, service: EngineService, metrics: Metrics) -> None:
    """Add the routes."""

    @app.get("/health", responses=UNREADY)
    async def health() -> JSONResponse:
        """200 while the process should be kept, also while it loads."""
        alive = service.state not in ("dead", "failed")
        told: dict[str, Any] = {"status": service.state} | ({"error": service.error} if service.error else {})
        if service.loaded:
            told["engine"] = {name: value for name, value in service.engine.health().items() if name != "error"}
        return JSONResponse(told, 200 if alive else 503)

    @app.get("/ready", responses=UNREADY)
    async def ready() -> JSONResponse:
        """200 while requests are served: from the first spoken utterance until the server is told to stop."""
        return JSONResponse({"status": service.state}, 200 if service.state == "ready" else 503)

    @app.get("/metrics", response_class=Response)
    async def prometheus(request: Request) -> Response:
        """Metrics for Prometheus."""
        text, media = metrics.render(request.headers.get("accept", ""))
        return Response(text, media_type=media)
