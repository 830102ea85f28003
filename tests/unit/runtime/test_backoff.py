"""Pauses between tries."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.runtime.backoff import RetryBackoff


def pauses(backoff: RetryBackoff, count: int) -> list[float]:
    """Pauses of so many failures in a row, found by bisection."""
    out, now = [], 100.0
    for _ in range(count):
        backoff.failed(now)
        low, high = now, now + 1000
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if backoff.is_due(middle) else (middle, high)
        out.append(high - now)
        now = high
    return out


@given(st.integers(0, 1000))
def test_pauses_double_up_to_their_limit_with_jitter(seed: int) -> None:
    found = pauses(RetryBackoff(0.2, 30.0, random.Random(seed)), 12)
    for i, pause in enumerate(found):
        expected = min(0.2 * 2**i, 30.0)
        assert 0.74 * expected <= pause <= 1.26 * expected


def test_first_try_and_one_after_a_success_are_due_at_once() -> None:
    backoff = RetryBackoff(1.0, 30.0)
    assert backoff.is_due(0.0)
    backoff.failed(0.0)
    assert not backoff.is_due(0.5)
    backoff.reset()
    assert backoff.is_due(0.5) and pauses(backoff, 1)[0] < 1.3


def test_attempt_after_a_change_is_due_at_once_and_the_next_later() -> None:
    backoff = RetryBackoff(1.0, 30.0)
    for _ in range(3):
        backoff.failed(0.0)
    backoff.try_now()
    assert backoff.is_due(0.0) and pauses(backoff, 1)[0] >= 0.75 * 8
