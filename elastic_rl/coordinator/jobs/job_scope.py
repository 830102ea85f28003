"""What a replica does for one job: its members, the leader's loop, the checkpoint service's maintenance, the API."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Self

from elastic_rl.config import Config
from elastic_rl.coordinator.alerts.notifier import Notifier
from elastic_rl.coordinator.api.change_stream import ChangeStream
from elastic_rl.coordinator.api.context import JobContext, ReplicaContext
from elastic_rl.coordinator.dcs_sweep import DcsSweep
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.coordinator.reconciler import Reconciler
from elastic_rl.coordinator.records import COORDINATOR
from elastic_rl.coordinator.watch_trigger import WatchTrigger
from elastic_rl.dcs.catalog.maintenance import Maintenance
from elastic_rl.dcs.security import Security
from elastic_rl.errors import EtcdUnavailable, Fenced
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.witness import HostWitness


@dataclass(frozen=True)
class JobScope:
    """A replica's part in a job, from ``open`` to ``close``. What a leader decides is under its fencing token, so
    scopes of the same job on several replicas do no harm to one another."""

    context: JobContext
    reconciler: Reconciler
    _sweep: DcsSweep
    _closing: contextlib.ExitStack

    @classmethod
    def open(cls, cfg: Config, replica: ReplicaContext, etcd: EtcdClient, url: str, dcs_security: Security) -> Self:
        """Registers the replica among the job's members, and starts the loops. ``etcd``: the client of the loops;
        ``url``: where the replica's API is. Raises ConfigError and EtcdUnavailable, with nothing left behind."""
        keys, election, ttl_s = Keys(cfg.job), replica.election, cfg.coordinator.lease_ttl_s
        with contextlib.ExitStack() as opened:
            notifier = Notifier(cfg.job, cfg.alerts)
            opened.callback(notifier.close)
            opened.callback(Membership(etcd, keys, COORDINATOR, election.replica, ttl_s=ttl_s, url=url).start().close)
            opened.callback(HostWitness(etcd, keys, election.replica, ttl_s=ttl_s).start().close)
            maintenance = Maintenance(etcd, keys, cfg.dcs, dcs_security)
            opened.callback(maintenance.close)
            sweep = DcsSweep(maintenance.sweep, election, short=maintenance.short)
            opened.callback(sweep.close)
            reconciler = Reconciler(etcd, keys, cfg, election, notifier, sweep=sweep)
            trigger = WatchTrigger(etcd, keys, reconciler.wake, lambda: election.is_leader)
            opened.callback(reconciler.stop)
            sweep.start()
            reconciler.start()
            trigger.start()
            opened.callback(trigger.stop)
            context = JobContext(
                replica, cfg, keys, OperationService(replica.etcd, keys, election, cfg),
                ChangeStream(replica.etcd, keys, election.replica, replica.streams),
                [receiver.name for receiver in notifier.receivers])
            return cls(context, reconciler, sweep, opened.pop_all())

    def close(self, *, gone: bool = False) -> None:
        """Ends the loops and deregisters, which may take some seconds. A loop that is in a pass then ends after it.
        ``gone``: the job has no record any more, so that no replica decides about it."""
        self._closing.close()
        if gone:
            with contextlib.suppress(Fenced, EtcdUnavailable):
                self.context.replica.election.writer.write(Op.delete(self.context.keys.leader()))

    @property
    def ended(self) -> bool:
        """Whether both loops have made their last pass."""
        return self.reconciler.ended and self._sweep.ended
