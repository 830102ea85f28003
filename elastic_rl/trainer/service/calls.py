"""The commands of a trainer group as their caller sees them: what each carries, and what comes back.

There is one controller, the actor, and SPMD inside a group: every rank executes the same command on what its replica
has. A batch is split over the data-parallel replicas, balanced by the estimated operations of the model
(``SequenceCost``), and what the replicas give back is joined in the order of the batch. Who holds what of a batch:

- a replica: its own share and nothing of the others';
- rank 0: the share of its replica, like any other; commands carry no tensors;
- the controller: what it decides by. A baseline or a whitened advantage is of all groups of a step, and so is the order
  of samples; for most algorithms these are a few numbers for each sample. Where samples are in a queue that ranks can
  read (``QueuedBatch``), that is all it has, but for tensors that an algorithm asks for, which it has whole; each
  replica reads its own share. Where they are in the controller's memory, as in a synchronous run, it has the whole
  batch as tensors too, with the shares that are being sent, up to eight at a time (as tensors and as bytes). Outputs
  are two tensors [L] at most.

Each call waits for its result for as long as that takes. Each raises TrainerFailed when the group is lost, Conflict for
a command about a step that does not fit the trainer's progress, Fenced when another actor has taken over, ConfigError
when the command or its batch is refused, PluginFailed when the algorithm's loss failed, StepRefused when the group
cannot compute with the batch, and StepsHeld, which is a PluginFailed, when steps are held since one has failed before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from elastic_rl.data.batch import Batch
from elastic_rl.data.ledger import Consumption
from elastic_rl.trainer.progress import Phase
from elastic_rl.trainer.service.commands import (
    Accumulate,
    Apply,
    Check,
    Command,
    ForwardLogprobs,
    ForwardReference,
    ForwardValues,
    ForwardVersion,
    Load,
    Offload,
    Onload,
    Save,
    Update,
)


@dataclass(frozen=True)
class Uploaded:
    """A batch whose shares a group has taken, for one command."""

    batch: str
    """Name of the batch."""
    group: str
    """The formation of the group that has them."""


class Executed(NamedTuple):
    """What a command gave back."""

    result: dict[str, Any]
    """What rank 0 returned, which is JSON; what other ranks return is the same, or of no interest."""
    tensors: dict[str, torch.Tensor]
    """Tensors [L] of a ``ForwardCommand``, in the order of its batch."""


class TrainerCalls(ABC):
    """What a trainer group can be asked. A subclass brings the commands to the ranks."""

    @abstractmethod
    def execute(self, make: Callable[..., Command], batch: Batch | Uploaded | None = None) -> Executed:
        """Has the ranks execute a command. ``make`` makes it from the fields that its sender knows: ``id``, ``epoch``,
        ``term``, ``group`` and, of one with a batch, ``batch``. A batch that is uploaded already is for commands that
        give no tensors. Raises ConfigError for tensors that are not [n, t] of the replicas' samples."""

    def update(self, phase: Phase, step: int, batch: Batch | Uploaded, *, versions: Sequence[int] = (),
               consumption: Consumption = Consumption(), cursor: Mapping[str, Any] | None = None, step_id: str = ""
               ) -> dict[str, Any]:
        """Runs step ``step`` of a phase (the trainer's step + 1) and returns its metrics once its policy is being
        published. Keys: those of ``TrainStep.train`` and, for RL, gather_s, copy_s, publish_stall_s, publish_wait_s
        (seconds), policy_version and state_version (0 when no state was saved).

        ``versions``: of the policy, that made what is trained on; of an RL step the policy's group refuses those
        beyond the staleness (StaleSamples, which is a Conflict), and a step that names none. ``cursor`` is saved with
        the state; ``step_id``: see ``Progress``. After PluginFailed and StepRefused the step was not made, and nothing
        has changed. If it failed after an update, the group is at its last state, which a StepRefused with
        ``went_back`` says. When the same step fails so a third time, this and every further step is refused with
        StepsHeld until another actor takes over or the group re-forms.
        """
        return self.execute(partial(Update, phase=phase, step=step, sample_versions=tuple(versions),
                                    consumption=consumption, cursor=dict(cursor or {}), step_id=step_id), batch).result

    def accumulate(self, step: int, batch: Batch, part: int, *, versions: Sequence[int] = ()) -> dict[str, Any]:
        """Computes the gradients of one part of the samples of RL step ``step`` (the trainer's step + 1) and adds them
        to those of the parts before it. ``part``: its number; 0 begins the step, whatever was accumulated before.
        ``versions``: as in ``update``.

        Raises Conflict when another part is the next one: those before were lost, with a group that has re-formed, or
        when the trainer had to publish its weights again. After PluginFailed and StepRefused the parts are to be sent
        again, from 0."""
        return self.execute(partial(Accumulate, step=step, part=part, sample_versions=tuple(versions)), batch).result

    def apply(self, step: int, parts: int, *, versions: Sequence[int] = (), consumption: Consumption = Consumption(),
              cursor: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Runs RL step ``step`` on the gradients of its ``parts`` parts: what ``update`` does with the samples of all
        of them in one batch, up to rounding. Raises Conflict unless these parts were accumulated. No part is left when
        it is refused."""
        return self.execute(partial(Apply, step=step, parts=parts, sample_versions=tuple(versions),
                                    consumption=consumption, cursor=dict(cursor or {}))).result

    def check(self, step: int, batch: Batch, phase: Phase = "rl") -> dict[str, Any]:
        """Computes what step ``step`` of a phase (the trainer's step + 1) would with a batch, and updates nothing; the
        metrics of that. Parts that were accumulated are discarded. Raises PluginFailed and StepRefused where ``update``
        would in its first update."""
        return self.execute(partial(Check, phase=phase, step=step), batch).result

    def forward_logprobs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Log-probs by the policy: ``logprobs`` [L] fp32 of the batch's loss tokens, and ``greedy`` [L] bool: whether
        the token is the most probable one."""
        return self.execute(ForwardLogprobs, batch).tensors

    def forward_reference(self, batch: Batch, step: int) -> torch.Tensor:
        """Log-probs [L] fp32 of the batch's loss tokens by the reference policy of RL step ``step`` (the trainer's
        step + 1). Raises ConfigError when the trainer has no such reference."""
        return self.execute(partial(ForwardReference, step=step), batch).tensors["logprobs"]

    def forward_values(self, batch: Batch, step: int) -> torch.Tensor:
        """Values [L] fp32, by a critic: of the states in which the batch's loss tokens were chosen, before RL step
        ``step`` (the trainer's step + 1)."""
        return self.execute(partial(ForwardValues, step=step), batch).tensors["values"]

    def forward_version(self, batch: Batch, step: int, at_least: int = 0) -> Executed:
        """Log-probs by a group that does not train: ``logprobs`` [L] fp32 of the batch's loss tokens, by the oldest
        version of the policy that RL step ``step`` made (0: with which RL began), whose number is ``at_least`` this.
        The result has its number, ``version``, and its step, ``step``. Raises Conflict while there
        is no such version: it may not be committed yet."""
        return self.execute(partial(ForwardVersion, step=step, at_least=at_least), batch)

    def save(self, phase: Phase, step: int, *, begin_rl: bool = False, publish: bool = False,
             cursor: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Commits the state of this step, and ends the SFT phase first with ``begin_rl``; with ``publish`` also the
        policy, under a new number. The result says whether it is ``committed``: if not, the trainer goes on trying by
        itself."""
        return self.execute(partial(Save, phase=phase, step=step, begin_rl=begin_rl, publish=publish,
                                    cursor=dict(cursor or {}))).result

    def load(self, version: int, phase: Phase, step: int) -> dict[str, Any]:
        """Has the group, which is at this step, go back to a version of its state, 0: the one that the job began with.
        The result says whether it is ``loaded``; else the version is not available, and the group is at the newest
        state that is."""
        return self.execute(partial(Load, version=version, phase=phase, step=step)).result

    def offload(self) -> None:
        """Has the trainer keep everything in host memory, so that engines may have its devices. Raises ConfigError for
        a trainer that shares no device with engines."""
        self.execute(Offload)

    def onload(self) -> None:
        """Has the trainer compute on its devices again; waits until engines have released their memory. Raises as
        ``offload``."""
        self.execute(Onload)
