"""Slots for sends, and deltas that several peers ask for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from elastic_rl.dcs.node.sends import DeltaCache, SendLimiter
from elastic_rl.errors import NodeUnavailable
from elastic_rl.runtime import wait_until


class Sender(threading.Thread):
    """Takes a slot, tells so, and keeps it until it is let go."""

    def __init__(self, gate: SendLimiter, peer: str, began: list[str], name: str) -> None:
        super().__init__(daemon=True, name=name)
        self.gate, self.peer, self.began, self.go = gate, peer, began, threading.Event()
        self.start()

    def run(self) -> None:
        with self.gate.slot(self.peer, 30):
            self.began.append(self.name)
            self.go.wait(30)

    def end(self) -> None:
        self.go.set()
        self.join(10)
        assert not self.is_alive()


@contextmanager
def waiting(gate: SendLimiter, peers: str, began: list[str]) -> Iterator[list[Sender]]:
    """One sender a letter, each in line before the next one comes."""
    senders = []
    for i, peer in enumerate(peers):
        senders.append(Sender(gate, peer, began, f"{peer}{i}"))
        wait_until(lambda n=i: gate.load() == n + 1, timeout_s=10, what="the sender")
    try:
        yield senders
    finally:
        for sender in senders:
            sender.end()


def test_sends_begin_in_order_and_no_more_than_the_limit_at_once() -> None:
    gate, began = SendLimiter(2, 9, max_waiting=9), list[str]()
    with waiting(gate, "abcd", began) as (a, b, _, _):
        wait_until(lambda: len(began) == 2, timeout_s=10, what="two sends")
        assert began == ["a0", "b1"] and gate.load() == 4
        assert gate.load(besides="a") < 4, "those of a peer do not count for itself"
        b.end()
        wait_until(lambda: len(began) == 3, timeout_s=10, what="the third")
        a.end()
        wait_until(lambda: len(began) == 4, timeout_s=10, what="the fourth")
        assert began == ["a0", "b1", "c2", "d3"]
    assert gate.load() == 0


def test_a_peer_at_its_limit_waits_and_lets_others_pass() -> None:
    gate, began = SendLimiter(4, 1, max_waiting=9), list[str]()
    with waiting(gate, "aabac", began) as senders:
        wait_until(lambda: len(began) == 3, timeout_s=10, what="one send a peer")
        assert sorted(began) == ["a0", "b2", "c4"]
        senders[0].end()
        wait_until(lambda: len(began) == 4, timeout_s=10, what="the next of a")
        assert began[-1] == "a1"


def test_a_line_that_is_too_long_or_too_slow_is_told() -> None:
    gate, began = SendLimiter(1, 1, max_waiting=1), list[str]()
    with waiting(gate, "a", began), ExitStack() as stack:
        wait_until(lambda: bool(began), timeout_s=10, what="the send")
        with pytest.raises(NodeUnavailable, match="did not begin"):
            stack.enter_context(gate.slot("b", 0.01))
        assert gate.load() == 1, "it left the line"
        late = Sender(gate, "b", began, "b")
        wait_until(lambda: gate.load() == 2, timeout_s=10, what="one in line")
        with pytest.raises(NodeUnavailable, match="busy"):
            stack.enter_context(gate.slot("c", 30))
        late.go.set()
    late.join(10)
    assert gate.load() == 0


def test_a_send_that_fails_gives_its_slot_back() -> None:
    gate = SendLimiter(1, 1, max_waiting=1)
    with pytest.raises(OSError), gate.slot("a", 1):
        raise OSError
    with gate.slot("a", 0.01):
        assert gate.load() == 1


def test_those_who_want_the_same_delta_wait_for_one_encoding() -> None:
    cache, encodings, go = DeltaCache(1 << 20), list[int](), threading.Event()

    def encode() -> bytes:
        encodings.append(1)
        go.wait(10)
        return b"delta"

    got: list[bytes | None] = []
    callers = [threading.Thread(target=lambda: got.append(cache.get("d", "b", encode)), daemon=True) for _ in range(6)]
    for caller in callers:
        caller.start()
    wait_until(lambda: bool(encodings), timeout_s=10, what="the encoding")
    go.set()
    for caller in callers:
        caller.join(10)
    assert got == [b"delta"] * 6 and len(encodings) == 1
    assert cache.get("d", "none", lambda: None) is None
    assert cache.get("d", "none", lambda: b"never") is None, "that dense is better is known, too"


def test_the_least_recently_used_deltas_go_first() -> None:
    cache = DeltaCache(4000)
    for base in "abc":
        cache.get("d", base, lambda: b"x" * 1000)
    cache.get("d", "a", lambda: pytest.fail("a was forgotten"))
    cache.get("d", "e", lambda: b"x" * 1000)
    assert cache.get("d", "a", lambda: b"new") == b"x" * 1000
    assert cache.get("d", "b", lambda: b"new") == b"new"
    cache.get("d", "big", lambda: b"x" * 5000)
    assert cache.get("d", "a", lambda: b"new") == b"new", "what is larger than the limit stays nowhere"


def test_an_encoding_that_fails_is_tried_again() -> None:
    cache = DeltaCache(4000)
    with pytest.raises(OSError):
        cache.get("d", "b", lambda: (_ for _ in ()).throw(OSError()))
    assert cache.get("d", "b", lambda: b"delta") == b"delta"
