"""Loading this rank's part of full tensors, from memory and from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from elastic_rl.errors import ConfigError
from elastic_rl.models.arch import ModelArch
from elastic_rl.models.families import FAMILIES
from elastic_rl.models.layout import padded_vocab
from elastic_rl.trainer.megatron.hf_layout import ShardRange
from elastic_rl.trainer.megatron.parallel import ParallelDims
from elastic_rl.trainer.megatron.policy import FileTensor
from elastic_rl.trainer.megatron.shard_loader import HfTensor, ShardLoader

HIDDEN, FFN, VOCAB = 6, 8, 5
ARCH = ModelArch(FAMILIES["qwen3"], layers=1, hidden=HIDDEN, ffn=FFN, heads=4, kv_heads=4, head_dim=3, vocab=VOCAB,
                 max_positions=8, rope_theta=1e4, norm_eps=1e-6)
FULL = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
        "model.layers.0.mlp.gate_proj.weight": torch.randn(FFN, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": torch.randn(FFN, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": torch.randn(HIDDEN, FFN),
        "model.layers.0.post_attention_layernorm.weight": torch.randn(HIDDEN)}


class ReadRanges:
    """A tensor that counts the elements that are read of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.read = tensor, 0

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        part = self._tensor.narrow(dim, start, length)
        self.read += part.numel()
        return part


def expecting(tp: int, tp_rank: int, prefix: str = "") -> tuple[ShardLoader, dict[str, torch.Tensor]]:
    """A loader, and the shards that it fills."""
    loader = ShardLoader(ARCH, ParallelDims(tp_rank, tp, tp, tp_rank, 1, 0, torch.device("cpu")))
    shapes = {"embedding.word_embeddings.weight": (padded_vocab(VOCAB, tp) // tp, HIDDEN),
              "decoder.layers.0.mlp.linear_fc1.weight": (2 * FFN // tp, HIDDEN),
              "decoder.layers.0.mlp.linear_fc2.weight": (HIDDEN, FFN // tp),
              "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": (HIDDEN,)}
    shards = {name: torch.nn.Parameter(torch.full(shape, float("nan"))) for name, shape in shapes.items()}
    for name, shard in shards.items():
        loader.expect(name, ShardRange.whole(shard), prefix)
    return loader, {name: shard.detach() for name, shard in shards.items()}


@pytest.mark.parametrize("tp_rank", [0, 1, 2, 3])
def test_rank_reads_its_part_of_each_tensor_and_no_more(tp_rank: int) -> None:
    loader, shards = expecting(4, tp_rank)
    sources = {name: ReadRanges(tensor) for name, tensor in FULL.items()}
    for name in reversed(sources):
        source: HfTensor = sources[name]
        loader.load(name, source)
    loader.require_complete()
    assert not any(shard.isnan().any() for shard in shards.values())
    read = {name: source.read for name, source in sources.items()}
    assert all(read[f"model.layers.0.mlp.{name}_proj.weight"] == FFN * HIDDEN / 4 for name in ("gate", "up", "down"))
    assert read["model.embed_tokens.weight"] == (2, 2, 1, 0)[tp_rank] * HIDDEN


@pytest.mark.parametrize("tp_rank", [0, 1, 2, 3])
def test_file_and_memory_give_the_same_shards(tmp_path: Path, tp_rank: int) -> None:
    save_file(FULL, tmp_path / "model.safetensors")
    from_memory, expected = expecting(4, tp_rank)
    from_file, found = expecting(4, tp_rank)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        for name in FULL:
            from_memory.load(name, FULL[name])
            from_file.load(name, FileTensor(opened.get_slice(name)))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_masters_get_the_values_of_their_parameters_as_precisely_as_they_are() -> None:
    loader, shards = expecting(1, 0)
    weight = "decoder.layers.0.mlp.linear_fc1.weight"
    rounded, half = torch.empty(shards[weight].shape, dtype=torch.bfloat16), torch.empty(FFN * HIDDEN)
    loader.expect(weight, ShardRange.whole(rounded))
    loader.expect(weight, ShardRange(tuple(rounded.shape), FFN * HIDDEN, half))
    for name, tensor in FULL.items():
        loader.load(name, tensor)
    loader.require_complete()
    assert torch.equal(rounded, shards[weight].bfloat16())
    assert torch.equal(half, FULL["model.layers.0.mlp.up_proj.weight"].view(-1))


def test_missing_and_misshapen_tensors_are_named() -> None:
    loader, _ = expecting(1, 0, "exp_avg.")
    assert loader.wants("exp_avg.model.embed_tokens.weight") and not loader.wants("model.embed_tokens.weight")
    with pytest.raises(ConfigError, match=r"exp_avg.model.embed_tokens.weight has shape \[1, 6\]"):
        loader.load("exp_avg.model.embed_tokens.weight", torch.ones(1, HIDDEN))  # copy_ would repeat the row
    for name, tensor in FULL.items():
        if "down_proj" not in name:
            loader.load(f"exp_avg.{name}", tensor)
    with pytest.raises(ConfigError, match="exp_avg.model.layers.0.mlp.down_proj.weight"):
        loader.require_complete()
