"""What a server tells of itself: health, readiness, and metrics for Prometheus."""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from qwen_megakernel.engine.audio import Audio
from qwen_megakernel.server.service import EngineService

UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"description": "The server is starting, stopping or dead.", "content": {"application/json": {}}}
}
"""What /openapi.json says of such an answer."""

_PREFIX = "qwen_megakernel"
_TTFC_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """Attributes:
    registry: all metrics.
    requests: HTTP requests, by path and status.
    sockets: open WebSockets.
    """

    def __init__(self, service: EngineService):
        self.registry = where = CollectorRegistry()
        where.register(_EngineCollector(service))
        service.said = self.record
        self.requests = Counter(f"{_PREFIX}_requests", "HTTP requests", ["path", "status"], registry=where)
        self.sockets = Gauge(f"{_PREFIX}_sockets", "WebSockets that are open", registry=where)
        self._audio = Counter(f"{_PREFIX}_audio_seconds", "Seconds of audio of utterances that ended", registry=where)
        words = "Text in to first chunk out, inside the engine"
        self._ttfc = Histogram(f"{_PREFIX}_ttfc_seconds", words, buckets=_TTFC_S, registry=where)

    def record(self, audio: Audio) -> None:
        """Count an utterance that has ended."""
        self._audio.inc(audio.duration_s)
        if audio.ttfc_s is not None:
            self._ttfc.observe(audio.ttfc_s)


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
        try:
            encode, media = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # the header's version is not a number
            encode, media = choose_encoder("")
        return Response(encode(metrics.registry), media_type=media)
