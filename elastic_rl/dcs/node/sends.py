"""What a node sends to others, and how much of it at once: slots for sends, and deltas that several peers request."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic_rl.errors import NodeUnavailable


class SendLimiter:
    """Admits ``max_sends`` sends at once, and ``peer_sends`` to one peer. The others are queued in order; one that only
    its own peer's limit delays is overtaken by those behind it."""

    def __init__(self, max_sends: int, peer_sends: int, *, max_waiting: int) -> None:
        self._max_sends, self._peer_sends, self._max_waiting = max_sends, peer_sends, max_waiting
        self._changed = threading.Condition()
        self._sending: Counter[str] = Counter()
        self._queue: OrderedDict[object, str] = OrderedDict()

    def load(self, excluding: str = "") -> int:
        """Sends in progress and queued, but for those to one peer."""
        with self._changed:
            return sum(n for peer, n in self._sending.items() if peer != excluding) + sum(
                peer != excluding for peer in self._queue.values())

    @contextmanager
    def slot(self, peer: str, timeout_s: float) -> Iterator[None]:
        """One send to ``peer``. Raises NodeUnavailable when the queue is full or does not move in time."""
        ticket = object()
        with self._changed:
            if len(self._queue) >= self._max_waiting:
                raise NodeUnavailable(f"this node is busy: {len(self._queue)} sends are queued",
                                      hint="try another node, or set a larger dcs.max_sends")
            self._queue[ticket] = peer
            try:
                if not self._changed.wait_for(lambda: self._is_next(ticket), timeout_s):
                    raise NodeUnavailable(f"this node is busy: a send did not begin within {timeout_s:g} s",
                                          hint="try another node, or set a larger dcs.max_sends")
                self._sending[peer] += 1
            finally:
                del self._queue[ticket]
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
        return ticket is next((t for t, peer in self._queue.items() if self._sending[peer] < self._peer_sends), None)


class DeltaCache:
    """Deltas by (digest, base), at most ``limit_bytes`` of them; the least recently used ones are dropped first.
    Concurrent callers for the same one wait for one encoding."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], bytes | None] = OrderedDict()
        self._nbytes = 0
        self._busy: dict[tuple[str, str], threading.Lock] = {}

    def get(self, digest: str, base: str, encode: Callable[[], bytes | None]) -> bytes | None:
        """The delta, or None where ``encode`` finds none that is worth it."""
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
                    self._add(key, delta)
                return delta
            finally:
                with self._lock:
                    self._busy.pop(key, None)

    def forget(self, digest: str) -> None:
        """Drops the deltas of a chunk, and those to it."""
        with self._lock:
            for key in [key for key in self._known if digest in key]:
                self._nbytes -= _size(self._known.pop(key))

    def _add(self, key: tuple[str, str], delta: bytes | None) -> None:
        self._known[key] = delta
        self._nbytes += _size(delta)
        while self._nbytes > self._limit_bytes and self._known:
            self._nbytes -= _size(self._known.popitem(last=False)[1])


def _size(delta: bytes | None) -> int:
    return len(delta or b"") + 200  # a key and its digests take memory as well
