"""The fetch schedule: by hand, and under random faults. A whole fleet of them: ``test_fetch_fleet.py``."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_rl.dcs.fetch.actions import Action, Ask, Failure, Get, Limits, Look, Lost, Recall
from elastic_rl.dcs.fetch.scheduler import FetchScheduler

CHUNKS = [f"c{i:03}" for i in range(64)]


@dataclass
class Hand:
    """A schedule run by hand: looks and questions are answered at once, gets are collected."""

    has: dict[str, set[str]]
    limits: Limits = Limits()
    own_id: str = "me"
    now: float = 0.0
    load: dict[str, int] = field(default_factory=dict)
    gets: list[Get] = field(default_factory=list)
    recalls: list[Recall] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.schedule = FetchScheduler(self.limits, self.own_id)

    def run(self) -> list[Get]:
        """Does what there is to do now; the gets that it began."""
        begun: list[Get] = []
        for _ in range(100_000):
            match self.schedule.next(self.now):
                case None:
                    self.gets += begun
                    return begun
                case Look():
                    self.schedule.looked(dict.fromkeys(self.has, "first"), self.now)
                case Ask() as ask:
                    self.asks.append(ask)
                    if ask.peer in self.silent:
                        self.schedule.unheard(ask, self.now)
                    else:
                        missing = [d for d in ask.digests if d not in self.has[ask.peer]]
                        self.schedule.heard(ask, missing, self.load.get(ask.peer, 0), self.now)
                case Get() as get:
                    begun.append(get)
                case Recall() as recall:
                    self.recalls.append(recall)
                case Lost() as lost:
                    self.lost.append(lost)
        raise AssertionError("the schedule never rests")

    def wait(self) -> list[Get]:
        """Lets time pass until there may be something to do, and does it."""
        at = self.schedule.wake_at(self.now)
        assert at > self.now, "the schedule does not sleep"
        self.now = at
        return self.run()

    def wait_until(self, seconds: float) -> list[Get]:
        begun = []
        while self.schedule.wake_at(self.now) < seconds:
            begun += self.wait()
        self.now = max(self.now, seconds)
        return begun + self.run()

    def want(self, digests: list[str]) -> list[Get]:
        self.schedule.want(digests)
        return self.run()

    def finish(self, get: Get, seconds: float = 0.01) -> list[int]:
        self.now += seconds
        return self.schedule.got(get.number, self.now)


def test_the_rarest_chunk_comes_first() -> None:
    hand = Hand({"a": set(CHUNKS[:5]), "b": set(CHUNKS[:4]), "c": set(CHUNKS[:4])}, Limits(parallel=1))
    [first] = hand.want(CHUNKS[:5])
    assert (first.digest, first.peer) == (CHUNKS[4], "a")


def test_equally_rare_chunks_come_in_another_order_at_each_node_and_the_same_at_one() -> None:
    def order(own_id: str) -> list[str]:
        hand = Hand({"n": set(CHUNKS), "filling": set()}, Limits(parallel=1), own_id)
        [get] = hand.want(CHUNKS)
        out = []
        while get:
            out.append(get.digest)
            hand.finish(get)
            get = next(iter(hand.run()), None)  # type: ignore[assignment]
        return out

    assert sorted(order("x")) == CHUNKS
    assert order("x") == order("x")
    assert order("x") != order("b")


def test_the_least_loaded_node_is_asked() -> None:
    hand = Hand({p: {"x"} for p in "abc"}, load={"a": 3, "b": 1, "c": 2})
    [get] = hand.want(["x"])
    assert get.peer == "b"


def test_a_node_that_serves_many_others_is_asked_for_one_chunk_at_a_time() -> None:
    hand = Hand({"a": set(CHUNKS)}, load={"a": 30})
    [get] = hand.want(CHUNKS)
    for _ in range(10):
        hand.finish(get)
        [get] = hand.run()


def test_gets_at_once_grow_to_the_limit_and_no_further() -> None:
    hand = Hand({"a": set(CHUNKS)}, Limits(parallel=4))
    under_way = hand.want(CHUNKS)
    most = 0
    while under_way:
        most = max(most, len(under_way))
        hand.finish(under_way.pop(0))
        under_way += hand.run()
    assert most == 4


def test_a_get_that_takes_long_is_hedged_and_the_loser_is_cancelled() -> None:
    hand = Hand({"a": {"x"}, "b": {"x"}})
    [slow] = hand.want(["x"])
    hedges = hand.wait_until(0.99)
    assert not hedges, "too early"
    [hedge] = hand.wait_until(1.01)
    assert {slow.peer, hedge.peer} == {"a", "b"}
    assert hand.finish(hedge) == [slow.number]
    assert hand.schedule.got(slow.number, hand.now) == [], "a late answer of the loser counts no more"
    # the slow one is left alone for a while, though not taken for dead
    [get] = hand.want(["x"])
    assert get.peer == hedge.peer


def test_what_is_slow_everywhere_is_not_hedged_at_once() -> None:
    hand = Hand({"a": set(CHUNKS), "b": set(CHUNKS)}, Limits(parallel=1))
    gets = hand.want(CHUNKS[:4])
    for _ in range(3):
        hand.now += 0.9
        hand.schedule.got(gets[0].number, hand.now)
        gets = hand.run()
    assert len(gets) == 1
    start = hand.now
    assert not hand.wait_until(start + 2.6)
    assert len(hand.wait_until(start + 2.8)) == 1


def test_a_slow_node_that_alone_has_a_chunk_is_still_asked_for_it() -> None:
    hand = Hand({"a": {"x", "y"}, "b": {"x"}}, Limits(parallel=1))
    for _ in range(5):
        hand.has = {"a": {"x"}, "b": {"x"}}
        gets = hand.want(["x"])
        if gets[0].peer == "a":
            [hedge] = hand.wait_until(hand.now + 1.1)
            hand.finish(hedge)
        else:
            hand.finish(gets[0])
    hand.has = {"a": {"y"}, "b": set()}
    gets = hand.want(["y"]) or hand.wait_until(hand.now + 12)
    assert [g.peer for g in gets] == ["a"] and not hand.lost


def test_a_node_that_does_not_answer_is_left_alone_longer_each_time_and_its_chunks_are_lost_in_the_end() -> None:
    hand = Hand({"a": {"x"}})
    gets, times = hand.want(["x"]), [0.0]
    while not hand.lost:
        for get in gets:
            hand.schedule.failed(get.number, Failure.BROKEN, hand.now)
        gets = hand.wait()
        times += [hand.now for _ in gets]
    assert len(times) == hand.limits.failures
    pauses = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert pauses == sorted(pauses) and pauses[0] > 0.3
    assert hand.lost == [Lost("x", corrupt=False)]


def test_a_node_that_comes_back_is_used_again() -> None:
    hand = Hand({"a": {"x"}, "b": {"y"}})
    hand.silent = {"a"}
    [get] = hand.want(["x", "y"])
    assert get.digest == "y"
    hand.silent = set()
    [get] = hand.wait_until(2.0)
    assert get.digest == "x" and not hand.lost


def test_wrong_bytes_are_not_asked_for_again_where_they_came_from() -> None:
    hand = Hand({"a": {"x"}, "b": {"x"}})
    [first] = hand.want(["x"])
    hand.schedule.failed(first.number, Failure.CORRUPT, hand.now)
    [second] = hand.run()
    assert second.peer != first.peer
    hand.schedule.failed(second.number, Failure.CORRUPT, hand.now)
    hand.wait_until(30.0)
    assert len(hand.gets) == 2 and hand.lost == [Lost("x", corrupt=True)]


def test_a_chunk_that_no_node_has_is_recalled_once_and_then_lost() -> None:
    hand = Hand({"a": set()}, Limits(durable=True))
    hand.want(["x"])
    [recall] = hand.recalls
    assert not hand.lost
    hand.schedule.failed(recall.number, Failure.MISSING, hand.now)
    hand.run()
    assert hand.lost == [Lost("x", corrupt=False)] and len(hand.recalls) == 1


def test_recalls_are_bounded_too() -> None:
    hand = Hand({}, Limits(durable=True, parallel=3))
    hand.want(CHUNKS)
    for done in range(len(CHUNKS)):
        assert len(hand.recalls) == min(done + 3, len(CHUNKS))
        hand.schedule.got(hand.recalls[done].number, hand.now)
        hand.run()
    assert not hand.lost


def test_nothing_is_given_up_before_the_nodes_were_listed_anew() -> None:
    hand = Hand({})
    hand.want(["x"])
    assert hand.lost == [Lost("x", corrupt=False)]
    hand.has = {"new": {"y"}}  # registered since, within the time that a list is good for
    [get] = hand.want(["y"])
    assert get.peer == "new" and len(hand.lost) == 1


def test_while_nobody_can_list_the_nodes_those_known_are_used() -> None:
    schedule = FetchScheduler(Limits(), "me")
    schedule.want(["x"])
    assert schedule.next(0.0) == Look()
    schedule.looked({"a": "1"}, 0.0)
    ask = schedule.next(0.0)
    assert isinstance(ask, Ask)
    schedule.heard(ask, [], 0, 0.0)
    get = schedule.next(0.0)
    assert isinstance(get, Get)
    schedule.got(get.number, 0.0)
    schedule.want(["y"])
    assert schedule.next(3.0) == Look()
    schedule.looked(None, 3.0)
    ask = schedule.next(3.0)
    assert isinstance(ask, Ask) and ask.digests == ("y",)


def test_a_restarted_node_is_asked_anew() -> None:
    hand = Hand({"a": {"x"}})
    [get] = hand.want(["x"])
    hand.schedule.failed(get.number, Failure.BROKEN, hand.now)
    hand.schedule.looked({"a": "second"}, hand.now)
    asked = len(hand.asks)
    [get] = hand.run()
    assert len(hand.asks) > asked and get.peer == "a"


def test_of_many_nodes_only_some_are_asked_unless_none_of_these_has_the_chunk() -> None:
    has: dict[str, set[str]] = {f"n{i:03}": {"common"} for i in range(200)}
    hand = Hand(has)
    hand.want(["common"])
    assert len({a.peer for a in hand.asks}) == hand.limits.neighbours
    hand.asks.clear()
    holder = next(p for p in has if not hand.schedule._peers[p].neighbour)
    has[holder].add("hidden")
    get = next(g for g in hand.want(["hidden"]) if g.digest == "hidden")
    assert get.peer == holder


def test_the_nodes_to_be_preferred_are_among_those_that_are_asked() -> None:
    has: dict[str, set[str]] = {f"n{i:03}": set() for i in range(200)}
    has["n150"] = {"x"}
    hand = Hand(has)
    hand.schedule.want(["x"], prefer=["n150"])
    hand.run()
    assert [g.peer for g in hand.gets] == ["n150"]
    assert len(hand.asks) <= hand.limits.neighbours + 1


def test_a_node_that_is_still_filling_is_asked_again() -> None:
    hand = Hand({"a": {"x"}, "b": set()}, load={"a": 50})
    has = hand.has
    has["a"] = set(CHUNKS)
    gets = hand.want(CHUNKS)
    assert {g.peer for g in gets} == {"a"}
    has["b"] = set(CHUNKS[:32])
    assert "b" in {g.peer for g in hand.wait_until(0.6)}


def test_a_chunk_that_a_filling_node_got_before_its_source_died_is_found_there() -> None:
    hand = Hand({"source": {"x"}, "filling": set()}, Limits(parallel=1))
    [get] = hand.want(["x"])
    hand.has["filling"].add("x")
    del hand.has["source"]
    hand.schedule.failed(get.number, Failure.BROKEN, hand.now)
    hand.silent = {"source"}
    hand.schedule.looked({"filling": "first"}, hand.now)
    gets = hand.run() or hand.wait_until(5.0)
    assert [g.peer for g in gets] == ["filling"] and not hand.lost


def test_long_lists_of_chunks_are_asked_for_in_several_questions() -> None:
    many = [f"d{i}" for i in range(1000)]
    hand = Hand({"a": set(many[::2]), "b": set(many[1::2])}, Limits(ask_most=100))
    hand.want(many)
    assert max(len(a.digests) for a in hand.asks) == 100
    for peer in "ab":
        assert {d for a in hand.asks if a.peer == peer for d in a.digests} == set(many)


def test_a_chunk_that_nobody_wants_any_more_is_forgotten() -> None:
    hand = Hand({"a": {"x", "y"}}, Limits(parallel=1))
    [get] = hand.want(["x", "y"])
    other = "y" if get.digest == "x" else "x"
    assert hand.schedule.drop(get.digest) == [get.number]
    assert [g.digest for g in hand.run()] == [other]
    assert hand.schedule.drop(get.digest) == []


# -- under random faults -----------------------------------------------------------------------------------------------
class Chaos:
    """Answers at random; checks after each step what must always hold."""

    def __init__(self, rng: random.Random, limits: Limits, peers: int) -> None:
        self.rng, self.limits = rng, limits
        self.has = {f"p{i}": {c for c in CHUNKS[:12] if rng.random() < 0.5} for i in range(peers)}
        self.up = dict.fromkeys(self.has, True)
        self.schedule = FetchScheduler(limits, "me")
        self.now = 0.0
        self.open: dict[int, Get | Recall] = {}
        self.asks: list[Ask] = []
        self.looking = False
        self.ends: Counter[str] = Counter()
        self.tries: Counter[str] = Counter()
        self.corrupt: set[tuple[str, str]] = set()

    def take(self, action: Action) -> None:
        match action:
            case Look():
                assert not self.looking
                self.looking = True
            case Ask():
                assert action.peer not in {a.peer for a in self.asks}, "two questions at once to one node"
                self.asks.append(action)
            case Get():
                assert (action.digest, action.peer) not in self.corrupt, "wrong bytes asked for again"
                pairs = [(g.digest, g.peer) for g in self.open.values() if isinstance(g, Get)]
                assert (action.digest, action.peer) not in pairs, "asked twice at once"
                assert sum(d == action.digest for d, _ in pairs) < self.limits.answers
                self.tries[action.digest] += 1
                assert self.tries[action.digest] <= self.limits.tries
                self.open[action.number] = action
            case Recall():
                self.open[action.number] = action
            case Lost():
                self.ends[action.digest] += 1
                assert all(g.digest != action.digest for g in self.open.values()), "lost while under way"
        assert len(self.open) <= 2 * self.limits.parallel

    def answer(self, calm: bool) -> None:
        """Answers one thing that is open, well or badly; ``calm``: well."""
        open_: list[object] = [*self.open.values(), *self.asks, *([Look()] if self.looking else [])]
        if not open_:
            return
        match self.rng.choice(open_):
            case Look():
                self.looking = False
                known = {p: "1" for p, up in self.up.items() if up}
                if calm or self.rng.random() < 0.8:
                    self.asks = [a for a in self.asks if a.peer in known]  # one that went answers no more
                    self.schedule.looked(known, self.now)
                else:
                    self.schedule.looked(None, self.now)
            case Ask() as ask:
                self.asks.remove(ask)
                if self.up[ask.peer] and (calm or self.rng.random() < 0.8):
                    missing = [d for d in ask.digests if d not in self.has[ask.peer]]
                    self.schedule.heard(ask, missing, self.rng.randrange(12), self.now)
                else:
                    self.schedule.unheard(ask, self.now)
            case Get() as get:
                del self.open[get.number]
                if not self.up[get.peer]:
                    self.schedule.failed(get.number, Failure.BROKEN, self.now)
                elif get.digest not in self.has[get.peer]:
                    self.schedule.failed(get.number, Failure.MISSING, self.now)
                elif calm or self.rng.random() < 0.6:
                    self.done(get.digest, get.number)
                else:
                    why = self.rng.choice(list(Failure))
                    if why is Failure.CORRUPT:
                        self.corrupt.add((get.digest, get.peer))
                    self.schedule.failed(get.number, why, self.now)
            case Recall() as recall:
                del self.open[recall.number]
                if self.rng.random() < 0.5:
                    self.done(recall.digest, recall.number)
                else:
                    self.schedule.failed(recall.number, Failure.MISSING, self.now)

    def done(self, digest: str, number: int) -> None:
        self.ends[digest] += 1
        for loser in self.schedule.got(number, self.now):
            assert self.open.pop(loser).digest == digest
        assert all(g.digest != digest for g in self.open.values()), "a get goes on though its chunk is here"

    def disturb(self) -> None:
        peer = self.rng.choice(list(self.has))
        self.up[peer] = self.rng.random() < 0.6
        self.has[peer].add(self.rng.choice(CHUNKS[:12]))


@settings(max_examples=150)
@given(seed=st.integers(0, 1 << 32), parallel=st.integers(1, 6), peers=st.integers(1, 6), durable=st.booleans())
def test_under_random_faults_every_chunk_ends_exactly_once_and_no_bound_is_broken(
        seed: int, parallel: int, peers: int, durable: bool) -> None:
    rng = random.Random(seed)
    chaos = Chaos(rng, Limits(parallel=parallel, durable=durable, neighbours=3, ask_most=5), peers)
    wanted = CHUNKS[:12]
    chaos.schedule.want(wanted[:6])
    for step in range(4000):
        if step == 40:
            chaos.schedule.want(wanted[6:], prefer=["p0"])
        calm = step > 400
        while action := chaos.schedule.next(chaos.now):
            chaos.take(action)
        if not calm and rng.random() < 0.1:
            chaos.disturb()
        if rng.random() < 0.7:
            chaos.answer(calm)
        else:
            chaos.now = min(chaos.schedule.wake_at(chaos.now), chaos.now + 1.0)
        if step > 40 and chaos.ends.total() == len(wanted):
            break
    assert chaos.ends == Counter(wanted), "a chunk did not end, or twice"
    assert not chaos.open and chaos.schedule.next(chaos.now + 100) is None


# -- turns -------------------------------------------------------------------------------------------------------------
def test_a_share_that_nobody_comes_for_is_taken_over() -> None:
    """Fifteen nodes are registered that want nothing, and one that draws on the publisher as this one does."""
    hand = Hand({"source": set(CHUNKS), **{f"idle{i}": set() for i in range(15)}}, load={"source": 2})
    began = hand.want(CHUNKS)
    most = 0.0
    while len(hand.gets) < len(CHUNKS):
        before = hand.now
        for get in began:
            hand.finish(get)
        began = hand.run()
        while not began:
            began = hand.wait()
        most = max(most, hand.now - before)
        assert hand.now < 10, "it waits for nodes that do not come"
    assert most > hand.limits.ask_every_s, "it waited for nobody's turn: this test has shown nothing"


def test_a_node_that_pulls_alone_waits_for_nobody() -> None:
    hand = Hand({"source": set(CHUNKS), **{f"idle{i}": set() for i in range(15)}}, Limits(parallel=1))
    began = hand.want(CHUNKS)
    for _ in CHUNKS:
        [get] = began
        hand.finish(get, 0.001)
        began = hand.run()
    assert not began and hand.now < hand.limits.ask_every_s
