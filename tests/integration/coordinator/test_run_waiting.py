"""A run that does not go on: what the leader says of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api_cluster import ApiCluster, items, running
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import JobStatus


@pytest.fixture
def cluster(etcd_servers: EtcdServers, tmp_path: Path) -> Iterator[ApiCluster]:
    with running(etcd_servers, tmp_path, "a", alerts={"run_waiting_s": 1.0}) as made:
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
