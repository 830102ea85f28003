"""The leader clock over changes of leaders whose own clocks have nothing in common."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from chaos_tests.sim.alerts import KEYS, MemoryEtcd
from elastic_rl.coordinator.leader_clock import PERSIST_EVERY_S, LeaderClock
from elastic_rl.etcd.client import Compare, Op


def clock_of(store: MemoryEtcd, monotonic: list[float]) -> LeaderClock:
    def guarded(compares: Sequence[Compare], then: Sequence[Op]) -> bool:
        return store.txn(compares, then)

    return LeaderClock(store, KEYS, guarded, lambda: monotonic[0])  # type: ignore[arg-type]


def test_clock_counts_on_under_the_next_leader() -> None:
    store, first, second = MemoryEtcd(), [50.0], [9_000.0]
    a, b = clock_of(store, first), clock_of(store, second)
    a.begin_term()
    assert a.now() == 0.0
    first[0] += 100.0
    a.persist()
    first[0] += 2.0
    b.begin_term()
    assert b.now() == 100.0, "what was not written is lost, and nothing else"
    second[0] += 5.0
    assert b.now() == 105.0


def test_unreadable_clock_starts_over() -> None:
    store = MemoryEtcd()
    store.txn([], [Op.put(KEYS.leader_clock(), b"garbage")])
    clock = clock_of(store, [7.0])
    clock.begin_term()
    assert clock.now() == 0.0


def test_clock_is_written_rarely() -> None:
    store, monotonic = MemoryEtcd(), [0.0]
    clock = clock_of(store, monotonic)
    clock.begin_term()
    for _ in range(1000):
        monotonic[0] += 0.1
        clock.persist()
    assert store.writes <= 100.0 / PERSIST_EVERY_S + 1


@given(seed=st.integers(0, 2**32))
def test_clock_never_jumps_and_loses_little_with_each_leader(seed: int) -> None:
    rng, store, led_s, before, changes = random.Random(seed), MemoryEtcd(), 0.0, 0.0, 0
    for _ in range(rng.randint(1, 8)):
        monotonic = [rng.uniform(-1e6, 1e6)]
        clock = clock_of(store, monotonic)
        clock.begin_term()
        assert before - PERSIST_EVERY_S - 1.0 <= clock.now() <= before + 1e-6
        changes += 1
        for _ in range(rng.randint(0, 50)):
            step = rng.uniform(0.05, 1.0)
            monotonic[0] += step
            led_s += step
            clock.persist()
            assert clock.now() <= led_s + 1e-6
        before = clock.now()
    assert led_s - before <= changes * (PERSIST_EVERY_S + 1.0) + 1e-6
