"""A run that does not go on: what the leader says of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api_cluster import ApiCluster, items, running
from support.etcd_server import EtcdServers
from support.leader import Leader
from support.waiting import wait_until

from elastic_rl.config import parse
from elastic_rl.coordinator.alerts.conditions import conditions
from elastic_rl.coordinator.snapshot import SnapshotReader
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import JobPhase, JobRecord, RunStatus
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import Engine, EngineState, GenerationCap, JobStatus, Member
from elastic_rl.pipeline.records.run_log import JobStatusWriter


@pytest.fixture
def cluster(etcd_servers: EtcdServers, tmp_path: Path) -> Iterator[ApiCluster]:
    with running(etcd_servers, tmp_path, "a", alerts={"run_waiting_s": 1.0, "engines_idle_s": 1.0}) as made:
        yield made


def alerts(api: httpx.Client) -> dict[str, str]:
    """Phase of each alert about a run that waits."""
    return {a["subject"]: a["phase"] for a in items(api, "alerts") if a["kind"] == "run.waiting"}


def until(check: Callable[[], Any], what: str) -> None:
    wait_until(check, what=what)


def test_waiting_run_and_run_without_an_actor_are_alerts(cluster: ApiCluster) -> None:
    key = cluster.keys.job_status()
    works = JobStatus(phase="rl", step=3, steps=9, stage="train", updated_at=time.time())
    waits = works.replace(stage="generate", waiting_kind="engines", waiting_for="an engine at version 4",
                          waiting_since=time.time() - 60)
    with cluster.client("a") as api:
        actor = Membership(cluster.etcd, cluster.keys, "actor", "actor-1", ttl_s=5).start()
        try:
            cluster.etcd.put(key, waits.encode())
            until(lambda: alerts(api).get("engines") == "firing", "the alert")
            job = api.get("").json()["status"]
            assert (job["stage"], job["waiting_for"], job["waiting_kind"], job["waiting_since"]) == (
                "generate", "an engine at version 4", "engines", waits.waiting_since)
            metrics = api.get("/metrics").text
            assert f'elastic_rl_run_waiting{{job_name="{cluster.keys.job}",kind="engines"}} 1.0' in metrics
            cluster.etcd.put(key, works.encode())
            until(lambda: alerts(api) == {}, "the end of the alert")
        finally:
            actor.close()  # on purpose, which is no death
        until(lambda: alerts(api).get("actor") == "firing", "the alert about a run that nobody runs")
        cluster.etcd.put(key, works.replace(phase="finished").encode())
        until(lambda: alerts(api) == {}, "the end of the alert")


def test_engines_that_idle_while_a_limit_binds_are_an_alert_and_shown(cluster: ApiCluster) -> None:
    epoch = fencing.raise_epoch(cluster.etcd, cluster.keys, "test").number
    term = fencing.begin_term(cluster.etcd, cluster.keys, epoch, "actor-1")
    status = JobStatusWriter(cluster.etcd, cluster.keys, FencedWriter.of_term(
        cluster.etcd, cluster.keys, epoch, term), steps=9, seed=0)
    cluster.etcd.put(cluster.keys.engine("e0"), Engine(
        id="e0", pool="rollout", state=EngineState.READY, epoch=epoch, version=3, running=1, slots=8, load_known=True
        ).encode())

    def kinds(api: httpx.Client) -> dict[str, str]:
        return {a["kind"]: a["phase"] for a in items(api, "alerts")}

    with cluster.client("a") as api, contextlib.ExitStack() as members:
        for role, name in (("actor", "actor-1"), ("engine", "e0")):
            member = members.enter_context(contextlib.closing(
                Membership(cluster.etcd, cluster.keys, role, name, ttl_s=5, epoch=epoch).start()))
            member.progress(1, "generate")
        status.write("rl", step=3)
        status.generation_cap(GenerationCap.STALENESS)
        until(lambda: kinds(api).get("pool.idle") == "firing", "the alert")
        assert api.get("").json()["status"]["generation_cap"] == "train.max_staleness"
        assert 'cap="train.max_staleness"' in api.get("/metrics").text
        status.generation_cap(GenerationCap.NONE)
        until(lambda: "pool.idle" not in kinds(api), "the end of the alert")


def test_end_of_a_run_that_its_operator_has_stopped_is_no_fault(etcd: EtcdClient, keys: Keys) -> None:
    cfg = parse({"job": keys.job, "coordinator": {"lease_ttl_s": 2, "reconcile_interval_s": 0.1}})
    job, run = ClusterKeys(cfg.cluster_name).job(keys.job), ClusterKeys(cfg.cluster_name).run_status(keys.job)
    etcd.put(keys.job_status(), JobStatus(phase="rl", step=3).encode())
    reader = SnapshotReader(etcd, keys, cfg)
    for record, phase, submission, stopped in (
            (JobRecord(), None, 0, False), (JobRecord(submission=1), JobPhase.RUNNING, 1, False),
            (JobRecord(submission=1, stopped=True), JobPhase.RUNNING, 1, True),
            (JobRecord(submission=1, stopped=True), JobPhase.STOPPED, 1, True),
            (JobRecord(submission=2), JobPhase.STOPPED, 1, False),  # it is to begin again
            (JobRecord(submission=2), JobPhase.RUNNING, 2, False), (JobRecord(submission=2), JobPhase.FAILED, 2, False),
            (JobRecord(submission=2), JobPhase.FINISHED, 2, True)):
        etcd.put(job, record.encode())
        if phase is not None:
            etcd.put(run, RunStatus(submission=submission, phase=phase).encode())
        found = reader.read()
        assert found.stopped is stopped
        assert any(key.startswith("run.waiting") for key in conditions(found, time.time())) is not stopped
    lease = etcd.keepalive(20)
    etcd.put(keys.member("actor", "a"), Member(role="actor", id="a", pid=1, host="h", incarnation="i").encode(),
             lease=lease.id)
    leader = Leader(etcd, keys, cfg, "a")
    try:
        until(lambda: etcd.get(keys.registry_entry("actor", "a")), "the sighting")
        etcd.put(job, JobRecord(submission=2, stopped=True).encode())
        lease.close()  # as kill -9 of an actor that did not end in time
        until(lambda: etcd.get(keys.registry_entry("actor", "a")) is None, "the actor to be forgotten")
        assert not [e for e in events.recent(etcd, keys) if e.kind.startswith("actor.")]
    finally:
        leader.close()
