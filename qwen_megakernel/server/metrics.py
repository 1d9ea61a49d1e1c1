"""What a server tells of itself: health, readiness, and metrics for Prometheus."""

from collections.abc import Iterator
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from qwen_megakernel.engine.audio import Audio
from qwen_megakernel.server.limits import OpenCount
from qwen_megakernel.server.service import EngineService

UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"description": "The server is starting, stopping or dead.", "content": {"application/json": {}}}
}
"""What /openapi.json says of such an answer."""

_PREFIX = "qwen_megakernel"
_TTFC_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class AnyMetrics(Protocol):
    """What counts for a server, in its own process or in another one."""

    def answered(self, path: str, status: int) -> None:
        """Count an answer to a request over HTTP."""

    def record(self, audio: Audio) -> None:
        """Count an utterance that has ended."""

    async def told(self, accept: str) -> tuple[bytes, str]:
        """All metrics, and their media type. `accept`: the header of who asks."""


class Metrics:
    """Any thread may call its methods."""

    def __init__(self, service: EngineService, sockets: OpenCount):
        self._registry = where = CollectorRegistry()
        where.register(_EngineCollector(service))
        self._requests = Counter(f"{_PREFIX}_requests", "HTTP requests", ["path", "status"], registry=where)
        Gauge(f"{_PREFIX}_sockets", "WebSockets that are open", registry=where).set_function(lambda: sockets.total)
        self._audio = Counter(f"{_PREFIX}_audio_seconds", "Seconds of audio of utterances that ended", registry=where)
        words = "Text in to first chunk out, inside the engine"
        self._ttfc = Histogram(f"{_PREFIX}_ttfc_seconds", words, buckets=_TTFC_S, registry=where)

    def answered(self, path: str, status: int) -> None:
        self._requests.labels(path, status).inc()

    def record(self, audio: Audio) -> None:
        self.said(audio.duration_s, audio.ttfc_s)

    def said(self, seconds: float, ttfc_s: float | None) -> None:
        """Count an utterance that has ended."""
        self._audio.inc(seconds)
        if ttfc_s is not None:
            self._ttfc.observe(ttfc_s)

    async def told(self, accept: str) -> tuple[bytes, str]:
        return self.text(accept)

    def text(self, accept: str) -> tuple[bytes, str]:
        """As `told`."""
        try:
            encode, media = choose_encoder(accept)
        except (TypeError, ValueError):  # the header's version is not a number
            encode, media = choose_encoder("")
        return encode(self._registry), media


class _EngineCollector(Collector):
    """The engine's own counters and load, read at each scrape."""

    def __init__(self, service: EngineService):
        self._service = service

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        yield GaugeMetricFamily(f"{_PREFIX}_ready", "1: requests are served", float(self._service.state == "ready"))
        if not self._service.loaded:
            return
        engine = self._service.engine
        health = engine.health()
        load = ("streams", "running", "queued", "max_streams", "sustained", "pages", "pages_reserved", "pages_filled")
        for name in load:
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", "See TTSEngine.health()", health[name])
        for name, count in engine.metrics().items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", "See TTSEngine.metrics()", count)


def add_state(app: FastAPI, service: EngineService, metrics: AnyMetrics) -> None:
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
        text, media = await metrics.told(request.headers.get("accept", ""))
        return Response(text, media_type=media)
