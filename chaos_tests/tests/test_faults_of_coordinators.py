"""The faults of the catalogue that strike coordinators, on replicas without a job that runs: each happens as its
witness says, and another replica goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from support.coordinators import Replicas
from support.etcd_server import EtcdServers
from support.tiers import full, parametrize
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.coordinator.records import Leadership
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.faults import states
from elastic_rl.faults.context import FaultContext
from elastic_rl.faults.etcd import ForeignRecords
from elastic_rl.faults.kinds import RecoversWithSteps
from elastic_rl.faults.processes import Struck, Way
from elastic_rl.faults.stale import StaleLeader
from elastic_rl.faults.undo import Undone, UndoRegistry, undo_all
from elastic_rl.runtime import failpoints


@pytest.fixture
def replicas(etcd_servers: EtcdServers, keys: Keys, tmp_path: Path) -> Iterator[Replicas]:
    found = Replicas(tmp_path, keys, etcd_servers.endpoints)
    try:
        yield found
    finally:
        found.close()


class _Context(FaultContext):
    """Of replicas that are forked: the environment that the kernel has of them is that of whom they were forked from,
    without a mark."""

    def owns(self, process: psutil.Process) -> bool:
        return process.pid in {child.pid for child in psutil.Process().children()}


def _context(replicas: Replicas, etcd: EtcdClient, folder: Path) -> FaultContext:
    no_api: Any = None
    return _Context(config.load(replicas.config_file("faults")), etcd, replicas.keys, no_api,
                    undo=UndoRegistry(folder / "undo"))


def _back(fault: RecoversWithSteps) -> None:
    wait_until(lambda: fault.may_go_unnoticed or fault.detected(), what=f"detection of {fault.name}")
    wait_until(fault.is_back, what=f"recovery from {fault.name}")


def test_stale_leader_comes_back_and_its_write_is_refused(replicas: Replicas, etcd: EtcdClient, tmp_path: Path) -> None:
    replicas.start("a", "b")
    context = _context(replicas, etcd, tmp_path)
    fault = StaleLeader(context)
    target, witness = fault.inject()
    assert "was refused" in witness and target.startswith("coordinator ")
    _back(fault)
    records = ForeignRecords(context, 3.0)
    witness = records.inject()[1]
    assert "5 records" in witness and "5 of them" in witness
    _back(records)
    assert all(replicas.ready(name) for name in ("a", "b")), "the one that was stopped follows, and both are well"
    assert undo_all(tmp_path / "undo") == Undone()


@parametrize("point", failpoints.LEADER, proved_in="chaos_tests/tests/test_faults_of_coordinators.py",
             why="a kill at each further point of a leader whose first point is killed by default")
def test_leader_that_dies_at_a_write_is_followed_by_one_that_completes_it(
        replicas: Replicas, etcd: EtcdClient, keys: Keys, point: str) -> None:
    with patch.dict(os.environ, {failpoints.ENV: point}):
        replicas.launch("a")
    assert replicas.running.pop("a").wait(timeout=300) == -signal.SIGKILL
    before = readable_one(etcd.get(keys.leadership()), Leadership)
    assert (before is not None and before.replica == "a") == (point == "leader.announced")
    replicas.start("b")

    def announced() -> Leadership | None:  # the candidacy of the dead one lasts as long as its lease
        found = readable_one(etcd.get(keys.leadership()), Leadership)
        return found if found is not None and found.replica == "b" else None

    after = wait_until(announced, what="the next leader's word")
    assert before is None or after.term > before.term
    elected = [e.subject for e in events.recent(etcd, keys, 100) if e.kind == event_kinds.LEADER_ELECTED.name]
    assert sorted(elected) == (["a", "b"] if before is not None else ["b"]), "each term is announced once"


@full(proved_in="chaos_tests/tests/test_faults_of_coordinators.py",
      why="a second leader that is killed in the moments before it has announced itself, which may take some tries")
def test_leader_is_killed_before_it_has_announced_itself(replicas: Replicas, etcd: EtcdClient, tmp_path: Path) -> None:
    replicas.start(*"abcde")
    fault = Struck(_context(replicas, etcd, tmp_path), "coordinator", Way.KILLED, state=states.LEADER_TAKING_OVER)
    _, witness = fault.inject()
    assert "which it had not announced" in witness and witness.count("SIGKILL") == 2
    _back(fault)
    assert undo_all(tmp_path / "undo") == Undone()
