"""A trainer group under torch elastic, with real etcd and a real DCS node: it trains, loses a rank, and resumes. Its
ranks are two pipeline stages; those of the whole runs (``e2e``) are tensor-parallel. The tests share one group, in
order."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open
from support.dcs_nodes import await_node, spawn_node
from support.etcd_server import EtcdServers
from support.otlp_collector import Collector, Span, collecting

from elastic_rl import config
from elastic_rl.data.tasks import Addition
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.errors import ConfigError, TrainerFailed
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.processes import python, spawn, stop
from elastic_rl.runtime import wait_until
from elastic_rl.trainer.batch import TrainBatch
from elastic_rl.trainer.client import TrainerClient
from elastic_rl.trainer.parallel import FENCED_EXIT

START_S = 400.0


@dataclass
class Group:
    ctx: RunContext
    etcd: EtcdClient
    keys: Keys
    client: TrainerClient
    agent: subprocess.Popen[bytes]
    folder: Path
    spans: Collector

    def start_agent(self) -> None:
        self.agent = spawn(python("elastic_rl.trainer.agent", "--context", str(self.folder / "context.json")),
                           log=self.folder / "trainer.log", env={"OMP_NUM_THREADS": "7"})  # as Ray sets it

    def ranks(self) -> list[psutil.Process]:
        alive = {m.pid for m in members(self.etcd, self.keys, "trainer")}
        return [psutil.Process(pid) for pid in sorted(alive) if psutil.pid_exists(pid)]

    def rank(self, number: int) -> int:
        return next(m.pid for m in members(self.etcd, self.keys, "trainer") if m.id == f"rank-{number}")


@pytest.fixture(scope="module")
def group(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("group")
    job = f"t-{secrets.token_hex(4)}"
    cfg = config.parse({
        "job": job, "seed": 1, "device": {"type": "cpu"}, "run_dir": str(folder / "runs"),
        "etcd": {"call_timeout_s": 2.0}, "dcs": {"arena_bytes": 64 << 20},
        "sft": {"max_steps": 20, "eval_every_steps": 10, "eval_every_steps_near_target": 10,
                "target_eval_accuracy": 1.0},
        "train": {"state_every_steps": 2, "prompts_per_step": 8},
        "trainer": {"tensor_parallel": 1, "pipeline_parallel": 2}})
    keys = Keys(job)
    with EtcdClient(etcd_servers.endpoints, call_timeout_s=2.0) as etcd, collecting() as collector:
        telemetry = cfg.telemetry.model_copy(update={"otlp_endpoint": collector.endpoint})
        cfg = cfg.model_copy(update={"telemetry": telemetry})
        epoch = fencing.raise_epoch(etcd, keys, holder="test").number
        ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=job, epoch=epoch,
                         model_dir=str(make_model_dir(folder / "model", cfg)))
        ctx.save(folder / "context.json")
        node = spawn_node(etcd_servers.endpoints, keys, "node-0", folder, arena_bytes=cfg.dcs.arena_bytes)
        group = None
        try:
            await_node(etcd, keys, node)
            client = TrainerClient(etcd, keys, step_timeout_s=60, start_timeout_s=START_S)
            group = Group(ctx, etcd, keys, client, node, folder, collector)
            group.start_agent()
            yield group
        finally:
            if group is not None:
                stop(group.agent.pid)
            stop(node.pid)


def batch_for(group: Group) -> TrainBatch:
    """Right answers, half of them with a positive and half with a negative advantage."""
    problems = Addition(group.ctx.config.data, group.ctx.config.seed).train[:64]
    n, prompt, width = len(problems), len(problems[0].prompt_ids), len(problems[0].answer_ids)
    return TrainBatch(tokens=torch.tensor([p.prompt_ids + p.answer_ids for p in problems]),
                      prompt_len=torch.full((n,), prompt), response_len=torch.full((n,), width),
                      engine_logprobs=torch.full((n, width), -2.0), advantages=torch.tensor([1.0, -1.0] * (n // 2)),
                      policy_versions=torch.ones(n, dtype=torch.int64), groups=torch.arange(8))


def assert_traced(group: Group, version: int) -> None:
    """The publish and its commit in the background are one trace, whose context is in the version's record."""
    names = {"trainer.publish", "trainer.commit", "dcs.store", "dcs.commit"}

    def complete() -> dict[str, Span]:
        found = {s.name: s for s in group.spans.trace_with("dcs.store", stream="policy", version=version)}
        return found if names <= set(found) else {}

    spans = wait_until(complete, timeout_s=30, what="every span of the publish")
    root = spans["trainer.publish"]
    assert root.parent == "" and spans["trainer.commit"].parent == root.id
    assert spans["dcs.commit"].parent == spans["trainer.commit"].id
    assert {s.pid for s in spans.values()} == {group.rank(0)}
    carried = [reads.get_version(group.etcd, group.keys, stream, number).meta["trace"]["traceparent"]
               for stream, number in (("policy", version), ("trainer_state", group.client.wait_ready().state_version))]
    assert all(root.trace in carrier and root.id in carrier for carrier in carried)


def test_group_trains_publishes_and_resumes_after_kill_9_of_a_rank(group: Group) -> None:
    first = group.client.wait_ready()
    assert (first.phase, first.step, first.restarts) == ("sft", 0, 0)
    seen: list[dict[str, Any]] = []
    result = group.client.sft(seen.append)
    assert [s["step"] for s in seen] == [10, 20]
    assert result["steps"] == 20 and result["loss"] < 3
    start = group.client.wait_ready()
    assert (start.phase, start.step) == ("rl", 0) and start.policy_version and start.state_version
    assert_traced(group, start.policy_version)

    batch = batch_for(group)
    metrics = [group.client.train(step, batch, cursor={"next": step}) for step in (1, 2, 3)]
    assert [m["policy_version"] for m in metrics] == [start.policy_version + s for s in (1, 2, 3)]
    assert [bool(m["state_version"]) for m in metrics] == [False, True, False]
    assert all(m["tokens"] == int(batch.response_len.sum()) and m["grad_norm"] > 0 for m in metrics)

    with (Puller(group.etcd, group.keys, "test", io_timeout_s=10) as puller,
          puller.pull("policy", start.policy_version + 3) as pulled):
        published = [(t.name, t.shape) for t in pulled.manifest.tensors]
    with safe_open(Path(group.ctx.model_dir) / "model.safetensors", framework="pt") as file:
        assert sorted(published) == [(n, tuple(file.get_slice(n).get_shape())) for n in sorted(file.keys())]

    victim = psutil.Process(group.rank(1))
    killed_at = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    await_end([victim])
    again = group.client.wait_ready(not_incarnation=first.incarnation)
    took = time.monotonic() - killed_at
    steps, stalls = ([round(m[key] * 1e3) for m in metrics] for key in ("train_s", "publish_stall_s"))
    print(f"\nrestart took {took:.1f} s; steps {steps} ms, publish stalls {stalls} ms")
    assert again.incarnation != first.incarnation and again.restarts == 1
    assert (again.phase, again.step, again.cursor) == ("rl", 2, {"next": 2}), "not the last saved state"
    assert again.policy_version > metrics[-1]["policy_version"], "the resumed step was not published again"
    assert any(e.kind == "trainer.restarted" for e in events.recent(group.etcd, group.keys))

    repeated = group.client.train(3, batch)
    assert repeated["policy_version"] > again.policy_version
    for key in ("loss", "grad_norm", "logprob_diff_max"):
        assert repeated[key] == metrics[2][key], "the repeated step differs from the lost one"


def test_bad_batch_and_wrong_step_are_refused_and_change_nothing(group: Group) -> None:
    before = group.client.wait_ready()
    batch = batch_for(group)
    with pytest.raises(ConfigError, match="prompt_len"):
        group.client.train(before.step + 1, TrainBatch(**{**batch.__dict__, "prompt_len": batch.prompt_len[:3]}))
    with pytest.raises(TrainerFailed, match="does not follow"):
        group.client.train(before.step + 7, batch)
    assert group.client.wait_ready() == before


def await_end(ranks: list[psutil.Process]) -> None:
    wait_until(lambda: not any(r.is_running() and r.status() != psutil.STATUS_ZOMBIE for r in ranks), timeout_s=20,
               what="the end of the ranks")


def test_ranks_have_the_configured_number_of_threads(group: Group) -> None:
    group.client.wait_ready()
    assert [rank.environ()["OMP_NUM_THREADS"] for rank in group.ranks()] == ["1", "1"]


def test_ranks_die_with_a_killed_agent_and_a_new_agent_resumes(group: Group) -> None:
    before = group.client.wait_ready()
    ranks = group.ranks()
    assert len(ranks) == 2
    os.kill(group.agent.pid, signal.SIGKILL)
    group.agent.wait(timeout=5)
    await_end(ranks)
    group.start_agent()
    after = group.client.wait_ready(not_incarnation=before.incarnation)
    assert (after.phase, after.step, after.restarts) == ("rl", 2, 0)
    assert after.policy_version > before.policy_version


def test_agent_of_an_older_epoch_ends_with_its_ranks(group: Group) -> None:
    group.client.wait_ready()
    ranks = group.ranks()
    fencing.raise_epoch(group.etcd, group.keys, holder="another driver")
    assert group.agent.wait(timeout=30) == FENCED_EXIT
    await_end(ranks)
