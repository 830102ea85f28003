"""Garbage collection by the leading coordinator: aborts versions whose publisher died, releases old ones, and has the
nodes drop chunks that no version refers to.

A node drops nothing for a catalog that is not its own, or is older than what it has seen (``node/version_index.py``).
The leader finds that out too: it suspends a catalog that is older than a node, so that no number is used twice, and
reports ``dcs.catalog_mismatch`` until a person has run ``elastic-rl versions recover``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from elastic_rl.dcs.catalog import leader_writes, pairs, reads, references
from elastic_rl.dcs.catalog.pins import pinned
from elastic_rl.dcs.catalog.reads import CatalogContents, Entry
from elastic_rl.dcs.catalog.retention import RetentionPolicy, to_release
from elastic_rl.dcs.catalog.transitions import LIVE, TRANSITIONS
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.connection import Dropped, NodeConnection, SweepMark, VersionName
from elastic_rl.dcs.fan_out import in_parallel, on_each
from elastic_rl.dcs.registered_nodes import RECOVER_HINT
from elastic_rl.dcs.security import Security
from elastic_rl.errors import Conflict, ElasticRLError, RecordUnreadable
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import CatalogIdentity, Severity, VersionState
from elastic_rl.runtime.failpoints import reach

log = logging.getLogger(__name__)

RECORDS_KEPT = 50
"""Records of versions that are gone or aborted, kept per stream for inspection."""
"""Kind of the event."""
_REPEAT_S = 30.0
"""The event is repeated while the mismatch lasts: an alert that nothing repeats ends."""


class GarbageCollector:
    """Level-triggered: each sweep reads everything and does what is due. Every write carries the caller's guard."""

    def __init__(self, etcd: EtcdClient, keys: Keys, retention: RetentionPolicy, *, io_timeout_s: float = 2.0,
                 security: Security | None = None, clock: Callable[[], float] = time.monotonic,
                 paired: Sequence[tuple[str, str]] = ()) -> None:
        """``paired``: streams whose newest pair of versions is kept, whatever the retention says (see ``pairs``).
        ``io_timeout_s``: longest wait for one node, while which others are swept."""
        self._etcd, self._keys, self._retention, self._clock = etcd, keys, retention, clock
        self._paired = paired
        self._client = DcsClient(etcd, keys, io_timeout_s=io_timeout_s, security=security)
        self._reported = ("", 0.0)  # last mismatch, and when

    def sweep(self, guard: Sequence[Compare]) -> list[str]:
        """One round; a line for each thing that was done or could not be. ``guard``: conditions that hold while the
        caller leads. Raises EtcdUnavailable, and RecordUnreadable for the identity of the catalog or, after the
        rest was done, for the record of a version."""
        marks, failed = on_each(self._client, self._client.registered(), NodeConnection.mark)
        reach("gc.marked")
        # After the marks: a node that has seen more commits than this reading is newer than the catalog.
        identity, revision = reads.read_identity(self._etcd, self._keys)
        if identity is not None and identity.suspended:
            return self._mismatch(f"the catalog of job {self._keys.job} is suspended: {identity.suspended}", guard)
        if identity is not None and (older := _older_than_nodes(identity, marks)):
            leader_writes.suspend(self._etcd, self._keys, identity, revision, older, guard)
            return self._mismatch(older, guard)
        contents = reads.read_catalog(self._etcd, self._keys)
        committed = {stream: [e.version for e in entries if e.version.state is VersionState.COMMITTED]
                     for stream, entries in contents.streams.items()}
        lines, in_pairs, needed = [], pairs.in_newest_pairs(committed, self._paired), references.needed(committed)
        for stream, entries in contents.streams.items():
            lines += self._abort_orphans(entries, guard)
            lines += self._release(stream, entries, {in_pairs.get(stream, 0), *needed.get(stream, ())}, guard)
            self._delete_records(entries, guard)
        lines += self._drop(identity, marks, failed, guard)
        lines += [f"could not sweep node {n}: {e.message}" for n, e in failed.items()]
        if contents.unreadable:  # raised only now: the rest must not wait for a person
            for line in lines:
                log.info("%s", line)
            more = f" and {len(contents.unreadable) - 1} more" if len(contents.unreadable) > 1 else ""
            raise RecordUnreadable(f"{contents.unreadable[0]}{more} cannot be decoded; no chunk is dropped meanwhile",
                                   hint="complete the coordinators' upgrade, or delete the key")
        return lines

    # -- records -----------------------------------------------------------------------------------------------------
    def _abort_orphans(self, entries: Sequence[Entry], guard: Sequence[Compare]) -> list[str]:
        lines = []
        for entry in entries:
            v = entry.version
            if (v.state is VersionState.STAGING
                    and self._etcd.get(self._keys.staging_owner(v.stream, v.number)) is None
                    and leader_writes.abort_orphan(self._etcd, self._keys, entry, guard)):
                lines.append(f"aborted {v.stream} version {v.number}: its publisher is gone")
        return lines

    def _release(self, stream: str, entries: Sequence[Entry], needed: set[int], guard: Sequence[Compare]
                 ) -> list[str]:
        """``needed``: numbers of versions that stay in any case."""
        committed = {e.version.number: e for e in entries if e.version.state is VersionState.COMMITTED}
        # By the newest one: a leader whose clock is ahead must not take all others for old.
        now = min(time.time(), max((e.version.committed_at for e in committed.values()), default=math.inf))
        old = to_release([e.version for e in committed.values()], self._retention, now, pinned=needed)
        old_entries = [*(e for e in entries if e.version.state is VersionState.RELEASING),
                       *(committed[n] for n in old)]
        if not old_entries:
            return []
        kept = pinned(self._etcd, self._keys, stream)
        lines = []
        for batch in leader_writes.releases([e for e in old_entries if e.version.number not in kept]):
            for released in ([batch] if leader_writes.release(self._etcd, self._keys, batch, guard) else
                             # One of them was pinned or changed just now; the next sweep looks at it again.
                             [[e] for e in batch if leader_writes.release(self._etcd, self._keys, [e], guard)]):
                lines += [f"released {stream} version {e.version.number}" for e in released]
                reach("gc.gone")
        return lines

    def _delete_records(self, entries: Sequence[Entry], guard: Sequence[Compare]) -> None:
        for entry in [e for e in entries if not TRANSITIONS[e.version.state]][:-RECORDS_KEPT]:
            leader_writes.delete_record(self._etcd, self._keys, entry, guard)

    # -- chunks ------------------------------------------------------------------------------------------------------
    def _drop(self, identity: CatalogIdentity | None, marks: Mapping[str, SweepMark], failed: dict[str, ElasticRLError],
              guard: Sequence[Compare]) -> list[str]:
        """Has each node note the committed versions and drop what no version refers to. Adds nodes that could not be
        swept to ``failed``.

        The drops need no guard: what a node may drop follows from the order mark, then read (see
        ``storage/chunk_table.py``) and from its own index, for every caller.
        """
        contents = reads.read_catalog(self._etcd, self._keys)
        lines = []
        known = {(e.version.stream, e.version.number): e.version.manifest for e in contents.entries()}
        foreign = {node_id: why for node_id, mark in marks.items() if (why := _why_foreign(identity, known, mark))}
        if foreign:
            lines += self._mismatch("; ".join(f"DCS node {n} {why}" for n, why in foreign.items()), guard)
        if identity is not None and not contents.unreadable:
            sweep = _NodeSweep(self._client, identity, contents, marks)
            dropped, late = in_parallel((n for n in marks if n not in foreign), sweep)
            failed.update((n, e) for n, e in late.items() if not isinstance(e, Conflict))
            for node_id, done in dropped.items():
                reach("gc.dropped")
                if done.chunks:
                    lines.append(f"dropped {done.chunks} chunks, {done.nbytes} bytes, of node {node_id}")
                if done.lacks:
                    lines.append(f"node {node_id} keeps the chunks that it had before it lost some: {done.lacks}")
        return lines

    def _mismatch(self, message: str, guard: Sequence[Compare]) -> list[str]:
        """Reports a mismatch, as an event too: at once, and then now and again."""
        text, now = f"{message} ({RECOVER_HINT})", self._clock()
        last, at = self._reported
        if (text != last or now - at >= _REPEAT_S) and self._etcd.txn(guard, [events.put_op(self._keys, events.build(
                event_kinds.DCS_CATALOG_MISMATCH, "catalog", text, severity=Severity.ERROR))]).succeeded:
            self._reported = (text, now)
        return [text]

    def close(self) -> None:
        self._client.close()


class _NodeSweep:
    """Sweeps one node: notes what it does not know yet, and has it drop the rest."""

    def __init__(self, client: DcsClient, identity: CatalogIdentity, contents: CatalogContents,
                 marks: Mapping[str, SweepMark]) -> None:
        self._client, self._identity, self._marks = client, identity, marks
        versions = [e.version for e in contents.entries()]
        self._live = {VersionName.from_version(v): v for v in versions if v.state in LIVE}
        self._released = {VersionName.from_version(v) for v in versions if v.state is VersionState.GONE}

    def __call__(self, node_id: str) -> Dropped:
        """The node's answer. Raises Conflict for a node that was restarted after its mark, or noted a newer commit
        since: its next sweep will do."""
        mark, connection = self._marks[node_id], self._client.connect(node_id)
        if connection.node.incarnation != mark.incarnation:
            raise Conflict(f"DCS node {node_id} was restarted since its mark")
        new = [v for name, v in self._live.items() if name not in mark.versions]
        if new or mark.commits < self._identity.commits:
            connection.note_versions(self._identity, new)
        return connection.drop(self._identity, mark.mark, self._live, self._released & mark.versions)


def _older_than_nodes(identity: CatalogIdentity, marks: Mapping[str, SweepMark]) -> str:
    """How the catalog is older than what some node has seen of it; empty if it is not."""
    newer = {n: m.commits for n, m in marks.items() if m.catalog == identity.id and m.commits > identity.commits}
    if not newer:
        return ""
    node_id = max(newer, key=lambda n: newer[n])
    return (f"etcd has catalog {identity.id} after {identity.commits} commits, and DCS node {node_id} has seen "
            f"{newer[node_id]}: was etcd restored from an old backup?")


def _why_foreign(identity: CatalogIdentity | None, known: Mapping[tuple[str, int], str], mark: SweepMark) -> str:
    """Why a node's chunks do not belong to the catalog in etcd; empty if they do. ``known``: stream and number of each
    version of the catalog → digest of its manifest."""
    if identity is None or mark.catalog not in ("", identity.id):
        there = f"catalog {identity.id}" if identity is not None else "no catalog"
        return f"holds versions of catalog {mark.catalog}, and etcd has {there}" if mark.catalog else ""
    for name in sorted(mark.versions):
        if known.get((name.stream, name.number), name.manifest) != name.manifest:
            return (f"holds another {name.stream} version {name.number} (manifest {name.manifest}) than the catalog: "
                    "was etcd restored from an old backup?")
    return ""
