"""Health of etcd. A thread of its own asks each member now and then, since one that is stopped answers late."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd.client import EtcdClient, MemberStatus
from elastic_rl.etcd.keys import Keys

log = logging.getLogger(__name__)

_EVERY_S = 5.0
_MAX_AGE_S = 60.0


@dataclass(frozen=True)
class EtcdHealth:
    """The last report. ``read_s``: seconds that a linearizable read took."""

    members: Sequence[MemberStatus] = ()
    read_s: float = 0.0


class EtcdProbe:
    """Keeps the last report about etcd."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys
        self._lock = threading.Lock()
        self._health, self._at = EtcdHealth(), 0.0
        self._stopping, self._wanted = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="etcd-probe", daemon=True)
        self._thread.start()

    def health(self) -> EtcdHealth:
        """The last report, an empty one when it is too old; requests a newer one. Never blocks."""
        with self._lock:
            age = time.monotonic() - self._at if self._at else _MAX_AGE_S
            if age >= _EVERY_S:
                self._wanted.set()
            return self._health if age < _MAX_AGE_S else EtcdHealth()

    def close(self) -> None:
        self._stopping.set()
        self._wanted.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        while self._wanted.wait() and not self._stopping.is_set():
            self._wanted.clear()
            try:
                started = time.monotonic()
                self._etcd.get(self._keys.epoch())
                read_s = time.monotonic() - started
                members = self._etcd.statuses()
            except ElasticRLError as e:
                log.debug("no report about etcd: %s", e)
                continue
            with self._lock:
                self._health, self._at = EtcdHealth(members, read_s), time.monotonic()
            self._stopping.wait(_EVERY_S / 2)
