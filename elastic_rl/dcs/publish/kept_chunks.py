"""Chunks of a new version that the head of its stream has as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_rl.dcs.connection import NodeConnection, Progress
from elastic_rl.runtime.sequences import batches

_BATCH = 8
"""Chunks that a node is asked to fetch at once: it has room for these in its arena, and saves them to disk before the
next ones need it."""


@dataclass(frozen=True)
class KeptChunks:
    """What a stream that only grows does not publish again. A node keeps these chunks without a hold, and so may have
    them on its disk alone: it drops nothing that a live version refers to whose manifest it has, and the head is live
    until the new version is the head. So a publish takes no more of the arena than what is new."""

    manifest: str
    """Digest of the manifest of the stream's head."""
    chunks: Mapping[str, int]
    """Digest → bytes."""

    def bring(self, connection: NodeConnection, *, prefer: Sequence[str] = (), on_progress: Progress | None = None
              ) -> None:
        """Has a node fetch those that it lacks. Raises as ``NodeConnection.fetch``."""
        # The manifest goes first: without it the node would drop the others at the next sweep.
        lacking = connection.has([self.manifest, *self.chunks])
        for batch in batches(lacking, _BATCH):
            connection.fetch(batch, prefer=prefer, sizes={d: self.chunks[d] for d in batch if d in self.chunks},
                             on_progress=on_progress)
