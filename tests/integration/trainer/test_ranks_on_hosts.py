"""A trainer group with two agents, as on two hosts: the ranks of both make one group, which re-forms when one dies, and
ends when another formation begins, on other hosts or with another number of replicas. Real ranks, etcd and DCS node;
the agents share this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from support.elastic_group import Group, elastic_group
from support.etcd_server import EtcdServers
from support.rank_processes import spawn_agent
from support.waiting import wait_until

from elastic_rl.data.batch import Batch, collate
from elastic_rl.data.samples import demonstration
from elastic_rl.data.sources import make_source
from elastic_rl.dcs.catalog import reads
from elastic_rl.etcd.records import Formation, FormationHost
from elastic_rl.host.processes import stop
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.trainer.megatron.parallel import FENCED_EXIT
from elastic_rl.trainer.service.client import TrainerStatus

OTHER, THIRD = "127.0.0.3", "127.0.0.4"
"""Addresses of further hosts: loopback has many."""


class Formations:
    """The formations of a group, of one agent and rank a host."""

    def __init__(self, group: Group) -> None:
        self.group, self.number = group, 0
        self.agents: list[subprocess.Popen[bytes]] = []

    def form(self, *addresses: str) -> None:
        """Begins the next formation, with a rank at each address."""
        group, size = self.group, len(addresses)
        record = Formation(epoch=group.ctx.epoch, data_parallel=size, hosts=[
            FormationHost(name=address, address=address, ranks=1) for address in addresses])
        group.etcd.put(group.keys.formation("trainer"), record.encode())
        self.number += 1
        cfg = group.ctx.config
        ctx = group.ctx.model_copy(update={"formation": self.number, "config": cfg.model_copy(update={
            "trainer": cfg.trainer.model_copy(update={"data_parallel": size})})})
        context = ctx.save(group.folder / f"context-{self.number}.json")
        self.agents = [spawn_agent(context, f"--hosts={size}", "--ranks=1", f"--address={address}",
                                   log=group.folder / f"agent-{self.number}-{address}.log") for address in addresses]

    def instead(self, before: TrainerStatus, *addresses: str) -> TrainerStatus:
        """Begins the next formation, which ends the one that answered ``before``. Returns once it is ready."""
        old = self.agents
        self.form(*addresses)
        assert [agent.wait(60) for agent in old] == [FENCED_EXIT] * len(old)
        return self.group.ready(after=before.group)


@pytest.fixture
def formations(etcd_servers: EtcdServers, tmp_path: Path) -> Iterator[Formations]:
    with elastic_group(etcd_servers.endpoints, tmp_path, {
            "deterministic": True, "sft": {"max_steps": 20, "state_every_steps": 1},
            # A rank that is lost must be noticed long before a collective times out.
            "trainer": {"tensor_parallel": 1, "data_parallel": 2, "collective_timeout_s": 250.0,
                        "start_timeout_s": 260.0}}, starts=False) as group:
        made = Formations(group)
        try:
            yield made
        finally:
            for agent in made.agents:
                stop(agent.pid)


def demonstrations(group: Group) -> Batch:
    return collate((p, demonstration(p)) for p in make_source(group.ctx.config).train[:30])


def test_ranks_of_two_hosts_are_one_group_that_reforms_and_that_the_next_formation_replaces(formations: Formations
                                                                                            ) -> None:
    group = formations.group
    batch = demonstrations(group)
    formations.form(LOOPBACK, OTHER)
    first = group.ready()
    assert len(first.share_urls) == 2 and {url.rpartition(":")[0] for url in first.share_urls} == {
        f"http://{LOOPBACK}", f"http://{OTHER}"}
    on_host = [{child.pid for child in psutil.Process(agent.pid).children(recursive=True)}
               for agent in formations.agents]
    assert all(len(of_one & {rank.pid for rank in group.ranks()}) == 1 for of_one in on_host)
    for step in (1, 2):
        group.client.update("sft", step, batch)

    os.kill(group.rank(1), signal.SIGKILL)
    second = group.ready(after=first.group)
    assert second.restarts == 1 and all(agent.poll() is None for agent in formations.agents)
    for step in range(second.step + 1, 4):
        group.client.update("sft", step, batch)
    wait_until(lambda: reads.head(group.etcd, group.keys, "trainer_state").meta["step"] == 3, what="the state")
    before = group.client.forward_logprobs(batch)["logprobs"]
    loss = group.client.update("sft", 4, batch)["loss"]
    wait_until(lambda: reads.head(group.etcd, group.keys, "trainer_state").meta["step"] == 4, what="the state")

    # On other hosts the same number of replicas does the step again, bit for bit.
    third = formations.instead(second, LOOPBACK, THIRD)
    assert third.step == 4 and {url.rpartition(":")[0] for url in third.share_urls} == {
        f"http://{LOOPBACK}", f"http://{THIRD}"}
    group.client.load(_version_at(group, 3), "sft", 4)
    torch.testing.assert_close(group.client.forward_logprobs(batch)["logprobs"], before, rtol=0.0, atol=0.0)
    assert group.client.update("sft", 4, batch)["loss"] == loss

    # With fewer replicas it is the same to rounding.
    fourth = formations.instead(third, LOOPBACK)
    assert fourth.step == 4 and len(fourth.share_urls) == 1
    group.client.load(_version_at(group, 3), "sft", 4)
    torch.testing.assert_close(group.client.forward_logprobs(batch)["logprobs"], before, rtol=1e-4, atol=1e-5)
    assert group.client.update("sft", 4, batch)["loss"] == pytest.approx(loss, rel=1e-4)


def _version_at(group: Group, step: int) -> int:
    """The version of the state after a step."""
    return next(v.number for v in reads.list_versions(group.etcd, group.keys, "trainer_state")
                if v.meta["step"] == step and v.state.value == "committed")
