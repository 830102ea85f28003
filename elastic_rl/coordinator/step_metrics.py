"""Downsampling of step metrics: which points are deleted when there are too many. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def steps_to_delete(steps: Sequence[int], limit: int) -> list[int]:
    """Steps whose points are to be deleted so that at most ``limit`` remain. ``steps``: those with a point, ascending.

    The newest half of ``limit`` and the first point remain. Of the older ones the multiples of a power of two remain,
    the smallest that suffices: a later call keeps a subset of what an earlier one kept, and the old points are evenly
    spaced however often it is called. Raises ValueError for a limit below 2.
    """
    if limit < 2:
        raise ValueError(f"limit must be at least 2, not {limit}")
    if len(steps) <= limit:
        return []
    newest = limit // 2
    old, room, stride = steps[1:-newest], limit - newest - 1, 2
    while sum(step % stride == 0 for step in old) > room:
        stride *= 2
    return [step for step in old if step % stride]
