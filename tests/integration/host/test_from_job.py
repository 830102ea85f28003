"""A new job that begins with the policy of another one, whose versions are on a real node."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cluster_files import make_secret
from support.dcs_nodes import await_node, spawn_node
from support.etcd_server import EtcdServers

from elastic_rl import config, train
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.errors import ConfigError, VersionNotFound
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobSpec, JobStatus
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import model_folder
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.processes import stop

SHAPE = {"hidden_size": 64, "intermediate_size": 128}


@dataclass
class Jobs:
    """A job with a trained policy, and a new one beside it in the same etcd."""

    old: Keys
    new: Keys
    info: ClusterInfo
    run_dir: Path
    weights: dict[str, torch.Tensor]
    """The tensors of the newest version of the old job."""
    etcd: EtcdClient

    @property
    def model(self) -> Path:
        return self.run_dir / self.new.job / "model"

    def start(self, from_job: str = "", **settings: Any) -> RunContext:
        cfg = config.parse({"job": self.new.job, "run_dir": str(self.run_dir), "etcd": {"call_timeout_s": 2.0},
                            **settings})
        return train.prepare(cfg, self.info, from_job=from_job)

    def spec(self) -> JobSpec:
        return JobSpec.decode(self.etcd.get(self.new.job_spec()).value)


@pytest.fixture
def jobs(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[Jobs]:
    old = config.parse({"job": keys.job, "run_dir": str(tmp_path / "runs"), "model": SHAPE})
    JobPaths.of(old).private.mkdir(parents=True)
    make_secret(old)
    ClusterInfo(keys.job, etcd_servers.endpoints, [], "").save(ClusterPaths.of(old).info)
    model_dir = make_model_dir(JobPaths.of(old).model, old)
    new = Keys(f"{keys.job}-new")
    process = spawn_node(etcd_servers.endpoints, keys, "node-0", tmp_path)
    try:
        await_node(etcd, keys, process)
        epoch = fencing.raise_epoch(etcd, keys, "test").number
        weights = load_file(model_dir / "model.safetensors")
        with Publisher(etcd, keys, "policy", epoch=epoch, owner="test", chunk_bytes=64 << 10, staging_ttl_s=5,
                       io_timeout_s=10) as publisher:
            publisher.publish(weights.items(), meta={"step": 0})
            weights = {name: tensor + 0.25 for name, tensor in weights.items()}
            publisher.publish(weights.items(), meta={"step": 1})
        info = ClusterInfo(new.job, etcd_servers.endpoints, [], "")
        yield Jobs(keys, new, info, tmp_path / "runs", weights, etcd)
    finally:
        stop(process.pid)
        process.wait(timeout=60)


def test_new_job_begins_with_the_newest_policy_of_the_other_one(jobs: Jobs) -> None:
    ctx = jobs.start(jobs.old.job)
    written = load_file(jobs.model / "model.safetensors")
    assert written.keys() == jobs.weights.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in jobs.weights.items())
    assert (jobs.model / "tokenizer.json").exists() and model_folder.faults(ctx.config) == []
    assert model_folder.read(jobs.model).arch.hidden == SHAPE["hidden_size"], "not that of the new settings"
    assert ctx.model_dir == ctx.config.model.path == str(jobs.model)
    assert ctx.config.sft.max_steps == 0, "its policy has been through the SFT phase"
    assert (jobs.spec().from_job, jobs.spec().from_version) == (jobs.old.job, 2)


def test_supervised_job_that_begins_with_another_policy_has_its_steps(jobs: Jobs) -> None:
    ctx = jobs.start(jobs.old.job, mode="sft")
    assert ctx.config.sft.max_steps == jobs.start(mode="sft").config.sft.max_steps > 0


def test_new_job_resumes_with_and_without_the_flag_and_keeps_its_model(jobs: Jobs) -> None:
    jobs.start(jobs.old.job)
    jobs.etcd.put(jobs.new.job_status(), JobStatus(phase="rl", step=3, steps=150).encode())
    marked = jobs.model / "mark"
    marked.touch()
    for from_job in ("", jobs.old.job):
        ctx = jobs.start(from_job)
        assert ctx.model_dir == str(jobs.model) and ctx.config.sft.max_steps == 0
    assert marked.exists(), "the model was not exported again"
    with pytest.raises(ConfigError, match="did not begin with the policy of another-job"):
        jobs.start("another-job")
    with pytest.raises(ConfigError, match="seed was 0"):
        jobs.start(seed=1)


def test_start_that_was_not_completed_is_completed_without_the_flag(jobs: Jobs) -> None:
    """It crashed before its first version: what it begins with was decided all the same."""
    jobs.start(jobs.old.job)
    ctx = jobs.start(seed=3)
    assert ctx.model_dir == str(jobs.model) and jobs.spec().from_job == jobs.old.job
    assert jobs.spec().from_version == 2 and jobs.spec().settings["seed"] == 3


def test_start_that_was_not_completed_has_its_model_made_again(jobs: Jobs) -> None:
    """And never begins with the built-in one instead, nor with a version that has come since."""
    jobs.start(jobs.old.job)
    with_version = jobs.spec()
    shutil.rmtree(jobs.model)
    jobs.etcd.put(jobs.new.job_spec(), with_version.replace(from_version=1).encode())
    assert jobs.start().model_dir == str(jobs.model)
    assert all(torch.equal(tensor + 0.25, jobs.weights[name])
               for name, tensor in load_file(jobs.model / "model.safetensors").items())
    assert (jobs.spec().from_job, jobs.spec().from_version) == (jobs.old.job, 1)
    shutil.rmtree(jobs.model)
    jobs.etcd.put(jobs.new.job_spec(), with_version.replace(from_version=9).encode())
    with pytest.raises(VersionNotFound, match="began with the policy 9 .*, which is gone") as e:
        jobs.start()
    assert f"--from-job={jobs.old.job}" in e.value.hint and jobs.spec().from_job == jobs.old.job


def test_other_settings_of_the_data_are_what_a_new_job_is_for(jobs: Jobs) -> None:
    jobs.etcd.put(jobs.old.job_spec(), JobSpec(settings={"seed": 0, "model.path": ""}).encode())
    ctx = jobs.start(jobs.old.job, seed=5, data={"options": {"operand_below": 50}}, train={"group_size": 4})
    assert json.loads((jobs.model / "config.json").read_text())["hidden_size"] == SHAPE["hidden_size"]
    assert ctx.config.seed == 5


def test_job_that_was_trained_already_cannot_begin_again_with_another_policy(jobs: Jobs) -> None:
    jobs.etcd.put(jobs.new.job_status(), JobStatus(phase="rl", step=3, steps=150).encode())
    with pytest.raises(ConfigError, match="has been trained already"):
        jobs.start(jobs.old.job)
    assert not jobs.model.exists()


def test_what_there_is_no_policy_of_is_named(jobs: Jobs) -> None:
    with pytest.raises(ConfigError, match="its own policy"):
        jobs.start(jobs.new.job)
    empty = config.parse({"job": "empty", "run_dir": str(jobs.run_dir)})
    JobPaths.of(empty).private.mkdir(parents=True)
    make_secret(empty)
    ClusterInfo("empty", jobs.info.etcd_endpoints, [], "").save(ClusterPaths.of(empty).info)
    with pytest.raises(VersionNotFound, match="job empty has no committed policy"):
        jobs.start("empty")
    with pytest.raises(ConfigError, match="no cluster of job nowhere is up") as e:
        jobs.start("nowhere")
    assert "elastic-rl up --job=nowhere" in e.value.hint
    with pytest.raises(ConfigError, match="job"):
        jobs.start("../x")
    assert jobs.etcd.get(jobs.new.job_spec()) is None
