"""Decides which limit is said to keep the run from asking for more samples. Pure; the clock is an argument."""

from __future__ import annotations

from elastic_rl.etcd.records import GenerationCap

MIN_S = 10.0
"""A limit that holds requests back for less than this long is not said: each step begins with more groups than fit."""
GAP_S = 5.0
"""A limit that has held nothing back for so long has ended. In between it may let some groups through, as with each
step that is trained."""


class CapWatch:
    """Which limit holds requests back for long, from what does at one moment. It changes rarely, since each change is a
    write to etcd."""

    def __init__(self) -> None:
        self._bound: dict[GenerationCap, tuple[float, float]] = {}
        """Limit → when it began to hold requests back, and when it did so last."""
        self._said = GenerationCap.NONE

    def seen(self, now: float, cap: GenerationCap) -> GenerationCap:
        """What is to be said. ``now``: monotonic seconds; ``cap``: what holds requests back now. Call it all the time,
        at least every ``GAP_S``."""
        self._bound = {known: (since, last) for known, (since, last) in self._bound.items() if now - last < GAP_S}
        if cap:
            since, _ = self._bound.get(cap, (now, now))
            self._bound[cap] = since, now
        if self._said not in self._bound:
            long = {known: since for known, (since, last) in self._bound.items() if last - since >= MIN_S}
            self._said = min(long, key=long.__getitem__, default=GenerationCap.NONE)
        return self._said
