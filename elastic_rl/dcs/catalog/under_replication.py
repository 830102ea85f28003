"""Committed versions that have fewer copies than wanted, and for how long there have been any. Pure.

The repair of the leader finds them on its rounds. A leader that has just begun knows nothing yet: that is neither
"some" nor "none", so that a change of leaders ends no alert, and begins none again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ShortVersion:
    """A committed version that has fewer copies than wanted."""

    stream: str
    number: int
    copies: int
    """Nodes that hold the part of it that the fewest hold."""
    wanted: int
    why: str
    """Why no more were made."""


@dataclass(frozen=True)
class UnderReplication:
    """What is known of versions that are short of copies."""

    versions: tuple[ShortVersion, ...] = ()
    since_s: float = 0.0
    """Since when there has been one without a break, whichever, in monotonic seconds: while a node is full, each of
    many short-lived versions is short."""
    complete: bool = False
    """Whether every committed version was examined, so that all others have their copies."""

    def after(self, found: Iterable[ShortVersion], complete: bool, now_s: float) -> UnderReplication:
        """``found``: the versions that are short now, of those that were examined. ``complete``: all were."""
        versions = tuple(found)
        return UnderReplication(versions, self.since_s if self.versions and versions else now_s, complete)


def described(versions: Sequence[ShortVersion], most: int = 3) -> str:
    """The versions in words, such as ``policy/12, policy/11 and 4 more have 1 of 2 copies``: the fewest, where they
    differ."""
    names = [f"{v.stream}/{v.number}" for v in sorted(versions, key=lambda v: (v.copies, v.stream, -v.number))]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    worst = min(versions, key=lambda v: v.copies)
    has = "has" if len(names) == 1 else "have"
    at_least = "" if all((v.copies, v.wanted) == (worst.copies, worst.wanted) for v in versions) else "at least "
    return f"{', '.join(names[:most])}{more} {has} {at_least}{worst.copies} of {worst.wanted} copies"
