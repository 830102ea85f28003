"""What a ``schedule`` knows of the chunks it wants, of the nodes, and of what is under way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

NEVER = float("-inf")
"""A time before all others."""


@dataclass(eq=False)
class Want:
    digest: str
    look: int
    """Number of the first look that began after it was wanted: without its result nothing is given up."""
    tie: tuple[int, int] = (0, 0)
    """Its place among equally rare ones."""
    sources: int = 0
    """Bits of the nodes that have it."""
    asked: int = 0
    """Bits of the nodes that answered whether they do."""
    banned: int = 0
    """Bits of the nodes that sent wrong bytes for it."""
    flights: set[int] = field(default_factory=set)
    tries: int = 0
    recalled: bool = False
    rotten: bool = False
    """Whether the durable store's copy was wrong."""


@dataclass(eq=False)
class Peer:
    id: str
    bit: int
    incarnation: str
    neighbour: bool = False
    window: int = 1
    """Gets at once from it; grows with each that succeeds, as the load it tells of comes to be known."""
    others: int = 0
    """Sends to other nodes under way there, by its last word."""
    contested: bool = False
    """Whether others were seen to draw on it since chunks were last wanted."""
    spread_at: float = NEVER
    """When a chunk that it alone had was last seen elsewhere, too, or since when it is contested."""
    took_s: float = 0.0
    """The last get from it."""
    flights: int = 0
    asking_since: float | None = None
    asked_at: float = NEVER
    fresh: int = 0
    """How many at the left of ``queue`` it was never asked about."""
    queue: deque[str] = field(default_factory=deque)
    """Chunks to ask it about."""
    failures: int = 0
    slow: int = 0
    """Races in a row that it lost."""
    not_before: float = NEVER
    heap: list[tuple[int, tuple[int, int], str]] = field(default_factory=list)
    """(rarity, tie, digest) of chunks that it has and that are not under way; what is outdated is sorted out when it
    comes to the top."""


@dataclass(frozen=True)
class Flight:
    digest: str
    peer: str
    """Empty for a recall."""
    start: float
    hedge: bool
