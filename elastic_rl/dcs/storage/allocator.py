"""Which part of an arena belongs to whom. Pure."""

from __future__ import annotations

import bisect

from elastic_rl.dcs.manifest import ALIGN, aligned
from elastic_rl.errors import ArenaFull


class Allocator:
    """First-fit allocator over ``size`` bytes that merges free neighbours. Offsets and sizes are multiples of ALIGN."""

    def __init__(self, size: int) -> None:
        self.size = size - size % ALIGN
        self.used = 0
        self._starts = [0] if self.size else []  # of the free regions, ascending
        self._sizes = [self.size] if self.size else []
        self._allocated: dict[int, int] = {}

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free region."""
        return max(self._sizes, default=0)

    def alloc(self, nbytes: int) -> int:
        """Returns the offset of a new region of at least ``nbytes`` (> 0). Raises ArenaFull."""
        if nbytes <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        needed = aligned(nbytes)
        for i, free in enumerate(self._sizes):
            if free >= needed:
                start = self._starts[i]
                if free == needed:
                    del self._starts[i], self._sizes[i]
                else:
                    self._starts[i], self._sizes[i] = start + needed, free - needed
                self._allocated[start] = needed
                self.used += needed
                return start
        raise ArenaFull(f"no room for {nbytes} bytes: {self.used} of {self.size} are in use, and the largest free "
                        f"region has {self.largest_free}",
                        hint="set a larger dcs.arena_bytes, or a smaller dcs.keep_versions")

    def split(self, offset: int, nbytes: int) -> int:
        """Splits a region after its first ``nbytes``; returns the offset of the second one."""
        size, first = self._allocated[offset], aligned(nbytes)
        if not 0 < first < size:
            raise ValueError(f"cannot split {size} bytes after {nbytes}")
        self._allocated[offset], self._allocated[offset + first] = first, size - first
        return offset + first

    def shrink(self, offset: int, nbytes: int) -> None:
        """Frees all of a region but its first ``nbytes``."""
        if aligned(nbytes) != self._allocated[offset]:
            self.free(self.split(offset, nbytes))

    def free(self, offset: int) -> None:
        """Frees a region. Raises KeyError for an offset at which none starts."""
        self._insert(offset, self._allocated.pop(offset))

    def _insert(self, start: int, size: int) -> None:
        self.used -= size
        i = bisect.bisect(self._starts, start)
        if i < len(self._starts) and start + size == self._starts[i]:
            size += self._sizes[i]
            del self._starts[i], self._sizes[i]
        if i and self._starts[i - 1] + self._sizes[i - 1] == start:
            self._sizes[i - 1] += size
        else:
            self._starts.insert(i, start)
            self._sizes.insert(i, size)

