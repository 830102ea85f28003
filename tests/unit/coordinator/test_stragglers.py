"""Which engines a run goes on without: the rule alone, and a simulated pool whose engines it takes out and back."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.stragglers.rule import Following, FollowLimits, Verdicts, quorum_of, served_by_quorum
from elastic_rl.engine.record import requested
from elastic_rl.etcd.records import Engine, EngineState, Straggler

LIMITS = FollowLimits("50%", timeout_s=15.0, catch_up_s=600.0)
READY, SYNCING = EngineState.READY, EngineState.SYNCING


def engine(name: str, version: int, state: EngineState = READY, *, needs: int = 0, missed: int = 0, since: float = 0.0,
           pull_apply_s: float = 0.0) -> Engine:
    straggler = Straggler(needs=needs, missed=missed, since=since, version=version) if missed else None
    return Engine(id=name, pool="rollout", state=state, epoch=1, version=version, pull_apply_s=pull_apply_s,
                  straggler=straggler)


def looks(engines: list[Engine], needs: int, times: list[float], known: Following = Following(),
          limits: FollowLimits = LIMITS) -> tuple[Following, Verdicts]:
    """The last of some looks."""
    verdicts = Verdicts()
    for now in times:
        known, verdicts = known.look(engines, needs, now, limits)
    return known, verdicts


def test_quorum_is_rounded_up_and_is_one_at_least() -> None:
    assert [quorum_of("50%", n) for n in (1, 2, 3, 10)] == [1, 1, 2, 5]
    assert [quorum_of("100%", n) for n in (1, 3)] == [1, 3] and quorum_of(4, 100) == 4 and quorum_of("1%", 10) == 1


def test_engine_that_lacks_what_a_quorum_serves_is_given_up_after_the_limit_and_not_before() -> None:
    pool = [engine("a", 5), engine("b", 5), engine("slow", 4)]
    known, verdicts = looks(pool, 5, [100.0, 114.9])
    assert not verdicts.changed and known.served_since == 100.0
    _, verdicts = known.look(pool, 5, 115.0, LIMITS)
    assert verdicts.changed == {"slow": Straggler(needs=5, missed=5, since=115.0, version=4)} and not verdicts.replace


def test_nobody_is_given_up_below_a_quorum_and_the_only_engine_never() -> None:
    for pool in ([engine("a", 4)], [engine("a", 5), engine("b", 4), engine("c", 4)],
                 [engine("a", 5), *[engine(f"s{i}", 4) for i in range(9)]]):
        assert not looks(pool, 5, [0.0, 1e6])[1].changed
    assert looks([engine("a", 5), engine("b", 4)], 5, [0.0, 1e6])[1].changed, "one of two is half of them"


def test_engines_that_are_out_count_in_the_quorum() -> None:
    """Else they would leave one after the other, and the last one be a quorum of itself."""
    out = [engine(f"out{i}", 3, SYNCING, needs=5, missed=4) for i in range(3)]
    assert served_by_quorum([engine("a", 5), engine("b", 5), *out], 5, LIMITS) == []
    assert len(served_by_quorum([*[engine(f"e{i}", 5) for i in range(3)], *out], 5, LIMITS)) == 3


def test_engines_that_start_or_have_ended_count_nowhere() -> None:
    away = [engine("a", 0, EngineState.STARTING), engine("b", 0, SYNCING), engine("c", 4, EngineState.DRAINING),
            engine("d", 4, EngineState.DEAD), engine("e", 0, EngineState.RELEASED)]
    _, verdicts = looks([engine("serves", 5), *away], 5, [0.0, 1e6])
    assert not verdicts.changed and not verdicts.replace


def test_version_that_the_run_does_not_need_takes_nobody_out() -> None:
    """An engine that waits for its turn to update lacks the head, and serves what the run needs."""
    assert not looks([engine("a", 9), engine("b", 9), engine("waits", 7)], 7, [0.0, 1e6])[1].changed
    assert not looks([engine("a", 9), engine("b", 1)], 0, [0.0, 1e6])[1].changed, "nothing was asked for yet"


def test_large_weights_are_waited_for_as_long_as_the_slowest_of_the_others_took() -> None:
    pool = [engine("a", 5, pull_apply_s=40.0), engine("b", 5, pull_apply_s=90.0), engine("slow", 4, pull_apply_s=900.0)]
    assert not looks(pool, 5, [0.0, 89.0])[1].changed and looks(pool, 5, [0.0, 90.0])[1].changed


def test_engine_that_was_given_up_for_the_last_version_is_not_waited_for_again() -> None:
    pool = [engine("a", 6), engine("b", 6), engine("again", 5, missed=5)]
    assert looks(pool, 6, [0.0])[1].changed == {"again": Straggler(needs=6, missed=6, since=0.0, version=5)}
    in_time = [engine("a", 6), engine("b", 6), engine("again", 6, missed=5)]
    assert looks(in_time, 6, [0.0])[1].changed == {"again": None}, "it has followed, and is one of the others"
    late = [engine("a", 6), engine("b", 6), engine("again", 6, missed=6)]
    assert not looks(late, 6, [0.0, 1e6])[1].changed, "that it has caught up is not that it follows"


def test_engine_that_was_late_once_is_waited_for_again_after_it_got_a_version_within_the_limit() -> None:
    """It has left at once, since nobody knew how late it would be: that it is slower than the quorum is no fault."""
    others = [engine("a", 6), engine("b", 6)]
    known, verdicts = looks([*others, engine("once", 5, missed=5)], 6, [100.0])
    assert verdicts.changed["once"] == Straggler(needs=6, missed=6, since=100.0, version=5)
    back = engine("once", 6, missed=6, since=100.0)
    assert known.look([*others, back.replace(state=SYNCING)], 6, 101.0, LIMITS)[1].changed == {}, "not routable yet"
    assert known.look([*others, back], 6, 115.1, LIMITS)[1].changed == {}
    known, verdicts = known.look([*others, back], 6, 115.0, LIMITS)
    assert verdicts.changed == {"once": None}
    pool = [engine("a", 7), engine("b", 7), engine("once", 6)]
    assert not looks(pool, 7, [200.0, 214.9], known)[1].changed


def test_engine_that_caught_up_late_with_a_version_has_not_followed_it() -> None:
    others = [engine("a", 7), engine("b", 7)]
    out = engine("out", 4, SYNCING, needs=5, missed=5)
    known, _ = looks([*others, out], 7, [100.0])  # the run needs a later version than that for which it was given up
    back = engine("out", 7, missed=5)
    assert not known.look([*others, back], 7, 115.1, LIMITS)[1].changed
    assert known.look([*others, back], 7, 103.0, LIMITS)[1].changed == {"out": None}
    given_up = engine("out", 7, missed=7, since=100.0)
    assert not looks([*others, given_up], 7, [130.0, 131.0])[1].changed, "a new leader knows that it was late"


def test_engine_that_is_out_comes_back_with_what_the_run_needs_then() -> None:
    pool = [engine("a", 7), engine("b", 7), engine("out", 4, SYNCING, needs=5, missed=5, since=3.0)]
    assert looks(pool, 7, [10.0])[1].changed == {"out": Straggler(needs=7, missed=5, since=3.0, version=4)}
    newer = [*pool[:2], pool[2].replace(straggler=Straggler(needs=5, missed=5, since=3.0, version=3))]
    assert looks(newer, 7, [10.0])[1].changed == {"out": Straggler(needs=7, missed=5, since=10.0, version=4)}, (
        "it gets further")


def test_engine_that_does_not_catch_up_is_replaced_and_not_for_an_outage() -> None:
    pool = [engine("a", 5), engine("b", 5), engine("out", 4, SYNCING, needs=5, missed=5, since=100.0)]
    assert not looks(pool, 5, [0.0, 699.0])[1].replace
    [why] = looks(pool, 5, [0.0, 700.0])[1].replace.values()
    assert "2 others serve version 5" in why
    external = [*pool[:2], pool[2].replace(external=True)]
    assert not looks(external, 5, [0.0, 700.0])[1].replace, "nobody could start it again"
    large = [engine("a", 5, pull_apply_s=300.0), engine("b", 5), pool[2]]
    assert not looks(large, 5, [0.0, 999.0])[1].replace and looks(large, 5, [0.0, 1000.0])[1].replace
    nobody = [engine("a", 4), engine("b", 4), pool[2]]
    known, verdicts = looks(nobody, 5, [200.0, 900.0])
    assert not verdicts.replace, "the others do not have it either"
    known, verdicts = looks(pool, 5, [901.0], known)
    assert not verdicts.replace, "it had no time to catch up since it could"
    assert looks(pool, 5, [1500.9], known)[1].replace == {} and looks(pool, 5, [1501.0], known)[1].replace


def test_new_leader_gives_engines_their_time_once_more_and_forgets_nobody_who_is_out() -> None:
    pool = [engine("a", 5), engine("b", 5), engine("slow", 4), engine("out", 3, SYNCING, needs=5, missed=5, since=0.0)]
    known, verdicts = Following().look(pool, 5, 700.0, LIMITS)
    assert not verdicts.changed and not verdicts.replace, "it does not know what the one before has excused"
    assert list(known.look(pool, 5, 1300.0, LIMITS)[1].replace) == ["out"]


def test_engines_that_take_turns_have_the_time_of_all_turns() -> None:
    limits = FollowLimits("50%", timeout_s=15.0, catch_up_s=600.0, max_unavailable=1)
    pool = [*[engine(f"e{i}", 5, pull_apply_s=10.0) for i in range(6)], *[engine(f"s{i}", 4) for i in range(4)]]
    assert not looks(pool, 5, [0.0, 39.9], limits=limits)[1].changed
    assert set(looks(pool, 5, [0.0, 40.0], limits=limits)[1].changed) == {"s0", "s1", "s2", "s3"}
    known = [*pool[:9], engine("again", 4, missed=4)]
    assert not looks(known, 5, [0.0, 39.9], limits=limits)[1].changed, "it has its turn, too"


def test_engine_that_is_out_of_the_router_is_no_part_of_those_that_serve() -> None:
    out = engine("out", 5, SYNCING, missed=4)
    assert served_by_quorum([engine("a", 5), out, engine("b", 4)], 5, LIMITS) == []
    assert len(served_by_quorum([engine("a", 5), engine("b", 5)], 5, FollowLimits(4))) == 2, "of all there are"


def test_straggler_has_caught_up_with_what_the_run_needs_now() -> None:
    known = Straggler(needs=7, missed=5, since=0.0)
    assert known.caught_up(6).needs == 7 and known.caught_up(7).needs == 0


@dataclass
class Pool:
    """A pool as its parts make it: engines pull and write through ``requested``, the driver takes out what is behind,
    the leader looks and may be replaced by another one. ``run_needs``: what the run waits for."""

    records: dict[str, Engine]
    memory: dict[str, Engine] = field(default_factory=dict)
    """What each runner believes of itself; it may not have seen its record for long."""
    known: Following = Following()
    now: float = 0.0
    run_needs: int = 1
    limits: FollowLimits = LIMITS

    def write(self, name: str) -> None:
        self.records[name] = self.memory[name] = requested(self.records[name], self.memory[name])

    def pulls(self, name: str, version: int, takes_s: float = 0.0) -> None:
        mine = self.memory[name]
        if version > mine.version:
            self.memory[name] = mine.replace(version=version, pull_apply_s=takes_s)

    def joins(self, name: str) -> None:
        """As ``EngineRunner._join_router``: after a write that says that it has caught up."""
        self.write(name)
        if self.memory[name].state is SYNCING and not self.memory[name].is_behind:
            self.memory[name] = self.memory[name].replace(state=READY)
            self.write(name)

    def driver(self) -> None:
        for name, record in self.records.items():
            if record.is_behind and record.state is READY:
                self.records[name] = record.replace(state=SYNCING)

    def leader(self, *, other: bool) -> Verdicts:
        if other:
            self.known = Following()
        self.known, verdicts = self.known.look(list(self.records.values()), self.run_needs, self.now,
                                               self.limits)
        for name, straggler in verdicts.changed.items():
            self.records[name] = self.records[name].replace(straggler=straggler)
        return verdicts


NAMES = ["a", "b", "c", "d"]
STEPS = st.lists(st.one_of(
    st.tuples(st.just("pulls"), st.sampled_from(NAMES)), st.tuples(st.just("writes"), st.sampled_from(NAMES)),
    st.tuples(st.just("joins"), st.sampled_from(NAMES)), st.tuples(st.just("driver"), st.just("")),
    st.tuples(st.just("leader"), st.just("")), st.tuples(st.just("other_leader"), st.just("")),
    st.tuples(st.just("needs"), st.just(""))), max_size=60)
AT_ONCE = FollowLimits("50%", timeout_s=0.0, catch_up_s=1e9)


@given(STEPS)
def test_no_order_of_writes_makes_an_engine_routable_that_is_behind_and_no_quorum_is_taken_out(steps) -> None:
    found = {n: engine(n, 2 if n in "ab" else 1) for n in NAMES}
    pool = Pool(dict(found), dict(found), run_needs=2, limits=AT_ONCE)
    for what, name in steps:
        before = dict(pool.records)
        match what:
            case "pulls":
                pool.pulls(name, pool.run_needs)
            case "writes":
                pool.write(name)
            case "joins":
                pool.joins(name)
            case "driver":
                pool.driver()
            case "leader" | "other_leader":
                for gone, straggler in pool.leader(other=what != "leader").changed.items():
                    if straggler is not None and not before[gone].is_behind:
                        assert len(served_by_quorum(list(before.values()), pool.run_needs, LIMITS)) >= 2
            case "needs":
                pool.run_needs += 1
        for n, record in pool.records.items():
            if record.state is READY is not before[n].state:
                assert not record.is_behind and what in ("joins", "writes"), "routable without having caught up"
            if before[n].is_behind and not record.is_behind:
                assert record.version >= before[n].straggler.needs
    # Whatever has happened: everybody who gets the version comes back.
    for n in NAMES:
        pool.pulls(n, pool.run_needs)
        pool.joins(n)
        pool.joins(n)
    assert {r.state for r in pool.records.values()} == {READY} and not any(r.is_behind for r in pool.records.values())


@given(st.integers(2, 8), st.data())
def test_run_waits_for_no_straggler_longer_than_the_limit_and_only_once(size, data) -> None:
    """Some engines, fewer than half, never have a version in time. They cost one limit, and no step after that."""
    slow = data.draw(st.integers(1, size // 2))
    names = [f"e{i}" for i in range(size)]
    pool = Pool({n: engine(n, 1) for n in names}, {n: engine(n, 1) for n in names})
    waited = []
    for version in range(2, 8):
        pool.run_needs, began = version, pool.now
        for n in names[slow:]:
            pool.pulls(n, version)
            pool.joins(n)
        while any(r.state is READY and r.version < version for r in pool.records.values()):
            pool.leader(other=False)
            pool.driver()
            pool.now += 1.0
        waited.append(pool.now - began)
        for n in names[:slow]:  # when the step's samples are made
            if data.draw(st.booleans()):
                pool.pulls(n, version)
                pool.joins(n)
        pool.now += 60.0
    assert waited[0] <= LIMITS.timeout_s + 2 and all(w <= 2 for w in waited[1:])


@given(st.integers(0, 40), st.booleans())
def test_engine_that_always_takes_as_long_is_waited_for_if_that_is_within_the_limit_and_once_if_not(
        takes_s: int, was_late: bool) -> None:
    """``takes_s``: seconds after the others. ``was_late``: whether it was given up before, for another reason."""
    first = {n: engine(n, 1, missed=int(was_late and n == "slower")) for n in ("a", "b", "slower")}
    pool = Pool(dict(first), dict(first))
    waited = []
    for version in range(2, 7):
        pool.run_needs, began, lasted = version, pool.now, None
        for n in ("a", "b"):
            pool.pulls(n, version)
            pool.joins(n)
        while pool.now < began + 60:
            if pool.now >= began + takes_s:
                pool.pulls("slower", version, takes_s=float(takes_s))
                pool.joins("slower")
            pool.leader(other=False)
            pool.driver()
            if lasted is None and not any(r.state is READY and r.version < version for r in pool.records.values()):
                lasted = pool.now - began
            pool.now += 1.0
        waited.append(lasted)
        if takes_s < LIMITS.timeout_s:
            assert pool.records["slower"].straggler is None
    if takes_s > LIMITS.timeout_s + 1:
        assert sum(waited) <= LIMITS.timeout_s + 1
    elif takes_s < LIMITS.timeout_s:
        assert waited[1:] == [takes_s] * 4, "it has its time, as any other"
