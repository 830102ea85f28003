"""The fully asynchronous schedule on a real etcd and trainer service, with engines that are a function."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.actor_runs import WAIT_S
from support.etcd_server import EtcdServers
from support.simulated_job import STEPS, SimulatedJob
from support.tiers import full, parametrize
from support.waiting import wait_until

from elastic_rl.dcs.catalog.holders import HeadHolders
from elastic_rl.engine.generation import Answers, GenerateFault, PromptRequest
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import StepMetrics
from elastic_rl.pipeline.flow.group_queue import EmbeddedQueue
from elastic_rl.pipeline.records import run_log

MakeJob = Callable[..., SimulatedJob]


@pytest.fixture
def make_job(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[MakeJob]:
    """Makes a fully asynchronous job with further settings, which is closed with the test."""
    with contextlib.ExitStack() as stack:
        def make(*, of: str = "", **settings: str) -> SimulatedJob:
            own = keys if not of else Keys(f"{keys.job}-{of}")
            made = SimulatedJob(etcd, etcd_servers.endpoints, own, tmp_path, **{
                "train.schedule": "fully_async", "train.max_staleness": "1"} | settings)
            stack.callback(made.close)
            return made

        yield make


def _metrics(job: SimulatedJob) -> list[StepMetrics]:
    return [StepMetrics.decode(kv.value) for kv in job.etcd.range(job.keys.steps_prefix())[0]]


def _slow_once(job: SimulatedJob, ordinal: int) -> tuple[threading.Event, list[int]]:
    """The engines do not answer for this group until the event is set, the first time that they are asked. And the
    versions of which they generated it."""
    generate, release, versions = job.roles.generate, threading.Event(), list[int]()

    def held(prompts: Sequence[PromptRequest], min_version: int, in_probation: bool = False) -> list[Answers]:
        found = generate(prompts, min_version)
        if any(p.ordinal == ordinal and p.samples > 1 for p in prompts):  # and no evaluation
            [[(_, samples), *_]] = found
            assert not isinstance(samples, GenerateFault)
            versions.append(samples[0].oldest_version)
            if len(versions) == 1:
                release.wait(WAIT_S)
        return found

    job.roles.generate = held  # type: ignore[method-assign]
    return release, versions


def test_groups_are_generated_during_a_step_and_trained_exactly_once_within_the_staleness(
        make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "_PIECES_EVERY_S", 0.0)
    job = make_job()
    errors = job.start_actor()
    job.wait_for(1)
    job.trainer.frozen.set()
    wait_until(lambda: not job.trainer.board._commands.empty(), what="a step in the trainer's queue")
    step = job.trainer.progress.step
    trained = len(job.trainer.progress.consumed.groups)
    wait_until(lambda: len(set(job.roles.asked)) >= trained + 2 * 8,
               what="the groups of the step after the one that is being made")
    assert job.trainer.progress.step == step
    wait_until(lambda: job.status().step <= step and job.status().pieces >= 2 * 8,
               what="that the status counts the groups that finish in a step that takes long")
    job.trainer.frozen.clear()
    job.finish()
    job.assert_exactly_once()
    assert errors == []
    found = _metrics(job)
    assert max(m.staleness for m in found) == 1 == max(m.update["staleness_max"] for m in found)
    for m in found:
        assert set(m.idle_s) >= {"groups"} and "generate" not in m.idle_s
        assert sum(m.idle_s.values()) <= m.seconds["total"] + 0.01
    # The trainer was the bottleneck while it was held up.
    assert max(m.update["producer_no_room_s"] for m in found) > 0
    assert all(m.update["producer_wait_s"] >= 0 and m.throughput["generate_tokens_per_s"] > 0 for m in found)


def test_staleness_0_trains_bit_for_bit_what_the_synchronous_schedule_trains(make_job: MakeJob) -> None:
    settings = {"train.max_staleness": "0", "deterministic": "true", "rollout.groups_per_request": "1"}
    sync = make_job(of="sync", **settings, **{"train.schedule": "sync"})
    sync.start_actor()
    sync.finish()
    one = make_job(of="one", **settings, **{"train.max_groups_in_flight": "1"})
    one.start_actor()
    one.finish()
    assert [s for s, _ in one.trainer.trained] == [s for s, _ in sync.trainer.trained] == list(range(1, STEPS + 1))
    for (_, ours), (_, theirs) in zip(one.trainer.trained, sync.trainer.trained, strict=True):
        assert ours.to_bytes() == theirs.to_bytes()
    assert one.trainer.saved[-1].consumed == sync.trainer.saved[-1].consumed


PARTS = {"train.prompts_per_part": "3", "train.updates_per_step": "1", "rollout.groups_per_request": "1"}


def _parts_of_steps(job: SimulatedJob) -> dict[int, list[int]]:
    """Samples of each part of each step that was made, the last time that it was."""
    found: dict[int, list[int]] = {}
    for step, part in job.trainer.trained:
        found.setdefault(step, []).append(part.samples)
    return found


def test_gradients_of_parts_are_computed_while_other_groups_of_the_step_are_generated(make_job: MakeJob) -> None:
    job = make_job(**PARTS, **{"train.max_staleness": "0"})
    release, _ = _slow_once(job, 7)
    errors = job.start_actor()
    assert job.trainer.at_part.wait(WAIT_S), "a part is there while group 7 is generated"
    wait_until(lambda: len(job.trainer.parts) == 2, what="all that are whole")
    assert job.trainer.progress.step == 0 and not job.trainer.trained
    release.set()
    job.finish()
    job.assert_exactly_once()
    assert errors == [] and _parts_of_steps(job) == {step: [6, 6, 4] for step in range(1, STEPS + 1)}
    for metrics in _metrics(job):
        assert metrics.staleness == 0
        assert metrics.samples == 16 and abs(metrics.seconds["total"] - sum(
            s for name, s in metrics.seconds.items() if name != "total")) < 0.01, "no second is counted twice"


@parametrize("lost", ["parts", "trainer"],
             proved_in="tests/unit/pipeline/test_flow_model.py",
             why="a lost trainer in place of lost parts")
def test_lost_parts_are_computed_again_and_no_group_is_trained_twice(make_job: MakeJob, lost: str) -> None:
    job = make_job(**PARTS)
    job.start_actor()
    job.wait_for(2)
    if lost == "parts":
        job.trainer.loses_parts.set()
        wait_until(lambda: not job.trainer.loses_parts.is_set(), what="the loss of a part")
    else:
        release, _ = _slow_once(job, max(job.roles.asked) + 20)
        wait_until(lambda: job.trainer.parts, what="a part")
        job.trainer.lose()
        assert "trainer" in job.wait_waiting("trainer")
        release.set()
        job.trainer.form()
    job.finish()
    job.assert_exactly_once()
    assert all(m.staleness <= 1 for m in _metrics(job))
    assert job.kinds("actor.resynced" if lost == "parts" else "trainer.failed")


@full(proved_in="tests/unit/pipeline/test_flow_model.py", why="the rule in a whole job")
def test_lost_trainer_is_resumed_with_the_groups_that_were_generated_meanwhile(make_job: MakeJob) -> None:
    job = make_job(**{"train.max_staleness": "2"})
    job.start_actor()
    job.wait_for(3)
    job.trainer.frozen.set()
    wait_until(lambda: not job.trainer.board._commands.empty(), what="a step in the trainer's queue")
    job.trainer.lose()
    assert "trainer" in job.wait_waiting("trainer")
    job.trainer.frozen.clear()
    job.trainer.form()
    job.finish()
    job.assert_exactly_once()
    assert job.kinds("trainer.") == ["trainer.failed", "trainer.recovered"]
    assert all(m.update["staleness_max"] <= 2 for m in _metrics(job))


def test_absent_engines_are_shown_as_what_the_run_waits_for(make_job: MakeJob) -> None:
    job = make_job()
    job.start_actor()
    job.wait_for(1)
    job.roles.away.set()
    assert "no engine answered" in job.wait_waiting("engines")
    job.roles.away.clear()
    job.finish()
    job.assert_exactly_once()


@full(proved_in="tests/unit/pipeline/test_flow_model.py", why="the rule in a whole job")
def test_overtaken_group_is_generated_again_when_it_is_too_stale(make_job: MakeJob) -> None:
    job = make_job(**{"rollout.groups_per_request": "1", "train.eval_every_steps": "100"})
    release, versions = _slow_once(job, 3)
    job.start_actor()
    job.wait_for(2)
    wait_until(lambda: job.trainer.progress.step >= 2, what="two steps without it")
    release.set()
    job.finish()
    job.assert_exactly_once()
    assert len(versions) == 2 and versions[0] < versions[1], "once in vain"
    assert sum(m.update["groups_stale"] for m in _metrics(job)) == 1


@full(proved_in="tests/unit/pipeline/test_flow_model.py", why="the rule in a whole job")
def test_groups_that_the_queue_loses_are_generated_again(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lost = EmbeddedQueue.put, list[int]()

    def put(self: Any, group: Any) -> None:
        if group.ordinal % 5 == 0 and group.ordinal not in lost:
            lost.append(group.ordinal)
            return
        kept(self, group)

    monkeypatch.setattr(EmbeddedQueue, "put", put)
    job = make_job()
    job.start_actor()
    job.finish()
    job.assert_exactly_once()
    assert len(lost) >= STEPS and sum(m.update["groups_lost"] for m in _metrics(job)) >= len(lost)


@full(proved_in="tests/unit/pipeline/test_flow_model.py", why="the rule in a whole job")
def test_actor_that_takes_over_trains_no_group_of_its_predecessor_again(make_job: MakeJob) -> None:
    job = make_job()
    first = job.start_actor()
    job.wait_for(2)
    second = job.start_actor()
    job.finish()
    wait_until(lambda: first, what="the end of the first actor")
    assert second == []
    job.assert_exactly_once()


def test_end_of_the_producer_ends_the_actor(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job()
    errors = job.start_actor()
    job.wait_for(1)
    monkeypatch.setattr("elastic_rl.pipeline.flow.background.Producer._more", lambda *_: 1 / 0)
    wait_until(lambda: errors, what="the end of the actor")
    assert "the producer ended: ZeroDivisionError" in str(errors[0])
    monkeypatch.undo()
    job.start_actor()
    job.finish()
    job.assert_exactly_once()


def test_version_that_engines_cannot_get_is_published_again_by_the_loop(
        make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_rl.etcd.records import Engine

    monkeypatch.setattr("elastic_rl.pipeline.pool_sync.FIRST_S", 0.3)
    monkeypatch.setattr(HeadHolders, "is_lost", lambda _: True)
    job = make_job(**{"train.max_staleness": "0"})
    job.start_actor()
    job.wait_for(2)
    key = job.keys.engine("rollout-e")
    record = Engine.decode(job.etcd.get(key).value)  # type: ignore[union-attr]
    job.etcd.put(key, record.replace(version=1).encode())
    wait_until(lambda: job.trainer.republished > 0, what="another publish")
    job.etcd.put(key, record.encode())
    job.finish()
    job.assert_exactly_once()
    assert "version.republished" in [e.kind for e in events.recent(job.etcd, job.keys)]
