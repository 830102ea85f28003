"""Gradients of parts of a step in a real trainer group of two replicas. What was accumulated is lost with a rank, with
a publish in between, and with a part that is left out; the step is then made of all its parts again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch
from support.elastic_group import Group, elastic_group
from support.etcd_server import EtcdServers
from support.failing_algorithm import OVERFLOWS
from support.tiers import full

from elastic_rl.data.batch import Batch, collate
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.samples import TRAIN_FAILED, Prompt, Sample, Segment
from elastic_rl.data.samples import Group as PromptGroup
from elastic_rl.data.sources import make_source
from elastic_rl.errors import Conflict, GroupsFailed, TrainerFailed
from elastic_rl.pipeline.flow.accumulated import Accumulated
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.schedule import TakenStep
from elastic_rl.pipeline.training.group_trials import GroupTrials
from elastic_rl.pipeline.training.step_maker import StepMaker
from elastic_rl.pipeline.training.training_batch import MadeBatch
from elastic_rl.pipeline.waits import Waits
from elastic_rl.trainer.service.commands import Accumulate


@pytest.fixture(scope="module")
def group(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with elastic_group(etcd_servers.endpoints, tmp_path_factory.mktemp("group"), {
            "sft": {"max_steps": 0}, "trainer": {"data_parallel": 2},
            "algorithm": {"name": "support.failing_algorithm:spec", "kl_coef": 0.1},
            "train": {"schedule": "fully_async", "updates_per_step": 1, "prompts_per_step": 8, "prompts_per_part": 3,
                      "state_every_steps": 2}}) as made:
        yield made


def parts_of(group: Group) -> list[Batch]:
    """A batch in three parts, one of which has fewer samples than there are replicas."""
    rows = [(p, Sample((Segment(p.answer_ids, (-2.0,) * len(p.answer_ids), version=1),)))
            for p in make_source(group.ctx.config).train[:32]]
    batch = collate(rows, [1.0, -1.0] * (len(rows) // 2))
    return [batch.rows(torch.arange(start, stop)) for start, stop in ((0, 15), (15, 16), (16, 32))]


def groups_of(step: int) -> Consumption:
    return Consumption(IntervalSet(((8 * (step - 1), 8 * step),)))


def test_step_is_made_of_its_parts_and_of_no_others(group: Group) -> None:
    client, parts = group.client, parts_of(group)
    client.wait_ready()
    assert client.save("sft", 0, begin_rl=True)["committed"]
    client.wait_ready()
    for number, part in enumerate(parts):
        client.accumulate(1, part, number, versions=group.newest_version())
    made = client.apply(1, 3, versions=group.newest_version(), consumption=groups_of(1), cursor={"next": 1})
    assert made["tokens"] == sum(part.loss_tokens for part in parts) and made["grad_norm"] > 0
    assert made["kl_reference"] == 0.0, "the policy with which RL began, put in its place for each part, and taken out"
    assert made["advantage_mean"] == 0.0 and made["advantage_std"] == 1.0 and made["train_tokens_per_s"] > 0
    status = client.wait_ready()
    assert (status.step, status.cursor) == (1, {"next": 1}) and len(status.consumed.groups) == 8

    with pytest.raises(Conflict, match=": 0 are accumulated"):
        client.apply(2, 0, versions=group.newest_version(), consumption=groups_of(2))
    with pytest.raises(Conflict, match=": 0 are accumulated"):
        client.accumulate(2, parts[1], 1, versions=group.newest_version())
    with pytest.raises(Conflict, match="does not follow"):
        client.accumulate(1, parts[0], 0, versions=group.newest_version())
    uploaded = client.upload(parts[0])
    with pytest.raises(Conflict, match="does not follow"):
        client.execute(partial(Accumulate, step=7, part=0, sample_versions=group.newest_version()), uploaded)
    with pytest.raises(Conflict, match="not every rank has its share"):  # that of a refused command is not kept
        client.execute(partial(Accumulate, step=2, part=0, sample_versions=group.newest_version()), uploaded)
    client.accumulate(2, parts[0], 0, versions=group.newest_version())
    with pytest.raises(Conflict, match=": 1 are accumulated"):
        client.apply(2, 2, versions=group.newest_version(), consumption=groups_of(2))
    before = group.newest_version()
    assert client.save("rl", 1, publish=True)["committed"]
    assert group.newest_version() > before
    with pytest.raises(Conflict, match="send the parts of the step again"):
        client.accumulate(2, parts[1], 1, versions=group.newest_version())
    client.accumulate(2, parts[0], 0, versions=before)  # the weights are the same, whatever their number


class Batches:
    """Right answers to the prompts whose numbers are the ordinals of the groups; ``OVERFLOWS`` of one group."""

    def __init__(self, group: Group, poison: int) -> None:
        self._prompts, self._poison = make_source(group.ctx.config).train, poison

    def make(self, groups: StepGroups, step: int, timer: StepTimer, *, tried: bool = False) -> MadeBatch:
        advantages = [OVERFLOWS if g.ordinal == self._poison else 1.0 - 2.0 * i
                      for g in groups.groups for i in range(len(g.samples))]
        prompts = [self._prompts[g.ordinal] for g in groups.groups for _ in g.samples]
        return MadeBatch(collate([(p, Sample((Segment(p.answer_ids, (-2.0,) * len(p.answer_ids), version=1),)))
                                  for p in prompts], advantages), advantages, {})

    def forget(self) -> None:
        pass


def taken(version: int, *ordinals: int) -> TakenStep:
    """Groups of samples of this version."""
    sample = Sample((Segment((2,), (-0.1,), version=version),))
    return TakenStep(StepGroups.from_groups([PromptGroup(o, Prompt((1,)), (sample, sample)) for o in ordinals]),
                     Consumption(IntervalSet.from_values(ordinals)))


def test_group_with_which_the_gradient_overflows_is_found_and_the_step_is_made_without_it(group: Group) -> None:
    client, before = group.client, group.client.wait_ready()
    waits, ranks, [version] = Waits(lambda *_: None, threading.Event()), group.ranks(), group.newest_version()
    logprobs = client.forward_logprobs(parts_of(group)[2])["logprobs"]
    makers = [StepMaker(Batches(group, 11), client, waits, GroupTrials(group.ctx.config, waits), in_parts=in_parts)
              for in_parts in (False, True)]
    with pytest.raises(GroupsFailed, match="norm of the gradient") as failed:
        makers[0].make(taken(version, 8, 9, 10, 11, 12), 2, StepTimer(), {})
    assert failed.value.ordinals == (11,)
    part = makers[1].add(taken(version, 8, 9).groups, 2, StepTimer(), Accumulated())
    part = makers[1].add(taken(version, 10, 11).groups, 2, StepTimer(), part)  # only the norm of all shows it
    with pytest.raises(GroupsFailed) as failed:
        makers[1].make(replace(taken(version, 8, 9, 10, 11), accumulated=part), 2, StepTimer(), {})
    assert failed.value.ordinals == (11,)
    assert client.wait_ready() == before and group.ranks() == ranks
    assert torch.equal(client.forward_logprobs(parts_of(group)[2])["logprobs"], logprobs)

    dropped = Consumption(IntervalSet.from_values([8, 9, 10, 12]), {TRAIN_FAILED: IntervalSet.from_values([11])})
    made, _ = makers[0].make(replace(taken(version, 8, 9, 10, 12), consumption=dropped), 2, StepTimer(), {})
    assert made["grad_norm"] > 0
    after = client.wait_ready()
    assert (after.step, after.consumed.dropped) == (2, {TRAIN_FAILED: 1})


@full(proved_in="tests/integration/trainer/test_step_parts.py tests/integration/trainer/test_trainer_group.py "
                "tests/integration/pipeline/test_fully_async.py", why="a real rank that dies with parts of a step")
def test_parts_that_a_dead_rank_had_are_computed_again(group: Group) -> None:
    client, parts = group.client, parts_of(group)
    before = client.wait_ready()
    client.accumulate(3, parts[0], 0, versions=group.newest_version())
    psutil.Process(group.rank(1)).send_signal(signal.SIGKILL)
    with pytest.raises(TrainerFailed, match="re-formed"):
        for _ in range(1000):
            client.accumulate(3, parts[0], 0, versions=group.newest_version())
    again = group.ready(after=before.group)
    assert again.step == 2 and again.consumed == before.consumed
    with pytest.raises(Conflict, match=": 0 are accumulated"):
        client.accumulate(3, parts[1], 1, versions=group.newest_version())
    for number, part in enumerate(parts):
        client.accumulate(3, part, number, versions=group.newest_version())
    made = client.apply(3, 3, versions=group.newest_version(), consumption=groups_of(3))
    assert made["kl_reference"] > 0
    assert len(client.wait_ready().consumed.groups) == len(before.consumed.groups) + 8
