"""The pins that a node holds for the readers of its host."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_rl.dcs.catalog import pins, reads
from elastic_rl.errors import EtcdUnavailable, VersionNotFound
from elastic_rl.etcd.client import EtcdClient, KeptLease
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Version

log = logging.getLogger(__name__)

_DELETE_AFTER_S = 2.0
"""Pins that have ended are deleted so long after the first of them, unless the next pin takes them along, as in a run
of short steps: that saves a transaction a step. Also the pause between two attempts while etcd does not answer."""


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

    Unpinning never blocks: the next pin deletes the keys in its transaction, or a background thread does a little
    later, which tries again while etcd is away. Pins of a node that dies end with its lease.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, node_id: str, ttl_s: int) -> None:
        self._etcd, self._keys, self._node_id, self._ttl_s = etcd, keys, node_id, ttl_s
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._lease: KeptLease | None = None
        self._ids = itertools.count(1)
        self._ended: dict[str, Pin] = {}
        """Pins that are to be deleted, by their keys."""
        self._delete_at = 0.0
        """Monotonic time from which on the thread deletes them."""
        self._stopping = threading.Event()
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
            lease, ended = self._alive_lease(), self._take_ended()
        holder = f"node-{self._node_id}.{next(self._ids)}"
        try:
            return Pin(pins.pin(self._etcd, self._keys, stream, number, holder, lease.id, ended), holder, lease)
        except BaseException:
            with self._lock:
                self._end(ended, after_s=0.0)  # they have waited, and whoever is refused may ask again and again
            raise

    def _alive_lease(self) -> KeptLease:
        if self._lease is None or not self._lease.alive:
            if self._lease is not None:
                self._lease.close()
            self._lease = self._etcd.keepalive(self._ttl_s)
        return self._lease

    def unpin(self, pin: Pin) -> None:
        """Ends a pin soon."""
        with self._lock:
            self._end({self._keys.pin(pin.version.stream, pin.version.number, pin.holder): pin})

    def _end(self, ended: Mapping[str, Pin], after_s: float = _DELETE_AFTER_S) -> None:
        """Has these deleted, by the thread at the latest. Under the lock."""
        at = time.monotonic() + after_s
        self._delete_at = min(self._delete_at, at) if self._ended else at
        self._ended.update(ended)
        if self._ended and self._thread is None:
            self._thread = threading.Thread(target=self._delete_ended, name="unpin", daemon=True)
            self._thread.start()
        self._work.notify()

    def _take_ended(self) -> dict[str, Pin]:
        """Takes what one transaction can delete of the ended pins; those of a lease that is over are gone, or will be.
        Under the lock."""
        taken = dict(itertools.islice(self._ended.items(), pins.MAX_ENDED))
        for key in taken:
            del self._ended[key]
        return {key: pin for key, pin in taken.items() if pin.alive}

    def _delete_ended(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                self._work.wait_for(lambda: self._ended or self._stopping.is_set())
                while self._ended and (left_s := self._delete_at - time.monotonic()) > 0 and not (
                        self._stopping.is_set()):
                    self._work.wait(left_s)
                ended = self._take_ended()
            try:
                if ended and not self._stopping.is_set():
                    pins.end(self._etcd, ended)
            except EtcdUnavailable as e:
                log.info("cannot unpin %d versions yet: %s", len(ended), e)
                with self._lock:
                    self._end(ended)

    def close(self) -> None:
        """Ends every pin."""
        self._stopping.set()
        with self._lock:
            self._work.notify()
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()
