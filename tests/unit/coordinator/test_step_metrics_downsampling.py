"""Downsampled step metrics stay bounded and evenly spaced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.retention import steps_to_delete

LIMIT = 40


def downsampled(steps: list[int], limit: int = LIMIT) -> list[int]:
    gone = set(steps_to_delete(steps, limit))
    return [s for s in steps if s not in gone]


def test_steps_within_the_limit_are_all_kept() -> None:
    assert steps_to_delete(list(range(1, LIMIT + 1)), LIMIT) == []


@given(st.lists(st.integers(0, 10_000), unique=True, min_size=2, max_size=300).map(sorted), st.integers(2, 100))
def test_at_most_the_limit_remain_and_both_ends_among_them(steps: list[int], limit: int) -> None:
    kept = downsampled(steps, limit)
    assert len(kept) <= limit and kept[0] == steps[0] and kept[-(limit // 2):] == steps[-(limit // 2):]
    assert set(kept) <= set(steps) and downsampled(kept, limit) == kept


@pytest.mark.parametrize("every", [1, 3, 7])
def test_repeated_downsampling_keeps_old_points_as_even_as_one_pass(every: int) -> None:
    kept: list[int] = []
    for step in range(1, 5001):
        kept.append(step)
        if step % every == 0:
            kept = downsampled(kept)
    kept = downsampled(kept)
    old = kept[1:-LIMIT // 2]
    gaps = {b - a for a, b in zip(old, old[1:], strict=False)}
    # One stride, but for what became old since the last doubling, which may lie closer.
    assert gaps <= {2**k for k in range(14)} and max(gaps) <= 4 * 5000 / (LIMIT // 2)
    assert len(kept) > LIMIT // 2 + LIMIT // 8, "it deletes more than it must"


def test_limit_below_two_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        steps_to_delete([1, 2, 3], 1)
