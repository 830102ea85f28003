"""One training step on this rank's share of a batch. The step owns the global denominator: each token's loss is
weighted by what all replicas have, so that the gradient does not depend on the parallel sizes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.registry import CRITIC_LOSS, AlgorithmSpec, algorithm_of, required_tensors
from elastic_rl.algorithms.schedule import learning_rate
from elastic_rl.config import Config
from elastic_rl.data.batch import SCHEMA, Batch
from elastic_rl.errors import PluginFailed
from elastic_rl.trainer.broadcast import first_text
from elastic_rl.trainer.forward import ForwardPass, LossTokens
from elastic_rl.trainer.megatron.optimizer import Adam
from elastic_rl.trainer.megatron.parallel import ParallelDims, from_last_stage, max_over_data, sum_over_data
from elastic_rl.trainer.megatron.policy import Policy
from elastic_rl.trainer.micro_batches import cut
from elastic_rl.trainer.progress import Phase
from elastic_rl.trainer.update_loss import UpdateLoss
from elastic_rl.trainer.vocab_parallel import divergence_from_top, entropy, token_logprobs


class TrainStep(ForwardPass):
    """Runs steps on one rank. All ranks call the same method; each passes its replica's share of the batch."""

    def __init__(self, policy: Policy, adam: Adam, cfg: Config, par: ParallelDims) -> None:
        super().__init__(policy, cfg, par)
        self.adam = adam

    def train(self, share: Batch, phase: Phase, step: int) -> dict[str, float]:
        """Makes the updates of a step, counted from 1 in its phase. Metrics are over all ranks: the log-prob
        differences of the first update, the others of the last one.

        In the steps in which only a critic learns, the policy's loss is measured and nothing is updated.

        Raises TrainerFailed for a gradient that is not finite, and PluginFailed, on every rank, when the loss of the
        algorithm fails on one; updates before that one were made (``Adam.updates``).
        """
        start = time.perf_counter()
        algorithm, lr = self._algorithm(phase), learning_rate(self.cfg, phase, step)
        if self._waits_for_critic(phase, step):
            metrics = self.gradients(share, algorithm)
            self.adam.zero_grad()
            return {**metrics, **self._spread(share), "grad_norm": 0.0, "lr": 0.0,
                    "train_s": time.perf_counter() - start}
        updates = 1 if phase == "sft" else self.cfg.train.updates_per_step
        if (algorithm is not CRITIC_LOSS and phase == "rl" and self.cfg.algorithm.tis_cap is not None and updates > 1
                and "trainer_logprobs" not in share):
            # With one update its own forward pass has them.
            own = self._forward(share, self.cfg.rollout.temperature, greedy=False)["logprobs"]
            share = Batch({**share.tensors, "trainer_logprobs": own})
        metrics = {}
        differences: dict[str, float] = {}
        for update in range(updates):
            metrics = self.gradients(share, algorithm)
            metrics["grad_norm"] = self.adam.reduce_and_step(lr)
            if not update:
                differences = {k: v for k, v in metrics.items() if k.startswith("logprob_diff")}
        return {**metrics, **differences, **self._spread(share), "lr": lr, "train_s": time.perf_counter() - start}

    def gradients(self, share: Batch, algorithm: AlgorithmSpec) -> dict[str, float]:
        """Forward and backward over this rank's share; leaves unreduced gradients. Returns metrics over all ranks.
        Raises PluginFailed, on every rank, when the loss of the algorithm fails on one."""
        self.adam.zero_grad()
        tokens, sequences = self._over_data([float(share.loss_tokens),
                                             float(share["loss_mask"].any(dim=1).sum())], sum_over_data)
        micros = cut(share, self.cfg.trainer)
        loss = UpdateLoss(algorithm, self.cfg.algorithm, tokens=tokens, sequences=sequences)
        needs = required_tensors(algorithm, self.cfg.algorithm)
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
            names = (*(name for name in needs if SCHEMA[name].dims[0] == "N"),
                     *(("trainer_logprobs",) if "trainer_logprobs" in part else ()))
            batch = LossBatch({name: index.values(part[name]) for name in names}, index.rows, part.samples)
            try:
                return loss.add(logp, batch, entropies, divergences)
            except PluginFailed as e:
                failure = failure or str(e)
                # The other ranks are in the passes through the model, which this one must end too.
                return logits.sum() * 0.0

        self._run(micros, finish, train=True)
        if failed := first_text(failure, self.par):
            raise PluginFailed(failed)
        summed = self._of_all(list(loss.sums.values()), sum_over_data)
        worst = self._of_all([loss.logprob_diff_max], max_over_data)[0]
        return {**dict(zip(loss.sums, summed, strict=True)), "logprob_diff_max": worst, "tokens": tokens}

    # -- parts ----------------------------------------------------------------------------------------------------
    def _algorithm(self, phase: Phase) -> AlgorithmSpec:
        return CRITIC_LOSS if self._gives_values else algorithm_of(self.cfg, phase)

    def _waits_for_critic(self, phase: Phase, step: int) -> bool:
        """Whether the policy stays as it is in this step, since the critic knows too little yet."""
        return (phase == "rl" and self.cfg.uses_critic and not self._gives_values
                and step <= self.cfg.critic.warmup_steps)

    def _temperature(self, needs: tuple[str, ...]) -> float:
        """That of the sampler, where the loss compares with its log-probs or with the reference policy's, which are of
        that temperature too."""
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

    def _spread(self, share: Batch) -> dict[str, float]:
        """Mean, standard deviation, least and largest of the advantages of all samples, or of all tokens where they
        have their own; nothing without any."""
        if "advantages" not in share:
            return {}
        own = (share["token_advantages"][share["loss_mask"]] if "token_advantages" in share else share["advantages"]
               ).double()
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
