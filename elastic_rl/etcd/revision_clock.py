"""Ages of etcd's revisions by this process's own clock, so that no wall clock of another host is needed.

etcd keeps no time with a revision. A process that notes now and then which revision is the present one knows for each
revision how long it has existed at least: since the first note of it or of a later one. A leader can bound its
predecessor's records in age this way: what was written before its first note counts as old as that note.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass

_PRECISION = 0.1
"""Notes are thinned out to this part of their age, so ages are too low by at most as much."""
_MAX_NOTES = 512
"""Thinned out from here on; what is left grows with the logarithm of the time."""


@dataclass(frozen=True)
class _Note:
    revision: int
    at: float


class RevisionClock:
    """Bounded memory; not thread-safe. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._notes: list[_Note] = []

    def observe(self, revision: int) -> None:
        """Notes the store's present revision. An older one than noted before (a store restored from a backup) starts
        over."""
        if self._notes and revision < self._notes[-1].revision:
            self._notes = []
        if not self._notes or revision > self._notes[-1].revision:
            self._notes.append(_Note(revision, self._clock()))
        if len(self._notes) > _MAX_NOTES:
            self._thin()

    def newest_at_least(self, age_s: float) -> int:
        """The newest revision that is known to be at least so old; 0 when there is none."""
        limit = self._clock() - age_s
        i = bisect.bisect_right(self._notes, limit, key=lambda note: note.at)
        return self._notes[i - 1].revision if i else 0

    def _thin(self) -> None:
        """Drops each note whose neighbours are close together enough without it."""
        now, kept = self._clock(), [self._notes[0]]
        for note, newer in zip(self._notes[1:-1], self._notes[2:], strict=True):
            if newer.at - kept[-1].at > _PRECISION * (now - newer.at):
                kept.append(note)
        self._notes = [*kept, self._notes[-1]]
