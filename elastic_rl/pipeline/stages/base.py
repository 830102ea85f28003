"""What the stages of all modes share."""

from __future__ import annotations

from typing import Any, Protocol

from elastic_rl.errors import Conflict, TrainerFailed
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.rollouts import RolloutCalls
from elastic_rl.pipeline.stages.term import ActorTerm
from elastic_rl.pipeline.training.device_phases import DevicePhases
from elastic_rl.pipeline.training.training_batch import ScoringRoles


class RoleCalls(RolloutCalls, ScoringRoles, Protocol):
    """The stateless roles, one attempt a call. Each raises ElasticRLError when the attempt failed."""


class Stages:
    """The stages of a mode, for one term of the actor."""

    effects: schedule.Effects
    """The schedule, which says what is done next."""

    def __init__(self, term: ActorTerm, devices: DevicePhases) -> None:
        self._term, self._waits, self._devices = term, term.waits, devices

    def carry_out(self, effect: schedule.Effect) -> Any:
        """The outcome of an effect, for as long as that takes. Raises TrainerFailed and Conflict when the committed
        state is not what the schedule believes, and Fenced."""
        self._devices.before(effect)
        return self._perform(effect)

    def _perform(self, effect: schedule.Effect) -> Any:
        """The outcome of an effect, whose side has the devices. A mode adds its effects to these."""
        if isinstance(effect, schedule.Finish):
            return self._term.finish(effect.step)
        if isinstance(effect, schedule.Stop):
            return self._term.stop(effect.step)
        raise TypeError(f"no effect of this mode: {effect!r}")

    def lost(self, error: TrainerFailed | Conflict) -> None:
        """An effect ended with this error; the next one is ``Resume``. A mode overrides it that has something under
        way beside what is committed."""
