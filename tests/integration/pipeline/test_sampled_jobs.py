"""Jobs that train nothing, on a real etcd and a real checkpoint service; engines are a function."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.actor_runs import WAIT_S, ThreadedJob
from support.dcs_cluster import DcsCluster
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.data import step_file
from elastic_rl.data.samples import Sample, Segment
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.engine.generation import Answers, PromptRequest
from elastic_rl.errors import EngineFailed, Fenced
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import OutputState, SampleRecord, StepMetrics
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.paths import JobPaths
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.rewards.judging import Judgement, JudgeRequest
from elastic_rl.trainer import replay

WIDE = {"data.options.operand_below": "8", "data.eval_fraction": "0.3", "rollout.groups_per_request": "4"}

_WRONG = (9, 1)
"""Tokens that are no answer."""


class Engines:
    """Answer every prompt right with the first sample and wrong with the others, those of the ordinals ``hard`` wrong
    with all. ``gates``: how many requests are answered until somebody opens it further; beyond, they hang until then,
    as ``away`` says."""

    hard: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.away = threading.Event()
        self._gate = threading.Semaphore(0)

    def open(self, requests: int) -> None:
        self._gate.release(requests)

    def generate(self, prompts: Sequence[PromptRequest], min_version: int, in_probation: bool = False
                 ) -> list[Answers]:
        if self.away.is_set():
            raise EngineFailed("no engine answered in 4 attempts")
        if not self._gate.acquire(timeout=WAIT_S):
            raise EngineFailed("nobody opened the gate")
        self.asked += [p.ordinal for p in prompts]
        return [[(place, [Sample((Segment(ids, (-0.5,) * len(ids), version=1),)) for ids in (
            _WRONG if p.ordinal in self.hard else p.prompt.answer_ids or (), *[_WRONG] * (p.samples - 1))])
            for place, p in enumerate(prompts)]]

    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        raise AssertionError("nothing is trained")

    def token_advantages(self, batch: bytes) -> Any:
        raise AssertionError("nothing is trained")

    def score(self, sequences: Any, top: int) -> Any:
        raise AssertionError("nothing is trained")

    def judge(self, request: JudgeRequest) -> list[Judgement]:
        raise AssertionError("no reward asks a judge")


class WithAdvantages(Engines):
    """Centred rewards are advantages."""

    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        return [[r - sum(row) / len(row) for r in row] for row in rewards]


class Job(ThreadedJob):
    """One job, whose roles are ``Engines``."""

    roles: Engines

    def __init__(self, dcs: DcsCluster, folder: Path, roles: Engines | None = None, **given: str) -> None:
        self.cfg = config.load(overrides=[f"--{key}={value}" for key, value in {
            **WIDE, "job": dcs.keys.job, "run_dir": str(folder), **given}.items()])
        self.model = make_model_dir(folder / "model", self.cfg)
        super().__init__(dcs.etcd, RunContext(
            config=self.cfg, etcd_endpoints=dcs.etcd_servers.endpoints, job=dcs.keys.job, epoch=dcs.epoch,
            model_dir=str(self.model), host=LOOPBACK), roles or Engines())

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (JobPaths.of(self.cfg).folder / name).read_bytes().splitlines()]

    def close(self) -> None:
        for run in self.runs:
            run.stopping.set()
            self.roles.open(1000)
        super().close()


@pytest.fixture
def dcs(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[DcsCluster]:
    with DcsCluster.open(etcd_servers, etcd, keys, tmp_path / "dcs") as out:
        out.start("a")
        yield out


def test_rejection_sampling_loses_no_prompt_when_its_actor_is_replaced(dcs: DcsCluster, tmp_path: Path) -> None:
    job = Job(dcs, tmp_path, mode="rejection_sampling", **{
        "train.prompts_per_step": "8", "train.group_size": "3", "rejection.min_reward": "1.0",
        "rejection.prompts": "40", "rollout.filters": '[{name: difficulty, low: 0.1, high: 0.9}]'})
    try:
        first = job.start_actor()
        job.roles.open(2 * 2 + 1)  # two steps, and half of the third
        wait_until(lambda: len(job.roles.asked) == 20, what="half of the third step")
        second = job.start_actor()
        wait_until(lambda: fencing.current_term(job.etcd, job.keys) == 2, what="the second term")
        job.roles.open(1000)
        job.finish()
        assert not second
        wait_until(lambda: bool(first), what="the end of the first actor")
        assert isinstance(first[0], Fenced)
        rows = job.rows("kept.jsonl")
        assert [row["ordinal"] for row in rows] == list(range(40)), "each prompt once, in order"
        assert all((row["reward"], row["response"], row["versions"]) == (1.0, row["answer"], [1]) for row in rows)
        assert len(job.roles.asked) > 40, "the step that was under way was sampled again"
        summary = json.loads((JobPaths.of(job.cfg).folder / "kept.json").read_text())
        assert (summary["prompts"], summary["samples"], summary["kept"]) == (40, 120, 40)
        assert summary["reward_mean"] == pytest.approx(1 / 3) and summary["kept_reward_mean"] == 1.0
        assert not (JobPaths.of(job.cfg).folder / "kept").exists()
        state = OutputState.decode(job.etcd.get(job.keys.output()).value)  # type: ignore[union-attr]
        assert state.complete and state.consumed["groups"] == [[0, 40]] and len(state.pieces) == 2
        assert len(state.model_dump_json()) < 2000
        metrics = [StepMetrics.decode(kv.value) for kv in job.etcd.range(job.keys.steps_prefix())[0]]
        assert [(m.step, m.samples, m.policy_version) for m in metrics] == [(n, 24, 1) for n in range(1, 6)]
        assert (job.status().step, job.status().steps) == (5, 5)
        [again] = [e for e in events.recent(job.etcd, job.keys, 100) if e.kind == "groups.leased_again"]
        assert again.data["groups"] == [[16, 24]]
        expected = load_file(job.model / "model.safetensors")
        with dcs.puller().pull("policy") as pulled:
            found = dict(pulled.tensors())
            assert found.keys() == expected.keys()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
            del found
    finally:
        job.close()


def test_filtered_prompts_are_dropped_on_the_record_and_no_other_takes_their_place(
        dcs: DcsCluster, tmp_path: Path) -> None:
    job = Job(dcs, tmp_path, mode="rejection_sampling", **{
        "train.prompts_per_step": "8", "train.group_size": "2", "rejection.prompts": "16",
        "rollout.filters": '[{name: difficulty, low: 0.9, high: 1.0}]'})
    try:
        job.roles.open(1000)
        job.start_actor()
        job.finish()
        assert job.rows("kept.jsonl") == [] and len(job.roles.asked) == 16
        assert sum(json.loads((JobPaths.of(job.cfg).folder / "kept.json").read_text())["dropped"].values()) == 16
        assert sum(job.status().dropped_groups.values()) == 16
    finally:
        job.close()


def test_batches_of_chosen_steps_are_kept_for_a_trainer_without_what_was_dropped(
        dcs: DcsCluster, tmp_path: Path) -> None:
    job = Job(dcs, tmp_path, WithAdvantages(), mode="rejection_sampling", **{
        "train.prompts_per_step": "8", "train.group_size": "3", "rejection.prompts": "20", "train.keep_steps": "[1, 3]",
        "rollout.filters": '[{name: difficulty, low: 0.1, high: 0.9}]'})
    job.roles.hard = frozenset({1, 16})
    try:
        job.roles.open(1000)
        job.start_actor()
        job.finish()
        paths = JobPaths.of(job.cfg)
        assert step_file.steps_in(paths.kept_steps) == [1, 3]
        for step, groups in ((1, 7), (3, 3)):
            kept = step_file.read(paths.kept_steps, step, step_file.identity(job.cfg.job, paths.job_id))
            assert (kept.batch.samples, kept.versions) == (groups * 3, (1,))
            assert torch.allclose(kept.batch["advantages"], torch.tensor([2 / 3, -1 / 3, -1 / 3] * groups))
            replay.require_replayable(job.cfg, kept.batch)
        shown = [SampleRecord.decode(kv.value) for kv in job.etcd.range(job.keys.samples_prefix())[0]]
        assert {s.step: s.advantage is not None for s in shown} == {1: True, 2: False, 3: True}, "people see them, too"
        assert len(job.rows("kept.jsonl")) == 18
    finally:
        job.close()


def test_evaluation_goes_on_where_its_actor_was_replaced_and_waits_for_engines(dcs: DcsCluster, tmp_path: Path) -> None:
    job = Job(dcs, tmp_path, mode="eval", **{
        "data.source": "mix", "eval.samples": "2", "eval.temperature": "1.0", "eval.prompts_per_step": "6",
        "data.options.operand_below": "null", "data.options": json.dumps({"parts": [
            {"source": "addition", "name": name, "options": {"operand_below": below}}
            for name, below in (("small", 5), ("large", 7))]})})
    try:
        job.start_actor()
        job.roles.open(2)
        job.wait_for(1)
        second = job.start_actor()
        job.roles.away.set()
        wait_until(lambda: job.status().waiting_kind == "engines", what="a wait for the engines")
        job.roles.away.clear()
        job.roles.open(1000)
        job.finish()
        assert not second
        result = json.loads((JobPaths.of(job.cfg).folder / "eval.json").read_text())
        small, large = (result["sets"][name]["prompts"] for name in ("small", "large"))
        assert (result["reward"], result["reward_options"]) == (job.cfg.rollout.reward, job.cfg.rollout.reward_options)
        assert list(result["sets"]) == ["eval", "small", "large"] and result["sets"]["eval"]["prompts"] == small + large
        assert [(row["set"], row["index"], row["sample"]) for row in job.rows("eval.jsonl")] == [
            (name, i, n) for name, count in (("small", small), ("large", large)) for i in range(count) for n in (0, 1)]
        for found in result["sets"].values():
            assert (found["reward_mean"], found["pass_at"]) == (0.5, {"1": 0.5, "2": 1.0})
        assert job.status().eval_accuracy == 0.5 and job.status().eval_sets == {"small": 0.5, "large": 0.5}
        assert job.status().phase == "finished" and not (JobPaths.of(job.cfg).folder / "eval").exists()
    finally:
        job.close()


def test_disk_without_room_is_waited_for(dcs: DcsCluster, tmp_path: Path) -> None:
    job = Job(dcs, tmp_path, mode="eval")
    JobPaths.of(job.cfg).folder.mkdir(parents=True, exist_ok=True)
    in_the_way = JobPaths.of(job.cfg).folder / "eval"
    in_the_way.write_text("")
    try:
        job.roles.open(1000)
        job.start_actor()
        wait_until(lambda: job.status().waiting_kind == "disk", what="a wait for the disk")
        assert "make room" in job.status().waiting_for
        in_the_way.unlink()
        job.finish()
        assert json.loads((JobPaths.of(job.cfg).folder / "eval.json").read_text())["sets"]["eval"]["reward_mean"] == 1.0
    finally:
        job.close()
