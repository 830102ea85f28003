"""Decides which generation cap a run reports: the limit that keeps it from asking for more samples. Pure; the clock is
an argument."""

from __future__ import annotations

from elastic_rl.etcd.records import GenerationCap

MIN_S = 10.0
"""A generation cap of less than this long is not reported: each step begins with more groups than fit."""
GAP_S = 5.0
"""A generation cap that was not there for so long has ended. In between it may let some groups through, as with each
step that is trained."""


class CapWatch:
    """Makes the generation cap of a longer time from that of each moment. It changes rarely, since each change is a
    write to etcd."""

    def __init__(self) -> None:
        self._bound: dict[GenerationCap, tuple[float, float]] = {}
        """Generation cap → when it began, and when it was there last."""
        self._said = GenerationCap.NONE

    def seen(self, now: float, cap: GenerationCap) -> GenerationCap:
        """The generation cap that is to be reported. ``now``: monotonic seconds; ``cap``: that of this moment. Call it
        all the time, at least every ``GAP_S``."""
        self._bound = {known: (since, last) for known, (since, last) in self._bound.items() if now - last < GAP_S}
        if cap:
            since, _ = self._bound.get(cap, (now, now))
            self._bound[cap] = since, now
        if self._said not in self._bound:
            long = {known: since for known, (since, last) in self._bound.items() if last - since >= MIN_S}
            self._said = min(long, key=long.__getitem__, default=GenerationCap.NONE)
        return self._said
