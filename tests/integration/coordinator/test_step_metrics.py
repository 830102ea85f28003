"""Step metrics in etcd: written with the status they belong to, deleted when a recovery rewinds, kept bounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.coordinators import Replicas
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl.errors import Fenced
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobStatus, StepMetrics
from elastic_rl.pipeline.records.run_log import JobStatusWriter


def point(step: int, total_s: float = 2.0) -> StepMetrics:
    return StepMetrics(step=step, at=step, reward=step / 10, policy_version=step + 1, seconds={"total": total_s})


def writer(etcd: EtcdClient, keys: Keys, clock: Callable[[], float] = time.time) -> JobStatusWriter:
    return JobStatusWriter(etcd, keys, FencedWriter.of_epoch(etcd, keys, fencing.current_epoch(etcd, keys)), steps=100,
                           seed=0, clock=clock)


def points(etcd: EtcdClient, keys: Keys) -> list[StepMetrics]:
    return [StepMetrics.decode(kv.value) for kv in etcd.range(keys.steps_prefix())[0]]


def test_step_status_and_metrics_are_one_write(etcd: EtcdClient, keys: Keys) -> None:
    fencing.raise_epoch(etcd, keys, "test")
    status = writer(etcd, keys)
    status.write("rl", metrics=point(1), step=1, reward=0.1)
    written = [etcd.get(key) for key in (keys.job_status(), keys.step_metrics(1))]
    assert written[0].mod_revision == written[1].mod_revision
    status.evaluated("rl", 1, 0.75)
    written = [etcd.get(key) for key in (keys.job_status(), keys.step_metrics(1))]
    assert written[0].mod_revision == written[1].mod_revision
    assert JobStatus.decode(written[0].value).eval_accuracy == 0.75
    assert StepMetrics.decode(written[1].value) == point(1).replace(eval_accuracy=0.75)
    status.evaluated("rl", 7, 0.5)  # of a step that an earlier incarnation did: only the status knows
    assert points(etcd, keys) == [point(1).replace(eval_accuracy=0.75)] and status.latest.eval_accuracy == 0.5
    assert status.latest.eval_start is None and status.latest.eval_measure == "reward"


def test_evaluation_before_the_first_step_is_kept(etcd: EtcdClient, keys: Keys) -> None:
    """No step has it, and every later one is compared with it."""
    fencing.raise_epoch(etcd, keys, "test")
    status = writer(etcd, keys)
    status.write("sft", eval_accuracy=0.9, eval_measure="exact_match")
    status.evaluated("rl", 0, 0.5, error=0.04)
    status.write("rl", metrics=point(1), step=1, reward=0.1)
    status.evaluated("rl", 1, 0.25, error=0.03)
    found = JobStatus.decode(etcd.get(keys.job_status()).value)
    assert (found.eval_measure, found.eval_start, found.eval_start_error, found.eval_accuracy, found.eval_error) == (
        "reward", 0.5, 0.04, 0.25, 0.03)


def test_finished_groups_and_parts_are_shown_now_and_then_until_their_step_is_made(etcd: EtcdClient, keys: Keys
                                                                                   ) -> None:
    fencing.raise_epoch(etcd, keys, "test")
    now = [100.0]
    status = writer(etcd, keys, lambda: now[0])
    status.resume("rl", 0)

    def shown() -> tuple[int, float]:
        found = JobStatus.decode(etcd.get(keys.job_status()).value)
        return found.pieces, found.step_s

    def say(count: int, after_s: float) -> tuple[int, float]:
        now[0] += after_s
        status.pieces(count)
        return shown()

    assert [say(1, 1.0), say(2, 8.9), say(3, 0.2)] == [(0, 0.0), (0, 0.0), (3, 0.0)]
    revision = etcd.get(keys.job_status()).mod_revision
    assert say(3, 100.0) == (3, 0.0) and etcd.get(keys.job_status()).mod_revision == revision, "nothing has changed"
    status.write("rl", metrics=point(1, total_s=10.0), step=1)
    assert shown() == (0, 10.0), "they are in the step"
    say(5, 20.0)
    status.write("rl", metrics=point(2, total_s=20.0), step=2)
    assert shown() == (0, pytest.approx(12.0)), "mostly what was usual before"
    say(5, 20.0)
    status.resume("rl", 1)
    assert shown()[0] == 0, "they are made again"


def test_supervised_steps_are_shown_without_a_write_for_each(etcd: EtcdClient, keys: Keys) -> None:
    fencing.raise_epoch(etcd, keys, "test")
    now = [100.0]
    status = writer(etcd, keys, lambda: now[0])
    status.resume("sft", 0, sft_step=4)

    def shown() -> tuple[str, int]:
        found = JobStatus.decode(etcd.get(keys.job_status()).value)
        return found.phase, found.sft_step

    assert shown() == ("sft", 4)
    for step in (5, 6):
        now[0] += 0.4
        status.progress(sft_step=step)
        assert shown() == ("sft", 4), "steps of a small model are done many times a second"
    now[0] += 0.4
    status.progress(sft_step=7)
    assert shown() == ("sft", 7)
    status.progress(sft_step=8)
    status.write("rl", step=1)
    assert shown() == ("rl", 8), "any other write says it too"


def test_recovery_deletes_metrics_of_undone_steps(etcd: EtcdClient, keys: Keys) -> None:
    fencing.raise_epoch(etcd, keys, "test")
    status = writer(etcd, keys)
    for step in range(1, 6):
        status.write("rl", metrics=point(step), step=step)
    status.write("rl", productive_s=status.latest.productive_s + 30.0)  # the SFT phase's
    status.resume("rl", 3, policy_version=9)
    assert [p.step for p in points(etcd, keys)] == [1, 2, 3]
    assert (status.latest.step, status.latest.policy_version, status.latest.productive_s) == (3, 9, 36.0)
    again = writer(etcd, keys)  # another incarnation of the actor reads what the first one wrote
    again.write("rl", metrics=point(4, total_s=5.0), step=4)
    assert JobStatus.decode(etcd.get(keys.job_status()).value).productive_s == 41.0

    # More than a transaction holds.
    store_all = [point(step) for step in range(5, 250)]
    for at in range(0, len(store_all), 50):
        fencing.write(etcd, keys, 1, *(Op.put(keys.step_metrics(p.step), p.encode()) for p in store_all[at:at + 50]))
    again.resume("rl", 2)
    assert [p.step for p in points(etcd, keys)] == [1, 2]

    fencing.raise_epoch(etcd, keys, "newer")
    with pytest.raises(Fenced):
        again.write("rl", metrics=point(3), step=3)
    assert [p.step for p in points(etcd, keys)] == [1, 2]


def test_leader_downsamples_step_metrics(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys,
                                         tmp_path: Path) -> None:
    fencing.raise_epoch(etcd, keys, "test")
    for at in range(1, 301, 100):
        fencing.write(etcd, keys, 1, *(Op.put(keys.step_metrics(n), point(n).encode()) for n in range(at, at + 100)))
    replicas = Replicas(tmp_path, keys, etcd_servers.endpoints, {"coordinator": {"max_step_metrics": 100}})
    try:
        replicas.start("a")
        wait_until(lambda: etcd.count(keys.steps_prefix()) <= 100, what="fewer points")
        kept = [p.step for p in points(etcd, keys)]
        assert kept[0] == 1 and kept[-50:] == list(range(251, 301)) and 75 <= len(kept) <= 100
    finally:
        replicas.close()


def status_of(etcd: EtcdClient, keys: Keys) -> JobStatus:
    return JobStatus.decode(etcd.get(keys.job_status()).value)


def test_status_says_what_the_run_waits_for_until_it_goes_on(etcd: EtcdClient, keys: Keys) -> None:
    fencing.raise_epoch(etcd, keys, "test")
    now = [1000.0]
    status = writer(etcd, keys, lambda: now[0])
    status.activity("generate", "engines", "an engine that serves version 2")
    assert etcd.get(keys.job_status()) is None  # it may be over in a moment
    now[0] += 2.0
    status.activity("generate", "engines", "an engine that serves version 2")
    found = status_of(etcd, keys)
    assert (found.stage, found.waiting_kind, found.waiting_since) == ("generate", "engines", 1000.0)
    status.write("rl", metrics=point(1), step=1)  # it still waits
    assert status_of(etcd, keys).waiting_for == "an engine that serves version 2"
    status.activity("train")
    found = status_of(etcd, keys)
    assert (found.stage, found.waiting_for, found.waiting_kind, found.waiting_since) == ("train", "", "", 0.0)


def test_next_actor_does_not_repeat_the_wait_of_the_last_one(etcd: EtcdClient, keys: Keys) -> None:
    fencing.raise_epoch(etcd, keys, "test")
    etcd.put(keys.job_status(), JobStatus(phase="rl", step=3, stage="generate", waiting_kind="engines",
                                          waiting_for="an engine", waiting_since=5.0).encode())
    writer(etcd, keys).activity("source")
    found = status_of(etcd, keys)
    assert (found.step, found.stage, found.waiting_kind, found.waiting_since) == (3, "source", "", 0.0)


def test_finished_run_waits_for_nothing(etcd: EtcdClient, keys: Keys) -> None:
    fencing.raise_epoch(etcd, keys, "test")
    now = [1000.0]
    status = writer(etcd, keys, lambda: now[0])
    status.activity("train", "trainer", "the trainer group")
    now[0] += 5.0
    status.activity("train", "trainer", "the trainer group")
    status.write("failed", message="ended by its operator")
    assert (status_of(etcd, keys).stage, status_of(etcd, keys).waiting_kind) == ("", "")


def test_activity_of_an_older_epoch_is_refused(etcd: EtcdClient, keys: Keys) -> None:
    fencing.raise_epoch(etcd, keys, "first")
    old = writer(etcd, keys)
    fencing.raise_epoch(etcd, keys, "second")
    with pytest.raises(Fenced):
        old.activity("train")


def test_dropped_groups_are_summed_by_reason_without_undone_steps(etcd: EtcdClient, keys: Keys) -> None:
    fencing.raise_epoch(etcd, keys, "test")
    status = writer(etcd, keys)
    for step in range(1, 5):
        status.write("rl", step=step, metrics=point(step).replace(
            dropped_groups=step, dropped_by_reason={"equal rewards": step - 1}))
    assert status_of(etcd, keys).dropped_groups == {"equal rewards": 6, "other": 4}
    status.resume("rl", 2)
    assert status_of(etcd, keys).dropped_groups == {"equal rewards": 1, "other": 2}
    status.write("rl", step=3, metrics=point(3).replace(
        dropped_groups=100, dropped_by_reason={f"reason {n}": 1 for n in range(100)}))
    found = status_of(etcd, keys).dropped_groups
    assert len(found) <= 17 and sum(found.values()) == 103


def test_version_that_the_run_needs_is_written_with_the_next_write_or_at_once_and_then_once(
        etcd: EtcdClient, keys: Keys) -> None:
    fencing.raise_epoch(etcd, keys, "test")
    status = writer(etcd, keys)
    status.write("rl", step=1)

    def written() -> tuple[int, int]:
        found = etcd.get(keys.job_status())
        assert found is not None
        return JobStatus.decode(found.value).needs_version, found.version

    _, writes = written()
    status.needs(3, at_once=False)
    assert written() == (0, writes), "most waits are over at once"
    status.needs(3, at_once=True)
    status.needs(3, at_once=True)
    assert written() == (3, writes + 1)
    status.needs(4, at_once=False)
    status.needs(2, at_once=True)
    assert written() == (4, writes + 2), "it never goes back"
    status.needs(5, at_once=False)
    status.write("rl", step=2)
    assert written() == (5, writes + 3)
