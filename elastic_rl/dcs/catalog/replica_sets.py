"""Which nodes hold which part of a version. Pure.

A version consists of parts: what one node was given by the ranks of its host. Each part, with the manifest, is on
``replicas`` nodes: the one that wrote it, and those that follow it in the ring of node ids. So the copies of a version
of N hosts are spread over N nodes, and a lost node is missing from a few parts of each version only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from elastic_rl.config.dcs import Replicas
from elastic_rl.etcd.records import ReplicaSets

_AUTO = 2
"""Copies of each part with ``dcs.replicas: auto``, where there are so many nodes."""
SOURCES = 8
"""Nodes that a version's record names as those to ask first."""


def successors(source: str, ids: Iterable[str]) -> list[str]:
    """The other nodes, in the order in which they are given copies of what ``source`` holds."""
    return sorted((n for n in ids if n != source), key=lambda n: (n < source, n))


def sources(sets: ReplicaSets, most: int = SOURCES) -> list[str]:
    """A few nodes, spread evenly over the parts."""
    nodes = list(dict.fromkeys(n for nodes in sets.parts for n in nodes))
    if len(nodes) <= most:
        return nodes
    return [nodes[i * len(nodes) // most] for i in range(most)]


def nodes_of(sets: ReplicaSets) -> list[str]:
    """Every node that holds a part, sorted by id."""
    return sorted({n for nodes in sets.parts for n in nodes})


def parts_by_node(sets: ReplicaSets) -> dict[str, list[int]]:
    """Node id → indexes of the parts that it holds."""
    out: dict[str, list[int]] = {}
    for i, nodes in enumerate(sets.parts):
        for node_id in nodes:
            out.setdefault(node_id, []).append(i)
    return out


def without(sets: ReplicaSets, lost: Mapping[str, Collection[int]]) -> ReplicaSets:
    """The replica sets without the given parts on the given nodes."""
    return sets.replace(parts=[[n for n in nodes if i not in lost.get(n, ())]
                               for i, nodes in enumerate(sets.parts)])


def with_copies(sets: ReplicaSets, copies: Iterable[tuple[int, str]]) -> ReplicaSets:
    """The replica sets with further (part, node)."""
    parts = [list(nodes) for nodes in sets.parts]
    for i, node_id in copies:
        if node_id not in parts[i]:
            parts[i].append(node_id)
    return sets.replace(parts=parts)


def wanted(replicas: Replicas, nodes: int) -> int:
    """How many nodes are to hold each chunk, where so many are there."""
    return max(1, min(_AUTO, nodes)) if replicas == "auto" else replicas


def required(replicas: Replicas) -> int:
    """How many nodes must hold each chunk before a version is committed."""
    return 1 if replicas == "auto" else replicas


def short_of(sets: ReplicaSets, replicas: int) -> list[int]:
    """Indexes of the parts with fewer copies than that."""
    return [i for i, nodes in enumerate(sets.parts) if len(nodes) < replicas]


def fewest(sets: ReplicaSets, nodes: Collection[str]) -> int:
    """How many of the nodes hold the part that the fewest of them hold; 0 where no replica sets are recorded."""
    return min((sum(n in nodes for n in part) for part in sets.parts), default=0)


def candidates(sets: ReplicaSets, part: int, ids: Sequence[str]) -> list[str]:
    """Nodes among ``ids`` that could be given a copy of a part, the one that should be asked first at the front: after
    the part's first node in the ring, or, where no node holds it, as if node number ``part`` did."""
    holding = sets.parts[part]
    start = holding[0] if holding else sorted(ids)[part % len(ids)] if ids else ""
    ring = [start, *successors(start, ids)] if start in ids else successors(start, ids)
    return [n for n in ring if n not in holding]
