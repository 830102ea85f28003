"""Waits out an outage of etcd, however long it is (I11)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from elastic_rl.errors import Conflict, EtcdUnavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 1.0
"""Pause before the next try; each try has the retry budget of the client."""
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
    while True:
        try:
            return call()
        except (EtcdUnavailable, Conflict) as e:
            if time.monotonic() - logged >= _LOG_EVERY_S:
                logged = time.monotonic()
                log.warning("waiting for etcd: %s", e)
            waiting()
            if pause(RETRY_S):
                raise Stopped from e
