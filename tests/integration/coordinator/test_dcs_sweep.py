"""The leader's maintenance of the checkpoint service while nodes are stopped."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.dcs_cluster import DcsCluster
from support.dcs_nodes import Nodes
from support.etcd_server import EtcdServers
from support.leader import Leader
from support.waiting import wait_until

from elastic_rl.config import parse
from elastic_rl.coordinator.alerts.state_machine import Alert
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.maintenance import Maintenance
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.security import Security
from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState, OperationState, PoolSpec, PoolStatus

IO_TIMEOUT_S = 40.0
"""What a stopped node costs a sweep: longer than all that the leader has to do meanwhile."""


def test_leader_decides_while_a_sweep_waits_for_stopped_nodes(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys,
                                                              tmp_path: Path) -> None:
    cfg = parse({"job": "x", "coordinator": {"lease_ttl_s": 5, "reconcile_interval_s": 0.1}})
    nodes = Nodes(etcd_servers=etcd_servers, etcd=etcd, keys=keys, folder=tmp_path)
    collector = GarbageCollector(etcd, keys, RetentionPolicy(2), io_timeout_s=IO_TIMEOUT_S)
    waiting = threading.Event()

    def sweep(guard: Sequence[Compare]) -> list[str]:
        waiting.set()
        try:
            return collector.sweep(guard)
        finally:
            waiting.clear()

    leader = None
    try:
        for node in ("n0", "n1", "n2"):
            nodes.start_node(node)
        for process in nodes.processes.values():
            process.send_signal(signal.SIGSTOP)
        etcd.put(keys.pool_spec("rollout"), PoolSpec(name="rollout", desired=1).encode())
        etcd.put(keys.pool_status("rollout"), PoolStatus(name="rollout", ready=0, starting=0, draining=0).encode())
        leader = Leader(etcd, keys, cfg, "a", sweep=sweep)
        assert waiting.wait(30)
        op = leader.operations.scale("rollout", 2, by="ann")
        for name in ("e0", "e1"):
            etcd.put(keys.engine(name), Engine(id=name, pool="rollout", state=EngineState.READY, epoch=1).encode())
        wait_until(lambda: leader.operation(op.id).state is OperationState.SUCCEEDED, timeout_s=IO_TIMEOUT_S / 2,
                   what="the end of the operation")
        assert waiting.is_set(), "the sweep is still waiting for the nodes"
    finally:
        nodes.close()
        if leader is not None:
            leader.close()
        collector.close()


def test_failing_sweeps_give_an_alert(etcd: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that this release cannot read must stop the collection of its chunks."""
    monkeypatch.setattr("elastic_rl.coordinator.alerts.conditions._SWEEP_HOLD_S", 0.5)
    cfg = parse({"job": "x", "coordinator": {"lease_ttl_s": 5, "reconcile_interval_s": 0.1}})
    collector = GarbageCollector(etcd, keys, RetentionPolicy(2))
    etcd.put(keys.version("policy", 1), b'{"stream":"policy","number":1,"state":"mirrored","epoch":1}')
    leader = Leader(etcd, keys, cfg, "a", sweep=collector.sweep)
    try:
        def alert() -> Alert | None:
            found = (Alert.decode(kv.value) for kv in etcd.range(keys.alerts_prefix() + "dcs.maintenance_failing")[0])
            return next((a for a in found if a.phase == "firing"), None)

        assert "cannot be decoded" in wait_until(alert, what="the alert").message
        etcd.delete(keys.version("policy", 1))
        wait_until(lambda: alert() is None, what="the end of the alert")
    finally:
        leader.close()
        collector.close()


def test_too_few_copies_are_one_alert_over_a_change_of_leaders_until_they_are_made(
        etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    cfg = parse({"job": "x", "coordinator": {"lease_ttl_s": 5, "reconcile_interval_s": 0.1},
                 "alerts": {"under_replicated_s": 0.5}, "dcs": {"replicas": 2, "keep_versions": 4}})
    with DcsCluster.open(etcd_servers, etcd, keys, tmp_path) as dcs, contextlib.ExitStack() as closing:
        def leader(name: str) -> Leader:
            maintenance = Maintenance(etcd, keys, cfg.dcs, Security())
            closing.callback(maintenance.close)
            return Leader(etcd, keys, cfg, name, sweep=maintenance.sweep, short=maintenance.short)

        def alerts(phase: str) -> list[Alert]:
            found = (Alert.decode(kv.value) for kv in etcd.range(keys.alerts_prefix() + "dcs.under_replicated")[0])
            return [a for a in found if a.phase == phase]

        dcs.start("a", "b")
        dcs.publish(1, 2, replicas=2)
        with contextlib.closing(leader("r0")):
            dcs.kill("b")
            wait_until(lambda: alerts("firing"), what="the alert")
            [alert] = alerts("firing")
            assert "policy/2, policy/1 have 1 of 2 copies" in alert.message
        with contextlib.closing(leader("r1")) as second:
            wait_until(lambda: second.sweep is not None and second.sweep.under_replication.versions,
                       what="the next leader's word")
            assert [a.id for a in alerts("firing")] == [alert.id], "it is the same alert"
            dcs.start("c")
            wait_until(lambda: not alerts("firing"), what="the end of the alert")
            assert dcs.parts(1) == dcs.parts(2) == [["a", "c"]]
