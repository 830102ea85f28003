"""Fault statistics: events, faults and restarts so far, and how long faults took to detect and to recover from. Pure.

Events are trimmed, so counters cannot be computed from those that are left. The leader counts each event once, as it
reads it: the statistics are part of the record of the event cursor, so that both change in one write, and a leader that
takes over continues the count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.records import Event, Record

DETECT_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the histogram buckets of detection times, in seconds."""
RECOVER_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds of the histogram buckets of recovery times, in seconds."""
_MAX_KINDS = 200
"""Event kinds that are counted separately; further ones are counted as ``other``."""
_MAX_OPEN = 256
"""Faults that are tracked until they are recovered; the oldest are dropped first."""
_EXPIRED_S = 3600.0
"""A recovery this long after its fault is not measured: it is about something else (a pool scaled in and out again)."""
_CLOCK_ERROR_S = 0.5
"""Difference between the clocks of two processes that is tolerated when events are put in order."""


class Histogram(Record):
    """Durations by bucket."""

    counts: list[int] = []
    """Observations by bucket; the last bucket has no upper bound."""
    total_s: float = 0.0

    def add(self, seconds: float, bounds: tuple[float, ...]) -> Histogram:
        counts = self.counts or [0] * (len(bounds) + 1)
        at = bisect_left(bounds, seconds)
        return Histogram(counts=[n + (i == at) for i, n in enumerate(counts)], total_s=self.total_s + seconds)


class FaultStatistics(Record):
    """Counts since the job's first event. A *part* is engine, a trainer group, coordinator, dcs, driver, router, the
    name of a role, or job (the whole compute plane)."""

    events: dict[str, int] = {}
    """Number of events by kind."""
    faults: dict[str, int] = {}
    """Number of faults by part; several events of one fault count once."""
    restarts: dict[str, int] = {}
    """Number of restarts by part."""
    detect: dict[str, Histogram] = {}
    """Time to detect by part: seconds from the last sign of life to the event that reported the fault, where known."""
    recover: dict[str, Histogram] = {}
    """Time to recover by part: seconds from the first event of a fault to the one that says that the part works again.
    """
    open: dict[str, float] = {}
    """Faults without a recovery so far: part/id, and unix seconds of the first event."""


class EventCursor(Record):
    """Events up to this revision have been turned into alerts, and counted."""

    revision: int
    statistics: FaultStatistics = FaultStatistics()


def count(statistics: FaultStatistics, events: Iterable[Event]) -> FaultStatistics:
    """The statistics with these events, each of them new, in the order in which they were written."""
    for event in events:
        known = event.kind in statistics.events or len(statistics.events) < _MAX_KINDS
        statistics = statistics.replace(events=_increment(statistics.events, event.kind if known else "other"))
        if (kind := event_kinds.find(event.kind)) is None:
            continue
        if kind.counted:
            statistics = statistics.replace(restarts=_increment(statistics.restarts, kind.counted))
        if kind.begins:
            statistics = _open(statistics, kind.fault(event.subject), event)
        if kind is event_kinds.ENGINE_REMOVED:  # an external engine, which is not replaced: its fault ends unrecovered
            statistics = statistics.replace(
                open={f: at for f, at in statistics.open.items() if f != kind.fault(event.subject)})
        for fault in _recovered_faults(statistics, kind, event):
            statistics = _close(statistics, fault, event.at)
    return statistics


def _increment(counts: Mapping[str, int], key: str) -> dict[str, int]:
    return {**counts, key: counts.get(key, 0) + 1}


def _open(statistics: FaultStatistics, fault: str, event: Event) -> FaultStatistics:
    if fault in statistics.open:
        return statistics
    part = fault.partition("/")[0]
    now_open = {**statistics.open, fault: event.at}
    for oldest in sorted(now_open, key=lambda f: now_open[f])[:max(0, len(now_open) - _MAX_OPEN)]:
        del now_open[oldest]
    statistics = statistics.replace(faults=_increment(statistics.faults, part), open=now_open)
    seconds = _duration(event, "detect_s")
    if seconds is not None:
        histogram = statistics.detect.get(part, Histogram()).add(seconds, DETECT_S)
        statistics = statistics.replace(detect={**statistics.detect, part: histogram})
    return statistics


def _duration(event: Event, name: str) -> float | None:
    """Seconds from an event's data; None for what is no duration."""
    value = event.data.get(name)
    return float(value) if isinstance(value, int | float) and value >= 0 else None


def _recovered_faults(statistics: FaultStatistics, kind: EventKind, event: Event) -> list[str]:
    """Faults that end with this event."""
    if kind is event_kinds.ENGINE_READY and not event.data.get("external"):  # an external engine keeps its id
        # A replacement has another id. It is one if it was started after the fault; each ends one fault.
        started = event.at - (_duration(event, "start_s") or 0.0) + _CLOCK_ERROR_S
        replaced = [f for f, at in statistics.open.items() if f.startswith(kind.fault("")) and at <= started]
        return sorted(replaced, key=lambda f: statistics.open[f])[:1]
    fault = kind.fault(event.subject)
    return [fault] if kind.ends and fault in statistics.open else []


def _close(statistics: FaultStatistics, fault: str, now: float) -> FaultStatistics:
    since = statistics.open[fault]
    statistics = statistics.replace(open={f: at for f, at in statistics.open.items() if f != fault})
    if now - since > _EXPIRED_S:
        return statistics
    part = fault.partition("/")[0]
    histogram = statistics.recover.get(part, Histogram()).add(max(0.0, now - since), RECOVER_S)
    return statistics.replace(recover={**statistics.recover, part: histogram})
