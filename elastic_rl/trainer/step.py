"""One optimizer step: supervised or RL. Every data-parallel rank takes its share of the rows and the loss is divided by
the tokens of all of them, so the gradient does not depend on how the group is cut."""

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
"""Metrics that are means over tokens; a rank adds its part of each."""


@dataclass(frozen=True)
class ResponseIndex:
    """Response positions of a batch, cut to the same R for all. Shapes [N, R]."""

    rows: torch.Tensor
    """[N, 1] row numbers, to index logits with."""
    at: torch.Tensor
    """Position whose logits predict the response's token j."""
    targets: torch.Tensor
    mask: torch.Tensor
    """fp32; 1 where the response has a token."""

    @classmethod
    def of(cls, tokens: torch.Tensor, prompt_len: torch.Tensor, response_len: torch.Tensor,
           width: int) -> ResponseIndex:
        j = torch.arange(width, device=tokens.device)[None]
        mask = (j < response_len[:, None]).float()
        position = (prompt_len[:, None] + j).clamp(max=tokens.shape[1] - 1)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        return cls(rows, position - 1, tokens.gather(1, position), mask)


def response_logprobs(logits: torch.Tensor, window: ResponseIndex) -> torch.Tensor:
    """log p(token | before) at temperature 1 for the window's tokens: [N, R] fp32, defined where the mask is 1.

    ``logits``: this rank's columns, of all tokens but the last: [N, T - 1, padded_vocab / TP]. Only the maximum, the
    sum and the picked logit cross the tensor-parallel group.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    picked = logits[window.rows, window.at]
    return -vocab_parallel_cross_entropy(picked.float().contiguous(), window.targets)


def _micro(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


class TrainStep:
    """Runs steps on one rank; all ranks call the same method with the same batch."""

    def __init__(self, policy: Policy, adam: Adam, cfg: Config, par: ParallelDims) -> None:
        self.policy, self.adam, self.cfg, self.par = policy, adam, cfg, par
        self._loss = ALGOS[cfg.algorithm.name].loss

    def train(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """``train.updates_per_step`` updates on the whole batch as RL step ``step``, counted from 1.

        Metrics are of all ranks; the log-prob differences are taken before the first update, the others are of the last
        one. The ratio's old log-probs are the engine's.
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
        """Forward and backward over this rank's rows; leaves unreduced gradients. Returns the metrics of all ranks."""
        self.adam.zero_grad()
        total = float(batch.response_len.sum())
        mine = batch.rows(self.par.share(batch.samples))
        parts = [mine.rows(part) for part in _micro(mine.samples, self.cfg.trainer.micro_batch_size)]
        sums = dict.fromkeys(_MEANS, 0.0)  # also where this rank's share has no row
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
        """What the last stage has, over all replicas."""
        tensor = over_data(torch.tensor(values, device=self.par.device), self.par)
        return [float(v) for v in from_last_stage(tensor, self.par).tolist()]

    def _loss_of(self, rows: TrainBatch, logits: torch.Tensor, total: float
                 ) -> tuple[torch.Tensor, dict[str, float], float]:
        """A micro-batch's part of the loss and of the metrics, and its largest difference of log-probs."""
        dev = self.par.device
        window = ResponseIndex.of(rows.tokens.to(dev), rows.prompt_len.to(dev), rows.response_len.to(dev),
                           rows.engine_logprobs.shape[1])
        old = rows.engine_logprobs.to(dev)
        logp = response_logprobs(logits, window)
        clip = self.cfg.algorithm
        loss, stats = self._loss(logp, old, rows.advantages.to(dev), window.mask, clip.clip_low, clip.clip_high)
        # The loss is a mean over this micro-batch's tokens; weighted by its share it adds up to the mean over all.
        weight = float(window.mask.sum()) / total
        difference = ((logp.detach() - old).abs() * window.mask)
        means = {k: float(v) * weight for k, v in stats.items()}
        means |= {"loss": float(loss.detach()) * weight, "logprob_diff_mean": float(difference.sum()) / total}
        return loss * weight, means, float(difference.max())

    def sft(self, problems: list[Problem], *, pad: int, lr: float) -> float:
        """One supervised update on the problems' answers; returns the mean loss a token, over all ranks."""
        self.adam.zero_grad()
        tokens, windows, total = self._windows(problems, pad, self.par.share(len(problems)))
        loss_sum = 0.0

        def finish(number: int, logits: torch.Tensor) -> torch.Tensor:
            nonlocal loss_sum
            window = windows[number]
            loss = -(response_logprobs(logits, window) * window.mask).sum() / total
            loss_sum += float(loss.detach())
            return loss

        self._run(tokens, finish, train=True)
        self.adam.reduce_and_step(lr)
        return self._of_all([loss_sum])[0]

    @torch.no_grad()
    def exact_match(self, problems: list[Problem], *, pad: int) -> float:
        """Share of the problems whose answer is what greedy decoding gives. One teacher-forced pass is enough: greedy
        decoding reproduces the answer exactly when every token of it is the argmax after the ones before it. Every
        replica takes all of them."""
        tokens, windows, _ = self._windows(problems, pad, slice(0, len(problems)))
        right = 0

        def finish(number: int, logits: torch.Tensor) -> torch.Tensor:
            nonlocal right
            window = windows[number]
            best = self._argmax(logits[window.rows, window.at])
            right += int(((best == window.targets) | (window.mask == 0)).all(dim=1).sum())
            return logits.new_zeros(())

        self._run(tokens, finish, train=False)
        return int(from_last_stage(torch.tensor([right], device=self.par.device), self.par)) / len(problems)

    def _windows(self, problems: list[Problem], pad: int, share: slice
                 ) -> tuple[list[torch.Tensor], list[ResponseIndex], float]:
        """Micro-batches of this share: their tokens and windows; and the answers' tokens of all problems."""
        tokens, prompt_len, response_len = encode(problems, pad)
        width, dev = int(response_len.max()), self.par.device
        parts = [slice(share.start + part.start, share.start + part.stop)
                 for part in _micro(share.stop - share.start, self.cfg.trainer.micro_batch_size)]
        windows = [ResponseIndex.of(tokens[p].to(dev), prompt_len[p].to(dev), response_len[p].to(dev),
                                    width) for p in parts]
        return [tokens[p] for p in parts], windows, float(response_len.sum())

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
