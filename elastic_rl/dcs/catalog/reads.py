"""Reading the catalog. Every function raises EtcdUnavailable, and RecordUnreadable for a record that it cannot decode.

The head of a stream holds the same bytes as its version's record and is written in the same transaction, so its mod
revision is that of the version's record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from elastic_rl.errors import RecordUnreadable
from elastic_rl.etcd import decoding
from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import CatalogIdentity, Record, ReplicaSets, Version

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Entry:
    """A version's record as read, and the mod revision to guard a change of it with."""

    version: Version
    revision: int


@dataclass(frozen=True)
class ReplicaSetsEntry:
    """The replica sets of a version, and its mod revision; 0 and no parts where none is recorded."""

    replica_sets: ReplicaSets
    revision: int


@dataclass(frozen=True)
class CatalogContents:
    """Every version record of a job, as of one reading."""

    streams: Mapping[str, list[Entry]]
    """Stream → its versions, oldest first."""
    unreadable: list[str]
    """Keys of records that this release cannot decode."""

    def entries(self) -> list[Entry]:
        return [entry for stream in self.streams.values() for entry in stream]


def decode(kind: type[R], kv: KeyValue) -> R:
    """The record under a key. Raises RecordUnreadable."""
    unreadable: dict[str, str] = {}
    if (record := decoding.decode(kv, kind, unreadable)) is None:
        raise RecordUnreadable(f"the record at {kv.key} cannot be decoded: {unreadable[kv.key]}",
                               hint="was it written by a newer release? then run that one everywhere")
    return record


def read_catalog(etcd: EtcdClient, keys: Keys) -> CatalogContents:
    """All version records of all streams. Never raises RecordUnreadable: those records are listed apart."""
    prefix = keys.streams_prefix()
    streams: dict[str, list[Entry]] = {}
    unreadable = []
    for kv in etcd.range(prefix)[0]:
        stream, _, rest = kv.key.removeprefix(prefix).partition("/")
        if rest.startswith("versions/"):
            try:
                streams.setdefault(stream, []).append(_entry(kv))
            except RecordUnreadable:
                unreadable.append(kv.key)
    return CatalogContents(streams, unreadable)


def list_entries(etcd: EtcdClient, keys: Keys, stream: str) -> list[Entry]:
    """Every version of a stream that has a record, in any state, oldest first."""
    kvs, _ = etcd.range(keys.versions_prefix(stream))
    return [_entry(kv) for kv in kvs]


def newest_number(etcd: EtcdClient, prefix: str) -> int:
    """The highest of the numbers that end the keys under a prefix; 0 for none. Raises EtcdUnavailable."""
    newest = etcd.page(prefix, limit=1, newest_first=True).kvs
    name = newest[0].key.removeprefix(prefix) if newest else ""
    return int(name) if name.isdecimal() else 0


def list_versions(etcd: EtcdClient, keys: Keys, stream: str) -> list[Version]:
    """Every version of a stream that has a record, in any state, oldest first."""
    return [e.version for e in list_entries(etcd, keys, stream)]


def get_entry(etcd: EtcdClient, keys: Keys, stream: str, number: int) -> Entry | None:
    kv = etcd.get(keys.version(stream, number))
    return _entry(kv) if kv else None


def get_version(etcd: EtcdClient, keys: Keys, stream: str, number: int) -> Version | None:
    """The version's record in whatever state it is; None when there is none."""
    entry = get_entry(etcd, keys, stream, number)
    return entry.version if entry else None


def head_entry(etcd: EtcdClient, keys: Keys, stream: str) -> Entry | None:
    """The newest committed version of a stream."""
    kv = etcd.get(keys.stream_head(stream))
    return _entry(kv) if kv else None


def head(etcd: EtcdClient, keys: Keys, stream: str) -> Version | None:
    """The newest committed version of a stream."""
    entry = head_entry(etcd, keys, stream)
    return entry.version if entry else None


def read_replica_sets(etcd: EtcdClient, keys: Keys, stream: str, number: int) -> ReplicaSetsEntry:
    kv = etcd.get(keys.replica_sets(stream, number))
    if kv is None:
        return ReplicaSetsEntry(ReplicaSets(parts=[]), 0)
    return ReplicaSetsEntry(decode(ReplicaSets, kv), kv.mod_revision)


def list_replica_sets(etcd: EtcdClient, keys: Keys, stream: str) -> dict[int, ReplicaSets]:
    """Version → its replica sets, of all versions of a stream that have any."""
    prefix = keys.replica_sets_prefix(stream)
    return {int(kv.key.removeprefix(prefix)): decode(ReplicaSets, kv) for kv in etcd.range(prefix)[0]}


def read_identity(etcd: EtcdClient, keys: Keys) -> tuple[CatalogIdentity | None, int]:
    """Which catalog this is, and the mod revision of that record; (None, 0) where nothing was ever published."""
    return decode_identity(etcd.get(keys.dcs_catalog()))


def decode_identity(kv: KeyValue | None) -> tuple[CatalogIdentity | None, int]:
    return (decode(CatalogIdentity, kv), kv.mod_revision) if kv else (None, 0)


def _entry(kv: KeyValue) -> Entry:
    return Entry(decode(Version, kv), kv.mod_revision)
