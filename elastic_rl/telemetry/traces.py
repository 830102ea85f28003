"""OpenTelemetry spans. Without an endpoint every call here costs next to nothing and sends nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()
_SCOPE = "elastic_rl"


def setup(endpoint: str, service: str, *, timeout_s: float = 2.0) -> None:
    """Exports spans of this process to an OTLP/HTTP collector such as ``http://collector:4318``; empty: does nothing.

    Spans are sent by a background thread in batches; a collector that is away costs dropped spans and nothing else.
    The first call of a process counts, later ones are ignored (OpenTelemetry has one provider a process).
    """
    if not endpoint:
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return
    resource = Resource.create({"service.name": service, "service.namespace": "elastic-rl",
                                "host.name": socket.gethostname(), "process.pid": os.getpid()})
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=timeout_s)
    provider.add_span_processor(
        BatchSpanProcessor(exporter, max_queue_size=2048, export_timeout_millis=timeout_s * 1e3))
    trace.set_tracer_provider(provider)


@contextmanager
def span(name: str, *, parent: Context | None = None, **attrs: str | int | float | bool) -> Iterator[trace.Span]:
    """A span around a block. ``parent`` is what ``extract`` gave for a request from elsewhere; without it the current
    span is the parent. An exception that leaves the block is recorded and marks the span as failed."""
    with trace.get_tracer(_SCOPE).start_as_current_span(name, context=parent, attributes=attrs) as current:
        yield current


def inject() -> dict[str, str]:
    """The current trace context as headers (W3C ``traceparent``); empty without a span. Fit for JSON and for HTTP."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier


def extract(carrier: Mapping[str, str]) -> Context:
    """The context that ``inject`` wrote elsewhere; give it to ``span(parent=…)``."""
    return _PROPAGATOR.extract(dict(carrier), context=otel_context.get_current())
