"""Copies that were lost with a node are made again, so that the next loss finds as many as the first did."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence

from elastic_rl.dcs.catalog import catalog
from elastic_rl.dcs.catalog.catalog import Entry
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.errors import ElasticRLError, NodeUnavailable
from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode, VersionState

log = logging.getLogger(__name__)

_Registration = tuple[str, int]
"""A node's id and pid: another process of the same id must be asked anew what it has."""


class Repairer:
    """Level-triggered: each round looks at every committed version and at the nodes there are. What was found whole is
    not asked about again before a node has come or gone."""

    def __init__(self, etcd: EtcdClient, keys: Keys, hub: DcsClient, *, replicas: int) -> None:
        self._etcd, self._keys, self._hub, self._replicas = etcd, keys, hub, replicas
        self._seen: dict[tuple[str, int], frozenset[_Registration]] = {}

    def round(self, guard: Sequence[Compare]) -> list[str]:
        """Makes what copies are missing, as far as there are nodes for them; a line for each that was made or could not
        be. ``guard``: conditions that hold while the caller leads. Raises EtcdUnavailable."""
        nodes = self._hub.nodes()
        there = frozenset((n.id, n.pid) for n in nodes)
        lines, found = [], {}
        for entry in self._committed():
            key = (entry.version.stream, entry.version.number)
            if self._seen.get(key) != there:
                try:
                    lines += self._look(entry, nodes, guard)
                except ElasticRLError as e:
                    lines.append(f"could not copy {key[0]} version {key[1]}: {e.message}")
                    continue
            found[key] = there
        self._seen = found
        return lines

    def _committed(self) -> list[Entry]:
        """Heads first: they are what the next failure must not take."""
        streams = catalog.entries_by_stream(self._etcd, self._keys).values()
        entries = [e for stream in streams for e in stream if e.version.state is VersionState.COMMITTED]
        return sorted(entries, key=lambda e: -e.version.number)

    def _look(self, entry: Entry, nodes: Sequence[DcsNode], guard: Sequence[Compare]) -> list[str]:
        version = entry.version
        what = f"{version.stream} version {version.number}"
        registered = {n.id for n in nodes}
        if len(registered.intersection(version.nodes)) == len(version.nodes) >= self._replicas and not self._new(nodes):
            return []
        digests = self._digests(version.manifest, [*version.nodes, *(n.id for n in nodes)])
        holding = [n.id for n in nodes if not self._missing(n.id, digests)]
        spare = [n.id for n in nodes if n.id not in holding]
        made: list[str] = []
        while len(holding) + len(made) < self._replicas and spare:
            target = spare.pop(0)
            with contextlib.suppress(NodeUnavailable):
                self._hub.connect(target).fetch(digests, prefer=holding, hold=True)
                made.append(target)
        now = [*holding, *made]
        try:
            if set(now) != set(version.nodes) and not catalog.relocate(self._etcd, self._keys, entry, now, guard):
                return []  # it changed meanwhile, or another one leads: the next round sees to it
        finally:
            for node_id in made:
                with contextlib.suppress(NodeUnavailable):
                    self._hub.connect(node_id).settle()
        if len(now) < self._replicas:
            return [f"{what} has {len(now)} of {self._replicas} copies, and there is no other node"]
        return [f"copied {what} to node {', '.join(made)}"] if made else []

    def _new(self, nodes: Sequence[DcsNode]) -> bool:
        """Whether a node is there that was not at the last round: it may be another process under an old id."""
        known = {n for seen in self._seen.values() for n in seen}
        return not {(n.id, n.pid) for n in nodes} <= known

    def _digests(self, manifest: str, candidates: Sequence[str]) -> list[str]:
        for node_id in dict.fromkeys(candidates):
            with contextlib.suppress(ElasticRLError):
                found = Manifest.decode(self._hub.connect(node_id).get(manifest))
                return [manifest, *found.chunks]
        raise NodeUnavailable(f"no node has its manifest {manifest}")

    def _missing(self, node_id: str, digests: Sequence[str]) -> bool:
        try:
            return bool(self._hub.connect(node_id).has(digests))
        except NodeUnavailable:
            return True


class RepairThread(threading.Thread):
    """Runs rounds off the leader's own loop, which must not wait for bytes on their way. ``kick`` asks for one."""

    def __init__(self, repairer: Repairer) -> None:
        super().__init__(name="repair", daemon=True)
        self._repairer = repairer
        self._guard: list[Compare] | None = None
        self._kicked = threading.Condition()
        self._stopping = False

    def kick(self, guard: Sequence[Compare]) -> None:
        """Asks for a round under this guard; while one runs, the last one asked for is the next."""
        with self._kicked:
            self._guard = list(guard)
            self._kicked.notify()

    def run(self) -> None:
        while True:
            with self._kicked:
                self._kicked.wait_for(lambda: self._stopping or self._guard is not None)
                guard, self._guard = self._guard, None
                if self._stopping or guard is None:
                    return
            try:
                for line in self._repairer.round(guard):
                    log.info("repair: %s", line)
            except ElasticRLError as e:
                log.warning("repair: %s", e)

    def close(self) -> None:
        """Ends the thread after the round that it is in, for which nobody waits long."""
        with self._kicked:
            self._stopping = True
            self._kicked.notify()
        if self.is_alive():
            self.join(timeout=2.0)
