"""Taking samples: the arithmetic that every row shares. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from elastic_rl.bench.measurement import Row


def seconds(run: Callable[[], object], samples: int, *, before: Callable[[], object] = lambda: None,
            warm: int = 1) -> list[float]:
    """Times of ``run`` after ``warm`` runs that do not count; ``before`` happens outside of the time."""
    out = []
    for i in range(warm + samples):
        before()
        start = time.monotonic()
        run()
        if i >= warm:
            out.append(time.monotonic() - start)
    return out


def gbps(nbytes: int, times: Sequence[float]) -> list[float]:
    """Times of moving so many bytes as 10^9 bytes a second."""
    return [nbytes / t / 1e9 for t in times]


def speedup(ours: Sequence[float], alternatives: Mapping[str, Sequence[float]]) -> tuple[list[float], dict[str, float]]:
    """How often faster we are than the best alternative, a sample of ours each, and than each of them by medians."""
    medians = {name: median(times) for name, times in alternatives.items() if times}
    best = min(medians.values())
    return [best / t for t in ours], {name: value / median(ours) for name, value in medians.items()}


def with_alternatives(row: Row, alternatives: Mapping[str, Sequence[float]]) -> Row:
    """The row beside the medians of the others."""
    return row.model_copy(update={"alternatives": {n: median(v) for n, v in alternatives.items() if v}})
