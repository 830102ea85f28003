"""The conversion between Megatron's layout and HF's, and the wire format of a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.errors import ConfigError
from elastic_rl.trainer import hf_layout
from elastic_rl.trainer.batch import TrainBatch, meta_of
from elastic_rl.trainer.hf_layout import AttentionDims

LAYER = ["input_layernorm.weight", "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight",
         "self_attention.q_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight",
         "mlp.linear_fc2.weight"]
NAMES = ["embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight",
         *(f"decoder.layers.1.{n}" for n in LAYER)]


def hf_tensors(dims: AttentionDims, hidden: int, ffn: int) -> dict[str, torch.Tensor]:
    """Every element differs, so that any misplaced row shows."""
    q, kv, b = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim, "model.layers.1."
    shapes = {"model.embed_tokens.weight": (dims.vocab, hidden), "lm_head.weight": (dims.vocab, hidden),
              "model.norm.weight": (hidden,), b + "input_layernorm.weight": (hidden,),
              b + "post_attention_layernorm.weight": (hidden,), b + "self_attn.q_proj.weight": (q, hidden),
              b + "self_attn.k_proj.weight": (kv, hidden), b + "self_attn.v_proj.weight": (kv, hidden),
              b + "self_attn.o_proj.weight": (hidden, q), b + "self_attn.q_norm.weight": (dims.head_dim,),
              b + "mlp.gate_proj.weight": (ffn, hidden), b + "mlp.up_proj.weight": (ffn, hidden),
              b + "mlp.down_proj.weight": (hidden, ffn)}
    out, start = {}, 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        out[name] = torch.arange(start, start + size, dtype=torch.float64).view(shape)
        start += size
    return out


@settings(deadline=None, max_examples=seeds(60))
@given(tp=st.sampled_from([1, 2, 4]), kv_per_rank=st.integers(1, 2), per_group=st.integers(1, 3),
       head_dim=st.sampled_from([2, 6]), vocab=st.integers(1, 19), ffn_per_rank=st.integers(1, 4))
def test_merge_inverts_split_for_every_hf_tensor(tp: int, kv_per_rank: int, per_group: int, head_dim: int,
                                                          vocab: int, ffn_per_rank: int) -> None:
    kv = kv_per_rank * tp
    dims = AttentionDims(kv * per_group, kv, head_dim, vocab, hf_layout.padded_vocab(vocab, tp))
    full = hf_tensors(dims, hidden=5, ffn=ffn_per_rank * tp)
    merged: dict[str, torch.Tensor] = {}
    for name in NAMES:
        rule = hf_layout.rule_of(name)
        merged |= hf_layout.merge(rule, [hf_layout.split(rule, full, dims, tp=tp, tp_rank=r) for r in range(tp)], dims)
    assert set(merged) == set(full)
    assert all(torch.equal(merged[n], full[n]) and merged[n].is_contiguous() for n in full)


def test_qkv_shard_has_queries_then_key_then_value_of_each_group() -> None:
    dims = AttentionDims(heads=4, kv_heads=2, head_dim=1, vocab=4, padded_vocab=4)
    column = lambda *values: torch.tensor(values, dtype=torch.float32)[:, None]  # noqa: E731
    full = {"q": column(0, 1, 2, 3), "k": column(10, 11), "v": column(20, 21)}
    rule = hf_layout.Rule(("q", "k", "v"), hf_layout.ShardLayout.QKV)
    assert hf_layout.split(rule, full, dims, tp=2, tp_rank=1).flatten().tolist() == [2, 3, 11, 21]


def test_padded_vocabulary_rows_are_zero_and_are_dropped_by_merge() -> None:
    dims = AttentionDims(1, 1, 1, vocab=3, padded_vocab=4)
    rule = hf_layout.rule_of("output_layer.weight")
    shards = [hf_layout.split(rule, {"lm_head.weight": torch.ones(3, 2)}, dims, tp=2, tp_rank=r) for r in range(2)]
    assert shards[1].tolist() == [[1, 1], [0, 0]]
    assert hf_layout.merge(rule, shards, dims)["lm_head.weight"].shape == (3, 2)


def test_unknown_parameter_and_missing_tensor_are_named() -> None:
    with pytest.raises(ConfigError, match="linear_qkv.bias"):
        hf_layout.rule_of("decoder.layers.0.self_attention.linear_qkv.bias")
    with pytest.raises(ConfigError, match="lm_head.weight"):
        hf_layout.split(hf_layout.rule_of("output_layer.weight"), {}, AttentionDims(1, 1, 1, 2, 2), tp=1, tp_rank=0)


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    n, prompt, response = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ints = lambda low, high: torch.tensor(draw(st.lists(st.integers(low, high), min_size=n, max_size=n)))  # noqa: E731
    lengths = ints(0, response)
    lengths[0] = 1
    return TrainBatch(tokens=torch.randint(0, 16, (n, prompt + response)), prompt_len=ints(1, prompt),
                      response_len=lengths, engine_logprobs=torch.randn(n, response), advantages=torch.randn(n),
                      policy_versions=ints(0, 1 << 40), groups=torch.arange(draw(st.integers(0, 3))))


@settings(deadline=None, max_examples=seeds(40))
@given(batches())
def test_batch_round_trips_through_its_wire_format(batch: TrainBatch) -> None:
    raw = batch.to_bytes(step=7, cursor={"next": [1, 2]})
    again = TrainBatch.from_bytes(raw)
    assert all(torch.equal(getattr(batch, name), getattr(again, name)) for name in batch.__dict__)
    assert meta_of(raw) == {"step": 7, "cursor": {"next": [1, 2]}}


@settings(deadline=None, max_examples=seeds(60))
@given(st.binary(max_size=64))
def test_bytes_that_are_not_a_batch_raise_config_error(raw: bytes) -> None:
    with pytest.raises(ConfigError):
        TrainBatch.from_bytes(raw)
    with pytest.raises(ConfigError):
        meta_of(raw)


@pytest.mark.parametrize(("change", "named"), [
    ({"prompt_len": torch.tensor([0, 1])}, "at least one token"),
    ({"response_len": torch.tensor([4, 1])}, "longer than its row"),
    ({"response_len": torch.tensor([0, 0])}, "no response token"),
    ({"advantages": torch.zeros(3)}, "advantages"),
    ({"tokens": torch.zeros(2, 4)}, "int64")])
def test_inconsistent_batch_raises_config_error(change: dict[str, torch.Tensor], named: str) -> None:
    good = {"tokens": torch.zeros(2, 4, dtype=torch.int64), "prompt_len": torch.tensor([2, 2]),
            "response_len": torch.tensor([2, 1]), "engine_logprobs": torch.zeros(2, 2), "advantages": torch.zeros(2),
            "policy_versions": torch.tensor([1, 1]), "groups": torch.tensor([0])}
    TrainBatch(**good).check()
    with pytest.raises(ConfigError, match=named):
        TrainBatch(**{**good, **change}).check()
