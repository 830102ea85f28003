"""The pipeline on a real etcd: a whole job through outages, and what it reports when the trainer is lost.

The trainer is the real service, board, gate and client over HTTP; only the tensors behind them are left out. Engines
are a function.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.etcd_server import EtcdServers
from support.simulated_job import STEPS, SimulatedJob
from support.tiers import full
from support.waiting import wait_until

from elastic_rl.config.groups import ACTOR
from elastic_rl.data.ledger import ConsumedGroups, audit
from elastic_rl.data.samples import TRAINER_REFUSED
from elastic_rl.data.sources import make_source
from elastic_rl.dcs.catalog.holders import HeadHolders
from elastic_rl.errors import Fenced
from elastic_rl.etcd import event_kinds, events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import (
    Engine,
    EngineState,
    Formation,
    FormationHost,
    GroupLease,
    RestartRequest,
    Severity,
    StepMetrics,
)
from elastic_rl.host.paths import JobPaths
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.records.history_reader import HistoryReader
from elastic_rl.pipeline.stages.trainer import TrainerStages
from elastic_rl.report.build import effective_steps, read_records
from elastic_rl.trainer.progress import Progress

MakeJob = Callable[..., SimulatedJob]


@pytest.fixture
def make_job(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[MakeJob]:
    """Makes a job with further settings, which is closed with the test."""
    with contextlib.ExitStack() as stack:
        def make(**settings: str) -> SimulatedJob:
            made = SimulatedJob(etcd, etcd_servers.endpoints, keys, tmp_path, **settings)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def job(make_job: MakeJob) -> SimulatedJob:
    return make_job()


def test_job_is_done_through_a_lost_trainer_absent_engines_and_a_frozen_trainer(job: SimulatedJob) -> None:
    errors = job.start_actor()
    job.wait_for(1)
    job.roles.away.set()
    assert "no engine answered" in job.wait_waiting("engines")
    job.roles.away.clear()
    job.wait_for(2)
    job.trainer.frozen.set()
    step = job.status().step
    job.trainer.lose()
    assert "trainer" in job.wait_waiting("trainer")
    job.trainer.frozen.clear()
    job.trainer.form()
    job.finish()
    assert errors == [] and job.trainer.saved[-1].step >= step
    job.assert_exactly_once()
    assert job.kinds("trainer.") == ["trainer.failed", "trainer.recovered"]
    assert job.status().waiting_kind == "" and job.status().eval_accuracy == 1.0
    lease = GroupLease.decode(job.etcd.range(job.keys.group_leases_prefix())[0][0].value)
    assert lease.term == 1 and len(job.etcd.range(job.keys.group_leases_prefix())[0]) == 1


def test_run_that_is_stopped_commits_without_its_engines_and_does_nothing_again(job: SimulatedJob) -> None:
    errors = job.start_actor()
    job.wait_for(1)
    job.roles.hanging.clear()  # so that no step is made that has not begun to train
    job.stop_asked.set()
    wait_until(lambda: job.status().phase == "stopped", what="the stop")
    status = job.status()
    assert status.message == f"stopped by its operator at step {status.step}" and not status.stage
    assert (job.trainer.saved[-1].phase, job.trainer.saved[-1].step) == ("rl", status.step)
    assert job.kinds("run.") == ["run.stopped"] and errors == []
    written = job.etcd.get(job.keys.job_status()).mod_revision
    [event] = [kv for kv in job.etcd.range(job.keys.events_prefix())[0] if b"run.stopped" in kv.value]
    assert event.mod_revision == written, "one transaction"
    job.stop_asked.clear()
    job.roles.hanging.set()
    job.trainer.lose()  # with all of the run
    job.trainer.form()
    job.start_actor()
    job.finish()
    job.assert_exactly_once()
    assert not [r for r in read_records(JobPaths.of(job.ctx.config).steps) if r["kind"] == "rewind"]


def test_supervised_updates_since_the_last_evaluation_are_on_record_after_a_stop(
        make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resumed run does not make them again."""
    job = make_job(**{"sft.eval_every_steps": "4", "sft.eval_every_steps_near_target": "4"})
    update = TrainerStages._sft_update

    def stopped_at_two(stages: TrainerStages, effect: schedule.SftUpdate) -> schedule.UpdateMade:
        if effect.step == 2:
            job.stop_asked.set()
        return update(stages, effect)

    monkeypatch.setattr(TrainerStages, "_sft_update", stopped_at_two)
    errors = job.start_actor()
    wait_until(lambda: job.status().phase == "stopped", what="the stop")
    status = job.status()
    assert status.message == "stopped by its operator at supervised step 2" and status.productive_s > 0 and not errors
    job.runs[-1].thread.join(60)
    [record] = [r for r in read_records(JobPaths.of(job.ctx.config).steps) if r["kind"] == "sft"]
    assert record["step"] == 2 and record["loss"] is not None and "eval_accuracy" not in record
    assert (job.trainer.saved[-1].phase, job.trainer.saved[-1].step) == ("sft", 2)


def test_run_says_that_no_engine_serves_while_its_requests_hang(job: SimulatedJob) -> None:
    job.roles.hanging.clear()
    job.start_actor()
    wait_until(lambda: job.status().stage == "evaluate", what="the first requests")
    key = job.keys.engine("rollout-e")
    record = Engine.decode(job.etcd.get(key).value)
    job.etcd.put(key, record.replace(state=EngineState.DEAD).encode())
    assert "engines that serve" in job.wait_waiting("engines")
    job.etcd.put(key, record.encode())
    job.roles.hanging.set()
    job.finish()
    job.assert_exactly_once()


def test_run_waits_for_an_absent_teacher_and_trains_on_its_tokens(make_job: MakeJob) -> None:
    job = make_job(**{"algorithm.name": "on_policy_distillation", "algorithm.teacher": "teacher",
                      "algorithm.teacher_top_k": "2", "pools.teacher.model": "/teacher"})
    job.roles.unscored.set()
    job.start_actor()
    assert "no teacher answered" in job.wait_waiting("teacher")
    job.roles.unscored.clear()
    job.finish()
    job.assert_exactly_once()
    for _, batch in job.trainer.trained:
        assert not batch["token_advantages"].any(), "the loss has the divergence"
        assert "teacher_logprobs" not in batch, "the trainer has no use for them"
        assert list(batch["teacher_top_ids"].shape) == [batch.loss_tokens, 3], "two, and the sampled one"
    metrics = StepMetrics.decode(job.etcd.get(job.keys.step_metrics(1)).value)
    _, first = job.trainer.trained[0]  # the teacher says -2 of each token
    divergence = float((first["old_logprobs"] + 2.0).sum()) / first.loss_tokens
    assert metrics.update["kl_teacher"] == pytest.approx(divergence, rel=1e-5)


@full(proved_in="tests/unit/pipeline/test_waits.py", why="the rule in a whole job")
def test_step_that_fails_again_and_again_is_a_wait_that_is_shown(job: SimulatedJob) -> None:
    """Every attempt begins its stages anew."""
    job.roles.broken.set()
    job.start_actor()
    assert "not finite" in job.wait_waiting("plugin")
    since = job.status().waiting_since
    wait_until(lambda: time.time() - since > 3.0, what="some attempts")
    assert (job.status().waiting_kind, job.status().waiting_since) == ("plugin", since)
    job.roles.broken.clear()
    job.finish()
    job.assert_exactly_once()


def test_commit_of_a_state_is_retried_with_backoff_and_shown(make_job: MakeJob) -> None:
    job = make_job(**{"train.steps": str(STEPS + 1)})  # the last one is not saved with its step
    job.start_actor()
    job.wait_for(1)
    job.trainer.rejects_saves.set()
    assert "the checkpoint service to commit the last state" in job.wait_waiting("dcs")
    since = job.status().waiting_since
    wait_until(lambda: len(job.trainer.rejected_saves) >= 4, what="some attempts")
    assert (job.status().waiting_kind, job.status().waiting_since) == ("dcs", since)
    *_, before, last = job.trainer.rejected_saves[:4]
    assert last - before > 2.5, "one second of the attempt, and a pause of at least 3 s"
    job.trainer.rejects_saves.clear()
    job.finish()
    assert job.trainer.saved[-1].step == STEPS + 1


@pytest.mark.parametrize("settings", [
    {}, {"train.schedule": "fully_async", "train.max_staleness": "1"}, {"train.prompts_per_part": "4"}], ids=str)
def test_group_that_the_trainer_refuses_twice_is_dropped_on_the_record(make_job: MakeJob, settings: dict[str, str]
                                                                      ) -> None:
    """Its samples say a version that was never published, which the trainer alone knows."""
    job = make_job(**settings)
    job.roles.unpublished.add(2)
    job.start_actor()
    job.finish()
    job.assert_exactly_once()
    assert job.trainer.saved[-1].consumed.dropped == {TRAINER_REFUSED: 1}
    assert job.kinds("actor.resync") == [event_kinds.ACTOR_RESYNCED.name] * 2


def test_step_whose_loss_fails_is_a_wait_for_the_plugin(job: SimulatedJob) -> None:
    job.start_actor()
    job.wait_for(1)
    job.trainer.loss_fails.set()
    assert "token_loss of algorithm.name=mine" in job.wait_waiting("plugin")
    job.trainer.loss_fails.clear()
    job.finish()
    job.assert_exactly_once()
    assert job.kinds("trainer.") == [], "the trainer is not at fault"


def test_what_the_trainer_answers_is_in_the_metrics_of_each_step(job: SimulatedJob) -> None:
    job.start_actor()
    job.finish()
    metrics = [StepMetrics.decode(kv.value) for kv in job.etcd.range(job.keys.steps_prefix())[0]]
    assert len(metrics) == STEPS
    for point in metrics:
        assert point.update == {"loss": 0.1, "logprob_diff_max": 0.0, "my_stat": 2.5}
        assert point.throughput["train_tokens_per_s"] == 1234.57 and point.throughput["generate_tokens_per_s"] > 0
        assert len(point.encode()) < 2048


def test_each_evaluation_set_is_evaluated_and_shown_by_name(make_job: MakeJob, etcd: EtcdClient, keys: Keys) -> None:
    parts = [{"source": "addition", "name": name, "options": {"operand_below": below}}
             for name, below in (("small", 6), ("large", 10))]
    job = make_job(**{"data.source": "mix", "data.options": json.dumps({"parts": parts})})
    job.start_actor()
    job.finish()
    assert job.status().eval_accuracy == 1.0 and job.status().eval_sets == {"small": 1.0, "large": 1.0}
    last = StepMetrics.decode(etcd.get(keys.step_metrics(STEPS)).value)  # type: ignore[union-attr]
    assert last.eval_sets == {"small": 1.0, "large": 1.0}
    found = [r for r in read_records(JobPaths.of(job.cfg).steps) if r["kind"] == "eval"]
    assert [r["step"] for r in found] == [0, 3, 6] and all(len(r["eval_sets"]) == 2 for r in found)


def test_records_of_actors_that_follow_one_another_are_one_history(job: SimulatedJob, tmp_path: Path) -> None:
    job.start_actor()
    job.wait_for(2)
    job.start_actor()
    job.finish()
    with HistoryReader(job.etcd, job.keys, io_timeout_s=5, security=None) as reader:
        shared = b"".join(reader.parts(tmp_path / "none"))
    copy = JobPaths.of(job.cfg).steps
    wait_until(lambda: copy.read_bytes() == shared, what="the copy of all records")
    found = read_records(copy)
    assert found[0]["kind"] == "history" and not [r for r in found if r["kind"] == "gap"]
    assert [r["step"] for r in effective_steps(found)] == [*range(1, STEPS + 1)]


def test_step_that_fails_after_an_update_waits_for_a_restarted_trainer(job: SimulatedJob) -> None:
    job.trainer.loss_fails_late.set()
    job.start_actor()
    assert "algorithm.name=mine failed late" in job.wait_waiting("plugin")
    made, since = [step for step, _ in job.trainer.trained], job.status().waiting_since
    wait_until(lambda: time.time() - since > 3.0, what="some attempts")
    assert (job.status().waiting_kind, job.status().waiting_since) == ("plugin", since)
    assert [step for step, _ in job.trainer.trained] == made == [1], "a step was made again"
    assert job.kinds("actor.") == []
    job.trainer.loss_fails_late.clear()
    job.trainer.lose()
    job.trainer.form()
    job.finish()
    job.assert_exactly_once()


def test_responses_that_never_end_by_themselves_are_said_once(job: SimulatedJob) -> None:
    job.roles.finish_reason = "length"
    job.start_actor()
    job.finish()
    [event] = [e for e in events.recent(job.etcd, job.keys) if e.kind == "responses.truncated"]
    assert "all 16 responses of step 1 ended at their limit" in event.message


def test_long_responses_lose_reward_before_advantages_are_made_of_it(
        make_job: MakeJob, etcd: EtcdClient, keys: Keys) -> None:
    """The first sample of a group is right and has the answer's tokens, the second is wrong and has one."""
    job = make_job(**{"algorithm.overlong_buffer_tokens": "1000"})
    limit = make_source(job.cfg).max_response_tokens
    job.start_actor()
    job.finish()
    for _, batch in job.trainer.trained:
        lengths = batch.loss_counts.view(-1, 2)
        expected = (1 - (lengths[:, 0] - lengths[:, 1]) / limit) / 2
        torch.testing.assert_close(batch["advantages"].view(-1, 2), torch.stack([expected, -expected], dim=1))
    metrics = [StepMetrics.decode(kv.value) for kv in etcd.range(keys.steps_prefix())[0]]
    assert {m.reward for m in metrics} == {0.5}, "rewards are shown as they were given"


def test_divergence_from_the_reference_lowers_rewards_before_advantages_are_made_of_them(
        make_job: MakeJob, etcd: EtcdClient, keys: Keys) -> None:
    """Each token has a log-prob of -1 under the reference. A trainer that is lost while it is asked is asked again."""
    job = make_job(**{
        "algorithm.kl_coef": "0.1", "algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1",
        "algorithm.options.normalize_std": "false"})
    job.start_actor()
    job.wait_for(2)
    job.trainer.frozen.set()
    wait_until(lambda: not job.trainer.board._commands.empty(), what="a command in the queue")
    job.trainer.lose()
    job.trainer.frozen.clear()
    job.trainer.form()
    job.finish()
    assert set(job.trainer.reference_passes) == set(range(1, STEPS + 1))
    found = list[tuple[int, float]]()
    for step, batch in job.trainer.trained:
        ratios = batch["old_logprobs"] + 1.0
        divergences = batch.sequence_sum(ratios).view(-1, 2)
        expected = (1 - 0.1 * (divergences[:, 0] - divergences[:, 1])) / 2
        torch.testing.assert_close(batch["advantages"].view(-1, 2), torch.stack([expected, -expected], dim=1))
        assert "ref_logprobs" not in batch
        found.append((step, pytest.approx(float(ratios.sum()) / batch.loss_tokens, rel=1e-5)))
    assert audit([(s.step, s.consumed) for s in job.trainer.saved if s.phase == "rl"], groups_per_step=8).clean
    metrics = [StepMetrics.decode(kv.value) for kv in etcd.range(keys.steps_prefix())[0]]
    assert {m.reward for m in metrics} == {0.5}, "rewards are shown as they were given"
    lines = [json.loads(line) for line in JobPaths.of(job.cfg).steps.read_text().splitlines()]
    steps = [(line["step"], line["algorithm"]["kl_reference"]) for line in lines if line["kind"] == "step"]
    assert len(steps) >= STEPS and all(step in found for step in steps)


def test_trainer_that_is_overloaded_or_not_heard_is_waited_for_and_not_lost(job: SimulatedJob) -> None:
    job.start_actor()
    job.wait_for(2)
    job.trainer.frozen.set()
    job.trainer.board.result = overloaded  # type: ignore[method-assign]
    job.etcd.delete(job.keys.member("trainer", "rank-0"))  # its lease ended: a process without a core
    assert "HTTP 500" in job.wait_waiting("trainer")
    del job.trainer.board.result  # type: ignore[method-assign]
    job.trainer.frozen.clear()
    wait_until(lambda: job.status().waiting_kind == "", what="the answer")
    wait_until(lambda: job.etcd.get(job.keys.member("trainer", "rank-0")), what="a heartbeat")
    job.finish()
    job.assert_exactly_once()
    assert job.kinds("trainer.") == []


def overloaded(*_: object) -> None:
    raise RuntimeError("no thread is free")


def test_source_with_other_prompts_than_the_job_began_with_is_waited_for(job: SimulatedJob) -> None:
    """Ordinals would stand for other prompts (I13)."""
    job.trainer.saved[-1] = Progress(cursor={"prompts": "90/0123456789abcdef"})
    job.trainer.lose()
    job.trainer.form()
    job.start_actor()
    assert "this job began with (90/0123456789abcdef)" in job.wait_waiting("source")
    assert job.trainer.trained == [] and job.kinds("trainer.") == []


def test_second_actor_takes_over_and_the_first_one_ends(job: SimulatedJob) -> None:
    first = job.start_actor()
    job.wait_for(2)
    second = job.start_actor()
    job.finish()
    wait_until(lambda: first, what="the end of the first actor")
    assert isinstance(first[0], Fenced) and second == []
    job.assert_exactly_once()
    assert job.kinds("groups.") in ([], ["groups.leased_again"]), "once, if there were any in progress"


@full(proved_in="tests/unit/pipeline/test_pipeline_model.py", why="one moment of a take-over in a whole job")
def test_new_actor_reports_the_return_of_a_trainer_that_its_predecessor_missed(job: SimulatedJob) -> None:
    job.start_actor()
    job.wait_for(1)
    fencing.emit(job.etcd, job.keys, job.ctx.epoch, event_kinds.TRAINER_GROUP_EVENTS["trainer"].failed, "trainer",
                 "lost", severity=Severity.ERROR)
    job.start_actor()
    job.finish()
    assert job.kinds("trainer.") == ["trainer.failed", "trainer.recovered"]


@full(proved_in="tests/unit/pipeline/test_pipeline_model.py", why="one moment of a take-over in a whole job")
def test_step_done_after_the_actors_death_is_recorded_by_the_next_actor(job: SimulatedJob) -> None:
    job.start_actor()
    job.wait_for(2)
    job.trainer.frozen.set()
    wait_until(lambda: not job.trainer.board._commands.empty(), what="a step in the trainer's queue")
    done = job.trainer.progress.step
    job.runs[0].stop(20)
    job.trainer.frozen.clear()
    wait_until(lambda: job.trainer.progress.step == done + 1, what="the step without an actor")
    assert job.etcd.get(job.keys.step_metrics(done + 1)) is None
    job.start_actor()
    job.finish()
    job.assert_exactly_once()
    assert len([step for step, _ in job.trainer.trained if step == done + 1]) == 1


@full(proved_in="tests/unit/pipeline/test_pipeline_model.py", why="one moment of a take-over in a whole job")
def test_actor_that_died_in_mid_step_is_continued(job: SimulatedJob) -> None:
    job.start_actor()
    job.wait_for(2)
    job.trainer.frozen.set()
    wait_until(lambda: not job.trainer.board._commands.empty(), what="a step in the trainer's queue")
    begun = GroupLease.decode(job.etcd.get(job.keys.group_lease("actor")).value).groups
    job.runs[0].stop(20)
    assert isinstance(job.runs[0].errors[0], Fenced)
    job.start_actor()
    wait_until(lambda: job.kinds("groups."), what="the successor's report")
    job.trainer.frozen.clear()
    job.finish()
    job.assert_exactly_once()
    [event] = [e for e in events.recent(job.etcd, job.keys) if e.kind == "groups.leased_again"]
    assert event.data["groups"] == begun


def test_version_whose_chunks_are_lost_is_published_again(job: SimulatedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that an engine is merely slow to get is not. No node of the checkpoint service is there to be asked."""
    looks, lost = list[bool](), False

    def is_lost(_: HeadHolders) -> bool:
        looks.append(lost)
        return lost

    monkeypatch.setattr("elastic_rl.pipeline.pool_sync.FIRST_S", 0.3)
    monkeypatch.setattr(HeadHolders, "is_lost", is_lost)
    job.start_actor()
    job.wait_for(2)
    key = job.keys.engine("rollout-e")
    record = Engine.decode(job.etcd.get(key).value)
    job.etcd.put(key, record.replace(version=1).encode())
    wait_until(lambda: len(looks) > 3, what="looks for a version that an engine is slow to get")
    assert not job.trainer.republished
    lost = True
    wait_until(lambda: job.trainer.republished > 0, what="another publish")
    job.etcd.put(key, record.encode())
    job.finish()
    job.assert_exactly_once()
    assert "version.republished" in job.kinds("version.")


def test_requested_restart_of_the_trainer_is_not_reported_as_a_fault(job: SimulatedJob) -> None:
    job.start_actor()
    job.wait_for(1)
    request = RestartRequest(target=ACTOR.name, generation=1, reason="new driver library", by="ada")
    job.etcd.put(job.keys.restart(ACTOR.name), request.replace(observed_generation=1).encode())
    job.trainer.lose()
    job.trainer.form()
    job.finish()
    assert job.kinds("trainer.") == ["trainer.restarting", "trainer.recovered"]
    job.assert_exactly_once()


def test_change_of_the_hosts_of_a_group_is_not_reported_as_a_fault_and_its_restart_by_itself_is(job: SimulatedJob
                                                                                                ) -> None:
    def form(reason: str) -> None:
        job.etcd.put(job.keys.formation(ACTOR.name), Formation(
            epoch=1, data_parallel=1, hosts=[FormationHost(name="b", address="", ranks=1)], reason=reason).encode())
        job.trainer.lose()
        job.trainer.form()

    job.start_actor()
    for losses, reason in ((1, "b is drained"), (2, "")):
        job.wait_for(losses)
        form(reason)
        wait_until(lambda: len(job.kinds("trainer.")) >= 2 * losses, what="the recovery")  # noqa: B023
    job.finish()
    assert job.kinds("trainer.") == ["trainer.restarting", "trainer.recovered", "trainer.failed", "trainer.recovered"]
    job.assert_exactly_once()


def test_loop_of_an_older_epoch_ends_and_reports_nothing(job: SimulatedJob) -> None:
    """A global restart ends the trainer of the old epoch: an alert about it would be one about the restart itself."""
    errors = job.start_actor()
    job.wait_for(1)
    fencing.raise_epoch(job.etcd, job.keys, holder="global restart")
    wait_until(lambda: errors, what="the end of the loop")
    assert isinstance(errors[0], Fenced) and job.kinds("trainer.") == []


@full(proved_in="tests/unit/pipeline/test_pipeline_model.py", why="one moment of a take-over in a whole job")
def test_actor_resumes_from_the_trainers_progress_alone(job: SimulatedJob) -> None:
    """Evaluations and early stop are functions of committed state: a new actor neither repeats nor skips one."""
    consumed = ConsumedGroups()
    job.trainer.lose()
    job.trainer.saved.append(Progress("rl", STEPS - 1, 0, consumed, {"evals": [[0, 0.5], [3, 0.6]]}))
    job.trainer.form()
    job.start_actor()
    job.finish()
    assert [int(s) for s, _ in job.trainer.progress.cursor["evals"]] == [0, 3, STEPS]
    assert [step for step, _ in job.trainer.trained] == [STEPS]


def test_reward_that_raises_is_shown_and_retried(
        make_job: MakeJob, etcd: EtcdClient, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward.py").write_text(
        "from elastic_rl.rewards.base import Reward\n"
        "from pathlib import Path\n"
        "async def reward(prompt, samples):\n"
        f"    if not Path({str(tmp_path / 'corrected')!r}).exists():\n"
        "        raise RuntimeError('the judge is away')\n"
        "    return [Reward(float(i), {'position': i}) for i, _ in enumerate(samples)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    job = make_job(**{"rollout.reward": "my_reward:reward"})
    job.start_actor()
    wait_until(lambda: "the judge is away" in job.wait_waiting("plugin"), what="what it waits for")
    (tmp_path / "corrected").touch()
    job.finish()
    job.assert_exactly_once(best=1)
    last = StepMetrics.decode(etcd.range(keys.steps_prefix())[0][-1].value)
    assert last.reward_parts == {"position": 0.5}


def test_source_that_is_away_or_slow_when_an_actor_starts_is_waited_for(
        make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far_source.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from elastic_rl.data.addition import Addition\n"
        "def far(options, seed, eval_fraction):\n"
        f"    if not Path({str(tmp_path / 'mounted')!r}).exists():\n"
        "        raise OSError('the file system is away')\n"
        f"    while not Path({str(tmp_path / 'read')!r}).exists():\n"
        "        time.sleep(0.05)\n"
        "    return Addition({'operand_below': 10}, seed=seed, eval_fraction=eval_fraction)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("elastic_rl.pipeline.sampling.source_reads.SHOWN_AFTER_S", 0.3)
    monkeypatch.setattr("elastic_rl.pipeline.waits._OWN_AFTER_S", 0.3)
    job = make_job(**{"data.source": "far_source:far", "data.options": "{}"})
    try:
        job.start_actor()
        assert "the file system is away" in job.wait_waiting("plugin")
        (tmp_path / "mounted").touch()
        assert "data.source=far_source:far to be made" in job.wait_waiting("source")
        (tmp_path / "read").touch()
        job.finish()
        job.assert_exactly_once()
    finally:
        (tmp_path / "mounted").touch()
        (tmp_path / "read").touch()


@full(proved_in="tests/unit/pipeline/test_reward_failures.py", why="the rule in a whole job")
def test_groups_whose_reward_fails_are_on_the_record_and_replaced(
        make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "picky_reward.py").write_text(
        "from elastic_rl.rewards.base import Reward\n"
        "async def reward(prompt, samples):\n"
        "    if sum(prompt.token_ids) % 7 == 0:\n"
        "        raise ValueError('not this prompt')\n"
        "    return [Reward(float(i)) for i, _ in enumerate(samples)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    job = make_job(**{"rollout.reward": "picky_reward:reward"})
    job.start_actor()
    job.finish()
    job.assert_exactly_once(best=1)
    consumed = job.trainer.saved[-1].consumed
    dropped = consumed.dropped.get("reward failed", 0)
    assert consumed.dropped.keys() == {"reward failed"} and dropped > 0
    assert consumed.trained == len(consumed.groups) - dropped == STEPS * 8
    assert job.kinds("reward.") == ["reward.failed"], "rarely, whatever fails"


@full(proved_in="tests/integration/pipeline/test_sampled_jobs.py tests/unit/pipeline/test_sampling.py",
      why="the rule in a whole job")
def test_groups_that_a_filter_drops_are_on_the_record_and_replaced(
        make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_filter.py").write_text(
        "def odd(group):\n    return 'odd' if group.ordinal % 4 == 1 else ''\n")
    monkeypatch.syspath_prepend(tmp_path)
    job = make_job(**{"rollout.filters": "['my_filter:odd']"})
    job.start_actor()
    job.finish()
    job.assert_exactly_once()
    consumed = job.trainer.saved[-1].consumed
    dropped = [g for g in consumed.groups if g % 4 == 1]
    assert consumed.dropped == {"odd": len(dropped)} and len(dropped) >= STEPS
    assert consumed.trained == len(consumed.groups) - len(dropped) == STEPS * 8
