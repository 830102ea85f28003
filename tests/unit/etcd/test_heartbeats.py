"""A member's record and the heartbeats that its host has collected: the newest one counts, whichever way it took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.etcd import heartbeats
from elastic_rl.etcd.heartbeats import HeartbeatIndex, heartbeat_of, merge, merge_stored
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Heartbeat, HostHeartbeats, Member, StatedWork
from elastic_rl.etcd.transaction import KeyValue, Op

KEYS = Keys("j")

INCARNATIONS = st.sampled_from(["a" * 16, "b" * 16])
HOSTS = st.sampled_from(["h0", "h1"])


def heartbeat(incarnation: str, beats: int) -> Heartbeat:
    """The heartbeat of this number; all that it says follows from that, and its clock goes back now and then."""
    return Heartbeat(role="engine", id="e", incarnation=incarnation, step=beats // 2, phase=f"phase {beats}",
                     progress_at=500.0 - beats, beat_at=1000.0 - 7 * beats % 5, beats=beats,
                     work=StatedWork(flops=float(beats)) if beats % 2 else None)


def member(incarnation: str, beats: int, collector: str = "h0") -> Member:
    """A record with that heartbeat."""
    return merge(Member(role="engine", id="e", pid=1, host="h", incarnation=incarnation, collector=collector,
                        info={"ready": True}), heartbeat(incarnation, beats))


@given(INCARNATIONS, st.integers(0, 9), st.lists(st.tuples(INCARNATIONS, st.integers(0, 9)), max_size=6))
def test_newest_heartbeat_of_the_incarnation_counts_in_any_order(incarnation: str, own: int,
                                                                 beats: list[tuple[str, int]]) -> None:
    record = merged = member(incarnation, own)
    for who, number in beats:
        before, merged = merged, merge(merged, heartbeat(who, number))
        assert merged.beats >= before.beats
    newest = max([own, *(number for who, number in beats if who == incarnation)])
    assert merged == member(incarnation, newest)
    assert (merged.info, merged.pid, merged.collector) == (record.info, record.pid, record.collector)
    assert merge(record, None) is record


@given(st.integers(1, 9))
def test_record_and_heartbeat_say_the_same(beats: int) -> None:
    beat = heartbeat("a" * 16, beats)
    assert heartbeat_of(merge(member("a" * 16, 0), beat)) == beat


HOST_RECORDS = st.dictionaries(HOSTS, st.dictionaries(INCARNATIONS, st.integers(0, 9)), max_size=2)


@given(st.lists(HOST_RECORDS, max_size=5), st.lists(st.tuples(INCARNATIONS, st.integers(0, 9), st.sampled_from(
    ["h0", "h1", ""])), max_size=2, unique_by=lambda record: record[0]))
def test_newest_heartbeat_counts_from_the_host_that_the_record_names_alone_and_stays(
        looks: list[dict[str, dict[str, int]]], records: list[tuple[str, int, str]]) -> None:
    index = HeartbeatIndex()
    members = [member(*record) for record in records]
    kept: dict[str, HostHeartbeats] = {}
    newest = {record.incarnation: record.beats for record in members}
    for look in looks:
        made = {host: HostHeartbeats(host=host, beats=[heartbeat(*beat) for beat in beats.items()])
                for host, beats in look.items()}
        kept = {host: kept[host] if kept.get(host) == record else record for host, record in made.items()}
        index.update(kept.values())
        for record, merged in zip(members, index.merged(members), strict=True):
            collected = look.get(record.collector, {}).get(record.incarnation, 0)
            newest[record.incarnation] = max(newest[record.incarnation], collected)
            assert merged == member(record.incarnation, newest[record.incarnation], record.collector)
            if newest[record.incarnation] == record.beats:
                assert merged is record
        assert all(a is b for a, b in zip(index.merged(members), index.merged(members), strict=True))
    for host in ("h0", "h1"):
        index.remove(host)
    assert [merged.beats for merged in index.merged(members)] == [newest[record.incarnation] for record in members]
    assert index.merged([]) == [] and index.merged(members) == members, "nothing is kept of a member that is gone"


class _Etcd:
    """Has the heartbeats of so many hosts, and one under the key of another host."""

    def __init__(self, hosts: int) -> None:
        self.kvs = {KEYS.heartbeats(f"h{n}"): HostHeartbeats(host=f"h{n}", beats=[heartbeat(f"{n:016x}", 3)])
                    for n in range(hosts)}
        self.kvs[KEYS.heartbeats("h0")] = self.kvs[KEYS.heartbeats("h1")]
        self.ranges = 0

    def kv(self, key: str) -> KeyValue:
        return KeyValue(key, self.kvs[key].encode(), 1, 1, 1, 0)

    def range(self, prefix: str) -> tuple[list[KeyValue], int]:
        self.ranges += 1
        return [self.kv(key) for key in self.kvs if key.startswith(prefix)], 1

    def txn(self, compares: object, ops: list[Op]) -> SimpleNamespace:
        return SimpleNamespace(kvs=[self.kv(op.key) for op in ops if op.key in self.kvs])


@pytest.mark.parametrize("hosts", [3, heartbeats._MAX_SINGLE_KEYS + 5])
def test_members_are_read_with_what_their_hosts_have_collected(hosts: int) -> None:
    etcd: Any = _Etcd(hosts)
    records = [member(f"{n:016x}", 1, f"h{n}") for n in range(hosts)] + [member("f" * 16, 1, "gone"),
                                                                        member("e" * 16, 1, "")]
    found = heartbeats.with_heartbeats(etcd, KEYS, records)
    assert [m.beats for m in found] == [1, *[3] * (hosts - 1), 1, 1], "the first key has the record of another host"
    assert etcd.ranges == (hosts > heartbeats._MAX_SINGLE_KEYS)


def test_record_without_a_newer_heartbeat_is_passed_on_as_it_is_stored() -> None:
    index = HeartbeatIndex([HostHeartbeats(host="h0", beats=[heartbeat("a" * 16, 3)])])
    newer = b'{"of": "a newer release"}'
    stored = [newer, member("a" * 16, 2).encode(), member("a" * 16, 4).encode()]
    assert merge_stored(stored, lambda members: index) == [newer, member("a" * 16, 3).encode(), stored[2]]
