"""Reading config.json of every family."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.config import ModelConfig
from elastic_rl.errors import ConfigError
from elastic_rl.models.arch import ModelArch, MoeArch
from elastic_rl.models.families import FAMILIES

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
OWN: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}}


def raw(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **OWN[family], **changes}


def test_every_family_is_tested() -> None:
    assert set(OWN) == set(FAMILIES) == {family.model_type for family in FAMILIES.values()}


def test_small_model_can_be_made_of_every_family() -> None:
    assert set(get_args(ModelConfig.model_fields["family"].annotation)) == set(FAMILIES)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_smallest_config_of_a_family_is_read(family: str) -> None:
    arch = ModelArch.parse(raw(family))
    assert arch.family is FAMILIES[family] and not arch.tied and arch.rope_factor is None
    assert arch.head_dim == OWN[family].get("head_dim", 16), "the hidden size over the heads where it is left out"
    assert (arch.rope_theta, arch.moe) == (10000.0, MoeArch(8, 2, 24, False) if FAMILIES[family].experts else None)


@pytest.mark.parametrize(("family", "change", "named"), [
    ("llama", {"attention_bias": True}, "attention biases"), ("llama", {"mlp_bias": True}, "biases of the MLP"),
    ("qwen2", {"head_dim": 32}, "head_dim=32 of 4 heads"), ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("qwen2", {"use_sliding_window": True}, "sliding-window"),
    ("qwen3", {"attention_bias": True}, "attention_bias"), ("qwen3", {"head_dim": None}, "head_dim"),
    ("qwen3", {"quantization_config": {"bits": 4}}, "quantized"), ("qwen3_moe", {"mlp_only_layers": [0]}, "experts"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 of 8"),
    ("qwen3_moe", {"num_experts": None}, "num_experts"), ("llama", {"rms_norm_eps": 0}, "rms_norm_eps"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"), ("llama", {"rope_theta": "1e4"}, "rope_theta"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
    ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 8.0}}, "high_freq_factor"),
    ("llama", {"rope_scaling": {**LLAMA3, "factor": None}}, "factor"),
    ("llama", {"rope_scaling": {**LLAMA3, "factor": math.nan}}, "factor"),
    ("llama", {"rope_theta": math.inf}, "rope_theta"), ("llama", {"rope_theta": 10**400}, "rope_theta"),
    ("llama", {"rms_norm_eps": math.inf}, "rms_norm_eps"), ("llama", {"hidden_size": 1 << 31}, "hidden_size"),
    ("llama", {"hidden_size": 1}, "hidden_size"),
    ("qwen3_moe", {"num_experts": 10**9}, "num_experts"),
    ("llama", {"rope_parameters": "default"}, "rope scaling")])
def test_what_is_not_supported_is_named(family: str, change: dict[str, Any], named: str) -> None:
    ModelArch.parse(raw(family))
    with pytest.raises(ConfigError, match=named) as e:
        ModelArch.parse(raw(family, **change))
    assert e.value.hint


def test_unknown_family_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="'gpt2'") as e:
        ModelArch.parse({"model_type": "gpt2"})
    assert "llama, qwen2, qwen3, qwen3_moe" in e.value.hint


@pytest.mark.parametrize("change", [
    {"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}])
def test_llama3_rope_scaling_is_read_in_its_old_and_new_place(change: dict[str, Any]) -> None:
    arch = ModelArch.parse(raw("llama", **change))
    assert (arch.rope_theta, arch.rope_factor) == (5e5, 32.0)


@settings(deadline=None, max_examples=seeds(40))
@given(family=st.sampled_from(sorted(FAMILIES)), changes=st.dictionaries(
    st.sampled_from([*SIZES, "head_dim", "num_experts", "moe_intermediate_size", "rope_theta", "rope_scaling",
                     "rope_parameters", "tie_word_embeddings", "quantization_config"]),
    st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.text(max_size=3), st.lists(st.integers(), max_size=2),
              st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta"]), st.none() | st.integers())),
    max_size=4))
def test_any_content_is_read_or_refused_with_a_config_error(family: str, changes: dict[str, Any]) -> None:
    try:
        arch = ModelArch.parse(raw(family, **changes))
    except ConfigError:
        return
    assert min(arch.layers, arch.hidden, arch.heads, arch.kv_heads, arch.head_dim, arch.vocab) > 0
    assert len(set(arch.hf_names())) == len(list(arch.hf_names()))
