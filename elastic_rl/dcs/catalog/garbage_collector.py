"""What the leading coordinator does for the checkpoint service: ends publishes whose publisher died, releases old
versions, and has the nodes drop chunks that no version refers to."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from elastic_rl.dcs.catalog import catalog
from elastic_rl.dcs.catalog.catalog import Entry
from elastic_rl.dcs.catalog.retention import RetentionPolicy, to_release
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.failpoints import reach
from elastic_rl.dcs.security import Security
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import VersionState

RECORDS_KEPT = 50
"""Records of versions that are gone or aborted, kept a stream for people to look at."""
LIVE = (VersionState.COMMITTED, VersionState.RELEASING)
"""States in which a version's chunks are needed. Those of a STAGING version are held by its publisher's connection."""


class GarbageCollector:
    """Level-triggered: each sweep looks at everything and does what is due. Every write carries the caller's guard."""

    def __init__(self, etcd: EtcdClient, keys: Keys, keep: RetentionPolicy, *, io_timeout_s: float = 2.0,
                 security: Security | None = None) -> None:
        self._etcd, self._keys, self._keep = etcd, keys, keep
        self._hub = DcsClient(etcd, keys, io_timeout_s=io_timeout_s, security=security)

    def sweep(self, guard: Sequence[Compare]) -> list[str]:
        """One round; a line for each thing that was done or could not be. ``guard``: conditions that hold while the
        caller leads. Raises EtcdUnavailable."""
        lines: list[str] = []
        for stream, entries in catalog.entries_by_stream(self._etcd, self._keys).items():
            lines += self._abort(entries, guard)
            lines += self._release(stream, entries, guard)
            lines += self._forget(entries, guard)
        return lines + self._drop()

    def _abort(self, entries: Sequence[Entry], guard: Sequence[Compare]) -> list[str]:
        lines = []
        for entry in entries:
            v = entry.version
            if (v.state is VersionState.STAGING
                    and self._etcd.get(self._keys.staging_owner(v.stream, v.number)) is None
                    and catalog.abort_orphan(self._etcd, self._keys, entry, guard)):
                lines.append(f"aborted {v.stream} version {v.number}: its publisher is gone")
        return lines

    def _release(self, stream: str, entries: Sequence[Entry], guard: Sequence[Compare]) -> list[str]:
        committed = {e.version.number: e for e in entries if e.version.state is VersionState.COMMITTED}
        versions = [e.version for e in committed.values()]
        old = to_release(versions, (), self._keep, time.time())
        if not old and not any(e.version.state is VersionState.RELEASING for e in entries):
            return []
        pinned = catalog.pinned(self._etcd, self._keys, stream)
        released = [n for n in old if n not in pinned
                    and catalog.release(self._etcd, self._keys, committed[n], guard)]
        reach("gc.releasing")
        # Pins are read again after the release: none can be added any more, so none that counts is missed.
        pinned = catalog.pinned(self._etcd, self._keys, stream)
        lines = []
        for v in catalog.entries(self._etcd, self._keys, stream) if released else entries:
            if (v.version.state is VersionState.RELEASING and v.version.number not in pinned
                    and catalog.gone(self._etcd, self._keys, v, guard)):
                lines.append(f"released {stream} version {v.version.number}")
                reach("gc.gone")
        return lines

    def _forget(self, entries: Sequence[Entry], guard: Sequence[Compare]) -> list[str]:
        over = [e for e in entries if not catalog.TRANSITIONS[e.version.state]][:-RECORDS_KEPT]
        for entry in over:
            catalog.forget(self._etcd, self._keys, entry, guard)
        return []

    def _drop(self) -> list[str]:
        """Has each node drop what no live version refers to. Needs no guard: what a node may drop follows from the
        order mark, then read (see ``chunks.py``), whoever asks."""
        lines, marks = [], {}
        for node in self._hub.nodes():
            try:
                marks[node.id] = self._hub.connect(node.id).mark()
            except ElasticRLError as e:
                lines.append(f"could not sweep node {node.id}: {e.message}")
        reach("gc.marked")
        live = sorted({e.version.manifest for e in itertools.chain.from_iterable(
            catalog.entries_by_stream(self._etcd, self._keys).values()) if e.version.state in LIVE})
        for node_id, mark in marks.items():
            try:
                chunks, nbytes = self._hub.connect(node_id).drop(live, mark)
            except ElasticRLError as e:
                lines.append(f"could not sweep node {node_id}: {e.message}")
                continue
            reach("gc.dropped")
            if chunks:
                lines.append(f"dropped {chunks} chunks, {nbytes} bytes, of node {node_id}")
        return lines

    def close(self) -> None:
        self._hub.close()
