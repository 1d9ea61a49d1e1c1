"""What a server tells of itself: health, readiness, its version, and metrics for Prometheus."""

import platform
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from qwen_megakernel import __version__
from qwen_megakernel.server.journal import Counts
from qwen_megakernel.server.limits import OpenCount
from qwen_megakernel.server.service import EngineService

UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"description": "The server is starting, stopping or dead.", "content": {"application/json": {}}}
}
"""What /openapi.json says of such an answer."""

_PREFIX = "qwen_megakernel"
_MOST_EXEMPLAR = 100  # characters of an id; OpenMetrics allows 128 for it and its name
_SOON_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LONG_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_LEAD_S = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_RTF = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 0.7, 1.0, 2.0, 5.0)

_ENGINE_GAUGES = {
    "streams": "Utterances that are open in the engine",
    "running": "Utterances that have a slot",
    "queued": "Utterances that wait for a slot",
    "max_streams": "Slots",
    "sustained": "Utterances that may run at once without gaps: what the device was measured to make, or the slots",
    "pages": "Pages of keys and values, of 64 positions each; 0: the slots share none",
    "pages_reserved": "Pages that running utterances have",
    "pages_filled": "Pages that hold keys and values",
}
_ENGINE_COUNTERS = {
    "frames": "Frames of 80 ms that the engine has made",
    "retries": "Utterances that were said again because they had ended badly",
    "lost": "Utterances that have left out some of their text",
    "kernel_faults": "Faults of the kernel or of the device",
}


class AnyMetrics(Counts, Protocol):
    """What counts for a server, in its own process or in another one."""

    async def told(self, accept: str) -> tuple[bytes, str]:
        """All metrics, and their media type. `accept`: the header of who asks."""


class Metrics:
    """Any thread may call its methods.

    Attributes:
        registry: of prometheus_client.
    """

    def __init__(self, service: EngineService, sockets: OpenCount, connections: OpenCount):
        self._model = service.model
        self.registry = where = CollectorRegistry()
        ProcessCollector(registry=where)
        where.register(_EngineCollector(service))
        for name, words, count in (
            ("sockets", "WebSockets that are open", sockets),
            ("connections", "Connections that are open", connections),
        ):
            gauge = Gauge(f"{_PREFIX}_{name}", words, registry=where)
            gauge.set_function(lambda count=count: count.total)  # type: ignore[misc]

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}_{name}", words, labels, registry=where)

        def histogram(name: str, words: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"{_PREFIX}_{name}", words, labels, buckets=buckets, registry=where)

        self._requests = counter("requests", "Requests that have ended", "protocol", "path", "status", "key")
        self._refusals = counter("refusals", "Requests that were refused or have failed", "protocol", "reason", "key")
        self._characters = counter("characters", "Characters of texts that came to be spoken", "protocol", "key")
        words = "From a request's head to the end of its answer"
        self._seconds = histogram("request_duration_seconds", words, _LONG_S, "protocol")
        speech = ("model", "protocol")
        words = "Texts that were spoken, by how that ended"
        self._utterances = counter("utterances", words, *speech, "finish_reason", "key")
        self._audio = counter("audio_seconds", "Seconds of audio that were made", *speech, "key")
        self._gaps = counter("gaps", "Texts of which a live listener would have heard a gap", *speech)
        words = "Wait for a slot"
        self._queue = histogram("queue_seconds", words, _SOON_S, *speech)
        words = "From the text to the first chunk of audio, inside the engine"
        self._first = histogram("first_audio_seconds", words, _SOON_S, *speech)
        self._length = histogram("audio_duration_seconds", "Length of what was spoken", _LONG_S, *speech)
        words = "Seconds from text to end for each second of audio"
        self._rtf = histogram("real_time_factor_ratio", words, _RTF, *speech)
        words = "Least lead over a live listener; 0: there was a gap"
        self._lead = histogram("least_lead_seconds", words, _LEAD_S, *speech)

    def answered(self, told: dict[str, Any]) -> None:
        """Count a request that has ended, as `Journal` tells it."""
        protocol, key = told["protocol"], told["key"]
        self._requests.labels(protocol, told["route"], told["status"], key).inc()
        self._seconds.labels(protocol).observe(told["seconds"])
        if told["reason"]:
            self._refusals.labels(protocol, told["reason"], key).inc()
        if told["characters"]:
            self._characters.labels(protocol, key).inc(told["characters"])

    def said(self, told: dict[str, Any]) -> None:
        """Count a session that has ended, as `Journal` tells it."""
        of, key, seconds = (self._model, told["protocol"]), told["key"], told["audio_s"]
        self._utterances.labels(*of, told["finish_reason"], key).inc()
        self._audio.labels(*of, key).inc(seconds)
        times = {self._queue: told["stages"].get("queue"), self._first: told["first_audio_s"]}
        lead_s = told["lead_s"]  # of a histogram with values below 0 OpenMetrics wants no sum
        times |= {self._lead: lead_s and max(0.0, lead_s), self._length: seconds or None}
        if told["finish_reason"] != "cancelled" and seconds:
            times[self._rtf] = told["compute_s"] / seconds
        who = {"request_id": told["id"][:_MOST_EXEMPLAR]} if told["id"] else None
        for histogram, value in times.items():
            if value is not None:
                histogram.labels(*of).observe(value, who)
        if (lead_s or 0) < 0:
            self._gaps.labels(*of).inc()

    def families(self) -> list[Metric]:
        """All metrics, as the library has them."""
        return list(self.registry.collect())

    async def told(self, accept: str) -> tuple[bytes, str]:
        return self.text(accept)

    def text(self, accept: str) -> tuple[bytes, str]:
        """As `told`."""
        try:
            encode, media = choose_encoder(accept)
        except (TypeError, ValueError):  # the header's version is not a number
            encode, media = choose_encoder("")
        return encode(self.registry), media


class _EngineCollector(Collector):
    """The engine's own counters and load, read at each scrape."""

    def __init__(self, service: EngineService):
        self._service = service

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        service, model = self._service, [self._service.model]
        loaded = service.loaded
        about = {"version": __version__, "python": platform.python_version(), "torch": torch.__version__}
        about |= {"model": service.model, "backend": service.engine.health()["backend"] if loaded else ""}
        info = GaugeMetricFamily(f"{_PREFIX}_build_info", "What serves, as labels", labels=list(about))
        info.add_metric(list(about.values()), 1.0)
        yield info
        yield GaugeMetricFamily(
            f"{_PREFIX}_ready", "1: the server is ready for requests", float(service.state == "ready")
        )
        if not loaded:
            return
        health, counts = service.engine.health(), service.engine.metrics()
        for name, words in _ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", words, labels=["model"])
            gauge.add_metric(model, health[name])
            yield gauge
        for name, words in _ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(f"{_PREFIX}_{name}", words, labels=["model"])
            counter.add_metric(model, counts[name])
            yield counter
        words = "Utterances that the runaway guard has ended, by what the model did"
        runaways = CounterMetricFamily(f"{_PREFIX}_runaways", words, labels=["model", "kind"])
        for kind in ("repeats", "silence", "standstill", "babble"):
            runaways.add_metric([*model, kind], counts[f"runaway_{kind}"])
        yield runaways
        words = "Memory that the engine has taken on its device, by part"
        memory = GaugeMetricFamily(f"{_PREFIX}_engine_memory_bytes", words, labels=["model", "part"])
        for part, size in getattr(service.engine, "memory", {}).items():
            memory.add_metric([*model, part], size)
        yield memory


def add_state(app: FastAPI, service: EngineService, metrics: AnyMetrics) -> None:
    """Add the routes."""

    @app.get("/health", responses=UNREADY)
    async def health() -> JSONResponse:
        """200 while the process should be kept, also while it loads."""
        alive = service.state not in ("dead", "failed")
        told: dict[str, Any] = {"status": service.state} | ({"error": service.error} if service.error else {})
        told["version"] = __version__
        if service.loaded:
            told["engine"] = {name: value for name, value in service.engine.health().items() if name != "error"}
        return JSONResponse(told, 200 if alive else 503)

    @app.get("/ready", responses=UNREADY)
    async def ready() -> JSONResponse:
        """200 while requests are served: from the first spoken utterance until the server is told to stop."""
        return JSONResponse({"status": service.state}, 200 if service.state == "ready" else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of the server, and its model."""
        return {"version": __version__, "model": service.model}

    @app.get("/metrics", response_class=Response)
    async def prometheus(request: Request) -> Response:
        """Metrics for Prometheus."""
        text, media = await metrics.told(request.headers.get("accept", ""))
        return Response(text, media_type=media)
