"""Times in which something was under way. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class Unseen:
    """Collects the times that the observer did not see: from the last change before a gap to the first after it."""

    def __init__(self) -> None:
        self._gaps, self._last, self._since = list[tuple[float, float]](), 0.0, math.inf

    def gap(self) -> None:
        self._since = min(self._since, self._last)

    def seen(self, at: float) -> None:
        """A change was seen at a time."""
        if self._since < math.inf:
            self._gaps.append((self._since, at))
            self._since = math.inf
        self._last = at

    def times(self) -> Times:
        return Times([*self._gaps, *([(self._since, math.inf)] if self._since < math.inf else [])])


class Times:
    """Times from and to, in seconds, which may overlap. A look costs a search, however many there are: a long run has
    as many faults as it has minutes, and each step and each operation of its clients is asked about."""

    def __init__(self, times: Iterable[tuple[float, float]]) -> None:
        self._begins, self._ends = list[float](), list[float]()
        """Of those that meet, as one, in their order."""
        for begin, end in sorted(times):
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def has(self, at: float, *, after_s: float = 0.0) -> bool:
        """Whether something was under way at a time, or so many seconds before."""
        before = bisect_right(self._begins, at)
        return before > 0 and at <= self._ends[before - 1] + after_s

    def meets(self, since: float, until: float) -> bool:
        """Whether something was under way between two times, of which neither counts."""
        before = bisect_left(self._begins, until)
        return before > 0 and self._ends[before - 1] > since

    def beside(self, since: float, until: float) -> float:
        """How much of a time is in none of these, in seconds."""
        first, last = bisect_right(self._ends, since), bisect_left(self._begins, until)
        under_way = sum(min(self._ends[n], until) - max(self._begins[n], since) for n in range(first, last))
        return max(0.0, until - since - under_way)
