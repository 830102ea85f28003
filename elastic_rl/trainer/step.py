"""One training step on this rank's share of a batch. The step owns the global denominator: each token's loss is
weighted by what all replicas have, so that the gradient does not depend on the parallel sizes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.registry import CRITIC_LOSS, AlgorithmSpec, algorithm_of, options_of, required_tensors
from elastic_rl.algorithms.schedule import learning_rate
from elastic_rl.config import Config
from elastic_rl.data.batch import SCHEMA, Batch
from elastic_rl.errors import PluginFailed, StepRefused
from elastic_rl.trainer.broadcast import first_text
from elastic_rl.trainer.forward import ForwardPass, LossTokens, Report
from elastic_rl.trainer.megatron.optimizer import Adam
from elastic_rl.trainer.megatron.parallel import ParallelDims, from_last_stage, max_over_data, sum_over_data
from elastic_rl.trainer.megatron.policy import Policy
from elastic_rl.trainer.micro_batches import cut
from elastic_rl.trainer.progress import Phase
from elastic_rl.trainer.throughput import Passed
from elastic_rl.trainer.update_loss import UpdateLoss
from elastic_rl.trainer.vocab_parallel import divergence_from_top, entropy, token_logprobs


@dataclass
class Parts:
    """What a step's parts have given so far, of this replica, besides the gradients in the model's buffers."""

    count: int = 0
    tokens: int = 0
    sequences: int = 0
    """Number of sequences with tokens that are trained on."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sums as in ``UpdateLoss.sums``, not divided by what only the whole step knows."""
    logprob_diff_max: float = 0.0
    advantages: list[torch.Tensor] = field(default_factory=list)
    """[n] of the samples of each part, float64."""
    passed: Passed = Passed()
    seconds: float = 0.0

    def add(self, share: Batch, loss: UpdateLoss, seconds: float) -> None:
        self.count += 1
        self.tokens += share.loss_tokens
        self.sequences += _sequences(share)
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in loss.sums.items()}
        self.logprob_diff_max = max(self.logprob_diff_max, loss.logprob_diff_max)
        self.advantages.append(share["advantages"].double())
        self.passed += Passed.of(share)
        self.seconds += seconds


class TrainStep(ForwardPass):
    """Runs steps on one rank. All ranks call the same method; each passes its replica's share of the batch."""

    def __init__(self, policy: Policy, adam: Adam, cfg: Config, par: ParallelDims,
                 report: Report = lambda phase, work: None) -> None:
        super().__init__(policy, cfg, par, report)
        self.adam = adam
        self.parts = Parts()
        """Parts of the step that is being accumulated."""

    def train(self, share: Batch, phase: Phase, step: int) -> dict[str, float]:
        """Makes the updates of a step, counted from 1 in its phase. Metrics are over all ranks: the log-prob
        differences of the first update, the others of the last one, each of its own minibatch.

        In the steps in which only a critic learns, the policy's loss is measured and nothing is updated.

        Raises, on every rank, StepRefused as ``Adam.reduce_and_step`` and ``ForwardPass``, and PluginFailed when the
        loss of the algorithm fails on one; updates before that one were made (``Adam.updates``).
        """
        start = time.perf_counter()
        self.discard_parts()
        algorithm, lr = self._algorithm(phase), learning_rate(self.cfg, phase, step)
        if self._waits_for_critic(phase, step):
            metrics = self.gradients(share, algorithm)
            self.adam.zero_grad()
            return {**metrics, **self._spread(_advantages(share)), "grad_norm": 0.0, "lr": 0.0,
                    "train_s": time.perf_counter() - start}
        passes, of = (1, 1) if phase == "sft" else (self.cfg.train.updates_per_step, self.cfg.train.minibatches)
        if (algorithm is not CRITIC_LOSS and phase == "rl" and self.cfg.algorithm.tis_cap is not None
                and passes * of > 1 and "trainer_logprobs" not in share):
            # With one update its own forward pass has them.
            own = self._forward(share, self.cfg.rollout.temperature, greedy=False)["logprobs"]
            share = share.with_tensors(trainer_logprobs=own)
        metrics = {}
        differences: dict[str, float] = {}
        for minibatch in share.minibatches(of) * passes:
            metrics = self.gradients(minibatch, algorithm)
            metrics["grad_norm"] = self.adam.reduce_and_step(lr)
            if not differences:
                differences = {k: v for k, v in metrics.items() if k.startswith("logprob_diff")}
        return {**metrics, **differences, **self._spread(_advantages(share)), "lr": lr,
                "train_s": time.perf_counter() - start}

    def accumulate(self, share: Batch, part: int) -> None:
        """Adds the gradients of one part of a step's samples to those of the parts before it; 0 is the first one. They
        lack a factor that depends on the samples of all parts, which ``apply`` multiplies in.

        Raises as ``gradients``; no part is left then.
        """
        start = time.perf_counter()
        if not part:
            self.discard_parts()
            self.adam.zero_grad()
        loss = self._loss(self._algorithm("rl"))
        try:
            self._backward(share, loss)
        except (PluginFailed, StepRefused):
            self.discard_parts()
            raise
        self.parts.add(share, loss, time.perf_counter() - start)

    def apply(self, step: int) -> tuple[dict[str, float], Passed]:
        """Makes the one update of RL step ``step`` with the gradients of its parts. Its metrics, as those of ``train``,
        and what has passed through the model for it. Raises StepRefused as ``train``; no part is left in any case."""
        start, lr = time.perf_counter(), learning_rate(self.cfg, "rl", step)
        parts, loss = self.parts, self._loss(self._algorithm("rl"))
        self.discard_parts()
        tokens, sequences = self._over_data([float(parts.tokens), float(parts.sequences)], sum_over_data)
        scale = loss.scale(tokens, sequences)
        self.adam.scale_gradients(scale)
        sums = {name: value * (scale if name == "loss" else 1.0 / max(tokens, 1.0))
                for name, value in parts.sums.items()}
        metrics = self._metrics(sums, parts.logprob_diff_max, tokens)
        metrics["grad_norm"] = self.adam.reduce_and_step(lr)
        return {**metrics, **self._spread(torch.cat(parts.advantages)), "lr": lr,
                "train_s": parts.seconds + time.perf_counter() - start}, parts.passed

    def check(self, share: Batch, phase: Phase) -> dict[str, float]:
        """Computes what a step with one update would, and updates nothing; what was accumulated is discarded.
        Returns its metrics. Raises as ``train``."""
        self.discard_parts()
        metrics = self.gradients(share, self._algorithm(phase))
        return {**metrics, "grad_norm": self.adam.reduce_and_discard()}

    def discard_parts(self) -> None:
        """Gradients that were accumulated are worth nothing any more."""
        self.parts = Parts()

    def gradients(self, share: Batch, algorithm: AlgorithmSpec) -> dict[str, float]:
        """Forward and backward over this rank's share; leaves unreduced gradients. Returns metrics over all ranks.
        Raises, on every rank, PluginFailed when the loss of the algorithm fails on one, and StepRefused as
        ``ForwardPass``."""
        self.adam.zero_grad()
        tokens, sequences = self._over_data([float(share.loss_tokens), float(_sequences(share))], sum_over_data)
        loss = self._loss(algorithm, tokens=tokens, sequences=sequences)
        self._backward(share, loss)
        return self._metrics(loss.sums, loss.logprob_diff_max, tokens)

    # -- parts of them --------------------------------------------------------------------------------------------
    def _backward(self, share: Batch, loss: UpdateLoss) -> None:
        """Adds the gradients of this rank's share to those that are there. Raises as ``gradients``."""
        micros = cut(share, self.cfg.trainer, self.cost)
        needs = required_tensors(loss.algorithm, self.cfg.algorithm)
        failure = ""

        def finish(number: int, logits: torch.Tensor) -> torch.Tensor:
            nonlocal failure
            part = micros[number].batch
            index = LossTokens.of(micros[number], self.par)
            if not len(index.rows):
                return logits.sum() * 0.0
            picked = index.logits(logits, self._temperature(needs))
            entropies, divergences = self._entropy(picked, loss), self._from_teacher(picked, loss, index, part)
            # Logits are overwritten.
            logp = index.joined(picked[:, 0] if self._gives_values else token_logprobs(picked, index.targets))
            if entropies is not None:
                entropies = index.joined(entropies)
            if divergences is not None:
                divergences = index.joined(divergences)
            names = (*(name for name in needs if len(SCHEMA[name].dims) == 1),
                     *(("trainer_logprobs",) if "trainer_logprobs" in part else ()))
            batch = LossBatch({name: index.to_tokens(part[name]) if SCHEMA[name].dims == ("N",)
                               else part[name].to(self.par.device) for name in names}, index.rows, part.samples)
            try:
                return loss.add(logp, batch, entropies, divergences)
            except PluginFailed as e:
                failure = failure or str(e)
                # The other ranks are in the passes through the model, which this one must end too.
                return logits.sum() * 0.0

        self._require_passed(self._run(micros, finish, train=True))
        if failed := first_text(failure, self.par):
            raise PluginFailed(failed)

    def _metrics(self, sums: dict[str, float], logprob_diff_max: float, tokens: float) -> dict[str, float]:
        """The metrics over all ranks, from this rank's part of each metric."""
        summed = self._of_all(list(sums.values()), sum_over_data)
        worst = self._of_all([logprob_diff_max], max_over_data)[0]
        return {**dict(zip(sums, summed, strict=True)), "logprob_diff_max": worst, "tokens": tokens}

    def _algorithm(self, phase: Phase) -> AlgorithmSpec:
        return CRITIC_LOSS if self._gives_values else algorithm_of(self.cfg, phase)

    def _loss(self, algorithm: AlgorithmSpec, **counts: float) -> UpdateLoss:
        options = self.cfg.critic if algorithm is CRITIC_LOSS else options_of(algorithm, self.cfg.algorithm)
        return UpdateLoss(algorithm, self.cfg.algorithm, options, **counts)

    def _waits_for_critic(self, phase: Phase, step: int) -> bool:
        """Whether the policy stays as it is in this step, since the critic knows too little yet."""
        return (phase == "rl" and self.cfg.uses_critic and not self._gives_values
                and step <= self.cfg.critic.warmup_steps)

    def _temperature(self, needs: tuple[str, ...]) -> float:
        """The temperature of the sampler, where the loss compares with its log-probs or with the reference policy's,
        which are of that temperature too."""
        compares = "old_logprobs" in needs or "ref_logprobs" in needs
        return self.cfg.rollout.temperature if compares else 1.0

    def _entropy(self, logits: torch.Tensor, loss: UpdateLoss) -> torch.Tensor | None:
        """[m] of the distributions with these columns [m, padded_vocab / TP]; None when nothing asks for it."""
        if not loss.wants_entropy:
            return None
        with torch.set_grad_enabled(bool(loss.entropy_coef)):
            return entropy(logits, self.par.tp_group if self.par.tp > 1 else None)

    def _from_teacher(self, logits: torch.Tensor, loss: UpdateLoss, index: LossTokens, part: Batch
                      ) -> torch.Tensor | None:
        """[m] divergences from the teacher of these tokens; None when nothing asks for them."""
        if not loss.wants_teacher:
            return None
        ids, logprobs = (part[name].to(index.own.device)[index.own]
                         for name in ("teacher_top_ids", "teacher_top_logprobs"))
        return divergence_from_top(logits, ids.long(), logprobs, self.par.tp_group if self.par.tp > 1 else None)

    def _spread(self, own: torch.Tensor | None) -> dict[str, float]:
        """Mean, standard deviation, least and largest of all advantages, of which ``own`` are this replica's; nothing
        without any."""
        if own is None:
            return {}
        extremes = [float(own.max()), -float(own.min())] if len(own) else [-math.inf, -math.inf]
        count, total, squares = self._over_data(
            [float(len(own)), float(own.sum()), float(own.square().sum())], sum_over_data)
        largest, least = self._over_data(extremes, max_over_data)
        mean = total / max(count, 1.0)
        return {"advantage_mean": mean, "advantage_std": math.sqrt(max(squares / max(count, 1.0) - mean * mean, 0.0)),
                "advantage_min": -least, "advantage_max": largest}

    def _over_data(self, values: list[float], reduce: Callable[[torch.Tensor, ParallelDims], torch.Tensor]
                   ) -> list[float]:
        # float64: counts of tokens beyond 2**24 must stay exact
        return reduce(torch.tensor(values, dtype=torch.float64, device=self.par.device), self.par).tolist()

    def _of_all(self, values: list[float], reduce: Callable[[torch.Tensor, ParallelDims], torch.Tensor]) -> list[float]:
        """Values of the last stage, reduced over all replicas, on every rank."""
        tensor = reduce(torch.tensor(values, device=self.par.device), self.par)
        return [float(v) for v in from_last_stage(tensor, self.par).tolist()]


def _sequences(share: Batch) -> int:
    """How many have tokens that are trained on."""
    return int(share.loss_counts.count_nonzero())


def _advantages(share: Batch) -> torch.Tensor | None:
    """Advantages of the share's samples, or of its tokens where they have their own, float64; None without any."""
    if "advantages" not in share:
        return None
    return share["token_advantages" if "token_advantages" in share else "advantages"].double()
