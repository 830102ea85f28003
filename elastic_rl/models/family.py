"""What is declared of a model family. A family is data: ``families/<family>.py`` has one ``Family`` and no code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_rl.models.layout import ShardLayout

Parameters = dict[str, tuple[tuple[str, ...], ShardLayout]]
"""Megatron parameter to its HF tensors, both named from the layer on; ``{}`` stands for the number of an expert."""


@dataclass(frozen=True)
class Refusal:
    """A key of config.json with the only values that are supported; a key that is not there is supported."""

    key: str
    what: str
    """What another value means."""
    supported: tuple[Any, ...] = (None, False)


@dataclass(frozen=True)
class Family:
    """How models of one ``model_type`` are read from config.json, built by Megatron, and laid out."""

    model_type: str
    layer: Parameters
    """The parameters of a layer. A model may lack some: those of Transformer Engine's or of the local layers."""
    refusals: tuple[Refusal, ...]
    defaults: Mapping[str, Any]
    """What transformers takes for a key that config.json leaves out. Its None for ``num_key_value_heads`` stands for as
    many as there are attention heads."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    experts: bool = False
    """Whether each layer has a router and experts instead of one MLP."""
    head_dim_from_width: bool = False
    """Whether config.json may leave ``head_dim`` out, which then is the hidden size over the heads."""
    own_head_dim: bool = True
    """Whether ``head_dim`` may be another size: SGLang takes no other for some families."""
