"""Makes the small Qwen3-shaped model that a run starts from when no model is given.

``python -m elastic_rl.data.tiny_model CONTEXT`` makes the one of a run; CONTEXT is the file of its RunContext.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as hf_logging

from elastic_rl.config import Config
from elastic_rl.data.tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, make_tokenizer
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.runtime import die_with_parent


def hf_config(cfg: Config) -> Qwen3Config:
    """The HF config of the model that ``cfg.model`` describes: untied embeddings, no attention bias, q/k norm."""
    shape = cfg.model
    return Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim, max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.rms_norm_eps, rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        attention_bias=False, tie_word_embeddings=False, bos_token_id=None, eos_token_id=EOS_ID, pad_token_id=PAD_ID,
        dtype=getattr(torch, cfg.device.dtype))


def make_model_dir(path: Path | str, cfg: Config) -> Path:
    """Writes config, seeded random weights (safetensors), generation config and tokenizer to ``path``; returns it.

    The folder appears complete or not at all, and the caller's random state does not change. An existing model is kept,
    so that a restarted run starts from the same bytes.
    """
    target = Path(path)
    if (target / "config.json").exists():
        return target
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        model = Qwen3ForCausalLM(hf_config(cfg)).to(getattr(torch, cfg.device.dtype))
    # Engines read the token that ends an answer from here.
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    hf_logging.disable_progress_bar()  # it would appear in the middle of the live view
    model.save_pretrained(partial)
    make_tokenizer().save_pretrained(partial)
    partial.rename(target)
    return target


if __name__ == "__main__":
    die_with_parent()
    run_context = RunContext.load(Path(sys.argv[1]))
    make_model_dir(run_context.model_dir, run_context.config)
