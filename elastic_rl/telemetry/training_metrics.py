"""Names of what a step of the training reports, in one place: the records of a step, the trackers, Prometheus, the
dashboard and the report use them as they are. docs/operating/training-metrics.md has the same table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Quantity:
    unit: str
    """Empty: a plain number."""
    meaning: str


UPDATE: dict[str, Quantity] = {
    "loss": Quantity("", "loss of the last update, with what the settings add to it"),
    "kl": Quantity("nats", "divergence of the policy from the one that sampled (with `algorithm.tis_cap`: from the "
                         "trainer's before the step), k3 estimate, mean of the tokens"),
    "kl_teacher": Quantity("nats", "divergence of the policy from the teacher, estimated from the sampled tokens; with "
                           "`algorithm.teacher`"),
    "kl_teacher_top": Quantity("nats", "the same over the teacher's most probable tokens, of the last update; with "
                               "`algorithm.teacher_top_k`"),
    "teacher_refused": Quantity("0 to 1", "share of the tokens that are not trained on, since the teacher refused "
                                "their samples; with `algorithm.teacher`"),
    "kl_reference": Quantity("nats", "divergence of the policy from the reference policy, mean of the tokens; with "
                                     "`algorithm.kl_coef` or `algorithm.report_kl`"),
    "reference_step": Quantity("", "the RL step whose policy the reference is; 0: with which RL began"),
    "entropy": Quantity("nats", "entropy of the policy's distribution, mean of the tokens; with "
                                "`algorithm.entropy_coef` or `algorithm.report_entropy`"),
    "clip_fraction": Quantity("0 to 1", "share of the tokens (`gspo`: of their sequences) whose gradient the clip "
                                        "removed; `cispo`: whose weight the cap holds"),
    "ratio_mean": Quantity("", "mean importance ratio"),
    "gate_mean": Quantity("", "`sapo`: mean factor of a token's gradient"),
    "logprob_diff_mean": Quantity("nats", "difference between the engine's and the trainer's log-probs, mean of the "
                                          "tokens, at the first update; with staleness above 0 most of it is that of "
                                          "the weights"),
    "logprob_diff_max": Quantity("nats", "the largest of them"),
    "tis_weight_mean": Quantity("", "mean truncated importance weight; with `algorithm.tis_cap`"),
    "tis_capped_fraction": Quantity("0 to 1", "share of the tokens at that cap"),
    "advantage_mean": Quantity("", "mean of the advantages of samples, or of tokens where an algorithm has these"),
    "advantage_std": Quantity("", "their standard deviation; 0: there is nothing to learn from"),
    "advantage_min": Quantity("", "the least of them"),
    "advantage_max": Quantity("", "the largest of them"),
    "grad_norm": Quantity("", "norm of the gradient before it is clipped to `train.max_grad_norm`"),
    "lr": Quantity("", "learning rate"),
    "critic_loss": Quantity("", "with a critic: its loss in its last update, half a squared error"),
    "critic_grad_norm": Quantity("", "norm of its gradient before it is clipped to `train.max_grad_norm`"),
    "critic_lr": Quantity("", "its learning rate"),
    "value_clip_fraction": Quantity("0 to 1", "share of the tokens whose value `critic.value_clip` stopped"),
    "value_mean": Quantity("", "mean of its values of the tokens, before the step"),
    "return_mean": Quantity("", "mean of what they should have been"),
    "explained_variance": Quantity("", "share of the variance of the returns that the values explain: 1 for a perfect "
                                       "critic, 0 for one that knows nothing"),
    "staleness_min": Quantity("versions", "by how many versions the oldest token of a group is older than the policy "
                                          "that it trained, the least of the step's groups; this and those below with "
                                          "`train.schedule: fully_async`"),
    "staleness_mean": Quantity("versions", "the same, their mean"),
    "staleness_max": Quantity("versions", "the same, the most; never above `train.max_staleness`"),
    "groups_queued": Quantity("", "groups that had finished and were left for later steps when this one was taken"),
    "groups_leased": Quantity("", "groups that were being generated then"),
    "groups_stale": Quantity("", "groups that were generated again since the step before, as they were too stale when "
                                 "their turn came"),
    "groups_lost": Quantity("", "groups that were generated again since the step before, as the queue had lost them"),
    "producer_wait_s": Quantity("s", "since the step before, what those who generate waited for a part of the system, "
                                     "as engines that get a version; beside the step's own time and no part of it"),
    "producer_no_room_s": Quantity("s", "the same, what they had nothing to do since `train.max_staleness` allowed no "
                                        "more groups"),
}
"""Metrics of the updates of a step: of the last one, unless it says otherwise. An algorithm may report more."""
THROUGHPUT: dict[str, Quantity] = {
    "train_tokens_per_s": Quantity(
        "tokens/s", "tokens of all updates, prompts included and padding not, by the time of the updates; of all ranks "
                    "together"),
    "generate_tokens_per_s": Quantity(
        "tokens/s", "tokens of the step's responses by the time of its stage generate, or with "
        "`train.schedule: fully_async` of the whole step; of all engines together"),
    "tflops_per_rank": Quantity(
        "TFLOP/s", "operations that the model needs for the updates, by their time, of one rank"),
    "mfu": Quantity(
        "0 to 1", "model FLOPs utilisation: that by what the device can do at its best; only where that is known "
                  "(`device.peak_tflops`)"),
    "peak_memory_bytes": Quantity(
        "bytes", "most memory that a rank has used since it started, the largest of all ranks: of tensors on a GPU, "
                 "resident on a CPU"),
}
PUBLISH = frozenset(("publish_stall_s", "gather_s", "copy_s", "publish_wait_s", "policy_version", "state_version",
                     "reference_version", "committed"))
"""What the trainer answers about the publish of a step."""
_ELSEWHERE = frozenset((*THROUGHPUT, *PUBLISH, "tokens", "train_s"))
_OWN = 16
"""Metrics of an algorithm of the user's own that a step has beside those of the table."""
_NAME_CHARS = 64
_DIGITS = 6


def of_update(answer: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of the updates in what the trainer answered: those of the table that are there, and the first 16
    others. Finite ones only, of six digits, since a job keeps those of thousands of steps. Pure."""
    own = sorted(name for name in answer.keys() - UPDATE.keys() - _ELSEWHERE if len(name) <= _NAME_CHARS)
    return _numbers(answer, (*UPDATE, *own[:_OWN]))


def of_throughput(answer: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of ``THROUGHPUT`` in what the trainer answered, as ``of_update`` has those of the updates."""
    return _numbers(answer, THROUGHPUT)


def _numbers(answer: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    found = {name: answer[name] for name in names if name in answer}
    return {name: float(f"{value:.{_DIGITS}g}") for name, value in found.items()
            if isinstance(value, int | float) and math.isfinite(value)}
