"""The deciding part of a coordinator replica, in the test's own process."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_rl.config import Config
from elastic_rl.coordinator.alerts.notifier import Notifier
from elastic_rl.coordinator.dcs_sweep import DcsSweep, Short, Sweep
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.election.leader_health import LeaderHealth
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.coordinator.reconciler import Reconciler, loop_of
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import Operation
from support.waiting import wait_until


class Leader:
    """``await_leadership``: False for a replica that starts while another one leads. ``sweep``: the maintenance that it
    runs every tenth of a second. ``short``: what that knows of versions with too few copies. ``skew_s``: by how much
    its wall clock is ahead."""

    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: Config, name: str, *, await_leadership: bool = True,
                 sweep: Sweep | None = None, short: Short = lambda guard: ([], True), skew_s: float = 0.0,
                 monotonic: Callable[[], float] = time.monotonic) -> None:
        self.etcd, self.keys = etcd, keys
        self.notifier = Notifier(keys.job, cfg.alerts)
        self.health = LeaderHealth(cfg.coordinator.reconcile_deadline_s)
        self.election = Election(etcd, ClusterKeys(keys.job), name, f"http://{name}",
                                 cfg.coordinator.lease_ttl_s, self.health).start()
        self.operations = OperationService(etcd, keys, self.election, cfg, clock=lambda: time.time() + skew_s)
        self.sweep = DcsSweep(sweep, self.election, short=short, every_s=0.1) if sweep else None
        self.reconciler = Reconciler(etcd, keys, cfg, self.election, self.notifier, sweep=self.sweep,
                                     clock=lambda: time.time() + skew_s, monotonic=monotonic)
        self.health.expect(loop_of(keys.job))
        if await_leadership:
            self.await_leadership()
        self.reconciler.start()
        if self.sweep:
            self.sweep.start()

    def await_leadership(self, timeout_s: float = 20.0) -> None:
        wait_until(lambda: self.election.is_leader, timeout_s=timeout_s, what=f"leadership of {self.election.replica}")

    def operation(self, operation_id: str) -> Operation:
        found = self.etcd.get(self.keys.operation(operation_id))
        assert found is not None, operation_id
        return Operation.decode(found.value)

    def close(self) -> None:
        if self.sweep:
            self.sweep.close()
        self.reconciler.stop()
        self.election.stop()
        self.notifier.close()
