"""Which versions are kept, on the nodes and in the durable store. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastic_rl.etcd.records import Version


@dataclass(frozen=True)
class RetentionPolicy:
    """What is kept of a stream: the newest ``versions``; of these, those that are not older than ``age_s``; of these,
    as many as have ``nbytes`` together. 0: no limit of that kind. The head is always kept."""

    versions: int
    age_s: float = 0.0
    nbytes: int = 0


def to_release(committed: Sequence[Version], policy: RetentionPolicy, now: float, *, pinned: Collection[int] = ()
               ) -> list[int]:
    """Numbers of the versions to be released, oldest first. ``committed``: those of one stream, oldest first; ``now``:
    unix seconds. Pinned versions stay, and do not count against the limits of the others."""
    kept, total, out = 0, 0, []
    for version in reversed(committed):
        total += version.nbytes
        is_head = version is committed[-1]
        fits = (kept < policy.versions and (not policy.age_s or now - version.committed_at <= policy.age_s)
                and (not policy.nbytes or total <= policy.nbytes))
        if is_head or fits:
            kept += 1
        else:
            total -= version.nbytes
            if version.number not in pinned:
                out.append(version.number)
    return sorted(out)


def durable_to_drop(anchors: Mapping[int, int], keep: int, needed: Collection[int] = ()) -> list[int]:
    """Numbers of the durable versions to be dropped. ``anchors``: number of each version → that of the version whose
    chunks its deltas are against (its own for a whole one). The newest ``keep`` stay, ``needed``, and the anchors of
    these."""
    stay = {*sorted(anchors)[-keep:], *(anchors.keys() & set(needed))}
    stay |= {anchors[n] for n in stay}
    return sorted(n for n in anchors if n not in stay)
