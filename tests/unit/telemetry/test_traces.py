"""Spans of one trace over several contexts, and the cost of tracing that is off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.otlp_collector import Collector, collecting

from elastic_rl.telemetry import traces


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        traces.setup(running.endpoint, "test")
        try:
            yield running
        finally:
            traces.shutdown()


def test_nothing_is_traced_or_carried_without_an_endpoint() -> None:
    traces.setup("", "test")
    with traces.span("a"):
        assert traces.inject() == {}
    assert not traces.enabled()
    traces.record("b", 1.0, 2.0)
    traces.shutdown()


def test_carrier_continues_its_trace_and_a_record_keeps_its_times(collector: Collector) -> None:
    with traces.span("publish", step=3):
        carrier = traces.inject()
    with traces.span("elsewhere", parent=traces.extract(carrier)), traces.span("inner"):
        pass
    traces.record("first", 100.5, 101.25, parent=traces.extract(carrier), version=7)
    with traces.span("apart"):
        pass
    traces.shutdown()
    spans = {s.name: s for s in collector.spans()}
    root = spans["publish"]
    assert root.parent == "" and root.attrs == {"step": 3}
    assert {s.name for s in collector.trace_with("publish")} == {"publish", "elsewhere", "inner", "first"}
    assert (spans["elsewhere"].parent, spans["inner"].parent) == (root.id, spans["elsewhere"].id)
    assert (spans["first"].began_at, spans["first"].ended_at, spans["first"].attrs) == (100.5, 101.25, {"version": 7})


def test_current_span_takes_precedence_over_a_carrier(collector: Collector) -> None:
    with traces.span("publish"):
        carrier = traces.inject()
    with traces.span("alone", parent=traces.current_or(carrier)):
        pass
    with traces.span("sync"), traces.span("within", parent=traces.current_or(carrier)):
        pass
    with pytest.raises(KeyError), traces.span("failing"):
        raise KeyError
    traces.shutdown()
    spans = {s.name: s for s in collector.spans()}
    assert spans["alone"].trace == spans["publish"].trace != spans["sync"].trace == spans["within"].trace
    assert spans["failing"].failed and not spans["alone"].failed


def test_corrupt_carrier_starts_a_new_trace(collector: Collector) -> None:
    odd: tuple[object, ...] = ({}, {"traceparent": "rubbish"}, {"traceparent": "00-0-0-0"}, {"other": "x"}, None, 3,
                               "x", ["traceparent"], [[1, 2]], {"traceparent": 7}, {3: "x"}, {"tracestate": ["a"]})
    for i, carrier in enumerate(odd):
        with traces.span(f"s{i}", parent=traces.extract(carrier)):
            pass
    traces.shutdown()
    assert [s.parent for s in collector.spans()] == [""] * len(odd)


def test_unavailable_collector_stops_nothing() -> None:
    traces.setup("http://127.0.0.1:9", "test", timeout_s=0.2)
    with traces.span("lost"):
        assert traces.inject()
    traces.shutdown()
    assert not traces.enabled()
