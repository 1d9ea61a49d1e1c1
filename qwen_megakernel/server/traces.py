"""Traces: the spans of a request, for OpenTelemetry. They are made once it has ended, from the times that the engine
measures anyway, and but for the first one by a thread of their own: all take 0.5 ms
(docs/log/2026-11-28.md#log-metrics-traces)."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from qwen_megakernel import __version__
from qwen_megakernel.errors import BackendError
from qwen_megakernel.server.records import Record, Speech

_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_VOCODER = "first_chunk"  # in `Timings`: the vocoder, and further frames of the first chunk
_NS = 1_000_000_000
_CLOSE_S = 3.0


def spans_of(endpoint: str | None) -> "Traces | None":
    """What makes spans: None without an endpoint and without OpenTelemetry's variables for one.

    Args:
        endpoint: base address of a collector, over HTTP.

    Raises:
        BackendError: the packages are missing.
    """
    if endpoint is None and not any(map(os.environ.get, _VARIABLES)):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise BackendError(f"traces need {error.name}: in the checkout, pip install -e '.[traces]'") from None
    address = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
    return Traces(BatchSpanProcessor(OTLPSpanExporter(endpoint=address)))


class Traces:
    def __init__(self, processor: Any):
        """`processor`: an OpenTelemetry `SpanProcessor`, which sends spans from a thread of its own."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "qwen_megakernel"), "service.version": __version__}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("qwen_megakernel")
        self._propagator = TraceContextTextMapPropagator()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="qwen_megakernel traces")

    def record(self, record: Record, seconds: float) -> None:
        """As `Spans.record`. A request that spoke nothing has a span alone."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        parent = self._propagator.extract({"traceparent": record.traceparent})
        name = f"{record.method} {record.route}".strip()
        told: dict[str, Any] = {
            "request.id": record.id,
            "protocol": record.protocol,
            "http.response.status_code": record.answer,
        }
        told |= {"client.address": record.client, "key": record.key, "characters": record.characters}
        told |= {name: str(value) for name, value in record.fields.items()}
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, told, start_time=record.begun_ns)
        if error := record.error:
            span.set_attribute("error.type", error.code)
            if error.status >= 500:
                span.set_status(Status(StatusCode.ERROR))
        record.trace_id = f"{span.get_span_context().trace_id:032x}"
        self._thread.submit(self._end, span, record.speeches, record.begun_ns + round(seconds * _NS))

    def _end(self, span: Any, speeches: list[Speech], end_ns: int) -> None:
        from opentelemetry.trace import set_span_in_context

        for speech in speeches:
            self._speech(speech, set_span_in_context(span))
        span.end(end_ns)

    def _speech(self, speech: Speech, inside: Any) -> None:
        from opentelemetry.trace import set_span_in_context

        told: dict[str, Any] = {
            "finish_reason": speech.finish_reason,
            "seed": str(speech.seed),
            "audio_s": speech.audio_s,
        }
        span = self._tracer.start_span("speak", inside, attributes=told, start_time=speech.begun_ns)
        at = speech.begun_ns
        for stage, seconds in speech.stages.items():
            name = "vocoder" if stage == _VOCODER else stage
            child = self._tracer.start_span(name, set_span_in_context(span), start_time=at)
            at += round(seconds * _NS)
            child.end(at)
        span.end(max(at, speech.begun_ns + round(speech.compute_s * _NS)))

    def close(self) -> None:
        """Send what was not sent yet, for a moment at most: the collector may be gone."""
        self._thread.shutdown()
        last = threading.Thread(target=self._provider.shutdown, name="qwen_megakernel traces end", daemon=True)
        last.start()
        last.join(_CLOSE_S)
