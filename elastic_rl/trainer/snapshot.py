"""A trainer's whole state as named HF-layout tensors: weights, Adam's moments, random states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from elastic_rl.trainer import hf_layout
from elastic_rl.trainer.device import Named
from elastic_rl.trainer.model import Policy
from elastic_rl.trainer.optimizer import MOMENTS, Adam
from elastic_rl.trainer.parallel import gather_shards
from elastic_rl.trainer.shares import gather_to_owners

_RNG = "rng."
_PLACES = 4
"""More than the HF tensors that one Megatron parameter makes."""
_TRACKERS = 64
"""More than the random states of one rank."""


def capture(policy: Policy, adam: Adam) -> dict[str, torch.Tensor]:
    """Full CPU tensors: ``<hf name>``, ``exp_avg.<hf name>``, ``exp_avg_sq.<hf name>`` and ``rng.tp<r>.<tracker>``
    (uint8). A collective of the tensor-parallel group; every rank of it gets the same result."""
    out = {name: t.to("cpu", copy=True) for name, t in policy.to_hf()}
    for kind, shards in adam.moments().items():
        out.update({name: t.to("cpu", copy=True) for name, t in policy.to_hf(shards, prefix=f"{kind}.")})
    for name, parts in gather_shards([(n, t.to(policy.par.device)) for n, t in _rng_states()], policy.par):
        out.update({f"{_RNG}tp{r}.{name}": part.cpu().clone() for r, part in enumerate(parts)})
    return out


def weights(policy: Policy, bucket_bytes: int) -> Iterator[Named]:
    """This rank's share of the full HF tensors, each with its place. A collective of the tensor-parallel group."""
    yield from _share(policy, dict(policy.parameters()), "", 0, bucket_bytes)


def extras(policy: Policy, adam: Adam, bucket_bytes: int) -> Iterator[Named]:
    """This rank's share of what a trainer_state has besides the weights, named as by ``capture``; likewise."""
    places = _PLACES * sum(1 for _ in policy.parameters())
    for i, (kind, shards) in enumerate(adam.moments().items()):
        yield from _share(policy, shards, f"{kind}.", (i + 1) * places, bucket_bytes)
    if policy.par.dp_rank == 0:
        at, r = (len(MOMENTS) + 1) * places, policy.par.tp_rank
        for i, (name, state) in enumerate(_rng_states()):
            yield at + r * _TRACKERS + i, f"{_RNG}tp{r}.{name}", state


def _share(policy: Policy, shards: Mapping[str, torch.Tensor], prefix: str, start: int, bucket_bytes: int
           ) -> Iterator[Named]:
    rules = [hf_layout.rule_of(name) for name in shards]
    whole = [rule.cut is hf_layout.Cut.WHOLE for rule in rules]
    for i, parts in gather_to_owners(list(shards.values()), whole, policy.par, bucket_bytes=bucket_bytes):
        for j, (hf_name, full) in enumerate(hf_layout.merge(rules[i], parts, policy.geometry).items()):
            yield start + i * _PLACES + j, prefix + hf_name, full


def restore(policy: Policy, adam: Adam, tensors: Mapping[str, torch.Tensor], *, updates: int) -> None:
    """Takes this rank's part of what ``capture`` gave, whatever the tensor-parallel size was then. Random states come
    back only at the same size: they belong to a rank, and there is no other rank to give them to."""
    policy.load_hf(tensors)
    par, geometry = policy.par, policy.geometry
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for kind in MOMENTS:
        full = {n.removeprefix(f"{kind}."): t for n, t in tensors.items() if n.startswith(f"{kind}.")}
        moments[kind] = {name: hf_layout.split(hf_layout.rule_of(name), full, geometry, tp=par.tp, tp_rank=par.tp_rank)
                         for name, _ in policy.parameters()}
    adam.load_moments(moments, updates)
    if f"{_RNG}tp{par.tp - 1}.torch" in tensors and f"{_RNG}tp{par.tp}.torch" not in tensors:
        _set_rng_states({name: tensors[f"{_RNG}tp{par.tp_rank}.{name}"].clone() for name, _ in _rng_states()})


def _rng_states() -> Iterator[tuple[str, torch.Tensor]]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    yield "torch", torch.get_rng_state()
    if torch.cuda.is_available():
        yield "cuda", torch.cuda.get_rng_state()
    yield from sorted(get_cuda_rng_tracker().get_states().items())


def _set_rng_states(states: Mapping[str, torch.Tensor]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states({n: s for n, s in states.items() if n not in ("torch", "cuda")})
