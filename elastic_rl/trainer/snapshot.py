"""The whole state of a trainer as named tensors in HF layout: weights, Adam's moments, random states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from elastic_rl.trainer import hf_layout
from elastic_rl.trainer.host_copy import Named
from elastic_rl.trainer.model import Policy
from elastic_rl.trainer.optimizer import MOMENTS, Adam
from elastic_rl.trainer.ownership import gather_to_owners

_RNG = "rng."
_TENSORS_PER_PARAMETER = 4
"""More than the HF tensors of one Megatron parameter."""
_TRACKERS = 64
"""More than the random states of one rank."""
_STAGE, _SECTION = 1 << 24, 1 << 40
"""Order numbers reserved for one pipeline stage in one section (the weights, a moment, the random states), and for one
section."""


def weights(policy: Policy, bucket_bytes: int) -> Iterator[Named]:
    """The full HF tensors that this rank owns, each with its order number. A collective of the tensor-parallel group.
    """
    yield from owned_tensors(policy, dict(policy.parameters()), bucket_bytes)


def extras(policy: Policy, adam: Adam, bucket_bytes: int) -> Iterator[Named]:
    """The tensors of a trainer_state besides the weights that this rank owns: ``exp_avg.<hf name>``,
    ``exp_avg_sq.<hf name>`` and ``rng.pp<p>tp<r>.<tracker>`` (uint8). A collective of the tensor-parallel group."""
    for i, (kind, shards) in enumerate(adam.moments().items()):
        yield from owned_tensors(policy, shards, bucket_bytes, f"{kind}.", i + 1)
    par = policy.par
    if par.dp_rank == 0:
        start = (len(MOMENTS) + 1) * _SECTION + par.pp_rank * _STAGE + par.tp_rank * _TRACKERS
        for i, (name, state) in enumerate(_rng_states()):
            yield start + i, _rng_name(par.pp_rank, par.tp_rank, name), state


def owned_tensors(policy: Policy, shards: Mapping[str, torch.Tensor], bucket_bytes: int, prefix: str = "",
                  section: int = 0) -> Iterator[Named]:
    """The full HF tensors that this rank owns, from shards that are named and split as the parameters are."""
    rules = [hf_layout.rule_of(name) for name in shards]
    whole = [rule.layout is hf_layout.ShardLayout.WHOLE for rule in rules]
    start = section * _SECTION + policy.par.pp_rank * _STAGE
    for i, gathered in gather_to_owners(list(shards.values()), whole, policy.par, bucket_bytes=bucket_bytes):
        for j, (hf_name, full) in enumerate(hf_layout.merge(rules[i], gathered, policy.dims).items()):
            yield start + i * _TENSORS_PER_PARAMETER + j, prefix + hf_name, full


def restore(policy: Policy, adam: Adam, tensors: Mapping[str, torch.Tensor], *, updates: int) -> None:
    """Loads this rank's part of a whole state that was saved at any parallel sizes. Random states are restored only at
    the same sizes, since each belongs to one rank."""
    policy.load_hf(tensors)
    par, dims = policy.par, policy.dims
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for kind in MOMENTS:
        full = {n.removeprefix(f"{kind}."): t for n, t in tensors.items() if n.startswith(f"{kind}.")}
        moments[kind] = {name: hf_layout.split(hf_layout.rule_of(name), full, dims, tp=par.tp, tp_rank=par.tp_rank)
                         for name, _ in policy.parameters()}
    adam.load_moments(moments, updates)
    ranks = {_rng_name(pp, tp, "torch") for pp in range(par.pp) for tp in range(par.tp)}
    if ranks == {n for n in tensors if n.startswith(_RNG) and n.endswith(".torch")}:
        _set_rng_states({name: tensors[_rng_name(par.pp_rank, par.tp_rank, name)].clone() for name, _ in _rng_states()})


def _rng_name(pp_rank: int, tp_rank: int, tracker: str) -> str:
    return f"{_RNG}pp{pp_rank}tp{tp_rank}.{tracker}"


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
