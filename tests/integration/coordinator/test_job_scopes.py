"""Which scopes a replica has open, on real etcd, with scopes that do nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.waiting import wait_until

from elastic_rl.coordinator import job_view
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.election.leader_health import LeaderHealth
from elastic_rl.coordinator.jobs.job_scopes import JobScopes
from elastic_rl.coordinator.reconciler import loop_of
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
        self.election = Election(etcd, self.keys, "a", "http://a", 2, LeaderHealth(deadline_s=1e6))
        self.scopes = JobScopes(etcd, self.keys, self.election, self._prepare)  # type: ignore[arg-type]

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


def test_leader_writes_what_keeps_it_from_deciding_about_each_job(etcd: EtcdClient, keys: Keys) -> None:
    cluster = Cluster(etcd, keys)

    def health(job: str) -> tuple[str, str]:
        """Health and message of a job, as another replica shows them."""
        shown = job_view.read(etcd, Keys(job), "b")
        return shown.health, shown.message

    def failing() -> bool:
        """Another pass has failed, and is shown; the one before may have been that of no leader yet."""
        cluster.election.health.pass_failed(loop_of(good), "a bug")
        return health(good) == ("failing", "a: a bug")

    good, bad = f"{keys.job}-good", f"{keys.job}-bad"
    cluster.put(good, "1")
    cluster.put(bad, "defect")
    cluster.scopes.start()
    try:
        cluster.has(**{good: "1"})
        assert set(cluster.scopes.known()) == {good, bad} and health(bad) == ("ok", ""), "it does not lead"
        cluster.election.start()
        wait_until(lambda: health(bad) == ("not-open", "a: RuntimeError: can't start new thread"), what="the reason")
        wait_until(failing, what="the failed pass")
        written = etcd.get(Keys(good).leader_problem())
        etcd.delete(cluster.keys.job(bad))
        wait_until(lambda: health(bad) == ("ok", ""), what="the end of the job")
        assert etcd.get(Keys(good).leader_problem()) == written, "it is written once"
        cluster.election.health.pass_succeeded(loop_of(good))
        wait_until(lambda: etcd.get(Keys(good).leader_problem()) is None, what="the end of the problem")
        wait_until(failing, what="the failed pass")
        cluster.election.stop()
        wait_until(lambda: health(good) == ("ok", ""), what="the end of the key with the term")
    finally:
        cluster.election.stop()
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
