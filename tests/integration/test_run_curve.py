"""The run's curve in etcd: written with the status it belongs to, ended where a recovery goes back, kept bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinators import Replicas
from etcd_server import EtcdServers

from elastic_rl.coordinator import epochs
from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.records import JobStatus, StepPoint
from elastic_rl.coordinator.store import Op, Store
from elastic_rl.errors import Fenced
from elastic_rl.processes import wait_until
from elastic_rl.roles.run_log import JobStatusWriter


def point(step: int, total_s: float = 2.0) -> StepPoint:
    return StepPoint(step=step, at=step, reward=step / 10, policy_version=step + 1, seconds={"total": total_s})


def writer(store: Store, keys: Keys) -> JobStatusWriter:
    return JobStatusWriter(store, keys, epoch=epochs.current_epoch(store, keys), steps=100, seed=0)


def points(store: Store, keys: Keys) -> list[StepPoint]:
    return [StepPoint.decode(kv.value) for kv in store.range(keys.steps_prefix())[0]]


def test_a_step_and_its_point_are_one_write_and_an_evaluation_joins_the_point(store: Store, keys: Keys) -> None:
    epochs.raise_epoch(store, keys, "test")
    status = writer(store, keys)
    status.write("rl", point=point(1), step=1, reward=0.1)
    written = [store.get(key) for key in (keys.job_status(), keys.step_point(1))]
    assert written[0].mod_revision == written[1].mod_revision
    status.evaluated("rl", 1, 0.75)
    written = [store.get(key) for key in (keys.job_status(), keys.step_point(1))]
    assert written[0].mod_revision == written[1].mod_revision
    assert JobStatus.decode(written[0].value).heldout == 0.75
    assert StepPoint.decode(written[1].value) == point(1).but(heldout=0.75)
    status.evaluated("rl", 7, 0.5)  # of a step that an earlier incarnation did: only the status knows
    assert points(store, keys) == [point(1).but(heldout=0.75)] and status.latest.heldout == 0.5


def test_a_recovery_deletes_the_points_that_it_undid_and_takes_their_time_back(store: Store, keys: Keys) -> None:
    epochs.raise_epoch(store, keys, "test")
    status = writer(store, keys)
    for step in range(1, 6):
        status.write("rl", point=point(step), step=step)
    status.write("rl", productive_s=status.latest.productive_s + 30.0)  # the warm-up's
    status.resume("rl", 3, policy_version=9)
    assert [p.step for p in points(store, keys)] == [1, 2, 3]
    assert (status.latest.step, status.latest.policy_version, status.latest.productive_s) == (3, 9, 36.0)
    again = writer(store, keys)  # another incarnation of the actor reads what the first one wrote
    again.write("rl", point=point(4, total_s=5.0), step=4)
    assert JobStatus.decode(store.get(keys.job_status()).value).productive_s == 41.0

    # More than a transaction holds.
    store_all = [point(step) for step in range(5, 250)]
    for at in range(0, len(store_all), 50):
        epochs.write(store, keys, 1, *(Op.put(keys.step_point(p.step), p.encode()) for p in store_all[at:at + 50]))
    again.resume("rl", 2)
    assert [p.step for p in points(store, keys)] == [1, 2]

    epochs.raise_epoch(store, keys, "newer")
    with pytest.raises(Fenced):
        again.write("rl", point=point(3), step=3)
    assert [p.step for p in points(store, keys)] == [1, 2]


def test_the_leader_thins_a_long_curve(etcd: EtcdServers, store: Store, keys: Keys, tmp_path: Path) -> None:
    epochs.raise_epoch(store, keys, "test")
    for at in range(1, 301, 100):
        epochs.write(store, keys, 1, *(Op.put(keys.step_point(n), point(n).encode()) for n in range(at, at + 100)))
    replicas = Replicas(tmp_path, keys, etcd.endpoints, {"coordinator": {"steps_keep": 100}})
    try:
        replicas.start("a")
        wait_until(lambda: store.count(keys.steps_prefix()) <= 100, timeout_s=30, what="a shorter curve")
        kept = [p.step for p in points(store, keys)]
        assert kept[0] == 1 and kept[-50:] == list(range(251, 301)) and 75 <= len(kept) <= 100
    finally:
        replicas.close()
