"""The conversion between Megatron's layout and HF's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.errors import ConfigError
from elastic_rl.models.arch import ModelArch, MoeArch, whole_model_name
from elastic_rl.models.families import FAMILIES
from elastic_rl.models.layout import AttentionDims, Rule, ShardLayout
from elastic_rl.trainer.checkpoint.ownership import owners_of
from elastic_rl.trainer.megatron import hf_layout
from elastic_rl.trainer.megatron.hf_layout import ShardRange
from elastic_rl.trainer.megatron.parallel import ParallelDims

HIDDEN = 5


def make_arch(family: str, *, kv: int, per_group: int, head_dim: int, vocab: int, ffn: int, tied: bool = False,
              experts: int = 2) -> ModelArch:
    moe = MoeArch(experts, 2, ffn + 4, norm_top_k=True) if FAMILIES[family].experts else None
    return ModelArch(FAMILIES[family], 2, HIDDEN, ffn, kv * per_group, kv, head_dim, vocab, 8, 1e4, 1e-6, tied, moe=moe)


def megatron_names(arch: ModelArch) -> list[str]:
    """The parameters of the local layers, without those that Transformer Engine names otherwise, and copies."""
    names = [n for n in ("embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight")
             if not arch.rule_of(n).replica]
    for layer in range(arch.layers):
        for parameter in arch.family.layer:
            if not parameter.endswith("layer_norm_weight"):
                names += [f"decoder.layers.{layer}.{parameter.format(expert)}"
                          for expert in range(arch.moe.experts if arch.moe and "{}" in parameter else 1)]
    return names


def hf_tensors(arch: ModelArch) -> dict[str, torch.Tensor]:
    """Every element differs, so that any misplaced row shows."""
    q, kv, head = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim, arch.head_dim
    ffn = arch.moe.ffn if arch.moe else arch.ffn
    shapes = {"embed_tokens.weight": (arch.vocab, HIDDEN), "lm_head.weight": (arch.vocab, HIDDEN),
              "q_proj.weight": (q, HIDDEN), "k_proj.weight": (kv, HIDDEN), "v_proj.weight": (kv, HIDDEN),
              "q_proj.bias": (q,), "k_proj.bias": (kv,), "v_proj.bias": (kv,), "o_proj.weight": (HIDDEN, q),
              "q_norm.weight": (head,), "k_norm.weight": (head,), "gate_proj.weight": (ffn, HIDDEN),
              "up_proj.weight": (ffn, HIDDEN), "down_proj.weight": (HIDDEN, ffn)}
    if arch.moe:
        shapes["mlp.gate.weight"] = (arch.moe.experts, HIDDEN)
    out, start = {}, 0
    for name in arch.hf_names():
        shape = next((s for end, s in shapes.items() if name.endswith(end)), (HIDDEN,))
        size = torch.Size(shape).numel()
        out[name] = torch.arange(start, start + size, dtype=torch.float64).view(shape)
        start += size
    return out


def shape_of(rule: Rule, hf: dict[str, torch.Tensor], dims: AttentionDims, tp: int) -> list[int]:
    """The shape of the shard that one rank has."""
    rows = sum(len(hf[name]) for name in rule.hf)
    shape = list(hf[rule.hf[0]].shape)
    match rule.layout:
        case ShardLayout.COLUMNS:
            shape[1] //= tp
        case ShardLayout.VOCAB:
            shape[0] = dims.padded_vocab // tp
        case ShardLayout.QKV | ShardLayout.GATE_UP:
            shape[0] = rows // tp
    return shape


def fill(rule: Rule, target: ShardRange, hf: dict[str, torch.Tensor], dims: AttentionDims, *, tp: int, tp_rank: int
         ) -> None:
    """From full HF tensors, which come in any order."""
    for piece in reversed(hf_layout.pieces(rule, target, dims, tp=tp, tp_rank=tp_rank)):
        assert piece.shape == tuple(hf[piece.hf].shape)
        piece.fill(hf[piece.hf].narrow(piece.dim, piece.start, piece.stop - piece.start))


def split(rule: Rule, hf: dict[str, torch.Tensor], dims: AttentionDims, *, tp: int, tp_rank: int) -> torch.Tensor:
    """The shard of one rank."""
    shard = torch.full(shape_of(rule, hf, dims, tp), -1, dtype=torch.float64)
    fill(rule, ShardRange.whole(shard), hf, dims, tp=tp, tp_rank=tp_rank)
    return shard


@settings(deadline=None, max_examples=seeds(40))
@given(family=st.sampled_from(sorted(FAMILIES)), tied=st.booleans(), tp=st.sampled_from([1, 2, 4]),
       kv_per_rank=st.integers(1, 2), per_group=st.integers(1, 3), head_dim=st.sampled_from([2, 6]),
       vocab=st.integers(1, 19), ffn_per_rank=st.integers(1, 4), experts=st.integers(2, 5))
def test_merge_inverts_the_pieces_of_every_hf_tensor_of_every_family(
        family: str, tied: bool, tp: int, kv_per_rank: int, per_group: int, head_dim: int, vocab: int,
        ffn_per_rank: int, experts: int) -> None:
    arch = make_arch(family, kv=kv_per_rank * tp, per_group=per_group, head_dim=head_dim, vocab=vocab,
                     ffn=ffn_per_rank * 4, tied=tied, experts=experts)
    dims, full = arch.attention_dims(tp), hf_tensors(arch)
    merged: dict[str, torch.Tensor] = {}
    for name in megatron_names(arch):
        rule = arch.rule_of(name)
        part = hf_layout.merge(rule, [split(rule, full, dims, tp=tp, tp_rank=r) for r in range(tp)], dims)
        assert not merged.keys() & part.keys(), "a tensor has one parameter"
        merged |= part
    assert set(merged) == set(full)
    assert all(torch.equal(merged[n], full[n]) and merged[n].is_contiguous() for n in full)


@settings(deadline=None, max_examples=seeds(40))
@given(family=st.sampled_from(sorted(FAMILIES)), tp=st.sampled_from([1, 2]), kv_per_rank=st.integers(1, 2),
       per_group=st.integers(1, 2), vocab=st.integers(1, 9), data=st.data())
def test_ranges_of_a_shard_read_no_other_tensor(family: str, tp: int, kv_per_rank: int, per_group: int, vocab: int,
                                                data: st.DataObject) -> None:
    """Ranges that split the shard among replicas at any elements, as the distributed optimizer's buckets do."""
    arch = make_arch(family, kv=kv_per_rank * tp, per_group=per_group, head_dim=2, vocab=vocab, ffn=4)
    dims, full = arch.attention_dims(tp), hf_tensors(arch)
    rule = arch.rule_of(data.draw(st.sampled_from(megatron_names(arch))))
    tp_rank = data.draw(st.integers(0, tp - 1))
    shard = split(rule, full, dims, tp=tp, tp_rank=tp_rank)
    cuts = data.draw(st.lists(st.integers(0, shard.numel()), max_size=3).map(sorted))
    for start, stop in pairwise([0, *cuts, shard.numel()]):
        expected = shard.view(-1)[start:stop]
        target = ShardRange(tuple(shard.shape), start, torch.full_like(expected, -1))
        fill(rule, target, full, dims, tp=tp, tp_rank=tp_rank)
        assert torch.equal(target.values, expected)
        read = {piece.hf for piece in hf_layout.pieces(rule, target, dims, tp=tp, tp_rank=tp_rank)}
        needed = {name for name in rule.hf if torch.isin(full[name], expected).any()}
        assert needed <= read and (read == needed or rule.layout is ShardLayout.VOCAB), "padding comes with its tensor"


@settings(deadline=None, max_examples=seeds(40))
@given(layers_per_stage=st.integers(1, 3), pp=st.integers(1, 4), experts_per_rank=st.integers(1, 3),
       ep=st.integers(1, 4))
def test_parameters_of_stages_and_expert_ranks_form_the_whole_model(
        layers_per_stage: int, pp: int, experts_per_rank: int, ep: int) -> None:
    local = [f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight"
             for layer in range(layers_per_stage) for expert in range(experts_per_rank)]
    found = [whole_model_name(name, stage * layers_per_stage, rank * experts_per_rank)
             for stage in range(pp) for rank in range(ep) for name in local]
    assert sorted(found) == sorted(f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight"
                                   for layer in range(pp * layers_per_stage) for expert in range(ep * experts_per_rank))
    assert whole_model_name("decoder.final_layernorm.weight", 3, 2) == "decoder.final_layernorm.weight"


def test_output_layer_of_tied_embeddings_is_a_copy_that_is_not_saved() -> None:
    shape: dict[str, int] = {"kv": 1, "per_group": 1, "head_dim": 2, "vocab": 3, "ffn": 4}
    tied, untied = (make_arch("qwen2", tied=t, **shape) for t in (True, False))
    assert tied.rule_of("output_layer.weight") == Rule(("model.embed_tokens.weight",), ShardLayout.VOCAB, replica=True)
    assert untied.rule_of("output_layer.weight") == Rule(("lm_head.weight",), ShardLayout.VOCAB)
    assert "lm_head.weight" not in tied.hf_names() and "lm_head.weight" in untied.hf_names()


def test_qkv_shard_has_queries_then_key_then_value_of_each_group() -> None:
    dims = AttentionDims(heads=4, kv_heads=2, head_dim=1, vocab=4, padded_vocab=4)
    column = lambda *values: torch.tensor(values, dtype=torch.float32)[:, None]  # noqa: E731
    full = {"q": column(0, 1, 2, 3), "k": column(10, 11), "v": column(20, 21)}
    rule = Rule(("q", "k", "v"), ShardLayout.QKV)
    assert split(rule, full, dims, tp=2, tp_rank=1).flatten().tolist() == [2, 3, 11, 21]


def test_padded_vocabulary_rows_are_zero_and_are_dropped_by_merge() -> None:
    dims = AttentionDims(1, 1, 1, vocab=3, padded_vocab=4)
    rule = Rule(("lm_head.weight",), ShardLayout.VOCAB)
    shards = [split(rule, {"lm_head.weight": torch.ones(3, 2)}, dims, tp=2, tp_rank=r) for r in range(2)]
    assert shards[1].tolist() == [[1, 1], [0, 0]]
    assert hf_layout.merge(rule, shards, dims)["lm_head.weight"].shape == (3, 2)


def test_parameter_that_a_family_lacks_is_named_with_the_families() -> None:
    arch = make_arch("llama", kv=1, per_group=1, head_dim=2, vocab=3, ffn=4)
    for name in ("self_attention.linear_qkv.bias", "self_attention.q_layernorm.weight", "mlp.router.weight"):
        with pytest.raises(ConfigError, match=name) as e:
            arch.rule_of(f"decoder.layers.0.{name}")
        assert "llama, qwen2, qwen3, qwen3_moe" in e.value.hint


@settings(deadline=None, max_examples=seeds(40))
@given(sizes=st.lists(st.tuples(st.integers(1, 99), st.booleans()), max_size=12), tp=st.integers(1, 2),
       copies=st.integers(1, 2), ep=st.integers(1, 3), pp_rank=st.integers(0, 1))
def test_each_tensor_has_one_owner_that_holds_it(sizes: list[tuple[int, bool]], tp: int, copies: int, ep: int,
                                                 pp_rank: int) -> None:
    dp = ep * copies
    stage = [ParallelDims(pp_rank * tp * dp + r, 2 * tp * dp, tp, r % tp, dp, r // tp, torch.device("cpu"), 2, pp_rank,
                          ep) for r in range(tp * dp)]
    owners = [owners_of([n for n, _ in sizes], par, [expert for _, expert in sizes]) for par in stage]
    for i, (_, expert) in enumerate(sizes):
        for par, found in zip(stage, owners, strict=True):
            others = [o[i] for p, o in zip(stage, owners, strict=True) if not expert or p.ep_rank == par.ep_rank]
            assert set(others) == {found[i]}, "the ranks that hold it agree"
            owner = next(p for p in stage if p.rank == found[i])
            assert not expert or owner.ep_rank == par.ep_rank
