"""PPO's advantages and the loss of its critic against float64 references."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import from_rows
from support.budget import seeds

from elastic_rl import config
from elastic_rl.algorithms import ppo
from elastic_rl.algorithms.kl import kl_estimate
from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.ppo import (
    PpoOptions,
    clipped_value_loss,
    estimated,
    explained_variance,
    gae_advantages,
    sample_rewards,
    whitened,
)
from elastic_rl.algorithms.registry import algorithm_of
from elastic_rl.config import AlgorithmConfig, CriticConfig
from elastic_rl.data.batch import Batch
from elastic_rl.errors import ConfigError

NUMBER = st.floats(-3, 3)
FACTOR = st.floats(0, 1)


@st.composite
def drawn_tokens(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards and values [L], and how many loss tokens each of N samples has, perhaps none."""
    counts = draw(st.lists(st.integers(0, 8), min_size=1, max_size=4))
    rewards, values = (torch.tensor(draw(st.lists(NUMBER, min_size=sum(counts), max_size=sum(counts))),
                                    dtype=torch.float64) for _ in range(2))
    return rewards, values, torch.tensor(counts)


def reference(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The sum of arXiv:1506.02438, eq. 16, term by term."""
    after = [*values[1:], 0.0][:len(values)]
    errors = [r + gamma * following - v for r, v, following in zip(rewards, values, after, strict=True)]
    return [math.fsum((gamma * lam) ** k * error for k, error in enumerate(errors[i:])) for i in range(len(errors))]


@pytest.mark.parametrize("block", [2, 4, 256])
@given(drawn=drawn_tokens(), gamma=FACTOR, lam=FACTOR)
@settings(max_examples=seeds(40), deadline=None)
def test_advantages_equal_the_sum_over_the_trained_tokens_of_a_sample(
        block: int, drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor], gamma: float, lam: float) -> None:
    rewards, values, counts = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "_BLOCK", block)
        found = estimated(rewards, values, counts, gamma=gamma, lam=lam)
    expected = [a for r, v in zip(rewards.split(counts.tolist()), values.split(counts.tolist()), strict=True)
                for a in reference(r.tolist(), v.tolist(), gamma, lam)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@given(drawn_tokens(), FACTOR)
@settings(max_examples=seeds(40), deadline=None)
def test_returns_with_lambda_one_are_discounted_rewards_whatever_the_values_are(
        drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor], gamma: float) -> None:
    rewards, values, counts = drawn
    returns = estimated(rewards, values, counts, gamma=gamma, lam=1.0) + values
    without = estimated(rewards, torch.zeros_like(values), counts, gamma=gamma, lam=1.0)
    torch.testing.assert_close(returns, without, rtol=1e-9, atol=1e-9)


def batch_of(mask: list[list[int]], **tensors: torch.Tensor) -> Batch:
    of_tokens = torch.tensor(mask, dtype=torch.bool)
    n, t = of_tokens.shape
    return from_rows(torch.ones(n, t), torch.full((n,), t), of_tokens, **tensors)


@pytest.mark.parametrize("piece", [1, 4, 1 << 20])
def test_reward_is_at_the_last_trained_token_and_the_divergence_at_each(monkeypatch: pytest.MonkeyPatch, piece: int
                                                                         ) -> None:
    """The second sample ends with a turn of its environment. The result is the same in pieces of some samples."""
    monkeypatch.setattr(ppo, "_PIECE", piece)
    mask = [[0, 1, 1, 0, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    generator = torch.Generator().manual_seed(0)
    old, other, values = (torch.randn(3, 5, generator=generator) for _ in range(3))
    batch = batch_of(mask, advantages=torch.tensor([2.0, -1.0, 5.0]), old_logprobs=old, ref_logprobs=other,
                     values=values)
    cfg = AlgorithmConfig(name="ppo", kl_coef=0.3, kl_in="reward", kl_estimator="k1")
    divergence = kl_estimate(old.double(), other.double(), "k1")
    found = gae_advantages(batch, PpoOptions(gamma=0.9, gae_lambda=0.8), cfg)
    expected: list[float] = []
    for row, reward in enumerate((2.0, -1.0)):
        own = torch.tensor(mask[row], dtype=torch.bool)
        rewards = (-0.3 * divergence[row][own]).tolist()
        rewards[-1] += reward
        expected += reference(rewards, values[row][own].double().tolist(), 0.9, 0.8)
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64))
    assert found.dtype is torch.float32


def test_batch_without_a_trained_token_has_no_advantages() -> None:
    batch = batch_of([[0, 0]], advantages=torch.ones(1), old_logprobs=torch.zeros(1, 2), values=torch.ones(1, 2))
    assert not len(gae_advantages(batch, PpoOptions(), AlgorithmConfig(name="ppo")))
    assert not len(whitened(torch.zeros(0)))


@given(drawn_tokens())
@settings(max_examples=seeds(40), deadline=None)
def test_whitened_advantages_have_mean_zero_and_deviation_one(
        drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    own, _, _ = drawn
    found = whitened(own)
    assert found.shape == own.shape
    if len(own) and float(own.std(unbiased=False)) > 1e-3:
        assert float(found.mean()) == pytest.approx(0, abs=1e-6)
        assert float(found.std(unbiased=False)) == pytest.approx(1, abs=1e-3)


def test_explained_variance_is_one_if_perfect_and_zero_if_constant() -> None:
    returns = torch.tensor([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((3,), 7.0), returns) == pytest.approx(0)
    assert explained_variance(-returns, returns) < 0
    assert explained_variance(returns, torch.ones(3)) == 0, "nothing is to be explained"


@given(st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=8), st.one_of(st.none(), st.floats(0.01, 2)))
@settings(max_examples=seeds(40), deadline=None)
def test_value_loss_is_the_larger_error_with_a_clipped_gradient(
        rows: list[tuple[float, float, float]], clip: float | None) -> None:
    value, old, target = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    value.requires_grad_()
    batch = LossBatch({"values": old, "returns": target}, torch.zeros(len(rows), dtype=torch.int64), 1)
    loss, stats = clipped_value_loss(value, batch, CriticConfig(value_clip=clip))
    loss.sum().backward()
    for i, (v, o, r) in enumerate(rows):
        bounded = v if clip is None else min(max(v, o - clip), o + clip)
        expected = 0.5 * max((v - r) ** 2, (bounded - r) ** 2)
        assert float(loss[i].detach()) == pytest.approx(expected, abs=1e-9)
        stopped = (bounded - r) ** 2 > (v - r) ** 2 + 1e-9
        if stopped:
            assert float(value.grad[i]) == 0 and float(stats["value_clip_fraction"][i]) == 1  # type: ignore[index]
        elif (bounded - r) ** 2 < (v - r) ** 2 - 1e-9 or bounded == v:
            assert float(value.grad[i]) == pytest.approx(v - r, abs=1e-9)  # type: ignore[index]


def test_rewards_of_samples_stay_as_they_are_and_must_be_finite() -> None:
    rewards = torch.tensor([[1.0, 0.0], [3.0, 3.0]], dtype=torch.float64)
    assert torch.equal(sample_rewards(rewards, PpoOptions()), rewards.float())
    with pytest.raises(ValueError, match="finite"):
        sample_rewards(torch.tensor([[float("nan")]]), PpoOptions())


def test_ppo_has_a_critic_and_other_algorithms_have_none() -> None:
    cfg = config.parse({"algorithm": {"name": "ppo"}})
    assert cfg.uses_critic and algorithm_of(cfg).inputs == ("values",)
    assert [group.name for group in cfg.trainer_groups] == ["trainer", "critic"]
    assert [group.name for group in config.parse({}).trainer_groups] == ["trainer"]
    with pytest.raises(ConfigError, match="needs the values of a critic"):
        algorithm_of(config.parse({"algorithm": {"name": "ppo"}, "critic": {"enabled": False}}))
    with pytest.raises(ConfigError, match="no use for a critic"):
        algorithm_of(config.parse({"critic": {"enabled": True}}))
    assert not config.parse({"algorithm": {"name": "ppo"}, "mode": "eval"}).uses_critic
