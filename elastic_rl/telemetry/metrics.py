"""Prometheus metrics of a process: one registry, one prefix, one text form.

A metric is created by its first use; the same name gives the same metric, so the order of imports does not matter.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

PREFIX = "elastic_rl_"
CONTENT_TYPE = CONTENT_TYPE_LATEST
# Prometheus sets the label `job` of each target to the name of its scrape configuration, and renames an exported one.
JOB_LABEL = "job_name"
"""Label of the metrics of a job, whose value is the job's name."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Buckets for durations in seconds."""

disable_created_metrics()  # it would double the series of counters
REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

_made: dict[str, Any] = {}
_lock = threading.Lock()


def counter(name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
    """A counter ``elastic_rl_<name>``; Prometheus adds ``_total``."""
    return _once(Counter, name, help_text, labels)


def gauge(name: str, help_text: str, labels: Sequence[str] = ()) -> Gauge:
    return _once(Gauge, name, help_text, labels)


def histogram(name: str, help_text: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS) -> Histogram:
    return _once(Histogram, name, help_text, labels, buckets=tuple(buckets))


def render() -> bytes:
    """Every metric of this process in the Prometheus text format."""
    return generate_latest(REGISTRY)


def _once(kind: type, name: str, help_text: str, labels: Sequence[str], **more: Any) -> Any:
    with _lock:
        metric = _made.get(name)
        if metric is None:
            metric = _made[name] = kind(PREFIX + name, help_text, tuple(labels), registry=REGISTRY, **more)
        if not isinstance(metric, kind):
            raise TypeError(f"{name} is already a {type(metric).__name__}")
        return metric
