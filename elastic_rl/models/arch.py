"""The model as its config.json describes it. Pure but for ``ModelArch.read``."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from elastic_rl.errors import ConfigError
from elastic_rl.models.families import FAMILIES
from elastic_rl.models.families.parameters import TOP
from elastic_rl.models.family import Family
from elastic_rl.models.layout import AttentionDims, Rule, ShardLayout, padded_vocab
from elastic_rl.runtime.files import read_limited

MAX_CONFIG_BYTES = 1 << 20
"""Largest config.json, and other file of a model that lists no tokens and no tensors."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(mlp\.experts\.local_experts\.)(\d+)(\..+)")
VALUE_HEAD = "score.weight"
"""HF's name of the value head [1, hidden], as a model for sequence classification has it."""
HF_EMBEDDING, HF_OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
"""HF's names of the embedding and the output layer, which are one tensor where they are tied."""
_OUTPUT, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What megatron-core's rotary embedding has built in; of llama3 scaling only the factor can be chosen."""
_SHOWN = 40
"""Characters of a value that is refused."""
_MAX_SIZE = (1 << 31) - 1
_MAX_COUNT = 10_000
"""Most layers, and most experts of each."""


@dataclass(frozen=True)
class MoeArch:
    """The experts of each layer."""

    experts: int
    top_k: int
    """Experts that a token is sent to."""
    ffn: int
    """Width of the hidden layer of one expert."""
    norm_top_k: bool
    """Whether the weights of a token's experts sum to 1."""


@dataclass(frozen=True)
class ModelArch:
    """The model as ``config.json`` describes it."""

    family: Family
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool = False
    """Whether the output layer is the word embedding."""
    rope_factor: float | None = None
    """Factor of llama3 rope scaling; None: not scaled."""
    moe: MoeArch | None = None
    value_head: bool = False
    """Whether the last layer gives one number a token, and not logits: that of a critic."""

    @classmethod
    def read(cls, model_dir: Path | str) -> ModelArch:
        """Raises ConfigError when the folder has no model of a family that is supported."""
        path = Path(model_dir) / "config.json"
        return cls.parse(read_json(path), str(path))

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str = "config.json") -> ModelArch:
        """Reads the content of a config.json; ``where`` names it in errors. A key that is left out has the default of
        transformers, which the engines read it with. Raises ConfigError for a model that is not supported, and for
        values that are no sizes."""
        family = FAMILIES.get(str(raw.get("model_type")))
        if family is None:
            raise ConfigError(f"{where} describes a {raw.get('model_type')!r} model",
                              hint=f"supported model types: {', '.join(FAMILIES)}")
        for refusal in family.refusals:
            if refusal.key in raw and raw[refusal.key] not in refusal.supported:
                raise ConfigError(f"{where}: {refusal.what} ({refusal.key}={str(raw[refusal.key])[:_SHOWN]}) are not "
                                  f"supported for {family.model_type}",
                                  hint="use a model without them")
        found = _Sizes(raw, family.defaults)
        hidden, heads = found.size("hidden_size"), found.size("num_attention_heads")
        head_dim = (hidden // heads if family.head_dim_from_width and raw.get("head_dim") is None and heads
                    else found.size("head_dim"))
        if not head_dim:  # a hidden size of less than one value for each head
            found.wrong.append("hidden_size")
        moe = None if not family.experts else MoeArch(
            found.size("num_experts", "num_local_experts", most=_MAX_COUNT), found.size("num_experts_per_tok"),
            found.size("moe_intermediate_size"), raw.get("norm_topk_prob") is True)
        theta, factor = _rope(raw, where)
        arch = cls(family, found.size("num_hidden_layers", most=_MAX_COUNT), hidden, found.size("intermediate_size"),
                   heads, found.kv_heads(heads), head_dim, found.size("vocab_size"),
                   found.size("max_position_embeddings"), theta, found.positive("rms_norm_eps"),
                   raw.get("tie_word_embeddings") is True, factor, moe)
        if found.wrong:
            raise ConfigError(f"{where} has no valid {', '.join(found.wrong)}", hint="download the model again")
        if not family.own_head_dim and head_dim * heads != hidden:
            raise ConfigError(f"{where}: head_dim={head_dim} of {heads} heads is not hidden_size={hidden}, as engines "
                              f"demand for {family.model_type}", hint="use another model")
        if moe is not None and not 1 < moe.top_k <= moe.experts:
            raise ConfigError(f"{where}: num_experts_per_tok={moe.top_k} of {moe.experts} experts is not supported",
                              hint="use a model that sends each token to two experts or more")
        return arch

    def as_critic(self) -> ModelArch:
        """The same layers with a value head, which is no embedding."""
        return replace(self, tied=False, value_head=True)

    def attention_dims(self, tp: int) -> AttentionDims:
        """Raises ConfigError when the heads do not fit."""
        if self.kv_heads % tp:
            raise ConfigError(f"{self.kv_heads} KV heads cannot be split over trainer.tensor_parallel={tp} ranks",
                              hint="set trainer.tensor_parallel to a divisor of the model's KV heads")
        return AttentionDims(self.heads, self.kv_heads, self.head_dim, self.vocab, padded_vocab(self.vocab, tp))

    def require_expert_parallel(self, ranks: int) -> None:
        """Raises ConfigError when the experts cannot be split over ``ranks``."""
        if ranks > 1 and (self.moe is None or self.moe.experts % ranks):
            what = f"has {self.moe.experts} experts" if self.moe is not None else "has no experts"
            raise ConfigError(f"the {self.family.model_type} model {what}, and trainer.expert_parallel={ranks}",
                              hint="set trainer.expert_parallel to a divisor of the number of experts, 1 without any")

    def rule_of(self, megatron_name: str) -> Rule:
        """The rule of a parameter by its name in the whole model. Raises ConfigError for one that has no HF counterpart
        in the model's family."""
        if megatron_name == _OUTPUT and self.value_head:
            return Rule((VALUE_HEAD,), ShardLayout.WHOLE)
        if megatron_name in TOP:
            tied = self.tied and megatron_name == _OUTPUT
            return Rule(*TOP[_EMBEDDING if tied else megatron_name], replica=tied)
        layer = _LAYER.fullmatch(megatron_name)
        expert = _EXPERT.fullmatch(layer[2]) if layer else None
        key = f"{expert[1]}{{}}{expert[3]}" if expert else layer[2] if layer else ""
        if layer is None or key not in self.family.layer:
            raise ConfigError(f"the Megatron parameter {megatron_name!r} has no HF counterpart in the family "
                              f"{self.family.model_type}", hint=f"supported model types: {', '.join(FAMILIES)}")
        names, layout = self.family.layer[key]
        return Rule(tuple(f"model.layers.{layer[1]}.{n.format(expert[2] if expert else '')}" for n in names), layout,
                    expert=expert is not None)

    def hf_names(self) -> Iterator[str]:
        """The name of every HF tensor of the model, once each."""
        yield from dict.fromkeys(name for parameter in TOP for name in self.rule_of(parameter).hf)
        of_layer = dict.fromkeys(name for names, _ in self.family.layer.values() for name in names)
        for layer in range(self.layers):
            for name in of_layer:
                for expert in range(self.moe.experts if self.moe and "{}" in name else 1):
                    yield f"model.layers.{layer}.{name.format(expert)}"


def whole_model_name(megatron_name: str, first_layer: int, first_expert: int) -> str:
    """The name in the whole model of a parameter of a rank whose first layer and first expert are these."""
    layer = _LAYER.fullmatch(megatron_name)
    if layer is None:
        return megatron_name
    expert = _EXPERT.fullmatch(layer[2])
    rest = f"{expert[1]}{int(expert[2]) + first_expert}{expert[3]}" if expert else layer[2]
    return f"decoder.layers.{int(layer[1]) + first_layer}.{rest}"


def vocabulary_of(model_dir: Path | str) -> int | None:
    """Number of tokens of a folder's model, of whatever family; None where its config.json does not say, and its family
    is not one whose default is known."""
    try:
        raw = read_json(Path(model_dir) / "config.json")
    except ConfigError:
        return None
    return _of_any_family(raw, "vocab_size")


def _of_any_family(raw: Mapping[str, Any], key: str) -> int | None:
    """A positive number of a config.json, or the default of its family; None where neither says it."""
    text = raw.get("text_config")  # of a model that reads more than text
    family = FAMILIES.get(str(raw.get("model_type")))
    found = raw.get(key) or (text.get(key) if isinstance(text, dict) else None) or (
        family.defaults.get(key) if family is not None and key not in raw else None)
    return found if type(found) is int and found > 0 else None


def config_eos_ids(raw: Mapping[str, Any]) -> Any:
    """``eos_token_id`` of a config.json as it is there, or the default of its family: an id, a list of them or None."""
    family = FAMILIES.get(str(raw.get("model_type")))
    return raw.get("eos_token_id", family.defaults.get("eos_token_id") if family is not None else None)


def end_ids_of(model_dir: Path | str) -> tuple[int, ...]:
    """Token ids at which an engine ends a response of a folder's model, besides those of the request: what config.json
    and generation_config.json name. A file that cannot be read names none."""
    found: list[Any] = []
    for name in ("config.json", "generation_config.json"):
        with contextlib.suppress(ConfigError):
            raw = read_json(Path(model_dir) / name)
            ids = config_eos_ids(raw) if name == "config.json" else raw.get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids]
    return tuple(dict.fromkeys(i for i in found if type(i) is int))


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a regular file of at most ``max_bytes``. Raises ConfigError."""
    try:
        found = json.loads(read_limited(path, max_bytes).decode("utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", hint="download the model again") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is not JSON: {e}", hint="download the model again") from e
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no JSON object", hint="download the model again")
    return found


class _Sizes:
    """Positive numbers of a config.json; what is none, or too large for any model, is noted and read as 1.
    ``defaults``: the values of keys that are left out."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._raw, self._defaults = raw, defaults
        self.wrong: list[str] = []

    def kv_heads(self, heads: int) -> int:
        """The number of KV heads: that of attention heads where the key is null, or left out by a family whose default
        that is."""
        key = "num_key_value_heads"
        return heads if self._raw.get(key, self._defaults[key]) is None else self.size(key)

    def size(self, *keys: str, most: int = _MAX_SIZE) -> int:
        """The value of the first key that is there."""
        value = next((self._raw[key] for key in keys if key in self._raw), self._defaults.get(keys[0]))
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most:
            return value
        self.wrong.append(keys[0])
        return 1

    def positive(self, key: str) -> float:
        value = self._raw.get(key, self._defaults.get(key))
        if _is_positive(value):
            return float(value)
        self.wrong.append(key)
        return 1.0


def _is_positive(value: Any) -> TypeGuard[float]:
    """Whether it is a positive number that a float can be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _rope(raw: Mapping[str, Any], where: str) -> tuple[float, float | None]:
    """Base of the rotary embedding, and the factor of its llama3 scaling. Raises ConfigError for another scaling."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{where}: rope scaling {rope!r} is not supported", hint="use a model without it")
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if kind not in ("default", "llama3") or partial != 1.0:
        what = f"scaling {kind!r}" if partial == 1.0 else f"of a part of each head (partial_rotary_factor={partial})"
        raise ConfigError(f"{where}: rope {what} is not supported", hint="supported: default and llama3")
    if not _is_positive(theta):
        raise ConfigError(f"{where}: rope_theta={theta!r} is no positive number", hint="download the model again")
    if kind == "default":
        return float(theta), None
    factor = rope.get("factor")
    other = {key: rope.get(key) for key, value in _LLAMA3.items() if rope.get(key) != value}
    if other or not _is_positive(factor) or factor < 1:
        raise ConfigError(f"{where}: llama3 rope scaling with {other or {'factor': factor}} is not supported",
                          hint=f"supported: a factor of at least 1 with {_LLAMA3}, as in Llama 3.1 to 3.3")
    return float(theta), float(factor)


RESERVED_TOKENS = 8
"""Tokens of the longest sequence of a model or of an engine's cache that the engine keeps for itself."""


def max_positions(folder: Path) -> int:
    """Tokens of the longest sequence that a model of whatever family takes; without limit where its folder does not say
    it."""
    try:
        found = _of_any_family(read_json(folder / "config.json"), "max_position_embeddings")
    except ConfigError:
        found = None
    return found or 1 << 62


def longest_sequence(folder: Path, cache_tokens: int) -> int:
    """Tokens of the longest sequence that an engine with such a model and cache takes, ``RESERVED_TOKENS`` included."""
    return min(max_positions(folder), cache_tokens)
