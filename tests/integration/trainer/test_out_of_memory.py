"""A rank of two, between which the model is split, has too little memory for one prompt group of a step."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence

import pytest
from support.elastic_group import Group, elastic_group
from support.etcd_server import EtcdServers
from support.no_memory_algorithm import MARK
from support.waiting import wait_until

from elastic_rl.data.batch import collate
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.samples import TRAIN_FAILED, Prompt, Sample, Segment
from elastic_rl.data.samples import Group as PromptGroup
from elastic_rl.data.sources import make_source
from elastic_rl.errors import Conflict, GroupsFailed
from elastic_rl.etcd import events
from elastic_rl.etcd.records import JobStatus
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.schedule import TakenStep
from elastic_rl.pipeline.training.group_trials import GroupTrials
from elastic_rl.pipeline.training.step_maker import StepMaker
from elastic_rl.pipeline.training.training_batch import MadeBatch
from elastic_rl.pipeline.waits import Waits

POISON = 10


@pytest.fixture(scope="module")
def group(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with elastic_group(etcd_servers.endpoints, tmp_path_factory.mktemp("group"), {
            "sft": {"max_steps": 0}, "trainer": {"tensor_parallel": 2, "data_parallel": 1, "max_restarts": 1},
            "algorithm": {"name": "support.no_memory_algorithm:spec"},
            "train": {"updates_per_step": 1, "prompts_per_step": 8, "state_every_steps": 1}}) as made:
        yield made


class Batches:
    """Right answers to the prompts whose numbers are the ordinals of the groups; ``MARK`` in those of one group."""

    def __init__(self, group: Group) -> None:
        self._prompts = make_source(group.ctx.config).train
        self.made: list[tuple[int, ...]] = []

    def make(self, groups: StepGroups, step: int, timer: StepTimer, *, tried: bool = False) -> MadeBatch:
        self.made.append(tuple(g.ordinal for g in groups.groups))
        advantages = [1.0 - 2.0 * i for g in groups.groups for i in range(len(g.samples))]
        rows = [(prompt := self._prompts[g.ordinal], MARK if g.ordinal == POISON else prompt.answer_ids or ())
                for g in groups.groups for _ in g.samples]
        return MadeBatch(collate([(p, Sample((Segment(answer, (-2.0,) * len(answer), version=1),)))
                                  for p, answer in rows], advantages), advantages, {})

    def forget(self) -> None:
        pass


def taken(version: int, ordinals: Sequence[int], dropped: Sequence[int] = ()) -> TakenStep:
    sample = Sample((Segment((2,), (-0.1,), version=version),))
    return TakenStep(StepGroups.from_groups([PromptGroup(o, Prompt((1,)), (sample, sample)) for o in ordinals]),
                     Consumption(IntervalSet.from_values(ordinals), {
                         TRAIN_FAILED: IntervalSet.from_values(dropped)} if dropped else {}))


def test_group_for_which_a_rank_lacks_memory_in_a_collective_is_found_and_dropped(group: Group) -> None:
    client = group.client
    client.wait_ready()
    assert client.save("sft", 0, begin_rl=True)["committed"]
    before, waits, batches = client.wait_ready(), Waits(lambda *_: None, threading.Event()), Batches(group)
    maker = StepMaker(batches, client, waits, GroupTrials(group.ctx.config, waits), in_parts=False)

    def make(ordinals: Sequence[int], dropped: Sequence[int] = ()) -> dict[str, object]:
        """Makes a step as the loop does, which resumes first."""
        assert client.wait_ready().step == 0
        [version] = group.newest_version()
        return maker.make(taken(version, ordinals, dropped), 1, StepTimer(), {})[0]

    with pytest.raises(Conflict, match="goes back from step 1: rank 1 has too little memory for update of rl step 1"):
        make(range(8, 12))
    assert batches.made == [(8, 9, 10, 11)] and client.wait_ready().group != before.group
    with pytest.raises(Conflict, match="while the groups of step 1 were tried"):
        make(range(8, 12))
    assert (8, 9, 10, 11) not in batches.made[1:], "it is not computed with again"
    with pytest.raises(GroupsFailed, match=r"with groups \[10\]: rank 1 has too little memory") as failed:
        make(range(8, 12))
    assert failed.value.ordinals == (POISON,)
    assert make((8, 9, 11, 12), (POISON,))["grad_norm"]
    after = client.wait_ready()
    assert (after.step, after.consumed.dropped) == (1, {TRAIN_FAILED: 1})
    refused = [e for e in events.recent(group.etcd, group.keys) if e.kind == "trainer.refused"]
    assert len(refused) == sum(POISON in ordinals for ordinals in batches.made) > 1
    assert refused[0].data["groups"]["trained"] and all(e.data["rank"] == 1 for e in refused)
    assert len(refused) > group.ctx.config.trainer.max_restarts, "they have used up none of the restarts"


def test_losses_use_up_restarts_only_while_the_job_makes_no_step(group: Group) -> None:
    """``max_restarts`` is 1. In a run of weeks ranks are lost many times, and each time it recovers."""
    def lost() -> None:
        before = group.client.wait_ready()
        os.kill(group.rank(1), signal.SIGKILL)
        group.ready(after=before.group)

    def exhausted() -> list[str]:
        return [e.message for e in events.recent(group.etcd, group.keys) if e.kind == "trainer.restarts_exhausted"]

    for step in range(101, 104):
        group.etcd.put(group.keys.job_status(), JobStatus(phase="rl", step=step).encode())
        lost()
    assert not exhausted()
    os.kill(group.rank(1), signal.SIGKILL)
    wait_until(exhausted, what="the end of the agent")
    [message] = exhausted()
    assert re.fullmatch(r"1 restarts without a step .*: rank [01] \(pid \d+\) ended with exit code .*", message)
