"""The process group of a trainer: device, backend, Megatron's parallel groups, and a few collectives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from elastic_rl.config import Config
from elastic_rl.errors import ConfigError

FENCED_EXIT = 3
"""Exit code of ranks and of their agent when their epoch is over."""


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the trainer group and the coordinates of this rank. The ranks of one tensor-parallel group are
    consecutive, and so are those of one pipeline stage."""

    rank: int
    world: int
    tp: int
    tp_rank: int
    dp: int
    dp_rank: int
    device: torch.device
    pp: int = 1
    pp_rank: int = 0

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
    def tp_group(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        return parallel_state.get_tensor_model_parallel_group()

    @property
    def dp_group(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_group()

    def dp_slice(self, count: int) -> slice:
        """The contiguous slice of ``count`` rows of this data-parallel rank; slices differ by at most one row."""
        return slice(count * self.dp_rank // self.dp, count * (self.dp_rank + 1) // self.dp)


def require_supported(cfg: Config) -> None:
    """Raises ConfigError for settings that the trainer does not support."""
    if cfg.device.dtype != "float32":
        raise ConfigError(f"device.dtype={cfg.device.dtype} is not supported by the trainer yet",
                          hint="set device.dtype to float32")


def init(cfg: Config) -> ParallelDims:
    """Joins the group that torch elastic describes in the environment. Raises ConfigError for another size than the
    configured one."""
    trainer = cfg.trainer
    require_supported(cfg)
    cuda = cfg.device.uses_cuda(torch.cuda.is_available)
    torch.set_num_threads(trainer.cpu_threads)
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        from elastic_rl.trainer import megatron_cpu

        device = torch.device("cpu")
        megatron_cpu.install()
    backend = cfg.device.dist_backend if cfg.device.dist_backend != "auto" else ("nccl" if cuda else "gloo")
    timeout = timedelta(seconds=trainer.collective_timeout_s)
    dist.init_process_group(backend, timeout=timeout)
    world = dist.get_world_size()
    if world != trainer.ranks:
        raise ConfigError(f"{world} ranks for trainer.tensor_parallel={trainer.tensor_parallel} "
                          f"x trainer.pipeline_parallel={trainer.pipeline_parallel} "
                          f"x trainer.data_parallel={trainer.data_parallel}")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        distributed_timeout_minutes=max(1, round(trainer.collective_timeout_s / 60)),
        create_gloo_process_groups=False)
    return ParallelDims(rank=dist.get_rank(), world=world, tp=trainer.tensor_parallel,
                        tp_rank=parallel_state.get_tensor_model_parallel_rank(), dp=trainer.data_parallel,
                        dp_rank=parallel_state.get_data_parallel_rank(), device=device, pp=trainer.pipeline_parallel,
                        pp_rank=parallel_state.get_pipeline_model_parallel_rank())


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


def from_last_stage(values: torch.Tensor, par: ParallelDims) -> torch.Tensor:
    """Broadcasts a small tensor from the last pipeline stage to every stage, in place."""
    if par.pp > 1:
        from megatron.core import parallel_state

        dist.broadcast(values, src=parallel_state.get_pipeline_model_parallel_last_rank(),
                       group=parallel_state.get_pipeline_model_parallel_group())
    return values
