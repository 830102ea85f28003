"""Which nodes hold which part of a version. Pure.

A version consists of parts: what one node was given by the ranks of its host. Each part, with the manifest, is on
``replicas`` nodes: the one that wrote it, and those that follow it in the ring of node ids. So the copies of a version
of N hosts are spread over N nodes, and a lost node is missing from a few parts of each version only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from elastic_rl.etcd.records import Placement

SOURCES = 8
"""Nodes that a version's record names as those to ask first."""


def successors(source: str, ids: Iterable[str]) -> list[str]:
    """The other nodes, in the order in which they are given copies of what ``source`` holds."""
    return sorted((n for n in ids if n != source), key=lambda n: (n < source, n))


def sources(placement: Placement, most: int = SOURCES) -> list[str]:
    """A few nodes, spread evenly over the parts."""
    nodes = list(dict.fromkeys(n for nodes in placement.parts for n in nodes))
    if len(nodes) <= most:
        return nodes
    return [nodes[i * len(nodes) // most] for i in range(most)]


def nodes_of(placement: Placement) -> list[str]:
    """Every node that holds a part, sorted by id."""
    return sorted({n for nodes in placement.parts for n in nodes})


def parts_by_node(placement: Placement) -> dict[str, list[int]]:
    """Node id → indexes of the parts that it holds."""
    out: dict[str, list[int]] = {}
    for i, nodes in enumerate(placement.parts):
        for node_id in nodes:
            out.setdefault(node_id, []).append(i)
    return out


def without(placement: Placement, lost: Mapping[str, Collection[int]]) -> Placement:
    """The placement without the given parts on the given nodes."""
    return placement.replace(parts=[[n for n in nodes if i not in lost.get(n, ())]
                                    for i, nodes in enumerate(placement.parts)])


def with_copies(placement: Placement, copies: Iterable[tuple[int, str]]) -> Placement:
    """The placement with further (part, node)."""
    parts = [list(nodes) for nodes in placement.parts]
    for i, node_id in copies:
        if node_id not in parts[i]:
            parts[i].append(node_id)
    return placement.replace(parts=parts)


def short_of(placement: Placement, replicas: int) -> list[int]:
    """Indexes of the parts with fewer copies than that."""
    return [i for i, nodes in enumerate(placement.parts) if len(nodes) < replicas]


def candidates(placement: Placement, part: int, ids: Sequence[str]) -> list[str]:
    """Nodes among ``ids`` that could be given a copy of a part, the one that should be asked first at the front: after
    the part's first node in the ring, or, where no node holds it, as if node number ``part`` did."""
    holding = placement.parts[part]
    start = holding[0] if holding else sorted(ids)[part % len(ids)] if ids else ""
    ring = [start, *successors(start, ids)] if start in ids else successors(start, ids)
    return [n for n in ring if n not in holding]
