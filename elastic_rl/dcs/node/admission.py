"""How many connections a node serves, and how long one may stay without having authenticated. Pure.

Anybody who can reach a node's port can open connections to it. Before they have authenticated they must not be able to
occupy what others need: they have a deadline of their own for the whole handshake, there are few of them in all and of
one host, and when there are too many the one that has waited longest makes room for the next.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of a node's connections."""

    connections: int = 512
    """Authenticated ones."""
    unauthenticated: int = 128
    unauthenticated_per_host: int = 32
    deadline_s: float = 10.0
    """For TLS handshake and hello together."""


class Admission:
    """The connections of a node. Not thread-safe; ``now`` never goes back."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[int, tuple[str, float]] = {}  # unauthenticated: connection -> host, since; oldest first
        self._by_host: Counter[str] = Counter()  # of those
        self._authenticated: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._authenticated)

    def enter(self, conn: int, host: str, now: float) -> list[int] | None:
        """A connection was accepted: those that are to be closed to make room for it. None: refuse it."""
        if (len(self._authenticated) >= self._limits.connections
                or self._by_host[host] >= self._limits.unauthenticated_per_host):
            return None
        evicted = []
        if len(self._waiting) >= self._limits.unauthenticated:
            most = max(self._by_host.values())
            evicted = [next(c for c, (h, _) in self._waiting.items() if self._by_host[h] == most)]
            self.leave(evicted[0])
        self._waiting[conn] = host, now
        self._by_host[host] += 1
        return evicted

    def authenticated(self, conn: int) -> bool:
        """The connection has authenticated; false if there are too many such."""
        if len(self._authenticated) >= self._limits.connections or conn not in self._waiting:
            return False
        self.leave(conn)
        self._authenticated.add(conn)
        return True

    def overdue(self, now: float) -> list[int]:
        """Connections that did not authenticate in time, which are to be closed."""
        late = [c for c, (_, since) in self._waiting.items() if now - since >= self._limits.deadline_s]
        for conn in late:
            self.leave(conn)
        return late

    def leave(self, conn: int) -> None:
        """The connection is closed."""
        self._authenticated.discard(conn)
        if (waiting := self._waiting.pop(conn, None)) is not None:
            host = waiting[0]
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]
