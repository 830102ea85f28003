"""Pauses between the attempts of a call that failed. Pure: the time is passed in."""

from __future__ import annotations

import random


def doubled_s(failures: int, first_s: float, max_s: float) -> float:
    """The pause after the given number of failures in a row, counted from 1: it doubles from ``first_s`` to ``max_s``.
    """
    return min(first_s * 2.0 ** min(max(failures - 1, 0), 60), max_s)


def backoff_s(failures: int, first_s: float, max_s: float, rng: random.Random | None = None) -> float:
    """``doubled_s`` with 25% of jitter, so that parts that failed together do not make their next attempts at the same
    time."""
    jitter = rng.uniform(0.75, 1.25) if rng is not None else random.uniform(0.75, 1.25)
    return doubled_s(failures, first_s, max_s) * jitter


class RetryBackoff:
    """The pauses between attempts, which ``backoff_s`` gives."""

    def __init__(self, first_s: float, max_s: float, rng: random.Random | None = None) -> None:
        self._first_s, self._max_s, self._random = first_s, max_s, rng
        self._failures = 0
        self._not_before = 0.0

    def is_due(self, now: float) -> bool:
        """Whether the next attempt may begin."""
        return now >= self._not_before

    def left_s(self, now: float) -> float:
        """Seconds until the next attempt may begin."""
        return max(0.0, self._not_before - now)

    def failed(self, now: float) -> None:
        """An attempt failed: the next one begins after a pause."""
        self._failures += 1
        self._not_before = now + backoff_s(self._failures, self._first_s, self._max_s, self._random)

    def try_now(self) -> None:
        """Something changed, so the next attempt need not wait; if it fails too, the pause after it is the longer
        one."""
        self._not_before = 0.0

    def reset(self) -> None:
        """An attempt succeeded."""
        self._failures, self._not_before = 0, 0.0
