"""Which policy versions belong to the weights that the trainer has, and which to weights that it went back from. Pure.

Versions are numbered in the order in which they are published, and a number is never given twice. When the trainer
goes back to the state of version 10 while version 20 is out, it publishes the old weights again, as version 21: engines
then go forward to it. Versions 11 to 20 are of a branch that was abandoned: by number 20 is one version old, by its
weights it is ten steps ahead, and was made with groups that are now made again. A branch knows those that were
abandoned before it, and is saved with the weights: else version 20 would be new again after the next return, to
version 25.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

_KEPT = 64
"""Branches that are remembered. The versions of earlier ones are too old for any bound that is of use."""


@dataclass(frozen=True)
class Branch:
    """What the trainer has made since it restored a state. ``base``: the version of that state, 0 for the beginning;
    ``first``: the first version that was published after it; 0 before there is one."""

    base: int = 0
    first: int = 0
    before: tuple[tuple[int, int], ...] = ()
    """Base and first version of the branches before, as far as versions were abandoned for them; the last ones."""

    def restored(self, version: int) -> Self:
        """The trainer is at the state of this version, which was saved with this branch; 0: at the beginning."""
        return type(self)(version, 0, self.abandoning[-_KEPT:] if version else ())

    def published(self, version: int) -> Self:
        """The trainer has published this version."""
        return self if self.first or not version else type(self)(self.base, version, self.before)

    @property
    def abandoning(self) -> tuple[tuple[int, int], ...]:
        """This branch and those before, each with the versions between its two that were abandoned for it."""
        return tuple((base, first) for base, first in (*self.before, (self.base, self.first)) if base + 1 < first)

    def abandoned(self, versions: Iterable[int]) -> bool:
        """Whether one of the versions is of weights that the trainer went back from."""
        return any(base < version < first for version in versions for base, first in self.abandoning)

    def to_json(self) -> list[Any]:
        return [self.base, self.first, *map(list, self.before)]

    @classmethod
    def from_json(cls, raw: Any) -> Self:
        """Raises ValueError and TypeError for anything but what ``to_json`` returned."""
        base, first, *before = raw
        return cls(int(base), int(first), tuple((int(b), int(f)) for b, f in before))
