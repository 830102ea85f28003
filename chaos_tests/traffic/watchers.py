"""Watches of etcd with the product's client: each change that one delivers is a record of the event log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chaos_tests.event_log import EventLog, Kind
from chaos_tests.traffic.traffic import Traffic
from elastic_rl.errors import Compacted, EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.runtime.waiting import wait_until

_LAST_S = 60.0
"""Longest time for the last changes to come."""


class Watcher(Traffic):
    """Watches a range until it is closed. Where changes were compacted before it got them, it reads the range again, as
    every reader of the product's watches does."""

    def __init__(self, etcd: EtcdClient, prefix: str, *, log: EventLog, name: str = "watcher") -> None:
        super().__init__()
        self._etcd, self._prefix, self._log, self._name = etcd, prefix, log, name
        self._revision = 0

    def workers(self) -> Sequence[Callable[[], None]]:
        return [self._work]

    def await_revision(self, revision: int) -> None:
        """Returns once it has delivered the change of this revision, which is one below its prefix. Raises
        DeadlineExceeded where it does not: changes before it are lost."""
        wait_until(lambda: self._errors or self._revision >= revision, timeout_s=_LAST_S,
                   what=f"the change of revision {revision} on a watch of {self._prefix}, which is at {self._revision}")
        self._raise()

    def _work(self) -> None:
        while not self.stopping:
            try:
                _, revision = self._etcd.range(self._prefix)
            except EtcdUnavailable:
                self.pause(1.0)
                continue
            self._log.write(Kind.WATCH, client=self._name, prefix=self._prefix, revision=revision, listed=True)
            self._revision = max(self._revision, revision)
            try:
                self._follow(revision)
            except Compacted:
                continue

    def _follow(self, revision: int) -> None:
        with self._etcd.watch(self._prefix, start_revision=revision + 1) as watch:
            while not self.stopping and not watch.closed:
                if (event := watch.get(0.2)) is not None:
                    self._log.write(Kind.WATCH, client=self._name, prefix=self._prefix, put=event.type == "put",
                                    revision=event.kv.mod_revision, key=event.kv.key)
                    self._revision = event.kv.mod_revision
                    self.count()
