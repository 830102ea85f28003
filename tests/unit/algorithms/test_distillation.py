"""Learning from a teacher: advantages of tokens, and the divergence from its most probable tokens, against plain
references in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.batches import from_rows
from support.budget import seeds

from elastic_rl import config
from elastic_rl.algorithms.distillation import DistillationOptions, teacher_advantages
from elastic_rl.algorithms.registry import algorithm_of, required_tensors
from elastic_rl.config import AlgorithmConfig
from elastic_rl.data.batch import Batch
from elastic_rl.errors import ConfigError
from elastic_rl.trainer.vocab_parallel import divergence_from_top

thorough = settings(deadline=None, max_examples=seeds(40))


def coarse_divergence(p: torch.Tensor, q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of the outcomes ``ids`` and all others as one; by the definition."""
    p_top, q_top = p.gather(-1, ids), q.gather(-1, ids)
    p_rest, q_rest = 1 - p_top.sum(-1), 1 - q_top.sum(-1)
    return (p_top * (p_top / q_top).log()).sum(-1) + p_rest * (p_rest / q_rest).log()


@thorough
@given(st.integers(1, 5), st.integers(3, 30), st.integers(1, 8), st.floats(0.1, 4), st.integers(0, 10_000))
def test_divergence_from_top_tokens_and_its_gradient(m: int, vocab: int, k: int, spread: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(m, vocab, generator=g, dtype=torch.float64) * spread).requires_grad_()
    other = (torch.randn(m, vocab, generator=g, dtype=torch.float64) * spread).log_softmax(-1)
    weights = torch.randn(m, generator=g, dtype=torch.float64)
    top = other.topk(min(k, vocab - 1))
    # Below 1e-8, which fp32 cannot tell from nothing, the rest counts as so much.
    assume(bool((1 - top.values.exp().sum(-1) > 1e-8).all()))
    found = divergence_from_top(logits, top.indices, top.values, None)
    p = logits.softmax(-1)
    expected = coarse_divergence(p, other.exp(), top.indices)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    [slope] = torch.autograd.grad((found * weights).sum(), logits)
    [wanted] = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(slope, wanted, rtol=1e-5, atol=1e-7)
    full = (p * (p.log() - other)).sum(-1)
    assert bool((found <= full + 1e-9).all()) and bool((found >= -1e-9).all())


def test_divergence_of_nearly_certain_distributions_is_finite() -> None:
    logits = torch.tensor([[90.0, 0.0, 0.0], [0.0, 90.0, 0.0]], requires_grad=True)
    ids = torch.tensor([[0, 1], [0, 1]])
    top = torch.tensor([[0.0, -60.0], [0.0, -60.0]])  # the rest has no probability left
    found = divergence_from_top(logits, ids, top, None)
    found.sum().backward()
    assert float(found[0].detach()) == pytest.approx(0, abs=1e-6) and 50 < float(found[1].detach()) < 70
    assert bool(torch.isfinite(logits.grad).all())


def test_probability_hidden_in_the_rest_is_seen_where_sampled() -> None:
    """Half of the policy's probability is on a token that the teacher all but rules out."""
    ids, log_q = torch.tensor([[0, 1, 9]]), torch.tensor([[0.3, 0.2, 1e-9]]).log()
    logits = torch.full((1, 12), -40.0)
    logits[0, [0, 1, 9]] = torch.tensor([0.3, 0.2, 0.5]).log()
    assert float(divergence_from_top(logits, ids[:, :2], log_q[:, :2], None)) == pytest.approx(0, abs=1e-5)
    assert float(divergence_from_top(logits, ids, log_q, None)) > 5


@thorough
@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5), st.randoms())
def test_values_of_loss_tokens_follow_their_samples(masks: list[list[bool]], order: Any) -> None:
    mask = torch.tensor(masks)
    mask[:, 0] = False
    count = int(mask.sum())
    ids = torch.arange(count, dtype=torch.int32)[:, None]
    made = from_rows(torch.ones(mask.shape), torch.full((len(mask),), 4), mask, teacher_top_ids=ids)
    rows = list(range(len(mask)))
    order.shuffle(rows)
    at = torch.full(mask.shape, -1, dtype=torch.int32)
    at[mask] = ids[:, 0]
    part = made.rows(torch.tensor(rows))
    assert part["teacher_top_ids"][:, 0].tolist() == at[rows][mask[rows]].tolist()
    half = made.rows(slice(0, len(mask) // 2))
    assert half["teacher_top_ids"][:, 0].tolist() == at[: len(mask) // 2][mask[: len(mask) // 2]].tolist()


def batch(**tensors: list[Any]) -> Batch:
    return from_rows(torch.ones(2, 3), torch.tensor([3, 2]), torch.tensor([[0, 1, 1], [0, 1, 0]]),
                     **{name: torch.tensor(value) for name, value in tensors.items()})


def test_advantage_of_a_token_is_what_the_teacher_thinks_of_it() -> None:
    given = batch(advantages=[2.0, -1.0], old_logprobs=[[0.0, -1.0, -2.0], [0.0, -0.5, 0.0]],
                  teacher_logprobs=[[0.0, -1.5, -0.5], [0.0, -0.5, 0.0]])

    def found(reward_coef: float = 0.0, **settings: float) -> list[float]:
        cfg = AlgorithmConfig(name="on_policy_distillation", **settings)
        return teacher_advantages(given, DistillationOptions(reward_coef=reward_coef), cfg).tolist()

    assert found() == [-0.5, 1.5, 0.0]
    assert found(teacher_coef=2.0) == [-1.0, 3.0, 0.0]
    assert found(reward_coef=0.5) == [0.5, 2.5, -0.5]
    assert found(teacher_top_k=4, reward_coef=1.0) == [2.0, 2.0, -1.0], "the loss has the divergence"


def test_batch_needs_the_teachers_tokens_only_if_the_loss_reads_them() -> None:
    def needed(**settings: Any) -> set[str]:
        cfg = config.parse({"pools": {"t": {"model": "/t"}}, "algorithm": {"teacher": "t", **settings}})
        return set(required_tensors(algorithm_of(cfg), cfg.algorithm))

    top = {"teacher_top_ids", "teacher_top_logprobs"}
    assert needed(name="on_policy_distillation") == {"old_logprobs", "token_advantages"}
    assert needed(name="on_policy_distillation", teacher_top_k=4) == {"old_logprobs", "token_advantages", *top}
    assert needed(name="gspo", teacher_top_k=4) == {"old_logprobs", "advantages", *top}


@pytest.mark.parametrize(("settings", "named"), [
    ({"algorithm": {"name": "on_policy_distillation"}}, "learns from a teacher, and there is none"),
    ({"algorithm": {"teacher_top_k": 4}}, "learns from a teacher, and there is none"),
    ({"algorithm": {"teacher": "t"}, "pools": {"t": {"model": "/t"}}}, "has no use for algorithm.teacher=t"),
    ({"algorithm": {"name": "on_policy_distillation", "teacher": "t"}}, "teacher=t is no further pool of the job"),
    ({"algorithm": {"name": "on_policy_distillation", "teacher": "rollout"}}, "set algorithm.teacher=NAME and"),
    ({"algorithm": {"options": {"reward_coef": 0.5}}}, "algorithm.options.reward_coef: there is no such option"),
    ({"algorithm": {"name": "on_policy_distillation", "teacher": "t", "overlong_buffer_tokens": 5},
      "pools": {"t": {"model": "/t"}}}, "have no effect"),
    ({"algorithm": {"teacher_coef": 0}}, "greater than 0"),
    ({"algorithm": {"name": "on_policy_distillation", "teacher": "t"}, "pools": {"t": {"model": "/t"}},
      "rollout": {"temperature": 0.8}}, "temperature 1")])
def test_settings_of_a_teacher_that_do_not_fit_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        algorithm_of(config.parse(settings))
