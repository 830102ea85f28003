"""The seam between those who generate groups and the trainer: finished groups wait in it for their step.

A queue holds data and decides nothing. Which groups are trained, and what becomes of one that the queue has lost, is
``group_flow``'s, so a queue need not be durable: what is not consumed, by the trainer's committed state, can be
generated again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_rl.data.samples import Group
from elastic_rl.errors import IllegalTransition


@dataclass(frozen=True)
class QueueLoss:
    """A queue was replaced by an empty one."""

    groups: tuple[int, ...]
    """That it held."""
    why: str
    """For people."""


class GroupQueue(Protocol):
    """Finished groups by ordinal. Used by two threads, one of which puts. Every call is bounded in time."""

    @property
    def at_once(self) -> int:
        """Groups that one ``get`` may ask for."""

    def put(self, group: Group) -> None:
        """Raises ElasticRLError when it cannot be held now: to be tried again. No more groups are put than the capacity
        that the queue was made with."""

    def get(self, ordinals: Sequence[int]) -> Mapping[int, Group]:
        """Those of the groups that it still has. They stay in it until they are dropped. Raises ElasticRLError when it
        cannot say which now: to be tried again."""

    def drop(self, ordinals: Collection[int]) -> None:
        """Their data is not needed any more. Raises nothing: what is not dropped now is dropped later."""

    def take_loss(self) -> QueueLoss | None:
        """What it has lost since the last call, as far as it knows."""

    def close(self) -> None: ...


class EmbeddedQueue:
    """In the memory of the actor, with which it ends."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: in groups."""
        self._capacity = self.at_once = capacity
        self._groups: dict[int, Group] = {}

    def put(self, group: Group) -> None:
        """Raises IllegalTransition beyond the capacity, which the flow never uses up."""
        if len(self._groups) >= self._capacity and group.ordinal not in self._groups:
            raise IllegalTransition(f"the queue is full: it holds {self._capacity} groups")
        self._groups[group.ordinal] = group

    def get(self, ordinals: Sequence[int]) -> Mapping[int, Group]:
        return {ordinal: found for ordinal in ordinals if (found := self._groups.get(ordinal)) is not None}

    def drop(self, ordinals: Collection[int]) -> None:
        for ordinal in ordinals:
            self._groups.pop(ordinal, None)

    def take_loss(self) -> None:
        return None

    def close(self) -> None:
        self._groups.clear()
