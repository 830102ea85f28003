"""On which hosts the ranks of a trainer group are, and with how many replicas of the model it trains: pure.

A replica has a number of ranks, of which those that are tensor-parallel to each other are on one host. Torch elastic
numbers the ranks by host, one after another, so a host with a multiple of them splits none of these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastic_rl.config import TrainerConfig

NO_ROOM_S = 30.0
"""After so long without room on a host that seemed to have it, another plan is looked for."""
FULL_S = 60.0
"""A host that has given its room to others is left out for so long."""


@dataclass(frozen=True)
class Room:
    """A host that may have ranks."""

    host: str
    ranks: int
    """Number of ranks that it has room for; those that it has are part of it."""


@dataclass(frozen=True)
class Plan:
    """Hosts of a group, and how many ranks each has."""

    ranks: dict[str, int]
    data_parallel: int


def sizes(trainer: TrainerConfig) -> list[int]:
    """The numbers of replicas with which the group may train, the largest first."""
    least = trainer.min_data_parallel or trainer.data_parallel
    return [size for size in range(trainer.data_parallel, least - 1, -1)
            if not size * trainer.context_parallel % trainer.expert_parallel]


def least_ranks(trainer: TrainerConfig) -> int:
    """Number of ranks of the smallest group."""
    return trainer.ranks // trainer.data_parallel * sizes(trainer)[-1]


def waits_for(trainer: TrainerConfig, *, holds: bool, knows_room: bool, on_one: int = 1) -> str:
    """What a group waits for that has no plan. ``holds``: whether it is to have all its replicas, since hosts are
    joining; ``knows_room``: whether it is known what the hosts have room for now; ``on_one``: number of ranks that must
    be on one host."""
    if holds:
        return "hosts that join, to have all its replicas"
    if not knows_room:
        return "Ray to say which GPUs are free"
    some = f", of these {on_one} on one host" if on_one > 1 else ""
    return f"hosts with room for {least_ranks(trainer)} ranks{some}: add a machine or scale in"


def plan(rooms: Sequence[Room], trainer: TrainerConfig, *, keeps: Collection[str] = ()) -> Plan | None:
    """The largest group that has room; None when not even the smallest has. Hosts of ``keeps`` come first, then those
    with the most room: a group on fewer hosts loses a host less often."""
    together = trainer.tensor_parallel
    most = trainer.ranks_per_host or trainer.ranks
    room = {r.host: min(r.ranks, most) // together * together for r in rooms}
    order = sorted((host for host in room if room[host] > 0), key=lambda host: (host not in keeps, -room[host]))
    for size in sizes(trainer):
        left = trainer.ranks // trainer.data_parallel * size
        if sum(room.values()) < left:
            continue
        ranks: dict[str, int] = {}
        for host in order:
            if left:
                ranks[host] = min(room[host], left)
                left -= ranks[host]
        return Plan(ranks, size)
    return None
