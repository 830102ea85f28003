"""Which chunk to fetch next, and from which node. Pure: no I/O, and the time is passed in.

A node has one scheduler for all chunks that it lacks. Its executor takes actions from ``next``, carries them out, and
reports the outcome:

- *ListNodes*: list the registered nodes. *QueryHave*: which of some chunks does a node have, and how busy is it? Nodes
  that are still filling are queried again and again, since they serve what they have; so a fleet of N fills in about
  log N rounds.
- *GetChunk*: transfer a chunk from a node. The rarest chunk comes first, so that what only one node has spreads early,
  divided among the nodes (``super_seeding``); it comes from the least loaded of the nodes that have it.
- *ReadDurable*: read a chunk that no node has from the durable store. If that fails too, the chunk is *ChunkLost*.

A slow transfer is *hedged*: a second node is requested too, and the first sound answer wins. A node that failed is
avoided for a while, longer each time. Every chunk has a budget of tries, so each ends received or lost.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from elastic_rl.dcs.fetch.model import (
    NEVER,
    Abandon,
    Action,
    ChunkLost,
    ChunkState,
    Failure,
    FetchLimits,
    GetChunk,
    ListNodes,
    PeerState,
    QueryHave,
    ReadDurable,
    Transfer,
)
from elastic_rl.dcs.fetch.super_seeding import SuperSeeding
from elastic_rl.runtime.backoff import backoff_s

_SAMPLES = 32
"""Finished transfers that the median is taken of."""
_BUSY_PATIENCE = 4
"""Queries after which a share that is not fetched is taken over while the node that has it is busy with others: what
they fetch may have to be seen first. One query if it is idle."""


class FetchScheduler:
    """See the module. Not thread-safe; ``now`` never goes back."""

    def __init__(self, limits: FetchLimits, own_id: str) -> None:
        self.limits = limits
        self._random = random.Random(own_id)
        self._seeding = SuperSeeding(own_id)
        self._requests: dict[str, ChunkState] = {}
        self._unlocated: dict[str, None] = {}  # chunks that may be lost: no known source, or tried before
        self._recheck = False
        """Whether something happened that may have decided on one of them."""
        self._peers: dict[str, PeerState] = {}
        self._active: dict[str, PeerState] = {}  # of these the ones that were ever to be queried; the rest are idle
        self._preferred: set[str] = set()
        self._bits: dict[str, int] = {}  # of every node seen since there were no requests
        self._by_bit: dict[int, PeerState] = {}
        self._transfers: dict[int, Transfer] = {}
        self._numbers = itertools.count(1)
        self._durations: deque[float] = deque(maxlen=_SAMPLES)
        self._median_s = 0.0
        self._listings_begun = self._listings_done = 0
        self._listed_at = NEVER

    # -- requests ----------------------------------------------------------------------------------------------------
    def request(self, digests: Iterable[str], prefer: Sequence[str] = ()) -> None:
        """Adds chunks to be fetched. ``prefer``: nodes that are likely to have them."""
        added = [d for d in digests if d not in self._requests]
        self._seeding.add(added)
        for digest in added:
            self._requests[digest] = ChunkState(digest, self._listings_begun + 1)
            self._unlocated[digest] = None
        for peer in list(self._active.values()):
            if peer.neighbour:
                self._enqueue(peer, added)
        self._preferred.update(prefer)
        self._choose_neighbours()
        self._recheck = True

    def cancel(self, digest: str) -> list[int]:
        """Forgets a chunk; returns the numbers of its transfers, which are to be cancelled."""
        chunk = self._remove(digest)
        if chunk is None:
            return []
        transfers = sorted(chunk.transfers)
        for number in transfers:
            self._end(number)
        self._tidy()
        return transfers

    def _remove(self, digest: str) -> ChunkState | None:
        self._seeding.remove(digest)
        return self._requests.pop(digest, None)

    def _tidy(self) -> None:
        """Forgets what only matters while there are requests."""
        if self._requests:
            return
        self._unlocated.clear()
        self._preferred.clear()
        for peer in self._active.values():
            peer.queue.clear()
            peer.heap.clear()
            peer.unqueried = 0
            peer.contested = False
        self._active = {p.id: p for p in self._active.values() if p.neighbour}
        self._bits = {p.id: p.bit for p in self._peers.values()}

    def _enqueue(self, peer: PeerState, digests: Sequence[str]) -> None:
        self._active[peer.id] = peer
        peer.queue.extendleft(reversed(digests))
        peer.unqueried += len(digests)

    # -- actions -----------------------------------------------------------------------------------------------------
    def next(self, now: float) -> Action | None:
        """The next action that is due; None when there is none now."""
        if not self._requests:
            return None
        return (self._expire(now) or self._decide_unlocated(now) or self._list_nodes(now) or self._query(now)
                or self._hedge(now) or self._get(now))

    def wake_at(self, now: float) -> float:
        """When ``next`` may have an action although nothing was reported meanwhile."""
        if not self._requests:
            return float("inf")
        patience, query_every_s = self._patience(), self._query_every_s()
        times = [now + query_every_s, self._listed_at + self.limits.list_every_s]
        times += [p.not_before for p in self._active.values()]
        times += [p.queried_at + query_every_s for p in self._active.values() if p.neighbour]
        times += [t.start + (patience if t.peer else self.limits.durable_timeout_s) for t in self._transfers.values()]
        return min(t for t in times if t > now)

    def _list_nodes(self, now: float) -> ListNodes | None:
        if self._listings_begun > self._listings_done:
            return None
        newest = next(reversed(self._requests.values()))
        if newest.listing <= self._listings_done and now < self._listed_at + self.limits.list_every_s:
            return None
        self._listings_begun += 1
        return ListNodes()

    def on_nodes(self, nodes: Mapping[str, str] | None, now: float) -> None:
        """The registered nodes but this one: id → something that differs after a restart. None: they could not be
        listed, and those known stay."""
        self._listings_done, self._listed_at, self._recheck = self._listings_begun, now, True
        if nodes is None:
            return
        for peer in list(self._peers.values()):
            if nodes.get(peer.id) != peer.incarnation:
                self._forget_peer(peer)
        self._seeding.set_nodes(nodes)
        new = [node_id for node_id in sorted(nodes) if node_id not in self._peers]
        self._random.shuffle(new)
        for node_id in new:
            bit = self._bits.setdefault(node_id, self._unused_bit())
            self._peers[node_id] = self._by_bit[bit] = PeerState(node_id, bit, nodes[node_id])
        self._choose_neighbours()

    def _unused_bit(self) -> int:
        used = sum(self._bits.values())
        return ~used & (used + 1)

    def _forget_peer(self, peer: PeerState) -> None:
        """The node is gone, or another process: what is known of it is void. Its transfers end by themselves."""
        del self._peers[peer.id]
        self._active.pop(peer.id, None)
        for chunk in self._requests.values():
            chunk.queried &= ~peer.bit
            if chunk.sources & peer.bit:
                chunk.sources &= ~peer.bit
                self._unlocate(chunk)
        del self._by_bit[peer.bit]
        self._seeding.set_complete(peer.id, False)

    def _choose_neighbours(self) -> None:
        room = self.limits.neighbours - sum(p.neighbour for p in self._peers.values())
        for peer in sorted(self._peers.values(), key=lambda p: p.id not in self._preferred):
            if peer.neighbour or room <= 0 and peer.id not in self._preferred:
                continue
            room -= 1
            peer.neighbour = True
            peer.queue.clear()  # from now on it is queried again and again, also for what it lacked before
            peer.unqueried = 0
            self._enqueue(peer, [c.digest for c in self._requests.values() if not c.sources & peer.bit])

    # -- queries -----------------------------------------------------------------------------------------------------
    def _query(self, now: float) -> QueryHave | None:
        if sum(p.query_since is not None for p in self._active.values()) >= 2 * self.limits.neighbours:
            return None
        query_every_s = self._query_every_s()
        for peer in self._active.values():
            if peer.query_since is not None or now < peer.not_before:
                continue
            if peer.unqueried or peer.neighbour and peer.queried_at + query_every_s <= now:
                peer.query_since = peer.queried_at = now
                return QueryHave(peer.id, tuple(self._next_digests(peer)))
        return None

    def _query_every_s(self) -> float:
        """Less often where transfers take long: then less changes."""
        return max(self.limits.query_every_s, self._median_s / 2)

    def _next_digests(self, peer: PeerState) -> Iterator[str]:
        room = self.limits.query_digests
        for _ in range(len(peer.queue)):
            if not room:
                return
            digest = peer.queue.popleft()
            peer.unqueried = max(peer.unqueried - 1, 0)
            chunk = self._requests.get(digest)
            if chunk is not None and not (chunk.sources | chunk.banned) & peer.bit:
                room -= 1
                yield digest

    def on_have(self, query: QueryHave, missing: Iterable[str], load: int, now: float) -> None:
        """A node answered. ``load``: sends to other nodes that are in progress or waiting there."""
        peer = self._peers.get(query.peer)
        if peer is None:
            return
        lacking = set(missing)
        peer.query_since = None
        peer.failures = min(peer.failures, self.limits.failures - 1)  # not dead, but only a chunk clears the rest
        peer.others = load
        if load and not peer.contested:
            peer.contested, peer.spread_at = True, now
        if query.digests:
            self._seeding.set_complete(peer.id, not lacking)
        for digest in query.digests:
            if (chunk := self._requests.get(digest)) is None:
                continue
            chunk.queried |= peer.bit
            if digest not in lacking:
                self._found(chunk, peer, now)
            elif peer.neighbour:
                peer.queue.append(digest)
        self._recheck = True

    def _found(self, chunk: ChunkState, peer: PeerState, now: float) -> None:
        if chunk.banned & peer.bit:
            return
        if not chunk.sources:
            chunk.tie = self._seeding.distance(chunk.digest)
        elif (only := self._by_bit.get(chunk.sources)) is not None:
            only.spread_at = now
        chunk.sources |= peer.bit
        heapq.heappush(peer.heap, (chunk.sources.bit_count(), chunk.tie, chunk.digest))

    def on_query_failed(self, query: QueryHave, now: float) -> None:
        """The node did not answer."""
        peer = self._peers.get(query.peer)
        if peer is not None:
            peer.query_since = None
            self._enqueue(peer, query.digests)
            self._blame(peer, now)

    # -- transfers ---------------------------------------------------------------------------------------------------
    def _get(self, now: float) -> GetChunk | None:
        if sum(not t.hedge for t in self._transfers.values()) >= self.limits.parallel:
            return None
        tops = [(top, peer) for peer in self._active.values() if self._is_free(peer, now) and (top := self._top(peer))]
        rarest = min((top for top, peer in tops if top[0] > 1 or self._may_take(top[2], peer, now)), default=None)
        return None if rarest is None else self._start(self._requests[rarest[2]], now, hedge=False)

    def _may_take(self, digest: str, peer: PeerState, now: float) -> bool:
        """Whether this node may fetch a chunk from the only node that has it: always if no others were seen to fetch
        from that one, otherwise by its share."""
        if not peer.contested:
            return True
        patience = self._query_every_s()
        if peer.others:
            patience = max(_BUSY_PATIENCE * patience, 2 * peer.took_s)
        return self._seeding.may_take(digest, (now - peer.spread_at) / patience)

    def _start(self, chunk: ChunkState, now: float, *, hedge: bool) -> GetChunk | None:
        """Begins a transfer from the least loaded node that has the chunk and does not send it yet."""
        taken = {self._transfers[n].peer for n in chunk.transfers}
        able = [p for p in self._active.values()
                if chunk.sources & p.bit and p.id not in taken and self._is_free(p, now)]
        if not able:
            return None
        peer = min(able, key=lambda p: (p.others + p.transfers, self._random.random()))
        number = next(self._numbers)
        self._transfers[number] = Transfer(chunk.digest, peer.id, now, hedge)
        chunk.transfers.add(number)
        chunk.tries += 1
        peer.transfers += 1
        return GetChunk(number, chunk.digest, peer.id)

    def _is_free(self, peer: PeerState, now: float) -> bool:
        """Whether one more transfer from the node may begin now."""
        if now < peer.not_before or peer.failures >= self.limits.failures:
            return False
        if peer.query_since is not None and now - peer.query_since > self.limits.hedge_after_s:
            return False  # it does not even answer a query
        return peer.transfers < min(peer.window, max(1, self.limits.parallel - peer.others))

    def _top(self, peer: PeerState) -> tuple[int, tuple[int, int], str] | None:
        """The rarest chunk that the node has and that is not in transfer."""
        while peer.heap:
            rarity, tie, digest = peer.heap[0]
            chunk = self._requests.get(digest)
            if chunk is None or chunk.transfers or not chunk.sources & peer.bit:
                heapq.heappop(peer.heap)
            elif chunk.sources.bit_count() != rarity:
                heapq.heapreplace(peer.heap, (chunk.sources.bit_count(), tie, digest))
            else:
                return rarity, tie, digest
        return None

    def _hedge(self, now: float) -> GetChunk | None:
        if sum(t.hedge for t in self._transfers.values()) >= self.limits.parallel:
            return None
        patience = self._patience()
        for transfer in list(self._transfers.values()):
            chunk = self._requests[transfer.digest]
            newest = max(self._transfers[n].start for n in chunk.transfers)
            if (transfer.peer and now - newest >= patience and len(chunk.transfers) < self.limits.transfers_per_chunk
                    and chunk.tries < self.limits.tries and (get := self._start(chunk, now, hedge=True))):
                return get
        return None

    def _patience(self) -> float:
        """Seconds until a transfer is hedged."""
        return max(self.limits.hedge_after_s, self.limits.hedge_factor * self._median_s)

    def on_received(self, number: int, now: float) -> list[int]:
        """The chunk is here; returns the numbers of its other transfers, which are to be cancelled."""
        transfer = self._end(number)
        if transfer is None:
            return []
        chunk = self._requests[transfer.digest]
        self._remove(transfer.digest)
        self._recheck = True
        peer = self._peers.get(transfer.peer)
        if peer is not None:
            peer.took_s = now - transfer.start
            self._durations.append(peer.took_s)
            self._median_s = median(self._durations)
            peer.spread_at = min(peer.spread_at + peer.took_s, now)  # until then it was this node's own transfer
            peer.failures = peer.slow = 0
            peer.window = min(peer.window + 1, self.limits.parallel)
        losers = sorted(chunk.transfers)
        self._tidy()
        for loser in losers:
            lost = self._end(loser)
            slow = self._peers.get(lost.peer) if lost else None
            if lost and slow is not None and lost.start < transfer.start:
                # Not a failure: it may be the only one that has another chunk. But others are preferred.
                slow.slow += 1
                slow.window = 1
                self._back_off(slow, slow.slow, now)
        return losers

    def on_failed(self, number: int, why: Failure, now: float) -> None:
        """A transfer failed; another one is tried."""
        transfer = self._end(number)
        if transfer is None:
            return
        chunk, peer = self._requests[transfer.digest], self._peers.get(transfer.peer)
        if not transfer.peer:
            chunk.durable_tried = self._recheck = True
            chunk.durable_corrupt = why is Failure.CORRUPT
            self._unlocated[chunk.digest] = None
            return
        if peer is not None:
            if why is Failure.CORRUPT:
                chunk.banned |= peer.bit
            if why is Failure.MISSING and peer.neighbour:
                peer.queue.append(chunk.digest)
            if why in (Failure.CORRUPT, Failure.MISSING):
                chunk.sources &= ~peer.bit
            if why in (Failure.CORRUPT, Failure.BROKEN):
                self._blame(peer, now)
        self._requeue(chunk)

    def _requeue(self, chunk: ChunkState) -> None:
        """Queues a chunk that is not in transfer any more."""
        if chunk.transfers:
            return
        self._unlocate(chunk)
        for peer in self._active.values():
            if chunk.sources & peer.bit:
                heapq.heappush(peer.heap, (chunk.sources.bit_count(), chunk.tie, chunk.digest))

    def _end(self, number: int) -> Transfer | None:
        transfer = self._transfers.pop(number, None)
        if transfer is not None:
            if (chunk := self._requests.get(transfer.digest)) is not None:
                chunk.transfers.discard(number)
            if (peer := self._peers.get(transfer.peer)) is not None:
                peer.transfers = max(peer.transfers - 1, 0)
        return transfer

    def _expire(self, now: float) -> Abandon | None:
        """Gives up a read of the durable store that hangs; transfers between nodes end by their socket's timeout."""
        for number, transfer in self._transfers.items():
            if not transfer.peer and now - transfer.start >= self.limits.durable_timeout_s:
                self.on_failed(number, Failure.BROKEN, now)
                return Abandon(number)
        return None

    # -- failing nodes and lost chunks -------------------------------------------------------------------------------
    def _blame(self, peer: PeerState, now: float) -> None:
        peer.failures += 1
        peer.window = 1
        self._back_off(peer, peer.failures, now)
        if peer.failures == self.limits.failures:
            for chunk in self._requests.values():
                if chunk.sources & peer.bit:
                    self._unlocate(chunk)
        self._recheck = True

    def _unlocate(self, chunk: ChunkState) -> None:
        """The chunk was not where it was thought to be. What other nodes answered is outdated: they are queried again,
        since one may have fetched it before that one failed."""
        chunk.queried = 0
        self._unlocated[chunk.digest] = None
        self._recheck = True

    def _back_off(self, peer: PeerState, times: int, now: float) -> None:
        pause_s = backoff_s(times + 1, self.limits.backoff_s, self.limits.backoff_max_s, self._random)
        peer.not_before = max(peer.not_before, now + pause_s)

    def _decide_unlocated(self, now: float) -> ReadDurable | ChunkLost | None:
        """Decides on a chunk that no living node has, or that was tried too often."""
        if not self._recheck or not self._unlocated:
            return None
        alive = [p for p in self._peers.values() if p.failures < self.limits.failures]
        mask = sum(p.bit for p in alive)
        cleared = []
        try:
            for digest in self._unlocated:
                chunk = self._requests.get(digest)
                spent = chunk is not None and chunk.tries >= self.limits.tries
                if chunk is None or chunk.transfers or chunk.sources & mask and not spent:
                    cleared.append(digest)
                elif spent or not self._may_be_found(chunk, alive):
                    if action := self._fall_back(chunk, now):
                        return action
                    break  # too many transfers for now
        finally:
            for digest in cleared:
                self._unlocated.pop(digest, None)
        self._recheck = False
        return None

    def _may_be_found(self, chunk: ChunkState, alive: Sequence[PeerState]) -> bool:
        """Whether there are nodes that did not answer about the chunk yet; has those queried that usually are not."""
        if chunk.listing > self._listings_done:
            return True
        unqueried = [p for p in alive if not (chunk.queried | chunk.banned) & p.bit]
        for peer in () if any(p.neighbour for p in unqueried) else unqueried:
            if not peer.unqueried and peer.query_since is None:
                self._enqueue(peer, [d for d in self._unlocated if d in self._requests])
        return bool(unqueried)

    def _fall_back(self, chunk: ChunkState, now: float) -> ReadDurable | ChunkLost | None:
        if not self.limits.durable or chunk.durable_tried:
            corrupt = bool(chunk.banned) or chunk.durable_corrupt
            self.cancel(chunk.digest)
            return ChunkLost(chunk.digest, corrupt)
        if sum(not t.hedge for t in self._transfers.values()) >= self.limits.parallel:
            return None
        number = next(self._numbers)
        self._transfers[number] = Transfer(chunk.digest, "", now, False)
        chunk.transfers.add(number)
        return ReadDurable(number, chunk.digest)
