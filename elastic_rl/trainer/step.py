"""One training step on this rank's share of a batch. The step owns the global denominator: each token's loss is
weighted by what all replicas have, so that the gradient does not depend on the parallel sizes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.registry import AlgorithmSpec, algorithm_of, required_tensors
from elastic_rl.algorithms.schedule import learning_rate
from elastic_rl.config import Config
from elastic_rl.data.batch import Batch
from elastic_rl.errors import PluginFailed
from elastic_rl.trainer.broadcast import first_text
from elastic_rl.trainer.context_parallel import joined, own_positions, places
from elastic_rl.trainer.megatron.optimizer import Adam
from elastic_rl.trainer.megatron.parallel import ParallelDims, from_last_stage, max_over_data, sum_over_data
from elastic_rl.trainer.megatron.pipeline import run
from elastic_rl.trainer.megatron.policy import Policy
from elastic_rl.trainer.micro_batches import MicroBatch, cut
from elastic_rl.trainer.progress import Phase
from elastic_rl.trainer.update_loss import UpdateLoss
from elastic_rl.trainer.vocab_parallel import entropy, most_probable, token_logprobs


@dataclass(frozen=True)
class LossTokens:
    """The tokens of a micro-batch that are trained on, M of them, in the order of its samples."""

    rows: torch.Tensor
    """[M] row of the sample."""
    at: torch.Tensor
    """[M] position of the sample whose logits predict the token."""
    targets: torch.Tensor
    """[m] the tokens that this rank has the logits for: all M, without context parallelism."""
    where: tuple[torch.Tensor, torch.Tensor]
    """Row and column [m] of these positions in this rank's logits."""
    own: torch.Tensor
    """[m] which of the M tokens these are."""
    par: ParallelDims

    @classmethod
    def of(cls, micro: MicroBatch, par: ParallelDims) -> LossTokens:
        rows, at = micro.batch["loss_mask"][:, 1:].nonzero(as_tuple=True)
        flat, width = micro.starts[rows] + at, micro.input.tokens.shape[1]
        own = torch.arange(len(rows))
        if par.cp > 1:
            found = places(own_positions(micro.input.packed, par.cp, par.cp_rank), width)[flat]
            own = (found >= 0).nonzero()[:, 0]
            flat, width = found[own], width // par.cp
        targets = micro.batch["tokens"][rows[own], at[own] + 1]
        return cls(rows.to(par.device), at.to(par.device), targets.to(par.device),
                   ((flat // width).to(par.device), (flat % width).to(par.device)), own.to(par.device), par)

    def logits(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """[m, padded_vocab / TP] fp32: this rank's columns for each token, as a sampler of this temperature has them;
        a copy. ``logits``: of all that went through the model, [R, P / CP, padded_vocab / TP]."""
        picked = logits[self.where].float()
        return picked / temperature if temperature != 1.0 else picked

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """[M] of this rank's values [m] and of those of the others of its context-parallel group."""
        return values if self.par.cp == 1 else joined(values, self.own, len(self.rows), self.par.cp_group)

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """[M] from a tensor [N] (one value a sample) or [N, T] (one a token)."""
        tensor = tensor.to(self.rows.device)
        return tensor[self.rows] if tensor.ndim == 1 else tensor[self.rows, self.at + 1]


class TrainStep:
    """Runs steps on one rank. All ranks call the same method; each passes its replica's share of the batch."""

    def __init__(self, policy: Policy, adam: Adam, cfg: Config, par: ParallelDims) -> None:
        self.policy, self.adam, self.cfg, self.par = policy, adam, cfg, par

    def train(self, share: Batch, phase: Phase, step: int) -> dict[str, float]:
        """Makes the updates of a step, counted from 1 in its phase. Metrics are over all ranks: the log-prob
        differences of the first update, the others of the last one.

        Raises TrainerFailed for a gradient that is not finite, and PluginFailed, on every rank, when the loss of the
        algorithm fails on one; updates before that one were made (``Adam.updates``).
        """
        start = time.perf_counter()
        algorithm, lr = algorithm_of(self.cfg, phase), learning_rate(self.cfg, phase, step)
        updates = 1 if phase == "sft" else self.cfg.train.updates_per_step
        if phase == "rl" and self.cfg.algorithm.tis_cap is not None and updates > 1:
            # With one update its own forward pass has them.
            own = self._forward(share, self.cfg.rollout.temperature, greedy=False)["logprobs"]
            share = Batch({**share.tensors, "trainer_logprobs": own})
        metrics: dict[str, float] = {}
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
            entropies = self._entropy(picked, loss)
            logp = index.joined(token_logprobs(picked, index.targets))  # overwrites them
            if entropies is not None:
                entropies = index.joined(entropies)
            names = (*needs, *(("trainer_logprobs",) if "trainer_logprobs" in part else ()))
            batch = LossBatch({name: index.values(part[name]) for name in names}, index.rows, part.samples)
            try:
                return loss.add(logp, batch, entropies)
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

    def forward_logprobs(self, share: Batch, phase: str = "rl", *, greedy: bool = True) -> dict[str, torch.Tensor]:
        """Of this rank's share, at the sampler's temperature (in the SFT phase, which samples nothing, at 1):
        ``logprobs`` [n, T] fp32 of the loss tokens, 0 elsewhere, and ``greedy`` [n, T] bool: whether the token is the
        most probable one, which needs all logits on each rank. On every rank of the replica."""
        return self._forward(share, 1.0 if phase == "sft" else self.cfg.rollout.temperature, greedy=greedy)

    # -- parts ----------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _forward(self, share: Batch, temperature: float, *, greedy: bool) -> dict[str, torch.Tensor]:
        """As ``forward_logprobs``. Without ``greedy`` that is left out: it needs all logits on each rank."""
        logprobs = torch.zeros(share["tokens"].shape, device=self.par.device)
        best = torch.zeros_like(logprobs)
        micros = cut(share, self.cfg.trainer)

        def finish(number: int, logits: torch.Tensor) -> torch.Tensor:
            index = LossTokens.of(micros[number], self.par)
            if len(index.rows):
                where = (micros[number].rows.to(self.par.device)[index.rows], index.at + 1)
                logprobs[where] = index.joined(token_logprobs(index.logits(logits, temperature), index.targets))
                if greedy:
                    best[where] = index.joined((most_probable(logits[index.where]) == index.targets).float())
            return logits.new_zeros(())

        self._run(micros, finish, train=False)
        both = from_last_stage(torch.stack([logprobs, best] if greedy else [logprobs]), self.par).cpu()
        return {"logprobs": both[0], **({"greedy": both[1].bool()} if greedy else {})}

    def _run(self, micros: list[MicroBatch], finish: Callable[[int, torch.Tensor], torch.Tensor], *, train: bool
             ) -> None:
        run(self.policy, [micro.input.to(self.par.device) for micro in micros], finish, train=train)

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

    def _spread(self, share: Batch) -> dict[str, float]:
        """Mean, standard deviation, least and largest of the advantages of all samples; nothing without any."""
        if "advantages" not in share:
            return {}
        own = share["advantages"].double()
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
