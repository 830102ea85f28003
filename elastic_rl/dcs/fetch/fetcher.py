"""Makes sure that a node has sound copies of chunks: its own, or else those of other nodes or of the durable store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from elastic_rl.config import DcsConfig
from elastic_rl.dcs.fetch.executor import FetchExecutor, OnChunk, Tick
from elastic_rl.dcs.fetch.model import ChunkRequest, FetchLimits
from elastic_rl.dcs.fetch.transfers import DurableChunks, PeerSource
from elastic_rl.dcs.storage.chunk import Chunk
from elastic_rl.dcs.storage.chunk_table import ChunkTable
from elastic_rl.errors import ChunkMissing

log = logging.getLogger(__name__)

_ROUNDS = 3
"""How often a chunk may be dropped as soon as it is here before the fetch fails."""


@dataclass(frozen=True)
class FetchSettings:
    """How a node fetches chunks from others."""

    parallel: int = 8
    hedge_after_s: float = 1.0
    delta: bool = True

    @classmethod
    def from_config(cls, dcs: DcsConfig) -> Self:
        return cls(dcs.max_parallel_fetches, dcs.hedge_after_s, dcs.delta)


class Fetcher:
    """Fetches missing chunks. Two callers that miss the same chunk make one transfer of it. Thread-safe."""

    def __init__(self, table: ChunkTable, peers: PeerSource, own_id: str, settings: FetchSettings = FetchSettings(),
                 durable: DurableChunks | None = None) -> None:
        limits = FetchLimits(parallel=settings.parallel, hedge_after_s=settings.hedge_after_s,
                             durable=durable is not None)
        self._table = table
        self._executor = FetchExecutor(table, peers, own_id, limits, delta=settings.delta, durable=durable)

    def fetch(self, digests: Sequence[str], prefer: Sequence[str], holder: int | None,
              sizes: Mapping[str, int] | None = None, bases: Mapping[str, str] | None = None, *, stream: str = "",
              on_chunk: OnChunk = lambda chunk: None, tick: Tick = lambda: None) -> list[Chunk]:
        """Sound local copies of the chunks, marked as used, and held for ``holder`` unless None.

        ``sizes``: bytes of the chunks, as far as they are known; missing ones then get their regions in the arena at
        once, in order. ``bases``: chunks to get deltas against, for those that are here; ``stream``: by which this
        node learns whether deltas pay. ``on_chunk`` is called with every chunk, ``tick`` at least every second while
        that goes on, both in this thread.

        Raises ChunkMissing, ChunkCorrupt (only corrupt copies were found), ArenaFull, DiskFull, EtcdUnavailable (no
        node is known), and what ``tick`` raises.
        """
        sizes, bases = sizes or {}, bases or {}
        missing = list(dict.fromkeys(digests))
        here: dict[str, Chunk] = {}
        for _ in range(_ROUNDS):
            requests = []
            for digest in missing:
                tick()
                if (chunk := self._local(digest, holder)) is not None:
                    here[digest] = chunk
                    on_chunk(chunk)
                else:
                    requests.append(ChunkRequest(digest, sizes.get(digest, 0), bases.get(digest, ""), stream))
            if not requests:
                return [here[d] for d in digests]
            received = self._executor.fetch(requests, prefer, holder, on_chunk, tick)
            here.update(received)
            missing = [r.digest for r in requests if r.digest not in received]
            if not missing:
                return [here[d] for d in digests]
        raise ChunkMissing(f"chunk {missing[0]} is dropped as soon as it is here")

    def _local(self, digest: str, holder: int | None) -> Chunk | None:
        # Marked as used before it is verified: from then on no garbage collection can drop it.
        chunk = self._table.use(digest, holder)
        if chunk is None or self._table.verify(digest):
            return chunk
        log.error("chunk %s on this node is corrupt, looking for another copy", digest)
        return None

    def close(self) -> None:
        """Ends every transfer."""
        self._executor.close()
