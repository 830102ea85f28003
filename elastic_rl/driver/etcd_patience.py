"""Waits out an outage of etcd, however long it is (I11)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from elastic_rl.errors import Conflict, ElasticRLError, EtcdUnavailable
from elastic_rl.runtime import patience

log = logging.getLogger(__name__)
T = TypeVar("T")

_RETRY_S = (1.0, 4.0)
"""First and longest pause between two attempts; each attempt has the retry budget of the client."""
_LOG_EVERY_S = 30.0


class Stopped(Exception):
    """The process was told to stop while it waited."""


def patiently(call: Callable[[], T], *, pause: Callable[[float], bool],
              waiting: Callable[[], None] = lambda: None) -> T:
    """The result of a call, as soon as etcd answers it.

    ``call`` may run several times, also after an attempt whose outcome is unknown. ``pause(seconds)`` waits that long
    and returns whether to give up. ``waiting`` is called before each pause. Raises Stopped.
    """
    logged = float("-inf")

    def report(error: ElasticRLError) -> None:
        nonlocal logged
        if time.monotonic() - logged >= _LOG_EVERY_S:
            logged = time.monotonic()
            log.warning("waiting for etcd: %s", error)
        waiting()

    def pause_or_stop(seconds: float) -> None:
        if pause(seconds):
            raise Stopped

    return patience.patiently(call, away=(EtcdUnavailable, Conflict), pauses_s=_RETRY_S, pause=pause_or_stop,
                              waiting=report)
