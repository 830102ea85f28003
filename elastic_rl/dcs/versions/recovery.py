"""Rebuilding the catalog of versions after etcd lost its data or was restored from an old backup.

Every node keeps the records of the committed versions beside its chunks (``node/version_index.py``), manifests are
chunks themselves, and the durable store has the record of each version in its commit mark. From these, and from what is
left in etcd, ``plan`` derives the catalog, and ``recover`` writes it:

1. The epoch is raised above every one under which a version was published, so that no earlier process can write, and
   the catalog is suspended.
2. Records and replica sets of all versions that are whole, on nodes or in the durable store.
3. The identity of the catalog: the one that the nodes know, with more commits than any of them has seen. Publishing and
   garbage collection work again from here on.

Versions of which parts are missing are left out and listed. Their numbers are not used again, nor are those up to
``_GAP`` above the highest known one: versions may have been committed that no node or store has a record of. Nodes that
are away keep what they have; once they are back, another recovery adds it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_rl.dcs.catalog import reads, replica_sets
from elastic_rl.dcs.catalog.reads import CatalogContents, Entry
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.connection import HeldVersion, NodeConnection
from elastic_rl.dcs.durable.store import CommitMark, DurableStore
from elastic_rl.dcs.fan_out import on_each
from elastic_rl.dcs.registered_nodes import read_nodes
from elastic_rl.errors import CatalogMismatch, ConfigError, Conflict, ElasticRLError
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import CatalogIdentity, ReplicaSets, Version, VersionState
from elastic_rl.etcd.transaction import MAX_OPS, batches

log = logging.getLogger(__name__)

_VERSIONS_BATCH = MAX_OPS // 3
"""Versions in one transaction: each one has three operations (``_ops``)."""
_GAP = 100
"""Numbers of a stream that are left out after a recovery."""


@dataclass(frozen=True)
class NodeInventory:
    """What one node knows and has."""

    catalog: str
    commits: int
    held: Sequence[HeldVersion]


@dataclass(frozen=True)
class Sources:
    """All that a catalog can be rebuilt from."""

    identity: CatalogIdentity | None
    contents: CatalogContents
    next_numbers: Mapping[str, int]
    """These three: what is in etcd."""
    nodes: Mapping[str, NodeInventory]
    marks: Sequence[CommitMark]
    unreachable: Mapping[str, ElasticRLError]
    """Registered nodes that did not answer, and why."""
    as_of: int = 0
    """Revision of etcd at which the nodes were listed."""


@dataclass(frozen=True)
class Recovered:
    """A version that is whole."""

    version: Version
    replica_sets: ReplicaSets
    durable: bool
    revision: int
    """Revision of its record in etcd; 0 where it has none."""


@dataclass(frozen=True)
class RecoveryPlan:
    """What the catalog will be."""

    catalog: str
    """Empty where only the durable store has versions: it is a new one then."""
    commits: int
    epoch: int
    """Highest epoch under which a version was published."""
    versions: Sequence[Recovered]
    """The versions by stream, oldest first."""
    lost: Sequence[tuple[Version, str]]
    """Versions of which parts are missing now, and how many. Those that etcd has as committed stay so."""
    heads: Mapping[str, Version]
    """Stream → its newest version; not where etcd has a newer one that is not whole now, which remains the head."""
    next_numbers: Mapping[str, int]
    """Stream → the last number that counts as used."""


@dataclass
class _Found:
    """What is known of one version."""

    version: Version
    parts: int = 0
    holders: dict[int, list[str]] = field(default_factory=dict)
    durable: bool = False
    entry: Entry | None = None


# -- reading -----------------------------------------------------------------------------------------------------------
def gather(etcd: EtcdClient, keys: Keys, client: DcsClient, durable: DurableStore | None) -> Sources:
    """Raises EtcdUnavailable, RecordUnreadable, and what the durable store does."""

    def ask(connection: NodeConnection) -> NodeInventory:
        return NodeInventory(*connection.inventory())

    registered, as_of = read_nodes(etcd, keys)
    nodes, unreachable = on_each(client, registered, ask)
    identity, _ = reads.read_identity(etcd, keys)
    contents = reads.read_catalog(etcd, keys)
    numbers = {}
    for stream in contents.streams:
        if (kv := etcd.get(keys.stream_next(stream))) is not None:
            numbers[stream] = int(kv.value)
    marks = []
    if durable is not None:
        marks = [durable.mark(stream, n) for stream in durable.streams() for n in durable.numbers(stream)]
    return Sources(identity, contents, numbers, nodes, marks, unreachable, as_of)


def plan(sources: Sources, catalog: str = "") -> RecoveryPlan:
    """What the catalog should be. Pure. ``catalog``: id of the one to recover, where nodes belong to several.

    Raises ConfigError when that must be given, or there is nothing to recover from; CatalogMismatch when etcd has
    commits of another catalog, or one number stands for two versions.
    """
    chosen = _choose(sources, catalog)
    nodes = {i: n for i, n in sources.nodes.items() if n.catalog == chosen}
    found = _found(sources, nodes)
    if not found:
        raise ConfigError("neither a registered node nor the durable store has a version to recover",
                          hint="start the DCS nodes on their disks (dcs.disk_dir), or set dcs.durable_url, and retry")
    versions, lost = list[Recovered](), list[tuple[Version, str]]()
    for key in sorted(found):
        known = found[key]
        missing = [i for i in range(known.parts) if not known.holders.get(i)]
        if known.durable or (known.parts and not missing):
            sets = ReplicaSets(parts=[sorted(known.holders.get(i, ())) for i in range(known.parts)],
                               as_of=sources.as_of)
            version = known.version.replace(state=VersionState.COMMITTED, sources=replica_sets.sources(sets))
            versions.append(Recovered(version, sets, known.durable, known.entry.revision if known.entry else 0))
        else:
            lost.append((known.version, f"{len(missing)} of {known.parts} parts are on no registered node"
                         if known.parts else "no registered node has its manifest"))
    seen = max((n.commits for n in nodes.values()), default=0)
    commits = sources.identity.commits if sources.identity is not None else 0
    heads = {r.version.stream: r.version for r in versions}
    for version, _ in lost:  # what etcd has committed stays so, and the head does not go back behind it
        if found[version.stream, version.number].entry is not None and (
                (head := heads.get(version.stream)) is None or head.number < version.number):
            heads.pop(version.stream, None)
    return RecoveryPlan(chosen, max(seen, commits) + 1, max(f.version.epoch for f in found.values()), versions, lost,
                        heads, _numbers(sources, found, is_older=seen > commits or not commits))


def _choose(sources: Sources, catalog: str) -> str:
    """Id of the catalog to recover; empty where only the durable store has versions."""
    if sources.contents.unreadable:
        raise ConfigError(f"the record at {sources.contents.unreadable[0]} cannot be decoded",
                          hint="run the release that wrote it, or delete that key")
    known: dict[str, list[str]] = {}
    for node_id, inventory in sources.nodes.items():
        if inventory.catalog:
            known.setdefault(inventory.catalog, []).append(node_id)
    there = ", ".join(f"{c} (nodes {', '.join(ids[:5])})" for c, ids in known.items()) or "none"
    if catalog and catalog not in known:
        raise ConfigError(f"no registered node belongs to catalog {catalog}", hint=f"catalogs of nodes: {there}")
    identity = sources.identity
    if identity is not None and identity.commits:
        if catalog not in ("", identity.id) or (known and identity.id not in known):
            raise CatalogMismatch(f"etcd has {identity.commits} commits of catalog {identity.id}, nodes belong to "
                                  f"{there}: two catalogs cannot be merged",
                                  hint="use another job name for one of them")
        return identity.id
    if len(known) > 1 and not catalog:
        raise ConfigError(f"nodes belong to {len(known)} catalogs: {there}",
                          hint="name the one to recover with --catalog; the other nodes are left as they are")
    return catalog or next(iter(known), "")


def _found(sources: Sources, nodes: Mapping[str, NodeInventory]) -> dict[tuple[str, int], _Found]:
    """Stream and number → what is known, for every version that is not released or aborted."""
    found: dict[tuple[str, int], _Found] = {}
    ended = set()
    for entry in sources.contents.entries():
        version = entry.version
        if version.state is VersionState.COMMITTED:
            _add(found, version).entry = entry
        elif version.state in (VersionState.RELEASING, VersionState.GONE):
            ended.add((version.stream, version.number))
    for node_id, inventory in nodes.items():
        for held in inventory.held:
            known = _add(found, held.version)
            known.parts = max(known.parts, held.parts)
            for part in held.held:
                known.holders.setdefault(part, []).append(node_id)
    for mark in sources.marks:
        known = _add(found, mark.version)
        known.parts, known.durable = mark.parts, True
    return {key: known for key, known in found.items() if key not in ended}


def _add(found: dict[tuple[str, int], _Found], version: Version) -> _Found:
    known = found.setdefault((version.stream, version.number), _Found(version))
    if known.version.manifest != version.manifest:
        raise CatalogMismatch(
            f"{version.stream} version {version.number} stands for two versions, with the manifests "
            f"{known.version.manifest} and {version.manifest}: it was published on two states of etcd",
            hint="stop the nodes that have the one that is not wanted (or set another dcs.durable_url), and try again")
    return known


def _numbers(sources: Sources, found: Iterable[tuple[str, int]], *, is_older: bool) -> dict[str, int]:
    """Stream → the last number that counts as used. ``is_older``: whether etcd does not know all that were used."""
    out = dict(sources.next_numbers)
    for stream, number in [*found, *((e.version.stream, e.version.number) for e in sources.contents.entries())]:
        out[stream] = max(out.get(stream, 0), number)
    return {s: n + _GAP if is_older or n > sources.next_numbers.get(s, 0) else n for s, n in out.items()}


# -- writing -----------------------------------------------------------------------------------------------------------
def recover(etcd: EtcdClient, keys: Keys, client: DcsClient, durable: DurableStore | None, *, catalog: str = "",
            holder: str) -> RecoveryPlan:
    """Rebuilds the catalog, under a new epoch; what it consists of. ``holder``: the holder of that epoch.

    Raises what ``gather`` and ``plan`` do, with nothing changed; Fenced when another epoch begins meanwhile, and
    Conflict when something else writes to the catalog: then run it again.
    """
    first = plan(gather(etcd, keys, client, durable), catalog)
    epoch = _raise_epoch(etcd, keys, first.epoch, holder)
    before, revision = reads.read_identity(etcd, keys)
    closed = (before or CatalogIdentity(id=first.catalog or secrets.token_hex(8), created_at=time.time())).replace(
        suspended="a recovery is under way, or was interrupted")
    write = _Writer(etcd, keys, epoch, revision)
    write.revision = write(Op.put(keys.dcs_catalog(), closed.encode()))
    # Again, now that nothing else writes: the first reading may have been in the middle of a publish or a release.
    planned = plan(gather(etcd, keys, client, durable), catalog)
    written = [(r, _ops(keys, r)) for r in planned.versions]
    for some in batches(written, _VERSIONS_BATCH, nbytes=lambda item: sum(op.nbytes for op in item[1])):
        write(*(op for _, ops in some for op in ops), conditions=[
            Compare.mod(keys.version(r.version.stream, r.version.number), "==", r.revision) for r, _ in some])
    identity = closed.replace(id=planned.catalog or closed.id, commits=planned.commits, suspended="")
    write(Op.put(keys.dcs_catalog(), identity.encode()),
          *(Op.put(keys.stream_next(s), str(n).encode()) for s, n in planned.next_numbers.items()),
          *(op for s, v in planned.heads.items() for op in (Op.put(keys.stream_head(s), v.encode()),
                                                            Op.put(keys.version(s, v.number), v.encode()))))
    log.info("recovered catalog %s: %d versions, %d lost", identity.id, len(planned.versions), len(planned.lost))
    return planned


@dataclass
class _Writer:
    """Writes under an epoch, as long as the identity of the catalog is unchanged."""

    etcd: EtcdClient
    keys: Keys
    epoch: int
    revision: int
    """Revision of the identity."""

    def __call__(self, *ops: Op, conditions: Sequence[Compare] = ()) -> int:
        """The revision of the writes. Raises Fenced and Conflict."""
        done = self.etcd.txn([fencing.epoch_guard(self.keys, self.epoch),
                              Compare.mod(self.keys.dcs_catalog(), "==", self.revision), *conditions], ops)
        if not done.succeeded:
            fencing.require_epoch(self.etcd, self.keys, self.epoch)
            raise Conflict(f"something else wrote to the catalog of job {self.keys.job} during its recovery",
                           hint="stop the run, and recover again")
        return done.revision


def _raise_epoch(etcd: EtcdClient, keys: Keys, above: int, holder: str) -> int:
    """Begins an epoch that is higher than ``above``, and than the present one. One put for each: an epoch's number is
    how often its key was put."""
    while (epoch := fencing.raise_epoch(etcd, keys, holder).number) <= above:
        continue
    return epoch


def _ops(keys: Keys, recovered: Recovered) -> list[Op]:
    v = recovered.version
    durable = keys.durable(v.stream, v.number)
    return [Op.put(keys.version(v.stream, v.number), v.encode()),
            Op.put(keys.replica_sets(v.stream, v.number), recovered.replica_sets.encode()),
            Op.put(durable, b"{}") if recovered.durable else Op.delete(durable)]
