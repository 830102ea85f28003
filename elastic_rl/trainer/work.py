"""What a rank says of the cost of its micro-batches, and how fast it is. Pure.

A micro-batch may take a hundred times as long as the one before it, and a replica ten times as long as the others. So a
rank states the estimated operations of each piece of work before it begins it, beside the seconds that it took for an
operation so far, and whoever looks at it knows when the piece is expected to end.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_rl.etcd.records import StatedWork

_FADE = 0.98
"""Fraction of what is known that is kept at each piece of work, so that it is about the last fifty."""


def in_flight(costs: Sequence[float], number: int, stages: int) -> float:
    """Operations of the micro-batches that the stages of a pipeline may work on while one of them has this number,
    counted from 0; -1: before the first one. A stage waits for others within a pass, and so for theirs too."""
    if stages == 1:
        return costs[number] if number >= 0 else sum(costs[:1])
    return sum(costs[max(0, number - stages + 1):number + stages])


class WorkMeter:
    """Seconds for an operation of the pieces of work that one rank has done. The first one is left out: kernels are
    compiled, and memory is taken, in it."""

    def __init__(self) -> None:
        self._is_warm = False
        self._flops = self._seconds = 0.0
        self._begun: tuple[float, float] | None = None

    def begin(self, flops: float, now: float) -> None:
        """A piece of work of so many operations begins, and the one before it ends. ``now``: monotonic seconds."""
        self.end(now)
        self._begun = flops, now

    def end(self, now: float) -> None:
        """The piece of work ends, if there is one."""
        if self._begun is not None:
            flops, began = self._begun
            if self._is_warm:
                self._flops, self._seconds = _FADE * self._flops + flops, _FADE * self._seconds + now - began
            self._begun, self._is_warm = None, True

    def stated(self, flops: float) -> StatedWork:
        """What this rank says of so many operations."""
        return StatedWork(flops=flops, s_per_flop=self._seconds / self._flops if self._flops else 0.0)
