"""Slots for sends, and deltas that several peers request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from support.waiting import wait_until

from elastic_rl.dcs.node.sends import DeltaCache, SendLimiter
from elastic_rl.errors import NodeUnavailable


class Sender(threading.Thread):
    """Takes a slot, notes its name, and keeps the slot until ``end``."""

    def __init__(self, limiter: SendLimiter, peer: str, began: list[str], name: str) -> None:
        super().__init__(daemon=True, name=name)
        self.limiter, self.peer, self.began, self.go = limiter, peer, began, threading.Event()
        self.start()

    def run(self) -> None:
        with self.limiter.slot(self.peer, 30):
            self.began.append(self.name)
            self.go.wait(30)

    def end(self) -> None:
        self.go.set()
        self.join(60)
        assert not self.is_alive()


@contextmanager
def waiting(limiter: SendLimiter, peers: str, began: list[str]) -> Iterator[list[Sender]]:
    """One sender a letter, each queued before the next one comes."""
    senders = []
    for i, peer in enumerate(peers):
        senders.append(Sender(limiter, peer, began, f"{peer}{i}"))
        wait_until(lambda n=i: limiter.load() == n + 1, what="the sender")
    try:
        yield senders
    finally:
        for sender in senders:
            sender.end()


def test_sends_begin_in_order_and_within_the_limit() -> None:
    limiter, began = SendLimiter(2, 9, max_waiting=9), list[str]()
    with waiting(limiter, "abcd", began) as (a, b, _, _):
        wait_until(lambda: len(began) == 2, what="two sends")
        assert began == ["a0", "b1"] and limiter.load() == 4
        assert limiter.load(excluding="a") < 4, "sends to a peer do not count for itself"
        b.end()
        wait_until(lambda: len(began) == 3, what="the third")
        a.end()
        wait_until(lambda: len(began) == 4, what="the fourth")
        assert began == ["a0", "b1", "c2", "d3"]
    assert limiter.load() == 0


def test_peer_at_its_limit_is_overtaken() -> None:
    limiter, began = SendLimiter(4, 1, max_waiting=9), list[str]()
    with waiting(limiter, "aabac", began) as senders:
        wait_until(lambda: len(began) == 3, what="one send a peer")
        assert sorted(began) == ["a0", "b2", "c4"]
        senders[0].end()
        wait_until(lambda: len(began) == 4, what="the next of a")
        assert began[-1] == "a1"


def test_full_or_slow_queue_is_reported() -> None:
    limiter, began = SendLimiter(1, 1, max_waiting=1), list[str]()
    with waiting(limiter, "a", began), ExitStack() as stack:
        wait_until(lambda: bool(began), what="the send")
        with pytest.raises(NodeUnavailable, match="did not begin"):
            stack.enter_context(limiter.slot("b", 0.01))
        assert limiter.load() == 1, "it is still queued"
        late = Sender(limiter, "b", began, "b")
        wait_until(lambda: limiter.load() == 2, what="one in the queue")
        with pytest.raises(NodeUnavailable, match="busy"):
            stack.enter_context(limiter.slot("c", 30))
        late.go.set()
    late.join(60)
    assert limiter.load() == 0


def test_failed_send_frees_its_slot() -> None:
    limiter = SendLimiter(1, 1, max_waiting=1)
    with pytest.raises(OSError), limiter.slot("a", 1):
        raise OSError
    with limiter.slot("a", 0.01):
        assert limiter.load() == 1


def test_concurrent_callers_wait_for_one_encoding() -> None:
    cache, encodings, go = DeltaCache(1 << 20), list[int](), threading.Event()

    def encode() -> bytes:
        encodings.append(1)
        go.wait(60)
        return b"delta"

    got: list[bytes | None] = []
    callers = [threading.Thread(target=lambda: got.append(cache.get("d", "b", encode)), daemon=True) for _ in range(6)]
    for caller in callers:
        caller.start()
    wait_until(lambda: bool(encodings), what="the encoding")
    go.set()
    for caller in callers:
        caller.join(60)
    assert got == [b"delta"] * 6 and len(encodings) == 1
    assert cache.get("d", "none", lambda: None) is None
    assert cache.get("d", "none", lambda: b"never") is None, "that there is no delta is cached, too"


def test_cache_drops_least_recently_used_deltas_first() -> None:
    cache = DeltaCache(4000)
    for base in "abc":
        cache.get("d", base, lambda: b"x" * 1000)
    cache.get("d", "a", lambda: pytest.fail("a was dropped"))
    cache.get("d", "e", lambda: b"x" * 1000)
    assert cache.get("d", "a", lambda: b"new") == b"x" * 1000
    assert cache.get("d", "b", lambda: b"new") == b"new"
    cache.get("d", "big", lambda: b"x" * 5000)
    assert cache.get("d", "a", lambda: b"new") == b"new", "a delta larger than the limit is not kept"


def test_failed_encoding_is_tried_again() -> None:
    cache = DeltaCache(4000)
    with pytest.raises(OSError):
        cache.get("d", "b", lambda: (_ for _ in ()).throw(OSError()))
    assert cache.get("d", "b", lambda: b"delta") == b"delta"
