"""When a member writes its record to etcd itself. Pure: no clock, no etcd.

While the agent of its host collects its heartbeats it writes what only its record has (``info``), and nothing else.
Once it is not collected any more it takes over after a random part of an interval: where etcd is slow, the members of
all hosts lose their agents at the same time, and would keep etcd slow.
"""

from __future__ import annotations


class WriteSchedule:
    """The writes of one member. Times are monotonic seconds."""

    def __init__(self, interval_s: float, now: float) -> None:
        """``interval_s``: the longest pause between two writes of a member that is not collected. Its record was
        written ``now``."""
        self._interval_s, self._written_at = interval_s, now
        self._held_until = float("-inf")
        self._is_new = self._was_collected = False

    def due(self, now: float, *, changed: bool, collected: bool, info_changed: bool, random: float) -> bool:
        """Whether the record is to be written now. ``changed``: whether there is news of the working thread since the
        last call. ``collected``: whether the agent has written what was there before. ``random``: from 0 to 1, the part
        of an interval for which a member that is not collected any more waits."""
        if self._was_collected and not collected:
            self._held_until = now + random * self._interval_s
        self._was_collected, self._is_new = collected, (self._is_new or changed) and not collected
        is_late = now - self._written_at >= self._interval_s
        return info_changed or (not collected and now >= self._held_until and (self._is_new or is_late))

    def written(self, now: float) -> None:
        """The record was written."""
        self._written_at, self._is_new = now, False
