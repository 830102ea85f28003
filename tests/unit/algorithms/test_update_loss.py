"""What the training step adds to an algorithm's loss, how it is cut into micro-batches, and what a user's loss may do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.algorithms.kl import kl_estimate
from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.registry import ALGOS, RESERVED_STATS, GrpoOptions, options_of
from elastic_rl.config import AlgorithmConfig
from elastic_rl.errors import PluginFailed
from elastic_rl.trainer.update_loss import UpdateLoss
from elastic_rl.trainer.vocab_parallel import entropy

thorough = settings(deadline=None, max_examples=seeds(25))
LEARNING = sorted(name for name, spec in ALGOS.items() if spec.advantages is not None)


def make_batch(sizes: list[int], seed: int = 0) -> LossBatch:
    g = torch.Generator().manual_seed(seed)
    m, sequence = sum(sizes), torch.tensor([i for i, n in enumerate(sizes) for _ in range(n)], dtype=torch.int64)
    draw = lambda n: torch.randn(n, generator=g)  # noqa: E731
    return LossBatch({"old_logprobs": -draw(m).abs(), "ref_logprobs": -draw(m).abs(), "trainer_logprobs":
                      -draw(m).abs(), "advantages": draw(len(sizes))[sequence]}, sequence, len(sizes))


def loss_of(cfg: AlgorithmConfig, batch: LossBatch, **counts: float) -> UpdateLoss:
    return UpdateLoss(ALGOS[cfg.name], cfg, options_of(ALGOS[cfg.name], cfg), **{
        "tokens": float(len(batch.sequence)), "sequences": float(len(batch.sequence.unique())), **counts})


def log_probs(batch: LossBatch, seed: int = 1) -> torch.Tensor:
    noise = torch.randn(len(batch.sequence), generator=torch.Generator().manual_seed(seed))
    return (batch["trainer_logprobs"] + noise * 0.2).requires_grad_()


@pytest.mark.parametrize("name", LEARNING)
@thorough
@given(st.lists(st.integers(1, 4), min_size=2, max_size=6), st.integers(0, 6), st.integers(0, 10_000))
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(name: str, sizes: list[int], cut: int, seed: int) -> None:
    cfg = AlgorithmConfig(name=name, constant_length_tokens=5, tis_cap=1.5, kl_coef=0.3, entropy_coef=0.1)
    batch, at = make_batch(sizes, seed), sum(sizes[:cut])
    whole, parts = loss_of(cfg, batch), loss_of(cfg, batch)
    together, apart = log_probs(batch), log_probs(batch)
    entropies = torch.linspace(0, 1, len(together))
    whole.add(together, batch, entropies).backward()
    for part in (slice(0, at), slice(at, None)):
        if len(sequence := batch.sequence[part]):
            own = LossBatch({n: t[part] for n, t in batch.tensors.items()}, sequence - sequence[0], len(sizes))
            parts.add(apart[part], own, entropies[part]).backward()
    torch.testing.assert_close(together.grad, apart.grad, rtol=1e-5, atol=1e-7)
    assert parts.sums == pytest.approx(whole.sums, rel=1e-5, abs=1e-6)
    assert parts.logprob_diff_max == whole.logprob_diff_max


@thorough
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 10_000), st.floats(0.5, 3))
def test_truncated_importance_weight_multiplies_each_tokens_gradient(sizes: list[int], seed: int, cap: float) -> None:
    """The ratio of the policy is the trainer's to itself; the weight makes up for the engine."""
    batch = make_batch(sizes, seed)
    plain = LossBatch({**batch.tensors, "old_logprobs": batch["trainer_logprobs"]}, batch.sequence, batch.sequences)
    corrected, reference = log_probs(batch), log_probs(batch)
    found = loss_of(AlgorithmConfig(tis_cap=cap), batch)
    found.add(corrected, batch).backward()
    loss_of(AlgorithmConfig(), plain).add(reference, plain).backward()
    engine, trainer = batch["old_logprobs"].tolist(), batch["trainer_logprobs"].tolist()
    weights = [min(math.exp(t - e), cap) for t, e in zip(trainer, engine, strict=True)]
    torch.testing.assert_close(corrected.grad, reference.grad * torch.tensor(weights), rtol=1e-4, atol=1e-7)
    assert found.sums["tis_weight_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-4)
    assert found.sums["logprob_diff_mean"] == pytest.approx(
        float((corrected.detach() - batch["old_logprobs"]).abs().mean()), rel=1e-4), "it compares with the engine"


def test_first_update_corrects_with_its_own_log_probs() -> None:
    batch = make_batch([3, 2])
    own = LossBatch({n: t for n, t in batch.tensors.items() if n != "trainer_logprobs"}, batch.sequence, 2)
    logp = log_probs(batch)
    loss = loss_of(AlgorithmConfig(tis_cap=2.0), batch)
    loss.add(logp, own).backward()
    weight = (logp.detach() - batch["old_logprobs"]).exp().clamp(max=2.0)
    torch.testing.assert_close(logp.grad, -weight * batch["advantages"] / 5)
    assert loss.sums["ratio_mean"] == 1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergence_and_entropy_are_added_with_their_coefficients(estimator: Any) -> None:
    batch = make_batch([2, 3])
    cfg = AlgorithmConfig(kl_coef=0.7, kl_estimator=estimator, entropy_coef=0.4)
    logp, entropies = log_probs(batch), torch.rand(5, generator=torch.Generator().manual_seed(3)).requires_grad_()
    plain, with_both = loss_of(AlgorithmConfig(), batch), loss_of(cfg, batch)
    plain.add(log_probs(batch), batch)
    with_both.add(logp, batch, entropies).backward()
    divergence = kl_estimate(logp.detach(), batch["ref_logprobs"], estimator)
    assert with_both.sums["loss"] == pytest.approx(
        plain.sums["loss"] + float(0.7 * divergence.mean() - 0.4 * entropies.detach().mean()), rel=1e-5)
    assert with_both.sums["kl_reference"] == pytest.approx(float(divergence.mean()), rel=1e-5)
    torch.testing.assert_close(entropies.grad, torch.full((5,), -0.4 / 5))


def test_importance_weights_are_no_part_of_divergence_and_entropy() -> None:
    """These are of the policy that is trained, whatever the engine sampled with."""
    batch = make_batch([2, 3])
    entropies = torch.rand(5, generator=torch.Generator().manual_seed(3))
    added = {}
    for cap in (None, 1.5):
        gradients = []
        for settings_ in ({}, {"kl_coef": 0.7, "entropy_coef": 0.4}):
            loss, logp, own = loss_of(AlgorithmConfig(tis_cap=cap, **settings_), batch), log_probs(batch), entropies * 1
            loss.add(logp, batch, own.requires_grad_() if settings_ else None).backward()
            gradients.append((logp.grad, own.grad))
        added[cap] = (gradients[1][0] - gradients[0][0], gradients[1][1])
    torch.testing.assert_close(added[1.5][0], added[None][0])
    torch.testing.assert_close(added[1.5][1], added[None][1])


def test_reported_divergence_changes_no_gradient() -> None:
    batch = make_batch([2, 3])
    loss, logp, plain = loss_of(AlgorithmConfig(report_kl=True), batch), log_probs(batch), log_probs(batch)
    loss.add(logp, batch).backward()
    loss_of(AlgorithmConfig(), batch).add(plain, batch).backward()
    assert torch.equal(logp.grad, plain.grad)
    assert loss.sums["kl_reference"] == pytest.approx(float(kl_estimate(logp.detach(), batch["ref_logprobs"],
                                                                        "k3").mean()), rel=1e-5)


def test_divergence_in_the_reward_is_no_term_of_the_loss() -> None:
    batch = make_batch([2, 3])
    loss, logp, plain = loss_of(AlgorithmConfig(kl_coef=0.7, kl_in="reward"), batch), log_probs(batch), log_probs(batch)
    loss.add(logp, batch).backward()
    loss_of(AlgorithmConfig(), batch).add(plain, batch).backward()
    assert "kl_reference" not in loss.sums and torch.equal(logp.grad, plain.grad)


def test_names_of_the_steps_own_metrics_are_refused_as_stats() -> None:
    cfg = AlgorithmConfig(kl_coef=0.7, entropy_coef=0.4, tis_cap=2.0)
    loss = UpdateLoss(replace(ALGOS["grpo"], stats=()), cfg, GrpoOptions(), tokens=1, sequences=1)
    assert set(loss.sums) <= RESERVED_STATS


def test_reported_entropy_changes_no_gradient() -> None:
    batch = make_batch([2, 3])
    loss, logp, reference = loss_of(AlgorithmConfig(report_entropy=True), batch), log_probs(batch), log_probs(batch)
    loss.add(logp, batch, torch.full((5,), 0.5)).backward()
    loss_of(AlgorithmConfig(), batch).add(reference, batch).backward()
    assert loss.wants_entropy and loss.sums["entropy"] == pytest.approx(0.5) and torch.equal(logp.grad, reference.grad)


def test_settings_of_the_rl_algorithm_do_not_change_the_supervised_phase() -> None:
    cfg = AlgorithmConfig(aggregate="sequence", tis_cap=2.0, entropy_coef=0.3, kl_coef=0.3, report_entropy=True)
    loss = UpdateLoss(ALGOS["sft"], cfg, options_of(ALGOS["sft"], cfg), tokens=5, sequences=2)
    logp = torch.full((5,), -0.5, requires_grad=True)
    loss.add(logp, LossBatch({}, torch.tensor([0, 0, 0, 1, 1]), 2)).backward()
    assert not loss.wants_entropy and loss.sums == {"loss": 0.5, "logprob_diff_mean": 0.0}
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx([-0.2] * 5)


# -- a user's loss -----------------------------------------------------------------------------------------------------


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise KeyError("in the backward pass")


def _exits(*_: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(("loss", "named"), [
    (_exits, "SystemExit"), (lambda *_: None, "TypeError"), (lambda logp, *_: (logp.sum(), {}), r"must be \[5\]"),
    (lambda logp, *_: (logp[:4], {}), "RuntimeError"), (lambda logp, *_: (logp.detach(), {}), "require grad"),
    (lambda logp, *_: (logp * math.nan, {}), "not finite"), (lambda logp, *_: (logp * 1e300, {}), "not finite"),
    (lambda logp, *_: (logp + (logp - logp.detach()).abs().sqrt(), {}), "not finite"),
    (lambda logp, *_: (_Raises.apply(logp), {}), "in the backward pass"),
    (lambda logp, batch, *_: (logp * batch["rewards"], {}), "KeyError: 'rewards'")])
def test_failure_of_a_users_loss_names_the_algorithm(loss: Callable[..., Any], named: str) -> None:
    spec = replace(ALGOS["grpo"], token_loss=loss, stats=())
    update = UpdateLoss(spec, AlgorithmConfig(name="mine:spec"), GrpoOptions(), tokens=5, sequences=2)
    batch = make_batch([2, 3])
    with pytest.raises(PluginFailed, match=f"algorithm.name=mine:spec.*{named}"):
        update.add(log_probs(batch), batch)


@pytest.mark.parametrize(("stats", "named"), [({}, "KeyError: 'mine'"), ({"mine": torch.ones(2)}, "stat 'mine' must")])
def test_missing_or_wrong_stat_is_named(stats: dict[str, torch.Tensor], named: str) -> None:
    spec = replace(ALGOS["grpo"], token_loss=lambda logp, *_: (logp, stats), stats=("mine",))
    batch = make_batch([2, 3])
    with pytest.raises(PluginFailed, match=named):
        UpdateLoss(spec, AlgorithmConfig(), GrpoOptions(), tokens=5, sequences=2).add(log_probs(batch), batch)


def test_log_probs_that_are_not_finite_are_no_fault_of_the_algorithm() -> None:
    """The norm of the gradient shows them, and the group goes back to its last state."""
    batch = make_batch([2, 3])
    loss = loss_of(AlgorithmConfig(), batch)
    loss.add(torch.full((5,), math.nan, requires_grad=True), batch).backward()
    assert math.isnan(loss.sums["loss"])


# -- entropy -----------------------------------------------------------------------------------------------------------


@thorough
@given(st.integers(1, 5), st.integers(2, 6), st.integers(0, 10_000))
def test_entropy_and_its_gradient_equal_the_definition(m: int, vocab: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(m, vocab, generator=g, dtype=torch.float64) * 3).requires_grad_()
    found = entropy(logits, None)
    for row, value in zip(logits.tolist(), found.tolist(), strict=True):
        total = sum(map(math.exp, row))
        assert value == pytest.approx(-sum(math.exp(z) / total * math.log(math.exp(z) / total) for z in row))
    assert torch.autograd.gradcheck(lambda z: entropy(z, None), (logits,))


def test_padding_columns_have_no_part_in_the_entropy() -> None:
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([logits, torch.full((3, 2), torch.finfo(torch.float32).min)], dim=1).requires_grad_()
    found = entropy(padded, None)
    found.sum().backward()
    torch.testing.assert_close(found, entropy(logits, None))
    assert padded.grad is not None and torch.isfinite(padded.grad).all() and (padded.grad[:, 4:] == 0).all()
