"""How the groups of the steps are generated: by the loop itself when a step takes them (``train.schedule: sync``), or
beside the steps (``background``). In both cases the flow decides which, and the step takes them from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from elastic_rl.data.intervals import IntervalSet
from elastic_rl.errors import GroupsLost
from elastic_rl.etcd.records import Engine
from elastic_rl.pipeline.flow.group_flow import FlowLimits
from elastic_rl.pipeline.flow.group_queue import EmbeddedQueue
from elastic_rl.pipeline.flow.shared_flow import OnPart, SharedFlow, Taken
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.rollouts import Rollouts


class Generation(Protocol):
    """Generates groups for one term of the actor. The loop's thread calls it."""

    @property
    def flow(self) -> SharedFlow: ...

    @property
    def engines(self) -> Sequence[Engine]:
        """The engines as of the last wait for a version."""

    def take(self, step: int, timer: StepTimer, on_part: OnPart) -> Taken:
        """The groups of a step, as soon as there are enough. Raises Fenced, and what ``on_part`` and a repeated publish
        of the weights raise; the same step may be taken again after that."""

    def lost(self, error: GroupsLost) -> None:
        """Groups that ``take`` gave are gone from the queue: they are generated again."""

    def take_idle_s(self, timer: StepTimer) -> dict[str, float]:
        """Seconds since the last call in which the loop waited, by stage; together at most what the step has taken."""

    def take_metrics(self) -> dict[str, float]:
        """Metrics of what went on beside the steps since the last call, by the names of ``training_metrics``."""

    def close(self) -> None: ...


class InlineGeneration:
    """The loop's thread generates what the flow grants, all of it, and then takes the step. Generation and training
    alternate, so that they may share devices."""

    def __init__(self, limits: FlowLimits, rollouts: Rollouts, lease: Callable[[IntervalSet], None]) -> None:
        """``lease``: writes down that this actor works on these groups; raises Fenced and EtcdUnavailable."""
        self.flow = SharedFlow(limits, EmbeddedQueue(limits.capacity))
        self._rollouts, self._lease = rollouts, lease

    @property
    def engines(self) -> Sequence[Engine]:
        return self._rollouts.pool.engines

    def take(self, step: int, timer: StepTimer, on_part: OnPart) -> Taken:
        taken = self.flow.take(self._rollouts.waits, lambda: self._generate(step, timer), lambda loss: None, on_part)
        return replace(taken, metrics={})  # they are of groups that wait for their step

    def _generate(self, step: int, timer: StepTimer) -> None:
        """The groups are handed on together and by ordinal, however they finish, so that filters see them, and the
        limit of dropped groups counts them, in an order that every run of this seed has."""
        if (grant := self.flow.lease(0.0)) is None:
            raise RuntimeError(f"step {step} lacks groups, and the flow grants none")
        rollouts = self._rollouts
        try:
            rollouts.waits.stage("source")
            self._lease(self.flow.open)
            groups = rollouts.generate(step, grant.min_version, timer, lambda: rollouts.sampler.training_groups(
                rollouts.prompts.training(grant.ordinals), grant.min_version, self.flow.rewarded))
        except BaseException:
            self.flow.give_back(grant)
            raise
        for group, reason in groups:
            self.flow.finished(group, reason, rollouts.waits)

    def lost(self, error: GroupsLost) -> None:
        pass  # every group that is not consumed is generated again when the flow resumes

    def take_idle_s(self, timer: StepTimer) -> dict[str, float]:
        return self._rollouts.waits.take_idle_s()

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.flow.close()
