"""What a node knows of one chunk."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(eq=False)
class Copy:
    """A chunk's bytes in the arena. The region is freed once the copy is dropped and has no users."""

    offset: int
    verified_at: float
    """When the last verification began, by the table's clock."""
    verification: int
    """Number of that verification."""
    users: int = 0
    """Threads of this node that read it, and processes that were given its offset."""
    dropped: bool = False


@dataclass(eq=False)
class Chunk:
    """A sealed chunk. Fields are guarded by the table's lock."""

    digest: str
    nbytes: int
    copy: Copy | None = None
    on_disk: bool = False
    """Whether there is a file that can stand in for the copy; it is verified when it is read."""
    stale_file: bool = False
    """Whether there is a file that is not relied upon: it is to be replaced, or removed with the chunk."""
    gone: bool = False
    """Whether the table has dropped it."""
    first_touch: int = 0
    """Number of its first use, with which it came to this node; 0: it was on disk at the start."""
    touched: int = 0
    """Number of its last use."""
    holders: set[int] = field(default_factory=set)
    """Connections that hold it."""
    keep_until: float = 0.0
    """End of the grace after a holder that closed without releasing its holds, by the table's clock."""
    busy: threading.Lock = field(default_factory=threading.Lock)
    """Held while its bytes are verified or read from disk, so that concurrent callers share one pass. Acquired before
    the table's lock, never under it."""

    @property
    def offset(self) -> int:
        """Offset of its copy in the arena, -1 without one."""
        return self.copy.offset if self.copy else -1
