"""Gradients of parts of a step in a real trainer group of two replicas. What was accumulated is lost with a rank, with
a publish in between, and with a part that is left out; the step is then made of all its parts again."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import psutil
import pytest
import torch
from support.elastic_group import Group, elastic_group
from support.etcd_server import EtcdServers
from support.tiers import full

from elastic_rl.data.batch import Batch, collate
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.samples import Sample, Segment
from elastic_rl.data.sources import make_source
from elastic_rl.errors import Conflict, TrainerFailed


@pytest.fixture(scope="module")
def group(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with elastic_group(etcd_servers.endpoints, tmp_path_factory.mktemp("group"), {
            "sft": {"max_steps": 0}, "algorithm": {"kl_coef": 0.1}, "trainer": {"data_parallel": 2},
            "train": {"schedule": "fully_async", "updates_per_step": 1, "prompts_per_step": 8, "prompts_per_part": 3,
                      "state_every_steps": 2}}) as made:
        yield made


def parts_of(group: Group) -> list[Batch]:
    """A batch in three parts, one of which has fewer samples than there are replicas."""
    rows = [(p, Sample((Segment(p.answer_ids, (-2.0,) * len(p.answer_ids), version=1),)))
            for p in make_source(group.ctx.config).train[:32]]
    batch = collate(rows, [1.0, -1.0] * (len(rows) // 2))
    return [batch.share(torch.arange(start, stop)) for start, stop in ((0, 15), (15, 16), (16, 32))]


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
    client.accumulate(2, parts[0], 0, versions=group.newest_version())
    with pytest.raises(Conflict, match=": 1 are accumulated"):
        client.apply(2, 2, versions=group.newest_version(), consumption=groups_of(2))
    before = group.newest_version()
    assert client.save("rl", 1, publish=True)["committed"]
    assert group.newest_version() > before
    with pytest.raises(Conflict, match="send the parts of the step again"):
        client.accumulate(2, parts[1], 1, versions=group.newest_version())
    client.accumulate(2, parts[0], 0, versions=before)  # the weights are the same, whatever their number


@full(proved_in="tests/integration/trainer/test_step_parts.py tests/integration/trainer/test_trainer_group.py "
                "tests/integration/pipeline/test_fully_async.py", why="a real rank that dies with parts of a step")
def test_parts_that_a_dead_rank_had_are_computed_again(group: Group) -> None:
    client, parts = group.client, parts_of(group)
    before = client.wait_ready()
    client.accumulate(2, parts[0], 0, versions=group.newest_version())
    psutil.Process(group.rank(1)).send_signal(signal.SIGKILL)
    with pytest.raises(TrainerFailed, match="re-formed"):
        for _ in range(1000):
            client.accumulate(2, parts[0], 0, versions=group.newest_version())
    again = group.ready(after=before.group)
    assert again.step == 1 and again.consumed == before.consumed
    with pytest.raises(Conflict, match=": 0 are accumulated"):
        client.accumulate(2, parts[1], 1, versions=group.newest_version())
    for number, part in enumerate(parts):
        client.accumulate(2, part, number, versions=group.newest_version())
    made = client.apply(2, 3, versions=group.newest_version(), consumption=groups_of(2))
    assert made["state_version"] > 0 and made["kl_reference"] > 0
    assert len(client.wait_ready().consumed.groups) == 16
