"""The members of an etcd as this process knows them. Its clients share them: one that has made no call for an hour
knows what another has learned."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from weakref import WeakValueDictionary

log = logging.getLogger(__name__)

_FIRST_S = 10.0
"""Age of the knowledge at which etcd is asked for the first time, at most. A process that lives for a single command
needs no other members than those that it was given."""


class KnownMembers:
    """``host:port`` of each member. Thread-safe."""

    def __init__(self, endpoints: Sequence[str], follow_s: float, *, clock: Callable[[], float] = time.monotonic
                 ) -> None:
        """``follow_s``: seconds after which etcd is asked for its members again; 0: never, they are the ``endpoints``.
        """
        self.endpoints, self._follow_s, self._clock = tuple(endpoints), follow_s, clock
        self._lock = threading.Lock()
        self._ask_at = clock() + min(_FIRST_S, follow_s)

    def is_due(self) -> bool:
        """Whether it is time to ask etcd; true for one caller each time."""
        if not self._follow_s or self._clock() < self._ask_at:
            return False
        with self._lock:
            now = self._clock()
            due = now >= self._ask_at
            if due:
                self._ask_at = now + self._follow_s * random.uniform(0.8, 1.2)
            return due

    def take(self, endpoints: Sequence[str]) -> None:
        """Replaces the members by those that etcd lists, if they are followed and there are any."""
        found = tuple(dict.fromkeys(endpoints))
        with self._lock:
            if self._follow_s and found and set(found) != set(self.endpoints):
                log.info("the members of etcd are now %s", ", ".join(found))
                self.endpoints = found


_shared: WeakValueDictionary[Hashable, KnownMembers] = WeakValueDictionary()
_sharing = threading.Lock()


def known_members(endpoints: Sequence[str], access: Hashable, follow_s: float) -> KnownMembers:
    """What the clients of this process know of the etcd with these ``endpoints``, which they reach by this ``access``.
    """
    if not follow_s:
        return KnownMembers(endpoints, 0.0)
    key = (tuple(sorted(endpoints)), access, follow_s)
    with _sharing:
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = KnownMembers(endpoints, follow_s)
        return found
