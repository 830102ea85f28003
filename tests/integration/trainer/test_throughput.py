"""What a rank reports of its speed and memory, against what torch counts in the real model of each family."""

from __future__ import annotations

import pytest
from support.rank_processes import Scenario, run_ranks

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.data.tiny_model import make_model_dir

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe"]
PEAK_TFLOPS = 0.5
Numbers = dict[str, dict[str, float]]


def make_config(family: str, replicas: int = 1, **trainer: int) -> Config:
    # Padded rows: that what fills them up is computed, and does not count, is what these tests see.
    return config.parse({"device": {"type": "cpu", "peak_tflops": PEAK_TFLOPS}, "model": {"family": family},
                         "trainer": {"data_parallel": replicas, "packing": False, **trainer}})


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """By family what its only rank reports, and "replicas": what those of two replicas of two stages do."""
    folder = tmp_path_factory.mktemp("throughput")
    models = {family: make_model_dir(folder / family, make_config(family)) for family in FAMILIES}
    found = run_ranks(folder / "alone", make_config("qwen3"), [
        Scenario(family, "throughput", model) for family, model in models.items()])
    found["replicas"] = run_ranks(folder / "replicas", make_config("qwen3", 2, pipeline_parallel=2), [
        Scenario("qwen3", "throughput", models["qwen3"])])["qwen3"]
    return {name: {key: float(value) for key, value in tensors.items()} for name, tensors in found.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_of_sequences_without_padding_are_those_that_torch_counts(measured: Numbers, family: str) -> None:
    of = measured[family]
    assert 2 * of["0/equal/counted"] / 1e12 == pytest.approx(of["0/equal/tflops_per_rank"], rel=1e-6)
    assert of["0/uneven/tflops_per_rank"] < 0.95 * of["0/equal/tflops_per_rank"], "padding does not count"
    assert of["0/uneven/counted"] == of["0/equal/counted"], "but it is computed"


def test_rates_and_utilisation_follow_from_tokens_flops_and_seconds(measured: Numbers) -> None:
    of = measured["qwen3"]
    for name in ("equal", "uneven"):
        assert of[f"0/{name}/train_tokens_per_s"] == 2 * of[f"0/{name}/tokens"]
        assert of[f"0/{name}/mfu"] == pytest.approx(of[f"0/{name}/tflops_per_rank"] / PEAK_TFLOPS)


def test_every_rank_of_a_group_reports_the_whole_group(measured: Numbers) -> None:
    alone, group = measured["qwen3"], measured["replicas"]
    for rank in range(4):
        assert group[f"{rank}/uneven/train_tokens_per_s"] == alone["0/uneven/train_tokens_per_s"]
        assert group[f"{rank}/uneven/tflops_per_rank"] == pytest.approx(alone["0/uneven/tflops_per_rank"] / 4)
        assert group[f"{rank}/uneven/peak_memory_bytes"] == group["0/uneven/peak_memory_bytes"] > 100 << 20
