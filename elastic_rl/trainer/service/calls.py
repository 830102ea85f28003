"""The commands of a trainer group as their caller sees them: what each carries, how it is split and collected, and what
comes back. See ``dispatch.py``.

Each call waits for its result for as long as that takes. Each raises TrainerFailed when the group is lost, Conflict for
a command about a step that does not fit the trainer's progress, Fenced when another actor has taken over, ConfigError
when the command or its batch is refused, and PluginFailed when the algorithm's loss failed, or has failed before and
steps are held for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

from elastic_rl.data.batch import Batch
from elastic_rl.data.ledger import Consumption
from elastic_rl.trainer.progress import Phase
from elastic_rl.trainer.service.commands import CommandKind, Weights
from elastic_rl.trainer.service.dispatch import (
    DP,
    FIRST,
    WITH_RESULT,
    Call,
    Dispatch,
    Split,
    Uploaded,
    command,
    dispatched_by,
)

R = TypeVar("R")


class TrainerCalls(ABC):
    """What a trainer group can be asked. A subclass brings the calls to the ranks."""

    @abstractmethod
    def dispatch(self, kind: CommandKind, how: Dispatch[R], call: Call) -> R:
        """Has the ranks execute a command; what was collected of it."""

    @command(CommandKind.UPDATE, split=Split.DP, collect=FIRST)
    def update(self, phase: Phase, step: int, batch: Batch | Uploaded, *, consumption: Consumption = Consumption(),
               cursor: Mapping[str, Any] | None = None, step_id: str = "") -> Call:
        """Runs step ``step`` of a phase (the trainer's step + 1) and returns its metrics once its policy is being
        published. Keys: those of ``TrainStep.train`` and, for RL, gather_s, copy_s, publish_stall_s, publish_wait_s
        (seconds), policy_version and state_version (0 when no state was saved).

        ``cursor`` is saved with the state; ``step_id``: see ``Progress``. After PluginFailed the step was not made. If
        it failed after an update, the group is at its last state, and every further step is refused with the same error
        until another actor takes over or the group re-forms.
        """
        return Call(batch, phase=phase, step=step, consumption=consumption, cursor=dict(cursor or {}), step_id=step_id)

    @command(CommandKind.ACCUMULATE, split=Split.DP, collect=FIRST)
    def accumulate(self, step: int, batch: Batch, part: int) -> Call:
        """Computes the gradients of one part of the samples of RL step ``step`` (the trainer's step + 1) and adds them
        to those of the parts before it. ``part``: its number; 0 begins the step anew, whatever was accumulated before.

        Raises Conflict when another part is the next one: those before were lost, with a group that has re-formed, or
        when the trainer had to publish its weights again. After PluginFailed no part is left either."""
        return Call(batch, phase="rl", step=step, part=part)

    @command(CommandKind.APPLY, split=Split.NONE, collect=FIRST)
    def apply(self, step: int, parts: int, *, consumption: Consumption = Consumption(),
              cursor: Mapping[str, Any] | None = None) -> Call:
        """Runs RL step ``step`` on the gradients of its ``parts`` parts: what ``update`` does with the samples of all
        of them in one batch, up to rounding. Raises Conflict unless these parts were accumulated."""
        return Call(phase="rl", step=step, part=parts, consumption=consumption, cursor=dict(cursor or {}))

    @command(CommandKind.FORWARD_LOGPROBS, split=Split.DP, collect=DP)
    def forward_logprobs(self, batch: Batch, *, weights: Weights = "policy", step: int = 0) -> Call:
        """``logprobs`` [N, T] fp32 of the batch's loss tokens (0 elsewhere) and, by the policy, ``greedy`` [N, T] bool:
        whether the token is the most probable one.

        ``weights``: whose log-probs; by the reference policy they are those of RL step ``step`` (the trainer's step +
        1), and ConfigError is raised when the trainer has no such reference."""
        return Call(batch, phase="rl", weights=weights, step=step)

    @command(CommandKind.FORWARD_VALUES, split=Split.DP, collect=DP)
    def forward_values(self, batch: Batch, step: int) -> Call:
        """``values`` [N, T] fp32, of a critic: of the states in which the batch's loss tokens were chosen (0
        elsewhere), before RL step ``step`` (the trainer's step + 1)."""
        return Call(batch, phase="rl", step=step)

    @command(CommandKind.FORWARD_VERSION, split=Split.DP, collect=WITH_RESULT)
    def forward_version(self, batch: Batch, step: int, at_least: int = 0) -> Call:
        """Of a group that does not train: ``logprobs`` [N, T] fp32 of the batch's loss tokens (0 elsewhere), by the
        oldest version of the policy that RL step ``step`` made (0: with which RL began), whose number is ``at_least``
        this. The result has its number, ``version``, and its step, ``step``. Raises Conflict while there is no such
        version: it may not be committed yet."""
        return Call(batch, phase="rl", step=step, version=at_least)

    @command(CommandKind.SAVE, split=Split.NONE, collect=FIRST)
    def save(self, phase: Phase, step: int, *, begin_rl: bool = False, publish: bool = False,
             cursor: Mapping[str, Any] | None = None) -> Call:
        """Commits the state of this step, and ends the SFT phase first with ``begin_rl``; with ``publish`` also the
        policy, under a new number. The result says whether it is ``committed``: if not, the trainer goes on trying by
        itself."""
        return Call(phase=phase, step=step, begin_rl=begin_rl, publish=publish, cursor=dict(cursor or {}))

    @command(CommandKind.LOAD, split=Split.NONE, collect=FIRST)
    def load(self, version: int, phase: Phase, step: int) -> Call:
        """Has the group, which is at this step, go back to a version of its state, 0: the one that the job began with.
        The result says whether it is ``loaded``; else the version is not available, and the group is at the newest
        state that is."""
        return Call(version=version, phase=phase, step=step)

    @command(CommandKind.OFFLOAD, split=Split.NONE, collect=FIRST)
    def offload(self) -> Call:
        """Has the trainer keep everything in host memory, so that engines may have its devices. Raises ConfigError for
        a trainer that shares no device with engines."""
        return Call()

    @command(CommandKind.ONLOAD, split=Split.NONE, collect=FIRST)
    def onload(self) -> Call:
        """Has the trainer compute on its devices again; waits until engines have released their memory. Raises as
        ``offload``."""
        return Call()


DISPATCH = dispatched_by(TrainerCalls)
"""How each command is dispatched."""
