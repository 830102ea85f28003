"""The scenarios of a critic that ranks perform in tests."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from elastic_rl.algorithms.registry import CRITIC_LOSS
from elastic_rl.config import Config
from elastic_rl.data.batch import Batch
from elastic_rl.trainer.checkpoint.snapshot import StateLoader
from elastic_rl.trainer.megatron import parallel
from elastic_rl.trainer.megatron.optimizer import Adam
from elastic_rl.trainer.megatron.policy import ModelArch, Policy
from elastic_rl.trainer.step import TrainStep
from support.megatron_ranks import gradients, share_of, state, synthetic


def with_values(cfg: Config, samples: int) -> Batch:
    """With values before the step and returns, both made up."""
    batch, generator = synthetic(cfg, samples), torch.Generator().manual_seed(2)
    values, returns = (torch.randn(batch.loss_tokens, generator=generator) for _ in range(2))
    return batch.only("tokens", "lengths", "loss_mask").with_tensors(values=values, returns=returns)


def perform(scenario: str, model: Path, state_file: str, cfg: Config, par: parallel.ParallelDims
            ) -> dict[str, torch.Tensor]:
    """The tensors of the result that this rank owns."""
    policy = Policy(ModelArch.read(model).as_critic(), cfg, par)
    adam = Adam(policy, cfg)
    train_step = TrainStep(policy, adam, cfg, par)
    if scenario == "critic restore":
        loader = StateLoader(policy, adam)
        with safe_open(state_file, framework="pt") as opened:
            for name in filter(loader.select, opened.keys()):
                loader.load(name, opened.get_tensor(name))
        loader.apply(2 * cfg.train.updates_per_step)
        return state(policy, adam)
    policy.load_folder(model)
    if scenario == "critic train":
        for step in (1, 2):
            train_step.train(share_of(with_values(cfg, 64), train_step), "rl", step)
        return state(policy, adam)
    samples = 1 if scenario == "critic with one sample" else 64
    batch = with_values(cfg, samples)
    found = gradients(train_step, CRITIC_LOSS, batch)
    values = train_step.forward_values(share_of(batch, train_step))["values"]
    if par.is_share_leader:
        rows = batch.share_rows(par.dp)[par.dp_rank].tolist()
        found |= {f"values {row}": own.clone() for row, own in zip(
            rows, values.split(batch.loss_counts[rows].tolist()), strict=True)}
    return found
