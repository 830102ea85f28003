"""Which rows of a queue are of use: those of the attempt that brought each group, and of attempts in progress. Pure.

    begin ──▶ being put ──arrived──▶ held ──drop, replace, lose──▶ dead
                  └────────────end───────────────────────────────────▲

Each call that puts a group is an attempt with a number that no other one has, a repeated call too. A dead attempt never
comes back: so whoever lists the rows that there are, and asks afterwards, may drop what is dead at any time, however
late. What the rows of an attempt are is known by their names only, so it does not matter how many of them a call that
failed has written, or writes later.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping

from elastic_rl.data.queue.row_client import RowName
from elastic_rl.data.queue.summary import GroupSummary


class RowAttempts:
    """The attempts to put groups into one queue. Not thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._putting = set[int]()
        """Attempts whose rows are being written."""
        self._held: dict[int, GroupSummary] = {}

    @property
    def held(self) -> Mapping[int, GroupSummary]:
        """The groups that the queue has, by ordinal."""
        return self._held

    def begin(self) -> int:
        """Begins an attempt to put a group."""
        self._putting.add(attempt := next(self._numbers))
        return attempt

    def arrived(self, group: GroupSummary) -> None:
        """The rows of the group's attempt are in the queue. They replace those of an earlier attempt."""
        self._putting.discard(group.attempt)
        self._held[group.ordinal] = group

    def end(self, attempt: int) -> None:
        """The attempt is over: unless it has arrived, its rows are of no use."""
        self._putting.discard(attempt)

    def drop(self, ordinals: Iterable[int]) -> None:
        """The data of these groups is not needed any more."""
        for ordinal in ordinals:
            self._held.pop(ordinal, None)

    def lose(self, names: Iterable[RowName]) -> None:
        """These rows are gone, and with each its group, unless a later attempt has brought that again."""
        for name in names:
            if self.holds(name):
                del self._held[name.ordinal]

    def lose_all(self) -> list[int]:
        """The queue begins again without rows. Returns the groups that were held. Attempts in progress stay so: they
        may write into the new one."""
        lost, self._held = sorted(self._held), {}
        return lost

    def holds(self, name: RowName) -> bool:
        """Whether the queue has this row, as far as is known."""
        group = self._held.get(name.ordinal)
        return group is not None and group.attempt == name.attempt

    def dead(self, names: Collection[RowName]) -> list[RowName]:
        """Returns those of these rows, which were listed before, that nobody can use any more."""
        return [name for name in names if not self.holds(name) and name.attempt not in self._putting]
