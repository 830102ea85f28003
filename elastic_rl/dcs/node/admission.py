"""How many connections a node serves, and how long one may stay without having authenticated. Pure.

Any host that reaches a node's port can open connections to it. Before they have authenticated they must not be able to
occupy what others need: they have one deadline for the whole handshake, and there are few of them in all and of one
host. If there are too many, the one that has waited longest is closed to make room for the next, so a caller that
authenticates at once gets in however many silent ones there are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds of a node's connections."""

    connections: int = 512
    """Authenticated ones."""
    unauthenticated: int = 128
    unauthenticated_per_host: int = 32
    deadline_s: float = 10.0
    """Limit for TLS handshake and hello together."""


class Admission:
    """The connections of a node. Not thread-safe; ``now`` never goes back."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._waiting: dict[int, tuple[str, float]] = {}  # unauthenticated: connection -> host, since; oldest first
        self._by_host: Counter[str] = Counter()  # of those
        self._authenticated: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._authenticated)

    def __contains__(self, conn: int) -> bool:
        return conn in self._waiting or conn in self._authenticated

    def enter(self, conn: int, host: str, now: float) -> list[int] | None:
        """A connection was accepted: returns those that are to be closed to make room for it, or None if it is to be
        refused."""
        if len(self._authenticated) >= self._limits.connections:
            return None
        evicted = []
        if self._by_host[host] >= self._limits.unauthenticated_per_host:
            evicted.append(self._oldest(host))
        elif len(self._waiting) >= self._limits.unauthenticated:
            evicted.append(self._oldest(max(self._by_host, key=lambda h: self._by_host[h])))
        for old in evicted:
            self.leave(old)
        self._waiting[conn] = host, now
        self._by_host[host] += 1
        return evicted

    def _oldest(self, host: str) -> int:
        return next(conn for conn, (of, _) in self._waiting.items() if of == host)

    def authenticated(self, conn: int) -> bool:
        """The connection has authenticated; false if it must be closed all the same: it is overdue, or there are too
        many."""
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
