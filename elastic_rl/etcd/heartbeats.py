"""A member's record and the heartbeats that the agent of its host has collected, put together.

Every heartbeat of a process is newer than those before it, whichever way it took: the process writes its record itself
while no agent collects (``membership``), and an agent writes those of all members on its host under one key. So readers
take whichever has the higher number, and going from one way to the other and back never makes anything older. What a
record has beside its heartbeat (``info``, ``url``) only the process itself writes.

A heartbeat counts for one incarnation only, and only from the host that the record names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import decode_bytes, readable
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Heartbeat, HostHeartbeats, Member
from elastic_rl.etcd.transaction import MAX_OPS, KeyValue, Op, batches

_MAX_SINGLE_KEYS = 2 * MAX_OPS
"""The heartbeats of so many hosts are read key by key, and those of more hosts as one range."""


def merge(member: Member, beat: Heartbeat | None) -> Member:
    """The member with whichever heartbeat is newer: that of its record, or this one. Pure."""
    if beat is None or beat.incarnation != member.incarnation or beat.beats <= member.beats:
        return member
    return member.replace(step=beat.step, phase=beat.phase, progress_at=beat.progress_at, beat_at=beat.beat_at,
                          beats=beat.beats, work=beat.work, in_flight=beat.in_flight)


def heartbeat_of(member: Member) -> Heartbeat:
    """The heartbeat that a member's record has."""
    return Heartbeat(role=member.role, id=member.id, incarnation=member.incarnation, step=member.step,
                     phase=member.phase, progress_at=member.progress_at, beat_at=member.beat_at, beats=member.beats,
                     work=member.work, in_flight=member.in_flight)


class HeartbeatIndex:
    """The collected heartbeats of a job's hosts, to be looked up by member. Pure."""

    def __init__(self, hosts: Iterable[HostHeartbeats] = ()) -> None:
        self._hosts: dict[str, tuple[HostHeartbeats, Mapping[str, Heartbeat]]] = {}
        self._merged: dict[str, tuple[Member, Heartbeat | None, Member]] = {}
        """The record, the heartbeat and what they make together, by incarnation."""
        self.update(hosts)

    def update(self, hosts: Iterable[HostHeartbeats]) -> None:
        """Replaces all. What the same objects have made before is kept: of thousands of hosts few have changed since
        the last look."""
        before, self._hosts = self._hosts, {}
        for record in hosts:
            known = before.get(record.host)
            self._hosts[record.host] = known if known is not None and known[0] is record else (
                record, {beat.incarnation: beat for beat in record.beats})

    def put(self, record: HostHeartbeats) -> None:
        """Replaces the heartbeats of one host."""
        self._hosts[record.host] = record, {beat.incarnation: beat for beat in record.beats}

    def remove(self, host: str) -> None:
        """Forgets the heartbeats of one host."""
        self._hosts.pop(host, None)

    def of(self, member: Member) -> Heartbeat | None:
        """What the host that its record names has collected of this incarnation."""
        found = self._hosts.get(member.collector) if member.collector else None
        return found[1].get(member.incarnation) if found is not None else None

    def merged(self, members: Iterable[Member]) -> list[Member]:
        """The members, each with its newest heartbeat: one that was seen stays, also where the host has lost it since.
        """
        before, self._merged = self._merged, {}
        return [self._merge(member, before) for member in members]

    def _merge(self, member: Member, before: Mapping[str, tuple[Member, Heartbeat | None, Member]]) -> Member:
        if not member.collector:
            return member
        beat, known = self.of(member), before.get(member.incarnation)
        if known is None or known[0] is not member or known[1] is not beat:
            made = merge(member, beat)
            if known is not None and known[2].beats > made.beats:
                made = merge(made, heartbeat_of(known[2]))
            known = member, beat, made
        self._merged[member.incarnation] = known
        return known[2]


def read(etcd: EtcdClient, keys: Keys, members: Iterable[Member]) -> HeartbeatIndex:
    """The heartbeats that the hosts of these members have collected. Raises EtcdUnavailable."""
    hosts = {member.collector for member in members if member.collector}
    if len(hosts) > _MAX_SINGLE_KEYS:
        return index(keys, etcd.range(keys.heartbeats_prefix())[0])
    found: list[KeyValue] = []
    for batch in batches(sorted(hosts)):
        found += etcd.txn([], [Op.get(keys.heartbeats(host)) for host in batch]).kvs
    return index(keys, found)


def index(keys: Keys, kvs: Iterable[KeyValue]) -> HeartbeatIndex:
    """The heartbeats under these keys; those that cannot be read, or lie under another host's key, are left out."""
    return HeartbeatIndex(record for record, kv in readable(kvs, HostHeartbeats)
                          if kv.key == keys.heartbeats(record.host))


def with_heartbeats(etcd: EtcdClient, keys: Keys, members: Iterable[Member]) -> list[Member]:
    """The members as their records have them, each with its newest heartbeat. Raises EtcdUnavailable."""
    members = list(members)
    return read(etcd, keys, members).merged(members)


def merge_stored(records: Iterable[bytes], find: Callable[[list[Member]], HeartbeatIndex]) -> list[bytes]:
    """Records of members as they are stored, each with its newest heartbeat in what ``find`` has of the members. Those
    that have no newer one there, or that this release cannot read, stay as they are."""
    decoded = [(raw, decode_bytes(raw, Member)) for raw in records]
    known = find([member for _, member in decoded if member is not None])
    return [raw if member is None or (merged := merge(member, known.of(member))) is member else merged.encode()
            for raw, member in decoded]
