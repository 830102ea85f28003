"""Waiting for a condition, with a limit on time, or on time without progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from elastic_rl.errors import DeadlineExceeded

T = TypeVar("T")


def wait_until(check: Callable[..., T | None], *, timeout_s: float, what: str, poll_s: float = 0.05,
               alive: Callable[..., bool] | None = None) -> T:
    """Polls ``check()`` until it returns something true and returns that. ``alive()`` false ends the wait early. Both
    are called without arguments; they may have some with defaults, as a lambda in a loop does.

    Raises DeadlineExceeded, which names ``what``.
    """
    end = time.monotonic() + timeout_s
    while True:
        if value := check():
            return value
        if alive is not None and not alive():
            raise DeadlineExceeded(f"{what} ended before it was ready", hint="see its log")
        if time.monotonic() > end:
            raise DeadlineExceeded(f"{what} was not ready within {timeout_s:g} s")
        time.sleep(poll_s)


class ProgressLimit:
    """A limit on the time without progress of something that is slow on a slow machine: a start, a load, a compile.

    The caller passes numbers that grow with the work (CPU seconds, bytes of a log, bytes read). It is progress when one
    of them has grown by at least its step since the last progress. A number that falls (a process ended) counts from
    where it fell to.
    """

    def __init__(self, limit_s: float, *, steps: Mapping[str, float] | None = None, gap_s: float = 30.0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """``limit_s``: seconds without progress. ``steps``: the smallest growth that counts, by name; any where it is
        not named. ``gap_s``: the most that the time between two updates can count for, so that a caller which was
        itself suspended blames nobody."""
        self.limit_s, self._steps, self._gap_s, self._clock = limit_s, dict(steps or {}), gap_s, clock
        self._base: dict[str, float] = {}
        self._updated_at = clock()
        self._stalled_s = 0.0

    def update(self, evidence: Mapping[str, float]) -> bool:
        """Takes the numbers as they are now. Returns whether there was progress since the last update."""
        now = self._clock()
        elapsed, self._updated_at = max(0.0, now - self._updated_at), now
        grown = False
        for name, value in evidence.items():
            base = self._base.setdefault(name, value)
            if value < base:
                self._base[name] = value
            grown |= value - base > 0 and value - base >= self._steps.get(name, 0.0)
        if grown:
            self._base.update(evidence)
            self._stalled_s = 0.0
        else:
            self._stalled_s += min(elapsed, self._gap_s)
        return grown

    @property
    def stalled_s(self) -> float:
        """Seconds without progress, as of the last update."""
        return self._stalled_s

    @property
    def expired(self) -> bool:
        return self._stalled_s >= self.limit_s
