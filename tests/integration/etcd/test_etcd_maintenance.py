"""etcd's database stays small under a coordinator, and has room again after it was full; on real etcd servers."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.coordinators import Replicas
from support.etcd_server import EtcdServers
from support.tiers import full
from support.waiting import wait_until

from elastic_rl.config import Config
from elastic_rl.coordinator import etcd_maintenance
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.etcd_maintenance import NO_SPACE, EtcdMaintenance
from elastic_rl.errors import Compacted, EtcdFull
from elastic_rl.etcd import deduplication, member_metrics
from elastic_rl.etcd.access import Access
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.host import preflight

QUOTA = 4 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[EtcdServers]:
    """One member with a quota of 4 MiB, which compacts nothing by itself."""
    servers = EtcdServers(tmp_path / "etcd", 1, flags=["--quota-backend-bytes", str(QUOTA)])
    try:
        yield servers.start()
    finally:
        servers.close()


def _overwrite(etcd: EtcdClient, keys: Keys) -> None:
    """Writes a few keys again and again until etcd is full of their history."""
    with pytest.raises(EtcdFull):
        for n in itertools.count():
            etcd.put(f"{keys.root}fill/{n % 20}", bytes(20_000))


def _free(etcd: EtcdClient, keys: Keys) -> None:
    """Compacts, and returns when every member reports the space as free, which it does at a later write."""
    etcd.compact(etcd.revision(), wait_s=30)

    def freed() -> bool:
        etcd.put(keys.root + "written", b"")
        return max(m.db_in_use_bytes for m in etcd.statuses()) < QUOTA / 4

    wait_until(freed, what="the freed space")


def _alarms(etcd: EtcdClient) -> set[str]:
    return {alarm for member in etcd.statuses() for alarm in member.alarms}


def _compacted(etcd: EtcdClient, revision: int) -> bool:
    try:
        etcd.page("/elastic_rl/_none", limit=1, revision=revision)
    except Compacted:
        return True
    return False


def _maintenance(servers: EtcdServers, etcd: EtcdClient, *, leads: bool, **settings: object) -> EtcdMaintenance:
    return EtcdMaintenance(etcd, servers.config(**settings), is_leader=lambda: leads)


# -- history -----------------------------------------------------------------------------------------------------------
def test_leader_compacts_exactly_what_is_older_than_the_history(etcd_servers: EtcdServers,
                                                                            etcd: EtcdClient, keys: Keys) -> None:
    now = [0.0]
    leads = [False]
    maintenance = EtcdMaintenance(etcd, etcd_servers.config(history_s=300.0), is_leader=lambda: leads[0],
                                  clock=lambda: now[0])
    old = etcd.put(keys.root + "n", b"old")
    with etcd.watch(keys.root, start_revision=old + 1) as watch:
        maintenance.tick()
        now[0] = 301.0
        young = etcd.put(keys.root + "n", b"young")
        maintenance.tick()
        assert not _compacted(etcd, old), "a follower compacted"
        leads[0] = True
        maintenance.tick()
        assert _compacted(etcd, old - 1) and not _compacted(etcd, young)
        event = watch.get(30)  # a watch that keeps up notices nothing
        assert event is not None and event.kv.mod_revision == young

        etcd.compact(young)  # the leader of another job, with a shorter history
        now[0] = 602.0
        last = etcd.put(keys.root + "n", b"last")
        maintenance.tick()
        assert not _compacted(etcd, last)


def test_coordinator_compacts_an_external_etcd(
        etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, keys, etcd_servers.endpoints, {"etcd": {"history_s": 1.0}})
    try:
        replicas.start("a", "b")
        revision = etcd.put(keys.root + "n", b"")
        wait_until(lambda: _compacted(etcd, revision - 1), what="the compaction")
        assert etcd.get(keys.root + "n") is not None and replicas.leader()
    finally:
        replicas.close()


# -- a full database ---------------------------------------------------------------------------------------------------
def test_full_etcd_recovers_and_its_leader_keeps_the_term(small: EtcdServers, keys: Keys) -> None:
    with small.connect() as etcd:
        election = Election(etcd, ClusterKeys(keys.job), "a", "", 3).start()
        try:
            wait_until(lambda: election.is_leader, what="the leader")
            token = election.guard
            _overwrite(etcd, keys)
            assert _alarms(etcd) == {NO_SPACE}
            assert etcd.statuses()[0].quota_bytes == QUOTA, "by the member's metrics page"
            maintenance = EtcdMaintenance(etcd, small.config(), is_leader=lambda: election.is_leader)
            maintenance.tick()
            assert _alarms(etcd) == set()
            etcd.put(keys.root + "written", b"")
            assert election.guard == token and etcd.txn(token, [Op.put(keys.root + "led", b"")]).succeeded
            (member,) = etcd.statuses()
            assert member.db_bytes < QUOTA / 2 and etcd.count(keys.root + "fill/") == 20
        finally:
            election.stop()


@full(proved_in="tests/unit/coordinator/test_etcd_maintenance_plan.py",
      why="each further state of a real etcd that is full")
def test_full_etcd_recovers_without_any_leader(small: EtcdServers, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full etcd grants no lease, so nobody can become leader."""
    monkeypatch.setattr(etcd_maintenance, "_FOLLOWER_DELAY_S", 0.2)
    with small.connect(retry_budget_s=1.0) as etcd, ExitStack() as cleanup:
        _overwrite(etcd, keys)
        with pytest.raises(EtcdFull):
            etcd.grant(5)
        elections = [Election(etcd, ClusterKeys(keys.job), name, "", 3).start() for name in ("a", "b")]
        for election in elections:
            cleanup.callback(election.stop)
            maintenance = EtcdMaintenance(etcd, small.config(history_s=1.0), is_leader=lambda e=election: e.is_leader)
            cleanup.callback(maintenance.start().close)
        wait_until(lambda: any(e.is_leader for e in elections), what="a leader")
        assert _alarms(etcd) == set()


@full(proved_in="tests/unit/coordinator/test_etcd_maintenance_plan.py",
      why="each further state of a real etcd that is full")
def test_etcd_full_of_live_data_recovers_after_keys_are_deleted(small: EtcdServers, keys: Keys) -> None:
    with small.connect() as etcd:
        with pytest.raises(EtcdFull):
            for n in itertools.count():
                etcd.put(f"{keys.root}fill/{n}", bytes(20_000))
        now = [0.0]
        maintenance = EtcdMaintenance(etcd, small.config(), is_leader=lambda: True, clock=lambda: now[0])
        maintenance.tick()
        assert _alarms(etcd) == {NO_SPACE}
        etcd.delete_prefix(keys.root + "fill/")
        maintenance.tick()
        assert _alarms(etcd) == {NO_SPACE}, "it was tried again without a pause"
        now[0] += 2 * etcd_maintenance._RETRY_S[0]
        maintenance.tick()
        assert _alarms(etcd) == set()
        etcd.put(keys.root + "written", b"")


@full(proved_in="tests/unit/coordinator/test_etcd_maintenance_plan.py",
      why="each further state of a real etcd that is full")
def test_maintenance_leaves_a_full_etcd_alone_when_disabled(small: EtcdServers, keys: Keys) -> None:
    with small.connect() as etcd:
        _overwrite(etcd, keys)
        _maintenance(small, etcd, leads=True, reclaim_space=False).tick()
        assert _alarms(etcd) == {NO_SPACE}


@full(proved_in="tests/unit/coordinator/test_etcd_maintenance_plan.py",
      why="each further state of a real etcd that is full")
def test_mostly_free_file_near_its_quota_is_defragmented_before_the_alarm(small: EtcdServers, keys: Keys) -> None:
    with small.connect() as etcd:
        for n in itertools.count():
            if etcd.statuses()[0].db_bytes >= 0.85 * QUOTA:
                break
            if n > 0.6 * QUOTA / 20_000:  # the size grows when etcd writes to its disk, some writes later
                time.sleep(0.15)
            etcd.put(keys.root + "n", bytes(20_000))
        _free(etcd, keys)
        maintenance = _maintenance(small, etcd, leads=True)
        assert etcd.statuses()[0].db_bytes >= 0.85 * QUOTA and _alarms(etcd) == set()
        maintenance.tick()
        assert etcd.statuses()[0].db_bytes < QUOTA / 2


def test_members_are_defragmented_under_writes(tmp_path: Path, keys: Keys) -> None:
    servers = EtcdServers(tmp_path / "etcd", 3, flags=["--quota-backend-bytes", str(QUOTA)])
    try:
        with servers.start().connect(call_timeout_s=0.5) as etcd:
            while min(sizes := [m.db_bytes for m in etcd.statuses()]) < 0.85 * QUOTA:
                if max(sizes) < 0.9 * QUOTA:  # one that is behind catches up without any further write
                    etcd.put(keys.root + "n", bytes(20_000))
            _free(etcd, keys)
            done, written = threading.Event(), itertools.count()

            def write() -> None:
                while not done.is_set():
                    etcd.put(keys.root + "n", str(next(written)).encode())

            writer = threading.Thread(target=write)
            writer.start()
            try:
                _maintenance(servers, etcd, leads=True).tick()
            finally:
                done.set()
                writer.join(20)
            assert not writer.is_alive()
            found = etcd.get(keys.root + "n")
            assert found is not None and int(found.value) == next(written) - 1
            assert max(m.db_bytes for m in etcd.statuses()) < QUOTA / 2 and _alarms(etcd) == set()
    finally:
        servers.close()


def test_client_deletes_from_a_full_etcd_after_its_token_lease_is_due(small: EtcdServers, keys: Keys,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Deletes need a lease for their write tokens, and a full etcd grants none."""
    with small.connect(retry_budget_s=2.0) as etcd:
        _overwrite(etcd, keys)
        monkeypatch.setattr(deduplication, "_MAX_AGE_S", -1.0)  # as after 200 s
        for n in range(20):
            assert etcd.delete(f"{keys.root}fill/{n}")
        assert _alarms(etcd) == {NO_SPACE} and etcd.count(keys.root + "fill/") == 0


def test_doctor_warns_of_a_nearly_full_file_and_of_uncompacted_history(small: EtcdServers, keys: Keys) -> None:
    def member() -> preflight.Finding:
        return next(f for f in preflight.examine(Config(etcd=small.config())) if f.check.startswith("etcd 127"))

    with small.connect() as etcd:
        assert member().verdict is preflight.Verdict.OK and " of 4 MiB" in member().found
        # Small values at the end: the size is known only after the next commit of the file, ten times a second.
        for _ in range(int(0.7 * QUOTA / 20_000)):
            etcd.put(keys.root + "n", bytes(20_000))
        while etcd.statuses()[0].db_bytes < 0.95 * QUOTA:
            for _ in range(10):
                etcd.put(keys.root + "n", bytes(1_000))
        near = member()
        assert near.verdict is preflight.Verdict.WARNING and "near its quota" in near.found
        assert "etcdctl defrag" in str(near.row())
        found = member_metrics.read(small.endpoints[0], Access(), timeout_s=5.0)
        assert found is not None and found.compacted_revision == 0 < found.current_revision
        assert preflight.etcd_history(found, 300.0).verdict is preflight.Verdict.OK, "it is young"
        old = dataclasses.replace(found, current_revision=10_000_000)
        for history_s, fix in ((300.0, "only while one runs"), (0.0, "etcd.history_s")):
            finding = preflight.etcd_history(old, history_s)
            assert finding.verdict is preflight.Verdict.WARNING and fix in str(finding.row())
        etcd.compact(found.current_revision)
        found = member_metrics.read(small.endpoints[0], Access(), timeout_s=5.0)
        assert found is not None and found.compacted_revision > 0
        assert preflight.etcd_history(dataclasses.replace(found, current_revision=10_000_000), 300.0).verdict \
            is preflight.Verdict.OK
        assert preflight.etcd_history(None, 300.0).verdict is preflight.Verdict.OK
