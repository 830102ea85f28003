"""Leading coordinators are killed and stopped under a stream of writes through both replicas."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.coordinators import AUTH, Replicas
from support.etcd_server import EtcdServers
from support.tiers import full
from support.waiting import wait_until

from chaos_tests.observation import Change, observe
from chaos_tests.traffic.pool_changes import PoolClients, lost
from chaos_tests.validate.leadership import check
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
    clients = PoolClients([replicas.job_url(name) for name in replicas.urls], 7, AUTH)
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
            pending = [late.submit(clients.patch, replicas.job_url(second), n, client=f"late {n}", timeout_s=300.0)
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
    last = f"{keys.root}zz-end"
    etcd.put(last, b"end")

    history = observe(etcd_servers.endpoints[0], f"{ROOT}/", since, last)
    verdict = check(history, keys)
    assert verdict.faults == []
    assert [name for _, name in verdict.terms] == verdict.announced and len(verdict.announced) == 3, verdict.terms
    assert verdict.announced[1] == second and verdict.announced[2] == killed
    assert lost([*clients.done, *late_writes], verdict) == [], "writes that were acknowledged are not in the store"
    assert clients.violations(verdict.desired) == [], "no order of reads and writes explains the answers"
    refused = {w.status for w in (*clients.done, *late_writes)} - {200}
    assert refused <= {0, 503, 504}, refused


KEYS = Keys("j")


def _put(revision: int, key: str, value: object, create: int = 0) -> Change:
    return Change(revision, True, key, create or revision, json.dumps(value))


def _scaled(revision: int, replica: str) -> list[Change]:
    event = {"kind": "pool.scaled", "subject": "rollout", "data": {"replica": replica}}
    return [_put(revision, KEYS.pool_spec("rollout"), {"desired": revision}, create=1),
            _put(revision, KEYS.event(f"e{revision}"), event)]


def test_checker_accepts_a_handover_and_finds_a_stale_writer() -> None:
    cluster = ClusterKeys(KEYS.job)
    history = [_put(2, cluster.leader("a"), {}), _put(3, cluster.leader("b"), {}), *_scaled(4, "a"),
               Change(5, False, cluster.leader("a"), 0, ""), *_scaled(6, "b")]
    assert check(history, KEYS).faults == []
    assert [n for _, n in check(history, KEYS).terms] == ["a", "b"]
    assert "written by a while b led" in check([*history, *_scaled(7, "a")], KEYS).faults[0]
    unguarded = [*history, _put(7, KEYS.pool_spec("rollout"), {"desired": 9}, create=1)]
    found, = check(unguarded, KEYS).faults
    assert found.startswith("revision 7: ") and found.endswith("the pool changed without its event")
