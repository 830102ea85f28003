"""A job that is run again: its status is reopened under the epoch that held, so that no other run is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.etcd_server import EtcdServers

from elastic_rl import config, train
from elastic_rl.errors import ConfigError, Fenced
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobStatus
from elastic_rl.etcd.run_context import RunContext
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


def test_new_job_has_no_status_to_reopen(ctx: RunContext, etcd: EtcdClient, keys: Keys) -> None:
    train._reopen(etcd, ctx)
    assert etcd.get(keys.job_status()) is None


def test_failed_job_is_reopened_at_its_step(ctx: RunContext, etcd: EtcdClient, keys: Keys) -> None:
    put(etcd, keys, JobStatus(phase="failed", step=4, steps=5, message="crash loop"))
    train._reopen(etcd, ctx)
    assert status(etcd, keys) == JobStatus(phase="starting", step=4, steps=10)


def test_finished_job_is_refused_unless_it_gets_more_steps(ctx: RunContext, etcd: EtcdClient, keys: Keys) -> None:
    put(etcd, keys, JobStatus(phase="finished", step=10, steps=10))
    with pytest.raises(ConfigError, match="10 steps"):
        train._reopen(etcd, ctx)
    put(etcd, keys, JobStatus(phase="finished", step=5, steps=5))
    train._reopen(etcd, ctx)
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
        train._reopen(etcd, ctx)
    assert raised and status(etcd, keys) == running
