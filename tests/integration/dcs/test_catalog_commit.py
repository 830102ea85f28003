"""Commits and the identity of the catalog, on a real etcd: many nodes, other catalogs, older ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from elastic_rl.dcs.catalog import leader_writes, reads, replica_sets
from elastic_rl.dcs.catalog.reads import read_identity
from elastic_rl.dcs.catalog.writer import PendingCommit, Staged, StreamWriter, commit_together
from elastic_rl.dcs.node.registration import Registration
from elastic_rl.dcs.registered_nodes import read_node
from elastic_rl.errors import CatalogMismatch, Conflict
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode, ReplicaSets, Version, VersionState

HOSTS = 1000


class Job:
    """A publisher of streams of one job, without nodes."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self.etcd, self.keys = etcd, keys
        self.epoch = fencing.raise_epoch(etcd, keys, "test").number
        self.lease = etcd.keepalive(60)

    def register(self, node_id: str, start: int = 1, **fields: object) -> str:
        """The incarnation of a node that is only a record, after so many starts."""
        record = _record(node_id, start, **fields)
        self.etcd.delete(self.keys.dcs_node(node_id))
        self.etcd.put(self.keys.dcs_node(node_id), record.encode())
        return record.incarnation

    def register_all(self, node_ids: Sequence[str]) -> dict[str, str]:
        """The incarnation of each of these nodes, none of which was registered before."""
        records = [_record(node_id, start=1) for node_id in node_ids]
        for some in (records[first:first + 100] for first in range(0, len(records), 100)):
            self.etcd.txn([], [Op.put(self.keys.dcs_node(record.id), record.encode()) for record in some])
        return {record.id: record.incarnation for record in records}

    def writer(self, stream: str = "policy") -> StreamWriter:
        return StreamWriter(self.etcd, self.keys, stream, epoch=self.epoch)

    def begin(self, writer: StreamWriter) -> Staged:
        return writer.begin(owner="test", lease=self.lease.id, meta={})

    def pending(self, writer: StreamWriter, *, acknowledged: dict[str, str] | None = None) -> PendingCommit:
        nodes = acknowledged or {}
        return PendingCommit(writer, self.begin(writer), "m", 1, ReplicaSets(parts=[[n] for n in nodes]), nodes)


def _record(node_id: str, start: int, **fields: object) -> DcsNode:
    return DcsNode(id=node_id, host="10.0.0.1", port=7000, pid=1, arena_path=f"/dev/shm/{node_id}-{start}",
                   arena_bytes=1 << 40, **fields)  # type: ignore[arg-type]


@pytest.fixture
def job(etcd: EtcdClient, keys: Keys) -> Iterator[Job]:
    out = Job(etcd, keys)
    yield out
    out.lease.close()


# -- many nodes --------------------------------------------------------------------------------------------------------
def test_version_of_a_thousand_hosts_is_committed(job: Job) -> None:
    """etcd takes 128 operations in a transaction."""
    hosts = job.register_all([f"host-{i:04d}" for i in range(HOSTS)])
    writers = [job.writer(stream) for stream in ("policy", "trainer_state")]
    parts = [[n, replica_sets.successors(n, hosts)[0]] for n in hosts]
    versions = commit_together([PendingCommit(w, job.begin(w), "m", 1, ReplicaSets(parts=parts), hosts)
                                for w in writers])
    assert [v.state for v in versions] == 2 * [VersionState.COMMITTED]
    assert reads.read_replica_sets(job.etcd, job.keys, "policy", 1).replica_sets.parts == parts
    record = job.etcd.get(job.keys.stream_head("policy"))
    assert record is not None and len(record.value) < 1024, "every engine watches this record"
    job.register("host-0500", start=2)
    with pytest.raises(Conflict, match="host-0500 was lost or restarted"):
        commit_together([job.pending(writers[0], acknowledged=hosts)])


@pytest.mark.parametrize("node", ["late", "a"])
def test_node_that_registers_during_a_commit_does_not_fail_it(
        job: Job, monkeypatch: pytest.MonkeyPatch, node: str) -> None:
    """Be it another node, or the same process again, whose lease had ended: the guard is on all registrations, and so
    the commit is tried again."""
    nodes = {"a": job.register("a")}
    writer = job.writer()
    pending = job.pending(writer, acknowledged=nodes)
    txn, tries = job.etcd.txn, []

    def txn_after_another_registers(*args, **options):  # type: ignore[no-untyped-def]
        if not tries:
            tries.append(txn([], [], []).revision)
            job.register(node)
        return txn(*args, **options)

    monkeypatch.setattr(job.etcd, "txn", txn_after_another_registers)
    assert commit_together([pending])[0].number == 1 and tries


def test_node_that_restarts_during_a_commit_fails_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"a": job.register("a")}
    pending = job.pending(job.writer(), acknowledged=nodes)
    txn, restarted = job.etcd.txn, []

    def txn_after_restart(*args, **options):  # type: ignore[no-untyped-def]
        if not restarted:
            restarted.append(True)
            job.register("a", start=2)
        return txn(*args, **options)

    monkeypatch.setattr(job.etcd, "txn", txn_after_restart)
    with pytest.raises(Conflict, match="a was lost or restarted"):
        commit_together([pending])
    assert reads.head(job.etcd, job.keys, "policy") is None


# -- the catalog's identity --------------------------------------------------------------------------------------------
def test_first_publish_creates_the_catalog_and_commits_are_counted(job: Job) -> None:
    assert read_identity(job.etcd, job.keys) == (None, 0)
    policy, state = job.writer(), job.writer("trainer_state")
    commit_together([job.pending(policy), job.pending(state)])
    identity, _ = read_identity(job.etcd, job.keys)
    assert identity is not None and identity.commits == 1
    commit_together([job.pending(job.writer("critic"))])
    commit_together([job.pending(policy)])  # which has not seen that other commit
    again, _ = read_identity(job.etcd, job.keys)
    assert again == identity.replace(commits=3)


def test_empty_etcd_under_nodes_with_versions_takes_no_publish(job: Job) -> None:
    job.register("a", catalog="lost", commits=7)
    with pytest.raises(CatalogMismatch, match="node a holds versions of catalog lost") as caught:
        job.begin(job.writer())
    assert "elastic-rl versions recover" in str(caught.value)
    assert read_identity(job.etcd, job.keys) == (None, 0)


def test_node_of_another_catalog_fails_the_commit(job: Job) -> None:
    writer = job.writer()
    staged = job.begin(writer)
    nodes = {"a": job.register("a", catalog="other", commits=7)}
    with pytest.raises(CatalogMismatch, match="node a holds versions of catalog other"):
        commit_together([PendingCommit(writer, staged, "m", 1, ReplicaSets(parts=[["a"]]), nodes)])
    assert reads.head(job.etcd, job.keys, "policy") is None


def test_node_that_has_seen_more_commits_fails_the_commit(job: Job) -> None:
    """Etcd was restored from an old backup: the number of the version may have been used."""
    writer = job.writer()
    commit_together([job.pending(writer)])
    identity, _ = read_identity(job.etcd, job.keys)
    assert identity is not None
    current = {"a": job.register("a", catalog=identity.id, commits=1)}
    commit_together([job.pending(writer, acknowledged=current)])
    job.register("elsewhere", catalog=identity.id, commits=20)
    with pytest.raises(CatalogMismatch, match="after 2 commits, and DCS node elsewhere has seen 20") as caught:
        commit_together([job.pending(writer, acknowledged=current)])
    assert "elastic-rl versions recover" in str(caught.value)
    head = reads.head(job.etcd, job.keys, "policy")
    assert head is not None and head.number == 2


@pytest.mark.parametrize("behind", [0, 3])
def test_node_that_noted_other_commits_meanwhile_does_not_fail_the_commit(job: Job, behind: int) -> None:
    """A publisher that has not seen the commits of other streams is no older catalog."""
    late, other = job.writer(), job.writer("critic")
    pending = job.pending(late)
    for _ in range(1 + behind):
        commit_together([job.pending(other)])
    identity, _ = read_identity(job.etcd, job.keys)
    assert identity is not None
    nodes = {"a": job.register("a", catalog=identity.id, commits=identity.commits)}
    [version] = commit_together([PendingCommit(late, pending.staged, "m", 1, ReplicaSets(parts=[["a"]]), nodes)])
    assert version.number == 1


def test_running_publisher_notices_that_etcd_lost_its_catalog(job: Job) -> None:
    writer = job.writer()
    commit_together([job.pending(writer)])
    job.etcd.delete_prefix(f"{job.keys.root}dcs/")
    with pytest.raises(CatalogMismatch, match="etcd has no catalog"):
        job.begin(writer)
    commit_together([job.pending(job.writer())])  # by another process, which knows of no other catalog
    with pytest.raises(CatalogMismatch, match="after 1 commits; this publisher wrote to catalog"):
        job.begin(writer)


def test_running_publisher_notices_that_etcd_went_back(job: Job) -> None:
    writer = job.writer()
    commit_together([job.pending(writer)])
    backup = job.etcd.range(f"{job.keys.root}dcs/")[0]
    commit_together([job.pending(writer)])
    job.etcd.delete_prefix(f"{job.keys.root}dcs/")
    for kv in backup:
        job.etcd.put(kv.key, kv.value)
    with pytest.raises(CatalogMismatch, match="after 1 commits; this publisher wrote to catalog .* after 2"):
        job.begin(writer)


def test_suspended_catalog_takes_neither_publish_nor_commit(job: Job) -> None:
    writer = job.writer()
    pending = job.pending(writer)
    identity, revision = read_identity(job.etcd, job.keys)
    assert identity is not None
    assert leader_writes.suspend(job.etcd, job.keys, identity, revision, "it is older than node a", [])
    with pytest.raises(CatalogMismatch, match="suspended: it is older than node a"):
        commit_together([pending])
    for fresh in (writer, job.writer()):
        with pytest.raises(CatalogMismatch, match="suspended"):
            job.begin(fresh)


# -- what the leader writes --------------------------------------------------------------------------------------------
def test_versions_with_large_records_are_released_in_transactions_that_etcd_takes(job: Job) -> None:
    for number in range(1, 61):  # 2.4 MB together
        job.etcd.put(job.keys.version("policy", number), Version(
            stream="policy", number=number, state=VersionState.COMMITTED, epoch=1, meta={"cursor": "x" * 40_000}
        ).encode())
    parts = [*leader_writes.releases(reads.read_catalog(job.etcd, job.keys).streams["policy"])]
    assert all(leader_writes.release(job.etcd, job.keys, part, []) for part in parts) and len(parts) == 3
    assert {e.version.state for e in reads.read_catalog(job.etcd, job.keys).streams["policy"]} == {VersionState.GONE}


# -- a node's own record -----------------------------------------------------------------------------------------------
def test_node_replaces_a_record_under_its_id_that_cannot_be_read(etcd: EtcdClient, keys: Keys) -> None:
    record = DcsNode(id="a", host="10.0.0.1", port=7000, pid=1, arena_path="/dev/shm/none", arena_bytes=1)
    etcd.put(keys.dcs_node("a"), b'{"id": "a"}')
    registration = Registration(etcd, keys, record, 5)
    registration.check_free()
    registration.put()
    try:
        found = read_node(etcd, keys, "a")
        assert found is not None and found.node == record
        etcd.delete(keys.dcs_node("a"))
        etcd.put(keys.dcs_node("a"), b'{"id": "a"}')  # by another process
        with pytest.raises(Conflict, match="another process has registered as DCS node a"):
            registration.beat(chunks=1)
    finally:
        registration.remove()
