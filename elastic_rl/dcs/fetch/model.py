"""What a ``FetchScheduler`` is configured with, what it decides, and what it knows of chunks and nodes. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

NEVER = float("-inf")
"""A time before all others."""


@dataclass(frozen=True)
class FetchLimits:
    """Bounds of a scheduler."""

    parallel: int = 8
    """Transfers in progress at once, not counting hedges, of which there may be as many."""
    hedge_after_s: float = 1.0
    """A transfer is hedged when it is older than this, and than ``hedge_factor`` times the median of the last ones."""
    hedge_factor: float = 3.0
    transfers_per_chunk: int = 3
    """Transfers of one chunk at once."""
    tries: int = 16
    """Transfers of one chunk in all."""
    query_every_s: float = 0.25
    list_every_s: float = 2.0
    query_digests: int = 4096
    """Chunks in one query."""
    neighbours: int = 16
    """Nodes that are queried regularly; others only for what none of these has."""
    backoff_s: float = 0.25
    backoff_max_s: float = 8.0
    failures: int = 3
    """Number of failures in a row after which a node counts as dead until it answers a query again."""
    durable: bool = False
    """Whether there is a durable store to read chunks from."""
    durable_timeout_s: float = 120.0
    """A read of a chunk from the durable store that takes longer has failed."""


@dataclass(frozen=True)
class ChunkRequest:
    """A chunk to be fetched."""

    digest: str
    nbytes: int = 0
    """0: unknown."""
    base: str = ""
    """A chunk to get a delta against, if it is here."""
    stream: str = ""
    """The stream, for which deltas pay or not."""


class Failure(Enum):
    """Why a transfer failed."""

    MISSING = "the node does not have the chunk (any more)"
    CORRUPT = "the bytes were not the chunk's"
    BROKEN = "the node did not answer, or not to the end"
    LOCAL = "this node's fault: no room, or the chunk was dropped at once"


# -- actions -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ListNodes:
    """List the registered nodes; report with ``on_nodes``."""


@dataclass(frozen=True)
class QueryHave:
    """Query which of the chunks a node has (possibly none: just its load); report with ``on_have`` or
    ``on_query_failed``."""

    peer: str
    digests: tuple[str, ...]


@dataclass(frozen=True)
class GetChunk:
    """Transfer a chunk from a node; report with ``on_received`` or ``on_failed``."""

    number: int
    digest: str
    peer: str


@dataclass(frozen=True)
class ReadDurable:
    """Read a chunk from the durable store; report with ``on_received`` or ``on_failed``."""

    number: int
    digest: str


@dataclass(frozen=True)
class Abandon:
    """A transfer took too long: the scheduler has given it up, and its result is to be discarded."""

    number: int


@dataclass(frozen=True)
class ChunkLost:
    """The chunk cannot be had; the scheduler has forgotten it. ``corrupt``: corrupt copies were seen."""

    digest: str
    corrupt: bool


Action = ListNodes | QueryHave | GetChunk | ReadDurable | Abandon | ChunkLost


# -- state -------------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class ChunkState:
    """A requested chunk."""

    digest: str
    listing: int
    """Number of the first listing that began after the request: the chunk is not lost before its result."""
    tie: tuple[int, int] = (0, 0)
    """The chunk's order among equally rare ones."""
    sources: int = 0
    """Bits of the nodes that have it."""
    queried: int = 0
    """Bits of the nodes that answered whether they have it."""
    banned: int = 0
    """Bits of the nodes that sent wrong bytes for it."""
    transfers: set[int] = field(default_factory=set)
    tries: int = 0
    durable_tried: bool = False
    durable_corrupt: bool = False


@dataclass(eq=False)
class PeerState:
    """Another node."""

    id: str
    bit: int
    incarnation: str
    neighbour: bool = False
    window: int = 1
    """Transfers at once from it; grows with each success, while its load becomes known."""
    others: int = 0
    """Sends to other nodes that it last reported."""
    contested: bool = False
    """Whether other nodes were seen to fetch from it since chunks were last requested."""
    spread_at: float = NEVER
    """When a chunk that it alone had was last seen elsewhere, or since when it is contested."""
    took_s: float = 0.0
    """Duration of the last transfer from it."""
    transfers: int = 0
    query_since: float | None = None
    queried_at: float = NEVER
    unqueried: int = 0
    """How many at the left of ``queue`` it was never queried about."""
    queue: deque[str] = field(default_factory=deque)
    """Chunks to query it about."""
    failures: int = 0
    slow: int = 0
    """Races in a row that it lost."""
    not_before: float = NEVER
    heap: list[tuple[int, tuple[int, int], str]] = field(default_factory=list)
    """(rarity, tie, digest) of chunks that it has and that are not in transfer; outdated entries are removed when they
    come to the top."""


@dataclass(frozen=True)
class Transfer:
    """A transfer in progress."""

    digest: str
    peer: str
    """Empty for the durable store."""
    start: float
    hedge: bool
