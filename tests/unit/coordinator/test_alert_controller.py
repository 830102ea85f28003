"""Alerts from fault to receiver under a virtual clock: leaders that die between any two writes, are stopped and come
back, and have other clocks; receivers that refuse, hang, or take a notification and lose the answer.

The seeds are shared by the three claims of the world, whose runs take up to a second.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from chaos_tests.sim.alerts import (
    KEYS,
    LONGEST_SILENCE_S,
    SKEW_S,
    TICK_S,
    AlertSimulation,
    Fault,
    check_all_delivered,
    check_order_and_rate,
    make,
    play,
)
from elastic_rl.coordinator.alerts import state_machine
from elastic_rl.coordinator.alerts.receiver_queue import ReceiverQueue
from elastic_rl.coordinator.alerts.state_machine import Phase
from elastic_rl.etcd.records import Severity

SEEDS = seeds(40)


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_start_and_end_of_each_fault_are_delivered_whatever_dies(seed: int) -> None:
    sim = make(seed)
    play(sim, sim.rng.choice([60, 200]))
    check_order_and_rate(sim)
    check_all_delivered(sim)


@pytest.mark.parametrize("seed", range(SEEDS // 4))
def test_nothing_is_delivered_twice_without_crashes(seed: int) -> None:
    sim = make(10_000 + seed)
    play(sim, 120, crashes=False, unhealthy=False)
    check_order_and_rate(sim)
    check_all_delivered(sim)
    assert max(Counter((i, d.receiver, d.phase) for d in sim.delivered for i in d.alerts).values(), default=0) <= 1


@pytest.mark.parametrize("seed", range(SEEDS // 4))
def test_silence_holds_notifications_back_and_loses_no_end_of_a_notified_alert(seed: int) -> None:
    sim = make(20_000 + seed)
    play(sim, 200, silences=True)
    check_order_and_rate(sim)
    sim.run(LONGEST_SILENCE_S + 2 * SKEW_S)
    sim.run_until_settled(3600)
    assert sim.settled and not sim.etcd.range(KEYS.silences_prefix())[0]
    delivered = {(i, d.receiver, d.phase) for d in sim.delivered for i in d.alerts}
    assert {t[:2] for t in delivered if t[2] is Phase.FIRING} == {t[:2] for t in delivered if t[2] is Phase.RESOLVED}
    assert not sim.etcd.silenced, "an alert was sent under a silence"


_ACTIONS = ["finish", "resume", "restart", "prune", "kill", "stop", "day", "mute", "heal"]
_STEPS = st.lists(st.one_of(
    st.tuples(st.sampled_from(_ACTIONS), st.just(0)),
    st.tuples(st.just("passes"), st.integers(1, 12)), st.tuples(st.just("dies in write"), st.integers(1, 6))),
    max_size=30)


@given(_STEPS, st.integers(0, 2**16))
@settings(max_examples=seeds(40))
def test_one_time_event_opens_one_alert_over_days_leaders_and_restarts(steps: list[tuple[str, int]], seed: int) -> None:
    sim = AlertSimulation(random.Random(seed), group_wait_s=0.0)
    finished, restarted, crashes = 0, 0, False
    for step, n in steps:
        match step:
            case "finish" | "resume":
                finished += step == "finish" and not sim.finished
                sim.finished = step == "finish"
            case "restart":
                sim.restart(f"node-{restarted}")
                restarted += 1
            case "prune":
                sim.prune_events()
            case "kill" | "stop" if not sim.leaderless:
                sim.kill(sim.leaders[-1]) if step == "kill" else setattr(sim.leaders[-1], "stopped", True)
                crashes = True
            case "day":
                sim.t += 24 * 3600.0
            case "mute":
                sim.unhealthy["chat"], crashes = "mute", True
            case "heal":
                sim.unhealthy.clear()
            case "dies in write":
                sim.etcd.die_at, crashes = sim.etcd.writes + n, True
            case "passes":
                sim.run(n * TICK_S)
    sim.etcd.die_at = 0
    sim.unhealthy.clear()
    sim.run(120.0)
    kinds = Counter(a.kind for a in sim.opened.values())
    assert set(kinds) <= {"job.finished", "dcs.restarted"}
    assert kinds["job.finished"] <= finished and kinds["dcs.restarted"] <= restarted
    assert bool(kinds["job.finished"]) >= sim.finished
    posts = Counter((i, d.receiver, d.phase) for d in sim.delivered for i in d.alerts)
    assert set(posts) == {(a.id, "chat", Phase.FIRING) for a in sim.opened.values()}
    if not crashes:
        assert set(posts.values()) <= {1}


def test_finished_job_is_notified_once_each_time_it_finishes() -> None:
    sim = AlertSimulation(random.Random(4))
    for finishes in (1, 2):
        sim.finished = True
        for _ in range(3):
            sim.run(60)
            sim.t += 24 * 3600.0
            sim.kill(sim.leaders[-1])
        assert [d.phase for d in sim.delivered if d.receiver == "chat"] == [Phase.FIRING] * finishes
        sim.finished = False
        sim.run(60)


def test_alerts_of_one_moment_are_one_notification() -> None:
    sim = AlertSimulation(random.Random(1))
    sim.faults = [Fault(f"n{n}", reported=False, severity=Severity.ERROR) for n in range(40)]
    for fault in sim.faults:
        sim.toggle(fault)
        sim.run(0.5 if fault.subject in ("n10", "n20") else 0)
    sim.run(10)
    assert [(len(d.alerts), d.phase) for d in sim.delivered if d.receiver == "chat"] == [(40, Phase.FIRING)]


def test_alerts_beyond_the_rate_limit_are_grouped() -> None:
    sim = AlertSimulation(random.Random(2), per_minute=3, group_wait_s=0.0)
    sim.faults = [Fault(f"n{n}", reported=False, severity=Severity.ERROR) for n in range(30)]
    for fault in sim.faults:
        sim.toggle(fault)
        sim.run(1.0)
    before = [d for d in sim.delivered if d.receiver == "pager"]
    assert len(before) == 3
    sim.run(60)
    delivered = [d for d in sim.delivered if d.receiver == "pager"]
    assert sum(len(d.alerts) for d in delivered) == 30 and len(delivered[3].alerts) >= 15


def test_alert_test_reaches_every_receiver_and_skips_the_backoff() -> None:
    sim = AlertSimulation(random.Random(3))
    sim.unhealthy["pager"] = "dead"
    sim.faults = [Fault("n0", reported=False, severity=Severity.ERROR)]
    sim.toggle(sim.faults[0])
    sim.run(40)
    queue = ReceiverQueue.decode(sim.etcd.get(KEYS.receiver("pager")).value)
    assert queue.failures >= 3 and queue.error
    sim.unhealthy.clear()
    test = state_machine.make_test_alert(sim.t + SKEW_S, "t1", "ada")
    sim.etcd.put(KEYS.alert(f"{test.key}/t1"), test)
    sim.run(8 + 3 * SKEW_S)
    assert {d.receiver for d in sim.delivered if "t1" in d.alerts} == {"pager", "chat"}
    sim.run(state_machine.TEST_KEEP_S + 5)
    assert not any("/t1" in kv.key for kv in sim.etcd.range(KEYS.alerts_prefix())[0])
