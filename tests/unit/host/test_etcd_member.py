"""Which member of etcd a host has: the decisions, without an etcd."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.cli.etcd import rows_of, to_remove
from elastic_rl.errors import ConfigError, DeadlineExceeded, EtcdRefused
from elastic_rl.etcd.client import ClusterMember, EtcdClient, MemberStatus
from elastic_rl.host import etcd_member
from elastic_rl.host.etcd_member import Add, EtcdMember, MovePeer, Promote, Remove, Removed, Start

URL = "https://10.0.0.2:2380"
OWN = EtcdMember(name="etcd-b", endpoint="10.0.0.2:2379", peer_port=2380)
FIRST = ClusterMember(1, "etcd-0", ("https://10.0.0.1:2380",), ("https://10.0.0.1:2379",))
ADDED = ClusterMember(7, "", (URL,), (), is_learner=True)
STARTED = ClusterMember(7, "etcd-b", (URL,), ("https://10.0.0.2:2379",))


def test_host_without_data_adds_a_member_and_starts_the_one_that_it_added() -> None:
    assert etcd_member.admission(OWN, URL, [FIRST]) == Add()
    assert etcd_member.admission(OWN, URL, [FIRST, ADDED]) == Start(
        7, "etcd-0=https://10.0.0.1:2380,etcd-b=https://10.0.0.2:2380")


def test_member_whose_data_are_gone_is_removed_before_its_host_gets_another() -> None:
    assert etcd_member.admission(OWN, URL, [FIRST, STARTED]) == Remove(7)
    moved = replace(STARTED, peer_urls=("https://10.0.0.2:9",))
    assert etcd_member.admission(OWN.replace(id=7), URL, [FIRST, moved]) == Remove(7)


def test_member_of_the_name_that_the_host_knows_nothing_of_is_nobodys_to_remove() -> None:
    other = replace(STARTED, peer_urls=("https://10.0.0.9:2380",))
    with pytest.raises(ConfigError, match="its data are not on this machine") as e:
        etcd_member.admission(OWN, URL, [FIRST, other])
    assert "elastic-rl etcd remove etcd-b" in e.value.hint


def test_more_members_than_are_of_use_are_refused() -> None:
    many = [replace(FIRST, id=n, name=f"etcd-{n}", peer_urls=(f"https://h{n}:1",)) for n in range(7)]
    with pytest.raises(ConfigError, match="7 members"):
        etcd_member.admission(OWN, URL, many)


@given(st.lists(st.booleans(), min_size=20, max_size=20), st.booleans())
def test_host_that_is_killed_anywhere_ends_up_with_one_member_and_others_stay(crashes: list[bool], lost: bool) -> None:
    """``crashes``: whether the host dies before it has noted what it did, and begins again. ``lost``: its data were
    there once."""
    members = [FIRST, *([STARTED] if lost else [])]
    next_id, own = 8, OWN.replace(id=7 if lost else 0)
    for crashed in [*crashes, False, False, False]:
        match etcd_member.admission(own, URL, members):
            case Add():
                members.append(replace(ADDED, id=next_id))
                next_id += 1
            case Remove(known):
                assert known != FIRST.id
                members = [m for m in members if m.id != known]
            case Start(known, initial):
                assert initial.count("etcd-b=") == 1
                if not crashed:
                    own = own.replace(id=known)
    assert [m.id for m in members if URL in m.peer_urls] == [own.id]
    assert FIRST in members


def test_running_member_is_kept_known_as_it_is() -> None:
    own = OWN.replace(id=7)
    assert etcd_member.upkeep(own, URL, [FIRST, STARTED]) is None
    assert etcd_member.upkeep(own, URL, [FIRST, replace(STARTED, is_learner=True)]) == Promote(7)
    assert etcd_member.upkeep(own, "https://10.0.0.2:1", [FIRST, STARTED]) == MovePeer(7)
    assert etcd_member.upkeep(own, URL, [FIRST]) == Removed()
    assert etcd_member.upkeep(OWN, URL, [FIRST, STARTED]) is None, "by its name, where its id is not known yet"
    assert etcd_member.upkeep(OWN, URL, [FIRST]) is None, "a name alone is no proof that it was removed"


def test_member_votes_once_all_clients_know_it() -> None:
    member = OWN.replace(admitted_at=1000.0)
    assert [etcd_member.may_vote(member, now, 30.0) for now in (1000.0, 1044.0, 1045.0)] == [False, False, True]
    assert etcd_member.may_vote(member, 900.0, 30.0), "the clock went back"


def test_members_that_have_started_are_listed_once() -> None:
    assert etcd_member.endpoints_of([FIRST, ADDED]) == ["10.0.0.1:2379"]
    assert etcd_member.endpoints_of([STARTED, FIRST]) == ["10.0.0.1:2379", "10.0.0.2:2379"]


def test_only_an_even_number_of_members_is_worth_a_word() -> None:
    assert not etcd_member.advice([FIRST])
    assert "2 members, which stand no more losses than 1" in etcd_member.advice([FIRST, ADDED])
    assert not etcd_member.advice([FIRST, STARTED, ADDED])


def test_members_are_listed_with_their_state() -> None:
    statuses = [MemberStatus("10.0.0.1:2379", "3.5.21", is_leader=True, db_bytes=4096),
                MemberStatus("10.0.0.2:2379", error="refused")]
    rows = rows_of([STARTED, FIRST, replace(ADDED, id=255)], statuses)
    assert [(row["member"], row["state"]) for row in rows] == [
        ("etcd-0", "leads"), ("etcd-b", "away: refused"), ("ff", "has never started")]


def test_member_is_removed_only_where_the_others_go_on() -> None:
    third = ClusterMember(9, "etcd-c", ("https://10.0.0.3:2380",), ("https://10.0.0.3:2379",))
    answers = [MemberStatus(f"10.0.0.{n}:2379") for n in (1, 2, 3)]
    members = [FIRST, STARTED, third]
    assert to_remove("etcd-b", members, answers) is STARTED
    assert to_remove("7", members, answers) is STARTED
    away = replace(answers[0], error="refused")
    assert to_remove("etcd-0", members, [away, *answers[1:]]) is FIRST
    with pytest.raises(ConfigError, match="1 of 2 members answer"):
        to_remove("etcd-b", members, [away, *answers[1:]])
    with pytest.raises(ConfigError, match="no majority"):
        to_remove("etcd-0", [FIRST, ADDED], answers)
    with pytest.raises(ConfigError, match="etcd has no member etcd-x"):
        to_remove("etcd-x", members, answers)


class Members:
    """etcd's list of members, and what it answers to changes of it."""

    def __init__(self, *members: ClusterMember, refusals: int = 0) -> None:
        self.listed, self.refusals, self.changes = list(members), refusals, list[str]()

    def members(self) -> list[ClusterMember]:
        return list(self.listed)

    def add_learner(self, peer_url: str) -> None:
        self._change("add")
        self.listed.append(replace(ADDED, peer_urls=(peer_url,)))

    def promote(self, member: int) -> None:
        self._change(f"promote {member}")

    def set_peer_url(self, member: int, url: str) -> None:
        self._change(f"move {member} {url}")

    def remove_member(self, member: int) -> None:
        self._change(f"remove {member}")
        self.listed = [m for m in self.listed if m.id != member]

    def _change(self, what: str) -> None:
        if self.refusals:
            self.refusals -= 1
            raise EtcdRefused("etcdserver: unhealthy cluster")
        self.changes.append(what)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_member, "_POLL_S", 0.0)


def admitted(etcd: Members, own: EtcdMember = OWN) -> EtcdMember:
    return etcd_member.admit(cast(EtcdClient, etcd), own, URL)


def test_admission_goes_on_when_etcd_refuses_a_change_for_now(at_once: None) -> None:
    etcd = Members(FIRST, STARTED, refusals=3)
    member = admitted(etcd, OWN.replace(id=7))
    assert etcd.changes == ["remove 7", "add"]
    assert (member.id, member.initial_cluster) == (7, f"etcd-0={FIRST.peer_urls[0]},etcd-b={URL}")


def test_admission_waits_for_another_learner_and_says_so(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_member, "_ADMITTED_S", 0.05)
    etcd = Members(FIRST, replace(STARTED, id=9, name="etcd-c", peer_urls=("https://c:1",), is_learner=True))
    with pytest.raises(DeadlineExceeded, match="another member is taken in") as e:
        admitted(etcd)
    assert not etcd.changes and "etcd remove MEMBER" in e.value.hint


def test_vote_is_asked_for_only_where_it_may_have_one() -> None:
    etcd = Members(FIRST, replace(STARTED, is_learner=True))
    own = OWN.replace(id=7)

    def keep(*, votes: bool, url: str = URL) -> bool:
        return etcd_member.keep(cast(EtcdClient, etcd), own, url, etcd.members(), votes=votes)

    assert keep(votes=False) and not etcd.changes
    assert keep(votes=True) and etcd.changes == ["promote 7"]
    etcd.refusals = 1
    assert keep(votes=True), "it has not caught up"
    assert keep(votes=False, url="https://10.0.0.2:1") and etcd.changes[-1] == "move 7 https://10.0.0.2:1"
    etcd.listed = [FIRST]
    assert not keep(votes=True)


def test_members_of_a_host_are_found_by_id_and_by_url() -> None:
    assert etcd_member.of_host(OWN, URL, [FIRST, ADDED]) == [7]
    assert etcd_member.of_host(OWN.replace(id=1), "https://moved:1", [FIRST, ADDED]) == [1]
