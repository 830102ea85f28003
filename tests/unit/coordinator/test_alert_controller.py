"""Alerts from fault to receiver under a virtual clock: leaders that die between any two writes, are stopped and come
back, with other clocks; receivers that refuse, hang, or take a message and lose the answer.

``ELASTIC_RL_SEEDS`` says how many seeds are tried.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from support.alert_simulation import KEYS, SKEW_S, TICK_S, Fault, House, _Leader

from elastic_rl.coordinator.alerts import state_machine
from elastic_rl.coordinator.alerts.delivery import WINDOW_S, ReceiverQueue
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.etcd.records import Severity

SEEDS = int(os.environ.get("ELASTIC_RL_SEEDS", "40"))
_LEADERLESS_S = 3.0
_LONGEST_SILENCE_S = 60.0
_EPISODE_S = 14.0
"""A fault lasts longer than any time without a leader and its clock's error, and so does the time between two."""


def make(seed: int) -> House:
    rng = random.Random(seed)
    house = House(rng, per_minute=rng.choice([2, 5, 10]), group_wait_s=rng.choice([0.0, 2.0]))
    house.faults = [Fault(f"f{n}", reported=n % 3 == 0, severity=rng.choice([Severity.ERROR, Severity.WARNING]))
                    for n in range(rng.choice([1, 4, 12]))]
    return house


def story(house: House, seconds: float, *, crashes: bool = True, sickness: bool = True, silences: bool = False) -> None:
    """Faults come and go while leaders and receivers fail; then all is well until everything is told."""
    rng, end = house.rng, house.t + seconds
    turns = {f.subject: house.t + rng.uniform(0, 30) for f in house.faults}
    stopped: list[_Leader] = []
    while house.t < end:
        for fault in house.faults:
            if house.t >= turns[fault.subject]:
                house.turn(fault)
                turns[fault.subject] = house.t + _EPISODE_S + rng.expovariate(1 / 30)
        if crashes and rng.random() < 0.05:
            house.etcd.die_at = house.etcd.writes + rng.randrange(1, 8)
        if crashes and not house.leaderless and rng.random() < 0.02:
            stopped.append(house.leaders[-1])
            house.leaders[-1].stopped = True
        if house.leaderless:
            wait = rng.uniform(0, _LEADERLESS_S)
            while wait > 0:
                house.tick()
                wait -= TICK_S
            house.elect()
        if stopped and rng.random() < 0.1:
            stopped.pop().stopped = False
        if sickness and rng.random() < 0.03:
            house.sick[rng.choice(house.receivers).name] = rng.choice(["dead", "mute", "well", "well"])
        if silences and rng.random() < 0.01:
            house.silence(rng.choice(house.faults).subject, rng.uniform(5, _LONGEST_SILENCE_S))
        house.tick()
    house.sick.clear()
    house.etcd.die_at = 0
    for fault in house.faults:
        if fault.there:
            house.run(_EPISODE_S)
            house.turn(fault)
    house.run(5.0)  # the last events and silences are seen
    house.run_until_quiet(60.0 * (4 + 60 / house.per_minute))


def wanted(house: House, alert: Alert) -> set[str]:
    return {r.name for r in house.receivers if r.wants({alert.severity.value})}


def check_order_and_rate(house: House) -> None:
    first: dict[tuple[str, str, Phase], float] = {}
    for n, heard in enumerate(house.heard):
        for i in heard.alerts:
            first.setdefault((i, heard.receiver, heard.phase), n)
    for (i, receiver, phase), at in first.items():
        if phase is Phase.RESOLVED:
            assert first.get((i, receiver, Phase.FIRING), at) < at, f"{i} was over before {receiver} heard of it"
    window = WINDOW_S - 2 * SKEW_S
    for times in house.attempts.values():
        for k in range(len(times) - house.per_minute):
            assert times[k + house.per_minute] - times[k] > window - 1.0, "more messages than the receiver's bound"


def check_all_told(house: House) -> None:
    """Each episode of each fault is one alert, and each alert was told from both its ends to all whom it is for."""
    assert house.quiet, "something is still to be told"
    kinds = Counter(a.subject for a in house.opened.values())
    assert kinds == {f.subject: f.episodes for f in house.faults if f.episodes}
    told = {(i, h.receiver, h.phase) for h in house.heard for i in h.alerts}
    assert told == {(a.id, r, p) for a in house.opened.values() for r in wanted(house, a)
                    for p in (Phase.FIRING, Phase.RESOLVED)}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_fault_is_told_once_from_both_ends_whatever_dies_and_whoever_leads(seed: int) -> None:
    house = make(seed)
    story(house, house.rng.choice([60, 200]))
    check_order_and_rate(house)
    check_all_told(house)


@pytest.mark.parametrize("seed", range(SEEDS // 4))
def test_without_crashes_nothing_is_told_twice(seed: int) -> None:
    house = make(10_000 + seed)
    story(house, 120, crashes=False, sickness=False)
    check_order_and_rate(house)
    check_all_told(house)
    assert max(Counter((i, h.receiver, h.phase) for h in house.heard for i in h.alerts).values(), default=0) <= 1


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_a_silence_keeps_quiet_while_it_lasts_and_loses_no_end_of_what_was_told(seed: int) -> None:
    house = make(20_000 + seed)
    story(house, 200, silences=True)
    check_order_and_rate(house)
    house.run(_LONGEST_SILENCE_S + 2 * SKEW_S)
    house.run_until_quiet(3600)
    assert house.quiet and not house.etcd.range(KEYS.silences_prefix())[0]
    told = {(i, h.receiver, h.phase) for h in house.heard for i in h.alerts}
    assert {t[:2] for t in told if t[2] is Phase.FIRING} == {t[:2] for t in told if t[2] is Phase.RESOLVED}
    assert not house.etcd.silenced, "an alert was put into a message under a silence"


def test_many_alerts_of_one_moment_are_one_message() -> None:
    house = House(random.Random(1))
    house.faults = [Fault(f"n{n}", reported=False, severity=Severity.ERROR) for n in range(40)]
    for fault in house.faults:
        house.turn(fault)
        house.run(0.5 if fault.subject in ("n10", "n20") else 0)
    house.run(10)
    assert [(len(h.alerts), h.phase) for h in house.heard if h.receiver == "chat"] == [(40, Phase.FIRING)]


def test_what_is_too_fast_for_a_receiver_waits_and_is_told_together() -> None:
    house = House(random.Random(2), per_minute=3, group_wait_s=0.0)
    house.faults = [Fault(f"n{n}", reported=False, severity=Severity.ERROR) for n in range(30)]
    for fault in house.faults:
        house.turn(fault)
        house.run(1.0)
    before = [h for h in house.heard if h.receiver == "pager"]
    assert len(before) == 3
    house.run(60)
    heard = [h for h in house.heard if h.receiver == "pager"]
    assert sum(len(h.alerts) for h in heard) == 30 and len(heard[3].alerts) >= 15


def test_a_test_is_told_to_all_at_once_also_to_one_that_rests_after_failures() -> None:
    house = House(random.Random(3))
    house.sick["pager"] = "dead"
    house.faults = [Fault("n0", reported=False, severity=Severity.ERROR)]
    house.turn(house.faults[0])
    house.run(40)
    box = ReceiverQueue.decode(house.etcd.get(KEYS.receiver("pager")).value)
    assert box.failures >= 3 and box.error
    house.sick.clear()
    trial = state_machine.make_test_alert(house.t + SKEW_S, "t1", "ada")
    house.etcd.put(KEYS.alert(f"{trial.key}/t1"), trial)
    house.run(8 + 3 * SKEW_S)
    assert {h.receiver for h in house.heard if "t1" in h.alerts} == {"pager", "chat"}
    house.run(state_machine.TEST_KEEP_S + 5)
    assert not any("/t1" in kv.key for kv in house.etcd.range(KEYS.alerts_prefix())[0])
