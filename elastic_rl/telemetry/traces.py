"""OpenTelemetry spans. Without an endpoint every call is almost free and sends nothing.

A context crosses processes as a *carrier*: a small dict of W3C headers for JSON and HTTP. The record of a version holds
the carrier of its publish, so that everything that is done with the version, in any process, belongs to one trace.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_PROPAGATOR = TraceContextTextMapPropagator()
_SCOPE = "elastic_rl"
_SEND_EVERY_S = 1.0
"""A process that is killed loses the spans of at most this many seconds."""
_provider: TracerProvider | None = None
"""The provider of this process, not OpenTelemetry's global provider, which a library may set and which cannot be unset.
"""


def setup(endpoint: str, service: str, *, timeout_s: float = 2.0) -> None:
    """Exports the spans of this process to an OTLP/HTTP collector such as ``http://collector:4318``; empty: does
    nothing. ``service``: name of the process's role.

    A background thread sends spans in batches, the last ones at ``shutdown``. While the collector is unavailable spans
    are dropped. The first call wins; later ones are ignored until ``shutdown``.
    """
    global _provider
    if not endpoint or _provider is not None:
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": service, "service.namespace": "elastic-rl",
                                "host.name": socket.gethostname(), "process.pid": os.getpid()})
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=timeout_s)
    provider.add_span_processor(BatchSpanProcessor(
        exporter, max_queue_size=2048, schedule_delay_millis=_SEND_EVERY_S * 1e3,
        export_timeout_millis=timeout_s * 1e3))
    _provider = provider


def shutdown() -> None:
    """Sends the remaining spans, within the timeout of the export, and ends it."""
    global _provider
    ended, _provider = _provider, None
    if ended is not None:
        ended.shutdown()


def enabled() -> bool:
    """Whether spans are exported."""
    return _provider is not None


def _tracer() -> trace.Tracer:
    return _provider.get_tracer(_SCOPE) if _provider is not None else trace.NoOpTracer()


@contextmanager
def span(name: str, *, parent: Context | None = None, **attrs: str | int | float | bool) -> Iterator[trace.Span]:
    """A span around a block. ``parent``: from ``extract``, for a request of another process; else the current span. An
    exception that leaves the block is recorded and marks the span as failed."""
    with _tracer().start_as_current_span(name, context=parent, attributes=attrs) as current:
        yield current


def record(name: str, began_at: float, ended_at: float, *, parent: Context | None = None,
           **attrs: str | int | float | bool) -> None:
    """Records a span that has ended. Times are unix seconds."""
    done = _tracer().start_span(name, context=parent, attributes=attrs, start_time=int(began_at * 1e9))
    done.end(int(ended_at * 1e9))


def inject() -> dict[str, str]:
    """The current trace context as a carrier; empty without a span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier


def extract(carrier: object) -> Context:
    """The context of a carrier from ``inject`` in another process, for ``span(parent=…)``. A carrier comes from a
    request or a record that anybody may have written: what is no mapping of texts counts as none, and raises nothing.
    """
    texts = ({name: value for name, value in carrier.items() if isinstance(name, str) and isinstance(value, str)}
             if isinstance(carrier, Mapping) else {})
    return _PROPAGATOR.extract(texts, context=otel_context.get_current())


def current_or(carrier: object) -> Context | None:
    """The parent of a span about something that has a carrier: None for the current span, else the carrier's
    context."""
    return None if trace.get_current_span().get_span_context().is_valid else extract(carrier)
