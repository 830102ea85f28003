"""A lease by the clock of its process: it is never taken for longer than etcd's, and is left or revoked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from support.clock import Clock
from support.waiting import wait_until

from elastic_rl.etcd import leases
from elastic_rl.etcd.leases import KeptLease

TTL_S = 9


class Member:
    """The channels to an etcd of one member."""

    current, call_timeout_s = "m", 0.5

    def __init__(self) -> None:
        self.closed = threading.Event()

    def after(self, member: str) -> str:
        return member

    def follow_members(self) -> None:
        pass


class Etcd:
    """Answers each keep-alive after ``answer_s`` seconds, or not at all within them."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.answer_s, self.answers = clock, 2.0, True
        self.sent: list[float] = []
        self.revoked: list[int] = []

    def renew(self, channels: object, lease: int, member: str, *, timeout_s: float) -> int | None:
        self.sent.append(self.clock.now)
        self.clock.now += self.answer_s
        return TTL_S if self.answers else None

    def revoke(self, channels: object, lease: int, *, budget_s: float) -> None:
        self.revoked.append(lease)


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> Etcd:
    out = Etcd(Clock(100.0))
    monkeypatch.setattr(leases, "boottime_s", out.clock)
    monkeypatch.setattr(leases, "renew", out.renew)
    monkeypatch.setattr(leases, "revoke", out.revoke)
    return out


@pytest.fixture
def keep(etcd: Etcd) -> Iterator[Callable[[], KeptLease]]:
    kept: list[KeptLease] = []

    def start() -> KeptLease:
        kept.append(KeptLease(Member(), 7, TTL_S, granted_at=etcd.clock.now))  # type: ignore[arg-type]
        return kept[-1]

    yield start
    for lease in kept:
        lease.stop()


def test_lease_counts_from_when_the_answered_keepalive_was_sent(etcd: Etcd, keep: Callable[[], KeptLease]) -> None:
    lease = keep()
    wait_until(lambda: etcd.clock.now == 102.0, what="the answer to the first keep-alive")
    lease.stop()
    assert etcd.sent == [100.0] and lease.renewed_at == 100.0 and lease.alive
    etcd.clock.now = 100.0 + TTL_S
    assert not lease.alive and not lease.lost.is_set()


def test_lease_is_lost_when_no_answer_has_come_for_its_time_to_live(
        etcd: Etcd, keep: Callable[[], KeptLease]) -> None:
    etcd.answers = False
    lease = keep()
    wait_until(lease.lost.is_set, what="the loss")
    assert lease.renewed_at == 100.0 and etcd.sent == [100.0, 102.0, 104.0, 106.0, 108.0]


def test_lease_that_is_left_is_not_revoked_and_one_that_is_closed_is(
        etcd: Etcd, keep: Callable[[], KeptLease]) -> None:
    left, closed = keep(), keep()
    left.stop()
    left.close()
    assert not etcd.revoked
    closed.close()
    assert etcd.revoked == [7]
