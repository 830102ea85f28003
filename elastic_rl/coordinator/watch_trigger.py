"""Triggers a reconcile pass of the leader when a key changes that it decides by, ahead of the next interval."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd.client import EtcdClient, WatchEvent
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, JobStatus

log = logging.getLogger(__name__)

_POLL_S = 0.5
_PAUSE_S = 1.0


class WatchTrigger:
    """A thread that watches the job's keys while this replica leads: others have nothing to decide, and thousands of
    members write all the time. It only saves time: what it misses, the next pass finds."""

    def __init__(self, etcd: EtcdClient, keys: Keys, wake: Callable[[], None], leads: Callable[[], bool]) -> None:
        self._etcd, self._keys, self._wake, self._leads = etcd, keys, wake, leads
        self._prefixes = (keys.members_prefix(), keys.dcs_nodes_prefix(), keys.events_prefix(), keys.pools_prefix(),
                          keys.autoscaling_prefix(), keys.operations_prefix(), keys.restarts_prefix())
        self._states: dict[str, str] = {}
        """The state in which an engine, or the job, was last seen, by key."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-trigger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(_POLL_S + _PAUSE_S)

    def matters(self, change: WatchEvent) -> bool:
        """Whether a change triggers a pass. Of members only those that come and go do: heartbeats are too frequent. Of
        engines and the job only another state does: each step changes their records several times, while what it needs
        the CPUs for most is the engines' new weights."""
        key = change.kv.key
        if key == self._keys.leader():
            return True
        if key == self._keys.job_status() or key.startswith(self._keys.engines_prefix()):
            before, now = self._states.pop(key, ""), self._state(change)
            if now:
                self._states[key] = now
            return not now or now != before
        if not key.startswith(self._prefixes):
            return False
        heartbeat = change.type == "put" and change.kv.version > 1
        return not (heartbeat and key.startswith(self._keys.members_prefix()))

    def _state(self, change: WatchEvent) -> str:
        """The state of an engine, or the phase of the job; "" where it is deleted, or cannot be read."""
        if change.type == "delete":
            return ""
        if change.kv.key == self._keys.job_status():
            status = readable_one(change.kv, JobStatus)
            return status.phase if status is not None else ""
        engine = readable_one(change.kv, Engine)
        return engine.state if engine is not None else ""

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._leads():
                self._stopping.wait(_POLL_S)
                continue
            try:
                revision = self._etcd.page(self._keys.job_status(), limit=1).revision
                self._states.clear()
                watch = self._etcd.watch(self._keys.root, start_revision=revision + 1)
                try:
                    while not self._stopping.is_set() and self._leads():
                        change = watch.get(_POLL_S)
                        if change is not None and self.matters(change):
                            self._wake()
                finally:
                    watch.close()
            except ElasticRLError as e:
                log.debug("watch ended: %s", e)
                self._wake()
                self._stopping.wait(_PAUSE_S)
