"""What an allocator of the arena has given out, for the checks of its tests."""

from __future__ import annotations

from elastic_rl.dcs.storage.allocator import Allocator


def regions(space: Allocator) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Allocated and free regions as (offset, size), ascending."""
    return sorted(space._allocated.items()), list(zip(space._starts, space._sizes, strict=True))
