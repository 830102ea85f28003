"""Whose fault it is when rewards fail: of the groups, which are then dropped, or of the reward, which is then waited
for. Pure.

A sample may make a reward raise or hang whenever it is tried, and must not hold the run up. A reward that depends on
something, or is wrong, fails for every sample, and dropping groups would use up the data without learning. The two are
told apart by what happens at the same time: a failure counts against a group only when the reward worked for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class RewardFailures:
    """Counts the failures of one request's groups, and remembers what became of the last groups."""

    def __init__(self, *, attempts: int, max_share: float, window: int) -> None:
        """``attempts``: of a group, before it is dropped. ``max_share``: fraction of the last ``window`` groups that
        may be dropped; of a share above 0 it is one group at least."""
        self._attempts = attempts
        self._room = max(1, int(max_share * window)) if max_share > 0 else 0
        self._dropped: deque[bool] = deque(maxlen=window)
        self._tried: dict[int, int] = {}
        self._failures: dict[int, int] = {}

    def begin(self) -> None:
        """Another request: its groups have not been tried."""
        self._tried.clear()
        self._failures.clear()

    def forget(self, groups: Sequence[int]) -> None:
        """Nothing more is heard of these groups."""
        for group in groups:
            self._tried.pop(group, None)
            self._failures.pop(group, None)

    def rewarded(self, groups: int) -> None:
        """So many groups got their rewards."""
        self._dropped.extend([False] * groups)

    def failed(self, groups: Sequence[int], *, reward_works: bool) -> list[int]:
        """Takes the groups whose reward failed in one attempt; returns those that are to be dropped, in order. The
        others are to be tried again. ``reward_works``: it worked for some other group in the same attempt."""
        for group in groups:
            self._failures[group] = self._failures.get(group, 0) + 1
        if not reward_works:
            return []
        for group in groups:
            self._tried[group] = self._tried.get(group, 0) + 1
        spent = [g for g in groups if self._tried[g] >= self._attempts]
        given = spent[:max(0, self._room - sum(self._dropped))]
        for group in given:
            del self._tried[group]
        self._dropped.extend([True] * len(given))
        return given

    def failures(self, group: int) -> int:
        """How often it failed, also when that did not count against it."""
        return self._failures.get(group, 0)

    def is_exhausted(self, groups: Sequence[int]) -> bool:
        """Whether one of these groups would be dropped, but too many were: so it is the reward that is at fault."""
        return any(self._tried.get(g, 0) >= self._attempts for g in groups)


class ReportLimit:
    """Lets a report through at most once in ``every_s`` seconds, and counts what it stands for."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._reported_at = float("-inf")
        self._held = 0

    def add(self, count: int, now: float) -> int:
        """Number of things that are to be reported now, all since the last report; 0: nothing is reported yet."""
        self._held += count
        if not self._held or now - self._reported_at < self._every_s:
            return 0
        held, self._held, self._reported_at = self._held, 0, now
        return held
