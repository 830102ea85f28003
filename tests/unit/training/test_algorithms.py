"""Advantages and losses against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.algorithms.advantages import STD_EPSILON, group_relative
from elastic_rl.algorithms.losses import clipped_policy_loss
from elastic_rl.algorithms.registry import ALGOS
from elastic_rl.algorithms.schedule import learning_rate
from elastic_rl.config import AlgorithmConfig, TrainConfig

thorough = settings(deadline=None, max_examples=seeds(60))
reward = st.floats(-10, 10, width=32)
groups = st.integers(2, 8).flatmap(
    lambda k: st.lists(st.lists(reward, min_size=k, max_size=k), min_size=1, max_size=6))


@thorough
@given(groups, st.booleans())
def test_advantages_of_a_group_sum_to_zero_up_to_rounding(rewards: list[list[float]], normalize: bool) -> None:
    out = group_relative(torch.tensor(rewards), normalize)
    assert out.shape == (len(rewards), len(rewards[0]))
    assert torch.isfinite(out).all()
    # Rounding of the mean, at most a few ulp of the largest reward, is divided by the epsilon at worst.
    scale = torch.tensor(rewards).abs().amax().item()
    assert out.sum(1).abs().max() <= 1e-4 + len(rewards[0]) * scale * 2e-7 / (STD_EPSILON if normalize else 1)


@thorough
@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=16))
def test_advantages_of_binary_rewards_equal_the_formula_of_the_paper(row: list[float]) -> None:
    out = group_relative(torch.tensor([row]))[0]
    mean = sum(row) / len(row)
    std = math.sqrt(sum((r - mean) ** 2 for r in row) / (len(row) - 1))
    expected = [(r - mean) / (std + STD_EPSILON) if std else 0.0 for r in row]
    assert out.tolist() == pytest.approx(expected, abs=1e-5)


@thorough
@given(reward, st.integers(2, 9), st.booleans())
def test_advantages_of_equal_rewards_are_exactly_zero(value: float, k: int, normalize: bool) -> None:
    assert (group_relative(torch.full((2, k), value), normalize) == 0).all()


@thorough
@given(groups)
def test_advantages_of_a_group_do_not_depend_on_other_groups(rewards: list[list[float]]) -> None:
    together = group_relative(torch.tensor(rewards))
    alone = torch.cat([group_relative(torch.tensor([row])) for row in rewards])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(3, 1), torch.tensor([[0.0, math.nan]])])
def test_advantages_reject_bad_shapes_and_nan(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="rewards"):
        group_relative(bad)


def _case(seed: int, n: int, r: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    logp = -torch.rand(n, r, generator=g) * 3
    old = logp + torch.randn(n, r, generator=g) * 0.4
    return logp, old, torch.randn(n, generator=g), (torch.rand(n, r, generator=g) < 0.7).float()


def _naive(logp: torch.Tensor, old: torch.Tensor, adv: torch.Tensor, mask: torch.Tensor,
           low: float, high: float) -> float:
    total, tokens = 0.0, 0
    for i in range(logp.shape[0]):
        for t in range(logp.shape[1]):
            if mask[i, t]:
                rho, a = math.exp(logp[i, t] - old[i, t]), float(adv[i])
                total -= min(rho * a, min(max(rho, 1 - low), 1 + high) * a)
                tokens += 1
    return total / max(tokens, 1)


@thorough
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 5), st.floats(0, 0.9), st.floats(0, 2))
def test_clipped_loss_equals_a_naive_implementation(seed: int, n: int, r: int, low: float, high: float) -> None:
    logp, old, adv, mask = _case(seed, n, r)
    loss, stats = clipped_policy_loss(logp, old, adv, mask, low, high)
    assert loss.item() == pytest.approx(_naive(logp, old, adv, mask, low, high), abs=1e-4, rel=1e-4)
    assert stats["tokens"] == mask.sum()
    assert 0 <= stats["clip_fraction"] <= 1
    assert stats["kl"] >= -1e-6


@thorough
@given(st.integers(0, 10_000))
def test_gradient_vanishes_exactly_where_the_clip_binds(seed: int) -> None:
    logp, old, adv, mask = _case(seed, 5, 4)
    logp.requires_grad_()
    loss, stats = clipped_policy_loss(logp, old, adv, mask, 0.2, 0.28)
    loss.backward()
    ratio = (logp - old).exp().detach()
    a = adv[:, None].expand_as(ratio)
    bound = ((a > 0) & (ratio > 1.28)) | ((a < 0) & (ratio < 0.8))
    assert logp.grad is not None
    assert (logp.grad[bound | (mask == 0)] == 0).all()
    assert (logp.grad[~bound & (mask == 1)] != 0).all()
    if mask.sum():
        assert stats["clip_fraction"].item() == pytest.approx((bound & (mask == 1)).sum().item() / mask.sum().item())


def test_on_policy_gradient_equals_the_plain_policy_gradient() -> None:
    logp, _, adv, mask = _case(1, 6, 3)
    logp.requires_grad_()
    clipped_policy_loss(logp, logp.detach(), adv, mask, 0.2, 0.28)[0].backward()
    assert torch.allclose(logp.grad, -(adv[:, None] * mask) / mask.sum())


def test_loss_ignores_values_in_the_padding() -> None:
    logp, old, adv, mask = _case(2, 4, 3)
    mask[0], mask[1, 2] = 0, 0
    mask[2] = 1
    changed_logp, changed_old = logp.clone(), old.clone()
    changed_logp[mask == 0], changed_old[mask == 0] = 80.0, -math.inf
    changed_logp.requires_grad_()
    loss, _ = clipped_policy_loss(changed_logp, changed_old, adv, mask, 0.2, 0.28)
    loss.backward()
    assert loss.item() == clipped_policy_loss(logp, old, adv, mask, 0.2, 0.28)[0].item()
    assert torch.isfinite(changed_logp.grad).all()


def test_empty_mask_gives_zero_loss_and_gradient() -> None:
    logp, old, adv, _ = _case(3, 2, 2)
    logp.requires_grad_()
    loss, stats = clipped_policy_loss(logp, old, adv, torch.zeros(2, 2), 0.2, 0.28)
    loss.backward()
    assert loss == 0 and stats["tokens"] == 0 and (logp.grad == 0).all()


def test_losses_of_parts_weighted_by_tokens_add_up_to_the_loss_of_the_whole() -> None:
    logp, old, adv, mask = _case(4, 8, 3)
    whole, stats = clipped_policy_loss(logp, old, adv, mask, 0.2, 0.28)
    parts = [clipped_policy_loss(logp[s], old[s], adv[s], mask[s], 0.2, 0.28) for s in (slice(0, 3), slice(3, 8))]
    joined = sum(loss * part["tokens"] for loss, part in parts) / stats["tokens"]
    assert torch.allclose(whole, joined)


def test_loss_rejects_bad_shapes_and_clips() -> None:
    logp, old, adv, mask = _case(5, 2, 2)
    with pytest.raises(ValueError, match="shapes"):
        clipped_policy_loss(logp, old, adv[:1], mask, 0.2, 0.28)
    with pytest.raises(ValueError, match="clip_low"):
        clipped_policy_loss(logp, old, adv, mask, -0.2, 0.28)


def test_registry_has_the_default_algorithm() -> None:
    assert ALGOS[AlgorithmConfig().name].loss is clipped_policy_loss


def test_learning_rate_decays_linearly_to_its_final_fraction() -> None:
    cfg = TrainConfig(steps=101, lr=1e-3, lr_warmup_steps=0, lr_decay="linear", lr_final_fraction=0.1)
    rates = [learning_rate(cfg, step) for step in (1, 51, 101, 500)]
    assert rates == pytest.approx([1e-3, 5.5e-4, 1e-4, 1e-4])


def test_constant_learning_rate_and_a_run_of_one_step() -> None:
    assert learning_rate(TrainConfig(lr_decay="constant", lr=2e-3, steps=9, lr_warmup_steps=9), 9) == 2e-3
    assert learning_rate(TrainConfig(lr_decay="linear", lr=2e-3, steps=1, lr_warmup_steps=0), 1) == 2e-3
    with pytest.raises(ValueError, match="from 1"):
        learning_rate(TrainConfig(), 0)


@thorough
@given(st.integers(1, 40), st.integers(1, 300), st.sampled_from(["linear", "constant"]))
def test_learning_rate_warms_up_linearly(warmup: int, step: int, decay: str) -> None:
    cfg = TrainConfig(steps=300, lr=1e-3, lr_warmup_steps=warmup, lr_decay=decay)
    without = cfg.model_copy(update={"lr_warmup_steps": 0})
    fraction = min(1.0, step / warmup)
    assert learning_rate(cfg, step) == pytest.approx(learning_rate(without, step) * fraction)
    assert 0 < learning_rate(cfg, step) <= cfg.lr
