"""Decides when what a run does now is worth a write to etcd. Pure; the clock is an argument.

A fast run changes its stage many times a second, and waits a little in each step. Of that only so much is written that
a person sees what the run does: a wait once it has lasted a while, and the end of one that was written. Stages and new
texts of a wait are written at once while they are rare, and at most every other second while they are frequent.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_WAIT_S = 1.0
"""A shorter wait is not written."""
_BURST, _PER_S = 10.0, 0.5


@dataclass(frozen=True)
class Activity:
    """What a run does, as ``JobStatus`` has it."""

    stage: str = ""
    waiting_kind: str = ""
    """Empty while it works."""
    waiting_for: str = ""
    waiting_since: float = 0.0
    """Unix seconds at which a wait of this kind began; 0 while it works."""


class ActivityThrottle:
    """Remembers what a run does and what of it was written. There is no wait without a kind, and none that keeps the
    beginning of a wait for something else."""

    def __init__(self) -> None:
        self.current = Activity()
        self._written = Activity()
        self._tokens, self._refilled_at = _BURST, 0.0

    def update(self, now: float, stage: str, waiting_kind: str = "", waiting_for: str = "") -> None:
        """The run works on ``stage``, or waits in it. ``now``: unix seconds."""
        if not waiting_kind:
            self.current = Activity(stage)
            return
        same = self.current.waiting_kind == waiting_kind
        since = min(self.current.waiting_since, now) if same else now
        self.current = Activity(stage, waiting_kind, waiting_for or waiting_kind, since)

    def due(self, now: float) -> bool:
        """Whether ``current`` is to be written now."""
        current, written = self.current, self._written
        self._tokens = min(_BURST, self._tokens + max(0.0, now - self._refilled_at) * _PER_S)
        self._refilled_at = now
        if current == written:
            return False
        if current.waiting_kind != written.waiting_kind and written.waiting_kind:
            return True  # what was written is over
        if current.waiting_kind and not written.waiting_kind:
            return now - current.waiting_since >= MIN_WAIT_S
        return self._tokens >= 1.0

    def written(self, activity: Activity) -> None:
        """It is in etcd now."""
        if activity != self._written:
            self._tokens = max(0.0, self._tokens - 1.0)
        self._written = activity

    def visible(self, now: float) -> Activity:
        """What any write of now says: a wait that has just begun is left out."""
        current = self.current
        young = now - current.waiting_since < MIN_WAIT_S
        if current.waiting_kind and young and current.waiting_kind != self._written.waiting_kind:
            return Activity(current.stage)
        return current
