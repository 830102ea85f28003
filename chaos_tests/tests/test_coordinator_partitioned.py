"""The leading coordinator loses its network to etcd, but not to its clients, and gets it back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from evidence import announced, broken_rules, lost, observed, terms
from support.coordinators import AUTH, Replicas
from support.etcd_server import EtcdServers
from support.hosts import TwoNetworks
from support.waiting import wait_until

from chaos_tests.event_log import Event
from chaos_tests.traffic.cluster_changes import ApiTarget
from chaos_tests.traffic.job_clients import PoolSizeClients
from chaos_tests.traffic.pool_changes import POOL
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import ROOT, ClusterKeys, Keys
from elastic_rl.etcd.records import PoolSpec
from elastic_rl.net import http_client


@pytest.fixture
def networks() -> Iterator[TwoNetworks]:
    with TwoNetworks() as made:
        yield made


@pytest.fixture
def far_etcd(tmp_path: Path, networks: TwoNetworks) -> Iterator[EtcdServers]:
    """Three members at an address that replicas reach over one of their two links."""
    servers = EtcdServers(tmp_path / "etcd", 3, host=networks.etcd_address)
    try:
        yield servers.start()
    finally:
        servers.close()


@pytest.fixture
def replicas(far_etcd: EtcdServers, networks: TwoNetworks, keys: Keys, tmp_path: Path) -> Iterator[Replicas]:
    # The two hosts are one machine, so the other replica can see that the one that is cut off exists.
    made = Replicas(tmp_path, keys, far_etcd.endpoints, {"coordinator": {"suspicion_s": 2.0}},
                    hosts={name: networks.host(name) for name in ("a", "b")})
    try:
        yield made
    finally:
        made.close()


def believes_to_lead(replicas: Replicas, name: str) -> bool:
    """By the replica's own metric."""
    text = http_client.request("GET", f"{replicas.urls[name]}/metrics", headers=AUTH, timeout=10.0).text
    found = re.search(r"^elastic_rl_is_leader (\S+)", text, re.MULTILINE)
    assert found, text[:500]
    return float(found[1]) == 1


def alert_phases(changes: Sequence[Event], keys: Keys, kind: str) -> list[tuple[str, str, Phase]]:
    """Each phase of each alert of a kind, once: (id, subject, phase)."""
    alerts = [Alert.decode(c["value"].encode()) for c in changes
              if c["put"] and c["key"].startswith(keys.alerts_prefix())]
    return list(dict.fromkeys((a.id, a.subject, a.phase) for a in alerts if a.kind == kind))


def test_partitioned_leader_steps_down_and_its_late_writes_are_refused(
        far_etcd: EtcdServers, networks: TwoNetworks, replicas: Replicas, keys: Keys) -> None:
    with far_etcd.connect() as etcd:
        since = etcd.put(keys.pool_spec("rollout"), PoolSpec(name="rollout", desired=2).encode())
        replicas.start("a", "b")
        target = ApiTarget(replicas.urls, keys.job, AUTH, None)
        clients = PoolSizeClients(target, 11, range(1, 61), writes=0.5, pause_s=0.02).start()
        try:
            clients.more(20)
            stale = replicas.leader()
            assert believes_to_lead(replicas, stale) and replicas.hosts[stale].reaches(far_etcd.endpoints[0])

            networks.cut_from_etcd(stale)  # under writes: what it has sent stays in its sockets and arrives later
            assert not replicas.hosts[stale].reaches(far_etcd.endpoints[0])
            wait_until(lambda: etcd.get(ClusterKeys(keys.job).leader(stale)) is None, what="its lease's end")
            clients.more(20)  # the other one leads
            assert not believes_to_lead(replicas, stale)
            refused = clients.calls.pool.patch(replicas.job_url(stale), 61, client="late", timeout_s=300.0)
            assert refused.status in (503, 504), refused  # in time, and typed
            assert http_client.request("GET", f"{replicas.urls[stale]}/readyz", timeout=300.0).status_code == 503
            wait_until(lambda: _open(etcd, keys, stale), what="the alert")
            assert not replicas.hosts[stale].reaches(far_etcd.endpoints[0])

            networks.heal(stale)
            wait_until(lambda: etcd.get(ClusterKeys(keys.job).leader(stale)), what="its next candidacy")
            wait_until(lambda: replicas.ready(stale), what="its readiness")
            assert not believes_to_lead(replicas, stale)
            wait_until(lambda: not _open(etcd, keys, stale), what="the alert's end")
            clients.more(20)
        finally:
            clients.close()
        changes, history = observed(etcd, keys, since, prefix=f"{ROOT}/"), clients.recorder.operations()
    assert broken_rules(changes, history) == []
    assert terms(changes, keys) == announced(changes, keys) and terms(changes, keys)[0] == stale
    assert len(terms(changes, keys)) == 2, "a partition of one replica is one change of leaders"
    assert lost(history, changes, keys, POOL) == [], "writes that were acknowledged are not in the store"
    (fired, resolved) = alert_phases(changes, keys, "coordinator.dead")
    assert (fired[1], fired[2]) == (stale, Phase.FIRING) and resolved == (fired[0], stale, Phase.RESOLVED)


def _open(etcd: EtcdClient, keys: Keys, replica: str) -> bool:
    alerts = [Alert.decode(kv.value) for kv in etcd.range(keys.alerts_prefix())[0]]
    return any(a.kind == "coordinator.dead" and a.subject == replica and a.open for a in alerts)
