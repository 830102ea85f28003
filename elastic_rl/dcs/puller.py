"""Pulling a committed version: pin it, have this host's node get what it lacks, and read it in place."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

import torch

from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.records import Version
from elastic_rl.coordinator.store import KeptLease, Store, Watch
from elastic_rl.dcs import catalog, mapping
from elastic_rl.dcs.client import HubClient, Located
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.errors import Compacted, StoreUnavailable


class HeadWatch:
    """Follows the head of a stream. The first ``get`` returns the present head, if there is one; each later one the
    newest head that was not returned yet (those in between are skipped). Read by one thread."""

    def __init__(self, store: Store, keys: Keys, stream: str) -> None:
        self._store, self._key = store, keys.stream_head(stream)
        self._seen = 0
        self._watch: Watch | None = None
        self._ready: Version | None = None

    def get(self, timeout_s: float) -> Version | None:
        """The next head, or None when none came in time. Raises StoreUnavailable."""
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
        kvs, revision = self._store.range(self._key)
        for kv in kvs:
            if kv.key == self._key:
                self._offer(kv.value)
        self._watch = self._store.watch(self._key, start_revision=revision + 1)

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

    def __init__(self, puller: Puller, version: Version, pin: str, arena_path: str) -> None:
        self.version = version
        self.manifest = Manifest((), {})
        self.arena_path = arena_path
        self._puller, self._pin = puller, pin
        self._at: dict[str, int] = {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, read-only view) of every tensor, valid while this is open. Raises ChunkCorrupt."""
        return mapping.load_tensors(self.reference())

    def reference(self) -> dict[str, Any]:
        """For ``mapping.load_tensors`` in another process of this host; JSON-able, valid while this is open."""
        return {
            "format": mapping.FORMAT, "path": self.arena_path, "stream": self.version.stream,
            "version": self.version.number,
            "chunks": [[d, self._at[d], nbytes] for d, nbytes in self.manifest.chunks.items()],
            "tensors": [[t.name, t.dtype, list(t.shape), [[self._at[s.digest] + s.offset, s.nbytes] for s in t.slices]]
                        for t in self.manifest.tensors]}

    def located(self, manifest: Manifest, chunks: list[Located]) -> None:
        self.manifest, self._at = manifest, {digest: offset for digest, offset, _ in chunks}

    def close(self) -> None:
        """Ends the pin; views must not be used any more."""
        if self._pin:
            pin, self._pin = self._pin, ""
            self._puller.unpin(self.version, pin)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Puller:
    """Pulls versions to this host. Thread-safe; connections and the lease of the pins are kept between pulls."""

    def __init__(self, store: Store, keys: Keys, holder: str, *, pin_ttl_s: int, io_timeout_s: float,
                 node: str = "") -> None:
        """``holder`` names who pins. ``node``: id of the node to pull to, where a host has several."""
        self._store, self._keys, self._holder, self._pin_ttl_s = store, keys, holder, pin_ttl_s
        self._hub = HubClient(store, keys, io_timeout_s=io_timeout_s, node=node)
        self._lease: KeptLease | None = None
        self._lock = threading.Lock()
        self._ids = itertools.count(1)

    def head(self, stream: str) -> Version | None:
        """The newest committed version of a stream."""
        return catalog.head(self._store, self._keys, stream)

    def watch_head(self, stream: str) -> HeadWatch:
        """Follows the head; close it when done."""
        return HeadWatch(self._store, self._keys, stream)

    def pull(self, stream: str, number: int | None = None) -> Pulled:
        """Pins a committed version (the head by default) and brings it to this host. A context manager.

        Raises VersionNotFound, NodeUnavailable, ChunkMissing, ChunkCorrupt (no sound copy anywhere) and ArenaFull.
        """
        holder = f"{self._holder}.{next(self._ids)}"  # the same version may be pulled twice at once
        version = catalog.pin(self._store, self._keys, stream, number, holder, self._pin_lease())
        try:
            return self._locate(version, holder)
        except BaseException:
            self.unpin(version, holder)
            raise

    def _locate(self, version: Version, holder: str) -> Pulled:
        node = self._hub.local()
        pulled = Pulled(self, version, holder, node.node.arena_path)
        [(digest, offset, nbytes)] = node.fetch([version.manifest], prefer=version.nodes)
        manifest = Manifest.decode(mapping.read(pulled.arena_path, digest, offset, nbytes))
        pulled.located(manifest, node.fetch(list(manifest.chunks), prefer=version.nodes))
        return pulled

    def _pin_lease(self) -> int:
        with self._lock:
            if self._lease is None or not self._lease.alive:
                if self._lease is not None:
                    self._lease.close()
                self._lease = self._store.keepalive(self._pin_ttl_s)
            return self._lease.id

    def unpin(self, version: Version, holder: str) -> None:
        """Ends one pin; if etcd is away, it ends with this puller's lease."""
        with contextlib.suppress(StoreUnavailable):
            catalog.unpin(self._store, self._keys, version.stream, version.number, holder)

    def close(self) -> None:
        """Ends every pin of this puller."""
        self._hub.close()
        with self._lock:
            if self._lease is not None:
                self._lease.close()
                self._lease = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
