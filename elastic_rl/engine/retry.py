"""When to try again what failed. Pure: the time is passed in."""

from __future__ import annotations

import random


class RetryBackoff:
    """Pauses between tries that double from ``first_s`` to ``max_s``, each with 25% of jitter so that engines that
    failed together do not try again together."""

    def __init__(self, first_s: float, max_s: float, rng: random.Random | None = None) -> None:
        self._first_s, self._max_s, self._random = first_s, max_s, rng or random.Random()
        self._failures = 0
        self._not_before = 0.0

    def is_due(self, now: float) -> bool:
        """Whether the next try may begin."""
        return now >= self._not_before

    def failed(self, now: float) -> None:
        """A try failed: the next one begins after a pause."""
        pause_s = min(self._first_s * 2.0 ** min(self._failures, 60), self._max_s)
        self._failures += 1
        self._not_before = now + pause_s * self._random.uniform(0.75, 1.25)

    def try_now(self) -> None:
        """Something changed, so the next try need not wait; if it fails too, the pause after it is the longer one."""
        self._not_before = 0.0

    def reset(self) -> None:
        """A try succeeded."""
        self._failures, self._not_before = 0, 0.0
