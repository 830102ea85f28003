"""A trainer group under torch elastic, with real etcd and a real DCS node: it trains, loses a rank, and resumes. Its
ranks are two pipeline stages; those of the whole runs (``e2e``) are tensor-parallel. The tests share one group, in
order."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open
from support.elastic_group import Group, elastic_group
from support.etcd_server import EtcdServers
from support.failing_algorithm import FAILS, FAILS_AFTER_AN_UPDATE
from support.otlp_collector import Span
from support.tiers import full
from support.waiting import wait_until

from elastic_rl.config import ROLLOUT_POOL, Stream
from elastic_rl.coordinator.membership.hang_detection import is_idle
from elastic_rl.data.batch import Batch, collate
from elastic_rl.data.branch import Branch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.samples import Sample, Segment, demonstration
from elastic_rl.data.sources import make_source
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.security import Security
from elastic_rl.errors import (
    ConfigError,
    Conflict,
    Fenced,
    PluginFailed,
    StaleSamples,
    StepRefused,
    StepsHeld,
    TrainerFailed,
)
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.device_claims import DeviceClaims
from elastic_rl.etcd.device_phase import Side
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import Engine, EngineState, Severity
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.leftovers import remove_files, tagged_files
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import stop
from elastic_rl.runtime.process import runs
from elastic_rl.trainer.megatron.parallel import FENCED_EXIT
from elastic_rl.trainer.service.client import TrainerClient, TrainerStatus
from elastic_rl.trainer.worker import GATHERING

STATE_EVERY = 2


@pytest.fixture(scope="module")
def group(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with elastic_group(etcd_servers.endpoints, tmp_path_factory.mktemp("group"), {
            "placement": "colocated",
            "sft": {"max_steps": 20, "eval_every_steps": 10, "eval_every_steps_near_target": 10,
                    "target_eval_accuracy": 1.0},
            "train": {"state_every_steps": STATE_EVERY, "prompts_per_step": 8},
            "algorithm": {"name": "support.failing_algorithm:spec", "kl_coef": 0.1,
                          "reference_every_steps": STATE_EVERY},
            # A rank that is lost must be noticed long before a collective times out.
            "trainer": {"tensor_parallel": 1, "pipeline_parallel": 2, "data_parallel": 1,
                        "collective_timeout_s": 250.0, "start_timeout_s": 260.0}}) as made:
        yield made


def reference_logprobs(group: Group, batch: Batch, step: int) -> torch.Tensor:
    return group.client.forward_reference(batch, step)


def batch_for(group: Group) -> Batch:
    """Right answers, half of them with a positive and half with a negative advantage."""
    rows = [(p, Sample((Segment(p.answer_ids, (-2.0,) * len(p.answer_ids), version=1),)))
            for p in make_source(group.ctx.config).train[:64]]
    return collate(rows, [1.0, -1.0] * (len(rows) // 2))


def groups_of(step: int) -> Consumption:
    """The groups of an RL step: eight a step."""
    return Consumption(IntervalSet(((8 * (step - 1), 8 * step),)))


def train(group: Group, step: int, batch: Batch | None = None) -> dict[str, Any]:
    return group.client.update("rl", step, batch or batch_for(group), versions=group.newest_version(),
                               consumption=groups_of(step), cursor={"next": step})


def assert_traced(group: Group, version: int) -> None:
    """The publish and its commit in the background are one trace, whose context is in the version's record."""
    names = {"trainer.publish", "trainer.commit", "dcs.store", "dcs.commit"}

    def complete() -> dict[str, Span]:
        found = {s.name: s for s in group.spans.trace_with("dcs.store", stream="policy", version=version)}
        return found if names <= set(found) else {}

    spans = wait_until(complete, what="every span of the publish")
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
    demonstrations = collate((p, demonstration(p)) for p in make_source(group.ctx.config).train[:64])
    assert group.client.check(1, demonstrations, "sft")["tokens"] == demonstrations.loss_tokens
    losses = [group.client.update("sft", step, demonstrations)["loss"] for step in range(1, 21)]
    assert losses[-1] < losses[0]
    assert group.client.save("sft", 20, begin_rl=True, cursor={"sft": 20})["committed"]
    start = group.client.wait_ready()
    assert (start.phase, start.step, start.cursor) == ("rl", 0, {"sft": 20})
    assert start.policy_version and start.state_version and not start.consumed.groups
    assert_traced(group, start.policy_version)

    batch = batch_for(group)
    before = group.client.forward_logprobs(batch)
    assert all(len(values) == batch.loss_tokens for values in before.values()) and (before["logprobs"] < 0).all()
    assert torch.equal(reference_logprobs(group, batch, 1), before["logprobs"]), "the policy with which RL began"
    metrics = [train(group, step) for step in (1, 2)]
    assert torch.equal(reference_logprobs(group, batch, 3), group.client.forward_logprobs(batch)["logprobs"])
    metrics.append(train(group, 3))
    assert [m["reference_step"] for m in metrics] == [0, 0, 2]
    assert metrics[1]["kl_reference"] > metrics[0]["kl_reference"] > 0, "measured at the last update of a step"
    reference = reference_logprobs(group, batch, 4)
    with pytest.raises(Conflict, match="does not follow"):
        reference_logprobs(group, batch, 3)
    assert metrics[0]["logprob_diff_max"] == pytest.approx(
        float((before["logprobs"] - batch["old_logprobs"]).abs().max()), abs=1e-5)
    assert [m["policy_version"] for m in metrics] == [start.policy_version + s for s in (1, 2, 3)]
    assert [bool(m["state_version"]) for m in metrics] == [False, True, False]
    assert all(m["tokens"] == batch.loss_tokens and m["grad_norm"] > 0 for m in metrics)

    with Puller(group.etcd, group.keys, "test", io_timeout_s=10, security=dcs_security(group.ctx.config)) as puller:
        # The step is done once its policy is being published.
        wait_until(lambda: puller.head("policy").number == start.policy_version + 3, what="its commit")
        with puller.pull("policy", start.policy_version + 3) as pulled:
            published = [(t.name, t.shape) for t in pulled.manifest.tensors]
    with safe_open(Path(group.ctx.model_dir) / "model.safetensors", framework="pt") as file:
        assert sorted(published) == [(n, tuple(file.get_slice(n).get_shape())) for n in sorted(file.keys())]

    victim = psutil.Process(group.rank(1))
    killed_at = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    await_end([victim])
    again = group.ready(after=first.group)
    took = time.monotonic() - killed_at
    steps, stalls = ([round(m[key] * 1e3) for m in metrics] for key in ("train_s", "publish_stall_s"))
    print(f"\nrestart took {took:.1f} s; steps {steps} ms, publish stalls {stalls} ms")
    assert again.group != first.group and again.restarts == 1
    assert (again.phase, again.step, again.cursor) == ("rl", 2, {"next": 2}), "not the last saved state"
    assert again.policy_version > metrics[-1]["policy_version"], "the resumed step was not published again"
    assert again.branch == Branch(metrics[1]["policy_version"], again.policy_version)
    assert any(e.kind == "trainer.restarted" for e in events.recent(group.etcd, group.keys))

    assert again.consumed.groups == IntervalSet(((0, 16),)), "the groups of the steps that the weights have"
    assert torch.equal(reference_logprobs(group, batch, 3), reference), "another reference than before"
    with pytest.raises(StaleSamples):  # of the weights that it went back from
        group.client.update("rl", 3, batch, versions=[metrics[2]["policy_version"]], consumption=groups_of(3))
    repeated = train(group, 3)
    assert repeated["policy_version"] > again.policy_version
    for key in ("loss", "grad_norm", "logprob_diff_max", "kl_reference", "reference_step"):
        assert repeated[key] == metrics[2][key], "the repeated step differs from the lost one"


def test_ranks_fall_back_together_when_the_newest_state_is_missing(group: Group) -> None:
    """Its chunks are on no node; each rank finds that out by itself."""
    before = group.client.wait_ready()
    known = reads.get_version(group.etcd, group.keys, Stream.TRAINER_STATE, before.state_version)
    lost = known.replace(number=known.number + 1, manifest="f" * len(known.manifest))
    assert int(group.etcd.get(group.keys.stream_next(lost.stream)).value) == known.number
    group.etcd.put(group.keys.version(lost.stream, lost.number), lost.encode())
    group.etcd.put(group.keys.stream_next(lost.stream), str(lost.number).encode())
    os.kill(group.rank(1), signal.SIGKILL)
    after = group.ready(after=before.group)
    assert (after.phase, after.step, after.state_version) == ("rl", 2, known.number)
    [event] = [e for e in events.recent(group.etcd, group.keys) if e.kind == "trainer.state_lost"]
    assert f"version {known.number}" in event.message


def test_stopped_rank_is_replaced_before_its_collective_times_out(group: Group) -> None:
    before = group.client.wait_ready()
    stopped = psutil.Process(group.rank(1))
    stopped.send_signal(signal.SIGSTOP)
    after = group.ready(after=before.group)
    assert (after.phase, after.step) == ("rl", 2)
    assert not runs(stopped)


@full(proved_in="tests/unit/trainer/test_rank_watch.py", why="two ranks of a real group that are lost at once")
def test_rank_that_does_not_react_is_killed_when_another_one_has_died(group: Group) -> None:
    before = group.client.wait_ready()
    os.kill(group.rank(1), signal.SIGSTOP)
    os.kill(group.rank(0), signal.SIGKILL)
    assert group.ready(after=before.group).step == 2
    # torch elastic says this when it has waited for its own, much longer, grace period.
    assert "Unable to shutdown process" not in (group.folder / "trainer.log").read_text()


def test_group_that_shares_devices_computes_in_its_phases_only_and_re_forms_in_one(group: Group) -> None:
    before, batch = group.client.wait_ready(), batch_for(group)
    claims = DeviceClaims(group.etcd, group.keys, ROLLOUT_POOL, epoch=group.ctx.epoch)
    term = fencing.current_term(group.etcd, group.keys)
    actor = fencing.FencedWriter.of_term(group.etcd, group.keys, group.ctx.epoch, term)
    assert not claims.begin_phase(Side.ENGINES, actor, term), "the group has memory since it formed"
    group.client.offload()
    group.client.offload()
    assert claims.begin_phase(Side.ENGINES, actor, term)
    with pytest.raises(Conflict, match="memory is offloaded"):
        group.client.forward_logprobs(batch)
    with pytest.raises(Conflict, match="memory is offloaded"):
        group.client.save("rl", before.step)
    assert group.client.wait_ready() == before

    os.kill(group.rank(1), signal.SIGKILL)

    def waiting() -> bool:
        found = [m for m in members(group.etcd, group.keys, "trainer") if "devices" in m.phase]
        return len(found) == 2 and before.group not in {m.incarnation for m in found}

    wait_until(waiting, what="the next formation to wait for its phase")
    assert group.etcd.get(group.keys.device_holder()) is None
    engine = Engine(id="rollout-e", pool=ROLLOUT_POOL, state=EngineState.SYNCING, epoch=group.ctx.epoch,
                    holds_device=True)
    group.etcd.put(group.keys.engine(engine.id), engine.encode())
    assert claims.begin_phase(Side.TRAINER, actor, term)
    assert "rollout-e to release memory" in claims.take_for_trainer("another")
    assert waiting(), "an engine has memory"
    group.etcd.delete(group.keys.engine(engine.id))
    group.ready(after=before.group)
    group.client.onload()
    logprobs = group.client.forward_logprobs(batch)["logprobs"]
    group.client.offload()
    group.client.onload()
    assert torch.equal(group.client.forward_logprobs(batch)["logprobs"], logprobs)


def test_rank_whose_gather_is_stuck_is_not_idle(group: Group) -> None:
    """The leader finds hangs by phases: the groups of Megatron would wait for a rank for a day."""
    before = group.client.wait_ready()

    def phase() -> str:
        return next(m.phase for m in members(group.etcd, group.keys, "trainer") if m.id == "rank-0")

    with ThreadPoolExecutor(1) as thread:
        os.kill(group.node.pid, signal.SIGSTOP)
        try:
            saving = thread.submit(group.client.save, before.phase, before.step)
            wait_until(lambda: phase() == GATHERING, what="that rank 0 copies what it gathers")
        finally:
            os.kill(group.node.pid, signal.SIGCONT)
        assert not is_idle(GATHERING)
        assert saving.result()["committed"]
    wait_until(lambda: is_idle(phase()), what="the end of the gather")


def test_command_that_does_not_fit_is_refused_and_changes_nothing(group: Group) -> None:
    before = group.client.wait_ready()
    step = before.step + 1
    with pytest.raises(Conflict, match="does not follow"):
        train(group, before.step + 7)
    with pytest.raises(Conflict, match="does not follow"):
        group.client.update("sft", step, batch_for(group))
    with pytest.raises(Conflict, match="consumed already"):
        group.client.update("rl", step, batch_for(group), versions=group.newest_version(), consumption=groups_of(1))
    with pytest.raises(TrainerFailed, match="no valid token"):
        impostor = TrainerClient(group.etcd, group.keys, Security("another"), epoch=group.ctx.epoch, term=1 << 30)
        impostor._url, impostor._group, impostor._shares = before.share_urls[0], before.group, before.share_urls
        impostor.update("rl", step, batch_for(group))
    newest = before.policy_version
    for versions in ((newest - 1, newest), (0, newest), (newest + 1,)):  # of staleness 0
        with pytest.raises(StaleSamples) as refused:
            group.client.update("rl", step, batch_for(group), versions=versions, consumption=groups_of(step))
        assert refused.value.versions == tuple(v for v in versions if v != newest)
    with pytest.raises(ConfigError, match="does not say which policy versions"):
        group.client.update("rl", step, batch_for(group), consumption=groups_of(step))
    assert group.client.wait_ready() == before


def test_batch_without_what_the_algorithm_needs_is_refused_before_any_rank_has_it(group: Group) -> None:
    before = group.client.wait_ready()
    batch = batch_for(group)
    tensors = {name: t for name, t in batch.tensors.items() if name != "advantages"}
    with pytest.raises(ConfigError, match="no tensor 'advantages'"):
        group.client.update("rl", before.step + 1, Batch(tensors))
    assert group.client.wait_ready() == before


def with_advantage(batch: Batch, value: float) -> Batch:
    """One sample, whose loss is computed by the last stage only, has this advantage."""
    advantages = batch["advantages"].clone()
    advantages[-1] = value
    return Batch({**batch.tensors, "advantages": advantages})


def test_loss_that_fails_is_refused_and_ends_no_rank(group: Group) -> None:
    before = group.client.wait_ready()
    ranks = group.ranks()
    for _ in range(2):
        with pytest.raises(PluginFailed, match=r"algorithm.name=support.failing_algorithm:spec.*the loss of the test"):
            train(group, before.step + 1, with_advantage(batch_for(group), FAILS))
    assert group.client.wait_ready() == before and group.ranks() == ranks


def test_group_restores_its_state_when_the_loss_fails_after_an_update(group: Group) -> None:
    first, batch = group.client.wait_ready().step + 1, batch_for(group)
    for step in range(first, first + 2 + (first + 1) % 2):  # the state of the last is saved while the next one fails
        train(group, step)
    before, ranks = group.client.wait_ready(), group.ranks()
    assert before.step == step
    logprobs = group.client.forward_logprobs(batch)["logprobs"]
    for _ in range(2):  # the actor looks for the samples that are to blame each time
        with pytest.raises(StepRefused, match=rf"after an update.*is back at step {before.step}") as refused:
            train(group, before.step + 1, with_advantage(batch, FAILS_AFTER_AN_UPDATE))
        assert refused.value.went_back
        after = group.client.wait_ready()
        assert (after.group, after.step, after.consumed) == (before.group, before.step, before.consumed)
        assert group.ranks() == ranks
        assert torch.equal(group.client.forward_logprobs(batch)["logprobs"], logprobs), "an update was kept"
        assert "loss" in group.client.check(before.step + 1, batch), "its samples can be tried"
    for failing in (with_advantage(batch, FAILS_AFTER_AN_UPDATE), batch):  # and then somebody has to look
        with pytest.raises(StepsHeld, match="after an update.*and makes no step"):
            train(group, before.step + 1, failing)
    found = [e for e in events.recent(group.etcd, group.keys) if e.kind == "trainer.rewound"]
    assert len(found) == 3 and {e.severity for e in found} == {Severity.ERROR}
    assert all("after an update" in e.message for e in found)
    term = fencing.begin_term(group.etcd, group.keys, group.ctx.epoch, "a restarted actor")
    group.client.close()
    group.client = TrainerClient(group.etcd, group.keys, dcs_security(group.ctx.config), epoch=group.ctx.epoch,
                                 term=term)
    assert train(group, before.step + 1)["policy_version"] > before.policy_version


def test_actor_that_was_replaced_can_change_nothing_any_more(group: Group) -> None:
    before = group.client.wait_ready()
    old = group.client
    term = fencing.begin_term(group.etcd, group.keys, group.ctx.epoch, "another replica")
    with pytest.raises(Fenced):  # although the new one has not spoken to the trainer yet
        train(group, before.step + 1)
    group.client = TrainerClient(group.etcd, group.keys, dcs_security(group.ctx.config), epoch=group.ctx.epoch,
                                 term=term)
    assert group.client.wait_ready().step == before.step
    old.close()


def await_end(ranks: list[psutil.Process]) -> None:
    wait_until(lambda: all(not runs(rank) for rank in ranks), what="the end of the ranks")


def test_ranks_die_with_a_killed_agent_and_a_new_agent_resumes(group: Group) -> None:
    if (found := group.client.wait_ready()).phase == "sft":  # when this test runs alone
        group.client.save("sft", found.step, begin_rl=True)
    first = group.client.wait_ready().step + 1
    for step in range(first, first + 2 - first % 2):  # the last one is odd, so its state is not saved
        train(group, step)
    before = group.client.wait_ready()
    ranks = group.ranks()
    made = tagged_files(tag := JobPaths.of(group.ctx.config).file_tag("trainer"))
    assert len(ranks) == 2 and any(list(folder.glob("torchelastic_*")) for folder in made)
    os.kill(group.agent.pid, signal.SIGKILL)
    group.agent.wait(timeout=60)
    await_end(ranks)
    assert remove_files(tag) and not tagged_files(tag)
    group.start_agent()
    after = group.ready(after=before.group)
    saved = before.step // STATE_EVERY * STATE_EVERY
    assert saved < before.step and (after.phase, after.step, after.restarts) == ("rl", saved, 0)
    assert after.policy_version > before.policy_version
    assert after.branch.first == after.policy_version


def test_reference_policy_is_stored_once_for_all_states_that_have_it(group: Group) -> None:
    """The reference is made anew after each even step, and the step after one uses it still."""
    before = group.client.wait_ready()
    assert before.step % STATE_EVERY == 0
    train(group, before.step + 1)
    assert group.client.save("rl", before.step + 1)["committed"]
    after = group.client.wait_ready()
    numbers = before.state_version, after.state_version
    saved = reads.get_version(group.etcd, group.keys, Stream.TRAINER_STATE, after.state_version)
    assert saved.meta["branch"] == after.branch.to_json(), "what was abandoned is saved with the state"
    with Puller(group.etcd, group.keys, "test", io_timeout_s=10, security=dcs_security(group.ctx.config)) as puller:
        stored = []
        for number in numbers:
            with puller.pull("trainer_state", number) as pulled:
                stored.append({t.name: t.slices for t in pulled.manifest.tensors})
    names = [name for name in stored[0] if name.startswith("reference.")]
    assert len(names) > 10
    for name in names:
        assert stored[0][name] == stored[1][name]
        weight = name.removeprefix("reference.")
        assert stored[0][weight] != stored[1][weight], "the policy was trained in between"


def restart_with(group: Group, **algorithm: Any) -> TrainerStatus:
    """The status of a group with other settings of the algorithm."""
    before, ranks = group.client.wait_ready(), group.ranks()
    stop(group.agent.pid)
    await_end(ranks)
    cfg = group.ctx.config
    changed = cfg.model_copy(update={"algorithm": cfg.algorithm.model_copy(update=algorithm)})
    group.ctx.model_copy(update={"config": changed}).save(group.folder / "context.json")
    group.start_agent()
    return group.ready(after=before.group)


@full(proved_in="tests/unit/trainer/test_reference.py", why="the refusal of a real group, of two starts with other "
                                                            "settings")
def test_state_without_a_reference_policy_is_not_trained_on_with_another_one(group: Group) -> None:
    """Neither a start with such settings nor a release that does not compare them may make the reference another."""
    without = restart_with(group, kl_coef=0.0)
    assert group.client.save("rl", without.step)["committed"]
    again = restart_with(group)
    for _ in range(2):
        with pytest.raises(ConfigError, match="has no reference policy"):
            train(group, again.step + 1)
    with pytest.raises(ConfigError, match="has no reference policy"):
        reference_logprobs(group, batch_for(group), again.step + 1)
    assert group.client.wait_ready() == again


def test_agent_of_an_older_epoch_ends_with_its_ranks(group: Group) -> None:
    group.client.wait_ready()
    ranks = group.ranks()
    fencing.raise_epoch(group.etcd, group.keys, holder="another driver")
    assert group.agent.wait(timeout=30) == FENCED_EXIT
    await_end(ranks)
