"""How a replica's share of a batch is cut into micro-batches: the samples of one forward and backward pass. Gradients
and metrics do not depend on the cut; memory and time do.

A sample of n tokens takes n - 1 positions of a pass, since nothing is predicted from its last token, and a sample of
one token, from which nothing is predicted either, takes one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from elastic_rl.config import TrainerConfig
from elastic_rl.data.batch import Batch, spans, starts_of
from elastic_rl.models.flops import SequenceCost
from elastic_rl.trainer.context_parallel import multiple


@dataclass(frozen=True)
class ModelInput:
    """What goes through the model in one pass."""

    tokens: torch.Tensor
    """[R, P] int64: R sequences, right-padded; or packed, with R = 1: sequences one after another, without padding."""
    packed: tuple[int, ...] = ()
    """Lengths of the packed sequences, which add up to P; () for padded ones. With context parallelism each is filled
    up to a multiple of its chunks."""
    padding: torch.Tensor | None = None
    """[R, P] bool: where a row is filled up. None where no row is."""

    @property
    def positions(self) -> int:
        """Number of positions that are not filled up."""
        return self.tokens.numel() - (0 if self.padding is None else int(self.padding.sum()))

    def flops(self, cost: SequenceCost) -> float:
        """Operations of a forward pass of the whole model; padding costs as much as tokens."""
        rows, width = self.tokens.shape
        return sum(map(cost, self.packed or (width,) * rows))

    def to(self, device: torch.device) -> ModelInput:
        return ModelInput(self.tokens.to(device), self.packed,
                          None if self.padding is None else self.padding.to(device))


@dataclass(frozen=True)
class MicroBatch:
    """N samples of a share that pass through the model together."""

    rows: torch.Tensor
    """[N] their rows in the share."""
    batch: Batch
    """These samples."""
    input: ModelInput
    starts: torch.Tensor
    """[N] where each sample begins in the rows of the model, were these rows laid end to end."""

    @classmethod
    def padded(cls, rows: torch.Tensor, batch: Batch) -> MicroBatch:
        """Samples in a row each."""
        own = positions(batch)
        width = int(own.max())
        padding = torch.arange(width)[None] >= own[:, None]
        starts = torch.arange(batch.samples) * width
        tokens = _placed(batch, own, starts, padding.numel()).view(padding.shape)
        return cls(rows, batch, ModelInput(tokens, padding=padding), starts)

    @classmethod
    def packed(cls, rows: torch.Tensor, batch: Batch, multiple: int = 1) -> MicroBatch:
        """A micro-batch of at least one sample, all in one row. ``multiple``: to multiples of which each sequence is
        filled up."""
        own = positions(batch)
        lengths = filled_up(own, multiple)
        starts = starts_of(lengths)
        tokens = _placed(batch, own, starts, int(lengths.sum()))[None]
        return cls(rows, batch, ModelInput(tokens, tuple(lengths.tolist())), starts)


def _placed(batch: Batch, own: torch.Tensor, starts: torch.Tensor, size: int) -> torch.Tensor:
    """[size] int64: the first ``own`` [N] tokens of each sample from ``starts`` [N] on; 0 elsewhere."""
    found = torch.zeros(size, dtype=torch.int64)
    found[spans(starts, own)] = batch["tokens"][spans(batch.starts, own)].long()
    return found


def positions(batch: Batch) -> torch.Tensor:
    """[N] int64 positions that each sample takes in a pass."""
    return (batch["lengths"] - 1).clamp(min=1)


def filled_up(lengths: torch.Tensor, multiple: int) -> torch.Tensor:
    """The least multiples that are not less."""
    return (lengths + multiple - 1) // multiple * multiple


def cut(share: Batch, cfg: TrainerConfig, cost: Callable[[int], float]) -> list[MicroBatch]:
    """The micro-batches of a share, as the settings have them. Every sample is in one of them. ``cost``: the work of a
    sequence of so many positions."""
    step, budget = multiple(cfg.context_parallel), cfg.micro_batch_tokens * cfg.context_parallel
    chosen = (pack(filled_up(positions(share), step).tolist(), budget, cost) if cfg.packing
              else cut_by_length(positions(share).tolist(), budget))
    found = []
    for rows in map(torch.tensor, chosen):
        batch = share.rows(rows)
        found.append(MicroBatch.packed(rows, batch, step) if cfg.packing else MicroBatch.padded(rows, batch))
    return found


def cut_by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches whose sequences are padded to the longest of each: numbers of the sequences of these lengths.

    A micro-batch has at most ``budget`` positions, padding included, or is a single sequence. Sequences are taken by
    length, so that the padding of all micro-batches together is at most ``budget * ln(longest / shortest)``: that of
    one is at most ``budget * (1 - shortest / longest)`` of its own, and lengths only fall from one to the next. The
    longest come first, so that a step for which memory does not suffice fails at once.
    """
    micros: list[list[int]] = []
    for number in _longest_first(lengths):
        if micros and lengths[micros[-1][0]] * (len(micros[-1]) + 1) <= budget:
            micros[-1].append(number)
        else:
            micros.append([number])
    return micros


def pack(lengths: Sequence[int], budget: int, cost: Callable[[int], float]) -> list[list[int]]:
    """Micro-batches without padding, with about as much work each: the stages of a pipeline, and replicas that share
    experts, wait for one another at every micro-batch.

    There are as many as ``fill`` has, or more where some sequence would find room in none of them, though less than one
    more than twice as many as the positions need. The largest come first, as in ``cut_by_length``.
    """
    number = len(fill(lengths, budget))
    micros = _balanced(lengths, budget, cost, number)
    if len(micros) > number:  # the last ones had only what found no room: now all are there from the beginning
        micros = _balanced(lengths, budget, cost, len(micros))
    return _largest_first(micros, lengths)


def _balanced(lengths: Sequence[int], budget: int, cost: Callable[[int], float], number: int) -> list[list[int]]:
    """Micro-batches, of which there are so many to begin with: each sequence, the longest first, goes to the one with
    the least work of those that it fits into, or to a further one where it fits into none; then all others have more
    than half of ``budget``."""
    shortest = min(lengths, default=0)
    micros: list[list[int]] = [[] for _ in range(number)]
    least = [(0.0, micro, 0) for micro in range(number)]
    """(work, micro-batch, positions) of those that may have room for the next sequence."""
    full: list[tuple[int, int, float]] = []
    """(positions, micro-batch, work) of those that had none for an earlier one. Each is looked at once for each
    sequence that it has: what fits once fits until something is added, since sequences only become shorter."""
    for sequence in _longest_first(lengths):
        length = lengths[sequence]
        while full and full[0][0] + length <= budget:
            taken, micro, work = heapq.heappop(full)
            heapq.heappush(least, (work, micro, taken))
        while least and least[0][2] and least[0][2] + length > budget:
            work, micro, taken = heapq.heappop(least)
            heapq.heappush(full, (taken, micro, work))
        if not least:
            least.append((0.0, len(micros), 0))
            micros.append([])
        work, micro, taken = least[0]
        micros[micro].append(sequence)
        if taken + length + shortest <= budget:
            heapq.heapreplace(least, (work + cost(length), micro, taken + length))
        else:  # nothing that is left fits into it
            heapq.heappop(least)
    return micros


def fill(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches without padding: each sequence, the longest first, goes to the micro-batch with the fewest
    positions if it fits there, else to a new one. So no two micro-batches would fit into one: there are less than twice
    as many as the positions need, if more than one."""
    micros: list[list[int]] = []
    least: list[tuple[int, int]] = []  # (positions, micro-batch)
    for number in _longest_first(lengths):
        length = lengths[number]
        if least and least[0][0] + length <= budget:
            taken, micro = least[0]
            heapq.heapreplace(least, (taken + length, micro))
            micros[micro].append(number)
        else:
            heapq.heappush(least, (length, len(micros)))
            micros.append([number])
    return _largest_first(micros, lengths)


def _largest_first(micros: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    return sorted(micros, key=lambda micro: -sum(lengths[number] for number in micro))


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda number: -lengths[number])
