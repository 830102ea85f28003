"""The hosts of the cluster as nodes of a run's Ray: which have joined it, and which get nothing more."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # Ray has no public name for it

from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.cluster_records import Host, HostPhase, HostState
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.mirror import Mirror

_LOOK_EVERY_S = 5.0
"""Ray is asked for its nodes so often; without a pause while somebody waits for them."""
SETTLE_S = 2.0
"""Ray reports so late which GPUs are free."""
_FEW = 0.05
"""Share of the ready hosts that nobody waits for: in a large cluster there is always one that cannot join."""

OFFERED = ("CPU", "GPU", "memory")
"""Ray's resources that a part may ask for by a setting; memory in bytes."""
_GONE = (HostPhase.LOST, HostPhase.LEFT)


@dataclass(frozen=True)
class HostNode:
    """The node of Ray of a host."""

    id: str
    address: str
    gpus: int = 0
    """Number of GPUs that Ray has given to nobody."""
    offers: Mapping[str, float] = field(default_factory=dict)
    """All that it has of the resources ``OFFERED``, whoever uses it."""


@dataclass(frozen=True)
class RayHosts:
    """The hosts at one reading."""

    nodes: Mapping[str, HostNode] = field(default_factory=lambda: MappingProxyType({}))
    """The hosts that have joined Ray, by name."""
    open: frozenset[str] = frozenset()
    """Names of the hosts that are ready: on these more is placed."""
    lost: frozenset[str] = frozenset()
    """Names of the hosts that are lost, or have left."""

    closed: frozenset[str] = frozenset()
    """Names of the hosts on which nothing more is placed: they are not ready, as a cordoned one, or to be emptied."""
    leaving: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Ray's ids of the nodes that are to be emptied, each with the name of its host."""
    drains: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """The drain of each host that is to be emptied (``HostState.drain_at``)."""
    overdue: frozenset[str] = frozenset()
    """Names of those whose time for that is over: they end in a moment."""
    missing: tuple[str, ...] = ()
    """Ready hosts that have not joined Ray; empty where they are few."""
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    """Labels of each host that has registered, by its name; empty unless somebody selects hosts by them."""
    late: int = 0
    """Number of all ready hosts that have not joined Ray."""
    looked_at: float = float("-inf")
    """When Ray was asked for ``open``, in monotonic seconds."""

    def is_overdue(self, node: str) -> bool:
        """Whether the time is over in which a node of Ray was to be emptied."""
        return self.leaving.get(node) in self.overdue

    def says_room_after(self, changed_at: float) -> bool:
        """Whether this is a reading, and knows which GPUs are free since something was placed or ended last, in
        monotonic seconds."""
        return self.looked_at > float("-inf") and self.looked_at >= changed_at + SETTLE_S


class HostsOfRay:
    """Follows what the leader has concluded about the hosts. For one thread of a process that is connected to Ray."""

    def __init__(self, etcd: EtcdClient, keys: ClusterKeys, *, reads_labels: bool = False) -> None:
        """``reads_labels``: whether somebody selects hosts by their labels."""
        self.counts_gpus = False
        """Whether somebody has to know how many GPUs are free."""
        self._prefix = keys.host_states_prefix()
        self._states = Mirror(etcd, self._prefix, _decode)
        self._registrations = Mirror(etcd, keys.host_registrations_prefix(), lambda kv: readable_one(kv, Host)
                                     ) if reads_labels else None
        self._nodes: list[tuple[str, HostNode]] = []
        """Name of the host of each node of Ray that is alive, and the node, as looked at last."""
        self._looked_at = float("-inf")

    def read(self, *, joining: bool) -> RayHosts:
        """The hosts as they are now. ``joining``: whether it matters which have not joined yet. Raises EtcdUnavailable
        and RayError."""
        states = {key.removeprefix(self._prefix): state for key, state in self._states.read(0.0).items()}
        drains = {name: state.drain_at for name, state in states.items() if state.drain_at}
        ready = {name for name, state in states.items() if state.phase is HostPhase.READY}
        if time.monotonic() - self._looked_at >= (0.0 if joining else _LOOK_EVERY_S):
            self._looked_at = time.monotonic()
            nodes = ray.nodes()  # first: what joins in between has free GPUs in the next reading
            self._nodes = _nodes_of_ray(nodes, available_resources_per_node() if self.counts_gpus else {})
        registered = self._registrations.read(0.0).values() if self._registrations is not None else ()
        missing = sorted(ready - {name for name, _ in self._nodes}) if joining else []
        return RayHosts(closed=frozenset(states.keys() - ready), drains=drains,
                        nodes=dict(self._nodes), open=frozenset(name for name, _ in self._nodes if name in ready),
                        lost=frozenset(name for name, state in states.items() if state.phase in _GONE),
                        overdue=frozenset(name for name, state in states.items() if state.drain_overdue),
                        leaving={node.id: name for name, node in self._nodes if name in drains},
                        missing=tuple(missing) if len(missing) > _FEW * len(ready) else (), late=len(missing),
                        labels={host.id: host.labels for host in registered}, looked_at=self._looked_at)

    def close(self) -> None:
        self._states.close()
        if self._registrations is not None:
            self._registrations.close()


def _nodes_of_ray(nodes: Iterable[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]
                  ) -> list[tuple[str, HostNode]]:
    """``nodes``: as Ray lists them. ``free``: resources that Ray has given to nobody, by the node's id."""
    return [(node["NodeName"], HostNode(node["NodeID"], node["NodeManagerAddress"],
                                        int(free.get(node["NodeID"], {}).get("GPU", 0)),
                                        {name: amount for name, amount in node.get("Resources", {}).items()
                                         if name in OFFERED}))
            for node in nodes if node["Alive"]]


def _decode(kv: KeyValue) -> HostState | None:
    return readable_one(kv, HostState)
