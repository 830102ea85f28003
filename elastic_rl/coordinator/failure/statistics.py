"""What happened so far, in numbers: faults, restarts, and how long they took to be noticed and mended. Pure.

Events are trimmed, so counters cannot be counted from what is left of them. The leader counts each event once, as it
reads it: the tally lies in the record of the cursor up to which it has read, so that both move in one write, and a
leader that takes over counts on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from elastic_rl.etcd.records import Event, Record

DETECT_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the classes of times to detect, in seconds."""
RECOVER_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_KINDS = 200
"""Kinds of events counted apart; further ones are counted as ``other``."""
_OPEN = 256
"""Faults remembered until they are mended; the oldest go first."""
_GIVE_UP_S = 3600.0
"""Nobody mended a fault of so long ago; what looks like it is about something else (a pool scaled in and out again)."""
_CLOCKS_S = 0.5
"""By so much the clocks of two processes may differ."""

_TRAINER = ("trainer.failed", "trainer.agent_ended", "trainer.dead")
_ENGINE = ("engine.dead", "engine.quarantined", "engine.replaced")
_RESTARTS = {"engine.replaced": "engine", "trainer.agent_ended": "trainer", "run.global_restart": "job"}


class Histogram(Record):
    """How long something took, as a histogram."""

    counts: list[int] = []
    """Observations by class, the last class without an upper bound."""
    total_s: float = 0.0

    def add(self, seconds: float, bounds: tuple[float, ...]) -> Histogram:
        counts = self.counts or [0] * (len(bounds) + 1)
        at = bisect_left(bounds, seconds)
        return Histogram(counts=[n + (i == at) for i, n in enumerate(counts)], total_s=self.total_s + seconds)


class FaultStatistics(Record):
    """Counts since the job's first event. A *part* is engine, trainer, coordinator, dcs, driver, router, a role's name,
    or job (the whole compute plane)."""

    events: dict[str, int] = {}
    """By kind."""
    faults: dict[str, int] = {}
    """By part; several events of one fault count once."""
    restarts: dict[str, int] = {}
    """By part."""
    detect: dict[str, Histogram] = {}
    """By part: seconds from the last sign of life to the event that told of the fault, where that was known."""
    recover: dict[str, Histogram] = {}
    """By part: seconds from the first event of a fault to the one that says that the part works again."""
    open: dict[str, float] = {}
    """Faults that are not mended yet: part/id, and unix seconds of the first event."""


class EventCursor(Record):
    """Events up to this revision have been turned into alerts, and counted."""

    revision: int
    tally: FaultStatistics = FaultStatistics()


def count(tally: FaultStatistics, events: Iterable[Event]) -> FaultStatistics:
    """The tally with these events, each of them new, in the order in which they were written."""
    for event in events:
        kind = event.kind if event.kind in tally.events or len(tally.events) < _KINDS else "other"
        tally = tally.replace(events=_more(tally.events, kind))
        if (part := _restarted(event)) is not None:
            tally = tally.replace(restarts=_more(tally.restarts, part))
        if (fault := _fault(event)) is not None:
            tally = _opened(tally, fault, event)
        if event.kind == "engine.removed":  # adopted: nobody replaces it, so its fault is over without being mended
            tally = tally.replace(open={f: at for f, at in tally.open.items() if f != f"engine/{event.subject}"})
        for mended in _mended(tally, event):
            tally = _closed(tally, mended, event.at)
    return tally


def _more(counts: Mapping[str, int], key: str) -> dict[str, int]:
    return {**counts, key: counts.get(key, 0) + 1}


def _restarted(event: Event) -> str | None:
    part, _, what = event.kind.partition(".")
    back = what in ("returned", "recovered") and part not in ("trainer", "engine")  # these say it in their own way
    if what == "restarted" or back:
        return part
    return _RESTARTS.get(event.kind)


def _fault(event: Event) -> str | None:
    """Name of the fault that an event tells of. Ranks of a trainer fall together, whichever was hit first."""
    part, _, what = event.kind.partition(".")
    if part == "trainer":
        return "trainer/" if what == "hung" or event.kind in _TRAINER else None
    return f"{part}/{event.subject}" if what in ("dead", "hung") or event.kind in _ENGINE else None


def _opened(tally: FaultStatistics, fault: str, event: Event) -> FaultStatistics:
    if fault in tally.open:
        return tally
    part = fault.partition("/")[0]
    now_open = {**tally.open, fault: event.at}
    for oldest in sorted(now_open, key=lambda f: now_open[f])[:max(0, len(now_open) - _OPEN)]:
        del now_open[oldest]
    tally = tally.replace(faults=_more(tally.faults, part), open=now_open)
    seconds = event.data.get("detect_s")
    if isinstance(seconds, int | float) and seconds >= 0:
        spread = tally.detect.get(part, Histogram()).add(float(seconds), DETECT_S)
        tally = tally.replace(detect={**tally.detect, part: spread})
    return tally


def _mended(tally: FaultStatistics, event: Event) -> list[str]:
    """Faults that are over by this event."""
    part, _, what = event.kind.partition(".")
    mine = [f for f in tally.open if f.startswith(f"{part}/")]
    if event.kind == "engine.ready":
        if event.data.get("adopted"):  # it is extra, and has its name again under the next driver
            return [f for f in mine if f == f"engine/{event.subject}"]
        # A replacement has another id. It is one if it was started after the fault; each mends one fault.
        started = event.at - float(event.data.get("start_s", 0.0)) + _CLOCKS_S
        return [f for f in sorted(mine, key=lambda f: tally.open[f]) if tally.open[f] <= started][:1]
    if part == "trainer":
        return mine if what in ("recovered", "resumed") else []
    return [f for f in mine if what in ("returned", "recovered", "resumed") and f == f"{part}/{event.subject}"]


def _closed(tally: FaultStatistics, fault: str, now: float) -> FaultStatistics:
    since = tally.open[fault]
    tally = tally.replace(open={f: at for f, at in tally.open.items() if f != fault})
    if now - since > _GIVE_UP_S:
        return tally
    part = fault.partition("/")[0]
    spread = tally.recover.get(part, Histogram()).add(max(0.0, now - since), RECOVER_S)
    return tally.replace(recover={**tally.recover, part: spread})
