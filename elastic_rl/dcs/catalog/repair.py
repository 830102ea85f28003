"""Repair: copies of parts that were lost with a node are made again on other nodes, so that the next loss finds as many
copies as the first one did."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from elastic_rl.config.dcs import Replicas
from elastic_rl.dcs.catalog import leader_writes, reads, replica_sets
from elastic_rl.dcs.catalog.reads import Entry, ReplicaSetsEntry
from elastic_rl.dcs.catalog.under_replication import ShortVersion
from elastic_rl.dcs.catalog.writer import merge_acknowledged
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs.digests import matches
from elastic_rl.dcs.fan_out import in_parallel, on_each
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.dcs.registered_nodes import RegisteredNode, read_nodes, registration_guards
from elastic_rl.errors import ArenaFull, ChunkMissing, DiskFull, ElasticRLError, NodeUnavailable
from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import CatalogIdentity, ReplicaSets, Version, VersionState
from elastic_rl.runtime.backoff import backoff_s

log = logging.getLogger(__name__)

_COPIES = 8
"""Parts that are copied at once."""
_ASKED = 16
"""Nodes that are queried for a manifest before one fetches it from any node that has it."""
_MANIFESTS = 4
"""Manifests that are kept decoded: that of a 1T model takes tens of MiB."""
_RETRY_S = (2.0, 120.0)
"""Pause after a version could not be repaired, at first and at most; doubled each time, with jitter."""

_NOT_FAILED: tuple[int, float, frozenset[tuple[str, int]]] = (0, 0.0, frozenset())
_RECHECK_S = 300.0
"""A version that is short of copies, and that nothing can be done for, is examined again after so long: `versions
recover` may have written its replica sets."""

_NO_OTHER = "there is no other node that could have one"
_NO_NODE = "no DCS node of the job is there"
_NO_RECORD = "etcd has no record of its replica sets; `elastic-rl versions recover` writes it"

_Nodes = Mapping[str, RegisteredNode]
_VersionKey = tuple[str, int]
_NodeState = tuple[int, int]
"""Registration of a node and how many chunks it has lost: what it held before either changed may be gone."""


class Repairer:
    """Level-triggered: each round reads every committed version and the registered nodes. A version that has all its
    copies is not examined again before a node registers, goes away, or reports a lost chunk.

    A node is trusted to hold the parts that the replica sets list for it if it registered before the nodes were read
    for them: this very process has acknowledged them. A node that has registered since, or that has lost a chunk,
    is asked.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, client: DcsClient, *, replicas: Replicas,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._etcd, self._keys, self._client, self._replicas, self._clock = etcd, keys, client, replicas, clock
        self._examined: dict[_VersionKey, frozenset[tuple[str, _NodeState]]] = {}
        """All nodes and their states when nothing more could be done for a version."""
        self._confirmed: dict[_VersionKey, dict[str, _NodeState]] = {}
        """Nodes that were asked and have what the replica sets list for them, with their states at that time."""
        self._failed: dict[_VersionKey, tuple[int, float, frozenset[tuple[str, int]]]] = {}
        """How often in a row a version could not be repaired, when it is tried again, and the nodes that were there, by
        their registrations: with another one it is tried at once."""
        self._recheck_at: dict[_VersionKey, float] = {}
        """When a version that is short of copies is examined again, whatever the nodes."""
        self._manifests: OrderedDict[str, list[list[str]]] = OrderedDict()
        self._guard: list[Compare] | None = None
        """The guard of the last round: another leader may have changed everything before that of another one."""
        self._short: dict[_VersionKey, ShortVersion] = {}
        self._complete = False

    def short(self, guard: Sequence[Compare]) -> tuple[list[ShortVersion], bool]:
        """Committed versions that have fewer copies than wanted, of those that were examined under this guard, and
        whether all were. For any thread; does not wait for a round."""
        if self._guard != list(guard):
            return [], False
        complete = self._complete  # before the versions, which only a later round adds to
        return list(self._short.values()), complete

    def round(self, guard: Sequence[Compare]) -> list[str]:
        """Makes the copies that are missing, as far as there are nodes for them; a line for each version that got or
        lacks some. ``guard``: conditions that hold while the caller leads. Raises EtcdUnavailable, RecordUnreadable."""
        identity, _ = reads.read_identity(self._etcd, self._keys)
        if identity is None or identity.suspended:
            return []
        found, as_of = read_nodes(self._etcd, self._keys)
        nodes = {i: n for i, n in found.items() if n.belongs_to(identity.id)}
        self._begin(guard)
        wanted = replica_sets.wanted(self._replicas, len(nodes))
        if not nodes:  # nothing can be done, and each version is short: those that return are examined again
            self._examined.clear()
            self._short = {(e.version.stream, e.version.number): ShortVersion(
                e.version.stream, e.version.number, 0, wanted, _NO_NODE) for e in self._committed()}
            self._complete = True
            return []
        there = frozenset((i, _state(n)) for i, n in nodes.items())
        committed = {(e.version.stream, e.version.number): e for e in self._committed()}
        for state in (self._examined, self._confirmed, self._failed, self._recheck_at):
            for key in [k for k in state if k not in committed]:
                del state[key]  # type: ignore[attr-defined]
        self._short = {key: short for key, short in self._short.items() if key in committed}
        due = [key for key in committed if self._is_due(key, there)]
        for key in due:  # all of them, before the copies of the first one are made, which may take long
            with contextlib.suppress(ElasticRLError):  # which its repair reports
                if (found_now := self._replica_sets(key)) is not None:
                    self._note(key, replica_sets.fewest(found_now.replica_sets, nodes), wanted)
        lines = []
        for key in due:
            entry, failures = committed[key], self._failed.get(key, _NOT_FAILED)[0]
            try:
                lines += self._repair(entry, nodes, wanted, as_of, identity, guard)
            except ElasticRLError as e:
                self._failed[key] = (failures + 1, self._clock() + backoff_s(failures + 1, *_RETRY_S),
                                     _registrations(there))
                lines.append(f"could not repair {key[0]} version {key[1]}: {e.message}")
                if (short := self._short.get(key)) is not None:
                    self._short = {**self._short, key: replace(short, why=e.message)}
            else:
                self._failed.pop(key, None)
                self._examined[key] = there
                self._recheck_at[key] = self._clock() + _RECHECK_S if key in self._short else math.inf
        self._complete = True
        return lines

    def _is_due(self, key: _VersionKey, there: frozenset[tuple[str, _NodeState]]) -> bool:
        """Whether a version is to be examined. ``there``: all nodes and their states."""
        now, (_, retry_at, known) = self._clock(), self._failed.get(key, _NOT_FAILED)
        done = self._examined.get(key) == there and now < self._recheck_at.get(key, math.inf)
        return not done and (now >= retry_at or not _registrations(there) <= known)

    def _begin(self, guard: Sequence[Compare]) -> None:
        """A round under another guard than the last one examines all versions."""
        if self._guard != list(guard):
            self._complete = False
            self._short = {}
            for state in (self._examined, self._confirmed, self._failed, self._recheck_at):
                state.clear()  # type: ignore[attr-defined]
            self._guard = list(guard)

    def _note(self, key: _VersionKey, copies: int, wanted: int, why: str = "") -> None:
        """Notes how many copies a version has. ``why``: why there are not more; else as before."""
        short = {k: version for k, version in self._short.items() if k != key}
        if copies < wanted:
            before = self._short.get(key)
            short[key] = ShortVersion(*key, copies, wanted, why or (before.why if before is not None else _NO_OTHER))
        self._short = short

    def _replica_sets(self, key: _VersionKey) -> ReplicaSetsEntry | None:
        """The replica sets of a version that was committed when the round read the catalog; None where it was released
        since, and they with it: versions may follow one another faster than rounds."""
        found = reads.read_replica_sets(self._etcd, self._keys, *key)
        if found.revision:
            return found
        version = reads.get_version(self._etcd, self._keys, *key)
        return found if version is not None and version.state is VersionState.COMMITTED else None

    def _committed(self) -> list[Entry]:
        """Newest first: the next failure must not take the heads."""
        entries = [e for e in reads.read_catalog(self._etcd, self._keys).entries()
                   if e.version.state is VersionState.COMMITTED]
        return sorted(entries, key=lambda e: -e.version.number)

    def _repair(self, entry: Entry, nodes: _Nodes, wanted: int, as_of: int, identity: CatalogIdentity,
                guard: Sequence[Compare]) -> list[str]:
        """``wanted``: copies of each part. ``as_of``: revision at which the nodes were read. Raises ElasticRLError
        where a later try may do better."""
        version = entry.version
        key = version.stream, version.number
        found = self._replica_sets(key)
        if found is None:
            self._note(key, wanted, wanted)
            return []
        holding = replica_sets.without(found.replica_sets, self._lost(version, found, nodes))
        missing = replica_sets.short_of(holding, wanted)
        self._note(key, replica_sets.fewest(holding, nodes), wanted)  # without what nodes have lost that are there
        errors: list[ElasticRLError] = []
        copies, failed = in_parallel(missing, lambda part: self._copy(version, part, holding, nodes, wanted, errors),
                                     threads=_COPIES)
        acknowledged = merge_acknowledged(copies.values())
        now = replica_sets.with_copies(holding, ((part, n) for part, made in copies.items() for n in made))
        try:
            registered, _ = registration_guards(self._etcd, self._keys, acknowledged, identity)
            if now != found.replica_sets and not leader_writes.update_replica_sets(
                    self._etcd, self._keys, entry, found, now.replace(as_of=as_of), [*registered, *guard]):
                raise NodeUnavailable("its record changed meanwhile, or this replica no longer leads")
        finally:
            on_each(self._client, acknowledged, lambda connection: connection.release_holds())
        self._note(key, replica_sets.fewest(now, nodes), wanted, _NO_OTHER if now.parts else _NO_RECORD)
        for error in (*failed.values(), *errors):
            raise error
        return _report(version, now, acknowledged, wanted)

    # -- what is lost ------------------------------------------------------------------------------------------------
    def _lost(self, version: Version, found: ReplicaSetsEntry, nodes: _Nodes) -> dict[str, set[int]]:
        """Parts that nodes of the replica sets do not hold any more."""
        listed = {n: set(parts) for n, parts in replica_sets.parts_by_node(found.replica_sets).items()}
        lost = {n: parts for n, parts in listed.items() if n not in nodes}
        confirmed = self._confirmed.setdefault((version.stream, version.number), {})
        doubtful = [n for n in listed if n in nodes and confirmed.get(n) != _state(nodes[n])
                    and (nodes[n].registration > found.replica_sets.as_of or nodes[n].node.lost_chunks)]
        if not doubtful:
            return lost
        digests = self._parts(version, nodes)

        def missing(node_id: str) -> set[int]:
            parts = listed[node_id]
            wanted = [version.manifest, *(d for i in parts for d in digests[i])]
            lacking = set(self._client.connect(node_id).has(wanted))
            return parts if version.manifest in lacking else {i for i in parts if not lacking.isdisjoint(digests[i])}

        answers, silent = in_parallel(doubtful, missing)
        lost |= {n: parts for n, parts in answers.items() if parts} | {n: listed[n] for n in silent}
        confirmed |= {n: _state(nodes[n]) for n, parts in answers.items() if not parts}
        return lost

    def _parts(self, version: Version, nodes: _Nodes) -> list[list[str]]:
        """Digests of the chunks of each part. Raises ChunkMissing when no node has the manifest."""
        digest = version.manifest
        if digest not in self._manifests:
            self._manifests[digest] = self._read_manifest(version, nodes).part_digests()
            while len(self._manifests) > _MANIFESTS:
                self._manifests.popitem(last=False)
        self._manifests.move_to_end(digest)
        return self._manifests[digest]

    def _read_manifest(self, version: Version, nodes: _Nodes) -> Manifest:
        asked = [n for n in dict.fromkeys([*version.sources, *nodes]) if n in nodes][:_ASKED]
        for node_id in asked:
            with contextlib.suppress(ElasticRLError):
                data = self._client.connect(node_id).get(version.manifest)
                if matches(data, version.manifest):
                    return Manifest.decode(data)
        for node_id in asked:  # perhaps another node has it, or the durable store
            with contextlib.suppress(ElasticRLError):
                connection = self._client.connect(node_id)
                connection.fetch([version.manifest])
                return Manifest.decode(connection.get(version.manifest))
        raise ChunkMissing(f"no node has a valid manifest {version.manifest}")

    # -- making copies -----------------------------------------------------------------------------------------------
    def _copy(self, version: Version, part: int, holding: ReplicaSets, nodes: _Nodes, wanted: int,
              errors: list[ElasticRLError]) -> dict[str, str]:
        """Has as many nodes fetch a part as it lacks copies; which, with their incarnations. Fewer where there are no
        more nodes, or these failed: why is added to ``errors`` then."""
        digests = self._parts(version, nodes)[part]
        made: dict[str, str] = {}
        last: ElasticRLError | None = None
        for target in sorted(replica_sets.candidates(holding, part, list(nodes)), key=self._client.is_unreachable):
            if len(holding.parts[part]) + len(made) >= wanted:
                return made
            try:
                connection = self._client.connect(target)
                connection.fetch([version.manifest, *digests], prefer=holding.parts[part], hold=True)
                made[target] = connection.node.incarnation
            except (NodeUnavailable, ArenaFull, DiskFull) as e:
                last = e
        if last is not None and len(holding.parts[part]) + len(made) < wanted:
            errors.append(last)
        return made


def _registrations(there: Iterable[tuple[str, _NodeState]]) -> frozenset[tuple[str, int]]:
    """The nodes of these states, each with when it registered."""
    return frozenset((node, registration) for node, (registration, _) in there)


def _state(node: RegisteredNode) -> _NodeState:
    return node.registration, node.node.lost_chunks


def _report(version: Version, now: ReplicaSets, made: Iterable[str], replicas: int) -> list[str]:
    what = f"{version.stream} version {version.number}"
    if not now.parts:
        return [f"{what} has no record of its replica sets and is not repaired: `elastic-rl versions recover`"]
    fewest = min(map(len, now.parts))
    if fewest < replicas:
        return [f"{what} has {fewest} of {replicas} copies, and there is no other node"]
    if not (to := ", ".join(made)):
        return []
    some = "" if len(now.parts) == 1 else "parts of "
    return [f"copied {some}{what} to node {to}"]


class RepairThread(threading.Thread):
    """Runs rounds in a thread of their own, since they wait for bytes to be copied. ``request`` asks for one."""

    def __init__(self, repairer: Repairer) -> None:
        super().__init__(name="repair", daemon=True)
        self._repairer = repairer
        self._guard: list[Compare] | None = None
        self._changed = threading.Condition()
        self._stopping = False

    def short(self, guard: Sequence[Compare]) -> tuple[list[ShortVersion], bool]:
        """``Repairer.short``."""
        return self._repairer.short(guard)

    def request(self, guard: Sequence[Compare]) -> None:
        """Asks for a round under this guard; of several requests during one round, the last one counts."""
        with self._changed:
            self._guard = list(guard)
            self._changed.notify()

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._guard is not None)
                guard, self._guard = self._guard, None
                if self._stopping or guard is None:
                    return
            try:
                for line in self._repairer.round(guard):
                    log.info("repair: %s", line)
            except ElasticRLError as e:
                log.warning("repair: %s", e)
            except Exception:  # the next round reads everything again; without this thread no copy is ever made
                log.exception("a round of repair failed")

    def close(self) -> None:
        """Ends the thread after its present round, for which this does not wait long."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self.is_alive():
            self.join(timeout=2.0)
