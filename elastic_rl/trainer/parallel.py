"""The process group of a trainer: device, backend, Megatron's parallel groups, and the few collectives used here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from elastic_rl.config import Config
from elastic_rl.errors import ConfigError


@dataclass(frozen=True)
class Parallel:
    """This rank's place in the trainer group. Ranks of one tensor-parallel group are neighbours."""

    rank: int
    world: int
    tp: int
    tp_rank: int
    dp: int
    dp_rank: int
    device: torch.device

    @property
    def tp_group(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        return parallel_state.get_tensor_model_parallel_group()

    @property
    def dp_group(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_group()

    def share(self, count: int) -> slice:
        """This data-parallel rank's contiguous share of ``count`` rows; shares differ by at most one row."""
        return slice(count * self.dp_rank // self.dp, count * (self.dp_rank + 1) // self.dp)


def require_supported(cfg: Config) -> None:
    """Raises ConfigError for settings that the trainer cannot honour."""
    if cfg.device.dtype != "float32":
        raise ConfigError(f"device.dtype={cfg.device.dtype} is not supported by the trainer yet",
                          hint="set device.dtype to float32")


def init(cfg: Config) -> Parallel:
    """Joins the group that torch elastic described in the environment. Raises ConfigError when the sizes do not fit."""
    trainer = cfg.trainer
    require_supported(cfg)
    cuda = cfg.device.type == "cuda" or (cfg.device.type == "auto" and torch.cuda.is_available())
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
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
    if world != trainer.tensor_parallel * trainer.data_parallel:
        raise ConfigError(f"{world} ranks for trainer.tensor_parallel={trainer.tensor_parallel} "
                          f"x trainer.data_parallel={trainer.data_parallel}")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tensor_parallel,
        distributed_timeout_minutes=max(1, round(trainer.collective_timeout_s / 60)),
        create_gloo_process_groups=False)
    return Parallel(rank=dist.get_rank(), world=world, tp=trainer.tensor_parallel,
                    tp_rank=parallel_state.get_tensor_model_parallel_rank(), dp=trainer.data_parallel,
                    dp_rank=parallel_state.get_data_parallel_rank(), device=device)


def gather_shards(shards: Sequence[tuple[str, torch.Tensor]], par: Parallel, *,
                  bucket_bytes: int = 64 << 20) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yields (name, [shard of TP rank 0, 1, …]) on every rank of the tensor-parallel group, in the order given.

    Every rank passes the same names and shapes, all of one dtype. Tensors travel packed in buckets: one broadcast per
    rank and bucket on gloo (whose all_gather is eight times slower), one all_gather on NCCL.
    """
    if par.tp == 1:
        for name, tensor in shards:
            yield name, [tensor]
        return
    for bucket in _buckets(shards, bucket_bytes):
        flat = torch.cat([t.detach().reshape(-1) for _, t in bucket])
        parts = _gather_flat(flat, par)
        offset = 0
        for name, tensor in bucket:
            yield name, [p[offset:offset + tensor.numel()].view(tensor.shape) for p in parts]
            offset += tensor.numel()


def _buckets(shards: Sequence[tuple[str, torch.Tensor]], limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for item in shards:
        if bucket and size + item[1].nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += item[1].nbytes
    if bucket:
        yield bucket


def _gather_flat(flat: torch.Tensor, par: Parallel) -> list[torch.Tensor]:
    if dist.get_backend(par.tp_group) != "gloo":
        parts = [torch.empty_like(flat) for _ in range(par.tp)]
        dist.all_gather(parts, flat, group=par.tp_group)
        return parts
    parts = []
    for source, global_rank in enumerate(dist.get_process_group_ranks(par.tp_group)):
        part = flat if source == par.tp_rank else torch.empty_like(flat)
        dist.broadcast(part, src=global_rank, group=par.tp_group)
        parts.append(part)
    return parts


def sum_over_data(values: torch.Tensor, par: Parallel) -> torch.Tensor:
    """Sums a small fp32 tensor over the data-parallel group, in place."""
    if par.dp > 1:
        dist.all_reduce(values, group=par.dp_group)
    return values


def max_over_data(values: torch.Tensor, par: Parallel) -> torch.Tensor:
    """Element-wise maximum over the data-parallel group, in place."""
    if par.dp > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=par.dp_group)
    return values
