"""What the clients of a process know of etcd's members."""

from __future__ import annotations

from support.clock import Clock

from elastic_rl.etcd.access import Access
from elastic_rl.etcd.known_members import KnownMembers, known_members


def test_etcd_is_asked_by_one_caller_at_a_time_and_first_soon() -> None:
    clock = Clock()
    known = KnownMembers(["a:1"], 30.0, clock=clock)
    assert not known.is_due()
    clock.now = 10.0
    assert known.is_due() and not known.is_due()
    clock.now = 10.0 + 23.0
    assert not known.is_due()
    clock.now = 10.0 + 37.0
    assert known.is_due()


def test_members_are_what_etcd_lists_and_never_none() -> None:
    known = KnownMembers(["a:1"], 30.0)
    known.take(["b:1", "c:1", "b:1"])
    assert known.endpoints == ("b:1", "c:1")
    known.take([])
    assert known.endpoints == ("b:1", "c:1")


def test_clients_of_one_etcd_share_what_they_know_and_those_of_another_do_not() -> None:
    idle, busy = (known_members(given, Access(), 30.0) for given in (["a:1", "b:1"], ["b:1", "a:1"]))
    busy.take(["c:1"])
    assert idle.endpoints == ("c:1",)
    assert known_members(["a:1", "b:1"], Access(user="u"), 30.0).endpoints == ("a:1", "b:1")
    fixed = known_members(["a:1"], Access(), 0.0)
    fixed.take(["c:1"])
    assert fixed.endpoints == ("a:1",) and not fixed.is_due()
