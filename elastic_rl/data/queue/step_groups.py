"""The groups of a step, or of a part of one: what is known of them, and where their samples are. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_rl.data.queue.summary import GroupSummary, SampleSummary
from elastic_rl.data.samples import Group, Prompt, Sample

SampleRef = tuple[int, int]
"""Ordinal of a group, and the index of a sample in it."""


class SampleReader(Protocol):
    """Reads samples where they are. Any thread may use it."""

    @property
    def address(self) -> Mapping[str, Any] | None:
        """JSON by which another process of the cluster reads them; None where it cannot."""

    def read(self, refs: Sequence[SampleRef]) -> list[tuple[Prompt, Sample]]:
        """The samples, in order, with their prompts. Raises GroupsLost for those that are gone, QueueUnavailable, and
        Fenced."""

    def require(self, refs: Sequence[SampleRef]) -> None:
        """Raises GroupsLost for samples that are known to be gone."""


class StepReader(SampleReader, Protocol):
    """Gives the samples of a step's groups."""

    @property
    def is_local(self) -> bool:
        """Whether all samples are in the memory of this process: else the ranks read their own."""


@dataclass(frozen=True)
class HeldSamples:
    """Samples in the memory of this process. A ``StepReader``."""

    groups: Mapping[int, Group]
    is_local = True
    address = None

    def read(self, refs: Sequence[SampleRef]) -> list[tuple[Prompt, Sample]]:
        return [(self.groups[ordinal].prompt, self.groups[ordinal].samples[index]) for ordinal, index in refs]

    def require(self, refs: Sequence[SampleRef]) -> None:
        """Raises nothing: all samples are in the memory of this process."""


@dataclass(frozen=True)
class StepGroups:
    """The groups of a step, in the order in which they are trained."""

    groups: tuple[GroupSummary, ...]
    reader: StepReader

    @classmethod
    def from_groups(cls, groups: Sequence[Group]) -> StepGroups:
        return cls(tuple(GroupSummary.from_group(group) for group in groups),
                   HeldSamples({group.ordinal: group for group in groups}))

    @property
    def samples(self) -> list[SampleSummary]:
        """The samples, one group after the other."""
        return [sample for group in self.groups for sample in group.samples]

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy versions of what is trained on, ascending; 0 for a token without one."""
        return tuple(sorted({version for group in self.groups for version in group.versions}))

    @property
    def refs(self) -> list[SampleRef]:
        """The references of ``samples``."""
        return [(group.ordinal, index) for group in self.groups for index in range(len(group.samples))]
