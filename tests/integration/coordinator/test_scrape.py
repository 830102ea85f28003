"""Scrapes of real replicas: every metric of the rules and the dashboard, and the same from each replica."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.coordinators import AUTH, LEASE_TTL_S, Replicas
from support.etcd_server import EtcdServers
from support.monitoring import expressions, metrics_of, promtool
from support.waiting import wait_until

from elastic_rl.etcd import event_kinds, events, fencing
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import LEASE_HEARTBEATS, Membership
from elastic_rl.etcd.records import (
    DcsNode,
    Engine,
    EngineState,
    JobStatus,
    PoolSpec,
    PoolStatus,
    StepMetrics,
    Version,
    VersionState,
)
from elastic_rl.net import http_client

OF_A_REPLICA = ("api_", "reconcile_", "is_leader", "scrape_etcd", "alert_deliveries", "etcd_up")
DOCS = Path(__file__).resolve().parents[3] / "docs" / "operating" / "metrics.md"
AGES = ("_age_seconds", "_left_seconds", "_effective_time_ratio")
Scraped = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def replicas(etcd_servers: EtcdServers, keys: Keys, tmp_path: Path) -> Iterator[Replicas]:
    made = Replicas(tmp_path, keys, etcd_servers.endpoints)
    try:
        yield made
    finally:
        made.close()


def text_of(replicas: Replicas, name: str) -> str:
    return http_client.request("GET", f"{replicas.urls[name]}/metrics", headers=AUTH, timeout=15).text


def scrape(replicas: Replicas, name: str) -> Scraped:
    """Samples by their names and labels, without the label of the only job."""
    job = ("job_name", replicas.keys.job)
    return {(s.name.removeprefix("elastic_rl_"), tuple(label for label in s.labels.items() if label != job)): s.value
            for family in text_string_to_metric_families(text_of(replicas, name)) for s in family.samples}


def exported(text: str) -> set[str]:
    """Names that an expression may use, of series that may have no sample yet, too."""
    names: set[str] = set()
    for family in text_string_to_metric_families(text):
        more = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + ending for ending in more}
    return names


def a_job(etcd: EtcdClient, keys: Keys) -> None:
    """A run in its third step: an engine, a node, a version, a fault that was recovered."""
    now = time.time()
    fencing.raise_epoch(etcd, keys, "test")
    version = Version(stream="policy", number=4, state=VersionState.COMMITTED, epoch=1, nbytes=64, committed_at=now)
    engine = Engine(id="e1", pool="rollout", state=EngineState.READY, epoch=1, version=3, pull_apply_s=0.5, pause_s=0.1)
    for key, record in {
        keys.pool_spec("rollout"): PoolSpec(name="rollout", desired=2),
        keys.pool_status("rollout"): PoolStatus(name="rollout", ready=1, starting=1, draining=0),
        keys.engine("e1"): engine, keys.stream_head("policy"): version, keys.version("policy", 4): version,
        keys.job_status(): JobStatus(phase="rl", step=3, steps=9, started_at=now - 100, productive_s=50.0, reward=0.5),
        keys.step_metrics(3): StepMetrics(step=3, at=now, reward=0.5, seconds={"total": 1.0, "train": 0.5},
                                         update={"kl": 0.01}, throughput={"mfu": 0.4}),
        keys.dcs_node("n0"): DcsNode(id="n0", host="h", port=1, pid=1, arena_path="", arena_bytes=100, used_bytes=60,
                                     disk_bytes=1000, disk_used_bytes=10),
    }.items():
        etcd.put(key, record.encode())
    fallen = events.build(event_kinds.ENGINE_DEAD, "e0", "", detect_s=0.2)
    recovered = events.build(event_kinds.ENGINE_READY, "e1", "", start_s=0.0)
    etcd.txn([], [Op.put(keys.event(fallen.id), fallen.encode())])
    etcd.txn([], [Op.put(keys.event(recovered.id + "z"), recovered.encode())])


def test_every_metric_of_the_rules_and_the_dashboard_is_exported(
        replicas: Replicas, etcd: EtcdClient, keys: Keys) -> None:
    a_job(etcd, keys)
    replicas.start("a")
    with Membership(etcd, keys, "rollout", "r1", ttl_s=5).start() as member:
        member.progress(1, "generate", in_flight=7)
        wait_until(lambda: scrape(replicas, "a").get(("rollout_groups_in_flight", ())) == 7,
                   what="the member's queue")
        text = text_of(replicas, "a")
        there = exported(text)
        missing = {where: gone for where, expr in expressions().items() if (gone := metrics_of(expr) - there)}
        assert missing == {}
        ours = {re.sub("_(bucket|sum|count)$", "", name) for name in there if name.startswith("elastic_rl_")}
        assert metrics_of(DOCS.read_text()) == ours, f"the table in {DOCS} is not complete, or has too many"
        checked = promtool("check", "metrics", stdin=text)
        assert checked.returncode == 0, checked.stdout + checked.stderr

        found = scrape(replicas, "a")
        assert found["engine_version_lag", (("engine", "e1"),)] == 1
        assert found["dcs_arena_used_bytes", (("node", "n0"),)] == 60
        assert 0 <= found["member_heartbeat_age_seconds", (("role", "rollout"),)] < 60
        assert 0 <= found["member_lease_left_seconds", (("role", "rollout"),)] <= 5 * LEASE_HEARTBEATS
        assert 0 <= found["leader_lease_left_seconds", ()] <= LEASE_TTL_S
        assert found["etcd_member_up", (("endpoint", replicas.etcd_servers[0]),)] == 1
        assert found["etcd_db_bytes", (("endpoint", replicas.etcd_servers[0]),)] > 0
        assert 0.2 < found["job_effective_time_ratio", ()] <= 0.5


def test_every_replica_shows_the_same_job_and_counters_survive_the_leader(
        replicas: Replicas, etcd: EtcdClient, keys: Keys) -> None:
    a_job(etcd, keys)
    replicas.start("a", "b")

    def counted() -> bool:
        return scrape(replicas, "a").get(("faults_total", (("part", "engine"),))) == 1

    wait_until(counted, what="the leader's count of the events")

    def of_the_job(name: str) -> Scraped:
        return {key: value for key, value in scrape(replicas, name).items()
                if not key[0].startswith((*OF_A_REPLICA, "python_", "process_")) and not key[0].endswith(AGES)}

    wait_until(lambda: of_the_job("a") == of_the_job("b"), what="two replicas with the same metrics")
    shown = of_the_job("a")
    assert shown["leader_elections_total", ()] == 1
    assert shown["fault_recovery_seconds_count", (("part", "engine"),)] == 1
    assert shown["fault_detection_seconds_sum", (("part", "engine"),)] == 0.2

    old = replicas.leader()
    other = "b" if old == "a" else "a"
    replicas.kill(old)
    assert replicas.leader(not_=old) == other
    died = ("faults_total", (("part", "coordinator"),))
    wait_until(lambda: scrape(replicas, other).get(died) == 1, what="the count of the replica's death")
    after = scrape(replicas, other)
    assert after["leader_elections_total", ()] == 2 and after["faults_open", (("part", "coordinator"),)] == 1
    for key, value in shown.items():
        if key[0].endswith(("_total", "_count", "_sum", "_bucket")):
            assert after[key] >= value, f"{key} went back"
