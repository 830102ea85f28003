"""The trainer groups of a job: Megatron ranks under torch elastic, each group with a model of its own, which it trains,
or computes with as others have trained it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic_rl.config.dcs import Stream


@dataclass(frozen=True)
class TrainerGroupSpec:
    """What tells one trainer group from another."""

    name: str
    """Role of its ranks among the members, target of its restart, subject of its alerts, and first part of the kinds of
    its events and of the names of its logs."""
    weights: Stream
    """Stream of its model's weights."""
    state: Stream
    """Stream that it resumes from: weights, optimizer, random states, and how far it is. Of a group that does not
    train: the one that it takes its weights from; it has no state."""
    every_step: bool
    """Whether its weights are published after each step, for others to pull; else only beside its state."""
    trains: bool = True
    """Whether it has an optimizer. If not it computes with versions of the policy, and publishes nothing."""
    train_keys: tuple[str, ...] = ()
    """Settings of the section ``train`` that it may have otherwise than the policy's group."""

    def with_own_keys(self, text: str) -> str:
        """A text about the sections ``trainer`` and ``train`` as the group has them, with the keys by which a user
        changes them for this group."""
        if self is ACTOR:
            return text
        keys = "|".join((r"trainer\.[a-z]", *(rf"train\.{key}\b" for key in self.train_keys)))
        return re.sub(rf"(?<![\w.])(?={keys})", f"{self.name}.", text)


ACTOR = TrainerGroupSpec("trainer", Stream.POLICY, Stream.TRAINER_STATE, every_step=True)
"""The group that trains the policy."""
CRITIC = TrainerGroupSpec("critic", Stream.CRITIC, Stream.CRITIC_STATE, every_step=False, train_keys=(
    "lr", "lr_warmup_steps", "lr_decay", "lr_decay_fraction", "lr_final_fraction", "updates_per_step", "minibatches",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "max_grad_norm"))
"""The group that trains the value model of PPO. The rest of ``train`` is about the steps, which both take together.
"""
ACTOR_FWD = TrainerGroupSpec("actor_fwd", Stream.POLICY, Stream.POLICY, every_step=False, trains=False)
"""Log-probs of the policy before a step, off the ranks that train it."""
REFERENCE = TrainerGroupSpec("reference", Stream.POLICY, Stream.POLICY, every_step=False, trains=False)
"""Log-probs of the reference policy."""
TRAINER_GROUPS = {group.name: group for group in (ACTOR, CRITIC, ACTOR_FWD, REFERENCE)}
"""Every group that a job may have, by name; ``Config.trainer_groups`` has those of one."""
