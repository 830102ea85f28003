"""What the leading coordinator writes to the catalog. Each function is one transaction under the caller's ``guard``
(conditions that hold while it leads) and returns whether it happened: False when the record changed since it was read,
or the caller no longer leads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elastic_rl.dcs.catalog import replica_sets
from elastic_rl.dcs.catalog.reads import Entry, ReplicaSetsEntry, head_entry
from elastic_rl.dcs.catalog.transitions import TRANSITIONS, transition
from elastic_rl.errors import IllegalTransition
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import CatalogIdentity, ReplicaSets, VersionState
from elastic_rl.etcd.transaction import MAX_OPS, batches

_MAX_RELEASED = MAX_OPS // 2
"""Versions that one transaction releases: each takes two conditions and two writes."""


def abort_orphan(etcd: EtcdClient, keys: Keys, entry: Entry, guard: Sequence[Compare]) -> bool:
    """STAGING → ABORTED, if its publisher's key is gone."""
    v = entry.version
    key = keys.version(v.stream, v.number)
    return etcd.txn(
        [Compare.mod(key, "==", entry.revision), Compare.absent(keys.staging_owner(v.stream, v.number)), *guard],
        [Op.put(key, transition(v, VersionState.ABORTED).encode())]).succeeded


def releases(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Splits versions into parts that one transaction releases. Their records may be large: each has what its publisher
    says of it."""
    return batches(entries, _MAX_RELEASED, nbytes=lambda entry: len(entry.version.encode()))


def release(etcd: EtcdClient, keys: Keys, entries: Sequence[Entry], guard: Sequence[Compare]) -> bool:
    """COMMITTED → GONE, of all ``entries`` or of none; of none where one of them has a pin. At most one of
    ``releases``."""
    versions = [entry.version for entry in entries]
    record = [keys.version(v.stream, v.number) for v in versions]
    return etcd.txn(
        [*(Compare.mod(key, "==", entry.revision) for key, entry in zip(record, entries, strict=True)),
         *(Compare.none_created_since(keys.pins_prefix(v.stream, v.number), 0) for v in versions), *guard],
        [*(Op.put(key, transition(v, VersionState.GONE).encode()) for key, v in zip(record, versions, strict=True)),
         *(Op.delete(keys.replica_sets(v.stream, v.number)) for v in versions)]).succeeded


def delete_record(etcd: EtcdClient, keys: Keys, entry: Entry, guard: Sequence[Compare]) -> bool:
    """Deletes the record of a version that is GONE or ABORTED; its number stays used."""
    v = entry.version
    if TRANSITIONS[v.state]:
        raise IllegalTransition(f"the record of {v.stream} version {v.number} is needed: it is {v.state}")
    key = keys.version(v.stream, v.number)
    return etcd.txn([Compare.mod(key, "==", entry.revision), *guard], [Op.delete(key)]).succeeded


def update_replica_sets(etcd: EtcdClient, keys: Keys, entry: Entry, found: ReplicaSetsEntry, sets: ReplicaSets,
                        guard: Sequence[Compare]) -> bool:
    """Records that other nodes hold parts of a committed version. The record's ``sources`` follow, where they name a
    node that holds nothing any more; the head's record changes with the version's, so that both stay equal."""
    v = entry.version
    key, head_key = keys.version(v.stream, v.number), keys.stream_head(v.stream)
    sets_key = keys.replica_sets(v.stream, v.number)
    conditions = [Compare.mod(key, "==", entry.revision), Compare.mod(sets_key, "==", found.revision), *guard]
    writes = [Op.put(sets_key, sets.encode())]
    if not set(v.sources) or not set(v.sources) <= set(replica_sets.nodes_of(sets)):
        new = v.replace(sources=replica_sets.sources(sets)).encode()
        writes.append(Op.put(key, new))
        current = head_entry(etcd, keys, v.stream)
        if current is not None and current.version.number == v.number:  # else it never becomes the head again
            conditions.append(Compare.mod(head_key, "==", entry.revision))
            writes.append(Op.put(head_key, new))
    return etcd.txn(conditions, writes).succeeded


def suspend(etcd: EtcdClient, keys: Keys, found: CatalogIdentity, revision: int, reason: str,
            guard: Sequence[Compare]) -> bool:
    """Has every publish refused until a person has recovered the catalog."""
    return etcd.txn([Compare.mod(keys.dcs_catalog(), "==", revision), *guard],
                    [Op.put(keys.dcs_catalog(), found.replace(suspended=reason).encode())]).succeeded
