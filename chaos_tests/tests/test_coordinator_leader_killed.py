"""Leading coordinators are killed and stopped under a stream of writes through both replicas."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from evidence import announced, broken_rules, lost, observed, terms
from support.coordinators import AUTH, Replicas
from support.etcd_server import EtcdServers
from support.tiers import full
from support.waiting import wait_until

from chaos_tests.traffic.cluster_changes import ApiTarget
from chaos_tests.traffic.job_clients import PoolSizeClients
from chaos_tests.traffic.pool_changes import POOL
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import ROOT, ClusterKeys, Keys
from elastic_rl.etcd.records import PoolSpec


@pytest.fixture
def replicas(etcd_servers: EtcdServers, keys: Keys, tmp_path: Path) -> Iterator[Replicas]:
    made = Replicas(tmp_path, keys, etcd_servers.endpoints)
    try:
        yield made
    finally:
        made.close()


def frozen(process: subprocess.Popen[bytes]) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


@full(proved_in="tests/integration/coordinator/test_election.py tests/unit/coordinator/test_election_protocol.py",
      why="many kills and stops under a stream of writes")
def test_stale_leader_writes_are_refused_when_leaders_are_killed_and_frozen(
        etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, replicas: Replicas) -> None:
    since = etcd.put(keys.pool_spec("rollout"), PoolSpec(name="rollout", desired=2).encode())
    replicas.start("a", "b")
    target = ApiTarget(replicas.urls, keys.job, AUTH, None)
    clients = PoolSizeClients(target, 7, range(1, 61), writes=0.5, pause_s=0.02).start()
    try:
        clients.more(20)

        killed = replicas.leader()
        replicas.kill(killed)  # returns only when it has ended by SIGKILL
        second = replicas.leader(not_=killed)
        clients.more(20)
        url = replicas.urls[killed]
        replicas.running[killed] = replicas.spawn(killed, int(url.rpartition(":")[2]))
        wait_until(lambda: replicas.ready(killed), what="the killed replica's return")
        clients.more(10)

        # Stopped as the leader with writes in flight: it resumes as a stale leader and must not write.
        replicas.kill(second, signal.SIGSTOP)
        wait_until(lambda: frozen(replicas.running[second]), what="the freeze")
        with ThreadPoolExecutor(4) as late:
            patch = clients.calls.pool.patch
            pending = [late.submit(patch, replicas.job_url(second), n, client=f"late {n}", timeout_s=300.0)
                       for n in range(61, 65)]
            wait_until(lambda: etcd.get(ClusterKeys(keys.job).leader(second)) is None, what="its lease's end")
            clients.more(10)
            assert frozen(replicas.running[second])
            replicas.kill(second, signal.SIGCONT)
            late_writes = [p.result(timeout=300) for p in pending]
        wait_until(lambda: etcd.get(ClusterKeys(keys.job).leader(second)), what="its next candidacy")
        clients.more(10)
    finally:
        clients.close()
    changes, history = observed(etcd, keys, since, prefix=f"{ROOT}/"), clients.recorder.operations()
    assert broken_rules(changes, history) == []
    assert terms(changes, keys) == announced(changes, keys) == [killed, second, killed]
    assert lost(history, changes, keys, POOL) == [], "writes that were acknowledged are not in the store"
    assert {w.status for w in late_writes} <= {200, 0, 503, 504}
