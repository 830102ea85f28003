"""A job that is run again: its status is reopened under the epoch that held, so that no other run is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.etcd_server import EtcdServers

from elastic_rl import config
from elastic_rl.errors import ConfigError, Fenced
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobStatus, OutputState, PoolSpec, PoolStatus, Severity, Version, VersionState
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.job import run_start
from elastic_rl.net.addresses import LOOPBACK


@pytest.fixture
def ctx(etcd_servers: EtcdServers, keys: Keys, tmp_path: Path) -> RunContext:
    cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path), "train": {"steps": 10}})
    return RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, epoch=0,
                      model_dir="", host=LOOPBACK)


def put(etcd: EtcdClient, keys: Keys, status: JobStatus) -> None:
    etcd.put(keys.job_status(), status.encode())


def status(etcd: EtcdClient, keys: Keys) -> JobStatus:
    return JobStatus.decode(etcd.get(keys.job_status()).value)


def commit(etcd: EtcdClient, keys: Keys, step: int, phase: str = "rl") -> None:
    etcd.put(keys.stream_head("trainer_state"), Version(
        stream="trainer_state", number=3, state=VersionState.COMMITTED, epoch=1,
        meta={"step": step, "phase": phase}).encode())


def said(etcd: EtcdClient, keys: Keys) -> list[tuple[str, Severity, str]]:
    return [(event.kind, event.severity, event.message) for event in events.recent(etcd, keys)]


def test_new_job_has_no_status_to_reopen(ctx: RunContext, etcd: EtcdClient, keys: Keys) -> None:
    run_start.open_run(etcd, keys, ctx.config)
    assert etcd.get(keys.job_status()) is None
    assert said(etcd, keys) == [("run.started", Severity.INFO, "begins")]


def test_failed_job_is_reopened_at_its_step(ctx: RunContext, etcd: EtcdClient, keys: Keys) -> None:
    put(etcd, keys, JobStatus(phase="failed", step=4, steps=5, message="crash loop"))
    run_start.open_run(etcd, keys, ctx.config)
    assert status(etcd, keys) == JobStatus(phase="starting", step=4, steps=10)


def test_finished_job_is_refused_unless_it_gets_more_steps(ctx: RunContext, etcd: EtcdClient, keys: Keys) -> None:
    put(etcd, keys, JobStatus(phase="finished", step=10, steps=10))
    with pytest.raises(ConfigError, match="10 steps"):
        run_start.open_run(etcd, keys, ctx.config)
    put(etcd, keys, JobStatus(phase="finished", step=5, steps=5))
    run_start.open_run(etcd, keys, ctx.config)
    assert status(etcd, keys).phase == "starting"


def test_status_that_a_new_driver_writes_meanwhile_is_not_overwritten(ctx: RunContext, etcd: EtcdClient, keys: Keys,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    put(etcd, keys, JobStatus(phase="failed", step=4, steps=10))
    running = JobStatus(phase="rl", step=7, steps=10)
    txn, raised = etcd.txn, []

    def start_driver_then_txn(*args, **kwargs):
        if not raised:
            raised.append(True)
            fencing.raise_epoch(etcd, keys, holder="a driver on another host")
            put(etcd, keys, running)
        return txn(*args, **kwargs)

    monkeypatch.setattr(etcd, "txn", start_driver_then_txn)
    with pytest.raises(Fenced):
        run_start.open_run(etcd, keys, ctx.config)
    assert raised and status(etcd, keys) == running


def test_run_says_at_which_committed_step_it_resumes(ctx: RunContext, etcd: EtcdClient, keys: Keys) -> None:
    """The status is ahead of the state that was committed, and so are the records of the run."""
    put(etcd, keys, JobStatus(phase="failed", step=4, steps=10))
    commit(etcd, keys, 3)
    run_start.open_run(etcd, keys, ctx.config)
    assert said(etcd, keys) == [("run.resumed", Severity.INFO, "resumes at step 3 of 10")]


def test_supervised_phase_and_jobs_that_train_nothing_resume_at_their_step(ctx: RunContext, etcd: EtcdClient,
                                                                            keys: Keys) -> None:
    etcd.put(keys.output(), OutputState(step=6).encode())
    assert str(run_start.resume_point(etcd, keys)) == "step 6"
    commit(etcd, keys, 40, "sft")
    assert str(run_start.resume_point(etcd, keys)) == "supervised step 40"


def test_warnings_of_the_checks_are_events_of_the_run_that_begins(ctx: RunContext, etcd: EtcdClient, keys: Keys
                                                                  ) -> None:
    run_start.open_run(etcd, keys, ctx.config, ["rows: 3 are left out. Look at the files"])
    assert sorted(said(etcd, keys)) == [("run.started", Severity.INFO, "begins"),
                                        ("run.warned", Severity.WARNING, "rows: 3 are left out. Look at the files")]


def test_state_whose_record_cannot_be_read_refuses_no_run(ctx: RunContext, etcd: EtcdClient, keys: Keys) -> None:
    put(etcd, keys, JobStatus(phase="failed", step=4, steps=10))
    etcd.put(keys.stream_head("trainer_state"), b"{}")
    run_start.open_run(etcd, keys, ctx.config)
    assert said(etcd, keys) == [("run.resumed", Severity.INFO, "resumes at step 4 of 10")]


def test_resume_with_more_steps_warns_of_the_learning_rate(ctx: RunContext, etcd: EtcdClient, keys: Keys) -> None:
    put(etcd, keys, JobStatus(phase="finished", step=5, steps=5))
    commit(etcd, keys, 5)
    cfg = config.parse({**ctx.config.model_dump(mode="json"), "train": {"steps": 10, "lr_warmup_steps": 0}})
    run_start.open_run(etcd, keys, cfg)
    [(kind, severity, message)] = said(etcd, keys)
    assert kind == "run.resumed" and severity is Severity.WARNING and "is 0.0005, and is 0.0001 with the 5" in message


def test_job_of_which_nothing_runs_has_no_engine(ctx: RunContext, etcd: EtcdClient, keys: Keys) -> None:
    etcd.put(keys.pool_spec("rollout"), (spec := PoolSpec(name="rollout", desired=2)).encode())
    etcd.put(keys.pool_status("rollout"), PoolStatus(name="rollout", ready=2, starting=0, draining=0).encode())
    run_start.forget_engines(etcd, keys)
    assert etcd.get(keys.pool_status("rollout")) is None
    assert etcd.get(keys.pool_spec("rollout")).value == spec.encode()
