"""Several lists of prompts as one, and the order that takes from each by its weight. Pure."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

from elastic_rl.data.order import Order, probes
from elastic_rl.data.samples import Prompt

MAX_CYCLE = 10_000
"""Ordinals after which the choice of the part repeats, at most."""


class Concatenated(Sequence[Prompt]):
    """The prompts of all parts, one part after the other."""

    def __init__(self, parts: Sequence[Sequence[Prompt]]) -> None:
        self.parts = tuple(parts)
        self._ends = list(accumulate(map(len, self.parts)))

    @property
    def fingerprint_indices(self) -> list[int]:
        """Indices that stand for all: those of each part."""
        begins = [0, *self._ends]
        return [begin + i for begin, part in zip(begins, self.parts, strict=False) for i in probes(part)]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        number, own = self.place(index)
        return self.parts[number][own]

    def place(self, index: int) -> tuple[int, int]:
        """Number of the part that a prompt is in, and its index there. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number] - len(self.parts[number]))

    def __iter__(self) -> Iterator[Prompt]:
        for part in self.parts:
            yield from part


class WeightedOrder:
    """Takes problems of several parts in the ratio of their weights, each part in its own order.

    Which part an ordinal takes repeats in a cycle, begun at a place that the seed chooses. Among the first ``n``
    ordinals the number of those of a part differs from its share of ``n`` by less than 2, and in any ``n`` consecutive
    ones too.
    """

    def __init__(self, parts: Sequence[tuple[Order, int]], weights: Sequence[float], seed: int) -> None:
        """``parts``: the order of each and its number of problems; the index of a problem counts those of the parts
        before it. Raises ValueError unless there is a positive, finite weight for each part."""
        if not parts or len(parts) != len(weights):
            raise ValueError(f"{len(parts)} parts have {len(weights)} weights")
        self._orders = [order for order, _ in parts]
        self._offsets = [0, *accumulate(size for _, size in parts)]
        self._turns = turns(weights)
        self._ranks, self._counts = _ranks(self._turns, len(parts))
        digest = hashlib.blake2b(f"weighted-order-{seed}".encode(), digest_size=8).digest()
        self._start = int.from_bytes(digest, "little") % len(self._turns)
        begun = [0] * len(parts)
        for part in self._turns[:self._start]:
            begun[part] += 1
        self._begun = begun

    def part(self, ordinal: int) -> tuple[int, int]:
        """Which part the ordinal takes, and how many ordinals before it took that part. Raises ValueError for a
        negative ordinal."""
        if ordinal < 0:
            raise ValueError(f"ordinals count from 0, got {ordinal}")
        cycle, position = divmod(ordinal + self._start, len(self._turns))
        part = self._turns[position]
        return part, cycle * self._counts[part] + self._ranks[position] - self._begun[part]

    def problem(self, ordinal: int) -> tuple[int, int]:
        """See ``Order``."""
        part, rank = self.part(ordinal)
        index, data_pass = self._orders[part].problem(rank)
        return self._offsets[part] + index, data_pass


def turns(weights: Sequence[float]) -> list[int]:
    """One cycle: the part of each place. In the first ``n`` places a part has its share of ``n``, ± less than 1
    (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980).

    The cycle is as short as the weights, as decimal numbers, allow; where it would be longer than ``MAX_CYCLE`` places,
    shares are rounded to that many, and each part has one place at least. Raises ValueError for weights that are not
    positive and finite, or more parts than ``MAX_CYCLE``.
    """
    counts = _counts(weights)
    parts, total = len(counts), sum(counts)
    if parts == 1:
        return [0]
    # A part may take place n once its debt, share · n − taken, is at least 1/(2·parts − 2); of those the one goes first
    # that would be owed most soonest. Debts are in units of 1/(total · (2·parts − 2)), so that they are whole.
    scale = 2 * parts - 2
    taken, out = [0] * parts, []
    for n in range(1, total + 1):
        debts = [(count * n - done * total) * scale for count, done in zip(counts, taken, strict=True)]
        ready = [i for i in range(parts) if debts[i] >= total]
        chosen = min(ready, key=lambda i: ((total * (scale - 1) - debts[i]) / counts[i], i))
        taken[chosen] += 1
        out.append(chosen)
    return out


def _counts(weights: Sequence[float]) -> list[int]:
    """Places of each part in a cycle."""
    if len(weights) > MAX_CYCLE or not all(math.isfinite(w) and w > 0 for w in weights):
        raise ValueError(f"weights must be positive and finite, and at most {MAX_CYCLE}")
    exact = [Fraction(str(w)) for w in weights]
    whole = [int(f * math.lcm(*(g.denominator for g in exact))) for f in exact]
    whole = [w // math.gcd(*whole) for w in whole]
    if (total := sum(whole)) <= MAX_CYCLE:
        return whole
    free = MAX_CYCLE - len(whole)
    counts = [1 + free * w // total for w in whole]
    rest = sorted(range(len(whole)), key=lambda i: -(free * whole[i] % total))
    for i in rest[:MAX_CYCLE - sum(counts)]:
        counts[i] += 1
    return counts


def _ranks(turns: Sequence[int], parts: int) -> tuple[list[int], list[int]]:
    """How many places before each place have the same part, and the places of each part."""
    counts, ranks = [0] * parts, []
    for part in turns:
        ranks.append(counts[part])
        counts[part] += 1
    return ranks, counts
