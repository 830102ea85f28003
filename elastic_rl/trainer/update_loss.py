"""The loss of one update, from the log-probs of the tokens that are trained on: the algorithm's loss, what the settings
add to it, and metrics. Knows no Megatron and no collective."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from pydantic import BaseModel
from torch import Tensor

from elastic_rl.algorithms.importance import truncated_weight
from elastic_rl.algorithms.kl import kl_estimate
from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.registry import AlgorithmSpec, aggregate_of
from elastic_rl.config import AlgorithmConfig
from elastic_rl.errors import PluginFailed
from elastic_rl.plugins.user_code import describe


class UpdateLoss:
    """Makes the loss of each of this rank's micro-batches, and adds up what becomes metrics.

    The loss of a token is that of the algorithm times its truncated importance weight, plus the divergence from the
    reference policy, less the entropy, with their coefficients; tokens are then weighted so that the weights of all
    ranks and micro-batches together make the aggregate.
    """

    def __init__(self, algorithm: AlgorithmSpec, cfg: AlgorithmConfig, options: BaseModel, *, tokens: float = 1.0,
                 sequences: float = 1.0) -> None:
        """``options``: what the loss of the algorithm reads. ``tokens`` and ``sequences`` that are trained on, of all
        replicas. Without these, which nobody knows before all parts of a step are there, what ``scale`` gives is to be
        multiplied in at the end."""
        self.algorithm, self.cfg, self._options = algorithm, cfg, options
        self._tokens, self._sequences = max(tokens, 1.0), max(sequences, 1.0)
        self._aggregate = aggregate_of(algorithm, cfg)
        self._learns = algorithm.advantages is not None
        """Whether this is RL: the settings below are about nothing else."""
        self.tis_cap = cfg.tis_cap if self._learns else None
        self.entropy_coef = cfg.entropy_coef if self._learns else 0.0
        self.kl_coef = cfg.kl_coef if self._learns and cfg.kl_in == "loss" else 0.0
        self.wants_kl = self._learns and cfg.measures_kl and cfg.kl_in == "loss"
        self.wants_entropy = self._learns and (cfg.report_entropy or bool(cfg.entropy_coef))
        self.wants_teacher = self._learns and bool(cfg.teacher_top_k)
        added = {"tis_weight_mean": self.tis_cap is not None, "tis_capped_fraction": self.tis_cap is not None,
                 "kl_reference": self.wants_kl, "entropy": self.wants_entropy, "kl_teacher_top": self.wants_teacher}
        self.sums: dict[str, float] = dict.fromkeys(
            ("loss", "logprob_diff_mean", *algorithm.stats, *(name for name, on in added.items() if on)), 0.0)
        """Metric → this rank's part of it: those of all replicas add up to the metric."""
        self.logprob_diff_max = 0.0

    def add(self, logp: Tensor, batch: LossBatch, entropy: Tensor | None = None, teacher: Tensor | None = None
            ) -> Tensor:
        """The loss [] of a micro-batch, whose gradient flows into ``logp`` [M], ``entropy`` [M] and the divergences
        from the ``teacher`` [M].

        ``batch``: what ``registry.required_tensors`` names, and ``trainer_logprobs`` [M], the log-probs before the
        step's first update, unless this is it. Raises PluginFailed as ``_algorithm_loss``.
        """
        weights = self._weights(batch)
        policy_weights = weights
        if "old_logprobs" in batch:
            engine, difference = batch["old_logprobs"], (logp.detach() - batch["old_logprobs"]).abs()
            self._count("logprob_diff_mean", difference)
            self.logprob_diff_max = max(self.logprob_diff_max, float(difference.max()))
            if self.tis_cap is not None:
                trainer = batch["trainer_logprobs"] if "trainer_logprobs" in batch else logp.detach()
                factor = truncated_weight(trainer, engine, self.tis_cap)
                self._count("tis_weight_mean", factor)
                self._count("tis_capped_fraction", (factor >= self.tis_cap).float())
                policy_weights = weights * factor
                batch = LossBatch({**batch.tensors, "old_logprobs": trainer}, batch.sequence, batch.sequences)
        value, total, stats = _algorithm_loss(self.algorithm, logp, batch, policy_weights, self._options, self.cfg.name)
        for name in self.algorithm.stats:
            self._count(name, stats[name])
        for name, coefficient, term in self._terms(logp, batch, entropy, teacher):
            self._count(name, term)
            if coefficient:
                added = coefficient * (term * weights).sum()
                value, total = value + float(added.detach()), total + added
        self.sums["loss"] += value
        return total

    def scale(self, tokens: float, sequences: float) -> float:
        """What loss and gradient, made without these counts, are to be multiplied by."""
        return 1.0 / max(tokens if self._aggregate == "token" else sequences, 1.0)

    def _terms(self, logp: Tensor, batch: LossBatch, entropy: Tensor | None, teacher: Tensor | None
               ) -> list[tuple[str, float, Tensor]]:
        """Name of the metric, coefficient in the loss, and values [M] of what the settings add."""
        terms = []
        if self.wants_kl:
            terms.append(("kl_reference", self.kl_coef,
                          kl_estimate(logp, batch["ref_logprobs"], self.cfg.estimator)))
        if entropy is not None:
            terms.append(("entropy", -self.entropy_coef, entropy))
        if teacher is not None:
            terms.append(("kl_teacher_top", self.cfg.teacher_coef, teacher))
        return terms

    def _count(self, name: str, values: Tensor) -> None:
        self.sums[name] += float(values.detach().sum()) / self._tokens

    def _weights(self, batch: LossBatch) -> Tensor:
        """[M] weight of each token's loss. Over all ranks they sum to 1, but with the constant aggregate."""
        ones = torch.ones(batch.sequence.shape, device=batch.sequence.device)
        if self._aggregate == "sequence":
            return 1.0 / (batch.to_tokens(batch.sequence_sum(ones)) * self._sequences)
        if self._aggregate == "token":
            return torch.full_like(ones, 1.0 / self._tokens)
        assert self.cfg.constant_length_tokens is not None  # checked by algorithm_of
        return torch.full_like(ones, 1.0 / (self.cfg.constant_length_tokens * self._sequences))


def _algorithm_loss(algorithm: AlgorithmSpec, logp: Tensor, batch: LossBatch, weights: Tensor, options: BaseModel,
                    setting: str) -> tuple[float, Tensor, Mapping[str, Tensor]]:
    """The weighted sum of an algorithm's loss over M tokens; a tensor [] with the gradient of that; its stats.
    ``setting``: the name that the settings give it.

    The gradient with respect to ``logp`` is taken here, and the tensor is linear in ``logp`` with these slopes: what a
    user's code raises, in its backward pass too, is raised before the pass through the model, in which other ranks wait
    for this one. Raises PluginFailed for whatever the token loss raises, a loss or stats that are not [M], a loss
    without a gradient, and a loss or gradient that is not finite although the log-probs are.
    """
    name, leaf = f"the token_loss of algorithm.name={setting}", logp.detach().requires_grad_()
    if algorithm.advantages is None:
        name = f"the token_loss of {algorithm.name}"
    try:
        with torch.enable_grad():
            loss, stats = algorithm.token_loss(leaf, batch, options)
            shapes = {key: tuple(value.shape) for key, value in (
                ("the loss", loss), *((f"the stat {stat!r}", stats[stat]) for stat in algorithm.stats))}
            total = (loss * weights).sum()
            slopes = torch.autograd.grad(total, leaf)[0].detach()
        value, finite = float(total.detach()), bool(torch.isfinite(slopes).all())
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # whatever a user's function raises: also SystemExit
        raise PluginFailed(f"{name} failed: {describe(e)}") from e
    for what, shape in shapes.items():
        if shape != tuple(logp.shape):
            raise PluginFailed(f"{name}: {what} must be {list(logp.shape)} as the log-probs, not {list(shape)}")
    # Log-probs that are not finite are no fault of the algorithm: the norm of the gradient shows them.
    if not (finite and math.isfinite(value)) and bool(torch.isfinite(logp).all()):
        raise PluginFailed(f"{name} gave a loss or a gradient that is not finite, of finite log-probs",
                           hint="bound what it takes the exponential or the logarithm of, and what it divides by")
    return value, (logp * slopes).sum(), stats
