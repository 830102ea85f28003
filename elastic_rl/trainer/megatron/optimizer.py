"""Adam through Megatron, and its state by Megatron parameter name: the moments and, of bf16 parameters, fp32 masters.

What Adam updates is fp32: the parameters, or masters that the parameters are rounded from after each update. With
Megatron's DistributedOptimizer a replica updates one range of the flattened parameters only, which may begin and end
within a parameter, and the replicas then gather the parameters.

Megatron takes Transformer Engine's FusedAdam, else Apex's, else torch's. They differ in where they count steps, on
which the bias correction depends: torch per parameter, in its state; the fused ones per parameter group, in ``step`` of
the group, which outlives the state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elastic_rl.config import Config
from elastic_rl.errors import StepRefused
from elastic_rl.trainer.megatron.hf_layout import ShardRange
from elastic_rl.trainer.megatron.megatron_cpu import cuda_literals
from elastic_rl.trainer.megatron.parallel import max_over_ranks
from elastic_rl.trainer.megatron.policy import Policy

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
Moments = dict[str, dict[str, torch.Tensor]]
"""``{"exp_avg": {Megatron name: what this rank keeps of it, fp32}, "exp_avg_sq": …}``"""


class AdamState:
    """Reads and writes the state of any of the Adams."""

    def __init__(self, inner: torch.optim.Optimizer, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """``parameters``: what ``inner`` updates, fp32, with names."""
        self._inner, self._parameters = inner, list(parameters)
        self._counts_per_parameter = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)

    def reset(self) -> None:
        """Discards the moments; the next step is the first one."""
        self._inner.state.clear()
        for group in self._inner.param_groups:
            group.pop("step", None)

    def moments(self) -> Moments:
        """The moments in place; before the first update zeros that take no memory."""
        out: Moments = {kind: {} for kind in MOMENTS}
        for name, param in self._parameters:
            state = self._inner.state.get(param, {})
            for kind in MOMENTS:
                zero = torch.zeros((), dtype=torch.float32, device=param.device)
                out[kind][name] = state[kind] if kind in state else zero.expand(param.shape)
        return out

    def allocate(self) -> Moments:
        """Moments with any content, to be filled and given to ``load``."""
        return {kind: {name: torch.empty_like(param, dtype=torch.float32, requires_grad=False)
                       for name, param in self._parameters} for kind in MOMENTS}

    def load(self, moments: Mapping[str, Mapping[str, torch.Tensor]], updates: int) -> None:
        """Continues after ``updates`` updates with these moments, which it keeps."""
        self.reset()
        if not updates:
            return
        for name, param in self._parameters:
            state: dict[str, Any] = {kind: moments[kind][name].to(param.device, torch.float32) for kind in MOMENTS}
            if self._counts_per_parameter:
                state["step"] = torch.tensor(float(updates))
            self._inner.state[param] = state
        if not self._counts_per_parameter:
            for group in self._inner.param_groups:
                group["step"] = updates


@dataclass(frozen=True)
class _Updated:
    """What this rank's Adam updates of one parameter."""

    name: str
    """Megatron's."""
    parameter: torch.nn.Parameter
    values: torch.Tensor
    """fp32: the parameter, its master, or with the distributed optimizer a flat range of either."""
    start: int = 0
    """Place of its first element in the flattened parameter."""

    def range_of(self, values: torch.Tensor) -> ShardRange:
        """The place of values that are split as these."""
        return ShardRange(tuple(self.parameter.shape), self.start, values.detach().view(-1))


class Adam:
    """The optimizer of one rank. It holds the whole state of this rank's shards, or with the distributed optimizer the
    part of one data-parallel replica."""

    def __init__(self, policy: Policy, cfg: Config) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.policy = policy
        self._distributed = cfg.trainer.distributed_optimizer
        with cuda_literals():
            self._megatron: Any = get_megatron_optimizer(
                OptimizerConfig(optimizer="adam", lr=cfg.train.lr, weight_decay=cfg.train.weight_decay,
                                clip_grad=cfg.train.max_grad_norm, adam_beta1=cfg.train.adam_beta1,
                                adam_beta2=cfg.train.adam_beta2, adam_eps=cfg.train.adam_eps,
                                params_dtype=policy.dtype, bf16=policy.dtype is torch.bfloat16,
                                use_distributed_optimizer=self._distributed),
                [policy.ddp], use_gloo_process_groups=False)
        # Megatron asks for the norm once the gradients are complete and before it changes anything.
        self._norm_of_megatron, self._megatron.get_grad_norm = self._megatron.get_grad_norm, self._finite_norm
        # Megatron's chain has one optimizer, and a second one for experts that are split over ranks; the .optimizer of
        # each is torch's, Apex's or TE's Adam.
        self._inner: list[torch.optim.Optimizer] = [o.optimizer for o in self._megatron.chained_optimizers]
        of_inner = [list(_updated_by(o, policy)) for o in self._megatron.chained_optimizers]
        self._states = [AdamState(inner, [(u.name, u.values) for u in updated])
                        for inner, updated in zip(self._inner, of_inner, strict=True)]
        self._updated = {u.name: u for updated in of_inner for u in updated}
        if policy.dtype is not torch.float32:
            policy.masters = self.ranges({name: u.values for name, u in self._updated.items()})
        self.updates = 0
        """Updates since the moments were last zero; Adam's bias correction depends on it."""

    def zero_grad(self) -> None:
        self.policy.ddp.zero_grad_buffer()
        self._megatron.zero_grad()

    def scale_gradients(self, factor: float) -> None:
        """Multiplies the gradients of this rank, before they are reduced."""
        self.policy.ddp.scale_gradients(factor)

    def reduce_and_step(self, lr: float) -> float:
        """Sums gradients over replicas (and over TP for the per-head norms), clips them, updates the parameters;
        returns the norm before clipping.

        Raises StepRefused, on every rank, when the gradient is not finite; parameters and moments are then as before.
        """
        self._reduce()
        for group in (g for inner in self._inner for g in inner.param_groups):
            group["lr"] = lr
        with cuda_literals():
            _, norm, _ = self._megatron.step()
        self.updates += 1
        return float(norm)

    def reduce_and_discard(self) -> float:
        """The norm that ``reduce_and_step`` would return. Changes nothing but the gradients, which are zero afterwards.
        Raises as ``reduce_and_step``."""
        self._reduce()
        try:
            with cuda_literals():
                self._megatron.prepare_grads()
                return float(self._megatron.get_grad_norm())
        finally:
            self.zero_grad()

    def _reduce(self) -> None:
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.policy.ddp])

    def _finite_norm(self) -> float:
        """The norm of the gradients. Raises StepRefused, on every rank, when it is not finite on one: a rank that went
        on alone would have other weights than the rest."""
        norm = float(self._norm_of_megatron())
        failed = torch.tensor([0.0 if math.isfinite(norm) else 1.0], device=self.policy.par.device)
        if float(max_over_ranks(failed, self.policy.par)):
            raise StepRefused(f"the norm of the gradient is {norm}", hint="lower train.lr, or look for bad samples")
        return norm

    def reset(self) -> None:
        """Discards the moments."""
        for state in self._states:
            state.reset()
        self.updates = 0

    def tensors(self) -> Iterator[torch.Tensor]:
        """What it keeps from one update to the next: parameters or masters, and the state of each."""
        for inner in self._inner:
            yield from (p.data for group in inner.param_groups for p in group["params"])
            yield from (v for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor))

    def moments(self) -> Moments:
        """The moments that this rank keeps, in place; zeros before the first update."""
        return _joined([state.moments() for state in self._states])

    def allocate_moments(self) -> Moments:
        """Moments with any content, to be filled and given to ``load_moments``."""
        return _joined([state.allocate() for state in self._states])

    def load_moments(self, moments: Moments, updates: int) -> None:
        """Takes over moments that are split as this rank's, and their update count."""
        for state in self._states:
            state.load(moments, updates)
        self.updates = updates

    def ranges(self, values: Mapping[str, torch.Tensor]) -> dict[str, ShardRange]:
        """The places of values that are split as what this rank updates, one kind of ``Moments``."""
        return {name: self._updated[name].range_of(kept) for name, kept in values.items()}

    def whole_state(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """(kind, {Megatron name: this rank's shard, fp32}) of each moment, and of the masters of bf16 parameters.

        With the distributed optimizer a collective of the data-parallel groups, between two steps: a kind is then in
        the gradient buffer, which takes no memory of its own, and valid until the next one is requested.
        """
        state = {kind: self.ranges(kept) for kind, kept in self.moments().items()}
        if self.policy.dtype is not torch.float32:
            state[MASTER] = self.policy.masters
        for kind, ranges in state.items():
            yield kind, (self._gathered(ranges) if self._distributed else
                         {name: found.values.view(found.shape) for name, found in ranges.items()})

    def _gathered(self, ranges: Mapping[str, ShardRange]) -> dict[str, torch.Tensor]:
        """Gathers the ranges of all replicas in the gradient buffer: it is fp32, and split over the replicas as they
        are."""
        ddp, parameters = self.policy.ddp, dict(self.policy.parameters())
        parts = []
        for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()]
                own.zero_()  # torch counts it as a change, unlike the collective: a publish stores what has changed
                parts.append((bucket.grad_data, own, group))
        for name, kept in ranges.items():
            parameters[name].main_grad.view(-1)[kept.start:kept.stop].copy_(kept.values)
        for whole, own, group in parts:
            dist.all_gather_into_tensor(whole, own, group=group)
        return {name: parameter.main_grad for name, parameter in parameters.items()}


def _updated_by(optimizer: Any, policy: Policy) -> Iterator[_Updated]:
    """What one optimizer of Megatron's chain updates."""
    from megatron.core.optimizer import DistributedOptimizer

    if not isinstance(optimizer, DistributedOptimizer):
        updated = {id(p) for group in optimizer.optimizer.param_groups for p in group["params"]}
        for name, parameter in policy.parameters():
            values = getattr(parameter, "main_param", parameter)
            if id(values) in updated:
                yield _Updated(name, parameter, values)
        return
    groups = (*zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
              *zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True))
    ranges = {id(parameter): values for parameters, of_parameters in groups
              for parameter, values in zip(parameters, of_parameters, strict=True)}
    for name, parameter in policy.parameters():
        if id(parameter) in ranges:
            start = optimizer._get_model_param_range_map(parameter)["param"].start
            yield _Updated(name, parameter, ranges[id(parameter)], start)


def _joined(parts: Sequence[Moments]) -> Moments:
    return {kind: {name: kept for part in parts for name, kept in part[kind].items()} for kind in MOMENTS}
