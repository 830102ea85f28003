"""The run's curve stays bounded, even and whole where people look."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.step_metrics import downsample

LIMIT = 40


def thinned(steps: list[int], limit: int = LIMIT) -> list[int]:
    gone = set(downsample(steps, limit))
    return [s for s in steps if s not in gone]


def test_a_curve_within_the_limit_is_left_alone() -> None:
    assert downsample(list(range(1, LIMIT + 1)), LIMIT) == []


@given(st.lists(st.integers(0, 10_000), unique=True, min_size=2, max_size=300).map(sorted), st.integers(2, 100))
def test_at_most_the_limit_stay_and_the_ends_are_among_them(steps: list[int], limit: int) -> None:
    kept = thinned(steps, limit)
    assert len(kept) <= limit and kept[0] == steps[0] and kept[-(limit // 2):] == steps[-(limit // 2):]
    assert set(kept) <= set(steps) and thinned(kept, limit) == kept


@pytest.mark.parametrize("every", [1, 3, 7])
def test_a_long_run_thinned_again_and_again_keeps_old_points_as_evenly_as_one_thinned_once(every: int) -> None:
    kept: list[int] = []
    for step in range(1, 5001):
        kept.append(step)
        if step % every == 0:
            kept = thinned(kept)
    kept = thinned(kept)
    old = kept[1:-LIMIT // 2]
    gaps = {b - a for a, b in zip(old, old[1:], strict=False)}
    # One stride, but for what became old since the last doubling, which may lie closer.
    assert gaps <= {2**k for k in range(14)} and max(gaps) <= 4 * 5000 / (LIMIT // 2)
    assert len(kept) > LIMIT // 2 + LIMIT // 8, "it throws away more than it must"


def test_a_limit_that_leaves_no_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="none"):
        downsample([1, 2, 3], 1)
