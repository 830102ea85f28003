"""Makes the small model that a run starts from when no model is given.

``python -m elastic_rl.data.tiny_model CONTEXT`` makes the one of a run; CONTEXT is the file of its RunContext.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from elastic_rl.config import Config, ModelConfig
from elastic_rl.data.tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, make_tokenizer
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.runtime.process import die_with_parent

if TYPE_CHECKING:  # importing torch and transformers takes five seconds; most importers of this module make no model
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_VOCAB_MULTIPLE = 16
"""The vocabulary of a given tokenizer is filled up to a multiple of this, so that it splits over any power of two of
ranks up to 16."""


def hf_config(cfg: Config, vocab_size: int = VOCAB_SIZE, eos_id: int = EOS_ID, pad_id: int = PAD_ID
              ) -> PretrainedConfig:
    """The HF config of the model that ``cfg.model`` describes."""
    import torch

    shape = cfg.model
    kind, own = _of_family(shape)
    return kind(
        vocab_size=vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.rms_norm_eps, rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied_embeddings, bos_token_id=None, eos_token_id=eos_id, pad_token_id=pad_id,
        dtype=getattr(torch, cfg.device.dtype), **own)


def _of_family(shape: ModelConfig) -> tuple[type[PretrainedConfig], dict[str, Any]]:
    """The class of the HF config, and what only this family has."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    match shape.family:
        case "llama":
            return LlamaConfig, {"head_dim": shape.head_dim, "attention_bias": False}
        case "qwen2":  # has biases of queries, keys and values, and no head size of its own
            return Qwen2Config, {}
        case "qwen3_moe":
            return Qwen3MoeConfig, {
                "head_dim": shape.head_dim, "attention_bias": False, "norm_topk_prob": True,
                "num_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token,
                "moe_intermediate_size": shape.expert_intermediate_size}
        case "qwen3":
            return Qwen3Config, {"head_dim": shape.head_dim, "attention_bias": False}
        case _:
            assert_never(shape.family)


def make_model_dir(path: Path | str, cfg: Config, tokenizer_dir: Path | str | None = None) -> Path:
    """Writes config, seeded random weights (safetensors), generation config and tokenizer to ``path``; returns it.
    ``tokenizer_dir``: folder of the tokenizer, to whose vocabulary the model is made; None: the built-in one.

    The folder appears complete or not at all, and the caller's random state does not change. An existing model is kept,
    so that a restarted run starts from the same bytes. Raises ConfigError for a tokenizer that cannot be used.
    """
    target = Path(path)
    if (target / "config.json").exists():
        return target
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging as hf_logging

    tokenizer, made_for = _tokenizer(cfg, tokenizer_dir)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        model = AutoModelForCausalLM.from_config(made_for).to(getattr(torch, cfg.device.dtype))
    # Engines read the token that ends an answer from here.
    model.generation_config = GenerationConfig(eos_token_id=made_for.eos_token_id, pad_token_id=made_for.pad_token_id)
    hf_logging.disable_progress_bar()  # it would appear in the middle of the live view
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(target)
    return target


def _tokenizer(cfg: Config, folder: Path | str | None) -> tuple[PreTrainedTokenizerBase, PretrainedConfig]:
    """The tokenizer, and the HF config of a model for it. Raises ConfigError."""
    if folder is None:
        return make_tokenizer(), hf_config(cfg)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{folder} has no tokenizer that can be read: {e}",
                          hint="name a folder with tokenizer.json and tokenizer_config.json") from e
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer in {folder} has no eos_token",
                          hint="use a tokenizer with an end-of-sequence token")
    eos = int(tokenizer.eos_token_id)
    pad = int(tokenizer.pad_token_id) if tokenizer.pad_token_id is not None else eos
    vocab = -(-len(tokenizer) // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    return tokenizer, hf_config(cfg, vocab, eos, pad)


if __name__ == "__main__":
    die_with_parent()
    run_context = RunContext.load(Path(sys.argv[1]))
    make_model_dir(run_context.model_dir, run_context.config)
