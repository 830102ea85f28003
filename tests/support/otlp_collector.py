"""An OTLP/HTTP collector for the tests: takes spans from any process, as one in production does, and keeps them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from support import http_servers


@dataclass(frozen=True)
class Span:
    """Times are unix seconds; ids are hexadecimal, ``parent`` is empty for the first span of a trace."""

    name: str
    trace: str
    id: str
    parent: str
    pid: int
    began_at: float
    ended_at: float
    failed: bool
    attrs: dict[str, str | int]


@dataclass
class Collector:
    endpoint: str = ""
    _spans: list[Span] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._lock:
            for of_process in request.resource_spans:
                resource = {a.key: a.value for a in of_process.resource.attributes}
                for s in (s for scope in of_process.scope_spans for s in scope.spans):
                    self._spans.append(Span(
                        s.name, s.trace_id.hex(), s.span_id.hex(), s.parent_span_id.hex(),
                        resource["process.pid"].int_value, s.start_time_unix_nano / 1e9, s.end_time_unix_nano / 1e9,
                        s.status.code == 2, {a.key: a.value.string_value or a.value.int_value for a in s.attributes}))

    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def trace_with(self, name: str, **attrs: object) -> list[Span]:
        """Every span of the trace that has a span of this name and these attributes; empty if there is none yet."""
        spans = self.spans()
        for found in spans:
            if found.name == name and attrs.items() <= found.attrs.items():
                return [s for s in spans if s.trace == found.trace]
        return []


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
            collector.take(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    with http_servers.serving(server):
        yield collector
