"""A real trainer group whose only DCS node dies: what it could not store is published again once there is a node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.dcs_nodes import await_node, spawn_node
from support.elastic_group import Group, elastic_group
from support.etcd_server import EtcdServers
from support.waiting import PATIENCE_S, wait_until

from elastic_rl.data.batch import collate
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.samples import Sample, Segment
from elastic_rl.data.sources import make_source
from elastic_rl.dcs.catalog import reads
from elastic_rl.etcd import events
from elastic_rl.host.processes import stop

IDLE_S = 10 * PATIENCE_S
"""Longer than this test waits for anything."""


@pytest.fixture
def group(etcd_servers: EtcdServers, tmp_path: Path) -> Iterator[Group]:
    with elastic_group(etcd_servers.endpoints, tmp_path / "group", {
            "sft": {"max_steps": 0}, "train": {"prompts_per_step": 8}, "coordinator": {"hang_max_s": 20 * IDLE_S},
            "trainer": {"tensor_parallel": 1, "data_parallel": 1, "collective_timeout_s": 10 * IDLE_S,
                        "start_timeout_s": 11 * IDLE_S}}) as made:
        yield made


def test_policy_that_no_node_had_taken_is_published_as_soon_as_there_is_one(group: Group) -> None:
    """However long the ranks are idle where there is nothing to do: a tenth of the limit of a collective."""
    client = group.client
    client.wait_ready()
    assert client.save("sft", 0, begin_rl=True)["committed"]
    client.wait_ready()
    rows = [(p, Sample((Segment(p.answer_ids, (-2.0,) * len(p.answer_ids), version=1),)))
            for p in make_source(group.ctx.config).train[:8]]
    before = reads.head(group.etcd, group.keys, "policy")
    assert before is not None
    group.node.kill()
    group.node.wait()
    client.update("rl", 1, collate(rows, [1.0, -1.0] * 4), versions=group.newest_version(),
                  consumption=Consumption(IntervalSet(((0, 8),))))
    dropped = wait_until(lambda: [e for e in events.recent(group.etcd, group.keys) if e.kind == "version.dropped"],
                         what="a publish that no node takes")
    node = spawn_node(group.ctx.etcd_endpoints, group.keys, "node-0", group.folder,
                      arena_bytes=group.ctx.config.dcs.arena_bytes)
    try:
        await_node(group.etcd, group.keys, node)
        head = wait_until(lambda: found if (found := reads.head(group.etcd, group.keys, "policy")) is not None
                          and found.number > before.number else None, what="the policy of the step")
    finally:
        stop(node.pid)
    assert head.number > dropped[-1].data["policy"] > before.number and head.meta["step"] == 1
