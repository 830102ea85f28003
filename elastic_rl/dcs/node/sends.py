"""What a node gives to others, and how much of it at once: slots for sends, and deltas that several peers ask for."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic_rl.errors import NodeUnavailable


class SendLimiter:
    """Lets ``max_sends`` sends through at once, ``peer_sends`` to one peer. The others wait in line; one that only its
    own peer's limit holds up lets those behind it pass."""

    def __init__(self, max_sends: int, peer_sends: int, *, max_waiting: int) -> None:
        self._max_sends, self._peer_sends, self._max_waiting = max_sends, peer_sends, max_waiting
        self._changed = threading.Condition()
        self._sending: Counter[str] = Counter()
        self._line: OrderedDict[object, str] = OrderedDict()

    def load(self, besides: str = "") -> int:
        """Sends under way and waiting, but for those to one peer."""
        with self._changed:
            return sum(n for peer, n in self._sending.items() if peer != besides) + sum(
                peer != besides for peer in self._line.values())

    @contextmanager
    def slot(self, peer: str, timeout_s: float) -> Iterator[None]:
        """One send to ``peer``. Raises NodeUnavailable when the line is too long or did not move in time."""
        ticket = object()
        with self._changed:
            if len(self._line) >= self._max_waiting:
                raise NodeUnavailable(f"this node is busy: {len(self._line)} sends wait already",
                                      hint="ask another node, or set a larger dcs.max_sends")
            self._line[ticket] = peer
            try:
                if not self._changed.wait_for(lambda: self._is_next(ticket), timeout_s):
                    raise NodeUnavailable(f"this node is busy: a send did not begin within {timeout_s:g} s",
                                          hint="ask another node, or set a larger dcs.max_sends")
                self._sending[peer] += 1
            finally:
                del self._line[ticket]
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._sending[peer] -= 1
                if not self._sending[peer]:
                    del self._sending[peer]
                self._changed.notify_all()

    def _is_next(self, ticket: object) -> bool:
        if self._sending.total() >= self._max_sends:
            return False
        return ticket is next((t for t, peer in self._line.items() if self._sending[peer] < self._peer_sends), None)


class DeltaCache:
    """Deltas by (digest, base), at most ``limit_bytes`` of them, least recently used ones go first. Those who want the
    same one at the same time wait for one encoding."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], bytes | None] = OrderedDict()
        self._nbytes = 0
        self._busy: dict[tuple[str, str], threading.Lock] = {}

    def get(self, digest: str, base: str, encode: Callable[[], bytes | None]) -> bytes | None:
        """The delta, or None where ``encode`` says that there is none worth it."""
        key = (digest, base)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:
            with self._lock:
                if key in self._known:
                    return self._known[key]
            try:
                delta = encode()
                with self._lock:
                    self._keep(key, delta)
                return delta
            finally:
                with self._lock:
                    self._busy.pop(key, None)

    def _keep(self, key: tuple[str, str], delta: bytes | None) -> None:
        self._known[key] = delta
        self._nbytes += _size(delta)
        while self._nbytes > self._limit_bytes and self._known:
            self._nbytes -= _size(self._known.popitem(last=False)[1])


def _size(delta: bytes | None) -> int:
    return len(delta or b"") + 200  # a key and its digests take room as well
