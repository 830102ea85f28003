"""The divergence from the reference policy in the rewards of samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.algorithms.kl import kl_estimate
from elastic_rl.config import AlgorithmConfig
from elastic_rl.config.algorithm import KlEstimator
from elastic_rl.data.batch import Batch, collate
from elastic_rl.data.samples import Prompt, Sample, Segment
from elastic_rl.pipeline.training.divergence import penalised, sample_divergences, without_scores


def make_batch(lengths: list[int], seed: int) -> Batch:
    """Samples of these numbers of loss tokens, each with two tokens of a tool in between."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for n in lengths:
        logprobs = (-torch.rand(n, generator=g)).tolist()
        segments = (Segment((1,) * n, tuple(logprobs), version=1), Segment((2, 2), loss=False))
        rows.append((Prompt((3, 4)), Sample(segments)))
    return collate(rows)


@settings(deadline=None, max_examples=seeds(40))
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.sampled_from(["k1", "k2", "k3"]), st.integers(0, 999))
def test_divergence_of_a_sample_is_the_sum_over_its_own_loss_tokens(lengths: list[int], estimator: KlEstimator,
                                                                    seed: int) -> None:
    batch = make_batch(lengths, seed)
    reference = -torch.rand(batch.loss_tokens, generator=torch.Generator().manual_seed(seed + 1)) - 0.1
    cfg = AlgorithmConfig(kl_coef=0.5, kl_in="reward", kl_estimator=estimator)
    found = sample_divergences(batch, reference, cfg)
    assert found.dtype == torch.float64
    for i, own in enumerate(reference.split(lengths)):
        expected = kl_estimate(batch.by_sample("old_logprobs")[i].double(), own.double(), estimator)
        assert float(found[i]) == pytest.approx(float(expected.sum()), abs=1e-12)


def test_policy_that_is_the_reference_has_no_divergence() -> None:
    batch = make_batch([2, 5], 0)
    for estimator in ("k1", "k2", "k3"):
        cfg = AlgorithmConfig(kl_in="reward", kl_estimator=estimator)
        assert sample_divergences(batch, batch["old_logprobs"], cfg).tolist() == [0.0, 0.0]


def test_rewards_of_groups_are_lowered_sample_by_sample() -> None:
    divergences, cfg = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), AlgorithmConfig(kl_coef=0.25)
    assert penalised([[1.0, 0.0], [1.0]], divergences, cfg) == [[0.75, -0.5], [0.0]]
    assert penalised([[0.1, 0.2, 0.3]], divergences, AlgorithmConfig(report_kl=True)) == [[0.1, 0.2, 0.3]]


def test_batch_for_the_pass_has_the_tokens_alone() -> None:
    assert set(without_scores(make_batch([2], 0)).tensors) == {"tokens", "lengths", "loss_mask"}
