"""The hosts of the cluster as nodes of a run's Ray: which have joined it, and which get nothing more."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import ray

from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.cluster_records import HostPhase, HostState
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.mirror import Mirror

_LOOK_EVERY_S = 5.0
"""Ray is asked for its nodes so often while somebody has to know them."""
_FEW = 0.05
"""Share of the ready hosts that nobody waits for: in a large cluster there is always one that cannot join."""


@dataclass(frozen=True)
class RayHosts:
    """The hosts at one reading."""

    closed: frozenset[str] = frozenset()
    """Names of those on which nothing more is placed: they are not ready, as one that is cordoned, or to be emptied."""
    leaving: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Ray's ids of the nodes that are to be emptied, each with the name of its host."""
    drains: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """The drain of each host that is to be emptied (``HostState.drain_at``)."""
    missing: tuple[str, ...] = ()
    """Ready hosts that have not joined Ray; empty where they are few."""


class HostsOfRay:
    """Follows what the leader has concluded about the hosts. For one thread of a process that is connected to Ray."""

    def __init__(self, etcd: EtcdClient, keys: ClusterKeys) -> None:
        self._prefix = keys.host_states_prefix()
        self._states = Mirror(etcd, self._prefix, _decode)
        self._nodes: dict[str, str] = {}
        """Name of the host of each node of Ray that is alive, by its id, as looked at last."""
        self._looked_at = float("-inf")

    def read(self, *, joining: bool) -> RayHosts:
        """The hosts as they are now. ``joining``: whether it matters which have not joined yet. Raises EtcdUnavailable
        and RayError."""
        states = {key.removeprefix(self._prefix): state for key, state in self._states.read(0.0).items()}
        drains = {name: state.drain_at for name, state in states.items() if state.drain_at}
        ready = {name for name, state in states.items() if state.phase is HostPhase.READY}
        if (drains or joining) and time.monotonic() - self._looked_at >= (0.0 if joining else _LOOK_EVERY_S):
            self._nodes = {node["NodeID"]: node["NodeName"] for node in ray.nodes() if node["Alive"]}
            self._looked_at = time.monotonic()
        missing = sorted(ready - set(self._nodes.values())) if joining else []
        return RayHosts(closed=frozenset(states.keys() - ready), drains=drains,
                        leaving={node: name for node, name in self._nodes.items() if name in drains},
                        missing=tuple(missing) if len(missing) > _FEW * len(ready) else ())

    def close(self) -> None:
        self._states.close()


def _decode(kv: KeyValue) -> HostState | None:
    return readable_one(kv, HostState)
