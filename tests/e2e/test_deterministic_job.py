"""The same job again, with faults and other engines, and with groups that are generated beside the steps: the same
samples and weights, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.tiers import full
from support.whole_run import Job, fault_of, whole_job

from elastic_rl.config import Stream
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import SampleRecord
from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.faults.kinds import EngineKilled, TrainerRankKilled
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.report.build import effective_steps, read_records

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), full(
    proved_in="tests/integration/pipeline/test_fully_async.py tests/integration/engine/test_colocated_engine.py",
    why="the same bits from three whole runs")]

STEPS = 8
SETTINGS = {"deterministic": "true", "train.steps": STEPS, "train.state_every_steps": 3, "train.prompts_per_step": 8,
            "train.group_size": 4, "sft.max_steps": 60, "data.options.operand_below": 5}
# In the other run each request, and each batch of an engine, has other samples in it.
QUIET = {"rollout.engines": 1, "rollout.groups_per_request": 3}
DISTURBED = {"rollout.engines": 2, "rollout.groups_per_request": 1}
ONE_BY_ONE = {"rollout.engines": 1, "rollout.groups_per_request": 1, "train.schedule": "fully_async",
              "train.max_staleness": 0, "train.max_groups_in_flight": 1}
OF_FLOW = {"staleness_min", "staleness_mean", "staleness_max", "groups_queued", "groups_leased", "groups_stale",
           "groups_lost", "producer_wait_s", "producer_no_room_s"}
OF_TIME = {"at", "seconds", "train_s", "idle_s", "throughput", "engines"}
"""What the log says of a step that depends on time,"""
OF_NUMBERS = {"policy_version", "sample_versions"}
"""and on the numbers of versions, of which a recovery takes further ones."""


def a_rank_and_an_engine_killed(context: FaultContext, _steps: int) -> list[tuple[int, Sequence[Fault]]]:
    return [(2, [TrainerRankKilled(context), EngineKilled(context)])]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of the job that nothing disturbs."""
    with whole_job(tmp_path_factory.mktemp("quiet"), SETTINGS | QUIET) as job:
        report = job.run()
        assert report["faults"] == []
        found = outcome(job)
    assert any(step["grad_norm"] > 0 for step in found["steps"][:3]), "weights that never change are always the same"
    assert len(found["steps"]) == STEPS and len(found["samples"]) == 4 * STEPS and found["weights"]
    return found


def assert_same(found: dict[str, Any], quiet: dict[str, Any]) -> None:
    for what in quiet:
        assert quiet[what] == found[what], what


def test_same_job_makes_the_same_samples_and_weights_whatever_fails(quiet: dict[str, Any], tmp_path: Path) -> None:
    with whole_job(tmp_path / "disturbed", SETTINGS | DISTURBED) as job:
        report = job.run(a_rank_and_an_engine_killed)
        assert "SIGKILL" in fault_of(report, "trainer_rank_killed")["witness"] and report["steps_redone"] > 0
        # The run may be over before the engine that replaces the other one serves.
        assert "SIGKILL" in {f["name"]: f["witness"] for f in report["faults"]}["engine_killed"]
        assert_same(outcome(job), quiet)


def test_asynchronous_job_at_staleness_0_makes_the_same_samples_and_weights(quiet: dict[str, Any], tmp_path: Path
                                                                           ) -> None:
    with whole_job(tmp_path / "one", SETTINGS | ONE_BY_ONE) as job:
        job.run()
        found = outcome(job)
    for step in found["steps"]:  # what only this schedule says of a step
        flow = {name: step["algorithm"].pop(name) for name in OF_FLOW}
        assert (flow["staleness_max"], flow["groups_stale"], flow["groups_lost"]) == (0, 0, 0)
    assert_same(found, quiet)


def outcome(job: Job) -> dict[str, Any]:
    """All that a job has made, without what depends on time and on the numbers of versions."""
    steps = effective_steps(read_records(JobPaths.of(job.cluster.cfg).steps))
    with EtcdClient(ClusterInfo.load(ClusterPaths.of(job.cluster.cfg).info).etcd_endpoints, call_timeout_s=2.0) as etcd:
        samples = [SampleRecord.decode(kv.value) for kv in etcd.range(Keys(job.cfg.job).samples_prefix())[0]]
        weights = digests(job, etcd)
    return {"steps": [{k: v for k, v in step.items() if k not in OF_TIME | OF_NUMBERS} for step in steps],
            "samples": [sample.replace(at=0.0, versions=[]) for sample in samples], "weights": weights}


def digests(job: Job, etcd: EtcdClient) -> dict[str, str]:
    """The digest of each tensor of the last policy."""
    keys, dcs = Keys(job.cfg.job), job.cluster.cfg.dcs
    number = reads.head(etcd, keys, Stream.POLICY).number
    security = dcs_security(job.cluster.cfg)
    with Puller(etcd, keys, "test", io_timeout_s=dcs.io_timeout_s, security=security) as puller, \
            puller.pull(Stream.POLICY, number) as pulled:
        return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in pulled.tensors()}
