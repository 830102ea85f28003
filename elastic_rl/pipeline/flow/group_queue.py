"""The seam between those who generate groups and the trainer: finished groups wait in it for their step.

A queue holds data and decides nothing. Which groups are trained, and what becomes of one that the queue has lost, is
``group_flow``'s, so a queue need not be durable: what is not consumed, by the trainer's committed state, can be
generated again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_rl.data.queue.packed_group import PackedGroup
from elastic_rl.data.queue.step_groups import HeldSamples, SampleRef, StepReader
from elastic_rl.data.queue.summary import GroupSummary
from elastic_rl.data.samples import Group, Prompt, Sample
from elastic_rl.errors import IllegalTransition


@dataclass(frozen=True)
class QueueLoss:
    """A queue was replaced by an empty one."""

    groups: tuple[int, ...]
    """The groups that it held."""
    why: str
    """The reason, for people."""


class GroupQueue(Protocol):
    """Finished groups by ordinal. Used by two threads, one of which puts. Every call is bounded in time."""

    def put(self, group: Group) -> None:
        """Raises ElasticRLError when it cannot be held now: to be tried again. No more groups are put than the capacity
        that the queue was made with."""

    def get(self, ordinals: Sequence[int]) -> Mapping[int, GroupSummary]:
        """The groups of ``ordinals`` that the queue still has, as far as it knows without looking. They stay in it
        until they are dropped."""

    def reader(self, groups: Collection[GroupSummary]) -> StepReader:
        """Reads the samples of these groups, which ``get`` gave, and no samples that have replaced them since."""

    def drop(self, ordinals: Collection[int]) -> None:
        """Drops groups whose data is not needed any more. Raises nothing: what is not dropped now is dropped later."""

    def take_loss(self) -> QueueLoss | None:
        """What it has lost since the last call, as far as it knows."""

    def close(self) -> None: ...


class EmbeddedQueue:
    """Holds groups in the memory of the actor, and ends with it. A ``StepReader`` too: a group is replaced only after
    the thread that reads it has given it up."""

    is_local = True
    address = None

    def __init__(self, capacity: int) -> None:
        """``capacity``: in groups."""
        self._capacity = capacity
        self._groups: dict[int, PackedGroup] = {}
        self._summaries: dict[int, GroupSummary] = {}

    def put(self, group: Group) -> None:
        """Raises IllegalTransition beyond the capacity, which the flow never uses up."""
        if len(self._groups) >= self._capacity and group.ordinal not in self._groups:
            raise IllegalTransition(f"the queue is full: it holds {self._capacity} groups")
        self._groups[group.ordinal] = PackedGroup.of(group)
        self._summaries[group.ordinal] = GroupSummary.from_group(group)

    def get(self, ordinals: Sequence[int]) -> Mapping[int, GroupSummary]:
        return {ordinal: self._summaries[ordinal] for ordinal in ordinals if ordinal in self._summaries}

    def reader(self, groups: Collection[GroupSummary]) -> StepReader:
        return self

    def read(self, refs: Sequence[SampleRef]) -> list[tuple[Prompt, Sample]]:
        groups = {ordinal: self._groups[ordinal].group() for ordinal in {ordinal for ordinal, _ in refs}}
        return HeldSamples(groups).read(refs)

    def require(self, refs: Sequence[SampleRef]) -> None:
        """Raises nothing: all samples are in the memory of this process."""

    def drop(self, ordinals: Collection[int]) -> None:
        for ordinal in ordinals:
            self._groups.pop(ordinal, None)
            self._summaries.pop(ordinal, None)

    def take_loss(self) -> None:
        return None

    def close(self) -> None:
        self._groups.clear()
        self._summaries.clear()
