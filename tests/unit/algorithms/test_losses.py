"""Every algorithm's loss against its paper's formula, in plain loops and float64, and its gradient against differences
of that formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.registry import ALGOS, aggregate_of, options_of
from elastic_rl.config import AlgorithmConfig
from elastic_rl.trainer.update_loss import UpdateLoss

Sequences = list[list[float]]
"""One number a token, by sequence."""
Formula = Callable[[list[float], list[float], list[float], float, Any], list[float]]
"""Loss of each token of one sequence, from its log-probs, the same before the gradient is taken (what a stop-gradient
sees), those that it was sampled with, and its advantage."""

thorough = settings(deadline=None, max_examples=seeds(25))
lengths = st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any)
LEARNING = sorted(name for name, spec in ALGOS.items() if spec.advantages is not None)


def clipped(logp: list[float], _stopped: list[float], old: list[float], a: float, options: Any) -> list[float]:
    ratios = [math.exp(new - before) for new, before in zip(logp, old, strict=True)]
    return [-min(r * a, min(max(r, 1 - options.clip_low), 1 + options.clip_high) * a) for r in ratios]


def gspo(logp: list[float], _stopped: list[float], old: list[float], a: float, options: Any) -> list[float]:
    s = math.exp(sum(new - before for new, before in zip(logp, old, strict=True)) / len(logp))
    return [-min(s * a, min(max(s, 1 - options.clip_low), 1 + options.clip_high) * a)] * len(logp)


def sapo(logp: list[float], _stopped: list[float], old: list[float], a: float, options: Any) -> list[float]:
    tau = options.tau_positive if a > 0 else options.tau_negative
    return [-4 / tau / (1 + math.exp(-tau * (math.exp(new - before) - 1))) * a
            for new, before in zip(logp, old, strict=True)]


def cispo(logp: list[float], stopped: list[float], old: list[float], a: float, options: Any) -> list[float]:
    return [-min(math.exp(was - before), options.max_weight) * a * new
            for new, was, before in zip(logp, stopped, old, strict=True)]


FORMULAS: dict[str, Formula] = {"gspo": gspo, "sapo": sapo, "cispo": cispo}


def aggregated(losses: Sequences, cfg: AlgorithmConfig) -> float:
    """The loss of a batch, of the losses of its tokens."""
    used = [row for row in losses if row]
    how = aggregate_of(ALGOS[cfg.name], cfg)
    if how == "token":
        return sum(map(sum, used)) / sum(map(len, used))
    if how == "sequence":
        return sum(sum(row) / len(row) for row in used) / len(used)
    return sum(map(sum, used)) / (cfg.constant_length_tokens or 0) / len(used)


def formula(logp: Sequences, stopped: Sequences, old: Sequences, advantages: list[float], cfg: AlgorithmConfig
            ) -> float:
    of_sequence, options = FORMULAS.get(cfg.name, clipped), options_of(ALGOS[cfg.name], cfg)
    return aggregated([of_sequence(*row, options) if row[0] else []
                       for row in zip(logp, stopped, old, advantages, strict=True)], cfg)


def make_case(sizes: list[int], seed: int) -> tuple[Sequences, Sequences, list[float]]:
    """Log-probs now, those that the tokens were sampled with, and an advantage for each sequence."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, generator=g, dtype=torch.float64).tolist()  # noqa: E731
    old = [[-abs(x) for x in draw(n)] for n in sizes]
    return [[x + 0.3 * d for x, d in zip(row, draw(len(row)), strict=True)] for row in old], old, draw(len(sizes))


def tensors(old: Sequences, advantages: list[float]) -> LossBatch:
    sequence = torch.tensor([i for i, row in enumerate(old) for _ in row])
    flat = torch.tensor([x for row in old for x in row], dtype=torch.float64)
    return LossBatch({"old_logprobs": flat, "advantages": torch.tensor(advantages, dtype=torch.float64)[sequence]},
                     sequence, len(old))


def update_loss(cfg: AlgorithmConfig, sizes: list[int]) -> UpdateLoss:
    spec = ALGOS[cfg.name]
    return UpdateLoss(spec, cfg, options_of(spec, cfg), tokens=sum(sizes), sequences=sum(n > 0 for n in sizes))


def config_of(name: str, **changes: object) -> AlgorithmConfig:
    """Clips that bind for some sequences and not for others."""
    options = {"gspo": {"clip_low": 0.1, "clip_high": 0.15}, "sapo": {"tau_negative": 1.7},
               "cispo": {"max_weight": 1.2}}
    return AlgorithmConfig(name=name, constant_length_tokens=6, options=options.get(name, {}),
                           **changes)  # type: ignore[arg-type]


def token_loss(name: str, logp: torch.Tensor, batch: LossBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return ALGOS[name].token_loss(logp, batch, options_of(ALGOS[name], config_of(name)))


@pytest.mark.parametrize("name", LEARNING)
@thorough
@given(lengths, st.integers(0, 10_000), st.sampled_from([None, "token", "sequence", "constant"]))
def test_loss_and_gradient_equal_the_formula_of_the_paper(name: str, sizes: list[int], seed: int,
                                                          aggregate: str | None) -> None:
    cfg = config_of(name, aggregate=aggregate)
    logp, old, advantages = make_case(sizes, seed)
    flat = torch.tensor([x for row in logp for x in row], dtype=torch.float64, requires_grad=True)
    loss = update_loss(cfg, sizes)
    loss.add(flat, tensors(old, advantages)).backward()
    assert loss.sums["loss"] == pytest.approx(formula(logp, logp, old, advantages, cfg), rel=1e-5, abs=1e-7)
    assert flat.grad is not None
    slopes = iter(flat.grad.tolist())
    for i, row in enumerate(logp):
        for t in range(len(row)):
            above, below = ([[x + sign * 1e-6 * (r == i and c == t) for c, x in enumerate(other)]
                             for r, other in enumerate(logp)] for sign in (1, -1))
            difference = formula(above, logp, old, advantages, cfg) - formula(below, logp, old, advantages, cfg)
            assert next(slopes) == pytest.approx(difference / 2e-6, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", LEARNING)
@thorough
@given(lengths, st.integers(0, 10_000))
def test_on_policy_gradient_is_the_plain_policy_gradient(name: str, sizes: list[int], seed: int) -> None:
    cfg = config_of(name)
    logp, _, advantages = make_case(sizes, seed)
    flat = torch.tensor([x for row in logp for x in row], dtype=torch.float64, requires_grad=True)
    update_loss(cfg, sizes).add(flat, tensors(logp, advantages)).backward()
    plain = flat.detach().clone().requires_grad_()
    reinforce = iter(-plain * tensors(logp, advantages)["advantages"])
    weighed = aggregated([[next(reinforce) for _ in row] for row in logp], cfg)  # type: ignore[misc]
    weighed.backward()  # type: ignore[attr-defined]
    torch.testing.assert_close(flat.grad, plain.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("shift", [-1e4, -60.0, 60.0, 1e4])
def test_log_probs_that_are_far_apart_give_finite_losses_and_gradients(name: str, shift: float) -> None:
    cfg = config_of(name)
    logp = torch.tensor([-1.0, -2.0, -0.5, -0.1], requires_grad=True)
    batch = LossBatch({"old_logprobs": logp.detach() - shift, "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0])},
                      torch.tensor([0, 0, 1, 1]), 2)
    update_loss(cfg, [2, 2]).add(logp, batch).backward()
    assert torch.isfinite(logp.grad).all()  # type: ignore[arg-type]


def test_clip_fraction_of_gspo_counts_the_sequences_whose_gradient_is_gone() -> None:
    old = [[-1.0, -2.0], [-1.0], [-3.0, -1.0]]
    logp = torch.tensor([-0.9, -1.5, -0.99, -3.5, -1.5], dtype=torch.float64)
    loss, stats = token_loss("gspo", logp, tensors(old, [1.0, 1.0, 1.0]))
    assert stats["clip_fraction"].tolist() == [1, 1, 0, 0, 0] and loss.shape == (5,)
    assert stats["ratio_mean"].tolist() == pytest.approx([math.exp(0.3)] * 2 + [math.exp(0.01)] + [math.exp(-0.5)] * 2)


def test_gspo_takes_an_advantage_for_each_token() -> None:
    """GSPO-token, eq. 14: the sequence's ratio times the token's own advantage and gradient."""
    logp = torch.tensor([-0.95, -2.02], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0], dtype=torch.float64)
    batch = LossBatch({"old_logprobs": torch.tensor([-1.0, -2.0], dtype=torch.float64),
                       "token_advantages": advantages}, torch.tensor([0, 0]), 1)
    loss, _ = token_loss("gspo", logp, batch)
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, -math.exp(0.015) * advantages)


def test_gate_of_sapo_is_one_on_policy_and_falls_on_both_sides() -> None:
    shifts = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0])
    batch = LossBatch({"old_logprobs": torch.zeros(5), "advantages": torch.ones(5)},
                      torch.zeros(5, dtype=torch.int64), 1)
    gate = token_loss("sapo", shifts, batch)[1]["gate_mean"]
    assert gate[2] == 1 and gate[0] < gate[1] < 1 and gate[4] < gate[3] < 1


@thorough
@given(lengths, st.integers(0, 10_000))
def test_sums_of_sequences_equal_those_of_loops(sizes: list[int], seed: int) -> None:
    values, old, advantages = make_case(sizes, seed)
    batch = tensors(old, advantages)
    flat = torch.tensor([x for row in values for x in row], dtype=torch.float64)
    assert batch.sequence_sum(flat).tolist() == pytest.approx([sum(row) for row in values])
    means = [sum(row) / len(row) if row else 0.0 for row in values]
    assert batch.sequence_mean(flat).tolist() == pytest.approx(means)
    spread = [m for m, row in zip(means, values, strict=True) for _ in row]
    assert batch.to_tokens(batch.sequence_mean(flat)).tolist() == pytest.approx(spread)
