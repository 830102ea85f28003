"""Which points of the run's curve are kept when there are too many. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def downsample(steps: Sequence[int], limit: int) -> list[int]:
    """Steps whose points go so that at most ``limit`` stay. ``steps``: those that have a point, in rising order.

    The newest half of ``limit`` and the first point stay. Of the older ones stay the multiples of a power of two, the
    smallest that is enough: a later call keeps a part of what an earlier one kept, and the old points lie evenly
    however often it is called.
    """
    if limit < 2:
        raise ValueError(f"a curve of at most {limit} points is none")
    if len(steps) <= limit:
        return []
    newest = limit // 2
    old, room, stride = steps[1:-newest], limit - newest - 1, 2
    while sum(step % stride == 0 for step in old) > room:
        stride *= 2
    return [step for step in old if step % stride]
