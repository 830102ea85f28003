"""Coordinators of a cluster with several jobs: each is taken up when its record appears, by every replica."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api_cluster import ApiCluster, problem
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.errors import ConfigError
from elastic_rl.etcd import event_kinds, events, job_settings
from elastic_rl.etcd.cluster_records import JobRecord
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.net.cluster_secret import ClusterSecret


class JobsOfCluster(ApiCluster):
    """A cluster whose first job is that of ``keys``."""

    def submit(self, job: str, *, secret: ClusterSecret | None = None, **settings: Any) -> Keys:
        cfg = config.parse({"job": job, "run_dir": str(self.replicas.folder), **settings})
        job_settings.submit(self.etcd, self.cluster_keys, cfg, secret or ClusterSecret.read(self.replicas.secret))
        return Keys(job)

    @property
    def cluster_keys(self) -> ClusterKeys:
        return ClusterKeys(self.keys.job)

    def get(self, name: str, path: str) -> Any:
        with self.client(name) as api:
            return api.get(path)

    def leader_of(self, keys: Keys, name: str = "a") -> str:
        answer = self.get(name, f"/v1/jobs/{keys.job}")
        return str((answer.json()["leader"] or {}).get("replica", "")) if answer.status_code == 200 else ""

    def members(self, keys: Keys) -> set[str]:
        found, _ = self.etcd.range(keys.members_prefix("coordinator"))
        return {kv.key.rpartition("/")[2] for kv in found}


@pytest.fixture
def cluster(etcd_servers: EtcdServers, tmp_path: Path) -> Iterator[JobsOfCluster]:
    made = JobsOfCluster(etcd_servers, tmp_path)
    try:
        yield made
    finally:
        made.close()


def other_job() -> str:
    return f"t-{secrets.token_hex(6)}"


def test_job_is_taken_up_with_its_record_and_left_with_it(cluster: JobsOfCluster) -> None:
    cluster.start("a")
    keys = cluster.submit(other_job())
    assert wait_until(lambda: cluster.leader_of(keys), what="a leader of the new job") == "a"
    listed = [job["name"] for job in cluster.get("a", "/v1/jobs").json()["items"]]
    assert listed == sorted([keys.job, cluster.keys.job])
    assert cluster.members(keys) == cluster.members(cluster.keys) == {"a"}

    cluster.etcd.delete(cluster.cluster_keys.job(keys.job))
    wait_until(lambda: cluster.get("a", f"/v1/jobs/{keys.job}").status_code == 404, what="the end of the job")
    wait_until(lambda: not cluster.members(keys), what="the replica's deregistration")
    wait_until(lambda: cluster.etcd.get(keys.leader()) is None, what="the end of the leader's key")
    assert cluster.leader_of(cluster.keys) == "a" and cluster.members(cluster.keys) == {"a"}


def test_changed_settings_of_a_job_hold_without_a_restart(cluster: JobsOfCluster) -> None:
    cluster.start("a")
    job = other_job()

    def receivers() -> list[str]:
        with cluster.client("a") as api:
            answer = api.post(f"/v1/jobs/{job}/alerts/test", params={"dry_run": True}, json={})
            return [r["receiver"] for r in answer.json()["receivers"]] if answer.status_code < 400 else ["none yet"]

    keys = cluster.submit(job)
    wait_until(lambda: cluster.leader_of(keys) == "a" and receivers() == [], what="the job and its leader")
    cluster.submit(job, alerts={"urls": ["json://127.0.0.1:1/hook"]})
    wait_until(lambda: len(receivers()) == 1 and receivers() != ["none yet"], what="the new receiver")
    assert cluster.leader_of(keys) == "a"
    elected = [e.subject for e in events.recent(cluster.etcd, keys) if e.kind == event_kinds.LEADER_ELECTED.name]
    assert elected == ["a"], "a change of settings is no election"


def test_same_settings_leave_the_record_as_it_is(cluster: JobsOfCluster) -> None:
    job, key = other_job(), cluster.cluster_keys.job
    cluster.submit(job, alerts={"urls": ["json://127.0.0.1:1/hook"]})
    before = cluster.etcd.get(key(job))
    assert before is not None and b"127.0.0.1:1" not in before.value
    cluster.submit(job, alerts={"urls": ["json://127.0.0.1:1/hook"]})
    assert cluster.etcd.get(key(job)) == before
    cluster.submit(job, seed=7)
    assert cluster.etcd.get(key(job)) != before


def test_job_with_settings_that_cannot_be_opened_harms_no_other(cluster: JobsOfCluster) -> None:
    keys = cluster.submit(other_job(), secret=ClusterSecret.generate())
    cluster.start("a")
    refused = wait_until(lambda: (answer := cluster.get("a", f"/v1/jobs/{keys.job}")).status_code == 503 and answer,
                         what="the job that is not open")
    assert "were not sealed with this cluster's secret" in problem(refused, 503, "job-not-open")["detail"]
    wait_until(lambda: cluster.leader_of(cluster.keys) == "a", what="the leader of the other job")

    def listed(name: str) -> dict[str, tuple[str, bool]]:
        return {job["name"]: (job["health"], "were not sealed" in job["message"])
                for job in cluster.get(name, "/v1/jobs").json()["items"]}

    def failing(name: str) -> dict[str, str]:
        text = cluster.get(name, "/metrics").text
        return dict(re.findall(r'^elastic_rl_job_reconcile_failing{job_name="(.*)"} (.)', text, re.M))

    assert listed("a") == {cluster.keys.job: ("ok", False), keys.job: ("not-open", True)}
    assert failing("a") == {cluster.keys.job: "0", keys.job: "1"}
    assert cluster.get("a", "/readyz").status_code == 200
    cluster.submit(keys.job)
    wait_until(lambda: cluster.leader_of(keys) == "a", what="the job that was submitted again")
    wait_until(lambda: listed("a")[keys.job] == ("ok", False), what="the end of the problem")
    assert failing("a")[keys.job] == "0"


def test_record_that_cannot_be_read_ends_no_job(cluster: JobsOfCluster) -> None:
    cluster.start("a")
    keys = cluster.submit(other_job())
    wait_until(lambda: cluster.leader_of(keys), what="a leader of the job")
    cluster.etcd.put(cluster.cluster_keys.job(keys.job), b"{")
    later = cluster.submit(other_job())
    wait_until(lambda: cluster.leader_of(later), what="a job whose record came after the damaged one")
    assert cluster.leader_of(keys) == "a" and cluster.members(keys) == {"a"}


def test_settings_that_cannot_be_used_leave_those_before_in_force(cluster: JobsOfCluster) -> None:
    cluster.start("a")
    keys, other = cluster.submit(other_job()), ClusterSecret.generate()
    wait_until(lambda: cluster.leader_of(keys), what="a leader of the job")
    members = cluster.etcd.range(keys.members_prefix("coordinator"))[0]
    not_a_mapping = job_settings._fernet(ClusterSecret.read(cluster.replicas.secret), keys.job).encrypt(b"[1]").decode()
    for settings, why in ((job_settings.sealed(config.parse({"job": keys.job}), other), "were not sealed"),
                          (not_a_mapping, "are no mapping")):
        cluster.etcd.put(cluster.cluster_keys.job(keys.job), JobRecord(settings=settings).encode())
        wait_until(lambda w=why: w in cluster.replicas.log("a").read_text(), what="the reason")
        assert cluster.leader_of(keys) == "a"
    after = cluster.etcd.range(keys.members_prefix("coordinator"))[0]
    assert [kv.create_revision for kv in after] == [kv.create_revision for kv in members], "its scope was never closed"
    cluster.submit(keys.job, alerts={"urls": ["json://127.0.0.1:1/hook"]})
    wait_until(lambda: [kv.create_revision for kv in cluster.etcd.range(keys.members_prefix("coordinator"))[0]] not in (
        [], [kv.create_revision for kv in members]), what="the scope with the next settings")


def test_submission_keeps_the_rest_of_a_record_and_refuses_one_that_is_not_its_own(cluster: JobsOfCluster) -> None:
    job, key, mine = other_job(), cluster.cluster_keys.job, ClusterSecret.read(cluster.replicas.secret)
    cfg = config.parse({"job": job})
    cluster.etcd.put(key(job), JobRecord(settings=job_settings.sealed(cfg, mine), priority=3, stopped=True).encode())
    cluster.submit(job, seed=5)
    record = JobRecord.decode(cluster.etcd.get(key(job)).value)
    assert (record.priority, record.stopped) == (3, True)
    assert job_settings.opened(record.settings, job, mine, cfg).seed == 5
    other = ClusterSecret.generate()
    with pytest.raises(job_settings.OtherSecret):
        job_settings.submit(cluster.etcd, cluster.cluster_keys, cfg, other, reseal=False)
    before = cluster.etcd.get(key(job))
    job_settings.submit(cluster.etcd, cluster.cluster_keys, cfg, mine, resubmit=False)
    assert cluster.etcd.get(key(job)) == before
    job_settings.submit(cluster.etcd, cluster.cluster_keys, cfg, other, resubmit=False)
    record = JobRecord.decode(cluster.etcd.get(key(job)).value)
    assert job_settings.opened(record.settings, job, other, cfg).seed == 0, "what nobody can open is sealed again"
    cluster.etcd.put(key(job), b"{")
    with pytest.raises(ConfigError, match="cannot be read"):
        cluster.submit(job)
    assert cluster.etcd.get(key(job)).value == b"{"


def test_key_of_the_leader_ends_with_the_last_replica(cluster: JobsOfCluster) -> None:
    cluster.start("a")
    assert cluster.etcd.get(cluster.keys.leader()) is not None
    cluster.replicas.kill("a")
    wait_until(lambda: cluster.etcd.get(cluster.keys.leader()) is None, what="the end of the leader's key")


def test_next_leader_takes_over_every_job(cluster: JobsOfCluster) -> None:
    cluster.start("a", "b")
    keys = [cluster.keys, cluster.submit(other_job())]
    first = cluster.replicas.leader()
    second = "b" if first == "a" else "a"
    for each in keys:
        wait_until(lambda k=each: cluster.leader_of(k, second) == first, what=f"the leader of {each.job}")
        wait_until(lambda k=each: cluster.members(k) == {"a", "b"}, what=f"the replicas of {each.job}")
    cluster.replicas.kill(first)
    for each in keys:
        wait_until(lambda k=each: cluster.leader_of(k, second) == second, what=f"the next leader of {each.job}")
        elected = [e.subject for e in events.recent(cluster.etcd, each) if e.kind == event_kinds.LEADER_ELECTED.name]
        assert sorted(elected) == ["a", "b"], "each term is announced once to each job"
