"""Upkeep of a host: its agent brings things back to what they should be from time to time, and says where it cannot."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from elastic_rl.errors import ElasticRLError, EtcdDenied, EtcdFull, EtcdUnavailable

log = logging.getLogger(__name__)

_EVERY_S = 10.0


class Upkeep:
    """One thing of this host that is kept right, such as its certificate."""

    def __init__(self, keep: Callable[[], bool], fails: str, *, every_s: float = _EVERY_S,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """``keep``: does what is to be done; False where it could not look now, because another command is at work: it
        is then called again with the next pass. ``fails``: how what it could not do is said, before the reason."""
        self._keep, self._fails, self._every_s, self._clock = keep, fails, every_s, clock
        self._at, self._error = float("-inf"), ""

    def run_if_due(self) -> str:
        """Keeps it right, where it is time for that. Returns why it is not; empty where it is. While etcd does not
        answer, that is what it was before."""
        if self._clock() < self._at:
            return self._error
        before = self._error
        try:
            if not self._keep():
                return before
            self._error = ""
        except (ElasticRLError, OSError) as e:
            # An etcd that is away comes back by itself; one that is full, or refuses this host, waits for a person.
            if not isinstance(e, EtcdUnavailable) or isinstance(e, EtcdDenied | EtcdFull):
                self._error = f"{self._fails}: {e}"
                if self._error != before:
                    log.error("%s", self._error)
        self._at = self._clock() + self._every_s
        return self._error
