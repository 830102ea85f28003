"""How a Megatron parameter is made of HF tensors, as data. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elastic_rl.errors import ConfigError


class ShardLayout(Enum):
    """How a parameter is split over tensor-parallel ranks."""

    WHOLE = "whole"
    """The same on every rank."""
    COLUMNS = "columns"
    VOCAB = "vocab"
    """Rows, after padding the vocabulary to a multiple of the group size."""
    QKV = "qkv"
    """Rows; per KV group the queries of the group, then its key, then its value. Weights and biases alike."""
    GATE_UP = "gate_up"
    """Each rank holds its rows of gate, then its rows of up."""


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter: its HF tensors and its layout."""

    hf: tuple[str, ...]
    layout: ShardLayout
    expert: bool = False
    """Whether it belongs to one expert, which only the ranks of one expert-parallel coordinate hold."""
    replica: bool = False
    """Whether it is a copy of another parameter: of the word embedding, on the last pipeline stage of a model with tied
    embeddings. A copy is loaded, and trained with the same gradient, but not saved."""


@dataclass(frozen=True)
class AttentionDims:
    """Sizes of attention and vocabulary. Megatron has ``padded_vocab`` rows, HF the first ``vocab`` of them."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    padded_vocab: int

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} attention heads cannot share {self.kv_heads} KV heads evenly",
                              hint="correct the model's config.json, or use another model")
        if self.padded_vocab < self.vocab:
            raise ConfigError(f"padded vocabulary {self.padded_vocab} is smaller than the vocabulary {self.vocab}")


def padded_vocab(vocab: int, tp: int) -> int:
    """The smallest multiple of ``tp`` that is at least ``vocab``."""
    return -(-vocab // tp) * tp
