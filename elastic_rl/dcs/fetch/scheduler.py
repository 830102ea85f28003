"""Which chunk to get next, and from which node. Pure: no I/O, and the clock is passed in.

A node has one schedule for all chunks that it lacks. Whoever runs it asks ``next`` what to do, does it, and tells how
it went:

- *Look*: list the registered nodes. *Ask*: which of some chunks has a node, and how busy is it? Nodes that are still
  filling are asked again and again, since they serve what they have; so a fleet of N fills in about log N rounds.
- *Get* a chunk from a node: the rarest chunk first, so that what only one node has spreads early, each node taking its
  turn with those (``turns.py``); from the least loaded of the nodes that have it.
- *Recall* a chunk that no node has from the durable store; it is *Lost* when that has it not either.

A get that takes long is *hedged*: another node is asked too, and the first sound answer wins. A node that failed is
left alone for a while, longer each time. Every chunk has a budget of tries, so each ends got or lost.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from elastic_rl.dcs.fetch.actions import Action, Ask, Failure, Get, Limits, Look, Lost, Recall
from elastic_rl.dcs.fetch.state import NEVER, Flight, Peer, Want
from elastic_rl.dcs.fetch.super_seeding import SuperSeeding

_SAMPLES = 32
"""Finished transfers that the median is taken of."""
_BUSY_PATIENCE = 4
"""Questions after which a share that nobody came for is taken over while the node that has it is busy with others: what
they take may have to be seen first. One question where it is idle."""


class FetchScheduler:
    """See the module. Not thread-safe; ``now`` never goes back."""

    def __init__(self, limits: Limits, own_id: str) -> None:
        self.limits = limits
        self._random = random.Random(own_id)
        self._turns = SuperSeeding(own_id)
        self._wants: dict[str, Want] = {}
        self._suspects: dict[str, None] = {}  # wants that may be hopeless: no known source, or tried before
        self._recheck = False
        """Whether something happened that may have made a suspect hopeless."""
        self._peers: dict[str, Peer] = {}
        self._preferred: set[str] = set()
        self._bits: dict[str, int] = {}  # of every node ever seen
        self._by_bit: dict[int, Peer] = {}
        self._flights: dict[int, Flight] = {}
        self._numbers = itertools.count(1)
        self._durations: deque[float] = deque(maxlen=_SAMPLES)
        self._usual_s = 0.0  # their median
        self._looks_begun = self._looks_done = 0
        self._looked_at = NEVER

    # -- what is wanted ----------------------------------------------------------------------------------------------
    def want(self, digests: Iterable[str], prefer: Sequence[str] = ()) -> None:
        """Adds chunks; ``prefer``: nodes that are likely to have them."""
        added = [d for d in digests if d not in self._wants]
        self._turns.line_up(added)
        for digest in added:
            self._wants[digest] = Want(digest, self._looks_begun + 1)
            self._suspects[digest] = None
        for peer in self._peers.values():
            if peer.neighbour:
                self._enqueue(peer, added)
        self._preferred.update(prefer)
        self._choose_neighbours()
        self._recheck = True

    def drop(self, digest: str) -> list[int]:
        """Forgets a chunk: numbers of its gets, which are to be cancelled."""
        want = self._remove(digest)
        if want is None:
            return []
        flights = sorted(want.flights)
        for number in flights:
            self._land(number)
        self._tidy()
        return flights

    def _remove(self, digest: str) -> Want | None:
        self._turns.forget(digest)
        return self._wants.pop(digest, None)

    def _tidy(self) -> None:
        if not self._wants:
            self._suspects.clear()
            self._preferred.clear()
            for peer in self._peers.values():
                peer.queue.clear()
                peer.heap.clear()
                peer.fresh = 0
                peer.contested = False

    @staticmethod
    def _enqueue(peer: Peer, digests: Sequence[str]) -> None:
        peer.queue.extendleft(reversed(digests))
        peer.fresh += len(digests)

    # -- what to do --------------------------------------------------------------------------------------------------
    def next(self, now: float) -> Action | None:
        """Something to do now."""
        if not self._wants:
            return None
        return (self._give_up(now) or self._look(now) or self._ask(now) or self._hedge(now) or self._get(now))

    def wake_at(self, now: float) -> float:
        """When ``next`` may have something without anything having been told meanwhile."""
        if not self._wants:
            return float("inf")
        patience, ask_every_s = self._patience(), self._ask_every_s()
        times = [now + ask_every_s, self._looked_at + self.limits.look_every_s]
        times += [p.not_before for p in self._peers.values()]
        times += [p.asked_at + ask_every_s for p in self._peers.values() if p.neighbour]
        times += [f.start + patience for f in self._flights.values()]
        return min(t for t in times if t > now)

    def _look(self, now: float) -> Look | None:
        if self._looks_begun > self._looks_done:
            return None
        newest = next(reversed(self._wants.values()))
        if newest.look <= self._looks_done and now < self._looked_at + self.limits.look_every_s:
            return None
        self._looks_begun += 1
        return Look()

    def looked(self, nodes: Mapping[str, str] | None, now: float) -> None:
        """The registered nodes but this one: id → something that differs after a restart. None: nobody could say;
        those known stay."""
        self._looks_done, self._looked_at, self._recheck = self._looks_begun, now, True
        if nodes is None:
            return
        for peer in list(self._peers.values()):
            if nodes.get(peer.id) != peer.incarnation:
                self._forget_peer(peer)
        self._turns.nodes(nodes)
        new = [node_id for node_id in sorted(nodes) if node_id not in self._peers]
        self._random.shuffle(new)
        for node_id in new:
            bit = self._bits.setdefault(node_id, 1 << len(self._bits))
            self._peers[node_id] = self._by_bit[bit] = Peer(node_id, bit, nodes[node_id])
        self._choose_neighbours()

    def _forget_peer(self, peer: Peer) -> None:
        """The node is gone, or another process: what is known of it counts no more. Its gets end by themselves."""
        del self._peers[peer.id]
        for want in self._wants.values():
            want.asked &= ~peer.bit
            if want.sources & peer.bit:
                want.sources &= ~peer.bit
                self._suspect(want)
        del self._by_bit[peer.bit]
        self._turns.complete(peer.id, False)

    def _choose_neighbours(self) -> None:
        room = self.limits.neighbours - sum(p.neighbour for p in self._peers.values())
        for peer in sorted(self._peers.values(), key=lambda p: p.id not in self._preferred):
            if peer.neighbour or room <= 0 and peer.id not in self._preferred:
                continue
            room -= 1
            peer.neighbour = True
            peer.queue.clear()  # from now on it is asked again and again, also for what it lacked before
            peer.fresh = 0
            self._enqueue(peer, [w.digest for w in self._wants.values() if not w.sources & peer.bit])

    # -- asking ------------------------------------------------------------------------------------------------------
    def _ask(self, now: float) -> Ask | None:
        if sum(p.asking_since is not None for p in self._peers.values()) >= 2 * self.limits.neighbours:
            return None
        ask_every_s = self._ask_every_s()
        for peer in self._peers.values():
            if peer.asking_since is not None or now < peer.not_before:
                continue
            if peer.fresh or peer.neighbour and peer.asked_at + ask_every_s <= now:
                peer.asking_since = peer.asked_at = now
                return Ask(peer.id, tuple(self._question(peer)))
        return None

    def _ask_every_s(self) -> float:
        """Where transfers take long there is less to hear."""
        return max(self.limits.ask_every_s, self._usual_s / 2)

    def _question(self, peer: Peer) -> Iterator[str]:
        room = self.limits.ask_most
        for _ in range(len(peer.queue)):
            if not room:
                return
            digest = peer.queue.popleft()
            peer.fresh = max(peer.fresh - 1, 0)
            want = self._wants.get(digest)
            if want is not None and not (want.sources | want.banned) & peer.bit:
                room -= 1
                yield digest

    def heard(self, asked: Ask, missing: Iterable[str], load: int, now: float) -> None:
        """A node's answer. ``load``: sends to other nodes under way and waiting there."""
        peer = self._peers.get(asked.peer)
        if peer is None:
            return
        lacking = set(missing)
        peer.asking_since = None
        peer.failures = min(peer.failures, self.limits.failures - 1)  # not dead, but only a chunk makes up for the rest
        peer.others = load
        if load and not peer.contested:
            peer.contested, peer.spread_at = True, now
        if asked.digests:
            self._turns.complete(peer.id, not lacking)
        for digest in asked.digests:
            if (want := self._wants.get(digest)) is None:
                continue
            want.asked |= peer.bit
            if digest not in lacking:
                self._found(want, peer, now)
            elif peer.neighbour:
                peer.queue.append(digest)
        self._recheck = True

    def _found(self, want: Want, peer: Peer, now: float) -> None:
        if want.banned & peer.bit:
            return
        if not want.sources:
            want.tie = self._turns.distance(want.digest)
        elif (only := self._by_bit.get(want.sources)) is not None:
            only.spread_at = now
        want.sources |= peer.bit
        heapq.heappush(peer.heap, (want.sources.bit_count(), want.tie, want.digest))

    def unheard(self, asked: Ask, now: float) -> None:
        """The node did not answer."""
        peer = self._peers.get(asked.peer)
        if peer is not None:
            peer.asking_since = None
            self._enqueue(peer, asked.digests)
            self._blame(peer, now)

    # -- getting -----------------------------------------------------------------------------------------------------
    def _get(self, now: float) -> Get | None:
        if sum(not f.hedge for f in self._flights.values()) >= self.limits.parallel:
            return None
        tops = [(top, peer) for peer in self._peers.values() if self._free(peer, now) and (top := self._top(peer))]
        rarest = min((top for top, peer in tops if top[0] > 1 or self._may_take(top[2], peer, now)), default=None)
        return None if rarest is None else self._start(self._wants[rarest[2]], now, hedge=False)

    def _may_take(self, digest: str, peer: Peer, now: float) -> bool:
        """Whether it is this node's turn to get the chunk of the only node that has it; always where no others were
        seen to draw on that one."""
        if not peer.contested:
            return True
        patience = self._ask_every_s()
        if peer.others:
            patience = max(_BUSY_PATIENCE * patience, 2 * peer.took_s)
        return self._turns.may_take(digest, (now - peer.spread_at) / patience)

    def _start(self, want: Want, now: float, *, hedge: bool) -> Get | None:
        """A get of the chunk from the least loaded node that has it and is not asked for it yet."""
        taken = {self._flights[n].peer for n in want.flights}
        able = [p for p in self._peers.values() if want.sources & p.bit and p.id not in taken and self._free(p, now)]
        if not able:
            return None
        peer = min(able, key=lambda p: (p.others + p.flights, self._random.random()))
        number = next(self._numbers)
        self._flights[number] = Flight(want.digest, peer.id, now, hedge)
        want.flights.add(number)
        want.tries += 1
        peer.flights += 1
        return Get(number, want.digest, peer.id)

    def _free(self, peer: Peer, now: float) -> bool:
        """Whether the node may be asked for one more chunk now."""
        if now < peer.not_before or peer.failures >= self.limits.failures:
            return False
        if peer.asking_since is not None and now - peer.asking_since > self.limits.hedge_after_s:
            return False  # it does not even answer a question
        return peer.flights < min(peer.window, max(1, self.limits.parallel - peer.others))

    def _top(self, peer: Peer) -> tuple[int, tuple[int, int], str] | None:
        """The rarest chunk that can be had of the node."""
        while peer.heap:
            rarity, tie, digest = peer.heap[0]
            want = self._wants.get(digest)
            if want is None or want.flights or not want.sources & peer.bit:
                heapq.heappop(peer.heap)
            elif want.sources.bit_count() != rarity:
                heapq.heapreplace(peer.heap, (want.sources.bit_count(), tie, digest))
            else:
                return rarity, tie, digest
        return None

    def _hedge(self, now: float) -> Get | None:
        if sum(f.hedge for f in self._flights.values()) >= self.limits.parallel:
            return None
        patience = self._patience()
        for flight in list(self._flights.values()):
            want = self._wants[flight.digest]
            newest = max(self._flights[n].start for n in want.flights)
            if (flight.peer and now - newest >= patience and len(want.flights) < self.limits.answers
                    and want.tries < self.limits.tries and (get := self._start(want, now, hedge=True))):
                return get
        return None

    def _patience(self) -> float:
        """Seconds until a get is hedged."""
        return max(self.limits.hedge_after_s, self.limits.hedge_factor * self._usual_s)

    def got(self, number: int, now: float) -> list[int]:
        """The chunk is here: numbers of other gets of it, which are to be cancelled."""
        flight = self._land(number)
        if flight is None:
            return []
        want = self._wants[flight.digest]
        self._remove(flight.digest)
        self._recheck = True
        peer = self._peers.get(flight.peer)
        if peer is not None:
            peer.took_s = now - flight.start
            self._durations.append(peer.took_s)
            self._usual_s = median(self._durations)
            peer.spread_at = min(peer.spread_at + peer.took_s, now)  # until then it was its own turn
            peer.failures = peer.slow = 0
            peer.window = min(peer.window + 1, self.limits.parallel)
        losers = sorted(want.flights)
        self._tidy()
        for loser in losers:
            lost = self._land(loser)
            slow = self._peers.get(lost.peer) if lost else None
            if lost and slow is not None and lost.start < flight.start:
                # Not a failure: it may be the only one that has another chunk. But others are better asked first.
                slow.slow += 1
                slow.window = 1
                self._back_off(slow, slow.slow, now)
        return losers

    def failed(self, number: int, why: Failure, now: float) -> None:
        """A get or recall came to nothing; another will be tried."""
        flight = self._land(number)
        if flight is None:
            return
        want, peer = self._wants[flight.digest], self._peers.get(flight.peer)
        if not flight.peer:
            want.recalled = self._recheck = True
            want.rotten = why is Failure.CORRUPT
            self._suspects[want.digest] = None
            return
        if peer is not None:
            if why is Failure.CORRUPT:
                want.banned |= peer.bit
            if why is Failure.MISSING and peer.neighbour:
                peer.queue.append(want.digest)
            if why in (Failure.CORRUPT, Failure.MISSING):
                want.sources &= ~peer.bit
            if why in (Failure.CORRUPT, Failure.BROKEN):
                self._blame(peer, now)
        self._replace(want)

    def _replace(self, want: Want) -> None:
        """Has a chunk that is not under way any more wait for a node again."""
        if want.flights:
            return
        self._suspect(want)
        for peer in self._peers.values():
            if want.sources & peer.bit:
                heapq.heappush(peer.heap, (want.sources.bit_count(), want.tie, want.digest))

    def _land(self, number: int) -> Flight | None:
        flight = self._flights.pop(number, None)
        if flight is not None:
            if (want := self._wants.get(flight.digest)) is not None:
                want.flights.discard(number)
            if (peer := self._peers.get(flight.peer)) is not None:
                peer.flights = max(peer.flights - 1, 0)
        return flight

    # -- nodes that fail, chunks that cannot be had ------------------------------------------------------------------
    def _blame(self, peer: Peer, now: float) -> None:
        peer.failures += 1
        peer.window = 1
        self._back_off(peer, peer.failures, now)
        if peer.failures == self.limits.failures:
            for want in self._wants.values():
                if want.sources & peer.bit:
                    self._suspect(want)
        self._recheck = True

    def _suspect(self, want: Want) -> None:
        """The chunk was had of no node where it was thought to be. What others said of it is old: they are asked
        anew, since one may have got it before that one failed."""
        want.asked = 0
        self._suspects[want.digest] = None
        self._recheck = True

    def _back_off(self, peer: Peer, times: int, now: float) -> None:
        pause = min(self.limits.backoff_s * 2 ** times, self.limits.backoff_most_s)
        peer.not_before = max(peer.not_before, now + pause * self._random.uniform(0.75, 1.25))

    def _give_up(self, now: float) -> Recall | Lost | None:
        """What to do about a chunk that no living node has, or that was tried too often."""
        if not self._recheck:
            return None
        alive = [p for p in self._peers.values() if p.failures < self.limits.failures]
        mask = sum(p.bit for p in alive)
        cleared = []
        try:
            for digest in self._suspects:
                want = self._wants.get(digest)
                spent = want is not None and want.tries >= self.limits.tries
                if want is None or want.flights or want.sources & mask and not spent:
                    cleared.append(digest)
                elif spent or not self._may_turn_up(want, alive):
                    if action := self._last_resort(want, now):
                        return action
                    break  # too much is under way for now
        finally:
            for digest in cleared:
                self._suspects.pop(digest, None)
        self._recheck = False
        return None

    def _may_turn_up(self, want: Want, alive: Sequence[Peer]) -> bool:
        """Whether there are nodes still to be heard about the chunk; has those asked that usually are not."""
        if want.look > self._looks_done:
            return True
        unasked = [p for p in alive if not (want.asked | want.banned) & p.bit]
        for peer in () if any(p.neighbour for p in unasked) else unasked:
            if not peer.fresh and peer.asking_since is None:
                self._enqueue(peer, [w for w in self._suspects if w in self._wants])
        return bool(unasked)

    def _last_resort(self, want: Want, now: float) -> Recall | Lost | None:
        if not self.limits.durable or want.recalled:
            corrupt = bool(want.banned) or want.rotten
            self.drop(want.digest)
            return Lost(want.digest, corrupt)
        if sum(not f.hedge for f in self._flights.values()) >= self.limits.parallel:
            return None
        number = next(self._numbers)
        self._flights[number] = Flight(want.digest, "", now, False)
        want.flights.add(number)
        return Recall(number, want.digest)
