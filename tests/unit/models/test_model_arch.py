"""Reading config.json of every family."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds
from transformers import AutoConfig

from elastic_rl.config import ModelConfig
from elastic_rl.errors import ConfigError
from elastic_rl.models.arch import ModelArch, MoeArch, config_eos_ids, end_ids_of, max_positions, vocabulary_of
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


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_key_that_is_left_out_has_the_default_of_transformers(family: str) -> None:
    """Engines read config.json with transformers, so another default would be another model than the trainer's."""
    theirs = AutoConfig.for_model(family)
    arch = ModelArch.parse({"model_type": family})
    assert (arch.vocab, arch.hidden, arch.ffn, arch.layers, arch.heads, arch.kv_heads, arch.max_positions) == (
        theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size, theirs.num_hidden_layers,
        theirs.num_attention_heads, theirs.num_key_value_heads, theirs.max_position_embeddings)
    assert (arch.norm_eps, arch.rope_theta, arch.tied) == (
        theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"], theirs.tie_word_embeddings)
    assert arch.head_dim == getattr(theirs, "head_dim", arch.hidden // arch.heads)
    assert arch.moe == (MoeArch(theirs.num_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size,
                                theirs.norm_topk_prob) if FAMILIES[family].experts else None)
    assert config_eos_ids({"model_type": family}) == theirs.eos_token_id


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_null_for_kv_heads_is_as_many_as_heads(family: str) -> None:
    assert ModelArch.parse(raw(family, num_key_value_heads=None)).kv_heads == SIZES["num_attention_heads"]


def test_experts_are_read_by_either_name() -> None:
    other = {key: value for key, value in raw("qwen3_moe").items() if key != "num_experts"}
    moe = ModelArch.parse({**other, "num_local_experts": 8}).moe
    assert moe is not None and moe.experts == 8


def test_folder_that_does_not_say_positions_or_vocabulary_has_the_defaults(tmp_path: Path) -> None:
    def said(**config: Any) -> tuple[int, int | None, tuple[int, ...]]:
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return max_positions(tmp_path), vocabulary_of(tmp_path), end_ids_of(tmp_path)

    assert said(model_type="llama") == (2048, 32000, (2,))
    assert said(model_type="llama", eos_token_id=None, vocab_size=7) == (2048, 7, ())
    assert said(model_type="other", text_config={"vocab_size": 5}) == (1 << 62, 5, ())


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
