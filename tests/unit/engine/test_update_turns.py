"""Which engines of a pool pause at once for an update, in simulated pools."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_rl.config.pools import slots_of
from elastic_rl.engine.update_turns import UpdateTurn
from elastic_rl.errors import EtcdUnavailable

TICK_S = 0.05


@pytest.mark.parametrize(("limit", "engines", "slots"), [
    (3, 100, 3), ("25%", 10, 2), ("25%", 1, 1), ("100%", 7, 7), ("1%", 10_000, 100)])
def test_limit_is_a_number_or_a_share_of_the_pool_and_at_least_one(limit: str | int, engines: int, slots: int) -> None:
    assert slots_of(limit, engines) == slots


@dataclass
class Store:
    """The slots of all engines. ``lossy``: share of the calls whose answer is lost, half of them with their effect."""

    slots: int
    rng: random.Random
    lossy: float = 0.0
    holders: dict[int, int] = field(default_factory=dict)
    calls: int = 0

    def call(self) -> bool:
        """Whether the call has its effect."""
        self.calls += 1
        if self.rng.random() >= self.lossy:
            return True
        if self.rng.random() < 0.5:
            raise EtcdUnavailable("nothing was done")
        return False


@dataclass
class OwnSlots:
    store: Store
    engine: int

    def count(self) -> int:
        return self.store.slots

    def claim(self, slot: int) -> bool:
        heard = self.store.call()
        has = self.store.holders.setdefault(slot, self.engine) == self.engine
        if not heard:
            raise EtcdUnavailable("the answer is lost")
        return has

    def free(self, slot: int) -> None:
        heard = self.store.call()
        if self.store.holders.get(slot) == self.engine:
            del self.store.holders[slot]
        if not heard:
            raise EtcdUnavailable("the answer is lost")


class Engine:
    def __init__(self, store: Store, number: int, rng: random.Random) -> None:
        self.turn, self.version, self.busy_until, self.waits, self.applies = UpdateTurn(
            OwnSlots(store, number), rng), 0, 0.0, False, 0
        self.applied: list[int] = []

    def tick(self, now: float, head: int, apply_s: float) -> None:
        """One look of the engine's loop. The version it applies is that of the moment in which its turn has come."""
        try:
            if self.busy_until > now:
                return
            if self.applies:
                self.version, self.applies = self.applies, 0
                self.applied.append(self.version)
            if self.version == head:
                self.turn.release()
            elif not self.waits:
                self.turn.begin()
                self.waits = True
            if self.waits and self.turn.take(now):
                self.waits, self.busy_until, self.applies = False, now + apply_s, head
        except EtcdUnavailable:
            pass


def run(engines: int, slots: int, seed: int, *, heads: list[float], apply_s: float = 1.0, lossy: float = 0.0,
        limit_s: float = 600.0) -> tuple[Store, list[Engine], float, int]:
    """Until all engines have the last head; ``heads``: when each is published. Also the most that paused at once."""
    rng = random.Random(seed)
    store = Store(slots, rng, lossy)
    pool = [Engine(store, i, random.Random(rng.random())) for i in range(engines)]
    now, most = 0.0, 0
    while now < limit_s:
        head = sum(at <= now for at in heads)
        for engine in pool:
            engine.tick(now, head, apply_s)
        paused = [number for number, e in enumerate(pool) if e.busy_until > now]
        assert set(paused) <= set(store.holders.values()), "an engine paused without a slot"
        most = max(most, len(paused))
        if all(e.version == len(heads) for e in pool) and not store.holders:
            return store, pool, now, most
        now += TICK_S
    pytest.fail("not every engine was updated, or slots are left")


@settings(max_examples=30)
@given(st.integers(1, 24), st.integers(1, 8), st.integers(0, 2**32), st.sampled_from([0.0, 0.2]))
def test_no_more_engines_pause_at_once_than_there_are_slots_and_none_is_left(engines: int, slots: int, seed: int,
                                                                            lossy: float) -> None:
    _, _, _, most = run(engines, slots, seed, heads=[0.0, 5.0], lossy=lossy)
    assert most <= slots


@settings(max_examples=30)
@given(st.integers(2, 8), st.integers(0, 2**32))
def test_engine_whose_slot_may_be_free_already_pauses_only_once_it_has_one_again(engines: int, seed: int) -> None:
    """Half of the answers are lost, and versions come so fast that the next one is there before a slot is free."""
    run(engines, 1, seed, heads=[0.2 * number for number in range(60)], apply_s=0.1, lossy=0.5)


def test_nobody_pauses_while_etcd_is_away() -> None:
    store = Store(1, random.Random(0), lossy=1.0)
    turn = UpdateTurn(OwnSlots(store, 0), random.Random(0))
    turn.begin()
    for tick in range(100):
        with pytest.raises(EtcdUnavailable):
            turn.take(tick * TICK_S)
    store.lossy = 0.0
    assert turn.take(100 * TICK_S) and list(store.holders.values()) == [0]
    turn.release()
    assert not store.holders


def test_engines_that_wait_skip_to_the_newest_version() -> None:
    """Versions come faster than the pool can apply them all."""
    _, pool, _, _ = run(16, 2, 1, heads=[float(second) for second in range(12)], apply_s=2.0)
    assert all(engine.applied == sorted(engine.applied) for engine in pool)
    assert max(len(engine.applied) for engine in pool) < 8, "some engine applied most of them"


def test_update_of_a_large_pool_costs_each_engine_a_few_calls_and_wastes_little_time() -> None:
    engines, slots, apply_s = 1000, 250, 2.0
    store, _, took_s, most = run(engines, slots, 3, heads=[0.0], apply_s=apply_s)
    assert most <= slots and store.calls <= 12 * engines
    assert took_s <= 2 * apply_s * engines / slots
