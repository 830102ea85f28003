"""A real trainer group of two replicas, one of which is much slower than the other and alive."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.elastic_group import Group, elastic_group
from support.etcd_server import EtcdServers
from support.slow_algorithm import SLOW_LOSSES, SLOW_RANK, SLOW_S
from support.waiting import wait_until

from elastic_rl.coordinator.membership.hang_detection import is_idle
from elastic_rl.data.batch import Batch, collate
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.samples import Sample, Segment
from elastic_rl.data.sources import make_source
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import Member
from elastic_rl.trainer.forward import IN_PASSES, WAITING

LIMIT_S = 20.0
"""What a collective may take: less than the slow replica takes longer than the other."""


@pytest.fixture(scope="module")
def group(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with elastic_group(etcd_servers.endpoints, tmp_path_factory.mktemp("group"), {
            "sft": {"max_steps": 0}, "deterministic": True, "algorithm": {"name": "support.slow_algorithm:spec"},
            "train": {"updates_per_step": 1, "prompts_per_step": 8},
            "trainer": {"data_parallel": 2, "micro_batch_tokens": 64, "collective_timeout_s": LIMIT_S}}) as made:
        yield made


def batch_of(group: Group) -> Batch:
    rows = [(p, Sample((Segment(p.answer_ids, (-2.0,) * len(p.answer_ids), version=1),)))
            for p in make_source(group.ctx.config).train[:64]]
    return collate(rows, [1.0, -1.0] * (len(rows) // 2))


def test_others_wait_for_a_slow_replica_however_long_and_the_step_is_the_same(group: Group) -> None:
    client, batch = group.client, batch_of(group)
    client.wait_ready()
    assert client.save("sft", 0, begin_rl=True)["committed"]
    before = client.wait_ready()
    consumption, versions = Consumption(IntervalSet(((0, 8),))), group.newest_version()

    def rank(number: int) -> Member:
        return next(m for m in members(group.etcd, group.keys, "trainer") if m.id == f"rank-{number}")

    with ThreadPoolExecutor(1) as thread:
        making = thread.submit(client.update, "rl", 1, batch, versions=versions, consumption=consumption)
        waiting = wait_until(lambda: found if (found := rank(1 - SLOW_RANK)).phase == WAITING else None,
                             what="that the other rank waits")
        slow = wait_until(lambda: found if (found := rank(SLOW_RANK)).phase == IN_PASSES else None,
                          what="that the slow one works")
        assert is_idle(waiting.phase), "the leader takes it for hung"
        assert slow.work is not None and slow.work.flops > 0, "it does not say what its work costs"
        made = making.result()
    assert made["train_s"] > SLOW_LOSSES * SLOW_S > LIMIT_S
    after = client.wait_ready()
    assert (after.group, after.step, after.restarts) == (before.group, 1, before.restarts)

    assert client.load(before.state_version, "rl", 1)["loaded"]
    client.wait_ready()
    again = client.update("rl", 1, batch, versions=group.newest_version(), consumption=consumption)
    for key in ("loss", "grad_norm", "logprob_diff_max", "tokens"):
        assert again[key] == made[key], key
