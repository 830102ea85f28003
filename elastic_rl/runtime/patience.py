"""Waiting for what is away, for as long as that takes (I11)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from elastic_rl.runtime.backoff import RetryBackoff

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


def patiently(call: Callable[[], T], *, away: type[E] | tuple[type[E], ...], pauses_s: tuple[float, float],
              pause: Callable[[float], object], waiting: Callable[[E], object],
              unless: tuple[type[Exception], ...] = ()) -> T:
    """The result of a call, as soon as it succeeds; it is made again and again while it raises one of ``away``.

    The caller decides which errors those are, since that depends on what is called: an outage that only a person can
    end is waited for too. ``unless``: those of them that end the wait all the same. ``pauses_s``: the first and the
    longest pause. ``waiting`` is called with each error, before the pause: it says what is waited for. ``pause`` waits
    for so many seconds; what it or ``waiting`` raises ends the wait.
    """
    backoff = RetryBackoff(*pauses_s)
    while True:
        try:
            return call()
        except unless:
            raise
        except away as e:
            waiting(e)
        now = time.monotonic()
        backoff.failed(now)
        pause(backoff.left_s(now))
