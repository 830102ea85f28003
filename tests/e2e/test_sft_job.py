"""A supervised job on real parts: it needs no engine, and what it made can be taken away as a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from support.tiers import full
from support.whole_run import whole_job

from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.dcs.versions.service import VersionService
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.host import inherited_model
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.paths import ClusterPaths, JobPaths

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), full(
    proved_in="tests/unit/pipeline/test_sampled_modes.py tests/integration/trainer/test_trainer_group.py",
    why="a supervised job as a whole run, and its export")]

SETTINGS = {"mode": "sft", "sft.max_steps": 30, "sft.target_eval_accuracy": 1.0}


def test_supervised_job_learns_without_engines_and_its_policy_can_be_exported(tmp_path: Path) -> None:
    with whole_job(tmp_path / "run", SETTINGS) as job:
        report = job.run()
        assert report["status"] == "finished" and report["steps"] == 0 and report["sft"]["steps"] == 30
        assert report["sft"]["loss_last"] < report["sft"]["loss_first"]

        info = ClusterInfo.load(ClusterPaths.of(job.cluster.cfg).info)
        keys = Keys(job.cfg.job)
        with EtcdClient(info.etcd_endpoints, call_timeout_s=2.0) as etcd:
            assert etcd.range(keys.pools_prefix())[0] == [] == etcd.range(keys.engines_prefix())[0]
        assert not [e.kind for e in job.events() if e.kind.startswith(("engine.", "router."))]

        cfg = job.cluster.cfg
        assert inherited_model.holds(JobPaths.of(cfg).policy).startswith("supervised step 30, version ")
        assert [e.kind for e in job.events() if "exported" in e.kind] == ["run.exported"]
        with VersionService(cfg, info.job, info.etcd_endpoints, dcs_security(cfg), JobPaths.of(cfg).model) as versions:
            versions.export("policy", tmp_path / "model", like=None, shard_bytes=1 << 30, force=False)
        exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        first = transformers.AutoModelForCausalLM.from_pretrained(JobPaths.of(job.cluster.cfg).model)
        assert any(not a.equal(b) for a, b in zip(exported.parameters(), first.parameters(), strict=True))
