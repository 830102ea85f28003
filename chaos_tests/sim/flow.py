"""The world of ``pipeline`` in which groups are generated beside the steps, by the real flow.

An actor has two sides, which are advanced in any order: one carries out the effects of the schedule, the other one
generates what the flow grants. Rollouts take any time, so that they span versions and overtake one another. The queue
between the two loses groups, and now and then all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from chaos_tests.sim.pipeline import LIMITS, PLAN, RL_KINDS, Actor, Recorder, World
from chaos_tests.sim.violation import RuleViolated
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.errors import Fenced
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.flow.group_flow import FlowCounts, FlowLimits, GroupFlow
from elastic_rl.pipeline.schedule import Lost, TakenStep

ASYNC_LIMITS = replace(LIMITS, max_staleness=2, beside_steps=True)


KINDS = RL_KINDS | {
    "group finished during a step", "group of several versions", "groups gone when they were chosen",
    "loss of the queue seen at once", "queue lost a part", "queue lost all", "samples of several versions",
    "samples older than the newest version"}
"""What can happen in each of these worlds."""


@dataclass
class Rollout:
    """A group that is being generated, by an engine of some version at its start."""

    ordinal: int
    version: int = 0
    """0: not begun."""
    min_version: int = 0
    left: int = 0


@dataclass
class AsyncActor(Actor):
    running: list[Rollout] = field(default_factory=list)
    producing: Iterator[None] = iter(())


class AsyncWorld(World):
    """``loses``: whether the queue does. ``turns``: of its producer that the rollout of an ordinal takes; random ones
    without it."""

    def __init__(self, seed: int, limits: FlowLimits = ASYNC_LIMITS, *, loses: bool = True,
                 turns: Callable[[int], int] | None = None, lies: float = 0.0, trusts_trainer: bool = False,
                 state_every: int = 2, deaths: int = 0, recorder: Recorder | None = None) -> None:
        super().__init__(seed, replace(PLAN, steps=limits.steps, groups_per_step=limits.groups_per_step), limits,
                         lies=lies, trusts_trainer=trusts_trainer, state_every=state_every, deaths=deaths,
                         recorder=recorder)
        self.loses = loses
        self.turns = turns or (lambda ordinal: self.random.randint(0, 12))
        self.generated: list[int] = []
        """Ordinals in the order in which they finished."""
        self.flow_counts: list[FlowCounts] = []
        self.overlaps = 0
        """Groups that finished while a step was being made."""
        self.most_open = 0
        self.parts = 0
        """That were computed with."""
        self.lost_at_ranks = 0
        """Steps whose groups were gone when the trainer's ranks read them."""

    def start_actor(self) -> None:
        if not self.etcd_up:
            return
        self.term += 1
        self.recorder.term_began(self.term)
        self.counts["actor beside another"] += bool(self.actors)
        flow = GroupFlow(self.limits)
        actor = AsyncActor(self.term, flow, schedule.run_rl(self.plan, flow))
        self.flow_counts.append(flow.counts)
        actor.doing = self.drive(actor)
        actor.producing = self.produce(actor)
        self.actors.append(actor)

    def advance(self, actor: Actor) -> None:
        assert isinstance(actor, AsyncActor)
        if self.random.random() < 0.5:
            super().advance(actor)
            return
        try:
            next(actor.producing)
        except Fenced:
            self.counts["actor fenced"] += 1
            self.actors.remove(actor)
            if actor.term == self.term:
                raise RuleViolated("I11", "the newest actor ended") from None

    def produce(self, actor: AsyncActor) -> Iterator[None]:
        while True:
            yield
            flow = actor.flow
            if (grant := flow.lease()) is not None:
                yield from self.fenced_write(actor, lambda: self.recorder.leased(
                    actor.term, actor.flow.open))
                actor.running += [Rollout(o, min_version=grant.min_version, left=self.turns(o)) for o in grant.ordinals]
            bound = (self.limits.max_staleness + 1) * self.limits.groups_per_step
            depth = flow.depth
            self.most_open = max(self.most_open, depth.leased + depth.queued + depth.training)
            # A rollout that is begun is not ended.
            if self.judges and (self.most_open > bound or len(actor.running) > bound):
                running = [rollout.ordinal for rollout in actor.running if rollout.ordinal in flow.open]
                self.counts["rollout of a group that a predecessor's step has consumed"] += len(running) <= bound
                if self.most_open > bound or len(running) > bound:
                    raise RuleViolated("I5", f"{self.most_open} groups are open and {running} are generated: {bound} "
                                             "may be")
            if not self.engines_up:
                continue
            for rollout in list(actor.running):
                if not rollout.version:
                    if self.served >= rollout.min_version and self.served > 0:
                        rollout.version = self.served
                elif rollout.left:
                    rollout.left -= 1
                else:
                    actor.running.remove(rollout)
                    self.finish(actor, rollout)
            if self.loses and actor.queue and self.random.random() < 0.01:
                # One storage unit is gone, or the whole queue. Some losses are seen at once, others when it is read.
                gone = [o for o in actor.queue if self.random.random() < 0.5] if self.random.random() < 0.5 else list(
                    actor.queue)
                self.counts["queue lost a part" if actor.queue.keys() - set(gone) else "queue lost all"] += 1
                for ordinal in gone:
                    del actor.queue[ordinal]
                if self.random.random() < 0.5:
                    self.counts["loss of the queue seen at once"] += 1
                    flow.lost(gone)

    def finish(self, actor: AsyncActor, rollout: Rollout) -> None:
        """Its last tokens are of the version that is served now: a partial rollout went on over the updates."""
        versions = sorted({self.said(rollout.version, rollout.ordinal), self.said(self.served, rollout.ordinal)})
        group = Group(rollout.ordinal, Prompt((1,)), (Sample(tuple(
            Segment((2,), (-0.1,), version=version) for version in versions)),))
        drop = "uniform" if random.Random(rollout.ordinal).random() < 0.2 else ""
        self.generated.append(rollout.ordinal)
        self.overlaps += actor.flow.depth.training > 0
        self.counts["group finished during a step"] += actor.flow.depth.training > 0
        self.counts["group of several versions"] += len(versions) > 1
        if actor.flow.finished(rollout.ordinal, group.versions, drop):
            actor.queue[rollout.ordinal] = group
            if not actor.flow.arrived(rollout.ordinal):
                del actor.queue[rollout.ordinal]

    def perform(self, actor: Actor, effect: schedule.Effect) -> Generator[None, None, Any]:
        assert isinstance(actor, AsyncActor)
        if isinstance(effect, schedule.Train) and self.limits.groups_per_part is None:
            yield
            if missing := [g.ordinal for g in effect.taken.groups.groups if g.ordinal not in actor.queue]:
                self.counts["groups gone when the ranks read them"] += 1
                self.lost_at_ranks += 1  # which read their samples themselves
                actor.flow.not_loaded(missing)
                raise Lost("groups are gone from the queue")
        return (yield from super().perform(actor, effect))

    def take(self, actor: Actor) -> Generator[None, None, TakenStep]:
        """Groups are generated beside the steps. Each part is loaded when it is chosen, and computed with: its data are
        not needed in the queue again."""
        actor.flow.choose_again()
        groups: dict[int, Group] = {}
        while True:
            yield
            for ordinal in actor.flow.take_stale():
                self.counts["stale group dropped"] += 1
                actor.queue.pop(ordinal, None)
            if (part := actor.flow.choose()) is None:
                continue
            if missing := [o for o in part.ordinals if o not in actor.queue]:
                self.counts["groups gone when they were chosen"] += 1
                actor.flow.not_loaded(missing)
                continue
            if part.first:
                groups = {}
            groups |= {o: actor.queue[o] for o in part.ordinals}
            self.parts += 1
            self.counts["part of a step"] += part.step is None
            if part.step is not None:
                return TakenStep(StepGroups.from_groups([groups[o] for o in part.step.ordinals]), part.step.consumption)
