"""Pulling a committed version: pin it, have this host's node get what it lacks, and read it in place."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import torch

from elastic_rl.dcs import catalog
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.connection import Located, NodeConnection, Progress
from elastic_rl.dcs.failpoints import reach
from elastic_rl.dcs.fetch import mapping
from elastic_rl.dcs.fetch.assembly import Assembly, reference
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.dcs.security import Security
from elastic_rl.errors import Compacted, ElasticRLError, EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient, KeptLease, Watch
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Version
from elastic_rl.telemetry import traces

OnPart = Callable[[dict[str, Any]], object]
"""Gets a reference (``mapping``) to some tensors of a version."""


class HeadWatch:
    """Follows the head of a stream. The first ``get`` returns the present head, if there is one; each later one the
    newest head that was not returned yet (those in between are skipped). Read by one thread."""

    def __init__(self, etcd: EtcdClient, keys: Keys, stream: str) -> None:
        self._etcd, self._key = etcd, keys.stream_head(stream)
        self._seen = 0
        self._watch: Watch | None = None
        self._ready: Version | None = None

    def get(self, timeout_s: float) -> Version | None:
        """The next head, or None when none came in time. Raises EtcdUnavailable."""
        end = time.monotonic() + timeout_s
        while True:
            if self._watch is None:
                self._open()
            assert self._watch is not None
            left = end - time.monotonic()
            try:
                event = self._watch.get(0 if self._ready else max(left, 0.0))
            except Compacted:
                self.close()
                continue
            except EtcdUnavailable:  # we may not watch; a new one can be had when that was mended
                self.close()
                raise
            if event is not None:
                if event.type == "put" and event.kv.key == self._key:
                    self._offer(event.kv.value)
                continue  # there may be a newer one already
            if self._ready is not None:
                version, self._ready = self._ready, None
                return version
            if left <= 0 or self._watch.closed:
                return None

    def _offer(self, value: bytes) -> None:
        version = Version.decode(value)
        if version.number > self._seen:
            self._seen, self._ready = version.number, version

    def _open(self) -> None:
        kvs, revision = self._etcd.range(self._key)
        for kv in kvs:
            if kv.key == self._key:
                self._offer(kv.value)
        self._watch = self._etcd.watch(self._key, start_revision=revision + 1)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pulled:
    """A version whose every chunk lies, verified, in this host's arena, and stays there until this is closed."""

    def __init__(self, puller: Puller, version: Version, pin: str, node: NodeConnection, manifest: Manifest,
                 chunks: Sequence[Located]) -> None:
        self.version, self.manifest = version, manifest
        self.arena_path = node.node.arena_path
        self._puller, self._pin, self._node = puller, pin, node
        self._at = {digest: offset for digest, offset, _ in chunks}
        self._lock = threading.Lock()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, read-only view) of every tensor, valid while this is open. Raises ChunkCorrupt."""
        return mapping.load_tensors(self.reference())

    def reference(self) -> dict[str, Any]:
        """For ``mapping.load_tensors`` in another process of this host; JSON-able, valid while this is open."""
        return reference(self.version, self.manifest, self.arena_path, self._at, self.manifest.tensors,
                         self.manifest.chunks)

    def close(self) -> None:
        """Ends the pin; views must not be used any more."""
        with self._lock:
            pin, self._pin = self._pin, ""
        if pin:
            self._puller.give_back(self.version, pin, self._node)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Puller:
    """Pulls versions to this host. Thread-safe; connections and the lease of the pins are kept between pulls."""

    def __init__(self, etcd: EtcdClient, keys: Keys, holder: str, *, pin_ttl_s: int, io_timeout_s: float,
                 node: str = "", security: Security | None = None) -> None:
        """``holder`` names who pins. ``node``: id of the node to pull to, where a host has several."""
        self._etcd, self._keys, self._holder, self._pin_ttl_s = etcd, keys, holder, pin_ttl_s
        self._hub = DcsClient(etcd, keys, io_timeout_s=io_timeout_s, node=node, security=security)
        self._lease: KeptLease | None = None
        self._lock = threading.Lock()
        # A version that is pulled has a connection of its own, so that letting go of one never waits for the pull of
        # another; these are free.
        self._idle: list[NodeConnection] = []
        self._in_use: set[NodeConnection] = set()
        self._last: dict[str, Manifest] = {}  # by stream: what this host most likely has still
        self._ids = itertools.count(1)

    def head(self, stream: str) -> Version | None:
        """The newest committed version of a stream."""
        return catalog.head(self._etcd, self._keys, stream)

    def watch_head(self, stream: str) -> HeadWatch:
        """Follows the head; close it when done."""
        return HeadWatch(self._etcd, self._keys, stream)

    def pull(self, stream: str, number: int | None = None, *, on_progress: Progress | None = None,
             on_part: OnPart | None = None) -> Pulled:
        """Pins a committed version (the head by default) and brings it to this host. A context manager.

        What is here already is not fetched again, so a pull that failed half-way goes on where it ended, and of what
        resembles the version pulled before only the difference is. Each chunk is verified as it arrives.

        ``on_progress`` is called about every second with the bytes that are here and the bytes in all. ``on_part`` gets
        the version bit by bit while the rest is under way: references to tensors that are complete, each tensor once.

        Raises VersionNotFound, NodeUnavailable, ChunkMissing, ChunkCorrupt (no sound copy anywhere), ArenaFull,
        DiskFull, and what ``on_part`` raises.
        """
        holder = f"{self._holder}.{next(self._ids)}"  # the same version may be pulled twice at once
        version = catalog.pin(self._etcd, self._keys, stream, number, holder, self._pin_lease())
        reach("pull.pinned")
        node: NodeConnection | None = None
        try:
            node = self._take()
            with traces.span("dcs.pull", parent=traces.current_or(version.meta.get("trace", {})), stream=stream,
                             version=version.number, nbytes=version.nbytes, holder=holder):
                return self._locate(version, holder, node, on_progress, on_part)
        except BaseException:
            self.give_back(version, holder, node)
            raise

    def _locate(self, version: Version, holder: str, node: NodeConnection, on_progress: Progress | None,
                on_part: OnPart | None) -> Pulled:
        [(digest, offset, nbytes)] = node.fetch([version.manifest], prefer=version.sources, use=holder)
        manifest = Manifest.decode(mapping.read(node.node.arena_path, digest, offset, nbytes))
        reach("pull.manifest")
        last = self._last.get(version.stream)
        fetch = partial(node.fetch, list(manifest.chunks), prefer=version.sources, use=holder, sizes=manifest.chunks,
                        bases=delta.bases(last, manifest) if last is not None else None, on_progress=on_progress)
        chunks = (fetch() if on_part is None
                  else _in_parts(fetch, node, Assembly(version, manifest, node.node.arena_path), on_part))
        reach("pull.located")
        self._last[version.stream] = manifest
        return Pulled(self, version, holder, node, manifest, chunks)

    def _take(self) -> NodeConnection:
        """A connection to this host's node for one pull."""
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
            if kept is None:
                kept = self._hub.open_local()
            elif kept.stale():
                kept.close()
                continue
            with self._lock:
                self._in_use.add(kept)
            return kept

    def _pin_lease(self) -> int:
        with self._lock:
            if self._lease is None or not self._lease.alive:
                if self._lease is not None:
                    self._lease.close()
                self._lease = self._etcd.keepalive(self._pin_ttl_s)
            return self._lease.id

    def give_back(self, version: Version, holder: str, node: NodeConnection | None) -> None:
        """Ends one pull: its chunks may move, and its pin ends; if etcd is away, that does with this puller's
        lease."""
        if node is not None:
            try:
                node.release(holder)
            except ElasticRLError:
                node.close()  # which releases, too
            with self._lock:
                self._in_use.discard(node)
                if not node.closed:
                    self._idle.append(node)
        with contextlib.suppress(EtcdUnavailable):
            catalog.unpin(self._etcd, self._keys, version.stream, version.number, holder)

    def close(self) -> None:
        """Ends every pin of this puller."""
        self._hub.close()
        with self._lock:
            for node in (*self._idle, *self._in_use):
                node.close()
            self._idle.clear()
            self._in_use.clear()
            if self._lease is not None:
                self._lease.close()
                self._lease = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _in_parts(fetch: Callable[..., list[Located]], node: NodeConnection, assembly: Assembly, on_part: OnPart
              ) -> list[Located]:
    """Fetches in another thread, and hands out in this one what is complete."""
    arrived: queue.SimpleQueue[Sequence[Located] | None] = queue.SimpleQueue()  # no longer than the manifest

    def run() -> list[Located]:
        try:
            return fetch(on_chunks=arrived.put)
        finally:
            arrived.put(None)

    with ThreadPoolExecutor(1, thread_name_prefix="fetch") as pool:
        fetched = pool.submit(run)
        try:
            while (chunks := arrived.get()) is not None:
                assembly.add(chunks)
                if arrived.empty() and (part := assembly.part()) is not None:
                    on_part(part)
            located = fetched.result()
            assembly.add(located)
            if (part := assembly.part()) is not None:
                on_part(part)
            return located
        except BaseException:
            node.close()  # ends the fetch
            raise
