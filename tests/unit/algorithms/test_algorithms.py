"""Advantages and losses against their definitions."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.algorithms.advantages import STD_EPSILON, GroupRelativeOptions, group_relative
from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.losses import ClipOptions, clipped_policy_loss
from elastic_rl.algorithms.registry import ALGOS, GrpoOptions, algorithm_of, options_of
from elastic_rl.algorithms.schedule import decay, learning_rate
from elastic_rl.config import AlgorithmConfig, Config, SftConfig, TrainConfig, load
from elastic_rl.data.batch import SCHEMA
from elastic_rl.errors import ConfigError

DEFAULTS = GrpoOptions()
thorough = settings(deadline=None, max_examples=seeds(40))
reward = st.floats(-10, 10, width=32)
groups = st.integers(2, 8).flatmap(
    lambda k: st.lists(st.lists(reward, min_size=k, max_size=k), min_size=1, max_size=6))


@thorough
@given(groups, st.booleans())
def test_advantages_of_a_group_sum_to_zero_up_to_rounding(rewards: list[list[float]], normalize: bool) -> None:
    out = group_relative(torch.tensor(rewards), GroupRelativeOptions(normalize_std=normalize))
    assert out.shape == (len(rewards), len(rewards[0]))
    assert torch.isfinite(out).all()
    # Rounding of the mean, at most a few ulp of the largest reward, is divided by the epsilon at worst.
    scale = torch.tensor(rewards).abs().amax().item()
    assert out.sum(1).abs().max() <= 1e-4 + len(rewards[0]) * scale * 2e-7 / (STD_EPSILON if normalize else 1)


@thorough
@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=16))
def test_advantages_of_binary_rewards_equal_the_formula_of_the_paper(row: list[float]) -> None:
    out = group_relative(torch.tensor([row]), DEFAULTS)[0]
    mean = sum(row) / len(row)
    std = math.sqrt(sum((r - mean) ** 2 for r in row) / (len(row) - 1))
    expected = [(r - mean) / (std + STD_EPSILON) if std else 0.0 for r in row]
    assert out.tolist() == pytest.approx(expected, abs=1e-5)


@thorough
@given(reward, st.integers(2, 9), st.booleans())
def test_advantages_of_equal_rewards_are_exactly_zero(value: float, k: int, normalize: bool) -> None:
    assert (group_relative(torch.full((2, k), value), GroupRelativeOptions(normalize_std=normalize)) == 0).all()


@thorough
@given(groups)
def test_advantages_of_a_group_do_not_depend_on_other_groups(rewards: list[list[float]]) -> None:
    together = group_relative(torch.tensor(rewards), DEFAULTS)
    alone = torch.cat([group_relative(torch.tensor([row]), DEFAULTS) for row in rewards])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(3, 1), torch.tensor([[0.0, math.nan]])])
def test_advantages_reject_bad_shapes_and_nan(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="rewards"):
        group_relative(bad, DEFAULTS)


def _case(seed: int, m: int) -> tuple[torch.Tensor, LossBatch]:
    g = torch.Generator().manual_seed(seed)
    logp = -torch.rand(m, generator=g) * 3
    old = logp + torch.randn(m, generator=g) * 0.4
    return logp, _batch(old, torch.randn(m, generator=g))


def _batch(old: torch.Tensor, advantages: torch.Tensor) -> LossBatch:
    """All tokens are of one sequence."""
    return LossBatch({"old_logprobs": old, "advantages": advantages}, torch.zeros(len(old), dtype=torch.int64), 1)


@thorough
@given(st.integers(0, 10_000), st.integers(1, 30), st.floats(0, 0.9), st.floats(0, 2))
def test_clipped_loss_equals_the_formula_of_the_paper(seed: int, m: int, low: float, high: float) -> None:
    logp, batch = _case(seed, m)
    loss, stats = clipped_policy_loss(logp, batch, ClipOptions(clip_low=low, clip_high=high))
    for i in range(m):
        rho, a = math.exp(logp[i] - batch["old_logprobs"][i]), float(batch["advantages"][i])
        assert loss[i].item() == pytest.approx(-min(rho * a, min(max(rho, 1 - low), 1 + high) * a), abs=1e-4, rel=1e-4)
    assert all(s.shape == (m,) for s in stats.values())
    assert ((stats["clip_fraction"] == 0) | (stats["clip_fraction"] == 1)).all() and (stats["kl"] >= -1e-6).all()


@thorough
@given(st.integers(0, 10_000))
def test_gradient_vanishes_exactly_where_the_clip_binds(seed: int) -> None:
    logp, batch = _case(seed, 20)
    logp.requires_grad_()
    loss, stats = clipped_policy_loss(logp, batch, DEFAULTS)
    loss.sum().backward()
    ratio, a = (logp - batch["old_logprobs"]).exp().detach(), batch["advantages"]
    bound = ((a > 0) & (ratio > 1.28)) | ((a < 0) & (ratio < 0.8))
    assert logp.grad is not None
    assert (logp.grad[bound] == 0).all() and (logp.grad[~bound] != 0).all()
    assert torch.equal(stats["clip_fraction"].bool(), bound)


def test_on_policy_gradient_equals_the_plain_policy_gradient() -> None:
    logp, batch = _case(1, 18)
    logp.requires_grad_()
    clipped_policy_loss(logp, _batch(logp.detach(), batch["advantages"]), DEFAULTS)[0].sum().backward()
    assert torch.allclose(logp.grad, -batch["advantages"])


def test_registry_has_the_default_algorithm() -> None:
    assert algorithm_of(Config()).token_loss is clipped_policy_loss
    assert set(algorithm_of(Config()).needs) <= set(SCHEMA)


@pytest.mark.parametrize(("name", "options", "said"), [
    ("dapo", {"clip_hihg": 0.3}, "algorithm.options.clip_hihg: there is no such option; did you mean 'clip_high'?"),
    ("dr_grpo", {"normalize_std": False}, "algorithm.options.normalize_std: there is no such option"),
    ("gspo", {"clip_low": 2}, "algorithm.options.clip_low: Input should be less than or equal to 1"),
    ("ppo", {"gamma": 0.9, "lambda": 0.9}, "did you mean 'gae_lambda'?")])
def test_option_that_an_algorithm_does_not_have_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    cfg = Config(algorithm=AlgorithmConfig(name=name, options=options, constant_length_tokens=9))
    with pytest.raises(ConfigError, match=re.escape(said)):
        algorithm_of(cfg)


def test_algorithms_have_options_of_their_own_under_one_name() -> None:
    found = {name: options_of(ALGOS[name], AlgorithmConfig(name=name)) for name in ("dapo", "gspo")}
    assert (found["dapo"].clip_high, found["gspo"].clip_high) == (0.28, 4e-4)
    cfg = AlgorithmConfig(name="dapo", options={"clip_high": 0.3})
    assert options_of(ALGOS["dapo"], cfg).clip_high == 0.3
    options_of(ALGOS["sft"], cfg)  # supervised steps before RL have no options


@pytest.mark.parametrize("name", [name for name, spec in ALGOS.items() if spec.advantages is not None])
def test_every_option_has_a_description_and_a_place_in_the_documentation(name: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    for option, field in ALGOS[name].options.model_fields.items():
        [default] = [row[1] for row in rows if row[0] == f"`{option}`" and f"`{name}`" in row[2]]
        assert field.description and yaml.safe_load(default) == field.default


@pytest.mark.parametrize(("setting", "meant"), [
    ("algorithm.clip_high", "algorithm.options.clip_high"), ("algorithm.gspo_clip_low", "algorithm.options.clip_low"),
    ("algorithm.sapo_tau_positive", "algorithm.options.tau_positive"), ("algorithm.value_clip", "critic.value_clip"),
    ("algorithm.cispo_max_weight", "algorithm.options.max_weight")])
def test_option_given_as_a_setting_is_refused_with_its_key(setting: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{setting}'; did you mean '{meant}'"):
        load(overrides=[f"{setting}=0.1"])


def test_clip_of_tokens_is_to_be_left_out_where_sequences_are_clipped() -> None:
    overrides = ["algorithm.name=gspo", "algorithm.clip_low=0.2", "algorithm.gspo_clip_low=0.1"]
    with pytest.raises(ConfigError, match="'algorithm.clip_low'; leave it out: gspo does not read") as raised:
        load(overrides=overrides)
    assert "'algorithm.gspo_clip_low'; did you mean 'algorithm.options.clip_low'" in raised.value.message


@pytest.mark.parametrize(("name", "named"), [
    ("grop", "did you mean 'grpo'"), ("sft", "no advantages"), ("math:pi", "not an AlgorithmSpec"),
    ("math:tau2", "has no 'tau2'")])
def test_wrong_algorithm_is_named(name: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        algorithm_of(Config(algorithm=AlgorithmConfig(name=name)))


def rate(step: int, phase: str = "rl", **train: Any) -> float:
    return learning_rate(Config(train=TrainConfig(**train)), phase, step)


def test_learning_rate_decays_linearly_to_its_final_fraction() -> None:
    rates = [rate(step, steps=101, lr=1e-3, lr_warmup_steps=0, lr_decay="linear", lr_final_fraction=0.1)
             for step in (1, 51, 101, 500)]
    assert rates == pytest.approx([1e-3, 5.5e-4, 1e-4, 1e-4])


def test_cosine_and_wsd_rates_at_known_steps() -> None:
    cosine = {"steps": 101, "lr": 1e-3, "lr_warmup_steps": 0, "lr_decay": "cosine", "lr_final_fraction": 0.2}
    assert [rate(step, **cosine) for step in (1, 26, 51, 101, 500)] == pytest.approx(
        [1e-3, 1e-3 * (0.2 + 0.4 * (1 + 0.5 ** 0.5)), 6e-4, 2e-4, 2e-4])
    wsd = {"steps": 100, "lr": 1e-3, "lr_warmup_steps": 4, "lr_decay": "wsd", "lr_decay_fraction": 0.2,
           "lr_final_fraction": 0.0}
    assert [rate(step, **wsd) for step in (1, 4, 80, 90, 100, 101)] == pytest.approx(
        [2.5e-4, 1e-3, 1e-3, 5e-4, 0.0, 0.0])


def test_sft_phase_has_a_schedule_of_its_own_over_its_own_steps() -> None:
    sft = SftConfig(lr=1e-3, max_steps=11, lr_warmup_steps=2, lr_decay="linear", lr_final_fraction=0.5)
    cfg = Config(sft=sft, train=TrainConfig(lr=5.0))
    assert [learning_rate(cfg, "sft", step) for step in (1, 2, 6, 11)] == pytest.approx(
        [5e-4, 1e-3, 1e-3 - 5e-4 * 4 / 9, 5e-4])


@thorough
@given(st.sampled_from(["constant", "linear", "cosine", "wsd"]), st.integers(2, 400), st.floats(0, 1), st.floats(0, 1),
       st.floats(0.001, 1))
def test_decay_falls_from_the_warm_up_to_its_final_fraction(kind: Any, steps: int, warm: float, final: float,
                                                            fraction: float) -> None:
    warmup_steps = int(warm * 2 * steps)
    rates = [decay(kind, step, steps, warmup_steps=warmup_steps, final=final, fraction=fraction)
             for step in range(1, steps + 3)]
    assert all(a >= b - 1e-12 for a, b in pairwise(rates))
    begins = max(min(warmup_steps, steps - 1), 1)
    assert rates[:begins] == [1.0] * begins
    assert rates[steps - 1:] == pytest.approx([1.0 if kind == "constant" else final] * 3)


def test_constant_learning_rate_and_a_run_of_one_step() -> None:
    assert rate(9, lr_decay="constant", lr=2e-3, steps=9, lr_warmup_steps=9) == 2e-3
    assert rate(1, lr_decay="linear", lr=2e-3, steps=1, lr_warmup_steps=0) == 2e-3
    assert rate(1, "sft") == rate(900, "sft") == Config().sft.lr
    with pytest.raises(ValueError, match="from 1"):
        rate(0)


@thorough
@given(st.integers(1, 299), st.integers(1, 300), st.sampled_from(["linear", "constant", "cosine", "wsd"]))
def test_learning_rate_warms_up_linearly_to_its_peak(warmup: int, step: int, decay: str) -> None:
    settings = {"steps": 300, "lr": 1e-3, "lr_decay": decay, "lr_warmup_steps": warmup}
    assert rate(warmup, **settings) == 1e-3
    if step < warmup:
        assert rate(step, **settings) == pytest.approx(1e-3 * step / warmup)
    assert 0 < rate(step, **settings) <= 1e-3
