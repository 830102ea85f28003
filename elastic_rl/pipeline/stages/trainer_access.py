"""The trainer groups of one term of the actor, and which side has the devices where they are shared."""

from __future__ import annotations

from elastic_rl.etcd import event_kinds
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.stages.term import ActorTerm
from elastic_rl.pipeline.training.commits import until_committed
from elastic_rl.pipeline.training.trainers import Trainers
from elastic_rl.pipeline.training.turns import OwnDevices, SharedDevices, Turns


class TrainerAccess:
    """The trainer groups and the turns, used by the loop's thread."""

    def __init__(self, term: ActorTerm) -> None:
        self._term = term
        self.groups = Trainers(
            term.etcd, term.keys, term.security, term.cfg, epoch=term.ctx.epoch, term=term.number,
            on_wait=self._on_wait, waits=term.waits, on_recovered=lambda group: term.emit(
                event_kinds.GROUPS[group].recovered, group, f"the group {group} computes again", step=term.step),
            publish_again=self._publish_lost_policy)
        self.turns: Turns = OwnDevices() if not term.cfg.colocated else SharedDevices(
            term.etcd, term.keys, term.writer, term.waits, self.groups, epoch=term.ctx.epoch, term=term.number)

    def close(self) -> None:
        self.groups.close()

    def _on_wait(self, group: str, what: str) -> None:
        if what:
            self._term.waits.waits(group, what)
        else:  # it answers; its ranks report their own progress
            self._term.alive("waiting for the trainer's step")

    def publish_again(self, version: int) -> None:
        """Publishes the weights again for engines that cannot get this version: its chunks may be lost with the node
        that had them, and the trainer has the weights. Raises TrainerFailed, Conflict and Fenced."""
        self._term.events.republished(version, f"engines lack version {version}")
        self.publish_weights_again()
        self._term.waits.stage("sync")

    def publish_weights_again(self) -> None:
        self.turns.to_trainer(StepTimer())
        if self._term.cfg.colocated:  # a trainer whose memory is offloaded does not repeat a commit that failed
            committed = until_committed(self._term.waits, self.groups.publish_policy)
            self.turns.to_engines(int(committed["policy_version"]), StepTimer())
        else:
            self.groups.publish_policy()

    def _publish_lost_policy(self, step: int, version: int) -> None:
        """Publishes the policy again for a group that computes with that of a step; nobody has an earlier one any more.
        """
        if step != self.groups.step:
            return
        self._term.events.republished(version, f"version {version} of the policy is lost")
        self.turns.to_trainer(StepTimer())
        self.groups.publish_policy()
