"""Adam through Megatron, and its moments by Megatron parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastic_rl.config import Config
from elastic_rl.errors import TrainerFailed
from elastic_rl.trainer.megatron_cpu import cuda_literals
from elastic_rl.trainer.model import Policy

MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam:
    """The optimizer of one rank. Not sharded over data-parallel replicas: each holds the whole state of its shards."""

    def __init__(self, policy: Policy, cfg: Config) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.policy = policy
        with cuda_literals():
            self._megatron: Any = get_megatron_optimizer(
                OptimizerConfig(optimizer="adam", lr=cfg.train.lr, weight_decay=cfg.train.weight_decay,
                                clip_grad=cfg.train.max_grad_norm, adam_beta1=0.9, adam_beta2=0.999, adam_eps=1e-8,
                                use_distributed_optimizer=False),
                [policy.ddp], use_gloo_process_groups=False)
        # For one dense model Megatron's chain has one optimizer, whose .optimizer is torch's, Apex's or TE's Adam.
        self._inner: torch.optim.Optimizer = self._megatron.chained_optimizers[0].optimizer
        self.updates = 0
        """Updates since the moments were last zero; Adam's bias correction depends on it."""

    def zero_grad(self) -> None:
        self.policy.ddp.zero_grad_buffer()
        self._megatron.zero_grad()

    def reduce_and_step(self, lr: float) -> float:
        """Sums gradients over replicas (and over TP for the per-head norms), clips them, updates the parameters;
        returns the norm before clipping.

        Raises TrainerFailed when the gradient is not finite; the parameters must then be restored.
        """
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.policy.ddp])
        for group in self._inner.param_groups:
            group["lr"] = lr
        with cuda_literals():
            _, norm, _ = self._megatron.step()
        if norm is None or not torch.isfinite(torch.tensor(float(norm))):
            raise TrainerFailed(f"the gradient norm is {norm}", hint="lower train.lr, or look for a bad batch")
        self.updates += 1
        return float(norm)

    def reset(self) -> None:
        """Discards the moments."""
        self._inner.state.clear()
        self.updates = 0

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """``{"exp_avg": {Megatron name: shard}, "exp_avg_sq": …}``; zeros before the first update."""
        out: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in MOMENTS}
        for name, param in self.policy.parameters():
            state = self._inner.state.get(param, {})
            for kind in MOMENTS:
                out[kind][name] = state[kind] if kind in state else torch.zeros_like(param)
        return out

    def load_moments(self, moments: Mapping[str, Mapping[str, torch.Tensor]], updates: int) -> None:
        """Loads shards of this rank, in the form that ``moments`` returns, and their update count."""
        self.reset()
        self.updates = updates
        if not updates:
            return
        for name, param in self.policy.parameters():
            state: dict[str, Any] = {kind: moments[kind][name].to(param.device, torch.float32) for kind in MOMENTS}
            if isinstance(self._inner, torch.optim.Adam | torch.optim.AdamW):
                state["step"] = torch.tensor(float(updates))
            self._inner.state[param] = state
        if not isinstance(self._inner, torch.optim.Adam | torch.optim.AdamW):
            for group in self._inner.param_groups:  # the fused Adams count steps per group
                group["step"] = updates
