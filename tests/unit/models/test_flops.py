"""Operations of a model from its shape, and the peak of a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl import config
from elastic_rl.config import DeviceConfig
from elastic_rl.errors import ConfigError
from elastic_rl.models.arch import ModelArch
from elastic_rl.models.flops import BACKWARD, SequenceCost, training_flops
from elastic_rl.trainer.throughput import PEAK_TFLOPS, peak_tflops

SHAPE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
"""Qwen3-8B."""
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
           "norm_topk_prob": True}


def arch(**changes: Any) -> ModelArch:
    return ModelArch.parse({**SHAPE, **changes})


def test_short_sequences_take_about_six_operations_a_parameter_and_token() -> None:
    parameters = 8.19e9 - 151936 * 4096  # of the model card, without the embedding, which is a look-up
    assert training_flops(arch(), 1000, 1000) == pytest.approx(6 * parameters * 1000, rel=0.01)


def test_experts_that_a_token_is_not_sent_to_take_none() -> None:
    few, many = (training_flops(arch(**{**EXPERTS, "num_experts": n}), 100, 0) for n in (64, 128))
    router = 6 * SHAPE["num_hidden_layers"] * SHAPE["hidden_size"] * 64 * 100
    assert many - few == pytest.approx(router)


@given(st.lists(st.integers(0, 9000), max_size=9), st.lists(st.integers(0, 9000), max_size=9))
def test_operations_of_batches_add_up(some: list[int], others: list[int]) -> None:
    def flops(lengths: list[int]) -> float:
        return training_flops(arch(), sum(lengths), sum(n * n for n in lengths))
    assert flops(some + others) == pytest.approx(flops(some) + flops(others))


def test_sequence_costs_what_it_counts_for_training_but_for_the_masked_half_of_its_attention() -> None:
    cost = SequenceCost.of(arch())
    for positions in (1, 1000, 131_072):
        counted = training_flops(arch(), positions, positions**2) / (1 + BACKWARD)
        masked = 2 * 36 * 32 * 128 * positions**2
        assert cost(positions) == pytest.approx(counted - masked)
    assert cost(131_072) / 131_072 == pytest.approx(3.55 * cost(1), rel=0.01), "of an 8B model, for each token"
    assert cost.of_sample(1001) == cost(1000) and cost.of_sample(1) == cost(1)


@pytest.mark.parametrize(("name", "device"), [
    ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100 PCIe"),
    ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA H200 NVL", "H200 NVL"), ("NVIDIA H20", "H20")])
def test_known_gpu_has_the_peak_of_its_data_sheet(name: str, device: str) -> None:
    assert peak_tflops(DeviceConfig(), name, torch.bfloat16) == PEAK_TFLOPS[device]
    assert peak_tflops(DeviceConfig(), name, torch.float32) is None, "the table is of bf16"
    assert peak_tflops(DeviceConfig(peak_tflops=67.0), name, torch.float32) == 67.0


@pytest.mark.parametrize("name", ["", "NVIDIA GB200", "NVIDIA H2000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
                                  "AMD MI300X"])
def test_other_device_has_no_peak_unless_it_is_set(name: str) -> None:
    assert peak_tflops(DeviceConfig(), name, torch.bfloat16) is None
    assert peak_tflops(DeviceConfig(peak_tflops=0.5), name, torch.bfloat16) == 0.5


def test_peak_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ConfigError, match="peak_tflops"):
        config.parse({"device": {"peak_tflops": 0}})
