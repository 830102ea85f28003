"""Which agent has the name of a host: one at a time, and never two that take it from each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.etcd.cluster_records import Host
from elastic_rl.host.agent.host_session import HostName, name_of_host


def record(incarnation: str) -> Host:
    return Host(id="h", incarnation=incarnation)


@pytest.mark.parametrize(("registered_at", "incarnation", "verdict"), [
    (0, "a", HostName.FREE), (5, "a", HostName.FREE), (6, "a", HostName.REPLACED),
    (5, "b", HostName.TAKEN), (6, "b", HostName.TAKEN)])
def test_name_is_taken_over_from_a_predecessor_only(registered_at: int, incarnation: str, verdict: HostName) -> None:
    assert name_of_host(registered_at, record(incarnation), "a", began=5) is verdict


def test_record_of_a_newer_release_is_not_replaced() -> None:
    assert name_of_host(3, None, "a", began=5) is HostName.TAKEN


@dataclass
class Agent:
    """An agent as ``HostSession`` registers it. ``leases``: its own, by the revision of their registration."""

    incarnation: str
    began: int
    leases: set[int] = field(default_factory=set)
    replaced: bool = False


class Registrations:
    """A model of etcd's registration of one host, and of the agents that want it."""

    def __init__(self) -> None:
        self.revision, self.there = 1, 0
        self.record: Host | None = None
        self.agents: list[Agent] = []
        self.changes = 0

    def start(self, incarnation: str) -> None:
        self.agents.append(Agent(incarnation, self.revision))

    def attempt(self, agent: Agent) -> None:
        if agent.replaced or self.there in agent.leases:
            return
        match name_of_host(self.there, self.record, agent.incarnation, agent.began):
            case HostName.FREE:
                if self.there:
                    assert self.record is not None and self.record.incarnation == agent.incarnation
                self.revision += 1
                self.changes += 1
                self.there, self.record = self.revision, record(agent.incarnation)
                agent.leases.add(self.there)
            case HostName.REPLACED:
                agent.replaced = True

    def expire(self) -> None:
        """The lease of whoever is registered ends."""
        self.revision, self.there, self.record = self.revision + 1, 0, None


@settings(max_examples=seeds(100))
@given(st.lists(st.one_of(
    st.sampled_from(["expire", "tick"]), st.tuples(st.just("start"), st.sampled_from("ab")),
    st.tuples(st.just("attempt"), st.integers(0, 7))), max_size=40))
def test_agents_of_one_name_come_to_rest(steps: list[str | tuple[str, object]]) -> None:
    """Whatever has happened, once no lease ends any more each agent registers at most once more, and one of them has
    the name."""
    world = Registrations()
    for step in steps:
        match step:
            case "expire":
                world.expire()
            case "tick":
                world.revision += 1
            case ("start", str(incarnation)) if len(world.agents) < 8:
                world.start(incarnation)
            case ("attempt", int(number)) if world.agents:
                world.attempt(world.agents[number % len(world.agents)])
    before = world.changes
    for _ in range(2 * len(world.agents) + 1):
        for agent in world.agents:
            world.attempt(agent)
    rested = world.changes
    for agent in world.agents:
        world.attempt(agent)
    assert world.changes == rested <= before + len(world.agents)
    living = [agent for agent in world.agents if not agent.replaced]
    assert not living or any(world.there in agent.leases for agent in living)
