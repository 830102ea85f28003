"""Which scopes a replica has open, on real etcd, with scopes that do nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.waiting import wait_until

from elastic_rl.coordinator.election.leader_health import LeaderHealth
from elastic_rl.coordinator.jobs.job_scopes import JobScopes
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import JobRecord
from elastic_rl.etcd.keys import ClusterKeys, Keys


@dataclass
class Scope:
    """A scope that only says what was done with it."""

    settings: str
    context: str = field(init=False)
    closed: bool = False
    ended: bool = True

    def __post_init__(self) -> None:
        self.context = self.settings

    def close(self, *, gone: bool = False) -> None:
        self.closed = True


class Cluster:
    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self.etcd, self.keys = etcd, ClusterKeys(keys.job)
        self.opened: list[Scope] = []
        self.health = LeaderHealth()
        self.scopes = JobScopes(etcd, self.keys, self.health, self._prepare)  # type: ignore[arg-type]

    def _prepare(self, job: str, record: JobRecord) -> Any:
        if record.settings == "defect":
            raise RuntimeError("can't start new thread")

        def open_scope() -> Scope:
            self.opened.append(Scope(record.settings))
            return self.opened[-1]

        return open_scope

    def put(self, job: str, settings: str) -> None:
        self.etcd.put(self.keys.job(job), JobRecord(settings=settings).encode())

    def has(self, **jobs: str) -> None:
        wait_until(lambda: dict(self.scopes) == jobs, what=f"the scopes {jobs}")


def test_defect_with_one_job_leaves_the_others_and_is_tried_again(etcd: EtcdClient, keys: Keys) -> None:
    cluster = Cluster(etcd, keys)
    cluster.put("bad", "defect")
    cluster.scopes.start()
    try:
        assert "can't start new thread" in cluster.scopes.waits_for("bad")
        cluster.put("good", "1")
        cluster.has(good="1")
        cluster.put("bad", "mended")
        cluster.has(good="1", bad="mended")
        assert cluster.scopes.waits_for("bad") == ""
    finally:
        cluster.scopes.close()
    assert all(scope.closed for scope in cluster.opened)


def test_scope_is_not_opened_beside_a_last_pass_with_the_settings_before(etcd: EtcdClient, keys: Keys) -> None:
    cluster = Cluster(etcd, keys)
    cluster.put("j", "old")
    cluster.scopes.start()
    try:
        (old,) = cluster.opened
        old.ended = False
        cluster.put("j", "new")
        wait_until(lambda: "has not ended" in cluster.scopes.waits_for("j"), what="the last pass")
        assert old.closed and cluster.opened == [old] and dict(cluster.scopes) == {"j": "old"}, "the API still answers"
        old.ended = True
        cluster.has(j="new")
    finally:
        cluster.scopes.close()


def test_job_that_was_deleted_does_not_come_back_with_a_damaged_record(etcd: EtcdClient, keys: Keys) -> None:
    cluster = Cluster(etcd, keys)
    cluster.put("j", "1")
    cluster.scopes.start()
    try:
        cluster.has(j="1")
        etcd.delete(cluster.keys.job("j"))
        cluster.has()
        etcd.put(cluster.keys.job("j"), b"{")
        cluster.put("later", "2")
        cluster.has(later="2")
    finally:
        cluster.scopes.close()
