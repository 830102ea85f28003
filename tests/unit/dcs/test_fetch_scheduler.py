"""The fetch scheduler: step by step, and under random faults. A whole fleet: ``test_fetch_fleet.py``."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.dcs.fetch.model import (
    Abandon,
    Action,
    ChunkLost,
    Failure,
    FetchLimits,
    GetChunk,
    ListNodes,
    QueryHave,
    ReadDurable,
)
from elastic_rl.dcs.fetch.scheduler import FetchScheduler

CHUNKS = [f"c{i:03}" for i in range(64)]


@dataclass
class Hand:
    """A scheduler run step by step: listings and queries are answered at once, transfers are collected."""

    has: dict[str, set[str]]
    limits: FetchLimits = FetchLimits()
    own_id: str = "me"
    now: float = 0.0
    load: dict[str, int] = field(default_factory=dict)
    gets: list[GetChunk] = field(default_factory=list)
    reads: list[ReadDurable] = field(default_factory=list)
    lost: list[ChunkLost] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    queries: list[QueryHave] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.scheduler = FetchScheduler(self.limits, self.own_id)

    def run(self) -> list[GetChunk]:
        """Does everything that is due; returns the transfers that it began."""
        begun: list[GetChunk] = []
        for _ in range(100_000):
            match self.scheduler.next(self.now):
                case None:
                    self.gets += begun
                    return begun
                case ListNodes():
                    self.scheduler.on_nodes(dict.fromkeys(self.has, "first"), self.now)
                case QueryHave() as query:
                    self.queries.append(query)
                    if query.peer in self.silent:
                        self.scheduler.on_query_failed(query, self.now)
                    else:
                        missing = [d for d in query.digests if d not in self.has[query.peer]]
                        self.scheduler.on_have(query, missing, self.load.get(query.peer, 0), self.now)
                case GetChunk() as get:
                    begun.append(get)
                case ReadDurable() as read:
                    self.reads.append(read)
                case ChunkLost() as lost:
                    self.lost.append(lost)
                case Abandon(number):
                    self.abandoned.append(number)
        raise AssertionError("the scheduler never runs out of actions")

    def wait(self) -> list[GetChunk]:
        """Advances the clock until something may be due, and does it."""
        at = self.scheduler.wake_at(self.now)
        assert at > self.now, "the scheduler does not sleep"
        self.now = at
        return self.run()

    def wait_until(self, seconds: float) -> list[GetChunk]:
        begun = []
        while self.scheduler.wake_at(self.now) < seconds:
            begun += self.wait()
        self.now = max(self.now, seconds)
        return begun + self.run()

    def request(self, digests: list[str]) -> list[GetChunk]:
        self.scheduler.request(digests)
        return self.run()

    def finish(self, get: GetChunk, seconds: float = 0.01) -> list[int]:
        self.now += seconds
        return self.scheduler.on_received(get.number, self.now)


def test_rarest_chunk_is_fetched_first() -> None:
    hand = Hand({"a": set(CHUNKS[:5]), "b": set(CHUNKS[:4]), "c": set(CHUNKS[:4])}, FetchLimits(parallel=1))
    [first] = hand.request(CHUNKS[:5])
    assert (first.digest, first.peer) == (CHUNKS[4], "a")


def test_order_of_equally_rare_chunks_differs_between_nodes_and_is_deterministic() -> None:
    def order(own_id: str) -> list[str]:
        hand = Hand({"n": set(CHUNKS), "filling": set()}, FetchLimits(parallel=1), own_id)
        [get] = hand.request(CHUNKS)
        out = []
        while get:
            out.append(get.digest)
            hand.finish(get)
            get = next(iter(hand.run()), None)  # type: ignore[assignment]
        return out

    assert sorted(order("x")) == CHUNKS
    assert order("x") == order("x")
    assert order("x") != order("b")


def test_least_loaded_node_is_chosen() -> None:
    hand = Hand({p: {"x"} for p in "abc"}, load={"a": 3, "b": 1, "c": 2})
    [get] = hand.request(["x"])
    assert get.peer == "b"


def test_busy_node_is_requested_one_chunk_at_a_time() -> None:
    hand = Hand({"a": set(CHUNKS)}, load={"a": 30})
    under_way = hand.request(CHUNKS)
    for _ in range(10):
        assert len(under_way) == 1
        hand.finish(under_way.pop())
        under_way = hand.run()


def test_concurrent_transfers_grow_to_the_limit() -> None:
    hand = Hand({"a": set(CHUNKS)}, FetchLimits(parallel=4))
    under_way = hand.request(CHUNKS)
    most = 0
    while under_way:
        most = max(most, len(under_way))
        hand.finish(under_way.pop(0))
        under_way += hand.run()
    assert most == 4


def test_slow_transfer_is_hedged_and_the_loser_is_cancelled() -> None:
    hand = Hand({"a": {"x"}, "b": {"x"}})
    [slow] = hand.request(["x"])
    hedges = hand.wait_until(0.99)
    assert not hedges, "too early"
    [hedge] = hand.wait_until(1.01)
    assert {slow.peer, hedge.peer} == {"a", "b"}
    assert hand.finish(hedge) == [slow.number]
    assert hand.scheduler.on_received(slow.number, hand.now) == [], "a late result of the loser is ignored"
    # the slow one is avoided for a while, though not taken for dead
    [get] = hand.request(["x"])
    assert get.peer == hedge.peer


def test_hedge_waits_for_a_multiple_of_the_median() -> None:
    hand = Hand({"a": set(CHUNKS), "b": set(CHUNKS)}, FetchLimits(parallel=1))
    gets = hand.request(CHUNKS[:4])
    for _ in range(3):
        hand.now += 0.9
        hand.scheduler.on_received(gets[0].number, hand.now)
        gets = hand.run()
    assert len(gets) == 1
    start = hand.now
    assert not hand.wait_until(start + 2.6)
    assert len(hand.wait_until(start + 2.8)) == 1


def test_slow_node_is_used_for_a_chunk_that_it_alone_has() -> None:
    hand = Hand({"a": {"x", "y"}, "b": {"x"}}, FetchLimits(parallel=1))
    for _ in range(5):
        hand.has = {"a": {"x"}, "b": {"x"}}
        gets = hand.request(["x"])
        if gets[0].peer == "a":
            [hedge] = hand.wait_until(hand.now + 1.1)
            hand.finish(hedge)
        else:
            hand.finish(gets[0])
    hand.has = {"a": {"y"}, "b": set()}
    gets = hand.request(["y"]) or hand.wait_until(hand.now + 12)
    assert [g.peer for g in gets] == ["a"] and not hand.lost


def test_failing_node_is_backed_off_until_its_chunk_is_lost() -> None:
    hand = Hand({"a": {"x"}})
    gets, times = hand.request(["x"]), [0.0]
    while not hand.lost:
        for get in gets:
            hand.scheduler.on_failed(get.number, Failure.BROKEN, hand.now)
        gets = hand.wait()
        times += [hand.now for _ in gets]
    assert len(times) == hand.limits.failures
    pauses = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert pauses == sorted(pauses) and pauses[0] > 0.3
    assert hand.lost == [ChunkLost("x", corrupt=False)]


def test_recovered_node_is_used_again() -> None:
    hand = Hand({"a": {"x"}, "b": {"y"}})
    hand.silent = {"a"}
    [get] = hand.request(["x", "y"])
    assert get.digest == "y"
    hand.silent = set()
    [get] = hand.wait_until(2.0)
    assert get.digest == "x" and not hand.lost


def test_node_that_sent_corrupt_bytes_is_not_requested_again() -> None:
    hand = Hand({"a": {"x"}, "b": {"x"}})
    [first] = hand.request(["x"])
    hand.scheduler.on_failed(first.number, Failure.CORRUPT, hand.now)
    [second] = hand.run()
    assert second.peer != first.peer
    hand.scheduler.on_failed(second.number, Failure.CORRUPT, hand.now)
    hand.wait_until(30.0)
    assert len(hand.gets) == 2 and hand.lost == [ChunkLost("x", corrupt=True)]


def test_chunk_on_no_node_is_read_once_from_the_durable_store() -> None:
    hand = Hand({"a": set()}, FetchLimits(durable=True))
    hand.request(["x"])
    [read] = hand.reads
    assert not hand.lost
    hand.scheduler.on_failed(read.number, Failure.MISSING, hand.now)
    hand.run()
    assert hand.lost == [ChunkLost("x", corrupt=False)] and len(hand.reads) == 1


def test_durable_reads_are_bounded() -> None:
    hand = Hand({}, FetchLimits(durable=True, parallel=3))
    hand.request(CHUNKS)
    for done in range(len(CHUNKS)):
        assert len(hand.reads) == min(done + 3, len(CHUNKS))
        hand.scheduler.on_received(hand.reads[done].number, hand.now)
        hand.run()
    assert not hand.lost


def test_durable_read_that_hangs_is_abandoned_and_its_chunk_lost() -> None:
    hand = Hand({}, FetchLimits(durable=True, durable_timeout_s=5.0))
    hand.request(["x"])
    [read] = hand.reads
    hand.wait_until(4.9)
    assert not hand.abandoned and not hand.lost
    hand.wait_until(5.1)
    assert hand.abandoned == [read.number] and hand.lost == [ChunkLost("x", corrupt=False)]
    assert hand.scheduler.on_received(read.number, hand.now) == [], "a late result is ignored"


def test_bits_of_nodes_that_are_gone_are_used_again() -> None:
    hand = Hand({})
    for generation in range(100):
        hand.has = {f"n{generation}.{i}": {"x"} for i in range(8)}
        hand.now += 10
        [get] = hand.request(["x"])
        hand.finish(get)
    assert max(p.bit for p in hand.scheduler._peers.values()) <= 1 << 16


def test_chunk_is_not_lost_before_nodes_were_listed_after_the_request() -> None:
    hand = Hand({})
    hand.request(["x"])
    assert hand.lost == [ChunkLost("x", corrupt=False)]
    hand.has = {"new": {"y"}}  # registered since, within the time that a list is good for
    [get] = hand.request(["y"])
    assert get.peer == "new" and len(hand.lost) == 1


def test_known_nodes_are_used_while_listing_fails() -> None:
    scheduler = FetchScheduler(FetchLimits(), "me")
    scheduler.request(["x"])
    assert scheduler.next(0.0) == ListNodes()
    scheduler.on_nodes({"a": "1"}, 0.0)
    query = scheduler.next(0.0)
    assert isinstance(query, QueryHave)
    scheduler.on_have(query, [], 0, 0.0)
    get = scheduler.next(0.0)
    assert isinstance(get, GetChunk)
    scheduler.on_received(get.number, 0.0)
    scheduler.request(["y"])
    assert scheduler.next(3.0) == ListNodes()
    scheduler.on_nodes(None, 3.0)
    query = scheduler.next(3.0)
    assert isinstance(query, QueryHave) and query.digests == ("y",)


def test_restarted_node_is_queried_again() -> None:
    hand = Hand({"a": {"x"}})
    [get] = hand.request(["x"])
    hand.scheduler.on_failed(get.number, Failure.BROKEN, hand.now)
    hand.scheduler.on_nodes({"a": "second"}, hand.now)
    before = len(hand.queries)
    [get] = hand.run()
    assert len(hand.queries) > before and get.peer == "a"


def test_only_neighbours_are_queried_unless_none_of_them_has_the_chunk() -> None:
    has: dict[str, set[str]] = {f"n{i:03}": {"common"} for i in range(200)}
    hand = Hand(has)
    hand.request(["common"])
    assert len({a.peer for a in hand.queries}) == hand.limits.neighbours
    hand.queries.clear()
    holder = next(p for p in has if not hand.scheduler._peers[p].neighbour)
    has[holder].add("hidden")
    get = next(g for g in hand.request(["hidden"]) if g.digest == "hidden")
    assert get.peer == holder


def test_preferred_nodes_are_queried() -> None:
    has: dict[str, set[str]] = {f"n{i:03}": set() for i in range(200)}
    has["n150"] = {"x"}
    hand = Hand(has)
    hand.scheduler.request(["x"], prefer=["n150"])
    hand.run()
    assert [g.peer for g in hand.gets] == ["n150"]
    assert len(hand.queries) <= hand.limits.neighbours + 1


def test_filling_node_is_queried_again() -> None:
    hand = Hand({"a": {"x"}, "b": set()}, load={"a": 50})
    has = hand.has
    has["a"] = set(CHUNKS)
    gets = hand.request(CHUNKS)
    assert {g.peer for g in gets} == {"a"}
    has["b"] = set(CHUNKS[:32])
    assert "b" in {g.peer for g in hand.wait_until(0.6)}


def test_chunk_is_found_at_a_filling_node_after_its_source_died() -> None:
    hand = Hand({"source": {"x"}, "filling": set()}, FetchLimits(parallel=1))
    [get] = hand.request(["x"])
    hand.has["filling"].add("x")
    del hand.has["source"]
    hand.scheduler.on_failed(get.number, Failure.BROKEN, hand.now)
    hand.silent = {"source"}
    hand.scheduler.on_nodes({"filling": "first"}, hand.now)
    gets = hand.run() or hand.wait_until(5.0)
    assert [g.peer for g in gets] == ["filling"] and not hand.lost


def test_long_lists_of_chunks_are_queried_in_batches() -> None:
    many = [f"d{i}" for i in range(1000)]
    hand = Hand({"a": set(many[::2]), "b": set(many[1::2])}, FetchLimits(query_digests=100))
    hand.request(many)
    assert max(len(a.digests) for a in hand.queries) == 100
    for peer in "ab":
        assert {d for a in hand.queries if a.peer == peer for d in a.digests} == set(many)


def test_cancelled_chunk_is_forgotten() -> None:
    hand = Hand({"a": {"x", "y"}}, FetchLimits(parallel=1))
    [get] = hand.request(["x", "y"])
    other = "y" if get.digest == "x" else "x"
    assert hand.scheduler.cancel(get.digest) == [get.number]
    assert [g.digest for g in hand.run()] == [other]
    assert hand.scheduler.cancel(get.digest) == []


# -- under random faults -----------------------------------------------------------------------------------------------
class Chaos:
    """Reports random outcomes; checks the invariants after each step."""

    def __init__(self, rng: random.Random, limits: FetchLimits, peers: int) -> None:
        self.rng, self.limits = rng, limits
        self.has = {f"p{i}": {c for c in CHUNKS[:12] if rng.random() < 0.5} for i in range(peers)}
        self.up = dict.fromkeys(self.has, True)
        self.scheduler = FetchScheduler(limits, "me")
        self.now = 0.0
        self.open: dict[int, GetChunk | ReadDurable] = {}
        self.queries: list[QueryHave] = []
        self.listing = False
        self.ends: Counter[str] = Counter()
        self.tries: Counter[str] = Counter()
        self.corrupt: set[tuple[str, str]] = set()

    def take(self, action: Action) -> None:
        match action:
            case ListNodes():
                assert not self.listing
                self.listing = True
            case QueryHave():
                assert action.peer not in {a.peer for a in self.queries}, "two queries at once to one node"
                self.queries.append(action)
            case GetChunk():
                assert (action.digest, action.peer) not in self.corrupt, "corrupt bytes requested again"
                pairs = [(g.digest, g.peer) for g in self.open.values() if isinstance(g, GetChunk)]
                assert (action.digest, action.peer) not in pairs, "requested twice at once"
                assert sum(d == action.digest for d, _ in pairs) < self.limits.transfers_per_chunk
                self.tries[action.digest] += 1
                assert self.tries[action.digest] <= self.limits.tries
                self.open[action.number] = action
            case ReadDurable():
                self.open[action.number] = action
            case ChunkLost():
                self.ends[action.digest] += 1
                assert all(g.digest != action.digest for g in self.open.values()), "lost while in transfer"
        assert len(self.open) <= 2 * self.limits.parallel

    def answer(self, calm: bool) -> None:
        """Reports one outcome, good or bad; ``calm``: good."""
        open_: list[object] = [*self.open.values(), *self.queries, *([ListNodes()] if self.listing else [])]
        if not open_:
            return
        match self.rng.choice(open_):
            case ListNodes():
                self.listing = False
                known = {p: "1" for p, up in self.up.items() if up}
                if calm or self.rng.random() < 0.8:
                    self.queries = [a for a in self.queries if a.peer in known]  # a node that is gone does not answer
                    self.scheduler.on_nodes(known, self.now)
                else:
                    self.scheduler.on_nodes(None, self.now)
            case QueryHave() as query:
                self.queries.remove(query)
                if self.up[query.peer] and (calm or self.rng.random() < 0.8):
                    missing = [d for d in query.digests if d not in self.has[query.peer]]
                    self.scheduler.on_have(query, missing, self.rng.randrange(12), self.now)
                else:
                    self.scheduler.on_query_failed(query, self.now)
            case GetChunk() as get:
                del self.open[get.number]
                if not self.up[get.peer]:
                    self.scheduler.on_failed(get.number, Failure.BROKEN, self.now)
                elif get.digest not in self.has[get.peer]:
                    self.scheduler.on_failed(get.number, Failure.MISSING, self.now)
                elif calm or self.rng.random() < 0.6:
                    self.done(get.digest, get.number)
                else:
                    why = self.rng.choice(list(Failure))
                    if why is Failure.CORRUPT:
                        self.corrupt.add((get.digest, get.peer))
                    self.scheduler.on_failed(get.number, why, self.now)
            case ReadDurable() as read:
                del self.open[read.number]
                if self.rng.random() < 0.5:
                    self.done(read.digest, read.number)
                else:
                    self.scheduler.on_failed(read.number, Failure.MISSING, self.now)

    def done(self, digest: str, number: int) -> None:
        self.ends[digest] += 1
        for loser in self.scheduler.on_received(number, self.now):
            assert self.open.pop(loser).digest == digest
        assert all(g.digest != digest for g in self.open.values()), "a transfer goes on though its chunk is here"

    def disturb(self) -> None:
        peer = self.rng.choice(list(self.has))
        self.up[peer] = self.rng.random() < 0.6
        self.has[peer].add(self.rng.choice(CHUNKS[:12]))


@settings(max_examples=seeds(40))
@given(seed=st.integers(0, 1 << 32), parallel=st.integers(1, 6), peers=st.integers(1, 6), durable=st.booleans())
def test_every_chunk_ends_exactly_once_under_random_faults(seed: int, parallel: int, peers: int, durable: bool) -> None:
    rng = random.Random(seed)
    chaos = Chaos(rng, FetchLimits(parallel=parallel, durable=durable, neighbours=3, query_digests=5), peers)
    wanted = CHUNKS[:12]
    chaos.scheduler.request(wanted[:6])
    for step in range(4000):
        if step == 40:
            chaos.scheduler.request(wanted[6:], prefer=["p0"])
        calm = step > 400
        while action := chaos.scheduler.next(chaos.now):
            chaos.take(action)
        if not calm and rng.random() < 0.1:
            chaos.disturb()
        if rng.random() < 0.7:
            chaos.answer(calm)
        else:
            chaos.now = min(chaos.scheduler.wake_at(chaos.now), chaos.now + 1.0)
        if step > 40 and chaos.ends.total() == len(wanted):
            break
    assert chaos.ends == Counter(wanted), "a chunk did not end, or twice"
    assert not chaos.open and chaos.scheduler.next(chaos.now + 100) is None


# -- super-seeding -----------------------------------------------------------------------------------------------------
def test_share_of_an_idle_node_is_taken_over() -> None:
    """Fifteen registered nodes fetch nothing, and one fetches from the publisher as this one does."""
    hand = Hand({"source": set(CHUNKS), **{f"idle{i}": set() for i in range(15)}}, load={"source": 2})
    began = hand.request(CHUNKS)
    most = 0.0
    while len(hand.gets) < len(CHUNKS):
        before = hand.now
        for get in began:
            hand.finish(get)
        began = hand.run()
        while not began:
            began = hand.wait()
        most = max(most, hand.now - before)
        assert hand.now < 10, "it waits for idle nodes"
    assert most > hand.limits.query_every_s, "it did not wait: this test shows nothing"


def test_node_that_pulls_alone_does_not_wait() -> None:
    hand = Hand({"source": set(CHUNKS), **{f"idle{i}": set() for i in range(15)}}, FetchLimits(parallel=1))
    began = hand.request(CHUNKS)
    for _ in CHUNKS:
        [get] = began
        hand.finish(get, 0.001)
        began = hand.run()
    assert not began and hand.now < hand.limits.query_every_s
