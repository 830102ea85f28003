"""The process group of a trainer: device, backend, Megatron's parallel groups, and a few collectives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from elastic_rl.config import Config, TrainerConfig
from elastic_rl.errors import ConfigError
from elastic_rl.net import torch_store
from elastic_rl.net.addresses import interface_of

_PASS_TIMEOUT = timedelta(days=1)
"""Limit of the collectives of Megatron's groups. Those inside a pass wait for other stages, for other experts and, on a
GPU, for all that was queued before them, and so for as long as a sequence takes. A rank that has died or is stopped is
found by the watch of its group, and one that hangs by its heartbeats, long before."""
FENCED_EXIT = 3
"""Exit code of ranks and of their agent when their epoch is over."""


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the trainer group and the coordinates of this rank. The ranks of one tensor-parallel group are
    consecutive; within a pipeline stage those of one replica are, and those of the stage are."""

    rank: int
    world: int
    tp: int
    tp_rank: int
    dp: int
    dp_rank: int
    device: torch.device
    pp: int = 1
    pp_rank: int = 0
    ep: int = 1
    cp: int = 1
    cp_rank: int = 0
    own_replica_group: dist.ProcessGroup | None = None
    """The ranks of this one's replica, with context parallelism, for which Megatron has no group."""

    @property
    def ep_rank(self) -> int:
        """Which part of the experts this rank holds. The parts are spread over the ranks of a stage that follow one
        another, but for those of a tensor-parallel group."""
        return (self.dp_rank * self.cp + self.cp_rank) % self.ep

    @property
    def passes_alone(self) -> bool:
        """Whether this rank needs no other one for a pass of its samples through the model."""
        return self.tp * self.cp * self.pp * self.ep == 1

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the model's output."""
        return self.pp_rank == self.pp - 1

    @property
    def stage(self) -> range:
        """The ranks that hold the same layers."""
        size = self.world // self.pp
        return range(self.pp_rank * size, (self.pp_rank + 1) * size)

    @property
    def expert_holders(self) -> list[int]:
        """The ranks of this stage that hold the same experts as this one, each its tensor-parallel part."""
        return [rank for rank in self.stage if (rank - self.stage.start) // self.tp % self.ep == self.ep_rank]

    @property
    def is_share_leader(self) -> bool:
        """Whether this rank receives the share of a batch for its data-parallel replica."""
        return self.tp_rank == self.cp_rank == self.pp_rank == 0

    @property
    def share_leader(self) -> int:
        """The rank that receives the share of this rank's replica. Replicas follow one another within a stage."""
        return self.dp_rank * self.cp * self.tp

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold one replica of the model; None when this rank alone does."""
        if self.cp > 1:
            return self.own_replica_group
        if self.tp * self.pp == 1:
            return None
        from megatron.core import parallel_state

        return parallel_state.get_model_parallel_group()

    @property
    def tp_group(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        return parallel_state.get_tensor_model_parallel_group()

    @property
    def cp_group(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        return parallel_state.get_context_parallel_group()

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """One rank of each replica: that with the same positions, layers and parts of them as this one."""
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_group()


def init(cfg: Config, address: str) -> ParallelDims:
    """Joins the group that torch elastic describes in the environment. ``address``: that of this host at which the
    other ranks reach it. Raises ConfigError for another size than the configured one."""
    trainer = cfg.trainer
    cuda = cfg.device.uses_cuda(torch.cuda.is_available)
    torch.set_num_threads(trainer.cpu_threads)
    if cfg.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # only costs time
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        from elastic_rl.trainer.megatron import megatron_cpu

        device = torch.device("cpu")
        megatron_cpu.install()
    backend = cfg.device.dist_backend if cfg.device.dist_backend != "auto" else ("nccl" if cuda else "gloo")
    timeout = timedelta(seconds=trainer.collective_timeout_s)
    torch_store.install()
    if interface := interface_of(address):  # else each looks up the host's name, which may have another address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # else all whose names begin so
    dist.init_process_group(backend, timeout=timeout)
    world = dist.get_world_size()
    if world != trainer.ranks:
        raise ConfigError(f"{world} ranks for trainer.tensor_parallel={trainer.tensor_parallel} "
                          f"x trainer.context_parallel={trainer.context_parallel} "
                          f"x trainer.pipeline_parallel={trainer.pipeline_parallel} "
                          f"x trainer.data_parallel={trainer.data_parallel}")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        context_parallel_size=trainer.context_parallel,
        expert_model_parallel_size=trainer.expert_parallel,
        distributed_timeout_minutes=round(_PASS_TIMEOUT.total_seconds() / 60),
        create_gloo_process_groups=False)
    return ParallelDims(rank=dist.get_rank(), world=world, tp=trainer.tensor_parallel,
                        tp_rank=parallel_state.get_tensor_model_parallel_rank(), dp=trainer.data_parallel,
                        dp_rank=parallel_state.get_data_parallel_rank(), device=device, pp=trainer.pipeline_parallel,
                        pp_rank=parallel_state.get_pipeline_model_parallel_rank(), ep=trainer.expert_parallel,
                        cp=trainer.context_parallel, cp_rank=parallel_state.get_context_parallel_rank(),
                        own_replica_group=_replica_group(trainer) if trainer.context_parallel > 1 else None)


def _replica_group(trainer: TrainerConfig) -> dist.ProcessGroup | None:
    """The group of this rank's replica. A collective."""
    size = trainer.tensor_parallel * trainer.context_parallel  # of a replica's ranks in a stage
    stage = size * trainer.data_parallel
    own, _ = dist.new_subgroups_by_enumeration(
        [[first + replica * size + i for first in range(0, trainer.ranks, stage) for i in range(size)]
         for replica in range(trainer.data_parallel)], timeout=_PASS_TIMEOUT)
    return own


def synchronize(par: ParallelDims) -> None:
    """Returns once the device has done all that this rank has queued."""
    if par.device.type == "cuda":
        torch.cuda.synchronize(par.device)


def sum_over_data(values: torch.Tensor, par: ParallelDims) -> torch.Tensor:
    """Sums a small fp32 tensor over the data-parallel group, in place."""
    if par.dp > 1:
        dist.all_reduce(values, group=par.dp_group)
    return values


def max_over_data(values: torch.Tensor, par: ParallelDims) -> torch.Tensor:
    """Element-wise maximum over the data-parallel group, in place."""
    if par.dp > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=par.dp_group)
    return values


def max_over_ranks(values: torch.Tensor, par: ParallelDims) -> torch.Tensor:
    """Element-wise maximum over all ranks, in place."""
    if par.world > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def from_last_stage(values: torch.Tensor, par: ParallelDims) -> torch.Tensor:
    """Broadcasts a small tensor from the last pipeline stage to every stage, in place."""
    if par.pp > 1:
        from megatron.core import parallel_state

        dist.broadcast(values, src=parallel_state.get_pipeline_model_parallel_last_rank(),
                       group=parallel_state.get_pipeline_model_parallel_group())
    return values


def barrier(par: ParallelDims) -> None:
    """Returns once every rank of the group has called it."""
    if par.world > 1:
        dist.all_reduce(torch.zeros(1, device=par.device))
