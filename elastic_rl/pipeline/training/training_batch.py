"""The stages reference, teacher, value and advantage: from the groups of a step to the batch that is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from elastic_rl.algorithms import ppo
from elastic_rl.algorithms.registry import AlgorithmSpec, algorithm_of, options_of, required_tensors, uses_values
from elastic_rl.algorithms.reward_shaping import shaped_rewards
from elastic_rl.config import Config
from elastic_rl.config.algorithm import reference_step
from elastic_rl.data.batch import Batch
from elastic_rl.data.queue.queued_batch import batch_of, turn_rewards
from elastic_rl.data.queue.step_groups import SampleRef, StepGroups, StepReader
from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.engine.scoring import ScoreRequest, TokenScores
from elastic_rl.errors import GroupsLost
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.training import divergence
from elastic_rl.pipeline.training.teaching import Teaching, with_scores
from elastic_rl.pipeline.waits import Waits


class ScoringRoles(Protocol):
    """The stateless roles that a batch is made with, one attempt a call. Each raises ElasticRLError when the attempt
    failed."""

    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        """Advantages [groups, samples] of rewards of the same shape."""

    def token_advantages(self, batch: bytes) -> np.ndarray:
        """Advantages [L] fp32 of the loss tokens of a batch in safetensors."""

    def score(self, sequences: Sequence[ScoreRequest], top: int) -> Sequence[TokenScores | None]:
        """What the teacher makes of each sequence, with so many of its most probable tokens beside each token; None of
        one that it refuses."""


class ForwardPasses(Protocol):
    """Passes by the trainer groups, which change nothing, so they may be repeated. Each raises TrainerFailed, Conflict
    and Fenced."""

    def reference_logprobs(self, batch: Batch, step: int) -> torch.Tensor:
        """[L] of the loss tokens, by the reference policy of RL step ``step``."""

    def trainer_logprobs(self, batch: Batch, step: int) -> torch.Tensor:
        """[L] of the loss tokens, by the policy before RL step ``step``."""

    def forward_values(self, batch: Batch, step: int) -> torch.Tensor:
        """[L] of the loss tokens, by the critic before RL step ``step``."""


class NoPasses:
    """The passes of a job without a trainer, whose settings ask for none: others are refused (``config.checks``)."""

    def reference_logprobs(self, batch: Batch, step: int) -> torch.Tensor:
        raise TypeError("a job without a trainer has no reference policy")

    def trainer_logprobs(self, batch: Batch, step: int) -> torch.Tensor:
        raise TypeError("a job without a trainer has no log-probs of one")

    def forward_values(self, batch: Batch, step: int) -> torch.Tensor:
        raise TypeError("a job without a trainer has no critic")


@dataclass(frozen=True)
class MadeBatch:
    """What a step is trained on."""

    batch: Batch
    advantages: list[float]
    """The advantage of each sample, for people; of a sample with advantages of its tokens their mean."""
    metrics: dict[str, float]
    """What was measured on the way, by the names of ``training_metrics``."""


class _Patient:
    """Reads samples of a step for as long as the queue is away. A ``StepReader``."""

    def __init__(self, reader: StepReader, waits: Waits) -> None:
        self._reader, self._waits = reader, waits
        self.is_local = reader.is_local

    @property
    def address(self) -> Mapping[str, Any] | None:
        return self._reader.address

    def read(self, refs: Sequence[SampleRef]) -> list[tuple[Prompt, Sample]]:
        return self._waits.retry("queue", lambda: self._reader.read(refs), end_on=(GroupsLost,))

    def require(self, refs: Sequence[SampleRef]) -> None:
        self._reader.require(refs)


class TrainingBatches:
    """Makes the batch of each step. Used by one thread; what fails is tried again without end."""

    def __init__(self, cfg: Config, roles: ScoringRoles, waits: Waits, longest_response: int,
                 passes: ForwardPasses) -> None:
        self._cfg, self._roles, self._waits, self._longest_response = cfg, roles, waits, longest_response
        self._passes, self._algorithm = passes, algorithm_of(cfg)
        self._teaching = None if cfg.algorithm.teacher is None else Teaching(
            roles.score, cfg.algorithm.teacher_top_k, waits)
        self._scores: tuple[StepGroups, Mapping[int, TokenScores | None]] | None = None
        """What the teacher said of the samples of a step."""
        self._made: tuple[StepGroups, int, MadeBatch] | None = None

    def close(self) -> None:
        if self._teaching is not None:
            self._teaching.close()

    def make(self, groups: StepGroups, step: int, timer: StepTimer, *, tried: bool = False) -> MadeBatch:
        """``tried``: some groups of a step alone, all of whose samples the teacher may refuse. A step that is tried
        again, since the trainer refused it, gets the batch that was made for it: the weights
        that made its values are the same. Raises TrainerFailed, Conflict and Fenced."""
        if self._made is None or self._made[0] is not groups or self._made[1] != step:
            self._made = groups, step, self._make(groups, step, timer, tried=tried)
        return self._made[2]

    def forget(self) -> None:
        """The step was made: its batch is not needed again."""
        self._made = self._scores = None

    def _make(self, given: StepGroups, step: int, timer: StepTimer, *, tried: bool) -> MadeBatch:
        groups = replace(given, reader=_Patient(given.reader, self._waits))
        rewards, reference, metrics = self._rewards(groups, step, timer)
        self._waits.stage("advantage")
        with timer.stage("advantage"):
            advantages = [a for row in self._waits.retry("advantages", lambda: self._roles.advantages(rewards))
                          for a in row]
        batch = batch_of(groups, advantages).with_tensors(**reference)
        if self._algorithm.token_advantages is not None and any(s.turn_rewards for s in groups.samples):
            batch = batch.with_tensors(turn_rewards=turn_rewards(groups, batch))
        if self._teaching is not None:
            batch, taught = self._taught(self._teaching, given, batch, timer, tried=tried)
            metrics |= taught
        if uses_values(self._algorithm):
            batch = batch.with_tensors(values=self._values(batch, step, timer))
        batch = self._with_token_advantages(batch, timer)
        batch = self._with_forward_passes(batch, step, timer)
        if self._cfg.uses_reference_group:
            metrics["reference_step"] = reference_step(step, self._cfg.algorithm.reference_every_steps)
        if "returns" in batch:
            batch, learned = self._for_critic(batch)
            metrics |= learned
        if "token_advantages" in batch:  # of each sample the mean over its tokens
            advantages = (batch.sequence_sum(batch["token_advantages"]) / batch.loss_counts.clamp(min=1)).tolist()
        return MadeBatch(batch, advantages, metrics)

    def _rewards(self, groups: StepGroups, step: int, timer: StepTimer
                 ) -> tuple[list[list[float]], dict[str, torch.Tensor], dict[str, float]]:
        """Rewards [groups, samples] with what the settings add to them; the tensor ``ref_logprobs`` where the
        divergence is for each token to bear, by an algorithm with a critic; and metrics of that."""
        cfg = self._cfg.algorithm
        rewards = [shaped_rewards(g.rewards, [s.response_tokens for s in g.samples], self._longest_response, cfg)
                   for g in groups.groups]
        if not cfg.measures_kl or cfg.kl_in != "reward":
            return rewards, {}, {}
        self._waits.stage("reference")
        with timer.stage("train"):
            batch = batch_of(groups)
            reference = self._passes.reference_logprobs(divergence.without_scores(batch), step)
        found = divergence.sample_divergences(batch, reference, cfg)
        metrics = {"kl_reference": float(found.sum()) / max(batch.loss_tokens, 1)}
        if uses_values(self._algorithm):
            return rewards, {"ref_logprobs": reference}, metrics
        return divergence.penalised(rewards, found, cfg), {}, metrics

    def _with_forward_passes(self, batch: Batch, step: int, timer: StepTimer) -> Batch:
        """The batch with what the trainer's loss reads and groups of their own have computed; else its ranks do."""
        scored = divergence.without_scores(batch)
        if self._cfg.uses_actor_fwd:
            self._waits.stage("actor_fwd")
            with timer.stage("train"):
                batch = batch.with_tensors(trainer_logprobs=self._passes.trainer_logprobs(scored, step))
        if self._cfg.uses_reference_group and "ref_logprobs" in required_tensors(self._algorithm, self._cfg.algorithm):
            self._waits.stage("reference")
            with timer.stage("train"):
                batch = batch.with_tensors(ref_logprobs=self._passes.reference_logprobs(scored, step))
        return batch

    def _values(self, batch: Batch, step: int, timer: StepTimer) -> torch.Tensor:
        self._waits.stage("value")
        with timer.stage("train"):
            return self._passes.forward_values(divergence.without_scores(batch), step)

    def _for_critic(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The critic's batch with the advantages as the policy's loss gets them, and metrics of the values."""
        values, returns = batch["values"], batch["returns"]
        if self._cfg.critic.whiten_advantages:
            batch = batch.with_tensors(token_advantages=ppo.whitened(batch["token_advantages"]))
        tokens = max(batch.loss_tokens, 1)
        return batch, {"value_mean": float(values.double().sum()) / tokens,
                       "return_mean": float(returns.double().sum()) / tokens,
                       "explained_variance": ppo.explained_variance(values, returns)}

    def _scores_of(self, teaching: Teaching, groups: StepGroups, batch: Batch, *, tried: bool
                   ) -> Mapping[int, TokenScores | None]:
        """The teacher's scores by row. Those of a step that is tried again, since the trainer refused it, are kept."""
        if self._scores is None or self._scores[0] is not groups:
            self._scores = groups, teaching.scores(batch, may_refuse_all=tried)
        return self._scores[1]

    def _taught(self, teaching: Teaching, groups: StepGroups, batch: Batch, timer: StepTimer, *, tried: bool
                ) -> tuple[Batch, dict[str, float]]:
        """The batch with the teacher's log-probs, and the estimate of the divergence from it by the sampled tokens."""
        self._waits.stage("teacher")
        with timer.stage("teacher"):
            tokens, scores = batch.loss_tokens, self._scores_of(teaching, groups, batch, tried=tried)
            batch = with_scores(batch, scores, self._cfg.algorithm.teacher_top_k)
        gap = batch["old_logprobs"] - batch["teacher_logprobs"]
        return batch, {"kl_teacher": float(gap.double().sum()) / max(batch.loss_tokens, 1),
                       "teacher_refused": (tokens - batch.loss_tokens) / max(tokens, 1)}

    def _token_advantages(self, batch: Batch, spec: AlgorithmSpec) -> torch.Tensor:
        """[L] fp32: the advantage of each loss token. A user's own code runs in the role, which it may stop."""
        if ":" not in self._cfg.algorithm.name and spec.token_advantages is not None:
            return spec.token_advantages(batch, options_of(spec, self._cfg.algorithm), self._cfg.algorithm)
        raw = batch.only("tokens", "lengths", "loss_mask", "advantages", "old_logprobs", *spec.inputs,
                         *(name for name in ("ref_logprobs", "turn_rewards") if name in batch)).loaded().to_bytes()
        found = self._waits.retry("advantages", lambda: self._roles.token_advantages(raw))
        return torch.from_numpy(np.array(found))

    def _with_token_advantages(self, batch: Batch, timer: StepTimer) -> Batch:
        """The batch with an advantage for each token, if the algorithm has these; without what only they are made of.
        """
        spec = self._algorithm
        if spec.token_advantages is not None:
            self._waits.stage("advantage")
            with timer.stage("advantage"):
                found = self._token_advantages(batch, spec)
                batch = batch.with_tensors(token_advantages=found)
                if uses_values(spec):  # an advantage is the error of a value
                    batch = batch.with_tensors(returns=found + batch["values"])
        return batch.without("teacher_logprobs", "ref_logprobs", "turn_rewards")
