"""The groups of a step, or of a part of one: what is known of them, and where their samples are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from elastic_rl.data.batch import Batch, collate
from elastic_rl.data.queue.queued_batch import QueuedBatch, SampleReader, SampleRef
from elastic_rl.data.queue.summary import GroupSummary, SampleSummary
from elastic_rl.data.samples import Group, Prompt, Sample


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
        """They are here."""


@dataclass(frozen=True)
class StepGroups:
    """In the order in which they are trained."""

    groups: tuple[GroupSummary, ...]
    reader: StepReader

    @classmethod
    def from_groups(cls, groups: Sequence[Group]) -> StepGroups:
        return cls(tuple(GroupSummary.from_group(group) for group in groups),
                   HeldSamples({group.ordinal: group for group in groups}))

    @property
    def samples(self) -> list[SampleSummary]:
        """One group after the other."""
        return [sample for group in self.groups for sample in group.samples]

    @property
    def refs(self) -> list[SampleRef]:
        """Of ``samples``."""
        return [(group.ordinal, index) for group in self.groups for index in range(len(group.samples))]

    def batch(self, advantages: Sequence[float] | None = None) -> Batch:
        """All samples as a batch; ``advantages``: one per sample, or None for a batch without. Raises as ``collate``
        and ``SampleReader.read``."""
        if self.reader.is_local:
            return collate(self.reader.read(self.refs), advantages)
        return QueuedBatch.of(self.refs, self.samples, self.reader, advantages)

    def turn_rewards(self, batch: Batch) -> torch.Tensor:
        """[N, T] fp32: what of each sample's reward is of a turn, at the turn's last token, if that is trained on; 0
        elsewhere. ``batch``: of all samples."""
        found = torch.zeros((batch.samples, batch.width))
        for row, sample in enumerate(self.samples):
            ends = [sample.prompt_tokens + end for end in sample.turn_ends[:len(sample.turn_rewards)]]
            found[row, ends] = torch.tensor(sample.turn_rewards, dtype=torch.float32)
        return torch.where(batch["loss_mask"], found, 0.0)
