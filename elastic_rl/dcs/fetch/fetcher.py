"""Making sure that a node has sound copies of chunks: its own, or else those of other nodes or of the durable store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from elastic_rl.config import DcsConfig
from elastic_rl.dcs.fetch.actions import Limits
from elastic_rl.dcs.fetch.swarm import Arrived, ColdStore, Peers, Swarm, Wanted
from elastic_rl.dcs.storage.chunk_table import ChunkTable
from elastic_rl.dcs.storage.tiers import Chunk
from elastic_rl.errors import ChunkMissing

log = logging.getLogger(__name__)

_ROUNDS = 3
"""How often a chunk may be lost again before the fetch is over."""

@dataclass(frozen=True)
class FetchSettings:
    """How a node gets chunks from others."""

    parallel: int = 8
    hedge_after_s: float = 1.0
    delta: bool = True

    @classmethod
    def of(cls, dcs: DcsConfig) -> Self:
        return cls(dcs.max_parallel_fetches, dcs.hedge_after_s, dcs.delta)


class Fetcher:
    """Gets missing chunks from peers. Two callers that miss the same chunk make one transfer of it."""

    def __init__(self, table: ChunkTable, hub: Peers, own_id: str, settings: FetchSettings = FetchSettings(),
                 durable: ColdStore | None = None) -> None:
        limits = Limits(parallel=settings.parallel, hedge_after_s=settings.hedge_after_s, durable=durable is not None)
        self._table = table
        self._swarm = Swarm(table, hub, own_id, limits, delta=settings.delta, durable=durable)

    def fetch(self, digests: Sequence[str], prefer: Sequence[str], holder: int | None,
              sizes: Mapping[str, int] | None = None, bases: Mapping[str, str] | None = None,
              arrived: Arrived = lambda chunk: None) -> list[Chunk]:
        """Sound local copies of the chunks, marked as used, and held for ``holder`` unless None.

        ``sizes``: bytes of the chunks, as far as they are known. Those that are missing then get their places in the
        arena at once, in order. ``bases``: chunks to get deltas against, for those that are here. ``arrived`` is told
        of every chunk, in this thread.

        Raises ChunkMissing, ChunkCorrupt (only rotten copies were found), ArenaFull and DiskFull.
        """
        sizes, bases = sizes or {}, bases or {}
        missing = list(dict.fromkeys(digests))
        here: dict[str, Chunk] = {}
        for _ in range(_ROUNDS):
            wanted = []
            for digest in missing:
                if (chunk := self._own(digest, holder)) is not None:
                    here[digest] = chunk
                    arrived(chunk)
                else:
                    wanted.append(Wanted(digest, sizes.get(digest, 0), bases.get(digest, "")))
            if not wanted:
                return [here[d] for d in digests]
            got = self._swarm.obtain(wanted, prefer, holder, arrived)
            here.update(got)
            missing = [w.digest for w in wanted if w.digest not in got]
            if not missing:
                return [here[d] for d in digests]
        raise ChunkMissing(f"chunk {missing[0]} is lost as soon as it is here")

    def _own(self, digest: str, holder: int | None) -> Chunk | None:
        # Marked as used before it is verified: from then on no sweep can take it.
        chunk = self._table.use(digest, holder)
        if chunk is None or self._table.sound(digest):
            return chunk
        log.error("chunk %s on this node is corrupt; looking for another copy", digest)
        return None

    def close(self) -> None:
        """Ends every transfer."""
        self._swarm.close()
