"""Sets of ordinals that are mostly contiguous, as intervals. Pure.

A run trains millions of prompt groups, nearly in order: as intervals the set of those that it has consumed takes a few
numbers, however long the run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class IntervalSet:
    """An immutable set of integers >= 0. ``spans``: half-open [start, stop), ascending, with a gap between any two."""

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_values(cls, values: Iterable[int]) -> Self:
        """Raises ValueError for a negative value."""
        spans: list[tuple[int, int]] = []
        for value in sorted(set(values)):
            if value < 0:
                raise ValueError(f"ordinals count from 0, got {value}")
            if spans and spans[-1][1] == value:
                spans[-1] = (spans[-1][0], value + 1)
            else:
                spans.append((value, value + 1))
        return cls(tuple(spans))

    @classmethod
    def from_json(cls, raw: object) -> Self:
        """Reads what ``to_json`` returned. Raises ValueError for anything else."""
        try:
            spans = tuple((int(start), int(stop)) for start, stop in raw)  # type: ignore[attr-defined]
        except (TypeError, ValueError) as e:
            raise ValueError(f"not a list of [start, stop): {raw!r}") from e
        flat = [bound for span in spans for bound in span]
        if any(a >= b for a, b in zip(flat, flat[1:], strict=False)) or (flat and flat[0] < 0):
            raise ValueError(f"intervals must ascend and not touch: {raw!r}")
        return cls(spans)

    def to_json(self) -> list[list[int]]:
        return [[start, stop] for start, stop in self.spans]

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int):
            return False
        at = bisect_right(self.spans, value, key=lambda span: span[0]) - 1
        return at >= 0 and value < self.spans[at][1]

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.spans:
            yield from range(start, stop)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __or__(self, other: IntervalSet) -> IntervalSet:
        merged: list[tuple[int, int]] = []
        for start, stop in sorted((*self.spans, *other.spans)):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
            else:
                merged.append((start, stop))
        return IntervalSet(tuple(merged))

    def __and__(self, other: IntervalSet) -> IntervalSet:
        common: list[tuple[int, int]] = []
        mine, theirs = iter(self.spans), iter(other.spans)
        a, b = next(mine, None), next(theirs, None)
        while a is not None and b is not None:
            if (start := max(a[0], b[0])) < (stop := min(a[1], b[1])):
                common.append((start, stop))
            if a[1] <= b[1]:
                a = next(mine, None)
            else:
                b = next(theirs, None)
        return IntervalSet(tuple(common))

    def __sub__(self, other: IntervalSet) -> IntervalSet:
        return self & other.complement(self.stop)

    @property
    def stop(self) -> int:
        """One more than the largest value; 0 for the empty set."""
        return self.spans[-1][1] if self.spans else 0

    def complement(self, stop: int) -> IntervalSet:
        """The values of [0, stop) that are not in the set."""
        out, at = [], 0
        for start, end in self.spans:
            if start >= stop:
                break
            if at < start:
                out.append((at, start))
            at = end
        if at < stop:
            out.append((at, stop))
        return IntervalSet(tuple(out))

    def first_missing(self, count: int) -> list[int]:
        """The ``count`` lowest values that are not in the set."""
        out: list[int] = []
        at = 0
        for start, stop in self.spans:
            out += range(at, min(start, at + count - len(out)))
            if len(out) == count:
                return out
            at = stop
        return out + list(range(at, at + count - len(out)))
