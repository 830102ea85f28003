"""Members: listed with their progress while they live, and gone soon after they die."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support import forked
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership, members
from elastic_rl.etcd.records import Evidence, Member, ProcessFinding, StatedWork
from elastic_rl.etcd.transaction import Op

TTL_S = 3


@pytest.fixture
def worker(etcd_servers: EtcdServers, keys: Keys, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is the member trainer/rank-0 and counts steps."""
    process = forked.spawn("support.member_process", ",".join(etcd_servers.endpoints), keys.job, "trainer", "rank-0",
                           str(TTL_S), log=tmp_path / "member.log")
    yield process
    process.kill()
    process.wait(60)


def _rank0(etcd: EtcdClient, keys: Keys) -> Member | None:
    return next(iter(members(etcd, keys, "trainer")), None)


def _wait_step(etcd: EtcdClient, keys: Keys, above: int) -> Member:
    def seen() -> Member | None:
        member = _rank0(etcd, keys)
        return member if member and member.step > above else None

    return wait_until(seen, what=f"a step above {above}")


def test_member_reports_progress_and_deregisters_on_close(etcd: EtcdClient, keys: Keys) -> None:
    etcd.put(keys.registry_entry("rollout", "engine-1"), b"{}")  # the leader's record of it
    member = Membership(etcd, keys, "rollout", "engine-1", ttl_s=TTL_S, url="http://e", epoch=4, info={"gpu": 0})
    member.start()
    (seen,) = members(etcd, keys, "rollout")
    assert (seen.role, seen.id, seen.url, seen.epoch, seen.info) == ("rollout", "engine-1", "http://e", 4, {"gpu": 0})
    assert seen.incarnation == member.incarnation and members(etcd, keys, "trainer") == []
    member.progress(7, "pulling", version=3)
    wait_until(lambda: members(etcd, keys)[0].step == 7, what="the step")
    moved = members(etcd, keys)[0]
    assert (moved.phase, moved.info) == ("pulling", {"gpu": 0, "version": 3})
    wait_until(lambda: members(etcd, keys)[0].beat_at > moved.beat_at, what="another heartbeat")
    assert members(etcd, keys)[0].progress_at == moved.progress_at  # a heartbeat is not progress
    member.progress(7, "pulling", work=StatedWork(flops=1e12, s_per_flop=1e-12))
    wait_until(lambda: members(etcd, keys)[0].work == StatedWork(flops=1e12, s_per_flop=1e-12), what="the stated work")
    member.progress(7, "pulling")
    wait_until(lambda: members(etcd, keys)[0].work is None, what="progress without any")
    member.close()
    assert members(etcd, keys) == [] and etcd.get(keys.registry_entry("rollout", "engine-1")) is None


def test_member_registers_again_after_losing_its_lease(etcd: EtcdClient, keys: Keys) -> None:
    with Membership(etcd, keys, "dcs", "node-1", ttl_s=TTL_S) as member:
        member.start()
        first = etcd.get(keys.member("dcs", "node-1"))
        assert first is not None
        etcd.revoke(first.lease)
        assert etcd.get(keys.member("dcs", "node-1")) is None
        wait_until(lambda: etcd.get(keys.member("dcs", "node-1")), what="the second registration")
        again = etcd.get(keys.member("dcs", "node-1"))
        assert again is not None and again.lease != first.lease
        assert Member.decode(again.value).incarnation == member.incarnation


def test_member_whose_entry_a_witness_has_ended_registers_again_without_the_evidence(etcd: EtcdClient, keys: Keys
                                                                                    ) -> None:
    with Membership(etcd, keys, "actor", "a", ttl_s=TTL_S).start() as member:
        assert etcd.count(f"{keys.root}processes/") == 1
        evidence = Evidence(role="actor", id="a", incarnation=member.incarnation, at=1.0, by="w",
                            finding=ProcessFinding.STOPPED)
        etcd.txn([], [Op.delete(keys.member("actor", "a")), Op.put(keys.evidence("actor", "a"), evidence.encode())])
        wait_until(lambda: members(etcd, keys, "actor"), what="the second registration")
        assert members(etcd, keys, "actor")[0].incarnation == member.incarnation
        assert etcd.count(keys.evidence_prefix()) == 0
    assert etcd.count(f"{keys.root}processes/") == 0


def test_younger_of_two_members_with_one_name_stays(etcd: EtcdClient, keys: Keys) -> None:
    older = Membership(etcd, keys, "trainer", "rank-0", ttl_s=TTL_S).start()
    younger = Membership(etcd, keys, "trainer", "rank-0", ttl_s=TTL_S).start()
    older.progress(1, "late")
    assert older.replaced.wait(TTL_S + 60)
    older.close()
    seen = _rank0(etcd, keys)
    assert seen is not None and seen.incarnation == younger.incarnation and seen.phase == ""
    younger.close()
    assert _rank0(etcd, keys) is None


def test_replaced_member_registers_again_once_the_other_is_gone(etcd: EtcdClient, keys: Keys) -> None:
    older = Membership(etcd, keys, "coordinator", "c-0", ttl_s=TTL_S, url="http://older").start()
    with Membership(etcd, keys, "coordinator", "c-0", ttl_s=TTL_S).start() as younger:
        older.progress(1, "late")
        assert older.replaced.wait(TTL_S + 60)
        time.sleep(TTL_S)  # long enough for a member that did not wait for the other's end
        assert [m.incarnation for m in members(etcd, keys, "coordinator")] == [younger.incarnation]
    (back,) = wait_until(lambda: members(etcd, keys, "coordinator"), what="the older one")
    assert (back.incarnation, back.url, back.step) == (older.incarnation, "http://older", 1)
    older.progress(2, "again")
    wait_until(lambda: members(etcd, keys, "coordinator")[0].step == 2, what="its heartbeats")
    older.close()
    assert members(etcd, keys, "coordinator") == []


def test_killed_member_is_gone_within_its_ttl(etcd: EtcdClient, keys: Keys, worker: subprocess.Popen[bytes]) -> None:
    assert _wait_step(etcd, keys, above=3).pid == worker.pid
    worker.kill()
    assert worker.wait(60) == -signal.SIGKILL
    wait_until(lambda: _rank0(etcd, keys) is None, what="the member's end")


def test_stopped_member_expires_and_returns_as_the_same(etcd: EtcdClient, keys: Keys,
                                                                   worker: subprocess.Popen[bytes]) -> None:
    before = _wait_step(etcd, keys, above=1)
    worker.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED, what="SIGSTOP")
    wait_until(lambda: _rank0(etcd, keys) is None, what="the member's end")
    worker.send_signal(signal.SIGCONT)
    assert _wait_step(etcd, keys, above=before.step).incarnation == before.incarnation
