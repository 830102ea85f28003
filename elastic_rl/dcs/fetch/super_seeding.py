"""Whose turn it is to take a chunk that only one node has, usually the publisher's. Pure.

A fleet that starts at once would have that node send the same chunks again and again, while others of its chunks are
nowhere else yet. So the chunks are put on a circle, and the circle is shared out among the nodes that lack some: each
takes its own share first, and finds the rest at the others soon. A share that nobody comes for (its node is slow, or
does not want these chunks at all) is taken over: the longer nothing of what a node alone has is seen to spread, the
further along the circle others reach, twice as far each time.
"""

from __future__ import annotations

from collections.abc import Iterable

_MOST_DOUBLINGS = 64
"""By then everything is in reach, of however many nodes."""


class SuperSeeding:
    """The view that one node has of this."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._nodes = [own_id]
        self._complete: set[str] = set()
        self._places: dict[str, tuple[int, int]] = {}  # (rank, of how many)
        self._sharers, self._own = 1, 0

    def nodes(self, ids: Iterable[str]) -> None:
        """The nodes that there are, but this one."""
        self._nodes = sorted([*ids, self._own_id])
        self._divide()

    def complete(self, node_id: str, yes: bool) -> None:
        """Whether a node has everything that it was asked for: then it has no share."""
        if yes != (node_id in self._complete):
            self._complete ^= {node_id}
            self._divide()

    def _divide(self) -> None:
        sharers = [n for n in self._nodes if n not in self._complete]
        self._sharers, self._own = len(sharers), sharers.index(self._own_id)

    def line_up(self, digests: Iterable[str]) -> None:
        """Puts chunks on the circle, evenly and in order; nodes that lack the same ones put them to the same places.
        Which nodes have them all is not known yet."""
        ordered = list(digests)
        self._complete.clear()
        self._divide()
        self._places.update({digest: (i, len(ordered)) for i, digest in enumerate(ordered)})

    def forget(self, digest: str) -> None:
        self._places.pop(digest, None)

    def distance(self, digest: str) -> tuple[int, int]:
        """How many shares a chunk's lies behind this node's along the circle, and the chunk's rank."""
        rank, count = self._places.get(digest, (0, 1))
        return (rank * self._sharers // count - self._own) % self._sharers, rank

    def may_take(self, digest: str, waited: float) -> bool:
        """``waited``: for how many patiences nothing has spread."""
        return self.distance(digest)[0] < 2 ** int(min(waited, _MOST_DOUBLINGS))
