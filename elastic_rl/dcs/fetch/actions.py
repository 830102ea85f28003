"""What a ``schedule`` tells its executor to do, and within which bounds. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Limits:
    """Bounds of a schedule."""

    parallel: int = 8
    """Gets under way at once, and as many hedges."""
    hedge_after_s: float = 1.0
    """A get is hedged when it is older than this, and than ``hedge_factor`` times the median of the last ones."""
    hedge_factor: float = 3.0
    answers: int = 3
    """Gets of one chunk at once."""
    tries: int = 16
    """Gets of one chunk in all."""
    ask_every_s: float = 0.25
    look_every_s: float = 2.0
    ask_most: int = 4096
    """Chunks in one question."""
    neighbours: int = 16
    """Nodes that are asked regularly; others only for what none of these has."""
    backoff_s: float = 0.25
    backoff_most_s: float = 8.0
    failures: int = 3
    """In a row, after which a node is taken for dead until it answers a question again."""
    durable: bool = False
    """Whether there is a durable store to recall chunks from."""


class Failure(Enum):
    """Why a get came to nothing."""

    MISSING = "the node does not have the chunk (any more)"
    CORRUPT = "the bytes were not the chunk's"
    BROKEN = "the node did not answer, or not to the end"
    OWN = "this node's fault: no room, or the chunk was dropped at once"


@dataclass(frozen=True)
class Look:
    """List the nodes; answer with ``looked``."""


@dataclass(frozen=True)
class Ask:
    """Ask a node which of the chunks it has (maybe none: just its load); answer with ``heard`` or ``unheard``."""

    peer: str
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Get:
    """Get a chunk from a node; answer with ``got`` or ``failed``."""

    number: int
    digest: str
    peer: str


@dataclass(frozen=True)
class Recall:
    """Read a chunk from the durable store; answer with ``got`` or ``failed``."""

    number: int
    digest: str


@dataclass(frozen=True)
class Lost:
    """The chunk cannot be had; the schedule has forgotten it. ``corrupt``: rotten copies were seen."""

    digest: str
    corrupt: bool


Action = Look | Ask | Get | Recall | Lost
