"""The order in which a run takes its problems: a function of the seed and a position. Pure."""

from __future__ import annotations

import random


class PromptOrder:
    """An endless sequence of problem indices: epoch after epoch, each a different shuffle of all problems.

    Position ``g`` of the sequence is the *ordinal* of a prompt group and identifies it for the whole run. The problem
    of an ordinal does not depend on earlier calls, so a run that resumes anywhere takes the same problems.
    """

    def __init__(self, n_train: int, seed: int) -> None:
        """Raises ValueError unless there is at least one problem."""
        if n_train < 1:
            raise ValueError(f"an order needs at least one problem, got {n_train}")
        self._n = n_train
        self._seed = seed
        self._epoch = -1
        self._indices: list[int] = []

    def groups(self, first_ordinal: int, count: int) -> list[int]:
        """Problem indices of the ordinals [first_ordinal, first_ordinal + count); ValueError for negative ones."""
        if first_ordinal < 0 or count < 0:
            raise ValueError(f"ordinals count from 0, got first {first_ordinal} and count {count}")
        return [self._problem(g) for g in range(first_ordinal, first_ordinal + count)]

    def _problem(self, ordinal: int) -> int:
        epoch, position = divmod(ordinal, self._n)
        if epoch != self._epoch:
            self._indices = list(range(self._n))
            random.Random(f"prompt-order-{self._seed}-{epoch}").shuffle(self._indices)
            self._epoch = epoch
        return self._indices[position]
