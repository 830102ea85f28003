"""Which samples a step may be trained on, by the versions of the policy that made them. Pure.

There is one rule, for every schedule. The flow applies it where the groups of a step are chosen (``GroupFlow``), and
the trainer once more to each command before it executes it (``WriterGate``), whatever the actor believes: neither asks
who made the samples, or which versions were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic_rl.data.branch import Branch
from elastic_rl.errors import StaleSamples

_NAMED = 8
"""Versions that a text names."""


@dataclass(frozen=True)
class StalenessRule:
    """The rule for the step that trains one policy."""

    version: int
    """Number of that policy: the first one of those under which its weights were published."""
    max_staleness: int
    """The setting ``train.max_staleness``, in versions."""
    branch: Branch = Branch()
    newest: int | None = None
    """The newest number that was given to a version; None for who does not know it, since the trainer may publish the
    same weights once more at any time."""

    def refused(self, versions: Iterable[int]) -> tuple[int, ...]:
        """The versions that no sample of the step may have a token of, ascending: older than the bound, of
        weights that the trainer went back from, not published yet, or none at all (0)."""
        return tuple(sorted({version for version in versions if version < max(1, self.version - self.max_staleness)
                             or self.branch.abandoned((version,))
                             or (self.newest is not None and version > self.newest)}))

    def require(self, versions: Iterable[int]) -> None:
        """Raises StaleSamples if one of the versions is refused."""
        if refused := self.refused(versions):
            named = ", ".join(map(str, refused[:_NAMED])) + (", …" if len(refused) > _NAMED else "")
            raise StaleSamples(
                f"samples of policy version {named} are refused: the step trains version {self.version}, may be "
                f"{self.max_staleness} versions ahead of its samples, and no sample may be of weights that the trainer "
                "went back from, or that it has not published", refused,
                hint="their groups are generated again, or dropped when that does not help; whoever generates them "
                "says a wrong version")
