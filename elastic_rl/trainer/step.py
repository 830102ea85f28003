"""One training step: supervised or RL. Every data-parallel rank takes its slice of the rows, and the loss is divided by
the tokens of all rows, so the gradient does not depend on the parallel sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic_rl.algorithms.registry import ALGOS
from elastic_rl.algorithms.schedule import learning_rate
from elastic_rl.config import Config
from elastic_rl.data.tasks import Problem
from elastic_rl.trainer.batch import TrainBatch
from elastic_rl.trainer.model import Policy
from elastic_rl.trainer.optimizer import Adam
from elastic_rl.trainer.parallel import ParallelDims, from_last_stage, max_over_data, sum_over_data
from elastic_rl.trainer.pipeline import Finish, run

_MEANS = ("loss", "logprob_diff_mean", "ratio_mean", "clip_fraction", "kl")
"""Metrics that are means over all tokens; each rank adds its part."""


@dataclass(frozen=True)
class ResponseIndex:
    """Positions of the responses of a batch, all of width R. Shapes [N, R]."""

    rows: torch.Tensor
    """[N, 1] row numbers, to index logits with."""
    at: torch.Tensor
    """Position whose logits predict token j of the response."""
    targets: torch.Tensor
    """Token j of the response."""
    mask: torch.Tensor
    """fp32; 1 where the response has a token."""

    @classmethod
    def from_lengths(cls, tokens: torch.Tensor, prompt_len: torch.Tensor, response_len: torch.Tensor,
                     width: int) -> ResponseIndex:
        """tokens [N, T], prompt_len [N], response_len [N]; ``width`` is R."""
        j = torch.arange(width, device=tokens.device)[None]
        mask = (j < response_len[:, None]).float()
        position = (prompt_len[:, None] + j).clamp(max=tokens.shape[1] - 1)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        return cls(rows, position - 1, tokens.gather(1, position), mask)


def response_logprobs(logits: torch.Tensor, index: ResponseIndex) -> torch.Tensor:
    """log p(token | tokens before it) at temperature 1 for the responses: [N, R] fp32, defined where the mask is 1.

    ``logits``: this rank's columns, of all tokens but the last: [N, T - 1, padded_vocab / TP]. Only the maximum, the
    sum and the picked logit cross the tensor-parallel group.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    picked = logits[index.rows, index.at]
    return -vocab_parallel_cross_entropy(picked.float().contiguous(), index.targets)


def _micro(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


class TrainStep:
    """Runs steps on one rank. All ranks call the same method with the same batch."""

    def __init__(self, policy: Policy, adam: Adam, cfg: Config, par: ParallelDims) -> None:
        self.policy, self.adam, self.cfg, self.par = policy, adam, cfg, par
        self._loss = ALGOS[cfg.algorithm.name].loss

    def train(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """Makes ``train.updates_per_step`` updates on the whole batch as RL step ``step``, counted from 1.

        Metrics are over all ranks: the log-prob differences of the first update, the others of the last one. The old
        log-probs of the ratio are the engine's.
        """
        start = time.perf_counter()
        lr = learning_rate(self.cfg.train, step)
        metrics: dict[str, float] = {}
        differences: dict[str, float] = {}
        for update in range(self.cfg.train.updates_per_step):
            metrics = self._update(batch, lr)
            if not update:
                differences = {k: metrics[k] for k in ("logprob_diff_max", "logprob_diff_mean")}
        return {**metrics, **differences, "lr": lr, "train_s": time.perf_counter() - start}

    def _update(self, batch: TrainBatch, lr: float) -> dict[str, float]:
        gradients = self.gradients(batch)
        norm = self.adam.reduce_and_step(lr)
        return {**gradients, "grad_norm": norm}

    def gradients(self, batch: TrainBatch) -> dict[str, float]:
        """Forward and backward over this rank's rows; leaves unreduced gradients. Returns metrics over all ranks."""
        self.adam.zero_grad()
        total = float(batch.response_len.sum())
        mine = batch.rows(self.par.dp_slice(batch.samples))
        parts = [mine.rows(part) for part in _micro(mine.samples, self.cfg.trainer.micro_batch_size)]
        sums = dict.fromkeys(_MEANS, 0.0)  # all of them, also where this rank's slice has no row
        worst = 0.0

        def finish(number: int, logits: torch.Tensor) -> torch.Tensor:
            nonlocal worst
            loss, stats, difference = self._loss_of(parts[number], logits, total)
            worst = max(worst, difference)
            for name in _MEANS:
                sums[name] += stats.get(name, 0.0)
            return loss

        self._run([part.tokens for part in parts], finish, train=True)
        summed = self._of_all(list(sums.values()))
        worst = self._of_all([worst], max_over_data)[0]
        return {**dict(zip(sums, summed, strict=True)), "logprob_diff_max": worst, "tokens": total}

    def _run(self, tokens: Sequence[torch.Tensor], finish: Finish, *, train: bool) -> None:
        # Nothing is predicted from the last token.
        run(self.policy, [t[:, :-1].to(self.par.device) for t in tokens], finish, train=train)

    def _of_all(self, values: list[float],
                over_data: Callable[[torch.Tensor, ParallelDims], torch.Tensor] = sum_over_data
                ) -> list[float]:
        """Values of the last stage, reduced over all replicas, on every rank."""
        tensor = over_data(torch.tensor(values, device=self.par.device), self.par)
        return [float(v) for v in from_last_stage(tensor, self.par).tolist()]

    def _loss_of(self, rows: TrainBatch, logits: torch.Tensor, total: float
                 ) -> tuple[torch.Tensor, dict[str, float], float]:
        """A micro-batch's part of the loss and of the metrics, and its largest log-prob difference."""
        dev = self.par.device
        index = ResponseIndex.from_lengths(rows.tokens.to(dev), rows.prompt_len.to(dev), rows.response_len.to(dev),
                                           rows.engine_logprobs.shape[1])
        old = rows.engine_logprobs.to(dev)
        logp = response_logprobs(logits, index)
        clip = self.cfg.algorithm
        loss, stats = self._loss(logp, old, rows.advantages.to(dev), index.mask, clip.clip_low, clip.clip_high)
        # A mean over this micro-batch's tokens: weighted by their fraction, the parts add up to the mean over all.
        weight = float(index.mask.sum()) / total
        difference = ((logp.detach() - old).abs() * index.mask)
        means = {k: float(v) * weight for k, v in stats.items()}
        means |= {"loss": float(loss.detach()) * weight, "logprob_diff_mean": float(difference.sum()) / total}
        return loss * weight, means, float(difference.max())

    def sft(self, problems: list[Problem], *, pad: int, lr: float) -> float:
        """One supervised update on the problems' answers; returns the mean loss per token, over all ranks."""
        self.adam.zero_grad()
        tokens, indices, total = self._answers(problems, pad, self.par.dp_slice(len(problems)))
        loss_sum = 0.0

        def finish(number: int, logits: torch.Tensor) -> torch.Tensor:
            nonlocal loss_sum
            index = indices[number]
            loss = -(response_logprobs(logits, index) * index.mask).sum() / total
            loss_sum += float(loss.detach())
            return loss

        self._run(tokens, finish, train=True)
        self.adam.reduce_and_step(lr)
        return self._of_all([loss_sum])[0]

    @torch.no_grad()
    def exact_match(self, problems: list[Problem], *, pad: int) -> float:
        """Fraction of the problems that greedy decoding answers right. One teacher-forced pass is enough: greedy
        decoding produces the answer exactly when every token of it is the argmax after the tokens before it. Every
        replica evaluates all of them."""
        tokens, indices, _ = self._answers(problems, pad, slice(0, len(problems)))
        right = 0

        def finish(number: int, logits: torch.Tensor) -> torch.Tensor:
            nonlocal right
            index = indices[number]
            best = self._argmax(logits[index.rows, index.at])
            right += int(((best == index.targets) | (index.mask == 0)).all(dim=1).sum())
            return logits.new_zeros(())

        self._run(tokens, finish, train=False)
        return int(from_last_stage(torch.tensor([right], device=self.par.device), self.par)) / len(problems)

    def _answers(self, problems: list[Problem], pad: int, rows: slice
                 ) -> tuple[list[torch.Tensor], list[ResponseIndex], float]:
        """Micro-batches of these rows: their tokens and the index of their answers; and the number of tokens in the
        answers of all problems."""
        tokens, prompt_len, response_len = encode(problems, pad)
        width, dev = int(response_len.max()), self.par.device
        parts = [slice(rows.start + part.start, rows.start + part.stop)
                 for part in _micro(rows.stop - rows.start, self.cfg.trainer.micro_batch_size)]
        indices = [ResponseIndex.from_lengths(tokens[p].to(dev), prompt_len[p].to(dev), response_len[p].to(dev), width)
                   for p in parts]
        return [tokens[p] for p in parts], indices, float(response_len.sum())

    def _argmax(self, logits: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        return gather_from_tensor_model_parallel_region(logits.contiguous()).argmax(dim=-1)


def encode(problems: list[Problem], pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens [N, T] int64 right-padded with ``pad``, prompt_len [N], answer_len [N]."""
    width = max(len(p.prompt_ids) + len(p.answer_ids) for p in problems)
    tokens = torch.full((len(problems), width), pad, dtype=torch.int64)
    for row, p in zip(tokens, problems, strict=True):
        sequence: list[Any] = [*p.prompt_ids, *p.answer_ids]
        row[:len(sequence)] = torch.tensor(sequence)
    lengths = torch.tensor([(len(p.prompt_ids), len(p.answer_ids)) for p in problems])
    return tokens, lengths[:, 0].clone(), lengths[:, 1].clone()
