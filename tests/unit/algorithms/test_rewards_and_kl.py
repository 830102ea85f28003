"""Advantages, reward shaping and estimates of the divergence against their definitions; what the registry refuses."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.algorithms.advantages import (
    STD_EPSILON,
    batch_normalised,
    batch_normalised_with_baseline,
    group_centred,
    group_relative,
    leave_one_out,
)
from elastic_rl.algorithms.kl import kl_estimate, rewards_less_kl
from elastic_rl.algorithms.registry import (
    ALGOS,
    AlgorithmSpec,
    GrpoOptions,
    algorithm_of,
    required_tensors,
    uses_reference,
)
from elastic_rl.algorithms.reward_shaping import overlong_penalty, shaped_rewards
from elastic_rl.config import AlgorithmConfig, Config, PoolConfig, parse
from elastic_rl.data.batch import SCHEMA
from elastic_rl.errors import ConfigError

CFG = AlgorithmConfig()
OPTIONS = GrpoOptions()
ESTIMATORS = (group_relative, group_centred, leave_one_out, batch_normalised, batch_normalised_with_baseline)
thorough = settings(deadline=None, max_examples=seeds(40))
groups = st.tuples(st.integers(1, 5), st.integers(2, 6)).flatmap(lambda size: st.lists(
    st.lists(st.integers(-8, 8), min_size=size[1], max_size=size[1]), min_size=size[0], max_size=size[0]))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def by_definition(name: str, rows: list[list[float]]) -> list[list[float]]:
    everything = [r for row in rows for r in row]
    if name == "group_centred":
        return [[r - mean(row) for r in row] for row in rows]
    if name == "leave_one_out":
        return [[r - mean(row[:i] + row[i + 1:]) for i, r in enumerate(row)] for row in rows]
    if name == "batch_normalised":
        return [[(r - mean(everything)) / (std(everything) + STD_EPSILON) for r in row] for row in rows]
    centred = by_definition("group_centred", rows)
    if name == "batch_normalised_with_baseline":
        spread = std([a for row in centred for a in row])
        return [[a / (spread + STD_EPSILON) for a in row] for row in centred]
    return [[a / (std(raw) + STD_EPSILON) for a in row] for raw, row in zip(rows, centred, strict=True)]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@thorough
@given(groups)
def test_advantages_equal_their_definition(estimator: Any, rows: list[list[float]]) -> None:
    out = estimator(torch.tensor(rows, dtype=torch.float32), OPTIONS)
    assert out.dtype == torch.float32
    for found, expected in zip(out.tolist(), by_definition(estimator.__name__, rows), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@thorough
@given(groups, st.integers(-20, 20))
def test_advantages_do_not_change_when_all_rewards_are_shifted(estimator: Any, rows: list[list[float]], shift: int
                                                               ) -> None:
    rewards = torch.tensor(rows, dtype=torch.float32)
    torch.testing.assert_close(estimator(rewards + shift, OPTIONS), estimator(rewards, OPTIONS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@thorough
@given(groups)
def test_advantages_sum_to_zero(estimator: Any, rows: list[list[float]]) -> None:
    """The sum is that of each group; with REINFORCE++ without a baseline, that of the step."""
    out = estimator(torch.tensor(rows, dtype=torch.float32), OPTIONS)
    assert (out.sum() if estimator is batch_normalised else out.sum(1)).abs().max() < 1e-3


@pytest.mark.parametrize("estimator", ESTIMATORS)
@thorough
@given(st.floats(-10, 10, width=32), st.integers(1, 4), st.integers(2, 7))
def test_equal_rewards_give_exactly_no_advantage(estimator: Any, value: float, g: int, k: int) -> None:
    assert (estimator(torch.full((g, k), value), OPTIONS) == 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(3, 1), torch.tensor([[0.0, math.inf]])])
def test_advantages_reject_bad_shapes_and_infinite_rewards(estimator: Any, bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="rewards"):
        estimator(bad, OPTIONS)


# -- reward shaping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (60, 0.0), (70, -0.5), (75, -0.75), (80, -1.0), (99, -1.0)])
def test_overlong_penalty_equals_the_formula_of_the_paper(length: int, penalty: float) -> None:
    cfg = AlgorithmConfig(overlong_buffer_tokens=20)
    assert overlong_penalty(length, 80, cfg) == pytest.approx(penalty)


@thorough
@given(st.integers(0, 50), st.integers(1, 40), st.floats(0, 3), st.integers(0, 60))
def test_overlong_penalty_is_bounded_and_never_falls_with_the_length(buffer: int, limit: int, worst: float,
                                                                     length: int) -> None:
    cfg = AlgorithmConfig(overlong_buffer_tokens=buffer, overlong_penalty=worst)
    now, longer = (overlong_penalty(n, limit, cfg) for n in (length, length + 1))
    assert -worst <= longer <= now <= 0
    assert buffer == 0 or overlong_penalty(limit, limit, cfg) == -worst


def test_rewards_are_as_they_were_without_a_buffer() -> None:
    assert shaped_rewards([0.1, 0.2], [5, 500], 10, CFG) == [0.1, 0.2]
    assert shaped_rewards([1.0, 1.0], [5, 10], 10, AlgorithmConfig(overlong_buffer_tokens=4)) == [1.0, 0.0]


# -- divergence --------------------------------------------------------------------------------------------------------


def _distributions(seed: int, vocab: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, the log-probs of the policy that they make, and those of a reference."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=g, dtype=torch.float64).requires_grad_()
    return logits, logits.log_softmax(0), torch.randn(vocab, generator=g, dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@thorough
@given(st.integers(0, 10_000))
def test_expected_estimate_is_the_divergence(estimator: Any, seed: int) -> None:
    _, policy, reference = _distributions(seed)
    divergence = (policy.exp() * (policy - reference)).sum()
    estimates = kl_estimate(policy, reference, estimator)
    torch.testing.assert_close((policy.exp() * estimates).sum(), divergence)
    assert estimator == "k1" or bool((estimates >= 0).all())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@thorough
@given(st.integers(0, 10_000))
def test_expected_gradient_is_the_documented_one(estimator: Any, seed: int) -> None:
    logits, policy, reference = _distributions(seed)
    probabilities = policy.exp().detach()  # of the samples; the gradient is that of the estimates
    found = torch.autograd.grad((probabilities * kl_estimate(policy, reference, estimator)).sum(), logits,
                                retain_graph=True)[0]
    p, q = (policy.exp(), policy), (reference.exp(), reference)
    expected = {"k1": policy.sum() * 0, "k2": (p[0] * (p[1] - q[1])).sum(), "k3": (q[0] * (q[1] - p[1])).sum()}
    torch.testing.assert_close(found, torch.autograd.grad(expected[estimator], logits)[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_estimate_in_the_reward_teaches_the_divergence_s_gradient_with_k1_alone(seed: int) -> None:
    """The gradient is that of E[estimate], with the estimate a number, as REINFORCE has it."""
    logits, policy, reference = _distributions(seed)
    true = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    for estimator in ("k1", "k2", "k3"):
        penalty = kl_estimate(policy, reference, estimator).detach()
        taught = torch.autograd.grad((policy.exp() * penalty).sum(), logits, retain_graph=True)[0]
        assert torch.allclose(taught, true, rtol=1e-6, atol=1e-9) is (estimator == "k1")


def test_divergence_lowers_the_reward_of_its_sample() -> None:
    rewards, kl = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 4.0]], requires_grad=True)
    out = rewards_less_kl(rewards, kl, AlgorithmConfig(kl_coef=0.25))
    assert out.tolist() == [[0.5, -1.0]] and not out.requires_grad
    with pytest.raises(ValueError, match=r"must be \[1, 2\]"):
        rewards_less_kl(rewards, kl[0], CFG)


# -- registry ----------------------------------------------------------------------------------------------------------


def test_every_algorithm_is_found_by_its_name_and_needs_what_batches_have() -> None:
    for name, spec in ALGOS.items():
        assert spec.name == name and set(spec.needs) <= set(SCHEMA)
        if spec.advantages is not None:
            cfg = AlgorithmConfig(name=name, constant_length_tokens=8,
                                  teacher="t" if "teacher_logprobs" in spec.inputs else None)
            assert algorithm_of(Config(algorithm=cfg, pools={"t": PoolConfig(model="/t")})) is spec


@pytest.mark.parametrize(("settings", "named"), [
    ({"name": "dr_grpo"}, "algorithm.constant_length_tokens"), ({"aggregate": "constant"}, "constant length"),
    ({"kl_coef": 0.1, "kl_estimator": "k1"}, "algorithm.kl_estimator=k1 in the loss"),
    ({"kl_coef": 0.1, "kl_in": "reward"}, "algorithm.kl_in=reward with algorithm.name='grpo'"),
    ({"name": "rloo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k3"}, "algorithm.kl_estimator=k3"),
    ({"name": "ppo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k2"}, "algorithm.kl_estimator=k2")])
def test_settings_that_cannot_be_carried_out_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        algorithm_of(parse({"algorithm": settings}))


def test_reference_policy_is_used_where_settings_or_loss_ask_for_it() -> None:
    own = replace(ALGOS["grpo"], needs=("advantages", "ref_logprobs"))
    assert uses_reference(own, CFG) and not uses_reference(ALGOS["grpo"], CFG)
    for asked in ({"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_in": "reward", "options": {"normalize_std": False}},
                  {"report_kl": True}, {"report_kl": True, "kl_in": "reward", "kl_estimator": "k1"}):
        cfg = AlgorithmConfig(**asked)
        assert algorithm_of(Config(algorithm=cfg)) is ALGOS["grpo"]
        assert uses_reference(ALGOS["grpo"], cfg) and not uses_reference(ALGOS["sft"], cfg)


def test_stats_with_names_of_the_step_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGOS, "mine", replace(ALGOS["grpo"], stats=("entropy", "own")))
    with pytest.raises(ConfigError, match="entropy"):
        algorithm_of(Config(algorithm=AlgorithmConfig(name="mine")))


@pytest.mark.parametrize(("wrong", "said"), [
    ({"aggregate": "mean"}, "aggregate='mean'"), ({"needs": ("values",)}, "needs 'values'"),
    ({"token_loss": None}, "token_loss"), ({"options": dict}, "no pydantic model"), ({"advantages": 3}, "advantages"),
    ({"stats": ("a\x1b[2J",)}, "printable"),
    ({"stats": ("",)}, "printable")])
def test_specification_that_the_ranks_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any],
                                                            said: str) -> None:
    monkeypatch.setitem(ALGOS, "mine", replace(ALGOS["grpo"], **wrong))
    with pytest.raises(ConfigError, match=re.escape(said)):
        algorithm_of(Config(algorithm=AlgorithmConfig(name="mine")))


def test_settings_add_to_what_a_batch_must_have() -> None:
    plain = AlgorithmSpec("plain", ("advantages",), ALGOS["grpo"].token_loss, advantages=group_relative)
    assert required_tensors(plain, CFG) == ("advantages",)
    assert required_tensors(plain, AlgorithmConfig(tis_cap=2.0)) == ("advantages", "old_logprobs")
    assert required_tensors(ALGOS["grpo"], AlgorithmConfig(tis_cap=2.0, kl_coef=0.1)) == (
        "old_logprobs", "advantages", "ref_logprobs")
    assert required_tensors(ALGOS["grpo"], AlgorithmConfig(report_kl=True))[-1] == "ref_logprobs"
    assert "ref_logprobs" not in required_tensors(ALGOS["grpo"], AlgorithmConfig(kl_coef=0.1, kl_in="reward"))
    assert required_tensors(ALGOS["sft"], AlgorithmConfig(tis_cap=2.0, kl_coef=0.1)) == ()
