"""Whether something grows with the steps of a run. A pure check of its event log.

Each series (the memory of a process, the keys in etcd, …) is cut into blocks of equal numbers of steps, of
which the medians count, and gets the slope of Theil and Sen, the median of the slopes between any two blocks, with its
bound of confidence from Kendall's rank statistic (Sen 1968). It grows when the bound is above the limit of its kind,
over all of the run after its warm-up and over the last half of that: a cache that fills, a buffer that was enlarged
once, and what is swept now and then do not, and a slow leak below noise does.
"""

from __future__ import annotations

import bisect
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from chaos_tests.event_log import Event, Kind

Point = tuple[float, float]
"""A step, and what was measured then."""

_STEP_S = "step_s"
LIMITS: Mapping[str, float] = {
    "anonymous_bytes": 1000.0, "descriptors": 1e-3, "threads": 1e-3, "etcd_keys": 1e-3, "etcd_bytes": 250.0,
    "files": 5e-3, "file_bytes": 250.0, "history_bytes": 5000.0, "shm_files": 1e-3, "shm_bytes": 250.0,
    "status_s": 1e-6, _STEP_S: 2e-6}
"""Most that a kind of series may grow a step. A job that takes a step in half a minute does a million in a year: 1 GB
of memory, a thousand descriptors, a second for ``status`` and two for a step. Logs have a limit of their own
(``telemetry.log_max_bytes``), below which they grow, and so has etcd's write-ahead log, five files of 64 MB;
``history_bytes`` is ``steps.jsonl``, a record a step, with its durable copy in the checkpoint service, some files."""
WARM_UP = 0.25
"""Part of a series that does not count: caches fill and rings wrap around in it."""
BLOCKS = 24
_FEWEST_BLOCKS = 16
_Z = 3.29
"""Quantile of the confidence: one series in two thousand that does not grow is found to, by one of the two bounds."""


@dataclass(frozen=True)
class Trend:
    """How a series goes with the steps."""

    kind: str
    """One of ``LIMITS``."""
    subject: str
    """The process, as its role and pid; "" for what is of the whole run."""
    first: Point
    last: Point
    """The medians of its first and last block after the warm-up."""
    slope: float
    lower: float
    upper: float
    """By how much it grows a step, and the bounds of that."""
    late: float
    """The lower bound of its last half."""

    @property
    def limit(self) -> float:
        return LIMITS[self.kind]

    @property
    def grows(self) -> bool:
        return min(self.lower, self.late) > self.limit

    @property
    def resolved(self) -> bool:
        """Whether the run was long enough to say of this series that it stays within its limit."""
        return self.grows or self.upper <= self.limit

    def __str__(self) -> str:
        return (f"{self.kind}{f' of {self.subject}' if self.subject else ''}: {self.slope:+.4g} a step "
                f"({self.lower:+.4g} to {self.upper:+.4g}; at most {self.limit:g}), {self.first[1]:.6g} at step "
                f"{self.first[0]:.0f}, {self.last[1]:.6g} at step {self.last[0]:.0f}")


class Samples:
    """What of the records of a run its series are made of, as numbers: of a long run the records do not fit in memory.
    A process that was started again is another subject: its memory begins again."""

    def __init__(self) -> None:
        self._clock = (array("d"), array("d"))
        """Times, and the steps at which the run was then."""
        self._of = defaultdict[tuple[str, str], tuple["array[float]", "array[float]"]](lambda: (array("d"), array("d")))
        """Times (of the time of steps the steps themselves) and values of each kind and subject."""

    def see(self, event: Event) -> None:
        at = float(event["at"])
        if event["kind"] in (Kind.STEP, Kind.STORE):
            _append(self._clock, at, float(event["step"]))
        if event["kind"] == Kind.STEP:
            if (total := (event.get("seconds") or {}).get("total")) is not None:
                _append(self._of[_STEP_S, ""], float(event["step"]), float(total))
        elif event["kind"] in (Kind.STORE, Kind.PROCESS):
            subject = "" if event["kind"] == Kind.STORE else f"{event['role']} ({event['pid']})"
            for kind in LIMITS:
                if kind in event:
                    _append(self._of[kind, subject], at, float(event[kind]))

    def trends(self) -> list[Trend]:
        """The trends of the series that have samples enough, by kind and subject."""
        steps = _Clock(dict(zip(*self._clock, strict=True)))
        found = [(kind, subject, trend_of(self._points(kind, subject, steps))) for kind, subject in sorted(self._of)]
        return [Trend(kind, subject, *numbers) for kind, subject, numbers in found if numbers is not None]

    def _points(self, kind: str, subject: str, steps: _Clock) -> list[Point]:
        """The points of a series, by step."""
        samples = zip(*self._of[kind, subject], strict=True)
        return sorted(samples if kind == _STEP_S else (
            (step, value) for at, value in samples if (step := steps.at(at)) is not None))


def _append(to: tuple[array[float], array[float]], at: float, value: float) -> None:
    to[0].append(at)
    to[1].append(value)


class _Clock:
    """At which step a run was at a time, between the times of which that is known."""

    def __init__(self, steps: Mapping[float, float]) -> None:
        self._known = sorted(steps.items())

    def at(self, at: float) -> float | None:
        """The step at that time: None before the first time that is known, and the last step after the last one."""
        after = bisect.bisect_right(self._known, (at, float("inf")))
        if not after:
            return None
        (began, low), (ended, high) = self._known[after - 1], self._known[min(after, len(self._known) - 1)]
        return low + (high - low) * ((at - began) / (ended - began) if ended > began else 0.0)


def trend_of(points: Sequence[Point]) -> tuple[Point, Point, float, float, float, float] | None:
    """First and last block, slope, lower and upper bound, and the lower bound of the last half, of points by step;
    None where there are too few."""
    if not points or len(blocks := list(_blocks(points))) < _FEWEST_BLOCKS:
        return None
    slope, lower, upper = theil_sen(blocks)
    return blocks[0], blocks[-1], slope, lower, upper, theil_sen(blocks[len(blocks) // 2:])[1]


def _blocks(points: Sequence[Point]) -> Iterator[Point]:
    """The medians of equal lengths of steps, after the warm-up."""
    low, high = points[0][0], points[-1][0]
    low += WARM_UP * (high - low)
    if high <= low:
        return
    parts = defaultdict[int, list[Point]](list)
    for step, value in points:
        if step >= low:
            parts[min(BLOCKS - 1, int((step - low) / (high - low) * BLOCKS))].append((step, value))
    for number in sorted(parts):
        yield median(step for step, _ in parts[number]), median(value for _, value in parts[number])


def theil_sen(points: Sequence[Point]) -> tuple[float, float, float]:
    """The slope of points, at least two with different steps, and its lower and upper bound of confidence: infinite
    where so few points say nothing."""
    slopes = sorted((y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in combinations(points, 2) if x1 > x0)
    n = len(points)
    spread = _Z * (n * (n - 1) * (2 * n + 5) / 18) ** 0.5
    low, high = int((len(slopes) - spread) // 2), int(-((len(slopes) + spread) // -2))
    return (median(slopes), slopes[low] if low >= 0 else float("-inf"),
            slopes[high] if high < len(slopes) else float("inf"))
