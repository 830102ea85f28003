"""The pins that a node holds for the readers of its host."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from elastic_rl.dcs.catalog import pins, reads
from elastic_rl.errors import EtcdUnavailable, VersionNotFound
from elastic_rl.etcd.client import EtcdClient, KeptLease
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Version

log = logging.getLogger(__name__)

_RETRY_S = 1.0
"""Pause between two attempts to delete pins while etcd does not answer."""


@dataclass(frozen=True)
class Pin:
    """A version that is not released while this is held and its lease lives."""

    version: Version
    holder: str
    lease: KeptLease

    @property
    def alive(self) -> bool:
        return self.lease.alive


class NodePins:
    """Pins versions under one lease of the node. Thread-safe.

    Unpinning never blocks: a background thread deletes the keys, and tries again while etcd is away. Pins of a node
    that dies end with its lease.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, node_id: str, ttl_s: int) -> None:
        self._etcd, self._keys, self._node_id, self._ttl_s = etcd, keys, node_id, ttl_s
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._lease: KeptLease | None = None
        self._ids = itertools.count(1)
        self._ended: deque[Pin] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    def head(self, stream: str) -> int:
        """Number of the newest committed version. Raises VersionNotFound and EtcdUnavailable."""
        head = reads.head(self._etcd, self._keys, stream)
        if head is None:
            raise VersionNotFound(f"stream {stream} of job {self._keys.job} has no committed version")
        return head.number

    def pin(self, stream: str, number: int) -> Pin:
        """Raises VersionNotFound and EtcdUnavailable."""
        with self._lock:
            lease = self._alive_lease()
        holder = f"node-{self._node_id}.{next(self._ids)}"
        return Pin(pins.pin(self._etcd, self._keys, stream, number, holder, lease.id), holder, lease)

    def _alive_lease(self) -> KeptLease:
        if self._lease is None or not self._lease.alive:
            if self._lease is not None:
                self._lease.close()
            self._lease = self._etcd.keepalive(self._ttl_s)
        return self._lease

    def unpin(self, pin: Pin) -> None:
        """Ends a pin soon."""
        with self._lock:
            self._ended.append(pin)
            if self._thread is None:
                self._thread = threading.Thread(target=self._delete_ended, name="unpin", daemon=True)
                self._thread.start()
            self._work.notify()

    def _delete_ended(self) -> None:
        while True:
            with self._lock:
                self._work.wait_for(lambda: self._ended or self._closed)
                if self._closed:
                    return
                pin = self._ended[0]
            if pin.alive:  # otherwise its key is gone, or will be
                try:
                    pins.unpin(self._etcd, self._keys, pin.version.stream, pin.version.number, pin.holder)
                except EtcdUnavailable as e:
                    log.info("cannot unpin %s version %d yet: %s", pin.version.stream, pin.version.number, e)
                    time.sleep(_RETRY_S)
                    continue
            with self._lock:
                self._ended.popleft()

    def close(self) -> None:
        """Ends every pin."""
        with self._lock:
            self._closed = True
            self._work.notify()
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()
