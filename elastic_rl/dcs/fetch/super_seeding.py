"""Which node fetches a chunk that only one node has, usually the publisher's. Pure.

If many nodes start at once, each would request the same chunks of that node while others of its chunks are nowhere
else yet. As in BitTorrent's super-seeding, each chunk should leave it about once. So the chunks are put on a circle,
and the circle is divided among the nodes that lack some: each fetches its own share first, and soon finds the rest at
the other nodes. A share that is not fetched (its node is slow, or does not want these chunks at all) is taken over: the
longer nothing of what a node alone has is seen to spread, the further along the circle others reach, twice as far each
time.
"""

from __future__ import annotations

from collections.abc import Iterable

_MAX_DOUBLINGS = 64
"""Number of doublings after which everything is in reach, of however many nodes."""


class SuperSeeding:
    """One node's view of the division."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._nodes = [own_id]
        self._complete: set[str] = set()
        self._places: dict[str, tuple[int, int]] = {}  # (rank, of how many)
        self._sharers, self._own = 1, 0

    def set_nodes(self, ids: Iterable[str]) -> None:
        """All nodes but this one."""
        self._nodes = sorted([*ids, self._own_id])
        self._divide()

    def set_complete(self, node_id: str, complete: bool) -> None:
        """Whether a node has everything that it was queried about: then it has no share."""
        if complete != (node_id in self._complete):
            self._complete ^= {node_id}
            self._divide()

    def _divide(self) -> None:
        sharers = [n for n in self._nodes if n not in self._complete]
        self._sharers, self._own = len(sharers), sharers.index(self._own_id)

    def add(self, digests: Iterable[str]) -> None:
        """Puts chunks on the circle, evenly and in order; nodes that lack the same ones put them to the same places.
        Which nodes are complete is unknown again."""
        ordered = list(digests)
        self._complete.clear()
        self._divide()
        self._places.update({digest: (i, len(ordered)) for i, digest in enumerate(ordered)})

    def remove(self, digest: str) -> None:
        """Takes a chunk off the circle."""
        self._places.pop(digest, None)

    def distance(self, digest: str) -> tuple[int, int]:
        """How many shares a chunk is away from this node's along the circle, and the chunk's rank."""
        rank, count = self._places.get(digest, (0, 1))
        return (rank * self._sharers // count - self._own) % self._sharers, rank

    def may_take(self, digest: str, waited: float) -> bool:
        """Whether this node may fetch the chunk. ``waited``: how long nothing has spread, in units of patience."""
        return self.distance(digest)[0] < 2 ** int(min(waited, _MAX_DOUBLINGS))
