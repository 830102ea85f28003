"""Runs one job: asks the schedule what is done next, and has the stages of the job's mode do it.

What the trainer, or the output, answers decides where the run is: a lost group, or a step that another actor has taken,
sends the schedule back to the committed state.
"""

from __future__ import annotations

import contextlib
import threading
import time

from elastic_rl.errors import Conflict, GroupReformed, TrainerFailed
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.schedule import Lost
from elastic_rl.pipeline.stages.base import RoleCalls, Stages
from elastic_rl.pipeline.stages.rl import RlStages
from elastic_rl.pipeline.stages.sampled import SampledStages
from elastic_rl.pipeline.stages.sft import SftStages
from elastic_rl.pipeline.stages.term import ActorTerm
from elastic_rl.pipeline.waits import StopAsked
from elastic_rl.runtime.backoff import RetryBackoff

_LOST_RETRY_S = (0.5, 10.0)
"""Pauses after losses of the trainer with no step between them."""
_STOP_LOSSES = 3
"""Losses of the trainer after which a stop tries no further commit: a trainer that ends whenever it saves, as one
without room for that does, never commits."""


class Pipeline:
    """Runs one job to its last step, as one term of the actor."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, member: Membership, roles: RoleCalls,
                 stopping: threading.Event, stop_asked: threading.Event) -> None:
        """``stopping`` ends the run with Fenced, wherever it waits. ``stop_asked``: its operator stops it, so that it
        commits what is trained, and ends."""
        self._ctx, self._etcd, self._member, self._roles = ctx, etcd, member, roles
        self._stopping, self._stop_asked = stopping, stop_asked
        self.term = 0
        """The actor's term, once it has begun."""
        self.finished = False

    def run(self) -> None:
        """Returns when the job has finished, or was stopped. Raises Fenced when another term or epoch has begun."""
        term = ActorTerm.begin(self._ctx, self._etcd, self._member, self._stopping, self._stop_asked)
        self.term = term.number
        with contextlib.ExitStack() as closing:
            closing.callback(term.close)
            _drive(self._make_stages(term, closing), term)
            self.finished = True

    def _make_stages(self, term: ActorTerm, closing: contextlib.ExitStack) -> Stages:
        if term.cfg.mode == "rl":
            return RlStages(term, self._roles, closing)
        if term.cfg.mode == "sft":
            return SftStages(term, closing)
        return SampledStages(term, self._roles, closing)


def _drive(stages: Stages, term: ActorTerm) -> None:
    """Has every effect of the schedule carried out. Raises Fenced.

    A stop ends in a limited time. Its commit may wait, as for etcd or the checkpoint service: when the time of the stop
    is over, the run's process fences this actor off, whose wait then ends with Fenced. Or it may end the trainer, each
    time: after a few losses the run ends without it, since what was to be committed was lost with the first one.
    """
    waits, effects = term.waits, stages.effects
    effect = next(effects)
    lost = RetryBackoff(*_LOST_RETRY_S)
    stops, stop_losses = False, 0
    while True:
        if waits.stop_asked and not stops and not isinstance(effect, schedule.NOT_STOPPED):
            stops, effect = True, effects.throw(schedule.StopAsked())
        try:
            with waits.interruptible(isinstance(effect, schedule.INTERRUPTIBLE)):
                outcome = waits.retry("trainer", lambda e=effect: stages.carry_out(e),  # type: ignore[misc]
                                      end_on=(TrainerFailed, Conflict))
        except StopAsked:
            stops, effect = True, effects.throw(schedule.StopAsked())
            continue
        except (TrainerFailed, Conflict) as e:
            stops = False  # what was to be saved is gone, or another step is there
            stages.lost(e)
            _report_loss(term, e)
            effect = effects.throw(Lost(str(e)))
            stop_losses += waits.stop_asked
            if stop_losses >= _STOP_LOSSES:  # in the place of where the trainer is: what it has stays committed
                stops, effect = True, effects.throw(schedule.StopAsked())
            waits.pause(lost.left_s(time.monotonic()))
            lost.failed(time.monotonic())  # the first loss is answered at once
            continue
        if isinstance(effect, schedule.Train | schedule.SftUpdate | schedule.Write) and not isinstance(
                outcome, schedule.NotTrained):
            lost.reset()
        try:
            effect = effects.send(outcome)
        except StopIteration:
            return


def _report_loss(term: ActorTerm, error: TrainerFailed | Conflict) -> None:
    """One event for each loss, however often the ``Resume`` that follows is tried."""
    group = error.group if isinstance(error, TrainerFailed) else ""
    term.waits.stage("resume")
    reformed = isinstance(error, GroupReformed)
    term.waits.retry("etcd", lambda: term.events.trainer_lost(term.step, str(error), group, reformed=reformed) if group
                     else term.events.resynced(term.step, str(error)))
