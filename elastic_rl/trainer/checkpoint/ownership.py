"""Which rank writes which tensors of a version: every byte once over all ranks. The owner gathers them in buckets."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from elastic_rl.trainer.megatron.parallel import ParallelDims


def assign(sizes: Sequence[int], ranks: int) -> list[int]:
    """An owner for each item, so that bytes are split evenly: the largest first, each to the rank that has least. Pure;
    the same sizes give the same owners, so an item stays on the host of its earlier versions."""
    load = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least, rank = heapq.heappop(load)
        owners[i] = rank
        heapq.heappush(load, (least + sizes[i], rank))
    return owners


def bucketed(items: Sequence[int], sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Splits ``items`` into runs of at most ``limit`` bytes, by their ``sizes``; a larger item is alone. Pure."""
    out: list[list[int]] = []
    size = 0
    for item in items:
        if not out or size + sizes[item] > limit:
            out.append([])
            size = 0
        out[-1].append(item)
        size += sizes[item]
    return out


def gather_to_owners(shards: Sequence[torch.Tensor], whole: Sequence[bool], par: ParallelDims, *, bucket_bytes: int,
                     experts: Sequence[bool] = ()) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yields (index, [shard of TP rank 0, 1, …]) of the tensors that this rank owns.

    A collective of the tensor-parallel group. Every rank of a pipeline stage passes tensors of the same shapes and of
    one dtype, and the ranks of the stage divide them among themselves; ``experts``: which of them only the ranks with
    the same experts hold, who divide those. A tensor that is ``whole`` on every rank is not sent: its list has one
    element. A bucket has at most ``bucket_bytes`` of full tensors, or one larger tensor. Besides
    its own shards a rank holds one bucket, a copy of its own part of it, and what its caller keeps of the tensors that
    were yielded last: ``hf_layout.merge`` makes one more full tensor.
    """
    full = [t.nbytes * (1 if w else par.tp) for t, w in zip(shards, whole, strict=True)]
    owners = owners_of(full, par, experts if par.ep > 1 else ())
    mine = [i for i, owner in enumerate(owners) if owner == par.rank]
    for i in mine:
        if whole[i] or par.tp == 1:
            yield i, [shards[i].detach()]
    if par.tp == 1:
        return
    first = par.rank - par.tp_rank  # ranks of one tensor-parallel group are consecutive
    for owner in range(first, first + par.tp):
        sent = [i for i in range(len(shards)) if owners[i] == owner and not whole[i]]
        for bucket in bucketed(sent, full, bucket_bytes):
            yield from _gather_bucket(bucket, [shards[i].detach() for i in bucket], owner, first, par)


def owners_of(sizes: Sequence[int], par: ParallelDims, experts: Sequence[bool]) -> list[int]:
    """The rank that owns each tensor: of the stage, and for ``experts`` (empty: none) of the ranks with the same ones.
    """
    of_experts = [i for i, expert in enumerate(experts) if expert]
    of_all = [i for i in range(len(sizes)) if not experts or not experts[i]]
    owners: dict[int, int] = {}
    for items, ranks in ((of_all, list(par.stage)), (of_experts, par.expert_holders)):
        owners.update(zip(items, (ranks[i] for i in assign([sizes[i] for i in items], len(ranks))), strict=True))
    return [owners[i] for i in range(len(sizes))]


def _gather_bucket(bucket: Sequence[int], own: Sequence[torch.Tensor], owner: int, first: int, par: ParallelDims
                   ) -> Iterator[tuple[int, list[torch.Tensor]]]:
    flat = torch.cat([t.reshape(-1) for t in own])
    if par.rank != owner:
        dist.send(flat, dst=owner, group=par.tp_group)
        return
    flats = []
    for rank in range(first, first + par.tp):
        flats.append(flat if rank == owner else torch.empty_like(flat))
        if rank != owner:
            dist.recv(flats[-1], src=rank, group=par.tp_group)
    offset = 0
    for i, tensor in zip(bucket, own, strict=True):
        yield i, [f[offset:offset + tensor.numel()].view(tensor.shape) for f in flats]
        offset += tensor.numel()
