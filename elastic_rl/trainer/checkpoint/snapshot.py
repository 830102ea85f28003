"""The whole state of a trainer as named tensors in HF layout: weights, fp32 masters of bf16 weights, Adam's moments,
random states, and the weights of the reference policy where there is one.

No rank ever has all of it. Saving: the ranks of a pipeline stage divide its tensors among themselves, and the owner of
a tensor gathers it, bucket by bucket, from its tensor-parallel group; weights, masters and moments alike. Loading: each
rank copies its own part of one tensor after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch

from elastic_rl.errors import ConfigError
from elastic_rl.models.layout import ShardLayout
from elastic_rl.trainer.checkpoint.host_copy import Named
from elastic_rl.trainer.checkpoint.ownership import gather_to_owners
from elastic_rl.trainer.megatron import hf_layout
from elastic_rl.trainer.megatron.hf_layout import ShardRange
from elastic_rl.trainer.megatron.optimizer import MASTER, MOMENTS, Adam
from elastic_rl.trainer.megatron.parallel import ParallelDims
from elastic_rl.trainer.megatron.policy import Policy
from elastic_rl.trainer.megatron.shard_loader import ShardLoader
from elastic_rl.trainer.reference import Reference

log = logging.getLogger(__name__)

_RNG, _REFERENCE = "rng.", "reference."
_TENSORS_PER_PARAMETER = 4
"""More than the HF tensors of one Megatron parameter."""
_TRACKERS = 64
"""A number above that of the random states of one rank."""
_SECTIONS = {section: number for number, section in enumerate((*MOMENTS, MASTER, _RNG, _REFERENCE), 1)}
"""The weights are the first one, 0."""
_STAGE, _SECTION = 1 << 24, 1 << 40
"""Order numbers reserved for one pipeline stage in one section, and for one section."""


def weights(policy: Policy, bucket_bytes: int) -> Iterator[Named]:
    """The full HF tensors that this rank owns, each with its order number. A collective of the tensor-parallel group.
    """
    yield from owned_tensors(policy, dict(policy.parameters()), bucket_bytes)


def extras(policy: Policy, adam: Adam, bucket_bytes: int) -> Iterator[Iterator[Named]]:
    """The tensors of a trainer_state besides the weights that this rank owns, in sections: ``exp_avg.<hf name>``,
    ``exp_avg_sq.<hf name>``, of bf16 weights ``master.<hf name>``, and ``rng.pp<p>tp<r>.<tracker>`` (uint8, always on
    the CPU). Nothing may read the device's tensors of a section any more when the next one is requested.

    A collective of the tensor-parallel group, and with the distributed optimizer of the data-parallel groups.
    """
    for kind, shards in adam.whole_state():
        yield owned_tensors(policy, shards, bucket_bytes, f"{kind}.", _SECTIONS[kind])
    if policy.par.dp_rank == policy.par.cp_rank == 0:
        yield _random_states(policy.par)


def _random_states(par: ParallelDims) -> Iterator[Named]:
    start = _SECTIONS[_RNG] * _SECTION + par.pp_rank * _STAGE + par.tp_rank * _TRACKERS
    for i, (name, state) in enumerate(_rng_states(par)):
        yield start + i, f"{_RNG}{_rank_name(par.pp_rank, par.tp_rank)}.{name}", state


def reference(policy: Policy, bucket_bytes: int) -> Iterator[Named]:
    """The tensors ``reference.<hf name>`` that this rank owns, while the model has the reference's weights. A
    collective of the tensor-parallel group."""
    yield from owned_tensors(policy, dict(policy.parameters()), bucket_bytes, _REFERENCE, _SECTIONS[_REFERENCE])


def owned_tensors(policy: Policy, shards: Mapping[str, torch.Tensor], bucket_bytes: int, prefix: str = "",
                  section: int = 0) -> Iterator[Named]:
    """The full HF tensors that this rank owns, from shards that are named and split as the parameters are."""
    saved = {name: rule for name in shards if not (rule := policy.arch.rule_of(name)).replica}
    rules = list(saved.values())
    whole = [rule.layout is ShardLayout.WHOLE for rule in rules]
    experts = [rule.expert for rule in rules]
    start = section * _SECTION + policy.par.pp_rank * _STAGE
    for i, gathered in gather_to_owners([shards[name] for name in saved], whole, policy.par, bucket_bytes=bucket_bytes,
                                        experts=experts):
        place = i + policy.par.ep_rank * len(rules) if experts[i] else i
        for j, (hf_name, full) in enumerate(hf_layout.merge(rules[i], gathered, policy.dims).items()):
            yield start + place * _TENSORS_PER_PARAMETER + j, prefix + hf_name, full


class StateLoader:
    """Loads this rank's part of a trainer_state that was saved at any parallel sizes: tensor by tensor, in any order,
    into the live parameters and masters and those of the reference policy, and into moments of its own; those of the
    optimizer are discarded first, since memory may not suffice for both. ``apply`` completes it; until then the model
    is torn."""

    def __init__(self, policy: Policy, adam: Adam, reference: Reference | None = None) -> None:
        """``reference``: the reference policy, in a run that has one; the state may have been saved before it was
        taken."""
        self._policy, self._adam = policy, adam
        self._reference = ShardLoader(policy.arch, policy.par)
        for name, shard in (reference.shards() if reference is not None else {}).items():
            self._reference.expect(name, ShardRange.whole(shard), _REFERENCE)
        self._shards = policy.shard_loader()
        adam.reset()
        self._moments = adam.allocate_moments()
        for kind, ranges in ({kind: adam.ranges(kept) for kind, kept in self._moments.items()}
                             | {MASTER: policy.masters}).items():
            for name, target in ranges.items():
                self._shards.expect(name, target, f"{kind}.")
        self._saved_masters = False
        self._saved_ranks: set[str] = set()
        self._rng: dict[str, torch.Tensor] = {}

    def select(self, name: str) -> bool:
        """Whether this rank needs the tensor of that name. Call it with every name of the state."""
        if name.startswith(_RNG):
            rank, _, tracker = name.removeprefix(_RNG).partition(".")
            if tracker == "torch":
                self._saved_ranks.add(rank)
            return rank == _rank_name(self._policy.par.pp_rank, self._policy.par.tp_rank)
        self._saved_masters |= name.startswith(f"{MASTER}.")
        return self._shards.wants(name) or self._reference.wants(name)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copies what this rank needs of a selected tensor. Raises ConfigError for a wrong shape."""
        if name.startswith(_RNG):
            self._rng[name.removeprefix(_RNG).partition(".")[2]] = tensor.clone()
        else:
            (self._reference if self._reference.wants(name) else self._shards).load(name, tensor)

    def apply(self, updates: int, *, has_reference: bool = False) -> None:
        """Completes the load, with Adam's update count. ``has_reference``: whether the state has a reference policy.
        Raises ConfigError when a tensor is missing, or the weights had another dtype."""
        if self._saved_masters != (self._policy.dtype is not torch.float32):
            saved, now = ("bfloat16", "float32") if self._saved_masters else ("float32", "bfloat16")
            raise ConfigError(f"the trainer_state was saved with device.dtype={saved}, and device.dtype is now {now}",
                              hint=f"set device.dtype to {saved}, or begin another job with --from-job")
        self._shards.require_complete()
        if has_reference:
            self._reference.require_complete()
        self._adam.load_moments(self._moments, updates)
        self._restore_rng()

    def _restore_rng(self) -> None:
        """Random states belong to one rank and one kind of device: they are restored only at the parallel sizes and on
        the device that they were saved on. Otherwise the ranks keep the states that the seed gave them."""
        par = self._policy.par
        own = {name: state.shape for name, state in _rng_states(par)}
        same_sizes = self._saved_ranks == {_rank_name(pp, tp) for pp in range(par.pp) for tp in range(par.tp)}
        if same_sizes and own == {name: state.shape for name, state in self._rng.items()}:
            _set_rng_states(self._rng)
        else:
            log.warning("random states are not restored: they were saved by a group of other sizes or devices")


def _rank_name(pp_rank: int, tp_rank: int) -> str:
    return f"pp{pp_rank}tp{tp_rank}"


def _rng_states(par: ParallelDims) -> Iterator[tuple[str, torch.Tensor]]:
    """uint8, on the CPU also where the generator is CUDA's. The replicas of a data-parallel group have equal states,
    since they are seeded alike and draw alike, so those of the first one stand for all."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    yield "torch", torch.get_rng_state()
    if par.device.type == "cuda":
        yield "cuda", torch.cuda.get_rng_state(par.device)
    yield from sorted(get_cuda_rng_tracker().get_states().items())


def _set_rng_states(states: Mapping[str, torch.Tensor]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states({n: s for n, s in states.items() if n not in ("torch", "cuda")})
